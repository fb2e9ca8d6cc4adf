"""Spaces of units, their legs in tensors, and elements of the group: plain data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import SymmetryError

FREEDOMS = ("permutation", "scale", "sign", "norm-scale", "norm-sign")


@dataclass(frozen=True)
class Grid:
    """Positions along an axis: units at start + step * i per run (start, count, step), repeated over (size, step)."""

    axis: int
    runs: tuple[tuple[int, int, int], ...]
    rest: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Leg:
    """Where a space stands in a tensor, and how its factors act there.

    Attributes:
        tensor: state-dict name.
        grid: the units' positions along one axis.
        over: for each parent of the space, where its index is read in this tensor.
        powers: exponent of each generator's factor.
        within: restriction to parts of other axes; () means everywhere.
        shift: epsilon of a batch-norm variance v, which moves as v + shift; 0 for all else.
    """

    tensor: str
    grid: Grid
    over: tuple[Grid, ...] = ()
    powers: tuple[int, ...] = ()
    within: tuple[Grid, ...] = ()
    shift: float = 0.0

    @property
    def axis(self) -> int:
        """The tensor axis the units lie on."""
        return self.grid.axis


@dataclass(frozen=True)
class Space:
    """A set of `size` interchangeable or rescalable units.

    Attributes:
        name: after the module that writes it.
        size: number of units.
        permutable: whether units may change places.
        generators: kind of each scale or sign freedom, one factor per unit each.
        parents: (name, size) of each axis that the space is nested in; a name that is no space is a rigid axis.
        legs: the tensor axes it is tied to.
    """

    name: str
    size: int
    permutable: bool
    generators: tuple[str, ...]
    parents: tuple[tuple[str, int], ...]
    legs: tuple[Leg, ...]

    @property
    def copies(self) -> int:
        """How many independent orders the space has: one per combination of its parents' indices."""
        return math.prod(size for _, size in self.parents)

    @property
    def freedoms(self) -> tuple[str, ...]:
        """The kinds of freedom, each once, in the order of `FREEDOMS`."""
        held = {"permutation"} & {"permutation" if self.permutable else ""} | set(self.generators)
        return tuple(kind for kind in FREEDOMS if kind in held)

    @property
    def log10_order(self) -> float:
        """Decimal logarithm of the number of permutations and sign changes."""
        orders = math.lgamma(self.size + 1) / math.log(10) if self.permutable else 0.0
        signs = sum(kind.endswith("sign") for kind in self.generators)
        return self.copies * (orders + signs * self.size * math.log10(2))

    def without(self, gone: Collection[str]) -> Space:
        """The same space with some kinds of freedom taken away."""
        remaining = [number for number, kind in enumerate(self.generators) if kind not in gone]
        legs = tuple(replace(leg, powers=tuple(leg.powers[number] for number in remaining)) for leg in self.legs)
        generators = tuple(self.generators[number] for number in remaining)
        return replace(self, permutable=self.permutable and "permutation" not in gone, generators=generators, legs=legs)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Space:
        """Read what `dataclasses.asdict` and JSON made of a space."""
        legs = tuple(
            Leg(
                item["tensor"],
                _grid(item["grid"]),
                tuple(_grid(grid) for grid in item["over"]),
                tuple(item["powers"]),
                tuple(_grid(grid) for grid in item["within"]),
                item["shift"],
            )
            for item in data["legs"]
        )
        parents = tuple((name, size) for name, size in data["parents"])
        return Space(data["name"], data["size"], data["permutable"], tuple(data["generators"]), parents, legs)


def _grid(data: dict[str, Any]) -> Grid:
    return Grid(data["axis"], tuple(tuple(run) for run in data["runs"]), tuple(tuple(item) for item in data["rest"]))


@dataclass(frozen=True, eq=False)
class Element:
    """One member of the group.

    Attributes:
        orders: space name -> (*parents, size) integers; spaces that are not permuted are left out.
        factors: space name -> (generators, *parents, size) positive numbers and signs; spaces without generators are
            left out.
        members: None for one element; N for a batch, all tensors then having a leading axis of N (in `factors` after
            the generators).
    """

    orders: Mapping[str, Tensor]
    factors: Mapping[str, Tensor]
    members: int | None = None

    def __repr__(self) -> str:
        """Say how much is moved."""
        moved = sum(
            int((order != torch.arange(order.shape[-1], device=order.device)).sum()) for order in self.orders.values()
        )
        batch = "" if self.members is None else f", {self.members} members"
        return f"Element({len(self.orders)} orders, {moved} units moved, {len(self.factors)} factor tables{batch})"

    def some(self, start: int, stop: int) -> Element:
        """The elements start:stop of a batch, as a batch."""
        return Element(
            {name: order[start:stop] for name, order in self.orders.items()},
            {name: factor[:, start:stop] for name, factor in self.factors.items()},
            stop - start,
        )

    def member(self, index: int) -> Element:
        """One element of a batch."""
        if self.members is None:
            raise SymmetryError("this Element is a single one, not a batch; use it as it is.")
        return Element(
            {name: order[index] for name, order in self.orders.items()},
            {name: factor[:, index] for name, factor in self.factors.items()},
        )
