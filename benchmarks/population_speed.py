"""Many networks: is consensus linear in their number, better than its peers, and at home on the disk?

python -m benchmarks.population_speed measure FOLDER     # what `disk_table` runs in a process of its own
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import onebasin as ob
from benchmarks.memory import Peak
from benchmarks.peers import coordinate
from benchmarks.planted import only
from benchmarks.targets import Targets, head, spread
from benchmarks.train import CACHE, fresh, mlp
from onebasin import Population, State, Symmetry
from onebasin.alignment.align import align

SMALL, LARGE = (64, 64, 64, 10), (784, 512, 10)
ROOT = Path(__file__).resolve().parents[1]


def symmetry_of(widths: tuple[int, ...]) -> Symmetry:
    """Permutations of an MLP."""
    return only(ob.discover(mlp(widths), torch.zeros(1, widths[0])), ("permutation",))


def independent(widths: tuple[int, ...], members: int, seed: int) -> Population:
    """Networks that know nothing of each other."""
    return Population.from_states(fresh(widths, seed * 1_000_000 + member) for member in range(members))


def scattered(widths: tuple[int, ...], members: int, seed: int, noise: float = 1.0) -> Population:
    """One network, moved along its orbit by a random element per member, with noise: what samples of a chain are."""
    generator = torch.Generator().manual_seed(seed)
    symmetry, centre = symmetry_of(widths), fresh(widths, seed)
    stacked = {
        name: value + noise * value.std() * torch.randn(members, *value.shape, generator=generator)
        for name, value in centre.items()
    }
    return symmetry.apply(symmetry.random(generator, members=members), Population.from_stacked(stacked))


def mean_overlap(stacked: State) -> float:
    """Mean of <w_i, w_j> over all pairs: (|sum w|^2 - sum |w|^2) / (N (N - 1))."""
    many = len(next(iter(stacked.values())))
    total = sum(float(value.double().sum(0).square().sum()) for value in stacked.values())
    own = sum(float(value.double().square().sum()) for value in stacked.values())
    return (total - own) / (many * (many - 1))


def linearity(seeds: int, sizes: tuple[int, int], targets: Targets) -> None:
    """Time of consensus for two sizes of a population, in alternation."""
    symmetry = symmetry_of(SMALL)
    few, many = sizes
    for kind, make in (("one network, moved, unit noise", scattered), ("independent networks", independent)):
        align(make(SMALL, few, 99), symmetry, reference="consensus")  # warm up
        times: dict[int, list[float]] = {few: [], many: []}
        for seed in range(seeds):
            for size in sizes:
                population = make(SMALL, size, seed)
                started = time.perf_counter()
                align(population, symmetry, reference="consensus")
                times[size].append(time.perf_counter() - started)
        ratios = [long / short for long, short in zip(times[many], times[few], strict=True)]
        print(f"{kind}: {few} in {spread(times[few])} s, {many} in {spread(times[many])} s")
        claim = f"time({many}) / time({few}) at most {1.2 * many / few:.0f}, {kind}"
        targets.judge(claim, spread(ratios, 1), statistics.median(ratios) <= 1.2 * many / few)


def quality(seeds: int, members: int, targets: Targets) -> None:
    """Mean pairwise overlap after alignment, of three ways to do it."""
    symmetry = symmetry_of(SMALL)
    axes = coordinate.axes_of(symmetry)
    print(f"\nmean <w_i, w_j> of {members} networks {'-'.join(map(str, SMALL))}, and seconds")
    for kind, make in (("one network, moved, unit noise", scattered), ("independent networks", independent)):
        found: dict[str, list[tuple[float, float]]] = {"consensus": [], "first": [], "MergeMany": []}
        for seed in range(seeds):
            population = make(SMALL, members, seed)
            for name in found:
                started = time.perf_counter()
                if name == "MergeMany":
                    generator = torch.Generator().manual_seed(seed)
                    moved = Population.from_states(coordinate.merge_many(list(population), axes, generator))
                else:
                    moved = align(population, symmetry, reference=name).population
                seconds = time.perf_counter() - started
                found[name].append((mean_overlap(moved.stacked()), seconds))
        print(f"{kind}:")
        for name, rows in found.items():
            print(f"  {name:<12}{spread([row[0] for row in rows], 3):<36}{spread([row[1] for row in rows])} s")
        for name in ("first", "MergeMany"):
            gains = [100 * (a[0] / b[0] - 1) for a, b in zip(found["consensus"], found[name], strict=True)]
            claim = f"at least the objective of {name}, {kind}"
            targets.judge(claim, f"{spread(gains, 1)} %", statistics.mean(gains) >= -1e-4)


def population_table(seeds: int, quick: bool, targets: Targets) -> None:
    head(f"Consensus, {'-'.join(map(str, SMALL))}", "permutations only; peers: align to the first network, MergeMany")
    linearity(1 if quick else min(seeds, 3), (5, 50) if quick else (100, 1000), targets)
    quality(seeds, 4 if quick else 20, targets)


# ------------------------------------------------------------------ from disk


def measure(folder: Path) -> dict[str, float]:
    """Align the population of a folder into a folder beside it; seconds, peak memory, overlap before and after."""
    symmetry = symmetry_of(LARGE)
    population = Population.open(folder / "population")
    with Peak() as peak:
        started = time.perf_counter()
        found = align(population, symmetry, reference="consensus", path=folder / "aligned")
        seconds = time.perf_counter() - started
    overlaps = streamed_overlap(population), streamed_overlap(found.population)
    return {
        "seconds": seconds,
        "bytes": peak.nbytes,
        "sweeps": found.sweeps,
        "before": overlaps[0],
        "after": overlaps[1],
    }


def streamed_overlap(population: Population) -> float:
    """`mean_overlap` of networks on disk, block by block."""
    sums: dict[str, Tensor] = {}
    own = 0.0
    for _, block in population.blocks():
        for name, value in block.items():
            sums[name] = sums.get(name, 0) + value.double().sum(0)
            own += float(value.double().square().sum())
    many = len(population)
    return (sum(float(value.square().sum()) for value in sums.values()) - own) / (many * (many - 1))


def disk_table(members: int, targets: Targets) -> None:
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        with Population.writer(Path(place) / "population", fresh(LARGE, 0)) as writer:
            for member in range(members):
                writer.append(fresh(LARGE, member))
        size = sum(file.stat().st_size for file in (Path(place) / "population").iterdir()) / 1e9
        head(
            f"{members:,} networks {'-'.join(map(str, LARGE))} from disk, {size:.2f} GB of shards",
            "independent networks, consensus; memory is the peak of anonymous memory above the start",
        )
        command = [sys.executable, "-m", "benchmarks.population_speed", "measure", place]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        print(done.stderr.strip()[-2000:])
        targets.judge("runs", f"it ended with code {done.returncode}", False)
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  mean <w_i, w_j> {found['before']:.3f} before, {found['after']:.3f} after, {found['sweeps']} sweeps")
    minutes, memory = found["seconds"] / 60, found["bytes"] / 1e9
    targets.judge("at most 10 minutes", f"{minutes:.1f} minutes", minutes <= 10)
    targets.judge("less than 2 GB above the shards", f"{memory:.2f} GB", memory < 2)


if __name__ == "__main__" and sys.argv[1:2] == ["measure"]:
    print(json.dumps(measure(Path(sys.argv[2]))))
