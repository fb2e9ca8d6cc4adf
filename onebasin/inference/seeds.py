"""Random streams: each is named, and its seed derives from the run's seed and its name.

A stream belongs to (purpose, chain, block of steps). So what a chain draws depends neither on the other chains, nor
on who computes it, nor on where a run was interrupted: blocks begin afresh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derived(seed: int, *name: str | int) -> int:
    """A seed of 63 bits for the stream `name`; a stable hash, the same on every machine.

    >>> derived(0, "momentum", 3) == derived(0, "momentum", 3) != derived(0, "momentum", 4)
    True
    """
    text = "/".join([str(seed), *map(str, name)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *name: str | int) -> torch.Generator:
    """A fresh generator for the stream `name`. It lives on the CPU, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(derived(seed, *name))


class Streams:
    """The random numbers of several chains during one block of steps.

    >>> a = Streams(0, chains=[0, 1], block=5).gaussian("momentum", torch.zeros(2, 3))
    >>> b = Streams(0, chains=[1], block=5).gaussian("momentum", torch.zeros(1, 3))
    >>> torch.equal(a[1:], b)
    True
    """

    def __init__(self, seed: int, chains: Sequence[int], block: int | str) -> None:
        self.seed, self.chains, self.block = seed, tuple(chains), block
        self._of_chain: dict[str, list[torch.Generator]] = {}
        self._of_all: dict[str, torch.Generator] = {}

    def each(self, purpose: str) -> list[torch.Generator]:
        """One generator per chain; asked for again within the block, they go on where they were."""
        if purpose not in self._of_chain:
            made = [generator(self.seed, purpose, "chain", chain, "block", self.block) for chain in self.chains]
            self._of_chain[purpose] = made
        return self._of_chain[purpose]

    def all(self, purpose: str) -> torch.Generator:
        """One generator for what all chains of a run have in common, such as the jittered number of steps."""
        if purpose not in self._of_all:
            self._of_all[purpose] = generator(self.seed, purpose, "block", self.block)
        return self._of_all[purpose]

    def gaussian(self, purpose: str, like: Tensor) -> Tensor:
        """Standard normal numbers in the shape (chains, ...), dtype and device of `like`."""
        shape, dtype = like.shape[1:], like.dtype
        rows = [torch.randn(shape, generator=stream, dtype=dtype) for stream in self.each(purpose)]
        return torch.stack(rows).to(like.device)

    def uniform(self, purpose: str) -> Tensor:
        """One number in [0, 1) per chain, float64 (chains,)."""
        rows = [torch.rand((), generator=stream, dtype=torch.float64) for stream in self.each(purpose)]
        return torch.stack(rows)
