"""Operations that read or write entries by their position.

The addressed axes are rigid, the others pass; unless the address was computed from the same units (the codebook entry
that `argmin` found nearest): then it moves with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from onebasin.symmetry.axes import Fixed, Reason, Term, Uniform, atoms
from onebasin.symmetry.constraints import Constraints, Part, Power, Value
from onebasin.symmetry.rules.pointwise import alike
from onebasin.symmetry.rules.rearrange import cat, window
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.trace import Node


def _look_up(constraints: Constraints, node: Node, x: Value, axis: int, index: Value | None) -> None:
    """Say that positions along an axis of x are looked up by `index` (None: by something whose numbers matter)."""
    if index is None or index.points is None:
        constraints.rigid(x, axis, Reason("its entries are looked up by position", node))
    else:
        _follow(constraints, node, x.axes[axis], index)
    constraints.pin(x, axis)


def _follow(constraints: Constraints, node: Node, term: Term, index: Value) -> Term:
    """Tie an axis to the one whose positions `index` holds.

    The units may then not be permuted differently for each index of another space (nesting): it is not checked that the
    address and what it addresses agree on that index. A value that holds the units alone forbids it.
    """
    assert index.points is not None
    constraints.value([index.points], node=node)
    return constraints.tie(index.points, term, node)


def _addressed(
    constraints: Constraints, node: Node, x: Value, gone: dict[int, Value | None], where: int, fresh: Sequence[Term]
) -> Value:
    """Axes `gone` of x are looked up by their index; the lookup's axes `fresh` stand at `where` among the kept ones."""
    constraints.settle(x, node)
    for axis, index in gone.items():
        _look_up(constraints, node, x, axis, index)
    staying = [axis for axis in range(len(x.shape)) if axis not in gone]
    axes = [x.axes[axis] for axis in staying]
    axes[where:where] = fresh
    out = constraints.value(axes, zero=x.zero, node=node)
    labels = [str(axis) for axis in range(len(x.shape))]
    names = [labels[axis] for axis in staying]
    names[where:where] = [f"fresh {i}" for i in range(len(fresh))]
    table = {**dict(zip(labels, x.axes, strict=True)), **dict(zip(names, axes, strict=True))}
    constraints.relate(out, names, [Part(x, tuple(labels))], table)
    return out


def _unmoved(constraints: Constraints, node: Node, index: Value) -> list[Term]:
    """An index must be the same for all networks of an orbit; the axes of what it looks up."""
    if any(atoms(term) for term in index.axes):
        constraints.rigid(index, None, Reason("it is used as an address", node))
        constraints.pin(index)
    return index.axes


@rule("embedding", follows=True)
def embedding(constraints: Constraints, node: Node, weight: Value, index: Value, *_: Any, **__: Any) -> Value:
    """Rows of a table: rows are rigid, columns are units of a stream."""
    return _addressed(constraints, node, weight, {0: index}, 0, _unmoved(constraints, node, index))


@rule("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag")
def embedding_bag(
    constraints: Constraints, node: Node, weight: Value, index: Value, offsets: Value, *rest: Any, **options: Any
) -> Any:
    """Sum, mean or maximum of rows of a table, bag by bag: rows are rigid, columns are units of a stream."""
    mode = options.get("mode", rest[1] if len(rest) > 1 else 0)
    for value in (index, offsets, *rest, *options.values()):
        if isinstance(value, Value):
            constraints.freeze(value, Reason("it says which rows of a table are added", node))
    readers = {user.arguments[1]: user for user in node.users if user.operation == "getitem"}
    if any(number > 0 and reader.users for number, reader in readers.items()) or 0 not in readers:
        constraints.freeze(weight, Reason("counts or positions inside its bags are used", node, explained=False))
        return {number: constraints.fixed(reader.shape or (), reader) for number, reader in readers.items()}
    bags = (readers[0].shape or (0,))[0]
    out = _addressed(constraints, node, weight, {0: None}, 0, [Fixed(bags)])
    if mode == 2:  # a maximum: positive factors pass
        constraints.pin(out, kinds=("sign",))
        constraints.pin(weight, kinds=("sign",))
    return {0: out}


@rule("index_select", follows=True)
def index_select(constraints: Constraints, node: Node, x: Value, dim: int, index: Value) -> Value:
    """Positions of one axis."""
    dim %= len(x.shape)
    if runs := _runs(x, dim, index):
        return cat(constraints, node, [window(constraints, node, x, dim, first, length) for first, length in runs], dim)
    return _addressed(constraints, node, x, {dim: index}, dim, _unmoved(constraints, node, index))


def _places(indices: Sequence[Value | None]) -> tuple[dict[int, Value], int]:
    """Which axis each index of an advanced indexing looks up, and where the indices' axes stand in the result."""
    used = {axis: index for axis, index in enumerate(indices) if index is not None}
    scattered = any(axis + 1 != later for axis, later in itertools.pairwise(used))
    return used, 0 if scattered else next(iter(used))  # indices that do not stand side by side put their axes first


