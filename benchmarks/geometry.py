"""Geometry of weight space: least mass against a convex solver, canonical forms, exchangeability, transpositions.

The peer is `cvxpy` in an environment of its own, with its default solver; its time is that of `Problem.solve`.

    python -m benchmarks.geometry [--seeds 10] [--only PART ...] [--no-peers] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import onebasin as ob
from benchmarks.mnist import ABSENT, load
from benchmarks.peers.environment import PeerMissing, call
from benchmarks.planted import built, only, varied
from benchmarks.population_speed import scattered
from benchmarks.targets import Targets, head, spread
from benchmarks.train import DEEP, Recipe, epochs, fresh, mlp, trained
from onebasin import Population, State, Symmetry
from onebasin.alignment.balance import balance
from onebasin.alignment.canonical import canonicalise
from onebasin.alignment.exchangeability import exchangeability
from onebasin.alignment.match import match
from onebasin.alignment.transpositions import transpositions
from onebasin.state import state_of
from tests.models import BATTERY, missing
from tests.models.pretrained import ResNet20, ani, data_dir, resnet20, tutorial_cnn

SMALL = (64, 64, 64, 10)
PARTS = ("balance", "speed", "canonical", "mass", "exchange", "swaps")


def mass(state: State, biases: bool) -> float:
    """Sum of squares of the weights, in float64."""
    return sum(
        float(value.double().square().sum()) for name, value in state.items() if biases or not name.endswith("bias")
    )


def best_time(job: Callable[[], object], repeats: int) -> float:
    """The median of a few runs."""
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        started = time.perf_counter()
        job()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


# ------------------------------------------------------------------ least mass


def balance_table(seeds: int, targets: Targets) -> None:
    head(f"Least mass of {'-'.join(map(str, SMALL))} against cvxpy", f"{seeds} networks; seconds of one network")
    symmetry = ob.discover(mlp(SMALL), torch.zeros(1, SMALL[0]))
    networks = [fresh(SMALL, seed) for seed in range(seeds)]
    population = Population.from_states([fresh(SMALL, seed) for seed in range(1000)])
    for biases in (False, True):
        name = "with biases" if biases else "without biases"
        arrays = {f"{number}/{key}": value for number, state in enumerate(networks) for key, value in state.items()}
        try:
            told, _ = call("cvxpy", arrays, *(["--biases"] if biases else []))
        except PeerMissing as reason:
            print(f"skipped: {reason}")
            return
        wide = [{key: value.double() for key, value in state.items()} for state in networks]
        ours = [mass(balance(state, symmetry, biases=biases).state, biases) for state in wide]
        theirs = [row["optimum"] for row in told["networks"]]
        gaps = [mine / other - 1 for mine, other in zip(ours, theirs, strict=True)]
        one = [best_time(partial(balance, state, symmetry, biases=biases), 3) for state in networks]
        each = best_time(partial(balance, population, symmetry, biases=biases), 3) / len(population)
        other = [row["seconds"] for row in told["networks"]]
        print(
            f"{name}: onebasin {spread([1e3 * t for t in one])} ms alone, {1e3 * each:.3f} ms in a population of 1,000"
        )
        print(f"{'':<{len(name) + 2}}cvxpy    {spread([1e3 * t for t in other])} ms ({told['networks'][0]['name']})")
        worst = max(gaps, key=abs)
        targets.judge(f"optimum of cvxpy to 1e-6, {name}", f"worst {worst:+.1e}", abs(worst) <= 1e-6)
        ratio = statistics.median(other) / each
        targets.judge(f"500 x faster in a population, {name}", f"{ratio:,.0f} x", ratio >= 500)
        ratio = statistics.median(other) / statistics.median(one)
        targets.judge(f"500 x faster alone, {name}", f"{ratio:,.0f} x", ratio >= 500)


def speed_table(members: int, targets: Targets) -> None:
    head("Balance of ResNet-20 sized networks", f"{members:,} members in memory, float32, batch norms included")
    model = built(ResNet20, 0)
    symmetry = ob.discover(model, torch.zeros(2, 3, 32, 32))
    generator = torch.Generator().manual_seed(0)
    base = varied(state_of(model), generator)
    stacked = {
        name: value.expand(members, *value.shape).clone()
        if not value.is_floating_point()
        else value * (0.5 + torch.rand(members, *value.shape, generator=generator))
        for name, value in base.items()
    }
    population = Population.from_stacked(stacked)
    seconds = best_time(lambda: balance(population, symmetry), 1)
    print(f"  {population}")
    targets.judge("at least 100 networks per second", f"{members / seconds:,.0f} per second", members / seconds >= 100)


# ------------------------------------------------------------------ canonical forms


def canonical_table(quick: bool, targets: Targets) -> None:
    head("Canonical forms over the battery", "largest |c(g.w) - c(w)| over the largest weight, float64, 3 elements g")
    print(f"{'':<28}{'unit-norm, max':>16}{'balanced, max':>16}")
    worst = 0.0
    for case in BATTERY[:: 12 if quick else 1]:
        if reason := missing(case):
            print(f"{case.name:<28} skipped: {reason}")
            continue
        model = case.build()
        symmetry = ob.discover(model, case.inputs())
        state = varied(state_of(model), torch.Generator().manual_seed(0))
        state = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
        errors = [invariance(state, symmetry, scale) for scale in ("unit-norm", "balanced")]
        worst = max(worst, *errors)
        mark = "" if max(errors) <= 1e-10 else "  <--"
        print(f"{case.name:<28}" + "".join(f"{error:>16.1e}" for error in errors) + mark)
    targets.judge("canonical forms agree to 1e-10", f"worst {worst:.1e}", worst <= 1e-10)


def invariance(state: State, symmetry: Symmetry, scale: str) -> float:
    """How far the canonical forms of equivalent networks are apart."""
    first = canonicalise(state, symmetry, scale=scale, order="max").state
    largest = 0.0
    for seed in range(3):
        other = canonicalise(symmetry.apply(symmetry.random(seed), state), symmetry, scale=scale, order="max").state
        for name, value in first.items():
            if value.is_floating_point() and value.numel():
                error = float((other[name] - value).abs().max() / value.abs().max().clamp_min(1e-300))
                largest = max(largest, error)
    return largest


# ------------------------------------------------------------------ real networks


def real_networks(quick: bool) -> Iterator[tuple[str, State, Symmetry]]:
    """Trained networks whose units have positive scales. (Those of the ANI-1x ensemble, with CELU, have none.)"""
    image = torch.zeros(2, 3, 32, 32)
    for name, model in (("ResNet-20, CIFAR-10", resnet20()), ("tutorial CNN, CIFAR-10", tutorial_cnn())):
        yield name, state_of(model), ob.discover(model, image)
    digits = None if quick else load()
    if digits is not None:
        symmetry = ob.discover(mlp(DEEP.widths), torch.zeros(1, 784))
        for seed, state in enumerate(trained(DEEP, [fresh(DEEP.widths, s) for s in range(4)], range(4), digits)):
            yield f"MLP 3 x 512, MNIST, {seed}", state, symmetry


def mass_table(quick: bool) -> None:
    head("Mass of trained networks", "sum of squares before and after balancing; batch norms keep their scale")
    if data_dir() is None:
        print("skipped: ../shared/data is not beside the project")
        return
    print(f"{'':<26}{'before':>12}{'after':>12}{'excess':>10}{'dead units':>12}")
    for name, state, symmetry in real_networks(quick):
        found = balance(state, symmetry, norms="keep")
        before, after, excess = (float(value) for value in (found.mass_before, found.mass_after, found.excess))
        print(f"{name:<26}{before:>12.2f}{after:>12.2f}{excess:>9.1f}%{len(found.dead):>12}")


def exchange_table(seeds: int, quick: bool, targets: Targets) -> None:
    many, recipe = (20 if quick else 300), Recipe(widths=(784, 16, 10), rate=0.05, batch=100, epochs=1, examples=2000)
    head(
        f"Exchangeability of {'-'.join(map(str, recipe.widths))}",
        f"{seeds} ensembles of {many} networks trained alone, against {many} epochs of one training run",
    )
    digits = load()
    if digits is None:
        print(ABSENT)
        return
    symmetry = ob.discover(mlp(recipe.widths), torch.zeros(1, 784))
    found = []
    for first in range(0, seeds * many, many):
        members = range(first, first + many)
        *_, ensemble = epochs(recipe, [fresh(recipe.widths, seed) for seed in members], members, digits)
        found.append(exchangeability(Population.from_stacked(ensemble), symmetry).rows[0].p)
    walk = epochs(replace(recipe, epochs=many), [fresh(recipe.widths, 0)], [0], digits)
    chain = Population.from_states({name: value[0].clone() for name, value in draw.items()} for draw in walk)
    run = exchangeability(chain, symmetry, chain=[0] * many)
    print(f"one run\n{run}\n")
    print("p of the ensembles: " + ", ".join(f"{p:.2f}" for p in sorted(found)))
    below = sum(p < 0.05 for p in found)
    # Of ten true hypotheses three or more fall below 0.05 in 1 of 87 cases.
    targets.judge("ensembles pass (p below 0.05 in at most 2)", f"{below} of {seeds} below", below <= 2)
    targets.judge("one run is rejected", "it passed" if run.passed else "it is", not run.passed)


def swaps_table(seeds: int) -> None:
    head("Transpositions", "of the element that moves the second network onto the first; random ones in brackets")
    widths = (784, 512, 10)
    symmetry = only(ob.discover(mlp(widths), torch.zeros(1, widths[0])), ("permutation",))
    pairs = [(fresh(widths, 2 * seed), fresh(widths, 2 * seed + 1)) for seed in range(seeds)]
    counts = [int(transpositions(match(a, b, symmetry).element, symmetry).total) for a, b in pairs]
    print(f"  independent 784-512-10: {spread(counts, 1)}  [505.2 ± 2.3]")
    population = scattered(SMALL, 2, 0)
    small = only(ob.discover(mlp(SMALL), torch.zeros(1, SMALL[0])), ("permutation",))
    print(f"  moved copy {'-'.join(map(str, SMALL))}: {transpositions(match(*population, small).element, small)}")
    if data_dir() is not None:
        atoms = tuple(torch.zeros(2, 384) for _ in range(4))
        group = ob.discover(ani(0), atoms)
        for member in range(1, 4):
            found = match(state_of(ani(0)), state_of(ani(member)), group)
            print(f"  ANI-1x 0 and {member}: {transpositions(found.element, group)}, {found.verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--no-peers", action="store_true", help="without the peers that must be installed")
    parser.add_argument("--quick", action="store_true", help="does everything run? The figures mean nothing")
    options = parser.parse_args()
    seeds, targets = 2 if options.quick else options.seeds, Targets()
    parts: dict[str, Callable[[], None]] = {
        "balance": lambda: balance_table(seeds, targets),
        "speed": lambda: speed_table(20 if options.quick else 1000, targets),
        "canonical": lambda: canonical_table(options.quick, targets),
        "mass": lambda: mass_table(options.quick),
        "exchange": lambda: exchange_table(seeds, options.quick, targets),
        "swaps": lambda: swaps_table(seeds),
    }
    for name in PARTS:
        if name in options.only and not (options.no_peers and name == "balance"):
            parts[name]()
    return targets.close() and not options.quick


if __name__ == "__main__":
    sys.exit(main())
