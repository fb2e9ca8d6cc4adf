"""Coordinate ascent over permutations, as published with Git Re-Basin: what most tools port.

Written from the description of the algorithm, in torch and scipy. Layers are visited in random order; each gets the
best order of its units while all others are held (one linear assignment), until a sweep changes no layer by more than
1e-12, at most 100 sweeps. `merge_many` aligns each network in turn, in random order, to the mean of the others.

Which axes belong together is told by hand or read off a `Symmetry`: tensor name -> for each axis the name of its space,
None where nothing moves. Only plain permutations of whole axes can be said in this language: no heads, no gates of a
recurrent cell, no signs, no scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from onebasin import State, Symmetry
from onebasin.alignment import BlockLayout
from onebasin.symmetry.apply import positions

SWEEPS, PROGRESS = 100, 1e-12
Axes = Mapping[str, tuple[str | None, ...]]
Nested = Mapping[str, tuple[int, tuple[str, ...]]]
"""Name of a set of heads -> their number, and the spaces of units inside of them."""
Orders = dict[str, Tensor]


def axes_of(symmetry: Symmetry) -> Axes | None:
    """The permutations of a symmetry in the language of this method, or None where it has no words for them."""
    axes: dict[str, list[str | None]] = {name: [None] * len(shape) for name, shape in symmetry.shapes.items()}
    for space in symmetry.spaces:
        if not space.permutable:
            continue
        for leg in space.legs:
            places, length = positions(leg.grid).reshape(-1), symmetry.shapes[leg.tensor][leg.axis]
            whole = torch.equal(places, torch.arange(length))
            if space.parents or leg.over or leg.within or not whole or axes[leg.tensor][leg.axis] is not None:
                return None
            axes[leg.tensor][leg.axis] = space.name
    return {name: tuple(found) for name, found in axes.items()}


def permuted(state: Mapping[str, Tensor], axes: Axes, orders: Orders) -> State:
    """The network with its units in new places: new[i] = old[order[i]] along every axis of a space."""
    return {name: _permuted(tensor, axes[name], orders) for name, tensor in state.items()}


def _permuted(tensor: Tensor, spaces: Sequence[str | None], orders: Orders, without: int = -1) -> Tensor:
    for axis, space in enumerate(spaces):
        if space is not None and axis != without:
            tensor = tensor.index_select(axis, orders[space])
    return tensor


def match(a: State, b: State, axes: Axes, generator: torch.Generator, nested: Nested | None = None) -> Orders:
    """Orders that move b towards a, from the identity; units of heads are numbered through, head by head."""
    legs: dict[str, list[tuple[str, int]]] = {}
    for name, spaces in axes.items():
        for axis, space in enumerate(spaces):
            if space is not None:
                legs.setdefault(space, []).append((name, axis))
    orders = {space: torch.arange(a[found[0][0]].shape[found[0][1]]) for space, found in legs.items()}
    families = {head: inside for head, (_, inside) in (nested or {}).items()}
    inner = {space for inside in families.values() for space in inside}
    families |= {space: (space,) for space in legs if space not in inner}
    names = list(families)
    for _ in range(SWEEPS):
        progress = False
        for number in torch.randperm(len(names), generator=generator).tolist():
            family = families[names[number]]
            gains = {space: _gains(a, b, axes, orders, legs[space]) for space in family}
            if nested and names[number] in nested:
                best = _heads(gains, nested[names[number]][0])
            else:
                best = {space: _assignment(gain) for space, gain in gains.items()}
            for space, order in best.items():
                units = torch.arange(len(order))
                gain = gains[space]
                progress |= bool(gain[units, order].sum() > gain[units, orders[space]].sum() + PROGRESS)
                orders[space] = order
        if not progress:
            break
    return orders


def _gains(a: State, b: State, axes: Axes, orders: Orders, legs: list[tuple[str, int]]) -> Tensor:
    """What unit i of a gains from unit j of b: (n, n)."""
    gains: Tensor | None = None
    for name, axis in legs:
        mine = a[name].movedim(axis, 0).flatten(1) if a[name].dim() > 1 else a[name][:, None]
        other = _permuted(b[name], axes[name], orders, without=axis)
        other = other.movedim(axis, 0).flatten(1) if other.dim() > 1 else other[:, None]
        gains = mine @ other.T if gains is None else gains.addmm_(mine, other.T)
    if gains is None:
        raise ValueError("a space without a tensor")
    return gains


def _heads(gains: Mapping[str, Tensor], heads: int) -> Orders:
    """The best order of heads with the best order of units in each: an assignment for every pair of heads."""
    value, inside = torch.zeros(heads, heads), {}
    for space, gain in gains.items():
        units = len(gain) // heads
        for new, row in enumerate(gain.split(units)):
            for old, part in enumerate(row.split(units, 1)):
                order = inside[space, new, old] = _assignment(part)
                value[new, old] += part[torch.arange(units), order].sum()
    order = _assignment(value).tolist()
    return {
        space: torch.cat([len(gain) // heads * old + inside[space, new, old] for new, old in enumerate(order)])
        for space, gain in gains.items()
    }


def cut(symmetry: Symmetry) -> tuple[Callable[[State], State], Axes, Nested]:
    """For networks with heads: what lays their tensors out so that whole axes move, the axes of that, and the heads."""
    layout = BlockLayout.of(symmetry)
    spaces, axes, plans = layout.spaces, {}, []
    for number, block in enumerate(layout.blocks):
        moving = [a for a in block.axes if not any(set(a.dims) < set(other.dims) for other in block.axes)]
        sizes = [layout.coordinates(axis.space) for axis in moving]
        dims = [dim for axis in moving for dim in axis.dims]
        axes[str(number)] = (*[spaces[axis.space].name for axis in moving], None)
        plans.append((str(number), block, dims, sizes))

    def lay_out(state: State) -> State:
        return {
            name: block.take(state[block.tensor][None])[0].permute(*dims, len(dims)).reshape(*sizes, -1)
            for name, block, dims, sizes in plans
        }

    heads: dict[str, tuple[int, tuple[str, ...]]] = {}
    for space in spaces:
        for parent, size in space.parents:
            heads[parent] = (size, (*heads.get(parent, (size, ()))[1], space.name))
    return lay_out, axes, heads


def _assignment(gains: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(gains.numpy(), maximize=True)[1])


def merge_many(networks: Sequence[State], axes: Axes, generator: torch.Generator, sweeps: int = SWEEPS) -> list[State]:
    """Align each network to the mean of the others, in random order, until their mean stops moving."""
    found = [dict(network) for network in networks]
    for _ in range(sweeps):
        progress = False
        for number in torch.randperm(len(found), generator=generator).tolist():
            others = [network for other, network in enumerate(found) if other != number]
            mean = {name: torch.stack([network[name] for network in others]).mean(0) for name in found[number]}
            moved = permuted(found[number], axes, match(mean, found[number], axes, generator))
            gain = sum(float(((moved[name] - found[number][name]) * mean[name]).sum()) for name in mean)
            if gain > PROGRESS:
                progress, found[number] = True, moved
        if not progress:
            break
    return found
