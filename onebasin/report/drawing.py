"""One drawing path: every panel, for the page and for files, is drawn here by matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onebasin.record import Panel, Rule
from onebasin.report.axes import wrapped
from onebasin.report.bars import draw_bars, lying
from onebasin.report.curves import draw_histogram, draw_lines, draw_points
from onebasin.report.heat import draw_heat
from onebasin.report.palette import ink

WIDTH = 4.4  # inches of a panel
_HEIGHT = 2.95  # without its legend
_ROW = 0.18  # inches of a row of the legend
_DRAW = {
    "lines": draw_lines,
    "points": draw_points,
    "bars": draw_bars,
    "histogram": draw_histogram,
    "heat": draw_heat,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in our style, whatever the user's settings of matplotlib are; they come back afterwards."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser may well have it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_settings())
        yield


def _settings() -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "onebasin",
        "pdf.fonttype": 42,
        "text.parse_math": False,  # a dollar in a record is a dollar
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": ink("ink"),
        "axes.labelsize": 9.5,
        "axes.labelcolor": ink("ink"),
        "axes.edgecolor": ink("edge"),
        "axes.facecolor": "none",
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.xmargin": 0.03,
        "axes.ymargin": 0.06,
        "grid.color": ink("grid"),
        "grid.linewidth": 0.7,
        "xtick.color": ink("edge"),
        "ytick.color": ink("edge"),
        "xtick.labelcolor": ink("muted"),
        "ytick.labelcolor": ink("muted"),
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "lines.linewidth": 1.7,
        "lines.markersize": 4.6,
        "lines.markeredgewidth": 0,
        "text.color": ink("ink"),
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "legend.handlelength": 3.2,
        "legend.columnspacing": 1.4,
        "legend.labelcolor": ink("ink"),
        "figure.facecolor": "none",
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
    }


def height(panel: Panel) -> float:
    """Inches that a panel needs: more with a long legend, or with many lying bars."""
    bars = len(panel.x.names) * max(len(panel.series), 1) if lying(panel) else 0
    return _HEIGHT + _ROW * _legend_rows(panel) + max(0.0, 0.16 * bars - 1.6)


def draw(place: Any, panel: Panel) -> None:
    """Draw a panel.

    Args:
        place: a Figure or SubFigure of matplotlib, empty.
        panel: what to draw.
    """
    axes = place.subplots()
    handles = _DRAW[panel.kind](axes, panel)
    rules = [_turned(rule) if lying(panel) else rule for rule in panel.rules]
    for rule in rules:
        _draw_rule(axes, rule)
    if panel.title:
        crossed = any(rule.direction == "vertical" for rule in rules)  # their names stand above the panel
        axes.set_title(wrapped(panel.title, 52, 2), pad=18 if crossed else 8)
    named = [(handle, name) for handle, name in zip(handles, _legend_names(panel), strict=False) if name]
    if named:
        drawn, names = zip(*named, strict=True)
        place.legend(drawn, names, loc="outside lower center", ncols=_columns(names))


def _legend_names(panel: Panel) -> list[str]:
    return [wrapped(series.name, 58, 1) for series in panel.series]


def _columns(names: Sequence[str]) -> int:
    widest = max(len(name) for name in names)
    return max(1, min(len(names), int(WIDTH / (0.5 + 0.062 * widest))))


def _legend_rows(panel: Panel) -> int:
    names = [name for name in _legend_names(panel) if name]
    return -(-len(names) // _columns(names)) if names else 0


def _turned(rule: Rule) -> Rule:
    other = {"horizontal": "vertical", "vertical": "horizontal"}
    return Rule(rule.name, rule.value, other.get(rule.direction, rule.direction))


def _draw_rule(axes: Any, rule: Rule) -> None:
    """Draw a straight line with its name beside it; one that lies outside the ends of the axes is left out."""
    style = {"color": ink("muted"), "linewidth": 1.1, "linestyle": (0, (2, 2)), "zorder": 1.5}
    label = {"color": ink("muted"), "fontsize": 8, "annotation_clip": False, "textcoords": "offset points"}
    name = wrapped(rule.name, 40, 1)
    if rule.direction == "diagonal":
        low, high = _overlap(axes)
        axes.plot([low, high], [low, high], scalex=False, scaley=False, **style)
        note = axes.annotate(name, (high, high), (-4, -24), ha="right", va="top", **label)
    elif rule.direction == "vertical":
        if not _in_view(axes.get_xlim(), rule.value):
            return
        axes.axvline(rule.value, **style)
        spot = {"xycoords": axes.get_xaxis_transform(), "ha": _side(axes, rule.value), "va": "bottom"}
        note = axes.annotate(name, (rule.value, 1.0), (0, 2), **spot, **label)
    else:
        if not _in_view(axes.get_ylim(), rule.value):
            return
        axes.axhline(rule.value, **style)
        spot = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        note = axes.annotate(name, (0.99, rule.value), (0, 2), **spot, **label)
    note.set_in_layout(False)


def _in_view(ends: tuple[float, float], place: float) -> bool:
    return min(ends) <= place <= max(ends)


def _side(axes: Any, place: float) -> str:
    """How a name above the place `place` of x is aligned, so that it stays above the panel."""
    across = axes.transAxes.inverted().transform(axes.transData.transform((place, axes.get_ylim()[1])))[0]
    return "left" if across < 0.25 else "right" if across > 0.75 else "center"


def _overlap(axes: Any) -> tuple[float, float]:
    """The part of the diagonal that both axes show; where there is none, what either shows."""
    (left, right), (bottom, top) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    low, high = max(left, bottom), min(right, top)
    return (low, high) if low < high else (min(left, bottom), max(right, top))
