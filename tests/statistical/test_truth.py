"""Every method against posteriors that are known: the prior, a conjugate one, and two weights integrated on a grid."""

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional.population_pass import predictions
from onebasin.inference.methods import METHODS
from onebasin.population.population import Population
from tests.judging import Conjugate, assert_mean, assert_standard, drawn, numbers, sample, weights_of

P = 1e-4  # a Kolmogorov-Smirnov test fails by accident once in so many


# --- no data: the prior ---

SCALES = {"0.weight": 0.5, "*.bias": 2.0}
PRIOR_STD = torch.tensor([0.5] * 6 + [2.0] * 3 + [1.0] * 3 + [2.0], dtype=torch.float64)
BLOCKS = (6, 3, 3, 1)
CHAINS: dict[str, Any] = {"chains": 250, "draws": 1, "epochs": 0}
HEAT: dict[str, Any] = {"method": "sghmc", "step": 0.64, "warmup": 150, **CHAINS}
GAUSSIAN: dict[str, Any] = {"draws": 300, "start": "model"}
# How each method is asked for the prior. Weights of narrow prior limit the steps, those of wide prior the mixing.
GIVE_THE_PRIOR: dict[str, dict[str, Any]] = {
    "hmc": {"method": "hmc", "leapfrog": 8, "warmup": 40, "thin": 5, **CHAINS},
    "hmc, diagonal mass": {"method": "hmc", "leapfrog": 6, "warmup": 80, "thin": 5, "mass": "diagonal", **CHAINS},
    "hmc, given step": {"method": "hmc", "leapfrog": 8, "warmup": 0, "thin": 30, "step": 0.6, **CHAINS},
    # Unadjusted: its bias falls with the variance of the energy error, here far below what 250 chains can see.
    "mclmc": {"method": "mclmc", "warmup": 3000, "thin": 1, "variance": 1e-4, "loose": 1e-3, **CHAINS},
    "sghmc, little friction": {"friction": 0.1, **HEAT},
    "sghmc": {"friction": 0.3, **HEAT},
    "sgld": {"friction": 1.0, **HEAT},
    "cyclical sghmc": {"friction": 0.3, "cycles": 1, "cycle": 300, "exploration": 0.3, **HEAT},
    "vi": {"method": "vi", "epochs": 400, "lr": 0.04, **GAUSSIAN},
    "laplace": {"method": "laplace", "epochs": 0, **GAUSSIAN},
    "laplace, full": {"method": "laplace", "epochs": 0, "structure": "full", **GAUSSIAN},
}
# What the others do instead.
POINT_OR_REFUSAL = {
    "ensemble": "ends at the mode of the prior",
    "swag": "walks without noise, and ends at the mode too",
    "swa": "averages networks that all end there",
    "ema": "averages networks, the latest of which are there",
    **dict.fromkeys(("dropout", "batchensemble", "lpbnn", "masksembles", "mimo"), "needs data to train on"),
    "mcbatchnorm": "needs data to take batches of",
}


def perceptron() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for value in model.parameters():
        nn.init.zeros_(value)
    return model


def test_every_method_has_told_what_it_does_without_data() -> None:
    assert {options["method"] for options in GIVE_THE_PRIOR.values()} | set(POINT_OR_REFUSAL) == set(METHODS)


@pytest.mark.parametrize("name", list(GIVE_THE_PRIOR))
def test_no_data_give_the_prior(name: str) -> None:
    options = dict(GIVE_THE_PRIOR[name])
    draws = drawn(perceptron(), None, options.pop("method"), prior=SCALES, **options) / PRIOR_STD
    assert_standard(draws)
    for block in draws.split(BLOCKS, dim=1):
        assert stats.kstest(block.flatten().numpy(), "norm").pvalue > P


@pytest.mark.parametrize("name", list(POINT_OR_REFUSAL))
def test_no_data_leave_the_others_at_the_mode(name: str) -> None:
    walk = {"optimizer": "sgd", "lr": 0.2, "momentum": 0.5, "epochs": 300}
    walk |= {"ema_decay": 0.9} if name == "ema" else {}
    if "needs data" in POINT_OR_REFUSAL[name]:
        with pytest.raises(InputError, match="needs data"):
            sample(perceptron(), None, name)
    else:
        draws = drawn(perceptron(), None, name, prior=SCALES, chains=2, **walk)
        assert float(draws.abs().max()) < 1e-6


