"""Entropy and mutual information of predictions, in nats: what every member doubts, and what members dispute.

For probabilities p_m of M members with mean p: the predictive entropy H(p) is the sum of the expected entropy
1/M sum_m H(p_m), which data cannot reduce, and the mutual information, which vanishes when all members agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import MEMBERS, PREDICTIVE, as_probabilities


@accepts_arrays
def entropy(probabilities: Tensor) -> Tensor:
    """Return H(p) = -sum_k p_k log p_k over the last axis, float64 (...); 0 log 0 is 0.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000], dtype=torch.float64)

    Args:
        probabilities: (examples, classes) or (members, examples, classes).
    """
    exact = as_probabilities(probabilities, MEMBERS if probabilities.dim() == 3 else PREDICTIVE)
    each: Tensor = torch.special.entr(exact)
    return each.sum(-1)


def mean_over_members(values: Tensor) -> Tensor:
    """Mean over the first axis in float64; of equal members exactly what each of them has.

    >>> mean_over_members(torch.tensor([0.1, 0.1, 0.1]).double()) == torch.tensor(0.1).double()
    tensor(True)
    """
    exact = values.detach().double()
    return exact[0] + (exact - exact[0]).mean(0)


@accepts_arrays
def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Return H(mean_m p_m), the entropy of the average predictive, float64 (examples,).

    >>> predictive_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931], dtype=torch.float64)
    """
    return entropy(mean_over_members(as_probabilities(probabilities, MEMBERS)))


@accepts_arrays
def expected_entropy(probabilities: Tensor) -> Tensor:
    """Return mean_m H(p_m), the mean entropy of members, float64 (examples,).

    >>> expected_entropy(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
    tensor([0.3466], dtype=torch.float64)
    """
    return mean_over_members(entropy(as_probabilities(probabilities, MEMBERS)))


@accepts_arrays
def mutual_information(probabilities: Tensor) -> Tensor:
    """Return H(mean_m p_m) - mean_m H(p_m) of each example, in nats, float64 (examples,).

    It lies between 0 and log min(M, K), and is exactly 0 for members that predict the same.

    >>> mutual_information(torch.tensor([[[1.0, 0.0], [0.3, 0.7]], [[0.0, 1.0], [0.3, 0.7]]]))
    tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    exact = as_probabilities(probabilities, MEMBERS)
    return information(mean_over_members(exact), expected_entropy(exact))


def information(average: Tensor, mean_entropy: Tensor) -> Tensor:
    """Mutual information from averages over members, for populations that are not kept: H(p) - mean_m H(p_m).

    By concavity it cannot be negative; what rounding takes below zero (1e-15 or so) is set to zero.

    >>> information(torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]))
    tensor([0.6931], dtype=torch.float64)

    Args:
        average: the mean of probabilities over members (examples, classes).
        mean_entropy: the mean of their entropies (examples,).
    """
    if tuple(mean_entropy.shape) != tuple(average.shape[:-1]):
        raise InputError(
            f"expected one mean entropy for each of {average.shape[0]} examples, found shape "
            f"{tuple(mean_entropy.shape)}; average both over the same members and examples"
        )
    return (entropy(average) - mean_entropy.double()).clamp(min=0)
