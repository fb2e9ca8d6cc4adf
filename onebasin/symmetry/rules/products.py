"""Products of matrices, convolutions and pooling: contracted axes are tied and their factors cancel, others pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Fixed, Reason, Term
from onebasin.symmetry.constraints import Constraints, Part, Value
from onebasin.symmetry.rules.pointwise import alike
from onebasin.symmetry.rules.rearrange import reshaped, unsqueeze
from onebasin.symmetry.rules.reduce import norm, unscaled
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.trace import Node


def contract(constraints: Constraints, node: Node, operands: Sequence[tuple[Value, str]], out_labels: str) -> Value:
    """Einstein summation: operands with one letter per axis; letters missing in `out_labels` are summed over."""
    table: dict[str, Term] = {}
    for value, labels in operands:
        constraints.settle(value, node)
        for label, term in zip(labels, value.axes, strict=True):
            table[label] = constraints.tie(table[label], term, node) if label in table else term
    out = constraints.value([table[label] for label in out_labels], zero=any(v.zero for v, _ in operands), node=node)
    constraints.relate(out, tuple(out_labels), [Part(value, tuple(labels)) for value, labels in operands], table)
    return out


@rule("mm")
def mm(constraints: Constraints, node: Node, a: Value, b: Value) -> Value:
    """Product of two matrices."""
    return contract(constraints, node, [(a, "mk"), (b, "kn")], "mn")


@rule("bmm")
def bmm(constraints: Constraints, node: Node, a: Value, b: Value) -> Value:
    """Products of a batch of matrices."""
    return contract(constraints, node, [(a, "bmk"), (b, "bkn")], "bmn")


@rule("mv")
def mv(constraints: Constraints, node: Node, a: Value, b: Value) -> Value:
    """Matrix times vector."""
    return contract(constraints, node, [(a, "mk"), (b, "k")], "m")


@rule("dot", "vdot")
def dot(constraints: Constraints, node: Node, a: Value, b: Value) -> Value:
    """Inner product of two vectors."""
    return contract(constraints, node, [(a, "k"), (b, "k")], "")


@rule("addmm")
def addmm(constraints: Constraints, node: Node, bias: Value, a: Value, b: Value, **_: Any) -> Value:
    """Product of two matrices plus a bias."""
    return alike(constraints, node, [mm(constraints, node, a, b), bias])


@rule("baddbmm")
def baddbmm(constraints: Constraints, node: Node, bias: Value, a: Value, b: Value, **_: Any) -> Value:
    """Products of a batch of matrices plus a bias."""
    return alike(constraints, node, [bmm(constraints, node, a, b), bias])


@rule("addmv")
def addmv(constraints: Constraints, node: Node, bias: Value, a: Value, b: Value, **_: Any) -> Value:
    """Matrix times vector plus a bias."""
    return alike(constraints, node, [mv(constraints, node, a, b), bias])


@rule("linear")
def linear(constraints: Constraints, node: Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """X @ weight.T + bias over the last axis of x."""
    letters = "abcdefgh"[: len(x.shape) - 1]
    out = contract(constraints, node, [(x, letters + "k"), (weight, "nk")], letters + "n")
    return out if bias is None else alike(constraints, node, [out, bias])


@rule("_trilinear")
def trilinear(
    constraints: Constraints, node: Node, a: Value, b: Value, c: Value, *expanded_and_summed: Sequence[int], **_: Any
) -> Value:
    """Three tensors multiplied and summed (nn.Bilinear): each lacks the axes it is expanded along."""
    *expanded, summed = expanded_and_summed[:4]
    letters = "abcdefgh"[: len(a.shape) + len(expanded[0])]
    operands = [
        (value, "".join(letter for axis, letter in enumerate(letters) if axis not in missing))
        for value, missing in zip((a, b, c), expanded, strict=True)
    ]
    out = "".join(letter for axis, letter in enumerate(letters) if axis not in summed)
    return contract(constraints, node, operands, out)


@rule("_cdist_forward", "cdist")
def distances(constraints: Constraints, node: Node, a: Value, b: Value, order: float = 2.0, *_: Any) -> Value:
    """Distances of the rows of two matrices: the norm of their differences."""
    rows, columns = unsqueeze(constraints, node, a, len(a.shape) - 1), unsqueeze(constraints, node, b, len(b.shape) - 2)
    return norm(constraints, node, alike(constraints, node, [rows, columns]), order, -1)


@rule("convolution", "conv1d", "conv2d", "conv3d")
def convolution(constraints: Constraints, node: Node, x: Value, weight: Value, bias: Value | None, *rest: Any) -> Value:
    """Convolution or its transpose: a contraction over channels inside each group; positions in space are rigid."""
    given: list[Any] = [*rest, *(1, 0, 1, False, 0, 1)[len(rest) :]]
    stride, padding, transposed, groups = given[0], given[1], given[3], given[5]
    assert node.shape is not None
    space = len(x.shape) - 2
    channels, out_channels = x.shape[1], node.shape[1]
    pointwise = not transposed and all(k == 1 for k in weight.shape[2:]) and not _any(padding) and not _any(stride, 1)
    for axis in range(2, len(x.shape)):
        constraints.rigid(weight, axis, Reason("it is an axis of a convolution kernel", node))
        if not pointwise:
            constraints.rigid(x, axis, Reason("it is an axis in space", node))
    grouped_x = reshaped(constraints, node, x, (x.shape[0], groups, channels // groups, *x.shape[2:]))
    first, second = (channels, out_channels) if transposed else (out_channels, channels)
    grouped_w = reshaped(constraints, node, weight, (groups, first // groups, second // groups, *weight.shape[2:]))
    at, kernel, image = "stuvw"[:space], "STUVW"[:space], "xyzpq"[:space]
    out_space = at if pointwise else image
    filters = ("gio" if transposed else "goi") + kernel
    if not pointwise:
        grouped_x = _opened(constraints, node, grouped_x, node.shape[2:])
    out = contract(constraints, node, [(grouped_x, "ngi" + out_space), (grouped_w, filters)], "ngo" + out_space)
    flat = reshaped(constraints, node, out, node.shape)
    if bias is None:
        return flat
    return alike(constraints, node, [flat, reshaped(constraints, node, bias, (out_channels, *[1] * space))])


def _any(numbers: Any, neutral: int = 0) -> bool:
    return any(number != neutral for number in (numbers if isinstance(numbers, tuple | list) else [numbers]))


def _opened(constraints: Constraints, node: Node, x: Value, positions: Sequence[int]) -> Value:
    """Replace the axes in space by the fixed ones of the result: which inputs a position sees does not matter here."""
    keep = len(x.shape) - len(positions)
    axes = [*x.axes[:keep], *[Fixed(size) for size in positions]]
    out = constraints.value(axes, zero=x.zero, node=node)
    letters = [f"kept {axis}" for axis in range(keep)]
    old, new = [f"old {axis}" for axis in range(len(positions))], [f"new {axis}" for axis in range(len(positions))]
    table = dict(zip([*letters, *old, *new], [*x.axes, *axes[keep:]], strict=True))
    constraints.relate(out, [*letters, *new], [Part(x, (*letters, *old))], table)
    return out


def in_space(constraints: Constraints, node: Node, x: Value, positions: Sequence[int], sign: int | None = 1) -> Value:
    """An operation on positions (pooling, resizing), alike for every channel, that commutes with positive factors."""
    for axis in range(len(x.shape) - len(positions), len(x.shape)):
        constraints.rigid(x, axis, Reason("it is an axis in space", node))
        constraints.pin(x, axis)
    constraints.settle(x, node)
    out = _opened(constraints, node, x, positions)
    if sign is None:
        constraints.pin(x, kinds=("sign",))
        constraints.pin(out, kinds=("sign",))
    return out


@rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "adaptive_max_pool2d",
)
def max_pool(constraints: Constraints, node: Node, x: Value, size: Any, *_: Any, **__: Any) -> Any:
    """Largest entry of each window."""
    shape = _result_shape(node, x)
    space = len(size) if isinstance(size, tuple | list) else len(x.shape) - 2
    pooled = in_space(constraints, node, x, shape[len(shape) - space :], sign=None)
    return (
        (pooled, unscaled(constraints, node, pooled))
        if "indices" in node.operation or "adaptive" in node.operation
        else pooled
    )


@rule(
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "reflection_pad1d", "reflection_pad2d",
    "replication_pad2d", "im2col",
)  # fmt: skip
def linear_in_space(constraints: Constraints, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """A linear map of positions, the same for every channel."""
    assert node.shape is not None
    if "im2col" in node.operation or len(node.shape) != len(x.shape):
        constraints.freeze(x, Reason("it is cut into patches", node))
        return constraints.fixed(node.shape)
    space = 1 if "1d" in node.operation else 3 if "3d" in node.operation else 2
    return in_space(constraints, node, x, node.shape[len(node.shape) - space :])


def _result_shape(node: Node, x: Value) -> tuple[int, ...]:
    """Shape of the first result, which for operations with several results only their readers know."""
    if node.shape is not None:
        return node.shape
    for user in node.users:
        if user.operation == "getitem" and user.arguments[1] == 0 and user.shape is not None:
            return user.shape
    return x.shape
