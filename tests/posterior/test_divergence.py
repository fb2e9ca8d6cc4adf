import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from onebasin.errors import InputError, SpecError
from onebasin.posterior import divergence as bures_module
from onebasin.posterior.divergence import kl, wasserstein2
from onebasin.posterior.gaussian import Covariance, Diagonal, Full, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.state import TensorSpec


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=seeded(seed), dtype=torch.float64)


def shape_of(size: int, rank: int, seed: int) -> Covariance:
    scale = (0.5 * numbers(size, seed=seed)).exp()
    return LowRank(scale, numbers(size, rank, seed=seed + 1)) if rank else Diagonal(scale)


def covariance(shape: Covariance) -> Tensor:
    made = shape.tensors()
    factor = made.get("factor", torch.zeros(shape.size, 0, dtype=torch.float64))
    return torch.diag(made["scale"] ** 2) + factor @ factor.T


def posterior(*gaussians: Gaussian, weights: list[float] | None = None) -> Posterior:
    layout = FlatLayout(("w",), {"w": TensorSpec((gaussians[0].size,), torch.float64)}, {})
    share = torch.tensor(weights or [1 / len(gaussians)] * len(gaussians), dtype=torch.float64)
    return Posterior(gaussians, share, layout, ({},) * len(gaussians))


def gaussian(size: int, rank: int, seed: int) -> Gaussian:
    return Gaussian(numbers(size, seed=seed + 50), shape_of(size, rank, seed))


def dense_wasserstein(p: Gaussian, q: Gaussian) -> float:
    a, b = covariance(p.covariance).numpy(), covariance(q.covariance).numpy()
    root = sqrtm(a)
    cross = sqrtm(root @ b @ root).real
    return math.sqrt(float((p.centre - q.centre).square().sum()) + float(a.trace() + b.trace() - 2 * cross.trace()))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 10), left=st.integers(0, 12), right=st.integers(0, 12), seed=st.integers(0, 999))
