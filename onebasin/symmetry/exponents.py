"""Which factors leave the function unchanged: the relations between values as linear equations, solved exactly.

Every leaf (an atom's direction in a block of a value) has an unknown exponent e: entries are multiplied by lambda_i^e
when unit i of the atom is scaled by lambda_i. Scales live over the rationals, signs over GF(2). Atoms do not mix, so
each has a small system of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction

from onebasin.symmetry.axes import Atom
from onebasin.symmetry.constraints import (
    Blocks,
    Constraints,
    Direction,
    Fusions,
    Index,
    Leaf,
    Move,
    Part,
    Pin,
    Power,
    Relation,
    Strip,
    Value,
    count,
    flat_index,
    strips,
)
from onebasin.symmetry.exact import System
from onebasin.symmetry.unused import unread

Carry = Callable[[Index], Index | None]
Systems = dict[str, dict[Atom, System[Leaf]]]


def equations(constraints: Constraints, blocks: dict[Value, Blocks], fusions: Fusions) -> Systems:
    """One system per kind ("scale", "sign") and atom."""
    writer = _Writer(blocks, fusions)
    for relation in constraints.relations:
        if isinstance(relation, Pin):
            writer.pin(relation)
        elif isinstance(relation, Move):
            writer.move(relation)
        else:
            writer.relation(relation)
    for value, block, read in unread(constraints, blocks):
        writer.follow(value, block, read)
    return writer.systems


class _Writer:
    """Turns relations into equations."""

    def __init__(self, blocks: dict[Value, Blocks], fusions: Fusions) -> None:
        self.blocks, self.fusions = blocks, fusions
        self.systems: Systems = {"scale": {}, "sign": {}}

    def _say(self, kind: str, atom: Atom, terms: list[tuple[Leaf, Fraction | int]]) -> None:
        system = self.systems[kind].setdefault(atom, System(2 if kind == "sign" else 0))
        system.add(terms)

    def _zero(self, leaf: Leaf, kinds: tuple[str, ...] = ("scale", "sign")) -> None:
        for kind in kinds:
            self._say(kind, leaf.atom, [(leaf, 1)])

    def pin(self, pin: Pin) -> None:
        """Exponents are 0."""
        laid = self.blocks[pin.value]
        for block in laid:
            for leaf, _ in laid.leaves(block):
                if pin.axis is None or leaf.axis == pin.axis:
                    self._zero(leaf, pin.kinds)

    def follow(self, value: Value, block: tuple[int, ...], read: tuple[int, ...]) -> None:
        """A block without effect takes the exponents of one that is read, where they share an axis; others are 0."""
        known = {(leaf.axis, leaf.step, leaf.atom): leaf for leaf, _ in self.blocks[value].leaves(read)}
        for leaf, _ in self.blocks[value].leaves(block):
            same = known.get((leaf.axis, leaf.step, leaf.atom))
            if same is None or block[leaf.axis] != read[leaf.axis]:
                self._zero(leaf)
            else:
                for kind in ("scale", "sign"):
                    self._say(kind, leaf.atom, [(leaf, 1), (same, -1)])

    def move(self, move: Move) -> None:
        """Exponents travel with the entries; checked from both sides, because either side may be cut more finely."""
        source, out = self.blocks[move.source], self.blocks[move.out]
        for here, there, carry in ((source, out, move.forth), (out, source, move.back)):
            for block in here:
                base = here.base(block)
                target = carry(base)
                if target is not None:
                    self._carry(here, there, block, (base, target), carry)

    def _carry(
        self, here: Blocks, there: Blocks, block: tuple[int, ...], pair: tuple[Index, Index], carry: Carry
    ) -> None:
        base, target = pair
        other = there.at(target)
        shape = there.value.shape
        found = {(leaf.atom, leaf.step * count(shape[leaf.axis + 1 :])): leaf for leaf, _ in there.leaves(other)}
        singles = {leaf.atom: leaf for leaf, direction in there.leaves(other) if direction.size == 1}
        for leaf, direction in here.leaves(block):
            match = singles.get(leaf.atom)
            if direction.size > 1:
                stepped = list(base)
                stepped[leaf.axis] += leaf.step
                landed = carry(tuple(stepped))
                gap = None if landed is None else flat_index(landed, shape) - flat_index(target, shape)
                match = found.get((leaf.atom, gap)) if gap is not None else None
            if match is None:
                self._zero(leaf)
                continue
            for kind in ("scale", "sign"):
                self._say(kind, leaf.atom, [(leaf, 1), (match, -1)])

    def relation(self, relation: Relation) -> None:
        """Label by label, exponents of the parts add up to that of the result, or to 0 where it has no such axis."""
        table = {label: strips(term, self.fusions) for label, term in relation.axes.items()}
        used = sorted({label for part in relation.parts for label in part.labels} | set(relation.labels))
        seen: set[Leaf] = set()
        for combination in itertools.product(*[table[label] for label in used]):
            here = dict(zip(used, combination, strict=True))
            for label, strip in here.items():
                for direction in strip.directions:
                    if direction.atom is not None:
                        self._balance(relation, here, label, direction, seen)
        for value in [relation.out, *[part.value for part in relation.parts]]:
            laid = self.blocks[value]
            for block in laid:
                for leaf, _ in laid.leaves(block):
                    if leaf not in seen:
                        self._zero(leaf)

    def _balance(
        self, relation: Relation, here: dict[str, Strip], label: str, direction: Direction, seen: set[Leaf]
    ) -> None:
        assert direction.atom is not None
        result = list(self._leaf(relation.out, relation.labels, here, label, direction))
        terms: dict[str, list[tuple[Leaf, Fraction | int]]] = {
            kind: [(leaf, -1) for leaf in result] for kind in ("scale", "sign")
        }
        for part in relation.parts:
            for leaf in self._leaf(part.value, part.labels, here, label, direction):
                seen.add(leaf)
                for kind, power in _powers(part):
                    if power is None:
                        self._zero(leaf, (kind,))
                    else:
                        terms[kind].append((leaf, power))
        seen.update(result)
        for kind in ("scale", "sign"):
            if terms[kind]:
                self._say(kind, direction.atom, terms[kind])

    def _leaf(
        self, value: Value, labels: tuple[str, ...], here: dict[str, Strip], label: str, direction: Direction
    ) -> Iterator[Leaf]:
        """The leaves of a value that stand for one direction of one label (two where a label occurs on two axes)."""
        laid = self.blocks[value]
        block = laid.at(tuple(here[name].start if value.shape[axis] > 1 else 0 for axis, name in enumerate(labels)))
        for leaf, own in laid.leaves(block):
            if (
                labels[leaf.axis] == label
                and leaf.step == direction.step
                and leaf.atom is direction.atom
                and own.size == direction.size
            ):
                yield leaf


def _powers(part: Part) -> tuple[tuple[str, Power], tuple[str, Power]]:
    return ("scale", part.scale), ("sign", part.sign)
