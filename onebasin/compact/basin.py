"""Two posteriors in a common basin: how far apart they are, before and after the second is moved onto the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from onebasin.align import match
from onebasin.compact.carry import carried
from onebasin.compact.scales import Scales
from onebasin.errors import InputError, SymmetryError
from onebasin.posterior import Divergence, Posterior, kl, wasserstein2
from onebasin.symmetry import Element, Symmetry

BY = ("weights", "spread")
HOME = "as given"
ORDER = "order and signs"
SCALES_OF_P = "order, signs and the scales of p"
CLOSEST = "order, signs and the closest scales"
GIVEN = "the given element"
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Distance:
    """What `distance` found.

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

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and words."""
        numbers: dict[str, Any] = {
            name: {key: getattr(getattr(self, name), key) for key in ("value", "low", "high", "method")}
            for name in ("kl_before", "kl_after", "wasserstein_before", "wasserstein_after")
        }
        return {**numbers, "kl_by": self.kl_by, "wasserstein_by": self.wasserstein_by}

    def __str__(self) -> str:
        return (
            f"{'':12s} {'as given':>34s} {'in a common basin':>34s}\n"
            f"{'KL (nats)':12s} {self.kl_before!s:>34s} {self.kl_after!s:>34s}  by {self.kl_by}\n"
            f"{'Wasserstein':12s} {self.wasserstein_before!s:>34s} {self.wasserstein_after!s:>34s}  "
            f"by {self.wasserstein_by}"
        )


def onto(p: Posterior, q: Posterior, symmetry: Symmetry, *, by: str = "spread", scale: str = "reference") -> Element:
    """The element that moves q onto p.

    Args:
        p: the posterior that stays.
        q: the posterior that moves; neither is changed.
        symmetry: of their architecture.
        by: "weights" matches the means; "spread" means and standard deviations together, which makes the Wasserstein
            distance of diagonal Gaussians small.
        scale: as in `match`.
    """
    if by not in BY:
        raise InputError(f"expected by as one of {', '.join(BY)}, found {by!r}: choose one of them")
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
    found = [_Move(HOME, symmetry.identity(), q)]
    for name, scale in ((ORDER, "keep"), (SCALES_OF_P, "reference")):
        if scale == "keep" or symmetry.dimensions:
            element = onto(p, q, symmetry, by=by, scale=scale)
            with contextlib.suppress(SymmetryError):  # companions that have no exact form under scales
                found.append(_Move(name, element, carried(q, element, symmetry)))
    return found


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
