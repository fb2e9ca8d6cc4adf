"""Sampling by several processes: the same draws, whoever makes them and whoever dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onebasin import Population
from onebasin.errors import InputError, StorageError
from onebasin.inference import driver as channels
from onebasin.inference.driver import BatchProgress, ReportReader, ReportWriter, WorkerChannel
from onebasin.inference.job import ChainBatch, chain_batches
from onebasin.inference.journal import RUN, read_info
from onebasin.inference.sample import by_chain
from onebasin.parallel import Executor, SerialExecutor, open_executor
from onebasin.storage import LockedElsewhere, file_lock
from tests.interrupted_run import problem
from tests.judging import sample, split_options

HERE = Path(__file__).resolve().parents[1]
QUICK: dict[str, Any] = {
    "chains": 5,
    "chains_per_batch": 3,
    "noise": 0.1,
    "compile": False,
    "warmup": 5,
    "leapfrog": 3,
    "epochs": 2,
}
LONG: dict[str, Any] = {**QUICK, "draws": 500, "seed": 7}  # draws that take seconds


def same(a: Population, b: Population) -> bool:
    facts = torch.equal(a.chain, b.chain) and torch.equal(a.log_density, b.log_density)
    return facts and all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names)


def workers_of(parent: int) -> list[int]:
    """The processes of a pool, read from the system; its resource tracker is none of them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if int(stat.rsplit(")", 1)[1].split()[1]) == parent and "popen_loky" in command:
            found.append(int(folder.name))
    return found


