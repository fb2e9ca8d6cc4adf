"""Ensembles: every member is trained as torch would train it, on the same batches."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.inference.kernel import StepIndex
from onebasin.inference.methods.ensemble import Ensemble
from onebasin.inference.seeds import Streams
from onebasin.inference.start import fresh
from onebasin.inference.target import Minibatches
from onebasin.inference.training import Optimizer
from tests.judging import Conjugate, drawn, numbers, sample, weights_of

EXAMPLES, BATCH, EPOCHS = 20, 6, 8
X = numbers(EXAMPLES, 3)
Y = torch.sin(X.sum(1, keepdim=True))
NOISE, SCALE = 0.5, 2.0


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def plain_loop(model: nn.Module, seed: int, chain: int, optimiser: Any, schedule: Any = None) -> nn.Module:
    """What everybody writes: mean loss, weight decay for the Gaussian prior, an optimiser of torch."""
    model.load_state_dict(fresh(model, seed, chain))
    model.train()
    steps = optimiser(model.parameters())
    rates = schedule(steps) if schedule else None
    batches = Minibatches(EXAMPLES, BATCH)
    for step in range(EPOCHS * batches.per_epoch):
        rows = batches.rows(step, Streams(seed, [chain], 0))[0]
        loss = 0.5 * ((model(X[rows]) - Y[rows]) / NOISE).square().mean()
        loss = loss + sum(0.5 * (value / SCALE).square().sum() for value in model.parameters()) / EXAMPLES
        steps.zero_grad()
        loss.backward()
        steps.step()
        if rates:
            rates.step()
    return model


PER_EPOCH = EXAMPLES // BATCH


def warm_up(steps: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LinearLR:
    """Two epochs, from one share of the rate in the first step to all of it in the last."""
    count = 2 * PER_EPOCH
    return torch.optim.lr_scheduler.LinearLR(steps, 1 / count, total_iters=count - 1)


class DecayedAdam(torch.optim.Adam):
    """L2 in the gradient as in Adam of torch, and besides that weights shrink as in AdamW."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            before = [value.clone() for value in self.param_groups[0]["params"]]
            super().step(closure)
            for value, old in zip(self.param_groups[0]["params"], before, strict=True):
                value -= self.param_groups[0]["lr"] * 0.1 * old


