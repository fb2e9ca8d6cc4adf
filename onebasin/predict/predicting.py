"""What a crowd predicts: every network by itself, or their average without keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.predict.batches import examples_in
from onebasin.predict.crowd import predictions, side_by_side
from onebasin.predict.drawing import Crowd, first_of, networks_of
from onebasin.predict.portions import check_rows, portion

Output = Literal["probabilities", "logits", "values"]
OUTPUTS = ("probabilities", "logits", "values")


class Options(TypedDict, total=False):
    """What `predict` may also be told.

    Attributes:
        draws: networks drawn from a Posterior, 100 by default; a Population is taken as it is.
        seed: of these draws, 0 by default. Draw k is the same for any `chunk`.
        chunk: networks in one pass; by default as many as 256 MB of activations and 64 MB of weights hold, at most 16.
        batch: examples in one pass; by default 1,000, or fewer where activations are large.
        progress: called with (networks done, networks in all).
    """

    draws: int
    seed: int
    chunk: int
    batch: int
    progress: Callable[[int, int], None]


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
        options: `draws`, `seed`, `chunk`, `batch` and `progress`, see `Options`.

    Returns:
        Without `average` the dtype is that of the networks; probabilities are computed in float32 at least.

    Raises:
        InputError: an option is unknown, there are no classes, or a network gives NaN.
    """
    check_output(output, options)
    total = len(networks_of(crowd, options.get("draws", 100), options.get("seed", 0)))
    result: Tensor | None = None
    for start, part in passes(model, crowd, inputs, **options):
        shown = _shown(part, output, start)
        if average:
            mean = shown.sum(0, dtype=torch.float64) / total
            result = mean if result is None else result.add_(mean)
        else:
            result = shown.new_empty((total, *shown.shape[1:])) if result is None else result
            result[start : start + len(shown)] = shown
    assert result is not None  # there is at least one network
    return result


def passes(model: nn.Module, crowd: Crowd, inputs: Inputs, **options: Unpack[Options]) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first network, what a block of networks returns (n, examples, ...)) until all have run."""
    networks = networks_of(crowd, options.get("draws", 100), options.get("seed", 0))
    sizes = portion(model, first_of(networks), inputs, chunk=options.get("chunk"), batch=options.get("batch"))
    several = side_by_side(model)
    for start, block in networks.blocks(sizes.block):
        part = Population.from_stacked(block)
        try:
            found = predictions(model, part, inputs, chunk=sizes.chunk, batch=sizes.batch, several=several)
        except IndexError:  # there is no axis of examples to join batches along
            check_rows(torch.zeros(()), examples_in(inputs))
            raise
        check_rows(found[0], examples_in(inputs))
        yield start, found
        if (progress := options.get("progress")) is not None:
            progress(start + len(part), len(networks))


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
