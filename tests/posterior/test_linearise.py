"""Linearised predictives against closed forms, Jacobians by hand, laplace-torch, and draws."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import onebasin as ob
from onebasin.errors import InputError
from onebasin.inference import from_laplace
from onebasin.inference.target import ParameterLayout
from onebasin.posterior import Block, Covariance, Diagonal, Full, Gaussian, Kronecker, LowRank, Partial, Posterior
from tests.judging import assert_mean, assert_standard, numbers
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def perceptron() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def orthonormal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(numbers(size, size, seed=seed))[0]


def covariances(sizes: list[tuple[int, int]], last: list[int]) -> dict[str, Covariance]:
    """One of every kind, for tensors of these sizes as matrices; `last` are the places of some of the weights."""
    size = sum(rows * columns for rows, columns in sizes)
    blocks = [
        Block(orthonormal(p, 1), orthonormal(q, 2) if q > 1 else None, 0.1 + numbers(p, q, seed=3).abs())
        for p, q in sizes
    ]
    scale = 0.1 + numbers(size, seed=4).abs()
    small = Full.from_covariance(torch.eye(len(last)).double() + numbers(len(last), 1, seed=5).square().sum())
    few = Kronecker([Block(None, None, scale[: len(last), None])])
    places = torch.tensor(last)
    return {
        "diagonal": Diagonal(scale),
        "low-rank": LowRank(scale, numbers(size, 3, seed=6)),
        "full": Full.from_covariance(torch.diag(scale) + numbers(size, size, seed=7) @ numbers(size, size, seed=7).T),
        "kronecker": Kronecker(blocks),
        "partial": Partial(small, places, size),
        "partial kronecker": Partial(few, places, size),
    }


KINDS = ("diagonal", "low-rank", "full", "kronecker", "partial", "partial kronecker")
SIZES, LAST = [(4, 3), (4, 1), (2, 4), (2, 1)], list(range(16, 26))  # of the perceptron: weights of its last layer


def posterior_of(model: nn.Module, *covariances: Covariance, shift: float = 0.0) -> Posterior:
    layout = ParameterLayout.of(model)
    centre = layout.join({name: value.detach() for name, value in model.named_parameters()})
    gaussians = [Gaussian(centre + number * shift, own) for number, own in enumerate(covariances)]
    return Posterior.equal(gaussians, layout, [layout.buffers_of(model)] * len(gaussians))


def jacobian(model: nn.Module, inputs: Tensor) -> Tensor:
    """(examples, outputs, weights), one backward pass for each output."""
    rows = []
    for example in inputs:
        outputs = model(example[None]).reshape(-1)
        each = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in outputs]
        rows.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in each]))
    return torch.stack(rows)


def matrix(covariance: Covariance) -> Tensor:
    """Read off the density alone: log p is quadratic, and its Hessian is minus the precision."""
    units, size = torch.eye(covariance.size).double(), covariance.size
    ends = covariance.log_density(units) - covariance.log_density(torch.zeros(size).double())
    both = covariance.log_density(units[:, None] + units[None]) - covariance.log_density(torch.zeros(size).double())
    return torch.linalg.inv(ends[:, None] + ends[None] - both)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_the_root_of_a_covariance_is_one(kind: str) -> None:
    covariance = covariances(SIZES, LAST)[kind]
    root = covariance.times_root(torch.eye(covariance.size).double())
    torch.testing.assert_close(root @ root.T, matrix(covariance), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(torch.linalg.vector_norm(root, dim=1), covariance.std(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_output_gaussian_by_hand(kind: str) -> None:
    model, inputs = perceptron(), numbers(70, 3)  # two pieces of examples
    covariance = covariances(SIZES, LAST)[kind]
    found = ob.linearise(model, posterior_of(model, covariance), inputs, covariance=True)
    root = covariance.times_root(torch.eye(26).double())
    slopes = jacobian(model, inputs)
    expected = slopes @ root @ root.T @ slopes.mT
    assert found.covariance is not None and found.mean.shape == found.std.shape == (1, 70, 2)
    torch.testing.assert_close(found.mean[0], model(inputs).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.covariance[0], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.std[0], expected.diagonal(dim1=1, dim2=2).sqrt(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_model_is_its_own_linearisation(kind: str) -> None:
    """The same draws then predict the same, and the Gaussian is the conjugate posterior predictive."""
    model, inputs = seeded(lambda: nn.Linear(3, 4)), numbers(6, 3)
    posterior = posterior_of(model, covariances([(4, 3), (4, 1)], list(range(12, 16)))[kind])
    options: dict[str, Any] = {"quantity": "values", "draws": 5, "seed": 3, "chunk": 2, "batch": 4}
    drawn = ob.predict(model, posterior, inputs, **options)
    torch.testing.assert_close(ob.predict(model, posterior, inputs, linearised=True, **options), drawn)
    chances = ob.predict(model, posterior, inputs, linearised="sampled", draws=5, seed=3)
    torch.testing.assert_close(chances, drawn.softmax(2))


def test_without_spread_it_is_the_network_and_with_little_nearly_a_drawn_one() -> None:
    for name in ("tied_autoencoder_tanh", "resnet_bn"):
        model, inputs = CASES[name].build().double(), CASES[name].inputs().double()
        size = ParameterLayout.of(model).size
        for width, tolerance in ((0.0, 1e-12), (1e-6, 1e-4)):
            posterior = posterior_of(model, Diagonal(torch.full((size,), width).double()))
            options: dict[str, Any] = {"quantity": "values", "draws": 3, "seed": 1}
            centre = ob.predict(
                model,
                posterior_of(model, Diagonal(torch.zeros(size).double())),
                inputs,
                statistics=False,
                quantity="values",
                draws=1,
            )
            found = ob.predict(model, posterior, inputs, linearised=True, **options) - centre
            expected = ob.predict(model, posterior, inputs, statistics=False, **options) - centre
            assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max() + (width == 0))
            assert (float(expected.abs().max()) > 1e-8) == (width > 0)


def test_draws_have_the_moments_of_the_gaussian_and_are_functions() -> None:
    model, inputs = perceptron(), numbers(3, 3)
    posterior = posterior_of(model, covariances(SIZES, LAST)["kronecker"])
    drawn = ob.predict(model, posterior, inputs, quantity="values", linearised=True, draws=2000, seed=1)
    found = ob.linearise(model, posterior, inputs, covariance=True)
    assert found.covariance is not None
    for example in range(3):
        root = torch.linalg.cholesky(found.covariance[0, example])
        assert_standard(
            torch.linalg.solve_triangular(root, (drawn[:, example] - found.mean[0, example]).T, upper=False).T
        )
    slopes, root = jacobian(model, inputs), posterior.components[0].covariance.times_root(torch.eye(26).double())
    between = (slopes[0] @ root @ root.T @ slopes[1].T)[0, 0]  # a member is one function of all examples
    gaps = drawn[:, :2, 0] - found.mean[0, :2, 0]
    assert_mean(gaps[:, 0] * gaps[:, 1], float(between))


def test_components_are_linearised_each_at_its_own_centre() -> None:
    model, inputs = perceptron(), numbers(5, 3)
    given = covariances(SIZES, LAST)
    mixture = posterior_of(model, given["diagonal"], given["full"], shift=0.3)
    found = ob.linearise(model, mixture, inputs)
    twin = perceptron()
    with torch.no_grad():
        for value in twin.parameters():
            value.add_(0.3)
    for number, (own, kind) in enumerate(((model, "diagonal"), (twin, "full"))):
        alone = ob.linearise(own, posterior_of(own, given[kind]), inputs)
        torch.testing.assert_close(found.mean[number], alone.mean[0])
        torch.testing.assert_close(found.std[number], alone.std[0])
    mean, std = found.moments
    torch.testing.assert_close(mean, found.mean.mean(0))
    torch.testing.assert_close(std.square(), (found.mean.square() + found.std.square()).mean(0) - mean.square())
    chances = ob.predict(model, mixture, inputs, linearised="probit")
    torch.testing.assert_close(chances, found.probit.softmax(2))
    torch.testing.assert_close(ob.predict(model, mixture, inputs, linearised="probit", average=True), chances.mean(0))
    pooled = ob.predict(model, mixture, inputs, linearised=True, draws=4, seed=2, quantity="values")
    same = ob.predict(model, mixture, inputs, linearised=True, draws=4, seed=2, quantity="values", chunk=1, batch=2)
    torch.testing.assert_close(pooled, same)


# --- laplace-torch ---


@pytest.fixture(scope="module")
def oracle() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, about torch.jit in a package it imports
        return pytest.importorskip("laplace")


@pytest.mark.parametrize("layers", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_laplace_torch_predicts_the_same(oracle: Any, task: str, structure: str, layers: str) -> None:
    model, x, new = perceptron(), numbers(15, 3), numbers(8, 3, seed=9)
    y = numbers(15, 2, seed=1) if task == "regression" else torch.arange(15) % 2
    fitted = oracle.Laplace(model, task, subset_of_weights=layers, hessian_structure=structure, prior_precision=4.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # it multiplies with an identity matrix of the default dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's forward mode, about torch.jit
            fitted.fit(DataLoader(TensorDataset(x, y), batch_size=15))
            mean, variance = fitted._glm_predictive_distribution(new)
            probit = None if task == "regression" else fitted(new, pred_type="glm", link_approx="probit")
    finally:
        torch.set_default_dtype(before)
    posterior = from_laplace(fitted, model)
    found = ob.linearise(model, posterior, new, covariance=True)
    assert found.covariance is not None
    torch.testing.assert_close(found.mean[0], mean.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance[0], variance.detach(), rtol=1e-6, atol=1e-9)
    if probit is not None:
        torch.testing.assert_close(
            ob.predict(model, posterior, new, linearised="probit")[0], probit.detach(), rtol=1e-7, atol=1e-9
        )


# --- evaluate ---


def test_values_are_evaluated_by_the_exact_gaussian() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))), numbers(30, 3)
    y = x.sum(1, keepdim=True)
    posterior = ob.approximate(
        model, (x, y), ob.Laplace(epochs=5, structure="full"), noise=0.4, chains=2, compile=False
    )
    found = ob.evaluate(model, posterior, (x, y), noise=0.4, linearised=True, n_resamples=20)
    outputs = ob.linearise(model, posterior, x)
    each = Normal(outputs.mean, (outputs.std.square() + 0.16).sqrt()).log_prob(y)
    expected = -(each.logsumexp(0) - torch.tensor(2.0).log()).mean()
    assert found.in_distribution["nll"].value == pytest.approx(float(expected), rel=1e-9)
    assert found.members == 2 and found.settings["linearised"] is True
    drawn = ob.evaluate(model, posterior, (x, y), noise=0.4, n_resamples=20, draws=10)
    assert (
        drawn.in_distribution["nll"].value != found.in_distribution["nll"].value and "linearised" not in drawn.settings
    )
    two = seeded(lambda: nn.Linear(3, 2))  # several values of an example are correlated: drawn, as those of a network
    pair = ob.approximate(two, (x, numbers(30, 2)), ob.Laplace(epochs=5, structure="full"), noise=0.4, compile=False)
    options: dict[str, Any] = {"noise": 0.4, "n_resamples": 20, "draws": 9}
    known, alike = (ob.evaluate(two, pair, (x, numbers(30, 2)), linearised=own, **options) for own in (False, True))
    assert alike.members == 9
    assert alike.in_distribution["nll"].value == pytest.approx(known.in_distribution["nll"].value, rel=1e-9)


def test_classes_are_evaluated_in_both_forms() -> None:
    model, x = perceptron(), numbers(40, 3)
    y = (x.sum(1) > 0).long()
    posterior = ob.approximate(model, (x, y), ob.Laplace(epochs=20, lr=0.05), chains=2, compile=False)
    found = ob.evaluate(
        model, posterior, (x, y), linearised="probit", ood=numbers(20, 3), reference=posterior, n_resamples=20, draws=7
    )
    chances = ob.predict(model, posterior, x, linearised="probit", average=True)
    assert found.in_distribution["nll"].value == pytest.approx(float(-chances[range(40), y].log().mean()), rel=1e-9)
    assert found.members == 2 and set(found.reference) == {"agreement", "total_variation"}
    sampled = ob.evaluate(model, posterior, (x, y), linearised=True, n_resamples=20, draws=7)
    mean = ob.predict(model, posterior, x, linearised=True, draws=7, average=True)
    assert sampled.members == 7
    assert sampled.in_distribution["nll"].value == pytest.approx(float(-mean[range(40), y].log().mean()), rel=1e-9)


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum().item() > 0 else x


def test_what_cannot_be_linearised_is_refused() -> None:
    model, x = perceptron(), numbers(5, 3)
    given = covariances(SIZES, LAST)["diagonal"]
    posterior = posterior_of(model, given)
    networks = ob.Population.from_models([model])
    with pytest.raises(InputError, match=r"expected a Posterior, whose Gaussians .* found Population: fit one"):
        ob.predict(model, networks, x, linearised=True)
    with pytest.raises(InputError, match="found statistics= with linearised="):
        ob.predict(model, posterior, x, linearised=True, statistics=x)
    with pytest.raises(InputError, match='or "probit", found \'probitt\': give "sampled"'):
        ob.predict(model, posterior, x, linearised="probitt")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"take mean and std of ob.linearise"):
        ob.predict(model, posterior, x, linearised="probit", quantity="values")
    with pytest.raises(InputError, match="the probit form is one of classes"):
        ob.evaluate(model, posterior, (x, numbers(5, 2)), noise=0.1, linearised="probit")
    uneven = Posterior(
        (*posterior.components, *posterior.components),
        torch.tensor([0.3, 0.7]).double(),
        posterior.layout,
        posterior.buffers * 2,
    )
    with pytest.raises(InputError, match="components of equal weight"):
        ob.predict(model, uneven, x, linearised="probit")
    branching = posterior_of(Branching(), Diagonal(torch.ones(1)))
    with pytest.raises(InputError, match="found Branching, where torch has none"):
        ob.linearise(Branching(), branching, torch.ones(2, 1))
