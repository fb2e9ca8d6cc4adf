import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebasin.errors import InputError
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.prior_shares import prior_shares
from onebasin.state import TensorSpec


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def population(members: int, prior: float, size: int = 20_000, seed: int = 0) -> Population:
    return Population.from_stacked({"w": prior * torch.randn(members, size, generator=seeded(seed))})


@settings(max_examples=10, deadline=None)
@given(members=st.sampled_from([10, 50, 200]), prior=st.sampled_from([0.01, 1.0, 7.0]), seed=st.integers(0, 99))
def test_draws_from_the_prior_give_the_expected_share(members: int, prior: float, seed: int) -> None:
    size = 20_000
    found = prior_shares(fit(population(members, prior, size, seed)), prior)
    assert found.networks == members
    error = math.sqrt(found.expected * (1 - found.expected) / size)
    assert abs(found.total - found.expected) < 5 * error + 1 / size


def test_the_spread_of_deviations_is_that_of_so_many_draws() -> None:
    # The paper's 1,000 draws: 0.963 to 1.037 of the prior, from chance alone.
    names = {"w": TensorSpec((1,), torch.float64)}
    posterior = Posterior(
        (Gaussian(torch.zeros(1, dtype=torch.float64), Diagonal(torch.ones(1, dtype=torch.float64))),),
        torch.ones(1),
        FlatLayout(("w",), names, {}),
        ({},),
    )
    assert prior_shares(posterior, 1.0, networks=1000).spread == pytest.approx((0.963, 1.037), abs=5e-4)
    std = fit(population(100, 1.0)).std["w"]
    low, high = prior_shares(posterior, 1.0, networks=100).spread
    inside = float(((std > low) & (std < high)).double().mean())
    assert abs(inside - 0.9) < 4.5 * math.sqrt(0.09 / 20_000)


def test_weights_that_left_the_prior_are_not_counted() -> None:
    names = {"a": TensorSpec((4,), torch.float64), "b": TensorSpec((2, 2), torch.float64)}
    centre = torch.tensor([0.0, 0.5, 0.0, 0.05, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    scale = torch.tensor([1.0, 1.0, 0.5, 0.95, 2.0, 2.1, 2.3, 0.0], dtype=torch.float64)
    posterior = Posterior((Gaussian(centre, Diagonal(scale)),), torch.ones(1), FlatLayout(("a", "b"), names, {}), ({},))
    found = prior_shares(posterior, {"*": 1.0, "b": 2.0})
    assert found.tensors == {"a": 0.5, "b": 0.5}  # moved; narrowed; and 2.3 and 0 of 2
    assert found.total == 0.5
    assert found.expected == 1.0 and found.networks is None
    assert found.to_dict()["tensors"] == {"a": 0.5, "b": 0.5}
    assert "50.00% of the weights" in str(found) and "exact moments" in str(found)
    assert prior_shares(posterior, 1.0, tolerance=0.6).tensors["a"] == 1.0
    shifted = prior_shares(posterior, 1.0, networks=37)
    assert shifted.networks == 37 and "37 draws" in str(shifted)


def test_running_statistics_are_no_weights() -> None:
    stacked = {
        "weight": torch.randn(20, 50, generator=seeded(0)),
        "running_mean": torch.zeros(20, 50),
        "running_var": torch.ones(20, 50),
    }
    found = prior_shares(fit(Population.from_stacked(stacked)), 1.0, tolerance=0.9)
    assert list(found.tensors) == ["weight"]
    assert found.total == 1.0


def test_priors_that_make_no_sense_are_refused() -> None:
    posterior = fit(population(5, 1.0, 10))
    for prior in (0.0, -1.0, math.inf, {"v": 1.0}):
        with pytest.raises(InputError, match="positive prior"):
            prior_shares(posterior, prior)
    with pytest.raises(InputError, match="tolerance"):
        prior_shares(posterior, 1.0, tolerance=1.5)
    with pytest.raises(InputError, match="more than 1"):
        prior_shares(posterior, 1.0, networks=1)
