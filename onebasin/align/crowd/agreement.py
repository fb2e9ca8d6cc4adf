"""How well the members of a population agree, weight by weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.crowd.view import norm
from onebasin.population import Population
from onebasin.state import State, is_statistic
from onebasin.symmetry import Element, Symmetry
from onebasin.symmetry.act import apply_block
from onebasin.symmetry.algebra import Wide


@dataclass(frozen=True, eq=False)
class Agreement:
    """Mean overlap of two different members, the mean network (or a given one), and distances to it (members,)."""

    overlap: float
    reference: State
    residual: Tensor


def mean_overlap(symmetry: Symmetry, population: Population, elements: Element) -> float:
    """Mean overlap of two different members once each is moved by its element; nothing is kept."""
    plan = Wide(symmetry, elements)
    blocks = (apply_block(plan, block, start, "value") for start, block in population.blocks())
    weights = _weights(symmetry, population)
    total, norms = _sums(blocks, weights)
    return _overlap({name: total[name] for name in weights}, norms, len(population))


def agreement(symmetry: Symmetry, population: Population, reference: Mapping[str, Tensor] | None) -> Agreement:
    """Measure a population in two passes over its blocks, in float64.

    Args:
        symmetry: says which tensors are the network's.
        population: the members.
        reference: measure distances to this network; to the mean of all members if None.
    """
    weights = _weights(symmetry, population)
    total, norms = _sums((block for _, block in population.blocks()), weights)
    members, heavy = len(population), {name: total[name] for name in weights}
    mean = {
        name: (total[name] / members).to(spec.dtype) if name in total else population.member(0)[name]
        for name, spec in population.spec.items()
    }
    centre = mean if reference is None else {**mean, **dict(reference)}
    return Agreement(_overlap(heavy, norms, members), centre, _residual(population, weights, centre))


def _weights(symmetry: Symmetry, population: Population) -> list[str]:
    floating = [name for name, spec in population.spec.items() if spec.dtype.is_floating_point]
    return [name for name in floating if name in symmetry.shapes and not is_statistic(name)]


def _sums(blocks: Iterable[State], weights: list[str]) -> tuple[State, float]:
    """Sum of every floating-point tensor, and sum of squares of the weights."""
    total: State = {}
    norms = 0.0
    for block in blocks:
        for name, values in block.items():
            if values.is_floating_point():
                part = values.cpu().double()
                total[name] = total[name] + part.sum(0) if name in total else part.sum(0)
                norms += float(part.square().sum()) if name in weights else 0.0
    return total, norms


def _overlap(total: State, norms: float, members: int) -> float:
    """(|S|^2 - sum |w_i|^2) / (N (N - 1))."""
    return (norm(total) - norms) / max(1, members * (members - 1))


def _residual(population: Population, weights: list[str], centre: Mapping[str, Tensor]) -> Tensor:
    found = torch.zeros(len(population), dtype=torch.float64)
    for start, block in population.blocks():
        for name in weights:
            apart = (block[name].cpu().double() - centre[name].cpu().double()).square()
            found[start : start + len(apart)] += apart.flatten(1).sum(1)
    return found
