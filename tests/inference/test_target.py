"""The potential and its gradient, against finite differences and against one network at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

from onebasin.errors import InputError, SpecError
from onebasin.inference.compile import compiled
from onebasin.inference.likelihood import LearnedNoise
from onebasin.inference.seeds import Streams
from onebasin.inference.target import DensityEvaluation, Minibatches, Target, target_of
from tests.judging import numbers, seeded

EXAMPLES = 20


class Tied(nn.Module):
    """An autoencoder that decodes with the weights it encodes with."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class Named(nn.Module):
    """A model that is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(1, 3)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return (self.left(left) * torch.tanh(self.right(right))).sum(1)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    return model


def normed() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model[1].running_mean.copy_(numbers(4, seed=5))
    model[1].running_var.copy_(numbers(4, seed=6).square() + 0.5)
    return model


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    inputs: Any
    goals: Tensor
    law: Callable[[Tensor], Any]  # outputs -> distribution of the goals
    noise: Any = None
    likelihood: str | None = None


ROWS, CLASSES = numbers(EXAMPLES, 3), torch.randint(0, 3, (EXAMPLES,), generator=seeded(1))
PAIR = numbers(EXAMPLES, 2, seed=8)


def normal(outputs: Tensor) -> Normal:
    return Normal(outputs.flatten(1) if outputs.dim() > 1 else outputs[:, None], 0.5)


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        ROWS,
        PAIR,
        lambda out: Normal(out, 0.5),
        0.5,
    ),
    "conv": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3)),
        numbers(EXAMPLES, 1, 3, 3),
        CLASSES,
        lambda out: Categorical(logits=out),
    ),
    "bernoulli": Case(
        lambda: nn.Linear(3, 1),
        ROWS,
        CLASSES.clamp(max=1)[:, None],
        lambda out: Bernoulli(logits=out),
        None,
        "bernoulli",
    ),
    "batch norm": Case(normed, ROWS, PAIR[:, :1], normal, 0.5),
    "tied": Case(Tied, ROWS, numbers(EXAMPLES, 3, seed=9), normal, 0.5),
    "frozen": Case(frozen, ROWS, PAIR[:, 0], normal, 0.5),
    "by keyword": Case(Named, {"left": PAIR, "right": ROWS[:, :1]}, PAIR[:, 0], normal, 0.5),
    "learned noise": Case(
        lambda: LearnedNoise(nn.Linear(3, 2), 2), ROWS, PAIR, lambda out: Normal(out[:, :2], out[:, 2:].exp())
    ),
}
PRIOR = {"*": 2.0, "*bias": 0.7}


def made(name: str, **options: Any) -> tuple[nn.Module, Target, Tensor]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().double()
    data = (case.inputs, case.goals)
    target = target_of(model, data, noise=case.noise, likelihood=case.likelihood, prior=PRIOR, **options)
    return model, target, 0.8 * numbers(3, target.layout.size, seed=11)


def one_by_one(case: Case, model: nn.Module, position: Tensor, training: bool) -> list[Tensor]:
    """U, its gradient, and buffers afterwards, by loading each chain's weights into the module itself."""
    found = []
    for row in position:
        twin = case.model().double()
        twin.load_state_dict(model.state_dict())
        twin.train(training)
        sampled = {name: value for name, value in twin.named_parameters() if value.requires_grad}
        for value, piece in zip(sampled.values(), row.split([v.numel() for v in sampled.values()]), strict=True):
            value.data.copy_(piece.view_as(value))
        outputs = twin(**case.inputs) if isinstance(case.inputs, dict) else twin(case.inputs)
        goals = case.goals.to(torch.float64) if case.goals.is_floating_point() or case.likelihood else case.goals
        law = case.law(outputs)
        potential = -law.log_prob(goals.reshape(law.batch_shape)).sum()
        for name, value in sampled.items():
            scale = 0.7 if name.endswith("bias") else 2.0
            potential = potential - Normal(torch.zeros((), dtype=torch.float64), scale).log_prob(value).sum()
        potential.backward()
        slope = torch.cat([value.grad.flatten() for value in sampled.values()])
        buffers = [buffer.double().flatten() for buffer in twin.buffers()]
        found.append(torch.cat([potential.detach()[None], slope, *buffers]))
    return found


