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
from typing import Unpack

import torch
from torch import Tensor, nn

from onebasin.alignment.balance import Hold, Mass, Point, SquaresLayout, Work, best_step, check_finite, holds, is_bias
from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.errors import InputError, check_options
from onebasin.parallel import ExecutionOptions, executor_for
from onebasin.population import BLOCK_BYTES, Population, caller_bytes, mapped, member_bytes
from onebasin.state import State, is_statistic
from onebasin.symmetry import Element, ExpandedElement, Symmetry, apply_block

Tables = dict[tuple[int, int], Tensor]
"""(space, generator) -> factors (M, coordinates)."""


class Pieces:
    """The blocks of M networks: values (M, *dims, rest) of every block."""

    def __init__(self, board: BlockLayout, stacked: Mapping[str, Tensor]) -> None:
        """Cut stacked networks (M, *shape)."""
        self.board = board
        self.values = [block.take(stacked[block.tensor]).double() for block in board.blocks]

    def rescale(self, tables: Tables) -> None:
        """Act with factors."""
        for number, block in enumerate(self.board.blocks):
            for foot in block.feet:
                for generator, power in enumerate(foot.powers):
                    table = tables.get((foot.space, generator))
                    if power and table is not None:
                        self.values[number] = self.values[number] * block.spread(foot, table**power)

    def standing(self, space: int) -> Iterator[tuple[TensorBlock, BlockAxis, Tensor]]:
        """Every block in which a space stands, with its foot there and the values."""
        for block, values in zip(self.board.blocks, self.values, strict=True):
            for foot in block.feet:
                if foot.space == space:
                    yield block, foot, values


def along(foot: BlockAxis, table: Tensor) -> Tensor:
    """A table over a foot's dims in their order in the block, as (M, coordinates)."""
    kept = sorted(foot.dims)
    return table.permute(0, *[1 + kept.index(dim) for dim in foot.dims]).flatten(1)


_NOTHING = 1e-12  # an odd sum that is smaller, relative to the sum of absolute values, says nothing


def settle_signs(pieces: Pieces) -> tuple[Tables, list[tuple[int, int]]]:
    """Turn the pieces; return the signs (M, n) of each (space, generator) that was settled, and those left open."""
    spaces = pieces.board.spaces
    still = [
        (n, g) for n, space in enumerate(spaces) for g, kind in enumerate(space.generators) if kind.endswith("sign")
    ]
    settled: Tables = {}
    while still:
        found: Tables = {}
        for space in dict.fromkeys(number for number, _ in still):
            found = _of_space(pieces, space, still)
            if found:
                break
        if not found:
            break
        pieces.rescale(found)
        settled.update(found)
        still = [key for key in still if key not in found]
    return settled, still


def open_signs(block: TensorBlock, still: list[tuple[int, int]]) -> list[tuple[BlockAxis, frozenset[int]]]:
    """The feet of a block that open signs turn, with the generators that do."""
    found = []
    for foot in block.feet:
        odd = frozenset(g for g, power in enumerate(foot.powers) if power % 2 and (foot.space, g) in still)
        if odd:
            found.append((foot, odd))
    return found


def _of_space(pieces: Pieces, space: int, still: list[tuple[int, int]]) -> Tables:
    """The signs of one space that can be read now."""
    seen: dict[frozenset[int], list[tuple[tuple[bool, bool], TensorBlock, BlockAxis, Tensor]]] = {}
    for block, foot, values in pieces.standing(space):
        turned = open_signs(block, still)
        if [held for held, _ in turned] == [foot]:
            bias = is_bias(block.tensor)
            rank = (bias, set(foot.dims) != set(range(len(block.dims))) or values.shape[-1] > 1)  # a gamma comes first
            seen.setdefault(turned[0][1], []).append((rank, block, foot, values))
    found: Tables = {}
    for generator, combination in _eliminate(list(seen)).items():
        sign = torch.ones((), dtype=torch.float64)
        for odd in combination:
            ranked = sorted(seen[odd], key=lambda item: item[0])
            sign = sign * _first([_odd(block, foot, values) for _, block, foot, values in ranked])
        found[space, generator] = sign
    return found


