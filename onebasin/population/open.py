"""Networks at a path: a population folder, files or archives of networks or draws, a pattern, or a name on the hub.

A pattern or a name on the hub stands for several of these, laid end to end.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onebasin.errors import InputError, StorageError
from onebasin.population.archive import ARCHIVES, archive_paths, is_archive, networks_in, stacked_archive, too_large
from onebasin.population.arviz import posterior_arrays
from onebasin.population.draws import stack_draws
from onebasin.population.files import (
    SUFFIXES,
    TORCH_SUFFIXES,
    file_source,
    is_pretrained,
    network_paths,
    pretrained_source,
    torch_sources,
)
from onebasin.population.hub import Address, RemoteNetworks, remote_networks
from onebasin.population.member_storage import MemorySource, Source, convert_source
from onebasin.population.names import natural_key, strip_prefix
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
from onebasin.state import Spec, TensorSpec, check_spec, spec_of
from onebasin.storage import leftovers, read_array, read_arrays, read_header

DRAWS = (".npz", ".npy", ".nc")  # arrays of draws, which only a spec makes networks
Precision = torch.dtype | Literal["stored"] | None
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
class Wanted:
    """What networks that are opened must be.

    Attributes:
        spec: names, shapes and dtypes; None takes what is there.
        dtype: floating-point tensors are converted to it; "stored": the spec says names and shapes only; None: dtypes
            must be those of the spec.
        tied: every name -> the first name of the same tensor; a file may hold such a tensor once.
    """

    spec: Spec | None = None
    dtype: Precision = None
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def conversion(self) -> torch.dtype | None:
        """The dtype that floating-point tensors get, if any."""
        return self.dtype if isinstance(self.dtype, torch.dtype) else None

    def converted(self, spec: Spec) -> Spec:
        """A spec after conversion."""
        return {
            name: TensorSpec(tensor.shape, self.conversion)
            if self.conversion is not None and tensor.dtype.is_floating_point
            else tensor
            for name, tensor in spec.items()
        }

    def fitted(self, found: Spec) -> Spec:
        """The spec that networks must have where the first has `found`."""
        if self.spec is None:
            return found
        if self.dtype != "stored":
            return self.converted(self.spec)
        return {name: TensorSpec(tensor.shape, found.get(name, tensor).dtype) for name, tensor in self.spec.items()}


def is_draws(path: Path) -> bool:
    """Whether a name says that a file holds arrays of draws, which only a spec makes networks."""
    return path.suffix.lower() in DRAWS


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


def open_members(path: Path, wanted: Wanted) -> StoredMembers:
    """Find the members under `path`, and refuse any that are not what is wanted."""
    files = find(path)
    if files.remote is not None and files.remote.archived > IN_MEMORY:
        raise too_large(files.name)
    files = files.fetch()
    if list(files.paths) == [path]:
        members = _open(path, wanted, IN_MEMORY)
    else:
        members = _concatenate(files.paths, wanted, files.name)
        members = replace(members, provenance={"source": files.name, **files.origin, **members.provenance})
    if wanted.spec is not None:
        spec = wanted.fitted(members.spec)
        check_spec(members.spec, spec, where=str(path))
        members = replace(members, spec=spec)
    return members


def files_with_networks(path: Path) -> list[Path]:
    """The files of a folder that hold networks, in natural order; a file or a population folder is itself one."""
    if not path.is_dir() or (path / MANIFEST).exists() or is_pretrained(path):
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


def _open(path: Path, wanted: Wanted, room: int) -> StoredMembers:
    """The members of one path, converted."""
    members = _as_stored(path, wanted, room)
    sources = [convert_source(source, wanted.conversion) for source in members.sources]
    return replace(members, sources=sources, spec=wanted.converted(members.spec))


def _as_stored(path: Path, wanted: Wanted, room: int) -> StoredMembers:
    if not path.is_dir():
        return _open_file(path, wanted, room)
    if (paths := files_with_networks(path)) != [path]:
        return _concatenate(paths, wanted, str(path))
    if is_pretrained(path):
        source, spec = pretrained_source(path, wanted.spec, wanted.tied)
        return StoredMembers([source], spec, provenance={"files": [path.name]})
    manifest = read_manifest(path)
    return _of_shards(read_shards(path, manifest), manifest.spec, manifest.provenance)


def _concatenate(paths: Sequence[Path], wanted: Wanted, where: str) -> StoredMembers:
    """The members of several paths, each of which must agree with the spec or with the first."""
    room = IN_MEMORY
    if sum(path.stat().st_size for path in paths if is_archive(path)) > room:
        raise too_large(where)
    parts: list[StoredMembers] = []
    spec: Spec = {}
    origin = paths[0].name if wanted.spec is None or wanted.dtype == "stored" else "the given spec"
    for path in paths:
        part = _open(path, wanted, room)
        spec = spec if parts else wanted.fitted(part.spec)
        check_spec(part.spec, spec, where=f"{path}, compared with {origin},")
        parts.append(part)
        if is_archive(path):
            room -= len(part) * member_bytes(part.spec)
    counts = [len(part) for part in parts]
    return StoredMembers(
        [source for part in parts for source in part.sources],
        spec,
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


def _open_file(path: Path, wanted: Wanted, room: int) -> StoredMembers:
    suffix, expected = path.suffix.lower(), wanted.spec
    if suffix in DRAWS:
        return _open_draws(path, expected)
    if suffix == ".safetensors":
        file = read_header(path)
        if is_shard(file):
            shard = shard_of(file)
            return _of_shards([shard], shard.spec, {})
        source, spec = file_source(file, expected, wanted.tied)
        return StoredMembers([source], spec, provenance={"files": [path.name]})
    if suffix in TORCH_SUFFIXES:
        members = torch_sources(path, expected)
        spec = members[0][1]
        for index, (_, other) in enumerate(members):
            where = f"network {index} of {path}, compared with the first,"
            check_spec(wanted.converted(other), wanted.converted(spec), where=where)
        return StoredMembers([source for source, _ in members], spec, provenance={"files": [path.name]})
    if is_archive(path):
        if path.stat().st_size > room:
            raise too_large(path)
        stacked = stacked_archive(path, _of_archive(path, wanted), room, wanted.conversion)
        source = MemorySource(stacked, len(next(iter(stacked.values()))))
        return StoredMembers([source], block_spec(stacked), provenance={"files": [path.name]})
    raise StorageError(
        f"expected a folder or a file {', '.join((*SUFFIXES, *ARCHIVES, *DRAWS))}, found {path}: "
        "rename the file after its format, or load it yourself and use Population.from_states"
    )


def _of_archive(path: Path, wanted: Wanted) -> Spec | None:
    """What the networks of an archive are compared with."""
    if wanted.spec is None or wanted.dtype != "stored":
        return None if wanted.spec is None else wanted.fitted({})
    first = spec_of(next(networks_in(path))[1])
    return wanted.fitted({name: first[stored] for name, stored in strip_prefix(first, wanted.spec).items()})


def _open_draws(path: Path, expected: Spec | None) -> StoredMembers:
    if not expected:
        raise InputError(
            f"{path} holds arrays of draws, and only the shapes of their network tell draws from chains: give "
            "spec=model (on the command line --model)"
        )
    if not path.is_file():
        raise StorageError(f"{path} does not exist: check the path")
    if path.suffix.lower() == ".npz":
        draws = stack_draws(read_arrays(path), expected, str(path))
    elif path.suffix.lower() == ".npy":
        draws = stack_draws({path.stem: read_array(path)}, expected, str(path))
    else:
        draws = stack_draws(posterior_arrays(path)[0], expected, str(path), axes=(2,))
    source = MemorySource(draws.stacked, len(next(iter(draws.stacked.values()))))
    chain = None if draws.chain is None else draws.chain.to(torch.int64)
    density = None if draws.log_density is None else draws.log_density.to(torch.float64)
    facts: dict[str, Any] = {"files": [path.name], **({"left_out": draws.left_out} if draws.left_out else {})}
    return StoredMembers([source], block_spec(draws.stacked), chain, density, facts)


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
