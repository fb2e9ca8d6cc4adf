"""From ``--data`` to tensors: one .npz or .safetensors file with inputs and targets."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data import digits
from onebasin.errors import InputError, StorageError, UnsafeFileError
from onebasin.population.tensor_file import map_tensors, read_header
from onebasin.predict import Inputs, examples_in

INPUTS, TARGETS = ("inputs", "x", "X"), ("targets", "y", "Y")
INPUT_GRAMMAR = ".npz or .safetensors with inputs (or x, X; inputs.NAME for each of several)"
GRAMMAR = f"{INPUT_GRAMMAR} and targets (or y, Y)"
_SHOWN = 8  # names worth reading in one sentence


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs as a model takes them, and targets (examples, ...) where the verb asked for them."""

    inputs: Inputs
    targets: Tensor | None

    @property
    def pair(self) -> tuple[Inputs, Tensor]:
        """Inputs and targets; only for who asked for targets."""
        assert self.targets is not None
        return self.inputs, self.targets


def read(path: Path, *, limit: int | None = None, targets: bool = True) -> Examples:
    """Read examples.

    Args:
        path: the file.
        limit: only the first so many examples.
        targets: whether targets are needed; others are not read.

    Raises:
        StorageError: the file is absent, damaged or something else.
        UnsafeFileError: an array is a pickle; it was not loaded.
        InputError: names or sizes are not those of examples.
    """
    stored = _stored(path)
    wanted = _inputs_in(stored, path)
    goal = _first(TARGETS, stored, path) if targets else None
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


def read_pair(text: str, limit: int | None = None) -> tuple[Inputs, Tensor]:
    """Inputs and targets of a file, or of the digits under that word."""
    if text == "digits":
        inputs, targets = digits()
        return inputs[:limit], targets[:limit]
    return read(Path(text), limit=limit).pair


def _numbers(targets: Tensor) -> Tensor:
    """Class numbers as int64, whatever short type they were stored in."""
    return targets if targets.is_floating_point() else targets.long()


def _inputs_in(stored: Iterable[str], path: Path) -> dict[str, str]:
    """Keyword -> stored name, with "" for a single positional input."""
    named = {name.removeprefix("inputs."): name for name in stored if name.startswith("inputs.")}
    return named or {"": _first(INPUTS, stored, path)}


def _first(names: tuple[str, ...], stored: Iterable[str], path: Path) -> str:
    for name in names:
        if name in stored:
            return name
    found = list(stored)
    listed = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise InputError(
        f"{path} should hold {names[0]} (or {', '.join(names[1:])}), found {listed or 'nothing'}: rename it"
    )


def _stored(path: Path) -> list[str]:
    """The names in the file."""
    if not path.is_file():
        raise StorageError(f"there is no file {path}: check the path of the data")
    if path.suffix == ".safetensors":
        return list(read_header(path).entries)
    if path.suffix != ".npz":
        raise InputError(f"data are read from {GRAMMAR}; found {path}: save them as one of these")
    with _archive(path) as archive:
        return list(archive.files)


def _tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return map_tensors(read_header(path), names)
    with _archive(path) as archive:
        return {name: _tensor(archive, name, path) for name in names}


@contextmanager
def _archive(path: Path) -> Iterator[Any]:
    """An open .npz file; numpy would leave a damaged one open if it opened it itself."""
    import numpy as np

    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except Exception as error:  # a damaged archive can fail in any way
            raise StorageError(f"expected an .npz file, but {path} is damaged or none: save it again") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise StorageError(f"expected an .npz file, found a single array in {path}: save it with np.savez")
        yield archive


def _tensor(archive: Any, name: str, path: Path) -> Tensor:
    try:
        array = archive[name]
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise InputError(f"{name} in {path} holds {array.dtype}, expected numbers: convert it first") from error
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise UnsafeFileError(
                f"{name} in {path} holds Python objects, which only a pickle can load; it was not loaded: save numbers"
            ) from error
        raise StorageError(f"{name} in {path} cannot be read ({error}): save the file again") from error
    except Exception as error:  # a cut archive, a wrong checksum
        raise StorageError(f"{name} in {path} cannot be read ({error}): save the file again") from error
