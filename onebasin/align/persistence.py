"""Does every unit keep its role along a chain? Early means of its weights are compared with late ones.

Relabelling units leaves the posterior as it is, so a chain that has explored it exchanges roles: what a unit's weights
were early says nothing about what they are late. Counting which unit holds the largest weight sees that only where one
unit stands out; means of all weights see it everywhere, and neighbours that are alike cannot imitate it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError

_APART = 0.2  # share of the draws, in the middle, that is left out, so that early and late do not touch


@dataclass(frozen=True)
class Persistence:
    """What `persistence` found.

    Attributes:
        correlation: of early and late means over units, pooled over weights: 1 if roles are kept, 0 if exchanged.
        p: share of relabellings of the late units that agree at least as well with the early ones; the observed one
            is counted among them.
    """

    correlation: float
    p: float


def persistence(draws: Tensor, *, permutations: int = 999, seed: int = 0) -> Persistence:
    """Compare early and late means of a chain's weights (members, units, *rest), units by units.

    The p-value is exact if early and late draws are independent of each other and units are alike; draws may remember
    their neighbours as long as they like within each part.

    >>> generator = torch.Generator().manual_seed(0)
    >>> noise, roles = torch.randn(100, 8, 5, generator=generator), torch.randn(8, 5, generator=generator)
    >>> kept, lost = persistence(noise + roles), persistence(noise)
    >>> kept.correlation > 0.9, kept.p, abs(lost.correlation) < 0.5, lost.p > 0.05
    (True, 0.001, True, True)

    Args:
        draws: one chain in its order.
        permutations: random relabellings.
        seed: of the relabellings.
    """
    if draws.dim() < 2 or len(draws) < 5 or draws.shape[1] < 2:
        raise InputError(f"expected at least 5 draws (members, units, ...) of 2 units, found {tuple(draws.shape)}")
    part = max(1, int(len(draws) * (1 - _APART) / 2))
    early, late = (_centred(draws[rows]) for rows in (slice(0, part), slice(len(draws) - part, None)))
    norm = float(early.norm() * late.norm())
    if norm == 0:
        return Persistence(0.0, 1.0)
    # Entry (i, k): how well early unit i agrees with late unit k; a relabelling sums one entry of each row.
    agreement = early @ late.T / norm
    units = len(agreement)
    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(permutations, units, generator=generator).argsort(1)
    found = float(agreement.trace())
    relabelled = agreement[torch.arange(units), orders].sum(1)
    better = int((relabelled >= found - 1e-12).sum())
    return Persistence(found, (1 + better) / (1 + permutations))


def _centred(draws: Tensor) -> Tensor:
    """Means over draws, each weight less its mean over units: float64 (units, weights)."""
    means = draws.detach().double().mean(0).flatten(1).cpu()
    return means - means.mean(0)
