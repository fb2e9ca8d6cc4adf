"""How numbers are distributed, and how two sets of them go together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
BINS = 40


@dataclass(frozen=True)
class Spread:
    """The distribution of some numbers.

    Attributes:
        count: how many.
        mean: their mean.
        sd: their standard deviation, with divisor count - 1; 0 for a single one.
        quantiles: level -> value, from the smallest (0.0) over the median (0.5) to the largest (1.0).
        edges: borders of the bins of the histogram, ascending.
        counts: numbers in each bin, one fewer than edges; the last bin is closed.
    """

    count: int
    mean: float
    sd: float
    quantiles: dict[float, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor) -> Spread | None:
        """The distribution of values (n,), None if there are none.

        >>> found = Spread.of(torch.tensor([1.0, 2.0, 6.0]))
        >>> found.mean, found.quantiles[0.5], sum(found.counts)
        (3.0, 2.0, 3)
        """
        if not len(values):
            return None
        ordered = values.double().sort().values
        low, high = float(ordered[0]), float(ordered[-1])
        edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64) if high > low else ordered[[0, -1]]
        bins = (torch.searchsorted(edges, ordered.cpu(), right=True) - 1).clamp(0, len(edges) - 2)
        return cls(
            len(values),
            float(ordered.mean()),
            float(ordered.std()) if len(values) > 1 else 0.0,
            {level: _quantile(ordered, level) for level in LEVELS},
            tuple(edges.tolist()),
            tuple(torch.bincount(bins, minlength=len(edges) - 1).tolist()),
        )


def median(values: Tensor) -> float:
    """The value in the middle, or halfway between the two that are there.

    >>> median(torch.tensor([5.0, 1.0, 2.0, 9.0]))
    3.5
    """
    return _quantile(values.double().sort().values, 0.5)


def _quantile(ordered: Tensor, level: float) -> float:
    """Linear between neighbours (torch.quantile refuses more than 16 million numbers)."""
    place = level * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return float(below + (place - math.floor(place)) * (above - below))
