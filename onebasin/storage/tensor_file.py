"""Safetensors files: headers, tensors mapped into memory, checksums per tensor.

Knows bytes, names and offsets; knows nothing of members, manifests or networks. A file is mapped anew for each
request: no handle stays open, and what holds a `TensorFile` can be sent to another process. Files of ours carry a
checksum per tensor, which is compared when a process first reads that tensor: a flipped bit never becomes a number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from onebasin.errors import StorageError
from onebasin.state import Spec, State, TensorSpec
from onebasin.storage.atomic import publish
from onebasin.storage.integrity import checksum, checksums_from, has_valid_seal, seal, stored_checksum

CHECKSUMS = "checksums"  # in the metadata of files of ours: a JSON object {name: 8 hexadecimal digits}

_AXES, _LONGEST = 32, 1 << 40  # of a tensor
TENSORS = 50_000  # in a file; each costs time, whether it is empty or not

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
    if path.exists() and not path.is_file():
        raise StorageError(f"expected a file, but {path} is a folder or a device: move it away to go on without it")
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
    if len(header) > TENSORS:
        raise StorageError(
            f"expected at most {TENSORS:,} tensors in {path}, found {len(header):,}, which no network has: stack those "
            "that belong together before they are saved"
        )
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    path = path.absolute()  # a process in another folder may read it later
    return TensorFile(path, path.stat().st_size, {key: str(value) for key, value in metadata.items()}, entries)


def is_usual(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor may be believed: a name that can be printed, and lengths that an empty one cannot make up."""
    return name.isprintable() and len(shape) <= _AXES and max(shape, default=0) <= _LONGEST


def _entry(path: Path, name: str, fields: Mapping[str, object], start: int) -> Entry:
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if code not in DTYPES or not isinstance(shape, list) or not isinstance(offsets, list):
        raise StorageError(
            f"tensor {name} of {path} has dtype {code}, which torch cannot hold: save it in another dtype"
        )
    if not is_usual(name, shape):
        raise StorageError(f"tensor {name[:80]!r} of {path} has a name or shape that no network has: change it")
    return Entry(TensorSpec(tuple(shape), DTYPES[str(code)]), start + offsets[0])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))  # an axis of size 1 may have any stride
    array = flat.view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs hide the buffer before Python 3.12


def map_tensors(file: TensorFile, names: Iterable[str]) -> State:
    """Map tensors of a file into memory; to change one does not change the file.

    Raises:
        StorageError: when the file has changed since its header was read, or does not match its checksums.
    """
    names = list(names)
    try:
        status = file.path.stat()
        if status.st_size != file.nbytes:
            raise StorageError(
                f"{file.path} had {file.nbytes:,} bytes when it was opened and has {status.st_size:,} now: "
                "restore it from a copy, or open the population again"
            )
        _verify(file, names, status)
        content = torch.from_file(str(file.path), shared=False, size=file.nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"{file.path} was there when the population was opened and cannot be read now ({error}): "
            "put it back, or open the population again without it"
        ) from error
    return {name: _view(content, file.entries[name]) for name in names}


def expected_checksums(file: TensorFile) -> Mapping[str, str]:
    """The checksums in the header of a file of ours by tensor; none for files of others.

    Raises:
        StorageError: when that part of the header is damaged.
    """
    if "onebasin" not in file.metadata or CHECKSUMS not in file.metadata:
        return {}
    checksums = checksums_from(file.metadata[CHECKSUMS])
    if checksums is None or not checksums.keys() <= file.entries.keys() or not has_valid_seal(file.metadata):
        raise StorageError(
            f"the header of {file.path} does not match its checksum: restore the file from a copy, or move it away to "
            "go on without it"
        )
    return checksums


def tensor_problems(file: TensorFile, names: Iterable[str] | None = None) -> list[str]:
    """Compare tensors on the disk with their checksums; return one sentence per difference."""
    expected = expected_checksums(file)
    wanted = expected if names is None else [name for name in names if name in expected]
    problems = []
    for name in wanted:
        entry = file.entries[name]
        actual = stored_checksum(file.path, entry.offset, entry.spec.nbytes)
        if actual != expected[name]:
            problems.append(
                f"{file.path}: tensor {name} does not match its checksum (stored {expected[name]}, found {actual}): "
                "restore the file from a copy, or move it away to go on without it"
            )
    return problems


_VERIFIED: dict[tuple[str, int, int, int], set[str]] = {}  # (path, inode, size, time) -> tensors found whole


def _verify(file: TensorFile, names: list[str], status: os.stat_result) -> None:
    """Compare tensors with their checksums unless this process has done so since the file was last written."""
    known = _VERIFIED.setdefault((str(file.path), status.st_ino, status.st_size, status.st_mtime_ns), set())
    if fresh := [name for name in names if name not in known]:
        if problems := tensor_problems(file, fresh):
            raise StorageError(problems[0])
        known.update(fresh)


def read_tensors(path: Path) -> tuple[State, Mapping[str, str]]:
    """Tensors and texts of a file, in memory, compared with their checksums."""
    header = read_header(path)
    return {name: value.clone() for name, value in map_tensors(header, header.entries).items()}, header.metadata


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors and texts as one file in place of what is there; readers see the old one or the new one."""
    # Copies, because the format refuses tensors that share memory, as views of one stack do.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    sums = {name: checksum(bytes_of(value)) for name, value in copies.items()}
    content = save(copies, seal({"onebasin": "tensors", **facts, CHECKSUMS: json.dumps(sums)}))
    publish(path, lambda file: file.write(content), size=len(content), replace=True)


def _view(content: Tensor, entry: Entry) -> Tensor:
    if not entry.spec.size:
        return torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
    piece = content[entry.offset : entry.offset + entry.spec.nbytes]
    if entry.offset % entry.spec.dtype.itemsize:
        piece = piece.clone()  # our files are aligned; those of others need not be
    return piece.view(entry.spec.dtype).view(entry.spec.shape)
