"""One Gaussian over flat weight vectors: a centre, and a shape that knows how draws spread around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from onebasin.errors import InputError

LOG_TWO_PI = math.log(2 * math.pi)


class Shape(Protocol):
    """How a Gaussian spreads around its centre: a covariance matrix (D, D) that is seldom written out.

    Attributes:
        kind: the name under which the shape is stored.
    """

    kind: ClassVar[str]

    @property
    def size(self) -> int:
        """D."""

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,): the root of the diagonal of the covariance."""

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D) from the centre, float64 (...)."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything the shape is made of; `from_tensors` makes an equal one of it."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The shape whose `tensors` these are."""


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(centre, covariance of the shape), over weight vectors (D,).

    >>> from onebasin.posterior.diagonal import Diagonal
    >>> gaussian = Gaussian(torch.zeros(3), Diagonal(torch.ones(3)))
    >>> gaussian.draw_flat(2, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """

    centre: Tensor
    shape: Shape

    def __post_init__(self) -> None:
        if tuple(self.centre.shape) != (self.shape.size,):
            raise InputError(
                f"expected a centre ({self.shape.size},) for a {self.shape.kind} shape of that size, found "
                f"{tuple(self.centre.shape)}: give both the same number of weights"
            )

    @property
    def size(self) -> int:
        """D."""
        return self.shape.size

    def draw_flat(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) in the dtype of the centre."""
        return self.centre + self.shape.noise(count, generator).to(self.centre)

    def log_density(self, flat: Tensor) -> Tensor:
        """Log density of weight vectors (..., D), float64 (...)."""
        return self.shape.log_density(flat.double() - self.centre.double())


def standard_normal(size: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the dtype and on the device of `like`, whichever device the generator lives on."""
    return torch.randn(tuple(size), generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def check_vector(values: Tensor, what: str) -> None:
    """Refuse standard deviations that are no vector of finite numbers from zero up."""
    if values.dim() != 1 or not bool((torch.isfinite(values) & (values >= 0)).all()):
        found = f"shape {tuple(values.shape)}" if values.dim() != 1 else "negative or non-finite numbers"
        raise InputError(f"expected {what} as a vector (D,) of finite numbers >= 0, found {found}: correct them")


def check_spread(std: Tensor) -> None:
    """Refuse to give the density of a Gaussian without spread in some direction: it has none."""
    if not bool((std > 0).all()):
        raise InputError(
            f"a density needs positive standard deviations, found {int((std == 0).sum())} weights with zero: draw from "
            "the Gaussian instead, or give these weights a small spread"
        )


def one_of_each(gaussians: Sequence[Gaussian], generators: Sequence[torch.Generator]) -> Tensor:
    """One draw from every Gaussian with a generator of its own, (n, D)."""
    pairs = zip(gaussians, generators, strict=True)
    return torch.cat([gaussian.draw_flat(1, generator) for gaussian, generator in pairs])
