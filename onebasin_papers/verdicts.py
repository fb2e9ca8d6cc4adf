"""Verdicts on claims: from numbers to a word, by criteria that every claim states beside its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

    >>> verdict, [correlations] = grows([1, 2, 3], [[0.1, 0.2, 0.3]])
    >>> verdict, round(correlations, 9), grows([1, 2, 3], [[0.3, 0.2, 0.1]])[0]
    ('reproduced', 1.0, 'not reproduced')
    """
    correlations = [rank_correlation(x, curve) for curve in curves]
    return graded(min(correlations) >= 0.9, fmean(correlations) >= 0.5), correlations


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where one of them does not vary.

    >>> round(rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]), 9), rank_correlation([1, 2], [3, 3])
    (0.8, 0.0)
    """
    return ob.metrics.spearman(*(torch.tensor(values, dtype=torch.float64) for values in (x, y))) or 0.0


LEVEL = 0.05
EXCHANGES = 9_999
ROUNDING = 1e-12
MOST = 0.8  # of the methods: "better" without a restriction


@dataclass(frozen=True)
class Difference:
    """How much better the multi-mode form of one method is than its one-mode form, paired over groups.

    Attributes:
        method: its name.
        mean: positive where multi-mode is better.
        error: standard error over groups, infinite for one group.
        p_value: two-sided, of a paired t-test; 1 for one group.
    """

    method: str
    mean: float
    error: float
    p_value: float

    @property
    def lost(self) -> bool:
        """Whether multi-mode is worse beyond chance."""
        return self.mean < 0 and self.p_value < LEVEL

    @property
    def won(self) -> bool:
        """Whether multi-mode is better beyond chance."""
        return self.mean > 0 and self.p_value < LEVEL


def difference(method: str, one: Sequence[float], multi: Sequence[float], better: str) -> Difference:
    """Compare two forms of a method, group by group.

    >>> difference("SWAG", [1.0, 2.0, 3.0], [2.0, 3.1, 4.2], "higher").won
    True

    Args:
        method: its name.
        one: means of the one-mode form in each group.
        multi: of the multi-mode form.
        better: "higher" or "lower".
    """
    from scipy.stats import t

    sign = 1 if better == "higher" else -1
    gains = [sign * (b - a) for a, b in zip(one, multi, strict=True)]
    mean, error = mean_error(gains)
    if error is None:
        return Difference(method, mean, math.inf, 1.0)
    if error == 0:
        return Difference(method, mean, 0.0, 0.0 if mean else 1.0)
    return Difference(method, mean, error, 2 * float(t.sf(abs(mean) / error, len(gains) - 1)))


def better_in_most(differences: Sequence[Difference]) -> str:
    """Whether multi-mode is better: for at least 80 % of the methods and none beyond chance worse; for more than half.

    >>> better_in_most([Difference("a", 1.0, 0.1, 0.01), Difference("b", 2.0, 0.1, 0.01)])
    'reproduced'
    """
    share = fmean(one.mean > 0 for one in differences)
    return graded(share >= MOST and not any(one.lost for one in differences), share > 0.5)


def runs_tell(predicted: Sequence[float], mean_number: Sequence[float]) -> str:
    """Whether the number of runs alone predicts how far one-mode is above multi-mode.

    Args:
        predicted: the gap that runs predict, for each method.
        mean_number: the gap that was measured.

    Returns:
        Reproduced where every gap is positive and predicted within a quarter; with a caveat where more than half are.
    """
    near = [gap > 0 and abs(guess - gap) <= 0.25 * gap for guess, gap in zip(predicted, mean_number, strict=True)]
    return graded(all(near), fmean(near) > 0.5)


def as_often_as_not(up: int, of: int) -> tuple[str, float]:
    """Whether something that happened `up` times out of `of` happens about half of the time.

    No where an exact binomial test at 5 % says so; a caveat where only the share is outside a third and two thirds.

    >>> [as_often_as_not(up, 10)[0] for up in (5, 2, 0)]
    ['reproduced', 'reproduced with a caveat', 'not reproduced']

    Returns:
        The verdict, and the two-sided p-value.
    """
    from scipy.stats import binomtest

    p = float(binomtest(up, of).pvalue)
    if p < LEVEL:
        return NOT, p
    return (REPRODUCED if of <= 3 * up <= 2 * of else CAVEAT), p


def noticeable(rows: int, tests: int) -> float:
    """The smallest correlation over so many rows that the strictest of so many tests tells from chance, about.

    >>> round(noticeable(11, 6), 2)
    0.75
    """
    from scipy.stats import t

    if rows < 3:
        return 1.0
    critical = float(t.isf(LEVEL / tests / 2, rows - 2))
    return critical / math.sqrt(rows - 2 + critical**2)


@dataclass(frozen=True)
class Correlation:
    """Rank correlation of a measure with a distance over rows of a table, and its p-value by exchanging rows."""

    measure: str
    rho: float
    p_value: float


def correlation(measure: str, distances: Sequence[float], values: Sequence[float], seed: int = 0) -> Correlation:
    """Spearman's correlation over rows, with a two-sided permutation p-value.

    >>> correlation("accuracy", [1, 2, 3, 4, 5, 6], [9, 8, 6, 5, 4, 1]).rho
    -1.0
    """
    x, y = (ob.metrics.ranks(torch.tensor(column, dtype=torch.float64)) for column in (distances, values))
    x, y = x - x.mean(), y - y.mean()
    size = float((x.square().sum() * y.square().sum()).sqrt())
    if size == 0:
        return Correlation(measure, 0.0, 1.0)
    rho = float(x @ y) / size
    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(EXCHANGES, len(y), generator=generator).argsort(1)
    drawn = y[orders] @ x / size
    p = (1 + int((drawn.abs() >= abs(rho) - ROUNDING).sum())) / (1 + EXCHANGES)
    return Correlation(measure, round(rho, 10), p)


def no_clear_correlation(correlations: Sequence[Correlation]) -> tuple[str, list[str]]:
    """Whether no measure goes with the distance: none with p < 0.05 after Holm's correction; at most half: a caveat.

    Returns:
        The verdict, and the measures that do go with it.
    """
    clear = list[str]()
    for place, one in enumerate(sorted(correlations, key=lambda one: one.p_value)):
        if one.p_value * (len(correlations) - place) >= LEVEL:
            break
        clear.append(one.measure)
    return graded(not clear, 2 * len(clear) <= len(correlations)), clear


def weakly_correlated(low: float, high: float) -> str:
    """Whether a correlation is weak: its interval lies within ±0.5; with a caveat where it reaches across a border.

    >>> weakly_correlated(-0.1, 0.3), weakly_correlated(0.4, 0.6), weakly_correlated(0.6, 0.8)
    ('reproduced', 'reproduced with a caveat', 'not reproduced')
    """
    return graded(low >= -0.5 and high <= 0.5, low <= 0.5 and high >= -0.5)


def none_collapsed(pairs: int, of: int) -> str:
    """Whether no pair has become one function; with a caveat where fewer than one in a thousand has."""
    return graded(pairs == 0, pairs < of / 1000)


def stands_for(p_value: float, remainder: float) -> str:
    """Whether one population may stand for another: no test tells them apart, or the distance is not positive."""
    return REPRODUCED if p_value >= LEVEL or remainder <= 0 else NOT


def varies_more(inside: float, outside: float) -> str:
    """Whether numbers outside vary more, relative to their mean, than inside."""
    return REPRODUCED if outside > inside else NOT
