import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

from onebasin.errors import InputError
from onebasin.inference.kernel import Draws, StepIndex
from onebasin.inference.methods.vi import VI, Fit, VIKernel
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Minibatches, Target, target_of

Z = 4.5  # |z| of a normal exceeds this with probability 7e-6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=seeded(seed), dtype=torch.float64)


def kernel_of(target: Target, **options: Any) -> VIKernel:
    kernel = VI(**options).plan(target).stages[0].kernel
    assert isinstance(kernel, VIKernel)
    return kernel


def start_of(target: Target, chains: int, seed: int = 1) -> Draws:
    position = 0.3 * numbers(chains, target.layout.size, seed=seed).to(target.layout.dtype)
    return Draws(position, target.buffers_for(chains), torch.full((chains,), float("nan"), dtype=torch.float64))


def fitted(target: Target, steps: int, chains: int, **options: Any) -> Fit:
    kernel = kernel_of(target, epochs=steps, batch=None, **options)
    streams = Streams(0, range(chains), 0)
    state = kernel.init(start_of(target, chains), streams)
    for step in range(steps):
        state, info = kernel.step(state, StepIndex(step, steps), streams)
        assert not info["divergent"].any()
    return state


NOISE, PRIOR = 0.7, 1.5
INPUTS = numbers(30, 4) @ (torch.eye(4) + 0.5 * torch.diag(torch.ones(3), 1)).double()
GOALS = INPUTS @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + NOISE * numbers(30, seed=9)


def regression(prior: Any = PRIOR) -> Target:
    return target_of(nn.Linear(4, 1).double(), (INPUTS, GOALS), noise=NOISE, prior=prior)


