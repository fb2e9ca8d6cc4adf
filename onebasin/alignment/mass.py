"""How far is every unit from the point of least mass? The mass that it takes in, less the mass that it gives out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.errors import SpecError
from onebasin.population import Population
from onebasin.state import is_statistic
from onebasin.symmetry import Symmetry

# ----------------------------------------------------------------------
# The squared norm of a network along its orbit of positive scales: small arrays instead of weights.


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


# ----------------------------------------------------------------------
# From weights to masses: every block of a board is reduced once to sums of squares in float64.


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


# ----------------------------------------------------------------------
# Directions along which the mass has no minimum, and what holds them.


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


# ----------------------------------------------------------------------
# How far is every unit from the point of least mass? The mass that it takes in, less the mass that it gives out


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
