"""The Population: many networks of one architecture behind one face, in memory or on disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError, StorageError
from onebasin.parallel import Executor, SerialExecutor
from onebasin.population.archive import ARCHIVES, archive_paths, is_archive, stacked_archive, too_large
from onebasin.population.check import source_problems
from onebasin.population.files import SUFFIXES, TORCH_SUFFIXES, file_source, network_paths, torch_sources
from onebasin.population.hub import find
from onebasin.population.shard import (
    MANIFEST,
    Block,
    Manifest,
    Origin,
    Shard,
    block_spec,
    check_names,
    is_shard,
    read_manifest,
    read_shard,
    read_shards,
    shard_key,
    shard_name,
    shard_of,
    shard_paths,
    write_manifest,
    write_shard,
)
from onebasin.population.sources import MemorySource, Source, empty, gather
from onebasin.population.writer import (
    BLOCK_BYTES,
    SHARD_BYTES,
    PopulationWriter,
    block_members,
    member_bytes,
    save_file,
    save_folder,
)
from onebasin.state import Spec, State, TensorSpec, as_spec, check_spec, dtype_name, restore, spec_of, state_of
from onebasin.storage import leftovers, need_space, read_header, whole_folder

# ----------------------------------------------------------------------
# From what users hold (dicts, arrays, indices) to stacked tensors (members, *shape).


def as_tensors(values: Mapping[str, Any]) -> State:
    """Take tensors as they are, detached, and arrays of numpy's kind without a copy where that is safe."""
    try:
        return {name: _as_tensor(value) for name, value in values.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"expected a dict of tensors or arrays, found something else: {error}") from error


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def stack_states(states: Iterable[Mapping[str, Any]]) -> State:
    """Stack state dicts into new tensors (members, *shape), in the order of names of the first."""
    # What a generator yields may be live (the weights of a network in training), so it is copied at once.
    live = not isinstance(states, Sequence)
    members: list[State] = []
    for index, given in enumerate(states):
        state = as_tensors(given)
        if members:
            where = f"member {index}, compared with member 0,"
            check_spec(spec_of(state), spec_of(members[0]), where=where)
        members.append({name: value.clone() for name, value in state.items()} if live else state)
    if not members:
        raise InputError("expected at least one network, found none: pass a list of modules or state dicts")
    return {name: torch.stack([state[name] for state in members]) for name in members[0]}


def merge_chains(stacked: State) -> tuple[State, Tensor]:
    """Turn (chains, draws, *shape) into (chains * draws, *shape) and the chain of each member."""
    leading = {name: tuple(value.shape[:2]) for name, value in stacked.items()}
    if len(set(leading.values())) != 1 or any(len(shape) != 2 for shape in leading.values()):
        raise SpecError(
            f"expected tensors (chains, draws, *shape) of equal chains and draws, found {leading}: "
            "stack each tensor over the same chains"
        )
    chains, draws = next(iter(leading.values()))
    return {name: value.flatten(0, 1) for name, value in stacked.items()}, torch.arange(chains).repeat_interleave(draws)


def member_values(values: Any, count: int, dtype: torch.dtype, what: str) -> Tensor | None:
    """Return one value per member (count,), or None."""
    if values is None:
        return None
    found = torch.as_tensor(values).detach().to(device="cpu", dtype=dtype)
    if tuple(found.shape) != (count,):
        raise InputError(
            f"expected {what} of shape ({count},), one per member, found {tuple(found.shape)}: give one per member"
        )
    return found


