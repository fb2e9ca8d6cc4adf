"""Laplace approximations against closed forms, brute force, and laplace-torch."""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

from onebasin.errors import InputError
from onebasin.inference.curvature import Seen, dense, diagonal
from onebasin.inference.kernel import Draws, StepIndex
from onebasin.inference.laplace_torch import from_laplace
from onebasin.inference.methods.laplace import Laplace, LaplaceKernel
from onebasin.inference.seeds import Streams
from onebasin.inference.target import ParameterLayout, Target, target_of
from onebasin.posterior.gaussian import Block, Covariance, Full, Gaussian, Kronecker, Partial
from onebasin.posterior.posterior import load_posterior

STRUCTURES = ("diagonal", "kfac", "full")
THEIRS = {"diagonal": "diag", "kfac": "kron", "full": "full"}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def perceptron(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3, padding="same", bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(2 * 5 * 2, 3),
    )


def networks(target: Target, *models: nn.Module) -> Draws:
    layout = target.layout
    position = torch.stack([layout.join(dict(model.named_parameters())).detach() for model in models])
    buffers_of_chains = [layout.buffers_of(model) for model in models]
    buffers = {name: torch.stack([own[name] for own in buffers_of_chains]) for name in buffers_of_chains[0]}
    return Draws(position, buffers, torch.full((len(models),), math.nan))


def streams(chains: int = 1, seed: int = 0) -> Streams:
    return Streams(seed, range(chains), "draw")


def seen(model: nn.Module, data: Any, **options: Any) -> Seen:
    target = target_of(model, data, **options)
    assert target.outputs is not None and target.likelihood is not None
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return Seen(target, target.outputs, target.likelihood, weights, target.buffers)


def fitted(model: nn.Module, data: Any, density: dict[str, Any], **options: Any) -> tuple[Gaussian, float]:
    target = target_of(model, data, **density)
    kernel = LaplaceKernel(target, Laplace(**options))
    state = kernel.init(networks(target, model), streams())
    return kernel.components(state)[0], float(state.evidence)


def covariance(shape: Covariance) -> Tensor:
    """The matrix, read off the density alone: log p is quadratic, and its Hessian is minus the precision."""
    size = shape.size
    origin = torch.zeros(size, dtype=torch.float64)
    units = eye(size)
    ends = shape.log_density(units) - shape.log_density(origin)
    both = shape.log_density(units[:, None] + units[None]) - shape.log_density(origin)
    precision = -(both - ends[:, None] - ends[None])
    return torch.linalg.inv(precision)


def varying(shape: Covariance) -> Covariance:
    return shape.inner if isinstance(shape, Partial) else shape


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


# Closed forms


def design(inputs: Tensor, outputs: int) -> Tensor:
    """The matrix that gives the outputs (n outputs,) of a linear layer from its weights and biases."""
    weights = torch.einsum("oc,ni->noci", eye(outputs), inputs).reshape(len(inputs) * outputs, -1)
    return torch.cat([weights, eye(outputs).repeat(len(inputs), 1)], dim=1)


