"""The squared norm of a network along its orbit of positive scales: small arrays instead of weights.

A *gauge* is one scale generator of one space; it has a log factor s for every coordinate (copy * size + unit). Along
the orbit every weight w moves to w * exp(sum of power * s), so that

    mass(s) = sum over weights of w^2 exp(2 * sum of power * s),

a positive sum of exponentials of linear forms: convex in s. Only sums of w^2 over entries that move alike are needed;
`Layout.reduce` makes them once, in float64, and all that follows works on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_MANY = 9000  # from here on numpy's products use threads, and wait for them

Powers = tuple[tuple[int, int], ...]
"""(gauge, power) for every gauge that acts, in the order of gauges."""


@dataclass(frozen=True)
class Gauge:
    """One scale generator: its space and number there, its kind and its number of coordinates."""

    space: int
    generator: int
    kind: str
    size: int
    name: str  # of the space


@dataclass(frozen=True)
class Side:
    """The dims of a part that hold the coordinates of one space, and the gauges of that space that act there."""

    space: int
    dims: tuple[int, ...]
    powers: Powers


@dataclass(frozen=True, eq=False)
class Part:
    """Sums of squares (M, *sizes); every dim belongs to a side."""

    values: Tensor
    sides: tuple[Side, ...]
    bias: bool

    def onto(self, number: int, factors: list[Tensor]) -> Tensor:
        """Sum onto the coordinates of a side, under the factors of all other sides: (M, coordinates)."""
        if self._matrices is not None:
            return _times(factors[1 - number], self._matrices[number])
        product = self.values
        for other, (side, factor) in enumerate(zip(self.sides, factors, strict=True)):
            if other != number:
                product = product * self.spread(side, factor)
        return self.gather(self.sides[number], product)

    def gather(self, side: Side, values: Tensor) -> Tensor:
        """Sum values shaped as the part's onto the coordinates of a side: (M, coordinates)."""
        others, order, _ = self._ways[side]
        summed = values.sum(others) if others else values
        return summed if order == (0, 1) else summed.permute(order).flatten(1)

    def spread(self, side: Side, table: Tensor) -> Tensor:
        """Lay a table (M, coordinates) along the dims of a side, ones elsewhere."""
        _, order, shape = self._ways[side]
        if len(side.dims) > 1:
            table = table.reshape(len(table), *[self.values.shape[1 + dim] for dim in side.dims])
            table = table.permute(0, *[order.index(1 + place) for place in range(len(side.dims))])
        return table.reshape(len(table), *shape)

    @cached_property
    def _matrices(self) -> tuple[Tensor, Tensor] | None:
        """For a plain table of one side against another: (M, other, own) for each side, as `_times` likes them."""
        if sorted(side.dims for side in self.sides) != [(0,), (1,)]:
            return None
        turned = self.values.transpose(1, 2)
        turned = turned if _by_numpy(turned) else turned.contiguous()
        return (turned, self.values) if self.sides[0].dims == (0,) else (self.values, turned)

    @cached_property
    def _ways(self) -> dict[Side, tuple[list[int], tuple[int, ...], list[int]]]:
        """For every side: dims that are summed, the order of those that are kept, and the shape of a spread table."""
        sizes, found = self.values.shape[1:], {}
        for side in self.sides:
            others = [1 + dim for dim in range(len(sizes)) if dim not in side.dims]
            kept = sorted(side.dims)
            order = (0, *[1 + kept.index(dim) for dim in side.dims])
            found[side] = (others, order, [size if dim in side.dims else 1 for dim, size in enumerate(sizes)])
        return found


def _by_numpy(matrices: Tensor) -> bool:
    """Whether numpy multiplies these: its product of many small matrices is several times as fast as torch's."""
    return matrices.device.type == "cpu" and matrices[0].numel() < _MANY


def _times(factor: Tensor, matrices: Tensor) -> Tensor:
    """Rows (M, other) times matrices (M, other, own), or one matrix for all rows: (M, own)."""
    if len(matrices) == 1:
        return factor @ matrices[0]
    if _by_numpy(matrices):
        return torch.from_numpy(np.matmul(factor[:, None].numpy(), matrices.numpy())[:, 0])
    return torch.bmm(factor[:, None], matrices)[:, 0]


