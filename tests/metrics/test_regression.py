"""Mixtures of Gaussians over members: torch.distributions as the oracle, coverage by simulation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from onebasin.errors import InputError
from onebasin.metrics.regression import central_interval, coverage, gaussian_nll, log_density, rmse, width

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
