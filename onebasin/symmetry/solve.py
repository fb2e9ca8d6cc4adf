"""Which factors leave the function unchanged: linear equations for exponents, solved exactly.

Every leaf (an atom's direction in a block of a value) has an unknown exponent e: its entries are multiplied by
lambda_i^e when unit i of the atom is scaled by lambda_i. What rules have said is linear in these unknowns. For
out[m, n] = sum over k of a[m, k] b[k, n] it is

    e(out, m) = e(a, m),   e(out, n) = e(b, n),   e(a, k) + e(b, k) = 0,

the last because terms of a sum with different lambda_k keep their sum, for all weights, only if each of them stays.
A nonlinearity of degree p gives e(out) = p e(in), one without a degree e(in) = 0, an output e = 0. Any solution is a
symmetry, seen on the tensors of the state; the others are intermediate results and are projected away.

Atoms do not mix, since their factors are independent: each has a small system of its own. Scales live over the
rationals. Signs live over GF(2), because (-1)^e knows only the parity of e: a square lets every sign pass, but scales
only as 2e. Both are solved exactly; in floating point a tolerance would have to decide about ranks, and one wrong
decision is a wrong symmetry. Cost: nearly all equations say that two unknowns are equal or that one is 0 and go into a
union-find; Gaussian elimination sees the few that are left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

from onebasin.symmetry.axes import Atom, Reason, rigidify
from onebasin.symmetry.blocks import Blocks, Direction, Fusions, Leaf, Strip, strips
from onebasin.symmetry.constraints import Constraints, Index, Move, Part, Pin, Power, Relation, Value, flat_index

Key = TypeVar("Key", bound=Hashable)
Number = Fraction | int
Row = dict[Key, Number]


class System(Generic[Key]):
    """Homogeneous linear equations in unknowns named by keys; `modulus` 0 for the rationals, 2 for GF(2).

    Equalities and zeros, which are nearly all equations, go into a union-find; only the rest is eliminated.
    """

    def __init__(self, modulus: int = 0) -> None:
        """Start without unknowns."""
        self.modulus = modulus
        self._parent: dict[Key, Key] = {}
        self._zero: set[Key] = set()
        self._rows: list[Row[Key]] = []

    def add(self, terms: Iterable[tuple[Key, Number]]) -> None:
        """Say that a linear combination is 0."""
        row: Row[Key] = {}
        for key, coefficient in terms:
            self._find(key)
            row[key] = self._reduce(row.get(key, 0) + coefficient)
        row = {key: coefficient for key, coefficient in row.items() if coefficient}
        if len(row) == 1:
            self._zero.add(self._find(next(iter(row))))
        elif len(row) == 2 and sum(row.values()) in ((0, 2) if self.modulus else (0,)):
            self._join(*row)  # a - b = 0; over GF(2) a + b = 0 is the same
        elif row:
            self._rows.append(row)

    def _reduce(self, number: Number) -> Number:
        return number % self.modulus if self.modulus else number

    def _find(self, key: Key) -> Key:
        parent = self._parent.setdefault(key, key)
        while parent != key:
            self._parent[key] = self._parent[parent]
            key, parent = parent, self._parent[parent]
        return key

    def _join(self, left: Key, right: Key) -> None:
        left, right = self._find(left), self._find(right)
        if left != right:
            self._parent[right] = left
            if right in self._zero:
                self._zero.add(left)

    def __iter__(self) -> Iterator[Key]:
        """The unknowns."""
        return iter(list(self._parent))

    def solutions(self, columns: Sequence[Key], zero: Iterable[Key] = ()) -> list[list[int]]:
        """A reduced basis of the solutions as seen on `columns` (what other unknowns do is projected away).

        Unknowns in `zero` are 0 as well.

        Each basis vector is integer and primitive; it has a leading column in which all others are 0, earlier columns
        first.
        """
        # Unknowns that a union-find has made equal count as one, zeros as none: what is left of the rows is small.
        roots_of_zero = {self._find(key) for key in (*self._zero, *zero)}
        rows = []
        for row in self._rows:
            merged: Row[Key] = {}
            for key, coefficient in row.items():
                root = self._find(key)
                if root not in roots_of_zero:
                    merged[root] = self._reduce(merged.get(root, Fraction(0)) + coefficient)
            rows.append({key: coefficient for key, coefficient in merged.items() if coefficient})
        roots = {key: self._find(key) for key in columns}
        seen = dict.fromkeys(root for root in roots.values() if root not in roots_of_zero)
        basis = self._null_space(rows, list(seen))
        dense = [[vector.get(roots[key], Fraction(0)) for key in columns] for vector in basis]
        return [_primitive(vector, self.modulus) for vector in self.echelon(dense)]

    def _null_space(self, rows: list[Row[Key]], wanted: list[Key]) -> list[Row[Key]]:
        """Null vectors of the eliminated system; unknowns that are in no row are free by themselves."""
        pivots: dict[Key, Row[Key]] = {}
        for row in rows:
            for pivot, known in pivots.items():
                if pivot in row:
                    row = self._minus(row, known, row[pivot])
            if not row:
                continue
            pivot = next(iter(row))
            inverse: Number = 1 / Fraction(row[pivot]) if not self.modulus else 1
            row = self._minus({}, row, -inverse)
            for other, known in pivots.items():
                if pivot in known:
                    pivots[other] = self._minus(known, row, known[pivot])
            pivots[pivot] = row
        free = dict.fromkeys([key for row in pivots.values() for key in row if key not in pivots])
        free.update(dict.fromkeys(key for key in wanted if key not in pivots))
        basis: list[Row[Key]] = []
        for key in free:
            basis.append({key: 1})
            basis[-1].update({pivot: self._reduce(-row[key]) for pivot, row in pivots.items() if key in row})
        return basis

    def _minus(self, row: Row[Key], other: Row[Key], factor: Number) -> Row[Key]:
        made = dict(row)
        for key, value in other.items():
            made[key] = self._reduce(made.get(key, Fraction(0)) - factor * value)
        return {key: value for key, value in made.items() if value}

    def echelon(self, vectors: list[list[Number]]) -> list[list[Number]]:
        """Reduced row echelon form; zero rows are left out."""
        rows = [list(vector) for vector in vectors]
        done: list[list[Number]] = []
        width = len(rows[0]) if rows else 0
        for column in range(width):
            pivot = next((row for row in rows if row[column]), None)
            if pivot is None:
                continue
            rows = [row for row in rows if row is not pivot]
            if not self.modulus:
                pivot = [Fraction(value) / pivot[column] for value in pivot]
            rows = [self._cleared(row, pivot, column) for row in rows]
            done = [self._cleared(row, pivot, column) for row in done]
            done.append(pivot)
        return done

    def _cleared(self, row: list[Number], pivot: list[Number], column: int) -> list[Number]:
        factor = row[column]
        if not factor:
            return row
        return [self._reduce(a - factor * b) for a, b in zip(row, pivot, strict=True)]


def sparse_rank(rows: Iterable[Mapping[Key, int]], modulus: int = 0) -> int:
    """Rank of sparse integer rows, over the rationals or modulo 2.

    >>> sparse_rank([{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"b": 1, "c": -1}])
    2
    """
    pivots: dict[Key, dict[Key, Number]] = {}
    for given in rows:
        row: dict[Key, Number] = {key: value % modulus if modulus else value for key, value in given.items()}
        row = {key: value for key, value in row.items() if value}
        while known := next((key for key in row if key in pivots), None):
            factor = row[known]
            for key, value in pivots[known].items():
                left = row.get(key, 0) - factor * value
                row[key] = left % modulus if modulus else left
                if not row[key]:
                    del row[key]
        if row:
            pivot, leading = next(iter(row.items()))
            pivots[pivot] = {key: value if modulus else Fraction(value) / leading for key, value in row.items()}
    return len(pivots)


def _primitive(vector: list[Number], modulus: int) -> list[int]:
    if modulus:
        return [int(value) % modulus for value in vector]
    factor = math.lcm(*[value.denominator for value in vector])
    whole = [int(value * factor) for value in vector]
    divisor = math.gcd(*whole) or 1
    return [value // divisor for value in whole]


Carry = Callable[[Index], Index | None]
Systems = dict[str, dict[Atom, System[Leaf]]]


def equations(constraints: Constraints, blocks: dict[Value, Blocks], fusions: Fusions) -> Systems:
    """The systems, one for each kind ("scale", "sign") and atom."""
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
    """Writes relations as equations."""

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
        """Entries keep their exponents; written from both sides, because either side may be cut more finely."""
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
        # A step along a direction moves the flat position by a known number: by it the direction is recognised there.
        by_step = {(leaf.atom, leaf.step * math.prod(shape[leaf.axis + 1 :])): leaf for leaf, _ in there.leaves(other)}
        singles = {leaf.atom: leaf for leaf, direction in there.leaves(other) if direction.size == 1}
        for leaf, direction in here.leaves(block):
            match = singles.get(leaf.atom)
            if direction.size > 1:
                stepped = list(base)
                stepped[leaf.axis] += leaf.step
                landed = carry(tuple(stepped))
                gap = None if landed is None else flat_index(landed, shape) - flat_index(target, shape)
                match = by_step.get((leaf.atom, gap)) if gap is not None else None
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


Block = tuple[int, ...]


# Parts of a tensor that this input never reads, as a table of 16 positions of which a short example reads 4, have no
# effect here, so nothing about them can be proved; but a longer input will read them. Left free they could be permuted
# and scaled at will. They are held rigid where they were cut off, and follow the part that is read everywhere else.
def unread(constraints: Constraints, blocks: dict[Value, Blocks]) -> Iterator[tuple[Value, Block, Block]]:
    """For each block of a state tensor that is never read: the tensor, the block, and the nearest block that is."""
    heard = _heard(constraints, blocks)
    for value in constraints.states.values():
        read = heard.get(value, set())
        if read and len(read) < len(list(blocks[value])):
            for block in blocks[value]:
                if block not in read:
                    yield value, block, min(sorted(read), key=lambda other: _differences(block, other))


def _differences(left: Block, right: Block) -> int:
    return sum(one != other for one, other in zip(left, right, strict=True))


def _heard(constraints: Constraints, blocks: dict[Value, Blocks]) -> dict[Value, set[Block]]:
    """The blocks of each value that some computation reads, followed backwards through what only moves entries."""
    moves: dict[Value, list[Move]] = {}
    computed: set[Value] = set()
    for relation in constraints.relations:
        if isinstance(relation, Move):
            moves.setdefault(relation.source, []).append(relation)
        elif isinstance(relation, Relation):
            computed |= {part.value for part in relation.parts} | {relation.out} & set(constraints.states.values())
        elif isinstance(relation, Pin) and relation.axis is None and not relation.value.state_name:
            computed.add(relation.value)  # an output, or the operand of an operation without a rule
    heard: dict[Value, set[Block]] = {}
    for value in reversed(constraints.values):
        if value in computed:
            heard[value] = set(blocks[value])
            continue
        blocks_read = heard.setdefault(value, set())
        for move in moves.get(value, ()):
            for block in blocks[value]:
                landed = move.forth(blocks[value].base(block))
                if landed is not None and blocks[move.out].at(landed) in heard.get(move.out, set()):
                    blocks_read.add(block)
    return heard


def hold_unread(constraints: Constraints, blocks: dict[Value, Blocks]) -> None:
    """Forbid permutations of what is not read, along the axes where it was cut off."""
    for value, block, read in unread(constraints, blocks):
        for axis in range(len(block)):
            if block[axis] != read[axis]:
                for direction in blocks[value].strip(block, axis).directions:
                    if direction.atom is not None:
                        rigidify(direction.atom, Reason("part of it is not read for this input", value.node))
