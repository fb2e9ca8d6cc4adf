"""Who computes a chain, and in how large pieces, does not change a single bit of it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onebasin.inference.methods import METHODS
from onebasin.population.population import Population
from tests.judging import numbers, sample, weights_of

X = numbers(20, 2).float()
Y = torch.sin(X.sum(1, keepdim=True))


class Net(nn.Module):
    """At the top of a module, so that it can be sent to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.norm(self.inner(x))))


TRAINING = {"epochs": 3, "batch": 6}
OPTIONS: dict[str, dict[str, Any]] = {
    "hmc": {"draws": 5, "warmup": 25, "leapfrog": 3, "mass": "diagonal", **TRAINING},
    "mclmc": {"draws": 5, "warmup": 50, "thin": 3, **TRAINING},
    "sghmc": {"draws": 5, "warmup": 5, "thin": 2, **TRAINING},
    "ensemble": {"draws": 3, "every": 2, **TRAINING},
    "vi": {"draws": 3, **TRAINING},
    "swag": {"draws": 3, "collect": 4, "rank": 2, **TRAINING},
    "laplace": {"draws": 3, **TRAINING},
    "dropout": {"draws": 3, "dropout": 0.2, **TRAINING},
    "batchensemble": {"members": 3, **TRAINING},
    "lpbnn": {"members": 2, "draws": 3, "latent": 2, **TRAINING},
    "masksembles": {"members": 3, **TRAINING},
    "mimo": {"members": 3, "repetition": 2, "input_repetition_probability": 0.3, **TRAINING},
    "mcbatchnorm": {"draws": 3, **TRAINING},
    "swa": {"draws": 3, "share": 0.5, "low": 1e-4, **TRAINING},
    "ema": {"draws": 3, "ema_decay": 0.8, **TRAINING},
}
DRAWS = {method: options.get("draws", options.get("members")) for method, options in OPTIONS.items()}


def drawn(method: str, **options: Any) -> Population:
    run = {"chains": 5, "chains_per_batch": 3, "seed": 4, "noise": 0.3, "compile": False}
    torch.manual_seed(0)
    return sample(Net(), (X, Y), method, **{**run, **OPTIONS[method], **options})


@cache
def reference(method: str) -> Population:
    return drawn(method)


def by_chain(population: Population) -> Tensor:
    """Weights (chains, draws, D)."""
    return torch.stack([weights_of(population)[population.chain == chain] for chain in range(5)])


def assert_same(a: Population, b: Population) -> None:
    assert torch.equal(a.chain, b.chain) and torch.equal(a.log_density, b.log_density)
    for name in a.names:
        assert torch.equal(a.tensor(name), b.tensor(name)), name
    assert a.provenance["diagnostics"] == b.provenance["diagnostics"]


def test_all_methods_are_here() -> None:
    assert set(OPTIONS) == set(METHODS)


@pytest.mark.parametrize("method", list(OPTIONS))
def test_neither_chunks_nor_the_disk_change_draws(method: str, tmp_path: Path) -> None:
    whole = reference(method)
    assert len(whole) == 5 * DRAWS[method] and bool(torch.isfinite(whole.log_density).all())
    assert sorted(whole.chain.tolist()) == sorted(list(range(5)) * DRAWS[method])
    assert_same(whole, drawn(method, chunk=1))
    assert_same(whole, drawn(method, chunk=2, path=tmp_path / "run"))


@pytest.mark.parametrize("method", ["hmc", "mcbatchnorm", "masksembles"])
def test_workers_do_not_change_draws(method: str) -> None:
    assert_same(reference(method), drawn(method, workers=2, chunk=2))


@pytest.mark.parametrize("method", list(OPTIONS))
def test_a_run_is_repeatable_and_its_seed_matters(method: str) -> None:
    torch.rand(1)  # the global generator is somewhere else in the second run
    first, again, other = reference(method), drawn(method), drawn(method, seed=5)
    assert_same(first, again)
    assert float((weights_of(first) - weights_of(other)).abs().max()) > 1e-3


@pytest.mark.parametrize("method", list(OPTIONS))
def test_fewer_chains_are_the_first_of_many(method: str) -> None:
    """In windows of the same size; windows of another size round differently."""
    many, few = reference(method), drawn(method, chains=3)
    assert torch.equal(weights_of(many)[many.chain < 3], weights_of(few)[few.chain < 3])


@pytest.mark.parametrize("method", ["hmc", "sghmc", "vi", "swag", "laplace", "dropout", "lpbnn", "mcbatchnorm", "swa"])
def test_fewer_draws_are_the_first_of_many(method: str) -> None:
    many, few = reference(method), drawn(method, draws=2)
    rows = by_chain(many)[:, :2]
    assert torch.equal(rows, by_chain(few))


def test_thinning_keeps_every_other_draw_where_draws_are_whole_blocks_apart() -> None:
    """A block is 20 steps with streams of their own; epochs of 20 steps begin with new ones whatever the thinning."""
    one, two = (drawn("sghmc", epochs=0, batch=1, warmup=1, thin=thin, draws=draws) for thin, draws in ((1, 4), (2, 2)))
    assert torch.equal(by_chain(one)[:, 1::2], by_chain(two))


def test_chains_of_a_window_are_independent_of_each_other() -> None:
    """What a chain does with others in the window, it does alone, up to the rounding of another shape."""
    together, alone = drawn("sghmc", chains_per_batch=5), drawn("sghmc", chains_per_batch=1)
    torch.testing.assert_close(weights_of(together), weights_of(alone), rtol=1e-3, atol=1e-3)
    a, b = drawn("ensemble", chains_per_batch=5), drawn("ensemble", chains_per_batch=1)
    torch.testing.assert_close(weights_of(a), weights_of(b), rtol=1e-3, atol=1e-3)
