"""A population as a folder: `population.json` and immutable shards, which several writers may add at once.

The manifest holds what never changes (format, spec, provenance, identity). Shards are found by listing the folder, so
that appending rewrites nothing and a reader sees every finished shard while writers are still at work. The manifest
names no file, so it can lead nowhere; each shard carries the identity, so that one from elsewhere is noticed.

A shard is one immutable block of members in one safetensors file, with a checksum per tensor: stacked tensors
(members, *shape) under their own names, two optional reserved tensors for chain and log density, and text metadata:
format, version, members, writer, sequence, population, and `checksums`, a JSON object {name: 8 hexadecimal digits}
whose order is the order of the spec.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population.member_storage import FileSource
from onebasin.state import Spec, TensorSpec, check_spec, spec_from_json, spec_of, spec_to_json
from onebasin.storage import (
    CHECKSUMS,
    CODES,
    TEMPORARY,
    TensorFile,
    bytes_of,
    chunks,
    expected_checksums,
    fold,
    publish,
    read_header,
    seal,
    write_json,
)

FORMAT = "onebasin-shard"
VERSION = 1
RESERVED = "onebasin."  # prefix of our own tensors
_CHAIN, _LOG_DENSITY = RESERVED + "chain", RESERVED + "log_density"
_NAME = re.compile(r"shard-(\d{5,})-([0-9A-Za-z_]+)\.safetensors")


@dataclass(frozen=True)
class Block:
    """Members that are together: tensors (n, *shape), chain (n,) and log density (n,) or None."""

    tensors: Mapping[str, Tensor]
    count: int
    chain: Tensor | None = None
    log_density: Tensor | None = None


@dataclass(frozen=True)
class Origin:
    """The writer of a shard, its number there, and the identity of the population it was written into."""

    writer: str = ""
    sequence: int = 0
    population: str = ""


@dataclass(frozen=True)
class Shard:
    """A shard on disk whose header was read."""

    source: FileSource
    spec: Spec
    checksums: Mapping[str, str]
    origin: Origin
    chain: Tensor | None
    log_density: Tensor | None


def shard_name(sequence: int, writer: str) -> str:
    """Return the file name; names sort by sequence, then by writer.

    >>> shard_name(3, "a1b2c3d4")
    'shard-00003-a1b2c3d4.safetensors'
    """
    return f"shard-{sequence:05d}-{writer}.safetensors"


def shard_key(path: Path) -> tuple[int, str] | None:
    """Return (sequence, writer) when the name is that of a shard."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), match[2]) if match else None


def check_names(spec: Spec) -> None:
    """Raise `SpecError` when a tensor cannot be stored: a reserved name or a dtype without a code."""
    for name, tensor in spec.items():
        if name.startswith(RESERVED) or name == "__metadata__":
            raise SpecError(f"tensor name {name} is reserved for the file format: rename this tensor")
        if tensor.dtype not in CODES:
            raise SpecError(f"tensor {name} is {tensor}, which a safetensors file cannot hold: convert it first")


def write_shard(path: Path, block: Block, origin: Origin | None = None, *, replace: bool = False) -> None:
    """Write one block; the file appears under its name when it is whole and on the disk."""
    tensors = _stored(block)
    facts = {"members": str(block.count), **{name: str(value) for name, value in vars(origin or Origin()).items()}}
    size = sum(tensor.nbytes for tensor in tensors.values())
    publish(path, lambda file: _write(file, tensors, facts), size=size, replace=replace)


def _stored(block: Block) -> dict[str, Tensor]:
    """All tensors of a block by their names in the file."""
    extras = {_CHAIN: block.chain, _LOG_DENSITY: block.log_density}
    return {**block.tensors, **{name: value for name, value in extras.items() if value is not None}}


