"""The maximum mean discrepancy of two samples: kernels, bandwidths, permutation test and bootstrap.

For samples x_1..x_m and y_1..y_n and a kernel k the unbiased estimate of the *squared* MMD is

    U = sum_{i != j} k(x_i, x_j) / m(m-1)  +  sum_{i != j} k(y_i, y_j) / n(n-1)  -  2 sum_{i, j} k(x_i, y_j) / mn.

Its mean is 0 when the laws are equal, so it may be slightly negative; with kernels of at most 1 it stays below 2.

Three kernels of a distance d at bandwidth b, each with its metric:

    laplace       exp(-d / b)              d = |x - y|_1
    gaussian      exp(-(d / b)^2)          d = |x - y|_2, without the factor 1/2 of others
    multiquadric  (1 + (d / b)^2)^(-1/2)   d = |x - y|_2, the inverse multiquadric

Bandwidths by rule:

    median        the median distance of two members of the pooled sample
    pooled        ten, geometric from d_min / 2 to 2 d_max, over all pairs of the pooled sample
    paper         the same over pairs (x_i, y_j) of the first 500 of each, as in the code of paper 2 (MMDAgg)
    paper-floors  that with its floors: if d_min < 0.1, max(5 % quantile, 0.1) is used; d_max is at least 0.3

"median" and "pooled" do not depend on which member belongs to which sample, so permutation tests with them are exact.
The collection of the paper depends on it a little, and its floors are absolute numbers that suit no layer of small
weights; both are there to compare with the paper. Distances of 0 are passed over by every rule.

Permutation test: members change sides at random, and p = (1 + number of U* >= U) / (1 + permutations). One matrix K of
kernel values serves all permutations: with a column of A for each, 1 where a member is on the side of x, all sums
follow from A'KA and A'K1. Over several bandwidths the test takes the largest U_b / s_b, where s_b^2 is the mean square
of U_b over the permutations and the sample itself (their mean is 0). That is the same function of each of them, so this
p-value needs no correction for having looked at several, and is exact for rules that do not know the sides.

Bootstrap: members of each sample are drawn again with replacement, with counts w. A pair of copies of one member says
nothing about two members, so these pairs are left out: sum_{i != j} w_i w_j k_ij / sum_{i != j} w_i w_j. The interval
of percentiles is valid where the laws differ (there U is asymptotically normal). Where they are equal U degenerates, no
bootstrap of this kind is consistent, and the interval is too wide: whether laws differ is a question for the test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.pairs import METRICS, pairwise

_PIECE = 1 << 15  # numbers that stay in the cache, and that torch does not share out to threads, which would wait
_FEW = 1 << 20  # numbers that are sorted out at once
_GUESSED = 1 << 16  # numbers that the guess is made from
_MARGIN = 0.02  # of all ranks on both sides of it: ten standard deviations of a random guess


def smallest(values: Tensor, rank: int) -> float:
    """Return the number that `rank` others of a tensor come before, in ascending order.

    It is exact and takes a few readings, without sorting all numbers or a copy of them. A few of the numbers tell
    between which two values it probably lies; how many are below is counted, and only those in between are looked at
    one by one. Where the guess was wrong, all are.

    >>> smallest(torch.tensor([[4.0, 1.0], [2.0, 3.0]]), 2)
    3.0

    Args:
        values: of any shape and any floating-point type, without NaN.
        rank: from 0 on.
    """
    flat = values.reshape(-1)
    if len(flat) <= _FEW:
        return float(flat.kthvalue(rank + 1).values)
    low, high = _guess(flat, rank / len(flat))
    below, inside = _between(flat, low, high)
    if not below <= rank < below + len(inside):  # the guess was wrong
        below, inside = 0, flat
    return float(inside.kthvalue(rank - below + 1).values)


def _between(flat: Tensor, low: float, high: float) -> tuple[int, Tensor]:
    """How many numbers are below, and those that are in between."""
    below, inside = 0, []
    for piece in flat.split(_PIECE):
        less = piece < low
        below += int(torch.count_nonzero(less))
        inside.append(piece[(piece <= high).logical_and_(less.logical_not_())])
    return below, torch.cat(inside)


def _guess(flat: Tensor, share: float) -> tuple[float, float]:
    """Two values that this share of the numbers probably lies between."""
    places = torch.randint(len(flat), (_GUESSED,), generator=torch.Generator().manual_seed(0))
    some = flat[places.to(flat.device)].sort().values
    last = len(some) - 1
    low, high = (round((share + side * _MARGIN) * last) for side in (-1, 1))
    return (float(some[low]) if low > 0 else -math.inf), (float(some[high]) if high < last else math.inf)


METRIC_OF = {"laplace": "l1", "gaussian": "l2", "multiquadric": "l2"}
RULES = ("median", "pooled", "paper", "paper-floors")
COUNT = 10  # bandwidths in a collection
_ROWS = 512  # of a matrix that are looked at together
_FIRST = 500  # members of each sample that the paper looks at
_NEAR, _FAR = 0.1, 0.3  # its floors

Bandwidth = str | float | Sequence[float] | Tensor


def kernel_values(distances: Tensor, bandwidth: float, kernel: str) -> Tensor:
    """Return the kernel of distances, elementwise.

    >>> kernel_values(torch.tensor([0.0, 2.0]), 2.0, "laplace")
    tensor([1.0000, 0.3679])
    """
    ratio = distances / bandwidth
    if metric_of(kernel) == "l1":
        return ratio.neg_().exp_()
    square = ratio.square_()
    return square.neg_().exp_() if kernel == "gaussian" else square.add_(1).rsqrt_()


def metric_of(kernel: str) -> str:
    """Return the metric whose distances a kernel takes: "l1" or "l2"."""
    if kernel not in METRIC_OF:
        raise InputError(f"expected a kernel out of {', '.join(METRIC_OF)}, found {kernel!r}: give 'gaussian'")
    return METRIC_OF[kernel]


@accepts_arrays
def bandwidths(rule: Bandwidth, distances: Tensor, split: int) -> Tensor:
    """Return the bandwidths (count,) that a rule gives, or the numbers that were given.

    >>> distances = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 3.0], [4.0, 3.0, 0.0]])
    >>> bandwidths("median", distances, split=1).tolist()
    [3.0]

    Args:
        rule: a rule of those at the top of this file, a number, or several.
        distances: (N, N) of the pooled sample, symmetric with zeros on the diagonal.
        split: the first so many members are x, the others y.

    Returns:
        float64 (count,). For members that are all alike, where every kernel is 1, all ones, or the floors.
    """
    if not isinstance(rule, str):
        return _given(rule, distances.device)
    if rule not in RULES:
        raise InputError(f"expected bandwidth {', '.join(RULES)} or numbers, found {rule!r}: give 'median'")
    chosen = distances[:split, split:][:_FIRST, :_FIRST] if rule.startswith("paper") else distances
    if rule == "paper-floors":
        return _floored(chosen[chosen > 0].double())
    positive = int(torch.count_nonzero(chosen > 0))
    if not positive:
        return torch.ones(1 if rule == "median" else COUNT, dtype=torch.float64, device=distances.device)
    if rule == "median":  # every pair is there twice, and members at a distance of 0 come first
        middle = smallest(chosen, chosen.numel() - positive + 2 * ((positive // 2 - 1) // 2))
        return torch.tensor([middle], dtype=torch.float64, device=distances.device)
    least = min(float(torch.where(rows > 0, rows, math.inf).min()) for rows in chosen.split(_ROWS))
    return _geometric(least / 2, 2 * float(chosen.max()), distances.device)


def _floored(distances: Tensor) -> Tensor:
    if not len(distances):
        return _geometric(_NEAR / 2, 2 * _FAR, distances.device)
    least = float(distances.min())
    if least < _NEAR:
        least = max(float(distances.sort().values[int(0.05 * len(distances))]), _NEAR)
    return _geometric(least / 2, 2 * max(float(distances.max()), _FAR), distances.device)


def _geometric(first: float, last: float, device: torch.device) -> Tensor:
    steps = torch.linspace(0, 1, COUNT, dtype=torch.float64, device=device)
    return first * (last / first) ** steps


def _given(numbers: float | Sequence[float] | Tensor, device: torch.device) -> Tensor:
    widths = torch.as_tensor(numbers, dtype=torch.float64, device=device).reshape(-1)
    if not len(widths) or not bool(((widths > 0) & torch.isfinite(widths)).all()):
        raise InputError(f"expected bandwidths above 0, found {numbers!r}: give positive numbers or a rule")
    return widths


FEWEST = 3  # members of a side whose resamples differ from each other
_RESAMPLED_ROWS = 1024  # of a symmetric matrix that are multiplied at once, from the diagonal on
_VARIES = 1e3  # times its rounding: a statistic that varies less does not vary


def random_sides(members: int, split: int, permutations: int, generator: torch.Generator | None) -> Tensor:
    """Draw sides (members, 1 + permutations), 1.0 for x; the first column is the samples as they are."""
    if permutations < 1:
        raise InputError(f"expected at least 1 permutation, found {permutations}: 999 is usual")
    generator = generator or torch.Generator().manual_seed(0)
    order = torch.rand(permutations, members, generator=generator, dtype=torch.float64).argsort(1).T
    sides = torch.cat([torch.arange(members)[:, None], order], 1) < split
    return sides.double()


@accepts_arrays
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


@accepts_arrays
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


@accepts_arrays
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


def random_counts(members: int, split: int, n_resamples: int, generator: torch.Generator | None) -> Tensor:
    """How often each member is drawn when both samples are drawn anew with replacement (members, n_resamples)."""
    if n_resamples < 1:
        raise InputError(f"expected at least 1 resample, found {n_resamples}: 1000 is usual")
    generator = generator or torch.Generator().manual_seed(0)
    parts = []
    for size in (split, members - split):
        drawn = torch.randint(size, (size, n_resamples), generator=generator)
        zeros = torch.zeros(size, n_resamples, dtype=torch.float64)
        parts.append(zeros.scatter_add_(0, drawn, torch.ones(size, n_resamples, dtype=torch.float64)))
    return torch.cat(parts)


@accepts_arrays
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
    for start in range(0, len(matrix), _RESAMPLED_ROWS):
        stop = min(start + _RESAMPLED_ROWS, len(matrix))
        part = columns[start:stop]
        above = matrix[start:stop, stop:] @ columns[stop:]
        total += (part * (matrix[start:stop, start:stop] @ part).add_(above, alpha=2)).sum(0)
    return total


@accepts_arrays
def percentiles(values: Tensor, confidence_level: float) -> tuple[float, float]:
    """The interval that leaves out equally many values on both sides; NaN is passed over."""
    if not 0 < confidence_level < 1:
        raise InputError(f"expected a confidence_level between 0 and 1, found {confidence_level}: 0.95 is usual")
    tail = (1 - confidence_level) / 2
    low, high = values.nanquantile(torch.tensor([tail, 1 - tail], dtype=values.dtype, device=values.device)).tolist()
    return low, high


@dataclass(frozen=True, eq=False)
class Pooled:
    """Distances between all members of two samples.

    Attributes:
        distances: float64 (m + n, m + n); the members of x come first.
        split: m.
        metric: "l1" or "l2".
    """

    distances: Tensor
    split: int
    metric: str

    def __post_init__(self) -> None:
        low, high = self.distances.aminmax() if self.distances.numel() else (self.distances.sum(), self.distances.sum())
        if not (float(low) >= 0 and math.isfinite(float(high))):
            raise InputError(
                "expected distances >= 0, found NaN, infinity or numbers below 0: leave out members that are not "
                "finite, and divide very large ones by a number"
            )

    @classmethod
    def of(cls, x: Tensor, y: Tensor, metric: str = "l2") -> Pooled:
        """Measure samples (m, *shape) and (n, *shape)."""
        if x.dim() < 1 or y.dim() < 1 or x.shape[1:] != y.shape[1:]:
            raise InputError(
                f"expected two samples (members, *shape) of one shape, found {tuple(x.shape)} and {tuple(y.shape)}"
            )
        together = torch.cat([part.reshape(len(part), -1).double() for part in (x, y.to(x.device))])
        if not bool(torch.isfinite(together).all()):
            raise InputError("expected finite samples, found NaN or infinity: leave these members out")
        return cls(pairwise(together, metric), len(x), metric)

    @classmethod
    def from_blocks(cls, xx: Tensor, yy: Tensor, xy: Tensor, metric: str = "l2") -> Pooled:
        """Put together distances (m, m), (n, n) and (m, n)."""
        m, n = len(xx), len(yy)
        if (xx.shape, yy.shape, xy.shape) != ((m, m), (n, n), (m, n)) or metric not in METRICS:
            shapes = [tuple(block.shape) for block in (xx, yy, xy)]
            raise InputError(
                f"expected distances (m, m), (n, n), (m, n) and metric {' or '.join(METRICS)}, found {shapes} and "
                f"{metric!r}: give the three blocks of one pair of samples"
            )
        top, bottom = torch.cat([xx, xy], 1), torch.cat([xy.T, yy], 1)
        return cls(torch.cat([top, bottom]).double(), m, metric)


@dataclass(frozen=True, eq=False)
class PermutationTest:
    """The result of `mmd_test`; one entry for each bandwidth.

    Attributes:
        squared: the estimates of the squared MMD (count,).
        bandwidths: (count,).
        p_values: of each bandwidth by itself (count,).
        p_value: of all of them together.
    """

    squared: Tensor
    bandwidths: Tensor
    p_values: Tensor
    p_value: float


@accepts_arrays
def mmd(
    x: Tensor | Pooled, y: Tensor | None = None, *, kernel: str = "gaussian", bandwidth: Bandwidth = "median"
) -> Tensor:
    """Return the unbiased estimate of the squared MMD.

    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0], [4.0]])
    >>> round(float(mmd(x, y, kernel="laplace", bandwidth=1.0)), 4)
    -0.1822

    Args:
        x: a sample (m, *shape) of any floating-point type, or the distances of both as a `Pooled`.
        y: the other sample (n, *shape); left out with a `Pooled`.
        kernel: "gaussian", "laplace" or "multiquadric"; formulas are at the top of this file.
        bandwidth: a rule, a number or several; see `bandwidths`.

    Returns:
        float64, () for "median" or one number, else (count,).
    """
    pooled = _pooled(x, y, kernel)
    widths = bandwidths(bandwidth, pooled.distances, pooled.split)
    estimates = torch.stack([unbiased(kernel_matrix(pooled, float(width), kernel), pooled.split) for width in widths])
    single = bandwidth == "median" if isinstance(bandwidth, str) else isinstance(bandwidth, int | float)
    return estimates[0] if single else estimates


@accepts_arrays
def mmd_test(
    x: Tensor | Pooled,
    y: Tensor | None = None,
    *,
    kernel: str = "gaussian",
    bandwidth: Bandwidth = "median",
    permutations: int = 999,
    generator: torch.Generator | None = None,
) -> PermutationTest:
    """Test whether two samples of independent members come from one law.

    Args:
        x: as in `mmd`.
        y: as in `mmd`.
        kernel: as in `mmd`.
        bandwidth: as in `mmd`.
        permutations: how often members change sides; the smallest p-value is 1 / (1 + permutations).
        generator: draws the permutations; seeded with 0 if it is left out.
    """
    pooled = _pooled(x, y, kernel)
    widths = bandwidths(bandwidth, pooled.distances, pooled.split)
    members = len(pooled.distances)
    sides = random_sides(members, pooled.split, permutations, generator).to(pooled.distances.device)
    matrices = [kernel_matrix(pooled, float(width), kernel) for width in widths]
    statistics = torch.stack([side_statistics(matrix, sides) for matrix in matrices])
    p_values, p_value = permutation_p(statistics, torch.stack([rounding(matrix, pooled.split) for matrix in matrices]))
    return PermutationTest(statistics[:, 0], widths, p_values, p_value)


@accepts_arrays
def mmd_interval(
    x: Tensor | Pooled,
    y: Tensor | None = None,
    *,
    kernel: str = "gaussian",
    bandwidth: Bandwidth = "median",
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Return a bootstrap interval of the squared MMD, averaged over bandwidths; it is valid where the laws differ.

    Two members, drawn again, are either the sample itself or no pair: below three on a side both ends are NaN.

    Args:
        x: as in `mmd`.
        y: as in `mmd`.
        kernel: as in `mmd`.
        bandwidth: as in `mmd`.
        n_resamples: how often both samples are drawn again.
        confidence_level: confidence level of the interval.
        generator: draws them; seeded with 0 if it is left out.
    """
    pooled = _pooled(x, y, kernel)
    split, device = pooled.split, pooled.distances.device
    counts = random_counts(len(pooled.distances), split, n_resamples, generator).to(device)
    widths = bandwidths(bandwidth, pooled.distances, split)
    ones = torch.ones(len(counts), dtype=torch.float64, device=device)
    statistics = [weighted_statistics(kernel_matrix(pooled, float(w), kernel), ones, split, counts) for w in widths]
    low, high = percentiles(torch.stack(statistics).mean(0), confidence_level)
    return (low, high) if min(split, len(pooled.distances) - split) >= FEWEST else (math.nan, math.nan)


