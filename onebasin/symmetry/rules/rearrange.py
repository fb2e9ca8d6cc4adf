"""Operations that put entries elsewhere and compute nothing.

Transpositions, broadcasts and flips reorder or repeat axes; views split axes into factors or merge them, in row-major
order; slices, selections, concatenations and padding cut axes into pieces or join them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onebasin.symmetry.axes import (
    Enumerated,
    Family,
    Fixed,
    Parted,
    Reason,
    StructureClash,
    Term,
    Uniform,
    atoms,
    concat,
    product,
    resolve,
    split_at,
    split_off,
)
from onebasin.symmetry.constraints import Constraints, Index, Value, flat_index, unflat_index
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.trace import Node


def permutation(name: str, arguments: Sequence[Any], rank: int) -> list[int]:
    """New axis -> old axis."""
    if name == "permute":
        return [dim % rank for dim in arguments[1]]
    order = list(range(rank))
    first, second = (arguments[1] % rank, arguments[2] % rank) if name == "transpose" else (0, rank - 1)
    order[first], order[second] = order[second], order[first]
    return order


def squeezed(shape: Sequence[int], arguments: Sequence[Any]) -> list[int]:
    """Axes that a squeeze removes."""
    if len(arguments) < 2:
        return [axis for axis, size in enumerate(shape) if size == 1]
    dims = arguments[1] if isinstance(arguments[1], tuple | list) else [arguments[1]]
    return [dim % len(shape) for dim in dims if shape[dim] == 1]


@rule("permute", "transpose", "t")
def permute(constraints: Constraints, node: Node, x: Value, *arguments: Any) -> Value:
    """Axes in another order."""
    return permuted(constraints, node, x, permutation(node.short, (x, *arguments), len(x.shape)))


def permuted(constraints: Constraints, node: Node, x: Value, order: Sequence[int]) -> Value:
    """Axes in the given order (new axis -> old axis)."""
    out = constraints.value([x.axes[axis] for axis in order], zero=x.zero, node=node)
    back = [order.index(axis) for axis in range(len(order))]
    constraints.move(x, out, lambda i: tuple(i[axis] for axis in order), lambda i: tuple(i[axis] for axis in back))
    return out


@rule("unsqueeze")
def unsqueeze(constraints: Constraints, node: Node, x: Value, dim: int) -> Value:
    """A new axis of length one."""
    dim %= len(x.shape) + 1
    out = constraints.value([*x.axes[:dim], Uniform(1), *x.axes[dim:]], zero=x.zero, node=node)
    constraints.move(x, out, lambda i: (*i[:dim], 0, *i[dim:]), lambda i: (*i[:dim], *i[dim + 1 :]))
    return out


@rule("squeeze")
def squeeze(constraints: Constraints, node: Node, x: Value, *arguments: Any) -> Value:
    """Axes of length one removed."""
    gone = squeezed(x.shape, (x, *arguments))
    staying = [axis for axis in range(len(x.shape)) if axis not in gone]
    out = constraints.value([x.axes[axis] for axis in staying], zero=x.zero, node=node)

    def back(index: Index) -> Index:
        full = [0] * len(x.shape)
        for axis, i in zip(staying, index, strict=True):
            full[axis] = i
        return tuple(full)

    constraints.move(x, out, lambda index: tuple(index[axis] for axis in staying), back)
    return out


@rule("expand", "broadcast_to")
def expand(constraints: Constraints, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """Axes of length one repeated."""
    assert node.shape is not None
    shape = node.shape
    shift = len(shape) - len(x.shape)
    axes: list[Term] = [Uniform(size) for size in shape]
    stretched = set(range(shift))
    for axis, term in enumerate(x.axes):
        if term.size == shape[axis + shift]:
            axes[axis + shift] = term
        else:
            stretched.add(axis + shift)
    out = constraints.value(axes, zero=x.zero, node=node)
    constraints.move(
        x,
        out,
        lambda index: (0,) * shift + tuple(index),
        lambda index: tuple(0 if axis in stretched else i for axis, i in enumerate(index))[shift:],
    )
    return out


@rule("repeat")
def repeat(constraints: Constraints, node: Node, x: Value, repeats: Sequence[int]) -> Value:
    """Copies side by side along axes: copy number x old index."""
    constraints.settle(x, node)
    shift = len(repeats) - len(x.shape)
    axes: list[Term] = [Uniform(count) for count in repeats[:shift]]
    axes += [product([Uniform(count), term]) for count, term in zip(repeats[shift:], x.axes, strict=True)]
    out = constraints.value(axes, zero=x.zero, node=node)
    constraints.move(
        x,
        out,
        lambda index: (0,) * shift + tuple(index),
        lambda index: tuple(i % size for i, size in zip(index[shift:], x.shape, strict=True)),
    )
    return out


@rule("flip")
def flip(constraints: Constraints, node: Node, x: Value, dims: Sequence[int]) -> Value:
    """Positions in reverse order."""
    flipped = [dim % len(x.shape) for dim in dims]
    for dim in flipped:
        constraints.rigid(x, dim, Reason("its order is reversed", node))
        constraints.pin(x, dim)
    axes = [
        Fixed(term.size) if axis in flipped and not isinstance(resolve(term), Uniform) else term
        for axis, term in enumerate(x.axes)
    ]
    out = constraints.value(axes, zero=x.zero, node=node)

    def turn(index: Index) -> Index:
        return tuple(
            size - 1 - i if axis in flipped else i for axis, (i, size) in enumerate(zip(index, x.shape, strict=True))
        )

    constraints.move(x, out, turn, turn)
    return out


MANY = 16  # pieces
PASSING = ("permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "alias", "contiguous", "detach", "expand")


@rule("view", "_unsafe_view", "reshape", "unflatten", "flatten")
def view(constraints: Constraints, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """The same entries in row-major order under another shape."""
    assert node.shape is not None
    return reshaped(constraints, node, x, node.shape, pieces_read(node))


@rule("as_strided")
def as_strided(
    constraints: Constraints,
    node: Node,
    x: Value,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Value:
    """The same entries in the same places of memory (decompositions write so to set the strides of single entries)."""
    source = node.arguments[0]
    steps = [step for n, step in zip(size, stride, strict=True) if n > 1]
    known = [step for n, step in zip(x.shape, source.stride or (), strict=False) if n > 1]
    same = [n for n in size if n > 1] == [n for n in x.shape if n > 1] and steps == known
    if not same or offset is not None or source.stride is None or math.prod(size) == 0:
        constraints.freeze(x, Reason("its memory is read in another order", node, explained=False))
        return constraints.fixed(tuple(size))
    return reshaped(constraints, node, x, size)


def reshaped(
    constraints: Constraints,
    node: Node,
    x: Value,
    shape: Sequence[int],
    pieces: Mapping[int, Sequence[int]] | None = None,
) -> Value:
    """View `x` under `shape`; axes in `pieces` are only read in pieces of these lengths: what follows may vary."""
    shape, pieces = tuple(shape), pieces or {}
    if x.shape == shape:
        return x
    constraints.settle(x, node)
    out_axes: list[Term] = []
    for sources, targets in _groups(x.shape, shape):
        term = product([x.axes[axis] for axis in sources]) if sources else Uniform(1)
        sizes = [shape[axis] for axis in targets]
        cut = next((i for i, axis in enumerate(targets) if axis in pieces and i < len(targets) - 1), None)
        try:
            out_axes += _factors(term, sizes) if cut is None else _families(term, sizes, cut, pieces[targets[cut]])
        except StructureClash as clash:
            for axis in sources:
                constraints.rigid(
                    x, axis, Reason(f"a view cuts through its structure ({clash})", node, explained=False)
                )
            out_axes += [Fixed(size) for size in sizes]
    out = constraints.value(out_axes, zero=x.zero, node=node)
    constraints.move(
        x,
        out,
        lambda index: unflat_index(flat_index(index, x.shape), shape),
        lambda index: unflat_index(flat_index(index, shape), x.shape),
    )
    return out


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair up runs of axes with equal products, as short as possible."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        sources, targets = [], []
        left = right = 1
        if i < len(old):
            sources.append(i)
            left, i = old[i], i + 1
        if j < len(new):
            targets.append(j)
            right, j = new[j], j + 1
        while left != right:
            if left < right and i < len(old):
                sources.append(i)
                left, i = left * old[i], i + 1
            elif j < len(new):
                targets.append(j)
                right, j = right * new[j], j + 1
            else:
                break
        if not (sources and targets) and groups:  # single positions at the end belong to the last group
            groups[-1][0].extend(sources)
            groups[-1][1].extend(targets)
        else:
            groups.append((sources, targets))
    return groups


def _factors(term: Term, sizes: list[int]) -> list[Term]:
    """Write a term as factors of the given sizes."""
    out: list[Term] = []
    for size in reversed(sizes[1:]):
        term, inner = split_off(term, size)
        out.insert(0, inner)
    return [term, *out] if sizes else []


def _families(term: Term, sizes: list[int], cut: int, lengths: Sequence[int]) -> list[Term]:
    """As `_factors`, but what follows position `cut` is described separately for each piece along it."""
    before, many, after = sizes[:cut], sizes[cut], sizes[cut + 1 :]
    inner = math.prod(after)
    outer: Term = Uniform(1)
    if before:
        outer, term = split_off(term, many * inner)
    pieces: list[Term] = []
    members: list[list[Term]] = []
    for length in lengths:
        head, term = split_at(term, length * inner) if term.size > length * inner else (term, Uniform(0))
        piece, width = split_off(head, inner)
        pieces.append(piece)
        members.append(_factors(width, after))
    token = Enumerated(many) if len(lengths) == many else Parted(tuple(pieces))
    families: list[Term] = [Family(token, tuple(member[i] for member in members)) for i in range(len(after))]
    return [*(_factors(outer, before) if before else []), token, *families]


def pieces_read(node: Node) -> dict[int, tuple[int, ...]]:
    """Axes of a node's result that every use cuts into the same pieces (`x[:, 0]`, `unbind`, `x[:, :3]`): lengths."""
    assert node.shape is not None
    pieces = {}
    for axis, length in enumerate(node.shape):
        cuts = _cuts(node, axis) if length > 1 else None
        if not cuts:
            continue
        spans = sorted(cuts)
        ends = [0, *[stop for _, stop in spans]]
        if len(spans) > 1 and ends == [*[start for start, _ in spans], length] and len(spans) <= MANY:
            pieces[axis] = tuple(stop - start for start, stop in spans)
        elif all(stop - start == 1 for start, stop in spans) and length <= MANY:
            pieces[axis] = (1,) * length
    return pieces


