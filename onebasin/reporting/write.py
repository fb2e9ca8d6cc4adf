"""Reports on disk: one HTML page that needs nothing else, and figures as files.

Everything is built from records; nothing is computed here, and torch is not needed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onebasin.errors import DiskError, InputError
from onebasin.reporting.drawing import draw_figure, house_style
from onebasin.reporting.page import page
from onebasin.reporting.record import Figure, Record
from onebasin.reporting.result import Result
from onebasin.reporting.text import Names
from onebasin.storage import write_text

FORMATS = ("svg", "pdf", "png")
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

    if not figure.panels:
        return []
    files = [folder / f"{name}.{ending}" for ending in FORMATS]
    with house_style():
        canvas = Canvas(layout="constrained", facecolor="white")
        draw_figure(figure, canvas)
        canvas.set_layout_engine("none")  # all files share one layout
        for file, ending in zip(files, FORMATS, strict=True):
            file.unlink(missing_ok=True)  # an existing link would be followed
            canvas.savefig(file, format=ending, dpi=200, metadata=_NO_DATES[ending])
    return files


PAGE, FIGURES = "report.html", "figures"


def report(
    folder: str | os.PathLike[str],
    *results: Result | Record | Mapping[str, Result | Record],
    title: str = "",
    figures: bool = True,
    open: bool = False,
) -> Path:
    """Show results on one page that needs nothing else, and keep each figure as SVG, PDF and PNG.

    Args:
        folder: of report.html and of figures/; it is made where it is missing.
        results: what functions of onebasin returned, or records; a section each, a whole study becomes a chapter. A
            dict gives them titles, as {"after refining": evaluation}.
        title: of the page; "" takes that of the single result, or says how many there are.
        figures: whether the figures are also written as files.
        open: whether the page is opened in the browser.

    Returns:
        The path of the page. It appears whole or not at all.

    Raises:
        InputError: there is no result, or something else was given.
        DiskError: the folder cannot be written.
    """
    if isinstance(folder, Result | Record):
        raise InputError('expected the folder of the page first, found a result: write report("page/", result, ...)')
    named = [
        pair
        for one in results
        for pair in ([("", one)] if isinstance(one, Result) or not isinstance(one, Mapping) else one.items())
    ]
    records = []
    for number, (name, result) in enumerate(named):
        if not isinstance(result, Result | Record):
            raise InputError(
                f"report() shows results of onebasin, found a {type(result).__name__} as result {number}: give what "
                "align, fit, evaluate, ... returned, or read_record(path) of what was saved"
            )
        record = result.record() if isinstance(result, Result) else result
        records.append(_titled(record, name) if name else record)
    page = write_report(chapters_of(records, title), folder, figures=figures)
    if open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return page


def _titled(record: Record, title: str) -> Record:
    """A record under another title; for a result it is also the title of its section and begins its summary."""
    if len(record.sections) != 1:
        return replace(record, title=title)
    (section,) = record.sections
    summary = tuple(f"{title}: {sentence}" for sentence in record.summary)
    return replace(record, title=title, summary=summary, sections=(replace(section, title=title),))


def chapters_of(records: Sequence[Record], title: str = "") -> list[Record]:
    """Chapters for records: results share the first, as a section each, and every study has its own.

    >>> from onebasin.reporting import result_record
    >>> results = [result_record(word, word, "It is.", ()) for word in ("match", "barrier")]
    >>> [chapter.title for chapter in chapters_of(results)]
    ['2 results']
    """
    results = [record for record in records if len(record.sections) == 1 and not any(record.claims)]
    studies = [record for record in records if not any(record is result for result in results)]
    if not results:
        return studies
    names, titles = Names(), Counter[str]()
    sections, summary = [], []
    for record in results:
        (section,) = record.sections
        titles[section.title] += 1
        if titles[section.title] > 1:  # as two posteriors are
            section = replace(section, title=f"{section.title} ({titles[section.title]})")
        begins = f"{section.title}: " if results[1:] else ""
        summary += [sentence if sentence.startswith(begins) else begins + sentence for sentence in record.summary]
        items = [replace(item, name=names.fresh(f"{record.name}-{item.name}")) for item in section.items]
        sections.append(
            replace(
                section,
                name=names.fresh(record.name),
                items=tuple(items),
                command=section.command or record.command,
                seconds=section.seconds or record.seconds,
            )
        )
    settings: dict[str, Any] = {}
    for record, section in zip(results, sections, strict=True):
        settings |= {
            f"{section.name}: {name}" if results[1:] else name: value for name, value in record.settings.items()
        }
    chapter = Record(
        name="results" if results[1:] else results[0].name,
        title=title or (f"{len(results)} results" if results[1:] else results[0].title),
        summary=tuple(dict.fromkeys(summary)),
        sections=tuple(sections),
        command="",
        settings=settings,
        versions={name: number for record in results for name, number in record.versions.items()},
        terms={word: text for record in results for word, text in record.terms.items()},
        seconds=sum(record.seconds for record in results),
    )
    return [chapter, *studies]


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
