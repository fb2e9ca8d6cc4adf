"""Reductions: the order along a reduced axis does not matter, but factors along it do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Fixed, Reason, Uniform, atoms
from onebasin.symmetry.rules.pointwise import passing, plain
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.weave import Part, Power, Value, Weave
from onebasin.trace import Node


def reduced(
    weave: Weave, node: Node, x: Value, dims: Any, keep: bool = False, powers: tuple[Power, Power] = (1, 1)
) -> Value:
    """Reduce `dims` (None: all); surviving axes pass factors with `powers`, reduced ones must carry none."""
    weave.settle(x, node)
    rank = len(x.shape)
    gone = _axes(dims, rank)
    labels = tuple(str(axis) for axis in range(rank))
    for axis in gone:
        weave.pin(x, axis)
    kept = [axis for axis in range(rank) if axis not in gone]
    out = weave.value([x.axes[axis] for axis in kept], zero=x.zero and powers[0] == 1, node=node)
    weave.relate(
        out, [labels[axis] for axis in kept], [Part(x, labels, *powers)], dict(zip(labels, x.axes, strict=True))
    )
    if not keep:
        return out
    stretched = weave.value(
        [Uniform(1) if axis in gone else x.axes[axis] for axis in range(rank)], zero=out.zero, node=node
    )
    names = [labels[axis] if axis in kept else f"one {axis}" for axis in range(rank)]
    table = dict(zip(names, stretched.axes, strict=True))
    weave.relate(stretched, names, [Part(out, tuple(labels[axis] for axis in kept))], table)
    return stretched


def beside(weave: Weave, node: Node, x: Value) -> Value:
    """A tensor without factors that moves with x: indices of largest entries, counts, masks."""
    return passing(weave, node, [x], [(0, 0)])


def _axes(dims: Any, rank: int) -> list[int]:
    if dims is None or (isinstance(dims, tuple | list) and not dims):
        return list(range(rank))
    return [dim % rank for dim in (dims if isinstance(dims, tuple | list) else [dims])] if rank else []


@rule("sum", "mean", "nansum")
def total(weave: Weave, node: Node, x: Value, dims: Any = None, keepdim: bool = False, **options: Any) -> Value:
    """Sum or mean."""
    return reduced(weave, node, x, options.get("dim", dims), keepdim)


@rule("amax", "amin")
def extreme(weave: Weave, node: Node, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    """Largest or smallest entry."""
    return reduced(weave, node, x, dims, keepdim, (1, None))


@rule("max", "min")
def extreme_with_position(weave: Weave, node: Node, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """Largest or smallest entry, with its position if a dimension is given: then the order along it matters."""
    if isinstance(dim, Value):
        return plain(weave, node, x, dim)
    out = reduced(weave, node, x, dim, keepdim, (1, None))
    if dim is None:
        return out
    if any(user.arguments[1] == 1 and user.users for user in node.users):
        weave.rigid(x, dim, Reason("the position of its largest entry is used", node))
    return out, beside(weave, node, out)


@rule("any", "all", "prod", "logsumexp")
def without_factors(weave: Weave, node: Node, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    """Reductions that no factor passes through."""
    return reduced(weave, node, x, dims, keepdim, (None, None))


@rule("var", "std")
def spread(weave: Weave, node: Node, x: Value, dims: Any = None, *_: Any, keepdim: bool = False, **__: Any) -> Value:
    """Variance or standard deviation: even, of degree 2 or 1."""
    return reduced(
        weave, node, x, dims if not isinstance(dims, bool) else None, keepdim, (2 if "var" in node.operation else 1, 0)
    )


@rule("var_mean", "std_mean")
def spread_and_mean(
    weave: Weave, node: Node, x: Value, dims: Any = None, *_: Any, keepdim: bool = False, **__: Any
) -> Any:
    """Variance and mean."""
    return reduced(weave, node, x, dims, keepdim, (2 if "var" in node.operation else 1, 0)), reduced(
        weave, node, x, dims, keepdim
    )


@rule("linalg_vector_norm", "norm")
def norm(
    weave: Weave, node: Node, x: Value, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    """A vector norm: of degree 1 and, being a function of |x|, even in the sign of each entry."""
    if order == 0:
        return reduced(weave, node, x, dims, keepdim, (None, None))
    absolute = passing(weave, node, [x], [(1, 0)])
    return reduced(weave, node, absolute, dims, keepdim)


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def softmax(weave: Weave, node: Node, x: Value, dim: int, *_: Any) -> Value:
    """Entries compete along an axis: they may change places, but carry no factors."""
    statistic(weave, node, x, [dim])
    return plain(weave, node, x)


def statistic(weave: Weave, node: Node, x: Value, dims: Sequence[int]) -> Value:
    """Note that something is computed for each index of the other axes: what is inside `dims` must stay inside."""
    weave.settle(x, node)
    gone = [dim % len(x.shape) for dim in dims] if x.shape else []
    kept = [axis for axis in range(len(x.shape)) if axis not in gone]
    out = weave.value([x.axes[axis] for axis in kept], node=node)
    labels = tuple(str(axis) for axis in range(len(x.shape)))
    weave.relate(out, [labels[a] for a in kept], [Part(x, labels, 0, 0)], dict(zip(labels, x.axes, strict=True)))
    return out


@rule("cumsum")
def cumulative_sum(weave: Weave, node: Node, x: Value, dim: int, **_: Any) -> Value:
    """Running sums: the order along the axis matters."""
    weave.settle(x, node)
    dim %= len(x.shape)
    weave.rigid(x, dim, Reason("running sums are taken along it", node))
    weave.pin(x, dim)
    statistic(weave, node, x, [dim])
    axes = [Fixed(term.size) if axis == dim and not atoms(term) else term for axis, term in enumerate(x.axes)]
    out = weave.value(axes, zero=x.zero, node=node)
    labels = tuple(str(axis) for axis in range(len(x.shape)))
    weave.relate(out, labels, [Part(x, labels)], dict(zip(labels, axes, strict=True)))
    return out
