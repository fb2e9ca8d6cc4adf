"""The member of least mass on an orbit of positive scales ("min-mass"), for one network or a whole population.

A *gauge* is one scale generator of one space; it has a log factor s for every coordinate (copy * size + unit). Along
the orbit every weight w moves to w * exp(sum of power * s), so that

    mass(s) = sum over weights of w^2 exp(2 * sum of power * s),

a positive sum of exponentials of linear forms: convex in s. Only sums of w^2 over entries that move alike are needed;
`MassLayout.reduce` makes them once, in float64, and all that follows works on them. Sweeps of exact coordinate steps
find the minimum (`minimise`), where every unit's incoming mass equals its outgoing mass. A tensor that a state dict
lists under two names counts once for each.

Two kinds of direction have no minimum. Weights before a batch norm (or the direction of a weight norm) may shrink for
ever: they are brought to unit norm (`Lift`). Dead units are left alone and reported (`unbounded_directions`).

>>> from torch import nn
>>> import onebasin as ob
>>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
>>> balanced = balance(model.state_dict(), ob.discover(model, torch.zeros(1, 3)))
>>> bool(balanced.mass_after < balanced.mass_before), balanced.dead
(True, ())
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.errors import InputError, SpecError
from onebasin.parallel import Executor, Progress, executor_for, one_thread, progress_of
from onebasin.population import Population, block_members, chain_series, map_blocks
from onebasin.reporting import (
    Axis,
    Column,
    Record,
    Result,
    Series,
    Table,
    cells_of,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State, is_statistic
from onebasin.symmetry import Element, ExpandedElement, Symmetry, apply_block

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
        if self._arrays is not None:
            return torch.from_numpy(np.matmul(factors[1 - number][:, None].numpy(), self._arrays[number])[:, 0])
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
    def _arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """The same for numpy, where it is quicker."""
        if self._matrices is None or len(self.values) == 1 or not _by_numpy(self.values):
            return None
        return self._matrices[0].numpy(), self._matrices[1].numpy()

    @cached_property
    def _ways(self) -> dict[Side, tuple[list[int], tuple[int, ...], list[int]]]:
        """For every side: dims that are summed, the order of those that are kept, and the shape of a spread table."""
        sizes, ways = self.values.shape[1:], {}
        for side in self.sides:
            others = [1 + dim for dim in range(len(sizes)) if dim not in side.dims]
            kept = sorted(side.dims)
            order = (0, *[1 + kept.index(dim) for dim in side.dims])
            ways[side] = (others, order, [size if dim in side.dims else 1 for dim, size in enumerate(sizes)])
        return ways


def _by_numpy(matrices: Tensor) -> bool:
    """Whether numpy should multiply these: its product of many small matrices is several times as fast as torch's."""
    return matrices.device.type == "cpu" and matrices[0].numel() < _MANY


def _times(factor: Tensor, matrices: Tensor) -> Tensor:
    """Rows (M, other) times matrices (M, other, own), or one matrix for all rows: (M, own)."""
    if len(matrices) == 1:
        return factor @ matrices[0]
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
        touching: list[list[tuple[int, int, int, int]]] = [[] for _ in self.gauges]
        for place, part in enumerate(self.parts):
            acting = [gauge for side in part.sides for gauge, _ in side.powers]
            for number, side in enumerate(part.sides):
                for gauge, power in side.powers:
                    touching[gauge].append((place, number, power, acting.count(gauge)))
        return touching

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
        tables = []
        for part in self.parts:
            table = self.rest.new_zeros(len(part.sides), len(self.gauges))
            for number, side in enumerate(part.sides):
                for gauge, power in side.powers:
                    table[number, gauge] = power
            tables.append(table)
        return tables

    def one_sign(self, gauge: int) -> int:
        """1 or -1 where all powers of a gauge have this sign: the mass then has no minimum along it. Else 0."""
        signs = {1 if power > 0 else -1 for _, _, power, _ in self.touching[gauge]}
        return next(iter(signs)) if len(signs) == 1 else 0

    @cached_property
    def here(self) -> LogScales:
        """The networks as they are: all logs zero. Move only a copy: what is summed here is summed once for all."""
        return LogScales([self.rest.new_zeros(self.members, gauge.size) for gauge in self.gauges])

    def along(self, place: int, number: int, point: LogScales) -> Tensor:
        """The mass of a part at each coordinate of a side: (M, coordinates)."""
        part, stamp = self.parts[place], [point.stamps[gauge] for gauge in self._others[place][number]]
        cached = point.sums.get((place, number))
        if cached is None or cached[0] != stamp:
            cached = (stamp, part.onto(number, [point.factor(side.powers) for side in part.sides]))
            point.sums[place, number] = cached
        return cached[1] * point.factor(part.sides[number].powers)

    def whole(self, place: int, point: LogScales) -> Tensor:
        """The mass of a part (M,), by a side whose sums are still known if there is one."""
        for number, others in enumerate(self._others[place]):
            cached = point.sums.get((place, number))
            if cached is not None and cached[0] == [point.stamps[gauge] for gauge in others]:
                return self.along(place, number, point).sum(1)
        return self.along(place, 0, point).sum(1)

    def total(self, point: LogScales) -> Tensor:
        """The mass (M,) at a point."""
        return sum((self.whole(place, point) for place, _ in enumerate(self.parts)), start=self.rest)

    def by_power(self, gauge: int, point: LogScales) -> dict[int, Tensor]:
        """Power -> mass (M, coordinates) that a gauge moves with this power.

        A part in which the gauge acts on k sides couples its coordinates. There

            exp(2 (p d_i + q d_j)) <= (exp(4 p d_i) + exp(4 q d_j)) / 2   (and so for any k)

        decouples them: mass / k with power k * p is an upper bound that touches at d = 0, with the same slope.
        """
        by_power: dict[int, Tensor] = {}
        for place, number, power, times in self.touching[gauge]:
            mass = self.along(place, number, point)
            if times > 1:
                mass = mass / times
            total = by_power.get(power * times)
            by_power[power * times] = mass if total is None else total + mass
        return by_power

    def members_of(self, rows: Tensor) -> Mass:
        """The mass of some members only."""
        parts = [replace(part, values=part.values[rows]) for part in self.parts]
        return Mass(self.gauges, parts, self.rest[rows])


