"""A function over all members of a population, block by block, wherever the work runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from onebasin.cluster import Cluster, Serial
from onebasin.population.durable import need_space, whole_folder
from onebasin.population.parting import parts
from onebasin.population.shard import Block, Origin, block_spec, check_names, read_shard, shard_name, write_shard
from onebasin.population.sources import MemorySource
from onebasin.population.stacking import checked_result, collect
from onebasin.population.store import MANIFEST, Manifest, read_manifest, shard_paths, write_manifest
from onebasin.population.writer import BLOCK_BYTES
from onebasin.state import Spec, State, check_spec

if TYPE_CHECKING:
    from onebasin.population.crowd import Population

Function = Callable[[State, int, Any], tuple[Mapping[str, Tensor], Any]]
Beside = Callable[[int, int], Any]
_Shard = tuple[int, int, "Population", Any]
_Made = TypeVar("_Made")
_ON_THEIR_WAY = 3  # blocks between a worker and the result: as they came, unpacked, and joined
_NAME = "0"  # of the writer: one order of the shards, whoever writes them


@dataclass(frozen=True, eq=False)
class Mapped:
    """What `mapped` made.

    Attributes:
        population: the moved members, with the chains, log densities and provenance of those before.
        notes: what the function said about each block.
    """

    population: Population
    notes: list[Any]


def mapped(
    population: Population,
    function: Function,
    cluster: Cluster,
    *,
    path: Path | None = None,
    size: int | None = None,
    beside: Beside | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Mapped:
    """Apply a function to every block of members.

    Args:
        population: the members; they are not changed.
        function: (tensors (n, *shape), number of the first, what `beside` gave) -> tensors (n, ...) of the same names,
            and anything to be noted. It must not change its arguments.
        cluster: who does it. Workers write what they make, so that it does not travel.
        path: new folder for the result; None to keep it in memory.
        size: members in a block; about 64 MB by default.
        beside: gives what belongs to members start:stop and goes with them.
        progress: called with (members done, members in all).
    """
    notes: list[Any] = []
    shards = _shards(population, size, beside)
    if path is None:
        kept = cluster.map(_Kept(function), shards, shared=None)
        tensors = collect(_noting(kept, notes, len(population), progress), len(population))
        made = type(population).from_stacked(tensors or population.stacked(), provenance=population.provenance)
        return Mapped(replace(made, chain=population.chain, log_density=population.log_density), notes)
    with whole_folder(path) as folder:
        need_space(folder, population.nbytes)
        spec: Spec | None = None
        written = cluster.map(_Written(function, folder.absolute(), secrets.token_hex(8)), shards, shared=None)
        for start, own in _noting(written, notes, len(population), progress):
            spec = spec or own
            check_spec(own, spec, where=f"what the function made of members from {start} on")
        write_manifest(folder, Manifest(spec or population.spec, population.provenance))
    return Mapped(type(population).open(path), notes)


def missing_shards(population: Population, path: Path) -> list[int] | None:
    """Numbers of the shards that a folder lacks to be what `mapped` made of a population with its default blocks.

    None where the folder is something else: no population of the same tensors, with shards of other numbers or sizes.
    """
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_manifest(path)
    wanted = {shard_name(number, _NAME): len(part) for number, (_, part) in enumerate(parts(population))}
    found = {file.name: read_shard(file).source.count for file in shard_paths(path)}
    if manifest.spec != population.spec or any(wanted.get(name) != count for name, count in found.items()):
        return None
    return [number for number, name in enumerate(wanted) if name not in found]


def shard_tensors(population: Population, path: Path, number: int) -> State:
    """The tensors (members, *shape) of one shard of a folder that `mapped` has made of a population."""
    source = read_shard(path / shard_name(number, _NAME)).source
    return source.views(list(population.spec), 0, source.count)


def completed(
    population: Population,
    function: Function,
    cluster: Cluster,
    path: Path,
    numbers: list[int],
    beside: Beside | None = None,
) -> Population:
    """Write the shards of these numbers into the folder that `mapped` made; everything else in it stays as it is."""
    identity = read_manifest(path).identity
    shards = (shard for shard in _shards(population, None, beside) if shard[0] in set(numbers))
    for _ in cluster.map(_Written(function, path.absolute(), identity), shards, shared=None):
        pass
    return type(population).open(path)


def caller_bytes(population: Population, path: object) -> int:
    """Bytes that the caller of `mapped` holds at most: members in memory, and moved ones if they are kept there."""
    given = sum(
        tensor.nbytes
        for source in population._sources
        if isinstance(source, MemorySource)
        for tensor in source.tensors.values()
    )
    made = population.nbytes + _ON_THEIR_WAY * min(population.nbytes, BLOCK_BYTES)
    return given + (made if path is None else 0)


def map_members(
    population: Population, function: Callable[[State, int], Mapping[str, Tensor]], path: Path | None, size: int | None
) -> Population:
    """`Population.map`: no notes, and in this process."""

    def apply(block: State, start: int, beside: None) -> tuple[Mapping[str, Tensor], None]:
        return function(block, start), None

    return mapped(population, apply, Serial(), path=path, size=size).population


def _shards(population: Population, size: int | None, beside: Beside | None) -> Iterator[_Shard]:
    """Number, first member, members, and what belongs to them."""
    for number, (start, part) in enumerate(parts(population, size)):
        yield number, start, part, None if beside is None else beside(start, start + len(part))


def _noting(
    results: Iterator[tuple[int, int, _Made, Any]],
    notes: list[Any],
    members: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[int, _Made]]:
    """Pass on (start, made), keep the notes, and tell how far it is."""
    for start, count, made, note in results:
        notes.append(note)
        yield start, made
        if progress is not None:
            progress(start + count, members)


def _applied(function: Function, shard: _Shard) -> tuple[State, Any]:
    """What a function makes of a block, and its note."""
    _, start, part, own = shard
    block = part.stacked()
    made, note = function(dict(block), start, own)
    return checked_result(made, block, len(part)), note


@dataclass(frozen=True, eq=False)
class _Kept:
    """Work whose result is sent back."""

    function: Function

    def __call__(self, shared: None, shard: _Shard) -> tuple[int, int, State, Any]:
        _, start, part, _ = shard
        return start, len(part), *_applied(self.function, shard)


@dataclass(frozen=True, eq=False)
class _Written:
    """Work whose result is written where it was made; a shard that is worked on twice is written twice."""

    function: Function
    folder: Path
    identity: str  # of the population in the making

    def __call__(self, shared: None, shard: _Shard) -> tuple[int, int, Spec, Any]:
        number, start, part, _ = shard
        result, note = _applied(self.function, shard)
        spec = block_spec(result)
        check_names(spec)
        need_space(self.folder, sum(value.nbytes for value in result.values()))
        whole = Block(result, len(part), part.chain, part.log_density)
        write_shard(self.folder / shard_name(number, _NAME), whole, Origin(_NAME, number, self.identity), replace=True)
        return start, len(part), spec, note
