"""Alignment against its peers: planted recovery, two independent networks, populations, and barriers.

Peers: coordinate ascent and MergeMany as published with Git Re-Basin (benchmarks/peers/coordinate.py), and `rebasin`
from PyPI in an environment of its own. Ratios come from one run, contenders alternating; the machine decides seconds.

    python -m benchmarks.alignment [--seeds 10] [--trials 20] [--only PART ...] [--no-peers] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

import onebasin as ob
from benchmarks.mnist import ABSENT, load
from benchmarks.peers import coordinate
from benchmarks.peers.coordinate import Axes
from benchmarks.peers.environment import PeerMissing, call
from benchmarks.planted import PROBLEMS, Problem, only, returned
from benchmarks.population_speed import disk_table, population_table
from benchmarks.targets import Targets, head, spread
from benchmarks.train import DEEP, fresh, mlp, trained
from onebasin import State, Symmetry
from onebasin.alignment.barrier import barrier
from onebasin.alignment.match import match

WIDE = (784, 512, 512, 512, 10)
Solution = tuple[Mapping[str, Tensor], State]
"""Orders, and the second network moved by them (and by signs and scales, where a method knows them)."""
Method = Callable[[State, State, Symmetry, Axes, int], Solution]
PARTS = ("planted", "pair", "population", "disk", "mnist")


def objective(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """<a, b> over all tensors, in float64."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def full(a: State, b: State, symmetry: Symmetry, axes: Axes, seed: int) -> Solution:
    element = match(a, b, symmetry).element
    return element.orders, symmetry.apply(element, b)


def cheap(a: State, b: State, symmetry: Symmetry, axes: Axes, seed: int) -> Solution:
    element = match(a, b, symmetry, effort="cheap").element
    return element.orders, symmetry.apply(element, b)


def ascent(a: State, b: State, symmetry: Symmetry, axes: Axes, seed: int) -> Solution:
    orders = coordinate.match(a, b, axes, torch.Generator().manual_seed(seed))
    return orders, coordinate.permuted(b, axes, orders)


OURS, ASCENT, REBASIN = "onebasin full", "coordinate ascent", "rebasin 0.0.47"
METHODS: dict[str, Method] = {OURS: full, "onebasin cheap": cheap, ASCENT: ascent}


# ------------------------------------------------------------------ planted recovery


@dataclass
class Tally:
    """How often a method was exact, and the seconds it took."""

    exact: int = 0
    times: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        """Exact of all, median milliseconds."""
        return (
            f"{self.exact:>3}/{len(self.times):<3}{1e3 * statistics.median(self.times):>8.0f} ms" if self.times else "-"
        )


def recovered(problem: Problem, trials: int) -> dict[str, Tally]:
    """Let each method solve the same planted problems."""
    symmetry = problem.symmetry()
    axes = coordinate.axes_of(symmetry)
    tallies = {name: Tally() for name in METHODS}
    for trial in range(trials):
        a, b, planted = problem.draw(symmetry, trial)
        answer = symmetry.invert(planted).orders
        for name, method in METHODS.items():
            if name == ASCENT and axes is None:
                continue
            started = time.perf_counter()
            orders, moved = method(a, b, symmetry, axes or {}, trial)
            tallies[name].times.append(time.perf_counter() - started)
            same = all(torch.equal(orders[space], order) for space, order in answer.items())
            tallies[name].exact += same if problem.noise else returned(a, moved)
    return tallies


def planted_table(trials: int, targets: Targets) -> None:
    head("Planted recovery", "exact of trials, and median time; - where coordinate ascent has no words for the group")
    print(f"{'':<44}" + "".join(f"{name:<20}" for name in METHODS))
    for problem in PROBLEMS:
        tallies = recovered(problem, trials)
        print(f"{problem.name:<44}" + "".join(f"{tally!s:<20}" for tally in tallies.values()))
        ours = tallies[OURS]
        targets.judge("all exact", f"{ours.exact} of {len(ours.times)}", ours.exact == len(ours.times))


# ------------------------------------------------------------------ two independent networks


