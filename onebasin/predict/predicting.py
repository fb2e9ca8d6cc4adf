"""What a crowd predicts: every network by itself, or their average without keeping them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.predict.drawing import Crowd, networks_of
from onebasin.predict.passing import Options, passes

Output = Literal["probabilities", "logits", "values"]
OUTPUTS = ("probabilities", "logits", "values")


def predict(
    model: nn.Module,
    crowd: Crowd,
    inputs: Inputs,
    *,
    output: Output = "probabilities",
    average: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """Return what the networks of a crowd predict, (members, examples, classes), or their average (examples, classes).

    >>> from onebasin.population import Population
    >>> crowd = Population.from_stacked({"weight": torch.tensor([[[0.0], [0.0]], [[3.0], [0.0]]])})
    >>> layer = nn.Linear(1, 2, bias=False)
    >>> predict(layer, crowd, torch.tensor([[1.0]]))
    tensor([[[0.5000, 0.5000]], [[0.9526, 0.0474]]])
    >>> predict(layer, crowd, torch.tensor([[1.0]]), average=True)
    tensor([[0.7263, 0.2737]], dtype=torch.float64)

    Args:
        model: the function; left exactly as it was.
        crowd: a Population, read block by block; or a Posterior, from which networks are drawn block by block.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, one example per row of every tensor.
        output: "probabilities", the softmax over the classes, which are axis 1 of what a network returns (examples,
            classes, ...); "logits" or "values" (two words for the same), what the network returns.
        average: return the mean over networks in float64, and keep no more than a block of them. (Of logits this is
            the logarithm of a geometric mean: for the average predictive ask for probabilities.)
        options: `draws`, `seed`, `statistics`, `chunk`, `batch` and `progress`; `workers`, `cluster` and `memory` say
            where the networks run; see `Options`.

    Returns:
        Without `average` the dtype is that of the networks; probabilities are computed in float32 at least.

    Raises:
        InputError: an option is unknown, there are no classes, or a network gives NaN.

    Warns:
        StatisticsWarning: draws of a Posterior have running statistics that are not their own; see `statistics`.
    """
    check_output(output, options)
    total = len(networks_of(crowd, options.get("draws", 100), options.get("seed", 0)))
    result: Tensor | None = None
    with passes(model, crowd, inputs, kept=4 if average else total, **options) as chunks:  # averages are twice as wide
        for start, part in chunks:
            shown = _shown(part, output, start)
            if average:
                mean = shown.sum(0, dtype=torch.float64) / total
                result = mean if result is None else result.add_(mean)
            else:
                result = shown.new_empty((total, *shown.shape[1:])) if result is None else result
                result[start : start + len(shown)] = shown
    assert result is not None  # there is at least one network
    return result


def check_output(output: str, options: Mapping[str, object]) -> None:
    """Refuse an output or an option that nobody knows.

    Raises:
        InputError: there is one.
    """
    if output not in OUTPUTS:
        raise InputError(f"expected output to be one of {', '.join(OUTPUTS)}, found {output!r}: choose one of them")
    refuse_unknown(options, Options.__annotations__, "predict")


def check_classes(outputs: Tensor) -> None:
    """Refuse outputs (members, examples, ...) without several classes to choose among.

    Raises:
        InputError: there are none.
    """
    if not outputs.is_floating_point():
        raise InputError(
            f"expected scores of classes as floating-point numbers to make probabilities of, found {outputs.dtype}: "
            'wrap the model so that it returns its scores, or ask for output="values"'
        )
    if outputs.dim() < 3 or outputs.shape[2] < 2:
        raise InputError(
            f"expected outputs (examples, classes, ...) of at least 2 classes to make probabilities of, found "
            f'{tuple(outputs.shape[1:])}: the softmax of a single number is always 1, so ask for output="values"'
        )


def refuse_nan(values: Tensor, start: int) -> None:
    """Refuse NaN in what networks (n, ...) from number `start` on predict: an average would be NaN everywhere.

    Raises:
        InputError: there is one.
    """
    broken = values.isnan().flatten(1).any(1).nonzero().flatten()
    if len(broken):
        raise InputError(
            f"expected numbers from every network, found NaN from network {start + int(broken[0])}: look for NaN or "
            "infinity in its weights and in the inputs, or leave it out"
        )


def _shown(part: Tensor, output: Output, start: int) -> Tensor:
    if output == "probabilities":
        check_classes(part)
        wide = part.float() if part.dtype.itemsize < 4 else part
        part = wide.softmax(2).to(part.dtype)
    refuse_nan(part, start)
    return part
