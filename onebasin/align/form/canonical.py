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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from onebasin.align.board import Board
from onebasin.align.form.order_keys import ORDERS, orders
from onebasin.align.form.pieces import Pieces, Tables
from onebasin.align.form.sign_rule import settle_signs
from onebasin.align.form.unit_norm import unit_norm
from onebasin.align.scale.balance import Work
from onebasin.align.scale.squares import Layout, check_finite
from onebasin.cluster import Places, cluster_for
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.population.mapping import caller_bytes, mapped
from onebasin.population.writer import BLOCK_BYTES, member_bytes
from onebasin.state import State, is_statistic
from onebasin.symmetry import Element, Symmetry
from onebasin.symmetry.act import apply_block
from onebasin.symmetry.algebra import Wide

SCALES = ("balanced", "unit-norm", "keep")
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
    **places: Unpack[Places],
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
        **places: where a population is worked on, see `Places`.
    """
    refuse_unknown(places, Places.__annotations__, "canonicalise")
    if isinstance(what, nn.Module):
        raise InputError("canonicalise moves a State or a Population, found a module: give model.state_dict()")
    for name, value, known in (("scale", scale, SCALES), ("order", order, (*ORDERS, "keep"))):
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
    with cluster_for(places, each=each, here=caller_bytes(what, path)) as cluster:
        moved = mapped(what, form, cluster, path=None if path is None else Path(path))
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
        self.layout = Layout.of(Board.of(symmetry, statistics=True))
        self.weights = Board.of(symmetry)

    def __call__(self, stacked: State, start: int, beside: None) -> tuple[State, Canonical]:
        """Bring stacked networks into normal form."""
        found = self.find(stacked, start)
        moved = apply_block(Wide(self.symmetry, found.element), stacked, 0, "value")
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
        turned = Wide(self.symmetry, self.symmetry.identity(members))
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
