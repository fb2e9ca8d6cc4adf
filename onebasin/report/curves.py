"""Lines with bands, points with bars of error, histograms as outlines."""

from __future__ import annotations

from typing import Any

from onebasin.record import Panel, Series
from onebasin.report.axes import crossed, dress, shown
from onebasin.report.looks import Look, looks

_MARKED, _LONG = 9, 16  # markers on a line, and points from which on not every one has its own


def draw_lines(axes: Any, panel: Panel) -> list[Any]:
    """Draw the series as lines, their errors as bands; returns one handle per series for the legend."""
    log_x, log_y = _scales(panel)
    handles = []
    for series, look in zip(panel.series, looks(panel.series), strict=True):
        x, y = shown(series.x, log_x), shown(series.y, log_y)
        if series.low and series.high:
            band = shown(series.low, log_y), shown(series.high, log_y)
            axes.fill_between(x, *band, color=look.colour, alpha=0.18, linewidth=0)
        every = (
            -(-len(x) // _MARKED) if len(x) > _LONG else 1
        )  # a long line has its ends free, where a frame would cut a marker
        (line,) = axes.plot(
            x,
            y,
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker,
            markevery=(every // 2, every),
        )
        handles.append(line)
    _finish(axes, panel, log_x, log_y)
    return handles


def draw_points(axes: Any, panel: Panel) -> list[Any]:
    """Draw the series as points with bars of error."""
    log_x, log_y = _scales(panel)
    handles = []
    for series, look in zip(panel.series, looks(panel.series), strict=True):
        x, y = shown(series.x, log_x), shown(series.y, log_y)
        many = len(x) > 60
        (dots,) = axes.plot(
            x,
            y,
            color=look.colour,
            linestyle="none",
            marker=look.marker,
            markersize=2.6 if many else 5,
            markeredgewidth=0,
            alpha=0.55 if many else 0.95,
        )
        error_bars(axes, series, look.colour, log_x, log_y)
        handles.append(dots)
    _finish(axes, panel, log_x, log_y)
    return handles


def draw_histogram(axes: Any, panel: Panel) -> list[Any]:
    """Draw counts in bins as outlines over a faint area."""
    log_x, log_y = _scales(panel)
    log_x = log_x and all(edge > 0 for series in panel.series for edge in series.x)
    handles = []
    for series, look in zip(panel.series, looks(panel.series), strict=True):
        edges = [float(edge) for edge in series.x]
        heights = shown(series.y, log=False)
        axes.stairs(heights, edges, fill=True, color=look.colour, alpha=0.1, linewidth=0)
        handles.append(_outline(axes, heights, edges, look))
    _finish(axes, panel, log_x, log_y)
    if not log_y and panel.y.low is None and panel.series:
        axes.set_ylim(bottom=0)
    return handles


def _outline(axes: Any, heights: list[float], edges: list[float], look: Look) -> Any:
    from matplotlib.lines import Line2D

    style = {"color": look.colour, "linestyle": look.outline, "linewidth": 1.5}
    axes.stairs(heights, edges, baseline=None, **style)
    return Line2D([], [], **style)


def error_bars(axes: Any, series: Series, colour: str, *logs: bool) -> None:
    """Draw the errors of a series as thin vertical lines, under its points."""
    if series.low and series.high:
        x, low, high = (
            shown(values, log)
            for values, log in zip((series.x, series.low, series.high), (*logs, logs[-1]), strict=True)
        )
        axes.vlines(x, low, high, color=colour, linewidth=1.2, alpha=0.8)


def _scales(panel: Panel) -> tuple[bool, bool]:
    """Whether x and y are logarithmic: as asked, unless no point would be left."""
    asked = panel.x.scale == "log", panel.y.scale == "log"
    left = any(
        y is not None and (x > 0 or not asked[0]) and (y > 0 or not asked[1])
        for series in panel.series
        for x, y in zip(series.x, series.y, strict=False)
    )
    return (asked[0] and left, asked[1] and left)


def _finish(axes: Any, panel: Panel, log_x: bool, log_y: bool) -> None:
    dress(axes, "x", panel.x, log_x, crossed(panel, "vertical"))
    dress(axes, "y", panel.y, log_y, crossed(panel, "horizontal"))
