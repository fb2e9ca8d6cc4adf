"""Map tensors of a safetensors file into memory.

Knows bytes, names and offsets; knows nothing of members, manifests or networks. A file is mapped anew for each
request: no handle stays open, and what holds a `TensorFile` can be sent to another process.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from onebasin.errors import StorageError
from onebasin.population.durable import publish
from onebasin.state import Spec, State, TensorSpec

CHUNK = 4 << 20  # bytes per step of a checksum: stays in the cache between summing and writing
_ROW_WORDS = 1021
_ROW_BYTES = 8 * _ROW_WORDS

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in the file."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class TensorFile:
    """The header of a safetensors file: text metadata, and where each tensor lies."""

    path: Path
    nbytes: int
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    @property
    def spec(self) -> Spec:
        """Shapes as stored in the file."""
        return {name: entry.spec for name, entry in self.entries.items()}


def read_header(path: Path) -> TensorFile:
    """Read and validate the header of a safetensors file.

    Raises:
        StorageError: when the file is absent, empty, truncated or not in this format.
    """
    try:
        with safe_open(path, framework="pt"):  # the format's own library judges whether header and length agree
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, dict[str, object]] = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise StorageError(f"{path} does not exist: check the path") from error
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise StorageError(
            f"expected a whole safetensors file, but {path} ({size:,} bytes) is truncated or corrupt ({error}): "
            "copy it again from its source, or move it away to go on without it"
        ) from error
    metadata = header.pop("__metadata__", {})
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    return TensorFile(path, path.stat().st_size, {key: str(value) for key, value in metadata.items()}, entries)


def _entry(path: Path, name: str, fields: Mapping[str, object], start: int) -> Entry:
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if code not in DTYPES or not isinstance(shape, list) or not isinstance(offsets, list):
        raise StorageError(
            f"tensor {name} of {path} has dtype {code}, which torch cannot hold: save it in another dtype"
        )
    return Entry(TensorSpec(tuple(shape), DTYPES[str(code)]), start + offsets[0])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs hide the buffer before Python 3.12


def map_tensors(file: TensorFile, names: Iterable[str]) -> State:
    """Map tensors of a file into memory without reading them; to change one does not change the file."""
    try:
        found = file.path.stat().st_size
        if found != file.nbytes:
            raise StorageError(
                f"{file.path} had {file.nbytes:,} bytes when it was opened and has {found:,} now: "
                "restore it from a copy, or open the population again"
            )
        content = torch.from_file(str(file.path), shared=False, size=file.nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"{file.path} was there when the population was opened and cannot be read now ({error}): "
            "put it back, or open the population again without it"
        ) from error
    return {name: _view(content, file.entries[name]) for name in names}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors and texts as one file in place of what is there; readers see the old one or the new one."""
    # Copies, because the format refuses tensors that share memory, as views of one stack do.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    content = save(copies, dict(facts))
    publish(path, lambda file: file.write(content), size=len(content), replace=True)


def _view(content: Tensor, entry: Entry) -> Tensor:
    if not entry.spec.size:
        return torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
    piece = content[entry.offset : entry.offset + entry.spec.nbytes]
    if entry.offset % entry.spec.dtype.itemsize:
        piece = piece.clone()  # our files are aligned; those of others need not be
    return piece.view(entry.spec.dtype).view(entry.spec.shape)


def chunks(view: memoryview) -> Iterator[memoryview]:
    """Cut bytes into the pieces that `fold` sums."""
    return (view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK))


def fold(piece: memoryview, value: int) -> int:
    """Continue a checksum with the next piece of at most `CHUNK` bytes.

    The piece is read as rows of 1021 words of 64 bits; the sums of the columns, modulo 2**64, and the bytes that
    fill no row go into a CRC-32. Any change inside one row is seen as surely as by the CRC itself. This takes a
    quarter of the time of a CRC over all bytes, which would cost as much as writing them. A prime number of
    columns keeps pages that swap places from going unseen.
    """
    rows = piece.nbytes // _ROW_BYTES
    words = np.frombuffer(piece, dtype="<u8", count=rows * _ROW_WORDS).reshape(rows, _ROW_WORDS)
    value = zlib.crc32(np.add.reduce(words, axis=0), value) if rows else value
    return zlib.crc32(piece[rows * _ROW_BYTES :], value)


def stored_checksum(file: TensorFile, name: str) -> str:
    """Return the checksum of the bytes of one tensor as they lie on the disk."""
    entry = file.entries[name]
    left, value = entry.spec.nbytes, 0
    with file.path.open("rb") as handle:
        handle.seek(entry.offset)
        while left > 0 and (piece := handle.read(min(CHUNK, left))):
            value, left = fold(memoryview(piece), value), left - len(piece)
    return "cut off" if left else f"{value:08x}"
