"""A small campaign of `benchmarks.faults`, and whether the campaign would notice what it looks for."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.fault_kinds import KINDS
from benchmarks.fault_stage import VERBS, equal
from benchmarks.faults import Row, combinations, page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs fork and /proc")
def test_eight_random_faults_lose_nothing_and_change_nothing() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.faults", "--faults", "8", "--seed", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 faults: 0 networks lost, 0 wrong results; target 0 and 0: met" in done.stdout
    total = next(line.split() for line in done.stdout.splitlines() if line.startswith("all "))
    assert int(total[1]) == 8
    assert int(total[2]) >= 4, "most faults must really disturb something"


def test_every_kind_meets_every_verb_it_can() -> None:
    pairs = combinations(random.Random(0), list(KINDS))
    once = [next(pairs) for _ in range(len(KINDS) * len(VERBS) - 1)]
    assert len(set(once)) == len(once)
    assert ("kill -9 of a worker", "compact") not in once  # it has no workers


def test_a_single_bit_is_a_difference() -> None:
    told = {"tensors": {"w": torch.zeros(2, 3)}, "chain": None, "told": {"sweeps": 3}}
    assert equal(told, {"tensors": {"w": torch.zeros(2, 3)}, "chain": None, "told": {"sweeps": 3}})
    assert not equal(told, {**told, "tensors": {"w": -torch.zeros(2, 3)}})
    assert not equal(told, {**told, "tensors": {"w": torch.zeros(3, 2)}})
    assert not equal(told, {**told, "chain": torch.zeros(2)})
    assert not equal(told, {**told, "told": {"sweeps": 4}})
    nan = torch.full((2,), float("nan"))
    assert equal(nan, nan.clone())


def test_what_went_wrong_is_told() -> None:
    rows = [Row("kill -9", "align", True, 0, 0, 2), Row("flipped bit", "compact", True, 1, 1, 3, "it was not refused")]
    told = page(rows, ["full disk"], 3.0)
    assert "2 faults: 1 networks lost, 1 wrong results; target 0 and 0: MISSED" in told
    assert "it was not refused" in told
    assert "may not mount a disk: full disk" in told
