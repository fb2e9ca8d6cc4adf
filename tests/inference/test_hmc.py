"""Hamiltonian Monte Carlo: the integrator, the acceptance, what adapts, and what happens where there is no density."""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.inference.kernel import StepIndex
from onebasin.inference.methods.hmc import (
    HMC,
    HMCKernel,
    MassEstimate,
    Phase,
    Tuner,
    energy_change,
    kinetic,
    leapfrog,
    mass_update,
)
from onebasin.inference.target import Target, target_of
from tests.judging import Conjugate, Together, Z, assert_mean, assert_standard, numbers, run, seeded, started

REGRESSION = Conjugate.of(12)
INVERSE_MASS = torch.tensor([0.5, 2.0, 1.3], dtype=torch.float64)


def bent(sampled: Any) -> Tensor:
    """-U of a 3-d toy that is neither Gaussian nor separable."""
    a, b, c = sampled["weight"][0]
    return -(0.25 * a**4 + 0.5 * b**2 + torch.cosh(0.7 * c) + 0.3 * a * b * torch.sin(c))


def toy() -> Target:
    return target_of(nn.Linear(3, 1, bias=False).double(), None, log_density=bent)


def phase(target: Target, position: Tensor, momentum: Tensor) -> Phase:
    return Phase(position, momentum, target(position, {}))


def moved(target: Target, at: Phase, size: float, steps: int, inverse_mass: Tensor) -> Phase:
    return leapfrog(target, {}, at, torch.full((len(at.position),), size, dtype=torch.float64), steps, inverse_mass)


MASSES = pytest.mark.parametrize("inverse_mass", [torch.ones(1).double(), INVERSE_MASS], ids=["identity", "diagonal"])


@MASSES
def test_leapfrog_goes_back_the_way_it_came(inverse_mass: Tensor) -> None:
    target = toy()
    there = phase(target, numbers(10, 3), numbers(10, 3, seed=1))
    end = moved(target, there, 0.15, 40, inverse_mass)
    assert float((end.position - there.position).abs().min(0).values.max()) > 1e-3
    for back in (
        moved(target, end, -0.15, 40, inverse_mass),
        moved(target, end._replace(momentum=-end.momentum), 0.15, 40, inverse_mass),
    ):
        torch.testing.assert_close(back.position, there.position, rtol=0, atol=1e-12)
        torch.testing.assert_close(back.momentum.abs(), there.momentum.abs(), rtol=0, atol=1e-12)


@MASSES
def test_leapfrog_keeps_volume(inverse_mass: Tensor) -> None:
    target, width = toy(), 1e-5
    centre = torch.cat([numbers(3), numbers(3, seed=1)])
    points = torch.cat([centre + width * torch.eye(6).double(), centre - width * torch.eye(6).double()])
    end = moved(target, phase(target, points[:, :3], points[:, 3:]), 0.3, 7, inverse_mass)
    ends = torch.cat([end.position, end.momentum], 1)
    jacobian = (ends[:6] - ends[6:]) / (2 * width)
    assert float((jacobian - torch.eye(6)).abs().max()) > 0.5, "nothing happened"
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1, abs=1e-7)  # differences err by 1e-9 per entry


@MASSES
def test_energy_error_falls_with_the_square_of_the_step(inverse_mass: Tensor) -> None:
    target = toy()
    before = phase(target, numbers(200, 3), numbers(200, 3, seed=1))
    sizes = [2.0**-k for k in range(4, 9)]
    errors = []
    for size in sizes:
        after = moved(target, before, size, round(2 / size), inverse_mass)
        errors.append(float(energy_change(before, after, inverse_mass).square().mean().sqrt()))
    fit = stats.linregress([math.log(size) for size in sizes], [math.log(error) for error in errors])
    assert 1.9 < fit.slope < 2.1


def test_energy_is_that_of_the_momenta() -> None:
    momentum = numbers(1000, 3)
    expected = -stats.multivariate_normal(cov=(1 / INVERSE_MASS).diag().numpy()).logpdf(momentum.numpy())
    found = kinetic(momentum, INVERSE_MASS)
    torch.testing.assert_close(found - found[0], torch.from_numpy(expected - expected[0]))


