"""SGHMC, SGLD and cycles, against the exact moments of a linear chain; mini-batches included."""

import itertools
import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.inference.kernel import StepIndex
from onebasin.inference.methods.sghmc import SGHMC, SGHMCKernel, _spaced
from onebasin.inference.target import Minibatches, target_of
from tests.judging import Conjugate, assert_mean, assert_standard, drawn, numbers, run

SMALL = Conjugate.of(6, noise=1.0, scale=1.0)
EYE = torch.eye(4, dtype=torch.float64)


def ordered_batches(examples: int, size: int) -> list[tuple[tuple[int, ...], ...]]:
    """All ways to go through the examples in batches; which comes first within a batch does not matter."""
    orders = itertools.permutations(range(examples))
    return sorted({tuple(tuple(sorted(o[k : k + size])) for k in range(0, examples, size)) for o in orders})


def step_map(problem: Conjugate, rows: tuple[int, ...], size: float, decay: float) -> Tensor:
    """The linear map of (x, p, 1) in one step without noise, with the gradient of these rows.

    grad U = A x - b,   A = N/n sum z z^T / noise^2 + 1 / scale^2,   b = N/n sum z y / noise^2
    p <- p - h grad U;   x <- x + h/2 (1 + decay) p;   p <- decay p
    """
    z, y, factor = problem.design[list(rows)], problem.y[list(rows)], len(problem.y) / len(rows) / problem.noise**2
    slope, pull = factor * z.T @ z + EYE / problem.scale**2, factor * z.T @ y
    kick = torch.eye(9, dtype=torch.float64)
    kick[4:8, :4], kick[4:8, 8] = -size * slope, size * pull
    drift = torch.eye(9, dtype=torch.float64)
    drift[:4, 4:8], drift[4:8, 4:8] = 0.5 * size * (1 + decay) * EYE, decay * EYE
    return drift @ kick


def exact_moments(problem: Conjugate, batch: int, rate: float, friction: float, epochs: int) -> tuple[Tensor, Tensor]:
    """E[x] and E[x x^T] after some epochs from x = 0, p ~ N(0, 1), averaged over all orders of the batches.

    The chain is linear given the batches, and epochs are independent of each other: with S = E[s s^T], s = (x, p, 1),
    a step is S -> M S M^T + Q, and an epoch the mean of such sequences over all ordered partitions of the data.
    """
    size, decay = math.sqrt(rate / len(problem.y)), 1 - friction
    orders = ordered_batches(len(problem.y), batch)
    maps = [torch.stack([step_map(problem, order[k], size, decay) for order in orders]) for k in range(len(orders[0]))]
    shake = torch.cat([0.5 * size * EYE, EYE, torch.zeros(1, 4).double()]) * math.sqrt(1 - decay**2)
    noise = shake @ shake.T
    moments = torch.diag(torch.cat([torch.zeros(4), torch.ones(5)])).double()
    for _ in range(epochs):
        each = moments.expand(len(orders), 9, 9)
        for step in maps:
            each = step @ each @ step.mT + noise
        moments = each.mean(0)
    return moments[:4, 8], moments[:4, :4]


def at_zero(model: nn.Module) -> nn.Module:
    for value in model.parameters():
        nn.init.zeros_(value)
    return model


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize(("friction", "rate"), [(0.1, 0.05), (0.1, 0.1), (0.5, 0.1), (0.5, 0.3), (1.0, 0.3)])
def test_mini_batches_move_the_moments_as_theory_says(batch: int, friction: float, rate: float) -> None:
    epochs = 30
    mean, second = exact_moments(SMALL, batch, rate, friction, epochs)
    options = {"step": rate, "friction": friction, "batch": batch, "warmup": epochs - 1, "draws": 1, "epochs": 0}
    draws = drawn(at_zero(SMALL.model), SMALL.data, "sghmc", start="model", chains=400, **SMALL.density, **options)
    assert_mean(draws, mean)
    assert_mean(draws[:, :, None] * draws[:, None, :], second)


