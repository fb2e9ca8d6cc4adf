"""A normal form without a reference: one network for every orbit, whichever of its networks is given.

First scales are removed, then signs, then the order of units; each rule depends only on what the freedoms that are
still open leave as it is. For networks in general position `canonicalise(g.w) == canonicalise(w)` for every g of the
group. Exceptions: units with equal keys (reported in `ties`; harmless where they are copies of each other), signs that
no weight shows alone, and, with unit norms, units without weights (both reported in `notes`).

>>> from torch import nn
>>> import onebasin as ob
>>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
>>> symmetry = ob.discover(model, torch.zeros(1, 3))
>>> here = canonicalise(model.double().state_dict(), symmetry).state
>>> there = canonicalise(symmetry.apply(symmetry.random(0), model.state_dict()), symmetry).state
>>> all(torch.allclose(here[name], there[name], atol=1e-10) for name in here)
True
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from onebasin.alignment.balance import (
    Balancer,
    Lift,
    LogScales,
    Mass,
    MassLayout,
    best_step,
    check_members_finite,
    is_bias,
    lifts_of,
)
from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.errors import InputError
from onebasin.parallel import Executor, executor_for
from onebasin.population import Population, chain_series, map_blocks
from onebasin.reporting import (
    Axis,
    Column,
    Figure,
    Panel,
    Record,
    Result,
    Table,
    cells_of,
    largest_first,
    result_record,
    size_in,
)
from onebasin.state import State, is_statistic
from onebasin.symmetry import Element, ExpandedElement, Symmetry, apply_block

Tables = dict[tuple[int, int], Tensor]
"""(space, generator) -> factors (M, coordinates)."""


class Blocks:
    """The blocks of M networks in float64, (M, *dims, rest) each: rescaled without touching the originals."""

    def __init__(self, layout: BlockLayout, stacked: Mapping[str, Tensor]) -> None:
        self.layout = layout
        self.values = [block.take(stacked[block.tensor]).double() for block in layout.blocks]

    def rescale(self, tables: Tables) -> None:
        """Multiply by powers of factors."""
        for number, block in enumerate(self.layout.blocks):
            for axis in block.axes:
                for generator, power in enumerate(axis.powers):
                    table = tables.get((axis.space, generator))
                    if power and table is not None:
                        self.values[number] = self.values[number] * block.spread(axis, table**power)

    def of_space(self, space: int) -> Iterator[tuple[TensorBlock, BlockAxis, Tensor]]:
        """Every block that a space moves, with its axis there and the values."""
        for block, values in zip(self.layout.blocks, self.values, strict=True):
            for axis in block.axes:
                if axis.space == space:
                    yield block, axis, values


_NOTHING = 1e-12  # an odd sum that is smaller, relative to the sum of absolute values, says nothing


def choose_signs(blocks: Blocks) -> tuple[Tables, list[tuple[int, int]]]:
    """Flip the blocks; return the signs (M, n) of each (space, generator) that has a rule, and those left open.

    A sign can be read off weights that it turns and that no other open sign turns: the sum of their cubes, which does
    not depend on the order of units, is to be positive. So signs are chosen outwards from the rigid axes: inputs,
    outputs, the gamma of a norm (which is looked at first, so that gammas come out positive). Several signs of one unit
    that only occur together are told apart by elimination over GF(2).
    """
    spaces = blocks.layout.spaces
    open_signs = [
        (n, g) for n, space in enumerate(spaces) for g, kind in enumerate(space.generators) if kind.endswith("sign")
    ]
    signs: Tables = {}
    while open_signs:
        chosen: Tables = {}
        for space in dict.fromkeys(number for number, _ in open_signs):
            chosen = _of_space(blocks, space, open_signs)
            if chosen:
                break
        if not chosen:
            break
        blocks.rescale(chosen)
        signs.update(chosen)
        open_signs = [key for key in open_signs if key not in chosen]
    return signs, open_signs


def turning_signs(block: TensorBlock, open_signs: list[tuple[int, int]]) -> list[tuple[BlockAxis, frozenset[int]]]:
    """The feet of a block that open signs turn, with the generators that do."""
    turning = []
    for axis in block.axes:
        odd = frozenset(g for g, power in enumerate(axis.powers) if power % 2 and (axis.space, g) in open_signs)
        if odd:
            turning.append((axis, odd))
    return turning


def _of_space(blocks: Blocks, space: int, open_signs: list[tuple[int, int]]) -> Tables:
    """The signs of one space that can be read now."""
    seen: dict[frozenset[int], list[tuple[tuple[bool, bool], TensorBlock, BlockAxis, Tensor]]] = {}
    for block, axis, values in blocks.of_space(space):
        turned = turning_signs(block, open_signs)
        if [turned_axis for turned_axis, _ in turned] == [axis]:
            bias = is_bias(block.tensor)
            rank = (bias, set(axis.dims) != set(range(len(block.dims))) or values.shape[-1] > 1)  # a gamma comes first
            seen.setdefault(turned[0][1], []).append((rank, block, axis, values))
    signs: Tables = {}
    for generator, combination in _eliminate(list(seen)).items():
        sign = torch.ones((), dtype=torch.float64)
        for odd in combination:
            ranked = sorted(seen[odd], key=lambda item: item[0])
            sign = sign * _first([_odd(block, axis, values) for _, block, axis, values in ranked])
        signs[space, generator] = sign
    return signs


def _eliminate(rows: list[frozenset[int]]) -> dict[int, list[frozenset[int]]]:
    """Generator -> rows whose sum over GF(2) is that generator alone, where there are such rows."""
    reduced: list[tuple[set[int], set[frozenset[int]]]] = []
    for row in rows:
        remaining, rows_used = set(row), {row}
        for pivot, combination in reduced:
            if min(pivot) in remaining:
                remaining, rows_used = remaining ^ pivot, rows_used ^ combination
        if remaining:
            reduced = [
                (other ^ remaining, combination ^ rows_used) if min(remaining) in other else (other, combination)
                for other, combination in reduced
            ]
            reduced.append((remaining, rows_used))
    return {min(remaining): sorted(rows_used, key=sorted) for remaining, rows_used in reduced if len(remaining) == 1}


def _odd(block: TensorBlock, axis: BlockAxis, values: Tensor) -> list[Tensor]:
    """Sums over a unit's entries (M, n) that turn with its sign: of cubes, and of cubes weighted along the rest."""
    cubes = values**3
    others = block.other_dims(axis)
    sums = []
    for table in (cubes.sum(-1), (cubes * torch.arange(1, cubes.shape[-1] + 1, device=cubes.device)).sum(-1)):
        total = axis.flatten(table.sum(others) if others else table)
        size = axis.flatten(cubes.abs().sum(-1).sum(others) if others else cubes.abs().sum(-1))
        sums.append(torch.where(total.abs() > _NOTHING * cubes.shape[-1] * size, total, 0.0))
    return sums


