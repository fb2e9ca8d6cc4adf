"""The law of scales against quadrature, a second derivation from the action, and the prior it comes from."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.balance import balance
from onebasin.alignment.scale_posterior import ScalePosterior, scale_posterior
from onebasin.errors import InputError
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}
State = dict[str, Tensor]
LIMIT = 4.5  # standard errors


@functools.cache
def found(name: str) -> tuple[State, ob.Symmetry]:
    model = CASES[name].build()
    symmetry = ob.discover(model, CASES[name].inputs())
    return model.double().state_dict(), symmetry


@functools.cache
def chain(widths: tuple[int, ...]) -> tuple[State, ob.Symmetry]:
    """A relu perceptron of these widths, with normal weights."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    symmetry = ob.discover(model, torch.zeros(2, widths[0]))
    generator = torch.Generator().manual_seed(5)
    return {k: torch.randn(t.shape, generator=generator).double() for k, t in model.state_dict().items()}, symmetry


def moved_log_prior(state: State, symmetry: ob.Symmetry, law: ScalePosterior, s: Tensor, variance: float) -> float:
    """Log prior of the moved network and the log volume that the move stretches, both from the action alone."""
    element = law.element(s)
    moved = symmetry.apply(element, state)
    ones = symmetry.apply(element, {name: torch.ones_like(tensor) for name, tensor in state.items()})
    names = [name for name in state if "running" not in name and state[name].is_floating_point()]
    prior = -sum(float(moved[name].square().sum()) for name in names) / (2 * variance)
    return prior + sum(float(ones[name].log().sum()) for name in names)


@pytest.mark.parametrize("name", ["mlp_relu", "mlp_square", "residual_mlp", "grouped", "rnn_relu", "attention_fused"])
def test_density_gradient_and_mode(name: str) -> None:
    state, symmetry = found(name)
    law = scale_posterior(state, symmetry, variance=0.3)
    generator = torch.Generator().manual_seed(1)
    points = 0.5 * torch.randn(4, len(law.counts), generator=generator).double()
    densities = law.log_density(points)
    expected = [moved_log_prior(state, symmetry, law, s, 0.3) for s in points]
    np.testing.assert_allclose(densities - densities[0], np.array(expected) - expected[0], rtol=1e-10, atol=1e-8)
    direction, step = torch.randn(len(law.counts), generator=generator).double(), 1e-5
    slope = (law.log_density(points[1] + step * direction) - law.log_density(points[1] - step * direction)) / (2 * step)
    assert float(slope) == pytest.approx(float(law.gradient(points[1]) @ direction), rel=1e-6)
    result = optimize.minimize(
        lambda s: -float(law.log_density(torch.from_numpy(s))),
        np.zeros(len(law.counts)),
        jac=lambda s: -law.gradient(torch.from_numpy(s)).numpy(),
        method="BFGS",
        options={"gtol": 1e-7},
    )
    np.testing.assert_allclose(law.mode(), result.x, atol=1e-5)
    assert float(law.gradient(law.mode()).abs().max()) < 1e-9 * float(law.counts.abs().max())
    shift = symmetry.random(2, freedoms=("scale",))
    elsewhere = scale_posterior(symmetry.apply(shift, state), symmetry, variance=0.3)  # the same law, seen from there
    torch.testing.assert_close(
        symmetry.apply(elsewhere.element(elsewhere.mode()), symmetry.apply(shift, state)),
        symmetry.apply(law.element(law.mode()), state),
        rtol=1e-9,
        atol=1e-9,
    )


def one_unit(variance: float) -> tuple[ScalePosterior, float, float]:
    state, symmetry = chain((3, 1, 2))
    into = float(state["0.weight"].square().sum() + state["0.bias"].square().sum())
    return scale_posterior(state, symmetry, variance=variance), into, float(state["2.weight"].square().sum())


@pytest.mark.parametrize("variance", [0.2, 2.0])
def test_one_unit_against_quadrature(variance: float) -> None:
    """4 incoming and 2 outgoing weights: density exp(2 s - (in e^{2s} + out e^{-2s}) / 2v)."""
    law, into, out = one_unit(variance)

    def density(s: float) -> float:
        return math.exp(2 * s - (into * math.exp(2 * s) + out * math.exp(-2 * s)) / (2 * variance))

    total = integrate.quad(density, -8, 8, points=[0.0])[0]
    mean = integrate.quad(lambda s: s * density(s) / total, -8, 8, points=[0.0])[0]
    second = integrate.quad(lambda s: (s - mean) ** 2 * density(s) / total, -8, 8, points=[0.0])[0]
    fourth = integrate.quad(lambda s: (s - mean) ** 4 * density(s) / total, -8, 8, points=[0.0])[0]
    root = (2 * variance + math.sqrt(4 * variance**2 + 4 * into * out)) / (2 * into)  # in x - out / x = 2 v, x = e^{2s}
    assert law.counts.tolist() == [2.0]
    assert float(law.mode()) == pytest.approx(math.log(root) / 2, rel=1e-10)
    count = 4000
    draws = law.sample(count, torch.Generator().manual_seed(0))[:, 0].numpy()
    assert abs(draws.mean() - mean) < LIMIT * math.sqrt(second / count)
    assert abs(draws.var() - second) < LIMIT * math.sqrt((fourth - second**2) / count)
    grid = np.linspace(-8, 8, 4001)
    heights = np.array([density(s) for s in grid])
    cumulative = integrate.cumulative_trapezoid(heights, grid, initial=0) / integrate.trapezoid(heights, grid)
    assert stats.kstest(draws, lambda s: np.interp(s, grid, cumulative)).pvalue > 1e-4


