"""Monte Carlo batch norm against statistics computed by hand, and against torch's own training mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.inference import Draws, Streams
from onebasin.inference.methods.mc_batch_norm import MCBatchNormKernel
from onebasin.inference.seeds import generator
from onebasin.inference.target import target_of
from tests.judging import numbers, sample, weights_of

X = numbers(30, 3)
Y = X.sum(1, keepdim=True)
RUN: dict[str, Any] = {"noise": 0.5, "compile": False, "chains": 2}
TRAINING: dict[str, Any] = {"epochs": 3, "batch": 10, "lr": 0.01}


def net(momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2),
        nn.Tanh(), nn.Linear(2, 1),
    ).double()  # fmt: skip


def by_hand(model: nn.Sequential, batch: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance of what goes into each norm, each batch normalised by its own."""
    found, hidden = {}, batch
    for name, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm1d):
            mean, variance = hidden.mean(0), hidden.var(0)
            found[f"{name}.running_mean"], found[f"{name}.running_var"] = mean, variance
            hidden = (hidden - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias
        else:
            hidden = layer(hidden)
    return {name: value.detach() for name, value in found.items()}


def rows_of(seed: int, chain: int, draw: int, size: int = 10) -> Tensor:
    """The batch of a draw, whose random stream is part of what a seed means."""
    stream = generator(seed, "batch", "chain", chain, "block", f"batch norm 1 draw {draw}")
    return torch.randperm(30, generator=stream)[:size]


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")  # a norm without momentum counts its batches
@pytest.mark.parametrize("mode", ["replace", "update"])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_a_draw_has_the_statistics_of_one_batch(mode: str, momentum: float | None) -> None:
    model = net(momentum)
    draws = sample(model, (X, Y), "mcbatchnorm", draws=3, mode=mode, seed=7, **TRAINING, **RUN)
    trained = sample(model, (X, Y), "ensemble", seed=7, **TRAINING, **RUN)
    assert draws.chain is not None and draws.chain.tolist() == [0, 0, 0, 1, 1, 1]
    for number, network in enumerate(draws):
        chain, draw = divmod(number, 3)
        ended = trained.member(chain)
        model.load_state_dict(ended)
        expected = by_hand(model, X[rows_of(7, chain, draw)])
        for name, value in network.items():
            if name not in expected:
                assert torch.equal(value, ended[name]), name
                continue
            share = 1.0
            if mode == "update":  # torch averages all batches alike without a momentum: nine of training, and this one
                own = momentum if name.startswith("1.") else 0.1
                share = 1 / 10 if own is None else own
            torch.testing.assert_close(
                value, (1 - share) * ended[name] + share * expected[name], rtol=1e-10, atol=1e-12
            )


def test_on_its_own_batch_a_replaced_norm_does_what_training_mode_does() -> None:
    """But for the unbiased variance, which torch stores, and the biased one, which it normalises by."""
    size, model = 20, net()
    draws = sample(model, (X, Y), "mcbatchnorm", draws=1, examples=size, **TRAINING, **RUN)
    batch = X[rows_of(0, 0, 0, size)]
    model.load_state_dict(draws.member(0))
    inside = model[:1](batch)
    found, expected = model.eval()[:2](batch), model.train()[:2](batch)
    centre = model[1].bias
    torch.testing.assert_close((found - centre) * (size / (size - 1)) ** 0.5, expected - centre, rtol=1e-3, atol=1e-6)
    assert inside.shape == (20, 4)


def test_draws_differ_and_spread_more_for_small_batches() -> None:
    small, large = (
        sample(net(), (X, Y), "mcbatchnorm", draws=40, examples=examples, **TRAINING, **RUN).tensor("1.running_mean")
        for examples in (3, 25)
    )
    # Of n out of N rows without repetition the mean has variance s^2 / n (1 - n / N): here 0.3 against 0.0067 s^2.
    assert bool((small[:40].var(0) > 5 * large[:40].var(0)).all())
    whole = sample(net(), (X, Y), "mcbatchnorm", draws=2, examples=30, **TRAINING, **RUN)
    torch.testing.assert_close(whole.tensor("1.running_mean")[0], whole.tensor("1.running_mean")[1])


def test_frozen_norms_stay_and_densities_are_those_of_the_draws() -> None:
    model = net()
    model[1].requires_grad_(False)
    draws = sample(model, (X, Y), "mcbatchnorm", draws=2, **TRAINING, **RUN)
    assert bool((draws.tensor("1.running_mean") == model[1].running_mean).all())
    assert not torch.equal(draws.tensor("4.running_mean")[0], draws.tensor("4.running_mean")[1])
    target = target_of(model, (X, Y), noise=0.5)
    state = draws.stacked()
    position = target.layout.join(state)
    buffers = {name: state[name] for name in target.layout.buffer_names}
    assert draws.log_density is not None
    torch.testing.assert_close(target.log_density(position, buffers), draws.log_density)


def test_convolutions_and_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2)

        def forward(self, image: Tensor, extra: Tensor) -> Tensor:
            return self.head(torch.cat([self.norm(self.conv(image)).relu().mean((2, 3)), extra], 1))

    image, extra = numbers(30, 1, 5, 5).float(), numbers(30, 1).float()
    data = ({"image": image, "extra": extra}, torch.arange(30) % 2)
    draws = sample(Two(), data, "mcbatchnorm", draws=1, compile=False, **TRAINING)
    own = Two()
    own.load_state_dict(draws.member(0))
    hidden = own.conv(image[rows_of(0, 0, 0)]).detach()
    torch.testing.assert_close(draws.member(0)["norm.running_mean"], hidden.mean((0, 2, 3)))
    torch.testing.assert_close(draws.member(0)["norm.running_var"], hidden.transpose(0, 1).flatten(1).var(1))


