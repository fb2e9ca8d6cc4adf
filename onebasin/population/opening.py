"""What a path holds: a population folder, a folder of networks or of archives, a shard, an archive, or one network.

A pattern or a name on the hub stands for several of these, laid end to end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import StorageError
from onebasin.population.archive import ARCHIVES, archive_paths, is_archive, stacked_archive, too_large
from onebasin.population.durable import leftovers
from onebasin.population.places import find
from onebasin.population.read import SUFFIXES, TORCH_SUFFIXES, file_source, network_paths, torch_sources
from onebasin.population.shard import Shard, block_spec, is_shard, shard_key, shard_of
from onebasin.population.sources import MemorySource, Source
from onebasin.population.store import MANIFEST, read_manifest, read_shards
from onebasin.population.tensor_file import read_header
from onebasin.population.writer import member_bytes
from onebasin.state import Spec, check_spec

IN_MEMORY = 1 << 30  # bytes of networks in archives that are opened at once; more must be imported


@dataclass(frozen=True)
class Parts:
    """What a Population is made of."""

    sources: Sequence[Source]
    spec: Spec
    chain: Tensor | None = None
    log_density: Tensor | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(source.count for source in self.sources)


def open_parts(path: Path, expected: Spec | None) -> Parts:
    """Find the members under `path`; with `expected`, refuse any that differ from it."""
    place = find(path)
    if place.offer is not None and place.offer.archived > IN_MEMORY:
        raise too_large(place.name)
    place = place.fetched()
    if list(place.paths) == [path]:
        parts = _open(path, expected, IN_MEMORY)
    else:
        parts = _laid_end_to_end(place.paths, expected, place.name)
        parts = replace(parts, provenance={"source": place.name, **place.origin, **parts.provenance})
    if expected is not None:
        check_spec(parts.spec, expected, where=str(path))
        parts = replace(parts, spec=expected)
    return parts


def members_of(path: Path) -> list[Path]:
    """The files of a folder that hold networks, in natural order; a file or a population folder is itself one."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return [path]
    paths = network_paths(path)
    if any(shard_key(file) for file in paths):
        return [path]
    paths = paths or archive_paths(path)
    if not paths:
        unfinished = leftovers(path)
        found = f"an unfinished {unfinished[0].name} of a writer" if unfinished else "none"
        raise StorageError(
            f"expected {MANIFEST} or files {', '.join((*SUFFIXES, *ARCHIVES))} in {path}, found {found}: "
            "check the path, or run again what should have written it"
        )
    return paths


def _open(path: Path, expected: Spec | None, room: int) -> Parts:
    if not path.is_dir():
        return _open_file(path, expected, room)
    if (paths := members_of(path)) != [path]:
        return _laid_end_to_end(paths, expected, str(path))
    manifest = read_manifest(path)
    return _of_shards(read_shards(path, manifest), manifest.spec, manifest.provenance)


def _laid_end_to_end(paths: Sequence[Path], expected: Spec | None, where: str) -> Parts:
    """Several places as one; each must agree with the spec or with the first."""
    room = IN_MEMORY
    if sum(path.stat().st_size for path in paths if is_archive(path)) > room:
        raise too_large(where)
    found: list[Parts] = []
    for path in paths:
        parts = _open(path, expected, room)
        spec = expected or (found[0].spec if found else parts.spec)
        origin = "the given spec" if expected else paths[0].name
        check_spec(parts.spec, spec, where=f"{path}, compared with {origin},")
        found.append(parts)
        if is_archive(path):
            room -= len(parts) * member_bytes(parts.spec)
    counts = [len(parts) for parts in found]
    return Parts(
        [source for parts in found for source in parts.sources],
        expected or found[0].spec,
        joined([parts.chain for parts in found], counts, torch.int64),
        joined([parts.log_density for parts in found], counts, torch.float64),
        {"files": relative_names(paths)},
    )


def relative_names(paths: Sequence[Path]) -> list[str]:
    """Names as they are told apart: below the folder that all share.

    >>> relative_names([Path("runs/1/best.pt"), Path("runs/2/best.pt")])
    ['1/best.pt', '2/best.pt']
    """
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


def _open_file(path: Path, expected: Spec | None, room: int) -> Parts:
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        file = read_header(path)
        if is_shard(file):
            shard = shard_of(file)
            return _of_shards([shard], shard.spec, {})
        source, spec = file_source(file, expected)
        return Parts([source], spec, provenance={"files": [path.name]})
    if suffix in TORCH_SUFFIXES:
        members = torch_sources(path, expected)
        spec = members[0][1]
        for index, (_, other) in enumerate(members):
            check_spec(other, spec, where=f"network {index} of {path}, compared with the first,")
        return Parts([source for source, _ in members], spec, provenance={"files": [path.name]})
    if is_archive(path):
        if path.stat().st_size > room:
            raise too_large(path)
        stacked = stacked_archive(path, expected, room)
        source = MemorySource(stacked, len(next(iter(stacked.values()))))
        return Parts([source], block_spec(stacked), provenance={"files": [path.name]})
    raise StorageError(
        f"expected a folder or a file {', '.join((*SUFFIXES, *ARCHIVES))}, found {path}: "
        "rename the file after its format, or load it yourself and use Population.from_states"
    )


def _of_shards(shards: Sequence[Shard], spec: Spec, provenance: Mapping[str, Any]) -> Parts:
    counts = [shard.source.count for shard in shards]
    chain = joined([shard.chain for shard in shards], counts, torch.int64)
    density = joined([shard.log_density for shard in shards], counts, torch.float64)
    return Parts([shard.source for shard in shards], spec, chain, density, provenance)


def joined(values: Sequence[Tensor | None], counts: Sequence[int], dtype: torch.dtype) -> Tensor | None:
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