def _eliminate(rows: list[frozenset[int]]) -> dict[int, list[frozenset[int]]]:
    """Generator -> rows whose sum over GF(2) is that generator alone, where there are such rows."""
    reduced: list[tuple[set[int], set[frozenset[int]]]] = []
    for row in rows:
        left, made = set(row), {row}
        for pivot, combination in reduced:
            if min(pivot) in left:
                left, made = left ^ pivot, made ^ combination
        if left:
            reduced = [
                (other ^ left, combination ^ made) if min(left) in other else (other, combination)
                for other, combination in reduced
            ]
            reduced.append((left, made))
    return {min(left): sorted(made, key=sorted) for left, made in reduced if len(left) == 1}


def _odd(block: TensorBlock, foot: BlockAxis, values: Tensor) -> list[Tensor]:
    """Sums over a unit's entries (M, n) that turn with its sign: of cubes, and of cubes weighted along the rest."""
    cubes = values**3
    others = [1 + dim for dim in range(len(block.dims)) if dim not in foot.dims]
    sums = []
    for table in (cubes.sum(-1), (cubes * torch.arange(1, cubes.shape[-1] + 1, device=cubes.device)).sum(-1)):
        total = along(foot, table.sum(others) if others else table)
        size = along(foot, cubes.abs().sum(-1).sum(others) if others else cubes.abs().sum(-1))
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

Open = list[tuple[int, int]]
"""(space, generator) of signs that could not be settled: there only absolute values say something."""


