"""The distance of two posteriors in a common basin: one is moved along its orbit, compared, and stitched to the other.

Positive scales come by descent on the distance itself. Under log scales s of all units (one per scale generator and
coordinate) every weight w moves to w exp(E s), with E a sparse matrix of small integers, the powers. So
|m_p - e^{Es} m_q|^2 + |sigma_p - e^{Es} sigma_q|^2, and the KL divergence of the marginals, are smooth functions of s
whose gradient is E^T of an elementwise one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onebasin.alignment import BlockLayout, match
from onebasin.errors import InputError, SymmetryError
from onebasin.population import Population
from onebasin.posterior.divergence import Divergence, kl, wasserstein2
from onebasin.posterior.gaussian import Covariance, Diagonal, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.reporting import (
    Axis,
    Cell,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Result,
    Series,
    Table,
    as_number,
    finite,
    result_record,
)
from onebasin.state import State, check_spec
from onebasin.symmetry import Element, Symmetry

_STEPS = 300


class Scales:
    """All positive scales of a symmetry, acting on the flat vector of uncertain weights of a posterior.

    Attributes:
        size: number of log scales; 0 if the symmetry has none.
    """

    def __init__(self, symmetry: Symmetry, like: Posterior) -> None:
        """Write down E for the weights of `like`."""
        self.symmetry = symmetry
        self.board = BlockLayout.of(symmetry)
        self.gauges: dict[tuple[int, int], int] = {}  # (space, generator) -> its first column
        self.size = 0
        for number, space in enumerate(symmetry.spaces):
            for generator, kind in enumerate(space.generators):
                if kind.endswith("scale"):
                    self.gauges[number, generator] = self.size
                    self.size += self.board.coordinates(number)
        self.powers = self._powers(like)

    def _powers(self, like: Posterior) -> Any:
        """E as a sparse matrix of scipy, float64 (weights, scales)."""
        from scipy.sparse import csr_matrix

        starts = dict(zip(like.layout.names, np.cumsum([0, *like.layout.sizes]).tolist(), strict=False))
        rows, columns, values = [], [], []
        for block in self.board.blocks:
            if block.tensor not in starts:
                continue
            shape = self.symmetry.shapes[block.tensor]
            stop = starts[block.tensor] + math.prod(shape)
            places = block.take(torch.arange(starts[block.tensor], stop).reshape(1, *shape))
            for foot in block.axes:
                units = block.spread(foot, torch.arange(self.board.coordinates(foot.space))[None]).expand_as(places)
                for generator, power in enumerate(foot.powers):
                    if power and (foot.space, generator) in self.gauges:
                        rows.append(places.flatten())
                        columns.append(self.gauges[foot.space, generator] + units.flatten())
                        values.append(torch.full((places.numel(),), float(power), dtype=torch.float64))
        if not rows:
            return csr_matrix((like.layout.size, self.size))
        where = torch.cat(rows).numpy(), torch.cat(columns).numpy()
        return csr_matrix((torch.cat(values).numpy(), where), (like.layout.size, self.size))

    def element(self, logs: Tensor) -> Element:
        """The element with these log scales (size,), without orders and signs."""
        identity = self.symmetry.identity()
        factors = {name: table.clone() for name, table in identity.factors.items()}
        for (number, generator), start in self.gauges.items():
            table = factors[self.symmetry.spaces[number].name]
            part = logs[start : start + self.board.coordinates(number)].exp()
            table[generator] = part.reshape(table[generator].shape).to(table)
        return Element(identity.orders, factors)

    def descended(self, p: Posterior, q: Posterior, objective: str) -> Element:
        """The scales s that make the distance of the marginals of p and e^{Es} q least, from where q is.

        L-BFGS; for diagonal Gaussians the objective is the squared Wasserstein distance or the KL divergence itself,
        for others that of independent weights with the same means and standard deviations.
        """
        left, right, turned = _marginals(p), _marginals(q), self.powers.T.tocsr()
        logs = torch.zeros(self.size, dtype=torch.float64)
        descent = torch.optim.LBFGS(
            [logs], max_iter=_STEPS, tolerance_grad=1e-10, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        )

        def measured() -> float:
            value, slope = _OBJECTIVES[objective](*left, *right, torch.from_numpy(self.powers @ logs.numpy()))
            logs.grad = torch.from_numpy(turned @ slope.numpy())
            return value

        descent.step(measured)
        return self.element(logs if bool(logs.isfinite().all()) else torch.zeros_like(logs))


def _marginals(posterior: Posterior) -> tuple[Tensor, Tensor]:
    return posterior.flat_mean.double().cpu(), posterior.flat_std.double().cpu()


def _wasserstein(mean: Tensor, std: Tensor, other: Tensor, spread: Tensor, logs: Tensor) -> tuple[float, Tensor]:
    """|mean - m other|^2 + |std - m spread|^2 and its gradient by log m."""
    factor = logs.exp()
    gaps = mean - factor * other, std - factor * spread
    slope = -2 * factor * (gaps[0] * other + gaps[1] * spread)
    return float(gaps[0].square().sum() + gaps[1].square().sum()), slope


def _kl(mean: Tensor, std: Tensor, other: Tensor, spread: Tensor, logs: Tensor) -> tuple[float, Tensor]:
    """The sum of log m + (std^2 + (mean - m other)^2) / (2 m^2 spread^2), and its gradient by log m."""
    factor = logs.exp()
    variance = (factor * spread).square()
    gap = mean - factor * other
    ratio = (std.square() + gap.square()) / variance
    return float((logs + ratio / 2).sum()), 1 - ratio - gap * factor * other / variance


_OBJECTIVES = {"kl": _kl, "wasserstein": _wasserstein}


def carried(posterior: Posterior, element: Element, symmetry: Symmetry) -> Posterior:
    """Move a posterior by an element: draws of the result are moved draws of the original.

    With weights w -> m w for factors m (and a new order), centres and directions move like weights and standard
    deviations by |m|; running statistics follow their units. The density at a moved network is that of the original
    divided by the product of all |m|, which is 1 for permutations and signs.

    Args:
        posterior: a mixture of diagonal or low-rank Gaussians.
        element: one for all components, or a batch with one for each.
        symmetry: the group it belongs to.

    Raises:
        SymmetryError: the element does not belong to the symmetry, or there are too few or many.
        InputError: a component has a spread of another kind, which would not keep it when moved.
    """
    if element.members not in (None, len(posterior.components)):
        raise SymmetryError(
            f"{element.members} elements cannot move {len(posterior.components)} components; give one for each, or a "
            "single one for all."
        )
    moved, moved_buffers = [], []
    for index, (component, buffers) in enumerate(zip(posterior.components, posterior.buffers, strict=True)):
        one = element if element.members is None else element.member(index)
        gaussian, followed = _moved(component, buffers, one, symmetry, posterior.layout)
        moved.append(gaussian)
        moved_buffers.append(followed)
    provenance = {**posterior.provenance, "carried": True}
    return replace(posterior, components=tuple(moved), buffers=tuple(moved_buffers), provenance=provenance)


def _moved(
    component: Gaussian, buffers: State, element: Element, symmetry: Symmetry, layout: FlatLayout
) -> tuple[Gaussian, State]:
    whole = symmetry.apply(element, _one(layout, component.centre, buffers))
    covariance = _moved_covariance(component.covariance, buffers, element, symmetry, layout)
    return Gaussian(_vectors(layout, whole), covariance), {name: whole[name] for name in layout.buffer_names}


def _moved_covariance(
    covariance: Covariance, buffers: State, element: Element, symmetry: Symmetry, layout: FlatLayout
) -> Covariance:
    if not isinstance(covariance, Diagonal | LowRank):
        raise InputError(
            f"expected diagonal or low-rank Gaussians to move, found a {covariance.kind} one: draw networks from it, "
            "move them, and fit a Gaussian to them"
        )
    spread = _one(layout, covariance.scale, buffers)
    scale = _vectors(layout, symmetry.apply(element, spread, kind="std"))
    if isinstance(covariance, Diagonal):
        return Diagonal(scale)
    if not covariance.factor.shape[1]:
        return LowRank(scale, covariance.factor)
    columns = Population.from_stacked(_laid_out(layout, covariance.factor.T, buffers))
    moved = symmetry.apply(element, columns).stacked()
    return LowRank(scale, torch.cat([moved[name].flatten(1) for name in layout.names], 1).T.contiguous())


def _laid_out(layout: FlatLayout, flat: Tensor, buffers: Mapping[str, Tensor]) -> State:
    """Vectors (n, D) as whole networks in the dtype of the vectors, each with the same buffers."""
    wide = {name: buffers[name].expand(len(flat), *buffers[name].shape) for name in layout.buffer_names}
    return layout.laid_out(flat, wide)


def _one(layout: FlatLayout, flat: Tensor, buffers: Mapping[str, Tensor]) -> State:
    """A vector (D,) as one network."""
    return {name: value[0] for name, value in _laid_out(layout, flat[None], buffers).items()}


def _vectors(layout: FlatLayout, state: Mapping[str, Tensor]) -> Tensor:
    """The vector (D,) of one network, in its own dtype."""
    return torch.cat([state[name].reshape(-1) for name in layout.names])


BY = ("weights", "spread")
UNMOVED = "as given"
ORDER = "order and signs"
SCALES_OF_P = "order, signs and the scales of p"
CLOSEST = "order, signs and the closest scales"
GIVEN = "the given element"
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Distance(Result):
    """KL divergence and Wasserstein-2 distance of two posteriors, as given and in a common basin.

    Attributes:
        kl_before: KL(p | q) as they were given, in nats.
        kl_after: KL(p | g.q), g = `kl_element`; the function of every draw is the same as before.
        wasserstein_before: 2-Wasserstein distance of p and q.
        wasserstein_after: of p and g.q, g = `element`.
        element: of all that were tried, the one with the least Wasserstein distance; or the one that was given.
        kl_element: the one with the least KL divergence; or the one that was given.
        wasserstein_by: how `element` was found: "as given" (nothing moved), "order and signs", "order, signs and the
            scales of p", "order, signs and the closest scales", or "the given element".
        kl_by: how `kl_element` was found.
    """

    kl_before: Divergence
    kl_after: Divergence
    wasserstein_before: Divergence
    wasserstein_after: Divergence
    element: Element
    kl_element: Element
    wasserstein_by: str
    kl_by: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        numbers: dict[str, Any] = {
            name: {key: getattr(getattr(self, name), key) for key in ("value", "low", "high", "method")}
            for name in ("kl_before", "kl_after", "wasserstein_before", "wasserstein_after")
        }
        return {**numbers, "kl_by": self.kl_by, "wasserstein_by": self.wasserstein_by}

    def record(self) -> Record:
        """A table, and bars as given and in a common basin."""
        text = (
            f"KL is {self.kl_after} nats in a common basin, {self.kl_before} as given; the Wasserstein-2 distance "
            f"{self.wasserstein_after} instead of {self.wasserstein_before}."
        )
        kinds = {
            "KL (nats)": (self.kl_before, self.kl_after, self.kl_by),
            "Wasserstein-2": (self.wasserstein_before, self.wasserstein_after, self.wasserstein_by),
        }
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (name, *(_number(each) for each in (before, after)), f"by {by}", after.method)
            for name, (before, after, by) in kinds.items()
        )
        names = Axis("", names=("as given", "in a common basin"))
        panels = tuple(
            Panel("bars", name, names, Axis(name), (_bars(before, after),))
            for name, (before, after, _) in kinds.items()
        )
        columns = (
            Column("distance"),
            Column("as given", "nothing moved", "lower", 4),
            Column("in a common basin", "the function of every draw is the same as before", "lower", 4),
            Column("moved", "what was done to the second posterior"),
            Column("known", "closed form, bounds, or a Monte-Carlo estimate with two standard errors"),
        )
        return result_record(
            "distance",
            "Distance of two posteriors",
            text,
            (
                Table("distances", "As given and in a common basin", columns, rows),
                Figure("bars", "How much of the distance is symmetry?", text, panels),
            ),
            values={name: {key: finite(part) if isinstance(part, float) else part for key, part in value.items()}
                    if isinstance(value, dict) else value for name, value in self.to_dict().items()},
        )  # fmt: skip


def _bars(*found: Divergence) -> Series:
    value, low, high = (tuple(finite(getattr(each, part)) for each in found) for part in ("value", "low", "high"))
    return Series("", tuple(range(len(found))), value, low, high)


def _number(found: Divergence) -> Number:
    return as_number(found.value) if found.low == found.high else as_number(found.value, found.low, found.high)


def onto(p: Posterior, q: Posterior, symmetry: Symmetry, *, by: str = "spread", scale: str = "reference") -> Element:
    """The element that moves q onto p.

    "weights" matches the means; "spread" means and standard deviations together, which makes the Wasserstein distance
    of diagonal Gaussians small. The scale is that of `match`.
    """
    if by not in BY:
        raise InputError(f"expected by as one of {', '.join(BY)}, found {by!r}: give 'spread'")
    spreads = (p.std, q.std) if by == "spread" else None
    return match(p.mean, q.mean, symmetry, std=spreads, scale=scale).element


def distance(
    p: Posterior,
    q: Posterior,
    symmetry: Symmetry,
    *,
    element: Element | None = None,
    by: str = "spread",
    samples: int = 200,
    generator: torch.Generator | None = None,
) -> Distance:
    """KL and Wasserstein-2 of two posteriors, as given and in a common basin.

    "In a common basin" is the least value over the elements g that were tried, among them the identity: it is never
    above the value as given, and an upper bound of the minimum over the whole group. Tried are the identity, the order
    and signs that `match` finds, the same with the scales of p, and from the best of these the scales that L-BFGS finds
    for the very number that is reported (for low rank and mixtures: for its value at the same means and deviations).
    Both numbers have their own g.

    Args:
        p: the posterior that stays.
        q: the posterior that is moved onto it.
        symmetry: of their architecture.
        element: how q is to be moved; nothing else is tried then, and the numbers may be larger than as given.
        by: what `match` compares, see `onto`.
        samples: draws for the KL of mixtures; every element is judged by the same draws.
        generator: for these.
    """
    drawn = None if generator is None else generator.get_state()

    def measured_kl(other: Posterior) -> Divergence:
        if generator is not None and drawn is not None:
            generator.set_state(drawn)
        return kl(p, other, samples=samples, generator=generator)

    def measured_wasserstein(other: Posterior) -> Divergence:
        return wasserstein2(p, other)

    if element is not None:
        moved = carried(q, element, symmetry)
        numbers = measured_kl(q), measured_kl(moved), measured_wasserstein(q), measured_wasserstein(moved)
        return Distance(*numbers, element, element, GIVEN, GIVEN)
    moves = _moves(p, q, symmetry, by)
    scales = Scales(symmetry, q) if symmetry.dimensions else None
    nearest = partial(_nearest, p, moves, symmetry, scales)
    kl_before, kl_best = nearest("kl", measured_kl)
    before, best = nearest("wasserstein", measured_wasserstein)
    return Distance(kl_before, kl_best[1], before, best[1], best[2], kl_best[2], best[0], kl_best[0])


class _Move(NamedTuple):
    """A way to move q: its name, its element, and the moved posterior."""

    name: str
    element: Element
    moved: Posterior


def _moves(p: Posterior, q: Posterior, symmetry: Symmetry, by: str) -> list[_Move]:
    """The identity first, then what `match` finds without and with scales."""
    moves = [_Move(UNMOVED, symmetry.identity(), q)]
    for name, scale in ((ORDER, "keep"), (SCALES_OF_P, "reference")):
        if scale == "keep" or symmetry.dimensions:
            element = onto(p, q, symmetry, by=by, scale=scale)
            with contextlib.suppress(SymmetryError):  # companions that have no exact form under scales
                moves.append(_Move(name, element, carried(q, element, symmetry)))
    return moves


def _nearest(
    p: Posterior,
    moves: list[_Move],
    symmetry: Symmetry,
    scales: Scales | None,
    objective: str,
    measured: Callable[[Posterior], Divergence],
) -> tuple[Divergence, tuple[str, Divergence, Element]]:
    """The divergence as given, and the least that was found: how, its value and its element."""
    values = [measured(move.moved) for move in moves]
    # A move that gains no more than rounding is none.
    least = min(range(len(moves)), key=lambda n: values[n].value + (_ROUNDING * abs(values[n].value) if n else 0))
    best = moves[least].name, values[least], moves[least].element
    if scales is not None:
        start = moves[least]
        try:
            element = symmetry.compose(scales.descended(p, start.moved, objective), start.element)
            value = measured(carried(moves[0].moved, element, symmetry))
        except SymmetryError:  # a batch norm's variance would have to be negative, or a companion has no exact form
            return values[0], best
        if value.value < (1 - _ROUNDING) * best[1].value:
            best = CLOSEST, value, element
    return values[0], best


def stitch(
    mean_of: Posterior,
    sigma_of: Posterior,
    symmetry: Symmetry,
    *,
    element: Element | None = None,
    by: str = "weights",
) -> Posterior:
    """A Gaussian with the mean of one posterior and the spread of another, moved onto it first.

    A spread belongs to the basin in which it was found: without the move, the standard deviation of one unit would be
    given to another.

    Args:
        mean_of: gives centre, running statistics and dtype; one Gaussian.
        sigma_of: gives the spread, diagonal or low rank; one Gaussian over the same weights.
        symmetry: of their architecture.
        element: how `sigma_of` is to be moved; by default the match of both means.
        by: what that match compares: "weights" (the means), or "spread" (means and standard deviations).

    Raises:
        InputError: one of them is a mixture, or they are over other weights.
    """
    for which, posterior in (("mean", mean_of), ("spread", sigma_of)):
        if len(posterior.components) > 1:
            raise InputError(
                f"expected one Gaussian to take the {which} of, found a mixture of {len(posterior.components)}: fit a "
                "diagonal or low-rank Gaussian"
            )
    check_spec(sigma_of.spec, mean_of.spec, where="the posterior that gives the spread")
    if mean_of.layout.names != sigma_of.layout.names:
        raise InputError(
            "expected posteriors over the same weights, found other uncertain tensors in the second: fit both with "
            "the same model"
        )
    move = onto(mean_of, sigma_of, symmetry, by=by) if element is None else element
    moved = carried(sigma_of, move, symmetry)
    provenance = {"mean of": dict(mean_of.provenance), "spread of": dict(sigma_of.provenance)}
    gaussian = Gaussian(mean_of.components[0].centre, moved.components[0].covariance)
    constant = {"constant_statistics": sorted(mean_of.constant_statistics)} if mean_of.constant_statistics else {}
    return replace(mean_of, components=(gaussian,), provenance={"stitch": provenance, **constant})
