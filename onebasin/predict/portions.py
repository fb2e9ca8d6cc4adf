"""How many networks and examples go through one forward pass, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebasin.calling import Inputs
from onebasin.errors import InputError
from onebasin.predict.batches import batches, examples_in
from onebasin.predict.forward import BATCH, Bound

MEMBERS = 16  # more networks in one pass gain nothing on a processor
BLOCK = 16 * MEMBERS  # networks read at a time at most, so that progress is told now and then
ROOM = 256 << 20  # bytes for the activations of one pass
HELD = 64 << 20  # bytes for the weights of one block of networks, and for their outputs
ALIVE = 3  # the widest activations that a forward pass holds at a time: read, written, and a skip connection


@dataclass(frozen=True)
class Portion:
    """What goes through a model at a time.

    Attributes:
        block: networks that are read and whose outputs are handed on together, at least a chunk.
        chunk: networks in one pass.
        batch: examples in one pass.
    """

    block: int
    chunk: int
    batch: int


def portion(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, chunk: int | None = None, batch: int | None = None
) -> Portion:
    """Choose what is not given, from one pass of one network over two examples; with both given there is no such pass.

    Args:
        model: the function.
        state: one of its networks.
        inputs: all examples.
        chunk: networks in one pass, if somebody has chosen.
        batch: examples in one pass, if somebody has chosen.

    Raises:
        InputError: a chunk of no networks was asked for.
    """
    if chunk is not None and chunk < 1:
        raise InputError(f"a chunk has at least 1 network, found {chunk}: leave chunk out to have it chosen")
    if chunk is not None and batch is not None:
        return Portion(chunk, chunk, batch)
    examples = examples_in(inputs)
    rows, call = next(batches(inputs, 2))
    watch = _Widest()
    with watch:
        result = Bound(model, state)(call)
    width = ALIVE * watch.nbytes // (rows.stop - rows.start) + 1
    batch = max(1, min(BATCH, examples, ROOM // width)) if batch is None else batch
    answers = result.nbytes * examples // (rows.stop - rows.start) + 1
    weights = sum(tensor.nbytes for tensor in state.values()) + 1
    block = max(1, min(BLOCK, HELD // answers, HELD // weights))
    chunk = chunk or max(1, min(MEMBERS, block, ROOM // max(1, min(batch, examples) * width)))
    return Portion(max(chunk, block // chunk * chunk), chunk, batch)


class _Widest(TorchDispatchMode):
    """Looks for the largest result of any operation."""

    def __init__(self) -> None:
        prepare: Callable[[], None] = super().__init__  # not annotated by torch
        prepare()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and measure what it gives."""
        out = func(*args, **kwargs or {})
        self.nbytes = max([self.nbytes, *(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))])
        return out
