"""Populations on disk: writers that resume, that share a folder, and that are killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population import Population, PopulationWriter
from onebasin.state import TensorSpec

ROOT = Path(__file__).parent.parent
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
