"""Where the CPU time of alignment, fits and distances goes, by kind of work.

    python -m benchmarks.where [--only WORK ...]     # PYTHONPATH=OTHER:. python -m benchmarks.where    for another tree

One thread, one process, under `cProfile`, which makes Python dearer than it is: shares are those of the profile, the
milliseconds of a call without it (median of five). Kinds: assignments (the solver), products of matrices, copies
(gathers, concatenations, conversions), launches (all other operations of torch and numpy), and Python.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import onebasin as ob
from benchmarks.matching import fresh, symmetry_of
from onebasin import Population

KINDS = ("assignments", "products", "copies", "launches", "Python")
PRODUCTS = ("addmm", "matmul", "bmm", "'mm'", "tensordot", "einsum", " dot", "linalg_qr", "linalg_solve")
COPIES = ("index_select", "clone", "copy_", ".cat", ".stack", "contiguous", "'to'", "'double'", "gather", "astype")
WIDTHS = (64, 64, 64, 10)


def kind_of(function: tuple[str, int, str]) -> str:
    file, _, name = function
    if "linear_sum_assignment" in name:
        return "assignments"
    if any(word in name for word in PRODUCTS):
        return "products"
    if any(word in name for word in COPIES) and file == "~":
        return "copies"
    return "launches" if file == "~" and ("torch" in name or "numpy" in name) else "Python"


def perceptrons(members: int, seed: int) -> Population:
    shapes = {f"{2 * k}.weight": (b, a) for k, (a, b) in enumerate(itertools.pairwise(WIDTHS))}
    shapes |= {f"{2 * k}.bias": (b,) for k, b in enumerate(WIDTHS[1:])}
    noise = torch.Generator().manual_seed(seed)
    return Population.from_stacked({n: 0.1 * torch.randn(members, *s, generator=noise) for n, s in shapes.items()})


def works() -> dict[str, Callable[[], object]]:
    layers = [layer for a, b in itertools.pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
    small = ob.discover(nn.Sequential(*layers), torch.zeros(2, WIDTHS[0]))
    few, many, others = perceptrons(40, 0), perceptrons(1000, 1), perceptrons(100, 2)
    hundred = perceptrons(100, 3)
    found: dict[str, Callable[[], object]] = {}
    for name in ("mlp", "resnet", "encoder"):
        symmetry, a, b = symmetry_of(name, "all"), fresh(name, 0), fresh(name, 1)
        found[f"match {name}"] = lambda a=a, b=b, s=symmetry: ob.match(a, b, s)
        element = symmetry.random(0)
        found[f"apply {name}"] = lambda e=element, a=a, s=symmetry: s.apply(e, a)
    found["consensus 40 x 64-64-64-10"] = lambda: ob.align(few, small)
    found["balance 100 x 64-64-64-10"] = lambda: ob.balance(hundred, small)
    found["canonicalise 100 x 64-64-64-10"] = lambda: ob.canonicalise(hundred, small)
    found["fit 1,000 x 9k"] = lambda: ob.fit(many)
    found["fit 1,000 x 9k, low rank"] = lambda: ob.fit(many, "low-rank", rank=20)
    found["discrepancy 100 against 100"] = lambda: ob.discrepancy(hundred, others, symmetry=small)
    return found


def measure(call: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """CPU seconds of a call, and the share of each kind of work."""
    call()
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    profile = cProfile.Profile()
    profile.runcall(call)
    shares = dict.fromkeys(KINDS, 0.0)
    for function, (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        shares[kind_of(function)] += own
    total = sum(shares.values())
    return statistics.median(seconds), {kind: value / total for kind, value in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="works whose names contain one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| work | ms | " + " | ".join(KINDS) + " |\n| --- | --- |" + " --- |" * len(KINDS))
    for name, call in works().items():
        if not options.only or any(word in name for word in options.only):
            seconds, shares = measure(call)
            cells = " | ".join(f"{100 * share:.0f} %" for share in shares.values())
            print(f"| {name} | {1e3 * seconds:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
