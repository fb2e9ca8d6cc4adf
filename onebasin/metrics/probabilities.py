"""Probabilities, class numbers and weights of examples, checked and converted; means over weighted examples.

Examples may count more than once: a bootstrap draw is a row of whole weights, and many rows are judged at once. Metrics
take `weights` (..., examples): each leading place is a sample of its own in which example i counts weights_i times, and
the metric returns (...). Whole weights give exactly the metric of the sample with repetitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays

PREDICTIVE, MEMBERS = "(examples, classes)", "(members, examples, classes)"
_SUM_TOLERANCE, _SUM_TOLERANCE_HALF = 1e-3, 2e-2  # a row of rounded numbers does not sum to 1 exactly


def as_probabilities(values: Tensor, shape: str = PREDICTIVE) -> Tensor:
    """Return probabilities in float64, unchanged otherwise: rows that sum to 1 only roughly are not scaled.

    >>> as_probabilities(torch.tensor([[0.25, 0.75]]))
    tensor([[0.2500, 0.7500]], dtype=torch.float64)

    Args:
        values: probabilities, classes on the last axis.
        shape: the axes that are expected, `PREDICTIVE` or `MEMBERS`.
    """
    axes = shape.count(",") + 1
    if not values.is_floating_point():
        raise InputError(
            f"expected probabilities {shape} in floating point, found {values.dtype}; give softmax(logits)"
        )
    if values.dim() != axes or not values.numel():
        more = "average over members, as p.mean(0)" if values.dim() > axes else "add an axis, as p[None]"
        raise InputError(
            f"expected probabilities {shape}, found shape {tuple(values.shape)}; "
            f"{more if values.dim() != axes else 'give at least one example'}"
        )
    exact = values.detach().double()
    tolerance = _SUM_TOLERANCE_HALF if values.dtype.itemsize < 4 else _SUM_TOLERANCE
    gap = (exact.sum(-1) - 1).abs()
    if not bool((exact >= 0).all()) or not bool((gap <= tolerance).all()):
        missing, lowest = int(exact.isnan().sum()), float(exact.nan_to_num(nan=0.0).min())
        raise InputError(
            f"expected probabilities >= 0 that sum to 1 over the last axis, found {missing} NaN, the lowest at "
            f"{lowest:g} and sums off by up to {float(gap.nan_to_num().max()):g}; give softmax(logits), not logits"
        )
    return exact


@accepts_arrays
def as_class_numbers(targets: Tensor, probabilities: Tensor) -> Tensor:
    """Return targets as int64 (examples,).

    >>> as_class_numbers(torch.tensor([1, 0], dtype=torch.uint8), torch.eye(2))
    tensor([1, 0])

    Args:
        targets: class numbers of any integer type.
        probabilities: what they are compared with (..., examples, classes).
    """
    examples, classes = probabilities.shape[-2:]
    if targets.is_floating_point() or targets.dtype == torch.bool or tuple(targets.shape) != (examples,):
        raise InputError(
            f"expected class numbers ({examples},) of an integer type, found {targets.dtype} of shape "
            f"{tuple(targets.shape)}; give one class number per example"
        )
    numbers = targets.detach().to(probabilities.device).long()
    if not bool(((numbers >= 0) & (numbers < classes)).all()):
        raise InputError(
            f"expected class numbers from 0 to {classes - 1}, found {int(numbers.min())} to {int(numbers.max())}; "
            "number the classes from 0"
        )
    return numbers


def as_pair(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return two average predictives (examples, classes) for the same examples.

    >>> [one.shape for one in as_pair(torch.eye(2), torch.eye(2))]
    [torch.Size([2, 2]), torch.Size([2, 2])]
    """
    first, second = as_probabilities(p), as_probabilities(q).to(p.device)
    if first.shape != second.shape:
        raise InputError(
            f"expected two predictives of the same examples and classes, found {tuple(first.shape)} and "
            f"{tuple(second.shape)}; compute both on the same inputs"
        )
    return first, second


@accepts_arrays
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
    """
    if weights is None:
        return torch.ones(examples, dtype=torch.float64, device=device)
    exact = weights.detach().double()
    if not exact.dim() or exact.shape[-1] != examples:
        raise InputError(
            f"expected weights (..., {examples}), one per example, found shape {tuple(exact.shape)}; give each example "
            "its count"
        )
    if not bool((exact >= 0).all()) or not bool((exact.sum(-1) > 0).all()):
        raise InputError(
            "expected weights >= 0 of which at least one is positive in each row, found others; leave weights out to "
            "count every example once"
        )
    return exact


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