def test_what_mini_batches_are_compared_with_is_not_the_posterior_itself() -> None:
    """The mean is off in proportion to the rate, the variance is too large; with whole gradients both are exact."""
    offs, inflations = [], []
    for rate in (0.025, 0.05, 0.1):
        mean, second = exact_moments(SMALL, 2, rate, 0.1, 150)
        offs.append(float((mean - SMALL.mean).norm()))
        inflations.append(float(((second - mean.outer(mean)) @ SMALL.precision).trace() / 4 - 1))
    assert offs[1] / offs[0] == pytest.approx(2, rel=0.1) and offs[2] / offs[1] == pytest.approx(2, rel=0.1)
    assert 0 < inflations[0] < 0.01 < inflations[1] < 0.1 < inflations[2] < 0.5
    mean, second = exact_moments(SMALL, 6, 0.3, 0.5, 150)
    torch.testing.assert_close(mean, SMALL.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(second - mean.outer(mean), torch.linalg.inv(SMALL.precision), rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(("friction", "stride"), [(0.05, 0.5), (0.3, 1.0), (1.0, 1.5)])
def test_whole_gradients_give_the_exact_posterior_at_coarse_steps(
    friction: float, stride: float, temperature: float
) -> None:
    """h times the largest frequency is `stride`; 2 is the limit of stability. Both thermometers show T."""
    regression = Conjugate.of(12)
    size = stride / float(torch.linalg.eigvalsh(regression.precision)[-1].sqrt())
    kernel = SGHMCKernel(
        regression.target,
        Minibatches(12, None),
        SGHMC(step=size**2 * 12, friction=friction, temperature=temperature),
    )
    state, info = run(kernel, regression.mean + torch.zeros(5000, 4).double(), 150)
    assert_standard(regression.whitened(state.position, temperature))
    assert_mean(info["kinetic_temperature"][-1], temperature)
    assert_mean(info["configurational_temperature"][-1], temperature)
    assert_mean(info["potential"][-1], float(kernel.target(regression.mean[None], {}).potential) + 2 * temperature)
    torch.testing.assert_close(info["step_size"][-1], torch.full((5000,), size**2 * 12).double())


def test_without_heat_it_ends_at_the_mode() -> None:
    regression = Conjugate.of(12)
    options = {"step": 0.05, "friction": 0.1, "temperature": 0.0, "batch": None, "warmup": 600, "draws": 1}
    draws = drawn(regression.model, regression.data, "sghmc", chains=3, epochs=0, **regression.density, **options)
    torch.testing.assert_close(draws, regression.mean.expand(3, 4), rtol=0, atol=1e-8)


def test_without_heat_it_is_gradient_descent_with_momentum() -> None:
    """With h^2 = rate / N and q = h p: q <- b q - b rate grad U / N, x <- x + (1 + b) / 2b q."""
    regression, rate, friction = Conjugate.of(12), 0.02, 0.2
    kernel = SGHMCKernel(regression.target, Minibatches(12, None), SGHMC(step=rate, friction=friction, temperature=0.0))
    state, _ = run(kernel, numbers(2, 4), 5)
    position, speed = numbers(2, 4), torch.zeros(2, 4).double()
    for _ in range(5):
        kicked = speed - rate * kernel.target(position, {}).gradient / 12
        speed = (1 - friction) * kicked
        position = position + 0.5 * (kicked + speed)
    torch.testing.assert_close(state.position, position)


def test_rate_and_heat_of_a_cycle() -> None:
    kernel = SGHMCKernel(
        SMALL.target,
        Minibatches(6, None),
        SGHMC(step=0.4, temperature=2.0, cycles=1, cycle=100, exploration=0.7),
    )
    rates, heats = zip(*[kernel.conditions(StepIndex(step, 0)) for step in range(200)], strict=True)
    assert rates[:100] == rates[100:] and heats[:100] == heats[100:]
    assert rates[0] == pytest.approx(0.4) and rates[50] == pytest.approx(0.2) and 0 < rates[99] < 1e-3
    assert list(rates[:100]) == sorted(rates[:100], reverse=True)
    assert heats[:70] == (0.0,) * 70 and heats[70:100] == (2.0,) * 30


def cycle_variances(cycle: int) -> tuple[dict[str, Any], list[float]]:
    """No data: each weight is a linear chain of known second moments S of (x, p), step by step through two cycles."""
    options = {"cycles": 2, "cycle": cycle, "exploration": 0.3, "step": 1.2, "friction": 0.5, "draws": 6}
    plan = SGHMC(**options).plan(target_of(nn.Linear(3, 1).double(), None, prior=1.0))
    moments, variances, step = torch.diag(torch.tensor([0.0, 1.0])).double(), [], 0
    for wait in plan.thin * 2:
        for _ in range(wait):
            rate, heat = plan.stages[-1].kernel.conditions(StepIndex(step, 0))
            size, step = math.sqrt(rate), step + 1
            kick = torch.tensor([[1, 0], [-size, 1]]).double()
            drift = torch.tensor([[1, 0.5 * size * 1.5], [0, 0.5]]).double()
            shake = torch.tensor([0.5 * size, 1]).double() * math.sqrt(0.75 * heat)
            moments = drift @ kick @ moments @ kick.T @ drift.T + shake.outer(shake)
        variances.append(float(moments[0, 0]))
    assert step == 2 * cycle and len(variances) == 6
    return options, variances


def test_cycles_have_the_variance_of_their_recursion() -> None:
    options, variances = cycle_variances(60)
    draws = drawn(at_zero(nn.Linear(3, 1).double()), None, "sghmc", start="model", chains=400, epochs=0, **options)
    for place, variance in enumerate(variances):
        assert_standard(draws.unflatten(0, (400, 6))[:, place] / variance**0.5)
    # The rate falls to zero at the end of a cycle of C steps: with k steps left h ~ k / C, relaxation takes 1 / h^2
    # steps, so the chain no longer follows once k h^2 ~ k^3 / C^2 ~ 1. There h changes by 1 / k ~ C^(-2/3) in a step,
    # and so far the variance is off.
    short, long = (max(abs(variance - 1) for variance in cycle_variances(cycle)[1]) for cycle in (60, 600))
    assert short < 0.1 and long / short == pytest.approx(10 ** (-2 / 3), rel=0.25)


def test_places_of_draws_in_a_cycle() -> None:
    for draws, cycles, cycle, exploration in itertools.product((1, 5, 6), (1, 2, 4), (10, 37), (0.0, 0.4)):
        spaced = _spaced(draws, cycles, cycle, exploration)
        assert sum(spaced) == cycle and len(spaced) == -(-draws // cycles)
        assert spaced[0] > int(exploration * cycle) and min(spaced) > 0
    with pytest.raises(InputError, match="room for 8 draws in the last 5 steps"):
        _spaced(8, 1, 10, 0.5)


def boxed(sampled: Any) -> Tensor:
    """A standard normal inside of |x| < 2; outside the function does not exist."""
    weight = sampled["weight"][0]
    return torch.where((weight.abs() < 2).all(), -0.5 * weight.square().sum(), torch.nan)


def test_walls_of_nan_keep_draws_inside_and_chains_moving() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.95)
    options = {"step": 0.3, "friction": 0.3, "warmup": 50, "draws": 60, "epochs": 0}
    draws = drawn(model, None, "sghmc", start="model", chains=50, log_density=boxed, **options).unflatten(0, (50, 60))
    assert bool((draws.abs() < 2).all())
    assert float((draws[:, 1:] - draws[:, :-1]).abs().amax(-1)[:, -20:].amax(1).min()) > 0.1, "a chain stands still"
    # A wall that sends chains back to where they were is no exact sampler; 0.77 is the variance of the true density.
    assert 0.65 < float(draws.var()) < 0.9

    kernel = SGHMCKernel(target_of(model, None, log_density=boxed), Minibatches(0, None), SGHMC(step=0.3, friction=0.3))
    state, info = run(kernel, 1.95 * torch.ones(500, 2).double(), 300)
    assert bool(info["divergent"].any()) and bool(torch.isfinite(info["step_size"]).all())
    assert float(info["step_size"][-1].min()) > 1e-4 and bool((info["step_size"][-1] == 0.3).any())
    assert bool((kernel.draw(state, None).position.abs() < 2).all())


def test_a_start_without_density_is_refused() -> None:
    kernel = SGHMCKernel(target_of(nn.Linear(2, 1, bias=False), None, log_density=boxed), Minibatches(0, None))
    with pytest.raises(InputError, match=r"found none at the start of chain 1: train"):
        run(kernel, torch.tensor([[0.0, 0.5], [0.0, 2.5]]), 1)


def test_what_is_drawn_has_the_density_of_the_whole_data() -> None:
    regression = Conjugate.of(12)
    kernel = SGHMCKernel(regression.target, Minibatches(12, 3), SGHMC(step=1e-3))
    state, _ = run(kernel, numbers(5, 4), 10)
    found = kernel.draw(state, None)
    torch.testing.assert_close(found.log_density, -kernel.target(state.position, {}).potential)
    exact = stats.multivariate_normal(regression.mean.numpy(), torch.linalg.inv(regression.precision).numpy())
    expected = torch.from_numpy(exact.logpdf(found.position.numpy()))
    torch.testing.assert_close(found.log_density - found.log_density[0], expected - expected[0])


@pytest.mark.parametrize("options", [{"friction": 0.0}, {"temperature": -1.0}, {"step": 0.0}, {"exploration": 1.0}])
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(InputError, match="expected 0 < friction <= 1"):
        SGHMC(**options).plan(SMALL.target)
