"""The temperature at which a classifier is as sure as it should be: merged networks doubt too much."""

from __future__ import annotations

from torch import Tensor

from onebasin.metrics.tempering import best_temperature
from onebasin.predict import score


def temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the T > 0 that minimises the cross-entropy of logits / T over all examples and places.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 0.0]]).expand(4, 2)  # right three times out of four: log 3 would be honest
    >>> round(1 / temperature(logits, torch.tensor([0, 0, 0, 1])), 6)
    1.098612

    Args:
        logits: (examples, classes, ...).
        targets: class numbers (examples, ...).

    Returns:
        As `best_temperature`, which it calls with one row per example and place.
    """
    score(logits, targets)  # refuses what is not a classification
    return best_temperature(logits.detach().movedim(1, -1).flatten(0, -2), targets.reshape(-1).to(logits.device))
