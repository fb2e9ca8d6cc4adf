"""Correlation coefficients of two sets of numbers or two rankings: those of scipy, for tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays


@accepts_arrays
def pearson(first: Tensor, second: Tensor) -> float | None:
    """Correlation of two sets of numbers (n,), None where one of them does not vary.

    >>> round(pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])), 9)
    1.0
    """
    from scipy.stats import pearsonr  # imported late: it takes a second

    both = [values.detach().double().cpu() for values in (first, second)]
    # What is left of equal numbers after their mean is taken off is rounding.
    if len(first) < 2 or any(float((own - own.mean()).norm()) <= 1e-12 * float(own.norm()) for own in both):
        return None
    return float(pearsonr(both[0].numpy(), both[1].numpy()).statistic)


@accepts_arrays
def spearman(first: Tensor, second: Tensor) -> float | None:
    """Correlation of their ranks; equal numbers share their mean rank.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 100.0])), 9)
    1.0
    """
    return pearson(ranks(first), ranks(second))


@accepts_arrays
def ranks(values: Tensor) -> Tensor:
    """Places of numbers (n,) in ascending order from 1 on, float64; equal numbers share their mean rank.

    >>> ranks(torch.tensor([5.0, 1.0, 5.0]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    from scipy.stats import rankdata

    return torch.from_numpy(rankdata(values.detach().double().cpu().numpy())).to(values.device)


@accepts_arrays
def kendall_tau(first: Tensor, second: Tensor) -> Tensor:
    """Kendall's tau-b between rows of values (..., n), float64 (...): 1 for the same order, -1 for the reverse.

    NaN where a row holds one value only.

    >>> kendall_tau(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0]))
    tensor(0.6667, dtype=torch.float64)
    """
    from scipy.stats import kendalltau

    if first.shape != second.shape or not first.dim() or first.shape[-1] < 2:
        raise InputError(
            f"expected two tensors (..., n) of one shape with n >= 2, found {tuple(first.shape)} and "
            f"{tuple(second.shape)}: rank the same things"
        )
    rows = zip(*(table.detach().cpu().reshape(-1, table.shape[-1]).numpy() for table in (first, second)), strict=True)
    taus = torch.tensor([kendalltau(*pair).statistic for pair in rows], dtype=torch.float64, device=first.device)
    return taus.reshape(first.shape[:-1])
