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

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onebasin.align.board import Board
from onebasin.align.form.order_keys import ORDERS, orders
from onebasin.align.form.pieces import Pieces, Tables
from onebasin.align.form.sign_rule import settle_signs
from onebasin.align.form.unit_norm import unit_norm
from onebasin.align.scale.balance import Work
from onebasin.align.scale.squares import Layout, check_finite
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.population.writer import block_members
from onebasin.quiet import one_thread
from onebasin.state import State
from onebasin.symmetry import Element, Symmetry
from onebasin.symmetry.act import apply_block
from onebasin.symmetry.algebra import Wide

SCALES = ("unit-norm", "balanced", "keep")
_TOLERANCE, _SWEEPS = 1e-13, 200  # of balancing: nearly as far as float64 goes


@dataclass(frozen=True, eq=False)
class Canonical:
    """Networks in normal form.

    Attributes:
        element: what was applied; a batch for a population.
        ties: space -> (members,) number of units whose order was left as it was, because their keys are equal; only
            spaces with any.
        notes: sentences about what has no normal form here.
        population: the result, of a population.
        state: the result, of one network.
    """

    element: Element
    ties: Mapping[str, Tensor]
    notes: tuple[str, ...]
    population: Population | None = None
    state: State | None = None


def canonicalise(
    what: Population | Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    scale: str = "unit-norm",
    order: str = "max",
    signs: bool = True,
    path: str | os.PathLike[str] | None = None,
) -> Canonical:
    """Bring networks into their normal form.

    Args:
        what: a population, or one network; it is not changed.
        symmetry: of the networks' model.
        scale: "unit-norm" (what writes a unit has norm 1, layer by layer), "balanced" (least mass) or "keep".
        order: descending "max", "first", "norm" or "mean" of a unit's weights (see `order_keys`), or "keep".
        signs: settle signs.
        path: write the resulting population to this folder instead of keeping it in memory.
    """
    if isinstance(what, nn.Module):
        raise InputError("canonicalise moves a State or a Population, found a module: give model.state_dict()")
    for name, value, known in (("scale", scale, SCALES), ("order", order, (*ORDERS, "keep"))):
        if value not in known:
            raise InputError(f"{name} must be one of {', '.join(known)}, found {value!r}: choose one of them")
    form = Form(symmetry, scale, order, signs)
    if not isinstance(what, Population):
        if path is not None:
            raise InputError("path= is for populations, found one network: save the state of the result yourself")
        element = form.find({name: tensor[None] for name, tensor in what.items()}, 0).member(0)
        return replace(form.report(element), state=symmetry.apply(element, what))
    if not len(what):
        raise InputError("expected a population of at least one network, found none: give networks to canonicalise")
    found: list[Element] = []

    def move(stacked: State, start: int) -> State:
        found.append(form.find(stacked, start))
        return apply_block(Wide(symmetry, found[-1]), stacked, 0, "value")

    with one_thread():
        moved = what.map(move, path=path, size=block_members(what.spec))
    return replace(form.report(_joined(found)), population=moved)


class Form:
    """The rules of a normal form, and what was noted while they were used."""

    def __init__(self, symmetry: Symmetry, scale: str, order: str, signs: bool) -> None:
        """Lay out the symmetry once."""
        self.symmetry, self.scale, self.order, self.signs = symmetry, scale, order, signs
        self.layout = Layout.of(Board.of(symmetry, statistics=True))
        self.weights = Board.of(symmetry)
        self.notes: dict[str, None] = {}
        self.ties: dict[int, list[Tensor]] = {}

    def find(self, stacked: Mapping[str, Tensor], start: int) -> Element:
        """The elements that bring stacked networks (M, *shape) into normal form; `start` numbers the first."""
        self.weights.check(stacked, where=f"member {start}", batched=True)
        pieces = Pieces(self.weights, stacked)
        factors = self._scales(stacked, start)
        pieces.rescale(factors)
        still: list[tuple[int, int]] = []
        if self.signs:
            turned, still = settle_signs(pieces)
            factors.update(turned)
            for space, generator in still:
                name, kind = self.symmetry.spaces[space].name, self.symmetry.spaces[space].generators[generator]
                self.notes[f"{name}: {kind} {generator} was left open, no weight shows it alone"] = None
        members = len(next(iter(stacked.values())))
        if self.order == "keep":
            return self._element(members, factors, {})
        found, ties = orders(pieces, self.order, still)
        for space, counts in ties.items():
            self.ties.setdefault(space, []).append(counts.cpu())
        return self._element(members, factors, found)

    def _scales(self, stacked: Mapping[str, Tensor], start: int) -> Tables:
        logs: list[Tensor] | None = None
        if self.scale == "keep":
            check_finite(stacked, start)
            return {}
        if self.scale == "unit-norm":
            logs, notes = unit_norm(self.layout, stacked, start)
            self.notes.update(dict.fromkeys(notes))
        if logs is None:
            work = Work(self.layout, True, "unit", _TOLERANCE, _SWEEPS, dead="unit")
            logs = work.solve(stacked, start).found.logs
        gauges = [(gauge.space, gauge.generator) for gauge in self.layout.gauges]
        return {key: table.exp() for key, table in zip(gauges, logs, strict=True)}

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

    def report(self, element: Element) -> Canonical:
        """What was found; the networks themselves are added by the caller."""
        ties = {self.symmetry.spaces[space].name: torch.cat(counts) for space, counts in self.ties.items()}
        return Canonical(element, {name: counts for name, counts in ties.items() if counts.any()}, tuple(self.notes))


def _joined(parts: list[Element]) -> Element:
    """Lay batches of elements end to end."""
    return Element(
        {name: torch.cat([part.orders[name] for part in parts]) for name in parts[0].orders},
        {name: torch.cat([part.factors[name] for part in parts], 1) for name in parts[0].factors},
        sum(part.members or 0 for part in parts),
    )
