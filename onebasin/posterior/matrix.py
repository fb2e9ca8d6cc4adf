"""A matrix X (N, D) that is too large to be held, and is read whenever it is multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Callable[[], Iterator[tuple[int, Tensor]]]
"""Begins a reading: yields (start, rows (n, D)) of X, which may be reused for the next."""


class Matrix(ABC):
    """X (N, D); every product is one reading."""

    @abstractmethod
    def times(self, right: Tensor) -> Tensor:
        """X right, (N, L), for `right` (D, L)."""

    @abstractmethod
    def gathered(self, left: Tensor, width: int) -> Tensor:
        """X^T left, (D, L), for `left` (N, L) and D = `width`."""

    @abstractmethod
    def turned(self, right: Tensor) -> Tensor:
        """X^T X right, (D, L), for `right` (D, L)."""

    @abstractmethod
    def lengths(self) -> Tensor:
        """The squared norm of each row, float64 (N,)."""


@dataclass(frozen=True, eq=False)
class Read(Matrix):
    """A matrix that is read in this process.

    >>> halves = Read(lambda: iter([(0, torch.eye(2)), (2, torch.ones(1, 2))]))
    >>> halves.turned(torch.ones(2, 1)).flatten().tolist(), halves.lengths().tolist()
    ([3.0, 3.0], [1.0, 1.0, 2.0])
    """

    rows: Rows

    def times(self, right: Tensor) -> Tensor:
        """Row block by row block."""
        return torch.cat([block @ right for _, block in self.rows()])

    def gathered(self, left: Tensor, width: int) -> Tensor:
        """Summed over row blocks."""
        total = left.new_zeros(width, left.shape[1])
        for start, block in self.rows():
            total.addmm_(block.T, left[start : start + len(block)])
        return total

    def turned(self, right: Tensor) -> Tensor:
        """Summed over row blocks."""
        total = torch.zeros_like(right)
        for _, block in self.rows():
            total.addmm_(block.T, block @ right)
        return total

    def lengths(self) -> Tensor:
        """Row block by row block."""
        return torch.cat([block.square().sum(1, dtype=torch.float64) for _, block in self.rows()])
