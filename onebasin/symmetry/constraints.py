"""A tensor seen as blocks: in each block every axis is a grid whose directions are atoms.

When all rules have run, an axis is one or more `Strip`s: positions `start + sum_k i_k * step_k`, one direction per
factor. A concatenation gives several strips, a flattened axis several directions. The blocks of a tensor are the
combinations of its axes' strips, and each direction of each block that is an atom (a *leaf*) has exponents of its
own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from torch import Tensor

from onebasin.symmetry.axes import (
    Atom,
    Concat,
    Enumerated,
    Family,
    Fixed,
    Parted,
    Product,
    Reason,
    StructureClash,
    Term,
    Uniform,
    resolve,
    rigidify,
    unify,
    whole,
)
from onebasin.symmetry.constants import uniform_axes
from onebasin.symmetry.trace import Graph, Node

# ----------------------------------------------------------------------
# The loom on which rules work: values with their axes, and the relations that decide about scales and signs.


Power = Fraction | int | None
"""How an exponent passes through: out = power * in; None if only the exponent 0 may pass."""

Index = tuple[int, ...]


@dataclass(eq=False)
class Value:
    """One tensor of the traced function: the term of each axis; `zero` if all entries are 0 whatever the weights.

    An integer tensor may hold positions along an axis of another tensor (what `argmax`, `topk` and `sort` return):
    `points` is the term of that axis. Whoever looks up entries by such positions follows the units when they change
    places; any other use of the numbers makes the units rigid. Along its own axis `distinct` no position occurs twice.
    `counts` marks 0, 1, 2, ... along one axis. A part of a parameter that is only read in parts says along which axis
    and from which position on it lies (`part`).
    """

    shape: tuple[int, ...]
    axes: list[Term]
    zero: bool = False
    constant: Tensor | None = None
    state_name: str = ""
    node: Node | None = None
    points: Term | None = None
    distinct: int | None = None
    counts: bool = False
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Part:
    """An operand of a relation: its axes' labels, and how exponents of scale and sign pass from it."""

    value: Value
    labels: tuple[str, ...]
    scale: Power = 1
    sign: Power = 1


@dataclass(frozen=True)
class Relation:
    """Exponents of `out` are sums over `parts`, label by label; over a label that `out` lacks they cancel.

    For example a product of matrices is out("mn") from parts ("mk", "kn"): m and n pass on, the two exponents along k
    add up to 0.
    """

    out: Value
    labels: tuple[str, ...]
    parts: tuple[Part, ...]
    axes: dict[str, Term]


@dataclass(frozen=True)
class Move:
    """`out` holds entries of `source` elsewhere: `forth` maps an index of source to one of out, `back` the reverse."""

    source: Value
    out: Value
    forth: Callable[[Index], Index | None]
    back: Callable[[Index], Index | None]


@dataclass(frozen=True)
class Pin:
    """Exponents of `value` along `axis` (all axes if None) are 0, for the kinds named."""

    value: Value
    axis: int | None = None
    kinds: tuple[str, ...] = ("scale", "sign")


