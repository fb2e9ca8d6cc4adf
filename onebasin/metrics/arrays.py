"""Arrays of numpy where tensors are expected."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from onebasin.errors import InputError, explained

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def accepts_arrays(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function of tensors take numpy arrays as well; a list or a text in place of its first tensor is refused.

    >>> accepts_arrays(torch.sum)(np.ones(3))
    tensor(3., dtype=torch.float64)
    """
    annotations = getattr(function, "__annotations__", {})
    begins_with_tensor = str(next(iter(annotations.values()), "")).split(".")[-1].rstrip("'>") == "Tensor"

    call = explained(function)

    @wraps(function)
    def converting(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if begins_with_tensor and arguments and isinstance(arguments[0], list | str):
            raise InputError(
                f"expected a tensor or an array in {getattr(function, '__name__', 'the metric')}, found a "
                f"{type(arguments[0]).__name__}: give torch.tensor(...) of it"
            )
        given: Any = call
        result: Result = given(*map(_tensor, arguments), **{name: _tensor(value) for name, value in options.items()})
        return result

    return converting


def _tensor(value: object) -> object:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