@accepts_arrays
def kernel_matrix(pooled: Pooled, bandwidth: float, kernel: str) -> Tensor:
    """Return the kernel of all pairs of members (N, N), 0 on the diagonal: no pair has the same member twice."""
    return kernel_values(pooled.distances, bandwidth, kernel).fill_diagonal_(0)


@accepts_arrays
def unbiased(matrix: Tensor, split: int) -> Tensor:
    """U from the kernel of all pairs (N, N), 0 on the diagonal, of which the first `split` members are x."""
    m, n = split, len(matrix) - split
    xx, yy, xy = (part.sum() for part in (matrix[:split, :split], matrix[split:, split:], matrix[:split, split:]))
    return xx / (m * (m - 1)) + yy / (n * (n - 1)) - 2 * xy / (m * n)


def _pooled(x: Tensor | Pooled, y: Tensor | None, kernel: str) -> Pooled:
    metric = metric_of(kernel)
    if isinstance(x, Pooled):
        if y is not None or x.metric != metric:
            raise InputError(f"a {kernel} kernel takes {metric} distances alone, found {x.metric}: measure them so")
        pooled = x
    elif y is None:
        raise InputError("expected two samples, found one: give x and y, or the distances of both as a Pooled")
    else:
        pooled = Pooled.of(x, y, metric)
    m, n = pooled.split, len(pooled.distances) - pooled.split
    if min(m, n) < 2:
        raise InputError(f"expected at least 2 members on each side, found {m} and {n}: an MMD compares pairs")
    return pooled
