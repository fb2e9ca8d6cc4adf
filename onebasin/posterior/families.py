"""The Gaussians that `fit` knows: for each a covariance, and how it is estimated from the deviations of networks.

A further family is a file with a class that follows `Covariance` and a `Family`, and an entry in `GAUSSIANS`: `fit`,
mixtures, files and the command line know it then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.posterior.gaussian import Covariance, Diagonal, Full, Kronecker, LowRank, Partial
from onebasin.posterior.moments import Deviations, leading_factor

ROUNDING = 64  # times the precision: a smaller part of a variance is not known from a difference


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The keywords of `fit` of the same names."""

    rank: int | None = None
    passes: int = 2
    oversample: int = 10
    diagonal: bool = True
    covariance: str = "diagonal"
    pooled: bool = False
    restarts: int = 10
    steps: int = 50
    seed: int = 0


@dataclass(frozen=True)
class Family:
    """One kind of Gaussian.

    Attributes:
        covariance: its class, by whose `kind` files name it.
        estimate: (deviations of networks from their means, standard deviation of each weight, float64 (D,), dtype of
            the result, options) -> the covariance.
        options: the keywords of `fit` that it reads; a family that reads `rank` needs one.
    """

    covariance: type[Covariance]
    estimate: Callable[[Deviations, Tensor, torch.dtype, FitOptions], Covariance]
    options: frozenset[str] = frozenset()


def diagonal(deviations: Deviations, std: Tensor, dtype: torch.dtype, options: FitOptions) -> Diagonal:
    """Independent weights with these standard deviations (D,)."""
    return Diagonal(std.to(dtype))


def low_rank(deviations: Deviations, std: Tensor, dtype: torch.dtype, options: FitOptions) -> LowRank:
    """The directions of largest variance, and what they leave of the variance of each weight as independent noise."""
    assert options.rank is not None  # `fit` has seen to it
    narrow = std.to(dtype)
    factor = leading_factor(
        deviations,
        deviations.size,
        options.rank,
        degrees=deviations.degrees,
        oversample=options.oversample,
        passes=options.passes,
        like=narrow,
        seed=options.seed,
    )
    if not options.diagonal:
        return LowRank(torch.zeros_like(narrow), factor)
    variance = std.square()
    left = variance - factor.square().sum(1, dtype=torch.float64)
    left[left < ROUNDING * torch.finfo(narrow.dtype).eps * variance] = 0.0
    return LowRank(left.sqrt().to(narrow), factor)


GAUSSIANS: dict[str, Family] = {
    "diagonal": Family(Diagonal, diagonal),
    "low-rank": Family(LowRank, low_rank, frozenset({"rank", "passes", "oversample", "diagonal", "seed"})),
}


def covariance_class(kind: str) -> type[Covariance]:
    """The class of covariances that files call by this name.

    Raises:
        KeyError: there is none.
    """
    known: list[type[Covariance]] = [Full, Kronecker, Partial]
    known += [family.covariance for family in GAUSSIANS.values()]
    return {covariance.kind: covariance for covariance in known}[kind]
