"""Numbers about pairs of networks, with intervals that know that pairs share networks.

M networks make M (M - 1) / 2 pairs, but only M things were drawn. So networks are drawn again, with replacement, and a
pair counts as often as both of its networks were drawn; pairs of a network with its own copy are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError


class Resampled(NamedTuple):
    """A number, its standard error and the ends of its percentile interval over drawings of networks."""

    value: float
    error: float
    low: float
    high: float


def mean_of_pairs(matrix: Tensor, generator: torch.Generator, *, draws: int = 1000, level: float = 0.95) -> Resampled:
    """Mean over pairs of a symmetric matrix (M, M), whose diagonal is not looked at.

    >>> mean_of_pairs(1 - torch.eye(5), torch.Generator(), draws=10)
    Resampled(value=1.0, error=0.0, low=1.0, high=1.0)
    """
    return _resampled((_pairs_only(matrix),), _mean, generator, draws, level)


def correlation_of_pairs(
    first: Tensor, second: Tensor, generator: torch.Generator, *, draws: int = 1000, level: float = 0.95
) -> Resampled:
    """Pearson's correlation over pairs of two symmetric matrices (M, M) about the same networks.

    Args:
        first: one number for each pair.
        second: another.
        generator: of the drawings.
        draws: drawings of the networks.
        level: of the interval.
    """
    if first.shape != second.shape:
        raise InputError(
            f"expected two matrices about the same networks, found {tuple(first.shape)} and {tuple(second.shape)}: "
            "give both for all of them"
        )
    return _resampled((_pairs_only(first), _pairs_only(second)), _correlation, generator, draws, level)


def _pairs_only(matrix: Tensor) -> Tensor:
    """In float64, with a diagonal of 0."""
    return matrix.double().cpu().clone().fill_diagonal_(0)


def _sums(counts: Tensor, matrix: Tensor) -> Tensor:
    """Sum over pairs, each as often as both networks were drawn: c' A c, (draws,)."""
    return ((counts @ matrix) * counts).sum(1)


def _pairs(counts: Tensor) -> Tensor:
    """Pairs of two different networks in each drawing, in both orders (draws,)."""
    return counts.sum(1).square() - counts.square().sum(1)


def _mean(counts: Tensor, matrix: Tensor) -> Tensor:
    return _sums(counts, matrix) / _pairs(counts)


def _correlation(counts: Tensor, first: Tensor, second: Tensor) -> Tensor:
    size = len(first)
    ones = 1 - torch.eye(size, dtype=first.dtype)
    a, b = (own - ones * own.sum() / (size * (size - 1)) for own in (first, second))
    x, y = _mean(counts, a), _mean(counts, b)
    both = _mean(counts, a * b) - x * y
    return both / ((_mean(counts, a * a) - x * x) * (_mean(counts, b * b) - y * y)).clamp(min=0).sqrt()


def _resampled(
    matrices: tuple[Tensor, ...],
    statistic: Callable[..., Tensor],
    generator: torch.Generator,
    draws: int,
    level: float,
) -> Resampled:
    size = len(matrices[0])
    if size < 3:
        raise InputError(f"expected at least 3 networks to draw from, found {size}: add members")
    chosen = torch.randint(size, (draws, size), generator=generator)
    counts = torch.zeros(draws, size, dtype=torch.float64).scatter_add_(
        1, chosen, torch.ones(draws, size, dtype=torch.float64)
    )
    value = float(statistic(torch.ones(1, size, dtype=torch.float64), *matrices))
    found = statistic(counts, *matrices)
    found = found[found.isfinite()]
    low, high = torch.quantile(found, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=found.dtype)).tolist()
    return Resampled(value, float(found.std()), low, high)
