"""What several verbs share: ``--debug``, where work runs, and what shows progress."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from rich.console import Console

from onebasin.errors import InputError

if TYPE_CHECKING:  # importing it takes torch, which --help does without
    from onebasin.parallel import Progress

_PATIENCE = 2.0  # seconds before progress is worth the flicker

_Command = TypeVar("_Command", bound=Callable[..., Any])


def debug(command: _Command) -> _Command:
    """Add ``--debug``, which lets the stack trace through; it may stand before or behind the verb."""

    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and isinstance(context.obj, dict):
            context.obj["debug"] = True

    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show the stack trace of an error."
    )(command)


def seed_option(command: _Command) -> _Command:
    """Add ``--seed``."""
    return click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        show_default=True,
        help="Seed of all random numbers.",
    )(command)


PLACES = ("workers", "executor")


def places(command: _Command) -> _Command:
    """Add ``--workers`` and ``--executor``: where work on a population runs, as the dict ``places``."""

    @functools.wraps(command)
    def gathered(*arguments: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in PLACES}
        return command(
            *arguments, places={name: value for name, value in given.items() if value is not None}, **options
        )

    for option in (
        click.option(
            "--executor",
            metavar="WHERE",
            help="Work on Ray: local starts it on this machine, an ADDRESS joins a cluster that runs.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Processes; results do not depend on their number. Default: 1, on a cluster all processors.",
        ),
    ):
        gathered = option(gathered)
    return cast("_Command", gathered)


def check_absent(path: Path, force: bool, choose: str = "--output") -> None:
    """Refuse to replace a file without ``--force``; before the work, not after it.

    Raises:
        InputError: the file exists, and there is no ``--force``.
    """
    if path.exists() and not force:
        raise InputError(f"{path} exists: choose another {choose}, or give --force to replace it")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show ``text`` with a spinner on stderr once the block takes long, and only on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    status = console.status(text)
    with _late(status.start, status.stop):
        yield


@contextmanager
def progress_bar(text: str) -> Iterator[Progress]:
    """Show ``text`` with a bar on stderr once the block takes long, and only on a terminal.

    Yields:
        A function (members done, members, what is being done) that moves the bar. It starts again with each sweep, and
        so does the time that is left.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, members, doing: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # A column of its own wraps, so that a long sentence does not push the bar off the line.
    columns = (
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task(text, total=None)

    def show(done: int, members: int, doing: str) -> None:
        if done < bar.tasks[0].completed:
            bar.reset(task)
        bar.update(task, completed=done, total=members, description=f"{text}: {doing}")

    with _late(bar.start, bar.stop):
        yield show


@contextmanager
def _late(start: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(_PATIENCE, start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        stop()
