"""The member of least mass on an orbit of positive scales ("min-mass"), for one network or a whole population.

The mass, the sum of squared weights, is convex in log scales (`mass.py`); sweeps of exact coordinate steps find its
minimum (`settle.py`), where every unit's incoming mass equals its outgoing mass. Directions without a minimum, before
a batch norm, are held at unit norm (`norm_scale.py`); dead units are left alone and reported (`live.py`). A tensor
that a state dict lists under two names counts once for each.

>>> from torch import nn
>>> import onebasin as ob
>>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
>>> found = balance(model.state_dict(), ob.discover(model, torch.zeros(1, 3)))
>>> bool(found.mass_after < found.mass_before), found.dead
(True, ())
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor, nn

from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.errors import InputError, SpecError, check_options
from onebasin.parallel import ExecutionOptions, executor_for, one_thread
from onebasin.population import Population, block_members, caller_bytes, mapped, member_bytes
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


@dataclass(frozen=True, eq=False)
class SquaresLayout:
    """Which gauges a board has, and which of them act where; nothing here depends on weights."""

    board: BlockLayout
    gauges: tuple[Gauge, ...]
    sides: tuple[tuple[Side, ...], ...]  # for every block

    @classmethod
    def of(cls, board: BlockLayout) -> SquaresLayout:
        """Find the gauges: generators of the kinds "scale" and "norm-scale"."""
        numbers: dict[tuple[int, int], int] = {}
        for number, space in enumerate(board.spaces):
            for generator, kind in enumerate(space.generators):
                if kind.endswith("scale"):
                    numbers[number, generator] = len(numbers)
        sides = tuple(_sides(block, numbers) for block in board.blocks)
        gauges = []
        for number, generator in numbers:
            space = board.spaces[number]
            kind, size = space.generators[generator], board.coordinates(number)
            gauges.append(Gauge(number, generator, kind, size, space.name))
        return cls(board, tuple(gauges), sides)

    def reduce(self, stacked: Mapping[str, Tensor], *, biases: bool = True, start: int = 0) -> Mass:
        """Sum squares of stacked weights (M, *shape), statistics left out, biases too if asked.

        `start` is the number of the first member, for messages.
        """
        single: dict[tuple[Powers, bool], Part] = {}
        coupled: list[Part] = []
        rest = _uncovered(self.board, stacked, biases)
        for block, sides in zip(self.board.blocks, self.sides, strict=True):
            if not _counts(block.tensor, biases):
                continue
            values = _squares(block.take(stacked[block.tensor]), block, sides)
            if not sides:
                rest = rest + values
                continue
            for part in _decoupled(Part(values, _renumbered(sides), is_bias(block.tensor))):
                if len(part.sides) > 1:
                    coupled.append(part)
                    continue
                flat = _flat(part)  # parts that move alike are one part
                key = (flat.sides[0].powers, flat.bias)
                known = single.get(key)
                single[key] = flat if known is None else replace(known, values=known.values + flat.values)
        rest = rest + sum(part.values.sum(1) for (powers, _), part in single.items() if not powers)
        mass = Mass(self.gauges, [*[part for (powers, _), part in single.items() if powers], *coupled], rest)
        if not bool(torch.isfinite(mass.total(mass.here)).all()):
            check_finite(stacked, start)
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
    found: dict[tuple[int, tuple[int, ...]], BlockAxis] = {(foot.space, foot.dims): foot for foot in block.feet}
    sides = []
    for (space, dims), foot in found.items():
        powers = {numbers[space, g]: power for g, power in enumerate(foot.powers) if power and (space, g) in numbers}
        if powers:
            sides.append(Side(space, dims, tuple(sorted(powers.items()))))
    return tuple(sides)


def _squares(part: Tensor, block: TensorBlock, sides: tuple[Side, ...]) -> Tensor:
    """Sum squares (M, *dims, rest) over the rest and over all dims that are in no side."""
    held = {dim for side in sides for dim in side.dims}
    gone = [1 + dim for dim in range(len(block.dims)) if dim not in held]
    if part.shape[-1] == 1:
        squares = part[..., 0].square() if part.dtype == torch.float64 else part[..., 0].double().square_()
    else:  # several times faster than a float64 copy, and as exact
        squares = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).square_()
    return squares.sum(gone) if gone else squares


def _renumbered(sides: tuple[Side, ...]) -> tuple[Side, ...]:
    """Number dims anew after those of no side are gone."""
    held = sorted({dim for side in sides for dim in side.dims})
    return tuple(replace(side, dims=tuple(held.index(dim) for dim in side.dims)) for side in sides)


def _flat(part: Part) -> Part:
    """A part with one side as a table (M, coordinates)."""
    side = part.sides[0]
    return replace(part, values=part.gather(side, part.values), sides=(replace(side, dims=(0,)),))


def _decoupled(part: Part) -> list[Part]:
    """Split entries that join a unit to itself off a part in which a space stands twice: there its powers add."""
    if len(part.sides) != 2 or part.sides[0].space != part.sides[1].space:
        return [part]
    first, second = part.sides
    sizes = part.values.shape[1:]
    count = math.prod(sizes[dim] for dim in first.dims)
    coordinates = torch.arange(count, device=part.values.device)[None]
    same = part.spread(first, coordinates) == part.spread(second, coordinates)
    powers = Counter(dict(first.powers))
    powers.update(dict(second.powers))
    added = tuple(sorted((gauge, power) for gauge, power in powers.items() if power))
    diagonal = Part(part.gather(first, part.values * same), (Side(first.space, (0,), added),), part.bias)
    return [diagonal, replace(part, values=part.values * ~same)]


def _uncovered(board: BlockLayout, stacked: Mapping[str, Tensor], biases: bool) -> Tensor:
    """Mass (M,) of what is not on the board: tensors without legs, constants left out, and parts that no leg covers."""
    covered: Counter[str] = Counter()
    blocks: dict[str, list[TensorBlock]] = {}
    for block in board.blocks:
        covered[block.tensor] += math.prod(math.prod(split) for split in block.split)
        blocks.setdefault(block.tensor, []).append(block)
    first = next(iter(stacked.values()))
    total = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for name, tensor in stacked.items():
        counted = tensor.is_floating_point() and _counts(name, biases) and name not in board.symmetry.frozen
        if not counted or covered[name] == tensor[0].numel():
            continue
        total = total + _all(tensor)
        for block in blocks.get(name, []):
            total = total - _all(block.take(tensor))
    return total


def _all(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1, dtype=torch.float64)
    return norms.square()


def check_finite(stacked: Mapping[str, Tensor], start: int = 0) -> None:
    """Refuse networks with NaN or infinity; `start` is the number of the first."""
    for name, tensor in stacked.items():
        wrong = ~torch.isfinite(tensor.flatten(1)).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
        if bool(wrong.any()):
            raise SpecError(
                f"member {start + int(wrong.nonzero()[0])} holds NaN or infinity in {name}: leave this network out or "
                "train it again with a smaller step"
            )


@dataclass(frozen=True, eq=False)
class Hold:
    """What holds a gauge."""

    side: int  # 1 or -1: the whole gauge is lifted so, 0: it is not
    pull: Tensor  # (M, n) lift of each coordinate: `side`, or what a dead unit was given
    floor: Tensor | None = None  # (M, n): s >= floor keeps v >= eps
    whole: Tensor | None = None  # (M, n): s = whole makes v + eps = 1

    @cached_property
    def lifted(self) -> bool:
        """Whether any coordinate is lifted."""
        return bool(self.pull.any())

    def members_of(self, rows: Tensor) -> Hold:
        """The hold of some members only."""
        pick = [None if table is None else table[rows] for table in (self.floor, self.whole)]
        return Hold(self.side, self.pull[rows], *pick)

    def kept(self) -> Hold:
        """No hold at all: the gauge will be left alone."""
        return Hold(self.side, torch.zeros_like(self.pull))


def holds(layout: SquaresLayout, mass: Mass, stacked: Mapping[str, Tensor]) -> list[Hold]:
    """One hold per gauge: lifts where the mass has no minimum, floors where there are variances."""
    floors: dict[int, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for number, power, shift, variance in _variances(layout, stacked):
        floor = (2 * shift / variance).log() / power
        whole = -variance.log() / power
        floors[number] = torch.maximum(floors[number], floor) if number in floors else floor
        wholes[number] = torch.maximum(wholes[number], whole) if number in wholes else whole
    held = []
    for number, gauge in enumerate(layout.gauges):
        side = mass.side(number)
        pull = torch.full((mass.members, gauge.size), float(side), dtype=torch.float64, device=mass.rest.device)
        held.append(Hold(side, pull, floors.get(number), wholes.get(number) if side else None))
    return held


def empty(mass: Mass, gauge: int) -> Tensor:
    """Coordinates (M, n) on which no mass hangs."""
    total = mass.rest.new_zeros(mass.members, mass.gauges[gauge].size)
    for table in mass.pulls(gauge, mass.here).values():
        total = total + table
    return total == 0


def _variances(layout: SquaresLayout, stacked: Mapping[str, Tensor]) -> list[tuple[int, int, float, Tensor]]:
    """(gauge, power, eps, v + eps as (M, n)) for every gauge that moves a variance."""
    found = []
    board: BlockLayout = layout.board
    for block, sides in zip(board.blocks, layout.sides, strict=True):
        shift = next((foot.shift for foot in block.feet if foot.shift), 0.0)
        if not shift or not is_statistic(block.tensor):
            continue
        values = block.take(stacked[block.tensor]).double() + shift
        for side in sides:
            foot = next(foot for foot in block.feet if (foot.space, foot.dims) == (side.space, side.dims))
            others = [1 + dim for dim in range(len(block.dims)) if dim not in foot.dims]
            kept = sorted(foot.dims)
            least = values.amin([*others, values.dim() - 1]).permute(0, *[1 + kept.index(dim) for dim in foot.dims])
            table = least.reshape(len(least), -1)
            found += [(gauge, power, shift, table) for gauge, power in side.powers if power > 0]
    return found


def without_held_biases(mass: Mass, held: list[Hold]) -> Mass:
    """Leave out the biases that only lifted gauges move: a norm takes them away, so they should not set its scale."""
    kept = [
        part
        for part in mass.parts
        if not (part.bias and all(held[gauge].side for side in part.sides for gauge, _ in side.powers))
    ]
    return mass if len(kept) == len(mass.parts) else Mass(mass.gauges, kept, mass.rest)


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
    layout = SquaresLayout.of(BlockLayout.of(symmetry))
    free = [number for number, gauge in enumerate(layout.gauges) if gauge.kind == "scale"]
    found = []
    for start, stacked in population.blocks():
        mass = layout.reduce(stacked, biases=biases, start=start)
        found.append(slope(mass, free, mass.here).cpu())
    return torch.cat(found)


def slope(mass: Mass, gauges: list[int], point: Point) -> Tensor:
    """Half the derivative of the mass: the sum of power * mass on each coordinate (rows, coordinates)."""
    tables = []
    for gauge in gauges:
        total = torch.zeros_like(point.logs[gauge])
        for power, table in mass.pulls(gauge, point).items():
            total = total + power * table
        tables.append(total)
    return torch.cat(tables, 1)


@dataclass(frozen=True, eq=False)
class Loose:
    """Coordinates (M, n) of a gauge without a minimum.

    Attributes:
        bare: all masses of positive, or all of negative power, are zero.
        ring: joined to the rest of the network through dead weights alone.
        lift: 1 where the mass falls for s to minus infinity, -1 for plus infinity, 0 where the coordinate is not
            loose or no mass hangs on it.
    """

    bare: Tensor
    ring: Tensor
    lift: Tensor

    @property
    def all(self) -> Tensor:
        """Every loose coordinate."""
        return self.bare | self.ring


def loose(mass: Mass, pinned: list[bool]) -> list[Loose]:
    """What has no minimum, for every gauge; gauges that are `pinned` are held by something else."""
    found = [
        _nothing(mass, number) if pinned[number] or not mass.touching[number] else _bare(mass, number)
        for number, _ in enumerate(mass.gauges)
    ]
    if all(float(part.values.min()) > 0 for part in mass.parts):
        return found
    held = [pinned[number] or not mass.touching[number] for number, _ in enumerate(mass.gauges)]
    bounds = Bounds(mass, [item.bare | pin for item, pin in zip(found, held, strict=True)])
    while bounds.learn():
        pass
    return [
        Loose(item.bare, ~(above & below), item.lift + above.double() - below.double())
        for item, above, below in zip(found, bounds.above, bounds.below, strict=True)
    ]


def _nothing(mass: Mass, gauge: int) -> Loose:
    lift = mass.rest.new_zeros(mass.members, mass.gauges[gauge].size)
    none = torch.zeros_like(lift, dtype=torch.bool)
    return Loose(none, none, lift)


def _bare(mass: Mass, gauge: int) -> Loose:
    sums = {sign: _nothing(mass, gauge).lift for sign in (1, -1)}
    for power, table in mass.pulls(gauge, mass.here).items():
        sums[1 if power > 0 else -1] += table
    up, down = sums[1] > 0, sums[-1] > 0
    bare = ~(up & down)
    return Loose(bare, torch.zeros_like(bare), up.double() - down.double())


class Bounds:
    """What is known about directions of endless fall: above[g] says d <= 0, below[g] says d >= 0."""

    def __init__(self, mass: Mass, pinned: list[Tensor]) -> None:
        """Coordinates that are pinned have d = 0."""
        self.mass = mass
        self.above, self.below = [pin.clone() for pin in pinned], [pin.clone() for pin in pinned]

    def learn(self) -> bool:
        """One round over all terms; whether anything new was found."""
        before = self._count()
        for part in self.mass.parts:
            for number, side in enumerate(part.sides):
                for gauge, power in side.powers:
                    rest = tuple((other, its) for other, its in side.powers if other != gauge)
                    held = self._reach(part, number) & self._cannot_fall(rest, gauge)
                    known = self.above if power > 0 else self.below
                    known[gauge] = known[gauge] | held
        return self._count() > before

    def _reach(self, part: Part, number: int) -> Tensor:
        """Coordinates of a side that have a live term whose other sides cannot fall."""
        live = part.values > 0
        for other, side in enumerate(part.sides):
            if other != number:
                live = live & part.spread(side, self._cannot_fall(side.powers, side.powers[0][0]))
        return part.gather(part.sides[number], live.double()) > 0

    def _cannot_fall(self, powers: Powers, like: int) -> Tensor:
        held = torch.ones_like(self.above[like])
        for gauge, power in powers:
            held = held & (self.below[gauge] if power > 0 else self.above[gauge])
        return held

    def _count(self) -> int:
        return sum(int(known.sum()) for known in (*self.above, *self.below))


_COARSE_NEWTON = 2  # steps per sweep
_SMALL = 1e-3  # after a step as short as this, the next would be a millionth
_HALVINGS = 4
_REACH = 4.0  # the longest step of a log scale: where the small problem has no minimum, it should not run away


def worthwhile(mass: Mass) -> bool:
    """Whether gauges meet at all; where they do not, one sweep is exact."""
    return any(sum(len(side.powers) for side in part.sides) > 1 for part in mass.parts)


def common_steps(mass: Mass, held: list[Hold], frozen: list[Tensor], point: Point) -> None:
    """Move the point by the best common step of every gauge."""
    movable = _movable(mass, held, frozen, point)
    terms, exponents = _terms(mass, point, movable)
    lifts = torch.zeros(mass.members, len(held), dtype=torch.float64, device=terms.device)
    for number, (gauge, hold) in enumerate(zip(mass.gauges, held, strict=True)):
        if hold.lifted:
            free = movable.get(gauge.space)
            lifts[:, number] = (hold.pull if free is None else hold.pull * free).sum(1)
    common = torch.zeros_like(lifts)
    for _ in range(_COARSE_NEWTON):
        step = _newton(terms * torch.exp(2 * common @ exponents.T), exponents, lifts)
        common = common + step
        if float(step.abs().max()) < _SMALL:
            break
    reach = common.abs().amax(1, keepdim=True)
    common = common * (_REACH / reach.clamp_min(_REACH))
    common = common * _above_floors(mass, held, movable, point, common)
    for number, gauge in enumerate(mass.gauges):
        step = common[:, number : number + 1]
        point.move(number, step * movable[gauge.space] if gauge.space in movable else step)


def _movable(mass: Mass, held: list[Hold], frozen: list[Tensor], point: Point) -> dict[int, Tensor]:
    """Space -> coordinates (M, n) that no gauge of the space holds where they are; left out where all may move."""
    found: dict[int, Tensor] = {}
    for gauge, hold, still, logs in zip(mass.gauges, held, frozen, point.logs, strict=True):
        stays = still if hold.floor is None else still | (logs <= hold.floor)
        if bool(stays.any()):
            found[gauge.space] = ~stays & found.get(gauge.space, ~stays)
    return found


def _terms(mass: Mass, point: Point, movable: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Masses (M, terms) that move alike, and their exponents (terms, gauges)."""
    masses, rows = [], []
    for place, (part, powers) in enumerate(zip(mass.parts, mass.exponents, strict=True)):
        held = [side.space in movable for side in part.sides]
        if not any(held):
            masses.append(mass.whole(place, point))
            rows.append(powers.sum(0))
            continue
        factors = [point.factor(side.powers) for side in part.sides]
        for chosen in itertools.product(*[(True, False) if mixed else (True,) for mixed in held]):
            masked = [
                factor * (movable[side.space] == moves) if mixed else factor
                for side, factor, mixed, moves in zip(part.sides, factors, held, chosen, strict=True)
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


def _above_floors(mass: Mass, held: list[Hold], movable: dict[int, Tensor], point: Point, common: Tensor) -> Tensor:
    """The part of the step (M, 1), from 0 to 1, after which a first variance is at its floor."""
    size = torch.ones_like(common[:, :1])
    for number, hold in enumerate(held):
        if hold.floor is not None:
            step, room = common[:, number : number + 1], point.logs[number] - hold.floor
            if mass.gauges[number].space in movable:
                room = room.masked_fill(~movable[mass.gauges[number].space], torch.inf)
            way = room.amin(1, keepdim=True) / (-step).clamp_min(1e-300)
            size = torch.minimum(size, torch.where(step < 0, way, 1.0))
    return size


_TINY = torch.finfo(torch.float64).tiny  # keeps logarithms finite where nothing hangs on a frozen coordinate
_NEWTON = 6  # steps where powers differ; the sweeps around them do the rest
_FAR = 150.0  # a log scale beyond this flees to infinity: exp(2 * 2 * 150) is near the end of float64


@dataclass(frozen=True, eq=False)
class Settled:
    """Log scales (M, n) of every gauge; sweeps and the imbalance left (M,); coordinates (M, n) without a minimum."""

    logs: list[Tensor]
    sweeps: Tensor
    imbalance: Tensor
    fled: list[Tensor]


def settle(mass: Mass, held: list[Hold], frozen: list[Tensor], *, tolerance: float, sweeps: int) -> Settled:
    """Sweep until every free coordinate has |in - out| <= tolerance * (in + out).

    Args:
        mass: mass of M networks.
        held: lift and floor of each gauge.
        frozen: (M, n) of each gauge: coordinates that stay at 1, or at v + eps = 1 where a hold knows a variance.
        tolerance: when a network is settled.
        sweeps: give up after this many; `imbalance` tells.
    """
    descent = Descent(mass, held, frozen)
    rows = torch.arange(mass.members, device=mass.rest.device)
    logs = [table.clone() for table in descent.point.logs]
    fled = [torch.zeros_like(table) for table in frozen]
    taken = torch.zeros_like(rows)
    left = torch.zeros_like(mass.rest)
    coupled = worthwhile(mass)
    for sweep in range(1, sweeps + 1):
        if sweep > 1 and coupled:
            common_steps(descent.mass, descent.held, descent.frozen, descent.point)
        worst = descent.sweep()
        taken[rows], left[rows] = sweep, worst
        unsettled = worst > tolerance
        count = int(unsettled.sum())
        if 2 * count > len(rows) and sweep < sweeps:
            continue
        for gauge, table in enumerate(descent.point.logs):
            logs[gauge][rows], fled[gauge][rows] = table, descent.fled[gauge]
        if not count:
            break
        descent, rows = descent.members_of(unsettled), rows[unsettled]  # go on with those that need it
    return Settled(logs, taken, left, fled)


class Descent:
    """Where the descent stands."""

    def __init__(self, mass: Mass, held: list[Hold], frozen: list[Tensor]) -> None:
        """Begin at the networks as they are."""
        self.mass, self.held, self.frozen = mass, held, list(frozen)
        self.still = [bool(still.any()) for still in frozen]
        self.fled = [torch.zeros_like(still) for still in frozen]
        self.point = mass.here.copy()
        for gauge, hold in enumerate(held):
            if hold.whole is not None and self.still[gauge]:
                self.point.move(gauge, frozen[gauge] * hold.whole)

    def sweep(self) -> Tensor:
        """Move every gauge once; return the largest imbalance (M,) that was met on the way."""
        worst = []
        for gauge, (hold, still) in enumerate(zip(self.held, self.frozen, strict=True)):
            if not self.mass.touching[gauge]:
                continue
            step, off = best_step(self.mass.pulls(gauge, self.point), hold)
            if hold.floor is not None:
                low = hold.floor - self.point.logs[gauge]
                off = off.masked_fill((step <= low) & (low >= 0), 0.0)
                step = torch.maximum(step, low)
            if self.still[gauge]:
                step, off = step.masked_fill(still, 0.0), off.masked_fill(still, 0.0)
            self.point.move(gauge, step)
            worst.append(off.amax(1))
        self._catch()
        return torch.stack(worst).amax(0) if worst else torch.zeros_like(self.mass.rest)

    def _catch(self) -> None:
        """Bring back to 1 and freeze what flees."""
        for gauge, logs in enumerate(self.point.logs):
            if not bool((logs.abs() > _FAR).any()):
                continue
            far = (logs.abs() > _FAR) & ~self.frozen[gauge]
            self.point.move(gauge, torch.where(far, -logs, 0.0))
            self.frozen[gauge] = self.frozen[gauge] | far
            self.fled[gauge] = self.fled[gauge] | far
            self.still[gauge] = True

    def members_of(self, rows: Tensor) -> Descent:
        """The descent of some members only."""
        made = object.__new__(Descent)
        made.mass = self.mass.members_of(rows)
        made.held = [hold.members_of(rows) for hold in self.held]
        made.frozen = [still[rows] for still in self.frozen]
        made.still = [bool(still.any()) for still in made.frozen]
        made.fled = [table[rows] for table in self.fled]
        made.point = Point([table[rows] for table in self.point.logs])
        return made


def best_step(pulls: dict[int, Tensor], hold: Hold) -> tuple[Tensor, Tensor]:
    """The minimiser d (M, n) of a coordinate, and the imbalance |in - out| / (in + out) before the step."""
    ends = {sign: [power for power in pulls if power * sign > 0] for sign in (1, -1)}
    span = max(ends[1], default=0) - min(ends[-1], default=0)  # half the steepest slope of log(up / down)
    plain = len(pulls) == (1 if hold.lifted else 2)  # then log(up / down) is a straight line
    up, down = (_weight(pulls, ends[sign], hold, sign) for sign in (1, -1))
    off = (up - down).abs() / (up + down)
    step = (down / up).log() / (2 * span)
    for _ in range(0 if plain else _NEWTON):
        moved = {power: table * torch.exp(2 * power * step) for power, table in pulls.items()}
        up, down = (_weight(moved, ends[sign], hold, sign) for sign in (1, -1))
        bend = sum((p * p * table / (up if p > 0 else down) for p, table in moved.items()), start=torch.zeros_like(up))
        # Newton on log(up / down), and never further than twice the way: its slope is within [0, 2 span].
        step = step + (down / up).log() / torch.clamp(2 * bend, min=span)
    return step, off


def _weight(pulls: dict[int, Tensor], powers: list[int], hold: Hold, sign: int) -> Tensor:
    """Sum of |p| M_p over powers of one sign, with the lift of this side; never quite zero."""
    total = torch.zeros_like(hold.pull) if not hold.lifted else (-sign * hold.pull).clamp_min(0)
    for power in powers:
        total = total + (pulls[power] if abs(power) == 1 else abs(power) * pulls[power])
    return total.clamp_min(_TINY)


_SHOWN = 5  # dead units in a printed report


@dataclass(frozen=True)
class Dead:
    """A unit whose scale has no best value; it was left as it was."""

    member: int
    space: str
    unit: tuple[int, ...]  # indices of the parents, then of the unit
    reason: str

    def __str__(self) -> str:
        """One line."""
        place = str(self.unit[0]) if len(self.unit) == 1 else str(self.unit)
        return f"member {self.member}, {self.space}, unit {place}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Balanced:
    """Networks at the point of least mass of their orbits.

    Attributes:
        element: the scales that were applied; a batch for a population.
        mass_before: sum of squared weights (members,), without running statistics, and without biases if so asked.
        mass_after: the same of the result.
        sweeps: sweeps that each member took (members,).
        imbalance: largest |in - out| / (in + out) over units that the last sweep met (members,).
        dead: units whose scale has no best value.
        fixed: one sentence for every direction without a minimum, and how it was held.
        population: the result, of a population.
        state: the result, of one network.
    """

    element: Element
    mass_before: Tensor
    mass_after: Tensor
    sweeps: Tensor
    imbalance: Tensor
    dead: tuple[Dead, ...]
    fixed: tuple[str, ...]
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
        count = len(self.mass_before)
        head = f"{count} network{'s' if count != 1 else ''} balanced in at most {int(self.sweeps.max())} sweeps"
        lines = [f"{head}, imbalance at most {float(self.imbalance.max()):.0e}", self.profile(), *self.fixed]
        lines += [f"dead: {unit}" for unit in self.dead[:_SHOWN]]
        if len(self.dead) > _SHOWN:
            lines.append(f"... and {len(self.dead) - _SHOWN} more dead units")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Notes:
    """What there is to say about one block of members."""

    layout: SquaresLayout
    held: list[Hold]
    flight: list[Loose]
    bare: list[Tensor]
    found: Settled

    def dead(self, start: int) -> tuple[Dead, ...]:
        """Units without a best scale; `start` is the number of the first member."""
        made: list[Dead] = []
        for number, hold in enumerate(self.held):
            item, fled = self.flight[number], self.found.fled[number]
            if hold.side:
                weightless = self.bare[number] if hold.whole is None else torch.zeros_like(self.bare[number])
                made += self._named(number, start, weightless, "it has no weights")
                continue
            made += self._named(number, start, self.bare[number], "it has no weights")
            for sign in (1, -1):
                bare = item.bare & (item.lift == -sign)
                made += self._named(number, start, bare, f"all its weights in {self._tensors(number, sign)} are zero")
            made += self._named(number, start, item.ring, "only dead weights join it to the rest of the network")
            made += self._named(number, start, fled, "the mass keeps falling as its scale grows or shrinks")
        return tuple(made)

    def _named(self, gauge: int, start: int, units: Tensor, reason: str) -> list[Dead]:
        if not bool(units.any()):
            return []
        space = self.layout.board.spaces[self.layout.gauges[gauge].space]
        members, flat = units.nonzero(as_tuple=True)
        places = torch.stack(torch.unravel_index(flat, [*[size for _, size in space.parents], space.size]), 1)
        return [
            Dead(start + member, space.name, tuple(place), reason)
            for member, place in zip(members.tolist(), places.tolist(), strict=True)
        ]

    def _tensors(self, gauge: int, sign: int) -> str:
        names = [
            block.tensor
            for block, sides in zip(self.layout.board.blocks, self.layout.sides, strict=True)
            for side in sides
            for number, power in side.powers
            if number == gauge and power * sign > 0 and not is_statistic(block.tensor)
        ]
        return ", ".join(dict.fromkeys(names))

    def fixed(self) -> Counter[tuple[int, str]]:
        """(gauge, how it was held) -> number of units."""
        counts: Counter[tuple[int, str]] = Counter()
        for number, hold in enumerate(self.held):
            if not hold.side:
                continue
            bare = self.bare[number]
            if not bool(hold.pull.any()):
                counts[number, "left as they were"] += bare.numel()
                continue
            low = torch.zeros_like(bare) if hold.floor is None else (self.found.logs[number] <= hold.floor) & ~bare
            counts[number, "at the smallest variance, eps"] += int(low.sum())
            counts[number, "without weights" + (", v + eps = 1" if hold.whole is not None else "")] += int(bare.sum())
            counts[number, "at unit norm"] += int((~bare & ~low).sum())
        return counts


def sentences(layout: SquaresLayout, counts: Counter[tuple[int, str]]) -> tuple[str, ...]:
    """One sentence for every gauge that was held."""
    made = []
    for number, gauge in enumerate(layout.gauges):
        told = [f"{count} {how}" for (held, how), count in counts.items() if held == number and count]
        if told:
            made.append(f"{gauge.name}, {gauge.kind} {gauge.generator}: no minimum; units {', '.join(told)}")
    return tuple(made)


SMALL, LARGE = 1 << 23, 1 << 26  # bytes of a block: its masses should stay in the cache if that makes FEW members
_FOLD = 6  # times the bytes of a block that its masses and the moved members take
FEW = 64  # members, or more: with less, the calls would count more than what they do


class BalanceOptions(ExecutionOptions, total=False):
    """The finer points of `balance`, all optional; where a population is worked on is said as in `ExecutionOptions`.

    Attributes:
        tolerance: a unit is balanced when |in - out| <= tolerance * (in + out) (1e-9); the mass is then exact to about
            the square of it.
        sweeps: give up after this many (1,000); `Balanced.imbalance` tells what is left.
        progress: called with (members done, members in all).
    """

    tolerance: float
    sweeps: int
    progress: Callable[[int, int], None]


def balance(
    what: Population | Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    biases: bool = True,
    norms: str = "unit",
    path: str | os.PathLike[str] | None = None,
    **options: Unpack[BalanceOptions],
) -> Balanced:
    """Move networks along their orbits of positive scales to the point of least mass.

    Args:
        what: a population, or one network; it is not changed.
        symmetry: of the networks' model. Only its kinds "scale" and "norm-scale" are used.
        biases: count biases (tensors called bias or beta) as mass; paper 2 does not.
        norms: what to do along directions without a minimum, before a batch norm or inside a weight norm: "unit"
            holds the weights of a unit at norm 1, "keep" leaves these directions alone.
        path: write the balanced population to this folder, block by block, instead of keeping it in memory.
        **options: see `Options`.
    """
    check_options(options, BalanceOptions.__annotations__, "balance")
    if isinstance(what, nn.Module):
        raise InputError("balance moves a State or a Population, found a module: give model.state_dict()")
    limits = options.get("tolerance", 1e-9), options.get("sweeps", 1000)
    work = Work(SquaresLayout.of(BlockLayout.of(symmetry, statistics=True)), biases, norms, *limits)
    if not isinstance(what, Population):
        if path is not None:
            raise InputError("path= is for populations, found one network: save the state of the result yourself")
        found = work.solve({name: tensor[None] for name, tensor in what.items()}, 0)
        report = work.report([found])
        element = report.element.member(0)
        return replace(report, element=element, state=symmetry.apply(element, what))
    if not len(what):
        raise InputError("expected a population of at least one network, found none: give networks to balance")

    def move(stacked: State, start: int, beside: None) -> tuple[State, Solved]:
        solved = work.solve(stacked, start)
        return apply_block(ExpandedElement(symmetry, work.element(solved)), stacked, 0, "value"), solved

    size, goal = _members(what), None if path is None else Path(path)
    needs = {"each": _FOLD * size * member_bytes(what.spec), "here": caller_bytes(what, path)}
    with executor_for(options, **needs) as executor:
        moved = mapped(what, move, executor, path=goal, size=size, progress=options.get("progress"))
    return replace(work.report(moved.notes), population=moved.population)


def _members(population: Population) -> int:
    """How many members are balanced at a time."""
    small, large = (block_members(population.spec, size) for size in (SMALL, LARGE))
    return min(large, max(small, FEW))


def balancing(
    board: BlockLayout,
    stacked: Mapping[str, Tensor],
    *,
    biases: bool = True,
    norms: str = "unit",
    dead: str = "keep",
    tolerance: float = 1e-9,
    sweeps: int = 1000,
) -> Element:
    """The batch of scales that balances stacked networks (M, *shape), without applying it.

    Args:
        board: `Board.of(symmetry, statistics=True)`; without statistics, variances of batch norms set no floor.
        stacked: the networks; they are not changed.
        biases: count biases as mass.
        norms: as in `balance`.
        dead: "keep" leaves units without a minimum at their scale; "unit" gives what is left of them norm 1, so that
            the result does not depend on the scales that the networks came with.
        tolerance: imbalance at which a unit counts as balanced.
        sweeps: give up after this many.
    """
    work = Work(SquaresLayout.of(board), biases, norms, tolerance, sweeps, dead)
    return work.element(work.solve(stacked, 0))


@dataclass(frozen=True, eq=False)
class Solved:
    """What was found for one block of members: masses (M,), scales, and what there is to report."""

    before: Tensor
    after: Tensor
    found: Settled
    dead: tuple[Dead, ...]
    fixed: Counter[tuple[int, str]]


class Work:
    """What is the same for all blocks of members."""

    def __init__(
        self, layout: SquaresLayout, biases: bool, norms: str, tolerance: float, sweeps: int, dead: str = "keep"
    ) -> None:
        """Check the options."""
        for name, value in (("norms", norms), ("dead", dead)):
            if value not in ("unit", "keep"):
                raise InputError(f'{name} must be "unit" or "keep", found {value!r}: see the documentation of balance')
        if sweeps < 1 or not tolerance >= 0:
            raise InputError(f"expected sweeps >= 1 and tolerance >= 0, found {sweeps} and {tolerance}")
        self.layout, self.biases, self.norms, self.dead = layout, biases, norms, dead
        self.tolerance, self.sweeps = tolerance, sweeps

    @one_thread()
    def solve(self, stacked: Mapping[str, Tensor], start: int) -> Solved:
        """Balance stacked networks, the first of which is member `start`."""
        self.layout.board.check(stacked, where=f"member {start}", batched=True)
        mass = self.layout.reduce(stacked, biases=self.biases, start=start)
        held = holds(self.layout, mass, stacked)
        free = without_held_biases(mass, held)
        flight = loose(free, [hold.side != 0 for hold in held])
        bare = [empty(free, gauge) for gauge, _ in enumerate(held)]
        frozen = []
        for number, (hold, item) in enumerate(zip(held, flight, strict=True)):
            still = bare[number] if hold.side else item.all
            if hold.side and self.norms == "keep":
                held[number], still = hold.kept(), torch.ones_like(still)
            elif not hold.side and self.dead == "unit":
                held[number], still = replace(hold, pull=item.lift), item.all & (item.lift == 0)
            frozen.append(still)
        found = settle(free, held, frozen, tolerance=self.tolerance, sweeps=self.sweeps)
        notes = Notes(self.layout, held, flight, bare, found)
        return Solved(mass.total(mass.here), mass.total(Point(found.logs)), found, notes.dead(start), notes.fixed())

    def element(self, *blocks: Solved) -> Element:
        """The scales of blocks of members as one batch of elements."""
        element = self.layout.board.symmetry.identity(sum(len(block.before) for block in blocks))
        for number, gauge in enumerate(self.layout.gauges):
            factors = element.factors[gauge.name]
            logs = torch.cat([block.found.logs[number] for block in blocks])
            factors[gauge.generator] = logs.exp().cpu().reshape(factors[gauge.generator].shape)
        return element

    def report(self, blocks: list[Solved]) -> Balanced:
        """Join the blocks."""
        return Balanced(
            self.element(*blocks),
            torch.cat([block.before for block in blocks]).cpu(),
            torch.cat([block.after for block in blocks]).cpu(),
            torch.cat([block.found.sweeps for block in blocks]).cpu(),
            torch.cat([block.found.imbalance for block in blocks]).cpu(),
            tuple(unit for block in blocks for unit in block.dead),
            sentences(self.layout, sum((block.fixed for block in blocks), start=Counter())),
        )
