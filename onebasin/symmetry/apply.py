"""How an element acts on tensors, and the algebra of elements.

A space of n units with parents p (a *copy* for each combination of their indices) acts on a tensor that holds both as

    new[p, i] = factor[p, i]^power * old[sigma(p), order[p, i]],

with sigma the orders of the parents. Orders and factors are written in the coordinates of the result, so legs of
parents must be composed before those of their children: `Symmetry.legs_of` lists them in that order, and a gather by
`index` after one by `before` is the gather by `before[index]`.

Most legs concern one axis at a time. They are composed into one index vector and one factor vector per axis, so that a
tensor is gathered once per axis and multiplied once, however many spaces meet on it, at the cost of copying it.
Legs whose order depends on an index of another axis (grouped convolutions, stacked experts) go through an index tensor
of full size, with 16 bytes for each entry. Gathers copy bits, so permutations are exact in any dtype; factors are
computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebasin.errors import SpecError, SymmetryError
from onebasin.state import State
from onebasin.symmetry.space import Element
from onebasin.symmetry.unmoved import differing, moved_companion

if TYPE_CHECKING:
    from onebasin.symmetry.group import Symmetry
    from onebasin.symmetry.space import Grid, Leg, Space


class ExpandedElement:
    """An element spread out: per space, orders (M, copies, n) and factors (generators, M, copies, n)."""

    def __init__(self, symmetry: Symmetry, element: Element, *, check: bool = True) -> None:
        """Check that the element belongs to the symmetry, unless it was made by us; M is 1 for a single element."""
        self.symmetry, self.members = symmetry, element.members
        self.powers: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        many = 1 if element.members is None else element.members
        known = {space.name for space in symmetry.spaces}
        if unknown := (set(element.orders) | set(element.factors)) - known:
            raise SymmetryError(
                f"the element speaks of spaces {sorted(unknown)}, which this symmetry lacks; draw it from this one."
            )
        self.orders: list[Tensor] = []
        self.factors: list[Tensor] = []
        for space in symmetry.spaces:
            shape = (many, space.copies, space.size)
            order, factor = element.orders.get(space.name), element.factors.get(space.name)
            if order is not None and not space.permutable:
                raise SymmetryError(f"the element permutes {space.name!r}, whose units are rigid.")
            count = len(space.generators)
            if check:
                _check(space, order, factor, element.members)
            self.orders.append(torch.arange(space.size).expand(shape) if order is None else order.reshape(shape))
            self.factors.append(
                torch.ones(count, *shape, dtype=torch.float64)
                if factor is None
                else factor.reshape(count, *shape).double()
            )

    @cached_property
    def active(self) -> list[bool]:
        """For each space, whether anything of it moves."""
        return [moves or bool((factor != 1).any()) for moves, factor in zip(self.permuting, self.factors, strict=True)]

    @cached_property
    def permuting(self) -> list[bool]:
        """For each space, whether it changes any order."""
        return [bool((order != torch.arange(order.shape[-1])).any()) for order in self.orders]

    @property
    def many(self) -> int:
        """Number of elements in the batch, 1 for a single one."""
        return 1 if self.members is None else self.members

    def block(self, start: int, stop: int) -> ExpandedElement:
        """The elements of members start to stop; a single element serves everyone."""
        if self.members is None:
            return self
        block = object.__new__(ExpandedElement)
        if start == 0 and stop == self.members:
            return self
        block.symmetry, block.members, block.powers = self.symmetry, stop - start, {}
        block.orders = [order[start:stop] for order in self.orders]
        block.factors = [factor[:, start:stop] for factor in self.factors]
        return block

    def narrow(self) -> Element:
        """Back to an Element."""
        batch = () if self.members is None else (self.members,)
        orders, factors = {}, {}
        for space, order, factor in zip(self.symmetry.spaces, self.orders, self.factors, strict=True):
            shape = (*batch, *[size for _, size in space.parents], space.size)
            if space.permutable:
                orders[space.name] = order.reshape(shape).clone()
            if space.generators:
                factors[space.name] = factor.reshape(len(space.generators), *shape).clone()
        return Element(orders, factors, self.members)

    def origin(self, number: int) -> Tensor:
        """For each copy of a space in new coordinates, the copy it came from: (M, copies)."""
        space = self.symmetry.spaces[number]
        names = [name for name, _ in space.parents]
        sizes = [size for _, size in space.parents]
        by_name = {other.name: index for index, other in enumerate(self.symmetry.spaces)}
        new = torch.unravel_index(torch.arange(space.copies), sizes) if sizes else ()
        old = torch.zeros(self.many, space.copies, dtype=torch.long)
        for position, (name, size) in enumerate(space.parents):
            index = new[position].expand(self.many, -1)
            if name in by_name:  # else the parent is rigid
                parent = self.symmetry.spaces[by_name[name]]
                copy = torch.zeros(space.copies, dtype=torch.long)
                for grandparent, width in parent.parents:
                    copy = copy * width + new[names.index(grandparent)]
                index = self.orders[by_name[name]][:, copy, new[position]]
            old = old * size + index
        return old


def _check(space: Space, order: Tensor | None, factor: Tensor | None, members: int | None) -> None:
    """Say what is wrong with the numbers of one space."""
    batch = () if members is None else (members,)
    shape = (*batch, *[size for _, size in space.parents], space.size)
    if order is not None:
        if order.is_floating_point() or tuple(order.shape) != shape:
            raise SymmetryError(
                f"the order of space {space.name!r} should be integers of shape {shape}, found {order.dtype} of shape "
                f"{tuple(order.shape)}; draw it from this symmetry."
            )
        if not bool((order.sort(-1).values == torch.arange(space.size, device=order.device)).all()):
            raise SymmetryError(f"the order of space {space.name!r} is no permutation of 0 to {space.size - 1}.")
    if factor is None:
        return
    if tuple(factor.shape) != (len(space.generators), *shape):
        raise SymmetryError(
            f"the factors of space {space.name!r} should have shape {(len(space.generators), *shape)}, found "
            f"{tuple(factor.shape)}; draw them from this symmetry."
        )
    for kind, numbers in zip(space.generators, factor, strict=True):
        sign = kind.endswith("sign")
        right = (numbers.abs() == 1) if sign else (numbers > 0) & torch.isfinite(numbers)
        if not bool(right.all()):
            raise SymmetryError(
                f"the {kind} factors of space {space.name!r} must be {'1 or -1' if sign else 'positive and finite'}."
            )


def compose(left: ExpandedElement, right: ExpandedElement) -> Element:
    """First `right`, then `left`."""
    if None not in (left.members, right.members) and left.members != right.members:
        raise SymmetryError(f"batches of {left.members} and {right.members} elements cannot be composed one by one.")
    if left.members is None and right.members is not None:
        left = _spread(left, right.many)
    elif right.members is None and left.members is not None:
        right = _spread(right, left.many)
    composed = _spread(left, left.many)
    composed.members = left.members
    for number, space in enumerate(left.symmetry.spaces):
        picked = sources(left, number)
        composed.orders[number] = (
            right.orders[number]
            .reshape(left.many, picked.shape[1])
            .gather(1, picked)
            .reshape(left.orders[number].shape)
        )
        count = len(space.generators)
        moved = right.factors[number].reshape(count, left.many, picked.shape[1]).gather(2, picked.expand(count, -1, -1))
        composed.factors[number] = left.factors[number] * moved.reshape(left.factors[number].shape)
    return composed.narrow()


def invert(expanded: ExpandedElement) -> Element:
    """The element that undoes `expanded`."""
    inverted = _spread(expanded, expanded.many)
    inverted.members = expanded.members
    for number, space in enumerate(expanded.symmetry.spaces):
        picked = sources(expanded, number)
        units = torch.arange(space.size).expand(expanded.orders[number].shape).reshape(expanded.many, -1)
        inverted.orders[number] = (
            torch.empty_like(units).scatter(1, picked, units).reshape(expanded.orders[number].shape)
        )
        inverse = 1 / expanded.factors[number].reshape(len(space.generators), expanded.many, picked.shape[1])
        scattered = torch.empty_like(inverse).scatter(2, picked.expand_as(inverse), inverse)
        inverted.factors[number] = scattered.reshape(expanded.factors[number].shape)
    return inverted.narrow()


def sources(expanded: ExpandedElement, number: int) -> Tensor:
    """(M, copies * n): where in old coordinates (copy, unit) each new unit came from."""
    size = expanded.symmetry.spaces[number].size
    return (expanded.origin(number)[:, :, None] * size + expanded.orders[number]).reshape(expanded.many, -1)


def _spread(expanded: ExpandedElement, many: int) -> ExpandedElement:
    spread = object.__new__(ExpandedElement)
    spread.symmetry, spread.members, spread.powers = expanded.symmetry, many, {}
    spread.orders = [order.expand(many, *order.shape[1:]).clone() for order in expanded.orders]
    spread.factors = [factor.expand(factor.shape[0], many, *factor.shape[2:]).clone() for factor in expanded.factors]
    return spread


CHUNK_BYTES = 1 << 26
Action = tuple[int, Tensor | None, Tensor | None]
"""Axis of the stacked tensor, index vectors (M, length), factors (M, ...); None where nothing happens."""

KINDS = ("value", "std", "variance", "mask", "gradient", "squared-gradient")


def apply(expanded: ExpandedElement, state: Mapping[str, Tensor], kind: str) -> State:
    """Act on one network."""
    if expanded.members is not None:
        raise SymmetryError(
            f"a batch of {expanded.members} elements cannot act on one State; take element.member(i), or give a "
            "Population."
        )
    return _apply(expanded, state, kind, stacked=False)


def apply_block(expanded: ExpandedElement, stacked: Mapping[str, Tensor], start: int, kind: str) -> State:
    """Act on a block of stacked networks that begins with member `start`."""
    many = len(next(iter(stacked.values())))
    return _apply(expanded.block(start, start + many), stacked, kind, stacked=True)


def _apply(expanded: ExpandedElement, state: Mapping[str, Tensor], kind: str, stacked: bool) -> State:
    if kind not in KINDS:
        raise SymmetryError(f"kind must be one of {', '.join(KINDS)}, found {kind!r}.")
    if kind == "value" and any(expanded.active) and (name := differing(expanded.symmetry.frozen, state, int(stacked))):
        raise SymmetryError(
            f"the constant {name!r} had equal entries where the symmetry was found, and has others here; discover the "
            "symmetry of the model with the constants of these networks."
        )
    result = {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in state.items()}
    for name, legs in expanded.symmetry.legs_of.items():
        tensor = result.get(name)
        expected = tuple(expanded.symmetry.shapes.get(name, ()))
        shape = None if tensor is None else tuple(tensor.shape[1 if stacked else 0 :])
        if tensor is None or (expected and shape != expected):
            raise SpecError(
                f"tensor {name!r} should have shape {expected} but "
                + ("is missing" if tensor is None else f"has {shape}")
                + "; give a state of the model whose symmetry this is."
            )
        moving = [(number, leg) for number, leg in legs if expanded.active[number]]
        if moving:
            moved = _move(expanded, tensor if stacked else tensor[None], moving, kind)
            result[name] = moved if stacked else moved[0]
    for name, (leader, how) in expanded.symmetry.companions.items():
        moving = [(number, leg) for number, leg in expanded.symmetry.legs_of.get(leader, []) if expanded.active[number]]
        if moving and name in result:
            tensor = result[name] if stacked else result[name][None]
            factor = _move(expanded, torch.ones_like(tensor, dtype=torch.float64), moving, "value")
            moved = moved_companion(_move(expanded, tensor, moving, "mask"), factor, how, kind, name)
            result[name] = moved if stacked else moved[0]
    return result


def _move(expanded: ExpandedElement, tensor: Tensor, legs: list[tuple[int, Leg]], kind: str) -> Tensor:
    """Act on one stacked tensor (N, *shape)."""
    if any(leg.within or any(grid.axis != leg.axis for grid in leg.over) for _, leg in legs):
        return _move_slowly(expanded, tensor, legs, kind)
    if expanded.many == 1 and len(tensor) == 1:
        return _move_one(expanded, tensor, legs, kind)
    shape = tensor.shape[1:]
    actions: list[Action] = []
    for axis in sorted({leg.axis for _, leg in legs}):
        index, factor = _axis_action(expanded, [(number, leg) for number, leg in legs if leg.axis == axis], shape[axis])
        if factor is not None:
            factor = factor.reshape(-1, *[size if a == axis else 1 for a, size in enumerate(shape)])
        actions.append((axis + 1, index if index is None else index.to(tensor.device), factor))
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    size = max(1, CHUNK_BYTES // max(1, tensor.element_size() * shape.numel()))
    for start in range(0, len(tensor), size):  # in chunks, which bound what is held between two gathers
        members = slice(start, start + size)
        part = [(axis, _members(index, members), _members(factor, members)) for axis, index, factor in actions]
        _act(tensor[members], part, out[members])
        _stretch(out[members], [factor for _, _, factor in part if factor is not None], legs, kind)
    return out


def _move_one(expanded: ExpandedElement, tensor: Tensor, legs: list[tuple[int, Leg]], kind: str) -> Tensor:
    """The same for one network: the same numbers, with fewer operations."""
    moved, factors = tensor, []
    for axis in range(tensor.dim() - 1):
        here = [(number, leg) for number, leg in legs if leg.grid.axis == axis]
        if not here:
            continue
        index, factor = _axis_action(expanded, here, tensor.shape[axis + 1])
        if index is not None and any(expanded.permuting[number] for number, _ in here):
            places = index.to(tensor.device)
            if axis == tensor.dim() - 2 and axis:  # picking single numbers out of rows: several times as quick
                moved = moved.gather(axis + 1, places.reshape((1,) * (tensor.dim() - 1) + (-1,)).expand_as(moved))
            else:
                moved = moved.index_select(axis + 1, places[0])
        if factor is not None:
            factors.append(factor.reshape(1, *[-1 if a == axis else 1 for a in range(tensor.dim() - 1)]))
    moved = moved.clone(memory_format=torch.contiguous_format) if moved is tensor else moved
    _stretch(moved, factors, legs, kind)
    return moved


def _members(vectors: Tensor | None, members: slice) -> Tensor | None:
    return vectors if vectors is None or len(vectors) == 1 else vectors[members]


def _act(tensor: Tensor, actions: list[Action], out: Tensor) -> None:
    """Gather `tensor` along each axis into `out`."""
    gathers = [(axis, index) for axis, index, _ in actions if index is not None]
    for axis, index in gathers[:-1]:
        tensor = _take(tensor, axis, index, torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
    if gathers:
        _take(tensor, *gathers[-1], out)
    else:
        out.copy_(tensor)


def _stretch(tensor: Tensor, factors: list[Tensor], legs: list[tuple[int, Leg]], kind: str) -> None:
    """Multiply our own buffer by factors, as the kind demands; batch-norm variances move as v + epsilon."""
    if kind == "mask" or not factors:
        return
    shift = next((leg.shift for _, leg in legs if leg.shift), 0.0)
    if kind == "value" and shift:
        product = math.prod(factors[1:], start=factors[0]).to(tensor.device)
        moved = product * (tensor.double() + shift) - shift
        if bool((moved < -1e-6 * shift).any()):
            raise SymmetryError(
                f"this element would shrink the batch-norm variance {legs[0][1].tensor!r} below zero; use factors of "
                "at least 1 for 'norm-scale', or larger ones for units of small variance."
            )
        tensor.copy_(torch.where(product == 1, tensor, moved.clamp_min(0).to(tensor.dtype)))
        return
    power = {"value": 1, "std": 1, "variance": 2, "gradient": -1, "squared-gradient": -2}[kind]
    for factor in factors:
        turned = (factor.abs() if kind == "std" else factor) ** power
        tensor.mul_(turned.to(device=tensor.device, dtype=tensor.dtype))


def _axis_action(
    expanded: ExpandedElement, legs: list[tuple[int, Leg]], length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Index vector and factor vector of an axis, (M, length) each; None where nothing happens."""
    index: Tensor | None = None
    factor: Tensor | None = None
    for number, leg in legs:
        space = expanded.symmetry.spaces[number]
        if _is_whole(expanded.symmetry, number, leg, length):
            if space.permutable:
                order = expanded.orders[number][:, 0]
                index = order if index is None else index.gather(1, order)
            if any(leg.powers):
                powered = _powered(expanded, number, leg)[:, 0]
                factor = powered if factor is None else factor * powered
            continue
        places = positions(leg.grid)
        copies = _copies(space.parents, leg.grid, leg.over, length, torch.get_default_device())
        if space.permutable:
            before = torch.arange(length).expand(expanded.many, -1) if index is None else index
            order = expanded.orders[number][:, copies]  # (M, rest, n)
            sources = places.expand(expanded.many, -1, -1).gather(2, order)
            index = before.clone()
            index[:, places.reshape(-1)] = before.gather(1, sources.reshape(expanded.many, -1))
        if any(leg.powers):
            factor = torch.ones(expanded.many, length, dtype=torch.float64) if factor is None else factor.clone()
            factor[:, places.reshape(-1)] *= _powered(expanded, number, leg)[:, copies].reshape(expanded.many, -1)
    return index, factor


