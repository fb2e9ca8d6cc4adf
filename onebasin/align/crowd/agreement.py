"""How well the members of a population agree, weight by weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.board import STATISTICS
from onebasin.align.crowd.view import norm
from onebasin.population import Population
from onebasin.state import State
from onebasin.symmetry import Symmetry


@dataclass(frozen=True, eq=False)
class Agreement:
    """Mean overlap of two different members, the mean network (or a given one), and distances to it (members,)."""

    overlap: float
    reference: State
    residual: Tensor


def agreement(
    symmetry: Symmetry, population: Population, reference: Mapping[str, Tensor] | None, *, distances: bool = True
) -> Agreement:
    """Measure a population in at most two passes over its blocks, in float64.

    Args:
        symmetry: says which tensors are the network's.
        population: the members.
        reference: measure distances to this network; to the mean of all members if None.
        distances: whether the second pass is wanted.
    """
    names = [name for name, spec in population.spec.items() if spec.dtype.is_floating_point]
    weights = [name for name in names if name in symmetry.shapes and name.rsplit(".", 1)[-1] not in STATISTICS]
    total: State = {}
    norms, members = 0.0, len(population)
    for _, block in population.blocks():
        for name in names:
            part = block[name].cpu().double()
            total[name] = total[name] + part.sum(0) if name in total else part.sum(0)
            norms += float(part.square().sum()) if name in weights else 0.0
    whole = norm({name: total[name] for name in weights})
    mean = {
        name: (total[name] / members).to(spec.dtype) if name in total else population.member(0)[name]
        for name, spec in population.spec.items()
    }
    centre = mean if reference is None else {**mean, **dict(reference)}
    residual = _residual(population, weights, centre) if distances else torch.zeros(members)
    return Agreement((whole - norms) / max(1, members * (members - 1)), centre, residual)


def _residual(population: Population, weights: list[str], centre: Mapping[str, Tensor]) -> Tensor:
    found = torch.zeros(len(population), dtype=torch.float64)
    for start, block in population.blocks():
        for name in weights:
            apart = (block[name].cpu().double() - centre[name].cpu().double()).square()
            found[start : start + len(apart)] += apart.flatten(1).sum(1).cpu()
    return found
