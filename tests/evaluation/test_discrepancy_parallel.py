"""Distances of populations are the same wherever they are measured, tile by tile, in memory that is stated."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import SpecError
from onebasin.evaluation.discrepancy import discrepancy
from onebasin.evaluation.distances import pair_distances
from onebasin.functional.call import global_seed
from onebasin.metrics.mmd import bandwidths, random_counts, random_sides, side_statistics, weighted_statistics
from onebasin.metrics.pairs import Across, pairwise
from onebasin.parallel import Executor, SerialExecutor, open_executor
from onebasin.population.population import Population
from tests.judging import numbers, seeded

QUICK: dict[str, Any] = {"permutations": 19, "n_resamples": 20}
TILES = DISTANCES = import_module("onebasin.evaluation.distances")
SELECTION = RESAMPLED = import_module("onebasin.metrics.mmd")


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    executor = open_executor(workers=2)
    yield executor
    executor.close()


@pytest.fixture(params=["one block", "several blocks"])
def travelling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few members that travel, with a tensor as a whole or with members of their own."""
    monkeypatch.setattr(TILES, "MEMBERS", 7)
    monkeypatch.setattr(TILES, "WORTH", 0)
    if request.param == "several blocks":
        monkeypatch.setattr(DISTANCES, "BLOCK_BYTES", 8 * 5 * 3)


def net(seed: int) -> nn.Module:
    with global_seed(seed):
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def populations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Population, Population]:
    """One on disk, in several shards and another order, and one in memory."""
    path = tmp_path_factory.mktemp("compare") / "population"
    whole = Population.from_models([net(n) for n in range(13)])
    with Population.writer(path, whole.spec, shard_members=3) as writer:
        for state in whole:
            writer.append(state)
    order = torch.randperm(13, generator=seeded(0))
    return Population.open(path)[order], Population.from_models([net(50 + n) for n in range(9)])[
        torch.arange(8, -1, -1)
    ]


def dense(population: Population) -> Tensor:
    return torch.cat([value.flatten(1).double() for value in population.stacked().values()], 1)


@pytest.mark.usefixtures("travelling")
def test_tiles_do_not_depend_on_who_measures(populations: tuple[Population, Population], two: Executor) -> None:
    here, there = (pair_distances(*populations, ("l1", "l2"), executor) for executor in (SerialExecutor(), two))
    assert torch.equal(here.l2, there.l2) and torch.equal(here.l1, there.l1)
    rows = torch.cat([dense(population) for population in populations])
    torch.testing.assert_close(here.l2, torch.cdist(rows, rows).square(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(here.l1, torch.cdist(rows, rows, p=1), rtol=1e-5, atol=1e-5)
    assert torch.equal(here.l2, here.l2.T) and not bool(here.l2.diagonal().any())


@pytest.mark.usefixtures("travelling")
def test_the_whole_comparison_does_not_depend_on_it_either(
    populations: tuple[Population, Population], two: Executor
) -> None:
    given: dict[str, Any] = {"symmetry": ob.discover(net(0), torch.zeros(1, 3)), "model": net(0)}
    given |= {"inputs": numbers(5, 3).float(), "normal_forms": ["unit-norm/max", "aligned"], **QUICK}
    alone, serial, both = (
        discrepancy(*populations, **given, **where) for where in ({}, {"executor": SerialExecutor()}, {"executor": two})
    )
    assert alone.to_dict() == serial.to_dict() == both.to_dict()


def test_workers_are_started_where_they_are_asked_for(
    populations: tuple[Population, Population], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TILES, "WORTH", 0)
    found = [discrepancy(*populations, layers=False, **QUICK, **where) for where in ({}, {"workers": 2})]
    assert found[0].to_dict() == found[1].to_dict()


def test_small_tensors_stay_here(populations: tuple[Population, Population]) -> None:
    class Nobody(SerialExecutor):
        def map(self, *given: Any, **named: Any) -> Any:
            raise AssertionError("not worth a journey")

    pair_distances(*populations, ("l1", "l2"), Nobody())


@pytest.mark.parametrize("counts", [(1, 1), (5, 3), (8, 4), (9, 9)])
def test_tiles_cover_every_pair_once(counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TILES, "MEMBERS", 4)
    members = sum(counts)
    seen = torch.zeros(members, members)
    for left, right in TILES.tiles(*counts):
        seen[left, right] += 1
        if left != right:
            seen[right, left] += 1
        assert all(end.stop <= counts[0] or end.start >= counts[0] for end in (left, right))
    assert bool((seen == 1).all())


def test_members_of_a_tile_are_read_a_few_columns_at_a_time(
    populations: tuple[Population, Population], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TILES, "MEMBERS", 4)
    monkeypatch.setattr(DISTANCES, "BLOCK_BYTES", 4 * 8 * 3)
    sizes: list[int] = []
    read = Population.read_columns

    def spy(population: Population, name: str, start: int, stop: int, out: Tensor) -> None:
        sizes.append(out.nbytes)
        read(population, name, start, stop, out)

    monkeypatch.setattr(Population, "read_columns", spy)
    pair_distances(*populations)
    assert max(sizes) <= 4 * 8 * 3 and len(sizes) > 50


@pytest.mark.usefixtures("travelling")
def test_broken_members_are_named_from_afar(populations: tuple[Population, Population], two: Executor) -> None:
    a, b = populations
    broken = {name: value.clone() for name, value in b.stacked().items()}
    broken["2.weight"][6, 1, 1] = torch.inf
    with pytest.raises(SpecError, match=r"2.weight of member 6 of the second"):
        pair_distances(a, Population.from_stacked(broken), ("l2",), two)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12)),
    far=st.sampled_from([0.0, 100.0]),
    unit=st.sampled_from([1.0, 2.0**-20]),
)
def test_distances_across_are_those_within_the_whole(sizes: tuple[int, int, int], far: float, unit: float) -> None:
    m, n, columns = sizes
    rows = numbers(m + n, columns)
    rows[m:] += far
    rows[-1] = rows[0]  # a copy, far from its own centre
    sums = Across(m, n)
    for part in rows.split(5, dim=1):
        sums.add(part[:m] / unit, part[m:] / unit, unit)
    found = sums.found()
    exact = (rows[:m, None] - rows[None, m:]).square().sum(2)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10 * (1 + far**2))
    assert float(found[0, -1]) == 0.0


