"""A diagonal and a few directions: the covariance that SWAG fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.gaussian import LOG_TWO_PI, check_spread, check_vector, standard_normal


@dataclass(frozen=True, eq=False)
class LowRank:
    """Covariance diag(scale^2) + factor factor^T; draws are scale * z1 + factor z2 with standard normal z1, z2.

    >>> LowRank(torch.zeros(2), torch.tensor([[3.0], [4.0]])).std()
    tensor([3., 4.])

    Attributes:
        scale: standard deviations (D,) of the independent part.
        factor: directions (D, K); K may be 0.
    """

    scale: Tensor
    factor: Tensor
    kind: ClassVar[str] = "low_rank"

    def __post_init__(self) -> None:
        check_vector(self.scale, "standard deviations")
        if self.factor.dim() != 2 or len(self.factor) != len(self.scale):
            raise InputError(
                f"expected a factor ({len(self.scale)}, K), one row per weight, found {tuple(self.factor.shape)}: "
                "transpose it, or give as many rows as there are standard deviations"
            )

    @property
    def size(self) -> int:
        """D."""
        return len(self.scale)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return (self.scale.square() + self.factor.square().sum(1)).sqrt()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        own = standard_normal((count, self.size), self.scale, generator)
        along = standard_normal((count, self.factor.shape[1]), self.factor, generator)
        return self.scale * own + along @ self.factor.T

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...), at the cost of a (K, K) system.

        With e = offset / scale and G = factor / scale, and y the solution of (I + G^T G) y = G^T e,

            offset^T covariance^-1 offset = |e - G y|^2 + |y|^2,    det covariance = prod scale^2 det(I + G^T G):

        sums of squares, which Woodbury's difference of two large numbers is not.
        """
        check_spread(self.scale)
        scale = self.scale.double()
        whitened = offset.double() / scale
        along = self.factor.double() / scale[:, None]
        inner = torch.eye(along.shape[1], dtype=along.dtype, device=along.device) + along.T @ along
        root = torch.linalg.cholesky(inner)
        fitted = torch.cholesky_solve((whitened @ along).unsqueeze(-1), root).squeeze(-1)
        distance: Tensor = (whitened - fitted @ along.T).square().sum(-1) + fitted.square().sum(-1)
        half_log_determinant = float(scale.log().sum() + root.diagonal().log().sum())
        return -0.5 * distance - 0.5 * self.size * LOG_TWO_PI - half_log_determinant

    def tensors(self) -> dict[str, Tensor]:
        """Standard deviations and directions."""
        return {"scale": self.scale, "factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        return cls(tensors["scale"], tensors["factor"])
