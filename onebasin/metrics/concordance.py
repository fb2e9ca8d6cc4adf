"""Do two rankings agree?"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError

_CHUNK = 1 << 24  # pairs that are compared at a time


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
