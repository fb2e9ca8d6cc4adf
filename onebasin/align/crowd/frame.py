"""Where each member of a crowd stands: its element so far, and the member moved by it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from onebasin.align.board import Board
from onebasin.align.scale.balance import balancing
from onebasin.population import Population
from onebasin.state import State, check_finite
from onebasin.symmetry import Element, Symmetry
from onebasin.symmetry.act import apply_block
from onebasin.symmetry.algebra import Wide

_BALANCED = 1e-9  # imbalance that matching does not see


class Frame:
    """A population and one element per member; members are read when asked for, and never changed."""

    def __init__(self, population: Population, symmetry: Symmetry) -> None:
        self.population, self.symmetry = population, symmetry
        self.elements = symmetry.identity(len(population))

    def __len__(self) -> int:
        return len(self.population)

    def check(self) -> None:
        """Raise unless members fit the symmetry and are finite; read one block at a time."""
        board = Board.of(self.symmetry)
        board.check({name: torch.empty(spec.shape, device="meta") for name, spec in self.population.spec.items()},
                    where="the population")  # fmt: skip
        for start, block in self.population.blocks():
            for name in board.tensors:
                if not bool(torch.isfinite(block[name].sum())):
                    for row in range(len(block[name])):
                        check_finite({name: block[name][row]}, where=f"member {start + row}")

    def balance(self) -> None:
        """Start every member at its lightest form."""
        if not self.symmetry.dimensions:
            return
        board = Board.of(self.symmetry, statistics=True)
        for start, block in self.population.blocks():
            found = balancing(board, block, tolerance=_BALANCED)
            for name, factor in found.factors.items():
                self.elements.factors[name][:, start : start + factor.shape[1]] = factor

    def element(self, member: int) -> Element:
        """The element of one member."""
        return self.elements.member(member)

    def move(self, member: int, element: Element) -> None:
        """Move a member on."""
        made = self.symmetry.compose(element, self.element(member))
        for name, order in made.orders.items():
            self.elements.orders[name][member] = order
        for name, factor in made.factors.items():
            self.elements.factors[name][:, member] = factor

    def move_all(self, element: Element) -> None:
        """Move every member on by the same element."""
        self.elements = self.symmetry.compose(element, self.elements)

    def copy(self) -> Frame:
        """Another frame of the same crowd, which moves by itself."""
        other = Frame(self.population, self.symmetry)
        other.elements = self.symmetry.compose(self.symmetry.identity(), self.elements)
        return other

    def moved(self, members: range) -> Iterator[State]:
        """The members as they stand now."""
        part = self.population[members.start : members.stop].stacked()
        batch = Element(
            {name: order[members.start : members.stop] for name, order in self.elements.orders.items()},
            {name: factor[:, members.start : members.stop] for name, factor in self.elements.factors.items()},
            len(members),
        )
        stacked = self.symmetry.apply(batch, Population.from_stacked(part)).stacked()
        for row in range(len(members)):
            yield {name: value[row] for name, value in stacked.items()}


def moved(
    population: Population,
    symmetry: Symmetry,
    elements: Element,
    *,
    kind: str = "value",
    path: str | os.PathLike[str] | None = None,
) -> Population:
    """Apply one element to each member; into a new folder if there is a path, block by block, else in memory."""
    plan = Wide(symmetry, elements)
    return population.map(lambda block, start: apply_block(plan, block, start, kind), path=path)
