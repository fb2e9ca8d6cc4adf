"""Whether targets are classes or values; where the targets themselves leave it open, the user is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError

KINDS = ("categorical", "bernoulli", "gaussian")


def kind_of_targets(targets: Tensor, likelihood: str | None = None, noise: float | str | None = None) -> str:
    """Return "categorical", "bernoulli" or "gaussian": how targets are to be read.

    What was said decides: `likelihood`, or `noise`, which only values have. Otherwise whole-number types are class
    numbers, and floats are values, if they look like values: floats that are all whole numbers, or of which there are
    only two different ones among more than two, may as well be class labels that went through a table of floats. A
    classifier with two outputs would then be trained as a mean and a log deviation, without a word; so these are
    refused with both readings.

    >>> kind_of_targets(torch.tensor([0, 1])), kind_of_targets(torch.tensor([0.3, 1.0, 2.0]))
    ('categorical', 'gaussian')
    >>> kind_of_targets(torch.tensor([0.0, 1.0]), noise=0.1)
    'gaussian'

    Args:
        targets: all of them, (examples, ...), of any type.
        likelihood: one of `KINDS`, or None where nobody has said.
        noise: the standard deviation of targets, or "learned"; None where nobody has said.

    Raises:
        InputError: there are two readings, or `likelihood` is none of `KINDS`, or contradicts `noise`.
    """
    if likelihood is not None:
        if likelihood not in KINDS:
            raise InputError(
                f"expected a likelihood out of {', '.join(KINDS)}, found {likelihood!r}: choose one of them"
            )
        if noise is not None and likelihood != "gaussian":
            raise InputError(
                f"noise={noise!r} is the standard deviation of gaussian targets, found {likelihood} ones: leave noise "
                'out, or choose likelihood="gaussian"'
            )
        return likelihood
    if not targets.is_floating_point():
        if noise is not None:
            raise InputError(
                f"{targets.dtype} targets are class numbers unless the likelihood is named, but noise={noise!r} is for "
                'values: leave noise out for classes, or add likelihood="gaussian" for values'
            )
        return "categorical"
    if noise is None and (seen := labels_seen(targets)):
        raise InputError(
            f"expected targets that are classes or values, found {targets.dtype} ones that can be either ({seen}): for "
            'classes give whole numbers from 0, as targets.long(), or likelihood="bernoulli" for 0 and 1 with one '
            'output each; for values say so, by likelihood="gaussian" or noise='
        )
    return "gaussian"


def loss_of_targets(targets: Tensor) -> str:
    """Return "cross-entropy" for class numbers, "mse" for values; asks where `kind_of_targets` asks.

    >>> loss_of_targets(torch.tensor([0, 1])), loss_of_targets(torch.tensor([0.3, 1.0, 2.0]))
    ('cross-entropy', 'mse')

    Raises:
        InputError: the targets are floats that may be class labels.
    """
    if not targets.is_floating_point():
        return "cross-entropy"
    if seen := labels_seen(targets):
        raise InputError(
            f"expected targets that are classes or values, found {targets.dtype} ones that can be either ({seen}): for "
            'classes store whole numbers from 0, as targets.long(); for values choose the loss "mse"'
        )
    return "mse"


def labels_seen(targets: Tensor) -> str:
    """Why float targets may be class labels: "the whole numbers 0 to 9"; empty where they cannot well be.

    >>> labels_seen(torch.tensor([0.0, 1.0, 1.0])), labels_seen(torch.tensor([0.5, 1.0, 1.0, 0.2]))
    ('the whole numbers 0 to 1', '')
    """
    flat = targets.detach().reshape(-1)
    if not flat.numel() or not targets.is_floating_point() or not bool(torch.isfinite(flat).all()):
        return ""
    low, high = float(flat.min()), float(flat.max())
    if bool((flat == flat.round()).all()):
        return f"the whole numbers {low:g} to {high:g}" if low < high else f"nothing but {low:g}"
    if flat.numel() > 2 and low < high and bool(((flat == low) | (flat == high)).all()):
        return f"only two different numbers, {low:g} and {high:g}"
    return ""
