"""Entry-by-entry operations: operands are in step, so their axes are tied; functions differ in which factors pass.

A function f with f(a x) = a^p f(x) for a > 0 passes a scale with power p; an odd function passes a sign, an even one
absorbs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from onebasin.symmetry.axes import Reason, Term, Uniform
from onebasin.symmetry.constraints import Constraints, Part, Power, Value
from onebasin.symmetry.rules.registry import RULES, rule
from onebasin.symmetry.trace import Node

HALF = Fraction(1, 2)

UNARY: dict[str, tuple[Power, Power]] = {
    "neg": (1, 1),
    # f(a x) = a f(x) for a > 0
    "relu": (1, None), "leaky_relu": (1, None), "rrelu": (1, None), "abs": (1, 0),
    # odd
    "tanh": (None, 1), "sin": (None, 1), "sinh": (None, 1), "tan": (None, 1), "asin": (None, 1), "atan": (None, 1),
    "asinh": (None, 1), "atanh": (None, 1), "erf": (None, 1), "erfinv": (None, 1), "sign": (0, 1), "sgn": (0, 1),
    "trunc": (None, 1), "round": (None, 1), "softsign": (None, 1), "tanhshrink": (None, 1), "softshrink": (None, 1),
    "hardshrink": (None, 1),
    # even
    "cos": (None, 0), "cosh": (None, 0), "square": (2, 0),
    # powers of positive numbers
    "sqrt": (HALF, None), "rsqrt": (-HALF, None), "reciprocal": (-1, 1),
}  # fmt: skip

PLAIN = (
    "gelu", "silu", "sigmoid", "log_sigmoid", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "softplus", "elu", "celu", "selu", "hardswish", "hardsigmoid", "mish", "logit", "erfc", "floor", "ceil",
    "frac", "logical_not", "bitwise_not", "isnan", "isinf", "isfinite", "acos", "acosh", "lgamma", "digamma",
    "special_erfcx", "nan_to_num", "threshold", "atan2", "hypot", "fmod", "remainder", "floor_divide",
    "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "logaddexp",
    "logaddexp2", "xlogy", "polygamma", "heaviside", "nextafter",
)  # fmt: skip


def broadcast(
    constraints: Constraints, node: Node, operands: Sequence[Value]
) -> tuple[list[Term], list[tuple[str, ...]], dict[str, Term]]:
    """Tie the operands' axes, right-aligned; return the result's axes, each operand's labels, each label's term."""
    for operand in operands:
        constraints.settle(operand, node)
    rank = max(len(operand.shape) for operand in operands)
    axes: list[Term] = []
    for position in range(rank):
        term: Term | None = None
        terms = [x.axes[position - rank + len(x.shape)] for x in operands if position - rank + len(x.shape) >= 0]
        size = next((t.size for t in terms if t.size != 1), 1)
        for candidate in terms:
            if candidate.size == size:
                term = candidate if term is None else constraints.tie(term, candidate, node)
        axes.append(term if term is not None else Uniform(size))
    labels = []
    for index, operand in enumerate(operands):
        shift = rank - len(operand.shape)
        labels.append(tuple(
            str(axis + shift) if operand.shape[axis] == axes[axis + shift].size else f"stretched {index} {axis}"
            for axis in range(len(operand.shape))
        ))  # fmt: skip
    table = {str(position): term for position, term in enumerate(axes)}
    for operand, names in zip(operands, labels, strict=True):
        for axis, name in enumerate(names):
            table.setdefault(name, operand.axes[axis])
    return axes, labels, table


def tensors(*operands: Any) -> list[Value]:
    """The operands that are tensors."""
    return [operand for operand in operands if isinstance(operand, Value)]


def plain(constraints: Constraints, node: Node, *operands: Any, **options: Any) -> Value:
    """A function without scale or sign behaviour: it only keeps its operands in step."""
    values = tensors(*operands, *options.values())
    return passing(constraints, node, values, [(None, None)] * len(values))


def passing(
    constraints: Constraints, node: Node, operands: Sequence[Value], powers: Sequence[tuple[Power, Power]]
) -> Value:
    """Operands multiplied together, each raised to its powers of scale and sign."""
    axes, labels, table = broadcast(constraints, node, operands)
    out = constraints.value(
        axes, zero=any(x.zero and p[0] == 1 for x, p in zip(operands, powers, strict=True)), node=node
    )
    parts = [Part(x, names, *power) for x, names, power in zip(operands, labels, powers, strict=True)]
    constraints.relate(out, [str(i) for i in range(len(axes))], parts, table)
    return out


def alike(
    constraints: Constraints,
    node: Node,
    operands: Sequence[Value],
    powers: tuple[Power, Power] = (1, 1),
    masks: Sequence[Value] = (),
) -> Value:
    """Operands added or chosen between: all carry the exponents of the result; `masks` are only walked in step."""
    axes, labels, table = broadcast(constraints, node, [*operands, *masks])
    out = constraints.value(axes, zero=all(operand.zero for operand in operands), node=node)
    for operand, names in zip(operands, labels, strict=False):
        constraints.relate(out, [str(i) for i in range(len(axes))], [Part(operand, names, *powers)], table)
    return out


def _unary(scale: Power, sign: Power) -> Any:
    def apply(constraints: Constraints, node: Node, x: Value, *_: Any, **__: Any) -> Value:
        return passing(constraints, node, [x], [(scale, sign)])

    return apply


for _name, _powers in UNARY.items():
    RULES[f"aten.{_name}"] = _unary(*_powers)
for _name in PLAIN:
    RULES[f"aten.{_name}"] = plain


@rule("clone", "alias", "detach", "contiguous", "lift_fresh_copy", "positive", "_conj")
def copy(constraints: Constraints, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """The same entries."""
    return x


@rule("_to_copy", "to")
def convert(constraints: Constraints, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """A change of dtype or device; only one to a floating type keeps what the entries say."""
    return x if node.dtype is not None and node.dtype.is_floating_point else plain(constraints, node, x)


@rule("add", "sub", "rsub")
def add(constraints: Constraints, node: Node, x: Any, y: Any, alpha: Any = 1, **_: Any) -> Value:
    """Sum or difference."""
    values = tensors(x, y)
    if len(values) == 2:
        return alike(constraints, node, values)
    number = y if isinstance(x, Value) else x
    return passing(constraints, node, values, [(1, 1)]) if number == 0 else plain(constraints, node, *values)


@rule("mul")
def mul(constraints: Constraints, node: Node, x: Any, y: Any) -> Value:
    """Product; multiplying by a number changes no exponent."""
    values = tensors(x, y)
    out = passing(constraints, node, values, [(1, 1)] * len(values))
    out.zero |= any(isinstance(number, int | float) and number == 0 for number in (x, y))
    return out


@rule("div", "true_divide")
def div(constraints: Constraints, node: Node, x: Any, y: Any, rounding_mode: Any = None) -> Value:
    """Quotient."""
    if rounding_mode is not None:
        return plain(constraints, node, *tensors(x, y))
    powers: list[tuple[Power, Power]] = [(power, 1) for value, power in ((x, 1), (y, -1)) if isinstance(value, Value)]
    return passing(constraints, node, tensors(x, y), powers)


@rule("pow")
def power(constraints: Constraints, node: Node, x: Any, exponent: Any) -> Value:
    """A constant power; anything else has no exponents of its own."""
    if not isinstance(x, Value) or isinstance(exponent, Value):
        return plain(constraints, node, x, exponent)
    if not math.isfinite(exponent):
        return plain(constraints, node, x)
    scale = Fraction(exponent).limit_denominator(64)
    if float(scale) != float(exponent):
        return plain(constraints, node, x)
    whole = scale.denominator == 1
    return passing(constraints, node, [x], [(scale, int(scale) % 2 if whole else None)])


@rule("clamp", "hardtanh", "clamp_min", "clamp_max", "relu6")
def clamp(constraints: Constraints, node: Node, x: Value, low: Any = None, high: Any = None, **options: Any) -> Value:
    """Clamping: at 0 from below it is relu, between -a and a it is odd."""
    name = node.short
    low, high = options.get("min", options.get("min_val", low)), options.get("max", options.get("max_val", high))
    if name == "hardtanh":
        low, high = -1 if low is None else low, 1 if high is None else high
    elif name == "clamp_max":
        low, high = None, low
    elif name == "relu6":
        low, high = 0, 6
    if isinstance(low, Value) or isinstance(high, Value):
        return plain(constraints, node, *tensors(x, low, high))
    one_sided = {(low, high if high is None or math.isfinite(high) else None)} & {(0, None), (None, 0)}
    odd = low is not None and high is not None and low == -high
    return passing(constraints, node, [x], [(1 if one_sided else None, 1 if odd else None)])


@rule("maximum", "minimum", "fmax", "fmin")
def extreme(constraints: Constraints, node: Node, x: Value, y: Value) -> Value:
    """The larger or smaller of two: both may be scaled together."""
    return alike(constraints, node, [x, y], (1, None))


@rule("eq", follows=True)
def equal(constraints: Constraints, node: Node, x: Value, y: Any) -> Value:
    """A comparison; positions against 0, 1, 2, ... along a new axis are a one-hot code: that axis holds their units."""
    if isinstance(y, Value) and (x.points is None) != (y.points is None):
        index, count = (x, y) if x.points is not None else (y, x)
        assert index.points is not None
        wide = next((len(count.shape) - axis for axis, size in enumerate(count.shape) if size > 1), 0)
        alone = wide and (len(index.shape) < wide or index.shape[-wide] == 1)
        if count.counts and alone and index.points.size == count.shape[-wide]:
            constraints.value([index.points], node=node)  # as in a lookup: no nesting
            code = constraints.value([index.points, *[Uniform(1)] * (wide - 1)], node=node)
            return passing(constraints, node, [index, code], [(0, 0), (None, None)])
    for value in tensors(x, y):
        constraints.expose(value, Reason("its units are told by their position", node))
    return compare(constraints, node, x, y)


@rule("gt", "lt", "ge", "le", "ne")
def compare(constraints: Constraints, node: Node, x: Value, y: Any) -> Value:
    """A comparison; with the number 0 its outcome does not depend on positive scales."""
    if isinstance(y, Value) or y != 0:
        return plain(constraints, node, x, y)
    even = node.short in ("eq", "ne")
    return passing(constraints, node, [x], [(0, 0 if even else None)])


@rule("native_dropout")
def dropout(constraints: Constraints, node: Node, x: Value, *_: Any) -> tuple[Value, Value]:
    """Dropout that is always on: the mask is drawn by position, so units stay where they are; factors pass."""
    mask = constraints.fixed(x.shape, node, Reason("it meets random numbers, which are drawn by position", node))
    return passing(constraints, node, [x, mask], [(1, 1), (0, 0)]), mask


@rule("where")
def where(constraints: Constraints, node: Node, condition: Value, x: Value, y: Value) -> Value:
    """A choice between two tensors; the condition itself carries no factor."""
    constraints.pin(condition)
    return alike(constraints, node, [x, y], masks=[condition])
