"""Scores that should be higher where a crowd has never been: five ways to tell foreign inputs from familiar ones.

Each takes what the members of a crowd give, (members, examples, classes), and returns one score per example in float64,
higher = more out-of-distribution. What is averaged over members, and when:

- `msp` and `entropy` judge the average of the probabilities (torch-uncertainty's entropy criterion is the mean of
  member entropies instead, which is `onebasin.metrics.entropy.expected_entropy`);
- `mutual_information` compares that average with its members;
- `max_logit` and `energy` judge the average of the logits. They see what softmax does not: a constant added to all
  logits of an example changes them.

Where only averages are kept, `msp`, `entropy`, `max_logit` and `energy` take them as (examples, classes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.entropy import entropy as _entropy
from onebasin.metrics.entropy import mean_over_members, mutual_information
from onebasin.metrics.probabilities import MEMBERS, as_probabilities


def msp(probabilities: Tensor) -> Tensor:
    """Minus the largest average probability, -max_k mean_m p_mk (maximum softmax probability).

    >>> msp(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]))
    tensor([-0.6000], dtype=torch.float64)

    Args:
        probabilities: (members, examples, classes), or their average (examples, classes).

    Raises:
        InputError: these are no probabilities.
    """
    return -_predictive(probabilities).amax(1)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy of the average probabilities in nats.

    >>> entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931], dtype=torch.float64)

    Args:
        probabilities: (members, examples, classes), or their average (examples, classes).

    Raises:
        InputError: these are no probabilities.
    """
    return _entropy(_predictive(probabilities))


def max_logit(logits: Tensor) -> Tensor:
    """Minus the largest average logit, -max_k mean_m z_mk.

    >>> max_logit(torch.tensor([[[4.0, 0.0]], [[2.0, 6.0]]]))
    tensor([-3.], dtype=torch.float64)

    Args:
        logits: (members, examples, classes), or their average (examples, classes).

    Raises:
        InputError: these are no finite logits.
    """
    return -_mean_logits(logits).amax(1)


def energy(logits: Tensor) -> Tensor:
    """Energy of the average logits, -log sum_k exp(mean_m z_mk).

    >>> energy(torch.zeros(3, 1, 2))
    tensor([-0.6931], dtype=torch.float64)

    Args:
        logits: (members, examples, classes), or their average (examples, classes).

    Raises:
        InputError: these are no finite logits.
    """
    return -_mean_logits(logits).logsumexp(1)


PROBABILITY_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"msp": msp, "entropy": entropy, "mutual_information": mutual_information}
)
LOGIT_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"max_logit": max_logit, "energy": energy})


def all_scores(logits: Tensor) -> dict[str, Tensor]:
    """Every score by its name, each (examples,), of member logits (members, examples, classes).

    >>> list(all_scores(torch.zeros(2, 1, 3)))
    ['msp', 'entropy', 'mutual_information', 'max_logit', 'energy']

    Raises:
        InputError: these are no finite logits of several members.
    """
    if logits.dim() != 3:
        raise InputError(
            f"expected logits {MEMBERS}, found shape {tuple(logits.shape)}; give a single network as logits[None]"
        )
    probabilities = logits.detach().double().softmax(2)
    found = {name: score(probabilities) for name, score in PROBABILITY_SCORES.items()}
    return found | {name: score(logits) for name, score in LOGIT_SCORES.items()}


def _predictive(probabilities: Tensor) -> Tensor:
    if probabilities.dim() == 3:
        return mean_over_members(as_probabilities(probabilities, MEMBERS))
    return as_probabilities(probabilities)


def _mean_logits(logits: Tensor) -> Tensor:
    if logits.dim() not in (2, 3) or not logits.numel() or not bool(torch.isfinite(logits).all()):
        raise InputError(
            f"expected finite logits {MEMBERS}, or their average, found shape {tuple(logits.shape)} with "
            f"{int((~torch.isfinite(logits)).sum())} entries that are not finite; give what the last layer returns"
        )
    return mean_over_members(logits) if logits.dim() == 3 else logits.detach().double()
