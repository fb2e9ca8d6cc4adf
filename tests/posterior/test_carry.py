import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, SymmetryError
from onebasin.functional.call import global_seed
from onebasin.functional.population_pass import predictions
from onebasin.posterior.distance import carried
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import Diagonal, Full, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Normed(nn.Module):
    """Convolution, batch norm with statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        made: Tensor = self.head(torch.tanh(self.second(x)).mean((2, 3)))
        return made


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.mix = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.again(torch.tanh(self.mix(torch.tanh(self.embed(x))))))
        made: Tensor = self.head(hidden)
        return made


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
    "relu": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (4, 3)),
    "normed": (Normed, (3, 2, 4, 4)),
    "tied": (Tied, (4, 4)),
}


@functools.cache
def made(name: str) -> tuple[nn.Module, Tensor, ob.Symmetry, ob.Population]:
    build, shape = MODELS[name]
    inputs = torch.randn(*shape, generator=seeded(0), dtype=torch.float64)
    with global_seed(0):
        models = [build().double() for _ in range(6)]
    for model in models:
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=seeded(1), dtype=torch.float64))
            if key.endswith("running_var"):
                buffer.copy_(1 + torch.rand(buffer.shape, generator=seeded(2), dtype=torch.float64))
    model = models[0].eval()
    return model, inputs, ob.discover(model, inputs), ob.Population.from_models(models)


def log_volume(symmetry: ob.Symmetry, element: ob.Element, posterior: Posterior) -> float:
    """Sum of log |factor| over all uncertain weights."""
    ones = {name: torch.ones(tensor.shape, dtype=torch.float64) for name, tensor in posterior.spec.items()}
    moved = symmetry.apply(element, ones, kind="std")
    return sum(float(moved[name].log().sum()) for name in posterior.layout.names)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scales", [False, True])
def test_the_density_of_moved_networks_changes_by_the_volume_alone(name: str, scales: bool) -> None:
    model, _, symmetry, population = made(name)
    freedoms = ob.symmetry.FREEDOMS if scales else ("permutation", "sign", "norm-sign")
    for options in ({}, {"family": "low-rank", "rank": 2}):
        posterior = fit(population, model=model, **options)
        if not options:  # six equal starts of norm weights have no spread: give them some
            scale = posterior.components[0].covariance.std() + 0.1
            shape = Diagonal(scale)
        else:
            low = posterior.components[0].covariance
            assert isinstance(low, LowRank)
            shape = LowRank(low.scale + 0.1, low.factor)
        posterior = Posterior(
            (Gaussian(posterior.components[0].centre, shape),), posterior.weights, posterior.layout, posterior.buffers
        )
        element = symmetry.random(3, freedoms=freedoms)
        moved = carried(posterior, element, symmetry)
        volume = log_volume(symmetry, element, posterior)
        assert (abs(volume) > 0.1) == (scales and symmetry.dimensions > 0)
        for state in posterior.draw(5, seeded(1), statistics=False):
            there = moved.log_density(symmetry.apply(element, state))
            assert there == pytest.approx(posterior.log_density(state) - volume, abs=1e-7)
        back = carried(moved, symmetry.invert(element), symmetry)
        for left, right in ((back.mean, posterior.mean), (back.std, posterior.std)):
            for key in left:
                torch.testing.assert_close(left[key], right[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_draws_with_the_same_seed_compute_the_same_functions(name: str) -> None:
    # Without an independent part all randomness is in the coordinates along the directions, which do not move.
    model, inputs, symmetry, population = made(name)
    posterior = fit(population, "low-rank", rank=3, diagonal=False, model=model)
    moved = carried(posterior, symmetry.random(5), symmetry)
    before, after = (predictions(model, each.draw(6, seeded(2)), inputs) for each in (posterior, moved))
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
    assert float(before.std(0).max()) > 1e-3  # and they are not all the same


def test_predictive_of_a_diagonal_posterior_is_kept() -> None:
    model, inputs, symmetry, population = made("tanh")
    posterior = fit(population, model=model)
    moved = carried(posterior, symmetry.random(5), symmetry)
    count = 4000
    outputs = [
        predictions(model, each.draw(count, seeded(s)), inputs, chunk=500) for s, each in ((1, posterior), (2, moved))
    ]
    gap = (outputs[0].mean(0) - outputs[1].mean(0)) / ((outputs[0].var(0) + outputs[1].var(0)) / count).sqrt()
    assert float(gap.abs().max()) < 4.5  # of 8 numbers; 7e-6 each


def test_running_statistics_follow_their_units() -> None:
    model, _, symmetry, population = made("normed")
    posterior = fit(population, model=model)
    element = symmetry.random(1)
    moved = carried(posterior, element, symmetry)
    expected = symmetry.apply(element, posterior.mean)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(moved.buffers[0][name], expected[name])
        assert not torch.equal(moved.buffers[0][name], posterior.buffers[0][name])
    assert torch.equal(moved.buffers[0]["norm.num_batches_tracked"], posterior.buffers[0]["norm.num_batches_tracked"])


def test_components_move_together_or_each_by_its_own_element() -> None:
    model, _, symmetry, population = made("tanh")
    posterior = fit(population, "mixture", components=[0, 0, 1, 1, 2, 2], model=model)
    batch = symmetry.random(4, members=3)
    each, together = carried(posterior, batch, symmetry), carried(posterior, batch.member(1), symmetry)
    assert torch.equal(each.components[1].centre, together.components[1].centre)
    assert not torch.equal(each.components[0].centre, together.components[0].centre)
    assert torch.equal(each.weights, posterior.weights)
    with pytest.raises(SymmetryError, match="3 components"):
        carried(posterior, symmetry.random(0, members=2), symmetry)


def test_narrow_networks_keep_a_wide_spread() -> None:
    _, _, symmetry, population = made("relu")
    narrow = fit(population.to(dtype=torch.float16), "low-rank", rank=1)
    moved = carried(narrow, symmetry.random(0), symmetry)
    assert moved.components[0].centre.dtype == moved.components[0].covariance.std().dtype == torch.float32
    assert moved.draw(1, seeded(0)).spec["0.weight"].dtype == torch.float16


def test_spreads_that_do_not_keep_their_kind_are_refused() -> None:
    _, _, symmetry, population = made("tanh")
    layout = FlatLayout(population.names, population.spec, {})
    full = Gaussian(torch.zeros(layout.size), Full(torch.eye(layout.size)))
    with pytest.raises(InputError, match="full"):
        carried(Posterior((full,), torch.ones(1), layout, ({},)), symmetry.identity(), symmetry)


def test_nothing_moves_by_the_identity_and_the_original_stays() -> None:
    model, _, symmetry, population = made("relu")
    posterior = fit(population, "low-rank", rank=2, model=model)
    before = {key: value.clone() for key, value in posterior.components[0].covariance.tensors().items()}
    same = carried(posterior, symmetry.identity(), symmetry)
    for key, value in before.items():
        assert torch.equal(same.components[0].covariance.tensors()[key], value)
    carried(posterior, symmetry.random(0), symmetry)
    for key, value in before.items():
        assert torch.equal(posterior.components[0].covariance.tensors()[key], value)