# --- conjugate: linear regression ---

REGRESSION = Conjugate.of(12)
EXACT: dict[str, dict[str, Any]] = {
    "hmc": {"method": "hmc", "leapfrog": 6, "warmup": 40, "thin": 5, **CHAINS},
    "hmc, diagonal mass": {"method": "hmc", "leapfrog": 6, "warmup": 80, "thin": 5, "mass": "diagonal", **CHAINS},
    "hmc, trained": {"method": "hmc", "leapfrog": 6, "warmup": 40, "thin": 5, **CHAINS, "epochs": 30, "lr": 0.1},
    "sghmc": {"method": "sghmc", "step": 0.2, "friction": 0.3, "batch": None, "warmup": 150, **CHAINS},
    "sgld": {"method": "sghmc", "step": 0.4, "friction": 1.0, "batch": None, "warmup": 150, **CHAINS},
    "laplace": {
        "method": "laplace", "structure": "full", "draws": 300,
        "optimizer": "sgd", "lr": 0.2, "momentum": 0.5, "epochs": 200, "batch": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(EXACT))
def test_conjugate_posterior_and_predictive(name: str) -> None:
    options = dict(EXACT[name])
    method, modes = options.pop("method"), options.get("modes", 1)
    options |= {"chains_per_batch": modes, "compile": False, **REGRESSION.density}
    population = sample(REGRESSION.model, REGRESSION.data, method, **options)
    assert_standard(REGRESSION.whitened(weights_of(population)))
    places = 2 * numbers(5, 3, seed=8)
    design = torch.cat([places, torch.ones(5, 1).double()], 1)
    spread = (design @ torch.linalg.solve(REGRESSION.precision, design.T)).diagonal().sqrt()
    found = predictions(REGRESSION.model, population, places)[..., 0]
    for column in ((found - design @ REGRESSION.mean) / spread).T:
        assert_standard(column[:, None])
    # log density = its maximum - chi^2_4 / 2
    top = -float(REGRESSION.target(REGRESSION.mean[None], {}).potential)
    assert stats.kstest(2 * (top - population.log_density.numpy()), stats.chi2(4).cdf).pvalue > P


@pytest.mark.parametrize("temperature", [0.1, 4.0])
@pytest.mark.parametrize("method", ["hmc", "sghmc", "laplace"])
def test_temperature_scales_the_covariance(method: str, temperature: float) -> None:
    options = {key: value for key, value in EXACT[method].items() if key != "method"}
    draws = drawn(REGRESSION.model, REGRESSION.data, method, temperature=temperature, **REGRESSION.density, **options)
    assert_standard(REGRESSION.whitened(draws, temperature))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_thermometers_of_a_run(temperature: float) -> None:
    options = {"step": 0.2, "friction": 0.3, "batch": None, "warmup": 100, "draws": 50, "epochs": 0}
    found = sample(
        REGRESSION.model, REGRESSION.data, "sghmc", chains=100, chains_per_batch=100, compile=False,
        temperature=temperature, **REGRESSION.density, **options,
    ).provenance["diagnostics"]  # fmt: skip
    for name in ("kinetic_temperature", "configurational_temperature"):
        assert_mean(torch.tensor(found[name], dtype=torch.float64), temperature)
    assert found["divergences"] == [0] * 100


def test_energies_of_a_run() -> None:
    options = {"leapfrog": 4, "warmup": 80, "draws": 60, "epochs": 0}
    found = sample(
        REGRESSION.model,
        REGRESSION.data,
        "hmc",
        chains=60,
        chains_per_batch=60,
        compile=False,
        **REGRESSION.density,
        **options,
    ).provenance["diagnostics"]
    assert_mean(torch.tensor(found["exp_energy_change"], dtype=torch.float64), 1.0)
    assert_mean(torch.tensor(found["accepted"], dtype=torch.float64) - torch.tensor(found["acceptance"]), 0.0)
    assert found["stuck"] == [] and found["divergences"] == [0] * 60


# --- two weights: y = w2 f(w1 x), integrated on a grid ---

X = torch.linspace(-1.5, 1.5, 8, dtype=torch.float64)[:, None]
NOISE = 0.6
GRID = torch.linspace(-6, 6, 801, dtype=torch.float64)


def two(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False), kind(), nn.Linear(1, 1, bias=False)).double()