def test_a_linear_gaussian_network_gets_its_exact_posterior_and_evidence() -> None:
    inputs, targets, noise, scale = numbers(12, 3), numbers(12, 2, seed=1), 0.7, 1.5
    model = seeded(lambda: nn.Linear(3, 2))
    target = target_of(model, (inputs, targets), noise=noise, prior=scale)
    training = {"epochs": 100, "batch": None, "optimizer": "sgd", "lr": 0.3, "momentum": 0.5}
    plan = Laplace(**training, structure="full", draws=3).plan(target)  # type: ignore[arg-type]
    train, stage = plan.stages
    state = train.kernel.init(networks(target, model), streams())
    for step in range(train.steps):
        state, _ = train.kernel.step(state, StepIndex(step, train.steps), streams())
    kernel = stage.kernel
    assert isinstance(kernel, LaplaceKernel) and (stage.steps, plan.draws, plan.thin) == (0, 3, (0,))
    found = kernel.init(train.kernel.draw(state, streams()), streams())
    component = kernel.components(found)[0]

    matrix = design(inputs, 2)
    exact = torch.linalg.inv(matrix.T @ matrix / noise**2 + eye(8) / scale**2)
    mean = exact @ matrix.T @ targets.reshape(-1) / noise**2
    assert torch.allclose(component.centre, mean, rtol=0, atol=1e-6)
    assert torch.allclose(covariance(component.covariance), exact, rtol=0, atol=1e-6)
    marginal = MultivariateNormal(0 * targets.reshape(-1), noise**2 * eye(24) + scale**2 * matrix @ matrix.T)
    assert math.isclose(float(found.evidence), float(marginal.log_prob(targets.reshape(-1))), rel_tol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_without_data_it_is_the_prior(structure: str) -> None:
    scales = {"*.weight": 0.5, "*.bias": 2.0}
    target = target_of(seeded(perceptron), None, prior=scales)
    kernel = LaplaceKernel(target, Laplace(structure=structure))
    state = kernel.init(networks(target, seeded(perceptron)), streams())
    component = kernel.components(state)[0]
    expected = target.layout.spread(scales, 1.0, "prior")
    assert torch.allclose(component.covariance.std(), expected, rtol=1e-14)
    assert_close(covariance(component.covariance), torch.diag(expected.square()))
    ends = numbers(5, target.layout.size)
    assert torch.allclose(component.covariance.log_density(ends), target.prior.log_density(ends), rtol=1e-12)


@pytest.mark.parametrize("noise", [0.3, 2.0])
def test_kronecker_factors_are_exact_for_deep_linear_networks_with_gaussian_targets(noise: float) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2)))
    data = (numbers(9, 3), numbers(9, 2, seed=1))
    whole = dense(seen(model, data, noise=noise), [name for name, _ in model.named_parameters()])
    component, _ = fitted(model, data, {"noise": noise}, structure="kfac")
    found = torch.linalg.inv(covariance(component.covariance)) - eye(len(whole))
    start = 0
    for value in model.parameters():
        place = slice(start, start := start + value.numel())
        assert_close(found[place, place], whole[place, place])


# Brute force


def cauchy(outputs: Tensor, targets: Tensor) -> Tensor:
    """A likelihood whose curvature is negative for outliers."""
    return -torch.log1p((outputs - targets).square()).sum(1)


