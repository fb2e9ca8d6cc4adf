"""Do two sets of numbers, or two rankings, agree?"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError

_CHUNK = 1 << 24  # pairs that are compared at a time


def pearson(first: Tensor, second: Tensor) -> float | None:
    """Correlation of two sets of numbers (n,), None where one of them does not vary.

    >>> round(pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])), 9)
    1.0
    """
    a, b = (values.double() - values.double().mean() for values in (first, second))
    size = float(a.norm() * b.norm())
    # What is left of equal numbers after their mean is taken off is rounding.
    varies = all(float(gap.norm()) > 1e-12 * float(own.norm()) for gap, own in ((a, first), (b, second)))
    return max(-1.0, min(1.0, float(a @ b) / size)) if varies and size > 0 else None


def spearman(first: Tensor, second: Tensor) -> float | None:
    """Correlation of their ranks; equal numbers share their mean rank.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 100.0])), 9)
    1.0
    """
    return pearson(ranks(first), ranks(second))


def ranks(values: Tensor) -> Tensor:
    """Places of numbers (n,) in ascending order from 1 on, float64; equal numbers share their mean rank.

    >>> ranks(torch.tensor([5.0, 1.0, 5.0]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    found: Tensor = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]
    return found


def kendall_tau(first: Tensor, second: Tensor) -> Tensor:
    """Kendall's tau-b between rows of values (..., n), float64 (...): 1 for the same order, -1 for the reverse.

        tau = (concordant - discordant) / sqrt((pairs - ties in first) * (pairs - ties in second))

    over all n (n - 1) / 2 pairs of places; NaN where a row holds one value only.

    >>> kendall_tau(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0]))
    tensor(0.6667, dtype=torch.float64)
    """
    if first.shape != second.shape or not first.dim() or first.shape[-1] < 2:
        raise InputError(
            f"expected two tensors (..., n) of one shape with n >= 2, found {tuple(first.shape)} and "
            f"{tuple(second.shape)}: rank the same things"
        )
    units = first.shape[-1]
    rows = (first.reshape(-1, units), second.reshape(-1, units))
    step = max(1, _CHUNK // units**2)
    found = [_tau(a, b) for a, b in zip(*(table.split(step) for table in rows), strict=True)]
    return torch.cat(found).reshape(first.shape[:-1])


def _tau(first: Tensor, second: Tensor) -> Tensor:
    above = torch.ones(first.shape[1], first.shape[1], dtype=torch.bool, device=first.device).triu(1)
    a, b = (
        (rows[:, :, None] > rows[:, None]).short() - (rows[:, :, None] < rows[:, None]).short()
        for rows in (first, second)
    )
    a, b = a[:, above], b[:, above]
    agreed = (a * b).sum(1).double()
    return agreed / (a.abs().sum(1).double() * b.abs().sum(1).double()).sqrt()