class LogScales:
    """Log scales (M, coordinates) of every gauge, and what follows from them. For one `Mass` only."""

    def __init__(self, logs: list[Tensor]) -> None:
        """Begin at these logs; they are not changed."""
        self.logs = list(logs)
        self.stamps = [0] * len(logs)  # how often each gauge was moved
        self.sums: dict[tuple[int, int], tuple[list[int], Tensor]] = {}  # (part, side) -> stamps of the others, sums
        self._factors: list[dict[Powers, Tensor]] = [{} for _ in logs]  # under every gauge that is in the powers

    def copy(self) -> LogScales:
        """The same point, to be moved on its own."""
        copy = LogScales(self.logs)
        copy.stamps, copy.sums = list(self.stamps), dict(self.sums)
        return copy

    def factor(self, powers: Powers) -> Tensor:
        """What the gauges of one side do to squares, exp(2 * sum of power * s): (M, coordinates)."""
        factor = self._factors[powers[0][0]].get(powers)
        if factor is None:
            first, *more = [2 * power * self.logs[gauge] for gauge, power in powers]
            factor = sum(more, start=first).exp()
            for gauge, _ in powers:
                self._factors[gauge][powers] = factor
        return factor

    def move(self, gauge: int, step: Tensor) -> None:
        """Add a step (M, coordinates) to one gauge."""
        self.logs[gauge] = self.logs[gauge] + step
        self.stamps[gauge] += 1
        for powers in self._factors[gauge]:
            for other, _ in powers:
                if other != gauge:
                    self._factors[other].pop(powers, None)
        self._factors[gauge] = {}


@dataclass(frozen=True, eq=False)
class MassLayout:
    """The gauges of a symmetry, and which of them act on each side of each block; independent of weights."""

    block_layout: BlockLayout
    gauges: tuple[Gauge, ...]
    sides: tuple[tuple[Side, ...], ...]  # for every block

    @classmethod
    def of(cls, layout: BlockLayout) -> MassLayout:
        """Find the gauges: generators of the kinds "scale" and "norm-scale"; once for each layout."""
        if cls not in layout.derived:
            layout.derived[cls] = cls._of(layout)
        found: MassLayout = layout.derived[cls]
        return found

    @classmethod
    def _of(cls, layout: BlockLayout) -> MassLayout:
        numbers: dict[tuple[int, int], int] = {}
        for number, space in enumerate(layout.spaces):
            for generator, kind in enumerate(space.generators):
                if kind.endswith("scale"):
                    numbers[number, generator] = len(numbers)
        sides = tuple(_sides(block, numbers) for block in layout.blocks)
        gauges = []
        for number, generator in numbers:
            space = layout.spaces[number]
            kind, size = space.generators[generator], layout.coordinates(number)
            gauges.append(Gauge(number, generator, kind, size, space.name))
        return cls(layout, tuple(gauges), sides)

    def reduce(self, stacked: Mapping[str, Tensor], *, biases: bool = True, start: int = 0) -> Mass:
        """Sum squares of stacked weights (M, *shape), statistics left out, biases too if asked.

        `start` is the number of the first member, for messages.
        """
        single: dict[tuple[Powers, bool], Part] = {}
        coupled: list[Part] = []
        rest = _uncovered(self.block_layout, stacked, biases)
        for block, sides in zip(self.block_layout.blocks, self.sides, strict=True):
            if not _counts(block.tensor, biases):
                continue
            values = _squares(block.take(stacked[block.tensor]), block, sides)
            if not sides:
                rest = rest + values
                continue
            dims = sorted({dim for side in sides for dim in side.dims})  # those that are left in values
            numbered = tuple(replace(side, dims=tuple(map(dims.index, side.dims))) for side in sides)
            for part in _decoupled(Part(values, numbered, is_bias(block.tensor))):
                if len(part.sides) > 1:
                    coupled.append(part)
                    continue
                flat = _flat(part)  # parts that move alike are one part
                key = (flat.sides[0].powers, flat.bias)
                same = single.get(key)
                single[key] = flat if same is None else replace(same, values=same.values + flat.values)
        rest = rest + sum(part.values.sum(1) for (powers, _), part in single.items() if not powers)
        mass = Mass(self.gauges, [*[part for (powers, _), part in single.items() if powers], *coupled], rest)
        if not bool(torch.isfinite(mass.total(mass.here)).all()):
            check_members_finite(stacked, start)
            raise SpecError(
                "the squares of some weights overflow: networks with weights beyond 1e150 are not supported"
            )
        return mass


def is_bias(name: str) -> bool:
    """Whether a tensor is a bias by its name: `bias`, `in_proj_bias`, `bias_hh_l0`, or the `beta` of a norm."""
    last = name.rsplit(".", 1)[-1]
    return "bias" in last or last == "beta"


def _counts(name: str, biases: bool) -> bool:
    return not is_statistic(name) and (biases or not is_bias(name))


def _sides(block: TensorBlock, numbers: Mapping[tuple[int, int], int]) -> tuple[Side, ...]:
    axes: dict[tuple[int, tuple[int, ...]], BlockAxis] = {(axis.space, axis.dims): axis for axis in block.axes}
    sides = []
    for (space, dims), axis in axes.items():
        powers = {numbers[space, g]: power for g, power in enumerate(axis.powers) if power and (space, g) in numbers}
        if powers:
            sides.append(Side(space, dims, tuple(sorted(powers.items()))))
    return tuple(sides)


def _squares(part: Tensor, block: TensorBlock, sides: tuple[Side, ...]) -> Tensor:
    """Sum squares (M, *dims, rest) over the rest and over all dims that are in no side."""
    kept = {dim for side in sides for dim in side.dims}
    summed = [1 + dim for dim in range(len(block.dims)) if dim not in kept]
    if part.shape[-1] == 1:
        squares = part[..., 0].square() if part.dtype == torch.float64 else part[..., 0].double().square_()
    else:  # several times faster than a float64 copy, and as exact
        squares = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).square_()
    return squares.sum(summed) if summed else squares


def _flat(part: Part) -> Part:
    """A part with one side as a table (M, coordinates)."""
    side = part.sides[0]
    return replace(part, values=part.gather(side, part.values), sides=(replace(side, dims=(0,)),))


def _decoupled(part: Part) -> list[Part]:
    """Split entries that join a unit to itself off a part that a space moves twice: there its powers add."""
    if len(part.sides) != 2 or part.sides[0].space != part.sides[1].space:
        return [part]
    first, second = part.sides
    sizes = part.values.shape[1:]
    count = math.prod(sizes[dim] for dim in first.dims)
    coordinates = torch.arange(count, device=part.values.device)[None]
    same = part.spread(first, coordinates) == part.spread(second, coordinates)
    powers = Counter(dict(first.powers))
    powers.update(dict(second.powers))
    powers_on_diagonal = tuple(sorted((gauge, power) for gauge, power in powers.items() if power))
    diagonal = Part(part.gather(first, part.values * same), (Side(first.space, (0,), powers_on_diagonal),), part.bias)
    return [diagonal, replace(part, values=part.values * ~same)]


def _uncovered(layout: BlockLayout, stacked: Mapping[str, Tensor], biases: bool) -> Tensor:
    """Mass (M,) of what is in no block: tensors without legs, constants left out, and parts that no leg covers."""
    covered: Counter[str] = Counter()
    blocks: dict[str, list[TensorBlock]] = {}
    for block in layout.blocks:
        covered[block.tensor] += math.prod(math.prod(split) for split in block.split)
        blocks.setdefault(block.tensor, []).append(block)
    first = next(iter(stacked.values()))
    total = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for name, tensor in stacked.items():
        counted = tensor.is_floating_point() and _counts(name, biases) and name not in layout.symmetry.frozen
        if not counted or covered[name] == tensor[0].numel():
            continue
        total = total + _all(tensor)
        for block in blocks.get(name, []):
            total = total - _all(block.take(tensor))
    return total


