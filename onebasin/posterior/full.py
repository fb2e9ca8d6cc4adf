"""A covariance with all its entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.gaussian import LOG_TWO_PI, check_spread, standard_normal


@dataclass(frozen=True, eq=False)
class Full:
    """Covariance factor factor^T.

    >>> Full.from_covariance(torch.tensor([[4.0, 2.0], [2.0, 2.0]])).factor
    tensor([[2., 0.],
            [1., 1.]])

    Attributes:
        factor: lower triangular (D, D).
    """

    factor: Tensor
    kind: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        check_square(self.factor, "a lower triangular factor")

    @classmethod
    def from_covariance(cls, covariance: Tensor) -> Self:
        """The shape with this covariance (D, D); computed in float64, kept in the given dtype."""
        check_square(covariance, "a covariance")
        return cls(_root(covariance.double(), "covariance").to(covariance.dtype))

    @classmethod
    def from_precision(cls, precision: Tensor) -> Self:
        """The shape whose covariance is the inverse of this matrix (D, D).

        With the rows and columns of the precision reversed, P' = R R^T gives P^-1 = L L^T for L = (R^-T)': lower
        triangular, and the covariance itself is never formed.
        """
        check_square(precision, "a precision")
        root = _root(precision.double().flip(0, 1), "precision")
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        inverse = torch.linalg.solve_triangular(root, identity, upper=False)
        return cls(inverse.T.flip(0, 1).to(precision.dtype))

    @property
    def size(self) -> int:
        """D."""
        return len(self.factor)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return self.factor.square().sum(1).sqrt()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        return standard_normal((count, self.size), self.factor, generator) @ self.factor.T

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...)."""
        factor = self.factor.double()
        check_spread(factor.diagonal())
        rows = offset.double().reshape(-1, self.size)
        whitened = torch.linalg.solve_triangular(factor, rows.T, upper=False)
        distance = whitened.square().sum(0).reshape(offset.shape[:-1])
        density: Tensor = -0.5 * (distance + self.size * LOG_TWO_PI) - factor.diagonal().log().sum()
        return density

    def tensors(self) -> dict[str, Tensor]:
        """The factor."""
        return {"factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        return cls(tensors["factor"])


def check_square(matrix: Tensor, what: str) -> None:
    """Refuse what is no square matrix of finite numbers."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not bool(torch.isfinite(matrix).all()):
        raise InputError(
            f"expected {what} as a square matrix of finite numbers, found shape {tuple(matrix.shape)}"
            f"{'' if bool(torch.isfinite(matrix).all()) else ' with NaN or infinity'}: correct it"
        )


def _root(matrix: Tensor, what: str) -> Tensor:
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise InputError(
            f"expected a positive definite {what}, found one that is not (at row {int(failed) - 1}): "
            "add something to its diagonal, such as a prior"
        )
    return root
