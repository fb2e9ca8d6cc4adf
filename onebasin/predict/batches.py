"""Inputs of a model, cut into batches along the first axis of every tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from onebasin.calling import Call, Inputs, call_arguments
from onebasin.errors import InputError


def examples_in(inputs: Inputs) -> int:
    """Number of examples: the common length of the first axis of all tensors.

    >>> examples_in((torch.zeros(5, 2), torch.zeros(5)))
    5
    """
    tensors = [leaf for leaf in tree_leaves(call_arguments(inputs)) if isinstance(leaf, Tensor) and leaf.dim()]
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) != 1 or lengths == {0}:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise InputError(
            f"expected input tensors with one and the same number of examples on the first axis, found {shapes}: "
            "give every input one row per example"
        )
    return lengths.pop()


def check_targets(inputs: Inputs, targets: Tensor) -> None:
    """Refuse targets that are not one per example.

    Raises:
        InputError: their number is another.
    """
    if not targets.dim() or examples_in(inputs) != len(targets):
        raise InputError(
            f"expected one target for each of {examples_in(inputs)} examples, found targets {tuple(targets.shape)}: "
            "give targets of the same length"
        )


def batches(inputs: Inputs, size: int) -> Iterator[tuple[slice, Call]]:
    """Yield (rows, arguments) with at most `size` examples each.

    The pieces are as equal as can be: a last batch of one example would have no variance.

    >>> [rows for rows, _ in batches(torch.zeros(7), 3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if size < 1:
        raise InputError(f"a batch has at least 1 example, found {size}: leave batch out for 1000")
    count, call = examples_in(inputs), call_arguments(inputs)
    pieces = -(-count // size)
    start = 0
    for piece in range(pieces):
        stop = start + count // pieces + (piece < count % pieces)
        rows = slice(start, stop)
        yield rows, rows_of(call, rows)
        start = stop


def moved(call: Call, device: torch.device, dtype: torch.dtype | None) -> Call:
    """The arguments on a device, floating-point ones in a dtype if one is given."""
    result: Call = tree_map(lambda value: _moved(value, device, dtype), call)
    return result


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def rows_of(call: Call, rows: slice | Tensor) -> Call:
    """The arguments of some of the examples."""
    result: Call = tree_map(lambda value: value[rows] if isinstance(value, Tensor) and value.dim() else value, call)
    return result