def test_kl_of_gaussians_is_that_of_torch(size: int, left: int, right: int, seed: int) -> None:
    p, q = gaussian(size, left, seed), gaussian(size, right, seed + 7)
    expected = kl_divergence(
        MultivariateNormal(p.centre, covariance(p.covariance)), MultivariateNormal(q.centre, covariance(q.covariance))
    )
    found = kl(posterior(p), posterior(q))
    assert found.method == "closed form"
    assert float(found) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_kl_of_a_posterior_to_itself_is_zero_also_where_directions_dwarf_the_diagonal() -> None:
    shape = LowRank(torch.full((6,), 1e-3, dtype=torch.float64), 100 * numbers(6, 2))
    assert float(kl(posterior(Gaussian(numbers(6), shape)), posterior(Gaussian(numbers(6), shape)))) == pytest.approx(
        0, abs=1e-4
    )


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 10), left=st.integers(0, 12), right=st.integers(0, 12), seed=st.integers(0, 999))
def test_wasserstein_of_gaussians_is_the_dense_formula(size: int, left: int, right: int, seed: int) -> None:
    p, q = gaussian(size, left, seed), gaussian(size, right, seed + 7)
    found = wasserstein2(posterior(p), posterior(q))
    assert found.method == "closed form"
    assert found.value == pytest.approx(dense_wasserstein(p, q), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("levels", [(0.0, 0.0), (0.7, 0.2), (0.0, 0.3)])
def test_wasserstein_with_isotropic_parts_needs_only_the_span(levels: tuple[float, float]) -> None:
    size = 40
    shapes = [
        LowRank(torch.full((size,), level, dtype=torch.float64), numbers(size, rank, seed=rank))
        for level, rank in zip(levels, (3, 5), strict=True)
    ]
    p, q = (Gaussian(numbers(size, seed=seed), shape) for seed, shape in enumerate(shapes))
    found = wasserstein2(posterior(p), posterior(q))
    assert found.method == "closed form"
    assert found.value == pytest.approx(dense_wasserstein(p, q), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(left=st.integers(1, 6), right=st.integers(0, 6), seed=st.integers(0, 999))
def test_bounds_of_large_low_rank_gaussians_hold_the_distance(left: int, right: int, seed: int) -> None:
    p, q = gaussian(12, left, seed), gaussian(12, right, seed + 3)
    exact = wasserstein2(posterior(p), posterior(q)).value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bures_module, "_DENSE", 0)
        found = wasserstein2(posterior(p), posterior(q))
    assert found.method == "bounds"
    assert found.low <= exact * (1 + 1e-9) and exact <= found.high * (1 + 1e-9)
    assert found.value == found.high


def test_mixture_of_equal_components_is_one_gaussian() -> None:
    p, q = gaussian(5, 0, 1), gaussian(5, 2, 2)
    exact = float(kl(posterior(p), posterior(q)))
    found = kl(posterior(p, p, weights=[0.3, 0.7]), posterior(q, q), samples=4000, generator=seeded(0))
    assert found.method == "Monte Carlo"
    error = (found.high - found.low) / 4
    assert 0 < error < 0.1 * exact
    assert abs(found.value - exact) < 4 * error
    moved = wasserstein2(posterior(p, p, weights=[0.3, 0.7]), posterior(q, q))
    assert moved.high == pytest.approx(dense_wasserstein(p, q), rel=1e-6)
    assert moved.low <= moved.high


def test_standard_error_of_monte_carlo_is_the_spread_over_seeds() -> None:
    p = posterior(gaussian(3, 1, 5), gaussian(3, 1, 5))  # with weights of 1/2, a half of the variance of one
    q = posterior(gaussian(3, 0, 9))
    found = [kl(p, q, samples=100, generator=seeded(seed)) for seed in range(200)]
    values = torch.tensor([each.value for each in found])
    errors = torch.tensor([(each.high - each.low) / 4 for each in found])
    # The spread of 200 values is known to 1 / sqrt(400) = 5 percent; 20 percent are four of these.
    assert float(values.std() / errors.square().mean().sqrt()) == pytest.approx(1, abs=0.2)


def test_transport_between_mixtures_moves_components_as_wholes() -> None:
    # Far apart and equally shaped: component 0 of p is component 1 of q and the other way round, each shifted by 1.
    wide = Diagonal(torch.ones(2, dtype=torch.float64))
    here, there = torch.zeros(2, dtype=torch.float64), torch.full((2,), 1000.0, dtype=torch.float64)
    shift = torch.tensor([1.0, 0.0], dtype=torch.float64)
    p = posterior(Gaussian(here, wide), Gaussian(there, wide))
    q = posterior(Gaussian(there + shift, wide), Gaussian(here + shift, wide))
    found = wasserstein2(p, q)
    assert found.high == pytest.approx(1.0, rel=1e-6)
    assert found.low == pytest.approx(1.0, rel=1e-6)  # the means alone are 1 apart


def test_divergences_refuse_what_they_cannot_compare() -> None:
    p = posterior(gaussian(4, 0, 1))
    with pytest.raises(SpecError):
        kl(p, posterior(gaussian(5, 0, 1)))
    with pytest.raises(InputError, match="generator"):
        kl(posterior(gaussian(4, 0, 1), gaussian(4, 0, 2)), p)
    with pytest.raises(InputError, match="full"):
        wasserstein2(p, posterior(Gaussian(numbers(4), Full(torch.eye(4, dtype=torch.float64)))))
    flat = posterior(Gaussian(numbers(4), LowRank(torch.zeros(4, dtype=torch.float64), numbers(4, 2))))
    with pytest.raises(InputError, match="positive standard deviations"):
        kl(p, flat)
    with pytest.raises(InputError, match="positive standard deviations"):
        kl(flat, p)
    wasserstein2(p, flat)
    other = FlatLayout(("v",), {"w": TensorSpec((2,), torch.float64), "v": TensorSpec((2,), torch.float64)}, {})
    first = FlatLayout(("w",), other.spec, {})
    pair = Gaussian(numbers(2), Diagonal(torch.ones(2, dtype=torch.float64)))
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(InputError, match="same weights"):
        kl(Posterior((pair,), one, first, ({"v": numbers(2)},)), Posterior((pair,), one, other, ({"w": numbers(2)},)))


def test_divergence_of_many_weights_never_writes_a_covariance() -> None:
    size = 200_000
    p, q = gaussian(size, 3, 1), gaussian(size, 2, 2)
    assert float(kl(posterior(p), posterior(q))) > 0
    found = wasserstein2(posterior(p), posterior(q))
    assert 0 < found.low <= found.high
    assert str(found).endswith("bounds)")
