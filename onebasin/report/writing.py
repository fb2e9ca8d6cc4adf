"""Write the page and the files of its figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onebasin.errors import DiskError, InputError
from onebasin.record import Figure, Record
from onebasin.record.store import write_whole
from onebasin.report.escape import Names
from onebasin.report.page import page
from onebasin.report.pictures import save_figure

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
        write_whole(goal / PAGE, page(wanted))
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