def _all(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1, dtype=torch.float64)
    return norms.square()


def check_members_finite(stacked: Mapping[str, Tensor], start: int = 0) -> None:
    """Refuse networks with NaN or infinity; `start` is the number of the first."""
    for name, tensor in stacked.items():
        wrong = ~torch.isfinite(tensor.flatten(1)).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
        if bool(wrong.any()):
            raise SpecError(
                f"member {start + int(wrong.nonzero()[0])} holds NaN or infinity in {name}: leave this network out or "
                "train it again with a smaller step"
            )


@dataclass(frozen=True, eq=False)
class Lift:
    """What holds a gauge along directions without a minimum.

    Instead of the mass alone,

        mass(s) - 2 * sum of s over the lifted coordinates

    is minimised, which is convex too, has one minimum, and there every lifted unit's weights have Euclidean norm 1. So
    the result does not depend on where along the orbit a network starts, which "divide by the norm first, then balance"
    would not achieve: balancing what a row reads changes its norm again. Biases that only lifted gauges move are left
    out.

    A batch-norm variance moves as v + eps and must stay positive: shrinking stops where v would fall below eps. Units
    without weights get v + eps = 1.
    """

    sign: int  # 1 or -1: the whole gauge is lifted so, 0: it is not
    values: Tensor  # (M, n) lift of each coordinate: `sign`, or what a dead unit was given
    floor: Tensor | None = None  # (M, n): s >= floor keeps v >= eps
    unit_variance: Tensor | None = None  # (M, n): s = unit_variance makes v + eps = 1

    @cached_property
    def pulls(self) -> dict[int, Tensor]:
        """Sign of a direction -> what the lift alone weighs there, never quite zero."""
        return {sign: (-sign * self.values).clamp_min(0).clamp_min(_TINY) for sign in (1, -1)}

    @cached_property
    def lifted(self) -> bool:
        """Whether any coordinate is lifted."""
        return bool(self.values.any())

    def members_of(self, rows: Tensor) -> Lift:
        """The lifts of some members only."""
        pick = [None if table is None else table[rows] for table in (self.floor, self.unit_variance)]
        return Lift(self.sign, self.values[rows], *pick)

    def dropped(self) -> Lift:
        """The same gauge without lift or floor: it will be left alone."""
        return Lift(self.sign, torch.zeros_like(self.values))


def lifts_of(layout: MassLayout, mass: Mass, stacked: Mapping[str, Tensor]) -> list[Lift]:
    """Lifts of each gauge where the mass has no minimum, and floors where there are variances."""
    floors: dict[int, Tensor] = {}
    ones: dict[int, Tensor] = {}
    for number, power, shift, variance in _variances(layout, stacked):
        floor = (2 * shift / variance).log() / power
        one = -variance.log() / power
        floors[number] = torch.maximum(floors[number], floor) if number in floors else floor
        ones[number] = torch.maximum(ones[number], one) if number in ones else one
    lifts = []
    for number, gauge in enumerate(layout.gauges):
        sign = mass.one_sign(number)
        values = torch.full((mass.members, gauge.size), float(sign), dtype=torch.float64, device=mass.rest.device)
        lifts.append(Lift(sign, values, floors.get(number), ones.get(number) if sign else None))
    return lifts


def massless(mass: Mass, gauge: int) -> Tensor:
    """Coordinates (M, n) on which no mass hangs."""
    total = mass.rest.new_zeros(mass.members, mass.gauges[gauge].size)
    for table in mass.by_power(gauge, mass.here).values():
        total = total + table
    return total == 0


def _variances(layout: MassLayout, stacked: Mapping[str, Tensor]) -> list[tuple[int, int, float, Tensor]]:
    """(gauge, power, eps, v + eps as (M, n)) for every gauge that moves a variance."""
    variances = []
    for block, sides in zip(layout.block_layout.blocks, layout.sides, strict=True):
        shift = next((axis.shift for axis in block.axes if axis.shift), 0.0)
        if not shift or not is_statistic(block.tensor):
            continue
        values = block.take(stacked[block.tensor]).double() + shift
        for side in sides:
            axis = next(axis for axis in block.axes if (axis.space, axis.dims) == (side.space, side.dims))
            least = block.reduce(axis, values, torch.amin)
            variances += [(gauge, power, shift, least) for gauge, power in side.powers if power > 0]
    return variances


def without_lifted_biases(mass: Mass, lifts: list[Lift]) -> Mass:
    """Leave out the biases that only lifted gauges move: a norm takes them away, so they should not set its scale."""
    parts = [
        part
        for part in mass.parts
        if not (part.bias and all(lifts[gauge].sign for side in part.sides for gauge, _ in side.powers))
    ]
    return mass if len(parts) == len(mass.parts) else Mass(mass.gauges, parts, mass.rest)


def imbalance(population: Population, symmetry: Symmetry, *, biases: bool = True) -> Tensor:
    """In - out of every unit, float64 (members, coordinates): half the slope of the mass in the unit's log scale.

    Gradient flow keeps it as it is, whatever the loss; weight decay w at rate r shrinks it by exp(-2 r w) per step.
    It is zero where `balance` ends. Units are listed space by space, as the symmetry has them.

    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    >>> found = imbalance(Population.from_models([model]), ob.discover(model, torch.zeros(1, 3)))
    >>> expected = model[0].weight.square().sum(1) - model[2].weight.square().sum(0)
    >>> torch.allclose(found[0], expected.double(), atol=1e-6)
    True

    Args:
        population: the networks, read block by block.
        symmetry: of their model; its generators of kind "scale" are the coordinates.
        biases: count biases as mass.
    """
    layout = MassLayout.of(BlockLayout.of(symmetry))
    free = [number for number, gauge in enumerate(layout.gauges) if gauge.kind == "scale"]
    blocks = []
    for start, stacked in population.blocks():
        mass = layout.reduce(stacked, biases=biases, start=start)
        blocks.append(slope(mass, free, mass.here).cpu())
    return torch.cat(blocks)


def slope(mass: Mass, gauges: list[int], point: LogScales) -> Tensor:
    """Half the derivative of the mass: the sum of power * mass on each coordinate (rows, coordinates)."""
    tables = []
    for gauge in gauges:
        total = torch.zeros_like(point.logs[gauge])
        for power, table in mass.by_power(gauge, point).items():
            total = total + power * table
        tables.append(total)
    return torch.cat(tables, 1)


