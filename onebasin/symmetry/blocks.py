"""Tensors as blocks of grids, and which atoms nest inside of others.

When all rules have run, an axis is one or more `Strip`s: positions `start + sum_k i_k * step_k`, one direction for each
factor. A concatenation gives several strips, a flattened axis several directions. The blocks of a tensor are the
combinations of its axes' strips, and each direction of a block that is an atom (a *leaf*) has exponents of its own:
inside of a block all entries of a unit are treated alike, between blocks they need not be.

Nesting: an atom D (units of a head) may be permuted differently for each index of an atom H (heads) if every block that
holds D also holds H, so that the permutation to use is always known. Where H occurs more than once, D belongs to the
one on its own axis. Summing over that H while D survives forbids it: afterwards the entries of D would be mixtures of
differently permuted ones. Two atoms that may depend on each other and always stand side by side are one larger atom
(a view that nothing distinguishes), and are fused; elsewhere one direction of the dependence is dropped, which misses a
symmetry but invents none. Cost: the number of blocks times the square of the directions in a block, for each fusion.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from onebasin.symmetry.axes import Atom, Concat, Enumerated, Family, Parted, Product, Term, resolve
from onebasin.symmetry.constraints import Constraints, Index, Relation, Value

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


Parents = dict[Atom, frozenset[Atom]]


def home(laid: Blocks, block: tuple[int, ...], leaf: Leaf, parent: Atom) -> tuple[int, Direction] | None:
    """Where `parent` stands for `leaf` in this block: axis and direction; None if nowhere or in several places."""
    on_axis: list[tuple[int, Direction]] = []
    elsewhere: list[tuple[int, Direction]] = []
    for other, direction in laid.leaves(block):
        if other.atom is parent:
            (on_axis if other.axis == leaf.axis else elsewhere).append((other.axis, direction))
    if len(on_axis) == 1:
        return on_axis[0]
    return elsewhere[0] if not on_axis and len(elsewhere) == 1 else None


def parents_of(constraints: Constraints, blocks: dict[Value, Blocks]) -> Parents:
    """For each atom, the atoms it may depend on."""
    found: dict[Atom, set[Atom]] = {}
    for laid in blocks.values():
        for block in laid:
            for leaf, candidates in _candidates(laid, block):
                known = found.get(leaf.atom)
                found[leaf.atom] = set(candidates) if known is None else known & candidates
    for child, parent in forbidden(constraints, blocks):
        found[child].discard(parent)
    return {atom: frozenset(others) for atom, others in found.items()}


def _candidates(laid: Blocks, block: tuple[int, ...]) -> Iterator[tuple[Leaf, set[Atom]]]:
    leaves = [leaf for leaf, _ in laid.leaves(block)]
    by_axis = Counter((leaf.axis, leaf.atom) for leaf in leaves)
    total = Counter(leaf.atom for leaf in leaves)
    for leaf in leaves:
        yield (
            leaf,
            {
                other
                for other in total
                if other is not leaf.atom
                and (by_axis[leaf.axis, other] == 1 or (not by_axis[leaf.axis, other] and total[other] == 1))
            },
        )


def forbidden(
    constraints: Constraints, blocks: dict[Value, Blocks], *, sums: bool = True
) -> Iterator[tuple[Atom, Atom]]:
    """Pairs (child, parent): the parent is summed over but the child survives, or two indices claim to be it.

    Without `sums` only the latter: a factor per pair may be summed over, since the equations see to it that it cancels.
    """
    for relation in constraints.relations:
        if not isinstance(relation, Relation):
            continue
        homes: dict[tuple[str, int, Atom, Atom], str] = {}
        for value, labels in [(relation.out, relation.labels), *[(part.value, part.labels) for part in relation.parts]]:
            laid = blocks[value]
            for block in laid:
                for leaf, candidates in _candidates(laid, block):
                    own = labels[leaf.axis]
                    for parent in candidates:
                        place = home(laid, block, leaf, parent)
                        assert place is not None
                        label = labels[place[0]]
                        same = homes.setdefault((own, leaf.step, leaf.atom, parent), label)
                        if same != label or (sums and label not in relation.labels and own in relation.labels):
                            yield leaf.atom, parent


def settle(found: Parents, blocks: dict[Value, Blocks], fusions: Fusions) -> tuple[Parents, Fusions]:
    """Resolve mutual dependence: fuse atoms that always stand side by side, else keep one direction only."""
    relation = {atom: set(others) for atom, others in found.items()}
    new: Fusions = {}
    taken: set[Atom] = set()
    for atom in sorted(relation, key=lambda a: a.serial):
        for other in sorted(relation[atom], key=lambda a: a.serial):
            if atom not in relation.get(other, ()):
                continue
            pair = None if {atom, other} & taken else _side_by_side(atom, other, blocks)
            if pair is not None and atom.rigid is None and other.rigid is None:
                new[pair] = Atom(atom.size * other.size)
                taken |= {atom, other}
            else:
                outer, inner = pair or (atom, other)
                if (outer.rigid is None) and inner.rigid is not None:
                    outer, inner = inner, outer
                relation[outer].discard(inner)
    changed = True
    while changed:  # what a parent depends on, its children must be able to see
        changed = False
        for atom, others in relation.items():
            visible = {other for other in others if relation.get(other, set()) <= others}
            changed |= visible != others
            relation[atom] = visible
    return {atom: frozenset(others) for atom, others in relation.items()}, {**fusions, **new}


def _side_by_side(left: Atom, right: Atom, blocks: dict[Value, Blocks]) -> tuple[Atom, Atom] | None:
    """The pair (outer, inner) if one always directly follows the other on the same axis."""
    orders = set()
    for laid in blocks.values():
        for axis in range(len(laid.value.axes)):
            for strip in {laid.strip(block, axis) for block in laid}:
                places = {
                    direction.atom: n for n, direction in enumerate(strip.directions) if direction.atom in (left, right)
                }
                if not places:
                    continue
                if len(places) < 2:
                    return None
                outer, inner = (left, right) if places[left] < places[right] else (right, left)
                first, second = strip.directions[places[outer]], strip.directions[places[inner]]
                if places[inner] != places[outer] + 1 or first.step != second.size * second.step:
                    return None
                orders.add((outer, inner))
    return orders.pop() if len(orders) == 1 else None