def as_rows(index: slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """Translate a slice, a list of integers, or a boolean or integer tensor into positions (n,)."""
    if isinstance(index, slice):
        return torch.arange(count)[index] if index.step is None or index.step > 0 else _reversed(index, count)
    if isinstance(index, int):
        raise InputError(f"population[{index}] is not a population: use population.member({index}) for one network")
    rows = torch.as_tensor(index).cpu()
    if rows.dtype == torch.bool:
        if tuple(rows.shape) != (count,):
            raise InputError(f"expected a mask of shape ({count},), found {tuple(rows.shape)}: give one per member")
        return rows.nonzero().flatten()
    rows = rows.to(torch.int64) if rows.numel() == 0 else rows
    wrong = rows.dtype.is_floating_point or rows.dim() != 1 or bool(((rows < -count) | (rows >= count)).any())
    if wrong:
        raise InputError(f"expected a list of members from {-count} to {count - 1}, found {index}: correct the list")
    return torch.where(rows < 0, rows + count, rows).to(torch.int64)


def _reversed(index: slice, count: int) -> Tensor:
    """Torch has no negative steps."""
    return torch.tensor(range(count)[index], dtype=torch.int64)


def flat_rows(matrix: Any) -> tuple[Tensor, Tensor | None]:
    """A matrix (members, D), and the chain of each member if it came as (chains, draws, D)."""
    rows, chain = as_tensors({"matrix": matrix})["matrix"], None
    if rows.dim() == 3:
        merged, chain = merge_chains({"matrix": rows})
        rows = merged["matrix"]
    if rows.dim() != 2:
        raise SpecError(
            f"expected a matrix (members, D) or (chains, draws, D), found shape {tuple(rows.shape)}: reshape it"
        )
    return rows, chain


def not_finite_rows(values: Tensor) -> list[int]:
    """Return the members of (n, *shape) that hold NaN or infinity."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex):
        return []
    wide = values.float() if values.dtype.itemsize == 1 else values  # torch knows too little of float8
    rows = ~torch.isfinite(wide.unsqueeze(-1)).flatten(1).all(1)
    return [int(row) for row in rows.nonzero().flatten()]


def checked_result(made: Mapping[str, Tensor], block: State, count: int) -> State:
    """What a function made of a block: it must have the names and the number of members of the block."""
    wrong = [name for name in made if made[name].shape[:1] != (count,)]
    if set(made) != set(block) or wrong:
        found = {name: tuple(value.shape) for name, value in made.items()}
        raise SpecError(
            f"a mapped function must return the names it was given ({', '.join(list(block)[:4])}, ...), "
            f"each with {count} members first; found {found}: correct the function"
        )
    return {name: made[name] for name in block}


def collect(results: Iterator[tuple[int, State]], count: int) -> State:
    """Join blocks into tensors (count, *shape); a single block is taken as it is."""
    whole: State = {}
    for start, block in results:
        size = len(next(iter(block.values())))
        if size == count:
            return block
        if not whole:
            devices = {name: value.device for name, value in block.items()}
            whole = {name: empty(tensor, count, devices[name]) for name, tensor in block_spec(block).items()}
        for name, value in block.items():
            whole[name][start : start + size].copy_(value)
    return whole


# ----------------------------------------------------------------------
# What a path holds: a population folder, a folder of networks or of archives, a shard, an archive, or one netwo


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


# ----------------------------------------------------------------------
# Some members of a population as one that can travel: with the files they are in, or with their own tensors.


def parts(population: Population, size: int | None = None) -> Iterator[tuple[int, Population]]:
    """Yield (start, at most `size` consecutive members); about 64 MB each by default.

    >>> from onebasin.population import Population
    >>> whole = Population.from_stacked({"w": torch.arange(5.0)})
    >>> [(start, part.tensor("w").tolist()) for start, part in parts(whole, 2)]
    [(0, [0.0, 1.0]), (2, [2.0, 3.0]), (4, [4.0])]
    """
    if size is not None and size < 1:
        raise InputError(f"a part has at least 1 member, found {size}: leave size out for about 64 MB")
    step = size or block_members(population.spec)
    for start in range(0, len(population), step):
        yield start, members_between(population, start, min(start + step, len(population)))


def readers(population: Population, executor: Executor) -> Executor:
    """Who reads a population for a pass that is cheap: workers what is in files, this process what is in memory.

    To send a block of numbers costs more than to add them up. The result is the same.
    """
    return SerialExecutor() if all(isinstance(source, MemorySource) for source in population._sources) else executor


def members_between(population: Population, start: int, stop: int) -> Population:
    """Members start:stop alone.

    Those in memory are copied, so that their place and order in memory do not depend on who works on them: products of
    matrices may round differently at another alignment.
    """
    rows = population._rows[start:stop]
    offsets = torch.tensor([0, *(source.count for source in population._sources)]).cumsum(0)
    owner = torch.searchsorted(offsets, rows, right=True) - 1
    places = torch.empty_like(rows)
    sources: list[Source] = []
    kept = 0  # members of the sources that are taken along
    for index in owner.unique().tolist():
        source, inside = population._sources[index], owner == index
        own = rows[inside] - offsets[index]
        if isinstance(source, MemorySource):
            taken = {name: value[own.to(value.device)].contiguous() for name, value in source.tensors.items()}
            source, own = MemorySource(taken, len(own)), torch.arange(len(own))
        places[inside] = kept + own
        sources.append(source)
        kept += source.count
    chain, density = (
        None if values is None else values[start:stop].clone() for values in (population.chain, population.log_density)
    )
    return replace(population, _sources=tuple(sources), _rows=places, provenance={}, chain=chain, log_density=density)


# ----------------------------------------------------------------------
# A function over all members of a population, block by block, wherever the work runs.


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
    executor: Executor,
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
        executor: who does it. Workers write what they make, so that it does not travel.
        path: new folder for the result; None to keep it in memory.
        size: members in a block; about 64 MB by default.
        beside: gives what belongs to members start:stop and goes with them.
        progress: called with (members done, members in all).
    """
    notes: list[Any] = []
    shards = _shards(population, size, beside)
    if path is None:
        kept = executor.map(_Kept(function), shards, shared=None)
        tensors = collect(_noting(kept, notes, len(population), progress), len(population))
        made = type(population).from_stacked(tensors or population.stacked(), provenance=population.provenance)
        return Mapped(replace(made, chain=population.chain, log_density=population.log_density), notes)
    with whole_folder(path) as folder:
        need_space(folder, population.nbytes)
        spec: Spec | None = None
        written = executor.map(_Written(function, folder.absolute(), secrets.token_hex(8)), shards, shared=None)
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
    executor: Executor,
    path: Path,
    numbers: list[int],
    beside: Beside | None = None,
) -> Population:
    """Write the shards of these numbers into the folder that `mapped` made; everything else in it stays as it is."""
    identity = read_manifest(path).identity
    shards = (shard for shard in _shards(population, None, beside) if shard[0] in set(numbers))
    for _ in executor.map(_Written(function, path.absolute(), identity), shards, shared=None):
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

    return mapped(population, apply, SerialExecutor(), path=path, size=size).population


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