def brute(model: nn.Module, inputs: Tensor, curvature: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum of J^T H J with one backward pass per output and example."""
    weights = list(model.parameters())
    total = torch.zeros(()).double()
    for index, example in enumerate(inputs):
        outputs = model(example[None]).reshape(-1)
        rows = [torch.autograd.grad(value, weights, retain_graph=True) for value in outputs]
        jacobian = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
        total = total + jacobian.T @ curvature(outputs.detach(), index) @ jacobian
    return total


def hessian_of(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda outputs: torch.autograd.functional.hessian(loss, outputs)


def expected_hessian(outputs: Tensor) -> Tensor:
    """The Hessian of a Gaussian in (mean, log std), averaged over targets by quadrature that is exact for squares."""
    mean, log_std = outputs.chunk(2)

    def loss(values: Tensor, targets: Tensor) -> Tensor:
        middle, width = values.chunk(2)
        return (0.5 * ((targets - middle) * torch.exp(-width)).square() + width).sum()

    ends = [mean + sign * log_std.exp() for sign in (-1, 1)]
    return sum(hessian_of(lambda values, end=end: loss(values, end))(outputs) for end in ends) / 2


def likelihood_cases() -> Iterator[Any]:
    inputs, real = numbers(6, 3), 2 * numbers(6, 2, seed=1)
    classes = torch.tensor([0, 1, 1, 0, 1, 0])
    yield pytest.param(perceptron, inputs, classes, {}, lambda o, n: hessian_of(
        lambda v: F.cross_entropy(v, classes[n]))(o), id="categorical")  # fmt: skip
    yield pytest.param(perceptron, inputs, (real > 0).double(), {"likelihood": "bernoulli"}, lambda o, n: torch.diag(
        torch.sigmoid(o) * torch.sigmoid(-o)), id="bernoulli")  # fmt: skip
    yield pytest.param(perceptron, inputs, real, {"noise": 0.4}, lambda o, n: eye(2) / 0.16,
                       id="gaussian")  # fmt: skip
    yield pytest.param(perceptron, inputs, real[:, :1], {"noise": "learned"}, lambda o, n: expected_hessian(o),
                       id="learned")  # fmt: skip
    yield pytest.param(perceptron, inputs, real, {"likelihood": cauchy}, lambda o, n: torch.diag(
        (2 * (1 - (o - real[n]).square()) / (1 + (o - real[n]).square()).square()).clamp(min=0)),
        id="custom")  # fmt: skip
    pixels = torch.tensor([[0, 1, 2, 0]] * 3 + [[2, 2, 0, 1]] * 3)
    yield pytest.param(lambda: nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (3, 4))), inputs, pixels, {},
                       lambda o, n: hessian_of(lambda v: F.cross_entropy(
                           v.reshape(1, 3, 4), pixels[n][None], reduction="sum"))(o), id="pixels")  # fmt: skip


@pytest.mark.parametrize(("make", "inputs", "targets", "density", "curvature"), list(likelihood_cases()))
def test_the_matrix_is_the_sum_of_brute_force_jacobians(
    make: Any, inputs: Tensor, targets: Tensor, density: Any, curvature: Any
) -> None:
    model = seeded(make)
    names = [name for name, _ in model.named_parameters()]
    expected = brute(model, inputs, curvature)
    own = seen(model, (inputs, targets), **density, piece=4)
    assert_close(dense(own, names), expected)
    sizes = [value.numel() for value in model.parameters()]
    parts = dict(zip(names, expected.diagonal().split(sizes), strict=True))
    for chosen in (names, names[2:] + names[:1]):
        found = diagonal(own, chosen)
        assert list(found) == chosen
        for name in chosen:
            assert_close(found[name], parts[name])
    for structure, exact in (("full", expected), ("diagonal", torch.diag(expected.diagonal()))):
        component, _ = fitted(model, (inputs, targets), {**density, "prior": 0.5}, structure=structure)
        assert_close(torch.linalg.inv(covariance(component.covariance)), exact + 4 * eye(len(exact)), 1e-8)


class Odd(nn.Module):
    """What Kronecker factors do not know: a layer that runs twice, a norm, a scale of its own, in-place operations."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.into, self.twice, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm, self.relu = nn.BatchNorm1d(4), nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.into(x))
        return self.out(self.norm(self.twice(self.twice(hidden)))) * self.scale


def test_tensors_without_kronecker_factors_get_their_exact_diagonal() -> None:
    model = seeded(Odd).train()
    model(numbers(20, 3, seed=3))  # so that the running statistics are not those of a fresh layer
    data = (numbers(6, 3), torch.tensor([0, 1, 1, 0, 1, 0]))
    component, _ = fitted(model.eval(), data, {}, structure="kfac")
    layout = ParameterLayout.of(model)
    std = layout.split(component.covariance.std())
    others = [name for name in layout.names if name.startswith(("scale", "twice", "norm"))]
    exact = dense(seen(model, data), layout.names).diagonal()
    for name in others:
        assert_close(std[name], (layout.split(exact)[name] + 1).rsqrt())
    blocks = dict(zip(layout.names, component.covariance.blocks, strict=True))  # type: ignore[attr-defined]
    assert [name for name, block in blocks.items() if block.left is None] == others
    plain = seeded(lambda: Odd(inplace=False))
    plain.load_state_dict(model.state_dict())
    assert_close(
        component.covariance.std(), fitted(plain.eval(), data, {}, structure="kfac")[0].covariance.std(), 1e-12
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.other(torch.tanh(self.one(x)))))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(("make", "width", "prefix"), [(Tied, 3, "one"), (grouped, 8, "1")])
def test_tied_and_grouped_weights_get_their_exact_diagonal(make: Any, width: int, prefix: str) -> None:
    model, data = seeded(make), (numbers(6, width), torch.arange(6) % 2)
    component, _ = fitted(model, data, {}, structure="kfac")
    layout = ParameterLayout.of(model)
    exact, std = (
        layout.split(dense(seen(model, data), layout.names).diagonal()),
        layout.split(component.covariance.std()),
    )
    kept = [name for name in layout.names if name.startswith(prefix)]
    assert len(kept) == 2
    for name in kept:
        assert_close(std[name], (exact[name] + 1).rsqrt())
    quick = fitted(model, data, {}, structure="diagonal")[0]
    assert_close(quick.covariance.std(), (layout.join(exact) + 1).rsqrt())