@dataclass
class Contender:
    """Objective and seconds per seed; the largest change of outputs, which should be rounding."""

    objectives: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: float = 0.0

    def add(self, a: State, b: State, moved: State, seconds: float) -> None:
        """Judge the network that a method returned, by nothing but its weights."""
        model, inputs = mlp(WIDE), torch.rand(64, WIDE[0], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before, after = (torch.func.functional_call(model, state, (inputs,)) for state in (b, moved))
        self.error = max(self.error, float((before - after).abs().max() / before.abs().max()))
        self.objectives.append(objective(a, moved))
        self.times.append(seconds)


def contest(seeds: int, peers: bool) -> dict[str, Contender]:
    """Every method on the same pairs, one pair after the other."""
    symmetry = only(ob.discover(mlp(WIDE), torch.zeros(1, WIDE[0])), ("permutation",))
    axes = coordinate.axes_of(symmetry) or {}
    found = {name: Contender() for name in (*METHODS, REBASIN)}
    for method in METHODS.values():
        method(fresh(WIDE, 0), fresh(WIDE, 1), symmetry, axes, 0)  # warm up
    for seed in range(seeds):
        a, b = fresh(WIDE, 2 * seed), fresh(WIDE, 2 * seed + 1)
        for name, method in METHODS.items():
            started = time.perf_counter()
            _, moved = method(a, b, symmetry, axes, seed)
            found[name].add(a, b, moved, time.perf_counter() - started)
        if peers:
            arrays = {f"0/{side}/{name}": v for side, state in (("a", a), ("b", b)) for name, v in state.items()}
            told, made = call("rebasin", arrays)
            moved = {name: made[f"0/{name}"] for name in b}
            found[REBASIN].add(a, b, moved, told["times"][0]["seconds"])
    return {name: contender for name, contender in found.items() if contender.times}


def pair_table(seeds: int, peers: bool, targets: Targets) -> None:
    head(
        f"Two independent networks {'-'.join(map(str, WIDE))}",
        f"objective <a, g.b> over all tensors, permutations only, {seeds} seeds; rebasin without its tracing",
    )
    try:
        found = contest(seeds, peers)
    except PeerMissing as reason:
        print(f"rebasin skipped: {reason}")
        found = contest(seeds, False)
    print(f"{'':<20}{'objective':<34}{'seconds':<34}change of outputs")
    for name, contender in found.items():
        numbers = f"{spread(contender.objectives):<34}{spread(contender.times, 3):<34}"
        print(f"{name:<20}{numbers}{contender.error:.0e}")
    ours, ascent = found[OURS], found[ASCENT]
    gains = [100 * (x / y - 1) for x, y in zip(ours.objectives, ascent.objectives, strict=True)]
    targets.judge("at least 5 % above coordinate ascent", f"{spread(gains, 1)} %", statistics.mean(gains) >= 5)
    seconds = statistics.median(ours.times)
    targets.judge("within 1.0 s", f"{seconds:.2f} s", seconds <= 1.0)
    if other := found.get(REBASIN):
        ratios = [x / y for x, y in zip(ours.times, other.times, strict=True)]
        targets.judge("at most 0.3 x the time of rebasin", spread(ratios), statistics.median(ratios) <= 0.3)
        gains = [100 * (x / y - 1) for x, y in zip(ours.objectives, other.objectives, strict=True)]
        targets.judge("a higher objective than rebasin's", f"by {spread(gains, 1)} %", min(gains) > 0)


# ------------------------------------------------------------------ trained networks


def mnist_table(seeds: int, quick: bool, targets: Targets) -> None:
    head("MNIST, 784-512-512-512-10, Adam", f"barrier of the test loss over the chord, 25 points, {seeds} pairs")
    digits = load()
    if digits is None:
        print(ABSENT)
        return
    recipe = DEEP if not quick else type(DEEP)(**{**vars(DEEP), "epochs": 1, "examples": 5_120})
    model = mlp(recipe.widths)
    symmetry = only(ob.discover(model, torch.zeros(1, recipe.widths[0])), ("permutation",))
    members = range(2 * seeds)
    networks = trained(recipe, [fresh(recipe.widths, seed) for seed in members], list(members), digits)
    before, after = [], []
    for a, b in zip(networks[::2], networks[1::2], strict=True):
        aligned = symmetry.apply(match(a, b, symmetry).element, b)
        for other, kept in ((b, before), (aligned, after)):
            kept.append(barrier(model, a, other, (digits.test_images, digits.test_labels), points=25).max)
    print(f"  unaligned {spread(before, 3)}\n  aligned   {spread(after, 4)}")
    targets.judge("unaligned above 0.3", f"{statistics.mean(before):.3f}", statistics.mean(before) > 0.3)
    targets.judge("aligned at most 0.02", f"{statistics.mean(after):.4f}", statistics.mean(after) <= 0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=20, help="planted problems per architecture")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--no-peers", action="store_true", help="without the peers that must be installed")
    parser.add_argument("--quick", action="store_true", help="does everything run? The figures mean nothing")
    options = parser.parse_args()
    seeds, trials = (1, 2) if options.quick else (options.seeds, options.trials)
    targets = Targets()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    parts: dict[str, Callable[[], None]] = {
        "planted": lambda: planted_table(trials, targets),
        "pair": lambda: pair_table(seeds, not options.no_peers, targets),
        "population": lambda: population_table(seeds, options.quick, targets),
        "disk": lambda: disk_table(100 if options.quick else 1000, targets),
        "mnist": lambda: mnist_table(seeds, options.quick, targets),
    }
    for name in PARTS:
        if name in options.only:
            parts[name]()
    return targets.close() and not options.quick


if __name__ == "__main__":
    sys.exit(main())
