"""Loss and error of a network on data; whether targets are classes or values, refused where they leave it open."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional.call import BATCH, Bound, batches
from onebasin.functional.data import AnyInputs, pair_of
from onebasin.functional.heads import LIKELIHOODS, Likelihood
from onebasin.functional.output import OutputPart, select_output

Loss = str | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Score:
    """How well one network does on some data.

    Attributes:
        loss: mean loss over the examples.
        error: share of wrong classes, None where there are no classes.
        examples: how many there were.
    """

    loss: float
    error: float | None
    examples: int


def losses(
    model: nn.Module,
    state: Mapping[str, Tensor],
    inputs: AnyInputs,
    targets: Any,
    *,
    output: OutputPart = None,
    loss: Loss = "cross-entropy",
    batch: int = BATCH,
) -> Score:
    """Return mean loss and error of `model` with the weights `state`; nothing is changed.

    >>> identity = {"weight": torch.eye(2), "bias": torch.zeros(2)}
    >>> losses(nn.Linear(2, 2), identity, torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1])).error
    0.5

    Args:
        model: the function.
        state: its weights.
        inputs: tensors or arrays, as in `predict`.
        targets: one row per example: class numbers for "cross-entropy", values for "mse".
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        loss: "cross-entropy" of outputs (examples, classes, ...); "mse", the squared difference averaged over the
            entries of each example; or a function (outputs, targets) -> one loss per example, or their mean.
        batch: largest number of examples in one forward pass.

    Raises:
        InputError: targets do not fit the inputs or the outputs, or the loss is not a finite number.
    """
    model = select_output(model, output)
    inputs, targets = pair_of((inputs, targets), model)
    bound = Bound(model, state)
    parts: list[Score] = []
    for rows, call in batches(inputs, batch):
        found = bound(call)
        if not parts and loss == "cross-entropy" and found.dim() > 1:  # all labels, before the other batches run
            check_labels(targets, found)
        parts.append(score(found, targets[rows], loss))
    count = sum(part.examples for part in parts)
    errors = [part.error * part.examples for part in parts if part.error is not None]
    return Score(
        math.fsum(part.loss * part.examples for part in parts) / count,
        math.fsum(errors) / count if len(errors) == len(parts) else None,
        count,
    )


def score(outputs: Tensor, targets: Tensor, loss: Loss = "cross-entropy") -> Score:
    """Mean loss and error of outputs (examples, ...) that were computed already."""
    if len(outputs) != len(targets):
        raise InputError(
            f"expected outputs with one row per example, found {tuple(outputs.shape)} for {len(targets)} targets: "
            "wrap the model so that its output has the examples on the first axis"
        )
    outputs, targets = outputs.detach(), targets.detach().to(outputs.device)
    wide = outputs.float() if outputs.dtype.itemsize < 4 else outputs
    error = None
    if callable(loss):
        values = _checked(loss(wide, targets), len(targets))
    elif loss == "cross-entropy":
        values = _cross_entropy(wide, targets)
        error = float((wide.argmax(1) != targets).double().mean())
    elif loss == "mse":
        values = _squared(wide, targets)
    else:
        raise InputError(f'expected loss "cross-entropy", "mse" or a function, found {loss!r}: give loss="mse"')
    mean = float(values.double().mean())
    if not math.isfinite(mean):
        bad = int((~torch.isfinite(wide)).sum())
        raise InputError(
            f"expected a finite loss, found {mean} over {len(targets)} examples ({bad} of {wide.numel()} outputs are "
            "not finite): look for NaN or infinity in the weights and the data"
        )
    return Score(mean, error, len(targets))


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per class number: -log softmax(outputs)[target], classes on axis 1."""
    expected = (outputs.shape[0], *outputs.shape[2:])
    check_one_hot(targets, outputs)
    if outputs.dim() < 2 or tuple(targets.shape) != expected or targets.is_floating_point():
        raise InputError(
            f"expected outputs (examples, classes, ...) and class numbers {expected}, found outputs "
            f"{tuple(outputs.shape)} and {targets.dtype} targets {tuple(targets.shape)}: put the classes on axis 1 "
            'and give whole-number targets (targets.long()), or choose loss="mse" or a function of your own'
        )
    check_class_numbers(targets, outputs.shape[1])
    return F.cross_entropy(outputs, targets.long(), reduction="none")


