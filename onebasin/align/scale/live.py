"""Along which coordinates the mass has a minimum.

A unit without writers, or without readers, could be scaled for ever and the mass would keep falling. So could a ring
of units that only write to each other. A minimum exists when no direction d lets every live term fall, that is when

    sum of power * d <= 0 for all terms of positive mass   forces   d = 0.

A term that grows with d_i, and whose other coordinates cannot fall, shows d_i <= 0. `loose` collects such bounds until
nothing new is learned; a coordinate that is not bounded on both sides is loose. For networks whose terms have one
writer and one reader this is the same as lying on a live path from a pinned end to a pinned end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.scale.mass import Mass, Part, Powers


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
