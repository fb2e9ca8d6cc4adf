"""Arrays in one .npz file: never unpickled, and with their checksums compared, as every zip archive has some."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Pair, Parts, as_inputs, as_targets
from onebasin.errors import InputError, StorageError, UnsafeFileError

INPUTS, TARGETS = ("inputs", "x", "X"), ("targets", "y", "Y")
LARGEST = 8 << 30  # bytes of all arrays, unpacked
_FREE, _RATIO = 256 << 20, 100  # unpacked bytes that any file may have, and so many times its own size
_SHOWN = 8  # names worth reading in one sentence


def read_file(path: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """Examples: inputs and targets, alone or beside inputs_test and targets_test; or x and y, or X and Y.

    Raises:
        InputError: other names, or arrays of something else than numbers.
        StorageError: the file is absent or damaged.
        UnsafeFileError: an array is a pickle; it was not loaded.
    """
    if not path.is_file():
        raise StorageError(f"there is no file {path}: check the path of the data")
    verify(path, checksums)
    stored = stored_names(path)
    train = _pair(path, stored, ("", "_train"))
    test = _pair(path, stored, ("_test",)) if any(f"{name}_test" in stored for name in INPUTS) else None
    return Parts(path.stem, train, test)


def _pair(path: Path, stored: list[str], endings: tuple[str, ...]) -> Pair:
    chosen = [
        first_of([f"{name}{ending}" for ending in endings for name in names], stored, path)
        for names in (INPUTS, TARGETS)
    ]
    arrays = read_arrays(path, chosen.__contains__)
    for name in chosen:
        if not arrays[name].dim():
            raise InputError(f"expected one row per example in {name} of {path}, found a single number: save arrays")
    return as_inputs(arrays[chosen[0]]), as_targets(arrays[chosen[1]])


def first_of(names: Iterable[str], stored: Iterable[str], path: Path) -> str:
    """The first of the names that is stored.

    Raises:
        InputError: none is; says what was found.
    """
    wanted, present = list(names), list(stored)
    for name in wanted:
        if name in present:
            return name
    listed = ", ".join(present[:_SHOWN]) + (", ..." if len(present) > _SHOWN else "")
    raise InputError(
        f"{path} should hold {wanted[0]} (or {', '.join(wanted[1:])}), found {listed or 'nothing'}: rename it"
    )


def stored_names(path: Path) -> list[str]:
    """The names in the file."""
    with _archive(path) as archive:
        return list(archive.files)


def read_arrays(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Arrays by name, as they are stored, in native byte order.

    Args:
        path: the file.
        wanted: which names to read.
    """
    with _archive(path) as archive:
        return {name: _tensor(archive, name, path) for name in archive.files if wanted(name)}


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
        _check_size(archive, path)
        yield archive


def _check_size(archive: Any, path: Path) -> None:
    """Refuse what numpy never writes, and arrays beyond what the file can mean, before any is unpacked."""
    entries = archive.zip.infolist()
    size, most = sum(entry.file_size for entry in entries), min(LARGEST, _FREE + _RATIO * path.stat().st_size)
    if size > most:
        raise StorageError(f"expected at most {most:,} bytes of arrays in {path}, found {size:,}: use np.savez")
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        raise StorageError(f"expected an .npz file as numpy writes it, found another packing in {path}: save it again")


def _tensor(archive: Any, name: str, path: Path) -> Tensor:
    try:
        array = archive[name]
        if array.dtype.kind == "c":
            raise TypeError("torch would keep the real part only")
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
