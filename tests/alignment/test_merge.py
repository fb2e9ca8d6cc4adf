"""Many networks into one, against the plain mean of stacked tensors."""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.merge import merge
from onebasin.alignment.repair import recalibrate, unit_statistics
from onebasin.errors import InputError, SpecError
from onebasin.functional.call import outputs
from onebasin.population.population import Population
from onebasin.state import State


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def networks(model: nn.Module, members: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Population:
    """Networks of one architecture; every integer buffer counts up from 3."""
    return Population.from_stacked(
        {
            name: normal(members, *t.shape, seed=seed + i).abs().to(dtype)
            if t.is_floating_point()
            else torch.arange(3, 3 + members).reshape(members, *[1] * t.dim()).expand(members, *t.shape)
            for i, (name, t) in enumerate(model.state_dict().items())
        }
    )


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


@settings(max_examples=30, deadline=None)
@given(members=st.integers(1, 7), seed=st.integers(0, 999), weighted=st.booleans())
def test_the_mean_of_the_members(members: int, seed: int, weighted: bool) -> None:
    population = networks(with_norm(), members, seed)
    weights = normal(members, seed=seed).abs() + 0.1 if weighted else torch.ones(members).double()
    found = merge(None, population, variance=None, weights=weights if weighted else None)
    for name, value in population.stacked().items():
        if value.is_floating_point():
            expected = sum(w * v for w, v in zip(weights, value, strict=True)) / weights.sum()
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=0)
        else:
            assert int(found[name]) == 3 and found[name].dtype == torch.int64


def test_blocks_are_streamed_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    population = networks(with_norm(), 7, dtype=torch.float32)
    population.save(tmp_path / "population")
    stored, plain = Population.open(tmp_path / "population"), merge(None, population, variance=None, weights=range(7))
    blocks = Population.blocks
    sizes = []

    def small(self: Population, size: int | None = None) -> Iterator[tuple[int, State]]:
        for start, block in blocks(self, 3):
            sizes.append(len(block["0.weight"]))
            yield start, block

    monkeypatch.setattr(Population, "blocks", small)
    found = merge(None, stored, variance=None, weights=range(7))
    assert sizes == [3, 3, 1]
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_dtypes_come_back_and_sums_are_wide(dtype: torch.dtype) -> None:
    """Four times 60,000 is beyond half precision; 1e8 + 1 beyond float32."""
    big = 60000.0 if dtype == torch.float16 else 1e8
    values = torch.tensor([[big], [1.0], [-big], [2.0]]).to(dtype)
    same = torch.full((4, 1), big).to(dtype)
    found = merge(None, Population.from_stacked({"w": values, "v": same}))
    assert found["w"].dtype == found["v"].dtype == dtype
    assert complex(found["w"]) == 0.75 and torch.equal(found["v"], same[0])


def test_one_member_is_itself() -> None:
    population = networks(with_norm(), 1, dtype=torch.float32)
    found = merge(with_norm(), population, data=normal(20, 3))
    assert all(torch.equal(found[name], value) for name, value in population.member(0).items())


def test_members_are_aligned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permuted copies of one network merge into that network once the permutations are undone."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    symmetry = ob.discover(model, torch.zeros(2, 3))
    state = networks(model, 1).member(0)
    elements = symmetry.random(0, members=4)
    copies = symmetry.apply(elements, Population.from_states([state] * 4))
    before = {name: value.clone() for name, value in copies.stacked().items()}

    def align(population: Population, symmetry: ob.Symmetry) -> Any:
        return SimpleNamespace(population=symmetry.apply(symmetry.invert(elements), population))

    x = normal(20, 3)
    searched = outputs(model, merge(None, copies, symmetry), x)  # by the search itself, into whatever basin it chose
    torch.testing.assert_close(searched, outputs(model, state, x), rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(import_module("onebasin.alignment.merge"), "align", align)
    found, raw = merge(None, copies, symmetry), merge(None, copies)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)
    assert not torch.allclose(raw["0.weight"], state["0.weight"], atol=0.1)
    assert all(torch.equal(value, before[name]) for name, value in copies.stacked().items())


