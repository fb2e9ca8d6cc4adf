"""Can a thousand networks of a million weights be fitted from disk in little memory?

    python -m benchmarks.fitting [--members 1000] [--weights 1000000] [--rank 20] [--folder DIR] [--quick]

A population with a few planted directions is written to disk, fitted ("diagonal", "low-rank") and deleted. Times are
given in units of reading the whole population once (every weight summed), since a fit of a few passes cannot be faster
than them. Memory is what the process holds beyond the files themselves; see `benchmarks.memory`. What was planted says
whether the answer is right: the standard deviation of every weight, and the variance along the directions.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.memory import Peak
from benchmarks.targets import Targets, head
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import LowRank
from onebasin.posterior.posterior import Posterior
from onebasin.state import TensorSpec

LIMIT = 4e9
BLOCK = 50  # members written at a time
PLANTED = 20


def shapes(weights: int) -> dict[str, tuple[int, ...]]:
    """Tensors of an MLP with about so many weights: one large, the others small."""
    wide = max(1, weights // 1000)
    return {"0.weight": (wide, 900), "0.bias": (wide,), "2.weight": (99, wide)}


def directions(size: int, rank: int) -> Tensor:
    """Planted directions (rank, size), lengths from 1 down to 1/2 times sqrt(size)."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(1.0, 0.5, rank)
    return lengths[:, None] * torch.randn(rank, size, generator=generator)


def write(path: Path, members: int, weights: int) -> int:
    """Write the population, x = 1 + z1 + z2 @ directions with standard normal z1 and z2; returns its bytes."""
    spec = {name: TensorSpec(shape, torch.float32) for name, shape in shapes(weights).items()}
    sizes = [tensor.size for tensor in spec.values()]
    planted, generator = directions(sum(sizes), PLANTED), torch.Generator().manual_seed(0)
    with Population.writer(path, spec) as writer:
        for start in range(0, members, BLOCK):
            count = min(BLOCK, members - start)
            rows = 1 + torch.randn(count, sum(sizes), generator=generator)
            rows.addmm_(torch.randn(count, PLANTED, generator=generator), planted)
            pieces = zip(spec.items(), rows.split(sizes, 1), strict=True)
            block = {name: piece.reshape(count, *tensor.shape) for (name, tensor), piece in pieces}
            writer.extend(Population.from_stacked(block))
    return Population.open(path).nbytes


def read_once(population: Population) -> float:
    """Seconds to sum every weight."""
    start = time.perf_counter()
    for _, block in population.blocks():
        for value in block.values():
            value.sum()
    return time.perf_counter() - start


def errors(found: Posterior, members: int, size: int) -> tuple[float, float]:
    """Root mean square error of standard deviations in Monte-Carlo errors; share of the factor that was planted."""
    planted = directions(size, PLANTED)
    true = (1 + planted.square().sum(0)).sqrt()
    std = found.components[0].covariance.std()
    z = float(((std / true - 1) * math.sqrt(2 * (members - 1))).square().mean().sqrt())
    shape = found.components[0].covariance
    if not isinstance(shape, LowRank):
        return z, math.nan
    basis = torch.linalg.qr(planted.T).Q
    along = (basis.T @ shape.factor).square().sum() / shape.factor.square().sum()
    return z, float(along)


def measure(population: Population, rank: int, targets: Targets) -> None:
    """Fit both families and judge."""
    members, size = len(population), sum(tensor.size for tensor in population.spec.values())
    reading = min(read_once(population) for _ in range(2))
    print(f"reading once: {reading:.1f} s")
    print(f"{'family':12s} {'seconds':>8s} {'readings':>9s} {'peak GB':>8s} {'std error':>10s} {'planted':>8s}")
    for family, options in (("diagonal", {}), ("low-rank", {"rank": rank})):
        start = time.perf_counter()
        with Peak() as peak:
            found = fit(population, family, **options)
        seconds = time.perf_counter() - start
        z, along = errors(found, members, size)
        print(
            f"{family:12s} {seconds:8.1f} {seconds / reading:9.1f} {peak.nbytes / 1e9:8.2f} {z:10.2f} {along:8.3f}",
            flush=True,
        )
        held = f"{peak.nbytes / 1e9:.2f} GB"
        targets.judge(f"{family} fit of {members:,} x {size:,} under 4 GB", held, peak.nbytes < LIMIT)
        # Members share the planted factors, so standard deviations err together: about 1 up to a factor.
        targets.judge(f"{family} standard deviations within sampling error", f"{z:.2f} of it", z < 2)
        if family == "low-rank":
            targets.judge("low-rank directions lie in the planted ones", f"{along:.3f} of their variance", along > 0.95)


def main() -> int:
    """Write, fit, delete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--weights", type=int, default=1_000_000)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--folder", default=None, help="where to write; the system's temporary folder by default")
    parser.add_argument("--quick", action="store_true", help="a tenth of the networks and of the weights")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    targets = Targets()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        nbytes = write(Path(folder) / "population", options.members // part, options.weights // part)
        population = Population.open(Path(folder) / "population")
        head("Fitting a population from disk", f"{population}; {nbytes / 1e9:.1f} GB; load {os.getloadavg()[0]:.1f}")
        measure(population, options.rank, targets)
    return targets.close()


if __name__ == "__main__":
    raise SystemExit(main())
