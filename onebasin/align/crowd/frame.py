"""Where each member of a crowd stands: its element so far, and the member moved by it."""

from __future__ import annotations

import hashlib
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


class Frame:
    """A population and one element per member; members are read when asked for, and never changed."""

    def __init__(self, population: Population, symmetry: Symmetry) -> None:
        self.population, self.symmetry = population, symmetry
        self.elements = symmetry.identity(len(population))

    def __len__(self) -> int:
        return len(self.population)

    def check(self) -> str:
        """Raise unless members fit the symmetry and are finite; read one block at a time.

        Returns:
            A fingerprint of the crowd: the sum of every tensor of every member.
        """
        board = Board.of(self.symmetry, statistics=True)
        board.check(
            {name: torch.empty(spec.shape, device="meta") for name, spec in self.population.spec.items()},
            where="the population",
        )
        digest = hashlib.sha256()
        for start, block in self.population.blocks():
            for name, values in block.items():
                flat = values.cpu().reshape(len(values), -1)
                flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
                sums = flat.double().sum(1)
                digest.update(name.encode() + sums.numpy().tobytes())
                for row in (~torch.isfinite(sums)).nonzero()[:, 0].tolist() if name in board.tensors else ():
                    check_finite({name: values[row]}, where=f"member {start + row}")
        return digest.hexdigest()

    def balance(self) -> None:
        """Start every member at its lightest form."""
        if not self.symmetry.dimensions:
            return
        board = Board.of(self.symmetry, statistics=True)
        for start, block in self.population.blocks():
            found = balancing(board, block)
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

    def one(self, member: int) -> State:
        """One member as it stands now."""
        return next(iter(self.moved(range(member, member + 1))))

    def first(self) -> State:
        """The first member as it stands now."""
        return self.one(0)

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
    narrow = [
        name for name, spec in population.spec.items() if spec.dtype.is_floating_point and spec.dtype.itemsize < 4
    ]

    def move(block: State, start: int) -> State:
        made = apply_block(plan, block, start, kind)
        # Half precision ends at 65,504: a scale may carry a weight beyond.
        check_finite({name: made[name] for name in narrow}, where=f"members from {start}, once moved,")
        return made

    return population.map(move, path=path)
