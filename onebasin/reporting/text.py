"""Texts and numbers as people read them, and tables for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

from onebasin.reporting.record import Cell, Column, Number, Table

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # XML forbids most of them


def readable(text: str) -> str:
    r"""A text without characters that no page may hold.

    >>> readable("a\x00b")
    'a\ufffdb'
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def one_line(text: str) -> str:
    r"""A readable text without line breaks.

    >>> one_line(" a\n b ")
    'a b'
    """
    return " ".join(readable(text).split())


class Names:
    """Words for addresses and files: lower case, hyphens, never twice.

    >>> names = Names()
    >>> names.fresh("Figure 3"), names.fresh("../figure 3"), names.fresh("§")
    ('figure-3', 'figure-3-2', 'part')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def fresh(self, text: str) -> str:
        """A word like `text` that was not given before."""
        word = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "part"
        name, number = word, 1
        while name in self._taken:
            number += 1
            name = f"{word}-{number}"
        self._taken.add(name)
        return name


MISSING = "–"


def figure_of(value: float, digits: int) -> str:
    """A number with `digits` digits after the point; with more, or a power of ten, where these would hide it.

    >>> figure_of(1234.5678, 2), figure_of(-0.00001, 3), figure_of(0.0, 3), figure_of(0.00042, 3), figure_of(2.5e9, 1)
    ('1,234.57', '−1.00e-05', '0.000', '0.00042', '2.50e+09')
    """
    size = abs(value)
    if size >= 1e7 or 0 < size < min(1e-4, 0.5 * 10.0**-digits):
        text = f"{size:.2e}"
    else:
        text = f"{size:.2g}" if 0 < size < 0.5 * 10.0**-digits else f"{size:,.{digits}f}"
    return f"−{text}" if value < 0 else text


def value_text(number: Number, column: Column) -> str:
    """The value of a number; a dash where there is none."""
    return (
        MISSING if number.value is None or not math.isfinite(number.value) else figure_of(number.value, column.digits)
    )


def error_text(number: Number, column: Column) -> str:
    """Its error as "± 0.012", or its interval as "[0.48, 0.52]"; "" where there is none.

    >>> error_text(Number(0.5, error=0.0123), Column("NLL")), error_text(Number(0.5, error=0.0004), Column("NLL"))
    ('± 0.012', '± 0.0004')
    """
    if number.value is None:
        return ""
    if number.low is not None and number.high is not None:
        return f"[{figure_of(number.low, column.digits)}, {figure_of(number.high, column.digits)}]"
    return "" if number.error is None else f"± {figure_of(number.error, column.digits)}"


def published_text(number: Number, column: Column) -> str:
    """What the paper reports, as "paper 0.98", never with more digits than it has; "" where it reports nothing.

    >>> published_text(Number(0.971, published=0.98), Column("Accuracy")), published_text(Number(1.0), Column("NLL"))
    ('paper 0.98', '')
    """
    if number.published is None or not math.isfinite(number.published):
        return ""
    known = max(0, -int(Decimal(repr(float(number.published))).as_tuple().exponent))
    return f"paper {figure_of(number.published, min(column.digits, known))}"


def best_rows(column: Column, cells: Sequence[Cell]) -> set[int]:
    """The rows that are best in a column, or no further from it than the errors of both; none where nothing is better.

    >>> best_rows(Column("loss", better="lower", digits=1), [Number(0.52), Number(0.49), Number(0.6), "-"])
    {0, 1}
    >>> best_rows(Column("loss", better="lower"), [Number(0.50, 0.03), Number(0.54, 0.04), Number(0.9, 0.1)])
    {0, 1}
    """
    values = {
        row: (round(cell.value, column.digits), _spread(cell))
        for row, cell in enumerate(cells)
        if isinstance(cell, Number) and cell.value is not None
    }
    if not column.better or len({value for value, _ in values.values()}) < 2:
        return set()
    best, error = (max if column.better == "higher" else min)(values.values(), key=lambda entry: entry[0])
    return {row for row, (value, spread) in values.items() if abs(value - best) <= math.hypot(spread, error)}


def _spread(number: Number) -> float:
    """The error of a number; half of its interval where it has one."""
    if number.low is not None and number.high is not None:
        return (number.high - number.low) / 2
    return number.error or 0.0


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(0.25), duration(7), duration(125), duration(7320)
    ('0.2 s', '7 s', '2 min 5 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def best_of(table: Table) -> list[set[int]]:
    """The best rows of each column; none where rows do not compete."""
    if not table.rivals:
        return [set() for _ in table.columns]
    return [best_rows(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one.

    >>> counted(1, "chain"), counted(2000, "chain")
    ('1 chain', '2,000 chains')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def text_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "lr", rule: bool = True, indent: str = ""
) -> str:
    """Lay out a table for a terminal; columns whose cells are all empty are left out.

    >>> print(text_table(("", "before", "after"), [("overlap", "1.5", "12")]))
             before  after
    ----------------------
    overlap     1.5     12

    Args:
        header: titles of the columns.
        rows: cells as text, as many in each row as there are titles.
        align: "l" or "r" for each column; the last letter holds for the columns that follow.
        rule: whether a line separates the header from the rows.
        indent: put before each line.
    """
    cells = [list(row) for row in rows]
    shown = [place for place in range(len(header)) if any(row[place] for row in cells)] if cells else range(len(header))
    lines = []
    for row in (header, *cells):
        padded = []
        for place in shown:
            width = max(len(line[place]) for line in (header, *cells))
            letter = align[min(place, len(align) - 1)]
            padded.append(row[place].rjust(width) if letter == "r" else row[place].ljust(width))
        lines.append(f"{indent}{'  '.join(padded)}".rstrip())
    if rule:
        lines.insert(1, indent + "-" * (max(map(len, lines)) - len(indent)))
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], *, rule: bool = True) -> str:
    """`text_table` of rows whose first is the header."""
    return text_table(rows[0], rows[1:], rule=rule)
