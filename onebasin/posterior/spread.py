"""The two parts of a covariance that formulas for large D know: independent, and along a few directions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.gaussian import Shape
from onebasin.posterior.low_rank import LowRank


class Spread(NamedTuple):
    """Covariance diag(scale^2) + factor factor^T, float64."""

    scale: Tensor  # (D,)
    factor: Tensor  # (D, K), K may be 0


def spread_of(shape: Shape) -> Spread:
    """The parts of a diagonal or low-rank shape.

    >>> import torch
    >>> spread_of(Diagonal(torch.ones(2))).factor.shape
    torch.Size([2, 0])
    """
    if isinstance(shape, Diagonal):
        scale = shape.scale.double()
        return Spread(scale, scale.new_zeros(len(scale), 0))
    if isinstance(shape, LowRank):
        return Spread(shape.scale.double(), shape.factor.double())
    raise InputError(
        f"expected diagonal or low-rank Gaussians, found a {shape.kind} one: draw networks from it and fit one to them"
    )
