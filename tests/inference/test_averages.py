"""SWA and EMA against averages written out by hand, and against SWAG, whose mean SWA is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.functional import refreshed
from onebasin.inference import Draws, StepIndex, Streams
from onebasin.inference.methods.ema import EMAKernel
from onebasin.inference.methods.swa import CyclicalOptimizer, SWAKernel
from onebasin.inference.target import target_of
from tests.judging import numbers, sample, weights_of

X = numbers(24, 3)
Y = X.sum(1, keepdim=True).sin()
RUN: dict[str, Any] = {"noise": 0.5, "compile": False, "chains": 2}
TRAINING: dict[str, Any] = {"epochs": 8, "batch": 6, "optimizer": "sgd", "lr": 0.05}


def net(norm: bool = False) -> nn.Module:
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


def iterates(kernel: Any, steps: int) -> tuple[Any, Tensor]:
    """The last State of a kernel, and the networks after every step (steps, chains, D)."""
    target = kernel.walk.target
    start = Draws(0.3 * numbers(2, target.layout.size, seed=1), target.buffers_for(2), torch.zeros(2))
    streams = Streams(0, [0, 1], 0)
    state, places = kernel.init(start, streams), []
    for step in range(steps):
        state, _ = kernel.step(state, StepIndex(step, steps), streams)
        places.append(state.position)
    return state, torch.stack(places)


def test_swa_is_the_mean_of_the_ends_of_its_cycles() -> None:
    plan = ob.SWA(**TRAINING, every=3, low=0.01).plan(target_of(net(), (X, Y), noise=0.5))
    kernel = plan.stages[-1].kernel
    assert isinstance(kernel, SWAKernel)
    state, places = iterates(kernel, 10)
    torch.testing.assert_close(state.mean, places[2::3].mean(0), rtol=1e-13, atol=1e-13)
    assert state.number.tolist() == [3, 3]
    # 8 epochs of 4 steps, the last quarter in cycles of 3: 3 cycles, of which the last ends with the draw
    assert [stage.steps for stage in plan.stages] == [32 - 9, 6] and (plan.thin, plan.draws) == ((3,), 1)


@pytest.mark.parametrize("low", [None, 0.01])
def test_averaged_networks_are_trained_as_those_before(low: float | None) -> None:
    options: dict[str, Any] = {"weight_decay": 0.1, "nesterov": True, "augment": ("mixup",), "precision": "bf16"}
    data = X.float(), Y.float()
    before, after = ob.SWA(**TRAINING, **options, low=low).plan(target_of(net().float(), data, noise=0.5)).stages
    first, walk = before.kernel, after.kernel.walk
    assert walk.transforms == first.transforms != () and walk.bf16 and first.bf16
    for name in ("name", "momentum", "nesterov", "weight_decay"):
        assert getattr(walk.optimizer, name) == getattr(first.optimizer, name)


def test_the_rate_of_a_cycle_is_that_of_the_paper() -> None:
    optimizer = CyclicalOptimizer("sgd", 0.1, cycle=4, low=0.02)
    found = [optimizer.lr_at(StepIndex(step, 0)) for step in range(8)]
    expected = [(1 - i / 4) * 0.1 + (i / 4) * 0.02 for i in (1, 2, 3, 4)] * 2
    assert found == pytest.approx(expected, rel=1e-12)
    walk = ob.SWA(lr=0.3, step=0.1).plan(target_of(net(), (X, Y), noise=0.5)).stages[-1].kernel.walk.optimizer
    assert [walk.lr_at(StepIndex(step, 0)) for step in (0, 50)] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("norm", "more"),
    [(False, {}), (True, {}), (False, {"weight_decay": 0.1, "nesterov": True, "augment": ("mixup",)})],
)
def test_swa_is_the_mean_of_swag(norm: bool, more: dict[str, Any]) -> None:
    swa = sample(net(norm), (X, Y), "swa", share=0.5, **TRAINING, **more, **RUN)
    swag = ob.SWAG(**{**TRAINING, "epochs": 4}, **more, collect=4)
    posterior = ob.approximate(net(norm), (X, Y), swag, **RUN)
    assert len(swa) == 2 and swa.chain is not None and swa.chain.tolist() == [0, 1]
    for chain, component in enumerate(posterior.components):
        found = posterior.layout.flat(swa.member(chain))
        torch.testing.assert_close(found, component.centre, rtol=1e-12, atol=1e-14)
        for name, value in posterior.buffers[chain].items():
            torch.testing.assert_close(swa.member(chain)[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["swa", "ema"])
def test_statistics_are_those_of_the_average(method: str) -> None:
    model = net(norm=True)
    found = sample(model, (X, Y), method, **TRAINING, **RUN).stacked()
    expected, names = refreshed(model, found, X)
    assert names == ("1.running_mean",)
    torch.testing.assert_close(found["1.running_var"], expected["1.running_var"])
    trained = sample(model, (X, Y), "ensemble", **TRAINING, **RUN).stacked()
    assert float((trained["1.running_var"] - refreshed(model, trained, X)[0]["1.running_var"]).abs().max()) > 1e-3


@pytest.mark.parametrize("bias", ["corrected", "start"])
@pytest.mark.parametrize("decay", [0.0, 0.8, 0.99])
def test_ema_by_hand(bias: str, decay: float) -> None:
    plan = ob.EMA(**TRAINING, ema_decay=decay, bias=bias).plan(target_of(net(), (X, Y), noise=0.5))
    kernel = plan.stages[0].kernel
    assert isinstance(kernel, EMAKernel) and len(plan.stages) == 1 and plan.stages[0].steps == 32
    state, places = iterates(kernel, 12)
    start = 0.3 * numbers(2, state.mean.shape[1], seed=1)
    expected = start if bias == "start" else torch.zeros_like(start)
    for place in places:
        expected = decay * expected + (1 - decay) * place
    expected = expected / (1 - decay**12) if bias == "corrected" else expected
    torch.testing.assert_close(state.mean, expected, rtol=1e-12, atol=1e-14)


def test_ema_trains_as_an_ensemble_does() -> None:
    trained = weights_of(sample(net(), (X, Y), "ensemble", **TRAINING, **RUN))
    assert torch.equal(weights_of(sample(net(), (X, Y), "ema", ema_decay=0.0, **TRAINING, **RUN)), trained)
    several = sample(net(), (X, Y), "ema", ema_decay=0.0, draws=3, every=2, **TRAINING, **RUN)
    again = sample(net(), (X, Y), "ensemble", draws=3, every=2, **TRAINING, **RUN)
    assert torch.equal(weights_of(several), weights_of(again))


@pytest.mark.parametrize("method", ["swa", "ema"])
def test_averages_are_flatter_than_where_training_ended(method: str) -> None:
    """At a rate at which SGD does not settle the average has the lower loss, in every chain."""
    loud = {"epochs": 30, "batch": 4, "optimizer": "sgd", "lr": 0.2, "momentum": 0.0}
    options: dict[str, Any] = {**loud, **RUN, "prior": None}
    own: dict[str, Any] = {"share": 0.5} if method == "swa" else {"ema_decay": 0.95}
    average, end = (sample(net(), (X, Y + 0.5 * numbers(24, 1, seed=3)), word, **options, **more).log_density
                    for word, more in ((method, own), ("ensemble", {})))  # fmt: skip
    assert average is not None and end is not None and bool((average > end).all())


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        (ob.SWA, {"share": 0.0}, "share above 0 and up to 1, found 0.0: give share=0.25"),
        (ob.SWA, {"lr": 0.1, "low": 0.2}, "found 0.2: give low=0.01"),
        (ob.SWA, {"every": 0}, "every to be a whole number from 1"),
        (ob.EMA, {"ema_decay": 1.0}, "ema_decay from 0 to below 1, found 1.0"),
        (ob.EMA, {"bias": "none"}, 'give bias="corrected"'),
        (ob.EMA, {"draws": 2, "lr_schedule": "cosine"}, 'there: use lr_schedule="constant"'),
    ],
)
def test_bad_options_get_a_sentence(method: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        method(**options)
