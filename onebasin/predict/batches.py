"""Inputs of a model, cut into batches along the first axis of every tensor."""

from __future__ import annotations

from torch import Tensor

from onebasin.calling import Inputs, batches, examples_in, moved, rows_of
from onebasin.errors import InputError

__all__ = ["batches", "check_targets", "examples_in", "moved", "rows_of"]


def check_targets(inputs: Inputs, targets: Tensor) -> None:
    """Refuse targets that are not one per example.

    Raises:
        InputError: their number is another.
    """
    if not targets.dim() or examples_in(inputs) != len(targets):
        raise InputError(
            f"expected one target for each of {examples_in(inputs)} examples, found targets {tuple(targets.shape)}: "
            "give targets of the same length"
        )
