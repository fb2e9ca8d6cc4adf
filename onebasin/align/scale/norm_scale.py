"""Directions along which the mass has no minimum, and what holds them.

Weights before a batch norm (or the direction of a weight norm) may shrink for ever: the function stays, the mass
falls. Such a gauge is held by a *lift*: instead of the mass alone,

    mass(s) - 2 * sum of s over the lifted coordinates

is minimised, which is convex too, has one minimum, and there every lifted unit's weights have Euclidean norm 1. So
the result does not depend on where along the orbit a network starts, which "divide by the norm first, then balance"
would not achieve: balancing what a row reads changes its norm again. Biases that only lifted gauges move are left out.

A batch-norm variance moves as v + eps and must stay positive: shrinking stops where v would fall below eps. Units with
no weights at all get v + eps = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onebasin.align.board import Board
from onebasin.align.scale.mass import Mass
from onebasin.align.scale.squares import Layout
from onebasin.state import is_statistic


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


def holds(layout: Layout, mass: Mass, stacked: Mapping[str, Tensor]) -> list[Hold]:
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


def _variances(layout: Layout, stacked: Mapping[str, Tensor]) -> list[tuple[int, int, float, Tensor]]:
    """(gauge, power, eps, v + eps as (M, n)) for every gauge that moves a variance."""
    found = []
    board: Board = layout.board
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
