"""The Population: many networks of one architecture behind one face, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError
from onebasin.population.inspection import source_problems
from onebasin.population.mapping import map_members
from onebasin.population.opening import joined, open_parts
from onebasin.population.saving import save_file, save_folder
from onebasin.population.shard import block_spec
from onebasin.population.sources import MemorySource, Source, gather
from onebasin.population.stacking import (
    as_rows,
    as_tensors,
    checked_result,
    flat_rows,
    member_values,
    merge_chains,
    not_finite_rows,
    stack_states,
)
from onebasin.population.writer import SHARD_BYTES, PopulationWriter, block_members, member_bytes
from onebasin.state import Spec, State, TensorSpec, as_spec, check_spec, dtype_name, restore, state_of

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