def test_statistics_of_the_mean_are_measured() -> None:
    model, x, population = with_norm(), normal(50, 3), networks(with_norm(), 3)
    plain = merge(None, population, variance=None)
    for variance in ("auto", "recalibrate"):
        found = merge(model, population, data=x, variance=variance)
        expected = recalibrate(model, plain, x)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    entering = x @ plain["0.weight"].T + plain["0.bias"]
    torch.testing.assert_close(found["1.running_var"], entering.var(0))
    without = nn.Sequential(nn.Linear(3, 2))  # nothing to recalibrate, and nobody insisted
    unchanged = merge(without, networks(without, 2), data=x)
    assert torch.equal(unchanged["0.weight"], merge(None, networks(without, 2))["0.weight"])


class Pair(nn.Module):
    """Returns two things, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = with_norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.whole(x)
        return result, result.sum()


def test_a_model_may_return_what_it_likes() -> None:
    """Nobody looks at the outputs; and without batch norms the model need not be run at all."""
    gru, x = nn.GRU(3, 4, batch_first=True), normal(6, 5, 3)
    population = networks(gru, 2)
    symmetry = ob.discover(gru, torch.zeros(2, 5, 3))
    for group in (None, symmetry):
        found, plain = merge(gru, population, group, data=x), merge(None, population, group)
        assert all(torch.equal(found[name], value) for name, value in plain.items())
    assert merge(gru, population, data=normal(6, 5, 99)).keys() == plain.keys()  # could not be run on these
    pair, y = Pair(), normal(50, 3)
    members = networks(pair, 3)
    expected = recalibrate(
        pair.whole, {n.removeprefix("whole."): t for n, t in merge(None, members, variance=None).items()}, y
    )
    for variance in ("auto", "recalibrate"):
        found = merge(pair, members, data=y, variance=variance)
        assert all(torch.equal(found[f"whole.{name}"], value) for name, value in expected.items())


def test_live_parameters_and_inference_mode_give_plain_tensors() -> None:
    model, x, population = with_norm().double(), normal(50, 3), networks(with_norm(), 3)
    live = Population.from_states(
        [{n: nn.Parameter(t) if t.is_floating_point() else t for n, t in member.items()} for member in population]
    )
    for variance in ("auto", "repair"):
        plain = merge(model, population, data=x, variance=variance)
        found = merge(model, live, data=x, variance=variance, weights=torch.ones(3, requires_grad=True))
        with torch.inference_mode():
            inside = merge(model, population, data=x, variance=variance)
        for name, value in plain.items():
            assert torch.equal(found[name], value) and torch.equal(inside[name], value)
            assert not found[name].requires_grad


def test_repair_gives_units_the_mean_spread_of_the_members() -> None:
    model, x, population = with_norm(), normal(50, 3), networks(with_norm(), 3)
    weights = [0.5, 0.25, 0.25]
    found = merge(model, population, data=x, variance="repair", weights=weights)
    parts = [unit_statistics(model, member, x)["3.weight"] for member in population]
    mean, std = unit_statistics(model, found, x)["3.weight"]
    torch.testing.assert_close(mean, sum(w * part[0] for w, part in zip(weights, parts, strict=True)))
    torch.testing.assert_close(std, sum(w * part[1] for w, part in zip(weights, parts, strict=True)))


TWO = Population.from_stacked({"w": torch.zeros(2, 1)})


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: merge(None, TWO[:0]), InputError, "add members"),
        (lambda: merge(None, TWO, weights=[1.0]), InputError, "one per member"),
        (lambda: merge(None, TWO, weights=[1.0, -1.0]), InputError, "one per member"),
        (lambda: merge(None, TWO, weights=[0.0, 0.0]), InputError, "one per member"),
        (lambda: merge(None, TWO, weights=[1.0, float("nan")]), InputError, "one per member"),
        (lambda: merge(None, TWO, variance="more"), InputError, "or None, found"),
        (lambda: merge(TWO, None), InputError, "give None as the model"),
        (lambda: merge(None, TWO, variance="repair"), InputError, "give a model and data="),
        (
            lambda: merge(None, Population.from_stacked({"w": torch.full((2, 1), torch.nan)})),
            SpecError,
            "is not finite",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()