def test_the_kernel_does_not_move() -> None:
    target = target_of(net(), (X, Y), noise=0.5)
    kernel = ob.MCBatchNorm(**TRAINING).plan(target).stages[-1].kernel
    assert isinstance(kernel, MCBatchNormKernel) and kernel.examples == 10
    start = Draws(numbers(2, target.layout.size), target.buffers_for(2), torch.zeros(2))
    state = kernel.init(start, Streams(0, [0, 1], 0))
    assert torch.equal(kernel.draw(state, Streams(0, [0, 1], "draw 0")).position, start.position)


@pytest.mark.parametrize(
    ("model", "data", "options", "sentence"),
    [
        (net(), None, {}, "mcbatchnorm needs data"),
        (nn.Linear(3, 1).double(), (X, Y), {}, "found none in Linear: use another method"),
        (net().requires_grad_(False).append(nn.Linear(1, 1).double()), (X, Y), {}, "that training moves, found none"),
        (net(), (X, Y), {"mode": "mean"}, "found 'mean': give mode=\"replace\""),
        (net(), (X, Y), {"examples": 1}, "examples to be a whole number from 2 on"),
    ],
)
def test_what_cannot_be_done_is_refused(model: nn.Module, data: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ob.sample(model, data, ob.MCBatchNorm(**options), noise=0.5 if data else None, compile=False)


@pytest.mark.parametrize("method", ["mcbatchnorm", "swa", "ema"])
def test_an_interrupted_run_goes_on_to_the_same_end(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in training, and again while averaging or drawing; every block is a checkpoint."""
    monkeypatch.setattr("onebasin.inference.driver._CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("onebasin.inference.driver._SECONDS", 0.0)
    monkeypatch.setattr("onebasin.inference.driver.BLOCK", 2)
    options: dict[str, Any] = {**TRAINING, **RUN, "epochs": 6, "draws": 3}
    whole = sample(net(), (X, Y), method, **options)
    for stop in (6, 16):

        def interrupt(done: int, total: int, text: str, stop: int = stop) -> None:
            if done >= stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sample(net(), (X, Y), method, path=tmp_path / "run", progress=interrupt, **options)
    found = sample(net(), (X, Y), method, path=tmp_path / "run", **options)
    assert sorted(found.chain.tolist()) == sorted(whole.chain.tolist())  # type: ignore[union-attr]
    order = found.chain.argsort(stable=True)  # type: ignore[union-attr]
    assert torch.equal(weights_of(found)[order], weights_of(whole))