def _first(options: list[list[Tensor]]) -> Tensor:
    """The sign of the first number that says something; 1 where none does."""
    sign = torch.zeros_like(options[0][0])
    for tables in options:
        for table in tables:
            sign = torch.where(sign == 0, table.sign(), sign)
    return torch.where(sign == 0, 1.0, sign)


ORDERS = ("max", "first", "norm", "mean")
_TIE = 1e-10  # keys closer than this, relative to the largest, are equal

OpenSigns = list[tuple[int, int]]
"""(space, generator) of signs without a rule: there only absolute values count."""


def unit_orders(blocks: Blocks, order: str, open_signs: OpenSigns) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Put the units of every permutable space in descending order of keys.

    A key may not depend on the order of any other space. "max" and "mean" run over all entries of a unit in the first
    tensor of its space (as a rule what writes it: a row of a layer), "norm" over all its entries in all tensors.
    "first" is the released code of paper 2: the first entry of the row, taken after what the row reads has been put in
    order; along axes that have no order yet the maximum is taken. All tables are in the coordinates of the given
    network.

    Returns:
        Space -> the units of each copy, in order (M, copies, n); space -> (M,) number of units that stayed tied.
    """
    orders: dict[int, Tensor] = {}
    ties: dict[int, Tensor] = {}
    for number, space in enumerate(blocks.layout.spaces):
        if space.permutable:
            keys = [key(blocks, number, order, open_signs, orders), *_second(blocks, number)]
            shape = (len(keys[0]), space.copies, space.size)
            orders[number], tied = _ranked([table.reshape(shape) for table in keys])
            ties[number] = tied.sum((1, 2))
    return orders, ties


def key(blocks: Blocks, space: int, order: str, open_signs: OpenSigns, known: dict[int, Tensor]) -> Tensor:
    """The key of every unit of a space: (M, coordinates)."""
    if order == "norm":
        return _second(blocks, space)[0]
    places = [item for item in blocks.of_space(space) if not is_bias(item[0].tensor)] or list(blocks.of_space(space))
    first = places[0][0].tensor
    tables, seen = [], set()
    for block, axis, values in places:
        if block.tensor == first and id(block) not in seen:  # a space that moves two axes of a block counts once
            seen.add(id(block))
            if turning_signs(block, open_signs):
                values = values.abs()
            tables.append(_reduce(blocks, block, axis, values, order, known))
    stacked = torch.stack(tables)
    return stacked.mean(0) if order == "mean" else stacked.amax(0) if order == "max" else stacked[0]


def _reduce(
    blocks: Blocks, block: TensorBlock, axis: BlockAxis, values: Tensor, order: str, known: dict[int, Tensor]
) -> Tensor:
    """One number for every coordinate of a foot: (M, coordinates)."""
    if order in ("mean", "max"):
        return block.reduce(axis, values, torch.mean if order == "mean" else torch.amax)
    values = values[..., 0]
    for dim in reversed(block.other_dims(axis)):
        units = [
            other for other in block.axes if other.dims[-1] == dim - 1 and blocks.layout.spaces[other.space].permutable
        ]
        ordered = [other for other in units if other.space in known and len(other.dims) == 1]
        if not units:
            values = values.select(dim, 0)
        elif ordered:
            leader = known[ordered[0].space][:, 0, 0]  # the unit that comes first, in each member
            shape = [len(values), *[1] * (values.dim() - 1)]
            index = leader.reshape(shape).expand(*[1 if d == dim else n for d, n in enumerate(values.shape)])
            values = values.gather(dim, index).squeeze(dim)
        else:
            values = values.amax(dim)
    return axis.flatten(values)


def _second(blocks: Blocks, space: int) -> list[Tensor]:
    """Keys for units whose first keys are equal: sums of squares and of fourth powers of all weights of a unit."""
    totals: list[Tensor] = []
    for power in (2, 4):
        tables = [block.reduce(axis, values**power, torch.sum) for block, axis, values in blocks.of_space(space)]
        totals.append(torch.stack(tables).sum(0))
    return totals


def _ranked(keys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sort (M, copies, n) by several keys, descending; which units are equal in all of them."""
    runs = torch.zeros_like(keys[0], dtype=torch.long)
    for table in keys:
        scale = table.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(table.dtype).tiny)
        order = _lexicographic(runs, table)
        sorted_runs, sorted_keys = runs.gather(-1, order), table.gather(-1, order) / scale
        new = torch.zeros_like(sorted_runs)
        new[..., 1:] = ((sorted_keys.diff(dim=-1).abs() > _TIE) | (sorted_runs.diff(dim=-1) > 0)).long().cumsum(-1)
        runs = torch.empty_like(runs).scatter(-1, order, new)
    order = _lexicographic(runs, torch.zeros_like(keys[0]))
    same = runs.gather(-1, order).diff(dim=-1) == 0
    tied = torch.zeros_like(runs, dtype=torch.bool)
    tied[..., 1:] |= same
    tied[..., :-1] |= same
    return order, tied


