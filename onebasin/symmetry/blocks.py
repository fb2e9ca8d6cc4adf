"""A tensor seen as blocks: in each block every axis is a grid whose directions are atoms.

When all rules have run, an axis is one or more `Strip`s: positions `start + sum_k i_k * step_k`, one direction per
factor. A concatenation gives several strips, a flattened axis several directions. The blocks of a tensor are the
combinations of its axes' strips, and each direction of each block that is an atom (a *leaf*) has exponents of its
own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from onebasin.symmetry.axes import Atom, Concat, Enumerated, Family, Parted, Product, Term, resolve
from onebasin.symmetry.weave import Index, Value

Fusions = dict[tuple[Atom, Atom], Atom]


@dataclass(frozen=True)
class Direction:
    """One factor of a strip: `size` positions, `step` apart; `atom` is None for positions that nothing moves."""

    atom: Atom | None
    size: int
    step: int


@dataclass(frozen=True)
class Strip:
    """Positions of an axis that form one grid."""

    start: int
    directions: tuple[Direction, ...]

    def positions(self) -> Iterator[int]:
        """All positions, last direction fastest."""
        for index in itertools.product(*[range(direction.size) for direction in self.directions]):
            yield self.start + sum(i * direction.step for i, direction in zip(index, self.directions, strict=True))


@dataclass(frozen=True)
class Leaf:
    """An atom's direction in one block of a value: the unit of bookkeeping for exponents."""

    value: int
    block: tuple[int, ...]
    axis: int
    step: int
    atom: Atom


def strips(term: Term, fusions: Fusions) -> tuple[Strip, ...]:
    """The strips of an axis."""
    return tuple(Strip(strip.start, _fused(strip.directions, fusions)) for strip in _strips(term))


def _strips(term: Term) -> list[Strip]:
    term = resolve(term)
    if isinstance(term, Atom):
        return [Strip(0, (Direction(term, term.size, 1),))]
    if isinstance(term, Enumerated):
        return [Strip(position, ()) for position in range(term.size)]
    if isinstance(term, Concat | Parted):
        found, start = [], 0
        for piece in term.pieces:
            found += [Strip(start + strip.start, strip.directions) for strip in _strips(piece)]
            start += piece.size
        return found
    if isinstance(term, Product):
        found = [Strip(0, ())]
        for factor in term.factors:
            found = [
                Strip(
                    outer.start * factor.size + inner.start,
                    (*[Direction(d.atom, d.size, d.step * factor.size) for d in outer.directions], *inner.directions),
                )
                for outer in found
                for inner in _strips(factor)
            ]
        return found
    return [Strip(0, (Direction(None, term.size, 1),))]


def _fused(directions: Sequence[Direction], fusions: Fusions) -> tuple[Direction, ...]:
    """Join neighbouring directions that always occur together."""
    merged: list[Direction] = []
    for direction in directions:
        while merged and (atom := _fusion(merged[-1], direction, fusions)):
            direction = Direction(atom, merged.pop().size * direction.size, direction.step)
        merged.append(direction)
    return tuple(merged)


def _fusion(outer: Direction, inner: Direction, fusions: Fusions) -> Atom | None:
    if outer.atom is None or inner.atom is None or outer.step != inner.size * inner.step:
        return None
    return fusions.get((outer.atom, inner.atom))


def _members(token: Enumerated | Parted, found: Sequence[Strip]) -> list[int]:
    """For each strip of an axis on which families hang, the number of the member that hangs there."""
    if isinstance(token, Enumerated):
        return list(range(token.size))
    ends = list(itertools.accumulate(piece.size for piece in token.pieces))
    return [sum(strip.start >= end for end in ends) for strip in found]


class Blocks:
    """The blocks of one value.

    A block is named by one strip number per axis. With families (axes that depend on another) the strips of an axis
    depend on the position along the other.
    """

    def __init__(self, value: Value, number: int, fusions: Fusions) -> None:
        """Lay out `value`; `number` identifies it among all values."""
        self.value, self.number = value, number
        terms = [resolve(term) for term in value.axes]
        self._tokens = {term: axis for axis, term in enumerate(terms) if isinstance(term, Enumerated | Parted)}
        self._plain = [() if isinstance(term, Family) else strips(term, fusions) for term in terms]
        self._families = {
            axis: (self._tokens[term.token], [strips(member, fusions) for member in term.members])
            for axis, term in enumerate(terms)
            if isinstance(term, Family)
        }
        self._members = {axis: _members(token, self._plain[axis]) for token, axis in self._tokens.items()}
        self._owners: dict[tuple[int, int], list[int]] = {}
        self._leaves: dict[tuple[int, ...], list[tuple[Leaf, Direction]]] = {}

    def axis_strips(self, axis: int, block: Sequence[int] | None = None) -> tuple[Strip, ...]:
        """Strips of an axis; for a family, those at the block's position along its token axis."""
        if axis not in self._families:
            return self._plain[axis]
        token, members = self._families[axis]
        assert block is not None
        return members[self._members[token][block[token]]]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """All block names."""
        return iter(self._names)

    @cached_property
    def _names(self) -> list[tuple[int, ...]]:
        order = sorted(range(len(self.value.axes)), key=lambda axis: axis in self._families)
        names: list[dict[int, int]] = [{}]
        for axis in order:
            grown = []
            for name in names:
                filled = [name.get(i, 0) for i in range(len(self.value.axes))]
                grown += [{**name, axis: strip} for strip in range(len(self.axis_strips(axis, filled)))]
            names = grown
        return [tuple(name[axis] for axis in range(len(self.value.axes))) for name in names]

    def strip(self, block: Sequence[int], axis: int) -> Strip:
        """The strip of a block along an axis."""
        return self.axis_strips(axis, block)[block[axis]]

    def base(self, block: Sequence[int]) -> Index:
        """First index of a block."""
        return tuple(self.strip(block, axis).start for axis in range(len(block)))

    def leaves(self, block: tuple[int, ...]) -> list[tuple[Leaf, Direction]]:
        """The atoms of a block."""
        if block not in self._leaves:
            self._leaves[block] = [
                (Leaf(self.number, block, axis, direction.step, direction.atom), direction)
                for axis in range(len(block))
                for direction in self.strip(block, axis).directions
                if direction.atom is not None
            ]
        return self._leaves[block]

    def at(self, index: Index) -> tuple[int, ...]:
        """The block that holds an index."""
        block = [0] * len(index)
        for axis in sorted(range(len(index)), key=lambda axis: axis in self._families):
            block[axis] = self.strip_at(axis, index[axis], block)
        return tuple(block)

    def strip_at(self, axis: int, position: int, block: Sequence[int] | None = None) -> int:
        """Number of the strip that holds a position of an axis."""
        found = self.axis_strips(axis, block)
        if len(found) == 1:
            return 0
        member = block[self._families[axis][0]] if axis in self._families and block is not None else -1
        key = (axis, member)
        if key not in self._owners:
            owners = [0] * self.value.shape[axis]
            for number, strip in enumerate(found):
                for owned in strip.positions():
                    owners[owned] = number
            self._owners[key] = owners
        return self._owners[key][position]
