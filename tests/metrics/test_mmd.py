"""The MMD against its sums and closed forms, its test against uniform p-values, its bootstrap against coverage."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.mmd import (
    COUNT,
    METRIC_OF,
    RULES,
    Pooled,
    bandwidths,
    mmd,
    mmd_interval,
    mmd_test,
    permutation_p,
    random_counts,
    random_sides,
    side_statistics,
    weighted_statistics,
)
from onebasin.metrics.pairs import pairwise
from tests.judging import assert_mean, numbers, seeded

KERNEL = {
    "laplace": lambda x, y, b: math.exp(-float((x - y).abs().sum()) / b),
    "gaussian": lambda x, y, b: math.exp(-float((x - y).square().sum()) / b**2),
    "multiquadric": lambda x, y, b: (1 + float((x - y).square().sum()) / b**2) ** -0.5,
}
P = 1e-4  # of tests of uniformity; seeds are fixed


def three_sums(x: Tensor, y: Tensor, kernel: str, bandwidth: float) -> float:
    """The definition, pair by pair."""
    m, n, k = len(x), len(y), KERNEL[kernel]
    xx = sum(k(x[i], x[j], bandwidth) for i, j in itertools.permutations(range(m), 2))
    yy = sum(k(y[i], y[j], bandwidth) for i, j in itertools.permutations(range(n), 2))
    xy = sum(k(one, other, bandwidth) for one in x for other in y)
    return xx / (m * (m - 1)) + yy / (n * (n - 1)) - 2 * xy / (m * n)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(2, 7),
    n=st.integers(2, 7),
    shape=st.sampled_from([(1,), (3,), (2, 3)]),
    kernel=st.sampled_from(sorted(KERNEL)),
    bandwidth=st.floats(0.05, 20),
    seed=st.integers(0, 100),
)
def test_the_three_sums(m: int, n: int, shape: tuple[int, ...], kernel: str, bandwidth: float, seed: int) -> None:
    x, y = numbers(m, *shape, seed=seed), 2 * numbers(n, *shape, seed=seed + 1) + 1
    found = mmd(x, y, kernel=kernel, bandwidth=bandwidth)
    assert found.shape == () and found.dtype == torch.float64
    assert float(found) == pytest.approx(three_sums(x, y, kernel, bandwidth), rel=1e-9, abs=1e-12)
    metric = METRIC_OF[kernel]
    order = 1.0 if metric == "l1" else 2.0
    blocks = [torch.cdist(p, q, p=order) for p, q in [(x.flatten(1),) * 2, (y.flatten(1),) * 2]]
    pooled = Pooled.from_blocks(*blocks, torch.cdist(x.flatten(1), y.flatten(1), p=order), metric)
    assert float(mmd(pooled, kernel=kernel, bandwidth=bandwidth)) == pytest.approx(float(found), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("metric", ["l1", "l2"])
def test_distances_of_many_rows_and_columns(metric: str) -> None:
    """More rows and columns than a tile holds; a large common offset must not cost digits."""
    rows = numbers(530, 700) + 1e4
    found = pairwise(rows, metric)
    direct = torch.stack([(rows - row).abs().sum(1) if metric == "l1" else (rows - row).norm(dim=1) for row in rows])
    torch.testing.assert_close(found, direct, rtol=1e-10, atol=0)
    assert torch.equal(found, found.T) and bool((found.diagonal() == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_numbers_are_taken_as_they_are(dtype: torch.dtype) -> None:
    x, y = numbers(9, 5).to(dtype), numbers(8, 5, seed=1).to(dtype)
    assert float(mmd(x, y)) == float(mmd(x.double(), y.double()))


def test_unbiased_for_gaussians() -> None:
    """E exp(-|z|^2 / b^2) = (1 + 2v / b^2)^(-d/2) exp(-|t|^2 / (b^2 + 2v)) for z ~ N(t, v I), here with v = 2."""
    d, b, shift = 4, 3.0, 0.7
    base = (1 + 4 / b**2) ** (-d / 2)
    expected = 2 * base * (1 - math.exp(-d * shift**2 / (b**2 + 4)))
    found = [float(mmd(numbers(8, d, seed=2 * s), numbers(5, d, seed=2 * s + 1) + shift, bandwidth=b))
             for s in range(800)]  # fmt: skip
    assert_mean(torch.tensor(found), expected)
    null = [float(mmd(numbers(8, d, seed=2 * s), numbers(5, d, seed=2 * s + 1), bandwidth=b)) for s in range(800)]
    assert_mean(torch.tensor(null), 0.0)


def test_bandwidths_by_rule() -> None:
    x, y = numbers(600, 2), 3 * numbers(520, 2, seed=1)
    pooled = Pooled.of(x, y)
    d = pooled.distances.numpy()
    pairs = d[np.triu_indices(1120, 1)]
    assert float(bandwidths("median", pooled.distances, 600)) == np.sort(pairs)[(len(pairs) - 1) // 2]
    cross = d[:500, 600:1100]
    for rule, low, high in [
        ("pooled", pairs.min() / 2, 2 * pairs.max()),
        ("paper", cross.min() / 2, 2 * cross.max()),
        ("paper-floors", max(np.quantile(cross, 0.05, method="higher"), 0.1) / 2, 2 * cross.max()),
    ]:
        found = bandwidths(rule, pooled.distances, 600).numpy()
        np.testing.assert_allclose(found, np.geomspace(low, high, COUNT), rtol=1e-4 if "floors" in rule else 1e-10)
    tiny = bandwidths("paper-floors", pooled.distances / 1e4, 600)
    np.testing.assert_allclose(tiny.numpy(), np.geomspace(0.05, 0.6, COUNT), rtol=1e-12)  # the floors alone


@pytest.mark.parametrize("rule", RULES)
def test_members_that_are_all_alike(rule: str) -> None:
    found = mmd(torch.ones(3, 4), torch.ones(5, 4), bandwidth=rule)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-15, rtol=0)
    assert mmd_test(torch.ones(3, 4), torch.ones(5, 4), bandwidth=rule, permutations=19).p_value == 1.0


def test_bandwidths_follow_the_scale_of_the_sample() -> None:
    x, y = numbers(12, 3), numbers(10, 3, seed=1) + 1
    for rule in ("median", "pooled", "paper"):
        for kernel in KERNEL:
            torch.testing.assert_close(
                mmd(x, y, kernel=kernel, bandwidth=rule), mmd(7 * x, 7 * y, kernel=kernel, bandwidth=rule)
            )


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 6), n=st.integers(2, 6), seed=st.integers(0, 50))
def test_permuted_statistics_are_those_of_permuted_samples(m: int, n: int, seed: int) -> None:
    together = numbers(m + n, 2, seed=seed)
    matrix = torch.exp(-torch.cdist(together, together)).fill_diagonal_(0)
    sides = random_sides(m + n, m, 8, seeded(seed))
    assert bool((sides.sum(0) == m).all()) and torch.equal(sides[:, 0], (torch.arange(m + n) < m).double())
    for column, found in zip(sides.T, side_statistics(matrix, sides).tolist(), strict=True):
        one, other = (column == 1).nonzero().flatten(), (column == 0).nonzero().flatten()
        xx, yy, xy = (matrix[p][:, q].sum() for p, q in [(one, one), (other, other), (one, other)])
        expected = float(xx) / max(1, m * (m - 1)) + float(yy) / (n * (n - 1)) - 2 * float(xy) / (m * n)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rule", ["median", "pooled"])
def test_p_values_are_uniform_when_laws_are_equal(rule: str) -> None:
    """With p on a grid of 1/20, p - u/20 for uniform u is uniform itself if and only if the test is exact."""
    found = [
        mmd_test(z[:9], z[9:], bandwidth=rule, permutations=19, generator=seeded(s)).p_value
        for s in range(500)
        for z in [numbers(16, 3, seed=s) ** 3]
    ]
    spread = torch.tensor(found) - torch.rand(len(found), generator=seeded(1)) / 20
    assert stats.kstest(spread.numpy(), "uniform").pvalue > P


def test_several_bandwidths_find_what_one_misses() -> None:
    """A comb of 17 points inside a uniform law: at the median distance nothing is seen."""
    x = 4.25 * torch.rand(150, 1, generator=seeded(50)) - 2.125
    y = torch.randint(-8, 9, (150, 1), generator=seeded(0)) / 4
    assert mmd_test(x, y).p_value > 0.1
    assert mmd_test(x, y, bandwidth="pooled").p_value < 0.01
    found = mmd_test(x, y, bandwidth="pooled")
    assert found.p_values.shape == found.squared.shape == found.bandwidths.shape == (COUNT,)
    torch.testing.assert_close(found.squared, mmd(x, y, bandwidth="pooled"), atol=1e-12, rtol=1e-9)
    assert found.p_value >= float(found.p_values.min())


def test_the_smallest_p_value_and_the_largest() -> None:
    statistics = torch.tensor([[3.0, 1.0, 2.0, -1.0], [-2.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    each, together = permutation_p(statistics)
    assert each.tolist() == [0.25, 1.0] and together == 0.25
    assert permutation_p(statistics[1:])[1] == 1.0  # far below 0 is no sign of a difference


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100))
def test_the_bootstrap_leaves_out_copies(seed: int) -> None:
    """Against the sample written out with its copies, pairs of copies passed over."""
    m, n = 5, 4
    z = numbers(m + n, 2, seed=seed)
    matrix = torch.exp(-torch.cdist(z, z)).fill_diagonal_(0)
    counts = random_counts(m + n, m, 6, seeded(seed))
    assert bool((counts[:m].sum(0) == m).all() and (counts[m:].sum(0) == n).all())
    ones = torch.ones(m + n, dtype=torch.float64)
    for column, found in zip(counts.T, weighted_statistics(matrix, ones, m, counts).tolist(), strict=True):
        drawn = torch.arange(m + n).repeat_interleave(column.long())
        one, other = drawn[drawn < m].tolist(), drawn[drawn >= m].tolist()
        parts = []
        for side in (one, other):
            values = [float(matrix[i, j]) for i, j in itertools.permutations(side, 2) if i != j]
            parts.append(sum(values) / len(values) if values else math.nan)
        cross = sum(float(matrix[i, j]) for i in one for j in other) / (m * n)
        assert found == pytest.approx(parts[0] + parts[1] - 2 * cross, rel=1e-9, nan_ok=True)


def test_the_interval_covers_when_laws_differ() -> None:
    """Percentiles are right asymptotically: at most 3 points below 95 % here, and Monte-Carlo error."""
    b, shift, rounds = 2.0, 1.0, 300
    expected = 2 * (1 + 4 / b**2) ** -0.5 * (1 - math.exp(-(shift**2) / (b**2 + 4)))
    covered = 0
    for s in range(rounds):
        x, y = numbers(60, 1, seed=2 * s), numbers(50, 1, seed=2 * s + 1) + shift
        low, high = mmd_interval(x, y, bandwidth=b, n_resamples=200, generator=seeded(s))
        covered += low <= expected <= high
    assert covered / rounds > 0.92 - 3 * math.sqrt(0.05 * 0.95 / rounds)
    assert covered < rounds  # an interval that always covers says nothing


def test_refusals() -> None:
    x, y = numbers(4, 2), numbers(5, 2)
    for call in (
        lambda: mmd(x, y, kernel="gauss"),
        lambda: mmd(x, y, bandwidth="mean"),
        lambda: mmd(x, y, bandwidth=-1.0),
        lambda: mmd(x, y, bandwidth=[]),
        lambda: mmd(x),
        lambda: mmd(x, y[:, :1]),
        lambda: mmd(x[:1], y),
        lambda: mmd(x, y * math.nan),
        lambda: mmd(Pooled.of(x, y, "l1")),
        lambda: mmd(Pooled.of(x, y), y),
        lambda: Pooled.from_blocks(x, y, x),
        lambda: Pooled.of(x, y, "l3"),
        lambda: mmd_test(x, y, permutations=0),
        lambda: mmd_interval(x, y, n_resamples=0),
        lambda: mmd_interval(x, y, confidence_level=95),
    ):
        with pytest.raises(InputError):
            call()
