"""Operations that put entries or axes into another order, or repeat them: transpositions, broadcasts, flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Fixed, Reason, Term, Uniform, product, resolve
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.weave import Index, Value, Weave
from onebasin.trace import Node


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
def permute(weave: Weave, node: Node, x: Value, *arguments: Any) -> Value:
    """Axes in another order."""
    return permuted(weave, node, x, permutation(node.short, (x, *arguments), len(x.shape)))


def permuted(weave: Weave, node: Node, x: Value, order: Sequence[int]) -> Value:
    """Axes in the given order (new axis -> old axis)."""
    out = weave.value([x.axes[axis] for axis in order], zero=x.zero, node=node)
    back = [order.index(axis) for axis in range(len(order))]
    weave.move(x, out, lambda i: tuple(i[axis] for axis in order), lambda i: tuple(i[axis] for axis in back))
    return out


@rule("unsqueeze")
def unsqueeze(weave: Weave, node: Node, x: Value, dim: int) -> Value:
    """A new axis of length one."""
    dim %= len(x.shape) + 1
    out = weave.value([*x.axes[:dim], Uniform(1), *x.axes[dim:]], zero=x.zero, node=node)
    weave.move(x, out, lambda i: (*i[:dim], 0, *i[dim:]), lambda i: (*i[:dim], *i[dim + 1 :]))
    return out


@rule("squeeze")
def squeeze(weave: Weave, node: Node, x: Value, *arguments: Any) -> Value:
    """Axes of length one removed."""
    gone = squeezed(x.shape, (x, *arguments))
    kept = [axis for axis in range(len(x.shape)) if axis not in gone]
    out = weave.value([x.axes[axis] for axis in kept], zero=x.zero, node=node)

    def back(index: Index) -> Index:
        full = [0] * len(x.shape)
        for axis, i in zip(kept, index, strict=True):
            full[axis] = i
        return tuple(full)

    weave.move(x, out, lambda index: tuple(index[axis] for axis in kept), back)
    return out


@rule("expand", "broadcast_to")
def expand(weave: Weave, node: Node, x: Value, *_: Any, **__: Any) -> Value:
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
    out = weave.value(axes, zero=x.zero, node=node)
    weave.move(
        x,
        out,
        lambda index: (0,) * shift + tuple(index),
        lambda index: tuple(0 if axis in stretched else i for axis, i in enumerate(index))[shift:],
    )
    return out


@rule("repeat")
def repeat(weave: Weave, node: Node, x: Value, repeats: Sequence[int]) -> Value:
    """Copies side by side along axes: copy number x old index."""
    weave.settle(x, node)
    shift = len(repeats) - len(x.shape)
    axes: list[Term] = [Uniform(count) for count in repeats[:shift]]
    axes += [product([Uniform(count), term]) for count, term in zip(repeats[shift:], x.axes, strict=True)]
    out = weave.value(axes, zero=x.zero, node=node)
    weave.move(
        x,
        out,
        lambda index: (0,) * shift + tuple(index),
        lambda index: tuple(i % size for i, size in zip(index[shift:], x.shape, strict=True)),
    )
    return out


@rule("flip")
def flip(weave: Weave, node: Node, x: Value, dims: Sequence[int]) -> Value:
    """Positions in reverse order."""
    flipped = [dim % len(x.shape) for dim in dims]
    for dim in flipped:
        weave.rigid(x, dim, Reason("its order is reversed", node))
        weave.pin(x, dim)
    axes = [
        Fixed(term.size) if axis in flipped and not isinstance(resolve(term), Uniform) else term
        for axis, term in enumerate(x.axes)
    ]
    out = weave.value(axes, zero=x.zero, node=node)

    def turn(index: Index) -> Index:
        return tuple(
            size - 1 - i if axis in flipped else i for axis, (i, size) in enumerate(zip(index, x.shape, strict=True))
        )

    weave.move(x, out, turn, turn)
    return out
