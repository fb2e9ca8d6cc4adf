"""Independent weights: a covariance that is a diagonal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onebasin.posterior.gaussian import LOG_TWO_PI, check_spread, check_vector, standard_normal


@dataclass(frozen=True, eq=False)
class Diagonal:
    """Covariance diag(std^2).

    >>> Diagonal(torch.ones(2)).log_density(torch.zeros(2)).item()
    -1.837877...

    Attributes:
        scale: the standard deviations (D,).
    """

    scale: Tensor
    kind: ClassVar[str] = "diagonal"

    def __post_init__(self) -> None:
        check_vector(self.scale, "standard deviations")

    @property
    def size(self) -> int:
        """D."""
        return len(self.scale)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return self.scale

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        return self.scale * standard_normal((count, self.size), self.scale, generator)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...)."""
        check_spread(self.scale)
        scale = self.scale.double()
        whitened = offset.double() / scale
        return -0.5 * (whitened.square().sum(-1) + self.size * LOG_TWO_PI) - scale.log().sum()

    def tensors(self) -> dict[str, Tensor]:
        """The standard deviations."""
        return {"scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        return cls(tensors["scale"])
