"""MCLMCKernel Langevin: reversible motion at constant speed and energy, and right draws when it is tuned finely."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional.call import global_seed
from onebasin.inference.kernel import Draws, StepIndex
from onebasin.inference.methods.mclmc import MCLMC, MCLMCKernel, MCLMCState, kick, unit
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target, target_of
from onebasin.metrics.chains import ess
from tests.judging import numbers, sample

STILL = StepIndex(1, 0)


def gaussian(scales: Tensor) -> Target:
    model = nn.Linear(len(scales), 1, bias=False).double()
    return target_of(model, None, log_density=lambda own: -0.5 * (own["weight"] / scales).square().sum())


class Silent(Streams):
    """Without the random turn, so that the motion is deterministic."""

    def gaussian(self, purpose: str, like: Tensor) -> Tensor:
        return torch.zeros_like(like)


def started(target: Target, step: float, chains: int = 3) -> tuple[MCLMCKernel, MCLMCState]:
    kernel = MCLMCKernel(target, MCLMC(length=1e9))
    position = numbers(chains, target.layout.size)
    state = kernel.init(Draws(position, {}, torch.zeros(chains)), Streams(0, range(chains), 0))
    return kernel, state._replace(step=torch.full((chains,), step, dtype=torch.float64))


def test_direction_stays_a_unit_vector_and_the_way_back_leads_back() -> None:
    kernel, start = started(gaussian(torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)), 0.2)
    state, streams = start, Silent(0, range(3), 0)
    for _ in range(20):
        state, _ = kernel.step(state, STILL, streams)
    assert float((state.direction.norm(dim=1) - 1).abs().max()) < 1e-12
    assert float((state.position - start.position).abs().max()) > 0.5
    state = state._replace(direction=-state.direction)
    for _ in range(20):
        state, _ = kernel.step(state, STILL, streams)
    torch.testing.assert_close(state.position, start.position, rtol=0, atol=1e-11)
    torch.testing.assert_close(state.direction, -start.direction, rtol=0, atol=1e-11)


def test_a_kick_follows_its_differential_equation() -> None:
    """du/dt = -(1 - u u^T) g / (D - 1), and the kinetic energy changes by minus the integral of u . g."""
    direction, gradient = unit(numbers(2, 5)), numbers(2, 5, seed=1) * 3
    steps, time = 20_000, 0.7
    u, energy = direction, torch.zeros(2, dtype=torch.float64)
    for _ in range(steps):  # midpoint rule
        slope = -(gradient - u * (u * gradient).sum(1, keepdim=True)) / 4
        middle = unit(u + 0.5 * time / steps * slope)
        energy = energy - (middle * gradient).sum(1) * time / steps
        u = unit(u - time / steps * (gradient - middle * (middle * gradient).sum(1, keepdim=True)) / 4)
    found, change = kick(direction, gradient, torch.full((2,), time, dtype=torch.float64))
    torch.testing.assert_close(found, u, rtol=0, atol=1e-7)
    torch.testing.assert_close(change, energy, rtol=0, atol=1e-6)


def test_the_energy_error_of_a_step_is_of_third_order() -> None:
    target, sizes, errors = gaussian(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)), (0.08, 0.04, 0.02), []
    for size in sizes:
        kernel, state = started(target, size, 8)
        _, info = kernel.step(state, STILL, Silent(0, range(8), 0))
        errors.append((info["energy_variance"] * 3).sqrt())
    slopes = [torch.log2(a / b) for a, b in pairwise(errors)]
    assert float((slopes[-1].median() - 3).abs()) < 0.1


def test_an_anisotropic_gaussian_is_sampled_within_its_monte_carlo_error() -> None:
    scales = torch.tensor([0.3, 0.5, 1.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    model = nn.Linear(6, 1, bias=False).double()
    draws = sample(
        model, None, "mclmc", log_density=lambda own: -0.5 * (own["weight"] / scales).square().sum(), chains=8,
        draws=1500, thin=4, warmup=3000, epochs=0, variance=2e-4, loose=1e-2, length=4.0, start="model",
    )  # fmt: skip
    values = draws.tensor("weight").reshape(8, 1500, 6) / scales
    squares = values.square()
    error = squares.flatten(0, 1).std(0) / ess(squares, "mean").sqrt()
    assert float(error.max()) < 0.1, "too few draws to say anything"
    z = (squares.flatten(0, 1).mean(0) - 1) / error
    assert float(z.abs().max()) < 4


def test_the_step_size_is_tuned_to_the_wished_error() -> None:
    target = gaussian(torch.linspace(0.2, 2.0, 40, dtype=torch.float64))
    plan = MCLMC(warmup=4000, variance=1e-2, epochs=0).plan(target)
    kernel = plan.stages[1].kernel
    streams = Streams(0, range(4), 0)
    state = kernel.init(Draws(numbers(4, 40), {}, torch.zeros(4)), streams)
    for step in range(4000):
        state, _ = kernel.step(state, StepIndex(step, 4000), streams)
    found = []
    for step in range(4000, 6000):
        state, info = kernel.step(state, StepIndex(step, 4000), streams)
        found.append(info["energy_variance"])
    # The error's variance grows with the sixth power of the step, so a factor 2 here is 12 % of the step.
    assert float((torch.stack(found).mean(0) / 1e-2).log2().abs().max()) < 1


def test_it_goes_on_after_a_region_without_density() -> None:
    def log_density(own: dict[str, Tensor]) -> Tensor:
        weight = own["weight"]
        return torch.where((weight.abs() < 1).all(), -0.5 * weight.square().sum(), torch.nan)

    with global_seed(0):
        model = nn.Linear(3, 1, bias=False)
    options = {"draws": 300, "thin": 5, "warmup": 300, "epochs": 0, "chains": 4, "variance": 0.01, "start": "model"}
    draws = sample(model, None, "mclmc", log_density=log_density, **options)
    values = draws.tensor("weight").reshape(4, 300, 3)
    assert bool((values.abs() < 1).all())
    assert min(draws.provenance["diagnostics"]["divergences"]) > 0
    # A chain that is stuck moves in no direction; near a wall one coordinate may well rest for a while.
    assert float(values[:, -50:].std(1).amax(1).min()) > 0.05, "a chain is stuck"


def test_bad_settings_get_sentences() -> None:
    with pytest.raises(InputError, match="at least 2 weights"):
        sample(nn.Linear(1, 1, bias=False), None, "mclmc")
    with pytest.raises(InputError, match="positive length"):
        sample(nn.Linear(2, 1), None, "mclmc", variance=-1.0)
    assert math.isclose(MCLMC().plan(gaussian(torch.ones(9, dtype=torch.float64))).stages[1].kernel.length, 3.0)