class Sequence(nn.Module):
    """A layer at several places of an example, with the examples on the first axis, the second, or neither."""

    def __init__(self, order: str, places: int) -> None:
        super().__init__()
        self.order, self.places = order, places
        self.into, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), self.places, 2)
        if self.order == "second":
            return self.out(torch.tanh(self.into(rows.transpose(0, 1)))).sum(0)
        if self.order == "neither":
            return self.out(torch.tanh(self.into(rows.reshape(-1, 2)))).reshape(len(x), -1, 2).sum(1)
        return self.out(torch.tanh(self.into(rows))).sum(1)


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("examples", [1, 2, 3, 5])
def test_the_order_of_axes_inside_a_model_does_not_matter(examples: int, places: int) -> None:
    data = (numbers(examples, 2 * places), torch.arange(examples) % 2)
    models = [seeded(partial(Sequence, order, places)) for order in ("first", "second", "neither")]
    names = [name for name, _ in models[0].named_parameters()]
    exact = dense(seen(models[0], data), names).diagonal()
    for model in models:
        assert_close(torch.cat(list(diagonal(seen(model, data, piece=3), names).values())), exact)
        kfac, evidence = fitted(model, data, {"piece": 3}, structure="kfac")
        first, expected = fitted(models[0], data, {}, structure="kfac")
        assert_close(kfac.covariance.std(), first.covariance.std(), 1e-12)
        assert math.isclose(evidence, expected, rel_tol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("layers", ["all", "last"])
def test_two_modes_together_are_two_modes_alone(structure: str, layers: str) -> None:
    models = [seeded(Odd, seed) for seed in (1, 2)]
    target = target_of(models[0], (numbers(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])))
    kernel = LaplaceKernel(target, Laplace(structure=structure, layers=layers, prior_precision="marginal"))
    both = kernel.init(networks(target, *models), streams(2))
    for chain, model in enumerate(models):
        alone = kernel.init(networks(target, model), streams())
        assert torch.equal(both.precision[chain], alone.precision[0])
        assert all(torch.equal(value[chain], alone.shape[name][0]) for name, value in both.shape.items())
        assert math.isclose(float(both.evidence[chain]), float(alone.evidence[0]), rel_tol=1e-12)
    assert float(both.precision[0, 0]) != float(both.precision[1, 0])


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_are_those_of_the_components(structure: str, layers: str) -> None:
    models = [seeded(perceptron, seed) for seed in (1, 2)]
    target = target_of(models[0], (numbers(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])))
    kernel = LaplaceKernel(target, Laplace(structure=structure, layers=layers))
    state = kernel.init(networks(target, *models), streams(2))
    drawn = kernel.draw(state, streams(2))
    for chain, (component, stream) in enumerate(zip(kernel.components(state), streams(2).each("draw"), strict=True)):
        assert torch.equal(drawn.position[chain], component.draw_flat(1, stream)[0])
        moved = target.layout.split(drawn.position[chain] != state.position[chain])
        assert {name: bool(value.any()) for name, value in moved.items()} == {
            name: layers == "all" or name.startswith("2.") for name in target.layout.names
        }
    assert torch.allclose(drawn.log_density, -target(drawn.position, drawn.buffers).potential)
    hot = LaplaceKernel(target, Laplace(structure=structure, layers=layers, temperature=4.0))
    warm = hot.components(hot.init(networks(target, *models), streams(2)))
    for cold, other in zip(kernel.components(state), warm, strict=True):
        assert_close(other.covariance.std(), 2 * cold.covariance.std())
    assert torch.allclose(hot.init(networks(target, *models), streams(2)).evidence, state.evidence)


# The prior precision


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_tuned_precision_maximises_the_evidence(structure: str) -> None:
    model = seeded(perceptron)
    data = (numbers(30, 3), numbers(30, 2, seed=1))
    density = {"noise": 0.2}
    target = target_of(model, data, **density)  # type: ignore[arg-type]
    kernel = LaplaceKernel(target, Laplace(structure=structure, prior_precision="marginal"))
    state = kernel.init(networks(target, model), streams())
    best = float(state.precision[0, 0])
    assert bool((state.precision == best).all())
    assert math.isclose(float(kernel.summary(state)["prior_precision"]), best, rel_tol=1e-12)
    given = [fitted(model, data, density, structure=structure, prior_precision=best * factor)[1]
             for factor in (0.5, 0.99, 1.0, 1.01, 2.0)]  # fmt: skip
    assert math.isclose(given[2], float(state.evidence), rel_tol=1e-12)
    assert given[0] < given[1] < given[2] > given[3] > given[4]
    number = fitted(model, data, density, structure=structure, prior_precision=4.0)
    prior = fitted(model, data, {**density, "prior": 0.5}, structure=structure)
    assert number[1] == prior[1] and torch.equal(number[0].covariance.std(), prior[0].covariance.std())


