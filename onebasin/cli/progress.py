"""Progress of long work on stderr: a bar with the time left on a terminal, a line every half minute in a log file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    state = _Stage(text)
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


class _Stage:
    """How far work is, as a line of a log: ``aligning: sweep 2, 30 of 120, 14 s, about 42 s left``."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text, self._clock = text, clock
        self._began = clock()
        self._points: list[tuple[int, float]] = []  # (done, when) at the begin of the stage, at its first news, and now
        self._total, self._doing = 0, ""

    def show(self, done: int, total: int, doing: str) -> None:
        """Take the news."""
        points = self._points
        if total != self._total or (points and done < points[-1][0]):  # a stage begins
            points.clear()
        self._points = [*points[:2], (done, self._clock())]
        self._total, self._doing = total, doing

    def __str__(self) -> str:
        parts = [f"{self._text}: {self._doing}" if self._doing else self._text]
        if self._points:
            parts.append(f"{self._points[-1][0]:,} of {self._total:,}")
        parts.append(duration(self._clock() - self._began))
        left = self._left()
        return ", ".join([*parts, *([] if left is None else [f"about {duration(left)} left"])])

    def _left(self) -> float | None:
        """Seconds in proportion to those since the first news: what is loaded or compiled before it comes once."""
        if len(self._points) < 2:
            return None
        (first, began), (last, now) = self._points[-2:]
        return (now - began) / (last - first) * (self._total - last) if last > first else None


def duration(seconds: float) -> str:
    """Time as people say it.

    >>> duration(7.2), duration(600), duration(9000)
    ('7 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
