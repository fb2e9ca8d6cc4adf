"""The statistic of `mmd` when members change sides, and when they are drawn again.

Permutation test: members change sides at random, and p = (1 + number of U* >= U) / (1 + permutations). One matrix K of
kernel values serves all permutations: with a column of A for each, 1 where a member is on the side of x, all sums
follow from A'KA and A'K1. Over several bandwidths the test takes the largest U_b / s_b, where s_b^2 is the mean square
of U_b over the permutations and the sample itself (their mean is 0). That is the same function of each of them, so this
p-value needs no correction for having looked at several, and is exact for rules that do not know the sides (`kernels`).

Bootstrap: members of each sample are drawn again with replacement, with counts w. A pair of copies of one member says
nothing about two members, so these pairs are left out: sum_{i != j} w_i w_j k_ij / sum_{i != j} w_i w_j. The interval
of percentiles is valid where the laws differ (there U is asymptotically normal). Where they are equal U degenerates, no
bootstrap of this kind is consistent, and the interval is too wide: whether laws differ is a question for the test.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebasin.errors import InputError

FEWEST = 3  # members of a side whose resamples differ from each other
_ROWS = 1024  # of a symmetric matrix that are multiplied at once, from the diagonal on
_VARIES = 1e3  # times its rounding: a statistic that varies less does not vary


def random_sides(members: int, split: int, permutations: int, generator: torch.Generator | None) -> Tensor:
    """Draw sides (members, 1 + permutations), 1.0 for x; the first column is the samples as they are."""
    if permutations < 1:
        raise InputError(f"expected at least 1 permutation, found {permutations}: 999 is usual")
    generator = generator or torch.Generator().manual_seed(0)
    order = torch.rand(permutations, members, generator=generator, dtype=torch.float64).argsort(1).T
    sides = torch.cat([torch.arange(members)[:, None], order], 1) < split
    return sides.double()


def side_statistics(matrix: Tensor, sides: Tensor) -> Tensor:
    """U for many ways to share out members.

    Where a side has one member, the term of its pairs is absent.

    Args:
        matrix: kernel of all pairs (N, N), symmetric, 0 on the diagonal.
        sides: (N, count), 1 for x and 0 for y, the same number of ones in each column.

    Returns:
        float64 (count,).
    """
    m = int(sides[:, 0].sum())
    n = len(sides) - m
    whole, touching = matrix.sum(), matrix.sum(1) @ sides
    xx = _quadratic(matrix, sides)
    xy = touching - xx
    yy = whole - 2 * touching + xx
    return xx / max(1, m * (m - 1)) + yy / max(1, n * (n - 1)) - 2 * xy / (m * n)


def rounding(matrix: Tensor, split: int) -> Tensor:
    """Return how much of `side_statistics` may be rounding, float64 ().

    Sums over all N^2 pairs are subtracted from each other and divided by as few as m (m - 1).

    Args:
        matrix: kernel of all pairs (N, N).
        split: members on one side.
    """
    count = len(matrix)
    fewest = max(1, min(size * (size - 1) for size in (split, count - split)))
    return 16 * torch.finfo(torch.float64).eps * matrix.amax() * (count**2 / fewest)


def permutation_p(found: Tensor, rounding: Tensor | None = None) -> tuple[Tensor, float]:
    """P-values of the first column of statistics (count, 1 + permutations): one for each row, and one for all rows.

    Args:
        found: the statistics.
        rounding: differences up to this are none (count,); 0 if it is left out. Rows that vary by hardly more say
            nothing: all permutations tie.
    """
    slack = found.new_zeros(len(found), 1) if rounding is None else rounding[:, None]
    each = (found >= found[:, :1] - slack).double().mean(1)
    spread = found.square().mean(1, keepdim=True).sqrt()
    varies = spread > _VARIES * slack
    divisor = torch.where(varies, spread, 1)
    largest = torch.where(varies, found / divisor, 0).amax(0)
    near = float(torch.where(varies, slack / divisor, 0).max()) + 1e-12
    each = torch.where(varies[:, 0], each, 1)
    return each, float((largest >= largest[0] - near).double().mean())


def random_counts(members: int, split: int, resamples: int, generator: torch.Generator | None) -> Tensor:
    """How often each member is drawn when both samples are drawn anew with replacement (members, resamples)."""
    if resamples < 1:
        raise InputError(f"expected at least 1 resample, found {resamples}: 1000 is usual")
    generator = generator or torch.Generator().manual_seed(0)
    parts = []
    for size in (split, members - split):
        drawn = torch.randint(size, (size, resamples), generator=generator)
        zeros = torch.zeros(size, resamples, dtype=torch.float64)
        parts.append(zeros.scatter_add_(0, drawn, torch.ones(size, resamples, dtype=torch.float64)))
    return torch.cat(parts)


def weighted_statistics(sums: Tensor, sizes: Tensor, split: int, counts: Tensor) -> Tensor:
    """U of resampled groups of members, pairs of one group left out.

    Args:
        sums: kernel summed over all pairs of members of two groups (N, N); its diagonal is not used.
        sizes: members of each group (N,); ones where every member stands for itself.
        split: the first so many groups are x.
        counts: how often each group is taken (N, count).

    Returns:
        float64 (count,); NaN where one side consists of copies of one group.
    """
    left, right = counts[:split], counts[split:]
    cross = (left * (sums[:split, split:] @ right)).sum(0) / ((sizes[:split] @ left) * (sizes[split:] @ right))
    return (
        _within(sums[:split, :split], sizes[:split], left)
        + _within(sums[split:, split:], sizes[split:], right)
        - (2 * cross)
    )


def _within(sums: Tensor, sizes: Tensor, counts: Tensor) -> Tensor:
    """Mean over pairs of different groups."""
    off = sums - torch.diag(sums.diagonal()) if bool(sums.diagonal().any()) else sums
    weights = sizes[:, None] * counts
    pairs = weights.sum(0).square() - weights.square().sum(0)
    return _quadratic(off, counts) / torch.where(pairs > 0, pairs, math.nan)


def _quadratic(matrix: Tensor, columns: Tensor) -> Tensor:
    """The form a'Ka of each column a of (N, count), (count,), for a symmetric K (N, N), of which half suffices."""
    total = columns.new_zeros(columns.shape[1])
    for start in range(0, len(matrix), _ROWS):
        stop = min(start + _ROWS, len(matrix))
        own = columns[start:stop]
        above = matrix[start:stop, stop:] @ columns[stop:]
        total += (own * (matrix[start:stop, start:stop] @ own).add_(above, alpha=2)).sum(0)
    return total


def percentiles(values: Tensor, confidence: float) -> tuple[float, float]:
    """The interval that leaves out equally many values on both sides; NaN is passed over."""
    if not 0 < confidence < 1:
        raise InputError(f"expected a confidence between 0 and 1, found {confidence}: 0.95 is usual")
    tail = (1 - confidence) / 2
    low, high = values.nanquantile(torch.tensor([tail, 1 - tail], dtype=values.dtype, device=values.device)).tolist()
    return low, high
