"""Examples that a function of the user returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebasin.data.dataset import Parts
from onebasin.data.images import as_inputs, as_targets
from onebasin.data.splitting import Pair
from onebasin.errors import InputError


def call(function: Callable[[], Any]) -> Parts:
    """What the function returns: (inputs, targets), or ((inputs, targets), (inputs, targets)), training first.

    >>> parts = call(lambda: ([[1.0], [2.0]], [0, 1]))
    >>> parts.train
    (tensor([[1.], [2.]]), tensor([0, 1]))

    Args:
        function: without arguments. Tensors, arrays and lists of numbers are all understood; bytes are pixels.

    Raises:
        InputError: it returned something else.
    """
    name = getattr(function, "__name__", type(function).__name__)
    found = function()
    if not _is_pair(found):
        raise InputError(
            f"expected (inputs, targets) or two such pairs from {name}(), found {_told(found)}: return one of these"
        )
    if all(isinstance(part, tuple) and _is_pair(part) for part in found):
        train, test = (_converted(part, name) for part in found)
        return Parts(name, train, test)
    return Parts(name, _converted(found, name), None)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _converted(pair: Any, name: str) -> Pair:
    inputs, targets = (_tensor(part, name) for part in pair)
    return as_inputs(inputs), as_targets(targets)


def _tensor(value: Any, name: str) -> Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"expected arrays of numbers from {name}(), found {_told(value)}: convert it to tensors or arrays"
        ) from error
    if found.is_complex():
        raise InputError(f"expected real numbers from {name}(), found {found.dtype}: return its parts as columns")
    if not found.dim():
        raise InputError(f"expected one row per example from {name}(), found a single number: return arrays")
    return found.detach()


def _told(value: Any) -> str:
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{length}"
