"""Bars under names: upright where the names fit beneath, lying where they do not."""

from __future__ import annotations

from typing import Any

from onebasin.record import Panel
from onebasin.report.axes import crossed, dress, is_log, shown
from onebasin.report.looks import looks
from onebasin.report.palette import ink

_LETTERS = 44  # that fit beneath a panel
_GROUP = 0.78  # part of the place between two names that bars fill


def lying(panel: Panel) -> bool:
    """Whether bars lie, so that long names can be read."""
    names = panel.x.names
    return panel.kind == "bars" and max(map(len, names), default=0) * len(names) > _LETTERS


def draw_bars(axes: Any, panel: Panel) -> list[Any]:
    """Draw groups of bars; dots where the axis of values has no zero from which a bar could start."""
    values = [value for series in panel.series for value in series.y]
    log = is_log(panel.y, values)
    flat = lying(panel)
    dots = log or (panel.y.low or 0.0) > 0
    width = _GROUP / max(len(panel.series), 1)
    handles = []
    for number, (series, look) in enumerate(zip(panel.series, looks(panel.series), strict=True)):
        shift = (number + 0.5) * width - _GROUP / 2
        places, heights = [x + shift for x in series.x], shown(series.y, log)
        if dots:
            points = (heights, places) if flat else (places, heights)
            (drawn,) = axes.plot(*points, linestyle="none", marker=look.marker, color=look.colour)
        else:
            draw = axes.barh if flat else axes.bar
            style = {"edgecolor": look.colour, "linewidth": 1.0, "alpha": 0.4 if series.dashed else 0.88}
            drawn = draw(places, heights, width * 0.92, color=look.colour, **style)
        if series.low and series.high:
            ends = axes.hlines if flat else axes.vlines
            ends(places, shown(series.low, log), shown(series.high, log), color=ink("ink"), linewidth=1.1)
        handles.append(drawn)
    names, measure = ("y", "x") if flat else ("x", "y")
    dress(axes, names, panel.x, False)
    dress(axes, measure, panel.y, log, crossed(panel, "horizontal"))
    if panel.x.names:
        getattr(axes, f"set_{names}lim")(-0.6, len(panel.x.names) - 0.4)
    if flat:
        axes.invert_yaxis()
    return handles
