"""Whether a training had ended: the trend of its loss is judged, reported, kept over interruptions, and said aloud."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import nn

from onebasin.data.load import load
from onebasin.examples.small import digits_mlp
from onebasin.inference.diagnostics import LEAST_FALL, Tail, unfinished
from onebasin.inference.kernel import Stage, StepIndex
from onebasin.inference.target import Minibatches
from onebasin.inference.training import Optimizer
from tests.judging import approximate, sample

Run = Callable[..., tuple[int, str, str]]
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5])


class Kernel:
    """Nothing but a schedule."""

    def __init__(self, schedule: str) -> None:
        self.optimizer = Optimizer(schedule=schedule)
        self.minibatches = Minibatches(50, 10)


def tail_of(steps: int, schedule: str = "constant") -> Tail:
    return Tail.of(Stage("training", Kernel(schedule), steps, optimum=True))  # type: ignore[arg-type]


def judged(tail: Tail, losses: np.ndarray) -> dict[str, torch.Tensor]:
    """The trend of losses (chains, steps), told in blocks of 20 as the loop does."""
    told = None
    for start in range(0, losses.shape[1], 20):
        block = [{"loss": torch.from_numpy(row)} for row in losses[:, start : start + 20].T.copy()]
        told = tail.added(told, start, block)
    assert told is not None
    return dict(tail.trend(told))


@pytest.mark.parametrize(
    ("schedule", "steps", "bins"),
    [("constant", 1000, 10), ("cosine", 1000, 10), ("constant", 60, 6), ("cosine", 9, 9), ("constant", 4, 4)],
)
def test_the_trend_is_that_of_least_squares(schedule: str, steps: int, bins: int) -> None:
    """Epochs have 5 steps: bins of 1,000 and of 60 steps are whole epochs, of fewer single steps."""
    tail, numbers = tail_of(steps, schedule), np.random.default_rng(0)
    losses = 2 + 0.1 * numbers.standard_normal((3, steps))
    rate = np.array([Optimizer(schedule=schedule).lr_at(StepIndex(step, steps)) for step in range(steps)])
    share = np.cumsum(rate) / rate.sum()
    found = judged(tail, losses)
    assert tail.bins == bins
    assert tail.first + tail.bins * tail.size == steps
    assert tail.size % 5 == 0 or steps < 30
    if steps == 1000:
        assert share[tail.first] == pytest.approx(0.8, abs=0.06)

    def binned(values: np.ndarray) -> np.ndarray:
        return values[tail.first :].reshape(bins, -1).mean(1)

    columns = [np.ones(bins), binned(share)] + ([binned(rate / rate.max())] if schedule == "cosine" else [])
    design = np.stack(columns, 1)
    freedom = bins - design.shape[1]
    for chain in range(3):
        y = binned(losses[chain])
        beta, square, *_ = np.linalg.lstsq(design, y, rcond=None)
        error = np.sqrt(square[0] / freedom * np.linalg.inv(design.T @ design)[1, 1])
        assert float(found["loss_fall"][chain]) == pytest.approx(-beta[1], rel=1e-5)
        assert float(found["loss_noise"][chain]) == pytest.approx(student.ppf(0.99, freedom) * error, rel=1e-4)
        assert float(found["final_loss"][chain]) == pytest.approx(y[-1])


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_noise_is_seldom_taken_for_a_trend_and_a_trend_is_found(schedule: str) -> None:
    """Of 2,000 trainings without a trend 1 % lie beyond the 99 % quantile, up to three binomial deviations."""
    tail, noise = tail_of(1000, schedule), np.random.default_rng(1).standard_normal((2000, 1000))
    found = judged(tail, 1 + noise)
    assert float(found["loss_fall"].std()) > 10 * LEAST_FALL  # so that only the noise holds it back
    assert abs(len(falling(found)) - 20) < 3 * (2000 * 0.01 * 0.99) ** 0.5
    rate = np.array([Optimizer(schedule=schedule).lr_at(StepIndex(step, 1000)) for step in range(1000)])
    share = np.cumsum(rate) / rate.sum()
    assert falling(judged(tail, 1 - 0.1 * share + 1e-4 * noise[:50])) == list(range(50))
    assert falling(judged(tail, 1 - 0.01 * share + 1e-4 * noise[:50])) == []
    assert falling(judged(tail, 1 + 100 * rate + 1e-4 * noise[:50])) == []  # only the noise of mini-batches has gone


def falling(found: dict[str, torch.Tensor]) -> list[int]:
    return unfinished(found["loss_fall"].tolist(), found["loss_noise"].tolist())


def digits() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = digits_mlp()
    inputs, targets = load("digits").train
    return model, (inputs[:300], targets[:300])


def test_an_underfitted_ensemble_of_digits_is_told_from_a_converged_one() -> None:
    model, data = digits()
    drawn = sample(model, data, "ensemble", chains=2, epochs=20, compile=False)
    short = drawn.provenance["diagnostics"]
    assert f"Note: {short['notes'][0]}" in str(drawn) and "2 chains of 1 network." in str(drawn)
    assert f"Note: {short['notes'][0]}" in [text for part in drawn.record().sections for text in part.text]
    assert short["still_falling"] == [0, 1]
    assert "2 of 2 trainings" in short["notes"][0] and "more epochs" in short["notes"][0]
    done = sample(model, data, "ensemble", chains=2, epochs=150, lr=1e-2, compile=False)
    long = done.provenance["diagnostics"]
    assert "Note:" not in str(done)
    assert (long["still_falling"], long["notes"]) == ([], [])
    assert max(long["final_loss"]) < min(short["final_loss"]) - 0.1  # what the note has promised
    assert max(long["gradient_norm"]) < min(short["gradient_norm"])


def test_loss_and_gradient_at_the_end_are_those_of_the_networks() -> None:
    model = nn.Linear(3, 1)
    found = sample(model, (X, Y), "ensemble", chains=2, epochs=30, noise=0.5)
    told = found.provenance["diagnostics"]
    for member in range(2):
        weights = {name: value.clone().requires_grad_() for name, value in found.member(member).items()}
        outputs = torch.func.functional_call(model, weights, (X,))[:, 0]
        prior = sum(torch.distributions.Normal(0.0, 1.0).log_prob(value).sum() for value in weights.values())
        loss = -(torch.distributions.Normal(outputs, 0.5).log_prob(Y).sum() + prior) / 60
        slopes = torch.autograd.grad(loss, list(weights.values()))
        assert told["final_loss"][member] == pytest.approx(float(loss.detach()), rel=1e-5)
        norm = float(torch.cat([slope.reshape(-1) for slope in slopes]).norm())
        assert told["gradient_norm"][member] == pytest.approx(norm, rel=1e-4)


METHODS: dict[str, dict[str, Any]] = {
    "ensemble": {},
    "checkpoints": {"draws": 3},
    "swag": {"collect": 4, "rank": 2, "draws": 2},
    "swa": {"draws": 2},
    "ema": {"draws": 2},
    "laplace": {"draws": 2},
    "dropout": {"draws": 2, "dropout": 0.001},
    "batchensemble": {"members": 2},
    "masksembles": {"members": 2},
    "vi": {"draws": 2, "init_std": 0.001, "lr_schedule": "constant", "lr": 1e-3},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_training_method_tells_also_from_the_disk(name: str, tmp_path: Path) -> None:
    method = "ensemble" if name == "checkpoints" else name
    options = {"epochs": 20, "noise": 0.5, "chains": 3, "chunk": 2, "batch": 20, **METHODS[name]}
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    here = sample(model, (X, Y), method, **options).provenance["diagnostics"]
    assert len(here["final_loss"]) == len(here["gradient_norm"]) == 3
    assert here["still_falling"] == [0, 1, 2], "20 epochs of Adam at 0.001 are too few"
    stored = sample(model, (X, Y), method, path=tmp_path / "run", **options)
    assert stored.provenance["diagnostics"] == here
    again = sample(model, (X, Y), method, path=tmp_path / "run", **options)
    assert again.provenance["diagnostics"] == here
    if name in ("swag", "laplace", "vi"):
        posterior = approximate(model, (X, Y), method, **options)
        assert posterior.provenance["diagnostics"]["still_falling"] == [0, 1, 2]
        assert posterior.provenance["diagnostics"]["loss_fall"] == here["loss_fall"]


@pytest.mark.parametrize("stop", [30, 55])
def test_an_interrupted_training_tells_the_same(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before and within the tail of 60 steps; every block is a checkpoint."""
    monkeypatch.setattr("onebasin.inference.driver._CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("onebasin.inference.driver.BLOCK", 5)
    options: dict[str, Any] = {"epochs": 20, "noise": 0.5, "batch": 20}
    expected = sample(nn.Linear(3, 1), (X, Y), "ensemble", **options).provenance["diagnostics"]
    seen = []

    def interrupt(done: int, total: int, text: str) -> None:
        seen.append(done)
        if done >= stop and len(seen) < 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(nn.Linear(3, 1), (X, Y), "ensemble", path=tmp_path / "run", progress=interrupt, **options)
    found = sample(nn.Linear(3, 1), (X, Y), "ensemble", path=tmp_path / "run", **options)
    assert found.provenance["diagnostics"] == expected


@pytest.mark.usefixtures("restored_imports")
def test_the_command_line_says_it(run: Run, tmp_path: Path) -> None:
    words = ["sample", "onebasin.examples:digits_mlp", "digits", "--limit", "300", "--method", "ensemble"]
    code, out, err = run(*words, "--epochs", "5", "-o", tmp_path / "short")
    assert code == 0, err
    assert "note: the loss of 1 of 1 trainings was still falling" in out
    assert "loss per example at the end" in out
