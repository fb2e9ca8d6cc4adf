"""How alike two average predictives are, after equations 1 and 2 of Xiao, Liu and Bamler (2023).

Both are (examples, classes) for the same examples; the measures are symmetric.
"""

from __future__ import annotations

from torch import Tensor

from onebasin.metrics.probabilities import as_pair
from onebasin.metrics.weighing import weighted_mean


def agreement(p: Tensor, q: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Share of the examples for which both have the same most probable class (the first one, of equal ones).

    >>> import torch
    >>> agreement(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    tensor(0.5000, dtype=torch.float64)

    Args:
        p: (examples, classes).
        q: (examples, classes).
        weights: (..., examples), see `onebasin.metrics.weighing`.

    Returns:
        (...), a single number without weights, float64.

    Raises:
        InputError: these are no probabilities, or their shapes differ.
    """
    first, second = as_pair(p, q)
    return weighted_mean((first.argmax(1) == second.argmax(1)).double(), weights)


def total_variation(p: Tensor, q: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean over examples of 1/2 sum_k |p_k - q_k|, from 0 (equal) to 1.

    >>> import torch
    >>> total_variation(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    tensor(0.3000, dtype=torch.float64)

    Args:
        p: (examples, classes).
        q: (examples, classes).
        weights: (..., examples), see `onebasin.metrics.weighing`.

    Returns:
        (...), a single number without weights, float64.

    Raises:
        InputError: these are no probabilities, or their shapes differ.
    """
    first, second = as_pair(p, q)
    return weighted_mean((first - second).abs().sum(1) / 2, weights)
