"""What `benchmarks.scale` measures, each part in a process of its own:

python -m benchmarks.scale_measures PART NUMBER ...
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import onebasin as ob
from benchmarks import scale_populations as populations
from benchmarks.memory import Peak, anonymous_bytes
from benchmarks.train import CACHE, mlp
from onebasin import Population, Symmetry
from onebasin.alignment.align import align
from onebasin.alignment.balance import balance
from onebasin.alignment.canonical import canonicalise
from onebasin.examples.published import optunet, resnet18, resnet20_frn_silu
from onebasin.parallel import Executor, open_executor

GROUP = Path("/sys/fs/cgroup/memory")  # of control groups, version 1
LIMIT = 2_000_000_000


class Watch:
    """Seconds of one step after the other, and the peak of memory over all of them."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.steps[name] = time.perf_counter() - started
        print(f"    {name} {self.steps[name]:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def watching() -> Iterator[tuple[Watch, dict[str, Any]]]:
    """Time steps, and measure memory; what is found is in the dict at the end."""
    watch, found = Watch(), dict[str, Any]()
    before = anonymous_bytes(os.getpid())
    with Peak() as peak:
        yield watch, found
    found |= {"steps": watch.steps, "bytes": before + peak.nbytes}


def permutations_of(widths: Sequence[int]) -> Symmetry:
    return ob.discover(mlp(widths), torch.zeros(1, widths[0]))


def whole_pipeline(members: int, workers: int) -> dict[str, Any]:
    """Discover, align, balance, fit, and compare two halves of OptuNet-sized networks."""
    population, model = populations.optunets(members), optunet()
    with watching() as (watch, found), _cluster(watch, workers) as executor:
        with watch.step("discover"):
            symmetry = ob.discover(model, torch.zeros(2, 1, 28, 28))
        with watch.step("align to consensus"):
            aligned = align(population, symmetry, executor=executor)
        with watch.step("balance"):
            balance(population, symmetry, executor=executor)
        with watch.step("compact (fit)"):
            ob.fit(aligned.population, executor=executor)
        with watch.step("MMD, raw and without symmetries"):
            half = members // 2
            ob.discrepancy(population[:half], population[half:], symmetry=symmetry, permutations=199, executor=executor)
    return {**found, "sweeps": aligned.sweeps}


@contextmanager
def _cluster(watch: Watch, workers: int, name: str | None = None) -> Iterator[Executor]:
    """A cluster whose workers have begun."""
    with watch.step("start workers"):
        executor = open_executor(workers=workers, executor=name)
        list(executor.map(_nothing, range(workers), shared=None))
    try:
        yield executor
    finally:
        executor.close()


def _nothing(shared: None, shard: int) -> None:
    """Only to be there."""


def resnet20(members: int, workers: int) -> dict[str, Any]:
    """Consensus of ResNet-20s from disk to disk."""
    folder, model = populations.resnet20s(members), resnet20_frn_silu()
    symmetry = ob.discover(model, torch.zeros(2, 3, 32, 32))
    with tempfile.TemporaryDirectory(dir=CACHE) as place, watching() as (watch, found), watch.step("align"):
        result = align(Population.open(folder), symmetry, path=Path(place) / "aligned", workers=workers)
    return {**found, "sweeps": result.sweeps, "before": result.before, "after": result.objective}


def resnet18s(members: int) -> dict[str, Any]:
    """One match of a ResNet-18, 11 million weights, in this process."""
    model = resnet18()
    symmetry = ob.discover(model, torch.zeros(2, 3, 32, 32))
    population = populations.independent(model, members)
    with watching() as (watch, found), watch.step("align"):
        result = align(population, symmetry)
    return {**found, "sweeps": result.sweeps, "each": watch.steps["align"] / (members * result.sweeps)}


def backends(members: int, workers: int) -> dict[str, Any]:
    """The same alignment on joblib's processes and on Ray, 16 networks per shard, in alternation."""
    population, symmetry = populations.perceptrons(members), permutations_of(populations.SMALL)
    times: dict[str, list[float]] = {"joblib": [], "ray": []}
    results: dict[str, Any] = {}
    watch = Watch()
    with _cluster(watch, workers) as local:
        started = watch.steps["start workers"]
        with _cluster(watch, workers, "local") as remote:
            for _ in range(3):
                for name, executor in (("joblib", local), ("ray", remote)):
                    begun = time.perf_counter()
                    results[name] = align(population, symmetry, reference="first", executor=executor).population
                    times[name].append(time.perf_counter() - begun)
    same = all(torch.equal(results["ray"].tensor(name), results["joblib"].tensor(name)) for name in population.names)
    begins = {"joblib": started, "ray": watch.steps["start workers"]}
    return {"times": times, "start": begins, "same": same, "shards": -(-members // 16)}


def by_members(sizes: Sequence[int], workers: int) -> dict[str, Any]:
    """Seconds of every operation on populations of different sizes."""
    symmetry = permutations_of(populations.SMALL)
    rows = []
    watch = Watch()
    with _cluster(watch, workers) as executor:
        steps: dict[str, Callable[[Population], Any]] = {
            "align": lambda own: align(own, symmetry, executor=executor),
            "balance": lambda own: balance(own, symmetry, executor=executor),
            "canonicalise": lambda own: canonicalise(own, symmetry, executor=executor),
            "fit": lambda own: ob.fit(own, executor=executor),
        }
        for members in sizes:
            population = populations.perceptrons(members)
            row: dict[str, float] = {"members": members}
            for name, step in steps.items():
                row[name], found = _timed(partial(step, population))
                if name == "align":
                    row["sweeps"] = found.sweeps
            rows.append(row)
            print(f"    {row}", file=sys.stderr, flush=True)
    return {"rows": rows}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The best of a few runs, of which short ones get more, and the result."""
    best, spent, found = math.inf, 0.0, None
    while spent < 1.0:
        started = time.perf_counter()
        found = work()
        own = time.perf_counter() - started
        best, spent = min(best, own), spent + own
    return best, found


def by_width(widths: Sequence[int]) -> dict[str, Any]:
    """Seconds of a consensus of 4 networks with two hidden layers of different widths, in this process."""
    rows = []
    for width in widths:
        sizes = (64, width, width, 10)
        symmetry, population = permutations_of(sizes), populations.perceptrons(4, sizes)
        seconds, found = _timed(partial(align, population, symmetry))
        rows.append({"width": width, "align": seconds, "sweeps": found.sweeps})
        print(f"    {rows[-1]}", file=sys.stderr, flush=True)
    return {"rows": rows}


def large(members: int, workers: int) -> dict[str, Any]:
    """A population of many gigabytes with 2 GB: canonicalised from disk to disk, fitted, and checked."""
    folder, symmetry = (
        populations.on_disk("perceptrons", mlp(populations.WIDE), members),
        permutations_of(populations.WIDE),
    )
    _confine()
    population = Population.open(folder)
    places: dict[str, Any] = {"workers": workers}
    with tempfile.TemporaryDirectory(dir=CACHE) as place, watching() as (watch, found):
        with watch.step("canonicalise"):
            canonicalise(population, symmetry, path=Path(place) / "normal", **places)
        normal = Population.open(Path(place) / "normal")
        with watch.step("fit"):
            fitted = ob.fit(normal, **places)
        with watch.step("check"):
            problems = normal.check()
    whole = len(normal) == members and not problems and len(fitted.mean) == len(population.names)
    return {**found, "gigabytes": population.nbytes / 1e9, "whole": whole, "confined": _confined()}


def _confine() -> None:
    """Let the system kill this process and its children when they take more than 2 GB, files and all."""
    group = GROUP / f"onebasin-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT), encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        print(f"    no control group: {error}", file=sys.stderr)


def _confined() -> bool:
    limit = GROUP / f"onebasin-{os.getpid()}" / "memory.limit_in_bytes"
    return limit.exists() and int(limit.read_text(encoding="ascii")) <= LIMIT


def release(pid: int) -> None:
    """Remove the control group of a process that has ended; what it started takes a moment to follow."""
    group = GROUP / f"onebasin-{pid}"
    for _ in range(50):
        if not group.exists():
            return
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.1)


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "optunet": whole_pipeline,
    "resnet20": resnet20,
    "resnet18": resnet18s,
    "ray": backends,
    "members": lambda *sizes: by_members(sizes[1:], sizes[0]),
    "width": lambda *widths: by_width(widths),
    "memory": large,
}


if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]](*map(int, sys.argv[2:]))))
