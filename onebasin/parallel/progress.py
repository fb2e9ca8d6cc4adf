"""Progress of long work: what `progress=` may be, the time that is left, and the line that `progress=True` shows."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from onebasin.errors import InputError
from onebasin.parallel.executor import Progress

PATIENCE = 2.0  # seconds before a line is worth it
_LIVE, _LOGGED = 0.2, 30.0  # seconds between two states of a line, and between two lines where none can be overwritten


def progress_of(progress: Progress | bool | None) -> Progress | None:
    """What is called with news: the function that was given, a line on stderr for True, nothing for False and None."""
    if progress is True:
        return _Line(sys.stderr)
    if progress is None or progress is False:
        return None
    if not callable(progress):
        raise InputError(
            f"expected progress=True, or a function of (done, total, text), found {progress!r}: give progress=True"
        )
    return progress


class _Line:
    """One line that is written over, with the time that is left; it goes when the work does.

    Where a line cannot be written over, as in a log file, there is a new one every half minute.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._state = stream, clock, TimeLeft(clock=clock)
        self._overwrites = stream.isatty() or "ipykernel" in sys.modules
        self._next = clock() + (PATIENCE if self._overwrites else _LOGGED)
        self._length = 0  # of what is on the line

    def __call__(self, done: int, total: int, doing: str) -> None:
        """Show the news, if the last ones have been there for a moment."""
        self._state.show(done, total, doing)
        if self._clock() < self._next:
            return
        text = str(self._state)
        if self._overwrites:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"\r{text.ljust(self._length)}")
            self._length = len(text)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
        self._next = self._clock() + (_LIVE if self._overwrites else _LOGGED)

    def __del__(self) -> None:
        """Empty the line; whoever reported has returned."""
        if self._length and not self._stream.closed:
            self._stream.write(f"\r{' ' * self._length}\r")
            self._stream.flush()


class TimeLeft:
    """How far work is, as a line of a log: ``aligning: sweep 2, 30 of 120, 14 s, about 42 s left``."""

    def __init__(self, text: str = "", clock: Callable[[], float] = time.monotonic) -> None:
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
        parts = [": ".join(part for part in (self._text, self._doing) if part)]
        if self._points:
            parts.append(f"{self._points[-1][0]:,} of {self._total:,}")
        parts.append(duration(self._clock() - self._began))
        left = self._left()
        return ", ".join([*filter(None, parts), *([] if left is None else [f"about {duration(left)} left"])])

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
