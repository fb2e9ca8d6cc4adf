"""Figures as data: what is drawn, never how."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onebasin.errors import InputError

KINDS = ("lines", "points", "bars", "histogram", "heat")
SCALES = ("linear", "log")
DIRECTIONS = ("horizontal", "vertical", "diagonal")


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it measures, with its unit.
        scale: "linear" or "log".
        low, high: its ends, None to fit the data.
        names: of the places 0, 1, 2, ..., for bars and for grids of named rows.
    """

    label: str
    scale: str = "linear"
    low: float | None = None
    high: float | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise InputError(f"an axis is one of {SCALES}, found {self.scale!r}: give one of these")


@dataclass(frozen=True)
class Series:
    """One named set of points.

    Attributes:
        name: in the legend; "" for none.
        x: places. Of bars: numbers of names. Of a histogram: the edges of its bins, one more than `y`.
        y: values, heights or counts; None leaves a gap.
        low, high: ends of error bars or of the band, as long as `y`, or empty.
        dashed: whether its line is dashed, as published values and baselines are.
        shade: which colour of the palette, by number; None takes the next one. Series of the same thing in several
            panels should have the same.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    dashed: bool = False
    shade: int | None = None

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.x)):
            raise InputError(f"series {self.name!r} has a place that is NaN or infinite: leave it out")
        if len(self.x) not in (len(self.y), len(self.y) + 1):
            raise InputError(f"series {self.name!r} has {len(self.x)} places for {len(self.y)} values: give as many")
        if any(len(ends) not in (0, len(self.y)) for ends in (self.low, self.high)):
            raise InputError(f"series {self.name!r} should have one end of error per value, or none: give as many")


@dataclass(frozen=True)
class Rule:
    """A straight line across a panel: y = value ("horizontal"), x = value ("vertical"), or y = x ("diagonal")."""

    name: str
    value: float = 0.0
    direction: str = "horizontal"

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.direction not in DIRECTIONS:
            raise InputError(
                f"a rule has a finite value and one of the directions {DIRECTIONS}, found {self.value} and "
                f"{self.direction!r}: give others, or leave it out"
            )


@dataclass(frozen=True)
class Panel:
    """One coordinate system.

    Attributes:
        kind: "lines", "points", "bars", "histogram" or "heat".
        title: what tells it from the other panels of the figure; "" for a single one.
        x, y: axes.
        series: what is drawn. Of a heat map: none.
        rules: straight lines for comparison.
        grid: values of a heat map, a row for each place of `rows` (y) with a value for each place of `columns` (x).
        columns, rows: places of a heat map, ascending.
        colour: what the colour of a heat map means.
    """

    kind: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    rules: tuple[Rule, ...] = ()
    grid: tuple[tuple[float | None, ...], ...] = ()
    columns: tuple[float, ...] = ()
    rows: tuple[float, ...] = ()
    colour: Axis | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"a panel is one of {KINDS}, found {self.kind!r}: give one of these")
        if self.kind == "heat" and (
            len(self.grid) != len(self.rows) or any(len(row) != len(self.columns) for row in self.grid)
        ):
            raise InputError(
                f"a heat map should have {len(self.rows)} rows of {len(self.columns)} values, found {len(self.grid)} "
                "rows or others: give one value per place"
            )
        if not all(map(math.isfinite, (*self.columns, *self.rows))):
            raise InputError("a heat map has a place that is NaN or infinite: leave it out")
        bins = 1 if self.kind == "histogram" else 0
        for series in self.series:
            if len(series.x) != len(series.y) + bins:
                raise InputError(f"series {series.name!r} of a {self.kind} has {len(series.x)} places: see `Series.x`")


@dataclass(frozen=True)
class Figure:
    """Panels side by side.

    Attributes:
        name: a word for addresses and files, lower case with hyphens; unique in its record.
        title: the question that it answers.
        caption: the answer, with numbers, and how it was measured.
        panels: at least one.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
