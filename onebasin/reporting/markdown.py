"""Tables and verdicts of a record as Markdown, with the command that made each above it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from onebasin.reporting.record import Cell, Column, Number, Record, Section, Table, tally
from onebasin.reporting.text import MISSING, best_of, error_text, one_line, published_text, value_text

_SPECIAL = re.compile(r"([\\*_\[\]<>|#~$])")


def markdown(record: Record) -> str:
    """A record without its figures, for a page of documentation."""
    return "\n\n".join(_blocks(record)) + "\n"


def _blocks(record: Record) -> Iterator[str]:
    yield f"## {_text(record.title)}"
    if record.command:
        yield f"Made by {_code(record.command)}."
    if record.summary:
        yield "\n".join(f"- {_text(sentence)}" for sentence in record.summary)
    claims = list(record.claims)
    if claims:
        yield f"### Verdicts: {tally(claims)}"
        rows = [(c.text, f"**{c.verdict}**", c.found, c.published, c.caveat) for c in claims]
        heads = ("claim", "verdict", "found", "published", "caveat")
        yield _grid(heads, [(_text(row[0]), row[1], *map(_text, row[2:])) for row in rows])
    for section in record.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"### {_text(section.title)}"
    if section.text:
        yield _text(section.text[0])
    for item in section.items:
        if isinstance(item, Table):
            yield from _table(item, section.command)


def _table(table: Table, command: str) -> Iterator[str]:
    yield f"**{_text(table.title)}**" + (f" Made by {_code(command)}." if command else "")
    best = best_of(table)
    rows = [
        [_cell(cell, table.columns[place], number in best[place]) for place, cell in enumerate(row)]
        for number, row in enumerate(table.rows)
    ]
    if table.columns:
        numeric = [any(isinstance(row[place], Number) for row in table.rows) for place in range(len(table.columns))]
        yield _grid([_head(column) for column in table.columns], rows, numeric)
    notes = [f"{_text(part).rstrip('.')}." for part in (table.errors, table.note) if part]
    if notes:
        yield " ".join(notes)


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    rule = ["---:" if place < len(numeric) and numeric[place] else "---" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def _head(column: Column) -> str:
    arrow = {"higher": " ↑", "lower": " ↓", "": ""}[column.better]
    return _text(column.name) + (f" ({_text(column.unit)})" if column.unit else "") + arrow


def _cell(cell: Cell, column: Column, is_best: bool) -> str:
    if not isinstance(cell, Number):
        return _text(cell) if cell else MISSING
    value = value_text(cell, column)
    value = f"**{value}**" if is_best else value
    remarks = [part for part in (published_text(cell, column), _text(cell.note)) if part]
    text = " ".join(part for part in (value, error_text(cell, column)) if part)
    return text + (f" ({'; '.join(remarks)})" if remarks else "")


def _text(text: str) -> str:
    r"""A text in one line whose characters mean themselves; what stands between backticks stays code.

    >>> _text("a|b <i> `c_d` e_f")
    'a\\|b \\<i\\> `c_d` e\\_f'
    """
    parts = one_line(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner
        return _SPECIAL.sub(r"\\\1", "".join(parts))
    return "".join(_code(part) if place % 2 else _SPECIAL.sub(r"\\\1", part) for place, part in enumerate(parts))


def _code(text: str) -> str:
    """A text as code in one line; a bar would end a cell of a table even there."""
    plain = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""
