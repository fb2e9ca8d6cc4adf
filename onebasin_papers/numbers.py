"""Numbers of records from what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import onebasin as ob

_SIGMAS = 2 * 1.959964  # an interval of 95 per cent is so many standard errors wide


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of runs, and its standard error; None for a single run.

    >>> mean_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def measured(
    values: Sequence[float], published: float | None = None, *, scale: float = 1.0, note: str = ""
) -> ob.reporting.Number:
    """Mean and standard error of runs, in units of 1 / `scale`.

    >>> measured([0.5, 0.7], 62.0, scale=100)
    Number(value=60.0, error=10.0, published=62.0, note='')
    """
    mean, error = mean_error([scale * value for value in values])
    return ob.reporting.Number(_rounded(mean), None if error is None else _rounded(error), published, note)


def _rounded(value: float) -> float:
    """A number without the noise of its last digits, however small it is."""
    return float(f"{value:.12g}")


def estimated(estimate: ob.Estimate, scale: float = 1.0, published: float | None = None) -> ob.reporting.Number:
    """A number with the standard error that its 95 % interval amounts to, in units of 1 / `scale`."""
    width = scale * (estimate.high - estimate.low) / _SIGMAS
    return ob.reporting.Number(scale * estimate.value, width if math.isfinite(width) else None, published)


def told(values: Sequence[float], digits: int = 3) -> str:
    """The mean of runs and its standard error, in words.

    >>> told([1.0, 3.0], 1), told([0.5])
    ('2.0 ± 1.0', '0.500')
    """
    mean, error = mean_error(values)
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def line(
    name: str,
    x: Sequence[float],
    columns: Sequence[Sequence[float]],
    *,
    shade: int | None = None,
    dashed: bool = False,
    digits: int | None = None,
) -> ob.reporting.Series:
    """Means of runs with a band of one standard error.

    >>> line("loss", [1.0], [[2.0, 4.0]]).low
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
    return ob.reporting.Series(
        name, tuple(map(float, x)), tuple(short(mean) for mean, _ in middles), *band, dashed, shade
    )
