"""The generalised Gauss-Newton matrix by its rows: exact, for any model, at the cost of one Jacobian per example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map, tree_unflatten

from onebasin.inference.curvature.outputs import output_roots
from onebasin.inference.density.likelihood import LogLikelihood
from onebasin.inference.density.target import Outputs, Target
from onebasin.predict.batches import batches
from onebasin.state import State

_ENTRIES = 2**24  # numbers in the Jacobians of one piece of the data
_PIECE = 64  # examples in one piece: all its activations are there once per root


class Seen(NamedTuple):
    """One network and the data it is seen on; what a Target knows, where it has data.

    Attributes:
        target: the posterior.
        outputs: the model.
        likelihood: of its outputs.
        sampled: weights of the network by name.
        rest: what it carries beside them.
    """

    target: Target
    outputs: Outputs
    likelihood: LogLikelihood
    sampled: State
    rest: State

    def pieces(self, size: int) -> Iterator[tuple[Any, Tensor]]:
        """Arguments of the model and targets, at most `size` examples at once."""
        for rows, _ in batches(tuple(self.target.leaves), size):
            yield tree_unflatten([leaf[rows] for leaf in self.target.leaves], self.target.structure)

    def __call__(self, call: Any, moved: Mapping[str, Tensor] | None = None) -> Tensor:
        """Outputs in evaluation mode, with some weights replaced."""
        return self.outputs({**self.sampled, **(moved or {})}, self.rest, call, False)[0]


def dense(seen: Seen, names: Sequence[str]) -> Tensor:
    """The whole matrix (d, d) of the tensors `names`, float64."""
    size = sum(seen.sampled[name].numel() for name in names)
    total = torch.zeros(size, size, dtype=torch.float64, device=seen.target.layout.device)
    for found in rows(seen, names):
        wide = found.double()
        total.addmm_(wide.T, wide)
    return total


def rows(seen: Seen, names: Sequence[str]) -> Iterator[Tensor]:
    """Rows (m, d) whose outer products sum to the matrix over the tensors `names`, for one piece of the data each."""
    moving = {name: seen.sampled[name] for name in names}

    def projected(moved: State, example: Any, root: Tensor) -> Tensor:
        return seen(tree_map(lambda value: value[None], example), moved).reshape(-1) @ root

    each = vmap(jacrev(projected), in_dims=(None, 0, 0))
    with torch.no_grad():
        size = sum(value.numel() for value in moving.values()) * seen(next(seen.pieces(1))[0]).numel()
        for call, goal in seen.pieces(max(1, min(_PIECE, seen.target.piece, _ENTRIES // max(1, size)))):
            roots = output_roots(seen.likelihood, seen(call), goal)
            slopes = each(moving, call, roots)
            yield torch.cat([slopes[name].flatten(0, 1).reshape(-1, moving[name].numel()) for name in names], dim=1)
