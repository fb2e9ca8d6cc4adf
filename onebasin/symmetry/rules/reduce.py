"""Reductions: the order along a reduced axis does not matter, but factors along it do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Fixed, Reason, Uniform
from onebasin.symmetry.constraints import Constraints, Part, Power, Value
from onebasin.symmetry.rules.pointwise import passing, plain
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.trace import Node


def reduced(
    constraints: Constraints, node: Node, x: Value, dims: Any, keep: bool = False, powers: tuple[Power, Power] = (1, 1)
) -> Value:
    """Reduce `dims` (None: all); surviving axes pass factors with `powers`, reduced ones must carry none."""
    constraints.settle(x, node)
    rank = len(x.shape)
    gone = _axes(dims, rank)
    labels = tuple(str(axis) for axis in range(rank))
    for axis in gone:
        constraints.pin(x, axis)
    staying = [axis for axis in range(rank) if axis not in gone]
    out = constraints.value([x.axes[axis] for axis in staying], zero=x.zero and powers[0] == 1, node=node)
    constraints.relate(
        out, [labels[axis] for axis in staying], [Part(x, labels, *powers)], dict(zip(labels, x.axes, strict=True))
    )
    if not keep:
        return out
    stretched = constraints.value(
        [Uniform(1) if axis in gone else x.axes[axis] for axis in range(rank)], zero=out.zero, node=node
    )
    names = [labels[axis] if axis in staying else f"one {axis}" for axis in range(rank)]
    table = dict(zip(names, stretched.axes, strict=True))
    constraints.relate(stretched, names, [Part(out, tuple(labels[axis] for axis in staying))], table)
    return stretched


def unscaled(constraints: Constraints, node: Node, x: Value) -> Value:
    """A tensor without factors that moves with x: indices of largest entries, counts, masks."""
    return passing(constraints, node, [x], [(0, 0)])


def _axes(dims: Any, rank: int) -> list[int]:
    if dims is None or (isinstance(dims, tuple | list) and not dims):
        return list(range(rank))
    return [dim % rank for dim in (dims if isinstance(dims, tuple | list) else [dims])] if rank else []


@rule("sum", "mean", "nansum")
def total(
    constraints: Constraints, node: Node, x: Value, dims: Any = None, keepdim: bool = False, **options: Any
) -> Value:
    """Sum or mean."""
    return reduced(constraints, node, x, options.get("dim", dims), keepdim)


@rule("amax", "amin")
def extreme(constraints: Constraints, node: Node, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
    """Largest or smallest entry."""
    return reduced(constraints, node, x, dims, keepdim, (1, None))


@rule("max", "min")
def extreme_with_position(
    constraints: Constraints, node: Node, x: Value, dim: Any = None, keepdim: bool = False
) -> Any:
    """Largest or smallest entry, with its position if a dimension is given: then the order along it matters."""
    if isinstance(dim, Value):
        return plain(constraints, node, x, dim)
    out = reduced(constraints, node, x, dim, keepdim, (1, None))
    if dim is None:
        return out
    return out, positions(constraints, node, x, dim, unscaled(constraints, node, out))


def positions(constraints: Constraints, node: Node, x: Value, dim: int, index: Value) -> Value:
    """Say that `index` holds positions along an axis of x, found by comparing its entries.

    Where entries are equal (zeros behind a relu) the place decides, and the units are rigid if the positions are used.
    """
    index.points = x.axes[dim]
    read = node.users if node.shape is not None else [u for g in node.users if g.arguments[1] == 1 for u in g.users]
    if read and not differ(x.node, dim % len(x.shape) == len(x.shape) - 1):
        constraints.expose(
            index, Reason("the positions of its largest entries are used, and entries may be equal", node)
        )
    return index


INJECTIVE = {
    "neg", "exp", "tanh", "sigmoid", "sqrt", "log", "atan", "clone", "alias", "detach", "contiguous", "_to_copy",
    "unsqueeze", "squeeze", "permute", "transpose", "t", "slice", "select", "native_layer_norm",
}  # fmt: skip
SAME_ORDER = {"view", "_unsafe_view", "reshape"}


def differ(node: Node | None, last: bool) -> bool:
    """Whether the entries of a result all differ, save for inputs and weights of measure zero.

    `last`: it is enough if they do along the last axis. Behind a relu many entries are 0, and so are all products with
    a layer that is dead for an input; a bias makes them differ along its own axis.
    """
    if node is None or node.kind in ("state", "input"):
        return node is not None and node.dtype is not None and node.dtype.is_floating_point and not node.buffer
    parents, name = node.parents(), node.short
    last = last and bool(node.shape) and name not in ("permute", "transpose", "t", "unsqueeze", "squeeze", "select")
    if name in ("mm", "bmm", "mul", "div"):
        return all(differ(parent, last and name in ("mul", "div")) for parent in parents)
    if name in ("addmm", "baddbmm", "convolution", "_cdist_forward"):
        along = {"addmm": 0, "_cdist_forward": 1}.get(name)  # a bias, or the points to which distances are taken
        if last and along is not None and differ(parents[along], False):
            return True
        return all(differ(parent, False) for parent in parents)
    if name in ("add", "sub"):
        return any(differ(parent, last) for parent in parents if parent.shape == node.shape)
    if name in ("sum", "mean"):  # not of a softmax, which sums to 1
        return parents[0].short in ("pow", "square", "abs") and differ(parents[0].parents()[0], False)
    if name in ("_softmax", "softmax", "_log_softmax", "log_softmax"):
        return (
            last
            and node.shape is not None
            and node.arguments[1] % len(node.shape) == len(node.shape) - 1
            and differ(parents[0], True)
        )
    if name in ("embedding", "linalg_vector_norm"):
        return differ(parents[0], False)
    if name in SAME_ORDER or name == "expand":
        shapes = node.shape, parents[0].shape
        same = bool(shapes[0]) and bool(shapes[1]) and shapes[0][-1] == shapes[1][-1]  # type: ignore[index]
        return (name in SAME_ORDER or shapes[0] == shapes[1]) and differ(parents[0], last and same)
    return (name in INJECTIVE or node.operation == "getitem") and differ(parents[0], last)


@rule("argmax", "argmin")
def position_of_extreme(
    constraints: Constraints, node: Node, x: Value, dim: Any = None, keepdim: bool = False
) -> Value:
    """Position of the largest or smallest entry: positive factors along the other axes make no difference."""
    if dim is None or not x.shape:
        constraints.freeze(x, Reason("the position of its largest entry is used", node))
        return constraints.fixed(node.shape or ())
    dim %= len(x.shape)
    return positions(constraints, node, x, dim, reduced(constraints, node, x, dim, keepdim, (0, None)))


@rule("sort", "topk")
def order_statistics(constraints: Constraints, node: Node, x: Value, *rest: Any, **options: Any) -> Any:
    """The largest entries in order, and where they were: a symmetric function of the entries along an axis."""
    if node.short == "topk":
        given = dict(zip(("k", "dim", "largest", "sorted"), rest, strict=False)) | options
        count, dim, ordered = given["k"], given.get("dim", -1), given.get("sorted", True)
    else:
        rest = rest[1:] if node.operation.endswith("stable") and len(rest) > 1 else rest
        dim, ordered = options.get("dim", rest[0] if rest else -1), True
        count = x.shape[dim] if x.shape else 1
    constraints.settle(x, node)
    if not x.shape or not ordered:
        constraints.freeze(x, Reason("its largest entries are used in no certain order", node))
        largest = constraints.fixed(tuple(count if a == dim % len(x.shape) else n for a, n in enumerate(x.shape)))
        return largest, constraints.fixed(largest.shape)
    dim %= len(x.shape)
    constraints.pin(x, dim)
    axes = [Fixed(count) if axis == dim else term for axis, term in enumerate(x.axes)]
    labels = tuple(str(axis) for axis in range(len(axes)))
    names = ["rank" if axis == dim else label for axis, label in enumerate(labels)]
    table = {**dict(zip(labels, x.axes, strict=True)), "rank": axes[dim]}
    out = constraints.value(axes, zero=x.zero, node=node)
    constraints.relate(out, names, [Part(x, labels, 1, None)], table)
    index = positions(constraints, node, x, dim, unscaled(constraints, node, out))
    index.distinct = dim
    return out, index


@rule("any", "all", "prod", "logsumexp")
def without_factors(
    constraints: Constraints, node: Node, x: Value, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    """Reductions that no factor passes through."""
    return reduced(constraints, node, x, dims, keepdim, (None, None))


@rule("var", "std")
def spread(
    constraints: Constraints, node: Node, x: Value, dims: Any = None, *_: Any, keepdim: bool = False, **__: Any
) -> Value:
    """Variance or standard deviation: even, of degree 2 or 1."""
    return reduced(
        constraints,
        node,
        x,
        dims if not isinstance(dims, bool) else None,
        keepdim,
        (2 if "var" in node.operation else 1, 0),
    )


@rule("var_mean", "std_mean")
def spread_and_mean(
    constraints: Constraints, node: Node, x: Value, dims: Any = None, *_: Any, keepdim: bool = False, **__: Any
) -> Any:
    """Variance and mean."""
    return reduced(constraints, node, x, dims, keepdim, (2 if "var" in node.operation else 1, 0)), reduced(
        constraints, node, x, dims, keepdim
    )


@rule("linalg_vector_norm", "norm")
def norm(
    constraints: Constraints, node: Node, x: Value, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    """A vector norm: of degree 1 and, being a function of |x|, even in the sign of each entry."""
    if order == 0:
        return reduced(constraints, node, x, dims, keepdim, (None, None))
    absolute = passing(constraints, node, [x], [(1, 0)])
    return reduced(constraints, node, absolute, dims, keepdim)


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def softmax(constraints: Constraints, node: Node, x: Value, dim: int, *_: Any) -> Value:
    """Entries compete along an axis: they may change places, but carry no factors."""
    statistic(constraints, node, x, [dim])
    return plain(constraints, node, x)


def statistic(constraints: Constraints, node: Node, x: Value, dims: Sequence[int], sign: Power = 0) -> Value:
    """Note that something is computed for each index of the other axes: what is inside `dims` must stay inside.

    A mean changes its sign with x (`sign` 1): then all that is inside has one sign.
    """
    constraints.settle(x, node)
    gone = [dim % len(x.shape) for dim in dims] if x.shape else []
    staying = [axis for axis in range(len(x.shape)) if axis not in gone]
    out = constraints.value([x.axes[axis] for axis in staying], node=node)
    labels = tuple(str(axis) for axis in range(len(x.shape)))
    constraints.relate(
        out, [labels[a] for a in staying], [Part(x, labels, 0, sign)], dict(zip(labels, x.axes, strict=True))
    )
    return out


@rule("cumsum")
def cumulative_sum(constraints: Constraints, node: Node, x: Value, dim: int, **_: Any) -> Value:
    """Running sums: the order along the axis matters."""
    constraints.settle(x, node)
    dim %= len(x.shape)
    constraints.rigid(x, dim, Reason("running sums are taken along it", node))
    constraints.pin(x, dim)
    statistic(constraints, node, x, [dim])
    axes = [Fixed(term.size) if axis == dim else term for axis, term in enumerate(x.axes)]
    out = constraints.value(axes, zero=x.zero, node=node)
    labels = tuple(str(axis) for axis in range(len(x.shape)))
    names = ["running" if axis == dim else label for axis, label in enumerate(labels)]
    table = {**dict(zip(labels, x.axes, strict=True)), "running": axes[dim]}
    constraints.relate(out, names, [Part(x, labels)], table)
    return out
