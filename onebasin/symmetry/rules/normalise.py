"""Normalisers. Each computes x_hat from statistics of x, then multiplies by a weight and adds a bias.

Only batch norm in inference form is exactly free of scale: its statistics are buffers and move along. The others add
an epsilon to statistics of the data, so that no factor of x passes exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Reason
from onebasin.symmetry.constraints import Constraints, Part, Value
from onebasin.symmetry.rules.pointwise import add, mul, passing
from onebasin.symmetry.rules.rearrange import reshaped
from onebasin.symmetry.rules.reduce import statistic
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.trace import Node


def _affine(constraints: Constraints, node: Node, x_hat: Value, weight: Value | None, bias: Value | None) -> Value:
    out = x_hat if weight is None else mul(constraints, node, x_hat, weight)
    return out if bias is None else add(constraints, node, out, bias)


def _per_channel(constraints: Constraints, node: Node, vector: Value | None, x: Value) -> Value | None:
    return None if vector is None else reshaped(constraints, node, vector, (*vector.shape, *[1] * (len(x.shape) - 2)))


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(
    constraints: Constraints, node: Node, x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None, *_: Any
) -> Any:
    """Layer norm over the last axes: units may change places. Root-mean-square norm subtracts no mean: signs pass."""
    root_mean_square = "rms" in node.operation
    stat = statistic(constraints, node, x, range(-len(shape), 0))
    if not root_mean_square:
        statistic(constraints, node, x, range(-len(shape), 0), sign=1)
        for axis in range(len(x.shape) - len(shape), len(x.shape)):
            constraints.pin(x, axis)  # a mean is taken along it; only the sign of all its entries together passes
    x_hat = passing(constraints, node, [x], [(None, 1)])
    out = _affine(constraints, node, x_hat, weight, bias if isinstance(bias, Value) else None)
    if node.shape is not None:
        return out
    return (out, stat) if root_mean_square else (out, stat, stat)


@rule("native_group_norm", "group_norm")
def group_norm(constraints: Constraints, node: Node, x: Value, weight: Any, bias: Any, *rest: Any) -> Any:
    """Channels are (groups, members): groups change places as blocks, members inside each group."""
    groups = rest[3]
    split_up = reshaped(constraints, node, x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    stat = statistic(constraints, node, split_up, range(2, len(split_up.shape)))
    statistic(constraints, node, split_up, range(2, len(split_up.shape)), sign=1)
    for axis in range(2, len(split_up.shape)):
        constraints.pin(split_up, axis)  # a mean is taken along it; only the sign of a whole group passes
    x_hat = passing(constraints, node, [split_up], [(None, 1)])
    joined = reshaped(constraints, node, x_hat, x.shape)
    out = _affine(
        constraints, node, joined, _per_channel(constraints, node, weight, x), _per_channel(constraints, node, bias, x)
    )
    return out, stat, stat


@rule("_native_batch_norm_legit_no_training")
def batch_norm(
    constraints: Constraints,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    _: float,
    epsilon: float,
) -> Any:
    """Batch norm in inference form: x, mean and sqrt(variance + epsilon) may be scaled together, unseen outside."""
    letters = "abcdefgh"
    labels = tuple(letters[axis] for axis in range(len(x.shape)))
    constraints.settle(x, node)
    channel = constraints.tie(constraints.tie(x.axes[1], mean.axes[0], node), variance.axes[0], node)
    table = {**dict(zip(labels, x.axes, strict=True)), "b": channel}
    constraints.relate(mean, ("b",), [Part(x, labels, 1, 1)], table)
    constraints.means.add(mean.state_name)
    if _moves_freely(node, variance):
        constraints.variances[variance.state_name] = epsilon
        constraints.relate(variance, ("b",), [Part(x, labels, 2, 0)], table)
    else:
        constraints.pin(x, kinds=("scale",))
        constraints.pin(variance)
    x_hat = passing(constraints, node, [x], [(0, 1)])
    out = _affine(
        constraints, node, x_hat, _per_channel(constraints, node, weight, x), _per_channel(constraints, node, bias, x)
    )
    return out, constraints.fixed((0,)), constraints.fixed((0,))


def _moves_freely(node: Node, variance: Value) -> bool:
    """A variance can be rescaled if it is in the state and every reader is a batch norm with the same epsilon."""
    if not variance.state_name or variance.node is None:
        return False
    readers = variance.node.users
    same = [
        r.operation == node.operation and r.arguments[4] is variance.node and r.arguments[6] == node.arguments[6]
        for r in readers
    ]
    return all(same)


@rule("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm")
def batch_statistics_norm(constraints: Constraints, node: Node, x: Value, weight: Any, bias: Any, *rest: Any) -> Any:
    """Statistics of the data at hand (instance norm): signs of whole channels pass, scales do not (epsilon)."""
    if node.operation != "aten._native_batch_norm_legit.no_stats":
        for value in (x, weight, bias, *rest):
            if isinstance(value, Value):
                constraints.freeze(
                    value, Reason("batch statistics with running averages have no rule", node, explained=False)
                )
        return constraints.fixed(x.shape), constraints.fixed((x.shape[1],)), constraints.fixed((x.shape[1],))
    others = [axis for axis in range(len(x.shape)) if axis != 1]
    for axis in others:
        constraints.pin(x, axis)
    stat = statistic(constraints, node, x, others)
    statistic(constraints, node, x, others, sign=1)
    x_hat = passing(constraints, node, [x], [(None, 1)])
    out = _affine(
        constraints, node, x_hat, _per_channel(constraints, node, weight, x), _per_channel(constraints, node, bias, x)
    )
    return out, stat, stat
