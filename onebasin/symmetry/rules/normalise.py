"""Normalisers. Each computes x_hat from statistics of x, then multiplies by a weight and adds a bias.

Only batch norm in inference form is exactly free of scale: its statistics are buffers and move along. The others add
an epsilon to statistics of the data, so that no factor of x passes exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Reason
from onebasin.symmetry.rules.pointwise import add, mul, passing
from onebasin.symmetry.rules.reduce import statistic
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.rules.reshape import reshaped
from onebasin.symmetry.weave import Part, Value, Weave
from onebasin.trace import Node


def _affine(weave: Weave, node: Node, x_hat: Value, weight: Value | None, bias: Value | None) -> Value:
    out = x_hat if weight is None else mul(weave, node, x_hat, weight)
    return out if bias is None else add(weave, node, out, bias)


def _per_channel(weave: Weave, node: Node, vector: Value | None, x: Value) -> Value | None:
    return None if vector is None else reshaped(weave, node, vector, (*vector.shape, *[1] * (len(x.shape) - 2)))


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(
    weave: Weave, node: Node, x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None, *_: Any
) -> Any:
    """Layer norm over the last axes: units may change places. Root-mean-square norm subtracts no mean: signs pass."""
    root_mean_square = "rms" in node.operation
    stat = statistic(weave, node, x, range(-len(shape), 0))
    if not root_mean_square:
        statistic(weave, node, x, range(-len(shape), 0), sign=1)
        for axis in range(len(x.shape) - len(shape), len(x.shape)):
            weave.pin(x, axis)  # a mean is taken along it; only the sign of all its entries together passes
    x_hat = passing(weave, node, [x], [(None, 1)])
    out = _affine(weave, node, x_hat, weight, bias if isinstance(bias, Value) else None)
    if node.shape is not None:
        return out
    return (out, stat) if root_mean_square else (out, stat, stat)


@rule("native_group_norm", "group_norm")
def group_norm(weave: Weave, node: Node, x: Value, weight: Any, bias: Any, *rest: Any) -> Any:
    """Channels are (groups, members): groups change places as blocks, members inside each group."""
    groups = rest[3]
    split_up = reshaped(weave, node, x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    stat = statistic(weave, node, split_up, range(2, len(split_up.shape)))
    statistic(weave, node, split_up, range(2, len(split_up.shape)), sign=1)
    for axis in range(2, len(split_up.shape)):
        weave.pin(split_up, axis)  # a mean is taken along it; only the sign of a whole group passes
    x_hat = passing(weave, node, [split_up], [(None, 1)])
    joined = reshaped(weave, node, x_hat, x.shape)
    out = _affine(weave, node, joined, _per_channel(weave, node, weight, x), _per_channel(weave, node, bias, x))
    return out, stat, stat


@rule("_native_batch_norm_legit_no_training")
def batch_norm(
    weave: Weave,
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
    weave.settle(x, node)
    channel = weave.tie(weave.tie(x.axes[1], mean.axes[0], node), variance.axes[0], node)
    table = {**dict(zip(labels, x.axes, strict=True)), "b": channel}
    weave.relate(mean, ("b",), [Part(x, labels, 1, 1)], table)
    weave.means.add(mean.state_name)
    if _moves_freely(node, variance):
        weave.variances[variance.state_name] = epsilon
        weave.relate(variance, ("b",), [Part(x, labels, 2, 0)], table)
    else:
        weave.pin(x, kinds=("scale",))
        weave.pin(variance)
    x_hat = passing(weave, node, [x], [(0, 1)])
    out = _affine(weave, node, x_hat, _per_channel(weave, node, weight, x), _per_channel(weave, node, bias, x))
    return out, weave.fixed((0,)), weave.fixed((0,))


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
def batch_statistics_norm(weave: Weave, node: Node, x: Value, weight: Any, bias: Any, *rest: Any) -> Any:
    """Statistics of the data at hand (instance norm): signs of whole channels pass, scales do not (epsilon)."""
    if node.operation != "aten._native_batch_norm_legit.no_stats":
        for value in (x, weight, bias, *rest):
            if isinstance(value, Value):
                weave.freeze(
                    value, Reason("batch statistics with running averages have no rule", node, explained=False)
                )
        return weave.fixed(x.shape), weave.fixed((x.shape[1],)), weave.fixed((x.shape[1],))
    others = [axis for axis in range(len(x.shape)) if axis != 1]
    for axis in others:
        weave.pin(x, axis)
    stat = statistic(weave, node, x, others)
    statistic(weave, node, x, others, sign=1)
    x_hat = passing(weave, node, [x], [(None, 1)])
    out = _affine(weave, node, x_hat, _per_channel(weave, node, weight, x), _per_channel(weave, node, bias, x))
    return out, stat, stat
