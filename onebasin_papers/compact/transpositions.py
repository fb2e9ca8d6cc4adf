"""Part one: does a permutation that was planted at the start survive training, and what does it cost?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import onebasin as ob
from onebasin_papers.compact import presets as published
from onebasin_papers.compact.setting import Runs, Setting, distance, setting
from onebasin_papers.compact.verdicts import CAVEAT, SURE, graded, grows, survives
from onebasin_papers.numbers import line, measured, told
from onebasin_papers.study import Part

# ----------------------------------------------------------------------
# Planted permutations: m1 = P m0 with a known P, both trained, each with its own order of the examples.


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

    element: ob.Element
    start: tuple[ob.State, ob.State]
    trained: tuple[ob.State, ob.State]


def sgd(bench: Runs, rate: float = 1.0) -> ob.Ensemble:
    """The paper's training; with prior=None it is plain cross-entropy without weight decay."""
    plan = bench.plan
    return ob.Ensemble(optimizer="sgd", lr=rate * plan.rate, momentum=0.9, batch=64, epochs=plan.epochs)


def pairs(bench: Runs, run: int) -> list[Pair]:
    """One pair for each number of transpositions; see `CompactPlan.retrained` for what is trained."""
    here, plan = setting(bench), bench.plan
    elements = [
        ob.element_with(here.symmetry, swaps, bench.stream("planted", run, swaps), "paper") for swaps in plan.planted
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


def _trained(bench: Runs, name: str, starts: Sequence[ob.State], rate: float = 1.0) -> ob.Population:
    """Networks trained by SGD from these starts, each with its own order of the examples."""
    problem = setting(bench).problem
    options = {"chains": len(starts), "prior": None, "start": ob.Population.from_states(starts)}
    return bench.networks(name, problem.model, problem.train, sgd(bench, rate), options)


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


def midpoint(here: Setting, a: ob.State, b: ob.State) -> float:
    """Barrier of the test loss where the paper's code takes it."""
    return ob.barrier(here.problem.model, a, b, here.problem.test, points=3).midpoint


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
        element = ob.element_with(here.symmetry, swaps, bench.stream("faster", run), "paper")
        moved = here.symmetry.apply(element, b)
        changes.append(here.swaps_by_weights(a, moved) - swaps)
        apart.append(distance(a, b) / distance(a, moved))
        loss.append((here.loss(a) + here.loss(b)) / 2)
    return Faster(factor * plan.rate, changes, apart, loss)


# ----------------------------------------------------------------------
# Planted permutations as a figure and two tables: the three left panels of the paper's figure 2.


CLOSE = 0.015  # of all units: how near a published number of transpositions has to be to stand beside ours
Rows = list[list[Row]]  # run -> one row for each number of transpositions


def beside(swaps: int, units: int) -> published.Swapped | None:
    """What the paper found at the same share of the largest possible number of transpositions; None if nothing."""
    share = swaps / (units - 1)
    near = min(published.TRANSPOSITIONS, key=lambda key: abs(key / (published.UNITS - 1) - share))
    close = abs(near / (published.UNITS - 1) - share) < CLOSE
    return published.TRANSPOSITIONS[near] if close else None


def columns_of(rows: Rows, take: Callable[[Row], float]) -> list[list[float]]:
    """Values of all runs at each number of transpositions."""
    return [[take(row) for row in column] for column in zip(*rows, strict=True)]


def planted_figure(rows: Rows, units: int) -> ob.reporting.Figure:
    """The three left panels of the paper's figure 2."""
    share = [row.planted / (units - 1) for row in rows[0]]
    theirs = [key / (published.UNITS - 1) for key in published.TRANSPOSITIONS]
    paper = list(published.TRANSPOSITIONS.values())
    x = ob.reporting.Axis("planted transpositions (share of the most)", low=0, high=1)
    scale, scale_paper = fmean([own[-1].start for own in rows]), paper[-1].start

    def dashed(name: str, values: Sequence[float], shade: int) -> ob.reporting.Series:
        return ob.reporting.Series(name, tuple(theirs), tuple(values), dashed=True, shade=shade)

    numbers = ob.reporting.Panel(
        "lines",
        "Number of transpositions",
        x,
        ob.reporting.Axis("found after training (share)", low=0, high=1),
        (
            line("this run", share, columns_of(rows, lambda row: row.after / (units - 1)), shade=0),
            dashed("published", [row.after / (published.UNITS - 1) for row in paper], 1),
        ),
        (ob.reporting.Rule("", direction="diagonal"),),
    )
    distances = ob.reporting.Panel(
        "lines",
        "Squared distance of weights",
        x,
        ob.reporting.Axis("squared distance (relative)", low=0),
        (
            line("at the start", share, columns_of(rows, lambda row: row.start / scale), shade=0),
            line("trained", share, columns_of(rows, lambda row: row.trained / scale), shade=1),
            line("trained, swaps undone", share, columns_of(rows, lambda row: row.undone / scale), shade=2),
            dashed("at the start, published", [row.start / scale_paper for row in paper], 0),
            dashed("trained, published", [row.trained / scale_paper for row in paper], 1),
        ),
    )
    barriers = ob.reporting.Panel(
        "lines",
        "Barrier",
        x,
        ob.reporting.Axis("barrier (nats)"),
        (
            line("at the start", share, columns_of(rows, lambda row: row.start_barrier), shade=0),
            line("trained", share, columns_of(rows, lambda row: row.barrier), shade=1),
            line("trained, swaps undone", share, columns_of(rows, lambda row: row.undone_barrier), shade=2),
            dashed("trained, published", [row.barrier for row in paper], 1),
        ),
    )
    return ob.reporting.Figure(
        "transpositions-kept",
        "Do planted transpositions survive training, and how high is the barrier they leave?",
        f"Means over {len(rows)} runs, bands of one standard error; dashed: MNIST 784-512-10, read off figure 2 of the "
        "paper. Numbers are relative to the largest possible one, distances to the largest one at the start, since the "
        "networks differ in width. Barriers are those of the test loss at the midpoint.",
        (numbers, distances, barriers),
    )


_COLUMNS = (
    ob.reporting.Column(
        "planted", "number of swaps of two hidden units between the two networks at the start", digits=0
    ),
    ob.reporting.Column(
        "after / before", "number found by matching activations after training, divided by the planted one"
    ),
    ob.reporting.Column("by weights", "the same, found by matching weights"),
    ob.reporting.Column(
        "silent units", "hidden units that no training example activates: matching activations guesses them", digits=1
    ),
    ob.reporting.Column(
        "distance, start", "squared distance between all weights of the two networks before training", digits=2
    ),
    ob.reporting.Column("distance, trained", "the same after training", digits=2),
    ob.reporting.Column(
        "distance, undone", "the same after training, with the planted permutation undone", "lower", digits=3
    ),
    ob.reporting.Column(
        "barrier", "test loss in the middle between the two networks minus the mean of theirs", "lower", unit="nats"
    ),
    ob.reporting.Column(
        "barrier, undone", "the same with the planted permutation undone", "lower", digits=5, unit="nats"
    ),
)


def planted_table(rows: Rows, units: int) -> ob.reporting.Table:
    """All pairs, one row for each number of transpositions that the paper's figure has too."""
    body = []
    for column in zip(*rows, strict=True):
        paper = beside(column[0].planted, units)
        if len(rows[0]) > len(published.TRANSPOSITIONS) and paper is None:
            continue  # of a long grid only what stands in the paper's figure to be read
        body.append(
            (
                ob.reporting.Number(column[0].planted),
                measured([row.after / row.planted for row in column], paper and _ratio(paper)),
                measured([row.by_weights / row.planted for row in column]),
                measured([float(row.silent) for row in column]),
                measured([row.start for row in column], paper and paper.start),
                measured([row.trained for row in column], paper and paper.trained),
                measured([row.undone for row in column], paper and paper.undone),
                measured([row.barrier for row in column], paper and paper.barrier),
                measured([row.undone_barrier for row in column]),
            )
        )
    return ob.reporting.Table(
        "transpositions-table",
        "What planted transpositions become",
        _COLUMNS,
        tuple(body),
        f"± one standard error over {len(rows)} runs",
        "Published values are for MNIST 784-512-10 at the same share of the largest possible number of transpositions.",
    )


def _ratio(paper: published.Swapped) -> float:
    """Transpositions after training over those planted, in the paper's figure."""
    planted = next(key for key, row in published.TRANSPOSITIONS.items() if row is paper)
    return paper.after / planted


def rates_table(found: Sequence[Faster], swaps: int) -> ob.reporting.Table:
    """What larger learning rates do."""
    return ob.reporting.Table(
        "transpositions-rates",
        f"Does it still hold when training moves weights further? ({swaps} planted transpositions)",
        (
            ob.reporting.Column(
                "learning rate", "of SGD; the first one is that of the other experiments here", digits=4
            ),
            ob.reporting.Column(
                "change",
                "mean absolute change of the number of transpositions by training, units matched by weights",
                "lower",
                digits=2,
            ),
            ob.reporting.Column(
                "apart",
                "squared distance with the permutation undone, divided by the distance with it: 0 for networks that "
                "are the same up to the permutation, 1 for strangers",
            ),
            ob.reporting.Column("test loss", "of the trained networks", "lower", unit="nats"),
        ),
        tuple(
            (
                ob.reporting.Number(own.rate),
                measured([float(abs(change)) for change in own.changes]),
                measured(own.apart),
                measured(own.loss),
            )
            for own in found
        ),
        f"± one standard error over {len(found[0].changes)} runs",
        "Ours; the paper has one learning rate. SGD treats all units alike, so the permutation is planted after the "
        "training of two networks from one start, which gives what training the permuted network gives up to rounding.",
    )


# ----------------------------------------------------------------------
# Part one: does a permutation that was planted at the start survive training, and what does it cost?


_STRANGERS = 31  # networks that are matched to the next one
NAME, TITLE = "transpositions", "Does a permutation planted at the start survive training?"


def run(bench: Runs) -> ob.reporting.Section:
    """Train all pairs and compare them."""
    here, plan = setting(bench), bench.plan
    rows: Rows = []
    unrelated: list[ob.State] = []
    for which in range(plan.runs):
        found = pairs(bench, which)
        rows.append([])
        for swaps, pair in zip(plan.planted, found, strict=True):
            bench.show(len(rows[-1]) + which * len(found), plan.runs * len(found), "comparing pairs")
            rows[-1].append(compared(here, swaps, pair))
        unrelated += [pair.trained[0] for pair in (found if plan.retrained else found[:1])]
    strangers = [here.swaps(a, b) for a, b in pairwise(unrelated[:_STRANGERS])]
    rates = [faster(bench, factor) for factor in plan.rates]
    claims = (_survival(rows, rates), _growth(rows, plan.units), _unrelated(strangers, plan.units))
    return ob.reporting.Section(
        NAME,
        TITLE,
        _text(here, rows, strangers, rates),
        (
            planted_figure(rows, plan.units),
            planted_table(rows, plan.units),
            rates_table(rates, plan.planted[2 * len(plan.planted) // 3]),
        ),
        claims,
    )


PART = Part(NAME, TITLE, run)


def _text(here: Setting, rows: Rows, strangers: Sequence[int], rates: Sequence[Faster]) -> tuple[str, ...]:
    flat, last = [row for own in rows for row in own], [own[-1] for own in rows]
    units = here.units
    peak = max(columns_of(rows, lambda row: row.barrier), key=fmean)
    expected, spread = ob.expected_transpositions(units)
    fast = rates[-1]
    return (
        f"Training changes the planted number of transpositions by at most {_most(row.change for row in flat)} of "
        f"{units - 1} when units are matched by activations, and by at most "
        f"{_most(row.change_by_weights for row in flat)} when they are matched by weights. The barrier between the two "
        f"networks rises to {told(peak)} nats with the number of swapped units, and is at most "
        f"{max(row.undone_barrier for row in flat):.4f} once the swaps are undone.",
        f"Each pair starts as one network ({here.widths}, {here.problem.name}) and a copy whose hidden units were "
        "permuted by a known number of transpositions (swaps of two units). Both are trained by SGD with their own "
        "order of the examples. Matching activations cannot tell units apart that no example activates: there are "
        f"{told([float(row.silent) for row in flat], 1)} of them per network.",
        f"Undone, the two are {told([row.undone for row in last], 2)} apart (squared), against "
        f"{told([row.trained for row in last], 1)} with all units misplaced: an easy test, as it was in the paper "
        f"(0.31 against 666). With {fast.rate:g} as learning rate the undone distance is {fmean(fast.apart):.0%} of "
        f"the misplaced one, and the number changes by {_list(fast.changes)} in {len(fast.changes)} runs.",
        f"Networks from unrelated starts are matched with {told([float(value) for value in strangers], 1)} "
        f"transpositions; a random permutation of {units} units has {expected:.1f} ± {spread:.1f}. The number between "
        "unrelated networks says that they are unrelated, and nothing else.",
    )


def _most(changes: Iterable[int]) -> int:
    return max(map(abs, changes))


def _list(values: Sequence[int]) -> str:
    return ", ".join(f"{value:+d}" if value else "0" for value in values)


def _survival(rows: Rows, rates: Sequence[Faster]) -> ob.reporting.Claim:
    flat = [row for own in rows for row in own]
    changes, by_weights = [row.change for row in flat], [row.change_by_weights for row in flat]
    apart = fmean([own[-1].undone / own[-1].trained for own in rows])
    verdict = survives(changes, by_weights, published.LARGEST_CHANGE)
    guessed = (
        f"Matching activations guesses units that no example activates ({fmean([row.silent for row in flat]):.1f} per "
        "network here); matching weights does not. "
        if verdict == CAVEAT
        else ""
    )
    return ob.reporting.Claim(
        "The number of transpositions between two networks survives training.",
        verdict,
        f"in {len(flat)} pairs the number changes by at most {_most(changes)} by activations and {_most(by_weights)} "
        f"by weights (criterion: at most {published.LARGEST_CHANGE} by activations; by weights alone gives a caveat)",
        f"at most {published.LARGEST_CHANGE} of 511 in five runs, by activations",
        f"{guessed}Undone, the networks are {apart:.2%} as far apart as with all units misplaced (0.05 % in the "
        f"paper), an easy test; at learning rate {rates[-1].rate:g} they are {fmean(rates[-1].apart):.0%} as far "
        f"apart, and the number changes by at most {_most(rates[-1].changes)} by weights.",
    )


def _growth(rows: Rows, units: int) -> ob.reporting.Claim:
    """Judged up to where the published curve has its peak."""
    upto = published.PEAK / (published.UNITS - 1) + CLOSE
    rising = [[row for row in own if row.planted / (units - 1) <= upto] for own in rows]
    verdict, found = grows([float(row.planted) for row in rising[0]], [[row.barrier for row in own] for own in rising])
    highest = max(columns_of(rows, lambda row: row.barrier), key=fmean)
    return ob.reporting.Claim(
        "The loss barrier between two networks grows with the number of transpositions between them.",
        verdict,
        f"rank correlation {told(found)} up to two thirds of the largest number, highest barrier {told(highest)} nats "
        "(criterion: at least 0.9 in every run)",
        "rises from 0.000 to 0.314 nats at 344 of 511, then 0.28",
        "The barrier is largely a count of misplaced units.",
    )


def _unrelated(strangers: Sequence[int], units: int) -> ob.reporting.Claim:
    expected, spread = ob.expected_transpositions(units)
    values = [float(value) for value in strangers]
    off = (fmean(values) - expected) / (spread / len(values) ** 0.5)
    return ob.reporting.Claim(
        "Independently trained networks are a random permutation apart (our reading; the paper does not test it).",
        graded(abs(off) < SURE, partly=False),
        f"{told(values, 1)} transpositions between {len(values)} pairs of strangers, {expected:.1f} expected of random "
        f"permutations, {off:+.1f} standard errors off (criterion: less than {SURE:g})",
        f"about {published.SWAPS_BEFORE} of 511",
    )