def _lexicographic(runs: Tensor, table: Tensor) -> Tensor:
    """Order by runs ascending, within a run by the table descending, then as it was."""
    by_key = table.argsort(dim=-1, descending=True, stable=True)
    by_run = runs.gather(-1, by_key).argsort(dim=-1, stable=True)
    return by_key.gather(-1, by_run)


Use = tuple[int, int, int]
"""A part, one of its sides, and the power that a gauge has there."""


@dataclass(frozen=True)
class Step:
    """Fixes a gauge by its weights of one sign of power; where a unit has none, by biases."""

    gauge: int
    sign: int
    weights: tuple[Use, ...]
    biases: tuple[Use, ...]


def unit_norm(
    layout: MassLayout, stacked: Mapping[str, Tensor], start: int = 0
) -> tuple[list[Tensor] | None, list[str]]:
    """Log scales (M, n) under which every unit is written by weights of norm 1, as in paper 2, and sentences.

    Layer by layer this is easy: once the units that a layer reads have their scale, the norm of each of its rows is
    known. In general a gauge can be fixed by weights that no gauge moves which is not fixed yet. `steps` finds such an
    order from the structure alone: first by weights with positive powers (what writes a unit: the rows of a layer, the
    gamma of a norm; where several writers can serve, their joint norm), and where no gauge is left that has any, by
    weights with negative ones. So a residual stream is fixed by its stem, before the blocks that read it. A bias serves
    only where a unit has no such weights. Gauges may wait for each other in a circle; in general they then have no such
    normal form, and None is returned instead of scales.
    """
    mass = layout.reduce(stacked, start=start)
    lifts = lifts_of(layout, mass, stacked)
    point, notes = mass.here.copy(), []
    order = steps(mass)
    ordered = {step.gauge for step in order}
    circular = [gauge.name for n, gauge in enumerate(layout.gauges) if mass.touching[n] and n not in ordered]
    if circular:
        names = ", ".join(dict.fromkeys(circular))
        return None, [f"{names}: their norms depend on each other in a circle, so the networks were balanced instead"]
    for step in order:
        bare = _fix_scale(mass, lifts[step.gauge], step, point)
        if bare:
            name = layout.gauges[step.gauge].name
            notes.append(f"{name}: {bare} units have no weights to be normed by, and kept their scale")
    return point.logs, notes