def holds_block(shard: Shard, block: Block) -> bool:
    """Whether a shard is what `write_shard` would make of this block, bit for bit."""
    tensors = _stored(block)
    if shard.source.count != block.count or list(shard.checksums) != list(tensors):
        return False
    stored = shard.source.views(list(tensors), 0, block.count)
    return all(
        stored[name].shape == tensor.shape
        and stored[name].dtype == tensor.dtype
        and bytes_of(stored[name]) == bytes_of(tensor.contiguous().cpu())
        for name, tensor in tensors.items()
    )


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], facts: dict[str, str]) -> None:
    """Write header and bytes; checksums are taken on the way, so the header is written twice with equal length."""
    sums = dict.fromkeys(tensors, "00000000")
    file.write(_header(tensors, facts, sums))
    for name in _by_alignment(tensors):
        value = 0
        for piece in chunks(bytes_of(tensors[name].contiguous().cpu())):
            value = fold(piece, value)
            file.write(piece)
        sums[name] = f"{value:08x}"
    file.seek(0)
    file.write(_header(tensors, facts, sums))


def _by_alignment(tensors: Mapping[str, Tensor]) -> list[str]:
    """Widest dtypes first, as the format's library does, so that every tensor is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def _header(tensors: Mapping[str, Tensor], facts: dict[str, str], sums: dict[str, str]) -> bytes:
    version = {"format": "pt", "onebasin": FORMAT, "version": str(VERSION)}
    header: dict[str, object] = {"__metadata__": seal({**version, **facts, CHECKSUMS: json.dumps(sums)})}
    end = 0
    for name in _by_alignment(tensors):
        start, end = end, end + tensors[name].nbytes
        shape, code = list(tensors[name].shape), CODES[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def is_shard(file: TensorFile) -> bool:
    """Whether the header says that onebasin wrote the file."""
    return file.metadata.get("onebasin") == FORMAT


def read_shard(path: Path) -> Shard:
    """Read the header of a shard, its chains and log densities; the weights stay on the disk."""
    return shard_of(read_header(path))


def shard_of(file: TensorFile) -> Shard:
    """Interpret a file as a shard.

    Raises:
        StorageError: when its header is not that of a shard, or is of a newer version.
    """
    version = file.metadata.get("version", "")
    if version.isdecimal() and (len(version) > 9 or int(version) > VERSION):  # int() refuses thousands of digits
        raise StorageError(f"{file.path} has shard version {version[:20]}, expected {VERSION}: upgrade onebasin")
    try:
        count, sums = int(file.metadata["members"]), expected_checksums(file)
        origin = Origin(file.metadata["writer"], int(file.metadata["sequence"]), file.metadata.get("population", ""))
        stored = {name: file.entries[name].spec for name in sums}
        if not stored or not 0 <= count <= file.nbytes or _wrong_extras(stored):
            raise ValueError("no tensors, more members than bytes, or chains that are none")
        whole = is_shard(file) and all(tensor.shape[:1] == (count,) for tensor in stored.values())
    except (KeyError, ValueError):
        whole = False
    if not whole:
        raise StorageError(
            f"{file.path} is named like a shard but was not written as one (members and checksums do not agree "
            "with its tensors): move it away, or import it on its own with Population.open"
        )
    names = [name for name in stored if not name.startswith(RESERVED)]
    spec = {name: TensorSpec(stored[name].shape[1:], stored[name].dtype) for name in names}
    source = FileSource(file, {name: name for name in stored}, count)
    return Shard(source, spec, sums, origin, _extra(source, _CHAIN), _extra(source, _LOG_DENSITY))


def _wrong_extras(stored: Spec) -> bool:
    """Whether chains or log densities are anything but one number of their kind per member."""
    kinds = {_CHAIN: torch.int64, _LOG_DENSITY: torch.float64}
    return any(
        name in stored and (len(stored[name].shape) != 1 or stored[name].dtype != kind) for name, kind in kinds.items()
    )


def _extra(source: FileSource, name: str) -> Tensor | None:
    if name not in source.stored:
        return None
    values = torch.empty(source.count, dtype=source.file.entries[name].spec.dtype)
    source.fill({name: values}, torch.arange(source.count))
    return values


def block_spec(tensors: Mapping[str, Tensor]) -> Spec:
    """Return the spec of one member of stacked tensors (n, *shape)."""
    return {name: TensorSpec(tensor.shape[1:], tensor.dtype) for name, tensor in spec_of(tensors).items()}


MANIFEST = "population.json"
MANIFEST_FORMAT = "onebasin-population"
_LARGEST = 64 << 20  # bytes of a manifest
MANIFEST_VERSION = 1

_NOT_A_MANIFEST = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SpecError)


@dataclass(frozen=True)
class Manifest:
    """What all members share.

    Attributes:
        spec: of one member.
        provenance: where they come from.
        identity: drawn when the folder is made; empty for one that was made before there were identities.
    """

    spec: Spec
    provenance: Mapping[str, Any]
    identity: str = ""


def read_manifest(folder: Path) -> Manifest:
    """Read `population.json`.

    Raises:
        StorageError: when it is absent, corrupt or of a newer version.
    """
    path = folder / MANIFEST
    if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
        raise StorageError(f"expected a small file, but {path} is a device, a folder or endless: move it away")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known, version = content["format"] == MANIFEST_FORMAT, int(content["version"])
        if known and version > MANIFEST_VERSION:
            raise StorageError(f"{path} has version {version}, expected at most {MANIFEST_VERSION}: upgrade onebasin")
        spec, provenance = spec_from_json(json.dumps(content["spec"])), dict(content["provenance"])
        manifest = Manifest(spec, provenance, str(content.get("identity", "")))
    except FileNotFoundError as error:
        raise StorageError(
            f"{folder} holds shards but no {MANIFEST}: call Population.writer(path, spec) there once to write "
            "it again, or open the shards one by one"
        ) from error
    except _NOT_A_MANIFEST as error:
        known = False
        cause: Exception | None = error
    else:
        cause = None
    if not known:
        raise StorageError(
            f"expected {path} to be a {MANIFEST_FORMAT} manifest, found something else: "
            "delete it and call Population.writer(path, spec) there to write it again"
        ) from cause
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write `population.json`, or check that the one already there has the same spec; return the one that is there."""
    try:
        provenance = json.loads(json.dumps(dict(manifest.provenance)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"provenance must be what JSON can hold (text, numbers, lists, dicts), found something else ({error}): "
            "convert it with str(...)"
        ) from error
    path = folder / MANIFEST
    try:
        if not path.exists():
            new = replace(manifest, identity=_identity(folder))
            spec = json.loads(spec_to_json(new.spec))
            content = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "spec": spec, "provenance": provenance}
            write_json(path, {**content, "identity": new.identity}, replace=False)
            return new
    except FileExistsError:
        pass  # another writer was a moment faster: its spec must be ours
    stored = read_manifest(folder)
    check_spec(manifest.spec, stored.spec, where=f"this writer, compared with the members in {folder},")
    return stored


