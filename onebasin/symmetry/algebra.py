"""The group's algebra: elements spread out over their symmetry, composed and inverted."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebasin.errors import SymmetryError
from onebasin.symmetry.element import Element

if TYPE_CHECKING:
    from onebasin.symmetry.group import Symmetry
    from onebasin.symmetry.space import Space


class Wide:
    """An element spread out: per space, orders (M, copies, n) and factors (generators, M, copies, n)."""

    def __init__(self, symmetry: Symmetry, element: Element) -> None:
        """Check that the element belongs to the symmetry; M is 1 for a single element."""
        self.symmetry, self.members = symmetry, element.members
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
        return [
            bool((order != torch.arange(order.shape[-1])).any() or (factor != 1).any())
            for order, factor in zip(self.orders, self.factors, strict=True)
        ]

    @property
    def many(self) -> int:
        """Number of elements in the batch, 1 for a single one."""
        return 1 if self.members is None else self.members

    def block(self, start: int, stop: int) -> Wide:
        """The elements of members start to stop; a single element serves everyone."""
        if self.members is None:
            return self
        made = object.__new__(Wide)
        made.symmetry, made.members = self.symmetry, stop - start
        made.orders = [order[start:stop] for order in self.orders]
        made.factors = [factor[:, start:stop] for factor in self.factors]
        return made

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


def compose(left: Wide, right: Wide) -> Element:
    """First `right`, then `left`."""
    if None not in (left.members, right.members) and left.members != right.members:
        raise SymmetryError(f"batches of {left.members} and {right.members} elements cannot be composed one by one.")
    if left.members is None and right.members is not None:
        left = _spread(left, right.many)
    elif right.members is None and left.members is not None:
        right = _spread(right, left.many)
    made = left.block(0, left.many) if left.members is not None else _spread(left, 1)
    made.members = left.members
    for number, space in enumerate(left.symmetry.spaces):
        picked = sources(left, number)
        made.orders[number] = (
            right.orders[number]
            .reshape(left.many, picked.shape[1])
            .gather(1, picked)
            .reshape(left.orders[number].shape)
        )
        count = len(space.generators)
        moved = right.factors[number].reshape(count, left.many, picked.shape[1]).gather(2, picked.expand(count, -1, -1))
        made.factors[number] = left.factors[number] * moved.reshape(left.factors[number].shape)
    return made.narrow()


def invert(wide: Wide) -> Element:
    """The element that undoes `wide`."""
    made = _spread(wide, wide.many)
    made.members = wide.members
    for number, space in enumerate(wide.symmetry.spaces):
        picked = sources(wide, number)
        units = torch.arange(space.size).expand(wide.orders[number].shape).reshape(wide.many, -1)
        made.orders[number] = torch.empty_like(units).scatter(1, picked, units).reshape(wide.orders[number].shape)
        inverse = 1 / wide.factors[number].reshape(len(space.generators), wide.many, picked.shape[1])
        scattered = torch.empty_like(inverse).scatter(2, picked.expand_as(inverse), inverse)
        made.factors[number] = scattered.reshape(wide.factors[number].shape)
    return made.narrow()


def sources(wide: Wide, number: int) -> Tensor:
    """(M, copies * n): where in old coordinates (copy, unit) each new unit came from."""
    size = wide.symmetry.spaces[number].size
    return (wide.origin(number)[:, :, None] * size + wide.orders[number]).reshape(wide.many, -1)


def _spread(wide: Wide, many: int) -> Wide:
    made = object.__new__(Wide)
    made.symmetry, made.members = wide.symmetry, many
    made.orders = [order.expand(many, *order.shape[1:]).clone() for order in wide.orders]
    made.factors = [factor.expand(factor.shape[0], many, *factor.shape[2:]).clone() for factor in wide.factors]
    return made