def steps(mass: Mass) -> list[Step]:
    """An order in which gauges can be fixed; gauges that wait for each other are not in it."""
    ordered: list[Step] = []
    waiting = [number for number, _ in enumerate(mass.gauges) if mass.touching[number]]
    while waiting:
        options = [_step(mass, gauge, sign, waiting) for sign in (1, -1) for gauge in waiting]
        step = next((step for step in options if step.weights), None)
        step = step or next((step for step in options if step.biases), None)
        if step is None:
            break
        ordered.append(step)
        waiting.remove(step.gauge)
    return ordered


def _step(mass: Mass, gauge: int, sign: int, waiting: list[int]) -> Step:
    uses: dict[bool, list[Use]] = {False: [], True: []}
    for number, part in enumerate(mass.parts):
        acting = [
            (side, other, power) for side, acting_side in enumerate(part.sides) for other, power in acting_side.powers
        ]
        uses_here = [(number, side, power) for side, other, power in acting if other == gauge]
        if (
            len(uses_here) == 1
            and uses_here[0][2] * sign > 0
            and not any(o in waiting and o != gauge for _, o, _ in acting)
        ):
            uses[part.bias] += uses_here
    return Step(gauge, sign, tuple(uses[False]), tuple(uses[True]))


def _fix_scale(mass: Mass, lift: Lift, step: Step, point: LogScales) -> int:
    """Fix one gauge; return how many coordinates have no weights for it."""
    move, bare = _to_norm_one(mass, lift, step, point, step.weights)
    if lift.unit_variance is not None:
        move, bare = torch.where(bare, lift.unit_variance, move), torch.zeros_like(bare)
    elif bool(bare.any()):
        second, without_biases = _to_norm_one(mass, lift, step, point, step.biases)
        move, bare = torch.where(bare, second, move), bare & without_biases
    if lift.floor is not None:
        move = torch.maximum(move, lift.floor)
    point.move(step.gauge, torch.where(bare, 0.0, move))
    return int(bare.sum())