@dataclass(eq=False)
class Constraints:
    """All that the rules have said about one graph."""

    graph: Graph
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    relations: list[Relation | Move | Pin] = field(default_factory=list)
    states: dict[str, Value] = field(default_factory=dict)
    means: set[str] = field(default_factory=set)
    variances: dict[str, float] = field(default_factory=dict)
    padding: list[Atom] = field(default_factory=list)
    hidden: list[Term] = field(default_factory=list)

    def value(self, axes: Sequence[Term], *, zero: bool = False, node: Node | None = None) -> Value:
        """A new value with these axes."""
        made = Value(tuple(term.size for term in axes), list(axes), zero=zero, node=node)
        self.values.append(made)
        return made

    def constant(self, tensor: Tensor) -> Value:
        """A known tensor: an axis along which it does not change is uniform, any other is fixed."""
        axes: list[Term] = []
        for axis, size in enumerate(tensor.shape):
            flat = size == 1 or bool((tensor == tensor.narrow(axis, 0, 1)).all()) if size else True
            axes.append(
                Uniform(size) if flat else Fixed(size, Reason("it meets a constant that differs from unit to unit"))
            )
        made = Value(tuple(tensor.shape), axes, constant=tensor)
        made.zero = tensor.numel() > 0 and not tensor.is_complex() and bool((tensor == 0).all())
        self.values.append(made)
        return made

    def frozen(self, tensor: Tensor, node: Node) -> Value:
        """A constant of the state: only that entries are equal along an axis counts, not what they are.

        It is not folded into other constants and zeros are not told from other numbers, so that what is found holds
        for every value that is equal along the same axes.
        """
        flat = uniform_axes(tensor)
        reason = Reason(f"it meets the constant {node.state_name}, which differs from unit to unit", node)
        axes = [Uniform(n) if n < 2 or axis in flat else Fixed(n, reason) for axis, n in enumerate(tensor.shape)]
        return self.value(axes, node=node)

    def zeros(self, size: int) -> Term:
        """A piece of an axis that holds zeros: its units are interchangeable and may be scaled at will."""
        self.padding.append(Atom(size))
        return self.padding[-1]

    def fixed(self, shape: Sequence[int], node: Node | None = None, reason: Reason | None = None) -> Value:
        """A value that no symmetry moves: an input, or what an unknown operation returns."""
        return self.value([Uniform(1) if size == 1 else Fixed(size, reason) for size in shape], node=node)

    def zero(self, shape: Sequence[int], node: Node | None = None) -> Value:
        """A tensor of zeros."""
        return self.value([Uniform(size) for size in shape], zero=True, node=node)

    def tie(self, left: Term, right: Term, node: Node) -> Term:
        """Unify two axes; where they have no common structure, both become rigid and the result is fixed."""
        try:
            return unify(left, right, Reason("it meets fixed positions", node))
        except StructureClash as clash:
            reason = Reason(f"two ways of cutting one axis do not fit together ({clash})", node, explained=False)
            rigidify(left, reason)
            rigidify(right, reason)
            return Fixed(left.size)

    def relate(self, out: Value, labels: Sequence[str], parts: Sequence[Part], axes: dict[str, Term]) -> None:
        """Record a relation; zeros say nothing about exponents."""
        heard = tuple(part for part in parts if not part.value.zero)
        if not out.zero and heard:
            self.relations.append(Relation(out, tuple(labels), heard, axes))

    def move(
        self, source: Value, out: Value, forth: Callable[..., Index | None], back: Callable[..., Index | None]
    ) -> None:
        """Record that `out` holds entries of `source` at other places."""
        if not source.zero and not out.zero:
            self.relations.append(Move(source, out, forth, back))

    def pin(self, value: Value, axis: int | None = None, kinds: tuple[str, ...] = ("scale", "sign")) -> None:
        """Record that exponents are 0."""
        if not value.zero:
            self.relations.append(Pin(value, axis, kinds))

    def rigid(self, value: Value, axis: int | None, reason: Reason) -> None:
        """Forbid permutations along an axis (all axes if None)."""
        for term in value.axes if axis is None else [value.axes[axis]]:
            rigidify(term, reason)

    def freeze(self, value: Value, reason: Reason) -> None:
        """Nothing may move this value."""
        self.rigid(value, None, reason)
        self.pin(value)
        self.expose(value, reason)

    def expose(self, value: Value, reason: Reason) -> None:
        """The numbers in `value` matter: if they are positions along an axis, its units may not change places."""
        if value.points is not None:
            rigidify(value.points, reason)

    def settle(self, value: Value, node: Node) -> Value:
        """Give up families: operations that compute want one term per axis."""
        for axis, term in enumerate(value.axes):
            resolved = resolve(term)
            if isinstance(resolved, Family):
                common = resolved.members[0]
                for member in resolved.members[1:]:
                    common = self.tie(common, member, node)
                value.axes[axis] = common
        value.axes[:] = [whole(term) if isinstance(term, Parted) else term for term in value.axes]
        return value


def flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Row-major position of a multi-index.

    >>> flat_index((1, 2), (3, 4))
    6
    """
    position = 0
    for i, size in zip(index, shape, strict=True):
        position = position * size + i
    return position


def unflat_index(position: int, shape: Sequence[int]) -> Index:
    """Multi-index of a row-major position.

    >>> unflat_index(6, (3, 4))
    (1, 2)
    """
    index = []
    for size in reversed(shape):
        position, i = divmod(position, size) if size else (0, 0)
        index.append(i)
    return tuple(reversed(index))


def count(shape: Sequence[int]) -> int:
    """Number of entries."""
    return math.prod(shape)


# ----------------------------------------------------------------------
# A tensor seen as blocks: in each block every axis is a grid whose directions are atoms.


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
