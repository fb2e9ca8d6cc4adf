"""Coordinate descent on the mass: all coordinates of one gauge at once, exactly, gauge after gauge.

Two coordinates of one gauge do not meet in a term (where they do, `Mass.pulls` decouples them by an upper bound), so
each is a problem of its own: with M_p the mass that it moves with power p, and b its lift,

    minimise over d:   sum of M_p exp(2 p d) - 2 b d,
    so that            sum over p > 0 of p M_p exp(2 p d) = sum over p < 0 of |p| M_p exp(2 p d) + b.

With powers 1 and -1 alone, exp(4 d) = M_-1 / M_1: a unit's incoming mass becomes its outgoing mass. Every step lowers
the mass, and the sweeps converge to its only minimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.scale.coarse import common_steps, worthwhile
from onebasin.align.scale.mass import Mass, Point
from onebasin.align.scale.norm_scale import Hold

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