def orders(pieces: Pieces, order: str, still: Open) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Put the units of every permutable space in descending order.

    Returns:
        Space -> the units of each copy, in order (M, copies, n); space -> (M,) number of units that stayed tied.
    """
    made: dict[int, Tensor] = {}
    ties: dict[int, Tensor] = {}
    for number, space in enumerate(pieces.board.spaces):
        if space.permutable:
            keys = [key(pieces, number, order, still, made), *_second(pieces, number)]
            shape = (len(keys[0]), space.copies, space.size)
            made[number], tied = _ranked([table.reshape(shape) for table in keys])
            ties[number] = tied.sum((1, 2))
    return made, ties


def key(pieces: Pieces, space: int, order: str, still: Open, known: dict[int, Tensor]) -> Tensor:
    """The key of every unit of a space: (M, coordinates)."""
    if order == "norm":
        return _second(pieces, space)[0]
    standing = [item for item in pieces.standing(space) if not is_bias(item[0].tensor)] or list(pieces.standing(space))
    first = standing[0][0].tensor
    tables, seen = [], set()
    for block, foot, values in standing:
        if block.tensor == first and id(block) not in seen:  # a space that stands twice in a block counts once
            seen.add(id(block))
            if open_signs(block, still):
                values = values.abs()
            tables.append(_reduce(pieces, block, foot, values, order, known))
    stacked = torch.stack(tables)
    return stacked.mean(0) if order == "mean" else stacked.amax(0) if order == "max" else stacked[0]


def _reduce(
    pieces: Pieces, block: TensorBlock, foot: BlockAxis, values: Tensor, order: str, known: dict[int, Tensor]
) -> Tensor:
    """One number for every coordinate of a foot: (M, coordinates)."""
    others = [1 + dim for dim in range(len(block.dims)) if dim not in foot.dims]
    if order == "mean":
        return along(foot, values.mean([*others, values.dim() - 1]))
    if order == "max":
        return along(foot, values.amax([*others, values.dim() - 1]))
    values = values[..., 0]
    for dim in reversed(others):
        units = [
            other for other in block.feet if other.dims[-1] == dim - 1 and pieces.board.spaces[other.space].permutable
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
    return along(foot, values)


def _second(pieces: Pieces, space: int) -> list[Tensor]:
    """What decides where first keys are equal: sums of squares and of fourth powers of all that hangs on a unit."""
    totals: list[Tensor] = []
    for power in (2, 4):
        tables = [
            along(foot, (values**power).sum([*[1 + d for d in range(len(block.dims)) if d not in foot.dims], -1]))
            for block, foot, values in pieces.standing(space)
        ]
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
    """Settle a gauge by its weights of one sign of power; where a unit has none, by biases."""

    gauge: int
    sign: int
    weights: tuple[Use, ...]
    biases: tuple[Use, ...]


def unit_norm(
    layout: SquaresLayout, stacked: Mapping[str, Tensor], start: int = 0
) -> tuple[list[Tensor] | None, list[str]]:
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


FORM_SCALES = ("balanced", "unit-norm", "keep")
FORM = "balanced/max"  # scale and order where nobody says which
_FEW = 1e-3  # part of the weights: where fewer make up the squared norm, distances are those of these few
_FEWEST = 2.0  # of them, whatever the number of all
_TINY = 1e-300
_SMALL = 20  # weights; of fewer, two may well be most
_TOLERANCE, _SWEEPS = 1e-13, 200  # of balancing: nearly as far as float64 goes
_FOLD = 8  # times the bytes of a block that its pieces take


@dataclass(frozen=True, eq=False)
class Canonical:
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


def canonicalise(
    what: Population | Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    scale: str = "balanced",
    order: str = "max",
    signs: bool = True,
    path: str | os.PathLike[str] | None = None,
    **places: Unpack[ExecutionOptions],
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
        order: descending "max", "first", "norm" or "mean" of a unit's weights (see `order_keys`), or "keep".
        signs: settle signs.
        path: write the resulting population to this folder instead of keeping it in memory.
        **places: where a population is worked on, see `ExecutionOptions`.
    """
    check_options(places, ExecutionOptions.__annotations__, "canonicalise")
    if isinstance(what, nn.Module):
        raise InputError("canonicalise moves a State or a Population, found a module: give model.state_dict()")
    for name, value, known in (("scale", scale, FORM_SCALES), ("order", order, (*ORDERS, "keep"))):
        if value not in known:
            raise InputError(f"{name} must be one of {', '.join(known)}, found {value!r}: choose one of them")
    form = Form(symmetry, scale, order, signs)
    if not isinstance(what, Population):
        if path is not None:
            raise InputError("path= is for populations, found one network: save the state of the result yourself")
        stacked, found = form({name: tensor[None] for name, tensor in what.items()}, 0, None)
        state = {name: tensor[0] for name, tensor in stacked.items()}
        return _conditioned(replace(found, element=found.element.member(0), ties=_told(found.ties), state=state))
    if not len(what):
        raise InputError("expected a population of at least one network, found none: give networks to canonicalise")
    each = _FOLD * min(what.nbytes, BLOCK_BYTES) + _FOLD * member_bytes(what.spec)
    with executor_for(places, each=each, here=caller_bytes(what, path)) as executor:
        moved = mapped(what, form, executor, path=None if path is None else Path(path))
    return _conditioned(replace(_joined(moved.notes), population=moved.population))


