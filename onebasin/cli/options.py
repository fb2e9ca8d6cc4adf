"""What several verbs share: the ``--debug`` option, the progress line, the seeded draw of weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import torch
from rich.console import Console

_PATIENCE = 2.0  # seconds before a progress line is worth the flicker

_Command = TypeVar("_Command", bound=Callable[..., Any])


def debug(command: _Command) -> _Command:
    """Add ``--debug``, which lets the stack trace through; it may stand before or behind the verb."""

    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and isinstance(context.obj, dict):
            context.obj["debug"] = True

    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show the stack trace of an error."
    )(command)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show ``text`` with a spinner on stderr once the block takes long, and only on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    status = console.status(text)
    timer = threading.Timer(_PATIENCE, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it afterwards.

    A model's constructor draws its weights from the global generator and takes no other: this is the only way to
    build the same network twice from somebody else's factory.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
