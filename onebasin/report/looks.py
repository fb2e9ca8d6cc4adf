"""How series of a panel are told apart: by colour, and by marker or dash, so that no colour is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from onebasin.record import Series
from onebasin.report.palette import MARKERS, SERIES, series_colour

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
    """One look per series; those without a shade get the numbers that nobody claimed, in order."""
    claimed = {one.shade for one in series}
    free = (number for number in count() if number not in claimed)
    return [_look(next(free) if one.shade is None else one.shade, one.dashed) for one in series]


def _look(number: int, dashed: bool) -> Look:
    again = number // len(SERIES) % len(_AGAIN)
    return Look(
        series_colour(number),
        MARKERS[(number + again) % len(MARKERS)],
        _DASHED if dashed else _AGAIN[again],
        _DASHED if dashed else _OUTLINES[number % len(_OUTLINES)],
    )