def _cuts(node: Node, axis: int) -> set[tuple[int, int]] | None:
    """Spans (start, stop) that the users of a node cut out of an axis; None if one of them does anything else."""
    spans: set[tuple[int, int]] = set()
    for user in node.users:
        cuts = _cuts_of(user, node, axis)
        if cuts is None:
            return None
        spans |= cuts
    return spans if node.users else None


def _cuts_of(user: Node, source: Node, axis: int) -> set[tuple[int, int]] | None:
    name = user.short
    assert source.shape is not None
    rank, length = len(source.shape), source.shape[axis]
    if name in ("select", "unbind", "slice", "split_with_sizes"):
        place = 2 if name == "split_with_sizes" else 1
        dim = user.arguments[place] if len(user.arguments) > place else user.options.get("dim", 0)
        if dim % rank != axis:
            several = name in ("unbind", "split_with_sizes")
            return None if several else _cuts(user, axis - (name == "select" and dim % rank < axis))
        if name == "unbind":
            return {(position, position + 1) for position in range(length)}
        if name == "select":
            return {(user.arguments[2] % length, user.arguments[2] % length + 1)}
        if name == "split_with_sizes":
            ends = list(itertools.accumulate(user.arguments[1]))
            return set(itertools.pairwise([0, *ends]))
        start, stop, step = slice(*[*user.arguments[2:], *(None, None, 1)[len(user.arguments) - 2 :]]).indices(length)
        return {(start, stop)} if step == 1 and (start, stop) != (0, length) else None
    if name == "index":
        (place, index), *more = [(place, i) for place, i in enumerate(user.arguments[1]) if i is not None]
        position = single_position(index)
        if more or place != axis or position is None:
            return None
        return {(position % length, position % length + 1)}
    if name not in PASSING or user.shape is None:
        return None
    return _cuts(user, _axis_map(name, user, source)[axis])


