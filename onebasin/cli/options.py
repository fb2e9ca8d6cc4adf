"""Options that several verbs share: the architecture, data, where work runs, and outputs that are not replaced."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from onebasin.cli.words import INPUT_GRAMMAR, LIKELIHOODS, LOSSES, SIZE_GRAMMAR
from onebasin.errors import DiskError, InputError

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


@dataclass(frozen=True)
class Architecture:
    """What the options say about the architecture."""

    reference: str | None
    texts: tuple[str, ...]
    vocabulary: int | None
    file: Path | None
    seed: int
    dtype: str | None = None

    @property
    def given(self) -> bool:
        """Whether they say anything."""
        return self.reference is not None or self.file is not None


def example_options(command: _Command) -> _Command:
    """Add ``--input`` and ``--vocabulary``."""
    vocabulary = click.option(
        "--vocabulary",
        type=click.IntRange(min=1),
        metavar="N",
        help="Draw ids below this. Default: the size of the model's smallest embedding.",
    )
    texts = click.option(
        "--input",
        "texts",
        multiple=True,
        metavar="INPUT",
        help=f"Example input: {SIZE_GRAMMAR}. Repeat it for several. Default: example_input() beside the factory.",
    )
    return texts(vocabulary(command))


DTYPES = ("float32", "float64", "bfloat16", "float16")


def dtype_option(command: _Command) -> _Command:
    """Add ``--dtype``."""
    return click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Convert floating-point weights to this when they are read. Default: as stored, the same in all files.",
    )(command)


def architecture_options(command: _Command) -> Callable[..., Any]:
    """Add the options that say what the networks are; the command receives them as one ``architecture``."""

    @functools.wraps(command)
    def gathered(
        *,
        model: str | None,
        texts: tuple[str, ...],
        vocabulary: int | None,
        file: Path | None,
        seed: int,
        dtype: str | None,
        **options: Any,
    ) -> Any:
        return command(architecture=Architecture(model, texts, vocabulary, file, seed, dtype), **options)

    options = [
        click.option(
            "--model",
            metavar="MODEL",
            help="The networks' model: path/to/file.py:factory, package.module:factory or a folder of transformers, "
            "as for discover.",
        ),
        example_options,
        click.option(
            "--symmetry",
            "file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Their symmetry, as written by discover --output: instead of --model, or beside it to save time.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            show_default=True,
            help="Seed of whatever is drawn.",
        ),
        dtype_option,
    ]
    decorated: Callable[..., Any] = gathered
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


@dataclass(frozen=True)
class Sources:
    """What the options say about where data come from, and how they are scaled."""

    directory: Path | None = None
    download: bool = False
    standardise: bool = False


def data_options(command: _Command) -> Callable[..., Any]:
    """Add ``--data-dir``, ``--download`` and ``--standardise``; the command receives them as one ``sources``."""

    @functools.wraps(command)
    def gathered(*, data_dir: Path | None, download: bool, standardise: bool, **options: Any) -> Any:
        return command(sources=Sources(data_dir, download, standardise), **options)

    folder = click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Where mnist/, fashion-mnist/, cifar10/, cifar100/ and uci/ lie. Default: what ONEBASIN_DATA names.",
    )
    download = click.option("--download", is_flag=True, help="Fetch openml/NAME where it is not in the cache yet.")
    standardise = click.option(
        "--standardise",
        is_flag=True,
        help="Give every column of words and functions mean 0 and deviation 1, by the numbers of their training part.",
    )
    return folder(download(standardise(gathered)))


def statistics_option(command: _Command) -> _Command:
    """Add ``--statistics``, the inputs on which draws of a posterior get running statistics of their own."""
    option = click.option(
        "--statistics",
        metavar="DATA",
        help="Inputs, such as those of training, on which the running statistics of norms are measured for each "
        f"network from a posterior: {INPUT_GRAMMAR}.",
    )
    return option(command)


def likelihood_options(command: _Command) -> _Command:
    """Add ``--likelihood``, ``--noise`` and ``--ignore-index``, which say how targets scatter and which count."""
    noise = click.option(
        "--noise",
        metavar="X",
        help="Standard deviation of gaussian targets, or learned, for a model that gives means and log deviations.",
    )
    likelihood = click.option(
        "--likelihood",
        type=click.Choice(LIKELIHOODS),
        help="Of the targets. Default: categorical for whole-number types, which are classes, gaussian for floats; "
        "floats that may be class labels are asked about. The last five are losses and no densities: train with them.",
    )
    ignored = click.option(
        "--ignore-index",
        "ignore_index",
        type=int,
        metavar="N",
        help="A class number of pixels that do not count, such as 255. Values of pixels that do not count are NaN.",
    )
    return likelihood(noise(ignored(command)))


def loss_option(command: _Command) -> _Command:
    """Add ``--loss``, which says what networks are judged by on data."""
    return click.option(
        "--loss",
        type=click.Choice(LOSSES),
        help="On the data. Default: cross-entropy for targets of whole-number types, which are classes, mse for "
        "floats; floats that may be class labels are asked about.",
    )(command)


def force_option(command: _Command) -> _Command:
    """Add ``--force`` of verbs that write files."""
    return click.option("--force", is_flag=True, help="Replace files that exist.")(command)


def check_output(path: Path, force: bool, choose: str = "--output", suffix: str = "") -> None:
    """Refuse a file that exists without ``--force``, and a place that cannot be written; before the work, not after it.

    Raises:
        InputError: the file exists and there is no ``--force``, or its ending is another one.
        DiskError: its folder cannot be made or written.
    """
    if suffix and path.suffix != suffix:
        raise InputError(f"expected the name of a {suffix} file, found {choose} {path}: end it so")
    if path.exists() and not force:
        raise InputError(f"{path} exists: choose another {choose}, or give --force to replace it")
    check_writable(path, choose)


def check_writable(path: Path, choose: str = "--output") -> None:
    """Make the folder that a file or folder will lie in, and refuse one that cannot be written."""
    from onebasin.storage import make_folder

    make_folder(path.parent)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DiskError(f"{path.parent} cannot be written by this user: choose another {choose}")


def remove_before(folder: Path, is_ours: bool, what: str, needed: Sequence[Path] = ()) -> None:
    """Remove a folder that ``--force`` replaces, where it is what this verb writes.

    Raises:
        InputError: the folder holds something else, or what is still needed; it is left as it is.
    """
    from onebasin.storage import is_taken, real_path

    if not is_taken(folder):
        return
    for path in needed:
        if path.exists() and real_path(path).is_relative_to(real_path(folder)):
            raise InputError(f"--force would remove {folder}, where {path} is read from: choose another --output")
    if not is_ours:
        raise InputError(
            f"expected {what} in {folder} to replace, found something else, which --force does not remove: choose "
            "another --output"
        )
    shutil.rmtree(folder)


def examples_option(default: int) -> Callable[[_Command], _Command]:
    """Return what adds ``--examples``: how many of many examples are enough."""
    return click.option(
        "--examples",
        type=click.IntRange(min=0),
        default=default,
        metavar="N",
        show_default=True,
        help="Of more examples than this so many are chosen at random; 0 takes all.",
    )