@pytest.mark.parametrize("shape", ["random", "one column", "constant", "sorted"])
def test_the_middle_of_many_is_found_exactly(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SELECTION, "_FEW", 100)
    monkeypatch.setattr(SELECTION, "_GUESSED", 50)
    monkeypatch.setattr(SELECTION, "_PIECE", 64)
    values = {
        "random": numbers(60, 60),
        "one column": torch.cat([numbers(3000, 1), torch.zeros(600, 1).double()]),
        "constant": torch.ones(3600, 1).double(),
        "sorted": torch.arange(3600.0).double(),
    }[shape].reshape(-1)
    order = values.sort().values
    for rank in (0, 1, 17, 1799, 1800, 3598, 3599):
        assert SELECTION.smallest(values, rank) == float(order[rank])


@settings(max_examples=30, deadline=None)
@given(members=st.integers(2, 12), copies=st.integers(0, 12), seed=st.integers(0, 99))
def test_bandwidths_are_those_of_pairs_above_the_diagonal(members: int, copies: int, seed: int) -> None:
    rows = numbers(members, 3, seed=seed)
    rows[: min(copies, members)] = rows[0]
    distances = pairwise(rows)
    upper = distances[torch.triu(torch.ones_like(distances), 1) > 0]
    positive = upper[upper > 0]
    median, pooled = bandwidths("median", distances, 1), bandwidths("pooled", distances, 1)
    if not len(positive):
        assert median.tolist() == [1.0] and pooled.tolist() == [1.0] * 10
        return
    assert median.tolist() == [float(positive.median())]
    ends = torch.stack([positive.min() / 2, 2 * positive.max()])
    torch.testing.assert_close(pooled[[0, -1]], ends, rtol=1e-12, atol=0)


def test_half_of_a_kernel_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics from tiles above the diagonal, beside those of the whole matrix and of each draw by itself."""
    matrix = pairwise(numbers(23, 4)).neg().exp().fill_diagonal_(0)
    sides, counts = random_sides(23, 10, 9, seeded(0)), random_counts(23, 10, 9, seeded(1))
    ones = torch.ones(23, dtype=torch.float64)
    whole = side_statistics(matrix, sides), weighted_statistics(matrix, ones, 10, counts)
    monkeypatch.setattr(RESAMPLED, "_ROWS", 4)
    parts = side_statistics(matrix, sides), weighted_statistics(matrix, ones, 10, counts)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    x, y = sides[:, 3], 1 - sides[:, 3]
    exact = x @ matrix @ x / 90 + y @ matrix @ y / (13 * 12) - 2 * (x @ matrix @ y) / 130
    torch.testing.assert_close(parts[0][3], exact, rtol=0, atol=1e-13)


def test_distances_that_were_judged_are_spent_and_others_are_not(tmp_path: Path) -> None:
    a, b = (Population.from_stacked({"u": numbers(n, 2, seed=n), "v": numbers(n, 3, seed=n + 50)}) for n in (6, 7))
    one = discrepancy(a, b, **QUICK)
    other = discrepancy(a, b, layers=False, **QUICK)
    assert one.raw.total == other.raw.total  # what tensors were judged by was not what they were added up from
    squares = pair_distances(a, b).l2
    assert one.raw.across == pytest.approx(float(squares[:6, 6:].mean()))
