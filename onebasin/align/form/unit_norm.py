"""Scales under which every unit is written by weights of Euclidean norm 1, as in paper 2.

Layer by layer this is easy: once the units that a layer reads have their scale, the norm of each of its rows is known.
In general a gauge can be settled by weights that no gauge moves which is not settled yet. `steps` finds such an order
from the structure alone: first by weights with positive powers (what writes a unit: the rows of a layer, the gamma of a
norm; where several writers can serve, their joint norm), and where no gauge is left that has any, by weights with
negative ones. So a residual stream is settled by its stem, before the blocks that read it. A bias serves only where a
unit has no such weights.

Gauges may wait for each other in a circle; in general they then have no such normal form, and `unit_norm` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.align.scale.mass import Mass, Point
from onebasin.align.scale.norm_scale import Hold, holds
from onebasin.align.scale.settle import best_step
from onebasin.align.scale.squares import Layout

Use = tuple[int, int, int]
"""A part, one of its sides, and the power that a gauge has there."""


@dataclass(frozen=True)
class Step:
    """Settle a gauge by its weights of one sign of power; where a unit has none, by biases."""

    gauge: int
    sign: int
    weights: tuple[Use, ...]
    biases: tuple[Use, ...]


def unit_norm(layout: Layout, stacked: Mapping[str, Tensor], start: int = 0) -> tuple[list[Tensor] | None, list[str]]:
    """Log scales (M, n) of every gauge of stacked networks, and sentences about what could not be had.

    None instead of scales where gauges wait for each other.
    """
    mass = layout.reduce(stacked, start=start)
    held = holds(layout, mass, stacked)
    point, notes = mass.here.copy(), []
    order = steps(mass)
    settled = {step.gauge for step in order}
    left = [gauge.name for n, gauge in enumerate(layout.gauges) if mass.touching[n] and n not in settled]
    if left:
        names = ", ".join(dict.fromkeys(left))
        return None, [f"{names}: their norms depend on each other in a circle, so the networks were balanced instead"]
    for step in order:
        bare = _settle(mass, held[step.gauge], step, point)
        if bare:
            name = layout.gauges[step.gauge].name
            notes.append(f"{name}: {bare} units have no weights to be normed by, and kept their scale")
    return point.logs, notes


def steps(mass: Mass) -> list[Step]:
    """An order in which gauges can be settled; gauges that wait for each other are not in it."""
    made: list[Step] = []
    waiting = [number for number, _ in enumerate(mass.gauges) if mass.touching[number]]
    while waiting:
        options = [_step(mass, gauge, sign, waiting) for sign in (1, -1) for gauge in waiting]
        found = next((step for step in options if step.weights), None)
        found = found or next((step for step in options if step.biases), None)
        if found is None:
            break
        made.append(found)
        waiting.remove(found.gauge)
    return made


def _step(mass: Mass, gauge: int, sign: int, waiting: list[int]) -> Step:
    uses: dict[bool, list[Use]] = {False: [], True: []}
    for number, part in enumerate(mass.parts):
        acting = [(side, other, power) for side, held in enumerate(part.sides) for other, power in held.powers]
        own = [(number, side, power) for side, other, power in acting if other == gauge]
        if len(own) == 1 and own[0][2] * sign > 0 and not any(o in waiting and o != gauge for _, o, _ in acting):
            uses[part.bias] += own
    return Step(gauge, sign, tuple(uses[False]), tuple(uses[True]))


def _settle(mass: Mass, hold: Hold, step: Step, point: Point) -> int:
    """Settle one gauge; return how many coordinates nothing could settle."""
    move, bare = _to_norm_one(mass, hold, step, point, step.weights)
    if hold.whole is not None:
        move, bare = torch.where(bare, hold.whole, move), torch.zeros_like(bare)
    elif bool(bare.any()):
        second, still = _to_norm_one(mass, hold, step, point, step.biases)
        move, bare = torch.where(bare, second, move), bare & still
    if hold.floor is not None:
        move = torch.maximum(move, hold.floor)
    point.move(step.gauge, torch.where(bare, 0.0, move))
    return int(bare.sum())


def _to_norm_one(mass: Mass, hold: Hold, step: Step, point: Point, uses: tuple[Use, ...]) -> tuple[Tensor, Tensor]:
    """The log factors (M, n) that give these weights norm 1, and where there are none."""
    pulls: dict[int, Tensor] = {}
    for number, side, power in uses:
        # best_step weighs |power| * mass against the lift of 1; the division leaves the mass itself
        moved = mass.along(number, side, point) / abs(power)
        pulls[power] = pulls[power] + moved if power in pulls else moved
    bare = sum(pulls.values(), start=torch.zeros_like(hold.pull)) == 0
    if not pulls:
        return torch.zeros_like(hold.pull), bare
    move, _ = best_step(pulls, replace(hold, pull=torch.full_like(hold.pull, float(step.sign))))
    return move, bare
