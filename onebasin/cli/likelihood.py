"""The options ``--likelihood`` and ``--noise`` of several verbs."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from onebasin.inference.density.likelihood import KINDS

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
        help="Of the targets. Default: categorical for whole numbers, which are classes, gaussian for others.",
    )
    return likelihood(noise(command))
