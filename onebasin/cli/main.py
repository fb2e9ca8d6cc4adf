"""The command group, and the one place where an exception becomes a sentence and an exit code.

Exit codes: 0 done; 1 a bug of ours; 2 wrong usage; others belong to one class of ``OnebasinError`` each.
"""

import codecs
import io
import os
import sys
import traceback
import warnings
from collections import UserDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from onebasin.cli.options import debug
from onebasin.errors import DiskError, OnebasinError, OnebasinWarning

_BUG, _INTERRUPTED, _PIPE_CLOSED = 1, 130, 141


_VERBS = (
    "align",
    "calibrate",
    "check",
    "compact",
    "compare",
    "demo",
    "diagnose",
    "discover",
    "evaluate",
    "import",
    "merge",
    "prune",
    "report",
    "reproduce",
    "sample",
)


class _Verbs(UserDict[str, click.Command]):
    """Commands by name, imported when they are asked for: `onebasin report` needs no torch."""

    def __missing__(self, name: str) -> click.Command:
        if name not in _VERBS:
            raise KeyError(name)
        module = f"{name}_" if iskeyword(name) else name
        self.data[name] = getattr(import_module(f"onebasin.cli.{module}"), module)
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in _VERBS

    def __iter__(self) -> Iterator[str]:
        return iter(_VERBS)

    def __len__(self) -> int:
        return len(_VERBS)


@click.group(commands=_Verbs(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="onebasin", message="%(prog)s %(version)s")
@debug
def group() -> None:
    """Find the symmetries of neural networks, and read populations of networks as one posterior."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; ``None`` reads the process's own.

    Returns:
        The exit code. Errors have been printed to stderr, in one sentence when they are the user's to solve.
    """
    settings = {"debug": False}
    try:
        with _warnings_as_lines():
            code = group.main(
                args=None if arguments is None else list(arguments),
                prog_name="onebasin",
                standalone_mode=False,
                obj=settings,
            )
        sys.stdout.flush()
    except Exception as error:
        if settings["debug"]:
            traceback.print_exc()
        return _report(error)
    return code if isinstance(code, int) else 0


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print warnings of our own to stderr, each sentence once, without the place in our code that it comes from."""
    printed: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", OnebasinWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, OnebasinWarning):
                show_other(message, category, *place, **more)
            elif str(message) not in printed:
                printed.add(str(message))
                click.echo(f"warning: {_printable(str(message))}", err=True)

        warnings.showwarning = show
        yield


def entry() -> None:
    """Run the process's own arguments and leave with the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # names of files may be any bytes
        universal = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if universal else "backslashreplace")
    code = main()
    try:
        sys.stdout.flush()
    except OSError:  # reported already; the interpreter would try again on its way out and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _printable(text: str) -> str:
    """A text that cannot steer the terminal: names in a file may hold anything."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _report(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, click.Abort):
        click.echo("stopped", err=True)
        return _INTERRUPTED
    if isinstance(error, BrokenPipeError):  # `onebasin ... | head` has read enough
        return _PIPE_CLOSED
    if isinstance(error, OSError):  # a full disk behind stdout, a file that vanished: the machine's, not ours
        click.echo(f"error: {error}", err=True)
        return DiskError.exit_code
    if isinstance(error, OnebasinError):
        click.echo(f"error: {_printable(' '.join(str(error).split()))}", err=True)  # one sentence, one line
        return error.exit_code
    click.echo(
        f"bug: {type(error).__name__}: {error}\n"
        "This is a fault of onebasin, not yours: please report it with the output of the same command and --debug.",
        err=True,
    )
    return _BUG
