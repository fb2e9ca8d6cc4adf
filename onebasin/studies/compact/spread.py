"""Several runs of one measurement, in words and as a line with a band."""

from __future__ import annotations

from collections.abc import Sequence

from onebasin.record import Series
from onebasin.studies.numbers import mean_error


def told(values: Sequence[float], digits: int = 3) -> str:
    """The mean and its standard error.

    >>> told([1.0, 3.0], 1), told([0.5])
    ('2.0 ± 1.0', '0.500')
    """
    mean, error = mean_error(values)
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def line(name: str, x: Sequence[float], columns: Sequence[Sequence[float]], shade: int | None = None) -> Series:
    """A line of means with a band of one standard error; `columns` holds the runs at each place."""
    middles = [mean_error(column) for column in columns]
    low = tuple(mean - (error or 0.0) for mean, error in middles)
    high = tuple(mean + (error or 0.0) for mean, error in middles)
    band = (low, high) if low != high else ((), ())
    return Series(name, tuple(map(float, x)), tuple(mean for mean, _ in middles), *band, shade=shade)
