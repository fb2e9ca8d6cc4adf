"""How far is every unit from the point of least mass? The mass that it takes in, less the mass that it gives out."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.align.board import Board
from onebasin.align.scale.mass import Mass, Point
from onebasin.align.scale.squares import Layout
from onebasin.population import Population
from onebasin.symmetry import Symmetry


def imbalance(population: Population, symmetry: Symmetry, *, biases: bool = True) -> Tensor:
    """In - out of every unit, float64 (members, coordinates): half the slope of the mass in the unit's log scale.

    Gradient flow keeps it as it is, whatever the loss; weight decay w at rate r shrinks it by exp(-2 r w) per step.
    It is zero where `balance` ends. Units are listed space by space, as the symmetry has them.

    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    >>> found = imbalance(Population.from_models([model]), ob.discover(model, torch.zeros(1, 3)))
    >>> expected = model[0].weight.square().sum(1) - model[2].weight.square().sum(0)
    >>> torch.allclose(found[0], expected.double(), atol=1e-6)
    True

    Args:
        population: the networks, read block by block.
        symmetry: of their model; its generators of kind "scale" are the coordinates.
        biases: count biases as mass.
    """
    layout = Layout.of(Board.of(symmetry))
    free = [number for number, gauge in enumerate(layout.gauges) if gauge.kind == "scale"]
    found = []
    for start, stacked in population.blocks():
        mass = layout.reduce(stacked, biases=biases, start=start)
        found.append(slope(mass, free, mass.here).cpu())
    return torch.cat(found)


def slope(mass: Mass, gauges: list[int], point: Point) -> Tensor:
    """Half the derivative of the mass: the sum of power * mass on each coordinate (rows, coordinates)."""
    tables = []
    for gauge in gauges:
        total = torch.zeros_like(point.logs[gauge])
        for power, table in mass.pulls(gauge, point).items():
            total = total + power * table
        tables.append(total)
    return torch.cat(tables, 1)
