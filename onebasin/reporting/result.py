"""Results that show themselves: text, HTML, a plot, a data frame and a file, all out of one record.

A class of results derives from `Result` and says what it holds in `record()`, as tables and figures; everything else
follows from that. Nothing here needs torch.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup, escape

from onebasin.errors import InputError
from onebasin.reporting.drawing import draw_figure, draw_on, house_style
from onebasin.reporting.record import (
    Axis,
    Cell,
    Figure,
    Number,
    Panel,
    Record,
    Section,
    Series,
    Table,
    encode,
    write_record,
)
from onebasin.reporting.text import MISSING, error_text, one_line, readable, text_table, value_text

_Item = TypeVar("_Item", Table, Figure)
_Any = TypeVar("_Any")
SHOWN = 30  # rows of a table at most that are printed; `to_dataframe` and a page have all


class Result(ABC):
    """Base class of results; a subclass defines `record`.

    A dataclass that derives from it is made with `repr=False`, so that a console shows the table, too.
    """

    @abstractmethod
    def record(self) -> Record:
        """Tables and figures of this result, and its numbers under `values`, as plain data."""

    def __str__(self) -> str:
        return text_of(self.record())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """The sentences and tables of the record, for a notebook."""
        return html_of(self.record())

    def plot(self, ax: Any = None, *, figure: str | None = None) -> Any:
        """Draw a figure of this result in the style of the reports.

        Args:
            ax: matplotlib axes to draw on, for a figure of several panels a sequence of them; None makes new ones.
            figure: name of the figure; None takes the first one. A wrong name is refused with the list of all.

        Returns:
            The matplotlib axes; of several panels, a list of them.
        """
        if isinstance(ax, str):
            raise InputError(f"expected matplotlib axes as ax, found {ax!r}: name a figure as figure={ax!r}")
        chosen = _chosen(self, Figure, figure)
        if ax is None:
            import matplotlib.pyplot as plt

            with house_style():
                canvas = plt.figure(layout="constrained", facecolor="white")
                drawn = draw_figure(chosen, canvas)
            for axes_of_panel in drawn:  # which lie in parts of the figure: `plot().figure.savefig(...)` saves it whole
                axes_of_panel.figure.savefig = canvas.savefig
        else:
            axes = (
                [ax]
                if hasattr(ax, "plot")
                else list(ax.flat if hasattr(ax, "flat") else ax if isinstance(ax, Iterable) else [])
            )
            if len(axes) != len(chosen.panels):
                raise InputError(
                    f"the figure {chosen.name!r} has {len(chosen.panels)} panels, found {len(axes)} axes: give "
                    f"plt.subplots(1, {len(chosen.panels)})[1], or no ax"
                )
            with house_style():
                drawn = [draw_on(place, panel) for place, panel in zip(axes, chosen.panels, strict=True)]
        return drawn[0] if len(drawn) == 1 else drawn

    def to_dataframe(self, table: str | None = None) -> Any:
        """A table of this result as a `pandas.DataFrame`; errors and intervals are columns of their own.

        Args:
            table: its name; None takes the first one. A wrong name is refused with the list of all.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise InputError(
                "to_dataframe() needs pandas, which is not installed: pip install 'onebasin[pandas]'"
            ) from error
        return pd.DataFrame(_columns(_chosen(self, Table, table)))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record of this result as JSON, for `onebasin report` and `onebasin.reporting.read_record`.

        Args:
            path: the file, as "evaluation.json"; an existing one is replaced, whole or not at all.

        Returns:
            The path.
        """
        write_record(self.record(), path)
        return Path(path)


def result_record(
    name: str,
    title: str,
    text: str | Sequence[str],
    items: Iterable[Table | Figure],
    *,
    values: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    terms: dict[str, str] | None = None,
) -> Record:
    """The record of one result: one section, summarised by its first sentence.

    Args:
        name: a word, as "evaluation".
        title: what was measured on what, as "Evaluation of 40 networks on 297 examples".
        text: paragraphs; the first is the answer.
        items: tables and figures; the first of each is what `to_dataframe` and `plot` take.
        values: the numbers for programs, as JSON knows them.
        settings: what was asked for: draws, seed, confidence level.
        terms: word -> definition, for the glossary of a page.
    """
    paragraphs = (text,) if isinstance(text, str) else tuple(text)
    return Record(
        name=name,
        title=title,
        summary=paragraphs[:1],
        sections=(Section(name, title, paragraphs, tuple(items)),),
        command="",
        settings=settings or {},
        versions=_versions(),
        terms=terms or {},
        values=encode(values or {}),
    )


def cells_of(*cells: Cell | float) -> tuple[Cell, ...]:
    """Cells of a table, out of texts and numbers.

    >>> cells_of("loss", 0.5, None)
    ('loss', Number(value=0.5, error=None, published=None, note='', low=None, high=None), None)
    """
    return tuple(cell if isinstance(cell, Number | str | None) else Number(cell) for cell in cells)


def size_in(place: int) -> Callable[[tuple[Cell, ...]], float]:
    """The size of a row for `leading`: its number in the column `place`, 0 where there is none."""

    def size(cells: tuple[Cell, ...]) -> float:
        cell = cells[place]
        return (cell.value or 0.0) if isinstance(cell, Number) else 0.0

    return size


def largest_first(items: Iterable[_Any], size: Callable[[_Any], float], most: int = SHOWN) -> list[_Any]:
    """All items: as they come, or, where there are more than `most`, the largest first.

    >>> largest_first([1, 3, 2], float), largest_first([1, 3, 2], float, most=2)
    ([1, 3, 2], [3, 2, 1])
    """
    given = list(items)
    return given if len(given) <= most else sorted(given, key=size, reverse=True)


def histogram(name: str, values: Iterable[float], edges: Sequence[float], **more: Any) -> Series:
    """A series that counts values between edges; values outside are not counted, as in `numpy.histogram`."""
    import numpy as np

    counts, _ = np.histogram(np.asarray(list(values), dtype=float), bins=np.asarray(edges, dtype=float))
    return Series(name, tuple(map(float, edges)), tuple(map(float, counts)), **more)


def finite(value: float | None) -> float | None:
    """A number that JSON holds: None for what is infinite, not a number, or not there."""
    return None if value is None or not math.isfinite(value) else float(value)


def as_number(value: float | None, low: float | None = None, high: float | None = None) -> Number:
    """A number with its interval; without one where an end is missing or infinite.

    >>> as_number(0.5, 0.4, float("nan")), as_number(float("inf"))
    (Number(value=0.5, error=None, published=None, note='', low=None, high=None), \
Number(value=None, error=None, published=None, note='infinite', low=None, high=None))
    """
    note = "infinite" if value is not None and math.isinf(value) else ""
    ends = finite(low), finite(high)
    return Number(
        finite(value), note=note, low=None if None in ends else ends[0], high=None if None in ends else ends[1]
    )


def one_panel(name: str, title: str, caption: str, kind: str, x: Axis | str, y: Axis | str, **more: Any) -> Figure:
    """A figure of one panel; an axis may be given by its label alone."""
    axes = [Axis(axis) if isinstance(axis, str) else axis for axis in (x, y)]
    return Figure(name, title, caption, (Panel(kind, "", axes[0], axes[1], **more),))


def text_of(record: Record) -> str:
    """A record for a terminal: its title, what it says, and its tables; figures are left out."""
    blocks = [one_line(record.title)]
    for section in record.sections:
        lines = [one_line(section.title)] if len(record.sections) > 1 else []
        blocks += [*lines, *(one_line(text).replace("`", "") for text in section.text)]
        tables = [item for item in section.items if isinstance(item, Table)]
        blocks += [table_text(table, titled=len(tables) > 1) for table in tables]
    return "\n\n".join(block for block in blocks if block)


def table_text(table: Table, *, titled: bool = True) -> str:
    """A table for a terminal, with its title above and its note below."""
    numeric = [any(isinstance(row[place], Number) for row in table.rows) for place in range(len(table.columns))]
    header = [f"{column.name} ({column.unit})" if column.unit else column.name for column in table.columns]
    rows = [
        [_cell_text(cell, column) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows[:SHOWN]
    ]
    body = text_table(header, rows, align="".join("r" if number else "l" for number in numeric) or "l")
    notes = [one_line(part).replace("`", "") for part in _notes(table)]
    title = [one_line(table.title).replace("`", "")] if titled else []
    return "\n".join([*title, body, *notes])


def _notes(table: Table) -> list[str]:
    """What stands below a table: what its errors are, its note, and how many rows were not printed."""
    left = len(table.rows) - SHOWN
    more = f'... and {left:,} more rows: to_dataframe("{table.name}") has all' if left > 0 else ""
    return [part for part in (table.errors, table.note, more) if part]


def _cell_text(cell: Any, column: Any) -> str:
    if isinstance(cell, Number):
        parts = (value_text(cell, column), error_text(cell, column), f"({cell.note})" if cell.note else "")
        return one_line(" ".join(part for part in parts if part))
    return one_line(cell) if cell else MISSING


def html_of(record: Record) -> str:
    """A record for a notebook: sentences and tables, every value escaped, no script and no style sheet."""
    parts = [Markup("<p><strong>{}</strong></p>").format(one_line(record.title))]
    for section in record.sections:
        parts += [Markup("<p>{}</p>").format(readable(text)) for text in section.text]
        parts += [_html_table(item) for item in section.items if isinstance(item, Table)]
    return f"<div class='onebasin'>{Markup('').join(parts)}</div>"


def _html_table(table: Table) -> Markup:
    head = Markup("").join(
        Markup("<th title='{}'>{}</th>").format(readable(column.help), readable(column.name))
        for column in table.columns
    )
    rows = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup("<{0}>{1}</{0}>").format(Markup("th" if not place else "td"), _cell_text(cell, column))
                for place, (cell, column) in enumerate(zip(row, table.columns, strict=True))
            )
        )
        for row in table.rows[:SHOWN]
    )
    notes = Markup("<br>").join(escape(readable(part)) for part in _notes(table))
    caption = Markup("<caption style='text-align:left'>{}</caption>").format(readable(table.title))
    body = Markup("<table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(caption, head, rows)
    return body + (Markup("<p><small>{}</small></p>").format(notes) if notes else Markup(""))


def _chosen(result: Result, kind: type[_Item], name: str | None) -> _Item:
    items = [item for item in result.record().items if isinstance(item, kind)]
    what = kind.__name__.lower()
    if not items:
        raise InputError(f"{type(result).__name__} has no {what}: print it")
    for item in items:
        if name is None or item.name == name:
            return item
    names = ", ".join(repr(item.name) for item in items)
    raise InputError(f"expected a {what} of {type(result).__name__}, one of {names}, found {name!r}")


def _columns(table: Table) -> dict[str, list[Any]]:
    """Columns by name: numbers as floats, and what belongs to them as "NAME error", "NAME low", "NAME high"."""
    columns: dict[str, list[Any]] = {}
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        columns[column.name] = [cell.value if isinstance(cell, Number) else cell for cell in cells]
        for part in ("error", "low", "high"):
            extra = [getattr(cell, part) if isinstance(cell, Number) else None for cell in cells]
            if any(value is not None for value in extra):
                columns[f"{column.name} {part}"] = extra
    return columns


def _versions() -> dict[str, str]:
    found = {}
    for name in ("onebasin", "torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
