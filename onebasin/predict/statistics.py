"""Mean and variance of units over data that arrive in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebasin.errors import InputError


@dataclass
class Moments:
    """Count, mean and sum of squared deviations per unit, in float64.

    Pieces are combined exactly (Chan, Golub and LeVeque): with n and m values of means p and q,

        deviations = deviations_n + deviations_m + (q - p)^2 n m / (n + m),

    the law of total variance. The average of the variances of batches would leave the last term out.

    >>> moments = Moments()
    >>> moments.add(torch.tensor([[1.0], [2.0]]), axis=1)
    >>> moments.add(torch.tensor([[6.0]]), axis=1)
    >>> moments.mean.item(), moments.variance(correction=0).item()
    (3.0, 4.666...)
    """

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    deviations: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, values: Tensor, axis: int) -> None:
        """Take in values whose units lie on `axis`; all other axes are averaged over."""
        rows = values.detach().movedim(axis, -1).flatten(0, -2)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        variance, mean = torch.var_mean(rows, 0, correction=0)
        old, new = self.count, len(rows)
        self.count = old + new
        if not old:
            self.mean, self.deviations = mean.double(), variance.double() * new
            return
        gap = mean.double() - self.mean
        self.mean = self.mean + gap * (new / self.count)
        self.deviations = self.deviations + variance.double() * new + gap.square() * (old * new / self.count)

    def variance(self, correction: int = 1) -> Tensor:
        """Sum of squared deviations over (count - correction), (units,)."""
        if self.count <= correction:
            raise InputError(
                f"a variance needs at least {correction + 1} values per unit, found {self.count}: give more examples"
            )
        return self.deviations / (self.count - correction)

    @property
    def std(self) -> Tensor:
        """Standard deviation with divisor `count`, (units,)."""
        return self.variance(correction=0).sqrt()
