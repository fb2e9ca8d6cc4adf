"""Where work runs: order, errors, deaths, and results that depend on none of it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.align import align
from onebasin.alignment.balance import balance
from onebasin.alignment.canonical import canonicalise
from onebasin.errors import ClusterError, InputError, SpecError
from onebasin.parallel import Executor, SerialExecutor, executor_for, open_executor
from onebasin.parallel.serialize import pack, unpack
from onebasin.parallel.workers import DEATHS, WorkerDied, WorkerPool


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    executor = open_executor(workers=2)
    yield executor
    executor.close()


def plus(shared: Tensor, shard: int) -> Tensor:
    return shared + shard


def threads(shared: None, shard: int) -> int:
    return torch.get_num_threads()


def slow_first(shared: None, shard: int) -> int:
    time.sleep(0.3 if shard == 0 else 0.0)
    return shard


def refuse(shared: None, shard: int) -> int:
    if shard == 2:
        raise SpecError("member 2 is not finite")
    return shard


def die(shared: str, shard: int) -> int:
    """Kill the worker that meets shard 3, once."""
    mark = Path(shared) / "0"
    if shard == 3 and mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return shard


def pid(shared: float, shard: int) -> int:
    time.sleep(shared)
    return os.getpid()


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_shards(two: Executor) -> None:
    assert list(two.map(slow_first, range(9), shared=None)) == list(range(9))
    shared = torch.arange(4.0)
    for executor in (SerialExecutor(), two):
        found = list(executor.map(plus, range(50), shared=shared))
        assert all(torch.equal(own, shared + number) for number, own in enumerate(found))
    assert list(two.map(plus, [], shared=shared)) == []


def test_functions_need_no_module(two: Executor) -> None:
    """What a notebook defines travels too."""
    offset = 3
    assert list(two.map(lambda shared, shard: shared * shard + offset, range(4), shared=2)) == [3, 5, 7, 9]


def test_everybody_works_with_one_thread(two: Executor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert set(SerialExecutor().map(threads, range(3), shared=None)) == {1}
        assert torch.get_num_threads() == 2
        assert set(two.map(threads, range(3), shared=None)) == {1}
    finally:
        torch.set_num_threads(before)


def test_shards_are_asked_for_a_few_ahead(two: Executor) -> None:
    """A population of a thousand shards is never in memory at once."""
    asked = 0

    def shards() -> Iterator[int]:
        nonlocal asked
        for number in range(100):
            asked += 1
            yield number

    for executor in (SerialExecutor(), two):
        asked = 0
        for done, _ in enumerate(executor.map(plus, shards(), shared=torch.zeros(1)), start=1):
            assert asked <= done + 2 * executor.workers


def test_who_stops_asking_stops_the_work(two: Executor, tmp_path: Path) -> None:
    def touch(shared: str, shard: int) -> int:
        (Path(shared) / f"{shard}").touch()
        return shard

    results = two.map(touch, range(1000), shared=str(tmp_path))
    assert next(results) == 0
    results.close()
    assert list(two.map(plus, [1], shared=torch.zeros(1))) == [torch.ones(1)]
    assert len(list(tmp_path.iterdir())) < 20


def test_errors_arrive_as_they_are(two: Executor) -> None:
    for executor in (SerialExecutor(), two):
        results = executor.map(refuse, range(5), shared=None)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(SpecError, match="member 2 is not finite"):
            next(results)
    assert list(two.map(slow_first, range(3), shared=None)) == [0, 1, 2]  # and the workers are still there


def test_what_cannot_be_sent_is_named(two: Executor) -> None:
    import threading

    with pytest.raises(InputError, match="can be sent to another process"):
        list(two.map(plus, [threading.Lock()], shared=torch.zeros(1)))  # type: ignore[list-item]


def test_both_workers_work(two: Executor) -> None:
    assert len(set(two.map(pid, range(8), shared=0.05))) == 2


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_dying_workers_are_survived(two: Executor, tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    assert list(two.map(die, range(20), shared=str(tmp_path))) == list(range(20))
    assert not list(tmp_path.iterdir())


def test_a_worker_killed_from_outside_is_replaced(two: Executor) -> None:
    victims: list[int] = []

    def kill() -> None:
        if not victims:
            victims.append(next(iter(workers)))
            os.kill(victims[0], signal.SIGKILL)

    workers = set(two.map(pid, range(8), shared=0.05))
    found = list(two.map(pid, range(6), shared=0.4, idle=kill))
    assert victims and len(found) == 6 and victims[0] not in found[-2:]


class Frail(WorkerPool):
    """Works here, and dies as often as it is told on shard 3."""

    def __init__(self, deaths: int) -> None:
        super().__init__(2)
        self.deaths = deaths

    def broadcast(self, content: bytes) -> bytes:
        return content

    def forget(self, address: bytes) -> None:
        """Nothing is kept."""

    def send(self, function: bytes, shared: bytes, payload: bytes) -> bytes:
        if unpack(payload) == 3 and self.deaths:
            self.deaths -= 1
            return b""
        return pack((unpack(function)(unpack(shared), unpack(payload)), None))

    def ready(self, ticket: bytes, seconds: float) -> bool:
        return True

    def collect(self, ticket: bytes) -> bytes:
        if not ticket:
            raise WorkerDied("it was told to")
        return ticket

    def cancel(self, ticket: bytes) -> None:
        """It is done already."""

    def close(self) -> None:
        """Nobody is here."""


@pytest.mark.parametrize("deaths", [0, 1, DEATHS])
def test_so_many_deaths_are_survived(deaths: int) -> None:
    assert list(Frail(deaths).map(plus, range(6), shared=0)) == list(range(6))


def test_a_shard_that_kills_everybody_is_given_up() -> None:
    with pytest.raises(ClusterError, match="4 workers died one after the other"):
        list(Frail(DEATHS + 1).map(plus, range(6), shared=0))


def test_nobody_is_left_behind() -> None:
    with executor_for(2) as executor:
        workers = set(executor.map(pid, range(8), shared=0.05))
    for _ in range(100):
        alive = [worker for worker in workers if Path(f"/proc/{worker}").exists()]
        if not alive:
            return
        time.sleep(0.1)
    pytest.fail(f"{alive} still run")


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_travel_alone_and_whole(dtype: torch.dtype) -> None:
    stack = torch.arange(60).reshape(5, 3, 4).to(dtype)
    for sent in (stack, stack[2], stack[:, 1], stack[0, 0, 0], stack[:0], stack.mT):
        found = unpack(pack(sent))
        assert torch.equal(found, sent) and found.dtype == dtype and found.data_ptr() % 64 == 0
    assert len(pack(torch.zeros(1000, 1000)[0])) < 5000


def test_models_travel_with_their_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = unpack(pack(model))
    assert found[1].weight is found[0].weight and torch.equal(found[0].weight, model[0].weight)


def test_a_part_holds_its_members_and_no_others(tmp_path: Path) -> None:
    first = ob.Population.from_stacked({"w": torch.arange(40.0).reshape(10, 4)}, chain=torch.arange(10))
    first.save(tmp_path / "disk")
    both = ob.Population.concatenate([first, ob.Population.open(tmp_path / "disk")])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    for population in (both, both[order], both[::-3]):
        found = unpack(pack(population.part(2, 6)))
        assert torch.equal(found.tensor("w"), population[2:6].tensor("w")) and torch.equal(
            found.chain, population[2:6].chain
        )
        joined = torch.cat([own.tensor("w") for _, own in population.parts(3)])
        assert torch.equal(joined, population.tensor("w"))
    large = ob.Population.from_stacked({"w": torch.zeros(1000, 1000)})
    assert len(pack(large.part(5, 6))) < 20_000


def test_no_workers_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 worker, found 0"):
        open_executor(workers=0)


# --- the same results, whoever works ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def symmetry() -> ob.Symmetry:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    return ob.discover(model, torch.zeros(1, 6))


def population(symmetry: ob.Symmetry, members: int) -> ob.Population:
    generator = torch.Generator().manual_seed(members)
    stacked = {name: torch.randn(members, *shape, generator=generator) for name, shape in symmetry.shapes.items()}
    return ob.Population.from_stacked(stacked, chain=torch.arange(members) % 3)


def everything(population: ob.Population, symmetry: ob.Symmetry, folder: Path, **places: object) -> list[Tensor]:
    """What align, balance and canonicalise make of a population, in all their ways."""
    found = align(population, symmetry, path=folder / "aligned", sweeps=3, **places)  # type: ignore[arg-type]
    medoid = align(population, symmetry, reference="medoid", **places)  # type: ignore[arg-type]
    light = balance(population, symmetry, path=folder / "light", **places)  # type: ignore[arg-type]
    normal = canonicalise(population, symmetry, **places)  # type: ignore[arg-type]
    assert light.population is not None and normal.population is not None
    populations = (found.population, medoid.population, light.population, normal.population)
    numbers = torch.tensor([found.objective, found.before, *found.history, medoid.objective], dtype=torch.float64)
    tensors = [own.tensor(name) for own in populations for name in population.names]
    return [*tensors, numbers, found.residual, light.mass_after, *found.elements.orders.values()]


@pytest.fixture(scope="module")
def mixed(symmetry: ob.Symmetry, tmp_path_factory: pytest.TempPathFactory) -> ob.Population:
    """Members from memory and from several shards, in no order."""
    folder = tmp_path_factory.mktemp("population") / "disk"
    with ob.Population.writer(folder, population(symmetry, 1).spec, shard_members=7) as writer:
        writer.extend(population(symmetry, 30))
    both = ob.Population.concatenate([population(symmetry, 20), ob.Population.open(folder)])
    return both[torch.randperm(50, generator=torch.Generator().manual_seed(1))]


def test_workers_change_not_one_bit(
    two: Executor, mixed: ob.Population, symmetry: ob.Symmetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebasin.population.population.block_members", lambda spec: 9)  # several blocks
    here = everything(mixed, symmetry, tmp_path / "here")
    there = everything(mixed, symmetry, tmp_path / "there", executor=two)
    assert len(here) == len(there) and all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_workers_need_not_be_where_we_are(
    two: Executor, symmetry: ob.Symmetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(two.map(pid, range(2), shared=0.0))  # they have begun somewhere else
    monkeypatch.chdir(tmp_path)
    population(symmetry, 9).save("population")
    found = align(ob.Population.open("population"), symmetry, path="aligned", executor=two)
    assert len(ob.Population.open("aligned")) == len(found.population) == 9


def test_ray_changes_not_one_bit(mixed: ob.Population, symmetry: ob.Symmetry, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    here = everything(mixed, symmetry, tmp_path / "here")
    with executor_for(2, "local") as executor:
        there = everything(mixed, symmetry, tmp_path / "there", executor=executor)
        (tmp_path / "0").touch()
        assert list(executor.map(die, range(8), shared=str(tmp_path))) == list(range(8))
        with pytest.raises(SpecError, match="member 2 is not finite"):
            list(executor.map(refuse, range(5), shared=None))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_cluster_that_is_not_there_is_named() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ClusterError, match=r"expected a Ray cluster at '127\.0\.0\.1:9'"):
        open_executor(executor="127.0.0.1:9")
