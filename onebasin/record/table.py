"""Tables: numbers with their errors, beside what others published."""

from __future__ import annotations

from dataclasses import dataclass

from onebasin.errors import InputError

BETTER = ("higher", "lower", "")
DIGITS = 15  # a float has no more


@dataclass(frozen=True)
class Number:
    """One measured number.

    Attributes:
        value: None where nothing can be measured; then `note` says why.
        error: its standard error, None where there is one run only. What it was taken over stands in `Table.errors`.
        published: what the paper reports in this place.
        note: a remark that is shown with the number.
    """

    value: float | None
    error: float | None = None
    published: float | None = None
    note: str = ""


Cell = Number | str | None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: its head, short.
        help: what it means: a definition, shown on hover and in the glossary.
        better: "higher", "lower", or "" where neither is.
        digits: digits after the point.
        unit: of all its numbers, as "%", "s", "nats".
    """

    name: str
    help: str = ""
    better: str = ""
    digits: int = 3
    unit: str = ""

    def __post_init__(self) -> None:
        if self.better not in BETTER:
            raise InputError(f"a column is better when one of {BETTER}, found {self.better!r}: give one of these")
        if not 0 <= self.digits <= DIGITS:
            raise InputError(f"a column shows 0 to {DIGITS} digits after the point, found {self.digits}: give another")


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the first column names the rows.

    Attributes:
        name: a word for addresses and files, lower case with hyphens; unique in its record.
        title: what the table tells, as a sentence or question.
        columns: the heads.
        rows: each as long as `columns`.
        errors: what the errors of its numbers are, as "± one standard error over 5 seeds".
        note: what a reader must know beside it.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    errors: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        wrong = [number for number, row in enumerate(self.rows) if len(row) != len(self.columns)]
        if wrong:
            raise InputError(
                f"each row of table {self.name} should have {len(self.columns)} cells, row {wrong[0]} has "
                f"{len(self.rows[wrong[0]])}: give one cell per column"
            )
