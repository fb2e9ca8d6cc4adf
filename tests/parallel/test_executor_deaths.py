"""What a hostile reader of the cluster tried: deaths in the middle of a message, full disks, odd layouts of memory."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.align import align
from onebasin.errors import DiskError, InputError
from onebasin.parallel import Executor, SerialExecutor, executor_for, open_executor, processes
from onebasin.parallel.processes import ProcessExecutor
from onebasin.parallel.serialize import pack, unpack
from onebasin.posterior.fit import fit


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(2)
    yield executor
    executor.close()


@pytest.fixture
def settings() -> Iterator[None]:
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(before[0])
    torch.set_float32_matmul_precision(before[1])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3))


def networks(model: nn.Module, members: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(members, *own.shape, generator=generator) for name, own in model.state_dict().items()}


def equal(a: ob.Population, b: ob.Population) -> bool:
    mine, yours = a.stacked(), b.stacked()
    return all(torch.equal(mine[name], yours[name]) for name in mine)


def in_time() -> Any:
    """For `idle`: a run that hangs is ended."""
    end = time.monotonic() + 60

    def look() -> None:
        assert time.monotonic() < end, "nothing happens any more"

    return look


# --- messages ---------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """Cannot be made anew of its message."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def refuse(shared: None, shard: int) -> int:
    raise OddError(1, 2)


def test_errors_with_odd_constructors_arrive(two: Executor) -> None:
    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        list(two.map(refuse, [0], shared=None))


def test_many_maps_at_once(two: Executor) -> None:
    """More functions than are kept, and more values than workers keep."""
    maps = [
        two.map(lambda shared, shard, own=number: (own, shared, shard), range(12), shared=-number)
        for number in range(6)
    ]
    assert list(zip(*maps, strict=True)) == [tuple((own, -own, shard) for own in range(6)) for shard in range(12)]


