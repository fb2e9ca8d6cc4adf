"""Kernels of distances, and the bandwidths at which they are looked at.

Three kernels of a distance d at bandwidth b, each with its metric:

    laplace       exp(-d / b)              d = |x - y|_1
    gaussian      exp(-(d / b)^2)          d = |x - y|_2, without the factor 1/2 of others
    multiquadric  (1 + (d / b)^2)^(-1/2)   d = |x - y|_2, the inverse multiquadric

Bandwidths by rule:

    median        the median distance of two members of the pooled sample
    pooled        ten, geometric from d_min / 2 to 2 d_max, over all pairs of the pooled sample
    paper         the same over pairs (x_i, y_j) of the first 500 of each, as in the code of paper 2 (MMDAgg)
    paper-floors  that with its floors: if d_min < 0.1, max(5 % quantile, 0.1) is used; d_max is at least 0.3

"median" and "pooled" do not depend on which member belongs to which sample, so permutation tests with them are exact.
The collection of the paper depends on it a little, and its floors are absolute numbers that suit no layer of small
weights; both are there to compare with the paper. Distances of 0 are passed over by every rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.selection import smallest

METRIC_OF = {"laplace": "l1", "gaussian": "l2", "multiquadric": "l2"}
RULES = ("median", "pooled", "paper", "paper-floors")
COUNT = 10  # bandwidths in a collection
_ROWS = 512  # of a matrix that are looked at together
_FIRST = 500  # members of each sample that the paper looks at
_NEAR, _FAR = 0.1, 0.3  # its floors

Bandwidth = str | float | Sequence[float] | Tensor


def kernel_values(distances: Tensor, bandwidth: float, kernel: str) -> Tensor:
    """Return the kernel of distances, elementwise.

    >>> kernel_values(torch.tensor([0.0, 2.0]), 2.0, "laplace")
    tensor([1.0000, 0.3679])
    """
    ratio = distances / bandwidth
    if metric_of(kernel) == "l1":
        return ratio.neg_().exp_()
    square = ratio.square_()
    return square.neg_().exp_() if kernel == "gaussian" else square.add_(1).rsqrt_()


def metric_of(kernel: str) -> str:
    """Return the metric whose distances a kernel takes: "l1" or "l2"."""
    if kernel not in METRIC_OF:
        raise InputError(f"expected a kernel out of {', '.join(METRIC_OF)}, found {kernel!r}: choose one of them")
    return METRIC_OF[kernel]


def bandwidths(rule: Bandwidth, distances: Tensor, split: int) -> Tensor:
    """Return the bandwidths (count,) that a rule gives, or the numbers that were given.

    >>> distances = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 3.0], [4.0, 3.0, 0.0]])
    >>> bandwidths("median", distances, split=1).tolist()
    [3.0]

    Args:
        rule: a rule of this page, a number, or several.
        distances: (N, N) of the pooled sample, symmetric with zeros on the diagonal.
        split: the first so many members are x, the others y.

    Returns:
        float64 (count,). For members that are all alike, where every kernel is 1, all ones, or the floors.
    """
    if not isinstance(rule, str):
        return _given(rule, distances.device)
    if rule not in RULES:
        raise InputError(f"expected bandwidth {', '.join(RULES)} or numbers, found {rule!r}: choose one of them")
    chosen = distances[:split, split:][:_FIRST, :_FIRST] if rule.startswith("paper") else distances
    if rule == "paper-floors":
        return _floored(chosen[chosen > 0].double())
    positive = int(torch.count_nonzero(chosen > 0))
    if not positive:
        return torch.ones(1 if rule == "median" else COUNT, dtype=torch.float64, device=distances.device)
    if rule == "median":  # every pair is there twice, and members at a distance of 0 come first
        middle = smallest(chosen, chosen.numel() - positive + 2 * ((positive // 2 - 1) // 2))
        return torch.tensor([middle], dtype=torch.float64, device=distances.device)
    least = min(float(torch.where(rows > 0, rows, math.inf).min()) for rows in chosen.split(_ROWS))
    return _geometric(least / 2, 2 * float(chosen.max()), distances.device)


def _floored(distances: Tensor) -> Tensor:
    if not len(distances):
        return _geometric(_NEAR / 2, 2 * _FAR, distances.device)
    least = float(distances.min())
    if least < _NEAR:
        least = max(float(distances.sort().values[int(0.05 * len(distances))]), _NEAR)
    return _geometric(least / 2, 2 * max(float(distances.max()), _FAR), distances.device)


def _geometric(first: float, last: float, device: torch.device) -> Tensor:
    steps = torch.linspace(0, 1, COUNT, dtype=torch.float64, device=device)
    return first * (last / first) ** steps


def _given(numbers: float | Sequence[float] | Tensor, device: torch.device) -> Tensor:
    found = torch.as_tensor(numbers, dtype=torch.float64, device=device).reshape(-1)
    if not len(found) or not bool(((found > 0) & torch.isfinite(found)).all()):
        raise InputError(f"expected bandwidths above 0, found {numbers!r}: give positive numbers or a rule")
    return found
