"""What a hostile review broke, each once: silent wrong results first, then refusals that must be sentences."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onebasin.errors import InputError, OnebasinError, StorageError
from onebasin.inference.journal import alone
from tests.judging import numbers, sample

X = numbers(24, 3).float()
Y = X.sum(1, keepdim=True)
CLASSES = (X.sum(1) > 0).long()
QUICK = {"draws": 3, "warmup": 3, "leapfrog": 3, "epochs": 1}


def net(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 1))


def test_frozen_parameters_and_their_statistics_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    model[:2].requires_grad_(False)
    model[1].running_mean.fill_(0.7)
    for method in ("hmc", "ensemble"):
        options = QUICK if method == "hmc" else {"epochs": 5}
        draws = sample(model, (X, Y), method, noise=0.5, chains=2, **options)
        for name in ("0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert bool((draws.tensor(name) == model.state_dict()[name]).all()), name
        assert float((draws.tensor("3.weight")[0] - draws.tensor("3.weight")[-1]).abs().max()) > 0
    again = sample(model, (X, Y), "ensemble", noise=0.5, epochs=5, start="model")
    assert bool((again.tensor("1.running_mean") == 0.7).all())


def test_an_exploding_sghmc_chain_is_flagged_and_returns_to_sound_places() -> None:
    x = numbers(24, 15).float()
    model = nn.Sequential(nn.Linear(15, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    draws = sample(model, (x, Y), "sghmc", chains=3, draws=5, epochs=50, noise=0.5, batch=7, step=1.0)
    found = draws.provenance["diagnostics"]
    assert min(found["divergences"]) > 0, "the step must be too large for this test to say anything"
    assert draws.log_density is not None
    assert float(draws.log_density.min()) > -1e6
    assert bool(torch.isfinite(draws.tensor("0.weight")).all())


class Scaled(nn.Module):
    """With a parameter that no module can reset."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(3) * torch.rand(())), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


def frozen(value: float) -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    nn.init.constant_(model[0].weight, value)
    nn.init.constant_(model[0].bias, 0.0)
    return model


PRIORS = {"*": 1.0, "*.bias": 0.01}


@pytest.mark.parametrize(
    ("first", "second", "options", "changed", "name"),
    [
        (net, lambda: net(nn.Tanh), {}, {}, "architecture"),
        (net, net, {"prior": PRIORS}, {"prior": dict(reversed(PRIORS.items()))}, "prior"),
        (lambda: frozen(1.0), lambda: frozen(2.0), {}, {}, "weights"),
        (Scaled, Scaled, {}, {}, "weights"),
        (net, lambda: frozen(1.0), {}, {}, "architecture"),
    ],
    ids=["activation", "order of prior patterns", "frozen weights", "bare parameters", "frozen or not"],
)
def test_another_posterior_is_not_resumed(first, second, options, changed, name, tmp_path: Path) -> None:
    options = {"noise": 0.5, "path": tmp_path / "run", **QUICK, **options}
    sample(first(), (X, Y), **options)
    with pytest.raises(InputError, match=f"another {name}"):
        sample(second(), (X, Y), **{**options, **changed})


@pytest.mark.parametrize(
    ("method", "options"),
    [("sghmc", {"cycles": 2, "cycle": 20, "epochs": 1}), ("ensemble", {"snapshots": True, "epochs": 12})],
)
def test_draws_may_not_grow_where_they_share_a_cycle(method: str, options: dict, tmp_path: Path) -> None:
    common = {"noise": 0.5, "path": tmp_path / "run", **options}
    sample(net(), (X, Y), method, draws=2, **common)
    with pytest.raises(InputError, match="another thin"):
        sample(net(), (X, Y), method, draws=6, **common)


def test_growing_draws_do_not_change_what_was_left_open(tmp_path: Path) -> None:
    sample(net(), (X, Y), noise=0.5, path=tmp_path / "run", **QUICK)
    more = sample(net(), (X, Y), noise=0.5, path=tmp_path / "run", **{**QUICK, "draws": 400})
    assert len(more) == 400


def test_statistics_that_a_fresh_start_forgets_do_not_matter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sample(model, (X, Y), noise=0.5, path=tmp_path / "run", **QUICK)
    model(X)  # moves the running statistics
    sample(model, (X, Y), noise=0.5, path=tmp_path / "run", **{**QUICK, "draws": 5})


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    sample(net(), (X, Y), noise=0.5, path=tmp_path / "run", **QUICK)
    with alone(tmp_path / "run"), pytest.raises(StorageError, match="another process is at work"):
        sample(net(), (X, Y), noise=0.5, path=tmp_path / "run", **QUICK)


