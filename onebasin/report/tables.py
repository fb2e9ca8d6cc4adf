"""A table of a record as HTML: sortable, every number with its error and the published one."""

from __future__ import annotations

from onebasin.record import Cell, Column, Number, Table
from onebasin.report.cells import MISSING, best_rows, error_text, published_text, value_text
from onebasin.report.escape import escape, prose

_ARROWS = {"higher": "↑", "lower": "↓"}


def table_html(table: Table, name: str) -> str:
    """A table with its title, and what its errors are.

    Args:
        table: what to show.
        name: unique on the page.
    """
    numeric = [any(isinstance(row[place], Number) for row in table.rows) for place in range(len(table.columns))]
    best = [best_rows(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]
    heads = "".join(map(_head, table.columns, numeric))
    rows = "".join(
        "<tr>"
        + "".join(
            _cell(cell, table.columns[place], numeric[place], is_first=place == 0, is_best=number in best[place])
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    body = rows or f'<tr><td colspan="{max(len(table.columns), 1)}" class="empty">no rows</td></tr>'
    return (
        f'<figure class="table" id="{escape(name)}"><figcaption id="{escape(name)}-title">'
        f"<h3>{prose(table.title)}</h3></figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{escape(name)}-title">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{_notes(table, any(best))}</figure>"
    )


def _head(column: Column, numeric: bool) -> str:
    """A head that sorts when it is pressed, and tells what the column means."""
    arrow = (
        f'<span class="better" aria-hidden="true">{_ARROWS[column.better]}</span>'
        f'<span class="unseen">, {column.better} is better</span>'
        if column.better
        else ""
    )
    unit = f' <span class="unit">{escape(column.unit)}</span>' if column.unit else ""
    told = " ".join(part for part in (column.help, f"{column.better} is better." if column.better else "") if part)
    told = told[:1].upper() + told[1:]
    name = f"<abbr>{escape(column.name)}</abbr>" if column.help else escape(column.name)
    tip = f' title="{escape(told)}"' if told else ""
    kind = ' class="number"' if numeric else ""
    return f'<th scope="col"{kind}><button type="button" class="sort"{tip}>{name}{unit}{arrow}</button></th>'


def _cell(cell: Cell, column: Column, numeric: bool, *, is_first: bool, is_best: bool) -> str:
    tag = "th" if is_first else "td"
    scope = ' scope="row"' if is_first else ""
    if isinstance(cell, Number):
        sort = f' data-value="{cell.value!r}"' if cell.value is not None else ""
        inside = _number(cell, column, is_best)
    else:
        sort, inside = "", prose(cell) if cell else f'<span class="missing">{MISSING}</span>'
    kind = ' class="number"' if numeric else ""
    return f"<{tag}{scope}{kind}{sort}>{inside}</{tag}>"


def _number(number: Number, column: Column, is_best: bool) -> str:
    value = f'<span class="value">{value_text(number, column)}</span>'
    if is_best:
        value = f'<strong>{value}<span class="unseen"> (best)</span></strong>'
    error = f' <span class="error">{error_text(number, column)}</span>' if error_text(number, column) else ""
    published = published_text(number, column)
    return (
        value
        + error
        + (f'<span class="published">{published}</span>' if published else "")
        + (f'<span class="remark">{prose(number.note)}</span>' if number.note else "")
    )


def _notes(table: Table, has_best: bool) -> str:
    published = any(isinstance(cell, Number) and cell.published is not None for row in table.rows for cell in row)
    told = [
        prose(table.errors),
        "“paper”: the published number" if published else "",
        "bold: the best of its column, as far as errors can tell" if has_best else "",
    ]
    line = "; ".join(part.rstrip(".") for part in told if part)
    first = f"{line[:1].upper()}{line[1:]}." if line else ""
    text = " ".join(part for part in (first, prose(table.note)) if part)
    return f'<p class="note">{text}</p>' if text else ""