def exact_draws(count: int, temperature: float) -> Tensor:
    noise = torch.linalg.solve_triangular(
        torch.linalg.cholesky(REGRESSION.precision).T, numbers(4, count, seed=2), upper=True
    )
    return REGRESSION.mean + temperature**0.5 * noise.T


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("mass", ["identity", "diagonal"])
def test_a_trajectory_leaves_the_posterior_as_it_is(mass: str, temperature: float) -> None:
    """Started in the posterior, chains stay in it, and E[exp(-dH / T)] = 1, for the whole and for each acceptance."""
    kernel = HMCKernel(REGRESSION.target, HMC(leapfrog=3, step=0.15, temperature=temperature))
    position = exact_draws(20_000, temperature)
    streams = Together(1, len(position))
    state = kernel.init(started(kernel.target, position), streams)
    if mass == "diagonal":
        state = state._replace(inverse_mass=torch.tensor([[0.3, 0.6, 1.2, 0.8]]).double().expand(len(position), 4))
    for step in range(3):
        state, info = kernel.step(state, StepIndex(step, 0), streams)
        assert float(info["acceptance"].mean()) < 0.95, "the step must be coarse enough to need the acceptance"
        assert_mean((-info["energy_change"]).exp(), 1.0)
        assert_mean(info["accepted"] - info["acceptance"], 0.0)
        assert_standard(REGRESSION.whitened(state.position, temperature))
    torch.testing.assert_close(state.evaluation.potential, kernel.target(state.position, {}).potential)
    torch.testing.assert_close(state.gradient, kernel.target(state.position, {}).gradient)


def test_a_quartic_well_is_left_as_it_is() -> None:
    """p(x) ~ exp(-x^4 / 4): x^4 / 4 ~ Gamma(1/4), E[x^4] = 1, E[x^2] = 2 Gamma(3/4) / Gamma(1/4)."""
    target = target_of(
        nn.Linear(4, 1, bias=False).double(), None, log_density=lambda own: -0.25 * own["weight"].pow(4).sum()
    )
    gamma = torch.from_numpy(stats.gamma(0.25).rvs((20_000, 4), random_state=3))
    state, info = run(HMCKernel(target, HMC(leapfrog=4, step=0.6)), (4 * gamma) ** 0.25, 5)  # all positive at first
    assert 0.3 < float(info["acceptance"].mean()) < 0.95
    assert_mean(state.position**4, 1.0)
    assert_mean(state.position**2, 2 * math.gamma(0.75) / math.gamma(0.25))
    assert_mean((-info["energy_change"][-1]).exp(), 1.0)


