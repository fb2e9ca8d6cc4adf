"""Outputs of several networks as a function that can be differentiated by their weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onebasin.functional.call import (
    Call,
    Vectorised,
    attributes_kept,
    evaluation_mode,
    fixed_buffers,
    mapped,
    moved,
    one_tensor,
    own_tables,
)
from onebasin.functional.norms import Given, frozen_norms, measured
from onebasin.state import shared_names


class Differentiable:
    """What members give for a batch, (members, examples, ...), in evaluation mode and with a gradient.

    With `statistics` the running statistics of norms are measured on these inputs first, for each member and with a
    gradient, as for networks that are drawn.

    The gradient is taken through all members at once with `torch.func.vmap`, or member by member if the model cannot
    be vectorised. Weights are expected as the model sees them: every state-dict name, float32 or wider.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, *, constant: Collection[str] = ()
    ) -> None:
        """Remember the model; buffers outside of its state dict are part of the function, `constant` norms too."""
        self.model, self.device, self.dtype = model, device, dtype
        self._constant, self._first = frozen_norms(model) | set(constant), shared_names(model)
        self._fixed = fixed_buffers(model, device, dtype)
        self._several = Vectorised(partial(mapped, self._one), self._each)

    def __call__(self, stacked: Mapping[str, Tensor], call: Call, statistics: Call | None = None) -> Tensor:
        """Outputs of members (members, *shape) of every tensor for one batch."""
        given = (call, statistics) if statistics is not None else (call,)
        placed: Any = tuple(moved(own, self.device, self.dtype) for own in given)
        with evaluation_mode(self.model), torch.random.fork_rng(devices=[]), own_tables(self.model, call):
            return self._several(stacked, placed)

    def _each(self, stacked: Mapping[str, Tensor], placed: Any) -> Tensor:
        members = len(next(iter(stacked.values())))
        states = ({name: value[index] for name, value in stacked.items()} for index in range(members))
        return torch.stack([self._alone(state, placed) for state in states])

    def _alone(self, tensors: Mapping[str, Tensor], placed: Any) -> Tensor:
        with attributes_kept(self.model):  # what one member leaves in the model is not for the next
            return self._one(tensors, placed)

    def _one(self, tensors: Mapping[str, Tensor], placed: Any) -> Tensor:
        (arguments, options), *others = placed  # one Call, or two
        everything = {**self._fixed, **tensors}
        if others:  # a shared tensor must be one object for its norm to be known by it
            everything |= {name: everything[kept] for name, kept in self._first.items()}
            statistics = measured(self.model, everything, others[0], self._constant)
            with Given(everything, statistics):
                return one_tensor(
                    self.model, functional_call(self.model, everything, arguments, options, tie_weights=False)
                )
        # evaluation_mode restores buffers afterwards, so an update in place must not reach the caller's tensors
        return one_tensor(self.model, functional_call(self.model, everything, arguments, options, tie_weights=False))