def exact(kl_weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and std of the best Gaussian with independent weights: posterior mean, and 1 / sqrt(precision_ii)."""
    design = torch.cat([INPUTS, torch.ones(30, 1, dtype=torch.float64)], 1)
    variance = kl_weight * NOISE**2
    precision = design.T @ design / variance + torch.eye(5, dtype=torch.float64) / PRIOR**2
    return torch.linalg.solve(precision, design.T @ GOALS / variance), precision.diagonal().rsqrt()


def assert_average(values: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    """The average over chains is `expected` within its own error, which is smaller than `allowed`."""
    error = values.std(0) / math.sqrt(len(values))
    assert bool((error * Z < allowed).all()), error
    assert bool(((values.mean(0) - expected).abs() < Z * error).all()), (values.mean(0) - expected) / error


@pytest.mark.parametrize("rows", [None, torch.tensor([[0, 3, 5], [7, 7, 2]]), torch.tensor([1, 4])])
@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_gradient_is_that_of_autograd(rows: Tensor | None, kl_weight: float) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    target = target_of(model, (INPUTS, GOALS), noise=NOISE, prior={"*": 2.0, "*.bias": 0.5})
    kernel = kernel_of(target, kl_weight=kl_weight, samples=3)
    size = target.layout.size
    mean, log_std, noise = numbers(2, size, seed=3), 0.3 * numbers(2, size, seed=4) - 1, numbers(2, 3, size, seed=5)
    none = torch.zeros(2, 2 * size, dtype=torch.float64)
    found, _ = kernel.gradient(Fit(mean, log_std, target.buffers_for(2), none, none), noise, rows)

    scales = target.prior.precision.rsqrt()
    for chain in range(2):
        own = None if rows is None else rows if rows.dim() == 1 else rows[chain]
        x, y = (INPUTS, GOALS) if own is None else (INPUTS[own], GOALS[own])
        centre, spread = mean[chain].requires_grad_(), log_std[chain].requires_grad_()
        negative = torch.zeros((), dtype=torch.float64)
        for sample in noise[chain]:
            weights = target.layout.split(centre + spread.exp() * sample)
            outputs = functional_call(model, weights, (x,)).squeeze(1)
            negative = negative - Normal(outputs, NOISE).log_prob(y).sum() * (30 / len(y)) / 3
        kl = kl_divergence(Normal(centre, spread.exp()), Normal(torch.zeros_like(scales), scales)).sum()
        slopes = torch.autograd.grad((negative + kl_weight * kl) / 30, [centre, spread])
        torch.testing.assert_close(found[chain], torch.cat(slopes), rtol=1e-10, atol=1e-10)


def test_divergence_and_loss_are_those_of_torch() -> None:
    target = regression({"*": 2.0, "bias": 0.5})
    kernel = kernel_of(target, batch=None, kl_weight=0.7)
    streams = Streams(0, [0, 1], 0)
    state = kernel.init(start_of(target, 2), streams)
    scales = target.prior.precision.rsqrt()
    expected = kl_divergence(Normal(state.mean, state.log_std.exp()), Normal(torch.zeros_like(scales), scales)).sum(1)
    torch.testing.assert_close(kernel.divergence(state), expected)
    _, info = kernel.step(state, StepIndex(0, 10), streams)
    noise = Streams(0, [0, 1], 0).gaussian("weights", torch.zeros(2, 1, 5, dtype=torch.float64))[:, 0]
    likelihood = target(state.mean + state.log_std.exp() * noise, state.buffers).log_likelihood
    torch.testing.assert_close(info["loss"], (0.7 * expected - likelihood) / 30)


@pytest.mark.parametrize("kl_weight", [1.0, 0.1])
def test_conjugate_regression_has_the_exact_optimum(kl_weight: float) -> None:
    state = fitted(regression(), 700, 64, lr=0.05, samples=8, kl_weight=kl_weight)
    mean, std = exact(kl_weight)
    assert_average(state.mean, mean, 0.03 * std)
    assert_average(state.log_std, std.log(), 0.02)


def test_mini_batches_have_the_same_optimum() -> None:
    target, chains, steps = regression(), 48, 800
    kernel = kernel_of(target, batch=10, lr=0.03)
    streams = Streams(2, range(chains), 0)
    state = kernel.init(start_of(target, chains), streams)
    for step in range(steps):
        state, _ = kernel.step(state, StepIndex(step, steps), streams)
    mean, std = exact()
    assert_average(state.mean, mean, 0.2 * std)
    assert_average(state.log_std, std.log(), 0.1)


def test_without_data_the_prior_comes_back() -> None:
    target = target_of(nn.Linear(4, 1).double(), None, prior={"weight": 0.3, "bias": 2.0})
    state = fitted(target, 1000, 2, lr=0.05, init_std=0.5)
    scales = torch.tensor([0.3] * 4 + [2.0], dtype=torch.float64).expand(2, 5)
    # The loss has no noise here, so the optimum is met to what Adam resolves in these steps.
    torch.testing.assert_close(state.log_std.exp(), scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(state.mean, torch.zeros_like(state.mean), rtol=0, atol=1e-6)


def test_a_density_of_ones_own_needs_no_prior() -> None:
    centre, spread = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.float64))})
    target = target_of(model, None, log_density=lambda own: Normal(centre, spread).log_prob(own["w"]).sum())
    state = fitted(target, 600, 64, lr=0.05, samples=4)
    assert_average(state.mean, centre, 0.05 * spread)
    assert_average(state.log_std, spread.log(), 0.03)
    entropy = Normal(state.mean, state.log_std.exp()).entropy().sum(1)
    torch.testing.assert_close(kernel_of(target).divergence(state), -entropy)


def slopes_at(mean: Tensor, std: Tensor, kl_weight: float) -> Tensor:
    """Independent estimates (200, 10) of the slope along mean and log std."""
    target = regression()
    kernel = kernel_of(target, kl_weight=kl_weight)
    none = torch.zeros(200, 10, dtype=torch.float64)
    state = Fit(mean.expand(200, 5), std.log().expand(200, 5), target.buffers_for(200), none, none)
    return kernel.gradient(state, numbers(200, 100, 5, seed=11), None)[0]


@pytest.mark.parametrize("kl_weight", [1.0, 0.1, 0.01, 1e-4])
def test_the_exact_optimum_is_stationary_down_to_no_divergence(kl_weight: float) -> None:
    slopes = slopes_at(*exact(kl_weight), kl_weight)
    assert_average(slopes, torch.zeros(10, dtype=torch.float64), math.inf)
    # The same point is none for another weight, and by far.
    other = slopes_at(*exact(kl_weight), 1.3 * kl_weight)
    assert bool((other.mean(0)[5:].abs() > 10 * other.std(0)[5:] / math.sqrt(200)).all())


def test_without_the_divergence_the_spread_collapses_on_least_squares() -> None:
    # There the slope along the mean is zero, and that along log std is std^2 H_ii / N > 0: down, at every spread.
    design = torch.cat([INPUTS, torch.ones(30, 1, dtype=torch.float64)], 1)
    least = torch.linalg.lstsq(design, GOALS[:, None]).solution[:, 0]
    curvature = (design.T @ design).diagonal() / NOISE**2 / 30
    for spread in (0.3, 1e-3):
        std = torch.full((5,), spread, dtype=torch.float64)
        expected = torch.cat([torch.zeros(5, dtype=torch.float64), std.square() * curvature])
        assert_average(slopes_at(least, std, 0.0), expected, torch.tensor([math.inf] * 5 + [spread**2] * 5))


def test_the_spread_has_a_floor() -> None:
    state = fitted(regression(), 60, 2, lr=0.5, kl_weight=0.0, init_std=1e-4, lr_schedule="constant")
    assert float(state.log_std.exp().min()) == pytest.approx(1e-5)


def test_chains_do_not_know_of_each_other() -> None:
    target = regression()
    kernel, start = kernel_of(target, batch=7, samples=2), start_of(target, 3)

    def run(chains: list[int]) -> tuple[Fit, Draws]:
        streams = Streams(5, chains, 0)
        buffers = {name: value[chains] for name, value in start.buffers.items()}
        state = kernel.init(Draws(start.position[chains], buffers, start.log_density[chains]), streams)
        for step in range(10):
            state, _ = kernel.step(state, StepIndex(step, 10), streams)
        return state, kernel.draw(state, Streams(5, chains, "draw 0"))

    (together, drawn), (alone, own) = run([0, 1, 2]), run([1])
    torch.testing.assert_close(together.mean[1:2], alone.mean)
    torch.testing.assert_close(together.log_std[1:2], alone.log_std)
    torch.testing.assert_close(drawn.position[1:2], own.position)


def test_draws_are_those_of_the_components() -> None:
    target = regression()
    kernel = kernel_of(target)
    state = kernel.init(start_of(target, 2), Streams(0, [0, 1], 0))
    drawn = kernel.draw(state, Streams(0, [0, 1], "draw 3"))
    streams = Streams(0, [0, 1], "draw 3").each("draw")
    for chain, (gaussian, stream) in enumerate(zip(kernel.components(state), streams, strict=True)):
        assert torch.equal(drawn.position[chain], gaussian.draw_flat(1, stream)[0])
        torch.testing.assert_close(gaussian.covariance.std(), torch.full((5,), 0.05, dtype=torch.float64))
    assert torch.equal(drawn.log_density, -target(drawn.position, drawn.buffers).potential)


def test_running_statistics_average_over_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    target = target_of(model, (INPUTS.float(), GOALS.float()), noise=NOISE)
    kernel = kernel_of(target, batch=None, samples=2)
    state = kernel.init(start_of(target, 2), Streams(0, [0, 1], 0))
    after, _ = kernel.step(state, StepIndex(0, 10), Streams(0, [0, 1], 0))
    noise = Streams(0, [0, 1], 0).gaussian("weights", torch.zeros(2, 2, target.layout.size))
    theta = state.mean[:, None] + state.log_std.exp()[:, None] * noise
    each = [target(theta[:, sample], state.buffers, training=True).buffers["1.running_var"] for sample in range(2)]
    torch.testing.assert_close(after.buffers["1.running_var"], torch.stack(each).mean(0))
    assert after.buffers["1.num_batches_tracked"].tolist() == [1, 1]


def test_a_chain_with_an_infinite_gradient_stays() -> None:
    target = regression()
    kernel = kernel_of(target, batch=None)
    start = start_of(target, 2)
    start.position[0, 0] = float("inf")
    state = kernel.init(start, Streams(0, [0, 1], 0))
    after, info = kernel.step(state, StepIndex(0, 10), Streams(0, [0, 1], 0))
    assert info["divergent"].tolist() == [True, False]
    assert torch.equal(after.mean[0], state.mean[0]) and not torch.equal(after.mean[1], state.mean[1])


def test_bad_options_are_told_in_a_sentence() -> None:
    with pytest.raises(InputError, match="needs a proper prior"):
        VI().plan(regression(prior=None))
    with pytest.raises(InputError, match="kl_weight >= 0"):
        VI(kl_weight=-1.0).plan(regression())
    with pytest.raises(InputError, match="init_std"):
        VI(init_std=0.0).plan(regression())
    with pytest.raises(InputError, match="samples"):
        VI(samples=0).plan(regression())
    with pytest.raises(InputError, match="needs a proper prior"):
        VIKernel(regression({"bias": math.inf}), Minibatches(30, None))


def test_the_library_posteriors_finds_the_same_optimum() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensordict warns about posteriors at import
        diagonal = pytest.importorskip("posteriors").vi.diag
        torchopt = pytest.importorskip("torchopt")
    target, steps = regression(), 800
    buffers = target.buffers_for(1)

    def log_posterior(position: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        design = torch.cat([INPUTS, torch.ones(30, 1, dtype=torch.float64)], 1)
        likelihood = Normal(design @ position, NOISE).log_prob(GOALS).sum()
        return likelihood + Normal(torch.zeros(5).double(), PRIOR).log_prob(position).sum(), torch.zeros(())

    position = 0.3 * numbers(1, 5, seed=3)
    found = log_posterior(position[0], None)[0]
    assert float(found) == pytest.approx(float(-target(position, buffers).potential), rel=1e-9)  # the same problem

    def rate(step: Any) -> Any:
        return 0.025 * (1 + math.cos(math.pi * min(int(step), steps) / steps))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transform = diagonal.build(log_posterior, torchopt.adam(lr=rate), n_samples=16, init_log_sds=-3.0)
        state = transform.init(position[0].clone())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(steps):
                state, _ = transform.update(state, None)
    ours = fitted(target, 800, 32, lr=0.05, samples=16)
    # Theirs is one run with the noise of one of our chains; ours is the average of 32.
    for mine, theirs in ((ours.mean, state.params), (ours.log_std, state.log_sd_diag)):
        error = mine.std(0) * math.sqrt(1 + 1 / 32)
        assert bool(((mine.mean(0) - theirs).abs() < Z * error).all()), (mine.mean(0) - theirs) / error
