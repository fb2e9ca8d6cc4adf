"""From what a user writes for data to tensors: a word, a folder, a file or a function.

A word alone is the training part, which never overlaps with ``NAME:test``; ``NAME:all`` is everything, and ``NAME#3``
is division number 3. A file or function of the user that has no division is taken whole; to divide it at random the
division must be numbered, as in ``data.npz#0:train`` and ``data.npz#0:test``, so that no model is trained on
the whole and tested on a part of it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import Tensor

from onebasin.cli.load import load_function
from onebasin.data import INPUTS, TARGETS, Dataset, Parts, Reading, first_of, read_arrays, read_parts, stored_names
from onebasin.errors import InputError, StorageError
from onebasin.functional import KINDS, Inputs, examples_in
from onebasin.storage import map_tensors, read_header

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


_INPUT_FILES = ".npz or .safetensors with inputs (or x, X; inputs.NAME for each of several)"
INPUT_GRAMMAR = f"a word such as digits, mnist:test or uci/boston (see sample), or {_INPUT_FILES}"
GRAMMAR = f"{INPUT_GRAMMAR} and targets (or y, Y)"
_FILES = (".npz", ".safetensors")
_TEXT = re.compile(r"(?P<name>.+?)(?:#(?P<split>\d+))?(?::(?P<part>train|test|all))?", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs as a model takes them, and targets (examples, ...) where the verb asked for them."""

    inputs: Inputs
    targets: Tensor | None

    @property
    def pair(self) -> tuple[Inputs, Tensor]:
        """Inputs and targets, where targets were asked for."""
        assert self.targets is not None
        return self.inputs, self.targets


@dataclass(frozen=True)
class Sources:
    """What the options say about where data come from, and how they are scaled."""

    directory: Path | None = None
    download: bool = False
    standardise: bool = False


def data_options(command: _Command) -> Callable[..., Any]:
    """Add ``--data-dir``, ``--download`` and ``--standardise``; the command receives them as one ``sources``."""

    @wraps(command)
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


def read(
    source: str | Path, *, limit: int | None = None, targets: bool = True, sources: Sources | None = None
) -> Examples:
    """Read examples.

    Args:
        source: what the user wrote.
        limit: only the first so many examples.
        targets: whether targets are needed; those of files are not read otherwise.
        sources: where words are looked up.

    Raises:
        StorageError: the file is absent, damaged or something else.
        UnsafeFileError: an array is a pickle; it was not loaded.
        InputError: names or sizes are not those of examples.
        ModelError: a function cannot be imported, or fails.
    """
    sources = sources or Sources()
    path = Path(source)
    if path.suffix in _FILES or path.is_file():
        if sources.standardise:
            raise InputError(
                f"--standardise needs a training part, and {source} is one part: write {source}:train or {source}:test "
                "for a file with both, or scale it before"
            )
        return _read_file(path, limit=limit, targets=targets)
    inputs, goals = _read_word(str(source), sources)
    return Examples(inputs[:limit], goals[:limit] if targets else None)


def read_pair(source: str, limit: int | None = None, sources: Sources | None = None) -> tuple[Inputs, Tensor]:
    """Inputs and targets."""
    return read(source, limit=limit, sources=sources).pair


def _read_word(text: str, sources: Sources) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one part of a data set."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"expected {GRAMMAR}, found {text!r}: write digits, for example")
    name, part, number = match["name"], match["part"], int(match["split"] or 0)
    if _is_function(text, name):
        name, part = (name, part) if ":" in name else (text, None)
        parts, is_users = read_parts(load_function(name), Reading(split=number)), True
    else:
        source = Path(name) if Path(name).suffix in _FILES else name
        is_users = Path(name).exists()
        parts = read_parts(source, Reading(sources.directory, number, sources.download))
    undivided = parts.train is not None and parts.test is None
    if undivided and is_users and match["split"] is None and part in ("train", "test"):
        raise InputError(
            f"{name} has no training and test part of its own: write {name} for everything, or {name}#0:train and "
            f"{name}#0:test for three quarters and a quarter of it, divided at random by the number"
        )
    whole = part == "all" or (is_users and part is None and match["split"] is None)
    chosen = _whole(parts) if undivided and whole else parts.dataset(number)
    if sources.standardise:
        chosen = chosen.standardised()
    pair = chosen.test if part == "test" else chosen.train
    if part == "all" and not undivided:
        pair = torch.cat([chosen.train[0], chosen.test[0]]), torch.cat([chosen.train[1], chosen.test[1]])
    if not len(pair[0]):
        raise InputError(f"{name} has no {part or 'training'} part here: write {name}:{_other(part)}")
    return pair


def _is_function(text: str, name: str) -> bool:
    """Whether a text is file.py:function or package.module:function, where the function may be called train or test."""
    if ":" in name:
        return True
    return ":" in text and (name.endswith(".py") or ("." in name and "/" not in name and not Path(name).exists()))


def _whole(parts: Parts) -> Dataset:
    """Everything that an undivided source holds, as training part."""
    assert parts.train is not None
    return Dataset(parts.name, parts.train, parts.train, parts.checked_classes())


def _other(part: str | None) -> str:
    return "train" if part == "test" else "test"


def _read_file(path: Path, *, limit: int | None, targets: bool) -> Examples:
    stored = _stored(path)
    wanted = _inputs_in(stored, path)
    goal = first_of(TARGETS, stored, path) if targets else None
    tensors = _tensors(path, [*wanted.values(), *([goal] if goal else [])])
    sizes = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InputError(
            f"{path} should hold one row per example in each array, found {shapes}: make them equally long"
        )
    tensors = {name: tensor[:limit] for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} in {path} holds NaN or infinity: leave these examples out")
    inputs: Inputs = {key: tensors[name] for key, name in wanted.items()}
    if "" in wanted:
        inputs = tensors[wanted[""]]
    examples_in(inputs)
    return Examples(inputs, _numbers(tensors[goal]) if goal else None)


def _numbers(targets: Tensor) -> Tensor:
    """Class numbers as int64, whatever short type they were stored in."""
    return targets if targets.is_floating_point() else targets.long()


def _inputs_in(stored: Iterable[str], path: Path) -> dict[str, str]:
    """Keyword -> stored name, with "" for a single positional input."""
    named = {name.removeprefix("inputs."): name for name in stored if name.startswith("inputs.")}
    return named or {"": first_of(INPUTS, stored, path)}


def _stored(path: Path) -> list[str]:
    """The names in the file."""
    if not path.is_file():
        raise StorageError(f"there is no file {path}: check the path of the data")
    if path.suffix == ".safetensors":
        return list(read_header(path).entries)
    if path.suffix != ".npz":
        raise InputError(f"data are read from {GRAMMAR}; found {path}: save them as one of these")
    return stored_names(path)


def _tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return map_tensors(read_header(path), names)
    return read_arrays(path, names.__contains__)
