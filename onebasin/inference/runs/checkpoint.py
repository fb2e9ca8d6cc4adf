"""A kernel's State as one file of tensors, so that a killed run goes on where it was.

A State is a NamedTuple of tensors, of dicts of tensors, and of further NamedTuples. Its tensors are stored under their
paths (`tuner/log_step`), and put back into the type that the kernel's `init` is annotated to return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from torch import Tensor


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a State with its path."""
    if isinstance(state, Tensor):
        yield path, state
        return
    entries = state.items() if isinstance(state, Mapping) else state._asdict().items()
    for name, value in entries:
        yield from leaves(value, f"{path}/{name}" if path else name)


def rebuilt(kind: Any, tensors: Mapping[str, Tensor], path: str = "") -> Any:
    """The State of type `kind` whose leaves are `tensors`.

    >>> import torch
    >>> from onebasin.inference.methods.mass import Spread
    >>> before = Spread.empty(torch.zeros(2, 3))
    >>> rebuilt(Spread, dict(leaves(before))).mean.shape
    torch.Size([2, 3])
    """
    if path in tensors:
        return tensors[path]
    if not hasattr(kind, "_fields"):
        start = f"{path}/"
        return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    hints = get_type_hints(kind)
    return kind(*[rebuilt(hints[name], tensors, f"{path}/{name}" if path else name) for name in kind._fields])


def state_type(kernel: Any) -> Any:
    """The type of a kernel's State: what its `init` returns."""
    return get_type_hints(type(kernel).init)["return"]
