"""What a path holds: a population folder, a folder of networks or of archives, a shard, an archive, or one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import StorageError
from onebasin.population.archive import ARCHIVES, archive_paths, is_archive, stacked_archive
from onebasin.population.durable import leftovers
from onebasin.population.read import SUFFIXES, TORCH_SUFFIXES, file_source, network_paths, torch_sources
from onebasin.population.shard import Shard, block_spec, is_shard, shard_key, shard_of
from onebasin.population.sources import MemorySource, Source
from onebasin.population.store import MANIFEST, read_manifest, read_shards
from onebasin.population.tensor_file import read_header
from onebasin.state import Spec, check_spec


@dataclass(frozen=True)
class Parts:
    """What a Population is made of."""

    sources: Sequence[Source]
    spec: Spec
    chain: Tensor | None = None
    log_density: Tensor | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def open_parts(path: Path, expected: Spec | None) -> Parts:
    """Find the members under `path`; with `expected`, refuse any that differ from it."""
    if not path.exists():
        raise StorageError(f"{path} does not exist: check the path")
    parts = _open_folder(path, expected) if path.is_dir() else _open_file(path, expected)
    if expected is not None:
        check_spec(parts.spec, expected, where=str(path))
        parts = Parts(parts.sources, expected, parts.chain, parts.log_density, parts.provenance)
    return parts


def _open_folder(folder: Path, expected: Spec | None) -> Parts:
    paths = network_paths(folder)
    if (folder / MANIFEST).exists() or any(shard_key(path) for path in paths):
        manifest = read_manifest(folder)
        return _of_shards(read_shards(folder, manifest.spec), manifest.spec, manifest.provenance)
    paths = paths or archive_paths(folder)
    if not paths:
        unfinished = leftovers(folder)
        found = f"an unfinished {unfinished[0].name} of a writer" if unfinished else "none"
        raise StorageError(
            f"expected {MANIFEST} or files {', '.join((*SUFFIXES, *ARCHIVES))} in {folder}, found {found}: "
            "check the path, or run again what should have written it"
        )
    sources: list[Source] = []
    spec = expected or {}
    for path in paths:
        parts = _open_file(path, expected)
        spec = spec or parts.spec
        check_spec(
            parts.spec,
            spec,
            where=f"{path}, compared with {'the given spec' if expected else paths[0].name},",
        )
        sources += parts.sources
    return Parts(sources, spec, provenance={"files": [path.name for path in paths]})


def _open_file(path: Path, expected: Spec | None) -> Parts:
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
        names, stacked = stacked_archive(path, expected)
        return Parts([MemorySource(stacked, len(names))], block_spec(stacked), provenance={"files": [path.name]})
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
