"""Operations that cut an axis into pieces or put pieces together: slices, selections, concatenations, padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Enumerated, Family, Fixed, Parted, Reason, Term, Uniform, atoms, concat, resolve
from onebasin.symmetry.rules.rearrange import expand, squeeze, unsqueeze
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.unify import StructureClash, split_at, split_off
from onebasin.symmetry.weave import Index, Value, Weave
from onebasin.trace import Node


@rule("slice")
def slice_axis(
    weave: Weave, node: Node, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    """A range of positions along an axis."""
    dim %= len(x.shape)
    first, _, step = slice(start, end, step).indices(x.shape[dim])
    assert node.shape is not None
    length = node.shape[dim]
    if step == 1 and length == x.shape[dim]:
        return x
    return window(weave, node, x, dim, first, length, step)


def window(weave: Weave, node: Node, x: Value, dim: int, first: int, length: int, step: int = 1) -> Value:
    """`length` positions along an axis from `first` on, `step` apart."""
    term = resolve(x.axes[dim])
    if isinstance(term, Enumerated) and length == 1:
        return unsqueeze(weave, node, select(weave, node, x, dim, first), dim)
    if isinstance(term, Parted) and step == 1:
        starts = list(itertools.accumulate((piece.size for piece in term.pieces), initial=0))
        number = starts.index(first) if first in starts[:-1] else -1
        if number >= 0 and term.pieces[number].size == length:
            return _piece(weave, node, x, (dim, first, number), term)
    if isinstance(term, Enumerated | Family | Parted):
        weave.settle(x, node)
        term = resolve(x.axes[dim])
    try:
        piece = _cut(term, first, length, step)
    except StructureClash as clash:
        weave.rigid(x, dim, Reason(f"a slice cuts through its structure ({clash})", node, explained=False))
        # The move below says nothing about a block whose first entry is not in the slice, though others are.
        weave.pin(x, dim)
        piece = Fixed(length)
    axes = [*x.axes[:dim], piece, *x.axes[dim + 1 :]]
    out = weave.value(axes, zero=x.zero, node=node)

    def forth(index: Index) -> Index | None:
        i, remainder = divmod(index[dim] - first, step)
        return (*index[:dim], i, *index[dim + 1 :]) if remainder == 0 and 0 <= i < length else None

    weave.move(x, out, forth, lambda index: (*index[:dim], first + step * index[dim], *index[dim + 1 :]))
    return out


def _piece(weave: Weave, node: Node, x: Value, place: tuple[int, int, int], token: Parted) -> Value:
    """One piece of an axis that is only read in pieces, with what hangs on it."""
    dim, first, number = place
    axes = [t.members[number] if isinstance(t := resolve(a), Family) and t.token is token else a for a in x.axes]
    axes[dim] = token.pieces[number]
    out = weave.value(axes, zero=x.zero, node=node)
    _place(weave, out, x, dim, first, reverse=True)
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
def select(weave: Weave, node: Node, x: Value, dim: int, index: int) -> Value:
    """One position along an axis."""
    dim %= len(x.shape)
    index %= x.shape[dim]
    token = resolve(x.axes[dim])
    if isinstance(token, Enumerated):
        kept = [term for axis, term in enumerate(x.axes) if axis != dim]
        axes = [
            t.members[index] if isinstance(t := resolve(term), Family) and t.token is token else term for term in kept
        ]
        out = weave.value(axes, zero=x.zero, node=node)
        weave.move(
            x,
            out,
            lambda i: (*i[:dim], *i[dim + 1 :]) if i[dim] == index else None,
            lambda i: (*i[:dim], index, *i[dim:]),
        )
        return out
    return squeeze(weave, node, window(weave, node, x, dim, index, 1), dim)


@rule("unbind")
def unbind(weave: Weave, node: Node, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """Every position along an axis."""
    return tuple(select(weave, node, x, dim, index) for index in range(x.shape[dim]))


@rule("split_with_sizes", "split", "chunk")
def split(weave: Weave, node: Node, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    """Consecutive ranges of an axis."""
    dim %= len(x.shape)
    length = x.shape[dim]
    if isinstance(sizes, int):
        size = -(-length // sizes) if "chunk" in node.operation else sizes
        sizes = [min(size, length - start) for start in range(0, length, size)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(window(weave, node, x, dim, start, size) for start, size in zip(starts, sizes, strict=True))


@rule("cat", "concat")
def cat(weave: Weave, node: Node, values: Sequence[Value], dim: int = 0) -> Value:
    """Tensors one after the other along an axis."""
    dim %= max(len(value.shape) for value in values)
    # What is empty adds nothing, and the empty vector (0,) fits beside any shape.
    values = [value for value in values if len(value.shape) <= dim or value.shape[dim]] or values[:1]
    values = [value for value in values if value.shape != (0,)] or values[:1]
    for value in values:
        weave.settle(value, node)
    axes = list(values[0].axes)
    for value in values[1:]:
        for axis in range(len(axes)):
            if axis != dim:
                axes[axis] = weave.tie(axes[axis], value.axes[axis], node)
    axes[dim] = concat([weave.zeros(v.shape[dim]) if v.zero else v.axes[dim] for v in values])
    out = weave.value(axes, zero=all(value.zero for value in values), node=node)
    start = 0
    for value in values:
        _place(weave, value, out, dim, start)
        start += value.shape[dim]
    return out


def _place(weave: Weave, piece: Value, whole: Value, dim: int, start: int, reverse: bool = False) -> None:
    """Record that `piece` stands in `whole` from `start` on; `reverse` where it was taken from there."""
    stop = start + piece.shape[dim]

    def into(index: Index) -> Index:
        return (*index[:dim], index[dim] + start, *index[dim + 1 :])

    def out_of(index: Index) -> Index | None:
        return (*index[:dim], index[dim] - start, *index[dim + 1 :]) if start <= index[dim] < stop else None

    if reverse:
        weave.move(whole, piece, out_of, into)
    else:
        weave.move(piece, whole, into, out_of)


@rule("constant_pad_nd")
def pad(weave: Weave, node: Node, x: Value, widths: Sequence[int], fill: float = 0) -> Value:
    """Constant entries before and after; zeros are interchangeable and may be scaled at will."""
    weave.settle(x, node)
    for number in range(len(widths) // 2):
        dim = len(x.shape) - 1 - number
        before, after = widths[2 * number], widths[2 * number + 1]
        if before < 0 or after < 0:
            length = x.shape[dim] + min(before, 0) + min(after, 0)
            x = window(weave, node, x, dim, max(-before, 0), length)
        before, after = max(before, 0), max(after, 0)
        if before or after:
            x = _padded(weave, node, x, (dim, before, after), fill)
    return x


def _padded(weave: Weave, node: Node, x: Value, place: tuple[int, int, int], fill: float) -> Value:
    dim, before, after = place
    if not atoms(x.axes[dim]):
        term: Term = Fixed(before + x.shape[dim] + after)
    else:
        ends: list[Term] = [weave.zeros(size) if fill == 0 else Uniform(size) for size in (before, after)]
        term = concat([*ends[:1], x.axes[dim], *ends[1:]])
    out = weave.value([*x.axes[:dim], term, *x.axes[dim + 1 :]], zero=x.zero and fill == 0, node=node)
    _place(weave, x, out, dim, before)
    if fill != 0:
        weave.pin(out)
    return out


@rule("slice_scatter")
def slice_scatter(
    weave: Weave, node: Node, x: Value, piece: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    """`piece` written over a range of x (x[..., a:b] = piece): what is before, the piece, what is after."""
    dim %= len(x.shape)
    first, _, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        for value in (x, piece):
            weave.freeze(value, Reason("every so many positions are overwritten", node, explained=False))
        return weave.fixed(x.shape)
    last = first + piece.shape[dim]
    around = [(0, first), (last, x.shape[dim] - last)]
    before, after = (window(weave, node, x, dim, begin, size) if size else None for begin, size in around)
    return cat(weave, node, [value for value in (before, piece, after) if value is not None], dim)


@rule("copy")
def copy_into(weave: Weave, node: Node, x: Value, source: Value, *_: Any) -> Value:
    """`source` written over all of x."""
    return expand(weave, node, source) if source.shape != x.shape else source
