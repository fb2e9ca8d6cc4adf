"""Part one: does a permutation that was planted at the start survive training, and what does it cost?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import onebasin as ob
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import CompactWorkspace, Setting, distance, setting
from onebasin_papers.numbers import mean_line, mean_number, mean_text
from onebasin_papers.study import Part
from onebasin_papers.verdicts import CAVEAT, SURE, graded, grows, survives

report = ob.reporting


@dataclass(frozen=True)
class Row:
    """One pair.

    Attributes:
        planted: transpositions of P.
        after: those that matching activations finds after training.
        by_weights: those that matching weights finds.
        silent: hidden units of m0 that no training example activates; matching activations cannot tell them apart.
            None where they were not counted.
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
    silent: int | None
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


def sgd(workspace: CompactWorkspace, rate: float = 1.0) -> ob.Ensemble:
    """The paper's training; with prior=None it is plain cross-entropy without weight decay."""
    settings = workspace.settings
    return ob.Ensemble(optimizer="sgd", lr=rate * settings.rate, momentum=0.9, batch=64, epochs=settings.epochs)


def pairs(workspace: CompactWorkspace, run: int) -> list[Pair]:
    """One pair for each number of transpositions; see `CompactSettings.retrained` for what is trained."""
    here, settings = setting(workspace), workspace.settings
    elements = [here.planted(swaps, workspace.generator("planted", run, swaps)) for swaps in settings.planted]
    if settings.retrained:
        starts = [here.start(workspace, "planted", run, swaps) for swaps in settings.planted]
        begun = [
            state
            for element, start in zip(elements, starts, strict=True)
            for state in (start, here.symmetry.apply(element, start))
        ]
        trained = list(_train(workspace, f"planted-{run}", begun))
        ends = zip(trained[::2], trained[1::2], strict=True)
        return [Pair(*fields) for fields in zip(elements, zip(begun[::2], begun[1::2], strict=True), ends, strict=True)]
    start = here.start(workspace, "planted", run)
    first, second = _train(workspace, f"planted-{run}", [start, start])
    return [
        Pair(element, (start, here.symmetry.apply(element, start)), (first, here.symmetry.apply(element, second)))
        for element in elements
    ]


def _train(workspace: CompactWorkspace, name: str, starts: Sequence[ob.State], rate: float = 1.0) -> ob.Population:
    """Networks trained by SGD from these starts, each with its own order of the examples."""
    problem = setting(workspace).problem
    method, start = sgd(workspace, rate), ob.Population.from_states(starts)
    return workspace.sample(name, problem.model, problem.train, method, chains=len(starts), prior=None, start=start)


def compare_pair(here: Setting, swaps: int, pair: Pair) -> Row:
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
        midpoint_barrier(here, *pair.start),
        midpoint_barrier(here, a, b),
        midpoint_barrier(here, moved, b),
    )


def midpoint_barrier(here: Setting, a: ob.State, b: ob.State) -> float:
    """Barrier of the test loss where the paper's code takes it."""
    return ob.barrier(here.problem.model, a, b, here.problem.test, points=3).midpoint


@dataclass(frozen=True)
class LearningRateTrial:
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


