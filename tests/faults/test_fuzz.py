"""Damaged files of every kind, against every reader: `benchmarks.fuzz` in small, and whether it would notice."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_doors import Door
from benchmarks.fuzz_list import DOORS
from benchmarks.fuzz_mutations import mutate
from onebasin.errors import StorageError

ROOT = Path(__file__).resolve().parents[2]
VALID = b'{"a": [1, 2, {"b": "text"}], "c": 1.5}'


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to limit memory")
def test_no_damaged_file_does_more_than_be_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz", "--files", "400", "--seed", "11"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^all +([\d,]+) +([\d,]+) +([\d,]+)", done.stdout, re.MULTILINE)
    files, refused, accepted = (int(number.replace(",", "")) for number in rows[0])
    assert files >= 380
    assert files == refused + accepted
    assert refused > 200, "most mutants should be damaged"
    assert accepted > 20, "some mutants should get as far as being used"


def test_mutants_can_be_made_again_and_differ() -> None:
    made = [mutate(VALID, random.Random(number), [VALID]) for number in range(200)]
    assert made == [mutate(VALID, random.Random(number), [VALID]) for number in range(200)]
    assert len(set(made)) > 120
    assert sum(content != VALID for content in made) > 180


def test_every_door_has_a_name_of_its_own() -> None:
    assert len({door.name for door in DOORS}) == len(DOORS) > 25


def build(folder: Path) -> None:
    (folder / "file").write_bytes(VALID)


def after(act: Callable[[], object]) -> Callable[[Path], None]:
    """A use that is in order for the valid file, and acts on damaged ones."""

    def use(folder: Path) -> None:
        if (folder / "file").read_bytes() != VALID:
            act()

    return use


def fail() -> None:
    raise IndexError("ours, and a bug")


def refuse() -> None:
    raise StorageError("as it should be")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to limit memory")
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (fail, "IndexError: ours, and a bug"),
        (lambda: time.sleep(60), "took more than"),
        (lambda: bytearray(3 << 30), "MemoryError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process ended with -9"),
        (lambda: sys.exit(0), "SystemExit"),
    ],
    ids=["another error", "hang", "memory", "crash", "exit"],
)
def test_the_engine_notices(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], said: str) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    tally = fuzz._in_child(Door("d", "file", build, after(act)), 3, 0)
    assert tally.findings
    assert said in tally.findings[0]
    assert re.match(r"d:\d: ", tally.findings[0]), "the mutant that did it is named"


def test_a_refusal_is_no_finding() -> None:
    tally = fuzz._in_child(Door("d", "file", build, after(refuse)), 5, 0)
    assert tally.findings == []
    assert tally.refused["StorageError"] + tally.accepted == 5
