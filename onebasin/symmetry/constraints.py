"""What rules say about a traced function: which axes are walked in step, and how factors pass.

Running a rule for an operation does two things. It unifies axes (`tie`): where x + y is computed, permuting the units
of x means permuting those of y. And it records how factors pass. Say unit i of an atom is scaled by lambda_i, and an
entry of a tensor is thereby multiplied by lambda_i^e; then each operation is a linear relation between exponents e:

    Relation   e(out) = sum over operands of power * e(operand), label by label; 0 over labels that `out` lacks
    Move       out holds entries of its operand at other places, with their exponents
    Pin        e = 0: an output, an argument of exp, a fixed input

`solve` turns these into equations once all axes are known, because a later operation may still cut an axis and give its
parts exponents of their own. Entries that are zero whatever the weights are say nothing, since 0 * lambda = 0: no
relation is recorded for them, and weights that are only ever multiplied by zeros are reported instead (`hidden`).
Cost: the number of operations, not of entries; no tensor of the model's size is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

from onebasin.symmetry.axes import (
    Atom,
    Family,
    Fixed,
    Parted,
    Reason,
    StructureClash,
    Term,
    Uniform,
    resolve,
    rigidify,
    unify,
    whole,
)
from onebasin.symmetry.trace import Graph, Node
from onebasin.symmetry.unmoved import uniform_axes

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


Range = tuple[int, int]


# Parameters that are only ever read in parts: rows 0 to 5 here, rows 6 to 17 there. Torch's attention keeps the
# projections of queries, keys and values in one matrix, and cuts it when queries come from elsewhere than keys. The
# parts are parameters of their own that happen to be stored together: their other axes need not belong to the same
# units, as they would if the whole matrix had one term for each axis.
@dataclass(frozen=True)
class Pieces:
    """The parts of one parameter along `axis`, by their first and last (exclusive) position."""

    axis: int
    values: dict[Range, Value]

    def read(self, node: Node) -> tuple[Value, ...]:
        """What a node that cuts the parameter gets, in order."""
        return tuple(self.values[start, stop] for _, start, stop in _cuts(node) or ())


def parted(graph: Graph) -> dict[str, tuple[int, list[Range]]]:
    """For each parameter that every reader cuts along one axis, into the same two or more parts: axis and parts."""
    nodes: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "state":
            nodes.setdefault(graph.shared.get(node.state_name, node.state_name), []).append(node)
    parts = {}
    for name, twins in nodes.items():
        readers = [user for node in twins for user in node.users]
        cuts = [_cuts(user) for user in readers]
        if not readers or None in cuts or name in graph.entangled or twins[0].buffer or not twins[0].shape:
            continue
        spans = sorted({cut for several in cuts for cut in several or ()})
        axes = {axis for axis, _, _ in spans}
        ends = [0] + [stop for _, _, stop in spans]
        if len(axes) == 1 and len(spans) > 1 and ends[:-1] == [start for _, start, _ in spans]:
            axis = axes.pop()
            if ends[-1] == twins[0].shape[axis] and len(twins[0].shape) > 1:
                parts[name] = axis, [(start, stop) for _, start, stop in spans]
    return parts


def _cuts(node: Node) -> list[tuple[int, int, int]] | None:
    """The parts (axis, start, stop) that a node cuts out of its first operand; None if it does anything else."""
    if node.short not in ("split_with_sizes", "split", "chunk", "slice"):
        return None
    source, *rest = node.arguments
    if node.short == "slice":
        given = [*rest, *[0, None, None, 1][len(rest) :]]
        axis = given[0] % len(source.shape)
        first, last, step = slice(*given[1:]).indices(source.shape[axis])
        return [(axis, first, last)] if step == 1 and first < last else None
    sizes, dim = rest[0], rest[1] if len(rest) > 1 else node.options.get("dim", 0)
    axis = dim % len(source.shape)
    length = source.shape[axis]
    if isinstance(sizes, int):
        size = -(-length // sizes) if node.short == "chunk" else sizes
        sizes = [min(size, length - start) for start in range(0, length, size)]
    return [(axis, sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
