"""Mixtures of Gaussians over members: torch.distributions as the oracle, coverage by simulation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from onebasin.errors import InputError
from onebasin.metrics.regression import (
    central_interval,
    coverage,
    cumulative_probability,
    gaussian_nll,
    interval_score,
    log_density,
    quantile_calibration_error,
    rmse,
    width,
)

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**31 - 1))
LEVELS = st.floats(0.01, 0.999)


def population(members: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """Means, noise of each member and example, targets."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(members, count, generator=generator, dtype=torch.float64)
    noise = torch.exp(torch.randn(members, count, generator=generator, dtype=torch.float64))
    return means, noise, 4 * torch.randn(count, generator=generator, dtype=torch.float64), generator


def mixture(means: Tensor, noise: Tensor) -> MixtureSameFamily:
    shares = torch.ones(means.shape[::-1], dtype=torch.float64)
    return MixtureSameFamily(Categorical(shares), Normal(means.T, noise.expand_as(means).T))


@settings(deadline=None)
@given(SIZES)
def test_densities_are_those_of_the_mixture(sizes: tuple[int, int, int]) -> None:
    means, noise, targets, _ = population(*sizes)
    oracle = mixture(means, noise).log_prob(targets)
    torch.testing.assert_close(log_density(means, targets, noise), oracle, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gaussian_nll(means, targets, noise), -oracle.mean(), rtol=1e-9, atol=1e-9)
    per_member = noise[:, :1]
    oracle = mixture(means, per_member).log_prob(targets).mean()
    torch.testing.assert_close(gaussian_nll(means, targets, per_member), -oracle, rtol=1e-9, atol=1e-9)
    one = float(noise[0, 0])
    oracle = mixture(means, torch.tensor(one, dtype=torch.float64)).log_prob(targets).mean()
    torch.testing.assert_close(gaussian_nll(means, targets, one), -oracle, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(SIZES, LEVELS)
def test_interval_ends_are_quantiles(sizes: tuple[int, int, int], level: float) -> None:
    means, noise, targets, _ = population(*sizes)
    low, high = central_interval(means, noise, level)
    oracle = mixture(means, noise)
    torch.testing.assert_close(oracle.cdf(low), torch.full_like(low, (1 - level) / 2), rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(oracle.cdf(high), torch.full_like(high, (1 + level) / 2), rtol=1e-8, atol=1e-11)
    inside = (oracle.cdf(targets) - 0.5).abs() <= level / 2
    torch.testing.assert_close(coverage(means, targets, noise, level), inside.double().mean())
    torch.testing.assert_close(width(means, noise, level), (high - low).mean())


def test_far_apart_members_have_quantiles_too() -> None:
    # The median of two distant bumps lies in a desert, where Newton's method has nothing to hold on to.
    means = torch.tensor([[-1e4], [1e4], [1e4]], dtype=torch.float64)
    low, high = central_interval(means, 1e-3, 0.5)
    assert float(low) == pytest.approx(-1e4 + 1e-3 * float(torch.special.ndtri(torch.tensor(0.75).double())), abs=1e-9)
    assert float(high) == pytest.approx(1e4 + 1e-3 * float(torch.special.ndtri(torch.tensor(0.625).double())), abs=1e-9)


def test_one_member_is_a_gaussian() -> None:
    targets = torch.linspace(-3, 3, 7, dtype=torch.float64)
    means = torch.zeros(1, 7, dtype=torch.float64)
    expected = -Normal(0.0, 2.0).log_prob(targets).mean()
    torch.testing.assert_close(gaussian_nll(means, targets, 2.0), expected, rtol=1e-6, atol=1e-6)
    assert float(width(means, 2.0, 0.9)) == pytest.approx(2 * 2 * 1.6448536269514722, rel=1e-12)


def test_targets_of_the_mixture_are_covered_as_often_as_promised() -> None:
    generator = torch.Generator().manual_seed(11)
    means = 2 * torch.randn(5, 20_000, generator=generator, dtype=torch.float64)
    noise = torch.exp(0.5 * torch.randn(5, 20_000, generator=generator, dtype=torch.float64))
    member = torch.randint(5, (20_000,), generator=generator)
    columns = torch.arange(20_000)
    draws = torch.randn(20_000, generator=generator, dtype=torch.float64)
    targets = means[member, columns] + noise[member, columns] * draws
    for level in (0.5, 0.9, 0.99):
        error = math.sqrt(level * (1 - level) / 20_000)
        assert abs(float(coverage(means, targets, noise, level)) - level) < 3.5 * error
        assert float(coverage(means, targets, noise / 2, level)) < level - 10 * error


def test_several_values_per_example() -> None:
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    error = np.sqrt(((means.numpy().mean(0) - targets.numpy()) ** 2).mean())
    assert float(rmse(means, targets)) == pytest.approx(error, rel=1e-12)
    joint = Normal(means, 0.7).log_prob(targets).sum(2).logsumexp(0) - math.log(4)  # one event per example
    torch.testing.assert_close(gaussian_nll(means, targets, 0.7), -joint.mean())
    low, high = central_interval(means, 0.7, 0.8)
    assert low.shape == high.shape == (6, 3)
    flat_low, _ = central_interval(means.reshape(4, 18), 0.7, 0.8)
    torch.testing.assert_close(low.reshape(-1), flat_low)
    inside = ((targets >= low) & (targets <= high)).double().mean()
    torch.testing.assert_close(coverage(means, targets, 0.7, 0.8), inside)


def test_blocks_do_not_change_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    means, noise, _, _ = population(4, 9, seed=1)
    whole = central_interval(means, noise, 0.9)
    monkeypatch.setattr("onebasin.metrics.regression._BLOCK_VALUES", 8)
    for one, other in zip(whole, central_interval(means, noise, 0.9), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rmse(torch.zeros(3), torch.zeros(3)), "means"),
        (lambda: rmse(torch.zeros(2, 3), torch.zeros(3, 1)), r"\(2, 3\) and \(3, 1\)"),
        (lambda: rmse(torch.full((1, 2), torch.nan), torch.zeros(2)), "finite means"),
        (lambda: rmse(torch.zeros(1, 2), torch.tensor([0.0, torch.inf])), "finite targets"),
        (lambda: gaussian_nll(torch.zeros(1, 2), torch.zeros(2), 0.0), "above 0"),
        (lambda: gaussian_nll(torch.zeros(2, 3), torch.zeros(3), torch.ones(2)), "broadcasts"),
        (lambda: width(torch.zeros(1, 2), -1.0), "above 0"),
        (lambda: coverage(torch.zeros(1, 2), torch.zeros(2), 1.0, 1.0), "level between 0 and 1"),
        (lambda: central_interval(torch.zeros(3), 1.0, 0.5), "means"),
    ],
)
def test_mistakes_get_a_sentence(call: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        call()


# ---------------------------------------------------------------------- interval score, quantiles


def test_the_interval_score_by_hand_and_its_least_expectation() -> None:
    low, high, goal = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 1.0]), torch.tensor([0.5, 3.0, -1.0])
    wanted = [1.0, 2 + 2 / 0.2 * 1, 1 + 2 / 0.2 * 1]
    assert float(interval_score(low, high, goal, level=0.8)) == pytest.approx(sum(wanted) / 3)
    weights = torch.tensor([2.0, 0.0, 1.0])
    assert float(interval_score(low, high, goal, level=0.8, weights=weights)) == pytest.approx(
        (2 * wanted[0] + wanted[2]) / 3
    )
    # Of N(0, 1) the expectation at half width h is 2 h + 4 / (1 - L) (phi(h) - h (1 - Phi(h))), least at its quantile.
    y = torch.special.ndtri((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    best = norm.ppf(0.9)
    scores = {}
    for h in (0.8 * best, best, 1.2 * best):
        end = torch.full_like(y, h)
        scores[h] = float(interval_score(-end, end, y, level=0.8))
        assert scores[h] == pytest.approx(2 * h + 4 / 0.2 * (norm.pdf(h) - h * norm.sf(h)), rel=1e-4)
    assert min(scores, key=lambda h: scores[h]) == best


def test_cumulative_probabilities_of_a_mixture_and_the_quantile_calibration_error() -> None:
    generator = torch.Generator().manual_seed(0)
    means, noise = torch.randn(4, 50, generator=generator).double(), torch.tensor(0.7).double()
    goal = torch.randn(50, generator=generator).double()
    u = cumulative_probability(means, goal, noise)
    assert np.allclose(u.numpy(), norm.cdf((goal.numpy() - means.numpy()) / 0.7).mean(0))
    shares = [float((u <= level / 20).double().mean()) for level in range(1, 20)]
    wanted = np.mean([abs(share - level / 20) for level, share in enumerate(shares, 1)])
    assert float(quantile_calibration_error(means, goal, noise)) == pytest.approx(wanted)
    # Deviations that are k times too small: the share below the quantile q is Phi(Phi^-1(q) / k).
    many = torch.special.ndtri((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    found = quantile_calibration_error(torch.zeros(1, 100_000), many, 0.5)
    levels = np.arange(1, 20) / 20
    assert float(found) == pytest.approx(np.abs(norm.cdf(norm.ppf(levels) * 0.5) - levels).mean(), abs=2e-5)


def test_refusals_of_levels_and_ends() -> None:
    one = torch.ones(2)
    with pytest.raises(InputError, match=r"0\.95 is usual"):
        interval_score(one, one, one, level=1.0)
    with pytest.raises(InputError, match="two ends"):
        interval_score(one + 1, one, one)
    with pytest.raises(InputError, match="leave them out"):
        quantile_calibration_error(one[None], one, 1.0, levels=[0.0])
