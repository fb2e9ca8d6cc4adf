"""Populations on disk: writers that resume, that share a folder, and that are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population.population import Population
from onebasin.population.writer import PopulationWriter
from onebasin.state import TensorSpec
from onebasin.storage import atomic as durable

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"w": TensorSpec((2, 3), torch.float32), "n": TensorSpec((), torch.int64)}


def state(value):
    return {"w": torch.full((2, 3), float(value)), "n": torch.tensor(value)}


def values(path):
    return Population.open(path).tensor("n").tolist()


def write(path, members, **options):
    with Population.writer(path, SPEC, **options) as writer:
        for value in members:
            writer.append(state(value), chain=value % 2, log_density=-float(value))


def shards(path):
    return sorted(path.glob("shard-*.safetensors"))


def run_python(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **options)


def test_members_are_flushed_resumed_and_counted(tmp_path):
    write(tmp_path / "p", range(5), shard_members=2, provenance={"seed": 3})
    assert [Population.open(path).tensor("n").tolist() for path in shards(tmp_path / "p")] == [[0, 1], [2, 3], [4]]
    with Population.writer(tmp_path / "p", SPEC, shard_members=4) as writer:
        assert writer.written == 5
        writer.append(state(5))
        assert writer.written == 5
        writer.extend(Population.from_states([state(6), state(7)]))
        assert writer.written == 8
    population = Population.open(tmp_path / "p")
    assert population.tensor("n").tolist() == list(range(8))
    assert population.chain.tolist() == [0, 1, 0, 1, 0, -1, -1, -1]
    assert population.log_density[:5].tolist() == [0, -1, -2, -3, -4]
    assert population.provenance == {"seed": 3}
    assert population.check() == []


def test_what_is_appended_is_copied(tmp_path):
    live = state(0)
    with Population.writer(tmp_path / "p", SPEC) as writer:
        for value in range(3):
            live["n"].fill_(value)
            writer.append(live)
    assert values(tmp_path / "p") == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_keeps_what_is_complete(tmp_path, error):
    def interrupted():
        with Population.writer(tmp_path / "p", SPEC, shard_members=4) as writer:
            for value in range(7):
                writer.append(state(value))
                if value == 5:
                    raise error

    with pytest.raises(error):
        interrupted()
    assert values(tmp_path / "p") == list(range(6))


def test_a_writer_refuses_another_spec(tmp_path):
    write(tmp_path / "p", range(2))
    other = {**SPEC, "w": TensorSpec((2, 4), torch.float32)}
    with pytest.raises(SpecError, match=r"w \(2, 4\) where \(2, 3\) is expected"):
        Population.writer(tmp_path / "p", other)
    with Population.writer(tmp_path / "p", SPEC) as writer:
        with pytest.raises(SpecError, match="appended as member 2 is missing n"):
            writer.append({"w": torch.zeros(2, 3)})
        with pytest.raises(SpecError, match="the population to append"):
            writer.extend(Population.from_stacked({"w": torch.zeros(1, 2, 3)}))
    assert values(tmp_path / "p") == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_members": 0}, "at least 1, found 0"),
        ({"name": "a/b"}, "letters, digits"),
        ({"provenance": {"model": torch.nn.ReLU()}}, r"str\(\.\.\.\)"),
    ],
)
def test_bad_options_are_explained(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        Population.writer(tmp_path / "p", SPEC, **options)


def test_named_writers_give_one_order_however_they_interleave(tmp_path):
    orders = []
    for turns in ("aabbab", "bbaaba"):
        path = tmp_path / turns
        for turn in turns:  # each turn is a run of its own that resumes its chain
            with Population.writer(path, SPEC, name=turn, shard_members=1) as writer:
                count = sum(f"-{turn}." in shard.name for shard in shards(path))
                writer.append(state(count + (100 if turn == "b" else 0)))
        orders.append(values(path))
    assert orders[0] == orders[1] == [0, 100, 1, 101, 2, 102]
    first, second = (Population.writer(tmp_path / "c", SPEC, name="x", shard_members=1) for _ in range(2))
    first.append(state(1))
    with pytest.raises(StorageError, match=r"another writer named x .* own name"):
        second.append(state(2))
    assert values(tmp_path / "c") == [1]


APPEND = """
import sys, torch
from onebasin.population import Population
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
spec = {"w": torch.zeros(2, 3), "n": torch.tensor(0)}
sys.stdin.readline()
with Population.writer(path, spec, shard_members=2) as writer:
    for value in range(first, first + count):
        writer.append({"w": torch.full((2, 3), float(value)), "n": torch.tensor(value)}, chain=first)
