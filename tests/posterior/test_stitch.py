import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.errors import InputError, SpecError
from onebasin.posterior.distance import carried, distance, onto, stitch
from onebasin.posterior.divergence import kl, wasserstein2
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.state import as_spec


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 2)).double()


@pytest.fixture(scope="module")
def symmetry(model: nn.Module) -> ob.Symmetry:
    return ob.discover(model, torch.zeros(1, 5, dtype=torch.float64))


def posterior(model: nn.Module, seed: int, rank: int = 0) -> Posterior:
    names = tuple(name for name, _ in model.named_parameters())
    layout = FlatLayout(names, as_spec(model), {})
    centre = torch.randn(layout.size, generator=seeded(seed), dtype=torch.float64)
    scale = 0.1 * (1 + torch.rand(layout.size, generator=seeded(seed + 1), dtype=torch.float64))
    factor = 0.1 * torch.randn(layout.size, rank, generator=seeded(seed + 2), dtype=torch.float64)
    shape = LowRank(scale, factor) if rank else Diagonal(scale)
    return Posterior((Gaussian(centre, shape),), torch.ones(1, dtype=torch.float64), layout, ({},), {"seed": seed})


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("by", ["weights", "spread"])
def test_a_spread_from_another_basin_is_brought_home(
    model: nn.Module, symmetry: ob.Symmetry, rank: int, by: str
) -> None:
    own = posterior(model, 1, rank)
    away = carried(own, symmetry.random(7), symmetry)
    found = stitch(own, away, symmetry, by=by)
    assert torch.equal(found.components[0].centre, own.components[0].centre)
    for name, value in own.components[0].covariance.tensors().items():
        torch.testing.assert_close(found.components[0].covariance.tensors()[name], value)
    blind = Gaussian(own.components[0].centre, away.components[0].covariance)
    assert not torch.allclose(blind.covariance.std(), own.components[0].covariance.std())
    assert found.provenance["stitch"]["mean of"] == {"seed": 1}


def test_a_given_element_is_used(model: nn.Module, symmetry: ob.Symmetry) -> None:
    own, other = posterior(model, 1), posterior(model, 5)
    element = symmetry.random(3)
    found = stitch(own, other, symmetry, element=element)
    moved = carried(other, element, symmetry)
    assert torch.equal(found.components[0].covariance.std(), moved.components[0].covariance.std())


def test_distance_in_a_common_basin_is_that_before_the_move(model: nn.Module, symmetry: ob.Symmetry) -> None:
    p = posterior(model, 1)
    near = posterior(model, 1)
    centre = near.components[0].centre + 0.02 * torch.randn(p.layout.size, generator=seeded(9), dtype=torch.float64)
    near = Posterior((Gaussian(centre, near.components[0].covariance),), near.weights, near.layout, near.buffers)
    exact = kl(p, near), wasserstein2(p, near)
    found = distance(p, carried(near, symmetry.random(4), symmetry), symmetry)
    assert float(found.kl_after) == pytest.approx(float(exact[0]), rel=1e-9)
    assert float(found.wasserstein_after) == pytest.approx(float(exact[1]), rel=1e-9)
    assert float(found.kl_before) > 10 * float(found.kl_after)
    assert float(found.wasserstein_before) > 2 * float(found.wasserstein_after)
    assert found.to_dict()["kl_after"]["method"] == "closed form"
    assert "common basin" in str(found)


def test_distance_of_unrelated_posteriors_is_not_made_larger(model: nn.Module, symmetry: ob.Symmetry) -> None:
    for seed in range(5):
        found = distance(posterior(model, seed), posterior(model, 50 + seed), symmetry)
        assert float(found.wasserstein_after) <= float(found.wasserstein_before) * (1 + 1e-9)


def test_distance_of_mixtures_takes_draws(model: nn.Module, symmetry: ob.Symmetry) -> None:
    one, two = posterior(model, 1), posterior(model, 2)
    both = Posterior(
        one.components + two.components, torch.tensor([0.5, 0.5], dtype=torch.float64), one.layout, ({}, {})
    )
    found = distance(one, both, symmetry, element=symmetry.identity(), samples=20, generator=seeded(0))
    assert found.kl_after.method == "Monte Carlo"
    # Half of the mixture is the first posterior itself, the other half far away: KL = log 2.
    assert float(found.kl_after) == pytest.approx(0.6931, abs=1e-3)


def test_what_cannot_be_stitched_is_refused(model: nn.Module, symmetry: ob.Symmetry) -> None:
    own = posterior(model, 1)
    pair = Posterior(own.components * 2, torch.tensor([0.5, 0.5], dtype=torch.float64), own.layout, ({}, {}))
    with pytest.raises(InputError, match="mixture of 2"):
        stitch(pair, own, symmetry)
    with pytest.raises(InputError, match="mixture of 2"):
        stitch(own, pair, symmetry)
    with pytest.raises(InputError, match="weights, spread"):
        onto(own, own, symmetry, by="names")
    with pytest.raises(SpecError):
        stitch(own, posterior(nn.Sequential(nn.Linear(5, 3)).double(), 1), symmetry)