def evaluated(found: DensityEvaluation, target: Target) -> Tensor:
    buffers = [
        found.buffers[name].double().reshape(len(found.gradient), -1)
        for name in target.buffers
        if "running" in name or "batches" in name
    ]
    return torch.cat([found.potential[:, None], found.gradient, *buffers], 1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_potential_and_gradient_are_those_of_each_network_by_itself(name: str, training: bool) -> None:
    model, target, position = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = target(position, target.buffers_for(3), training=training)
    expected = torch.stack(one_by_one(CASES[name], model, position, training))
    torch.testing.assert_close(evaluated(found, target), expected, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()), "the model was touched"


@pytest.mark.parametrize("name", list(CASES))
def test_gradient_is_the_slope_of_the_potential(name: str) -> None:
    _, target, position = made(name)
    size, width = target.layout.size, 1e-5
    moves = width * torch.eye(size, dtype=torch.float64)
    around = torch.cat([position[0] + moves, position[0] - moves])
    potential = target(around, target.buffers_for(len(around))).potential
    slope = (potential[:size] - potential[size:]) / (2 * width)
    found = target(position[:1], target.buffers_for(1)).gradient[0]
    # Central differences err by width^2 |U'''| / 6 + 1e-16 |U| / width, both about 1e-9 here.
    torch.testing.assert_close(found, slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", list(CASES))
def test_pieces_add_up_to_the_whole(name: str) -> None:
    _, whole, position = made(name)
    _, cut, _ = made(name, piece=7)
    a, b = whole(position, whole.buffers_for(3)), cut(position, cut.buffers_for(3))
    for left, right in zip(a[:3], b[:3], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(CASES))
def test_mean_over_the_mini_batches_of_an_epoch_is_the_whole(name: str) -> None:
    _, target, position = made(name)
    whole = target(position, target.buffers_for(3))
    batches, streams = Minibatches(EXAMPLES, 5), Streams(4, range(3), 0)
    rows = [batches.rows(step, streams) for step in range(batches.per_epoch)]
    for chain in range(3):
        assert sorted(torch.cat([part[chain] for part in rows]).tolist()) == list(range(EXAMPLES))
    found = [target(position, target.buffers_for(3), part) for part in rows]
    gradients = torch.stack([one.gradient for one in found])
    torch.testing.assert_close(gradients.mean(0), whole.gradient, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.stack([one.log_likelihood for one in found]).mean(0), whole.log_likelihood)
    assert all(torch.equal(one.log_prior, whole.log_prior) for one in found), "the prior is no estimate"
    assert bool((gradients.std(0) > 1e-6).any()), "all batches are alike"


def test_shared_and_own_mini_batches_agree() -> None:
    _, target, position = made("conv")
    rows = torch.tensor([[0, 3, 5], [7, 7, 2], [19, 1, 4]])
    own = target(position, target.buffers_for(3), rows)
    for chain in range(3):
        shared = target(position, target.buffers_for(3), rows[chain])
        torch.testing.assert_close(own.gradient[chain], shared.gradient[chain], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own.potential[chain], shared.potential[chain], rtol=1e-12, atol=1e-12)


def test_epochs_of_a_chain_differ_and_leave_out_different_examples() -> None:
    batches, streams = Minibatches(10, 4), Streams(0, range(2), 0)
    assert batches.per_epoch == 2
    epochs = [torch.cat([batches.rows(2 * epoch + k, streams) for k in range(2)], 1) for epoch in range(40)]
    assert all(len(set(row.tolist())) == 8 for epoch in epochs for row in epoch)
    assert len({tuple(row.tolist()) for epoch in epochs for row in epoch}) == 80
    seen = torch.bincount(torch.cat(epochs, 1)[0], minlength=10)
    # Each example is left out with probability 1/5 in each of 40 epochs.
    assert bool(((seen - 32).abs() < 4.5 * math.sqrt(40 * 0.2 * 0.8)).all())


def test_compiled_is_eager() -> None:
    _, eager, position = made("batch norm")
    _, quick, _ = made("batch norm", compile=True)
    rows = torch.arange(12).reshape(3, 4)
    for other in (position, position + 1):  # the second call must not remember the first
        a = eager(other, eager.buffers_for(3), rows, training=True)
        b = quick(other, quick.buffers_for(3), rows, training=True)
        torch.testing.assert_close(evaluated(a, eager), evaluated(b, quick), rtol=1e-9, atol=1e-9)
    assert next(iter(quick._functions.values())).compiled, "it was not compiled at all"


def test_half_precision_model_is_computed_in_single() -> None:
    torch.manual_seed(1)
    half = normed().to(torch.bfloat16)
    single = normed()
    single.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    data = (ROWS.to(torch.bfloat16), PAIR[:, :1])
    a, b = (target_of(model, data, noise=0.5) for model in (half, single))
    position = 0.5 * numbers(2, a.layout.size).float()
    assert a.layout.dtype == torch.float32 == a(position, a.buffers_for(2)).gradient.dtype
    for training in (False, True):
        x, y = (one(position, one.buffers_for(2), training=training) for one in (a, b))
        torch.testing.assert_close(x.gradient, y.gradient, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(x.buffers["1.running_var"], y.buffers["1.running_var"])
    assert a.layout.networks(position, a.buffers_for(2))["0.weight"].dtype == torch.bfloat16


def test_energy_differences_in_single_precision_are_good_enough_to_accept_by() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = numbers(5000, 3)
    data = (x, x.sum(1))
    low, high = target_of(model, data, noise=0.5), target_of(model.double(), data, noise=0.5)
    start = 0.3 * numbers(1, low.layout.size).float()
    near = start + 1e-3 * numbers(4, low.layout.size, seed=1).float()
    a = low(near, low.buffers_for(4)).potential - low(start, low.buffers_for(1)).potential
    b = high(near.double(), high.buffers_for(4)).potential - high(start.double(), high.buffers_for(1)).potential
    # 5000 residual terms of size 1e1 with independent rounding errors of 6e-8 each: about 1e-4 in all.
    torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


def test_prior_by_name_and_pattern() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    target = target_of(model, None, prior={"*.weight": 3.0, "1.*": 0.5, "0.bias": float("inf")})
    scales = torch.cat([torch.full((6,), 3.0), torch.full((3,), torch.inf), torch.full((4,), 0.5)]).double()
    torch.testing.assert_close(target.prior.precision, scales**-2)
    position = numbers(2, 13)
    found = target(position, target.buffers_for(2))
    torch.testing.assert_close(found.gradient, position / scales.square())
    proper = scales.isfinite()
    expected = Normal(torch.zeros(10).double(), scales[proper]).log_prob(position[:, proper]).sum(1)
    torch.testing.assert_close(found.log_prior, expected)
    assert target.prior.flat and not found.log_likelihood.any()
    flat = target_of(model, None, prior=None)
    assert not flat(position, flat.buffers_for(2)).gradient.any()


def wrong(**options: Any) -> Callable[[], Target]:
    model, data = options.pop("model", nn.Linear(3, 1)), options.pop("data", (ROWS, PAIR[:, 0]))
    return lambda: target_of(model, data, **{"noise": 0.5, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (wrong(prior=0.0), InputError, "positive standard deviation"),
        (wrong(prior={"weight": -1.0}), InputError, "'weight', found -1.0"),
        (wrong(prior={"*": float("nan")}), InputError, "positive standard deviation"),
        (wrong(prior={"wieght": 1.0}), InputError, "'wieght', which fits none of weight, bias"),
        (wrong(noise=None), InputError, "noise level"),
        (wrong(data=(ROWS, PAIR[:5, 0])), InputError, "one target for each of 20"),
        (wrong(data=(ROWS, PAIR)), InputError, "values per example"),
        (wrong(data=(ROWS / 0, PAIR[:, 0])), InputError, "finite data"),
        (wrong(data=(ROWS, CLASSES), noise=None), InputError, "at least 2 classes"),
        (wrong(data=(ROWS, CLASSES)), InputError, "leave noise out"),
        (wrong(likelihood=lambda out, goal: (out - goal).sum()), InputError, "one log likelihood for each"),
        (wrong(log_density=lambda own: own["bias"].sum()), InputError, "leave them out"),
        (wrong(model=nn.Linear(3, 1).requires_grad_(False)), InputError, "expected parameters to sample"),
        (wrong(model=nn.Linear(3, 1, dtype=torch.complex64)), SpecError, "complex64 under weight"),
    ],
)
def test_what_cannot_be_a_posterior_is_refused(call: Callable[[], Target], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_tensor_in_two_places_is_compiled_as_two() -> None:
    same = numbers(3, 2)
    function = compiled(lambda a, b: (a + 2 * b,), [same, same])
    assert function is not None
    (found,) = function(torch.ones(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(found, torch.ones(3, 2, dtype=torch.float64))