def _conditions(stacked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of stacked networks (M, *shape): `effective` and `largest` of `Canonical`, float64 (M,)."""
    rows = []  # of each tensor: its largest weight, and sums of squares and fourth powers in units of that
    for name, own in stacked.items():
        if own.is_floating_point() and own.numel() and not is_statistic(name):
            sizes = own.detach().flatten(1).abs().double()
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


def _conditioned(found: Canonical) -> Canonical:
    """The same with a note where a few weights decide all distances."""
    held = found.state if found.state is not None else found.population.spec if found.population is not None else {}
    weights = sum(
        math.prod(own.shape) for name, own in held.items() if own.dtype.is_floating_point and not is_statistic(name)
    )
    bad = found.effective < max(_FEWEST, _FEW * weights)
    if weights < _SMALL or not bool(bad.any()):
        return found
    few, top = float(found.effective[bad].min()), float(found.largest.max())
    note = (
        f"ill-conditioned: in {int(bad.sum()):,} of {len(bad):,} networks few weights, {few:.0f} of {weights:,}, "
        f"hold nearly all of the squared norm, and distances see little else; the largest is {top:.2g}; "
        'scale="balanced" keeps networks light'
    )
    return replace(found, notes=(*found.notes, note))


class Form:
    """The rules of a normal form."""

    def __init__(self, symmetry: Symmetry, scale: str, order: str, signs: bool) -> None:
        """Lay out the symmetry once."""
        self.symmetry, self.scale, self.order, self.signs = symmetry, scale, order, signs
        self.layout = SquaresLayout.of(BlockLayout.of(symmetry, statistics=True))
        self.weights = BlockLayout.of(symmetry)

    def __call__(self, stacked: State, start: int, beside: None) -> tuple[State, Canonical]:
        """Bring stacked networks into normal form."""
        found = self.find(stacked, start)
        moved = apply_block(ExpandedElement(self.symmetry, found.element), stacked, 0, "value")
        effective, largest = _conditions(moved)
        return moved, replace(found, effective=effective, largest=largest)

    def find(self, stacked: Mapping[str, Tensor], start: int) -> Canonical:
        """What brings stacked networks (M, *shape) into normal form; `start` numbers the first."""
        self.weights.check(stacked, where=f"member {start}", batched=True)
        pieces = Pieces(self.weights, stacked)
        factors, notes = self._scales(stacked, start)
        pieces.rescale(factors)
        still: list[tuple[int, int]] = []
        if self.signs:
            turned, still = settle_signs(pieces)
            factors.update(turned)
            for space, generator in still:
                name, kind = self.symmetry.spaces[space].name, self.symmetry.spaces[space].generators[generator]
                notes = (*notes, f"{name}: {kind} {generator} was left open, no weight shows it alone")
        members = len(next(iter(stacked.values())))
        unknown = torch.full((members,), torch.nan, dtype=torch.float64)
        if self.order == "keep":
            return Canonical(self._element(members, factors, {}), {}, notes, unknown, unknown)
        found, ties = orders(pieces, self.order, still)
        named = {self.symmetry.spaces[space].name: counts.cpu() for space, counts in ties.items()}
        return Canonical(self._element(members, factors, found), named, notes, unknown, unknown)

    def _scales(self, stacked: Mapping[str, Tensor], start: int) -> tuple[Tables, tuple[str, ...]]:
        """Factors of the scales, and what there is to say about them."""
        logs: list[Tensor] | None = None
        notes: tuple[str, ...] = ()
        if self.scale == "keep":
            check_finite(stacked, start)
            return {}, notes
        if self.scale == "unit-norm":
            logs, found = unit_norm(self.layout, stacked, start)
            notes = tuple(found)
        if logs is None:
            work = Work(self.layout, True, "unit", _TOLERANCE, _SWEEPS, dead="unit")
            logs = work.solve(stacked, start).found.logs
        gauges = [(gauge.space, gauge.generator) for gauge in self.layout.gauges]
        return {key: table.exp() for key, table in zip(gauges, logs, strict=True)}, notes

    def _element(self, members: int, factors: Tables, found: dict[int, Tensor]) -> Element:
        """Orders and factors in the coordinates of the given networks, as elements."""
        scaled = self.symmetry.identity(members)
        for (space, generator), table in factors.items():
            held = scaled.factors[self.symmetry.spaces[space].name]
            held[generator] = table.cpu().reshape(held[generator].shape)
        turned = ExpandedElement(self.symmetry, self.symmetry.identity(members))
        for space, order in sorted(found.items()):  # parents first: a child is listed by where its parent now stands
            origin = turned.origin(space)
            turned.orders[space] = order.cpu().gather(1, origin[:, :, None].expand(-1, -1, order.shape[2]))
        return self.symmetry.compose(turned.narrow(), scaled)


def _told(ties: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The spaces with any."""
    return {name: counts for name, counts in ties.items() if counts.any()}


def _joined(parts: list[Canonical]) -> Canonical:
    """Lay batches end to end."""
    elements = [part.element for part in parts]
    element = Element(
        {name: torch.cat([own.orders[name] for own in elements]) for name in elements[0].orders},
        {name: torch.cat([own.factors[name] for own in elements], 1) for name in elements[0].factors},
        sum(own.members or 0 for own in elements),
    )
    ties = {name: torch.cat([part.ties[name] for part in parts]) for name in parts[0].ties}
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    effective, largest = (torch.cat(own) for own in ([p.effective for p in parts], [p.largest for p in parts]))
    return Canonical(element, _told(ties), notes, effective, largest)
