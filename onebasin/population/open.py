"""Networks at a path: a population folder, files or archives of networks, a pattern of these, or a name on the hub.

A pattern or a name on the hub stands for several of these, laid end to end.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import StorageError
from onebasin.population.archive import ARCHIVES, archive_paths, is_archive, stacked_archive, too_large
from onebasin.population.files import SUFFIXES, TORCH_SUFFIXES, file_source, network_paths, torch_sources
from onebasin.population.hub import Address, RemoteNetworks, remote_networks
from onebasin.population.member_storage import MemorySource, Source
from onebasin.population.names import natural_key
from onebasin.population.shard import (
    MANIFEST,
    Shard,
    block_spec,
    is_shard,
    read_manifest,
    read_shards,
    shard_key,
    shard_of,
)
from onebasin.population.writer import member_bytes
from onebasin.state import Spec, check_spec
from onebasin.storage import leftovers, read_header

IN_MEMORY = 1 << 30  # bytes of networks in archives that are opened at once; more must be imported


@dataclass(frozen=True)
class NetworkFiles:
    """The files behind a path, a pattern or a name on the hub, in their order.

    Attributes:
        name: the path, pattern or address.
        paths: files or folders, each with one network or several.
        origin: what else is known about where they come from, JSON-able.
        remote: where they still have to be fetched from; `paths` is empty until then.
    """

    name: str
    paths: Sequence[Path]
    origin: Mapping[str, Any] = field(default_factory=dict)
    remote: RemoteNetworks | None = None

    def fetch(self) -> NetworkFiles:
        """The same files on this machine."""
        return self if self.remote is None else replace(self, paths=self.remote.fetch(), remote=None)


def is_there(where: Path) -> bool:
    """Whether networks can be looked for: a path that exists, a pattern, or a name on the hub.

    >>> [is_there(Path(text)) for text in ("runs/*/best.pt", "hf://owner/name", "no/such/path")]
    [True, True, False]
    """
    return where.exists() or glob.has_magic(str(where)) or Address.parse(where) is not None


def find(where: Path) -> NetworkFiles:
    """The files behind a path, a name on the hub or a pattern; what exists under this very name comes first.

    Raises:
        StorageError: nothing exists or matches.
        InputError: a name on the hub that is malformed, unknown there, or has nothing of use.
    """
    if where.exists():
        return NetworkFiles(str(where), [where])
    if (address := Address.parse(where)) is not None:
        remote = remote_networks(address)
        return NetworkFiles(str(address), [], {"commit": remote.commit}, remote)
    if glob.has_magic(str(where)):
        paths = sorted(map(Path, glob.glob(str(where), recursive=True)), key=natural_key)
        if not paths:
            raise StorageError(f"expected files that match {where}, found none: check the pattern and the folder")
        return NetworkFiles(str(where), paths)
    raise StorageError(f"{where} does not exist: check the path")


@dataclass(frozen=True)
class StoredMembers:
    """The members of a population that stay where they are, and what is known of each."""

    sources: Sequence[Source]
    spec: Spec
    chain: Tensor | None = None
    log_density: Tensor | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(source.count for source in self.sources)


def open_members(path: Path, expected: Spec | None) -> StoredMembers:
    """Find the members under `path`; with `expected`, refuse any that differ from it."""
    files = find(path)
    if files.remote is not None and files.remote.archived > IN_MEMORY:
        raise too_large(files.name)
    files = files.fetch()
    if list(files.paths) == [path]:
        members = _open(path, expected, IN_MEMORY)
    else:
        members = _concatenate(files.paths, expected, files.name)
        members = replace(members, provenance={"source": files.name, **files.origin, **members.provenance})
    if expected is not None:
        check_spec(members.spec, expected, where=str(path))
        members = replace(members, spec=expected)
    return members


def files_with_networks(path: Path) -> list[Path]:
    """The files of a folder that hold networks, in natural order; a file or a population folder is itself one."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    paths = network_paths(path)
    if any(shard_key(file) for file in paths):
        return [path]
    paths = paths or archive_paths(path)
    if not paths:
        unfinished = leftovers(path)
        content = f"an unfinished {unfinished[0].name} of a writer" if unfinished else "none"
        raise StorageError(
            f"expected {MANIFEST} or files {', '.join((*SUFFIXES, *ARCHIVES))} in {path}, found {content}: "
            "check the path, or run again what should have written it"
        )
    return paths


