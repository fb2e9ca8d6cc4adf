"""Ranks made Gaussian, which keeps heavy tails from deciding."""

from __future__ import annotations

import torch
from torch import Tensor


def normal_scores(rows: Tensor) -> Tensor:
    """Replace each value of a row by z = Phi^-1((rank - 3/8) / (n + 1/4)); equal values share their mean rank.

    Args:
        rows: (rows, n), without NaN.

    Returns:
        The scores, float64 (rows, n).

    >>> normal_scores(torch.tensor([[3.0, 1.0, 2.0, 2.0]]))
    tensor([[ 1.0491, -1.0491,  0.0000,  0.0000]], dtype=torch.float64)
    """
    ascending, order = rows.sort(dim=1, stable=True)
    return scattered(_scores_in_order(ascending), order)


def bulk_and_folded_scores(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Normal scores of the values and of their distances |x - median| from the median of their row."""
    ascending, order = rows.sort(dim=1, stable=True)
    n = rows.shape[1]
    median = (ascending[:, (n - 1) // 2] + ascending[:, n // 2]) / 2
    # Distances in ascending order of values fall and rise again, and a stable sort merges two runs much faster.
    distances = (ascending - median[:, None]).abs()
    return scattered(_scores_in_order(ascending), order), scattered(normal_scores(distances), order)


def scattered(ordered: Tensor, order: Tensor) -> Tensor:
    """Put column i of `ordered` (rows, n) back to place order[i], undoing a sort."""
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def _scores_in_order(ascending: Tensor) -> Tensor:
    n = ascending.shape[1]
    place = torch.arange(n, device=ascending.device).expand_as(ascending)
    rises = ascending[:, 1:] != ascending[:, :-1]
    first, last = place.clone(), place.clone()  # of the run of equal values around each place
    first[:, 1:] *= rises
    last[:, :-1].masked_fill_(~rises, n - 1)
    first = first.cummax(dim=1).values
    last = last.flip(1).cummin(dim=1).values.flip(1)
    # The mean rank is 1 + (first + last) / 2: few distinct values, so that their scores are looked up.
    ranks = 1 + torch.arange(2 * n - 1, dtype=torch.float64, device=ascending.device) / 2
    scores: Tensor = torch.special.ndtri((ranks - 3 / 8) / (n + 1 / 4))
    return scores[first + last]
