"""A function over all members of a population, block by block, wherever the work runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from onebasin.errors import SpecError
from onebasin.parallel import Executor, SerialExecutor
from onebasin.population.member_storage import empty
from onebasin.population.shard import (
    MANIFEST,
    Block,
    Manifest,
    Origin,
    block_spec,
    check_names,
    read_manifest,
    read_shard,
    shard_name,
    shard_paths,
    write_manifest,
    write_shard,
)
from onebasin.state import Spec, State, check_spec
from onebasin.storage import need_space, whole_folder

if TYPE_CHECKING:
    from onebasin.population.population import Population

Function = Callable[[State, int, Any], tuple[Mapping[str, Tensor], Any]]
Extras = Callable[[int, int], Any]
_Shard = tuple[int, int, "Population", Any]  # number, first member, members, what belongs to them
_Result = TypeVar("_Result")
_WRITER = "0"  # the name of the writer of all shards: one order, in whatever process they are written


@dataclass(frozen=True, eq=False)
class Mapped:
    """The result of `map_blocks`.

    Attributes:
        population: the new members, with the chains, log densities and provenance of those before.
        notes: the second value that the function returned for each block.
    """

    population: Population
    notes: list[Any]


def map_blocks(
    population: Population,
    function: Function,
    executor: Executor,
    *,
    path: Path | None = None,
    size: int | None = None,
    extras: Extras | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Mapped:
    """Apply a function to every block of members.

    Args:
        population: the members; they are not changed.
        function: (tensors (n, *shape), index of the first, what `extras` gave) -> tensors (n, ...) of the same names,
            and a note. It must not change its arguments.
        executor: where the function is called. With `path` its workers write their results themselves.
        path: new folder for the result; None for memory.
        size: members in a block; about 64 MB by default.
        extras: (start, stop) -> what is sent to the function with members start:stop.
        progress: called with (members done, members in all).
    """
    notes: list[Any] = []
    shards = _shards(population, size, extras)
    if path is None:
        returned = executor.map(_ReturnBlock(function), shards, shared=None)
        tensors = _concatenate(_collect_notes(returned, notes, len(population), progress), len(population))
        return Mapped(_with_facts(population, tensors or population.stacked()), notes)
    with whole_folder(path) as folder:
        need_space(folder, population.nbytes)
        spec: Spec | None = None
        written = executor.map(_WriteBlock(function, folder.absolute(), secrets.token_hex(8)), shards, shared=None)
        for start, block in _collect_notes(written, notes, len(population), progress):
            spec = spec or block
            check_spec(block, spec, where=f"what the function made of members from {start} on")
        write_manifest(folder, Manifest(spec or population.spec, population.provenance))
    return Mapped(type(population).open(path), notes)


def map_members(
    population: Population, function: Callable[[State, int], Mapping[str, Tensor]], path: Path | None, size: int | None
) -> Population:
    """`Population.map`: without notes, in this process."""

    def apply(block: State, start: int, extras: None) -> tuple[Mapping[str, Tensor], None]:
        return function(block, start), None

    if path is None and size is None and population.is_one_tensor_stack:
        result = _check_result(function(population.stacked(), 0), population.stacked(), len(population))
        return _with_facts(population, result)
    return map_blocks(population, apply, SerialExecutor(), path=path, size=size).population


def _with_facts(population: Population, tensors: State) -> Population:
    """New members with the chains, log densities and provenance of `population`."""
    members = type(population).from_stacked(tensors, provenance=population.provenance)
    return replace(members, chain=population.chain, log_density=population.log_density)


def missing_shards(population: Population, path: Path) -> list[int] | None:
    """Numbers of the shards that a folder lacks to be what `map_blocks` makes of a population with default blocks.

    None where the folder is something else: no population of the same tensors, with shards of other numbers or sizes.
    """
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_manifest(path)
    wanted = {shard_name(number, _WRITER): len(part) for number, (_, part) in enumerate(population.parts())}
    stored = {file.name: read_shard(file).source.count for file in shard_paths(path)}
    if manifest.spec != population.spec or any(wanted.get(name) != count for name, count in stored.items()):
        return None
    return [number for number, name in enumerate(wanted) if name not in stored]


def shard_tensors(population: Population, path: Path, number: int) -> State:
    """The tensors (members, *shape) of one shard of a folder that `map_blocks` has made of a population."""
    source = read_shard(path / shard_name(number, _WRITER)).source
    return source.views(list(population.spec), 0, source.count)


def complete_shards(
    population: Population,
    function: Function,
    executor: Executor,
    path: Path,
    numbers: list[int],
    extras: Extras | None = None,
) -> Population:
    """Write the shards of these numbers into the folder that `map_blocks` made; all others stay as they are."""
    identity = read_manifest(path).identity
    shards = (shard for shard in _shards(population, None, extras) if shard[0] in set(numbers))
    for _ in executor.map(_WriteBlock(function, path.absolute(), identity), shards, shared=None):
        pass
    return type(population).open(path)


def _shards(population: Population, size: int | None, extras: Extras | None) -> Iterator[_Shard]:
    for number, (start, part) in enumerate(population.parts(size)):
        yield number, start, part, None if extras is None else extras(start, start + len(part))


def _collect_notes(
    results: Iterator[tuple[int, int, _Result, Any]],
    notes: list[Any],
    members: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[int, _Result]]:
    """Yield (start, result), append the notes to `notes`, and call `progress`."""
    for start, count, result, note in results:
        notes.append(note)
        yield start, result
        if progress is not None:
            progress(start + count, members)


def _apply(function: Function, shard: _Shard) -> tuple[State, Any]:
    """The tensors and the note that a function returns for a block."""
    _, start, part, extras = shard
    block = part.stacked()
    result, note = function(dict(block), start, extras)
    return _check_result(result, block, len(part)), note


def _check_result(result: Mapping[str, Tensor], block: State, count: int) -> State:
    """The tensors of a result in the order of the block, of which it must have the names and the number of members."""
    wrong = [name for name in result if result[name].shape[:1] != (count,)]
    if set(result) != set(block) or wrong:
        shapes = {name: tuple(value.shape) for name, value in result.items()}
        raise SpecError(
            f"a mapped function must return the names it was given ({', '.join(list(block)[:4])}, ...), "
            f"each with {count} members first; found {shapes}: correct the function"
        )
    return {name: result[name] for name in block}


def _concatenate(blocks: Iterator[tuple[int, State]], count: int) -> State:
    """Tensors (count, *shape) out of blocks; a single block is taken as it is."""
    whole: State = {}
    for start, block in blocks:
        size = len(next(iter(block.values())))
        if size == count:
            return block
        if not whole:
            devices = {name: value.device for name, value in block.items()}
            whole = {name: empty(tensor, count, devices[name]) for name, tensor in block_spec(block).items()}
        for name, value in block.items():
            whole[name][start : start + size].copy_(value)
    return whole


@dataclass(frozen=True, eq=False)
class _ReturnBlock:
    """Work whose result is sent back."""

    function: Function

    def __call__(self, shared: None, shard: _Shard) -> tuple[int, int, State, Any]:
        _, start, part, _ = shard
        return start, len(part), *_apply(self.function, shard)


@dataclass(frozen=True, eq=False)
class _WriteBlock:
    """Work whose result is written by its worker; a shard that is worked on twice is written twice."""

    function: Function
    folder: Path
    identity: str  # of the new population

    def __call__(self, shared: None, shard: _Shard) -> tuple[int, int, Spec, Any]:
        number, start, part, _ = shard
        result, note = _apply(self.function, shard)
        spec = block_spec(result)
        check_names(spec)
        need_space(self.folder, sum(value.nbytes for value in result.values()))
        block, origin = Block(result, len(part), part.chain, part.log_density), Origin(_WRITER, number, self.identity)
        write_shard(self.folder / shard_name(number, _WRITER), block, origin, replace=True)
        return start, len(part), spec, note
