"""The options ``--likelihood``, ``--noise`` and ``--loss`` of several verbs."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from onebasin.functional import KINDS

_Command = TypeVar("_Command", bound=Callable[..., Any])


def likelihood_options(command: _Command) -> _Command:
    """Add ``--likelihood`` and ``--noise``, which say how targets scatter."""
    noise = click.option(
        "--noise",
        metavar="X",
        help="Standard deviation of gaussian targets, or learned, for a model that gives means and log deviations.",
    )
    likelihood = click.option(
        "--likelihood",
        type=click.Choice(KINDS),
        help="Of the targets. Default: categorical for whole-number types, which are classes, gaussian for floats; "
        "floats that may be class labels are asked about.",
    )
    return likelihood(noise(command))


def loss_option(command: _Command) -> _Command:
    """Add ``--loss``, which says what networks are judged by on data."""
    return click.option(
        "--loss",
        type=click.Choice(["cross-entropy", "mse"]),
        help="On the data. Default: cross-entropy for targets of whole-number types, which are classes, mse for "
        "floats; floats that may be class labels are asked about.",
    )(command)
