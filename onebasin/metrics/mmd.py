"""Do two samples come from one law? The maximum mean discrepancy, its permutation test and its bootstrap.

For samples x_1..x_m and y_1..y_n and a kernel k the unbiased estimate of the *squared* MMD is

    U = sum_{i != j} k(x_i, x_j) / m(m-1)  +  sum_{i != j} k(y_i, y_j) / n(n-1)  -  2 sum_{i, j} k(x_i, y_j) / mn.

Its mean is 0 when the laws are equal, so it may be slightly negative; with kernels of at most 1 it stays below 2.

The permutation test and the bootstrap are explained in `resampled`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.distances import METRICS, pairwise
from onebasin.metrics.kernels import Bandwidth, bandwidths, kernel_values, metric_of
from onebasin.metrics.resampled import (
    FEWEST,
    percentiles,
    permutation_p,
    random_counts,
    random_sides,
    rounding,
    side_statistics,
    weighted_statistics,
)


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
class MMDTest:
    """What `mmd_test` found; one entry for each bandwidth.

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
        kernel: "gaussian", "laplace" or "multiquadric"; see `kernels`.
        bandwidth: a rule, a number or several; see `kernels`.

    Returns:
        float64, () for "median" or one number, else (count,).
    """
    pooled = _pooled(x, y, kernel)
    widths = bandwidths(bandwidth, pooled.distances, pooled.split)
    found = torch.stack([unbiased(kernel_matrix(pooled, float(width), kernel), pooled.split) for width in widths])
    single = bandwidth == "median" if isinstance(bandwidth, str) else isinstance(bandwidth, int | float)
    return found[0] if single else found


def mmd_test(
    x: Tensor | Pooled,
    y: Tensor | None = None,
    *,
    kernel: str = "gaussian",
    bandwidth: Bandwidth = "median",
    permutations: int = 999,
    generator: torch.Generator | None = None,
) -> MMDTest:
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
    found = torch.stack([side_statistics(matrix, sides) for matrix in matrices])
    p_values, p_value = permutation_p(found, torch.stack([rounding(matrix, pooled.split) for matrix in matrices]))
    return MMDTest(found[:, 0], widths, p_values, p_value)


def mmd_interval(
    x: Tensor | Pooled,
    y: Tensor | None = None,
    *,
    kernel: str = "gaussian",
    bandwidth: Bandwidth = "median",
    resamples: int = 1000,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Return a bootstrap interval of the squared MMD, averaged over bandwidths; for laws that differ (see above).

    Two members, drawn again, are either the sample itself or no pair: below three on a side both ends are NaN.

    Args:
        x: as in `mmd`.
        y: as in `mmd`.
        kernel: as in `mmd`.
        bandwidth: as in `mmd`.
        resamples: how often both samples are drawn again.
        confidence: of the interval.
        generator: draws them; seeded with 0 if it is left out.
    """
    pooled = _pooled(x, y, kernel)
    split, device = pooled.split, pooled.distances.device
    counts = random_counts(len(pooled.distances), split, resamples, generator).to(device)
    widths = bandwidths(bandwidth, pooled.distances, split)
    ones = torch.ones(len(counts), dtype=torch.float64, device=device)
    found = [weighted_statistics(kernel_matrix(pooled, float(w), kernel), ones, split, counts) for w in widths]
    low, high = percentiles(torch.stack(found).mean(0), confidence)
    return (low, high) if min(split, len(pooled.distances) - split) >= FEWEST else (math.nan, math.nan)


def kernel_matrix(pooled: Pooled, bandwidth: float, kernel: str) -> Tensor:
    """Return the kernel of all pairs of members (N, N), 0 on the diagonal: no pair has the same member twice."""
    return kernel_values(pooled.distances, bandwidth, kernel).fill_diagonal_(0)


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
