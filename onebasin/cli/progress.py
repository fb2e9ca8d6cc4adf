"""Progress of long work on stderr: a bar with the time left on a terminal, a line every half minute in a log file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # importing it takes torch, which --help does without
    from onebasin.parallel import Progress

PATIENCE = 2.0  # seconds before a bar is worth the flicker
EVERY = 30.0  # seconds between two lines where stderr is no terminal


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show ``text`` and the time that passed on stderr once the block takes long."""
    with progress_bar(text):
        yield


@contextmanager
def progress_bar(text: str) -> Iterator[Progress]:
    """Show ``text``, how much is done and the time left on stderr once the block takes long.

    Yields:
        A function (done, in all, what is being done) that moves the bar. It starts again with each sweep, and so does
        the time that is left.
    """
    with _bar(text) if sys.stderr.isatty() else _lines(text) as show:
        yield show


@contextmanager
def _bar(text: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # A column of its own wraps, so that a long sentence does not push the bar off the line.
    columns = (
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(text, total=None)

    def show(done: int, total: int, doing: str) -> None:
        if done < bar.tasks[0].completed or total != bar.tasks[0].total:  # a stage begins
            bar.reset(task)
        bar.update(task, completed=done, total=total, description=f"{text}: {doing}")

    timer = threading.Timer(PATIENCE, bar.start)
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


@contextmanager
def _lines(text: str) -> Iterator[Progress]:
    from onebasin.parallel import TimeLeft

    state = TimeLeft(text)
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(EVERY):
            click.echo(state, err=True)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield state.show
    finally:
        ended.set()
        reporter.join()
