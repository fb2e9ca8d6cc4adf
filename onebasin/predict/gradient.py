"""Outputs of several networks as a function that can be differentiated by their weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from onebasin.calling import Call, evaluation_mode
from onebasin.predict.batches import moved
from onebasin.predict.forward import fixed_buffers, one_tensor


class Differentiable:
    """What members give for a batch, (members, examples, ...), in evaluation mode and with a gradient.

    The gradient is taken through all members at once with `torch.func.vmap`, or member by member if the model cannot
    be vectorised. Weights are expected as the model sees them: every state-dict name, float32 or wider.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Remember the model; buffers outside of its state dict are part of the function."""
        self.model, self.device, self.dtype = model, device, dtype
        self._fixed = fixed_buffers(model, device, dtype)
        self._together = True

    def __call__(self, stacked: Mapping[str, Tensor], call: Call) -> Tensor:
        """Outputs of members (members, *shape) of every tensor for one batch."""
        placed = moved(call, self.device, self.dtype)
        with evaluation_mode(self.model), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # An operation without a batching rule is looped over by torch, which then warns that this is slow.
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            if self._together:
                try:
                    result: Tensor = vmap(self._one, in_dims=(0, None))(dict(stacked), placed)
                    return result
                except Exception:  # vmap refuses in many ways; if the fault is the model's, the plain call says so
                    self._together = False
            members = len(next(iter(stacked.values())))
            each = ({name: value[index] for name, value in stacked.items()} for index in range(members))
            return torch.stack([self._one(state, placed) for state in each])

    def _one(self, tensors: Mapping[str, Tensor], placed: Call) -> Tensor:
        arguments, options = placed
        everything = {**self._fixed, **tensors}
        # evaluation_mode restores buffers afterwards, so an update in place must not reach the caller's tensors
        return one_tensor(self.model, functional_call(self.model, everything, arguments, options, tie_weights=False))
