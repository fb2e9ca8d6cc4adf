"""Reports on disk: one HTML page that needs nothing else, and figures as files.

Everything is built from records; nothing is computed here, and torch is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onebasin.errors import DiskError, InputError
from onebasin.reporting.drawing import WIDTH, draw, height, house_style
from onebasin.reporting.page import page
from onebasin.reporting.record import Figure, Record
from onebasin.reporting.text import Names
from onebasin.storage import write_text

FORMATS = ("svg", "pdf", "png")
_SIDE_BY_SIDE = 3  # panels
_NO_DATES: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure, its panels side by side.

    Args:
        figure: what to draw.
        folder: exists already.
        name: of the files, without their ending.

    Returns:
        The files, in the order of `FORMATS`.
    """
    from matplotlib.figure import Figure as Canvas

    columns = min(len(figure.panels), _SIDE_BY_SIDE)
    rows = -(-len(figure.panels) // columns) if columns else 0
    if not rows:
        return []
    files = [folder / f"{name}.{ending}" for ending in FORMATS]
    with house_style():
        heights = [max(map(height, figure.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
        canvas = Canvas(figsize=(WIDTH * columns, sum(heights)), layout="constrained", facecolor="white")
        places = canvas.subfigures(rows, columns, squeeze=False, height_ratios=heights)
        for panel, place in zip(figure.panels, places.flat, strict=False):
            draw(place, panel)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # all files share one layout
        for file, ending in zip(files, FORMATS, strict=True):
            file.unlink(missing_ok=True)  # an existing link would be followed
            canvas.savefig(file, format=ending, dpi=200, metadata=_NO_DATES[ending])
    return files


PAGE, FIGURES = "report.html", "figures"


def write_report(records: Record | Sequence[Record], folder: str | os.PathLike[str], *, figures: bool = True) -> Path:
    """Show records on one page that needs nothing else, and keep each figure as SVG, PDF and PNG.

    Args:
        records: one, or several for a chapter each.
        folder: of report.html and of figures/; it is made where it is missing.
        figures: whether the figures are also written as files.

    Returns:
        The path of the page. It appears whole or not at all.

    Raises:
        InputError: there is no record.
        DiskError: the folder cannot be written.
    """
    wanted = [records] if isinstance(records, Record) else list(records)
    if not wanted:
        raise InputError("a report shows at least one record, found none: give the folder of a finished run")
    goal = Path(folder)
    try:
        goal.mkdir(parents=True, exist_ok=True)
        if figures:
            _save_figures(wanted, goal / FIGURES)
        write_text(goal / PAGE, page(wanted))
    except OSError as error:
        raise DiskError(f"{goal} cannot be written ({error.strerror or error}): choose another folder") from error
    return goal / PAGE


def _save_figures(records: Sequence[Record], folder: Path) -> None:
    """Save the figures under their names; of several records, behind the name of theirs."""
    names = Names()
    for record in records:
        for item in record.items:
            if isinstance(item, Figure):
                if folder.is_symlink():
                    raise DiskError(f"{folder} is a link, which figures must not follow: remove it")
                folder.mkdir(exist_ok=True)
                save_figure(item, folder, names.fresh(f"{record.name}-{item.name}" if records[1:] else item.name))