def _to_norm_one(mass: Mass, lift: Lift, step: Step, point: LogScales, uses: tuple[Use, ...]) -> tuple[Tensor, Tensor]:
    """The log factors (M, n) that give these weights norm 1, and where there are none."""
    masses: dict[int, Tensor] = {}
    for number, side, power in uses:
        # best_step weighs |power| * mass against the lift of 1; the division leaves the mass itself
        moved = mass.along(number, side, point) / abs(power)
        masses[power] = masses[power] + moved if power in masses else moved
    bare = sum(masses.values(), start=torch.zeros_like(lift.values)) == 0
    if not masses:
        return torch.zeros_like(lift.values), bare
    move, _ = best_step(masses, replace(lift, values=torch.full_like(lift.values, float(step.sign))))
    return move, bare


FORM_SCALES = ("balanced", "unit-norm", "keep")
FORM = "balanced/max"  # scale and order by default
_FEW = 1e-3  # part of the weights: where fewer make up the squared norm, distances are those of these few
_FEWEST = 2.0  # of them, whatever the number of all
_TINY = 1e-300
_SMALL = 20  # weights; of fewer, two may well be most
_TOLERANCE, _SWEEPS = 1e-13, 200  # of balancing: nearly as far as float64 goes


@dataclass(frozen=True, eq=False, repr=False)
class Canonical(Result):
    """Networks in normal form.

    Attributes:
        element: what was applied; a batch for a population.
        ties: space -> (members,) number of units whose order was left as it was, because their keys are equal; only
            spaces with any.
        notes: sentences about what has no normal form here, and about a form that is ill-conditioned.
        effective: (members,) how many weights make up the squared norm in this form, (sum w^2)^2 / sum w^4.
        largest: (members,) the largest absolute value of a weight in this form.
        population: the result, of a population.
        state: the result, of one network.
    """

    element: Element
    ties: Mapping[str, Tensor]
    notes: tuple[str, ...]
    effective: Tensor
    largest: Tensor
    population: Population | None = None
    state: State | None = None

    def record(self) -> Record:
        """How well conditioned the form of each network is, and where units tie."""
        members, chain = len(self.effective), None if self.population is None else self.population.chain
        least = float(self.effective.min())
        tied = f"units tie in {', '.join(self.ties)}" if self.ties else "no units tie"
        text = (
            f"At least {least:,.1f} weights make up the squared norm of a network, the largest weight is "
            f"{float(self.largest.max()):.3g}, and {tied}.",
            *self.notes,
        )
        rows = (
            cells_of(str(member), float(self.effective[member]), float(self.largest[member]))
            for member in range(members)
        )
        ties = tuple(cells_of(space, int((counts > 0).sum()), int(counts.max())) for space, counts in self.ties.items())
        items = [Table("networks", "How well conditioned is the form?", _FORM, tuple(largest_first(rows, size_in(2))))]
        items += [Table("ties", "Which units have equal keys?", _TIES, ties)] if ties else []
        figure = Figure(
            "condition",
            "Do few weights hold all of the norm?",
            text[0],
            tuple(
                Panel(
                    "points",
                    "",
                    Axis("network, in the order of the population"),
                    Axis(what, "log"),
                    chain_series(range(members), chain, torch.arange(members), values),
                )
                for what, values in (
                    ("weights in the squared norm", self.effective),
                    ("largest weight", self.largest),
                )
            ),
        )
        return result_record(
            "canonical",
            f"Normal form of {members:,} network{'s' if members != 1 else ''}",
            text,
            (*items, figure),
            values={
                **{"effective": self.effective.tolist(), "largest": self.largest.tolist(), "notes": self.notes},
                **{"ties": {space: counts.tolist() for space, counts in self.ties.items()}},
            },
        )


_FORM = (
    Column("network"),
    Column("effective weights", "(sum w^2)^2 / sum w^4: how many make up the squared norm", "higher", 1),
    Column("largest weight", "absolute value", digits=3),
)
_TIES = (
    Column("space"),
    Column("networks", "in which units of the space have equal keys", digits=0),
    Column("units", "at most in one network, whose order was left as it was", digits=0),
)


