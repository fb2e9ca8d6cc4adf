"""Views: the same entries in row-major order under another shape; axes are split into factors or merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onebasin.symmetry.axes import Enumerated, Family, Fixed, Parted, Reason, Term, Uniform, product
from onebasin.symmetry.rules.rearrange import permutation, permuted, squeezed
from onebasin.symmetry.rules.registry import rule
from onebasin.symmetry.unify import StructureClash, split_at, split_off
from onebasin.symmetry.weave import Value, Weave, flat_index, unflat_index
from onebasin.trace import Node

MANY = 16  # pieces
PASSING = ("permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "alias", "contiguous", "detach", "expand")


@rule("view", "_unsafe_view", "reshape", "unflatten", "flatten")
def view(weave: Weave, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """The same entries in row-major order under another shape."""
    assert node.shape is not None
    return reshaped(weave, node, x, node.shape, pieces_read(node))


@rule("as_strided")
def as_strided(
    weave: Weave, node: Node, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Value:
    """The same entries in the same places of memory (decompositions write so to set the strides of single entries)."""
    source = node.arguments[0]
    steps = [step for n, step in zip(size, stride, strict=True) if n > 1]
    known = [step for n, step in zip(x.shape, source.stride or (), strict=False) if n > 1]
    same = [n for n in size if n > 1] == [n for n in x.shape if n > 1] and steps == known
    if not same or offset is not None or source.stride is None or math.prod(size) == 0:
        weave.freeze(x, Reason("its memory is read in another order", node, explained=False))
        return weave.fixed(tuple(size))
    return reshaped(weave, node, x, size)


def reshaped(
    weave: Weave, node: Node, x: Value, shape: Sequence[int], pieces: Mapping[int, Sequence[int]] | None = None
) -> Value:
    """View `x` under `shape`; axes in `pieces` are only read in pieces of these lengths: what follows may vary."""
    shape, pieces = tuple(shape), pieces or {}
    if x.shape == shape:
        return x
    weave.settle(x, node)
    out_axes: list[Term] = []
    for sources, targets in _groups(x.shape, shape):
        term = product([x.axes[axis] for axis in sources]) if sources else Uniform(1)
        sizes = [shape[axis] for axis in targets]
        cut = next((i for i, axis in enumerate(targets) if axis in pieces and i < len(targets) - 1), None)
        try:
            out_axes += _factors(term, sizes) if cut is None else _families(term, sizes, cut, pieces[targets[cut]])
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


def _families(term: Term, sizes: list[int], cut: int, lengths: Sequence[int]) -> list[Term]:
    """As `_factors`, but what follows position `cut` is described separately for each piece along it."""
    before, many, after = sizes[:cut], sizes[cut], sizes[cut + 1 :]
    inner = math.prod(after)
    outer: Term = Uniform(1)
    if before:
        outer, term = split_off(term, many * inner)
    pieces: list[Term] = []
    members: list[list[Term]] = []
    for length in lengths:
        head, term = split_at(term, length * inner) if term.size > length * inner else (term, Uniform(0))
        piece, width = split_off(head, inner)
        pieces.append(piece)
        members.append(_factors(width, after))
    token = Enumerated(many) if len(lengths) == many else Parted(tuple(pieces))
    families: list[Term] = [Family(token, tuple(member[i] for member in members)) for i in range(len(after))]
    return [*(_factors(outer, before) if before else []), token, *families]


def pieces_read(node: Node) -> dict[int, tuple[int, ...]]:
    """Axes of a node's result that every use cuts into the same pieces (`x[:, 0]`, `unbind`, `x[:, :3]`): lengths."""
    assert node.shape is not None
    found = {}
    for axis, length in enumerate(node.shape):
        cuts = _cuts(node, axis) if length > 1 else None
        if not cuts:
            continue
        spans = sorted(cuts)
        ends = [0, *[stop for _, stop in spans]]
        if len(spans) > 1 and ends == [*[start for start, _ in spans], length] and len(spans) <= MANY:
            found[axis] = tuple(stop - start for start, stop in spans)
        elif all(stop - start == 1 for start, stop in spans) and length <= MANY:
            found[axis] = (1,) * length
    return found


def _cuts(node: Node, axis: int) -> set[tuple[int, int]] | None:
    """Spans (start, stop) that the users of a node cut out of an axis; None if one of them does anything else."""
    found: set[tuple[int, int]] = set()
    for user in node.users:
        cuts = _cuts_of(user, node, axis)
        if cuts is None:
            return None
        found |= cuts
    return found if node.users else None


def _cuts_of(user: Node, source: Node, axis: int) -> set[tuple[int, int]] | None:
    name = user.short
    assert source.shape is not None
    rank, length = len(source.shape), source.shape[axis]
    if name in ("select", "unbind", "slice", "split_with_sizes"):
        place = 2 if name == "split_with_sizes" else 1
        dim = user.arguments[place] if len(user.arguments) > place else user.options.get("dim", 0)
        if dim % rank != axis:
            several = name in ("unbind", "split_with_sizes")
            return None if several else _cuts(user, axis - (name == "select" and dim % rank < axis))
        if name == "unbind":
            return {(position, position + 1) for position in range(length)}
        if name == "select":
            return {(user.arguments[2] % length, user.arguments[2] % length + 1)}
        if name == "split_with_sizes":
            ends = list(itertools.accumulate(user.arguments[1]))
            return set(itertools.pairwise([0, *ends]))
        start, stop, step = slice(*[*user.arguments[2:], *(None, None, 1)[len(user.arguments) - 2 :]]).indices(length)
        return {(start, stop)} if step == 1 and (start, stop) != (0, length) else None
    if name == "index":
        (place, index), *more = [(place, i) for place, i in enumerate(user.arguments[1]) if i is not None]
        position = single_position(index)
        if more or place != axis or position is None:
            return None
        return {(position % length, position % length + 1)}
    if name not in PASSING or user.shape is None:
        return None
    return _cuts(user, _axis_map(name, user, source)[axis])


def single_position(node: Node) -> int | None:
    """The number in a constant index with one entry, followed through copies."""
    while node.kind == "call" and node.short in ("clone", "alias", "detach", "lift_fresh_copy"):
        node = node.arguments[0]
    one = node.constant is not None and node.constant.numel() == 1 and not node.constant.is_floating_point()
    return int(node.constant) if one and node.constant is not None and node.constant.dtype != torch.bool else None


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