TRAININGS: dict[str, tuple[dict[str, Any], Callable[..., Any], Any]] = {
    "adam": ({"lr": 0.02}, lambda own: torch.optim.Adam(own, 0.02), None),
    "adamw": ({"lr": 0.02, "decay": 0.1}, lambda own: torch.optim.AdamW(own, 0.02, weight_decay=0.1), None),
    "sgd": ({"optimizer": "sgd", "lr": 0.02}, lambda own: torch.optim.SGD(own, 0.02, momentum=0.9), None),
    "nesterov": (
        {"optimizer": "sgd", "lr": 0.02, "momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
        lambda own: torch.optim.SGD(own, 0.02, momentum=0.8, nesterov=True, weight_decay=0.05),
        None,
    ),
    "adam with L2": (
        {"lr": 0.02, "weight_decay": 0.05},
        lambda own: torch.optim.Adam(own, 0.02, weight_decay=0.05),
        None,
    ),
    "both decays": (
        {"lr": 0.02, "weight_decay": 0.05, "decay": 0.1},
        lambda own: DecayedAdam(own, 0.02, weight_decay=0.05),
        None,
    ),
    "milestones": (
        {"optimizer": "sgd", "lr": 0.05, "lr_schedule": "milestones", "milestones": (2, 5), "gamma": 0.3},
        lambda own: torch.optim.SGD(own, 0.05, momentum=0.9),
        lambda steps: torch.optim.lr_scheduler.MultiStepLR(steps, [2 * PER_EPOCH, 5 * PER_EPOCH], 0.3),
    ),
    "warm-up and milestones": (
        {"lr": 0.05, "lr_schedule": "milestones", "milestones": (1, 5), "lr_warmup": 2},
        lambda own: torch.optim.Adam(own, 0.05),
        lambda steps: torch.optim.lr_scheduler.ChainedScheduler(
            [warm_up(steps), torch.optim.lr_scheduler.MultiStepLR(steps, [PER_EPOCH, 5 * PER_EPOCH])]
        ),
    ),
    "warm-up and cosine": (
        {"optimizer": "sgd", "lr": 0.05, "lr_schedule": "cosine", "lr_warmup": 2},
        lambda own: torch.optim.SGD(own, 0.05, momentum=0.9),
        lambda steps: torch.optim.lr_scheduler.SequentialLR(
            steps,
            [warm_up(steps), torch.optim.lr_scheduler.CosineAnnealingLR(steps, (EPOCHS - 2) * PER_EPOCH)],
            [2 * PER_EPOCH],
        ),
    ),
    "cosine": (
        {"optimizer": "sgd", "lr": 0.02, "momentum": 0.5, "lr_schedule": "cosine"},
        lambda own: torch.optim.SGD(own, 0.02, momentum=0.5),
        lambda steps: torch.optim.lr_scheduler.CosineAnnealingLR(steps, EPOCHS * (EXAMPLES // BATCH)),
    ),
}


@pytest.mark.parametrize("make", [plain, normed])
@pytest.mark.parametrize("name", list(TRAININGS))
def test_a_member_is_what_a_plain_loop_of_torch_trains(name: str, make: Callable[[], nn.Module]) -> None:
    options, optimiser, schedule = TRAININGS[name]
    found = sample(
        make(), (X, Y), "ensemble", chains=2, seed=7, noise=NOISE, prior=SCALE, epochs=EPOCHS, batch=BATCH, **options
    )
    for chain in range(2):
        expected = plain_loop(make(), 7, chain, optimiser, schedule)
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(
                found.tensor(key)[chain], value, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: k + m
            )
        likelihood = torch.distributions.Normal(expected.eval()(X), NOISE).log_prob(Y).sum()
        law = torch.distributions.Normal(torch.zeros(()).double(), SCALE)
        before = sum(law.log_prob(value).sum() for value in expected.parameters())
        torch.testing.assert_close(found.log_density[chain], (likelihood + before).detach(), rtol=1e-9, atol=1e-9)


def test_members_differ_and_do_not_know_of_each_other() -> None:
    options: dict[str, Any] = {"noise": NOISE, "epochs": 3, "batch": 5, "seed": 2}
    three, one = (sample(plain(), (X, Y), "ensemble", chains=modes, chains_per_batch=1, **options) for modes in (3, 1))
    rows = weights_of(three)
    assert torch.equal(rows[:1], weights_of(one))
    assert all(float((rows[i] - rows[j]).abs().max()) > 0.01 for i, j in itertools.combinations(range(3), 2))


def test_the_model_itself_stays_as_it_is() -> None:
    model = normed()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    sample(model, (X, Y), "ensemble", chains=2, noise=NOISE, epochs=2)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()) and model.training
    assert torch.equal(state, torch.get_rng_state()), "the global generator was moved"
    assert all(value.requires_grad and value.grad is None for value in model.parameters())


def test_one_member_is_the_mode_of_the_posterior() -> None:
    problem = Conjugate.of(12)
    options = {"epochs": 200, "batch": None, "optimizer": "sgd", "lr": 0.2, "momentum": 0.5}
    found = drawn(problem.model, problem.data, "ensemble", chains=2, **problem.density, **options)
    torch.testing.assert_close(found, problem.mean.expand(2, 4), rtol=0, atol=1e-6)
    flat = drawn(problem.model, problem.data, "ensemble", noise=problem.noise, prior=None, **options)
    least_squares = torch.linalg.lstsq(problem.design, problem.y[:, None]).solution[:, 0]
    torch.testing.assert_close(flat[0], least_squares, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_checkpoints_are_longer_trainings(optimiser: str) -> None:
    options: dict[str, Any] = {"noise": NOISE, "batch": 10, "optimizer": optimiser, "lr": 0.02}
    several = drawn(plain(), (X, Y), "ensemble", epochs=10, draws=3, every=10, **options)
    for place, epochs in enumerate((10, 20, 30)):
        # Blocks of random numbers begin elsewhere, but training takes none from them: orders are those of the epoch.
        assert torch.equal(several[place : place + 1], drawn(plain(), (X, Y), "ensemble", epochs=epochs, **options))


def test_snapshots_share_the_epochs_in_cycles_of_a_cosine() -> None:
    problem = Conjugate.of(20)
    plan = Ensemble(epochs=12, batch=5, draws=3, snapshots=True, lr=0.1).plan(problem.target)
    assert plan.thin == (16,) and plan.draws == 3
    optimizer = plan.stages[-1].kernel.optimizer
    rates = [optimizer.lr_at(StepIndex(step, 0)) for step in range(48)]
    assert (
        rates[:16] == rates[16:32] == rates[32:] and rates[0] == pytest.approx(0.1) and rates[8] == pytest.approx(0.05)
    )
    found = drawn(
        problem.model, problem.data, "ensemble", epochs=12, batch=5, draws=3, snapshots=True, **problem.density
    )
    assert len(found) == 3 and float((found[0] - found[1]).abs().max()) > 1e-3


def nowhere(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets above 1 have no likelihood: their mini-batches have no gradient."""
    return torch.where(targets[:, 0] > 1, torch.nan, -0.5 * (outputs - targets).square()[:, 0])


def test_batches_without_a_gradient_are_passed_over() -> None:
    goals = torch.where(torch.arange(EXAMPLES)[:, None] == 3, 2.0, Y)
    options = {"likelihood": nowhere, "epochs": 30, "batch": 1, "lr": 0.02}
    found = drawn(nn.Linear(3, 1).double(), (X, goals), "ensemble", **options)[0]
    kept = torch.arange(EXAMPLES) != 3
    assert float((X[kept] @ found[:3] + found[3] - Y[kept, 0]).square().mean()) < float(Y[kept].var())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "rmsprop"}, "adam"),
        ({"lr_schedule": "linear"}, 'lr_schedule "constant", "cosine" or "milestones"'),
        ({"lr_schedule": "milestones"}, r"give lr_schedule=\"milestones\", milestones=\(25, 50\)"),
        ({"milestones": (5,)}, "expected milestones with lr_schedule"),
        ({"lr_schedule": "milestones", "milestones": (5, 3)}, "expected increasing milestones"),
        ({"lr_schedule": "milestones", "milestones": 5}, "expected a tuple of epochs"),
        ({"lr_schedule": "milestones", "milestones": (0, 3)}, "milestones to be a whole number from 1 on"),
        ({"nesterov": True}, "expected SGD with momentum for nesterov=True, found 'adam'"),
        ({"nesterov": True, "optimizer": "sgd", "momentum": 0.0}, "with momentum 0.0"),
        ({"weight_decay": -0.1}, "expected weight_decay >= 0 and gamma > 0"),
        ({"gamma": 0.0}, "expected weight_decay >= 0 and gamma > 0"),
        ({"lr_warmup": -1}, "lr_warmup to be a whole number from 0 on"),
        ({"precision": "fp16"}, 'expected precision "full" or "bf16"'),
        ({"snapshots": True, "draws": 2, "lr_warmup": 3}, "expected snapshots with their own cosine cycles"),
        ({"lr": 0.0}, "positive learning rate"),
        ({"epochs": -1}, "epochs to be a whole number from 0 on"),
        ({"draws": 0}, "draws to be a whole number from 1 on"),
        ({"batch": 0}, "batch to be a whole number from 1 on"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ensemble(**options).plan(Conjugate.of(12).target)


def test_cosine_goes_from_the_rate_to_zero() -> None:
    rates = [Optimizer(lr=0.3, schedule="cosine").lr_at(StepIndex(step, 10)) for step in range(12)]
    assert rates[0] == pytest.approx(0.3) and rates[5] == pytest.approx(0.15) and rates[10] == rates[11] == 0