def goals(kind: type[nn.Module]) -> Tensor:
    return 1.2 * kind()(0.9 * X) + 0.3 * numbers(8, 1, seed=4)


def on_grid(kind: type[nn.Module]) -> Tensor:
    """Posterior probability of each cell, (w1, w2)."""
    first, second = torch.meshgrid(GRID, GRID, indexing="ij")
    log = -0.5 * (first.square() + second.square())
    for x, y in zip(X.flatten(), goals(kind).flatten(), strict=True):
        log = log - 0.5 * ((y - second * kind()(first * x)) / NOISE).square()
    return torch.softmax(log.flatten(), 0).view_as(log)


WALKS = {
    "hmc": {"leapfrog": 6, "warmup": 50, "thin": 10, "draws": 1, "epochs": 0},
    # A step h leaves a relative error of about (h * frequency)^2 / 12, here 0.003, far below what 400 chains can see.
    "sghmc": {"step": 0.08, "friction": 0.2, "batch": None, "warmup": 200, "draws": 1, "epochs": 0},
}


@pytest.mark.parametrize("kind", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("method", list(WALKS))
def test_two_weights_against_quadrature(method: str, kind: type[nn.Module]) -> None:
    weight = on_grid(kind)
    draws = drawn(two(kind), (X, goals(kind)), method, noise=NOISE, chains=400, seed=1, **WALKS[method])
    first, second = draws.T.contiguous()
    a, b = torch.meshgrid(GRID, GRID, indexing="ij")
    statistics = [lambda u, v: u.abs(), lambda u, v: v.abs(), lambda u, v: u * v, lambda u, v: (u * v).square()]
    for statistic in statistics:
        assert_mean(statistic(first, second), float((weight * statistic(a, b)).sum()))
    for values, marginal in ((first, weight.sum(1)), (second, weight.sum(0))):
        # A cell's probability is spread around its centre: the distribution function is half of it higher there.
        below = marginal.cumsum(0) - 0.5 * marginal
        at = torch.searchsorted(GRID, values).clamp(1, len(GRID) - 1)
        share = (values - GRID[at - 1]) / (GRID[at] - GRID[at - 1])
        assert stats.kstest(torch.lerp(below[at - 1], below[at], share).numpy(), "uniform").pvalue > P
    for sign in (1, -1):
        inside = (sign * first > 0) & (sign * second > 0)
        assert_mean(inside.double(), float((weight * ((sign * a > 0) & (sign * b > 0))).sum()))
    if kind is nn.Tanh:
        assert float((weight.flip(0, 1) - weight).abs().max()) < 1e-12, "both sign modes are equally probable"


def test_hidden_units_are_exchangeable_whatever_the_start() -> None:
    """Unit 0 starts as the one that does everything; in the end nobody can tell the units apart."""
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    first = {"0.weight": torch.tensor([[2.0], [0.1]]), "0.bias": torch.zeros(2)}
    state = {**first, "2.weight": torch.tensor([[1.0, 0.1]]), "2.bias": torch.zeros(1)}
    start = Population.from_states([{name: value.double() for name, value in state.items()}])
    population = sample(
        model, (X, goals(nn.Tanh)), "hmc", noise=NOISE, start=start, chains=400, chains_per_batch=400, compile=False,
        leapfrog=8, warmup=50, thin=20, draws=1, epochs=0,
    )  # fmt: skip
    for name, axis in (("0.weight", 1), ("0.bias", 1), ("2.weight", 2)):
        values = population.tensor(name).abs()  # |w|: signs are a symmetry too, and keep units apart for longer
        a, b = values.select(axis, 0).flatten()[:200], values.select(axis, 1).flatten()[200:]
        assert stats.ks_2samp(a.numpy(), b.numpy()).pvalue > P
    slopes = population.tensor("0.weight")[:, 0, 0]
    assert bool((slopes < 0).any()) and bool((slopes > 0).any())