def test_two_coupled_units_against_quadrature() -> None:
    """One unit feeds another: means and covariance over a plane."""
    state, symmetry = chain((2, 1, 1, 3))
    law = scale_posterior(state, symmetry, variance=0.5)
    axis = torch.linspace(-6, 6, 601, dtype=torch.float64)
    plane = torch.cartesian_prod(axis, axis)
    weight = (law.log_density(plane) - law.log_density(law.mode())).exp()
    weight = weight / weight.sum()
    mean = weight @ plane
    covariance = (plane - mean).T @ (weight[:, None] * (plane - mean))
    count = 4000
    draws = law.sample(count, torch.Generator().manual_seed(3))
    assert bool(((draws.mean(0) - mean).abs() < LIMIT * (covariance.diagonal() / count).sqrt()).all())
    product = (draws[:, 0] - mean[0]) * (draws[:, 1] - mean[1])
    error = float(product.std()) / math.sqrt(count)
    assert abs(float(product.mean() - covariance[0, 1])) < LIMIT * error
    assert abs(float(covariance[0, 1])) > 10 * error  # or the test would say little


def test_the_law_is_that_of_the_prior_on_orbits() -> None:
    """Networks drawn from the prior: where they sit on their orbits is distributed as the law says.

    Every network is brought to its lightest point; the probability, under the law seen from there, of lying below
    where it really was must be uniform. This checks the volume term, which no derivative of the mass would.
    """
    _, symmetry = chain((3, 1, 2))
    generator = torch.Generator().manual_seed(11)
    shapes, count = symmetry.shapes, 400
    population = ob.Population.from_stacked(
        {name: torch.randn(count, *shape, generator=generator).double() for name, shape in shapes.items()}
    )
    light = balance(population, symmetry)
    grid = torch.linspace(-7, 7, 1401, dtype=torch.float64)
    chances = []
    for member in range(count):
        law = scale_posterior(light.population.member(member), symmetry)
        log = law.log_density(grid[:, None])
        weight = (log - log.max()).exp()
        real = -math.log(float(light.element.factors["0"][0, member]))
        below = torch.cumulative_trapezoid(weight, grid) / torch.trapezoid(weight, grid)
        chances.append(float(np.interp(real, grid[1:], below)))
    assert stats.kstest(chances, "uniform").pvalue > 1e-3


def test_flat_biases_are_the_limit_of_light_ones() -> None:
    """A prior that a bias does not feel: shrink the bias instead of widening its prior, which is the same."""
    state, symmetry = found("residual_mlp")
    flat = scale_posterior(state, symmetry, biases=False)
    light = {name: tensor * (1e-7 if name.endswith("bias") else 1) for name, tensor in state.items()}
    limit = scale_posterior(light, symmetry)
    points = torch.randn(3, len(flat.counts), generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(flat.gradient(points), limit.gradient(points), rtol=1e-9, atol=1e-9)


def test_samples_of_a_network_are_functionally_the_same_and_heavier_than_necessary() -> None:
    state, symmetry = found("residual_mlp")
    law = scale_posterior(state, symmetry)
    draws = law.sample(5, torch.Generator().manual_seed(0))
    assert torch.equal(draws, law.sample(5, torch.Generator().manual_seed(0)))
    least = float(balance(state, symmetry).mass_after)
    model = CASES["residual_mlp"].build().double()
    inputs = (CASES["residual_mlp"].inputs().double(),)
    before = torch.func.functional_call(model, state, inputs)
    batch = law.element(draws)
    for member in range(5):
        moved = symmetry.apply(batch.member(member), state)
        torch.testing.assert_close(torch.func.functional_call(model, moved, inputs), before, rtol=1e-9, atol=1e-9)
        assert sum(float(tensor.square().sum()) for tensor in moved.values()) > least


def test_what_is_refused() -> None:
    state, symmetry = found("mlp_relu")
    with pytest.raises(InputError, match="positive prior variance"):
        scale_posterior(state, symmetry, variance=0.0)
    dead = {**state, "4.weight": torch.zeros_like(state["4.weight"])}
    with pytest.raises(InputError, match="coordinate 0 of space 2 is dead"):
        scale_posterior(dead, symmetry)
    with pytest.raises(InputError, match="no free scales"):
        scale_posterior(*found("mlp_tanh"))
    law = scale_posterior(state, symmetry)
    with pytest.raises(InputError, match=r"expected log scales \(\.\.\., 12\)"):
        law.log_density(torch.zeros(3))
    with pytest.raises(InputError, match="at least one draw"):
        law.sample(0, torch.Generator())
