"""Planted permutations: m1 = P m0 with a known P, both trained, each with its own order of the examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebasin.align import barrier
from onebasin.align.transpositions import element_with
from onebasin.population import Population
from onebasin.state import State
from onebasin.studies.compact.setting import Runs, Setting, distance, setting
from onebasin.symmetry import Element


@dataclass(frozen=True)
class Row:
    """One pair.

    Attributes:
        planted: transpositions of P.
        after: those that matching activations finds after training.
        by_weights: those that matching weights finds.
        silent: hidden units of m0 that no training example activates; matching activations cannot tell them apart.
        start: |m0 - m1|^2 before training.
        trained: the same after training.
        undone: the same after training, and after P was applied to m0.
        start_barrier: of the test loss at the midpoint before training, in nats.
        barrier: after training.
        undone_barrier: after training, and after P was applied to m0.
    """

    planted: int
    after: int
    by_weights: int
    silent: int
    start: float
    trained: float
    undone: float
    start_barrier: float
    barrier: float
    undone_barrier: float

    @property
    def change(self) -> int:
        """What training did to the number of transpositions, by activations."""
        return self.after - self.planted

    @property
    def change_by_weights(self) -> int:
        """The same by weights."""
        return self.by_weights - self.planted


@dataclass(frozen=True, eq=False)
class Pair:
    """Two networks that differed by P at the start."""

    element: Element
    start: tuple[State, State]
    trained: tuple[State, State]


def sgd(bench: Runs, rate: float = 1.0) -> dict[str, object]:
    """The paper's optimiser: plain cross-entropy, no weight decay."""
    plan = bench.plan
    return {"optimiser": "sgd", "rate": rate * plan.rate, "momentum": 0.9, "batch": 64, "prior": None}


def pairs(bench: Runs, run: int) -> list[Pair]:
    """One pair for each number of transpositions; see `CompactPlan.retrained` for what is trained."""
    here, plan = setting(bench), bench.plan
    elements = [
        element_with(here.symmetry, swaps, bench.stream("planted", run, swaps), "paper") for swaps in plan.planted
    ]
    if plan.retrained:
        starts = [here.start(bench, "planted", run, swaps) for swaps in plan.planted]
        begun = [
            state
            for element, start in zip(elements, starts, strict=True)
            for state in (start, here.symmetry.apply(element, start))
        ]
        trained = list(_trained(bench, f"planted-{run}", begun))
        ends = zip(trained[::2], trained[1::2], strict=True)
        return [Pair(*own) for own in zip(elements, zip(begun[::2], begun[1::2], strict=True), ends, strict=True)]
    start = here.start(bench, "planted", run)
    first, second = _trained(bench, f"planted-{run}", [start, start])
    return [
        Pair(element, (start, here.symmetry.apply(element, start)), (first, here.symmetry.apply(element, second)))
        for element in elements
    ]


def _trained(bench: Runs, name: str, starts: Sequence[State], rate: float = 1.0) -> Population:
    """Networks trained by SGD from these starts, each with its own order of the examples."""
    problem = setting(bench).problem
    options = {**sgd(bench, rate), "modes": len(starts), "epochs": bench.plan.epochs}
    options["start"] = Population.from_states(starts)
    return bench.networks(name, problem.model, problem.train, "ensemble", options)


def compared(here: Setting, swaps: int, pair: Pair) -> Row:
    """Compare the two networks before training, after it, and after P was undone."""
    (a, b), moved = pair.trained, here.symmetry.apply(pair.element, pair.trained[0])
    return Row(
        swaps,
        here.swaps(a, b),
        here.swaps_by_weights(a, b),
        here.silent(a),
        distance(*pair.start),
        distance(a, b),
        distance(moved, b),
        midpoint(here, *pair.start),
        midpoint(here, a, b),
        midpoint(here, moved, b),
    )


def midpoint(here: Setting, a: State, b: State) -> float:
    """Barrier of the test loss where the paper's code takes it."""
    return barrier(here.problem.model, a, b, *here.problem.test, points=3).midpoint


@dataclass(frozen=True)
class Faster:
    """Planted permutations under a larger learning rate.

    Attributes:
        rate: the learning rate.
        changes: what training did to the number of transpositions by weights, of each pair.
        apart: |P m0 - m1|^2 / |m0 - m1|^2 after training, of each pair.
        loss: test loss of each pair, averaged over its networks.
    """

    rate: float
    changes: list[int]
    apart: list[float]
    loss: list[float]


def faster(bench: Runs, factor: float) -> Faster:
    """Try a multiple of the learning rate on two networks per run; the permutation is planted after training."""
    here, plan = setting(bench), bench.plan
    swaps = plan.planted[2 * len(plan.planted) // 3]
    starts = [here.start(bench, "faster", run) for run in range(plan.runs) for _ in range(2)]
    trained = _trained(bench, f"faster-{factor:g}", starts, factor)
    changes, apart, loss = [], [], []
    for run in range(plan.runs):
        a, b = trained.member(2 * run), trained.member(2 * run + 1)
        element = element_with(here.symmetry, swaps, bench.stream("faster", run), "paper")
        moved = here.symmetry.apply(element, b)
        changes.append(here.swaps_by_weights(a, moved) - swaps)
        apart.append(distance(a, b) / distance(a, moved))
        loss.append((here.loss(a) + here.loss(b)) / 2)
    return Faster(factor * plan.rate, changes, apart, loss)
