"""Arrays in an .npz or .npy file: never unpickled, and those of an .npz file with their checksums compared."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import InputError, StorageError, UnsafeFileError

LARGEST = 8 << 30  # bytes of all arrays, unpacked
_FREE, _RATIO = 256 << 20, 100  # unpacked bytes that any file may have, and so many times its own size


def stored_names(path: Path) -> list[str]:
    """The names in the file."""
    with _archive(path) as archive:
        return list(archive.files)


def read_arrays(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Arrays by name, as they are stored, in native byte order."""
    with _archive(path) as archive:
        return {name: _tensor(archive, name, path) for name in archive.files if wanted(name)}


def read_array(path: Path) -> Tensor:
    """The array of an .npy file, as it is stored, in native byte order."""
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise StorageError(f"there is no file {path}: check the path") from error
    except Exception as error:  # a damaged file can fail in any way
        if "allow_pickle" in str(error) and _is_npy(path):
            raise UnsafeFileError(
                f"{path} holds Python objects, which only a pickle can load; it was not loaded: save numbers"
            ) from error
        raise StorageError(f"expected an .npy file, but {path} is damaged or none: save it again") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise StorageError(f"expected a single array, found an archive of several in {path}: call the file .npz")
    return _tensor({"it": array}, "it", path)


def _is_npy(path: Path) -> bool:
    """Whether a file begins as .npy files do: numpy takes anything else for a pickle."""
    with path.open("rb") as file:
        return file.read(6) == b"\x93NUMPY"


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
