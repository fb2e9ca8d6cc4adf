"""Scores of average predictives (examples, classes), against targets and against each other.

Targets are class numbers (examples,), results are float64, and `weights` (..., examples) counts examples more than
once, as in `onebasin.metrics.probabilities`. All scores are means over examples.

Agreement and total variation are equations 1 and 2 of Xiao, Liu and Bamler (2023); both are symmetric.
"""

from __future__ import annotations

from torch import Tensor

from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import as_class_numbers, as_pair, as_probabilities, weighted_mean


@accepts_arrays
def accuracy(probabilities: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Share of the examples whose most probable class is the target; of equally probable classes the first counts.

    >>> import torch
    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    exact = as_probabilities(probabilities)
    return weighted_mean((exact.argmax(1) == as_class_numbers(targets, exact)).double(), weights)


@accepts_arrays
def nll(probabilities: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean of -log p(target), in nats.

    Nothing is clamped: a target with probability zero makes the result infinite, for that is what the prediction
    deserves. Float32 softmax gives such zeros for logits that are 104 below the largest: compute it in float64.

    >>> import torch
    >>> p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> nll(p, torch.tensor([0, 0])), nll(p, torch.tensor([0, 1]))
    (tensor(0.3466, dtype=torch.float64), tensor(inf, dtype=torch.float64))
    """
    exact = as_probabilities(probabilities)
    wanted = exact.gather(1, as_class_numbers(targets, exact)[:, None]).squeeze(1)
    return weighted_mean(0 - wanted.log(), weights)  # 0 - x, for a certain prediction is worth 0 and not -0


@accepts_arrays
def brier(probabilities: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean over examples of sum_k (p_k - [k = target])^2, from 0 to 2; not divided by the number of classes.

    >>> import torch
    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.2500, dtype=torch.float64)
    """
    exact = as_probabilities(probabilities)
    numbers = as_class_numbers(targets, exact)[:, None]
    gap = exact.scatter_add(1, numbers, exact.new_full((len(exact), 1), -1.0))
    return weighted_mean(gap.square().sum(1), weights)


@accepts_arrays
def agreement(p: Tensor, q: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Share of the examples for which both have the same most probable class (the first one, of equal ones).

    >>> import torch
    >>> agreement(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    tensor(0.5000, dtype=torch.float64)
    """
    first, second = as_pair(p, q)
    return weighted_mean((first.argmax(1) == second.argmax(1)).double(), weights)


@accepts_arrays
def total_variation(p: Tensor, q: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean over examples of 1/2 sum_k |p_k - q_k|, from 0 (equal) to 1.

    >>> import torch
    >>> total_variation(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    tensor(0.3000, dtype=torch.float64)
    """
    first, second = as_pair(p, q)
    return weighted_mean((first - second).abs().sum(1) / 2, weights)