"""


def test_several_processes_append_at_once(tmp_path):
    processes = [run_python(APPEND, tmp_path / "p", 100 * k, 7, stdin=subprocess.PIPE) for k in range(3)]
    for process in processes:  # all have imported torch: start together
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 3
    population = Population.open(tmp_path / "p")
    found = population.tensor("n")
    assert sorted(found.tolist()) == [100 * k + i for k in range(3) for i in range(7)]
    for k in range(3):  # the order inside a chain is that of its writer
        assert found[population.chain == 100 * k].tolist() == [100 * k + i for i in range(7)]
    assert values(tmp_path / "p") == found.tolist()
    assert population.check() == []


ENDLESS = """
import sys, torch
from onebasin.population import Population
with Population.writer(sys.argv[1], {"w": torch.zeros(200_000), "n": torch.tensor(0)}, shard_members=3) as writer:
    for value in range(10**9):
        writer.append({"w": torch.full((200_000,), float(value)), "n": torch.tensor(value)})
        print(value, flush=True)
"""


def test_a_killed_writer_loses_at_most_the_block_in_flight(tmp_path):
    path = tmp_path / "p"
    process = run_python(ENDLESS, path, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if int(line) == 20:  # open while the writer is at work: every finished shard is there and whole
                early = Population.open(path)
                assert early.tensor("n").tolist() == list(range(len(early)))
                assert len(early) >= 20
            if int(line) >= 40:
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = max([40, *(int(line) for line in process.stdout if line.endswith("\n"))])
    process.stdout.close()
    population = Population.open(path)
    assert population.tensor("n").tolist() == list(range(len(population)))
    assert len(population) >= last - 2
    assert all("unfinished" in problem for problem in population.check())
    with Population.writer(path, population.spec) as writer:
        writer.append({"w": torch.zeros(200_000), "n": torch.tensor(writer.written)})
    assert values(path) == list(range(len(population) + 1))


KILLED = """
import os, random, signal, sys, time, torch
from onebasin.population import Population
path, moments = sys.argv[1], random.Random(0)
torch.set_num_threads(1)

def write(pipe):
    with Population.writer(path, {"w": torch.zeros(50_000), "n": torch.tensor(0)}, name="a") as writer:
        while True:
            value = writer.written
            writer.append({"w": torch.full((50_000,), float(value)), "n": torch.tensor(value)})
            writer.flush()
            os.write(pipe, value.to_bytes(8, "little"))

