"""Operations that address entries by their position: the addressed axes are rigid, the others pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from onebasin.symmetry.axes import Reason, Term, atoms
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.weave import Part, Value, Weave
from onebasin.trace import Node


def _addressed(weave: Weave, node: Node, x: Value, gone: Sequence[int], where: int, fresh: Sequence[Term]) -> Value:
    """Axes `gone` of x are looked up by position; the lookup's axes `fresh` stand at `where` among the kept ones."""
    weave.settle(x, node)
    for axis in gone:
        weave.rigid(x, axis, Reason("its entries are looked up by position", node))
        weave.pin(x, axis)
    kept = [axis for axis in range(len(x.shape)) if axis not in gone]
    axes = [x.axes[axis] for axis in kept]
    axes[where:where] = fresh
    out = weave.value(axes, zero=x.zero, node=node)
    labels = [str(axis) for axis in range(len(x.shape))]
    names = [labels[axis] for axis in kept]
    names[where:where] = [f"fresh {i}" for i in range(len(fresh))]
    table = {**dict(zip(labels, x.axes, strict=True)), **dict(zip(names, axes, strict=True))}
    weave.relate(out, names, [Part(x, tuple(labels))], table)
    return out


def _unmoved(weave: Weave, node: Node, index: Value) -> list[Term]:
    """An index must be the same for all networks of an orbit."""
    if any(atoms(term) for term in index.axes):
        weave.freeze(index, Reason("it is used as an address", node))
    return index.axes


@rule("embedding")
def embedding(weave: Weave, node: Node, weight: Value, index: Value, *_: Any, **__: Any) -> Value:
    """Rows of a table: rows are rigid, columns are units of a stream."""
    return _addressed(weave, node, weight, [0], 0, _unmoved(weave, node, index))


@rule("index_select")
def index_select(weave: Weave, node: Node, x: Value, dim: int, index: Value) -> Value:
    """Positions of one axis."""
    return _addressed(weave, node, x, [dim % len(x.shape)], dim % len(x.shape), _unmoved(weave, node, index))


@rule("index", "_unsafe_index")
def index_tensor(weave: Weave, node: Node, x: Value, indices: Sequence[Value | None]) -> Value:
    """Advanced indexing."""
    assert node.shape is not None
    used = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    scattered = any(axis + 1 != later for axis, later in itertools.pairwise(used))
    where = 0 if scattered else used[0]  # indices that do not stand side by side put their axes first
    for index in given:
        _unmoved(weave, node, index)
    rank = len(node.shape) - (len(x.shape) - len(used))
    fresh = weave.fixed(node.shape[where : where + rank]).axes
    return _addressed(weave, node, x, used, where, fresh)


@rule("gather", "take_along_dim")
def gather(weave: Weave, node: Node, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Entries picked along one axis for each position of the others."""
    weave.freeze(x, Reason("its entries are gathered by position", node))
    weave.freeze(index, Reason("it is used as an address", node))
    return weave.fixed(index.shape)