def die_halfway(shared: str, shard: int) -> bytes:
    """Be killed, once, when half of a long result is written to a pipe."""
    mark = Path(shared) / "mark"
    if shard == 1 and mark.exists():
        from multiprocessing import connection

        def half(self: Any, content: Any, write: Any = os.write) -> None:
            if len(content) <= 4096:  # which the system writes as a whole
                write(self._handle, content)
                return
            write(self._handle, bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        mark.unlink()
        connection.Connection._send = half  # type: ignore[attr-defined]
    return bytes(40_000)


def test_a_death_in_the_middle_of_a_result_is_survived(two: ProcessExecutor, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    found = list(two.map(die_halfway, range(8), shared=str(tmp_path), idle=in_time()))
    assert [len(own) for own in found] == [40_000] * 8
    assert len(list(Path(two._folder.name).iterdir())) <= 2  # functions that may be used again


def test_threads_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, original = [], ProcessExecutor._start_pool

    def slowly(self: ProcessExecutor) -> Any:
        opened.append(1)
        time.sleep(0.1)
        return original(self)

    monkeypatch.setattr(ProcessExecutor, "_start_pool", slowly)
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = list(executor.map(lambda shared, shard: shared * shard, range(5), shared=number))

    with ProcessExecutor(1) as executor:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: [number * shard for shard in range(5)] for number in range(4)}
    assert len(opened) == 1


# --- ends -------------------------------------------------------------------------------------------------------------


def test_workers_that_are_just_starting_do_not_hear_an_interrupt() -> None:
    script = (
        "import signal, time\n"
        "from onebasin.parallel import open_executor\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs inherit it ignored
        "try:\n"
        "    with open_executor(2) as cluster:\n"
        "        print(flush=True)\n"
        "        list(cluster.map(lambda shared, shard: time.sleep(9), [0, 1], shared=None))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.4)  # they import what they need
    os.killpg(process.pid, signal.SIGINT)
    told, complaints = process.communicate(timeout=30)
    assert (told.strip(), complaints) == ("interrupted", "")


def test_a_worker_without_parent_ends_and_clears_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose parent was killed before it could look for it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "1").touch()
    monkeypatch.setattr(processes, "_GRACE", 0.0)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    processes._end_with_parent(os.getpid(), str(tmp_path / "folder"))  # not the parent of this process
    assert ended == [1] and not list(tmp_path.iterdir())


def test_a_full_disk_is_named(two: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkstemp", full)
        with pytest.raises(DiskError, match=r"No space left on device.*TMPDIR"):
            list(two.map(refuse, [0], shared=None))
    assert list(two.map(lambda shared, shard: shard, [1], shared=None)) == [1]


def fill(shared: None, shard: int) -> bytes:
    """Make a result for which the disk of the worker has no room."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tempfile.mkstemp = full  # type: ignore[assignment]
    return bytes(10_000)


def test_a_disk_that_is_full_for_a_worker_is_named_too() -> None:
    with ProcessExecutor(1) as executor, pytest.raises(DiskError, match="No space left on device"):
        list(executor.map(fill, [0], shared=None, idle=in_time()))


# --- the same bits ----------------------------------------------------------------------------------------------------


def told(shared: None, shard: int) -> tuple[torch.dtype, str, bool]:
    return torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")


def test_workers_are_told_what_torch_was_told_here(two: Executor, settings: None) -> None:
    for dtype, precision, automatic in ((torch.float64, "medium", True), (torch.float32, "highest", False)):
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        with torch.autocast("cpu", enabled=automatic):
            for executor in (SerialExecutor(), two):
                assert list(executor.map(told, [0], shared=None)) == [(dtype, precision, automatic)]


def test_another_default_dtype_changes_no_alignment(settings: None) -> None:
    model = mlp()
    symmetry, population = ob.discover(model, torch.zeros(1, 7)), ob.Population.from_stacked(networks(model, 6))
    before = align(population, symmetry).population
    torch.set_default_dtype(torch.float64)
    assert equal(align(population, symmetry).population, before)


def test_members_lie_in_their_own_order_wherever_they_are(two: Executor) -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 3))
    symmetry, stacked = ob.discover(model, torch.zeros(1, 2, 8, 8)), networks(model, 9)
    for name in ("0.weight", "2.weight"):  # channels last
        stacked[name] = stacked[name].movedim(2, -1).contiguous().movedim(-1, 2)
    population = ob.Population.from_stacked(stacked)
    assert not population.stacked()["0.weight"].is_contiguous()
    assert all(own.is_contiguous() for own in population.part(2, 7).stacked().values())
    here, there = (align(population, symmetry, executor=executor) for executor in (SerialExecutor(), two))
    assert equal(here.population, there.population) and torch.equal(here.residual, there.residual)
    reference = {name: own[3].mT.contiguous().mT if own.ndim == 3 else own[3] for name, own in stacked.items()}
    here, there = (
        align(population, symmetry, reference=reference, executor=executor) for executor in (SerialExecutor(), two)
    )
    assert equal(here.population, there.population) and torch.equal(here.residual, there.residual)


def test_modules_whose_weights_are_computed_travel(two: Executor) -> None:
    model, inputs = mlp(), torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    nn.utils.parametrizations.weight_norm(model[0])
    again = unpack(pack(model))
    assert torch.equal(again(inputs), model(inputs)) and list(again.state_dict()) == list(model.state_dict())
    population = ob.Population.from_stacked(networks(model, 5))
    here, there = (ob.predict(model, population, inputs, executor=executor) for executor in (SerialExecutor(), two))
    assert torch.equal(here, there)


def test_a_population_is_found_from_another_folder(
    two: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked = networks(mlp(), 3)
    monkeypatch.chdir(tmp_path)
    ob.Population.from_stacked(stacked).save("population")
    population = ob.Population.open("population")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sums = two.map(lambda shared, members: members.tensor("0.bias"), [population.part(0, 3)], shared=None)
    assert torch.equal(next(iter(sums)), stacked["0.bias"])


# --- workers and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["2", 2.5, 0, None.__class__])
def test_workers_are_counted_in_whole_numbers(workers: Any) -> None:
    with pytest.raises(InputError, match="whole number"):
        open_executor(workers)
    with pytest.raises(InputError, match="whole number"), executor_for(workers):
        pass


def test_an_open_executor_stays_open(two: Executor) -> None:
    with executor_for(1, two) as executor:
        assert executor is two
    assert list(two.map(lambda shared, shard: shard, [1], shared=None)) == [1]


def test_a_mixture_of_wide_networks_takes_no_square_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = torch.eye
    monkeypatch.setattr(torch, "eye", lambda size, **options: (sizes.append(size), original(size, **options))[1])
    values = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0))
    fit(ob.Population.from_stacked({"w": values}), "mixture", components=1)
    assert max(sizes, default=0) < 3000


TQDM_IN_WORKERS = """
from onebasin.parallel import open_executor

def count(shared, number):
    import io
    from tqdm import tqdm  # torch has one at work whenever it compiles, as samplers do
    return sum(1 for _ in tqdm(range(number), file=io.StringIO()))

with open_executor(2) as cluster:
    assert list(cluster.map(count, [1, 2, 3, 4], shared=None)) == [1, 2, 3, 4]
"""


def test_workers_leave_no_semaphores_behind() -> None:
    """Workers are killed at the end, and the locks between processes that tqdm makes were left to be complained of."""
    pytest.importorskip("tqdm")
    done = subprocess.run(
        [sys.executable, "-c", TQDM_IN_WORKERS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