@pytest.mark.parametrize("structure", ["diagonal", "kfac"])
def test_a_precision_for_each_tensor_is_at_least_as_good_and_stationary(structure: str) -> None:
    model = seeded(perceptron)
    data, density = (numbers(30, 3), numbers(30, 2, seed=1)), {"noise": 0.2}
    target = target_of(model, data, **density)  # type: ignore[arg-type]
    kernel = LaplaceKernel(target, Laplace(structure=structure, prior_precision="per-layer"))
    state = kernel.init(networks(target, model), streams())
    assert float(state.evidence) > fitted(model, data, density, structure=structure, prior_precision="marginal")[1]
    for index, name in enumerate(target.layout.names):
        values = []
        for factor in (0.98, 1.0, 1.02):
            scales = dict(zip(target.layout.names, state.precision[0].rsqrt().tolist(), strict=True))
            scales[name] = float((state.precision[0, index] * factor).rsqrt())
            values.append(fitted(model, data, {**density, "prior": scales}, structure=structure)[1])
        assert values[0] < values[1] > values[2]


# laplace-torch


@pytest.fixture(scope="module")
def oracle() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, about torch.jit in a package it imports
        found = pytest.importorskip("laplace")
    return found


def theirs(oracle: Any, model: nn.Module, data: Any, structure: str, layers: str, **options: Any) -> Any:
    kind = "regression" if data[1].is_floating_point() else "classification"
    subset = "all" if layers == "all" else "last_layer"
    found = oracle.Laplace(model, kind, subset_of_weights=subset, hessian_structure=THEIRS[structure], **options)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # it multiplies with an identity matrix of the default dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's forward mode, about torch.jit
            found.fit(DataLoader(TensorDataset(*data), batch_size=len(data[0])))
    finally:
        torch.set_default_dtype(before)
    return found


def their_covariance(found: Any) -> Tensor:
    precision = found.posterior_precision
    if not isinstance(precision, Tensor):
        matrix: Tensor = precision.to_matrix(exponent=-1)
        return matrix
    return torch.diag(1 / precision) if precision.dim() == 1 else torch.linalg.inv(precision)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)).sum(1))


TASKS = {
    "classification": (perceptron, (numbers(15, 3), torch.arange(15) % 2), {}, {}),
    "regression": (perceptron, (numbers(15, 3), numbers(15, 2, seed=1)), {"noise": 0.6}, {"sigma_noise": 0.6}),
    "tokens": (Tokens, (numbers(9, 4, 2), torch.arange(9) % 2), {}, {}),
    "images": (convolutional, (numbers(7, 2, 5, 6), torch.arange(7) % 3), {}, {}),
}


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", TASKS)
def test_laplace_torch_finds_the_same(oracle: Any, task: str, structure: str, layers: str) -> None:
    make, data, density, options = TASKS[task]
    model = seeded(make)
    reference = theirs(oracle, model, data, structure, layers, prior_precision=4.0, **options)
    component, evidence = fitted(model, data, {**density, "prior": 0.5}, structure=structure, layers=layers)
    found, expected = covariance(varying(component.covariance)), their_covariance(reference).detach()
    assert_close(found, expected, 1e-7)
    assert_close(varying(component.covariance).std(), expected.diagonal().sqrt(), 1e-9)
    assert math.isclose(evidence, float(reference.log_marginal_likelihood()), rel_tol=1e-9)


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fitted_laplace_object_becomes_the_same_gaussian(
    oracle: Any, structure: str, layers: str, tmp_path: Path
) -> None:
    make, data, _, options = TASKS["regression"]
    model = seeded(make)
    reference = theirs(oracle, model, data, structure, layers, prior_precision=4.0, **options)
    posterior = from_laplace(reference, model)
    shape = posterior.components[0].covariance
    exact = their_covariance(reference).detach()
    assert_close(covariance(varying(shape)), exact, 1e-7)
    assert all(torch.equal(posterior.mean[name], value) for name, value in model.state_dict().items())
    offset = 0.1 * numbers(shape.size, seed=5)
    places = shape.places if isinstance(shape, Partial) else torch.arange(shape.size)
    expected = float(reference.log_prob(reference.mean + offset[places]))
    assert math.isclose(float(shape.log_density(offset)), expected, rel_tol=1e-9)
    again = load_posterior(posterior.save(tmp_path / "posterior.safetensors"))
    assert torch.equal(again.components[0].covariance.log_density(offset), shape.log_density(offset))

    count = 4000
    drawn = posterior.components[0].draw_flat(count, torch.Generator().manual_seed(0)) - posterior.components[0].centre
    assert torch.equal(drawn[:, [i for i in range(shape.size) if i not in places.tolist()]].abs().sum(),
                       torch.zeros((), dtype=torch.float64))  # fmt: skip
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(exact), drawn[:, places].T, upper=False)
    scores = [white.sum() / math.sqrt(white.numel()), (white.square() - 1).sum() / math.sqrt(2 * white.numel())]
    mixed = torch.cov(white) * math.sqrt(count)
    upper = mixed[torch.triu(torch.ones_like(mixed), 1) == 1]
    scores.append((upper.square() - 1).sum() / math.sqrt(2 * len(upper)))
    assert all(abs(float(score)) < 4 for score in scores), scores


