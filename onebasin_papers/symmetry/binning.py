"""Many values as few numbers for figures: counts in bins of one and two dimensions."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

import onebasin as ob


def edges(low: float, high: float, bins: int) -> tuple[float, ...]:
    """Ends of equally wide bins.

    >>> edges(0, 1, 2)
    (0.0, 0.5, 1.0)
    """
    return tuple(round(low + (high - low) * place / bins, 10) for place in range(bins + 1))


def counts(values: Tensor, places: tuple[float, ...]) -> Tensor:
    """How many values fall between neighbours, the last end included; values outside are left out: (bins,).

    >>> counts(torch.tensor([0.1, 0.5, 1.0, 7.0]), (0.0, 0.5, 1.0))
    tensor([1, 2])
    """
    return _bin(values, places).bincount(minlength=len(places))[1 : len(places)]


def histogram(name: str, values: Tensor, places: tuple[float, ...], *, shade: int | None = None) -> ob.reporting.Series:
    """Values as a series of a histogram."""
    return ob.reporting.Series(name, places, tuple(map(float, counts(values, places).tolist())), shade=shade)


def heat(
    title: str,
    x: Tensor,
    y: Tensor,
    places: tuple[float, ...],
    axes: tuple[ob.reporting.Axis, ob.reporting.Axis],
    *rules: ob.reporting.Rule,
) -> ob.reporting.Panel:
    """Points as a heat map on a square; places without any point stay empty.

    Args:
        title: of the panel.
        x: coordinates (n,).
        y: coordinates (n,).
        places: edges of the bins, the same for both axes.
        axes: their labels.
        *rules: straight lines for comparison.
    """
    bins = len(places) - 1
    columns, rows = _bin(x, places), _bin(y, places)
    inside = (columns > 0) & (columns <= bins) & (rows > 0) & (rows <= bins)
    cells = ((rows - 1) * bins + columns - 1)[inside].bincount(minlength=bins * bins).reshape(bins, bins)
    middle = tuple(round((a + b) / 2, 10) for a, b in pairwise(places))
    grid = tuple(tuple(float(cell) if cell else None for cell in row) for row in cells.tolist())
    colour = ob.reporting.Axis("networks", scale="log")
    return ob.reporting.Panel("heat", title, *axes, rules=rules, grid=grid, columns=middle, rows=middle, colour=colour)


def _bin(values: Tensor, places: tuple[float, ...]) -> Tensor:
    """Number of the bin from 1 on; 0 below, len(places) above."""
    ends = torch.tensor(places, dtype=torch.float64)
    found = torch.searchsorted(ends, values.double().contiguous(), right=True)
    return torch.where(values.double() == ends[-1], len(places) - 1, found)