class Mass:
    """Mass of M networks as a function of the log scales of their gauges."""

    def __init__(self, gauges: tuple[Gauge, ...], parts: Iterable[Part], rest: Tensor) -> None:
        """`rest` (M,) is the mass of all weights that no gauge moves."""
        self.gauges, self.parts, self.rest = gauges, tuple(parts), rest

    @property
    def members(self) -> int:
        """Number of networks."""
        return len(self.rest)

    @cached_property
    def touching(self) -> list[list[tuple[int, int, int, int]]]:
        """For every gauge: (part, side, power, in how many sides of the part the gauge acts)."""
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in self.gauges]
        for place, part in enumerate(self.parts):
            held = [gauge for side in part.sides for gauge, _ in side.powers]
            for number, side in enumerate(part.sides):
                for gauge, power in side.powers:
                    found[gauge].append((place, number, power, held.count(gauge)))
        return found

    @cached_property
    def _others(self) -> list[list[list[int]]]:
        """For every part and side, the gauges that act on its other sides."""
        return [
            [
                [g for k, side in enumerate(part.sides) if k != number for g, _ in side.powers]
                for number, _ in enumerate(part.sides)
            ]
            for part in self.parts
        ]

    @cached_property
    def exponents(self) -> list[Tensor]:
        """For every part the powers of all gauges on its sides: (sides, gauges)."""
        found = []
        for part in self.parts:
            table = self.rest.new_zeros(len(part.sides), len(self.gauges))
            for number, side in enumerate(part.sides):
                for gauge, power in side.powers:
                    table[number, gauge] = power
            found.append(table)
        return found

    def side(self, gauge: int) -> int:
        """1 or -1 where all powers of a gauge have this sign: the mass then has no minimum along it. Else 0."""
        signs = {1 if power > 0 else -1 for _, _, power, _ in self.touching[gauge]}
        return next(iter(signs)) if len(signs) == 1 else 0

    @cached_property
    def here(self) -> Point:
        """The networks as they are: all logs zero. Move only a copy: what is summed here is summed once for all."""
        return Point([self.rest.new_zeros(self.members, gauge.size) for gauge in self.gauges])

    def along(self, place: int, number: int, point: Point) -> Tensor:
        """The mass of a part that hangs on each coordinate of a side: (M, coordinates)."""
        part, stamp = self.parts[place], [point.stamps[gauge] for gauge in self._others[place][number]]
        known = point.sums.get((place, number))
        if known is None or known[0] != stamp:
            known = (stamp, part.onto(number, [point.factor(side.powers) for side in part.sides]))
            point.sums[place, number] = known
        return known[1] * point.factor(part.sides[number].powers)

    def whole(self, place: int, point: Point) -> Tensor:
        """The mass of a part (M,), by a side whose sums are still known if there is one."""
        for number, others in enumerate(self._others[place]):
            known = point.sums.get((place, number))
            if known is not None and known[0] == [point.stamps[gauge] for gauge in others]:
                return self.along(place, number, point).sum(1)
        return self.along(place, 0, point).sum(1)

    def total(self, point: Point) -> Tensor:
        """The mass (M,) at a point."""
        return sum((self.whole(place, point) for place, _ in enumerate(self.parts)), start=self.rest)

    def pulls(self, gauge: int, point: Point) -> dict[int, Tensor]:
        """Power -> mass (M, coordinates) that a gauge moves with this power.

        A part in which the gauge acts on k sides couples its coordinates. There

            exp(2 (p d_i + q d_j)) <= (exp(4 p d_i) + exp(4 q d_j)) / 2   (and so for any k)

        decouples them: mass / k with power k * p is an upper bound that touches at d = 0, with the same slope.
        """
        found: dict[int, Tensor] = {}
        for place, number, power, times in self.touching[gauge]:
            mass = self.along(place, number, point)
            if times > 1:
                mass = mass / times
            known = found.get(power * times)
            found[power * times] = mass if known is None else known + mass
        return found

    def members_of(self, rows: Tensor) -> Mass:
        """The mass of some members only."""
        parts = [replace(part, values=part.values[rows]) for part in self.parts]
        return Mass(self.gauges, parts, self.rest[rows])


class Point:
    """Log scales (M, coordinates) of every gauge, and what follows from them. For one `Mass` only."""

    def __init__(self, logs: list[Tensor]) -> None:
        """Begin at these logs; they are not changed."""
        self.logs = list(logs)
        self.stamps = [0] * len(logs)  # how often each gauge was moved
        self.sums: dict[tuple[int, int], tuple[list[int], Tensor]] = {}  # (part, side) -> stamps of the others, sums
        self._factors: list[dict[Powers, Tensor]] = [{} for _ in logs]  # under every gauge that is in the powers

    def copy(self) -> Point:
        """The same point, to be moved on its own."""
        made = Point(self.logs)
        made.stamps, made.sums = list(self.stamps), dict(self.sums)
        return made

    def factor(self, powers: Powers) -> Tensor:
        """What the gauges of one side do to squares, exp(2 * sum of power * s): (M, coordinates)."""
        known = self._factors[powers[0][0]].get(powers)
        if known is None:
            first, *more = [2 * power * self.logs[gauge] for gauge, power in powers]
            known = sum(more, start=first).exp()
            for gauge, _ in powers:
                self._factors[gauge][powers] = known
        return known

    def move(self, gauge: int, step: Tensor) -> None:
        """Add a step (M, coordinates) to one gauge."""
        self.logs[gauge] = self.logs[gauge] + step
        self.stamps[gauge] += 1
        for powers in self._factors[gauge]:
            for other, _ in powers:
                if other != gauge:
                    self._factors[other].pop(powers, None)
        self._factors[gauge] = {}