kept, waited = -1, 0
for turn in range(60):
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        write(pipe)
    os.close(pipe)
    told = os.read(reader, 8) if turn % 2 else b""  # every other one lives until it has written something
    waited += turn % 2
    time.sleep(moments.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    told += b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    os.close(reader)
    kept = max([kept, *(int.from_bytes(told[at : at + 8], "little") for at in range(0, len(told) - 7, 8))])
    if kept < 0:
        continue
    population = Population.open(path)
    found = population.tensor("n").tolist()
    assert found == list(range(len(found))) and len(found) > kept, (found, kept)
    assert torch.equal(population.tensor("w")[:, 0], torch.arange(float(len(found))))
    assert all("unfinished" in problem for problem in population.check()), population.check()
print(kept, waited)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_sixty_random_moments_a_writer_loses_nothing_it_has_told_of(tmp_path):
    process = run_python(KILLED, tmp_path / "p", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    kept, waited = map(int, output.split())
    assert kept + 1 >= waited == 30


@pytest.mark.parametrize("moment", ["os.fsync", "os.link", "os.unlink after the link", "the folder's fsync"])
def test_control_c_in_the_middle_of_writing_a_shard(tmp_path, monkeypatch, moment):
    """Whenever it comes, the members that wait are written once, by the end of the block."""

    def interrupt_at(function, number=1):
        calls = []

        def call(*arguments, **options):
            # Python interrupts the main thread alone; on a slow disk the thread of early syncs calls fsync as well.
            if threading.current_thread() is threading.main_thread():
                calls.append(1)
                if len(calls) == number:
                    monkeypatch.undo()
                    raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    def interrupted():
        with Population.writer(tmp_path / "p", SPEC, shard_members=2, name="a") as writer:
            writer.append(state(0))
            if moment == "os.fsync":
                monkeypatch.setattr(durable.os, "fsync", interrupt_at(os.fsync))
            elif moment == "os.link":
                monkeypatch.setattr(durable.os, "link", interrupt_at(os.link))
            elif moment == "the folder's fsync":
                monkeypatch.setattr(durable, "sync_folder", interrupt_at(durable.sync_folder))
            else:
                monkeypatch.setattr(Path, "unlink", interrupt_at(Path.unlink))
            writer.append(state(1))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert values(tmp_path / "p") == [0, 1]
    assert all("unfinished" in problem for problem in Population.open(tmp_path / "p").check())


def test_two_writers_of_one_name_lose_nothing(tmp_path):
    """The second one is told; what it holds can still be written, under a name of its own."""
    first, second = (Population.writer(tmp_path / "p", SPEC, name="x", shard_members=2) for _ in range(2))
    first.extend(Population.from_states([state(0), state(1)]))
    second.append(state(2))
    with pytest.raises(StorageError, match=r"another writer named x is at work: give each its own name"):
        second.append(state(3))
    assert values(tmp_path / "p") == [0, 1]
    second.name = "y"
    second.flush()
    assert values(tmp_path / "p") == [0, 1, 2, 3]
    assert Population.open(tmp_path / "p").check() == []


def test_the_same_block_written_twice_is_there_once(tmp_path):
    first, second = (Population.writer(tmp_path / "p", SPEC, name="x") for _ in range(2))
    for writer in (first, second):
        writer.append(state(1), chain=0, log_density=float("nan"))
        writer.flush()
    assert values(tmp_path / "p") == [1]


def test_nothing_depends_on_the_clock(tmp_path, monkeypatch):
    """Neither the time of day nor the times of files decide about names, order or content."""
    jumps = iter([5e9, 0.0, 3e9, -1e9] * 100)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(jumps) * 1e9))
    write(tmp_path / "p", range(7), shard_members=2, name="a")
    for age, path in enumerate(sorted((tmp_path / "p").iterdir())):
        os.utime(path, (1e9 - age * 1e6, 1e9 - age * 1e6))  # the later a shard, the older its file
    write(tmp_path / "p", [7], name="a")
    assert values(tmp_path / "p") == list(range(8))
    assert Population.open(tmp_path / "p").check() == []
    source = "".join(path.read_text() for path in (ROOT / "onebasin").rglob("*.py"))
    assert not re.search(r"\btime\.time(_ns)?\(|\bdatetime\b|getmtime", source)


def test_a_writer_does_not_hide_the_networks_of_others(tmp_path):
    torch.save(state(0), tmp_path / "net0.pt")
    with pytest.raises(InputError, match=r"holds other networks \(net0\.pt, \.\.\.\): choose another path"):
        Population.writer(tmp_path, SPEC)


def test_the_manifest_is_readable_by_a_person(tmp_path):
    write(tmp_path / "p", range(1), provenance={"seed": 1})
    content = json.loads((tmp_path / "p" / "population.json").read_text())
    assert content["spec"]["w"] == {"shape": [2, 3], "dtype": "float32"}
    assert content["provenance"] == {"seed": 1}
    assert isinstance(Population.writer(tmp_path / "p", SPEC), PopulationWriter)
