"""The stage of the fault campaign: tiny networks, three commands, and what they give when nothing goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.cli.main import main
from onebasin.inference import driver
from onebasin.inference.journal import read_info
from onebasin.inference.sample import by_chain
from onebasin.population.population import Population
from onebasin.storage.tensor_file import read_tensors

align_journal = import_module("onebasin.alignment.align")  # the package offers the function of this name

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

def example_input():
    return torch.zeros(2, 2)
"""
SHAPES = {
    "0.weight": (12, 2),
    "0.bias": (12,),
    "2.weight": (12, 12),
    "2.bias": (12,),
    "4.weight": (1, 12),
    "4.bias": (1,),
}
MEMBERS, PER_SHARD = 24, 4
LONGEST = 120.0  # seconds after which a process counts as hanging


@dataclass(frozen=True)
class Verb:
    """One command, run inside a copy of the stage.

    Attributes:
        name: of the verb.
        words: the command.
        output: what it writes.
        again: words that a user adds when the command is repeated.
    """

    name: str
    words: tuple[str, ...]
    output: str
    again: tuple[str, ...] = ()


_SAMPLE = "sample model.py:net train.npz --method hmc --chains 4 --draws 12 --noise 0.1 --epochs 2 -o chain --seed 3"
_QUICK = "--set warmup=10 --set leapfrog=5 --set compile=false"
_SYMMETRY = ("--symmetry", "symmetry.json")
VERBS = {
    "sample": Verb("sample", tuple(f"{_SAMPLE} {_QUICK}".split()), "chain"),
    "align": Verb("align", ("align", "input", "-o", "aligned", *_SYMMETRY), "aligned"),
    "compact": Verb("compact", ("compact", "input", "-o", "q.safetensors", *_SYMMETRY), "q.safetensors", ("--force",)),
}


class Process:
    """A command at work in a process of its own, forked from this one, which has imported everything already."""

    def __init__(self, words: list[str], place: Path, log: Path, prepare: Callable[[], None] | None = None) -> None:
        """Start it."""
        self.log = log
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, 1), os.dup2(handle, 2)
                os.chdir(place)
                _hasten()
                if prepare is not None:
                    prepare()
                code = main(words)
            except KeyboardInterrupt:
                code = 130
            finally:
                with contextlib.suppress(BaseException):
                    sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise TimeoutError(f"a command hung for {LONGEST:.0f} s: {self.text()}")

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _hasten() -> None:
    """Write checkpoints and journals all the time, so that faults find something to disturb."""
    torch.set_num_threads(1)
    driver._CHECKPOINT_SECONDS = 0.01
    driver._SECONDS = 0.02
    align_journal._SECONDS = 0.05


def with_workers(words: list[str], place: Path, log: Path) -> subprocess.Popen[bytes]:
    """The same command as a program of its own, with two workers."""
    command = [sys.executable, "-m", "onebasin", *words, "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=place, env=environment, stdout=file, stderr=file)


def workers_of(pid: int) -> list[int]:
    """Processes that work for a process: its children, but for the one that only counts shared memory."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return [child for child in found if not _only_counts(child)]


def _only_counts(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return True


def set_stage(place: Path, seed: int) -> None:
    """Write model, data, symmetry, a population to be aligned, and one of other networks."""
    place.mkdir(parents=True)
    (place / "model.py").write_text(MODEL)
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(40, 2)).astype("float32")
    np.savez(place / "train.npz", x=inputs, y=np.sin(inputs.sum(axis=1, keepdims=True)))
    for name in ("input", "other"):
        generator = torch.Generator().manual_seed(seed + len(name))
        networks = {key: torch.randn(MEMBERS, *shape, generator=generator) for key, shape in SHAPES.items()}
        population = Population.from_stacked(networks, chain=[i // 6 for i in range(MEMBERS)])
        with Population.writer(place / name, population.spec, shard_members=PER_SHARD, name="a") as writer:
            writer.extend(population)
    log = place.with_name("stage.log")
    for words in (
        ["discover", "model.py:net", "--output", "symmetry.json"],
        [*VERBS["sample"].words[:-1], "compile=false", "--seed", "4", "-o", "other-chain"],
    ):
        process = Process(words, place, log)
        if process.wait():
            raise RuntimeError(f"the stage cannot be set: {process.text()}")
    stale = Process(
        [*VERBS["align"].words, "--tolerance", "0.5"],
        place,
        log,
        lambda: setattr(align_journal.Journal, "close", lambda self: None),
    )
    if stale.wait():
        raise RuntimeError(f"the stage cannot be set: {stale.text()}")
    shutil.rmtree(place / "aligned")
    (place / "aligned.journal").rename(place / "stale.journal")


def result(verb: Verb, place: Path) -> dict[str, Any]:
    """Everything that a command has made, in a form that can be compared bit for bit."""
    output = place / verb.output
    if verb.name == "compact":
        tensors, facts = read_tensors(output)
        return {
            "tensors": tensors,
            "facts": sorted(facts.items()),
            "record": json.loads(output.with_suffix(".json").read_text())["record"]["values"],
        }
    population = Population.open(output)
    if verb.name == "sample":
        told: Any = read_info(output)
        population = by_chain(population)
    else:
        told = json.loads((output / "record.json").read_text())["record"]["values"]
    found: dict[str, Any] = {"tensors": {name: value.clone() for name, value in population.stacked().items()}}
    return {**found, "chain": population.chain, "density": population.log_density, "told": told}


def equal(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return both and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    return bool(a == b)
