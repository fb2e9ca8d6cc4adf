"""Is a population written and read at least half as fast as raw safetensors?

    python -m benchmarks.population [--members 1000] [--hidden 64] [--repeats 7] [--folder DIR]

The same stacked MLPs go to disk and back, in alternation: through `Population` (checksums, fsync, rename), through
`safetensors.torch.save_file` / `load_file`, and through the latter with an fsync, which `Population` always does.
Every loaded byte is touched (one sum per tensor) inside the timed region, since a mapped file is not read otherwise.
Reads come from the page cache in all three. Above 512 MB a population has several shards: to have all members in
one tensor then costs an allocation and a copy, which a single mapped file does not need (try --members 5000).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onebasin.population.population import Population

TARGET = 2.0  # at most twice the time of raw safetensors


def make_population(members: int, hidden: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (hidden, 784), "0.bias": (hidden,), "2.weight": (10, hidden), "2.bias": (10,)}
    return {name: torch.randn(members, *shape, generator=generator) for name, shape in shapes.items()}


def touch(tensors: dict[str, Tensor]) -> float:
    return sum(float(tensor.sum()) for tensor in tensors.values())


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_population(tensors: dict[str, Tensor], folder: Path) -> tuple[float, float]:
    path = folder / "population"
    population = Population.from_stacked(tensors)
    write = seconds(lambda: population.save(path))
    return write, seconds(lambda: touch(Population.open(path).stacked()))


def time_raw(tensors: dict[str, Tensor], folder: Path, *, sync: bool = False) -> tuple[float, float]:
    path = folder / "raw.safetensors"

    def write() -> None:
        save_file(tensors, path)
        if sync:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    return seconds(write), seconds(lambda: touch(load_file(path)))


CONTENDERS: dict[str, Callable[[dict[str, Tensor], Path], tuple[float, float]]] = {
    "onebasin": time_population,
    "raw safetensors": time_raw,
    "raw + fsync": lambda tensors, folder: time_raw(tensors, folder, sync=True),
}


def measure(tensors: dict[str, Tensor], repeats: int, parent: str | None) -> dict[str, list[tuple[float, float]]]:
    """Alternate the contenders, each time on a fresh folder and after pending writes of others are on the disk."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for repeat in range(repeats + 1):
        for name, run in CONTENDERS.items():
            folder = Path(tempfile.mkdtemp(dir=parent))
            os.sync()
            result = run(tensors, folder)
            shutil.rmtree(folder)
            if repeat:  # the first round warms up allocators and disk
                times[name].append(result)
    return times


def report(times: dict[str, list[tuple[float, float]]], nbytes: int) -> float:
    print(f"{'':16s} {'write s':>22s} {'read s':>22s} {'round trip s':>22s} {'MB/s':>7s}")
    medians = {}
    for name, rows in times.items():
        columns = [[write for write, _ in rows], [read for _, read in rows], [sum(row) for row in rows]]
        cells = [f"{statistics.median(c):.3f} ({min(c):.3f}-{max(c):.3f})" for c in columns]
        medians[name] = statistics.median(columns[2])
        print(f"{name:16s} {cells[0]:>22s} {cells[1]:>22s} {cells[2]:>22s} {nbytes / 1e6 / medians[name]:7.0f}")
    return medians["onebasin"] / medians["raw safetensors"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=None, help="where to write; the system's temporary folder by default")
    options = parser.parse_args()
    tensors = make_population(options.members, options.hidden)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    population = f"{options.members:,} MLPs 784-{options.hidden}-10"
    print(f"{population}, {nbytes / 1e6:.0f} MB, median (min-max) of {options.repeats}")
    ratio = report(measure(tensors, options.repeats, options.folder), nbytes)
    verdict = "met" if ratio <= TARGET else "MISSED"
    print(f"round trip takes {ratio:.2f} times raw safetensors (without fsync); target at most {TARGET:.1f}: {verdict}")


if __name__ == "__main__":
    main()