@dataclass(frozen=True, eq=False)
class Unbounded:
    """Coordinates (M, n) of a gauge without a minimum.

    Attributes:
        one_sided: all masses of positive, or all of negative power, are zero.
        isolated: joined to the rest of the network through dead weights alone.
        direction: 1 where the mass falls for s to minus infinity, -1 for plus infinity, 0 where the coordinate has a
            minimum or no mass depends on it.
    """

    one_sided: Tensor
    isolated: Tensor
    direction: Tensor

    @property
    def all(self) -> Tensor:
        """Every coordinate without a minimum."""
        return self.one_sided | self.isolated


def unbounded_directions(mass: Mass, pinned: list[bool]) -> list[Unbounded]:
    """The coordinates of every gauge along which the mass has no minimum; `pinned` gauges do not count.

    A unit without writers, or without readers, could be scaled for ever and the mass would keep falling. So could a
    ring of units that only write to each other. A minimum exists when no direction d lets every live term fall, that is
    when

        sum of power * d <= 0 for all terms of positive mass   forces   d = 0.

    A term that grows with d_i, and whose other coordinates cannot fall, shows d_i <= 0. `Bounds` collects such bounds
    until a round adds none; a coordinate that is not bounded on both sides has no minimum. For networks whose terms
    have one writer and one reader this is the same as lying on a live path from a pinned end to a pinned end.
    """
    directions = [
        _bounded(mass, number) if pinned[number] or not mass.touching[number] else _one_sided(mass, number)
        for number, _ in enumerate(mass.gauges)
    ]
    if all(float(part.values.min()) > 0 for part in mass.parts):
        return directions
    fixed = [pinned[number] or not mass.touching[number] for number, _ in enumerate(mass.gauges)]
    bounds = Bounds(mass, [item.one_sided | fix for item, fix in zip(directions, fixed, strict=True)])
    while bounds.learn():
        pass
    return [
        Unbounded(item.one_sided, ~(above & below), item.direction + above.double() - below.double())
        for item, above, below in zip(directions, bounds.above, bounds.below, strict=True)
    ]


def _bounded(mass: Mass, gauge: int) -> Unbounded:
    zero = mass.rest.new_zeros(mass.members, mass.gauges[gauge].size)
    none = torch.zeros_like(zero, dtype=torch.bool)
    return Unbounded(none, none, zero)


def _one_sided(mass: Mass, gauge: int) -> Unbounded:
    sums = {sign: _bounded(mass, gauge).direction for sign in (1, -1)}
    for power, table in mass.by_power(gauge, mass.here).items():
        sums[1 if power > 0 else -1] += table
    up, down = sums[1] > 0, sums[-1] > 0
    one_sided = ~(up & down)
    return Unbounded(one_sided, torch.zeros_like(one_sided), up.double() - down.double())


class Bounds:
    """Bounds on directions of endless fall: where above[g] is set d <= 0, where below[g] is set d >= 0."""

    def __init__(self, mass: Mass, pinned: list[Tensor]) -> None:
        """Coordinates that are pinned have d = 0."""
        self.mass = mass
        self.above, self.below = [pin.clone() for pin in pinned], [pin.clone() for pin in pinned]

    def learn(self) -> bool:
        """One round over all terms; whether it added a bound."""
        before = self._count()
        for part in self.mass.parts:
            for number, side in enumerate(part.sides):
                for gauge, power in side.powers:
                    rest = tuple((other, its) for other, its in side.powers if other != gauge)
                    bounded = self._reach(part, number) & self._cannot_fall(rest, gauge)
                    bounds = self.above if power > 0 else self.below
                    bounds[gauge] = bounds[gauge] | bounded
        return self._count() > before

    def _reach(self, part: Part, number: int) -> Tensor:
        """Coordinates of a side that have a live term whose other sides cannot fall."""
        live = part.values > 0
        for other, side in enumerate(part.sides):
            if other != number:
                live = live & part.spread(side, self._cannot_fall(side.powers, side.powers[0][0]))
        return part.gather(part.sides[number], live.double()) > 0

    def _cannot_fall(self, powers: Powers, like: int) -> Tensor:
        bounded = torch.ones_like(self.above[like])
        for gauge, power in powers:
            bounded = bounded & (self.below[gauge] if power > 0 else self.above[gauge])
        return bounded

    def _count(self) -> int:
        return sum(int(known.sum()) for known in (*self.above, *self.below))


_COMMON_NEWTON = 2  # steps per sweep
_SMALL = 1e-3  # after a step as short as this, the next would be a millionth
_HALVINGS = 4
_REACH = 4.0  # the longest step of a log scale: where the small problem has no minimum, it should not run away


def gauges_meet(mass: Mass) -> bool:
    """Whether any part is moved by two gauges; where none is, one sweep is exact."""
    return any(sum(len(side.powers) for side in part.sides) > 1 for part in mass.parts)


def common_steps(mass: Mass, lifts: list[Lift], frozen: list[Tensor], point: LogScales) -> None:
    """Move the point by the best common step of every gauge.

    Sweeps alone creep through deep networks: what one layer gains is handed to the next, hundreds of times. The
    creeping part is nearly constant within a gauge, so it is removed by a small problem of its own, with one number c
    per gauge:

        minimise over c   sum over parts of m_k exp(2 sum of power * c) - 2 sum of lift * c,

    m_k being the whole mass of part k and each lift the sum over a gauge's units. This is Newton's method in as many
    dimensions as there are gauges. Coordinates that may not move are left where they are: a part falls into terms by
    which of its sides may move.
    """
    movable = _movable(mass, lifts, frozen, point)
    terms, exponents = _terms(mass, point, movable)
    gauge_lifts = torch.zeros(mass.members, len(lifts), dtype=torch.float64, device=terms.device)
    for number, (gauge, lift) in enumerate(zip(mass.gauges, lifts, strict=True)):
        if lift.lifted:
            free = movable.get(gauge.space)
            gauge_lifts[:, number] = (lift.values if free is None else lift.values * free).sum(1)
    common = torch.zeros_like(gauge_lifts)
    for _ in range(_COMMON_NEWTON):
        step = _newton(terms * torch.exp(2 * common @ exponents.T), exponents, gauge_lifts)
        common = common + step
        if float(step.abs().max()) < _SMALL:
            break
    reach = common.abs().amax(1, keepdim=True)
    common = common * (_REACH / reach.clamp_min(_REACH))
    common = common * _above_floors(mass, lifts, movable, point, common)
    for number, gauge in enumerate(mass.gauges):
        step = common[:, number : number + 1]
        point.move(number, step * movable[gauge.space] if gauge.space in movable else step)


def _movable(mass: Mass, lifts: list[Lift], frozen: list[Tensor], point: LogScales) -> dict[int, Tensor]:
    """Space -> coordinates (M, n) that no gauge of the space holds where they are; left out where all may move."""
    movable: dict[int, Tensor] = {}
    for gauge, lift, fixed, logs in zip(mass.gauges, lifts, frozen, point.logs, strict=True):
        stays = fixed if lift.floor is None else fixed | (logs <= lift.floor)
        if bool(stays.any()):
            movable[gauge.space] = ~stays & movable.get(gauge.space, ~stays)
    return movable