def _is_mask(index: Value | None) -> bool:
    return index is not None and (
        index.constant.dtype if index.constant is not None else index.node.dtype if index.node is not None else None
    ) in (torch.bool, torch.uint8)


@rule("index", "_unsafe_index", follows=True)
def index_tensor(constraints: Constraints, node: Node, x: Value, indices: Sequence[Value | None]) -> Value:
    """Advanced indexing."""
    assert node.shape is not None
    used, where = _places(indices)
    masks = [index for index in used.values() if _is_mask(index)]
    # One mask over one axis picks entries of that axis and leaves the others in step, as an index does. A mask of
    # several axes takes as many of x, and several indices are walked side by side.
    if masks and (len(used) > 1 or len(masks[0].shape) != 1):
        for value in (x, *used.values()):
            constraints.freeze(value, Reason("entries are picked by a mask", node, explained=False))
        return constraints.fixed(node.shape)
    if len(used) == 1 and not masks and (runs := _runs(x, where, used[where])):
        return cat(
            constraints, node, [window(constraints, node, x, where, first, length) for first, length in runs], where
        )
    for index in used.values():
        _unmoved(constraints, node, index)
    rank = len(node.shape) - (len(x.shape) - len(used))
    fresh = constraints.fixed(node.shape[where : where + rank]).axes
    return _addressed(constraints, node, x, dict(used), where, fresh)


FEW_RUNS = 16


def _runs(x: Value, axis: int, index: Value) -> list[tuple[int, int]]:
    """A constant index as (first, length) of runs of neighbours; [] if it is none, or units are not concerned."""
    if index.constant is None or index.constant.dim() != 1 or not atoms(x.axes[axis]):
        return []
    runs: list[tuple[int, int]] = []
    for position in index.constant.tolist():
        place = position % x.shape[axis]
        first, length = runs[-1] if runs else (place, 0)
        if place == first + length:
            runs[-1:] = [(first, length + 1)]
        else:
            runs.append((place, 1))
    return runs if len(runs) <= FEW_RUNS else []


