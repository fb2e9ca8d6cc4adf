"""Write populations: a writer that appends members block by block, and whole populations, all or nothing."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from onebasin.errors import InputError, StorageError
from onebasin.population.files import network_paths
from onebasin.population.member_storage import empty
from onebasin.population.shard import (
    MANIFEST,
    Block,
    Manifest,
    Origin,
    block_spec,
    check_names,
    holds_block,
    read_shard,
    read_shards,
    shard_key,
    shard_name,
    write_manifest,
    write_shard,
)
from onebasin.state import Spec, State, check_spec, check_state
from onebasin.storage import make_folder, need_space, whole_folder

if TYPE_CHECKING:
    from onebasin.population.population import Population

BLOCK_BYTES = 64 << 20  # default size of a block: large against the cost of an fsync, small against memory
_BUFFERED = 1024  # members that wait in memory at most: a sampler of tiny networks should not lose hours
SHARD_BYTES = 512 << 20  # largest shard of a whole population, whose members need no buffer


def member_bytes(spec: Spec) -> int:
    """Bytes of one member."""
    return sum(tensor.nbytes for tensor in spec.values())


def block_members(spec: Spec, nbytes: int = BLOCK_BYTES) -> int:
    """How many members fit into one block of `nbytes`, at least one."""
    return max(1, nbytes // max(1, member_bytes(spec)))


def block_at(start: int, tensors: State, population: Population) -> Block:
    """A block of tensors (n, *shape) of consecutive members with their chains and log densities."""
    count = len(next(iter(tensors.values())))
    chain, density = population.chain, population.log_density
    rows = slice(start, start + count)
    return Block(tensors, count, None if chain is None else chain[rows], None if density is None else density[rows])


def _check_folder(folder: Path) -> None:
    """Refuse a folder of one-network files: with a manifest they would no longer be found."""
    networks = [path.name for path in network_paths(folder) if not shard_key(path)]
    if networks and not (folder / MANIFEST).exists():
        raise InputError(
            f"expected a new folder or a population, but {folder} holds other networks ({networks[0]}, ...): "
            "choose another path"
        )


def _values_or_none(values: Sequence[float | None], unknown: float) -> Tensor | None:
    """Return values as a tensor (n,), or None if none is known."""
    if all(value is None for value in values):
        return None
    dtype = torch.int64 if isinstance(unknown, int) else torch.float64
    return torch.tensor([unknown if value is None else value for value in values], dtype=dtype)


class PopulationWriter:
    """Appends members to a folder; several writers, also in several processes, may share it.

    Use it as a context manager: full blocks are written as shards at once, the last one at the end, also when an
    exception or Ctrl-C ends the block. On an existing population the spec must agree, and members are added.

    Args:
        path: the folder.
        spec: shapes and dtypes of one member.
        provenance: what to remember about the origin, JSON-able; kept from the first writer.
        shard_members: members per shard, which a killed process may lose; by default about 64 MB, at most 1,024.
        name: letters, digits and `_` that name this writer in its shards. Members are ordered by (sequence, name),
            so named writers give the same order in every run; without one a random name is drawn.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: Spec,
        *,
        provenance: Mapping[str, Any] | None = None,
        shard_members: int | None = None,
        name: str | None = None,
    ) -> None:
        check_names(spec)
        if shard_members is not None and shard_members < 1:
            raise InputError(f"shard_members must be at least 1, found {shard_members}: leave it out for about 64 MB")
        if name is not None and not re.fullmatch(r"[0-9A-Za-z_]+", name):
            raise InputError(f"a writer's name has letters, digits and _, found {name!r}: choose another name")
        self.path, self.spec = Path(path), dict(spec)
        self.shard_members = shard_members or min(_BUFFERED, block_members(spec))
        self.name = name or secrets.token_hex(4)
        make_folder(self.path)
        _check_folder(self.path)
        manifest = write_manifest(self.path, Manifest(self.spec, provenance or {}))
        self._identity = manifest.identity
        shards = read_shards(self.path, manifest)
        self._written = sum(shard.source.count for shard in shards)
        keys = [shard_key(shard.source.path) or (0, "") for shard in shards]
        # A named writer continues its own numbering, so that an interrupted run ends in the same order.
        self._sequence = 1 + max((key[0] for key in keys if name in (None, key[1])), default=-1)
        self._buffers: State = {}
        self._facts: list[tuple[int | None, float | None]] = []  # of the members that wait in the buffers

    @property
    def written(self) -> int:
        """Members safely on disk: those found when the writer was opened, and those it has added."""
        return self._written

    @property
    def sequence(self) -> int:
        """Number of the next shard of this writer."""
        return self._sequence

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def append(
        self, state: Mapping[str, Tensor], *, chain: int | None = None, log_density: float | None = None
    ) -> None:
        """Add one network; its tensors are copied, so the caller may go on changing them."""
        check_state(state, self.spec, where=f"the network appended as member {self._written + len(self._facts)}")
        if len(self._facts) == self.shard_members:
            self.flush()  # an earlier attempt failed, on a full disk say: nothing goes on before it succeeds
        if not self._buffers:
            self._buffers = {name: empty(tensor, self.shard_members) for name, tensor in self.spec.items()}
        for name, buffer in self._buffers.items():
            buffer[len(self._facts)].copy_(state[name].detach())
        self._facts.append((chain, log_density))  # only now is the member complete: an interrupt above leaves it out
        if len(self._facts) == self.shard_members:
            self.flush()

    def extend(self, population: Population) -> None:
        """Add all members of a population, block by block; they are written before this returns."""
        check_spec(population.spec, self.spec, where="the population to append")
        self.flush()
        for start, tensors in population.blocks(self.shard_members):
            self.write(block_at(start, {name: tensors[name] for name in self.spec}, population))

    def flush(self) -> None:
        """Write the members that are complete as one shard."""
        count = len(self._facts)
        if not count:
            return
        chains, densities = [fact[0] for fact in self._facts], [fact[1] for fact in self._facts]
        tensors = {name: buffer[:count] for name, buffer in self._buffers.items()}
        self._publish(Block(tensors, count, _values_or_none(chains, -1), _values_or_none(densities, float("nan"))))
        # Nothing is called between these assignments, so that Ctrl-C comes before all or after all of them. If it came
        # before, the same shard will be written again, and found to be there.
        self._sequence, self._written, self._facts = self._sequence + 1, self._written + count, []

    def write(self, block: Block) -> None:
        """Write members that are together as one shard."""
        self._publish(block)
        self._sequence, self._written = self._sequence + 1, self._written + block.count

    def _publish(self, block: Block) -> None:
        """Write the shard whose turn it is, unless exactly this shard is there already."""
        need_space(self.path, block.count * (member_bytes(self.spec) + 16))
        path = self.path / shard_name(self._sequence, self.name)
        try:
            write_shard(path, block, Origin(self.name, self._sequence, self._identity))
        except FileExistsError as error:
            if holds_block(read_shard(path), block):
                return
            raise StorageError(
                f"{path} exists already, so another writer named {self.name} is at work: give each its own name"
            ) from error


def save_folder(path: Path, blocks: Iterator[tuple[int, State]], population: Population) -> None:
    """Write blocks with the facts of `population` into a new population folder; each block becomes a shard."""
    with whole_folder(path) as folder:
        first = next(blocks, None)
        spec = population.spec if first is None else block_spec(first[1])
        need_space(folder, len(population) * member_bytes(spec))
        with PopulationWriter(folder, spec, provenance=population.provenance, name="0") as writer:
            for start, tensors in chain([] if first is None else [first], blocks):
                writer.write(block_at(start, tensors, population))


def save_file(path: Path, tensors: State, population: Population) -> None:
    """Write all members into one safetensors file; a file of this name is replaced when the new one is whole."""
    check_names(population.spec)
    make_folder(path.parent)
    need_space(path.parent, len(population) * member_bytes(population.spec))
    write_shard(path, block_at(0, tensors, population), replace=True)
