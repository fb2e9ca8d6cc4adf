"""Disagreement of networks on the most probable class, example by example.

Probabilities are (members, examples, classes); of equally probable classes the first counts. `weighted_mean` of
`onebasin.metrics` averages over examples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import MEMBERS, as_probabilities


@accepts_arrays
def disagreement(probabilities: Tensor) -> Tensor:
    """Share of the pairs of different members whose most probable classes differ, float64 (examples,).

    With n_k of M members for class k it is 1 - sum_k n_k (n_k - 1) / (M (M - 1)).

    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]], [[0.2, 0.8]]]))  # 2 of 3 pairs
    tensor([0.6667], dtype=torch.float64)

    Args:
        probabilities: (members, examples, classes), at least two members.
    """
    votes = _votes(probabilities)
    members = len(probabilities)
    if members < 2:
        raise InputError(f"expected at least 2 members to disagree, found {members}; give the networks of a population")
    return 1 - (votes * (votes - 1)).sum(1) / (members * (members - 1))


@accepts_arrays
def variation_ratio(probabilities: Tensor) -> Tensor:
    """Share of the members whose most probable class is not the commonest one, float64 (examples,) (Freeman, 1965).

    >>> variation_ratio(torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]], [[0.2, 0.8]]]))  # one of three
    tensor([0.3333], dtype=torch.float64)

    Args:
        probabilities: (members, examples, classes).
    """
    return 1 - _votes(probabilities).amax(1) / len(probabilities)


def _votes(probabilities: Tensor) -> Tensor:
    """How many members choose each class, float64 (examples, classes)."""
    exact = as_probabilities(probabilities, MEMBERS)
    chosen = exact.argmax(2)
    votes = torch.zeros_like(exact[0])
    return votes.scatter_add_(1, chosen.T, torch.ones_like(chosen.T, dtype=exact.dtype))
