"""Tables and verdicts of a record as Markdown, with the command that made each above it."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from onebasin.reporting.record import Cell, Column, Number, Record, Section, Table, tally

# ----------------------------------------------------------------------
# Words of a record made harmless: for HTML, for SVG, and for names of files.


_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # XML forbids most of them
_CODE = re.compile("`([^`]+)`")


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


def escape(text: str) -> str:
    """A text as HTML, in an element or in a quoted attribute.

    >>> escape('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return html.escape(readable(text), quote=True)


def prose(text: str) -> str:
    """A sentence as HTML; what stands between backticks is code.

    >>> prose("`a<b` holds")
    '<code>a&lt;b</code> holds'
    """
    return _CODE.sub(r"<code>\1</code>", escape(text))


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


# ----------------------------------------------------------------------
# Numbers as people write them: value, error, what was published.


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
    """Its error as "± 0.012"; "" where there is none.

    >>> error_text(Number(0.5, error=0.0123), Column("NLL")), error_text(Number(0.5, error=0.0004), Column("NLL"))
    ('± 0.012', '± 0.0004')
    """
    return "" if number.value is None or number.error is None else f"± {figure_of(number.error, column.digits)}"


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
        row: (round(cell.value, column.digits), cell.error or 0.0)
        for row, cell in enumerate(cells)
        if isinstance(cell, Number) and cell.value is not None
    }
    if not column.better or len({value for value, _ in values.values()}) < 2:
        return set()
    best, error = (max if column.better == "higher" else min)(values.values(), key=lambda entry: entry[0])
    return {row for row, (value, own) in values.items() if abs(value - best) <= math.hypot(own, error)}


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(0.25), duration(7), duration(125), duration(7320)
    ('0.2 s', '7 s', '2 min 5 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# ----------------------------------------------------------------------
# Tables and verdicts of a record as Markdown, with the command that made each above it.


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
    best = [best_rows(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]
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
    told = " ".join(part for part in (value, error_text(cell, column)) if part)
    return told + (f" ({'; '.join(remarks)})" if remarks else "")


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