def gone(process: int) -> bool:
    """Whether a process has ended, perhaps without anybody having asked for its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def pair() -> Iterator[Executor]:
    """Two workers for several runs."""
    executor = open_executor(2)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The long run by one process."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    model, data = problem()
    sample(model, data, "hmc", path=path, **LONG)
    return path


def assert_like(path: Path, undisturbed: Path) -> None:
    found, expected = (by_chain(Population.open(one)) for one in (path, undisturbed))
    assert same(found, expected)
    a, b = read_info(path), read_info(undisturbed)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
    assert not found.check()


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.mark.parametrize("on_disk", [False, True])
def test_where_batches_run_does_not_change_draws(on_disk: bool, tmp_path: Path, pair: Executor) -> None:
    model, data = problem()

    def drawn(name: str, **places: Any) -> Population:
        path = tmp_path / name if on_disk else None
        return sample(model, data, "hmc", draws=6, seed=3, path=path, **QUICK, **places)

    alone = drawn("alone")
    with_serial = drawn("serial", executor=SerialExecutor())
    first, second = drawn("first", executor=pair), drawn("second", executor=pair, chunk=1)
    assert same(alone, with_serial) and same(alone, first) and same(alone, second)
    assert alone.provenance["diagnostics"] == first.provenance["diagnostics"] == second.provenance["diagnostics"]


def test_nothing_is_left_of_the_work(tmp_path: Path, pair: Executor) -> None:
    model, data = problem()
    seen: list[tuple[int, int]] = []
    told = lambda done, total, text: seen.append((done, total))  # noqa: E731
    sample(model, data, "hmc", draws=3, path=tmp_path / "run", executor=pair, progress=told, **QUICK)
    assert seen[-1][0] == seen[-1][1], "the last news say that everything is done"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not (tmp_path / "run" / RUN / "workers").exists()
    assert {path.suffix for path in (tmp_path / "run" / RUN).iterdir()} <= {".safetensors", ".json", ""}


def test_data_in_any_order_of_memory_give_the_same_draws(pair: Executor) -> None:
    model, (x, y) = nn.Linear(3, 1), (torch.linspace(-1, 1, 60).reshape(3, 20).T, torch.linspace(0, 1, 20)[:, None])
    flat = torch.zeros(61)
    odd = flat[1:].view(20, 3).copy_(x)  # contiguous, and not where torch would have put it
    options = {"draws": 4, **QUICK}
    reference = sample(model, (x.contiguous().clone(), y), "hmc", **options)
    for given in (x, odd):
        assert same(reference, sample(model, (given, y), "hmc", **options))
    assert same(reference, sample(model, (x, y), "hmc", executor=pair, **options))


@needs_proc
def test_a_worker_that_is_killed_is_survived(tmp_path: Path, undisturbed: Path) -> None:
    model, data = problem()
    killed: list[int] = []

    def told(done: int, total: int, text: str) -> None:
        if text.startswith("drawing") and not killed:
            killed.append(workers_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    executor = open_executor(2)
    sample(model, data, "hmc", path=tmp_path / "run", executor=executor, progress=told, **LONG)
    executor.close()
    assert killed
    assert_like(tmp_path / "run", undisturbed)


def started(folder: Path) -> subprocess.Popen[str]:
    """The long run with two workers in a process of its own, which prints its progress."""
    method, run = split_options("hmc", LONG)
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "from tests.interrupted_run import *\n"
        "model, data = problem()\n"
        "told = lambda done, total, text: print(text, flush=True)\n"
        "from onebasin import HMC\n"
        f"ob.sample(model, data, {method!r}, path={str(folder)!r}, progress=told, workers=2, **{run!r})\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=HERE.parent)


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_the_parent_is_ended_and_the_run_goes_on(
    how: signal.Signals, tmp_path: Path, pair: Executor, undisturbed: Path
) -> None:
    process = started(tmp_path / "run")
    assert process.stdout is not None
    assert any(line.startswith("drawing") for line in process.stdout)
    workers = workers_of(process.pid)
    process.send_signal(how)
    process.wait(60)
    process.stdout.close()
    assert len(workers) == 2
    if how is signal.SIGINT:
        assert all(gone(worker) for worker in workers)
        assert not (tmp_path / "run" / RUN / "workers").exists(), "all have written before they were ended"
        kept = Population.open(tmp_path / "run")
        assert 0 < len(kept) < 5 * LONG["draws"]
        assert not kept.check()
    model, data = problem()
    sample(model, data, "hmc", path=tmp_path / "run", executor=pair, **LONG)  # orphans or not
    assert_like(tmp_path / "run", undisturbed)
    for _ in range(300):  # they get some seconds to write what they have
        if all(gone(worker) for worker in workers):
            return
        time.sleep(0.1)
    pytest.fail("workers outlive a parent that was killed")


def test_an_error_of_one_batch_ends_all(tmp_path: Path, pair: Executor) -> None:
    model, data = problem()
    weights = {name: torch.zeros(5, *value.shape) for name, value in model.state_dict().items()}
    weights["2.bias"][4] = torch.inf  # the last chain cannot begin; the others would go on for hours
    options = {**QUICK, "epochs": 0, "draws": 10**7, "start": Population.from_stacked(weights)}
    with pytest.raises(InputError, match="at the start of chain 4"):
        sample(model, data, "hmc", path=tmp_path / "run", executor=pair, **options)
    assert not (tmp_path / "run" / RUN / "workers").exists()
    assert len(sample(model, data, "hmc", draws=1, executor=pair, **QUICK)) == 5, "both workers are free again"


# ---------------------------------------------------------------------- the files between workers


def channel_of(path: Path) -> WorkerChannel:
    (path / RUN).mkdir(parents=True, exist_ok=True)
    return WorkerChannel.opened(path)


def test_a_worker_ends_when_its_token_goes_or_another_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_TOKEN_SECONDS", 0.0)
    first = channel_of(tmp_path)
    check = first.check_stop()
    check()
    second = channel_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        check()
    other = second.check_stop()
    other()
    second.closed(1.0)
    with pytest.raises(KeyboardInterrupt):
        other()
    assert not second.folder.exists()


def test_one_batch_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_PREDECESSOR_SECONDS", 0.2)
    channel, (one, two) = channel_of(tmp_path), chain_batches(4, 2)
    with channel.taken(one):
        with pytest.raises(StorageError, match="another process is at work on u000000"), channel.taken(one):
            pass
        with channel.taken(two):
            pass
        channel.closed(0.2)
        assert channel.folder.exists(), "somebody is still at work: what it holds stays"
        with pytest.raises(KeyboardInterrupt), channel.taken(two):
            pass
    with file_lock(tmp_path / "file"), pytest.raises(LockedElsewhere), file_lock(tmp_path / "file"):
        pass


def test_a_folder_that_a_worker_does_not_see(tmp_path: Path) -> None:
    channel = WorkerChannel(tmp_path / "elsewhere", "token")
    with pytest.raises(InputError, match="that all machines of the cluster see"), channel.taken(chain_batches(1, 1)[0]):
        pass


def test_news_arrive_once_and_the_last_always(tmp_path: Path) -> None:
    channel, (batch,) = channel_of(tmp_path), chain_batches(2, 2)
    heard: list[tuple[ChainBatch, BatchProgress]] = []
    listener = ReportReader(channel, [batch], lambda *news: heard.append(news))
    listener.look()
    with ReportWriter(channel, batch) as reporter:
        for done in range(5):
            reporter(batch, BatchProgress(done, 4, "warm-up", 0, 2, 0, {"loss": float("inf")}))
            listener.look()
    listener.look()
    listener.look()
    assert [progress.done for _, progress in heard] == [0, 4]
    (channel.folder / f"{batch.name}.json").write_text("{")
    assert channel.read(batch) is None
