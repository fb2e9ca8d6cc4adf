"""Which examples a step sees: every chain goes through its own shuffled data, epoch by epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.seeds import Streams, generator


class Minibatches:
    """Rows (chains, n) for each step; a function of the seed, the chain and the step alone.

    An epoch has floor(N / n) batches, so that all are equally large; what is left over differs from epoch to epoch.

    >>> streams = Streams(0, chains=[0, 1], block=0)
    >>> Minibatches(examples=10, size=5).rows(0, streams).shape
    torch.Size([2, 5])
    """

    def __init__(self, examples: int, size: int | None) -> None:
        if size is not None and size < 1:
            raise InputError(f"a mini-batch has at least 1 example, found batch={size}: leave it out for all examples")
        self.examples, self.size = examples, None if size is None or size >= examples else size
        self._orders: dict[tuple[int, int, int], Tensor] = {}

    @property
    def per_epoch(self) -> int:
        """Steps in one epoch."""
        return 1 if self.size is None else self.examples // self.size

    def rows(self, step: int, streams: Streams) -> Tensor | None:
        """Rows of this step, None for the whole data."""
        if self.size is None:
            return None
        epoch, place = divmod(step, self.per_epoch)
        wanted = [(streams.seed, chain, epoch) for chain in streams.chains]
        if any(key not in self._orders for key in wanted):
            self._orders = {
                key: torch.randperm(self.examples, generator=generator(key[0], "order", key[1], key[2]))
                for key in wanted
            }
        rows = slice(place * self.size, (place + 1) * self.size)
        return torch.stack([self._orders[key][rows] for key in wanted])