@pytest.mark.parametrize("wished", [0.6, 0.75, 0.9])
def test_acceptance_is_what_was_wished(wished: float) -> None:
    target = target_of(nn.Linear(200, 1, bias=False), None)
    chains, warmup = 60, 400
    kernel = HMCKernel(target, HMC(leapfrog=4, acceptance=wished))
    _, info = run(kernel, numbers(chains, 200).float(), warmup + 100, warmup)
    # By construction log_step = centre - sqrt(t) / 0.05 * (sum of wished - found) / (t + 10), so that the mean over the
    # warm-up is off by |centre - log_step| * 0.05 / sqrt(t); steps end within a factor of e^4 of the centre.
    assert abs(float(info["acceptance"][:warmup].mean()) - wished) < 4 * 0.05 / warmup**0.5
    # Steps scatter with variance v around their mean, and acceptance a(log step) = 2 Phi(-u), u ~ step^2, is concave:
    # at the mean it is higher than the mean acceptance, to leading order by -a'' v / 2 = 4 u phi(u) (1 - u^2) v.
    u = -stats.norm.ppf(wished / 2)
    excess = 4 * u * stats.norm.pdf(u) * (1 - u**2) * float(info["step_size"][warmup // 2 : warmup].log().var(0).mean())
    found = info["acceptance"][warmup:].mean(0)
    error = Z * float(found.std()) / chains**0.5
    assert wished - error < float(found.mean()) < wished + 2 * excess + error < 0.9 + 0.1 * wished
    assert bool((info["step_size"][warmup:] == info["step_size"][-1]).all()), "the step still adapts after warm-up"
    assert len(set(info["step_size"][-1].tolist())) == chains, "every chain has its own step"


def test_dual_averaging_finds_the_root_of_a_noisy_curve() -> None:
    """Acceptance a = exp(-step), seen as a coin: 3/4 are accepted at step log(4/3)."""
    root, coin = math.log(4 / 3), seeded(0)
    tuner, scatter = Tuner.at(torch.full((400,), 5.0)), 0.0
    for count in range(1, 3001):
        chance = torch.exp(-tuner.log_step.exp())
        tuner = tuner.update((torch.rand(400, generator=coin) < chance).double(), 0.75)
        scatter += count**-0.75 * (float(tuner.log_step.var()) - scatter)
    # Iterates of variance v hold their mean acceptance: mean of x = log step is off by -a'' v / (2 a'), where
    # a'' / a' = 1 - exp(x); the next order is v^2.
    error = tuner.log_mean - math.log(root) + 0.5 * (1 - root) * scatter
    assert abs(float(error.mean())) < Z * float(error.std()) / 20 + scatter**2
    assert float(error.std()) < 0.2


@pytest.mark.parametrize("rejections", [50, 1000])
def test_a_run_of_rejections_is_forgotten_as_quickly_as_it_came(rejections: int) -> None:
    tuner = Tuner.at(torch.ones(1))
    for _ in range(rejections):
        tuner = tuner.update(torch.zeros(1), 0.75)
    assert 0 < float(tuner.log_step.exp()) < 1e-8
    for _ in range(rejections):
        tuner = tuner.update(torch.ones(1), 0.75)
    assert float(tuner.log_step.exp()) > 0.1


def test_spread_is_the_variance() -> None:
    draws = 3 + 0.1 * numbers(50, 2, 4)
    spread = MassEstimate.empty(draws[0])
    for draw in draws:
        spread = spread.add(draw)
    torch.testing.assert_close(spread.mean, draws.mean(0))
    torch.testing.assert_close(spread.variance(), draws.var(0) * 50 / 55 + 1e-3 * 5 / 55)


def test_mass_is_learned_in_two_windows_and_then_kept() -> None:
    spread, inverse = MassEstimate.empty(torch.zeros(1, 2)), torch.ones(1, 1)
    changes = []
    for step in range(220):
        spread, new = mass_update(spread, numbers(1, 2, seed=step).float(), inverse, StepIndex(step, 200))
        changes += [step] if new is not inverse else []
        inverse = new
    assert changes == [89, 179]  # 45 % and 90 % of 200 trajectories
    assert not spread.seen.any()


def test_diagonal_mass_takes_on_scales_a_hundred_apart() -> None:
    target = target_of(nn.Linear(3, 1).double(), None, prior={"weight": 2.0, "bias": 0.02})
    start = target.prior.precision.rsqrt() * numbers(64, 4)
    state, info = run(HMCKernel(target, HMC(leapfrog=8, mass="diagonal")), start, 500, 400)
    ratio = (state.inverse_mass * target.prior.precision).log()
    # A variance from the 180 trajectories of the second window scatters by sqrt(2 / 180) = 0.1 if they are independent,
    # by 0.2 if a quarter of them count.
    assert float(ratio.square().mean().sqrt()) < 0.3
    # With the identity steps would be below 0.04, the limit of stability of the narrow weight.
    assert float(info["step_size"][-1].min()) > 0.3
    assert_standard(state.position * target.prior.precision.sqrt())


def boxed(sampled: Any) -> Tensor:
    """A standard normal inside of |x| < 2; outside the function does not exist."""
    weight = sampled["weight"][0]
    return torch.where((weight.abs() < 2).all(), -0.5 * weight.square().sum(), torch.nan)


def test_walls_of_nan_keep_the_chains_inside_of_the_right_density() -> None:
    target = target_of(nn.Linear(2, 1, bias=False).double(), None, log_density=boxed)
    state, info = run(HMCKernel(target, HMC(leapfrog=5)), 1.98 * torch.ones(2000, 2).double(), 360, 300)
    assert bool((state.position.abs() < 2).all())
    assert bool(info["divergent"].any()) and bool(torch.isfinite(state.evaluation.potential).all())
    for column in state.position.T:
        assert stats.kstest(column.numpy(), stats.truncnorm(-2, 2).cdf).pvalue > 1e-4
    late = info["accepted"][-40:]
    assert bool(late.any(0).all()), "a chain stands still"
    assert float(info["step_size"][-1].quantile(0.01)) > 0.1, "a step size has not recovered"


def test_a_start_without_density_is_refused() -> None:
    target = target_of(nn.Linear(2, 1, bias=False).double(), None, log_density=boxed)
    position = torch.tensor([[0.0, 0.5], [0.0, 2.5]]).double()
    with pytest.raises(InputError, match=r"finite log density at the start, found none at the start of chain 1: train"):
        run(HMCKernel(target), position, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": "dense"}, 'mass "identity" or "diagonal", found \'dense\''),
        ({"jitter": 1.0}, "0 <= jitter < 1"),
        ({"acceptance": 1.0}, "0 < acceptance < 1"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"leapfrog": 0}, "leapfrog to be a whole number from 1 on"),
        ({"draws": 2.5}, "a whole number for draws"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        HMC(**options).plan(REGRESSION.target)
