"""Drawings of figures: every panel, for the page and for files, is drawn here by matplotlib."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from onebasin.reporting.record import Axis, Figure, Panel, Rule, Series
from onebasin.reporting.text import one_line


@dataclass(frozen=True)
class Shade:
    """One colour: its hex values on light and on dark paper."""

    light: str
    dark: str


# Okabe and Ito's colours, which people with any kind of colour vision tell apart; brighter on dark paper. Their yellow
# is left out: it cannot be seen on white.
SERIES = (
    Shade("#0072b2", "#5ab0ee"),  # blue
    Shade("#d55e00", "#ff8f4a"),  # vermillion
    Shade("#009e73", "#35cfa3"),  # bluish green
    Shade("#cc79a7", "#eba3cb"),  # reddish purple
    Shade("#e69f00", "#ffc24d"),  # orange
    Shade("#56b4e9", "#a5dcff"),  # sky blue
    Shade("#3b3f46", "#cfd4da"),  # black, softened
)
ROLES = {
    "paper": Shade("#ffffff", "#15181d"),
    "sheet": Shade("#f6f7f9", "#1d2127"),
    "ink": Shade("#1b1e23", "#e9ecef"),
    "muted": Shade("#5b626c", "#a2aab5"),
    "grid": Shade("#e3e6ea", "#2c323a"),
    "edge": Shade("#d0d5db", "#3a414b"),
    "accent": Shade("#0067a3", "#6cb8f0"),
    "good": Shade("#00694d", "#4fd6b0"),
    "fair": Shade("#8a5a00", "#f5bd4f"),
    "bad": Shade("#a83c00", "#ff9d66"),
}
GRADIENT = "cividis"  # perceptually even, and the same to every kind of colour vision
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def ink(role: str) -> str:
    """The colour of a role in files, which are on white paper.

    >>> ink("paper")
    '#ffffff'
    """
    return ROLES[role].light


def series_colour(number: int) -> str:
    """The colour of a series in files; after the last one the first comes again."""
    return SERIES[number % len(SERIES)].light


def variables() -> dict[str, Shade]:
    """CSS variable -> colour, of all."""
    return {f"--{name}": shade for name, shade in ROLES.items()} | {
        f"--series-{number}": shade for number, shade in enumerate(SERIES)
    }


def style_rule() -> str:
    """The CSS rule that gives every variable its value; ``color-scheme`` of the page chooses the paper."""
    values = "".join(f"{name}:light-dark({shade.light},{shade.dark});" for name, shade in variables().items())
    return f":root{{{values}}}"


def as_variable(colour: str) -> str:
    """The CSS variable for a light colour of the palette; other colours stay.

    >>> as_variable("#0072B2"), as_variable("#123456")
    ('var(--series-0)', '#123456')
    """
    return _VARIABLES.get(colour.lower(), colour)


_VARIABLES = {shade.light: f"var({name})" for name, shade in variables().items()}


# How series of a panel are told apart: by colour, and by marker or dash, so that no colour is needed.

_DASHED = (0, (4, 2))
_OUTLINES: tuple[Any, ...] = ("solid", (0, (7, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_AGAIN: tuple[Any, ...] = ("solid", (0, (7, 1.5, 1.5, 1.5)), (0, (1.2, 1.2)))  # the colours were used up


@dataclass(frozen=True)
class Look:
    """Colour, marker and dashes of a series; `outline` are the dashes where there is no marker."""

    colour: str
    marker: str
    dashes: Any
    outline: Any


def looks(series: Sequence[Series]) -> list[Look]:
    """One look per series; those without a shade get the numbers that are not taken, in order."""
    taken = {one.shade for one in series}
    free = (number for number in count() if number not in taken)
    return [_look(next(free) if one.shade is None else one.shade, one.dashed) for one in series]


def _look(number: int, dashed: bool) -> Look:
    again = number // len(SERIES) % len(_AGAIN)
    return Look(
        series_colour(number),
        MARKERS[(number + again) % len(MARKERS)],
        _DASHED if dashed else _AGAIN[again],
        _DASHED if dashed else _OUTLINES[number % len(_OUTLINES)],
    )


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


def dress(
    axes: Any,
    which: str,
    axis: Axis,
    log: bool,
    also: Sequence[float] = (),
    *,
    grid: bool = True,
    whole: bool = False,
) -> None:
    """Give the axis "x" or "y" its scale, ends, ticks and label.

    Args:
        axes: of matplotlib, with the data drawn.
        which: "x" or "y".
        axis: what is wanted.
        log: whether it is logarithmic, see `is_log`.
        also: places that should be in view, unless the ends of the axis are given.
        grid: whether faint lines cross the panel at its ticks.
        whole: whether ticks stand at whole numbers only, as counts do.
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
        _few_ticks(drawn, log, whole)
    label = wrapped(axis.label, 56 if which == "x" else 40, 2)
    getattr(axes, f"set_{which}label")(label)
    axes.grid(grid and not axis.names, axis=which)