def try_learning_rate(workspace: CompactWorkspace, factor: float) -> LearningRateTrial:
    """Try a multiple of the learning rate on two networks per run; the permutation is planted after training."""
    here, settings = setting(workspace), workspace.settings
    swaps = settings.planted[2 * len(settings.planted) // 3]
    starts = [here.start(workspace, "faster", run) for run in range(settings.runs) for _ in range(2)]
    trained = _train(workspace, f"faster-{factor:g}", starts, factor)
    changes, apart, loss = [], [], []
    for run in range(settings.runs):
        a, b = trained.member(2 * run), trained.member(2 * run + 1)
        element = here.planted(swaps, workspace.generator("faster", run))
        moved = here.symmetry.apply(element, b)
        changes.append(here.swaps_by_weights(a, moved) - swaps)
        apart.append(distance(a, b) / distance(a, moved))
        loss.append((here.loss(a) + here.loss(b)) / 2)
    return LearningRateTrial(factor * settings.rate, changes, apart, loss)


CLOSE = 0.015  # of all units: how near a published number of transpositions has to be to stand beside ours
Rows = list[list[Row]]  # run -> one row for each number of transpositions


def published_near(swaps: int, units: int) -> published.Swapped | None:
    """What the paper found at the same share of the largest possible number of transpositions; None if nothing."""
    share = swaps / (units - 1)
    near = min(published.TRANSPOSITIONS, key=lambda key: abs(key / (published.UNITS - 1) - share))
    close = abs(near / (published.UNITS - 1) - share) < CLOSE
    return published.TRANSPOSITIONS[near] if close else None


def columns_of(rows: Rows, take: Callable[[Row], float]) -> list[list[float]]:
    """Values of all runs at each number of transpositions."""
    return [[take(row) for row in column] for column in zip(*rows, strict=True)]


def planted_figure(rows: Rows, most: int) -> report.Figure:
    """The three left panels of the paper's figure 2; at most `most` transpositions are possible."""
    share = [row.planted / most for row in rows[0]]
    theirs = [key / (published.UNITS - 1) for key in published.TRANSPOSITIONS]
    paper = list(published.TRANSPOSITIONS.values())
    x = report.Axis("planted transpositions (share of the most)", low=0, high=1)
    scale, scale_paper = fmean([run_rows[-1].start for run_rows in rows]), paper[-1].start

    def dashed(name: str, values: Sequence[float], shade: int) -> report.Series:
        return report.Series(name, tuple(theirs), tuple(values), dashed=True, shade=shade)

    numbers = report.Panel(
        "lines",
        "Number of transpositions",
        x,
        report.Axis("found after training (share)", low=0, high=1),
        (
            mean_line("this run", share, columns_of(rows, lambda row: row.after / most), shade=0),
            dashed("published", [row.after / (published.UNITS - 1) for row in paper], 1),
        ),
        (report.Rule("", direction="diagonal"),),
    )
    distances = report.Panel(
        "lines",
        "Squared distance of weights",
        x,
        report.Axis("squared distance (relative)", low=0),
        (
            mean_line("at the start", share, columns_of(rows, lambda row: row.start / scale), shade=0),
            mean_line("trained", share, columns_of(rows, lambda row: row.trained / scale), shade=1),
            mean_line("trained, swaps undone", share, columns_of(rows, lambda row: row.undone / scale), shade=2),
            dashed("at the start, published", [row.start / scale_paper for row in paper], 0),
            dashed("trained, published", [row.trained / scale_paper for row in paper], 1),
        ),
    )
    barriers = report.Panel(
        "lines",
        "Barrier",
        x,
        report.Axis("barrier (nats)"),
        (
            mean_line("at the start", share, columns_of(rows, lambda row: row.start_barrier), shade=0),
            mean_line("trained", share, columns_of(rows, lambda row: row.barrier), shade=1),
            mean_line("trained, swaps undone", share, columns_of(rows, lambda row: row.undone_barrier), shade=2),
            dashed("trained, published", [row.barrier for row in paper], 1),
        ),
    )
    return report.Figure(
        "transpositions-kept",
        "Do planted transpositions survive training, and how high is the barrier they leave?",
        f"Means over {len(rows)} runs, bands of one standard error; dashed: MNIST 784-512-10, read off figure 2 of the "
        "paper. Numbers are relative to the largest possible one, distances to the largest one at the start, since the "
        "networks differ in width. Barriers are those of the test loss at the midpoint.",
        (numbers, distances, barriers),
    )


_COLUMNS = (
    report.Column("planted", "number of swaps of two hidden units between the two networks at the start", digits=0),
    report.Column("after / before", "number found by matching activations after training, divided by the planted one"),
    report.Column("by weights", "the same, found by matching weights"),
    report.Column(
        "silent units", "hidden units that no training example activates: matching activations guesses them", digits=1
    ),
    report.Column(
        "distance, start", "squared distance between all weights of the two networks before training", digits=2
    ),
    report.Column("distance, trained", "the same after training", digits=2),
    report.Column(
        "distance, undone", "the same after training, with the planted permutation undone", "lower", digits=3
    ),
    report.Column(
        "barrier", "test loss in the middle between the two networks minus the mean of theirs", "lower", unit="nats"
    ),
    report.Column("barrier, undone", "the same with the planted permutation undone", "lower", digits=5, unit="nats"),
)


def planted_table(rows: Rows, most: int) -> report.Table:
    """All pairs, one row for each number of transpositions that the paper's figure has too."""
    body = []
    for column in zip(*rows, strict=True):
        paper = published_near(column[0].planted, most + 1)
        silent = _counted(column)
        if len(rows[0]) > len(published.TRANSPOSITIONS) and paper is None:
            continue  # of a long grid only what stands in the paper's figure to be read
        body.append(
            (
                report.Number(column[0].planted),
                mean_number([row.after / row.planted for row in column], paper and _ratio(paper)),
                mean_number([row.by_weights / row.planted for row in column]),
                mean_number(silent) if silent else None,
                mean_number([row.start for row in column], paper and paper.start),
                mean_number([row.trained for row in column], paper and paper.trained),
                mean_number([row.undone for row in column], paper and paper.undone),
                mean_number([row.barrier for row in column], paper and paper.barrier),
                mean_number([row.undone_barrier for row in column]),
            )
        )
    return report.Table(
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


def rates_table(rates: Sequence[LearningRateTrial], swaps: int) -> report.Table:
    """What larger learning rates do."""
    return report.Table(
        "transpositions-rates",
        f"Does it still hold when training moves weights further? ({swaps} planted transpositions)",
        (
            report.Column("learning rate", "of SGD; the first one is that of the other experiments here", digits=4),
            report.Column(
                "change",
                "mean absolute change of the number of transpositions by training, units matched by weights",
                "lower",
                digits=2,
            ),
            report.Column(
                "apart",
                "squared distance with the permutation undone, divided by the distance with it: 0 for networks that "
                "are the same up to the permutation, 1 for strangers",
            ),
            report.Column("test loss", "of the trained networks", "lower", unit="nats"),
        ),
        tuple(
            (
                report.Number(trial.rate),
                mean_number([float(abs(change)) for change in trial.changes]),
                mean_number(trial.apart),
                mean_number(trial.loss),
            )
            for trial in rates
        ),
        f"± one standard error over {len(rates[0].changes)} runs",
        "Ours; the paper has one learning rate. SGD treats all units alike, so the permutation is planted after the "
        "training of two networks from one start, which gives what training the permuted network gives up to rounding.",
    )


_STRANGERS = 31  # networks that are matched to the next one
NAME, TITLE = "transpositions", "Does a permutation planted at the start survive training?"


def run(workspace: CompactWorkspace) -> report.Section:
    """Train all pairs and compare them."""
    here, settings = setting(workspace), workspace.settings
    rows: Rows = []
    unrelated: list[ob.State] = []
    for which in range(settings.runs):
        trained_pairs = pairs(workspace, which)
        rows.append([])
        for swaps, pair in zip(settings.planted, trained_pairs, strict=True):
            workspace.progress(
                len(rows[-1]) + which * len(trained_pairs), settings.runs * len(trained_pairs), "comparing pairs"
            )
            rows[-1].append(compare_pair(here, swaps, pair))
        unrelated += [pair.trained[0] for pair in (trained_pairs if settings.retrained else trained_pairs[:1])]
    strangers = [here.swaps(a, b) for a, b in pairwise(unrelated[:_STRANGERS])]
    rates = [try_learning_rate(workspace, factor) for factor in settings.rates]
    claims = (_survival(rows, rates), _growth(rows, here.most), _unrelated(strangers, here.chance))
    return report.Section(
        NAME,
        TITLE,
        _text(here, rows, strangers, rates),
        (
            planted_figure(rows, here.most),
            planted_table(rows, here.most),
            rates_table(rates, settings.planted[2 * len(settings.planted) // 3]),
        ),
        claims,
    )


PART = Part(NAME, TITLE, run, ("units", "planted", "runs", "retrained", "epochs", "rate", "rates"))


def _text(here: Setting, rows: Rows, strangers: Sequence[int], rates: Sequence[LearningRateTrial]) -> tuple[str, ...]:
    flat, last = [row for run_rows in rows for row in run_rows], [run_rows[-1] for run_rows in rows]
    chance, silent = here.chance, _counted(flat)
    peak = max(columns_of(rows, lambda row: row.barrier), key=fmean)
    layers = " and ".join(str(units) for _, units in chance.sizes.values())
    fast = rates[-1]
    unseen = (
        " Matching activations cannot tell units apart that no example activates: there are "
        f"{mean_text(silent, 1)} of them per network."
        if silent
        else ""
    )
    return (
        f"Training changes the planted number of transpositions by at most {_most(row.change for row in flat)} of "
        f"{chance.maximum} when units are matched by activations, and by at most "
        f"{_most(row.change_by_weights for row in flat)} when they are matched by weights. The barrier between the two "
        f"networks rises to {mean_text(peak)} nats with the number of swapped units, and is at most "
        f"{max(row.undone_barrier for row in flat):.4f} once the swaps are undone.",
        f"Each pair starts as one network ({here.widths}, {here.problem.name}) and a copy whose hidden units were "
        "permuted by a known number of transpositions (swaps of two units). Both are trained by SGD with their own "
        f"order of the examples.{unseen}",
        f"Undone, the two are {mean_text([row.undone for row in last], 2)} apart (squared), against "
        f"{mean_text([row.trained for row in last], 1)} with all units misplaced: an easy test, as it was in the paper "
        f"(0.31 against 666). With {fast.rate:g} as learning rate the undone distance is {fmean(fast.apart):.0%} of "
        f"the misplaced one, and the number changes by {_list(fast.changes)} in {len(fast.changes)} runs.",
        f"Networks from unrelated starts are matched with {mean_text([float(value) for value in strangers], 1)} "
        f"transpositions; a random permutation of {layers} units has {chance.expected:.1f} ± {chance.spread:.1f}. The "
        "number between unrelated networks says that they are unrelated, and nothing else.",
    )


def _counted(rows: Iterable[Row]) -> list[float]:
    """Silent units of each network, where they were counted."""
    return [float(row.silent) for row in rows if row.silent is not None]


def _most(changes: Iterable[int]) -> int:
    return max(map(abs, changes))


def _list(values: Sequence[int]) -> str:
    return ", ".join(f"{value:+d}" if value else "0" for value in values)


def _survival(rows: Rows, rates: Sequence[LearningRateTrial]) -> report.Claim:
    flat = [row for run_rows in rows for row in run_rows]
    changes, by_weights = [row.change for row in flat], [row.change_by_weights for row in flat]
    apart = fmean([run_rows[-1].undone / run_rows[-1].trained for run_rows in rows])
    verdict = survives(changes, by_weights, published.LARGEST_CHANGE)
    silent = _counted(flat)
    count = f" ({fmean(silent):.1f} per network here)" if silent else ""
    guessed = (
        f"Matching activations guesses units that no example activates{count}; matching weights does not. "
        if verdict == CAVEAT
        else ""
    )
    return report.Claim(
        "The number of transpositions between two networks survives training.",
        verdict,
        f"in {len(flat)} pairs the number changes by at most {_most(changes)} by activations and {_most(by_weights)} "
        f"by weights (criterion: at most {published.LARGEST_CHANGE} by activations; by weights alone gives a caveat)",
        f"at most {published.LARGEST_CHANGE} of 511 in five runs, by activations",
        f"{guessed}Undone, the networks are {apart:.2%} as far apart as with all units misplaced (0.05 % in the "
        f"paper), an easy test; at learning rate {rates[-1].rate:g} they are {fmean(rates[-1].apart):.0%} as far "
        f"apart, and the number changes by at most {_most(rates[-1].changes)} by weights.",
    )


def _growth(rows: Rows, most: int) -> report.Claim:
    """Judged up to where the published curve has its peak."""
    upto = published.PEAK / (published.UNITS - 1) + CLOSE
    rising = [[row for row in run_rows if row.planted / most <= upto] for run_rows in rows]
    verdict, correlations = grows(
        [float(row.planted) for row in rising[0]], [[row.barrier for row in run_rows] for run_rows in rising]
    )
    highest = max(columns_of(rows, lambda row: row.barrier), key=fmean)
    return report.Claim(
        "The loss barrier between two networks grows with the number of transpositions between them.",
        verdict,
        f"rank correlation {mean_text(correlations)} up to two thirds of the largest number, highest barrier "
        f"{mean_text(highest)} nats "
        "(criterion: at least 0.9 in every run)",
        "rises from 0.000 to 0.314 nats at 344 of 511, then 0.28",
        "The barrier is largely a count of misplaced units.",
    )


def _unrelated(strangers: Sequence[int], chance: ob.Transpositions) -> report.Claim:
    expected = chance.expected
    values = [float(value) for value in strangers]
    off = (fmean(values) - expected) / (chance.spread / len(values) ** 0.5)
    return report.Claim(
        "Independently trained networks are a random permutation apart (our reading; the paper does not test it).",
        graded(abs(off) < SURE, partly=False),
        f"{mean_text(values, 1)} transpositions between {len(values)} pairs of strangers, {expected:.1f} expected of "
        "random "
        f"permutations, {off:+.1f} standard errors off (criterion: less than {SURE:g})",
        f"about {published.SWAPS_BEFORE} of 511",
    )