def _terms(mass: Mass, point: LogScales, movable: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Masses (M, terms) that move alike, and their exponents (terms, gauges)."""
    masses, rows = [], []
    for place, (part, powers) in enumerate(zip(mass.parts, mass.exponents, strict=True)):
        mixed_sides = [side.space in movable for side in part.sides]
        if not any(mixed_sides):
            masses.append(mass.whole(place, point))
            rows.append(powers.sum(0))
            continue
        factors = [point.factor(side.powers) for side in part.sides]
        for chosen in itertools.product(*[(True, False) if mixed else (True,) for mixed in mixed_sides]):
            masked = [
                factor * (movable[side.space] == moves) if mixed else factor
                for side, factor, mixed, moves in zip(part.sides, factors, mixed_sides, chosen, strict=True)
            ]
            masses.append((part.onto(0, masked) * masked[0]).sum(1))
            rows.append(powers[list(chosen)].sum(0))
    return torch.stack(masses, 1), torch.stack(rows)


def _newton(terms: Tensor, exponents: Tensor, lifts: Tensor) -> Tensor:
    """A Newton step (M, gauges), halved while it would pass the minimum along its line."""
    slope = terms @ exponents - lifts
    bend = 2 * (exponents.T * terms[:, None]) @ exponents
    diagonal = bend.diagonal(dim1=1, dim2=2)
    bend = bend + torch.diag_embed(1e-12 * diagonal + (diagonal <= 0))
    step: Tensor = -torch.linalg.solve(bend, slope)
    fall = (slope * step).sum(1)
    size = torch.ones_like(fall)
    for _ in range(_HALVINGS):
        moved = terms * torch.exp(2 * (size[:, None] * step) @ exponents.T)
        rise = ((moved @ exponents - lifts) * step).sum(1)
        past = rise > -0.1 * fall
        if not bool(past.any()):
            break
        size = torch.where(past, size / 2, size)
    return step * size[:, None]


def _above_floors(
    mass: Mass, lifts: list[Lift], movable: dict[int, Tensor], point: LogScales, common: Tensor
) -> Tensor:
    """The part of the step (M, 1), from 0 to 1, after which a first variance is at its floor."""
    size = torch.ones_like(common[:, :1])
    for number, lift in enumerate(lifts):
        if lift.floor is not None:
            step, room = common[:, number : number + 1], point.logs[number] - lift.floor
            if mass.gauges[number].space in movable:
                room = room.masked_fill(~movable[mass.gauges[number].space], torch.inf)
            way = room.amin(1, keepdim=True) / (-step).clamp_min(1e-300)
            size = torch.minimum(size, torch.where(step < 0, way, 1.0))
    return size


_TINY = torch.finfo(torch.float64).tiny  # keeps logarithms finite where a frozen coordinate has no mass
_NEWTON = 6  # steps where powers differ; the sweeps around them do the rest
_FAR = 150.0  # a log scale beyond this diverges: exp(2 * 2 * 150) is near the end of float64


@dataclass(frozen=True, eq=False)
class Minimum:
    """Log scales (M, n) of every gauge; sweeps and the imbalance left (M,); coordinates (M, n) without a minimum."""

    logs: list[Tensor]
    sweeps: Tensor
    imbalance: Tensor
    diverged: list[Tensor]


def minimise(mass: Mass, lifts: list[Lift], frozen: list[Tensor], *, tolerance: float, sweeps: int) -> Minimum:
    """Sweep until every free coordinate has |in - out| <= tolerance * (in + out), or `sweeps` are done.

    This is coordinate descent on the mass: all coordinates of one gauge at once, exactly, gauge after gauge. Two
    coordinates of one gauge do not meet in a term (where they do, `Mass.by_power` decouples them by an upper bound), so
    each is a problem of its own: with M_p the mass that it moves with power p, and b its lift,

        minimise over d:   sum of M_p exp(2 p d) - 2 b d,
        so that            sum over p > 0 of p M_p exp(2 p d) = sum over p < 0 of |p| M_p exp(2 p d) + b.

    With powers 1 and -1 alone, exp(4 d) = M_-1 / M_1: a unit's incoming mass becomes its outgoing mass. Every step
    lowers the mass, and the sweeps converge to its only minimum. Coordinates that are `frozen` (M, n) stay at 1, or at
    v + eps = 1 where a lift knows a variance.
    """
    descent = Descent(mass, lifts, frozen)
    rows = torch.arange(mass.members, device=mass.rest.device)
    logs = [table.clone() for table in descent.point.logs]
    diverged = [torch.zeros_like(table) for table in frozen]
    taken = torch.zeros_like(rows)
    remaining = torch.zeros_like(mass.rest)
    coupled = gauges_meet(mass)
    for sweep in range(1, sweeps + 1):
        if sweep > 1 and coupled:
            common_steps(descent.mass, descent.lifts, descent.frozen, descent.point)
        worst = descent.sweep()
        taken[rows], remaining[rows] = sweep, worst
        unbalanced = worst > tolerance
        count = int(unbalanced.sum())
        if 2 * count > len(rows) and sweep < sweeps:
            continue
        for gauge, table in enumerate(descent.point.logs):
            logs[gauge][rows], diverged[gauge][rows] = table, descent.diverged[gauge]
        if not count:
            break
        descent, rows = descent.members_of(unbalanced), rows[unbalanced]  # go on with those that need it
    return Minimum(logs, taken, remaining, diverged)


class Descent:
    """Log scales on their way to the minimum."""

    def __init__(self, mass: Mass, lifts: list[Lift], frozen: list[Tensor]) -> None:
        self.mass, self.lifts, self.frozen = mass, lifts, list(frozen)
        self.any_frozen = [bool(fixed.any()) for fixed in frozen]
        self.diverged = [torch.zeros_like(fixed) for fixed in frozen]
        self.point = mass.here.copy()
        for gauge, lift in enumerate(lifts):
            if lift.unit_variance is not None and self.any_frozen[gauge]:
                self.point.move(gauge, frozen[gauge] * lift.unit_variance)

    def sweep(self) -> Tensor:
        """Move every gauge once; return the largest imbalance (M,) before any of the steps."""
        worst = []
        for gauge, (lift, fixed) in enumerate(zip(self.lifts, self.frozen, strict=True)):
            if not self.mass.touching[gauge]:
                continue
            step, off = best_step(self.mass.by_power(gauge, self.point), lift)
            if lift.floor is not None:
                low = lift.floor - self.point.logs[gauge]
                off = off.masked_fill((step <= low) & (low >= 0), 0.0)
                step = torch.maximum(step, low)
            if self.any_frozen[gauge]:
                step, off = step.masked_fill(fixed, 0.0), off.masked_fill(fixed, 0.0)
            self.point.move(gauge, step)
            worst.append(off.amax(1))
        self._stop_divergence()
        return torch.stack(worst).amax(0) if worst else torch.zeros_like(self.mass.rest)

    def _stop_divergence(self) -> None:
        """Bring back to 1 and freeze coordinates that diverge."""
        for gauge, logs in enumerate(self.point.logs):
            if not bool((logs.abs() > _FAR).any()):
                continue
            far = (logs.abs() > _FAR) & ~self.frozen[gauge]
            self.point.move(gauge, torch.where(far, -logs, 0.0))
            self.frozen[gauge] = self.frozen[gauge] | far
            self.diverged[gauge] = self.diverged[gauge] | far
            self.any_frozen[gauge] = True

    def members_of(self, rows: Tensor) -> Descent:
        """The descent of some members only."""
        descent = object.__new__(Descent)
        descent.mass = self.mass.members_of(rows)
        descent.lifts = [lift.members_of(rows) for lift in self.lifts]
        descent.frozen = [fixed[rows] for fixed in self.frozen]
        descent.any_frozen = [bool(fixed.any()) for fixed in descent.frozen]
        descent.diverged = [table[rows] for table in self.diverged]
        descent.point = LogScales([table[rows] for table in self.point.logs])
        return descent


def best_step(masses: dict[int, Tensor], lift: Lift) -> tuple[Tensor, Tensor]:
    """The minimiser d (M, n) of a coordinate, and the imbalance |in - out| / (in + out) before the step."""
    ends = {sign: [power for power in masses if power * sign > 0] for sign in (1, -1)}
    span = max(ends[1], default=0) - min(ends[-1], default=0)  # half the steepest slope of log(up / down)
    plain = len(masses) == (1 if lift.lifted else 2)  # then log(up / down) is a straight line
    up, down = (_weight(masses, ends[sign], lift, sign) for sign in (1, -1))
    off = (up - down).abs() / (up + down)
    step = (down / up).log() / (2 * span)
    for _ in range(0 if plain else _NEWTON):
        moved = {power: table * torch.exp(2 * power * step) for power, table in masses.items()}
        up, down = (_weight(moved, ends[sign], lift, sign) for sign in (1, -1))
        bend = sum((p * p * table / (up if p > 0 else down) for p, table in moved.items()), start=torch.zeros_like(up))
        # Newton on log(up / down), and never further than twice the way: its slope is within [0, 2 span].
        step = step + (down / up).log() / torch.clamp(2 * bend, min=span)
    return step, off


def _weight(masses: dict[int, Tensor], powers: list[int], lift: Lift, sign: int) -> Tensor:
    """Sum of |p| M_p over powers of one sign, with the lift of this side; never quite zero."""
    if not lift.lifted and len(powers) == 1:
        table = masses[powers[0]]
        return (table if abs(powers[0]) == 1 else abs(powers[0]) * table).clamp_min(_TINY)
    if lift.lifted and not powers:
        return lift.pulls[sign]
    total = torch.zeros_like(lift.values) if not lift.lifted else (-sign * lift.values).clamp_min(0)
    for power in powers:
        total = total + (masses[power] if abs(power) == 1 else abs(power) * masses[power])
    return total.clamp_min(_TINY)


_SHOWN = 5  # dead units in a printed report


@dataclass(frozen=True)
class DeadUnit:
    """A unit whose scale has no best value; it was left as it was."""

    member: int
    space: str
    unit: tuple[int, ...]  # indices of the parents, then of the unit
    reason: str

    def __str__(self) -> str:
        """One line."""
        place = str(self.unit[0]) if len(self.unit) == 1 else str(self.unit)
        return f"member {self.member}, {self.space}, unit {place}: {self.reason}"


@dataclass(frozen=True, eq=False, repr=False)
class Balanced(Result):
    """Networks at the point of least mass of their orbits.

    Attributes:
        element: the scales that were applied; a batch for a population.
        mass_before: sum of squared weights (members,), without running statistics, and without biases if so asked.
        mass_after: the same of the result.
        sweeps: sweeps that each member took (members,).
        imbalance: largest |in - out| / (in + out) over units that the last sweep met (members,).
        dead: units whose scale has no best value.
        fixed: one sentence for every direction without a minimum, and how it was held.
        layers: tensor -> its part of both masses, (members, 2): before and after.
        population: the result, of a population.
        state: the result, of one network.
    """

    element: Element
    mass_before: Tensor
    mass_after: Tensor
    sweeps: Tensor
    imbalance: Tensor
    dead: tuple[DeadUnit, ...]
    fixed: tuple[str, ...]
    layers: Mapping[str, Tensor] = field(default_factory=dict)
    population: Population | None = None
    state: State | None = None

    @property
    def excess(self) -> Tensor:
        """How much heavier than necessary the networks were, in percent (members,).

        Where a norm's direction was brought to unit length the masses before and after do not have the same gauge,
        and the excess may be negative; `balance(..., norms="keep")` compares like with like.
        """
        return torch.where(self.mass_before == self.mass_after, 0.0, 100 * (self.mass_before / self.mass_after - 1))

    def profile(self) -> str:
        """A short table of masses over members."""
        rows = [("mass before", self.mass_before), ("mass after", self.mass_after), ("excess in %", self.excess)]
        lines = [f"{'':12}{'least':>12}{'mean':>12}{'most':>12}"]
        for name, values in rows:
            lines.append(
                f"{name:12}" + "".join(f"{float(v):12.5g}" for v in (values.min(), values.mean(), values.max()))
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        """The profile, what was fixed, and the first dead units."""
        return "\n".join([self._head, self.profile(), *self._remarks])

    @property
    def _head(self) -> str:
        count = len(self.mass_before)
        head = f"{count} network{'s' if count != 1 else ''} balanced in at most {int(self.sweeps.max())} sweeps"
        return f"{head}, imbalance at most {float(self.imbalance.max()):.0e}"

    @property
    def _remarks(self) -> list[str]:
        lines = [*self.fixed, *(f"dead: {unit}" for unit in self.dead[:_SHOWN])]
        more = len(self.dead) - _SHOWN
        return [*lines, f"... and {more} more dead units"] if more > 0 else lines

    def record(self) -> Record:
        """Masses over members and by tensor, before and after."""
        mean = float(self.excess.mean())
        count = len(self.mass_before)
        text = (
            f"The networks were {mean:.2f} % heavier than their functions need, on average. {self._head}.",
            *self._remarks,
        )
        masses = tuple(
            cells_of(name, *map(float, (values.min(), values.mean(), values.max())))
            for name, values in (
                ("mass before", self.mass_before),
                ("mass after", self.mass_after),
                ("excess in %", self.excess),
            )
        )
        layers = [(name, *values.mean(0).tolist()) for name, values in self.layers.items()]
        rows = tuple(
            cells_of(name, before, after, after / before if before else None)
            for name, before, after in largest_first(layers, lambda layer: layer[1])
        )
        shown = largest_first(layers, lambda layer: layer[1], _BARS)[:_BARS]
        places = tuple(map(float, range(len(shown))))
        figures = [
            one_panel(
                "layers",
                "Which tensors carry the mass?",
                f"{text[0]} Sums of squares by tensor, averaged over networks."
                + (f" The {_BARS} heaviest of {len(layers)} tensors." if len(layers) > _BARS else ""),
                "bars",
                Axis("", names=tuple(name for name, _, _ in shown)),
                "sum of squared weights",
                series=(
                    Series("before", places, tuple(before for _, before, _ in shown)),
                    Series("after", places, tuple(after for _, _, after in shown)),
                ),
            ),
            one_panel(
                "excess",
                "How much too heavy was each network?",
                text[0],
                "points",
                "network, in the order of the population",
                "excess mass before (%)",
                series=chain_series(
                    range(len(self.excess)),
                    None if self.population is None else self.population.chain,
                    torch.arange(len(self.excess)),
                    self.excess,
                ),
            ),
        ]
        return result_record(
            "balance",
            f"Balance of {count:,} network{'s' if count != 1 else ''}",
            text,
            (
                Table("masses", "How heavy are the networks?", _MASSES, masses),
                Table("layers-table", "Where is the mass?", _LAYERS, rows),
                *figures,
            ),
            values={
                **{name: getattr(self, name).tolist() for name in ("mass_before", "mass_after", "sweeps", "imbalance")},
                **{"layers": {name: values.tolist() for name, values in self.layers.items()}},
                **{"excess": self.excess.tolist(), "dead": [str(unit) for unit in self.dead], "fixed": self.fixed},
            },
        )


_BARS = 20  # tensors of a figure
_MASSES = (
    Column("", "sum of squared weights, and by how many percent it was too large"),
    *(Column(name, digits=4) for name in ("least", "mean", "most")),
)
_LAYERS = (
    Column("tensor"),
    Column("mass before", "mean over networks", digits=4),
    Column("mass after", "mean over networks", digits=4),
    Column("ratio", "after over before"),
)


@dataclass(frozen=True, eq=False)
class BlockReport:
    """Dead units and held directions of one block of members."""

    layout: MassLayout
    lifts: list[Lift]
    unbounded: list[Unbounded]
    massless: list[Tensor]
    minimum: Minimum

    def dead(self, start: int) -> tuple[DeadUnit, ...]:
        """Units without a best scale; `start` is the number of the first member."""
        units: list[DeadUnit] = []
        for number, lift in enumerate(self.lifts):
            directions, massless = self.unbounded[number], self.massless[number]
            if not lift.sign or lift.unit_variance is None:
                units += self._named(number, start, massless, "it has no weights")
            if lift.sign:
                continue
            for sign in (1, -1):
                falling = directions.one_sided & (directions.direction == -sign)
                reason = f"all its weights in {self._tensors(number, sign)} are zero"
                units += self._named(number, start, falling, reason)
            reason = "only dead weights join it to the rest of the network"
            units += self._named(number, start, directions.isolated, reason)
            reason = "the mass keeps falling as its scale grows or shrinks"
            units += self._named(number, start, self.minimum.diverged[number], reason)
        return tuple(units)

    def _named(self, gauge: int, start: int, units: Tensor, reason: str) -> list[DeadUnit]:
        if not bool(units.any()):
            return []
        space = self.layout.block_layout.spaces[self.layout.gauges[gauge].space]
        members, flat = units.nonzero(as_tuple=True)
        places = torch.stack(torch.unravel_index(flat, [*[size for _, size in space.parents], space.size]), 1)
        return [
            DeadUnit(start + member, space.name, tuple(place), reason)
            for member, place in zip(members.tolist(), places.tolist(), strict=True)
        ]

    def _tensors(self, gauge: int, sign: int) -> str:
        names = [
            block.tensor
            for block, sides in zip(self.layout.block_layout.blocks, self.layout.sides, strict=True)
            for side in sides
            for number, power in side.powers
            if number == gauge and power * sign > 0 and not is_statistic(block.tensor)
        ]
        return ", ".join(dict.fromkeys(names))

    def fixed(self) -> Counter[tuple[int, str]]:
        """(gauge, how it was held) -> number of units."""
        counts: Counter[tuple[int, str]] = Counter()
        for number, lift in enumerate(self.lifts):
            if not lift.sign:
                continue
            bare = self.massless[number]
            if not bool(lift.values.any()):
                counts[number, "left as they were"] += bare.numel()
                continue
            low = torch.zeros_like(bare) if lift.floor is None else (self.minimum.logs[number] <= lift.floor) & ~bare
            without = "without weights" + ("" if lift.unit_variance is None else ", v + eps = 1")
            counts[number, "at the smallest variance, eps"] += int(low.sum())
            counts[number, without] += int(bare.sum())
            counts[number, "at unit norm"] += int((~bare & ~low).sum())
        return counts


def sentences(layout: MassLayout, counts: Counter[tuple[int, str]]) -> tuple[str, ...]:
    """One sentence for every gauge that was held."""
    lines = []
    for number, gauge in enumerate(layout.gauges):
        parts = ", ".join(f"{count} {how}" for (held, how), count in counts.items() if held == number and count)
        if parts:
            lines.append(f"{gauge.name}, {gauge.kind} {gauge.generator}: no minimum; units {parts}")
    return tuple(lines)


_SMALL_BLOCK, _LARGE_BLOCK = 1 << 23, 1 << 26  # bytes: masses should stay in the cache if that makes _FEW members
_FEW = 64  # members, or more: with less, the calls would count more than what they do


def balance(
    what: Population | Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    biases: bool = True,
    norms: str = "unit",
    path: str | os.PathLike[str] | None = None,
    tolerance: float = 1e-9,
    sweeps: int = 1000,
    workers: int | None = None,
    executor: str | Executor | None = None,
    progress: Progress | bool | None = None,
) -> Balanced:
    """Move networks along their orbits of positive scales to the point of least mass.

    Args:
        what: a population, or one network; it is not changed.
        symmetry: of the networks' model. Only its kinds "scale" and "norm-scale" are used.
        biases: count biases (tensors called bias or beta) as mass; paper 2 does not.
        norms: what to do along directions without a minimum, before a batch norm or inside a weight norm: "unit"
            holds the weights of a unit at norm 1, "keep" leaves these directions alone.
        path: write the balanced population to this folder, block by block, instead of keeping it in memory.
        tolerance: a unit is balanced when |in - out| <= tolerance * (in + out); the mass is then exact to about the
            square of it.
        sweeps: give up after this many; `Balanced.imbalance` tells what is left.
        workers: processes on this machine, for a population; without effect on the result.
        executor: "local" or the address of a Ray cluster, or an open executor.
        progress: True for a line on stderr with the time left, or a function that is called with (members done,
            members, what is being done).
    """
    if isinstance(what, nn.Module):
        raise InputError("balance moves a State or a Population, found a module: give model.state_dict()")
    layout = MassLayout.of(BlockLayout.of(symmetry, statistics=True))
    balancer = Balancer(layout, biases, norms, tolerance, sweeps)
    if not isinstance(what, Population):
        if path is not None:
            raise InputError("path= is for populations, found one network: save the state of the result yourself")
        stacked = {name: tensor[None] for name, tensor in what.items()}
        result = balancer.solve(stacked, 0)
        element = balancer.element(result).member(0)
        state = symmetry.apply(element, what)
        layers = balancer.layers(stacked, {name: tensor[None] for name, tensor in state.items()})
        return replace(balancer.join([replace(result, layers=layers)]), element=element, state=state)
    if not len(what):
        raise InputError("expected a population of at least one network, found none: give networks to balance")

    def move(stacked: State, start: int, beside: None) -> tuple[State, BlockResult]:
        result = balancer.solve(stacked, start)
        moved = apply_block(ExpandedElement(symmetry, balancer.element(result)), stacked, 0, "value")
        return moved, replace(result, layers=balancer.layers(stacked, moved))

    listener = progress_of(progress)

    def report(done: int, members: int) -> None:
        if listener is not None:
            listener(done, members, "balancing")

    small, large = (block_members(what.spec, size) for size in (_SMALL_BLOCK, _LARGE_BLOCK))
    size, folder = min(large, max(small, _FEW)), None if path is None else Path(path)
    with executor_for(workers, executor) as opened:
        moved = map_blocks(what, move, opened, path=folder, size=size, progress=report)
    return replace(balancer.join(moved.notes), population=moved.population)


def balancing_scales(layout: BlockLayout, stacked: Mapping[str, Tensor]) -> Element:
    """The batch of scales that balances stacked networks (M, *shape), without applying it.

    The layout must know statistics: without them, variances of batch norms set no floor.
    """
    balancer = Balancer(MassLayout.of(layout), biases=True, norms="unit", tolerance=1e-9, sweeps=1000)
    return balancer.scales(balancer.minimum(stacked, 0)[-1].logs, len(next(iter(stacked.values()))))


@dataclass(frozen=True, eq=False)
class BlockResult:
    """Masses (M,), scales, dead units, held directions and masses by tensor (M, 2) of one block of members."""

    before: Tensor
    after: Tensor
    minimum: Minimum
    dead: tuple[DeadUnit, ...]
    fixed: Counter[tuple[int, str]]
    layers: Mapping[str, Tensor] = field(default_factory=dict)


class Balancer:
    """Balances blocks of members.

    `dead` "keep" leaves units without a minimum at their scale; "unit" gives what is left of them norm 1, so that the
    result does not depend on the scales that the networks came with.
    """

    def __init__(
        self, layout: MassLayout, biases: bool, norms: str, tolerance: float, sweeps: int, dead: str = "keep"
    ) -> None:
        for name, value in (("norms", norms), ("dead", dead)):
            if value not in ("unit", "keep"):
                raise InputError(f'{name} must be "unit" or "keep", found {value!r}: see the documentation of balance')
        if sweeps < 1 or not tolerance >= 0:
            raise InputError(f"expected sweeps >= 1 and tolerance >= 0, found {sweeps} and {tolerance}")
        self.layout, self.biases, self.norms, self.dead = layout, biases, norms, dead
        self.tolerance, self.sweeps = tolerance, sweeps

    @one_thread()
    def solve(self, stacked: Mapping[str, Tensor], start: int) -> BlockResult:
        """Balance stacked networks, the first of which is member `start`."""
        mass, lifts, unbounded, bare, minimum = self.minimum(stacked, start)
        report = BlockReport(self.layout, lifts, unbounded, bare, minimum)
        before, after = mass.total(mass.here), mass.total(LogScales(minimum.logs))
        return BlockResult(before, after, minimum, report.dead(start), report.fixed())

    @one_thread()
    def minimum(
        self, stacked: Mapping[str, Tensor], start: int
    ) -> tuple[Mass, list[Lift], list[Unbounded], list[Tensor], Minimum]:
        """The scales of least mass, and what they were found from: mass, lifts, endless directions, massless units."""
        self.layout.block_layout.check(stacked, where=f"member {start}", batched=True)
        mass = self.layout.reduce(stacked, biases=self.biases, start=start)
        lifts = lifts_of(self.layout, mass, stacked)
        free = without_lifted_biases(mass, lifts)
        unbounded = unbounded_directions(free, [lift.sign != 0 for lift in lifts])
        bare = [massless(free, gauge) for gauge, _ in enumerate(lifts)]
        frozen = []
        for number, (lift, directions) in enumerate(zip(lifts, unbounded, strict=True)):
            fixed = bare[number] if lift.sign else directions.all
            if lift.sign and self.norms == "keep":
                lifts[number], fixed = lift.dropped(), torch.ones_like(fixed)
            elif not lift.sign and self.dead == "unit":
                lifts[number] = replace(lift, values=directions.direction)
                fixed = directions.all & (directions.direction == 0)
            frozen.append(fixed)
        minimum = minimise(free, lifts, frozen, tolerance=self.tolerance, sweeps=self.sweeps)
        return mass, lifts, unbounded, bare, minimum

    def element(self, *blocks: BlockResult) -> Element:
        """The scales of blocks of members as one batch of elements."""
        logs = [torch.cat(tables) for tables in zip(*(block.minimum.logs for block in blocks), strict=True)]
        return self.scales(logs, sum(len(block.before) for block in blocks))

    def scales(self, logs: list[Tensor], members: int) -> Element:
        """Logs (members, coordinates) of every gauge as one batch of elements."""
        element = self.layout.block_layout.symmetry.identity(members)
        for gauge, table in zip(self.layout.gauges, logs, strict=True):
            factors = element.factors[gauge.name]
            factors[gauge.generator] = table.exp().cpu().reshape(factors[gauge.generator].shape)
        return element

    def layers(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensor -> sum of its squares in each of stacked networks, before and after, (M, 2) float64."""
        counted = [name for name, value in before.items() if value.is_floating_point() and _counts(name, self.biases)]
        return {
            name: torch.stack(
                [part[name].detach().double().square().flatten(1).sum(1).cpu() for part in (before, after)], 1
            )
            for name in counted
            if name in self.layout.block_layout.symmetry.shapes
        }

    def join(self, blocks: list[BlockResult]) -> Balanced:
        """The result for all members, laid end to end."""
        return Balanced(
            self.element(*blocks),
            torch.cat([block.before for block in blocks]).cpu(),
            torch.cat([block.after for block in blocks]).cpu(),
            torch.cat([block.minimum.sweeps for block in blocks]).cpu(),
            torch.cat([block.minimum.imbalance for block in blocks]).cpu(),
            tuple(unit for block in blocks for unit in block.dead),
            sentences(self.layout, sum((block.fixed for block in blocks), start=Counter())),
            {name: torch.cat([block.layers[name] for block in blocks]) for name in blocks[0].layers},
        )