def check_one_hot(targets: Tensor, outputs: Tensor) -> None:
    """Refuse targets with one column per class, which are the same thing as class numbers but not the same numbers.

    Args:
        targets: (examples, ...).
        outputs: of some of the examples (n, classes, ...).

    Raises:
        InputError: every row of the targets is one 1 among zeros, as many as there are classes.
    """
    if targets.dim() != 2 or outputs.dim() != 2 or targets.shape[1] != outputs.shape[1] or targets.shape[1] < 2:
        return
    if bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all()):
        raise InputError(
            f"expected class numbers ({len(targets)},), found one-hot targets {tuple(targets.shape)}: give "
            "targets.argmax(1)"
        )


def check_labels(targets: Tensor, outputs: Tensor) -> None:
    """Refuse one-hot targets, and class numbers that the outputs of some examples (n, classes, ...) do not have.

    Raises:
        InputError: there are such targets.
    """
    check_one_hot(targets, outputs)
    if not targets.is_floating_point():
        check_class_numbers(targets, outputs.shape[1])


def check_class_numbers(targets: Tensor, classes: int) -> None:
    """Refuse class numbers outside 0 ... classes - 1, which would index past the outputs.

    Raises:
        InputError: there are such numbers.
    """
    wrong = (targets < 0) | (targets >= classes)
    if bool(wrong.any()):
        strange = targets[wrong].unique()
        remedy = "number the classes from 0, or name the likelihood or loss where the targets are values"
        if targets.dim() > 1 and len(strange) == 1:
            remedy = f"give ignore_index={int(strange)} where it marks what does not count, or number them from 0"
        raise InputError(
            f"expected class numbers from 0 to {classes - 1}, found {int(targets.min())} to {int(targets.max())}: "
            f"{remedy}"
        )


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """(outputs - targets)^2; (n, 1) and (n,) are the same values, but nothing is broadcast or laid out anew."""
    if _core(outputs) != _core(targets):
        raise InputError(
            f"expected target values in the shape of the outputs {tuple(outputs.shape)}, found {tuple(targets.shape)}: "
            "give one value per output, in the order of its axes, or targets.long() where they are class numbers"
        )
    return (outputs - targets.reshape(outputs.shape).to(outputs.dtype)).square()


def _core(tensor: Tensor) -> tuple[int, ...]:
    """The shape without axes of size 1 at its end."""
    shape = tuple(tensor.shape)
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _checked(values: Tensor, examples: int) -> Tensor:
    """Refuse what is neither a mean nor one loss per example."""
    if not isinstance(values, Tensor) or (values.dim() and len(values) != examples):
        given = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"expected a mean or one loss for each of {examples} examples from the loss function, found {given}: "
            'use reduction="none" or "mean"'
        )
    return values.detach()


KINDS = ("categorical", "bernoulli", "gaussian")


def kind_of_targets(
    targets: Tensor, likelihood: str | Likelihood | None = None, noise: float | str | None = None
) -> str:
    """Return "categorical", "bernoulli", "gaussian" or a word of `LIKELIHOODS`: how targets are to be read.

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
        likelihood: one of `KINDS`, a word of `LIKELIHOODS` or an object like theirs; None decides by the targets.
        noise: the standard deviation of targets, or "learned"; None where it is not given.

    Raises:
        InputError: there are two readings, or `likelihood` is no such word, or contradicts `noise`.
    """
    if likelihood is not None:
        word = likelihood.name if isinstance(likelihood, Likelihood) else likelihood
        if word == likelihood and word not in (*KINDS, *LIKELIHOODS):
            near = difflib.get_close_matches(str(word), (*KINDS, *LIKELIHOODS), n=1)
            raise InputError(
                f"expected a likelihood out of {', '.join((*KINDS, *LIKELIHOODS))}, found {likelihood!r}: write "
                f"{f'{near[0]!r}' if near else repr('gaussian') + ' for values'}"
            )
        if noise is not None and likelihood != "gaussian":
            raise InputError(
                f"noise={noise!r} is the standard deviation of gaussian targets, found {word} ones: leave noise out, "
                'or choose likelihood="gaussian"'
            )
        return word
    if not targets.is_floating_point():
        if noise is not None:
            raise InputError(
                f"{targets.dtype} targets are class numbers unless the likelihood is named, but noise={noise!r} is for "
                'values: leave noise out for classes, or add likelihood="gaussian" for values'
            )
        return "categorical"
    if noise is None and targets.dim() == 2 and targets.shape[1] > 1:
        check_one_hot(targets, targets)
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
