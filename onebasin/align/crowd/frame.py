"""Where each member of a crowd stands: its element so far, and the member moved by it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from onebasin.align.board import Board
from onebasin.align.crowd.matching import Standing, standing
from onebasin.align.crowd.view import View
from onebasin.align.pair.assign import Vertex
from onebasin.align.scale.balance import balancing
from onebasin.cluster import Cluster, Serial
from onebasin.population import Population
from onebasin.population.mapping import completed, mapped
from onebasin.population.parting import part, parts, readers
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

    def check(self, cluster: Cluster) -> str:
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
        weights = frozenset(board.tensors)
        for sums in readers(self.population, cluster).map(_sums, parts(self.population), shared=weights):
            for name, values in sums.items():
                digest.update(name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    def balance(self, cluster: Cluster) -> None:
        """Start every member at its lightest form."""
        if not self.symmetry.dimensions:
            return
        board = Board.of(self.symmetry, statistics=True)
        for start, found in cluster.map(_balancing, parts(self.population), shared=board):
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

    def follow(self, start: int, vertices: Sequence[Vertex | None], view: View) -> int:
        """Move members from `start` on to the vertices that were found for them; return how many did not stay."""
        for member, vertex in enumerate(vertices, start):
            if vertex is not None:
                self.move(member, view.assignment.element(vertex))
        return sum(vertex is not None for vertex in vertices)

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
        return next(standing(self.symmetry, next(self.shards(range(member, member + 1), 1))))

    def first(self) -> State:
        """The first member as it stands now."""
        return self.one(0)

    def shards(self, members: range, size: int) -> Iterator[Standing]:
        """Members, `size` at a time, with where they stand now; each travels alone."""
        for start in members[::size]:
            stop = min(members.stop, start + size)
            yield part(self.population, start, stop), self.elements.some(start, stop)


def _sums(weights: frozenset[str], shard: tuple[int, Population]) -> State:
    """The sum of every tensor of every member, float64 (members,); refuses weights that are not finite."""
    start, members = shard
    found: State = {}
    for name, values in members.stacked().items():
        flat = values.cpu().reshape(len(values), -1)
        flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
        found[name] = flat.double().sum(1)
        for row in (~torch.isfinite(found[name])).nonzero()[:, 0].tolist() if name in weights else ():
            check_finite({name: values[row]}, where=f"member {start + row}")
    return found


def _balancing(board: Board, shard: tuple[int, Population]) -> tuple[int, Element]:
    """The scales that balance some members."""
    start, members = shard
    return start, balancing(board, members.stacked())


def moved(
    population: Population,
    symmetry: Symmetry,
    elements: Element,
    *,
    kind: str = "value",
    path: str | os.PathLike[str] | None = None,
    cluster: Cluster | None = None,
    only: list[int] | None = None,
) -> Population:
    """Apply one element to each member; into a new folder if there is a path, block by block, else in memory.

    With `only`, the folder is there, and the shards of these numbers are written into it.
    """
    narrow = [
        name for name, spec in population.spec.items() if spec.dtype.is_floating_point and spec.dtype.itemsize < 4
    ]

    def move(block: State, start: int, own: Element) -> tuple[State, None]:
        made = apply_block(Wide(symmetry, own), block, 0, kind)
        # Half precision ends at 65,504: a scale may carry a weight beyond.
        check_finite({name: made[name] for name in narrow}, where=f"members from {start}, once moved,")
        return made, None

    goal = None if path is None else Path(path)
    if goal is not None and only is not None:
        return completed(population, move, cluster or Serial(), goal, only, elements.some)
    return mapped(population, move, cluster or Serial(), path=goal, beside=elements.some).population