def _identity(folder: Path) -> str:
    """A new identity, or that of the shards whose manifest was lost; none where these disagree."""
    identities = {read_shard(path).origin.population for path in shard_paths(folder)}
    return secrets.token_hex(8) if not identities else identities.pop() if len(identities) == 1 else ""


def shard_paths(folder: Path) -> list[Path]:
    """List finished shards in the order of their members: by sequence, then by writer."""
    keyed = [(key, path) for path in folder.iterdir() if (key := shard_key(path)) and TEMPORARY not in path.name]
    return [path for _, path in sorted(keyed)]


def read_shards(folder: Path, manifest: Manifest) -> list[Shard]:
    """Read the headers of all finished shards, and refuse those that do not belong here.

    Raises:
        SpecError: a shard holds other tensors.
        StorageError: a shard is damaged, or was written under another name or for another population.
    """
    shards = [read_shard(path) for path in shard_paths(folder)]
    for shard in shards:
        check_belongs(shard, manifest)
    return shards


def check_belongs(shard: Shard, manifest: Manifest) -> None:
    """Refuse a shard that came from elsewhere: its networks would be taken for those of this population."""
    path, origin = shard.source.path, shard.origin
    check_spec(shard.spec, manifest.spec, where=f"shard {path}")
    remedy = (
        "put back the file that was here, or move this one away; Population.writer(folder, spec).extend("
        "Population.open(file)) adds its networks in earnest"
    )
    if (origin.sequence, origin.writer) != shard_key(path):
        name = shard_name(origin.sequence, origin.writer)
        here = ", which is here too" if (path.parent / name).exists() else ""
        raise StorageError(f"{path} was written as {name}{here}, so it is a copy or stands for another file: {remedy}")
    if manifest.identity and origin.population and origin.population != manifest.identity:
        raise StorageError(f"{path} was written into another population: {remedy}")
