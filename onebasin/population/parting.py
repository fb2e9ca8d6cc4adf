"""Some members of a population as one that can travel: with the files they are in, or with their own tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from onebasin.cluster import Cluster, Serial
from onebasin.errors import InputError
from onebasin.population.sources import MemorySource, Source
from onebasin.population.writer import block_members

if TYPE_CHECKING:
    from onebasin.population.crowd import Population


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
        yield start, part(population, start, min(start + step, len(population)))


def readers(population: Population, cluster: Cluster) -> Cluster:
    """Who reads a population for a pass that is cheap: workers what is in files, this process what is in memory.

    To send a block of numbers costs more than to add them up. The result is the same.
    """
    return Serial() if all(isinstance(source, MemorySource) for source in population._sources) else cluster


def part(population: Population, start: int, stop: int) -> Population:
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