# ----------------------------------------------------------------------
# The Population: many networks of one architecture behind one face, in memory or on disk.


Architecture = Mapping[str, TensorSpec] | Mapping[str, Tensor] | nn.Module
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, repr=False, eq=False)
class Population:
    """Many networks: the same names, each tensor (members, *shape).

    Build one with a `from_...` method or `open`. Slices are lazy, and members on disk are read when asked for.

    >>> population = Population.from_models([nn.Linear(2, 3), nn.Linear(2, 3)])
    >>> population
    Population of 2 networks: 2 tensors, 9 weights each, float32, 0.0 MB in memory
    >>> population.tensor("weight").shape
    torch.Size([2, 3, 2])

    Attributes:
        spec: name -> shape and dtype of one member.
        chain: int64 (members,) or None; -1 where unknown.
        log_density: float64 (members,) or None; NaN where unknown.
        provenance: where the networks come from, JSON-able.
    """

    _sources: Sequence[Source]
    _rows: Tensor  # (members,) int64: positions in the sources laid end to end
    spec: Spec
    chain: Tensor | None = None
    log_density: Tensor | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    where: str = "in memory"

    @classmethod
    def from_stacked(
        cls,
        tensors: Mapping[str, Any],
        *,
        chain: Any = None,
        log_density: Any = None,
        provenance: Mapping[str, Any] | None = None,
        by_chain: bool = False,
    ) -> Population:
        """Take tensors or arrays (members, *shape) as they are, without a copy.

        Args:
            tensors: name -> stacked values.
            chain: chain of each member (members,).
            log_density: log density of each member (members,).
            provenance: where the networks come from, JSON-able.
            by_chain: the tensors are (chains, draws, *shape), as samplers return them; chains are laid end to end.
        """
        stacked = as_tensors(tensors)
        if by_chain:
            stacked, chain = merge_chains(stacked)
        lengths = {name: tuple(value.shape[:1]) for name, value in stacked.items()}
        if not stacked or len(set(lengths.values())) != 1 or () in lengths.values():
            raise SpecError(
                f"expected tensors (members, *shape) with one number of members, found {lengths or 'no tensor'}: "
                "stack each tensor over the same members"
            )
        count = next(iter(lengths.values()))[0]
        return cls(
            (MemorySource(stacked, count),),
            torch.arange(count),
            block_spec(stacked),
            member_values(chain, count, torch.int64, "chain"),
            member_values(log_density, count, torch.float64, "log_density"),
            dict(provenance or {}),
        )

    @classmethod
    def from_states(cls, states: Iterable[Mapping[str, Any]], **facts: Any) -> Population:
        """Stack networks given as state dicts; `facts` are those of `from_stacked`. The dicts are not kept.

        >>> len(Population.from_states([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], chain=[0, 1]))
        2
        """
        return cls.from_stacked(stack_states(states), **facts)

    @classmethod
    def from_models(cls, models: Iterable[nn.Module], **facts: Any) -> Population:
        """Stack the states of modules of one architecture; the modules are not kept."""
        return cls.from_states([state_of(model) for model in models], **facts)

    @classmethod
    def from_flat(cls, matrix: Any, spec: Architecture, **facts: Any) -> Population:
        """Cut a matrix (members, D), or (chains, draws, D) as samplers return it, into tensors; see `restore`.

        A state or module also lends its integer buffers.
        """
        rows, chain = flat_rows(matrix)
        facts = facts if chain is None else {**facts, "chain": chain}
        rest: Mapping[str, Any] = state_of(spec) if isinstance(spec, nn.Module) else spec
        tensors = {name: value for name, value in rest.items() if isinstance(value, Tensor)}
        return cls.from_stacked(restore(rows, as_spec(spec), tensors), **facts)

    @classmethod
    def open(cls, path: PathLike, *, spec: Architecture | None = None, finite: bool = False) -> Population:
        """Open a population folder, a folder of one-network files, or one file; weights stay on the disk.

        Args:
            path: a folder with `population.json`, or with .safetensors, .pt, .pth, .th or .ckpt files (one network
                each, in natural order of their names), or one such file; .tgz or .tar archives of safetensors files,
                read into memory; a pattern of these; or hf://OWNER/NAME on the hub. Torch files never run code.
            spec: refuse members that differ from this spec, state or module; a shared prefix of names is stripped.
            finite: read everything, and refuse NaN and infinity.
        """
        parts = open_parts(Path(path), None if spec is None else as_spec(spec))
        rows = torch.arange(sum(source.count for source in parts.sources))
        facts = (parts.chain, parts.log_density, parts.provenance)
        population = cls(tuple(parts.sources), rows, parts.spec, *facts, str(path))
        if finite and (problems := population._not_finite()):
            raise SpecError(problems[0])
        return population

    @classmethod
    def concatenate(cls, populations: Iterable[Population]) -> Population:
        """Lay populations of one spec end to end, without a copy."""
        parts = list(populations)
        if not parts:
            raise InputError("expected at least one population to concatenate, found none: pass a list of populations")
        for index, part in enumerate(parts):
            check_spec(part.spec, parts[0].spec, where=f"population {index}, compared with the first,")
        sizes = [sum(source.count for source in part._sources) for part in parts]
        counts = [len(part) for part in parts]
        starts = accumulate(sizes[:-1], initial=0)
        places = list(dict.fromkeys(part.where for part in parts))
        return cls(
            tuple(source for part in parts for source in part._sources),
            torch.cat([part._rows + start for part, start in zip(parts, starts, strict=True)]),
            parts[0].spec,
            joined([part.chain for part in parts], counts, torch.int64),
            joined([part.log_density for part in parts], counts, torch.float64),
            {"parts": [dict(part.provenance) for part in parts]},
            places[0] if len(places) == 1 else f"{len(places)} places",
        )

    @staticmethod
    def writer(path: PathLike, spec: Architecture, **options: Any) -> PopulationWriter:
        """Open a `PopulationWriter` on a new or an existing folder; see there for the options."""
        return PopulationWriter(path, as_spec(spec), **options)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of all members once they are in memory."""
        return len(self) * member_bytes(self.spec)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[State]:
        return (self.member(index) for index in range(len(self)))

    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> Population:
        rows = as_rows(index, len(self))
        chain = None if self.chain is None else self.chain[rows]
        density = None if self.log_density is None else self.log_density[rows]
        return replace(self, _rows=self._rows[rows], chain=chain, log_density=density)

    def __repr__(self) -> str:
        weights = sum(tensor.size for tensor in self.spec.values())
        dtypes = "/".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in self.spec.values()))
        members = f"{len(self):,} network{'s' if len(self) != 1 else ''}"
        place = self.where if self.where == "in memory" else f"at {self.where}"
        return (
            f"Population of {members}: {len(self.spec)} tensors, {weights:,} weights each, {dtypes}, "
            f"{self.nbytes / 1e6:,.1f} MB {place}"
        )

    def member(self, index: int) -> State:
        """Return one network as a fresh dict that `load_state_dict` accepts; negative counts from the end."""
        if not -len(self) <= index < len(self):
            raise InputError(f"there are {len(self)} members, found index {index}: use one below {len(self)}")
        row = self._rows[index].reshape(1)
        return {name: value[0].clone() for name, value in gather(self._sources, row, self.spec).items()}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor of all members (members, *shape)."""
        if name not in self.spec:
            known = ", ".join(self.names[:6])
            raise InputError(f"expected the name of a tensor ({known}, ...), found {name!r}: see population.names")
        return gather(self._sources, self._rows, {name: self.spec[name]})[name]

    def stacked(self) -> State:
        """Return all members as tensors (members, *shape); in memory they may be views, so do not change them."""
        return gather(self._sources, self._rows, self.spec)

    def blocks(self, size: int | None = None) -> Iterator[tuple[int, State]]:
        """Yield (start, tensors (n, *shape)) for consecutive members, n <= size; about 64 MB each by default."""
        if size is not None and size < 1:
            raise InputError(f"a block has at least 1 member, found {size}: leave size out for about 64 MB")
        step = size or block_members(self.spec)
        for start in range(0, len(self), step):
            yield start, gather(self._sources, self._rows[start : start + step], self.spec)

    def map(
        self,
        function: Callable[[State, int], Mapping[str, Tensor]],
        *,
        path: PathLike | None = None,
        size: int = 0,
    ) -> Population:
        """Apply a function to every member, block by block; chains, densities and provenance are kept.

        Args:
            function: (tensors (n, *shape), index of the first member) -> tensors (n, ...) of the same names. It must
                not change its argument.
            path: stream the result into this new population folder instead of memory.
            size: members per block; 0 for about 64 MB, or for all members at once where they are in memory already
                and the result stays there.
        """
        if path is None and not size and len(self._sources) == 1 and isinstance(self._sources[0], MemorySource):
            made = checked_result(function(self.stacked(), 0), self.stacked(), len(self))
            result = Population.from_stacked(made, provenance=self.provenance)
            return replace(result, chain=self.chain, log_density=self.log_density)
        return map_members(self, function, None if path is None else Path(path), size or None)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Population:
        """Return the population in memory on a device, its floating-point tensors in a dtype."""
        return self.map(
            lambda block, start: {
                name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
                for name, value in block.items()
            }
        )

    def save(self, path: PathLike) -> Path:
        """Write a population folder, or a single file if `path` ends in .safetensors; all or nothing.

        A folder must be new or empty; to add to a population use `Population.writer`.
        """
        if Path(path).suffix == ".safetensors":
            save_file(Path(path), self.stacked(), self)
        else:
            save_folder(Path(path), self.blocks(block_members(self.spec, SHARD_BYTES)), self)
        return Path(path)

    def check(self, finite: bool = False) -> list[str]:
        """Read what is on disk and compare checksums; look for unfinished files; return one sentence per problem.

        With `finite`, also look for NaN and infinity in the members. A folder that no longer opens is examined
        by `onebasin check` and `inspect_population(path)`.
        """
        problems = source_problems(self._sources)
        if finite and not problems:
            problems += self._not_finite()
        return problems

    def _not_finite(self) -> list[str]:
        """Name each member and tensor with NaN or infinity."""
        place = "" if self.where == "in memory" else f" of {self.where}"
        return [
            f"member {start + row}{place} is not finite: tensor {name} holds NaN or infinity; "
            "leave this network out or train it again with a smaller step"
            for start, block in self.blocks()
            for name, value in block.items()
            for row in not_finite_rows(value)
        ]
