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

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from onebasin.align.board import Board
from onebasin.align.scale.balance_report import Balanced, Dead, Notes, sentences
from onebasin.align.scale.live import loose
from onebasin.align.scale.mass import Point
from onebasin.align.scale.norm_scale import empty, holds, without_held_biases
from onebasin.align.scale.settle import Settled, settle
from onebasin.align.scale.squares import Layout
from onebasin.cluster import Places, cluster_for
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.population.mapping import caller_bytes, mapped
from onebasin.population.writer import block_members, member_bytes
from onebasin.quiet import one_thread
from onebasin.state import State
from onebasin.symmetry import Element, Symmetry
from onebasin.symmetry.act import apply_block
from onebasin.symmetry.algebra import Wide

SMALL, LARGE = 1 << 23, 1 << 26  # bytes of a block: its masses should stay in the cache if that makes FEW members
_FOLD = 6  # times the bytes of a block that its masses and the moved members take
FEW = 64  # members, or more: with less, the calls would count more than what they do


class Options(Places, total=False):
    """The finer points of `balance`, all optional; where a population is worked on is said as in `Places`.

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
    **options: Unpack[Options],
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
    refuse_unknown(options, Options.__annotations__, "balance")
    if isinstance(what, nn.Module):
        raise InputError("balance moves a State or a Population, found a module: give model.state_dict()")
    limits = options.get("tolerance", 1e-9), options.get("sweeps", 1000)
    work = Work(Layout.of(Board.of(symmetry, statistics=True)), biases, norms, *limits)
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
        return apply_block(Wide(symmetry, work.element(solved)), stacked, 0, "value"), solved

    size, goal = _members(what), None if path is None else Path(path)
    needs = {"each": _FOLD * size * member_bytes(what.spec), "here": caller_bytes(what, path)}
    with cluster_for(options, **needs) as cluster:
        moved = mapped(what, move, cluster, path=goal, size=size, progress=options.get("progress"))
    return replace(work.report(moved.notes), population=moved.population)


def _members(population: Population) -> int:
    """How many members are balanced at a time."""
    small, large = (block_members(population.spec, size) for size in (SMALL, LARGE))
    return min(large, max(small, FEW))


def balancing(
    board: Board,
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
    work = Work(Layout.of(board), biases, norms, tolerance, sweeps, dead)
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
        self, layout: Layout, biases: bool, norms: str, tolerance: float, sweeps: int, dead: str = "keep"
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
