"""One block of the covariance for each tensor, diagonal in a basis that is a Kronecker product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.full import check_square
from onebasin.posterior.gaussian import LOG_TWO_PI, check_spread, check_vector, standard_normal


class Block(NamedTuple):
    """The covariance of one tensor, flattened as a matrix X (p, q), row by row.

    (left kron right) diag(scale^2) (left kron right)^T, so draws are X = left (scale * Z) right^T. The product
    A kron B of two covariances is the case in which scale^2 is the outer product of their eigenvalues.

    Attributes:
        left: orthonormal eigenvectors (p, p) in the columns; None for the identity.
        right: eigenvectors (q, q); None for the identity.
        scale: standard deviations (p, q) along the products of eigenvectors.
    """

    left: Tensor | None
    right: Tensor | None
    scale: Tensor

    def rotated(self, matrix: Tensor) -> Tensor:
        """From coordinates in the eigenbasis (..., p, q) to weights."""
        matrix = matrix if self.left is None else self.left.to(matrix.dtype) @ matrix
        return matrix if self.right is None else matrix @ self.right.to(matrix.dtype).T

    def unrotated(self, matrix: Tensor) -> Tensor:
        """From weights (..., p, q) to coordinates in the eigenbasis."""
        matrix = matrix if self.left is None else self.left.to(matrix.dtype).T @ matrix
        return matrix if self.right is None else matrix @ self.right.to(matrix.dtype)

    def std(self) -> Tensor:
        """Standard deviation of each weight (p, q)."""
        left, right = (None if side is None else side.square() for side in (self.left, self.right))
        return Block(left, right, self.scale).rotated(self.scale.square()).sqrt()


class Kronecker:
    """A block for each tensor, in the order of the flat vector; tensors are independent of each other.

    >>> Kronecker([Block(None, None, torch.ones(2, 3)), Block(None, None, torch.ones(2, 1))]).size
    8
    """

    kind: ClassVar[str] = "kronecker"

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = tuple(blocks)
        for block in self.blocks:
            check_vector(block.scale.reshape(-1), "standard deviations")
            for side, length in zip((block.left, block.right), block.scale.shape, strict=True):
                if side is not None:
                    check_square(side, "eigenvectors")
                if side is not None and len(side) != length:
                    raise InputError(
                        f"expected {length} eigenvectors for standard deviations {tuple(block.scale.shape)}, found "
                        f"{len(side)}: give left and right sides that fit them"
                    )

    @property
    def size(self) -> int:
        """D."""
        return sum(block.scale.numel() for block in self.blocks)

    def std(self) -> Tensor:
        """Standard deviation of each weight (D,)."""
        return torch.cat([block.std().reshape(-1) for block in self.blocks])

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws (count, D) with mean zero."""
        drawn = []
        for block in self.blocks:
            free = standard_normal((count, *block.scale.shape), block.scale, generator)
            drawn.append(block.rotated(block.scale * free).reshape(count, -1))
        return torch.cat(drawn, dim=1)

    def log_density(self, offset: Tensor) -> Tensor:
        """Log density of offsets (..., D), float64 (...)."""
        pieces = offset.double().split([block.scale.numel() for block in self.blocks], dim=-1)
        total = offset.new_full(offset.shape[:-1], -0.5 * self.size * LOG_TWO_PI, dtype=torch.float64)
        for block, piece in zip(self.blocks, pieces, strict=True):
            scale = block.scale.double()
            check_spread(scale)
            whitened = block.unrotated(piece.reshape(*piece.shape[:-1], *scale.shape)) / scale
            total = total - 0.5 * whitened.square().sum((-2, -1)) - scale.log().sum()
        return total

    def tensors(self) -> dict[str, Tensor]:
        """The sides and scales of all blocks, numbered."""
        return {
            f"{index}.{name}": value
            for index, block in enumerate(self.blocks)
            for name, value in block._asdict().items()
            if value is not None
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Invert `tensors`."""
        count = sum(name.endswith(".scale") for name in tensors)
        sides = [(tensors.get(f"{index}.left"), tensors.get(f"{index}.right")) for index in range(count)]
        return cls([Block(*pair, tensors[f"{index}.scale"]) for index, pair in enumerate(sides)])
