"""Examples that count more than once: a bootstrap draw is a row of whole weights, and many rows are judged at once.

Metrics take `weights` (..., examples): each leading place is a sample of its own in which example i counts weights_i
times, and the metric returns (...). Whole weights give exactly the metric of the sample with repetitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean of values (examples,) with weights (..., examples): sum_i w_i v_i / sum_i w_i, float64 (...).

    An infinite value makes a mean infinite where its weight is not zero.

    >>> weighted_mean(torch.tensor([1.0, 4.0, torch.inf]), torch.tensor([[2.0, 1.0, 0.0], [1.0, 0.0, 1.0]]))
    tensor([2., inf], dtype=torch.float64)
    """
    values = values.double()
    if weights is None:
        return values.mean()
    weights = as_weights(weights, len(values))
    infinite = values.isinf()
    mean = weights @ values.masked_fill(infinite, 0) / weights.sum(-1)
    if bool(infinite.any()):
        hit = (weights[..., infinite] > 0).any(-1)
        mean = mean.masked_fill(hit, values[infinite].sum())
    return mean


def as_weights(weights: Tensor | None, examples: int, device: torch.device | None = None) -> Tensor:
    """Weights in float64 (..., examples); ones where there are none.

    >>> as_weights(None, 2)
    tensor([1., 1.], dtype=torch.float64)

    Raises:
        InputError: the last axis is not the examples', a weight is negative, or a row has no positive one.
    """
    if weights is None:
        return torch.ones(examples, dtype=torch.float64, device=device)
    found = weights.detach().double()
    if not found.dim() or found.shape[-1] != examples:
        raise InputError(
            f"expected weights (..., {examples}), one per example, found shape {tuple(found.shape)}; give each example "
            "its count"
        )
    if not bool((found >= 0).all()) or not bool((found.sum(-1) > 0).all()):
        raise InputError(
            "expected weights >= 0 of which at least one is positive in each row, found others; leave weights out to "
            "count every example once"
        )
    return found


def at_most(scores: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """Total weight of the scores that are at most each value.

    >>> at_most(torch.tensor([3.0, 1.0, 3.0]), torch.ones(3), torch.tensor([0.0, 1.0, 3.0]))
    tensor([0., 1., 3.])

    Args:
        scores: (examples,).
        weights: (..., examples); they may be anything that is summed up.
        values: (v,).

    Returns:
        (..., v).
    """
    ascending, order = scores.sort()
    total = torch.nn.functional.pad(_columns(weights, order).cumsum(-1), (1, 0))
    return _columns(total, torch.searchsorted(ascending, values, right=True))


def _columns(rows: Tensor, places: Tensor) -> Tensor:
    """Return rows[..., places]; gathering takes half the time of indexing."""
    return rows.gather(-1, places.expand(*rows.shape[:-1], -1))