def _open(path: Path, expected: Spec | None, room: int) -> StoredMembers:
    if not path.is_dir():
        return _open_file(path, expected, room)
    if (paths := files_with_networks(path)) != [path]:
        return _concatenate(paths, expected, str(path))
    manifest = read_manifest(path)
    return _of_shards(read_shards(path, manifest), manifest.spec, manifest.provenance)


def _concatenate(paths: Sequence[Path], expected: Spec | None, where: str) -> StoredMembers:
    """The members of several paths, each of which must agree with the spec or with the first."""
    room = IN_MEMORY
    if sum(path.stat().st_size for path in paths if is_archive(path)) > room:
        raise too_large(where)
    parts: list[StoredMembers] = []
    for path in paths:
        part = _open(path, expected, room)
        spec = expected or (parts[0].spec if parts else part.spec)
        origin = "the given spec" if expected else paths[0].name
        check_spec(part.spec, spec, where=f"{path}, compared with {origin},")
        parts.append(part)
        if is_archive(path):
            room -= len(part) * member_bytes(part.spec)
    counts = [len(part) for part in parts]
    return StoredMembers(
        [source for part in parts for source in part.sources],
        expected or parts[0].spec,
        concatenate_values([part.chain for part in parts], counts, torch.int64),
        concatenate_values([part.log_density for part in parts], counts, torch.float64),
        {"files": relative_names(paths)},
    )


def relative_names(paths: Sequence[Path]) -> list[str]:
    """Paths below the folder that all share.

    >>> relative_names([Path("runs/1/best.pt"), Path("runs/2/best.pt")])
    ['1/best.pt', '2/best.pt']
    """
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


def _open_file(path: Path, expected: Spec | None, room: int) -> StoredMembers:
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        file = read_header(path)
        if is_shard(file):
            shard = shard_of(file)
            return _of_shards([shard], shard.spec, {})
        source, spec = file_source(file, expected)
        return StoredMembers([source], spec, provenance={"files": [path.name]})
    if suffix in TORCH_SUFFIXES:
        members = torch_sources(path, expected)
        spec = members[0][1]
        for index, (_, other) in enumerate(members):
            check_spec(other, spec, where=f"network {index} of {path}, compared with the first,")
        return StoredMembers([source for source, _ in members], spec, provenance={"files": [path.name]})
    if is_archive(path):
        if path.stat().st_size > room:
            raise too_large(path)
        stacked = stacked_archive(path, expected, room)
        source = MemorySource(stacked, len(next(iter(stacked.values()))))
        return StoredMembers([source], block_spec(stacked), provenance={"files": [path.name]})
    raise StorageError(
        f"expected a folder or a file {', '.join((*SUFFIXES, *ARCHIVES))}, found {path}: "
        "rename the file after its format, or load it yourself and use Population.from_states"
    )


def _of_shards(shards: Sequence[Shard], spec: Spec, provenance: Mapping[str, Any]) -> StoredMembers:
    counts = [shard.source.count for shard in shards]
    chain = concatenate_values([shard.chain for shard in shards], counts, torch.int64)
    density = concatenate_values([shard.log_density for shard in shards], counts, torch.float64)
    return StoredMembers([shard.source for shard in shards], spec, chain, density, provenance)


def concatenate_values(values: Sequence[Tensor | None], counts: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Concatenate per-member values; where a part has none, -1 or NaN stands for unknown."""
    if all(value is None for value in values):
        return None
    unknown = float("nan") if dtype.is_floating_point else -1
    return torch.cat(
        [
            torch.full((count,), unknown, dtype=dtype) if value is None else value
            for value, count in zip(values, counts, strict=True)
        ]
    )
