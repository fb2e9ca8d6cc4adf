"""Whether a claim holds: from numbers to a word, by criteria that every claim states beside its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

import onebasin as ob
from onebasin_papers.numbers import mean_error

REPRODUCED, CAVEAT, NOT = ob.reporting.VERDICTS
POINTS = 0.02  # share of right answers that a compact form may lose and still be close to its samples
VARIATION = 0.072  # total variation likewise: the most that the paper's distances to HMC allow, 0.0229 + 0.0495
SURE = 3.0  # standard errors that a difference between runs has to be away from zero


def graded(whole: bool, partly: bool) -> str:
    """Reproduced where all of a claim holds, with a caveat where the weaker half of it does.

    >>> graded(True, True), graded(False, True), graded(False, False)
    ('reproduced', 'reproduced with a caveat', 'not reproduced')
    """
    return REPRODUCED if whole else CAVEAT if partly else NOT


def smaller(low: Sequence[float], high: Sequence[float]) -> bool:
    """Whether `low` is below `high` in every run, and on average by more than `SURE` standard errors.

    Runs are paired. With one run only the sign counts.

    >>> smaller([1.0, 1.1, 0.9], [2.0, 2.2, 1.9]), smaller([1.0, 1.1], [2.0, 1.05])
    (True, False)
    """
    gaps = [after - before for before, after in zip(low, high, strict=True)]
    mean, error = mean_error(gaps)
    return min(gaps) > 0 and (error is None or mean > SURE * error)


def survives(by_activations: Sequence[int], by_weights: Sequence[int], allowed: int) -> str:
    """Whether numbers of transpositions survive training: by the paper's matching, or at least by that of weights.

    Args:
        by_activations: found after training minus planted, of all pairs.
        by_weights: the same with units matched by their weights, where units that never fire can be told apart.
        allowed: the largest change.

    >>> survives([0, 1, -2], [0], allowed=2), survives([3], [0], allowed=2), survives([3], [30], allowed=2)
    ('reproduced', 'reproduced with a caveat', 'not reproduced')
    """
    held, at_least = (max(map(abs, changes)) <= allowed for changes in (by_activations, by_weights))
    return graded(held, at_least)


def close(lost: Sequence[float], variation: Sequence[float]) -> bool:
    """Whether a compact form predicts about what the samples predict that it stands for, on average over runs.

    Args:
        lost: share of right answers that it loses.
        variation: its total variation from the samples.

    >>> close([0.01], [0.05]), close([0.01], [0.3]), close([0.1], [0.05])
    (True, False, False)
    """
    return fmean(lost) <= POINTS and fmean(variation) <= VARIATION


def falls(before: Sequence[float], after: Sequence[float], factor: float) -> str:
    """Whether a number falls to `factor` of what it was, or at least falls for sure; runs are paired.

    >>> falls([1.0, 1.2], [0.1, 0.1], 0.5), falls([1.0, 1.1], [0.8, 0.91], 0.5), falls([1.0, 1.2], [1.1, 1.0], 0.5)
    ('reproduced', 'reproduced with a caveat', 'not reproduced')
    """
    sure = smaller(after, before)
    return graded(sure and fmean(after) <= factor * fmean(before), sure)


def grows(x: Sequence[float], curves: Sequence[Sequence[float]]) -> tuple[str, list[float]]:
    """Whether curves rise with x: rank correlation of at least 0.9 in every run, or on average of 0.5.

    Returns:
        The verdict, and Spearman's rank correlation of each curve.

    >>> verdict, [found] = grows([1, 2, 3], [[0.1, 0.2, 0.3]])
    >>> verdict, round(found, 9), grows([1, 2, 3], [[0.3, 0.2, 0.1]])[0]
    ('reproduced', 1.0, 'not reproduced')
    """
    found = [rank_correlation(x, curve) for curve in curves]
    return graded(min(found) >= 0.9, fmean(found) >= 0.5), found


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where one of them does not vary.

    >>> round(rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]), 9), rank_correlation([1, 2], [3, 3])
    (0.8, 0.0)
    """
    return ob.metrics.spearman(*(torch.tensor(values, dtype=torch.float64) for values in (x, y))) or 0.0
