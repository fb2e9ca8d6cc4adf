"""IDX files, the format of MNIST and everything that replaces it.

Two zero bytes, a type, the number of axes, their big-endian lengths, then the values, big-endian, the last axis
fastest. Plain or gzipped.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Pair, Parts, as_inputs, as_targets
from onebasin.errors import InputError, StorageError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_TEST = re.compile(r"(^|[-_.])(t10k|test)([-_.]|$)")
_DEFLATE = 1032  # no stream of deflate grows by more
_LARGEST = 8 << 30  # bytes of one file's values
_PIECE = 16 << 20
_AXES = 8
_AGAIN = "fetch the file again"


def read_idx(path: Path, checksums: Mapping[str, str] | None = None) -> Tensor:
    """The values of one file, in native byte order and in the shape that its header gives.

    Args:
        path: the file; gzip is recognised by content.
        checksums: name -> digest; see `onebasin.data.checksum`.

    Raises:
        StorageError: the file is absent, truncated, damaged, or no IDX file.
    """
    import numpy as np

    try:
        verify(path, checksums)
        with _opened(path) as file:
            kind, shape = _header(file, path)
            size = math.prod(shape) * np.dtype(TYPES[kind]).itemsize
            _check_possible(path, size, packed=isinstance(file, gzip.GzipFile))
            content = _read(file, size)
            extra = file.read(1)  # at the end gzip compares its checksum
    except (OSError, EOFError, zlib.error) as error:
        raise StorageError(f"expected a whole IDX file, but {path} cannot be read ({error}): {_AGAIN}") from error
    if len(content) != size or extra:
        actual = f"only {len(content):,}" if len(content) < size else "more"
        raise StorageError(f"expected {size:,} bytes after the header of {path}, found {actual}: {_AGAIN}")
    if not size:
        raise StorageError(f"expected examples in {path}, found the shape {shape}: {_AGAIN}")
    array = np.frombuffer(content, TYPES[kind]).reshape(shape)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def read_idx_folder(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """Images and labels in a folder of IDX files; t10k or test in a name marks the test part.

    Raises:
        InputError: there is not exactly one file of each kind.
        StorageError: a file is damaged.
    """
    files = idx_files(folder)
    train, test = (_pair(folder, files, part, checksums) for part in ("train", "test"))
    return Parts(folder.name, train, test)


def idx_files(folder: Path) -> list[Path]:
    """The IDX files of a folder, told by their content; the gzipped one where both lie there, as it has a checksum."""
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and (_has_idx_name(path) or _looks_like_idx(path)):
            files[path.name.removesuffix(".gz")] = path
    return list(files.values())


def _has_idx_name(path: Path) -> bool:
    """A damaged file is still meant, and must not be passed over in silence."""
    return re.search(r"[-.]idx\d-[a-z]+(\.gz)?$", path.name) is not None


def _looks_like_idx(path: Path) -> bool:
    try:
        with _opened(path) as file:
            head = file.read(4)
    except (OSError, EOFError, zlib.error):
        return False
    return _is_head(head)


def _pair(folder: Path, files: list[Path], part: str, checksums: Mapping[str, str] | None) -> Pair | None:
    members = [path for path in files if (_TEST.search(path.name) is not None) == (part == "test")]
    if not members:
        return None
    labels = [path for path in members if _axes(path) == 1]
    images = [path for path in members if _axes(path) > 1]
    if len(labels) != 1 or len(images) != 1:
        raise InputError(
            f"expected one IDX file of inputs and one of labels for {part} in {folder}, found "
            f"{', '.join(path.name for path in members)}: put each set into a folder of its own"
        )
    inputs, targets = read_idx(images[0], checksums), read_idx(labels[0], checksums)
    return as_inputs(inputs), as_targets(targets)


def _axes(path: Path) -> int:
    try:
        with _opened(path) as file:
            return len(_header(file, path)[1])
    except (OSError, EOFError, zlib.error) as error:
        raise StorageError(f"expected an IDX file, but {path} cannot be read ({error}): {_AGAIN}") from error


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")


def _header(file: gzip.GzipFile | BufferedReader, path: Path) -> tuple[int, tuple[int, ...]]:
    """Type and shape."""
    head = file.read(4)
    if not _is_head(head):
        raise StorageError(
            f"expected an IDX file, which begins with 00 00, a type and a number of axes, found "
            f"{head.hex(' ') or 'nothing'} in {path}: {_AGAIN}"
        )
    lengths = file.read(4 * head[3])
    if len(lengths) < 4 * head[3]:
        raise StorageError(f"expected the lengths of {head[3]} axes in {path}, found its end: {_AGAIN}")
    return head[2], struct.unpack(f">{head[3]}I", lengths)


def _is_head(head: bytes) -> bool:
    return len(head) == 4 and not any(head[:2]) and head[2] in TYPES and 0 < head[3] <= _AXES


def _read(file: gzip.GzipFile | BufferedReader, size: int) -> bytearray:
    """At most so many bytes; memory grows with what is there, not with what was promised."""
    content = bytearray()
    while len(content) < size and (piece := file.read(min(_PIECE, size - len(content)))):
        content += piece
    return content


def _check_possible(path: Path, size: int, *, packed: bool) -> None:
    """Refuse a header that promises more than the file can hold, before anything is read."""
    stored = path.stat().st_size
    if size > min(_LARGEST, _DEFLATE * stored if packed else stored):
        raise StorageError(
            f"the header of {path} promises {size:,} bytes, which its {stored:,} bytes cannot hold or which are more "
            f"than {_LARGEST:,}: it is damaged; {_AGAIN}"
        )
