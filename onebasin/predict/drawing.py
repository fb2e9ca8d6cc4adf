"""Networks that are drawn from a posterior when they are needed, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.posterior import Posterior
from onebasin.posterior.posterior import shares
from onebasin.state import Spec, State

Crowd = Population | Posterior


@dataclass(frozen=True, eq=False)
class Drawn:
    """Networks drawn from a posterior, read like a Population, but never all in memory.

    Each network is drawn by itself, component by component, from one generator that starts anew at `seed` whenever the
    networks are asked for. So network k is the same, bit for bit, for blocks of any size; it depends on `draws`, which
    decides how many networks each component gets. (`Posterior.draw` takes its numbers in one piece: the same
    distribution, other networks.)

    Attributes:
        posterior: where they come from.
        draws: how many.
        seed: where the generator starts.
    """

    posterior: Posterior
    draws: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.draws, int) or self.draws < 1:
            raise InputError(f"expected to draw at least 1 network, found draws={self.draws}: give a positive number")

    def __len__(self) -> int:
        return self.draws

    @property
    def spec(self) -> Spec:
        """Shapes and dtypes of one network."""
        return self.posterior.spec

    @cached_property
    def chain(self) -> Tensor:
        """The component of each network, int64 (draws,), ascending."""
        return self._components(self._generator())

    def blocks(self, size: int) -> Iterator[tuple[int, State]]:
        """Yield (start, tensors (n, *shape)) for consecutive networks, n <= size."""
        reel = Reel(self)
        for start in range(0, self.draws, size):
            yield start, reel.take(start, min(start + size, self.draws))

    def vectors(self) -> Iterator[Tensor]:
        """Yield the uncertain weights of one network after the other, each (1, D)."""
        generator = self._generator()
        for component in self._components(generator).tolist():
            yield self.posterior.components[component].draw_flat(1, generator)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _components(self, generator: torch.Generator) -> Tensor:
        """Which component each network comes from; the first use of the generator."""
        counts = shares(self.posterior.weights, self.draws, generator)
        return torch.repeat_interleave(torch.arange(len(counts)), counts)


class Reel:
    """Any consecutive networks of `Drawn`; quick for those who ask for later and later ones.

    What lies between is drawn and thrown away, and to go back it starts anew: a generator cannot be wound forward.
    """

    def __init__(self, drawn: Drawn) -> None:
        """Stand before the first network."""
        self._drawn, self._at, self._vectors = drawn, 0, drawn.vectors()

    def take(self, start: int, stop: int) -> State:
        """Networks start:stop, as tensors (stop - start, *shape)."""
        if start < self._at:
            self._at, self._vectors = 0, self._drawn.vectors()
        next(islice(self._vectors, start - self._at, start - self._at), None)
        flat, self._at = torch.cat([*islice(self._vectors, stop - start)]), stop
        posterior, chain = self._drawn.posterior, self._drawn.chain[start:stop].tolist()
        rest = {name: torch.stack([posterior.rest[own][name] for own in chain]) for name in posterior.layout.others}
        return posterior.layout.networks(flat, rest)


def first_of(networks: Population | Drawn) -> State:
    """The first network."""
    _, block = next(iter(networks.blocks(1)))
    return {name: value[0] for name, value in block.items()}


def networks_of(crowd: Crowd, draws: int, seed: int) -> Population | Drawn:
    """The networks of a crowd: a population as it is, a posterior through `draws` draws.

    Raises:
        InputError: there is no network, or the crowd is neither of the two.
    """
    if isinstance(crowd, Posterior):
        return Drawn(crowd, draws, seed)
    if not isinstance(crowd, Population):
        raise InputError(
            f"expected a Population or a Posterior, found {type(crowd).__name__}: "
            "make a Population of single networks with Population.from_states"
        )
    if not len(crowd):
        raise InputError("expected at least one network to predict with, found an empty population: add members")
    return crowd