@rule("index_put", "_unsafe_index_put", follows=True)
def index_put(
    constraints: Constraints,
    node: Node,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """`x[indices] = values` or `+= values`: positions that are written to are rigid, the other axes are in step."""
    if any(_is_mask(index) for index in indices):
        (mask, *more) = [index for index in indices if index is not None]
        if more or accumulate or values.shape not in ((), (1,)) or mask.shape != x.shape:
            for value in (x, values, mask, *more):
                constraints.freeze(value, Reason("entries are written by a mask", node, explained=False))
            return constraints.fixed(x.shape)
        constraints.pin(mask)  # as in where(mask, values, x)
        return alike(constraints, node, [x, values], masks=[mask])
    constraints.settle(x, node)
    constraints.settle(values, node)
    used, where = _places(indices)
    for axis, index in used.items():
        constraints.expose(index, Reason("its entries are written by position", node))
        _unmoved(constraints, node, index)
        constraints.rigid(x, axis, Reason("its entries are written by position", node))
        constraints.pin(x, axis)
    fresh = torch.broadcast_shapes(*[index.shape for index in used.values()])
    staying = [axis for axis in range(len(x.shape)) if axis not in used]
    names = [f"kept {axis}" for axis in staying]
    names[where:where] = [f"written {i}" for i in range(len(fresh))]
    names = names[len(names) - len(values.shape) :]
    table: dict[str, Term] = {f"kept {axis}": x.axes[axis] for axis in staying}
    labels = []
    for number, (name, term) in enumerate(zip(names, values.axes, strict=True)):
        if name in table and term.size == table[name].size:
            table[name] = constraints.tie(table[name], term, node)
        else:
            if name not in table and not (accumulate and _all_alike(used, len(fresh), name)):
                constraints.rigid(values, number, Reason("its entries are written by position", node))
            name = f"stretched {number}"
            table[name] = term
        labels.append(name)
    axes = [table[f"kept {axis}"] if axis in staying else _position(x.shape[axis]) for axis in range(len(x.shape))]
    return _written(
        constraints, node, (x, axes), (values, labels), table, [f"kept {axis}" for axis in range(len(axes))]
    )


def _all_alike(used: dict[int, Value], rank: int, name: str) -> bool:
    """Whether all indices are the same along one of their common axes: then all is added up at one place."""
    back = rank - int(name.split()[1])
    return all(len(i.shape) < back or isinstance(i.axes[len(i.shape) - back], Uniform) for i in used.values())


def _position(size: int) -> Term:
    return Uniform(1) if size == 1 else Fixed(size)


def _written(
    constraints: Constraints,
    node: Node,
    base: tuple[Value, list[Term]],
    source: tuple[Value, Sequence[str]],
    table: dict[str, Term],
    names: Sequence[str],
    powers: tuple[Power, Power] = (1, 1),
) -> Value:
    """The result of writing `source` into `base`: both carry the factors of the result.

    Along labels that only the source has its entries are added up, so there it carries none.
    """
    (x, axes), (values, labels) = base, source
    out = constraints.value(axes, zero=x.zero and values.zero, node=node)
    for name, term in zip(names, axes, strict=True):
        table.setdefault(name, term)
    constraints.relate(out, names, [Part(x, tuple(names), *powers)], table)
    constraints.relate(out, names, [Part(values, tuple(labels), *powers)], table)
    return out


REDUCED: dict[str | None, tuple[Power, Power]] = {
    None: (1, 1), "add": (1, 1), "sum": (1, 1), "mean": (1, 1), "amax": (1, None), "amin": (1, None),
}  # fmt: skip


@rule("scatter_add", "scatter", "scatter_reduce", follows=True)
def scatter(
    constraints: Constraints,
    node: Node,
    x: Value,
    dim: int,
    index: Value,
    source: Any,
    *rest: Any,
    reduce: Any = None,
    **_: Any,
) -> Value:
    """`x[index[i, j], j] = source[i, j]`, or added, averaged, their extremes: the other axes are in step."""
    reduce = reduce or (rest[0] if rest else "sum" if node.short == "scatter_add" else None)
    values = source if isinstance(source, Value) else constraints.constant(torch.full(index.shape, source))
    for value in (x, index, values):
        constraints.settle(value, node)
    dim = dim % len(x.shape) if x.shape else 0
    other_axes = [axis for axis in range(len(x.shape)) if axis != dim]
    if not x.shape or values.shape != index.shape or any(index.shape[axis] != x.shape[axis] for axis in other_axes):
        for value in (x, index, values):
            constraints.freeze(value, Reason("a scatter writes a part of it", node, explained=False))
        return constraints.fixed(x.shape)
    constraints.pin(index)
    constraints.pin(x, dim)
    table = {
        str(axis): constraints.tie(constraints.tie(x.axes[axis], values.axes[axis], node), index.axes[axis], node)
        for axis in other_axes
    }
    reason = Reason("its entries are written by position", node)
    # Of several entries for one place the last one stays, so that their order matters: unless they are added up or all
    # alike, or no place is written to twice.
    in_any_order = reduce is not None or not isinstance(source, Value) or index.distinct == dim
    if not in_any_order:
        for value in (values, index):
            constraints.rigid(value, dim, reason)
    table["written"] = constraints.tie(values.axes[dim], index.axes[dim], node)
    if in_any_order and index.points is not None:
        table[str(dim)] = _follow(constraints, node, x.axes[dim], index)
    else:
        constraints.expose(index, reason)
        constraints.rigid(x, dim, reason)
        table[str(dim)] = _position(x.shape[dim])
    names = [str(axis) for axis in range(len(x.shape))]
    axes = [table[name] for name in names]
    labels = ["written" if axis == dim else str(axis) for axis in range(len(axes))]
    out = _written(constraints, node, (x, axes), (values, labels), table, names, REDUCED.get(reduce, (None, None)))
    constraints.pin(out, dim)
    return out


@rule("gather", follows=True)
def gather(constraints: Constraints, node: Node, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Entries picked along one axis for each position of the others, along which x and index are in step."""
    constraints.settle(x, node)
    constraints.settle(index, node)
    if not x.shape:
        return x
    dim %= len(x.shape)
    _look_up(constraints, node, x, dim, index)
    constraints.pin(index)
    axes, table = list(index.axes), {"looked up": x.axes[dim]}
    labels = ["looked up" if axis == dim else str(axis) for axis in range(len(x.shape))]
    for axis, term in enumerate(x.axes):
        if axis == dim:
            continue
        if index.shape[axis] == x.shape[axis]:
            axes[axis] = table[str(axis)] = constraints.tie(term, axes[axis], node)
        else:  # only the first positions are read
            constraints.rigid(x, axis, Reason("only a part of it is read", node))
            constraints.pin(x, axis)
            labels[axis] = f"part {axis}"
            table[labels[axis]] = term
    names = [str(axis) for axis in range(len(axes))]
    table = {**dict(zip(names, axes, strict=True)), **table}
    out = constraints.value(axes, zero=x.zero, node=node)
    constraints.relate(out, names, [Part(x, tuple(labels))], table)
    return out


@rule("unfold")
def windows(constraints: Constraints, node: Node, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    """Windows that slide along an axis: (..., positions, ..., offset in the window)."""
    assert node.shape is not None
    if not x.shape:
        return constraints.fixed(node.shape)
    dim %= len(x.shape)
    slid = _addressed(constraints, node, x, {dim: None}, dim, [_position(node.shape[dim])])
    axes = [*slid.axes, _position(node.shape[-1])]
    out = constraints.value(axes, zero=x.zero, node=node)
    names = [str(axis) for axis in range(len(axes))]
    constraints.relate(out, names, [Part(slid, tuple(names[:-1]))], dict(zip(names, axes, strict=True)))
    return out
