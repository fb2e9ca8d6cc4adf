"""Fits are the same wherever the population is read, and no more than a block of it is ever held."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onebasin.errors import SpecError
from onebasin.parallel import Executor, SerialExecutor, open_executor
from onebasin.population.member_storage import gather
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.layout import flat_layout
from onebasin.posterior.moments import Deviations, RowMatrix, moments
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.refine import fit_scales
from tests.judging import numbers, seeded

MEMBERS, BLOCK = 47, 5
FAMILIES: dict[str, dict[str, Any]] = {
    "diagonal": {},
    "low-rank": {"family": "low-rank", "rank": 2, "oversample": 1},
    "low-rank of all": {"family": "low-rank", "rank": 60},
    "chains": {"family": "mixture", "components": "chains"},
    "k-means": {"family": "mixture", "components": 3, "restarts": 2},
    "pooled k-means": {"family": "mixture", "components": 2, "pooled": True, "covariance": "low-rank", "rank": 2},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    executor = open_executor(workers=2)
    yield executor
    executor.close()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of five members, so that a small population takes many."""
    monkeypatch.setattr(import_module("onebasin.population.population"), "block_members", lambda spec: BLOCK)
    moments = import_module("onebasin.posterior.moments")
    monkeypatch.setattr(moments, "block_members", lambda spec: BLOCK)
    monkeypatch.setattr(moments, "_SHARE", 1)
    monkeypatch.setattr(moments, "_DEVIATIONS_SHARE", 1)


def networks(dtype: torch.dtype = torch.float32) -> Population:
    """Three chains, batch norm's statistics and a counter."""
    chain = torch.arange(MEMBERS) % 3
    return Population.from_stacked(
        {
            "weight": (numbers(MEMBERS, 11, 13) + 3 * chain[:, None, None]).to(dtype),
            "bias": numbers(MEMBERS, 11, seed=1).to(dtype),
            "running_mean": numbers(MEMBERS, 11, seed=2).to(dtype),
            "num_batches_tracked": torch.arange(MEMBERS),
        },
        chain=chain,
    )


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Population]:
    """In memory, and on disk in several shards and another order."""
    whole = networks()
    path = tmp_path_factory.mktemp("fit") / "population"
    with Population.writer(path, whole.spec, shard_members=9) as writer:
        for number, state in enumerate(whole):
            writer.append(state, chain=number % 3)
    order = torch.randperm(MEMBERS, generator=seeded(0))
    return {"memory": whole, "disk": Population.open(path)[order], "back": whole[torch.arange(MEMBERS - 1, -1, -1)]}


def assert_same(one: Posterior, other: Posterior) -> None:
    assert torch.equal(one.weights, other.weights)
    for left, right in zip(one.components, other.components, strict=True):
        assert torch.equal(left.centre, right.centre)
        tensors = right.covariance.tensors()
        assert all(torch.equal(value, tensors[name]) for name, value in left.covariance.tensors().items())
    for own, others in zip(one.buffers, other.buffers, strict=True):
        assert all(torch.equal(value, others[name]) for name, value in own.items())
    assert one.provenance == other.provenance


@pytest.mark.parametrize("where", ["memory", "disk", "back"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fits_do_not_depend_on_who_reads(family: str, where: str, groups: dict[str, Population], two: Executor) -> None:
    alone = fit(groups[where], **FAMILIES[family])
    assert_same(alone, fit(groups[where], **FAMILIES[family], executor=SerialExecutor()))
    assert_same(alone, fit(groups[where], **FAMILIES[family], executor=two))


def test_workers_are_started_where_they_are_asked_for(groups: dict[str, Population]) -> None:
    options = FAMILIES["low-rank"]
    assert_same(fit(groups["disk"], **options), fit(groups["disk"], **options, workers=2))


@pytest.mark.parametrize("executor", [None, "two"])
def test_shards_give_the_moments_of_all(executor: str | None, two: Executor) -> None:
    population, groups = networks(torch.float64), torch.randint(4, (MEMBERS,), generator=seeded(3))
    found = moments(population, ["weight", "bias"], groups, two if executor else None)
    rows = torch.cat([population.tensor(name).flatten(1) for name in ("weight", "bias")], 1)
    for group in range(4):
        own = rows[groups == group]
        assert int(found.counts[group]) == len(own)
        torch.testing.assert_close(found.mean[group], own.mean(0), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found.squares[group], (own - own.mean(0)).square().sum(0), rtol=1e-12, atol=0)


def test_products_over_shards_are_those_of_the_whole_matrix(two: Executor) -> None:
    population = networks(torch.float64)
    layout, groups = flat_layout(population), torch.arange(MEMBERS) % 2
    centres = moments(population, layout.names, groups).mean
    rows = torch.cat([population.tensor(name).flatten(1) for name in layout.names], 1) - centres[groups]
    found, whole = Deviations(population, layout, centres, groups, executor=two), RowMatrix(lambda: iter([(0, rows)]))
    right, left = numbers(layout.size, 3, seed=5), numbers(MEMBERS, 3, seed=6)
    for name, given in {"times": (right,), "gathered": (left, layout.size), "turned": (right,), "lengths": ()}.items():
        torch.testing.assert_close(getattr(found, name)(*given), getattr(whole, name)(*given))
    assert found.size == (MEMBERS, layout.size) and found.degrees == MEMBERS - 2


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_than_a_shard_is_joined(
    family: str, groups: dict[str, Population], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard holds 5 members, or 1 for each column of a product or group of a mixture."""
    joined: list[int] = []

    def spy(sources: Any, rows: Tensor, spec: Any) -> Any:
        joined.append(len(rows))
        return gather(sources, rows, spec)

    monkeypatch.setattr(import_module("onebasin.population.population"), "gather", spy)
    fit(groups["disk"], **FAMILIES[family], model=model())
    allowed = MEMBERS if family == "low-rank of all" else 12
    assert 0 < max(joined) <= allowed and sum(joined) >= MEMBERS


class Model(nn.Module):
    """With the names of the population."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(11, 13)), nn.Parameter(torch.zeros(11))
        self.register_buffer("running_mean", torch.zeros(11))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def model() -> nn.Module:
    return Model()


def test_what_workers_find_wrong_is_said_here(two: Executor) -> None:
    broken = {name: value.clone() for name, value in networks().stacked().items()}
    broken["weight"][40, 3, 3] = torch.nan
    with pytest.raises(SpecError, match="NaN"):
        fit(Population.from_stacked(broken), executor=two)


def test_a_teacher_is_asked_anywhere_and_places_leave_no_trace(two: Executor) -> None:
    population = networks()
    posterior = fit(population, model=model())
    given: dict[str, Any] = {"steps": 2, "draws": 2, "batch": 4}
    inputs = numbers(6, 13).float()
    here = fit_scales(model(), posterior, population, inputs, **given)
    there = fit_scales(model(), posterior, population, inputs, **given, executor=two)
    assert_same(here, there)
