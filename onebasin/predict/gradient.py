"""Outputs of several networks as a function that can be differentiated by their weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onebasin.calling import Call, evaluation_mode
from onebasin.predict.batches import moved
from onebasin.predict.forward import fixed_buffers, one_tensor
from onebasin.predict.vectorised import Vectorised, mapped


class Differentiable:
    """What members give for a batch, (members, examples, ...), in evaluation mode and with a gradient.

    The gradient is taken through all members at once with `torch.func.vmap`, or member by member if the model cannot
    be vectorised. Weights are expected as the model sees them: every state-dict name, float32 or wider.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Remember the model; buffers outside of its state dict are part of the function."""
        self.model, self.device, self.dtype = model, device, dtype
        self._fixed = fixed_buffers(model, device, dtype)
        self._several = Vectorised(partial(mapped, self._one), self._each)

    def __call__(self, stacked: Mapping[str, Tensor], call: Call) -> Tensor:
        """Outputs of members (members, *shape) of every tensor for one batch."""
        with evaluation_mode(self.model), torch.random.fork_rng(devices=[]):
            return self._several(stacked, moved(call, self.device, self.dtype))

    def _each(self, stacked: Mapping[str, Tensor], placed: Call) -> Tensor:
        members = len(next(iter(stacked.values())))
        states = ({name: value[index] for name, value in stacked.items()} for index in range(members))
        return torch.stack([self._one(state, placed) for state in states])

    def _one(self, tensors: Mapping[str, Tensor], placed: Call) -> Tensor:
        arguments, options = placed
        everything = {**self._fixed, **tensors}
        # evaluation_mode restores buffers afterwards, so an update in place must not reach the caller's tensors
        return one_tensor(self.model, functional_call(self.model, everything, arguments, options, tie_weights=False))
