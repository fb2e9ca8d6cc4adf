"""Measured values as numbers, series and histograms of a record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

import onebasin as ob

report = ob.reporting

_SIGMAS = 2 * 1.959964  # an interval of 95 per cent is so many standard errors wide


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of runs, and its standard error; None for a single run.

    >>> mean_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def mean_number(
    values: Sequence[float], published: float | None = None, *, scale: float = 1.0, note: str = ""
) -> report.Number:
    """Mean and standard error of runs, in units of 1 / `scale`.

    >>> mean_number([0.5, 0.7], 62.0, scale=100)
    Number(value=60.0, error=10.0, published=62.0, note='', low=None, high=None)
    """
    mean, error = mean_error([scale * value for value in values])
    return report.Number(_rounded(mean), None if error is None else _rounded(error), published, note)


def _rounded(value: float) -> float:
    """A number without the noise of its last digits, however small it is."""
    return float(f"{value:.12g}")


def estimate_number(estimate: ob.Estimate, scale: float = 1.0, published: float | None = None) -> report.Number:
    """A number with the standard error that its 95 % interval amounts to, in units of 1 / `scale`."""
    width = scale * (estimate.high - estimate.low) / _SIGMAS
    return report.Number(scale * estimate.value, width if math.isfinite(width) else None, published)


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """The mean of runs and its standard error, in words.

    >>> mean_text([1.0, 3.0], 1), mean_text([0.5])
    ('2.0 ± 1.0', '0.500')
    """
    mean, error = mean_error(values)
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def mean_line(
    name: str,
    x: Sequence[float],
    columns: Sequence[Sequence[float]],
    *,
    shade: int | None = None,
    dashed: bool = False,
    digits: int | None = None,
) -> report.Series:
    """Means of runs with a band of one standard error.

    >>> mean_line("loss", [1.0], [[2.0, 4.0]]).low
    (2.0,)

    Args:
        name: in the legend.
        x: places.
        columns: the runs at each place.
        shade: as in `Series`.
        dashed: as in `Series`.
        digits: after the point, so that long lines take little room in a record; None keeps all.
    """

    def short(value: float) -> float:
        return value if digits is None else round(value, digits)

    middles = [mean_error(column) for column in columns]
    low = tuple(short(mean - (error or 0.0)) for mean, error in middles)
    high = tuple(short(mean + (error or 0.0)) for mean, error in middles)
    band = (low, high) if low != high else ((), ())
    return report.Series(name, tuple(map(float, x)), tuple(short(mean) for mean, _ in middles), *band, dashed, shade)


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


def histogram(name: str, values: Tensor, places: tuple[float, ...], *, shade: int | None = None) -> report.Series:
    """Values as a series of a histogram."""
    return report.Series(name, places, tuple(map(float, counts(values, places).tolist())), shade=shade)


def heat(
    title: str,
    x: Tensor,
    y: Tensor,
    places: tuple[float, ...],
    axes: tuple[report.Axis, report.Axis],
    *rules: report.Rule,
) -> report.Panel:
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
    colour = report.Axis("networks", scale="log")
    return report.Panel("heat", title, *axes, rules=rules, grid=grid, columns=middle, rows=middle, colour=colour)


def _bin(values: Tensor, places: tuple[float, ...]) -> Tensor:
    """Number of the bin from 1 on; 0 below, len(places) above."""
    ends = torch.tensor(places, dtype=torch.float64)
    place = torch.searchsorted(ends, values.double().contiguous(), right=True)
    return torch.where(values.double() == ends[-1], len(places) - 1, place)