def canonicalise(
    what: Population | Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    scale: str = "balanced",
    order: str = "max",
    signs: bool = True,
    path: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Canonical:
    """Bring networks into their normal form.

    With unit norms, the form of paper 2, a unit whose incoming weights have decayed while its bias has not gets an
    enormous bias, which then is all that distances see. Such a form is called ill-conditioned in `notes`: fewer than
    one weight in a thousand, or than two, make up the squared norm of a network. Balanced networks are the lightest of
    their orbit and cannot explode.

    Args:
        what: a population, or one network; it is not changed.
        symmetry: of the networks' model.
        scale: "balanced" (least mass), "unit-norm" (what writes a unit has norm 1, layer by layer) or "keep".
        order: descending "max", "first", "norm" or "mean" of a unit's weights (see `unit_orders`), or "keep".
        signs: choose signs too.
        path: write the resulting population to this folder instead of keeping it in memory.
        workers: processes on this machine, for a population; without effect on the result.
        executor: "local" or the address of a Ray cluster, or an open executor.
    """
    if isinstance(what, nn.Module):
        raise InputError("canonicalise moves a State or a Population, found a module: give model.state_dict()")
    for name, value, known in (("scale", scale, FORM_SCALES), ("order", order, (*ORDERS, "keep"))):
        if value not in known:
            raise InputError(f"{name} must be one of {', '.join(known)}, found {value!r}")
    form = NormalForm(symmetry, scale, order, signs)
    if not isinstance(what, Population):
        if path is not None:
            raise InputError("path= is for populations, found one network: save the state of the result yourself")
        stacked, result = form({name: tensor[None] for name, tensor in what.items()}, 0, None)
        state = {name: tensor[0] for name, tensor in stacked.items()}
        element, ties = result.element.member(0), _only_tied(result.ties)
        return _with_condition(replace(result, element=element, ties=ties, state=state))
    if not len(what):
        raise InputError("expected a population of at least one network, found none: give networks to canonicalise")
    with executor_for(workers, executor) as opened:
        moved = map_blocks(what, form, opened, path=None if path is None else Path(path))
    return _with_condition(replace(_joined(moved.notes), population=moved.population))


canonicalize = canonicalise


def _conditions(stacked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of stacked networks (M, *shape): `effective` and `largest` of `Canonical`, float64 (M,)."""
    rows = []  # of each tensor: its largest weight, and sums of squares and fourth powers in units of that
    for name, values in stacked.items():
        if values.is_floating_point() and values.numel() and not is_statistic(name):
            sizes = values.detach().flatten(1).abs().double()
            top = sizes.amax(1)
            squares = (sizes / top.clamp_min(_TINY)[:, None]).square_()
            rows.append(torch.stack([top, squares.sum(1), squares.square_().sum(1)]).cpu())
    if not rows:
        members = len(next(iter(stacked.values())))
        return torch.full((members,), torch.inf, dtype=torch.float64), torch.zeros(members, dtype=torch.float64)
    tops, second, fourth = torch.stack(rows, 1)  # (tensors, M) each
    largest = tops.amax(0)
    share = (tops / largest.clamp_min(_TINY)).square()
    second, fourth = (share * second).sum(0), (share.square() * fourth).sum(0)
    return torch.where(fourth > 0, second.square() / fourth, torch.inf), largest


def _with_condition(form: Canonical) -> Canonical:
    """The same with a note where a few weights decide all distances."""
    tensors = form.state if form.state is not None else form.population.spec if form.population is not None else {}
    weights = sum(
        math.prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype.is_floating_point and not is_statistic(name)
    )
    bad = form.effective < max(_FEWEST, _FEW * weights)
    if weights < _SMALL or not bool(bad.any()):
        return form
    few, top = float(form.effective[bad].min()), float(form.largest.max())
    note = (
        f"ill-conditioned: in {int(bad.sum()):,} of {len(bad):,} networks few weights, {few:.0f} of {weights:,}, "
        f"hold nearly all of the squared norm, and distances see little else; the largest is {top:.2g}; "
        'scale="balanced" keeps networks light'
    )
    return replace(form, notes=(*form.notes, note))


class NormalForm:
    """The rules of a normal form, applied to stacked networks."""

    def __init__(self, symmetry: Symmetry, scale: str, order: str, signs: bool) -> None:
        self.symmetry, self.scale, self.order, self.signs = symmetry, scale, order, signs
        self.layout = MassLayout.of(BlockLayout.of(symmetry, statistics=True))
        self.weights = BlockLayout.of(symmetry)

    def __call__(self, stacked: State, start: int, beside: None) -> tuple[State, Canonical]:
        """Bring stacked networks into normal form."""
        form = self.find(stacked, start)
        moved = apply_block(ExpandedElement(self.symmetry, form.element), stacked, 0, "value")
        effective, largest = _conditions(moved)
        return moved, replace(form, effective=effective, largest=largest)

    def find(self, stacked: Mapping[str, Tensor], start: int) -> Canonical:
        """What brings stacked networks (M, *shape) into normal form; `start` numbers the first."""
        self.weights.check(stacked, where=f"member {start}", batched=True)
        blocks = Blocks(self.weights, stacked)
        factors, notes = self._scales(stacked, start)
        blocks.rescale(factors)
        open_signs: list[tuple[int, int]] = []
        if self.signs:
            turned, open_signs = choose_signs(blocks)
            factors.update(turned)
            for space, generator in open_signs:
                name, kind = self.symmetry.spaces[space].name, self.symmetry.spaces[space].generators[generator]
                notes = (*notes, f"{name}: {kind} {generator} was left open, no weight shows it alone")
        members = len(next(iter(stacked.values())))
        unknown = torch.full((members,), torch.nan, dtype=torch.float64)
        if self.order == "keep":
            return Canonical(self._element(members, factors, {}), {}, notes, unknown, unknown)
        orders, ties = unit_orders(blocks, self.order, open_signs)
        named = {self.symmetry.spaces[space].name: counts.cpu() for space, counts in ties.items()}
        return Canonical(self._element(members, factors, orders), named, notes, unknown, unknown)

    def _scales(self, stacked: Mapping[str, Tensor], start: int) -> tuple[Tables, tuple[str, ...]]:
        """Factors of the scales, and what there is to say about them."""
        logs: list[Tensor] | None = None
        notes: tuple[str, ...] = ()
        if self.scale == "keep":
            check_members_finite(stacked, start)
            return {}, notes
        if self.scale == "unit-norm":
            logs, sentences = unit_norm(self.layout, stacked, start)
            notes = tuple(sentences)
        if logs is None:
            balancer = Balancer(self.layout, True, "unit", _TOLERANCE, _SWEEPS, dead="unit")
            logs = balancer.solve(stacked, start).minimum.logs
        gauges = [(gauge.space, gauge.generator) for gauge in self.layout.gauges]
        return {key: table.exp() for key, table in zip(gauges, logs, strict=True)}, notes

    def _element(self, members: int, factors: Tables, orders: dict[int, Tensor]) -> Element:
        """Orders and factors in the coordinates of the given networks, as elements."""
        scaled = self.symmetry.identity(members)
        for (space, generator), table in factors.items():
            table_of_space = scaled.factors[self.symmetry.spaces[space].name]
            table_of_space[generator] = table.cpu().reshape(table_of_space[generator].shape)
        turned = ExpandedElement(self.symmetry, self.symmetry.identity(members))
        for space, order in sorted(orders.items()):  # parents first: a child is listed by the new place of its parent
            origin = turned.origin(space)
            turned.orders[space] = order.cpu().gather(1, origin[:, :, None].expand(-1, -1, order.shape[2]))
        return self.symmetry.compose(turned.narrow(), scaled)


def _only_tied(ties: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The spaces with any."""
    return {name: counts for name, counts in ties.items() if counts.any()}


def _joined(parts: list[Canonical]) -> Canonical:
    """Lay batches end to end."""
    elements = [part.element for part in parts]
    element = Element(
        {
            name: torch.cat([element_of_block.orders[name] for element_of_block in elements])
            for name in elements[0].orders
        },
        {
            name: torch.cat([element_of_block.factors[name] for element_of_block in elements], 1)
            for name in elements[0].factors
        },
        sum(element_of_block.members or 0 for element_of_block in elements),
    )
    ties = {name: torch.cat([part.ties[name] for part in parts]) for name in parts[0].ties}
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    effective, largest = (
        torch.cat(element_of_block) for element_of_block in ([p.effective for p in parts], [p.largest for p in parts])
    )
    return Canonical(element, _only_tied(ties), notes, effective, largest)
