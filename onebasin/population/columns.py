"""Tensors that are the same in all members of a population."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from onebasin.population.population import Population, parts
from onebasin.population.sources import MemorySource, consecutive

# ----------------------------------------------------------------------
# Read a range of columns of one tensor of all members: what sums over pairs of members need.


def device_of(population: Population) -> torch.device:
    """Where the members live once they are read; the CPU for those on disk."""
    return next((source.device for source in population._sources), torch.device("cpu"))


def overlapping(a: Population, b: Population) -> bool:
    """Whether both take members from the same tensors or files, as two halves of one population do.

    >>> whole = Population.from_stacked({"w": torch.zeros(4, 2)})
    >>> overlapping(whole[:2], whole[2:]), overlapping(whole, Population.from_stacked({"w": torch.zeros(4, 2)}))
    (True, False)
    """
    return any(one is other for one in a._sources for other in b._sources)


def only(population: Population, name: str) -> Population:
    """The same members with one tensor alone, without a copy: who sends some of them sends nothing else.

    >>> only(Population.from_stacked({"w": torch.zeros(4, 2), "b": torch.zeros(4)}), "b").names
    ('b',)
    """
    sources = tuple(
        MemorySource({name: source.tensors[name]}, source.count) if isinstance(source, MemorySource) else source
        for source in population._sources
    )
    return replace(population, _sources=sources, spec={name: population.spec[name]})


def read_columns(population: Population, name: str, start: int, stop: int, out: Tensor) -> None:
    """Copy columns start:stop of a tensor, each member laid flat, into `out`, in the dtype and on the device of `out`.

    >>> out = torch.empty(2, 2)
    >>> read_columns(Population.from_stacked({"w": torch.arange(8.0).view(2, 2, 2)}), "w", 1, 3, out)
    >>> out.tolist()
    [[1.0, 2.0], [5.0, 6.0]]

    Args:
        population: in memory or on disk.
        name: of the tensor.
        start: first column.
        stop: one after the last column.
        out: (members, stop - start).
    """
    first = 0
    owned = population._rows
    for source in population._sources:
        inside = (owned >= first) & (owned < first + source.count)
        places = inside.nonzero().flatten()
        if len(places):
            stored = source.views([name], 0, source.count)[name]
            flat = stored.reshape(source.count, -1)[:, start:stop]
            _copy(out, places, flat, owned[places] - first)
        first += source.count


def _copy(out: Tensor, places: Tensor, flat: Tensor, rows: Tensor) -> None:
    """Copy rows of `flat` to places of `out`; runs of neighbours at once."""
    for position, place, length in consecutive(places):
        for offset, row, count in consecutive(rows[position : position + length]):
            out[place + offset : place + offset + count].copy_(flat[row : row + count])


# ----------------------------------------------------------------------
# Tensors that are the same in all members of a population.


def constant_tensors(population: Population, names: Iterable[str]) -> set[str]:
    """The names among `names` of tensors that are equal bit for bit in all members; none of an empty population.

    A tensor is not looked at any more once two members differ in it, and reading stops when none is left: of a
    population of sampled networks the first block.

    Args:
        population: the networks.
        names: tensors to look at.
    """
    left = set(names) if len(population) else set()
    first = population.member(0) if left else {}
    for _, part in parts(population) if left else ():
        block = part.stacked()
        left = {name for name in left if torch.equal(block[name], first[name].expand_as(block[name]))}
        if not left:
            break
    return left
