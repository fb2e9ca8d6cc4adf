"""From what a user writes for data to tensors: a word, a folder, a file or a function.

A word alone is the training part, which never overlaps with ``NAME:test``; ``NAME:all`` is everything, and ``NAME#3``
is division number 3. A file or function of the user that has no division is taken whole; to divide it at random the
division must be numbered, as in ``data.npz#0:train`` and ``data.npz#0:test``, so that no model is trained on
the whole and tested on a part of it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from onebasin.cli.load import load_function
from onebasin.cli.options import Sources
from onebasin.cli.words import DATA_GRAMMAR, LOSSES
from onebasin.data import INPUTS, TARGETS, Dataset, Parts, Reading, first_of, read_arrays, read_parts, stored_names
from onebasin.errors import InputError, StorageError
from onebasin.functional import (
    Inputs,
    answers,
    call_arguments,
    check_class_numbers,
    check_targets,
    examples_in,
    rows_of,
    score,
)
from onebasin.posterior import check_classes
from onebasin.state import State
from onebasin.storage import map_tensors, read_array, read_header

_FILES = (".npz", ".npy", ".safetensors")
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


def some(found: Examples, most: int, seed: int) -> tuple[Examples, str]:
    """The examples, or so many of them, chosen at random, in their order; and a sentence that says so, or nothing.

    Args:
        found: all of them.
        most: how many are taken; 0 for all.
        seed: of the choice.
    """
    count = examples_in(found.inputs)
    if not most or count <= most:
        return found, ""
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values
    arguments, named = rows_of(call_arguments(found.inputs), rows)
    targets = None if found.targets is None else found.targets[rows]
    sentence = f"{most:,} of {count:,} examples were taken, at random: --examples 0 takes all"
    return Examples(named or arguments, targets), sentence


def check_fit(model: nn.Module, state: State, inputs: Inputs, targets: Tensor | None = None, loss: str = "") -> None:
    """Run one network on the first two examples, and refuse data that do not fit it; before the work, not after it.

    Args:
        model: the function.
        state: one network.
        inputs: all inputs.
        targets: all targets, where there are any.
        loss: what networks are judged by, "cross-entropy" or "mse"; others are not looked at.

    Raises:
        InputError: the model cannot read the inputs, or targets do not fit its outputs.
    """
    outputs = answers(model, state, inputs)
    if targets is None:
        return
    check_targets(inputs, targets)
    if loss == "cross-entropy":
        check_classes(outputs[None])
    if loss in LOSSES:
        score(outputs, targets[: len(outputs)], loss)
    if loss == "cross-entropy":
        check_class_numbers(targets, outputs.shape[1])


def read_dataset(source: str, sources: Sources | None = None) -> Dataset:
    """Read training and test examples; what comes undivided is divided at random, three quarters to one.

    Args:
        source: what the user wrote: a word, a folder, an .npz file or a function, with `#3` for division number 3.
        sources: where words are looked up.

    Raises:
        InputError: the source is one part of a data set, or holds one part only.
        StorageError: the file is absent, damaged or something else.
        ModelError: a function cannot be imported, or fails.
    """
    sources = sources or Sources()
    word = _looked_up(source, sources)
    if word.part is not None:
        whole = source.removesuffix(f":{word.part}")
        raise InputError(f"expected training and test examples, found {source}, one part of them: write {whole}")
    dataset = word.parts.dataset(word.number)
    if not len(dataset.train[0]) or not len(dataset.test[0]):
        raise InputError(f"expected training and test examples in {source}, found one part only: add the other")
    return dataset.standardised() if sources.standardise else dataset


@dataclass(frozen=True)
class _Word:
    """What a text names: a source, the part of it, the number of the division (and whether it was given)."""

    name: str
    part: str | None
    number: int
    is_numbered: bool
    parts: Parts
    is_users: bool


def _looked_up(text: str, sources: Sources) -> _Word:
    """Read what a text names, not yet divided."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"expected {DATA_GRAMMAR}, found {text!r}: write digits, for example")
    name, part, number = match["name"], match["part"], int(match["split"] or 0)
    if _is_function(text, name):
        name, part = (name, part) if ":" in name else (text, None)
        parts, is_users = read_parts(load_function(name), Reading(split=number)), True
    else:
        source = Path(name) if Path(name).suffix in _FILES else name
        is_users = Path(name).exists()
        parts = read_parts(source, Reading(sources.directory, number, sources.download))
    return _Word(name, part, number, match["split"] is not None, parts, is_users)


def _read_word(text: str, sources: Sources) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one part of a data set."""
    word = _looked_up(text, sources)
    name, part, number, parts, is_users = word.name, word.part, word.number, word.parts, word.is_users
    undivided = parts.train is not None and parts.test is None
    if undivided and is_users and not word.is_numbered and part in ("train", "test"):
        raise InputError(
            f"{name} has no training and test part of its own: write {name} for everything, or {name}#0:train and "
            f"{name}#0:test for three quarters and a quarter of it, divided at random by the number"
        )
    whole = part == "all" or (is_users and part is None and not word.is_numbered)
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
    stored = _stored(path, targets)
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
        known = tensor.nan_to_num(nan=0.0, posinf=torch.inf) if name == goal and tensor.dim() >= 3 else tensor
        if tensor.is_floating_point() and not bool(torch.isfinite(known).all()):
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


def _stored(path: Path, targets: bool) -> list[str]:
    """The names in the file; of an .npy file also what the file of targets beside it gives."""
    if not path.is_file():
        raise StorageError(f"there is no file {path}: check the path of the data")
    if path.suffix == ".safetensors":
        return list(read_header(path).entries)
    if path.suffix == ".npy":
        beside = list(_npy_files(path))
        if targets and "targets" not in beside:
            raise InputError(
                f"expected targets beside the inputs in {path}, found none: call the files x.npy and y.npy (or "
                'inputs.npy and targets.npy), or write np.savez("data.npz", inputs=x, targets=y)'
            )
        return beside
    if path.suffix != ".npz":
        raise InputError(f"data are read from {DATA_GRAMMAR}; found {path}: save them as one of these")
    return stored_names(path)


def _npy_files(path: Path) -> dict[str, Path]:
    """The files of inputs and targets: y.npy belongs to x.npy, y_test.npy to x_test.npy, targets.npy to inputs.npy."""
    word, rest, ending = path.stem.partition("_")
    names = {"x": "y", "X": "yY", "inputs": ("targets",)}.get(word, ())
    found = [one for name in names if (one := path.with_name(f"{name}{rest}{ending}{path.suffix}")).is_file()]
    return {"inputs": path, "targets": found[0]} if found else {"inputs": path}


def _tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return map_tensors(read_header(path), names)
    if path.suffix == ".npy":
        every = _npy_files(path)
        return {name: read_array(every[name]) for name in names}
    return read_arrays(path, names.__contains__)