def are_whole(values: Iterable[float | None]) -> bool:
    """Whether numbers are counts or numbers of things, so that nothing lies between two neighbours.

    >>> are_whole([3.0, None, 5.0]), are_whole([0.0, 1.0]), are_whole([0.5, 2.0]), are_whole([])
    (True, False, False, False)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return max(map(abs, known), default=0) > 1 and all(value == int(value) for value in known)


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
    if axis.low is not None and axis.high is None and not log:  # the margin was that of the data, not of the axis
        high += 0.06 * max(0.0, high - low - span)
    if low < high:
        getattr(axes, f"set_{which}lim")(low, high)


def _few_ticks(drawn: Any, log: bool, whole: bool) -> None:
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(drawn.get_view_interval())
    if not log:
        least = 1 if whole else 3
        drawn.set_major_locator(MaxNLocator(_TICKS, integer=whole, min_n_ticks=least, steps=[1, 2, 2.5, 5, 10]))
    elif high / low < 10:
        drawn.set_major_locator(AutoLocator())
    else:
        subdivisions = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
        drawn.set_major_locator(LogLocator(subs=subdivisions, numticks=_TICKS + 1))
    drawn.set_minor_locator(NullLocator())
    span = low if log else high - low
    drawn.set_major_formatter(FuncFormatter(lambda value, place: tick_text(value, span)))


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
    dress(axes, measure, panel.y, log, crossed(panel, "horizontal"), whole=are_whole(values))
    if panel.x.names:
        getattr(axes, f"set_{names}lim")(-0.6, len(panel.x.names) - 0.4)
    if flat:
        axes.invert_yaxis()
    return handles


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
            x, y, color=look.colour, linestyle=look.dashes, marker=look.marker, markevery=(every // 2, every)
        )
        handles.append(line)
    _finish(axes, panel, log_x, log_y)
    return handles


def draw_points(axes: Any, panel: Panel) -> list[Any]:
    """Draw the series as points with bars of error; few points have their labels beside them."""
    log_x, log_y = _scales(panel)
    handles = _dots(axes, panel, log_x, log_y)
    _finish(axes, panel, log_x, log_y)
    return handles


_LABELLED = 24  # points of a panel at most whose labels are written; the page shows others on hover
POINTS = "points-"  # beginning of the SVG id of labelled points, with the number of their series


def _dots(axes: Any, panel: Panel, log_x: bool, log_y: bool, *, upon: bool = False) -> list[Any]:
    """Draw points and labels; those `upon` colours have a white edge, to be seen on all of them."""
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    edge = {"path_effects": [withStroke(linewidth=2.5, foreground="#fffffe")], "fontsize": 9, "color": "#000000"}
    handles = []
    few = sum(len(series.labels) for series in panel.series) <= _LABELLED
    for number, (series, look) in enumerate(zip(panel.series, looks(panel.series), strict=True)):
        x, y = shown(series.x, log_x), shown(series.y, log_y)
        many = len(x) > 60
        (dots,) = axes.plot(
            x,
            y,
            color=look.colour,
            linestyle="none",
            marker=look.marker,
            markersize=2.6 if many else 7 if upon else 5,
            markeredgewidth=1 if upon and not many else 0,
            markeredgecolor="#fffffe",
            alpha=0.55 if many else 0.95,
        )
        error_bars(axes, series, look.colour, log_x, log_y)
        if series.labels:
            dots.set_gid(f"{POINTS}{number}")
        for label, *place in zip(series.labels if few else (), x, y, strict=False):
            if all(map(math.isfinite, place)):
                note = axes.annotate(
                    wrapped(label, 24, 1),
                    place,
                    (4, 3),
                    textcoords="offset points",
                    annotation_clip=True,
                    **(edge if upon else {"fontsize": 7.5, "color": ink("muted")}),
                )
                note.set_in_layout(False)
        large = Line2D([], [], color=look.colour, linestyle="none", marker=look.marker)
        handles.append(large if many else dots)  # small points would not be seen in the legend
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
    places = [] if panel.kind == "histogram" else [x for series in panel.series for x in series.x]
    values = [
        y for series in panel.series[: 1 if panel.kind == "histogram" else None] for y in series.y
    ]  # counts first
    dress(axes, "x", panel.x, log_x, crossed(panel, "vertical"), whole=are_whole(places))
    dress(axes, "y", panel.y, log_y, crossed(panel, "horizontal"), whole=are_whole(values))


_WRITTEN = 64  # cells at most that also show their value as text
_VECTOR = 600  # cells at most that are drawn one by one; more become a picture inside the figure
_STEPS = 48


def draw_heat(axes: Any, panel: Panel) -> list[Any]:
    """Draw the grid and its bar of colours."""
    import matplotlib
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    flat = [value for row in panel.grid for value in row]
    colour = panel.colour or Axis("")
    log = is_log(colour, flat)
    log_x, log_y = (
        is_log(axis, places) and min(places) > 0 for axis, places in ((panel.x, panel.columns), (panel.y, panel.rows))
    )
    values = np.ma.masked_invalid(np.array([shown(row, log) for row in panel.grid], dtype=float).reshape(
        len(panel.rows), len(panel.columns)
    ))  # fmt: skip
    if values.count():
        low, high = _ends(colour, float(values.min()), float(values.max()), log)
        mesh = axes.pcolormesh(
            edges_between(panel.columns, log_x),
            edges_between(panel.rows, log_y),
            values,
            cmap=matplotlib.colormaps[GRADIENT].resampled(_STEPS),
            norm=LogNorm(low, high) if log else Normalize(low, high),
            edgecolor="face",
            linewidth=0.3,
            rasterized=values.size > _VECTOR,
        )
        _colour_bar(axes, mesh, colour, log)
        if values.size <= _WRITTEN:
            _write_values(axes, panel, mesh, values)
    dress(axes, "x", panel.x, log_x, grid=False)
    dress(axes, "y", panel.y, log_y, grid=False)
    if panel.y.names:
        axes.invert_yaxis()  # names are read from above
    return _dots(axes, panel, log_x, log_y, upon=True)


def _ends(colour: Axis, low: float, high: float, log: bool) -> tuple[float, float]:
    """Ends of the scale of colours: what was asked for where it can be, and never the same twice."""
    low = colour.low if colour.low is not None and not (log and colour.low <= 0) else low
    high = colour.high if colour.high is not None and colour.high > low else high
    if low < high:
        return low, high
    return (low / 2, low * 2) if log else (low - 0.5, low + 0.5)


def _colour_bar(axes: Any, mesh: Any, colour: Axis, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=24)
    bar.solids.set(
        rasterized=False, edgecolor="face", linewidth=0.4
    )  # without edges, paper shines through between steps
    bar.outline.set_visible(False)
    bar.set_label(wrapped(colour.label, 40, 2))
    low, high = mesh.norm.vmin, mesh.norm.vmax
    if not log:
        bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: tick_text(value, high - low)))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _write_values(axes: Any, panel: Panel, mesh: Any, values: Any) -> None:
    """Write each value into its cell, dark on bright cells and the other way round."""
    for row, y in enumerate(panel.rows):
        for column, x in enumerate(panel.columns):
            value = values[row, column]
            if math.isfinite(float(value.filled(math.nan)) if hasattr(value, "filled") else float(value)):
                red, green, blue, _ = mesh.cmap(mesh.norm(value))
                bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                axes.text(
                    x,
                    y,
                    tick_text(float(f"{value:.2g}")),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="#000000" if bright else "#fffffe",  # colours that are not of the palette stay what they are
                )


WIDTH = 4.4  # inches of a panel
_HEIGHT = 2.95  # without its legend
_ROW = 0.18  # inches of a row of the legend
_DRAW = {"lines": draw_lines, "points": draw_points, "bars": draw_bars, "histogram": draw_histogram, "heat": draw_heat}


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


def draw(place: Any, panel: Panel) -> Any:
    """Draw a panel, its legend beneath it, and return the axes.

    Args:
        place: a Figure or SubFigure of matplotlib, empty.
        panel: what to draw.
    """
    axes = place.subplots()
    handles, names = _draw_panel(axes, panel)
    if handles:
        place.legend(handles, names, loc="outside lower center", ncols=_columns(names))
    return axes


def draw_on(axes: Any, panel: Panel) -> Any:
    """Draw a panel on axes of a caller, with the legend inside them, and return them."""
    handles, names = _draw_panel(axes, panel)
    if handles:
        axes.legend(handles, names)
    return axes


def draw_figure(figure: Figure, canvas: Any) -> list[Any]:
    """Draw the panels of a figure side by side, at most three in a row, and return their axes.

    Args:
        figure: what to draw; it has a panel.
        canvas: an empty Figure of matplotlib with a constrained layout; it gets the size that the panels need.
    """
    columns = min(len(figure.panels), _SIDE_BY_SIDE)
    rows = -(-len(figure.panels) // columns)
    heights = [max(map(height, figure.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
    canvas.set_size_inches(WIDTH * columns, sum(heights))
    places = canvas.subfigures(rows, columns, squeeze=False, height_ratios=heights)
    axes = [draw(place, panel) for panel, place in zip(figure.panels, places.flat, strict=False)]
    canvas.draw_without_rendering()
    return axes


_SIDE_BY_SIDE = 3  # panels


def _draw_panel(axes: Any, panel: Panel) -> tuple[list[Any], list[str]]:
    """Draw a panel without a legend; returns handles and names for one."""
    handles = _DRAW[panel.kind](axes, panel)
    rules = [_turned(rule) if lying(panel) else rule for rule in panel.rules]
    for rule in rules:
        _draw_rule(axes, rule)
    crossed = any(rule.direction == "vertical" for rule in rules)  # their names stand above the panel
    if panel.title or crossed:
        axes.set_title(wrapped(panel.title, 52, 2) or " ", pad=18 if panel.title and crossed else 8)
    named = [(handle, name) for handle, name in zip(handles, _legend_names(panel), strict=False) if name]
    return [handle for handle, _ in named], [name for _, name in named]


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
