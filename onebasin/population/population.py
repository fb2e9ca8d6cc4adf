"""The Population: many networks of one architecture behind one interface, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError, explained
from onebasin.parallel import Executor, SerialExecutor, align_tensors
from onebasin.population.arviz import OUTPUTS, posterior_arrays, tree
from onebasin.population.check import source_problems
from onebasin.population.draws import CHAIN, LOG_DENSITY, merge_chains, stack_draws
from onebasin.population.map import map_members
from onebasin.population.member_storage import MemorySource, Source, consecutive, gather
from onebasin.population.open import Precision, Wanted, concatenate_values, open_members
from onebasin.population.shard import block_spec
from onebasin.population.show import population_record, population_title
from onebasin.population.writer import (
    SHARD_BYTES,
    PopulationWriter,
    block_members,
    member_bytes,
    save_file,
    save_folder,
)
from onebasin.reporting import Record, Result, html_of, text_of
from onebasin.state import (
    Spec,
    State,
    TensorSpec,
    as_spec,
    check_spec,
    dtype_name,
    flat_size,
    flatten,
    restore,
    shared_names,
    spec_of,
    state_of,
)

Architecture = Mapping[str, TensorSpec] | Mapping[str, Tensor] | nn.Module
PathLike = str | os.PathLike[str]


def check_population(population: object) -> None:
    """Refuse what is no Population.

    Raises:
        InputError: a posterior, a module, or something else was given.
    """
    if isinstance(population, Population):
        return
    if hasattr(population, "draw") and hasattr(population, "components"):
        remedy = "draw networks from it, as posterior.draw(100, torch.Generator())"
    elif isinstance(getattr(population, "population", None), Population):
        remedy = "give its networks, as alignment.population"
    elif isinstance(population, nn.Module):
        remedy = "make one of several modules with Population.from_models([...])"
    else:
        remedy = "make one with Population.from_models or Population.from_states"
    raise InputError(f"expected a Population, found {type(population).__name__}: {remedy}")


@dataclass(frozen=True, repr=False, eq=False)
class Population(Result):
    """Many networks: the same names, each tensor (members, *shape).

    Build one with a `from_...` method or `open`. Slices are lazy, and members on disk are read when asked for.

    >>> population = Population.from_models([nn.Linear(2, 3), nn.Linear(2, 3)])
    >>> print(population.title)
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
    @explained
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
        stacked = _tensors(tensors)
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
            _member_values(chain, count, torch.int64, "chain"),
            _member_values(log_density, count, torch.float64, "log_density"),
            dict(provenance or {}),
        )

    @classmethod
    def from_states(cls, states: Iterable[Mapping[str, Any]], **facts: Any) -> Population:
        """Stack networks given as state dicts; `facts` are those of `from_stacked`. The dicts are not kept.

        >>> len(Population.from_states([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], chain=[0, 1]))
        2
        """
        return cls.from_stacked(_stack_states(states), **facts)

    @classmethod
    @explained
    def from_models(cls, models: Iterable[nn.Module], **facts: Any) -> Population:
        """Stack the states of modules of one architecture; the modules are not kept."""
        given: list[Any] = [models] if isinstance(models, nn.Module | Mapping) else list(models)
        for index, model in enumerate(given):
            if isinstance(model, Mapping):
                raise InputError(
                    f"expected modules, found a state dict at place {index}: give state dicts to Population.from_states"
                )
            if not isinstance(model, nn.Module):
                raise InputError(
                    f"expected a list of torch.nn.Module, found {type(model).__name__} at place {index}: give modules"
                )
        return cls.from_states([state_of(model) for model in given], **facts)

    @classmethod
    @explained
    def from_flat(cls, matrix: Any, spec: Architecture, **facts: Any) -> Population:
        """Cut a matrix (members, D), or (chains, draws, D) as samplers return it, into tensors; see `restore`.

        A state or module also lends its integer buffers.
        """
        given: object = spec
        if not isinstance(given, nn.Module | Mapping):
            made = f", as {getattr(given, '__name__', 'factory')}()" if callable(given) else ""
            raise InputError(
                f"expected a module, a state dict or a spec to cut the matrix by, found {type(given).__name__}: give a "
                f"module{made}"
            )
        rows, chain = _flat_rows(matrix)
        facts = facts if chain is None else {**facts, "chain": chain}
        entries: Mapping[str, Any] = state_of(spec) if isinstance(spec, nn.Module) else spec
        buffers = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
        return cls.from_stacked(restore(rows, as_spec(spec), buffers), **facts)

    @classmethod
    @explained
    def from_arviz(cls, data: Any, spec: Architecture | None = None, **facts: Any) -> Population:
        """Take the draws (chain, draw, *shape) of an ArviZ posterior, chains laid end to end.

        What `to_arviz` made comes back with its values, dtypes, chains, log densities and provenance.

        Args:
            data: an `xarray.DataTree` or an `arviz.InferenceData` with a group "posterior"; that group; a dict of
                arrays; or the path of a netCDF file (.nc).
            spec: take its tensors alone, or one variable (chain, draw, D) of flat networks, and refuse other shapes;
                None takes all variables.
            **facts: `chain`, `log_density` and `provenance`, as for `from_stacked`.

        Raises:
            SpecError: there is no posterior, or its variables are no draws of such networks.
        """
        arrays, provenance = posterior_arrays(data)
        if spec is None:
            known = {name: arrays.pop(name, None) for name in (CHAIN, LOG_DENSITY)}
            stacked, chain = merge_chains(arrays)
            known = {CHAIN: chain if known[CHAIN] is None else known[CHAIN], LOG_DENSITY: known[LOG_DENSITY]}
        else:
            draws = stack_draws(arrays, as_spec(spec), "the posterior", axes=(2,))
            stacked, known = draws.stacked, {CHAIN: draws.chain, LOG_DENSITY: draws.log_density}
        return cls.from_stacked(stacked, **{**known, "provenance": provenance, **facts})

    @classmethod
    @explained
    def open(
        cls,
        path: PathLike,
        *,
        spec: Architecture | None = None,
        dtype: Precision = None,
        tied: Mapping[str, str] | None = None,
        finite: bool = False,
    ) -> Population:
        """Open a population folder, a folder of one-network files, or one file; weights stay on the disk.

        Args:
            path: a folder with `population.json`, or with .safetensors, .pt, .pth, .th or .ckpt files (one network
                each, in natural order of their names), or one such file; .tgz or .tar archives of safetensors files,
                read into memory; a folder of `save_pretrained`; draws in .npz, .npy or .nc (ArviZ) files, which need
                `spec` and are read into memory; a pattern of these; or hf://OWNER/NAME on the hub. Torch files never
                run code.
            spec: refuse members that differ from this spec, state or module; a shared prefix of names is stripped.
            dtype: convert floating-point tensors to it when they are read, as in a folder of mixed precision; "stored":
                `spec` says names and shapes only, and dtypes are those of the first file; None: dtypes must agree.
            tied: name -> first name of the same tensor, for files that hold tied weights once; of a module its own.
            finite: read everything, and refuse NaN and infinity.
        """
        if dtype not in (None, "stored") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(f"expected a floating-point dtype such as torch.float32, found {dtype!r}: give one")
        tied = shared_names(spec) if tied is None and isinstance(spec, nn.Module) else tied or {}
        members = open_members(Path(path), Wanted(None if spec is None else as_spec(spec), dtype, tied))
        facts = (members.chain, members.log_density, members.provenance)
        population = cls(tuple(members.sources), torch.arange(len(members)), members.spec, *facts, str(path))
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
            concatenate_values([part.chain for part in parts], counts, torch.int64),
            concatenate_values([part.log_density for part in parts], counts, torch.float64),
            {"parts": [dict(part.provenance) for part in parts]},
            places[0] if len(places) == 1 else f"{len(places)} places",
        )

    @staticmethod
    def writer(path: PathLike, spec: Architecture, **options: Any) -> PopulationWriter:
        """Open a `PopulationWriter` on a new or an existing folder; see there for the options."""
        return PopulationWriter(path, as_spec(spec), **options)

    @property
    def device(self) -> torch.device:
        """The device of the members once they are read; the CPU for those on disk."""
        return next((source.device for source in self._sources), torch.device("cpu"))

    @property
    def in_memory(self) -> bool:
        """Whether no member is on disk."""
        return all(isinstance(source, MemorySource) for source in self._sources)

    def reading_executor(self, executor: Executor) -> Executor:
        """`executor` for members on disk; for members in memory this process, since sending them would cost more."""
        return SerialExecutor() if self.in_memory else executor

    @property
    def is_one_tensor_stack(self) -> bool:
        """Whether all members lie in memory in one stack per tensor."""
        return self.in_memory and len(self._sources) == 1

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

    @overload
    def __getitem__(self, index: int) -> State: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> Population: ...

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> State | Population:
        if isinstance(index, int | np.integer):
            return self.member(int(index))
        rows = _rows(index, len(self))
        chain = None if self.chain is None else self.chain[rows]
        density = None if self.log_density is None else self.log_density[rows]
        return replace(self, _rows=self._rows[rows], chain=chain, log_density=density)

    @property
    def title(self) -> str:
        """One line: number of networks, tensors and weights, dtypes, size and place."""
        return f"{population_title(len(self))}: {self._content}"

    @property
    def _content(self) -> str:
        weights = sum(tensor.size for tensor in self.spec.values())
        dtypes = "/".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in self.spec.values()))
        place = self.where if self.where == "in memory" else f"at {self.where}"
        return f"{len(self.spec)} tensors, {weights:,} weights each, {dtypes}, {self.nbytes / 1e6:,.1f} MB {place}"

    def record(self) -> Record:
        """Tables of tensors and chains; weights and norms of at most 500 networks, about 64 MB, which are read."""
        return population_record(self, self._content)

    def __str__(self) -> str:
        """The tables, for which no weight is read."""
        return text_of(population_record(self, self._content, figures=False))

    def _repr_html_(self) -> str:
        """The tables as HTML, for which no weight is read."""
        return html_of(population_record(self, self._content, figures=False))

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

    def to_flat(self) -> Tensor:
        """All members as a matrix (members, D), each flattened as by `flatten`; `from_flat` takes it back."""
        if not len(self):
            return torch.empty(0, flat_size(self.spec))
        return torch.cat([torch.vmap(flatten)(block) for _, block in self.blocks()])

    def to_arviz(
        self,
        model: nn.Module | None = None,
        inputs: Any = None,
        *,
        names: Iterable[str] | None = None,
        cut: bool = False,
    ) -> Any:
        """Return the draws as an `xarray.DataTree`, as ArviZ takes them; `from_arviz` takes them back.

        Group "posterior" has one variable per tensor, (chain, draw, NAME_dim_0, ...), and "sample_stats" the log
        density `lp` where it is known. With a model and inputs "predictions" has its outputs, (chain, draw, example,
        output). Chains are in the order of their first members; without chains all members are draws of one. Half
        precision is held in float32. Needs `pip install 'onebasin[arviz]'`.

        Args:
            model: the function, for outputs.
            inputs: where it is evaluated.
            names: tensors in the posterior; None for all.
            cut: leave out the last draws of chains that are longer than the shortest, which are refused otherwise.

        Raises:
            InputError: there is no network, chains are not equally long, or ArviZ is not installed.
        """
        if (model is None) != (inputs is None):
            raise InputError("expected a model and inputs, or none of them, found one: outputs are computed with both")
        rows, chains = self._by_chain(cut)
        outputs = None
        if model is not None:
            # Through the front door, since this package stands below those that call models.
            outputs = import_module("onebasin").predict(model, self, inputs, quantity="logits")
        tensors = {name: self.tensor(name) for name in (self.names if names is None else names)}
        facts = {LOG_DENSITY: self.log_density, OUTPUTS: outputs}
        return tree(tensors, rows, chains, facts, dict(self.provenance))

    def _by_chain(self, cut: bool) -> tuple[Tensor, list[int]]:
        """Members of each chain (chains, draws), and the numbers of the chains."""
        chain = torch.zeros(len(self), dtype=torch.int64) if self.chain is None else self.chain
        rows = {number: (chain == number).nonzero().flatten() for number in dict.fromkeys(chain.tolist())}
        draws = {number: len(members) for number, members in rows.items()}
        if not rows or (len(set(draws.values())) > 1 and not cut):
            raise InputError(
                f"ArviZ takes chains of equal length, found {draws or 'no'} draws by chain: give cut=True to leave out "
                "the last draws of the longer ones"
            )
        return torch.stack([members[: min(draws.values())] for members in rows.values()]), list(rows)

    def blocks(self, size: int | None = None) -> Iterator[tuple[int, State]]:
        """Yield (start, tensors (n, *shape)) for consecutive members, n <= size; about 64 MB each by default."""
        if size is not None and size < 1:
            raise InputError(f"a block has at least 1 member, found {size}: leave size out for about 64 MB")
        step = size or block_members(self.spec)
        for start in range(0, len(self), step):
            yield start, gather(self._sources, self._rows[start : start + step], self.spec)

    def parts(self, size: int | None = None, *, shared: bool = False) -> Iterator[tuple[int, Population]]:
        """Yield (start, at most `size` consecutive members), to be sent to a worker; about 64 MB each by default.

        With `shared`, for work that does not write into them, tensors in memory are copied only where they lie
        otherwise than in a worker.

        >>> whole = Population.from_stacked({"w": torch.arange(5.0)})
        >>> [(start, part.tensor("w").tolist()) for start, part in whole.parts(2)]
        [(0, [0.0, 1.0]), (2, [2.0, 3.0]), (4, [4.0])]
        """
        if size is not None and size < 1:
            raise InputError(f"a part has at least 1 member, found {size}: leave size out for about 64 MB")
        step = size or block_members(self.spec)
        for start in range(0, len(self), step):
            yield start, self.part(start, min(start + step, len(self)), shared=shared)

    def part(self, start: int, stop: int, *, shared: bool = False) -> Population:
        """Members start:stop alone, with the files they are in, or with copies of their tensors.

        Copies, so that their place and order in memory do not depend on where they are worked on: products of
        matrices may round differently at another alignment. `shared` as in `parts`.
        """
        rows = self._rows[start:stop]
        offsets = torch.tensor([0, *(source.count for source in self._sources)]).cumsum(0)
        owner = torch.searchsorted(offsets, rows, right=True) - 1
        positions = torch.empty_like(rows)
        sources: list[Source] = []
        before = 0  # members of the sources so far
        for index in owner.unique().tolist():
            source, inside = self._sources[index], owner == index
            local = rows[inside] - offsets[index]
            if isinstance(source, MemorySource):
                first, run = int(local[0]), torch.arange(len(local))
                if shared and torch.equal(local, first + run):
                    copies = align_tensors({n: value[first : first + len(run)] for n, value in source.tensors.items()})
                else:
                    copies = {n: value[local.to(value.device)].contiguous() for n, value in source.tensors.items()}
                source, local = MemorySource(copies, len(local)), run
            positions[inside] = before + local
            sources.append(source)
            before += source.count
        chain, density = (
            None if values is None else values[start:stop].clone() for values in (self.chain, self.log_density)
        )
        return replace(self, _sources=tuple(sources), _rows=positions, provenance={}, chain=chain, log_density=density)

    def select(self, *names: str) -> Population:
        """The same members with these tensors alone, without a copy; a part of it sends nothing else to a worker.

        >>> Population.from_stacked({"w": torch.zeros(4, 2), "b": torch.zeros(4)}).select("b").names
        ('b',)
        """
        if missing := [name for name in names if name not in self.spec]:
            raise SpecError(f"expected names out of {', '.join(self.names)}, found {missing[0]!r}: correct the name")
        sources = tuple(
            MemorySource({name: source.tensors[name] for name in names}, source.count)
            if isinstance(source, MemorySource)
            else source
            for source in self._sources
        )
        return replace(self, _sources=sources, spec={name: self.spec[name] for name in names})

    def overlaps(self, other: Population) -> bool:
        """Whether both take members from the same tensors or files, as two halves of one population do.

        >>> whole = Population.from_stacked({"w": torch.zeros(4, 2)})
        >>> whole[:2].overlaps(whole[2:]), whole.overlaps(Population.from_stacked({"w": torch.zeros(4, 2)}))
        (True, False)
        """
        return any(source is another for source in self._sources for another in other._sources)

    def read_columns(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """Copy columns start:stop of a tensor, each member flattened, into `out` (members, stop - start).

        Sums over pairs of members need this. A shard holds each tensor as (members, *shape), so a range of columns is a
        strided part of the mapped file. It is copied into a buffer of the caller, and the map is dropped with the call:
        pages of the file never pile up in memory.

        >>> out = torch.empty(2, 2)
        >>> Population.from_stacked({"w": torch.arange(8.0).view(2, 2, 2)}).read_columns("w", 1, 3, out)
        >>> out.tolist()
        [[1.0, 2.0], [5.0, 6.0]]
        """
        first = 0
        for source in self._sources:
            inside = ((self._rows >= first) & (self._rows < first + source.count)).nonzero().flatten()
            if len(inside):
                flat = source.views([name], 0, source.count)[name].reshape(source.count, -1)[:, start:stop]
                rows = self._rows[inside] - first
                for position, target, length in consecutive(inside):  # neighbours are copied at once
                    for offset, row, count in consecutive(rows[position : position + length]):
                        out[target + offset : target + offset + count].copy_(flat[row : row + count])
            first += source.count

    def constant_tensors(self, names: Iterable[str]) -> set[str]:
        """Those of the names whose tensors are equal bit for bit in all members; none of an empty population.

        A tensor is not looked at any more once two members differ in it, and reading stops when none is left: of a
        population of sampled networks after the first block.
        """
        constant = set(names) if len(self) else set()
        first = self.member(0) if constant else {}
        for _, block in self.blocks() if constant else ():
            constant = {name for name in constant if torch.equal(block[name], first[name].expand_as(block[name]))}
            if not constant:
                break
        return constant

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

        A folder must be new or empty; to add to a population use `Population.writer`. With a path that ends in .json
        only the record for reports is written, as of any result.
        """
        if Path(path).suffix == ".json":
            return super().save(path)
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
            for row in _not_finite_rows(value)
        ]


def _tensors(values: Mapping[str, Any]) -> State:
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


def _stack_states(states: Iterable[Mapping[str, Any]]) -> State:
    """Stack state dicts into new tensors (members, *shape), in the order of names of the first."""
    # What a generator yields may be live (the weights of a network in training), so it is copied at once.
    live = not isinstance(states, Sequence)
    members: list[State] = []
    every: Iterable[Any] = [states] if isinstance(states, Mapping | nn.Module) else states
    for index, given in enumerate(every):
        if not isinstance(given, Mapping):
            reader = "Population.from_models" if isinstance(given, nn.Module) else "Population.from_flat"
            raise InputError(
                f"expected a list of state dicts, found {type(given).__name__} at place {index}: give dicts of "
                f"tensors, or use {reader}"
            )
        state = _tensors(given)
        if members:
            where = f"member {index}, compared with member 0,"
            check_spec(spec_of(state), spec_of(members[0]), where=where)
        members.append({name: value.clone() for name, value in state.items()} if live else state)
    if not members:
        raise InputError("expected at least one network, found none: pass a list of modules or state dicts")
    return {name: torch.stack([state[name] for state in members]) for name in members[0]}


def _member_values(values: Any, count: int, dtype: torch.dtype, what: str) -> Tensor | None:
    """Return one value per member (count,), or None."""
    if values is None:
        return None
    try:
        result = torch.as_tensor(values).detach().to(device="cpu", dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"expected {what} as one number per member, found {type(values).__name__}: give a list of {count} numbers"
        ) from error
    if tuple(result.shape) != (count,):
        raise InputError(
            f"expected {what} of shape ({count},), one per member, found {tuple(result.shape)}: give one per member"
        )
    return result


def _rows(index: slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """Translate a slice, a list of integers, or a boolean or integer tensor into positions (n,)."""
    if isinstance(index, slice):
        chosen = range(count)[index]
        return torch.arange(
            chosen.start, chosen.start + len(chosen) * chosen.step, chosen.step
        )  # torch has no negative slices
    try:
        rows = torch.as_tensor(index).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"expected the number of a network, a slice or a list of numbers, found {index!r}: population.tensor(name) "
            "is a tensor of all networks"
        ) from error
    if rows.dtype == torch.bool:
        if tuple(rows.shape) != (count,):
            raise InputError(f"expected a mask of shape ({count},), found {tuple(rows.shape)}: give one per member")
        return rows.nonzero().flatten()
    rows = rows.to(torch.int64) if rows.numel() == 0 else rows
    wrong = rows.dtype.is_floating_point or rows.dim() != 1 or bool(((rows < -count) | (rows >= count)).any())
    if wrong:
        raise InputError(f"expected a list of members from {-count} to {count - 1}, found {index}: correct the list")
    return torch.where(rows < 0, rows + count, rows).to(torch.int64)


def _flat_rows(matrix: Any) -> tuple[Tensor, Tensor | None]:
    """A matrix (members, D), and the chain of each member if it came as (chains, draws, D)."""
    rows, chain = _tensors({"matrix": matrix})["matrix"], None
    if rows.dim() == 3:
        merged, chain = merge_chains({"matrix": rows})
        rows = merged["matrix"]
    if rows.dim() != 2:
        raise SpecError(
            f"expected a matrix (members, D) or (chains, draws, D), found shape {tuple(rows.shape)}: reshape it"
        )
    return rows, chain


def _not_finite_rows(values: Tensor) -> list[int]:
    """Return the members of (n, *shape) that hold NaN or infinity."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex):
        return []
    wide = values.float() if values.dtype.itemsize == 1 else values  # torch knows too little of float8
    rows = ~torch.isfinite(wide.unsqueeze(-1)).flatten(1).all(1)
    return [int(row) for row in rows.nonzero().flatten()]
