"""One step for whole layers: every gauge moves all its units by a common factor.

Sweeps alone creep through deep networks: what one layer gains is handed to the next, hundreds of times. The creeping
part is nearly constant within a gauge, so it is removed by a small problem of its own, with one number c per gauge:

    minimise over c   sum over parts of m_k exp(2 sum of power * c) - 2 sum of lift * c,

m_k being the whole mass of part k and each lift the sum over a gauge's units. This is Newton's method in as many
dimensions as there are gauges. Coordinates that may not move are left where they are: a part falls into terms by which
of its sides may move.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from onebasin.align.scale.mass import Mass, Point
from onebasin.align.scale.norm_scale import Hold

_NEWTON = 2  # steps per sweep
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
    for _ in range(_NEWTON):
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
