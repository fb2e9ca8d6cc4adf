"""Views: the same entries in row-major order under another shape; axes are split into factors or merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Enumerated, Family, Fixed, Reason, Term, Uniform, product
from onebasin.symmetry.rules.rearrange import permutation, permuted, squeezed
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.unify import StructureClash, split_at, split_off
from onebasin.symmetry.weave import Value, Weave, flat_index, unflat_index
from onebasin.trace import Node

PASSING = ("permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "alias", "contiguous", "detach", "expand")


@rule("view", "_unsafe_view", "reshape", "unflatten", "flatten")
def view(weave: Weave, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """The same entries in row-major order under another shape."""
    assert node.shape is not None
    return reshaped(weave, node, x, node.shape, selected_axes(node))


def reshaped(
    weave: Weave, node: Node, x: Value, shape: Sequence[int], enumerated: frozenset[int] = frozenset()
) -> Value:
    """View `x` under `shape`; axes in `enumerated` are only selected from: what hangs on them may vary by position."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    weave.settle(x, node)
    out_axes: list[Term] = []
    for sources, targets in _groups(x.shape, shape):
        term = product([x.axes[axis] for axis in sources]) if sources else Uniform(1)
        sizes = [shape[axis] for axis in targets]
        cut = next((i for i, axis in enumerate(targets) if axis in enumerated and i < len(targets) - 1), None)
        try:
            out_axes += _factors(term, sizes) if cut is None else _families(term, sizes, cut, weave, node)
        except StructureClash as clash:
            for axis in sources:
                weave.rigid(x, axis, Reason(f"a view cuts through its structure ({clash})", node, explained=False))
            out_axes += [Fixed(size) for size in sizes]
    out = weave.value(out_axes, zero=x.zero, node=node)
    weave.move(
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


def _families(term: Term, sizes: list[int], cut: int, weave: Weave, node: Node) -> list[Term]:
    """As `_factors`, but what follows position `cut` is described separately for each index along it."""
    before, many, after = sizes[:cut], sizes[cut], sizes[cut + 1 :]
    inner = 1
    for size in after:
        inner *= size
    outer: Term = Uniform(1)
    if before:
        outer, term = split_off(term, many * inner)
    token = Enumerated(many)
    members: list[list[Term]] = []
    for _ in range(many):
        head, term = split_at(term, inner) if term.size > inner else (term, Uniform(0))
        members.append(_factors(head, after))
    families: list[Term] = [Family(token, tuple(member[i] for member in members)) for i in range(len(after))]
    return [*(_factors(outer, before) if before else []), token, *families]


def selected_axes(node: Node) -> frozenset[int]:
    """Axes of a node's result that every use selects single positions from (`x[:, 0]`, `unbind`)."""
    assert node.shape is not None
    return frozenset(
        axis for axis in range(len(node.shape)) if 1 < node.shape[axis] <= 16 and _only_selected(node, axis)
    )


def _only_selected(node: Node, axis: int) -> bool:
    if not node.users:
        return False
    return all(_selects(user, node, axis) for user in node.users)


def _selects(user: Node, source: Node, axis: int) -> bool:
    name = user.short
    assert source.shape is not None
    rank = len(source.shape)
    if name in ("select", "unbind", "slice"):
        dim = user.arguments[1] if len(user.arguments) > 1 else user.options.get("dim", 0)
        if dim % rank == axis:
            return name != "slice" or (user.shape is not None and user.shape[axis] == 1)
        return name != "unbind" and _only_selected(user, axis - (name == "select" and dim % rank < axis))
    if name not in PASSING or user.shape is None:
        return False
    return _only_selected(user, _axis_map(name, user, source)[axis])


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
def pixel_shuffle(weave: Weave, node: Node, x: Value, factor: int) -> Value:
    """Channels C r r become an r times larger image: view, permute, view."""
    *batch, channels, height, width = x.shape
    rank = len(batch)
    split_up = reshaped(weave, node, x, (*batch, channels // factor**2, factor, factor, height, width))
    order = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    turned = permuted(weave, node, split_up, order)
    return reshaped(weave, node, turned, (*batch, channels // factor**2, height * factor, width * factor))
