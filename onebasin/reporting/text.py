"""Tables of text for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, rule: bool = True) -> str:
    """Lay out rows: the first is the head, the first column is text, the others are numbers; empty ones are left out.

    >>> print(table([("", "before", "after"), ("overlap", "1.5", "12")]))
             before  after
    ----------------------
    overlap     1.5     12

    Args:
        rows: the cells; at least one row below the head.
        rule: whether a line stands below the head.
    """
    filled = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    rows = [[row[column] for column in filled] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    if rule:
        lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
