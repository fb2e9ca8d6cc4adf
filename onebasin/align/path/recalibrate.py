"""Batch norm of a network that was averaged: its running statistics are those of nobody, so measure them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.norms import refreshed_one
from onebasin.predict import Inputs
from onebasin.state import State


def recalibrate(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int | None = None) -> State:
    """Return the network with running means and variances measured on `inputs`; see `onebasin.norms.refreshed`.

    Args:
        model: the function; left exactly as it was.
        state: its weights.
        inputs: data as in `outputs`; some thousand examples are plenty.
        batch: largest number of examples that are normalised together.

    Raises:
        InputError: no norm with running statistics was used.
    """
    state, norms = refreshed_one(model, state, inputs, batch=batch)
    if not norms:
        raise InputError(
            f"expected a batch norm with running statistics in {type(model).__name__}, and none was used: "
            "there is nothing to recalibrate, repair works for networks without one"
        )
    return state