def test_kronecker_damping_is_kept(oracle: Any) -> None:
    make, data, _, options = TASKS["regression"]
    model = seeded(make)
    reference = theirs(oracle, model, data, "kfac", "all", **options)
    precision = reference.posterior_precision
    precision.damping = True  # version 0.3 forgets it when it adds the prior
    damped = SimpleNamespace(posterior_precision=precision, mean=reference.mean, model=reference.model)
    found = from_laplace(damped, model).components[0].covariance
    assert_close(covariance(found), precision.to_matrix(exponent=-1).detach(), 1e-7)


def test_an_unfitted_or_foreign_laplace_object_is_refused(oracle: Any) -> None:
    make, data, _, options = TASKS["regression"]
    model = seeded(make)
    with pytest.raises(InputError, match="fit"):
        from_laplace(oracle.Laplace(model, "regression", subset_of_weights="all", hessian_structure="diag"), model)
    with pytest.raises(InputError, match="fitted to"):
        from_laplace(theirs(oracle, model, data, "diagonal", "all", **options), seeded(lambda: perceptron(outputs=5)))


# Shapes


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(numbers(size, size, seed=seed))[0].contiguous()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["both", "left", "right", "none"]), st.integers(0, 99))
def test_kronecker_shapes_are_their_dense_matrices(rows: int, columns: int, sides: str, seed: int) -> None:
    left = orthogonal(rows, seed) if sides in ("both", "left") else None
    right = orthogonal(columns, seed + 1) if sides in ("both", "right") else None
    scale = numbers(rows, columns, seed=seed + 2).exp()
    shape = Kronecker([Block(left, right, scale), Block(None, None, torch.full((2, 1), 0.3, dtype=torch.float64))])
    basis = torch.kron(eye(rows) if left is None else left, eye(columns) if right is None else right)
    block = basis @ torch.diag(scale.reshape(-1).square()) @ basis.T
    matrix = torch.block_diag(block, 0.09 * eye(2))
    points = numbers(2, 3, shape.size, seed=seed + 3)
    exact = MultivariateNormal(torch.zeros(shape.size, dtype=torch.float64), matrix)
    assert torch.allclose(shape.log_density(points), exact.log_prob(points), rtol=1e-8)
    assert torch.allclose(shape.std(), matrix.diagonal().sqrt(), rtol=1e-7)
    again = Kronecker.from_tensors(shape.tensors())
    assert torch.equal(again.log_density(points), shape.log_density(points))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(0, 99))
