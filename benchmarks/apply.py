"""Moving a whole population along its orbit against copying the same bytes, in one run.

A population of MLPs 784-512-10 (relu: permutation and scale) is moved by one element for all and by one element per
member. Target: within 3 x of the copy.

    python -m benchmarks.apply [--members 1000] [--repeats 9]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import onebasin as ob

WIDTHS = (784, 512, 10)
TARGET = 3.0


def seconds(function: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    model = nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2]))
    symmetry = ob.discover(model, torch.zeros(1, WIDTHS[0]))
    generator = torch.Generator().manual_seed(0)
    stacked = {
        name: torch.randn(options.members, *tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
    }
    population = ob.Population.from_stacked(stacked)
    size = sum(tensor.nbytes for tensor in stacked.values()) / 1e9
    one, many = symmetry.random(1), symmetry.random(2, members=options.members)
    turned = symmetry.random(3, freedoms=["permutation"], members=options.members)
    jobs = {
        "copy the bytes": lambda: {name: tensor.clone() for name, tensor in stacked.items()},
        "one element for all": lambda: symmetry.apply(one, population),
        "one per member": lambda: symmetry.apply(many, population),
        "one per member, permutations": lambda: symmetry.apply(turned, population),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()  # warm up
    for _ in range(options.repeats):  # alternate, so that noise of the machine hits all alike
        for name, job in jobs.items():
            times[name] += seconds(job, 1)
    copy = statistics.median(times["copy the bytes"])
    print(f"{options.members:,} MLPs {'-'.join(map(str, WIDTHS))}, {size:.2f} GB, {torch.get_num_threads()} threads")
    print(f"{'':<30}{'median':>9}{'min':>9}{'max':>9}{'GB/s':>8}{'ratio':>8}")
    for name, found in times.items():
        median = statistics.median(found)
        print(
            f"{name:<30}{median:>8.3f}s{min(found):>8.3f}s{max(found):>8.3f}s{size / median:>8.1f}{median / copy:>8.2f}"
        )
    worst = max(statistics.median(found) for found in times.values()) / copy
    print(f"target: ratio at most {TARGET}: {'met' if worst <= TARGET else 'MISSED'} (worst {worst:.2f})")


if __name__ == "__main__":
    main()
