"""What should be known when the numbers of `discrepancy` are read."""

from __future__ import annotations

from math import comb

from onebasin.discrepancy.runs import Runs
from onebasin.metrics.resampled import FEWEST

FEW = 10  # runs; below, a bootstrap over runs is rough
LEVEL = 0.05  # p-values that cannot get below this are worth a word


def notes_on(runs: Runs, *, permutations: int, resamples: int) -> tuple[str, ...]:
    """Sentences about what runs of these numbers can show.

    Args:
        runs: of both crowds.
        permutations: of the test; 0 for none.
        resamples: of the interval; 0 for none.
    """
    found, what, fewest = [], "networks" if runs.trivial else "runs", min(runs.counts)
    if runs.counts == (1, 1):
        found.append(
            "one run against one run: nothing tells how far two runs of one law are apart, so there is no p-value, no "
            "part of runs and no interval"
        )
    elif fewest == 1:
        found.append("a crowd of one run: what runs explain is judged by the other crowd, and there is no interval")
    elif resamples and fewest < FEWEST:
        found.append(f"{fewest} {what} on one side: too few to be drawn again, so there is no interval")
    elif resamples and fewest < FEW:
        found.append(f"{fewest} {what} on one side: intervals from so few are rough, and often too narrow")
    least = smallest_p(runs, permutations)
    if permutations and sum(runs.counts) > 2 and least > LEVEL:
        found.append(f"{runs.counts[0]} against {runs.counts[1]} {what}: p cannot be much below {least:.2g}")
    if len(runs.sizes.unique()) > 1:
        found.append("runs of unequal size: the test compares one network of each run")
    if runs.shared:
        found.append("both crowds hold networks of one run: they are not independent, and p-values are not to be used")
    return tuple(found)


def smallest_p(runs: Runs, permutations: int) -> float:
    """The p-value of crowds that could not be further apart: one division of runs out of all, or that and its mirror.

    Args:
        runs: of both crowds.
        permutations: of the test.
    """
    first, second = runs.counts
    return max((2 if first == second else 1) / comb(first + second, first), 1 / (1 + permutations))