def single_position(node: Node) -> int | None:
    """The number in a constant index with one entry, followed through copies."""
    while node.kind == "call" and node.short in ("clone", "alias", "detach", "lift_fresh_copy"):
        node = node.arguments[0]
    one = node.constant is not None and node.constant.numel() == 1 and not node.constant.is_floating_point()
    return int(node.constant) if one and node.constant is not None and node.constant.dtype != torch.bool else None


def _axis_map(name: str, user: Node, source: Node) -> dict[int, int]:
    """Where each axis of `source` is found in the result of a passing operation."""
    assert source.shape is not None and user.shape is not None
    rank = len(source.shape)
    if name in ("permute", "transpose", "t"):
        return {old: new for new, old in enumerate(permutation(name, user.arguments, rank))}
    if name == "unsqueeze":
        dim = user.arguments[1] % (rank + 1)
        return {axis: axis + (axis >= dim) for axis in range(rank)}
    if name == "squeeze":
        gone = squeezed(source.shape, user.arguments)
        return {axis: axis - sum(g < axis for g in gone) for axis in range(rank)}
    shift = len(user.shape) - rank
    return {axis: axis + shift for axis in range(rank)}


@rule("pixel_shuffle")
def pixel_shuffle(constraints: Constraints, node: Node, x: Value, factor: int) -> Value:
    """Channels C r r become an r times larger image: view, permute, view."""
    *batch, channels, height, width = x.shape
    rank = len(batch)
    split_up = reshaped(constraints, node, x, (*batch, channels // factor**2, factor, factor, height, width))
    order = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    turned = permuted(constraints, node, split_up, order)
    return reshaped(constraints, node, turned, (*batch, channels // factor**2, height * factor, width * factor))


@rule("slice")
def slice_axis(
    constraints: Constraints, node: Node, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    """A range of positions along an axis."""
    dim %= len(x.shape)
    first, _, step = slice(start, end, step).indices(x.shape[dim])
    assert node.shape is not None
    length = node.shape[dim]
    if step == 1 and length == x.shape[dim]:
        return x
    return window(constraints, node, x, dim, first, length, step)


def window(constraints: Constraints, node: Node, x: Value, dim: int, first: int, length: int, step: int = 1) -> Value:
    """`length` positions along an axis from `first` on, `step` apart."""
    term = resolve(x.axes[dim])
    if isinstance(term, Enumerated) and length == 1:
        return unsqueeze(constraints, node, select(constraints, node, x, dim, first), dim)
    if isinstance(term, Parted) and step == 1:
        starts = list(itertools.accumulate((piece.size for piece in term.pieces), initial=0))
        number = starts.index(first) if first in starts[:-1] else -1
        if number >= 0 and term.pieces[number].size == length:
            return _piece(constraints, node, x, (dim, first, number), term)
    if isinstance(term, Enumerated | Family | Parted):
        constraints.settle(x, node)
        term = resolve(x.axes[dim])
    try:
        piece = _cut(term, first, length, step)
    except StructureClash as clash:
        constraints.rigid(x, dim, Reason(f"a slice cuts through its structure ({clash})", node, explained=False))
        # The move below says nothing about a block whose first entry is not in the slice, though others are.
        constraints.pin(x, dim)
        piece = Fixed(length)
    axes = [*x.axes[:dim], piece, *x.axes[dim + 1 :]]
    out = constraints.value(axes, zero=x.zero, node=node)

    def forth(index: Index) -> Index | None:
        i, remainder = divmod(index[dim] - first, step)
        return (*index[:dim], i, *index[dim + 1 :]) if remainder == 0 and 0 <= i < length else None

    constraints.move(x, out, forth, lambda index: (*index[:dim], first + step * index[dim], *index[dim + 1 :]))
    return out


def _piece(constraints: Constraints, node: Node, x: Value, place: tuple[int, int, int], token: Parted) -> Value:
    """One piece of an axis that is only read in pieces, with what hangs on it."""
    dim, first, number = place
    axes = [t.members[number] if isinstance(t := resolve(a), Family) and t.token is token else a for a in x.axes]
    axes[dim] = token.pieces[number]
    out = constraints.value(axes, zero=x.zero, node=node)
    _place(constraints, out, x, dim, first, reverse=True)
    return out


def _cut(term: Term, first: int, length: int, step: int) -> Term:
    if isinstance(term, Uniform | Fixed):
        return type(term)(length)
    if step == 1:
        _, rest = split_at(term, first)
        return split_at(rest, length)[0]
    if first >= step or length * step != term.size:
        raise StructureClash(f"every {step}th position from {first}")
    outer, inner = split_off(term, step)
    for _ in range(step - 1):  # the positions inside a step are told apart from now on
        _, inner = split_at(inner, 1)
    return outer


@rule("select")
def select(constraints: Constraints, node: Node, x: Value, dim: int, index: int) -> Value:
    """One position along an axis."""
    dim %= len(x.shape)
    index %= x.shape[dim]
    token = resolve(x.axes[dim])
    if isinstance(token, Enumerated):
        staying = [term for axis, term in enumerate(x.axes) if axis != dim]
        axes = [
            t.members[index] if isinstance(t := resolve(term), Family) and t.token is token else term
            for term in staying
        ]
        out = constraints.value(axes, zero=x.zero, node=node)
        constraints.move(
            x,
            out,
            lambda i: (*i[:dim], *i[dim + 1 :]) if i[dim] == index else None,
            lambda i: (*i[:dim], index, *i[dim:]),
        )
        return out
    return squeeze(constraints, node, window(constraints, node, x, dim, index, 1), dim)


@rule("unbind")
def unbind(constraints: Constraints, node: Node, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """Every position along an axis."""
    return tuple(select(constraints, node, x, dim, index) for index in range(x.shape[dim]))


@rule("split_with_sizes", "split", "chunk")
def split(constraints: Constraints, node: Node, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    """Consecutive ranges of an axis."""
    dim %= len(x.shape)
    length = x.shape[dim]
    if isinstance(sizes, int):
        size = -(-length // sizes) if "chunk" in node.operation else sizes
        sizes = [min(size, length - start) for start in range(0, length, size)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(window(constraints, node, x, dim, start, size) for start, size in zip(starts, sizes, strict=True))


@rule("cat", "concat")
def cat(constraints: Constraints, node: Node, values: Sequence[Value], dim: int = 0) -> Value:
    """Tensors one after the other along an axis."""
    dim %= max(len(value.shape) for value in values)
    # What is empty adds nothing, and the empty vector (0,) fits beside any shape.
    values = [value for value in values if len(value.shape) <= dim or value.shape[dim]] or values[:1]
    values = [value for value in values if value.shape != (0,)] or values[:1]
    for value in values:
        constraints.settle(value, node)
    axes = list(values[0].axes)
    for value in values[1:]:
        for axis in range(len(axes)):
            if axis != dim:
                axes[axis] = constraints.tie(axes[axis], value.axes[axis], node)
    axes[dim] = concat([constraints.zeros(v.shape[dim]) if v.zero else v.axes[dim] for v in values])
    out = constraints.value(axes, zero=all(value.zero for value in values), node=node)
    start = 0
    for value in values:
        _place(constraints, value, out, dim, start)
        start += value.shape[dim]
    return out


def _place(constraints: Constraints, piece: Value, whole: Value, dim: int, start: int, reverse: bool = False) -> None:
    """Record that `piece` stands in `whole` from `start` on; `reverse` where it was taken from there."""
    stop = start + piece.shape[dim]

    def into(index: Index) -> Index:
        return (*index[:dim], index[dim] + start, *index[dim + 1 :])

    def out_of(index: Index) -> Index | None:
        return (*index[:dim], index[dim] - start, *index[dim + 1 :]) if start <= index[dim] < stop else None

    if reverse:
        constraints.move(whole, piece, out_of, into)
    else:
        constraints.move(piece, whole, into, out_of)


@rule("constant_pad_nd")
def pad(constraints: Constraints, node: Node, x: Value, widths: Sequence[int], fill: float = 0) -> Value:
    """Constant entries before and after; zeros are interchangeable and may be scaled at will."""
    constraints.settle(x, node)
    for number in range(len(widths) // 2):
        dim = len(x.shape) - 1 - number
        before, after = widths[2 * number], widths[2 * number + 1]
        if before < 0 or after < 0:
            length = x.shape[dim] + min(before, 0) + min(after, 0)
            x = window(constraints, node, x, dim, max(-before, 0), length)
        before, after = max(before, 0), max(after, 0)
        if before or after:
            x = _padded(constraints, node, x, (dim, before, after), fill)
    return x


def _padded(constraints: Constraints, node: Node, x: Value, place: tuple[int, int, int], fill: float) -> Value:
    dim, before, after = place
    if not atoms(x.axes[dim]):
        term: Term = Fixed(before + x.shape[dim] + after)
    else:
        ends: list[Term] = [constraints.zeros(size) if fill == 0 else Uniform(size) for size in (before, after)]
        term = concat([*ends[:1], x.axes[dim], *ends[1:]])
    out = constraints.value([*x.axes[:dim], term, *x.axes[dim + 1 :]], zero=x.zero and fill == 0, node=node)
    _place(constraints, x, out, dim, before)
    if fill != 0:
        constraints.pin(out)
    return out


@rule("slice_scatter")
def slice_scatter(
    constraints: Constraints,
    node: Node,
    x: Value,
    piece: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    """`piece` written over a range of x (x[..., a:b] = piece): what is before, the piece, what is after."""
    dim %= len(x.shape)
    first, _, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        for value in (x, piece):
            constraints.freeze(value, Reason("every so many positions are overwritten", node, explained=False))
        return constraints.fixed(x.shape)
    last = first + piece.shape[dim]
    around = [(0, first), (last, x.shape[dim] - last)]
    before, after = (window(constraints, node, x, dim, begin, size) if size else None for begin, size in around)
    return cat(constraints, node, [value for value in (before, piece, after) if value is not None], dim)


@rule("copy")
def copy_into(constraints: Constraints, node: Node, x: Value, source: Value, *_: Any) -> Value:
    """`source` written over all of x."""
    return expand(constraints, node, source) if source.shape != x.shape else source