def _powered(expanded: ExpandedElement, number: int, leg: Leg) -> Tensor:
    """Product over generators of factor^power: (M, copies, n). It is shared between legs: not to be written to."""
    product = expanded.powers.get((number, leg.powers))
    if product is None:
        product = torch.ones(expanded.orders[number].shape, dtype=torch.float64)
        for generator, power in enumerate(leg.powers):
            if power:
                product = product * expanded.factors[number][generator] ** power
        expanded.powers[number, leg.powers] = product
    return product


def _is_whole(symmetry: Symmetry, number: int, leg: Leg, length: int) -> bool:
    """Whether the units of a space without parents are the positions of the axis, one by one; remembered."""
    key = (_is_whole, id(leg))  # the legs of a symmetry live as long as it does
    known: bool | None = symmetry.derived.get(key)
    if known is None:
        places = positions(leg.grid)
        alone = not symmetry.spaces[number].parents and places.shape == (1, length)
        known = symmetry.derived[key] = alone and torch.equal(places[0], torch.arange(length))
    return known


def positions(grid: Grid) -> Tensor:
    """Positions along the axis: (rest, n). The result is shared between calls: it must not be written to."""
    return _positions(grid, torch.get_default_device())


@lru_cache(maxsize=1024)
def _positions(grid: Grid, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # tensors that are made in that mode cannot be used outside
        units = torch.cat([start + step * torch.arange(count) for start, count, step in grid.runs])
        rest = torch.zeros(1, dtype=torch.long)
        for size, step in grid.rest:
            rest = (rest[:, None] + step * torch.arange(size)).reshape(-1)
        return rest[:, None] + units


def labels(grid: Grid, length: int) -> Tensor:
    """For each position of an axis the number of the unit that stands there, -1 for none."""
    units = torch.full((length,), -1, dtype=torch.long)
    places = positions(grid)
    units[places] = torch.arange(places.shape[1]).expand_as(places)
    return units


@lru_cache(maxsize=1024)
def _copies(
    parents: tuple[tuple[str, int], ...], grid: Grid, over: tuple[Grid, ...], length: int, device: torch.device
) -> Tensor:
    """Which copy of a space stands in each row of `positions(grid)`: (rest,). All parents lie on the same axis."""
    with torch.inference_mode(False):
        places = positions(grid)
        copy = torch.zeros(len(places), dtype=torch.long)
        for (_, size), parent in zip(parents, over, strict=True):
            copy = copy * size + labels(parent, length)[places[:, 0]]
        return copy


def _take(tensor: Tensor, axis: int, index: Tensor, out: Tensor) -> Tensor:
    """Gather along an axis into `out`; `index` is (M, length), M being 1 or the number of members."""
    members, length = len(tensor), index.shape[1]
    index = index.expand(members, -1)
    before, after = math.prod(tensor.shape[1:axis]), math.prod(tensor.shape[axis + 1 :])
    if after == 1:
        wide = index[:, None].expand(-1, before, -1)
        torch.gather(tensor.reshape(members, before, length), 2, wide, out=out.view(members, before, length))
    else:  # rows are contiguous: copy whole rows
        starts = (torch.arange(members * before, device=index.device) * length).reshape(members, before, 1)
        rows = (starts + index[:, None]).reshape(-1)
        torch.index_select(tensor.reshape(-1, after), 0, rows, out=out.view(-1, after))
    return out


def _move_slowly(expanded: ExpandedElement, tensor: Tensor, legs: list[tuple[int, Leg]], kind: str) -> Tensor:
    """Act through an index tensor of full size, one element at a time."""
    shape = tensor.shape[1:]
    moved = []
    for member in range(expanded.many):
        source = torch.arange(shape.numel()).reshape(shape)
        factor = torch.ones(shape, dtype=torch.float64)
        for number, leg in legs:
            powered = _powered(expanded, number, leg)[member]
            for place, copies in _regions(expanded.symmetry.spaces[number], leg, shape):
                rows = source[place].movedim(leg.axis, -1)
                split = rows.reshape(*rows.shape[:-1], len(copies), -1)
                order = expanded.orders[number][member][copies].expand(split.shape)
                source[place] = split.gather(-1, order).reshape(rows.shape).movedim(-1, leg.axis)
                stretch = powered[copies].reshape([-1 if axis == leg.axis else 1 for axis in range(len(shape))])
                factor[place] *= stretch
        chosen = tensor if expanded.members is None else tensor[member : member + 1]
        out = (
            chosen.reshape(len(chosen), -1).index_select(1, source.reshape(-1).to(tensor.device)).reshape(chosen.shape)
        )
        _stretch(out, [factor[None]], legs, kind)
        moved.append(out)
    return moved[0] if expanded.members is None else torch.cat(moved)


def _regions(space: Space, leg: Leg, shape: torch.Size) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Parts of a tensor where the order along the leg's axis depends on that axis alone: (index, copy per row)."""
    places = positions(leg.grid)
    outside: dict[int, list[tuple[int, Tensor]]] = {}
    ranges = [torch.arange(size) for size in shape]
    ranges[leg.axis] = places.reshape(-1)
    for grid in leg.within:
        ranges[grid.axis] = positions(grid).reshape(-1)
    for position, grid in enumerate(leg.over):
        if grid.axis != leg.axis:
            outside.setdefault(grid.axis, []).append((position, labels(grid, shape[grid.axis])))
    cells: list[tuple[list[Tensor], dict[int, int]]] = [(ranges, {})]
    for axis, grids in outside.items():
        grown = []
        for old, known in cells:
            keys = torch.stack([label[old[axis]] for _, label in grids])
            for key in keys.unique(dim=1).T:
                inside = old[axis][(keys == key[:, None]).all(0)]
                news = {**known, **{position: int(k) for (position, _), k in zip(grids, key, strict=True)}}
                grown.append(([*old[:axis], inside, *old[axis + 1 :]], news))
        cells = grown
    for chosen, known in cells:
        if any(index < 0 for index in known.values()):
            continue
        copy = torch.zeros(len(places), dtype=torch.long)
        for position, ((_, size), grid) in enumerate(zip(space.parents, leg.over, strict=True)):
            index = (
                labels(grid, shape[leg.axis])[places[:, 0]] if position not in known else torch.tensor(known[position])
            )
            copy = copy * size + index
        yield torch.meshgrid(*chosen, indexing="ij"), copy