def test_a_damaged_definition_is_told(tmp_path: Path) -> None:
    sample(net(), (X, Y), noise=0.5, path=tmp_path / "run", **QUICK)
    (tmp_path / "run" / "run" / "definition.json").write_text("{")
    with pytest.raises(StorageError, match="damaged"):
        sample(net(), (X, Y), noise=0.5, path=tmp_path / "run", **QUICK)


class Noisy(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.always = nn.Linear(3, 4), nn.Linear(4, 1), always

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.dropout(self.inner(x), 0.5, self.always or self.training))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x), 2, 3)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return self.linear(x) * factor


STATELESS = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("model", "data", "options", "sentence"),
    [
        (nn.Linear(3, 1), (X, 2 * CLASSES - 1), {"likelihood": "bernoulli"}, "bernoulli targets from 0 to 1"),
        (net(), (X, Y), {"method": "ensemble", "draws": 4, "lr_schedule": "cosine", "noise": 0.5}, "snapshots=True"),
        (nn.Linear(3, 1), (X, Y), {"method": "dropout", "noise": 0.5}, "fewer than two linear"),
        (Noisy(False), (X, Y), {"method": "dropout", "noise": 0.5}, "random numbers of its own"),
        (Noisy(True), (X, Y), {"noise": 0.5}, "random numbers in evaluation"),
        (STATELESS, (X, Y), {"noise": 0.5}, "track_running_stats=True"),
        (Table(), (X, torch.zeros(24, 3, 2)), {"noise": 0.5}, "shape of the targets"),
        (net(), (X, Y), {"noise": 0.5, "temperature": float("inf")}, "temperature"),
        (net(), (X, Y), {"noise": 0.5, "leapfrog": 2.5}, "a whole number for leapfrog"),
        (net(), (X, Y), {"noise": 0.5, "lr": "fast"}, "a number for lr"),
        (net(), (X, Y), {"noise": 0.5, "threads": -1}, "threads"),
        (net(), (X, Y), {"noise": 0.5, "compile": "x"}, "for compile"),
        (net(), None, {"log_density": lambda own: own["0.weight"].sum(0)}, "one number"),
        (net(), None, {"log_density": lambda own: 1.0}, "one number"),
        (Times(), ((X, torch.tensor(2.0)), Y), {"noise": 0.5}, "one row per example"),
        (
            nn.Linear(1, 1),
            None,
            {"method": "laplace", "log_density": lambda own: -own["weight"].square().sum(), "prior_precision": 1.0},
            "density of your own",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(model: nn.Module, data: object, options: dict, sentence: str) -> None:
    with pytest.raises(OnebasinError, match=sentence):
        sample(model, data, **{**(QUICK if "method" not in options else {}), **options})


@pytest.mark.parametrize("mass", ["identity", "diagonal"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 20])
def test_a_short_warm_up_does_not_freeze_chains(mass: str, warmup: int) -> None:
    options = {"chains": 4, "noise": 0.1, "draws": 50, "epochs": 200, "lr": 0.05, "leapfrog": 10}
    draws = sample(nn.Linear(3, 1), (X, Y), warmup=warmup, mass=mass, **options)
    assert draws.provenance["diagnostics"]["stuck"] == []
    assert min(draws.provenance["diagnostics"]["accepted"]) > 0.2


@pytest.mark.parametrize("method", ["hmc", "sghmc", "mclmc", "ensemble", "vi", "swag", "laplace"])
def test_scalar_and_empty_parameters_are_fine(method: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.linear(x) + self.empty.sum()

    options = {"draws": 2, "epochs": 1, **({"warmup": 2} if method in ("hmc", "sghmc", "mclmc") else {})}
    draws = sample(Odd(), (X, Y), method, noise=0.5, **options)
    assert draws.tensor("scale").shape == (2,) or method == "ensemble"
    assert draws.tensor("empty").shape[1:] == (0, 3)


def test_a_script_without_a_guard_can_have_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, onebasin as ob\nfrom torch import nn\n"
        "x = torch.zeros(8, 1)\n"
        "class Own(nn.Linear): pass\n"
        "class Mine(ob.HMC): pass\n"
        "method = Mine(draws=2, warmup=1, epochs=1)\n"
        "found = ob.sample(Own(1, 1), (x, x), method, noise=1.0, chains=4, workers=2)\n"
        "print(len(found))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    assert done.stdout == "8\n"
