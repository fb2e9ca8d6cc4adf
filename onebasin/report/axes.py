"""Axes of a panel: scale, ends, few ticks, names."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from onebasin.record import Axis, Panel
from onebasin.report.escape import one_line

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TICKS = 5


def is_log(axis: Axis, values: Iterable[float | None]) -> bool:
    """Whether an axis is drawn as logarithmic: it asks for it, and there is something to show."""
    return axis.scale == "log" and any(value is not None and value > 0 for value in values)


def shown(values: Iterable[float | None], log: bool) -> list[float]:
    """Numbers to draw: NaN, which leaves a gap, for what is missing or has no place on a logarithmic axis."""
    return [math.nan if value is None or (log and value <= 0) else float(value) for value in values]


def wrapped(text: str, width: int, lines: int = 3) -> str:
    r"""A text in lines of at most `width` characters; what is too long ends with "…".

    >>> wrapped("a rather long sentence about nothing", 12, lines=2)
    'a rather\nlong…'
    """
    return "\n".join(textwrap.wrap(one_line(text), width, max_lines=lines, placeholder="…"))


def tick_text(value: float, span: float = 1.0) -> str:
    """A number at a tick; noise that is tiny beside `span` is zero.

    >>> [tick_text(value, 1e9) for value in (0.25, 12000.0, 1e-17, 2e6)], tick_text(1e-5, 1e-4)
    (['0.25', '12,000', '0', '2×10⁶'], '10⁻⁵')
    """
    if abs(value) < 1e-9 * min(span, 1.0):
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.6g}".replace("-", "−")
    mantissa, exponent = f"{value:.3e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "−")
    power = f"10{str(int(exponent)).translate(_RAISED)}"
    return power if mantissa == "1" else f"{mantissa}×{power}".replace("−1×", "−")


def dress(axes: Any, which: str, axis: Axis, log: bool, also: Sequence[float] = (), *, grid: bool = True) -> None:
    """Give the axis "x" or "y" its scale, ends, ticks and label.

    Args:
        axes: of matplotlib, with the data drawn.
        which: "x" or "y".
        axis: what is wanted.
        log: whether it is logarithmic, see `is_log`.
        also: places that should be in view, unless the ends of the axis are given.
        grid: whether faint lines cross the panel at its ticks.
    """
    drawn = axes.xaxis if which == "x" else axes.yaxis
    if log:
        getattr(axes, f"set_{which}scale")("log")
    _limit(axes, which, axis, log, also)
    if axis.names:
        width = 13 if which == "x" else 22
        drawn.set_ticks(range(len(axis.names)), [wrapped(name, width, 2) for name in axis.names])
        drawn.set_tick_params(length=0)
    else:
        _few_ticks(drawn, log)
    label = wrapped(axis.label, 56 if which == "x" else 40, 2)
    getattr(axes, f"set_{which}label")(label)
    axes.grid(grid and not axis.names, axis=which)


def crossed(panel: Panel, direction: str) -> list[float]:
    """Where rules of a direction cross the axis that they stand on."""
    return [rule.value for rule in panel.rules if rule.direction == direction]


def _limit(axes: Any, which: str, axis: Axis, log: bool, also: Sequence[float]) -> None:
    """Set the ends that are given, unless they are upside down or have no place on the scale."""
    low, high = getattr(axes, f"get_{which}lim")()
    span = high - low
    for place in also:
        if place > 0 or not log:
            low = min(low, place / 1.2 if log else place - 0.05 * span)
            high = max(high, place * 1.2 if log else place + 0.05 * span)
    low = axis.low if axis.low is not None and not (log and axis.low <= 0) else low
    high = axis.high if axis.high is not None and not (log and axis.high <= 0) else high
    if low < high:
        getattr(axes, f"set_{which}lim")(low, high)


def _few_ticks(drawn: Any, log: bool) -> None:
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(drawn.get_view_interval())
    if not log:
        drawn.set_major_locator(MaxNLocator(_TICKS, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
    elif high / low < 10:
        drawn.set_major_locator(AutoLocator())
    else:
        subdivisions = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
        drawn.set_major_locator(LogLocator(subs=subdivisions, numticks=_TICKS + 1))
    drawn.set_minor_locator(NullLocator())
    drawn.set_major_formatter(FuncFormatter(lambda value, place: tick_text(value, high - low)))


def edges_between(places: Sequence[float], log: bool) -> list[float]:
    """Edges of cells around ascending places: halfway between neighbours, on the scale that is drawn.

    >>> edges_between([0, 1, 3], log=False), edges_between([2], log=False)
    ([-0.5, 0.5, 2.0, 4.0], [1.5, 2.5])
    """
    marks = [math.log(place) for place in places] if log else [float(place) for place in places]
    halves = [(a + b) / 2 for a, b in pairwise(marks)]
    first = marks[0] - (halves[0] - marks[0] if halves else 0.5)
    last = marks[-1] + (marks[-1] - halves[-1] if halves else 0.5)
    ends = [first, *halves, last]
    return [math.exp(end) for end in ends] if log else ends
