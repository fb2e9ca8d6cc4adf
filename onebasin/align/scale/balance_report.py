"""What balancing found: the result, the masses, and which units and directions were special."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.scale.live import Loose
from onebasin.align.scale.norm_scale import Hold
from onebasin.align.scale.settle import Settled
from onebasin.align.scale.squares import Layout
from onebasin.population import Population
from onebasin.state import State, is_statistic
from onebasin.symmetry import Element

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

    layout: Layout
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


def sentences(layout: Layout, counts: Counter[tuple[int, str]]) -> tuple[str, ...]:
    """One sentence for every gauge that was held."""
    made = []
    for number, gauge in enumerate(layout.gauges):
        told = [f"{count} {how}" for (held, how), count in counts.items() if held == number and count]
        if told:
            made.append(f"{gauge.name}, {gauge.kind} {gauge.generator}: no minimum; units {', '.join(told)}")
    return tuple(made)