def test_full_shapes_from_covariance_and_from_precision_agree(size: int, seed: int) -> None:
    root = numbers(size, size, seed=seed)
    matrix = root @ root.T + eye(size)
    one, other = Full.from_covariance(matrix), Full.from_precision(torch.linalg.inv(matrix))
    assert_close(other.factor, one.factor, 1e-8)
    assert torch.equal(other.factor, other.factor.tril())
    points = numbers(2, 3, size, seed=seed + 1)
    exact = MultivariateNormal(torch.zeros(size, dtype=torch.float64), matrix)
    assert torch.allclose(one.log_density(points), exact.log_prob(points), rtol=1e-9)
    assert torch.allclose(one.std(), matrix.diagonal().sqrt(), rtol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_of_a_shape_have_its_covariance(structure: str) -> None:
    model = seeded(perceptron)
    component, _ = fitted(model, (numbers(8, 3), torch.arange(8) % 2), {}, structure=structure)
    count = 5000
    drawn = component.covariance.noise(count, torch.Generator().manual_seed(1))
    exact = covariance(component.covariance)
    wide = exact.diagonal().outer(exact.diagonal())
    scores = (drawn.T @ drawn / count - exact) / ((exact.square() + wide) / count).sqrt()
    assert float(scores.abs().max()) < 5  # 351 entries, p below 1e-3
    assert float((drawn.mean(0) / (exact.diagonal() / count).sqrt()).abs().max()) < 4.5


def test_a_partial_shape_keeps_its_inner_one_through_its_tensors() -> None:
    for inner in (Full(torch.eye(2)), Kronecker([Block(torch.eye(2), None, torch.ones(2, 1))])):
        shape = Partial(inner, torch.tensor([3, 1]), 5)
        again = Partial.from_tensors(shape.tensors())
        assert type(again.inner) is type(inner) and again.size == 5
        offset = torch.arange(5.0)
        assert torch.equal(again.log_density(offset), inner.log_density(torch.tensor([3.0, 1.0])))
        assert again.noise(3, torch.Generator().manual_seed(0))[:, [0, 2, 4]].abs().max() == 0


# What is refused


@pytest.mark.parametrize("options", [
    {"structure": "dense"}, {"layers": "first"}, {"temperature": 0.0}, {"prior_precision": "best"},
    {"prior_precision": -1.0}, {"prior_precision": "per-layer", "structure": "full"},
])  # fmt: skip
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    target = target_of(perceptron(), (torch.zeros(4, 3), torch.zeros(4, 2)), noise=1.0)
    with pytest.raises(InputError, match="found"):
        Laplace(**options).plan(target)


def test_what_has_no_gaussian_is_refused() -> None:
    model, data = seeded(perceptron), (numbers(2, 3), torch.tensor([0, 1]))
    for structure in STRUCTURES:
        if structure != "diagonal":  # two examples bound every single weight, but not every direction
            with pytest.raises(InputError, match="give a prior"):
                fitted(model, data, {"prior": None}, structure=structure)
        with pytest.raises(InputError, match="give a prior"):
            fitted(model, None, {"prior": None}, structure=structure)
    with pytest.raises(InputError, match="no data"):
        fitted(model, None, {}, prior_precision="marginal")
    with pytest.raises(InputError, match="last layer"):
        fitted(model, None, {}, layers="last")
    with pytest.raises(InputError, match="5000"):
        fitted(seeded(lambda: nn.Linear(5000, 2)), (numbers(2, 5000), data[1]), {}, structure="full")
    broken = seeded(perceptron)
    next(iter(broken.parameters())).data.fill_(math.nan)
    for structure in STRUCTURES:
        with pytest.raises(InputError, match="finite curvature"):
            fitted_at(model, broken, data, structure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", ["kfac", "full"])
def test_a_direction_that_rounding_alone_bounds_is_refused(structure: str, dtype: torch.dtype) -> None:
    model = seeded(lambda: nn.Linear(3, 1, bias=False)).to(dtype)
    for seed in range(20):  # the eigenvalue that should be zero is positive about every second time
        data = (numbers(2, 3, seed=seed), numbers(2, 1))
        with pytest.raises(InputError, match="found 1 directions"):
            fitted(model, data, {"prior": None, "noise": 1.0}, structure=structure)


def fitted_at(model: nn.Module, broken: nn.Module, data: Any, structure: str) -> None:
    target = target_of(model, data)
    LaplaceKernel(target, Laplace(structure=structure)).init(networks(target, broken), streams())


def test_float32_networks_stay_float32() -> None:
    model = perceptron()
    for structure in STRUCTURES:
        component, _ = fitted(model, (torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
                                      torch.arange(8) % 2), {}, structure=structure)  # fmt: skip
        assert component.draw_flat(2, torch.Generator().manual_seed(0)).dtype == torch.float32
        assert all(value.dtype == torch.float32 for value in component.covariance.tensors().values())
