"""How far two populations are apart: what it costs at scale, whether its p-values are right, and what hangs on a form.

    python -m benchmarks.discrepancy [scale] [null] [law] [forms] [--quick] [--rounds N] [--folder DIR]

Without names everything runs. `scale` writes two populations of 4 GB to the folder (the system's temporary one by
default) and deletes them; their times mean something only on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor, nn

import onebasin as ob
from benchmarks.targets import Targets, head, spread
from onebasin.data.dataset import split
from onebasin.data.load import digits
from onebasin.evaluation.discrepancy import NORMAL_FORMS, discrepancy
from onebasin.evaluation.distances import BLOCK_BYTES, pair_distances
from onebasin.functional.call import global_seed
from onebasin.population.member_storage import FileSource
from onebasin.population.population import Population
from onebasin.state import TensorSpec

WIDTHS = (784, 1014, 200, 10)  # 1,001,000 weights
SLOWER, MEMORY = 2.0, 4e9  # at most so many times the bare products, and bytes
LEVEL = 0.001  # at which a test of uniformity is rejected


# --- scale ------------------------------------------------------------------------------------------------------------


def spec(widths: tuple[int, ...]) -> dict[str, TensorSpec]:
    found = {}
    for layer, (into, out) in enumerate(pairwise(widths)):
        found[f"{2 * layer}.weight"] = TensorSpec((out, into), torch.float32)
        found[f"{2 * layer}.bias"] = TensorSpec((out,), torch.float32)
    return found


def write_population(path: Path, members: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with Population.writer(path, spec(WIDTHS), name="made") as writer:
        for start in range(0, members, 50):
            count = min(50, members - start)
            block = {
                name: torch.randn(count, *tensor.shape, generator=generator) for name, tensor in spec(WIDTHS).items()
            }
            writer.extend(Population.from_stacked(block))


def mapped(population: Population, name: str) -> list[Tensor]:
    """The tensor in each shard, flat, as plain maps of the files."""
    found = []
    for source in population._sources:
        assert isinstance(source, FileSource)
        entry = source.file.entries[name]
        whole = torch.from_file(str(source.path), shared=False, size=source.file.nbytes, dtype=torch.uint8)
        piece = whole[entry.offset : entry.offset + entry.spec.nbytes]
        found.append(piece.view(entry.spec.dtype).view(source.count, -1))
    return found


def bare(a: Population, b: Population) -> float:
    """Nothing but the three products of every block of columns, in float32."""
    m, n = len(a), len(b)
    sums = [torch.zeros(*shape) for shape in ((m, m), (n, n), (m, n))]
    for name, tensor in a.spec.items():
        step = BLOCK_BYTES // (4 * (m + n))
        shards = [mapped(population, name) for population in (a, b)]
        for start in range(0, tensor.size, step):
            x, y = (torch.cat([shard[:, start : start + step] for shard in side]) for side in shards)
            for total, left, right in zip(sums, (x, y, x), (x, y, y), strict=True):
                total.addmm_(left, right.T)
    return float(sums[2].sum())


def judged(a: Population, b: Population, **options: int) -> float:
    return discrepancy(a, b, layers=False, **options).raw.total.squared


WORK: dict[str, Callable[[Population, Population], float]] = {
    "bare products": bare,
    "squared MMD": lambda a, b: judged(a, b, permutations=0, n_resamples=0),
    "with p and interval": judged,
    "each tensor too": lambda a, b: discrepancy(a, b).raw.total.squared,
}


def worker(name: str, folder: Path) -> None:
    """One measurement in a process of its own, whose peak of resident memory counts mapped pages too."""
    a, b = (Population.open(folder / side) for side in ("a", "b"))
    start, before = time.perf_counter(), time.process_time()
    WORK[name](a, b)
    seconds, processor = time.perf_counter() - start, time.process_time() - before
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps([seconds, processor, 1024 * peak]))


def measured(name: str, folder: Path) -> tuple[float, float, int]:
    command = [sys.executable, "-m", "benchmarks.discrepancy", "--worker", name, "--folder", str(folder)]
    seconds, processor, peak = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seconds, processor, peak


def scale(targets: Targets, options: argparse.Namespace) -> None:
    members = 200 if options.quick else 1000
    weights = sum(tensor.size for tensor in spec(WIDTHS).values())
    head("scale", f"{members:,} against {members:,} networks of {weights:,} weights on disk")
    need = 2 * members * weights * 4
    folder = Path(tempfile.mkdtemp(prefix="onebasin-", dir=options.folder))
    try:
        if shutil.disk_usage(folder).free < 1.2 * need:
            print(f"{folder} has no room for {need / 1e9:.1f} GB: give --folder")
            return
        for side, seed in (("a", 0), ("b", 1)):
            write_population(folder / side, members, seed)
        rounds: dict[str, list[tuple[float, float, int]]] = {name: [] for name in WORK}
        for _ in range(options.rounds):
            for name, found in rounds.items():
                found.append(measured(name, folder))
    finally:
        shutil.rmtree(folder)
    best = {name: [min(column) for column in zip(*found, strict=True)] for name, found in rounds.items()}
    first = best["bare products"]
    print(f"{'':20s} {'seconds':>9s} {'x bare':>7s} {'processor s':>12s} {'x bare':>7s} {'GB resident':>12s}")
    for name, (seconds, processor, _) in best.items():
        peak = max(found[2] for found in rounds[name]) / 1e9
        ratios = f"{seconds / first[0]:7.2f} {processor:12.1f} {processor / first[1]:7.2f}"
        print(f"{name:20s} {seconds:9.1f} {ratios} {peak:12.2f}")
    ratio = best["squared MMD"][0] / first[0]
    peak = max(found[2] for name in list(WORK)[1:] for found in rounds[name])
    targets.judge(f"at most {SLOWER:g} times the bare products", f"{ratio:.2f}", ratio <= SLOWER)
    targets.judge(f"at most {MEMORY / 1e9:g} GB resident", f"{peak / 1e9:.2f} GB", peak <= MEMORY)
    absolute(members, weights, best["squared MMD"][0])


def absolute(members: int, weights: int, products: float) -> None:
    """What l1 costs, from a small part of the columns: it is proportional to their number."""
    columns = 4000
    generator = torch.Generator().manual_seed(0)
    a, b = (Population.from_stacked({"w": torch.randn(members, columns, generator=generator)}) for _ in range(2))
    start = time.perf_counter()
    pair_distances(a, b, ("l1",))
    seconds = (time.perf_counter() - start) * weights / columns
    print(f"l1 distances, extrapolated from {columns:,} weights: {seconds:,.0f} s, {seconds / products:.0f} x the MMD")


# --- null -------------------------------------------------------------------------------------------------------------


def mlp(seed: int, widths: tuple[int, ...] = (4, 6, 6, 3)) -> nn.Module:
    with global_seed(seed):
        layers = [layer for into, out in pairwise(widths) for layer in (nn.Linear(into, out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def null(targets: Targets, options: argparse.Namespace) -> None:
    rounds, members, permutations = (60 if options.quick else 400), 24, 99
    head("null", f"p-values of halves of one population of {members} networks, {rounds} populations")
    symmetry = ob.discover(mlp(0), torch.zeros(1, 4))
    inputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    for preset in ("median", "pooled", "paper"):
        found: dict[str, list[float]] = {"raw": [], "balanced/max": [], "function": []}
        for number in range(rounds):
            population = Population.from_models([mlp(1 + members * number + k) for k in range(members)])
            report = discrepancy(
                population[: members // 2], population[members // 2 :], symmetry=symmetry, model=mlp(0), inputs=inputs,
                preset=preset, permutations=permutations, n_resamples=0, layers=False, seed=number,
            )  # fmt: skip
            assert report.mmd_canonical is not None and report.function is not None
            for name, gap in zip(found, (report.raw.total, report.mmd_canonical, report.function), strict=True):
                found[name].append(gap.p_value)
        for name, values in found.items():
            p = torch.tensor(values, dtype=torch.float64)
            jitter = torch.rand(len(p), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            uniform = float(stats.kstest((p - jitter / (1 + permutations)).numpy(), "uniform").pvalue)
            claim = f"p uniform, {preset}, {name}"
            said = f"Kolmogorov-Smirnov p {uniform:.3f}, {100 * float((p <= 0.05).double().mean()):.1f} % below 0.05"
            targets.judge(claim, said, uniform > LEVEL)


# --- law --------------------------------------------------------------------------------------------------------------


def law(targets: Targets, options: argparse.Namespace) -> None:
    """The table of paper-symmetry.md 3.3, with what runs explain beside it.

    Members differ from the reference law by their noise. With d the squared MMD of independent members and v that of
    one run beyond it, runs alone predict that 10 x 10 is (d + v/11) and 1 x 100 is (d + v). Both d and v come from
    designs other than the one that is predicted: d from 100 x 1, v from what runs explain in 10 x 10.
    """
    size, reference, seeds = (200, 200, 10) if options.quick else (1000, 1000, 20)
    head("law", f"runs of {size}-dimensional Gaussian networks against {reference} modes, preset paper, {seeds} seeds")
    print(f"{'design':8s} {'noise':>5s}  {'MMD^2':32s} {'from runs':>9s} {'remainder':>9s}")
    for noise in (0.05, 0.3, 0.7):
        found = {
            runs: torch.tensor(list(designs(runs, noise, size, reference, seeds)), dtype=torch.float64)
            for runs in (1, 10, 100)
        }
        for runs, rows in found.items():
            explained, remainder = rows.mean(0)[1:].tolist()
            design, squared = f"{runs} x {100 // runs}", spread(rows[:, 0].tolist(), 3)
            print(f"{design:8s} {noise:5.2f}  {squared:32s} {explained:9.4f} {remainder:9.4f}")
        ratio = float(found[10][:, 0].mean() / found[1][:, 0].mean())
        d, v = found[100][:, 0], 11 * found[10][:, 1]
        print(f"  10 x 10 / 1 x 100: {ratio:.3f}")
        close(targets, f"noise {noise}: 1 x 100 as runs predict", found[1][:, 0], d + v)
        close(targets, f"noise {noise}: the remainder of 10 x 10 is that of independent members", found[10][:, 2], d)


def close(targets: Targets, claim: str, found: Tensor, expected: Tensor) -> None:
    """Whether two sets of seeds have the same mean, by a t-test of their differences."""
    p = float(stats.ttest_1samp((found - expected).numpy(), 0).pvalue)
    targets.judge(claim, f"{float(found.mean()):.4f} for {float(expected.mean()):.4f}, p {p:.3f}", p > LEVEL)


def designs(runs: int, noise: float, size: int, reference: int, seeds: int) -> Iterator[tuple[float, float, float]]:
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        chain = torch.arange(runs).repeat_interleave(100 // runs)
        x = torch.randn(runs, size, generator=generator)[chain] + noise * torch.randn(100, size, generator=generator)
        y = torch.randn(reference, size, generator=generator)
        a, b = Population.from_stacked({"w": x}, chain=chain), Population.from_stacked({"w": y})
        gap = discrepancy(a, b, preset="paper", permutations=0, n_resamples=0, layers=False).raw.total
        yield gap.squared, gap.explained, gap.remainder


# --- forms ------------------------------------------------------------------------------------------------------------


def forms(targets: Targets, options: argparse.Namespace) -> None:
    """What hangs on the normal form: samplers on the digits against a deep ensemble, in every form."""
    members = 30 if options.quick else 100
    widths = (64, 16, 10)
    train, test = split(*digits(), seed=0)
    head("forms", f"populations of {'-'.join(map(str, widths))} networks on the digits against {members} trained ones")
    ensemble = ob.Ensemble(epochs=30, lr=1e-2)
    samples: dict[str, tuple[ob.Method, int]] = {
        "ensemble": (ensemble, 40),
        "SWAG 10 x 4": (ob.SWAG(epochs=30, lr=1e-2, draws=4, collect=20), 10),
        "SWAG 1 x 40": (ob.SWAG(epochs=30, lr=1e-2, draws=40, collect=20), 1),
        "HMC 4 x 10": (ob.HMC(epochs=30, lr=1e-2, draws=10, warmup=50, leapfrog=20), 4),
    }
    model = mlp(0, widths)
    symmetry = ob.discover(model, torch.zeros(1, 64))
    reference = ob.sample(model, train, ensemble, chains=members, seed=100, compile=False)
    for name, (method, chains) in samples.items():
        population = ob.sample(model, train, method, chains=chains, seed=200, compile=False)
        found = discrepancy(
            population,
            reference,
            symmetry=symmetry,
            normal_forms=NORMAL_FORMS,
            model=model,
            inputs=test[0],
            layers=False,
            n_resamples=500,
        )
        print(f"\n{name}\n{found}")
        if name == "ensemble":
            worst = min(gap.p_value for gap in [found.raw.total, *(one.total for one in found.normal_forms.values())])
            targets.judge(
                "ensemble against ensemble: no form rejects at 0.001", f"smallest p {worst:.3f}", worst > LEVEL
            )


# --- all --------------------------------------------------------------------------------------------------------------

PARTS = {"scale": scale, "null": null, "law": law, "forms": forms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="smaller populations, fewer rounds")
    parser.add_argument("--rounds", type=int, default=2, help="of timing, of which the fastest counts")
    parser.add_argument("--folder", help="where large populations are written")
    parser.add_argument("--worker", choices=list(WORK), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, Path(options.folder))
        return 0
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"expected parts out of {', '.join(PARTS)}, found {unknown[0]}")
    targets = Targets()
    for name in options.parts or PARTS:
        start = time.perf_counter()
        PARTS[name](targets, options)
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    return targets.close()


if __name__ == "__main__":
    raise SystemExit(main())
