"""How well the members of a population agree, weight by weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.crowd.view import norm
from onebasin.cluster import Cluster
from onebasin.population import Population
from onebasin.population.parting import parts, readers
from onebasin.state import State, trained_parameters
from onebasin.symmetry import Element, Symmetry
from onebasin.symmetry.act import apply_block
from onebasin.symmetry.algebra import Wide


@dataclass(frozen=True, eq=False)
class Agreement:
    """Mean overlap of two different members, the mean network (or a given one), and distances to it (members,)."""

    overlap: float
    reference: State
    residual: Tensor


def mean_overlap(symmetry: Symmetry, population: Population, elements: Element, cluster: Cluster) -> float:
    """Mean overlap of two different members once each is moved by its element; nothing is kept."""
    weights = _weights(symmetry, population)
    shards = ((members, elements.some(start, start + len(members))) for start, members in parts(population))
    total, norms = _joined(readers(population, cluster).map(_Sums(symmetry, weights), shards, shared=None))
    return _overlap({name: total[name] for name in weights}, norms, len(population))


def agreement(
    symmetry: Symmetry, population: Population, reference: Mapping[str, Tensor] | None, cluster: Cluster
) -> Agreement:
    """Measure a population in two passes over its blocks, in float64.

    Args:
        symmetry: says which tensors are the network's.
        population: the members.
        reference: measure distances to this network; to the mean of all members if None.
        cluster: who reads them.
    """
    weights = _weights(symmetry, population)
    shards = ((members, None) for _, members in parts(population))
    total, norms = _joined(readers(population, cluster).map(_Sums(symmetry, weights), shards, shared=None))
    members, heavy = len(population), {name: total[name] for name in weights}
    first = population.member(0)
    mean = {
        name: (total[name] / members).to(spec.dtype) if name in total and name not in symmetry.frozen else first[name]
        for name, spec in population.spec.items()
    }
    centre = mean if reference is None else {**mean, **dict(reference)}
    aim = {name: centre[name].cpu() for name in weights}
    residual = torch.cat(list(readers(population, cluster).map(_residual, parts(population), shared=aim)))
    return Agreement(_overlap(heavy, norms, members), centre, residual)


def _weights(symmetry: Symmetry, population: Population) -> list[str]:
    trained = trained_parameters(population.spec, frozen=symmetry.frozen)
    return [name for name in trained if name in symmetry.shapes and population.spec[name].dtype.is_floating_point]


class _Sums:
    """The sum of every floating-point tensor over some members, moved or not, and the sum of squares of the weights."""

    def __init__(self, symmetry: Symmetry, weights: list[str]) -> None:
        self.symmetry, self.weights = symmetry, weights

    def __call__(self, shared: None, shard: tuple[Population, Element | None]) -> tuple[State, float]:
        members, elements = shard
        block = members.stacked()
        if elements is not None:
            block = apply_block(Wide(self.symmetry, elements), block, 0, "value")
        total: State = {}
        norms = 0.0
        for name, values in block.items():
            if values.is_floating_point():
                part = values.cpu().double()
                total[name] = part.sum(0)
                norms += float(part.square().sum()) if name in self.weights else 0.0
        return total, norms


def _joined(found: Iterable[tuple[State, float]]) -> tuple[State, float]:
    """Add sums up, in their order."""
    total: State = {}
    norms = 0.0
    for own, squares in found:
        total = {name: total[name] + value for name, value in own.items()} if total else own
        norms += squares
    return total, norms


def _overlap(total: State, norms: float, members: int) -> float:
    """(|S|^2 - sum |w_i|^2) / (N (N - 1))."""
    return (norm(total) - norms) / max(1, members * (members - 1))


def _residual(centre: State, shard: tuple[int, Population]) -> Tensor:
    """Squared distances of some members from a network (members,)."""
    _, members = shard
    found = torch.zeros(len(members), dtype=torch.float64)
    block = members.stacked()
    for name, middle in centre.items():
        found += (block[name].cpu().double() - middle.double()).square().flatten(1).sum(1)
    return found
