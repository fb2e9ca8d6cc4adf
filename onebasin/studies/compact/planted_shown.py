"""Planted permutations as a figure and two tables: the three left panels of the paper's figure 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from onebasin.record import Axis, Column, Figure, Number, Panel, Rule, Series, Table
from onebasin.studies.compact import published
from onebasin.studies.compact.planted import Faster, Row
from onebasin.studies.numbers import line, measured

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


def planted_figure(rows: Rows, units: int) -> Figure:
    """The three left panels of the paper's figure 2."""
    share = [row.planted / (units - 1) for row in rows[0]]
    theirs = [key / (published.UNITS - 1) for key in published.TRANSPOSITIONS]
    paper = list(published.TRANSPOSITIONS.values())
    x = Axis("planted transpositions (share of the most)", low=0, high=1)
    scale, scale_paper = fmean([own[-1].start for own in rows]), paper[-1].start

    def dashed(name: str, values: Sequence[float], shade: int) -> Series:
        return Series(name, tuple(theirs), tuple(values), dashed=True, shade=shade)

    numbers = Panel(
        "lines",
        "Number of transpositions",
        x,
        Axis("found after training (share)", low=0, high=1),
        (
            line("this run", share, columns_of(rows, lambda row: row.after / (units - 1)), shade=0),
            dashed("published", [row.after / (published.UNITS - 1) for row in paper], 1),
        ),
        (Rule("", direction="diagonal"),),
    )
    distances = Panel(
        "lines",
        "Squared distance of weights",
        x,
        Axis("squared distance (relative)", low=0),
        (
            line("at the start", share, columns_of(rows, lambda row: row.start / scale), shade=0),
            line("trained", share, columns_of(rows, lambda row: row.trained / scale), shade=1),
            line("trained, swaps undone", share, columns_of(rows, lambda row: row.undone / scale), shade=2),
            dashed("at the start, published", [row.start / scale_paper for row in paper], 0),
            dashed("trained, published", [row.trained / scale_paper for row in paper], 1),
        ),
    )
    barriers = Panel(
        "lines",
        "Barrier",
        x,
        Axis("barrier (nats)"),
        (
            line("at the start", share, columns_of(rows, lambda row: row.start_barrier), shade=0),
            line("trained", share, columns_of(rows, lambda row: row.barrier), shade=1),
            line("trained, swaps undone", share, columns_of(rows, lambda row: row.undone_barrier), shade=2),
            dashed("trained, published", [row.barrier for row in paper], 1),
        ),
    )
    return Figure(
        "transpositions-kept",
        "Do planted transpositions survive training, and how high is the barrier they leave?",
        f"Means over {len(rows)} runs, bands of one standard error; dashed: MNIST 784-512-10, read off figure 2 of the "
        "paper. Numbers are relative to the largest possible one, distances to the largest one at the start, since the "
        "networks differ in width. Barriers are those of the test loss at the midpoint.",
        (numbers, distances, barriers),
    )


_COLUMNS = (
    Column("planted", "number of swaps of two hidden units between the two networks at the start", digits=0),
    Column("after / before", "number found by matching activations after training, divided by the planted one"),
    Column("by weights", "the same, found by matching weights"),
    Column(
        "silent units", "hidden units that no training example activates: matching activations guesses them", digits=1
    ),
    Column("distance, start", "squared distance between all weights of the two networks before training", digits=2),
    Column("distance, trained", "the same after training", digits=2),
    Column("distance, undone", "the same after training, with the planted permutation undone", "lower", digits=3),
    Column(
        "barrier", "test loss in the middle between the two networks minus the mean of theirs", "lower", unit="nats"
    ),
    Column("barrier, undone", "the same with the planted permutation undone", "lower", digits=5, unit="nats"),
)


def planted_table(rows: Rows, units: int) -> Table:
    """All pairs, one row for each number of transpositions that the paper's figure has too."""
    body = []
    for column in zip(*rows, strict=True):
        paper = beside(column[0].planted, units)
        if len(rows[0]) > len(published.TRANSPOSITIONS) and paper is None:
            continue  # of a long grid only what stands in the paper's figure to be read
        body.append(
            (
                Number(column[0].planted),
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
    return Table(
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


def rates_table(found: Sequence[Faster], swaps: int) -> Table:
    """What larger learning rates do."""
    return Table(
        "transpositions-rates",
        f"Does it still hold when training moves weights further? ({swaps} planted transpositions)",
        (
            Column("learning rate", "of SGD; the first one is that of the other experiments here", digits=4),
            Column(
                "change",
                "mean absolute change of the number of transpositions by training, units matched by weights",
                "lower",
                digits=2,
            ),
            Column(
                "apart",
                "squared distance with the permutation undone, divided by the distance with it: 0 for networks that "
                "are the same up to the permutation, 1 for strangers",
            ),
            Column("test loss", "of the trained networks", "lower", unit="nats"),
        ),
        tuple(
            (
                Number(own.rate),
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
