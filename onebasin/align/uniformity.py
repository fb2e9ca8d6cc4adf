"""Is every outcome equally likely? A chi-square test for counts of draws that may remember their predecessors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError

SHORTEST = 20  # draws; in a shorter chain memory cannot be told from chance
SMALLEST = 5.0  # expected count below which the chi-square tail is not trusted
SIMULATIONS = 9_999
CHUNK = 1 << 22  # simulated draws and counts held at a time


@dataclass(frozen=True)
class Uniformity:
    """What the counts say.

    Attributes:
        statistic: sum of (count - expected)^2 / expected over outcomes and copies, divided by the inflation.
        freedom: its mean if every outcome is equally likely: copies * (n - 1).
        effective: independent draws that would tell as much: draws / inflation.
        p: probability of at least this statistic if every outcome is equally likely.
    """

    statistic: float
    freedom: int
    effective: float
    p: float


def uniformity(counts: Tensor, *, inflation: float = 1.0, seed: int = 0) -> Uniformity:
    """Test counts (n,), or (copies, n) of several independent contests with equally many draws, for uniformity.

    Dividing by the inflation gives the statistic its right mean for autocorrelated draws, the first-order correction
    of Rao & Scott (1981); it is exact in the limit where all outcomes are remembered equally long. The tail is that of
    the chi-square distribution, or where fewer than 5 effective draws per outcome are expected, that of 9,999
    simulated counts (so p is then at least 1e-4).

    >>> ensemble = torch.tensor([45, 49, 46, 43, 45, 54, 47, 56, 38, 47, 50, 44, 41, 44, 51, 53])
    >>> found = uniformity(ensemble)
    >>> print(f"{found.statistic:.1f} on {found.freedom} degrees of freedom, p = {found.p:.2f}")
    7.5 on 15 degrees of freedom, p = 0.94
    """
    rows = counts.reshape(-1, counts.shape[-1])
    copies, outcomes = rows.shape
    draws = int(rows[0].sum())
    if draws < 1 or bool((rows.sum(1) != draws).any()):
        raise InputError(f"every copy needs the same number of draws, at least 1; found {rows.sum(1).tolist()}.")
    effective = draws / inflation
    statistic = float(_chi_square(rows, draws)) / inflation
    freedom = copies * (outcomes - 1)
    if effective < SMALLEST * outcomes:
        p = _simulated(statistic, (copies, outcomes), max(1, round(effective)), seed)
    else:
        half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
        p = float(torch.special.gammaincc(half[0], half[1]))
    return Uniformity(statistic, freedom, effective, p)


def _chi_square(counts: Tensor, draws: int) -> Tensor:
    """Sum over copies of sum (count - draws/n)^2 / (draws/n) for counts (..., copies, n)."""
    copies, outcomes = counts.shape[-2:]
    return counts.double().square().sum((-2, -1)) * (outcomes / draws) - copies * draws


def _simulated(statistic: float, shape: tuple[int, int], draws: int, seed: int) -> float:
    """Share of simulated statistics that are at least as large, the observed one counted among them."""
    copies, outcomes = shape
    generator = torch.Generator().manual_seed(seed)
    step = max(1, CHUNK // (copies * (draws + outcomes)))
    larger = 0
    for start in range(0, SIMULATIONS, step):
        rows = min(step, SIMULATIONS - start) * copies
        winners = torch.randint(outcomes, (rows, draws), generator=generator) + outcomes * torch.arange(rows)[:, None]
        counts = winners.reshape(-1).bincount(minlength=rows * outcomes).reshape(-1, copies, outcomes)
        # Statistics that are equal on paper must count as equal, whatever was rounded.
        larger += int((_chi_square(counts, draws) >= statistic - 1e-9 * (1 + statistic)).sum())
    return (1 + larger) / (1 + SIMULATIONS)


def inflation(winners: Tensor, chain: Tensor, outcomes: int) -> float:
    """How many draws of the chains are worth one independent draw: at least 1.

    It is the integrated autocorrelation time 1 + 2 (r_1 + r_2 + ...) of the indicators "outcome i was drawn", averaged
    over outcomes and copies. Two draws agree or not, so the autocovariance at lag l, summed over outcomes, is the
    share of pairs at that lag that agree, less what the chain's own frequencies explain; the sum ends by Geyer's
    initial monotone sequence, and what is lost by estimating the frequencies is added to first order. Centring each
    chain at its own frequencies is what lets a chain fail that hops quickly between few of the outcomes, or that
    always draws the same one and so shows no memory at all. It is a little too small (by 10 to 15 %) for chains of only
    ten autocorrelation times.

    Args:
        winners: (members, copies) integers below `outcomes`, draws of a chain in their order.
        chain: (members,) number of the chain, below zero for networks made independently of all others. Chains of
            fewer than 20 draws count as one draw each.
        outcomes: number of possible outcomes.
    """
    _, where, lengths = chain.unique(return_inverse=True, return_counts=True)
    length = torch.where(chain < 0, 1, lengths[where])
    worth = torch.where(length < SHORTEST, length, 0).double()
    long = (length >= SHORTEST).nonzero()[:, 0]
    if len(long):
        long = long[where[long].argsort(stable=True)]
        worth[long] = _autocorrelation_time(winners[long], where[long].unique(return_inverse=True)[1], outcomes)
    return float(worth.mean())


def _autocorrelation_time(winners: Tensor, chain: Tensor, outcomes: int) -> float:
    """For draws (T, copies) sorted by chain: pooled over chains, copies and outcomes, at least 1."""
    total, copies = winners.shape
    lengths = chain.bincount()
    column = (chain[:, None] * copies + torch.arange(copies)) * outcomes + winners
    share = column.reshape(-1).bincount(minlength=len(lengths) * copies * outcomes).reshape(-1, copies, outcomes)
    share = share.double() / lengths[:, None, None]
    own = share.reshape(-1)[column]
    square = share.square().sum(-1)[chain]

    def covariance(lag: int) -> float:
        first, last = slice(0, total - lag), slice(lag, total)
        agree = (winners[first] == winners[last]) + (square[first] - own[first] - own[last])
        return float(agree[chain[first] == chain[last]].sum()) / (total * copies)

    variance = covariance(0)
    if variance <= 1e-12:  # nothing but one outcome
        return 1.0
    summed, least, lag = -variance, math.inf, 0
    while lag + 1 < int(lengths.max()) and (pair := covariance(lag) + covariance(lag + 1)) > 0:
        least = min(least, pair)
        summed += 2 * least
        lag += 2
    found = max(1.0, summed / variance)
    # A mean taken from the same draws lowers every covariance by about variance * time / length.
    lags = torch.arange(1 - max(1, lag), max(1, lag)).abs()[:, None]
    lost = float((1 - lags / lengths).clamp_min(0).sum()) / total
    left = max(1 - lost + found * len(lengths) / total, found * len(lengths) / total)  # the time is at most the length
    return max(1.0, found / left)


def adjust(p: Sequence[float], method: str = "holm") -> list[float]:
    """Correct p-values for their number: "holm" bounds the chance of any false alarm, "bh" the share of false alarms.

    >>> [round(value, 3) for value in adjust([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    >>> [round(value, 3) for value in adjust([0.01, 0.04, 0.03], "bh")]
    [0.03, 0.04, 0.04]
    """
    many = len(p)
    values, order = torch.tensor(p, dtype=torch.float64).sort()
    if method == "holm":
        made = (values * torch.arange(many, 0, -1)).cummax(0).values
    elif method == "bh":
        made = (values * many / torch.arange(1, many + 1)).flip(0).cummin(0).values.flip(0)
    else:
        raise InputError(f"correction must be 'holm' or 'bh' (Benjamini and Hochberg), found {method!r}.")
    return torch.empty_like(made).scatter(0, order, made.clamp_max(1)).tolist()
