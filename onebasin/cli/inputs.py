"""From ``--input`` texts to example inputs.

The grammar is ``[NAME=][KIND:]SIZE``: sizes joined by ``x``; kind ``float`` (the default), ``ids`` (integers below the
vocabulary; ``ids1000`` sets it) or ``bool``. Inputs are drawn at random from a seed, in the model's own precision.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onebasin.cli.words import SIZE_GRAMMAR
from onebasin.errors import InputError

_PATTERN = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<kind>float|bool|ids<?(?P<vocabulary>\d*)>?):)?(?P<size>\d+(?:x\d+)*)"
)


@dataclass(frozen=True)
class InputText:
    """One parsed ``--input``; ``name`` is empty for a positional input, ``vocabulary`` is None when not given."""

    name: str
    kind: str
    shape: tuple[int, ...]
    vocabulary: int | None = None


def parse(text: str) -> InputText:
    """Parse one ``--input``.

    >>> parse("input_ids=ids30522:2x16")
    InputText(name='input_ids', kind='ids', shape=(2, 16), vocabulary=30522)

    Raises:
        InputError: with the grammar.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not an input; expected {SIZE_GRAMMAR}.")
    shape = tuple(int(size) for size in match["size"].split("x"))
    if 0 in shape or match["vocabulary"] == "0":
        raise InputError(f"{text!r} is empty: each size must be at least 1, as in 2x3x32x32.")
    kind = match["kind"] or "float"
    vocabulary = int(match["vocabulary"]) if match["vocabulary"] else None
    return InputText(match["name"] or "", "ids" if kind.startswith("ids") else kind, shape, vocabulary)


def draw(
    texts: Sequence[str], model: nn.Module, *, vocabulary: int | None, seed: int
) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Draw example inputs for ``model``.

    Args:
        texts: the ``--input`` options, all named or all positional.
        model: gives the precision of floats, and the vocabulary through its smallest embedding.
        vocabulary: ids are drawn below this; ``None`` asks the model.
        seed: of the draw.

    Returns:
        A tuple of positional inputs, or a dict of keyword inputs.

    Raises:
        InputError: a text is malformed, names are mixed with positions or repeated, or memory is too small.
    """
    parsed = [parse(text) for text in texts]
    names = [item.name for item in parsed if item.name]
    if names and (len(names) < len(parsed) or len(set(names)) < len(names)):
        raise InputError(
            "Inputs are either all positional or all named, each name once; "
            f"found {', '.join(item.name or 'one without a name' for item in parsed)}."
        )
    generator = torch.Generator().manual_seed(seed)
    default = vocabulary or _smallest_vocabulary(model)
    try:
        values = [_draw_one(item, model, item.vocabulary or default, generator) for item in parsed]
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when memory is short
        raise InputError(f"The inputs {', '.join(texts)} do not fit into memory; give smaller sizes.") from error
    return dict(zip(names, values, strict=True)) if names else tuple(values)


def _draw_one(item: InputText, model: nn.Module, vocabulary: int, generator: torch.Generator) -> Tensor:
    if item.kind == "ids":
        return torch.randint(vocabulary, item.shape, generator=generator)
    if item.kind == "bool":
        return torch.randint(2, item.shape, generator=generator).bool()
    precision = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    return torch.randn(item.shape, generator=generator).to(precision)


def _smallest_vocabulary(model: nn.Module) -> int:
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return min(sizes, default=2)
