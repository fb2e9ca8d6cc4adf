"""Two posteriors in a common basin: how far apart they are, before and after the second is moved onto the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from onebasin.align import match
from onebasin.compact.carry import carried
from onebasin.errors import InputError
from onebasin.posterior import Divergence, Posterior, kl, wasserstein2
from onebasin.symmetry import Element, Symmetry

BY = ("weights", "spread")


@dataclass(frozen=True, eq=False)
class Distance:
    """What `distance` found.

    Attributes:
        kl_before: KL(p | q) as they were given, in nats.
        kl_after: KL(p | g.q) after q was moved; the function of every draw is the same as before.
        wasserstein_before: 2-Wasserstein distance of p and q.
        wasserstein_after: of p and g.q.
        element: g.
    """

    kl_before: Divergence
    kl_after: Divergence
    wasserstein_before: Divergence
    wasserstein_after: Divergence
    element: Element

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            name: {key: getattr(getattr(self, name), key) for key in ("value", "low", "high", "method")}
            for name in ("kl_before", "kl_after", "wasserstein_before", "wasserstein_after")
        }

    def __str__(self) -> str:
        return (
            f"{'':12s} {'as given':>34s} {'in a common basin':>34s}\n"
            f"{'KL (nats)':12s} {self.kl_before!s:>34s} {self.kl_after!s:>34s}\n"
            f"{'Wasserstein':12s} {self.wasserstein_before!s:>34s} {self.wasserstein_after!s:>34s}"
        )


def onto(p: Posterior, q: Posterior, symmetry: Symmetry, *, by: str = "spread") -> Element:
    """The element that moves q onto p.

    Args:
        p: the posterior that stays.
        q: the posterior that moves; neither is changed.
        symmetry: of their architecture.
        by: "weights" matches the means; "spread" means and standard deviations together, which makes the Wasserstein
            distance of diagonal Gaussians small.
    """
    if by not in BY:
        raise InputError(f"expected by as one of {', '.join(BY)}, found {by!r}: choose one of them")
    return match(p.mean, q.mean, symmetry, std=(p.std, q.std) if by == "spread" else None).element


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

    Args:
        p: the posterior that stays.
        q: the posterior that is moved onto it.
        symmetry: of their architecture.
        element: how q is to be moved; found by `onto` unless given.
        by: what `onto` compares.
        samples: draws for the KL of mixtures.
        generator: for these.
    """
    found = onto(p, q, symmetry, by=by) if element is None else element
    moved = carried(q, found, symmetry)
    before, after = (kl(p, other, samples=samples, generator=generator) for other in (q, moved))
    return Distance(before, after, wasserstein2(p, q), wasserstein2(p, moved), found)
