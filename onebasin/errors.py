"""Errors and warnings of the library, and the check of option names.

There is one root class, and one subclass per question the user must answer. Every message says what was expected, what
was found, where, and what to do. The command line turns an error into its message and its `exit_code`; codes 1 and 2
belong to Python and to the option parser.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import ClassVar


def first_line(error: BaseException, most: int = 200) -> str:
    r"""The first line of another library's error, as a part of our sentence.

    >>> first_line(ValueError("no such thing\nat line 3")), first_line(KeyError())
    ('no such thing', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


class OnebasinError(Exception):
    """Anything that onebasin refuses to do."""

    exit_code: ClassVar[int] = 3


class SpecError(OnebasinError):
    """Do these networks fit together? A tensor is missing, extra, not finite, or of another shape or dtype."""

    exit_code = 4


class StorageError(OnebasinError):
    """Is the file whole? It is absent, truncated, corrupt, half written or holds no network."""

    exit_code = 5


class UnsafeFileError(OnebasinError):
    """Do you trust this file? It is a pickle that wants to run code, and it was not run."""

    exit_code = 6


class DiskError(OnebasinError):
    """Where else can this be written? The disk is full or refuses to be written."""

    exit_code = 7


class TraceError(OnebasinError):
    """Which example input runs through the model? The model could not be traced."""

    exit_code = 8


class SymmetryError(OnebasinError):
    """Is this the symmetry of this network? An element or a symmetry does not fit."""

    exit_code = 9


class InputError(OnebasinError):
    """What did you mean? An example input or an option cannot be used."""

    exit_code = 10


class ModelError(OnebasinError):
    """Which model do you mean? The file, the factory in it, or what the factory returned is not usable."""

    exit_code = 11


class ClusterError(OnebasinError):
    """Where can this run? Workers die again and again, or a cluster cannot be reached."""

    exit_code = 12


class OnebasinWarning(UserWarning):
    """Anything that onebasin does although the result may not be what was meant."""


class SlowWarning(OnebasinWarning):
    """Why does it take so long? Torch cannot run several of these networks at once, so they run one by one."""


class StatisticsWarning(OnebasinWarning):
    """Where do running statistics come from? Networks compute with statistics that are not their own."""


class LikelihoodWarning(OnebasinWarning):
    """Is this a posterior? Draws are made with a loss in the place of a likelihood."""


def check_options(options: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Raise `InputError` when an option has an unknown name: a misspelt one would be ignored in silence.

    >>> check_options({"loss": "mse"}, ["loss", "batch"], "barrier")
    >>> check_options({"los": "mse"}, ["loss", "batch"], "barrier")
    Traceback (most recent call last):
    ...
    onebasin.errors.InputError: barrier has no option 'los': did you mean 'loss'? It knows batch, loss

    Args:
        options: the keyword arguments as given.
        known: the names that are read.
        where: how the message names the function.
    """
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out."
            raise InputError(f"{where} has no option {name!r}: {hint} It knows {', '.join(sorted(known))}")
