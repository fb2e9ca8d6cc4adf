"""The deviations of networks from their centres as a matrix (N, D), multiplied shard by shard wherever the work runs.

Shards depend on the crowd, and on how large a product is, but not on who multiplies: sums over shards are taken in
their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onebasin.cluster import Cluster, settled
from onebasin.population import Population
from onebasin.population.parting import parts
from onebasin.population.writer import block_members
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.matrix import Matrix, Read
from onebasin.posterior.moments import deviations

_SHARE = 4  # networks in a shard for each column of a product (D, L), which comes back from every shard
_Shard = tuple[Population, Tensor, Tensor | None]


class Deviations(Matrix):
    """X (N, D) with a row w - centre of its group for each network w, in the precision of `vector_dtype`.

    Attributes:
        size: N and D.
        degrees: N - G, the divisor of an unbiased covariance.

    Args:
        population: N networks.
        layout: which D of their numbers.
        centres: of G groups, float64 (G, D).
        groups: the group of each network, int64 (N,); all are of one if it is left out.
        cluster: who reads and multiplies.
    """

    def __init__(
        self,
        population: Population,
        layout: Coordinates,
        centres: Tensor,
        groups: Tensor | None = None,
        *,
        cluster: Cluster,
    ) -> None:
        self.population, self.cluster = population, cluster
        self.groups = torch.zeros(len(population), dtype=torch.int64) if groups is None else groups
        self.size = (len(population), layout.size)
        self.degrees = len(population) - len(centres)
        self._work = _Work(layout, centres)  # one object for all products, so that it is sent once

    def times(self, right: Tensor) -> Tensor:
        """Shards of about 64 MB, laid end to end."""
        return torch.cat(list(self._mapped(("times", right), 1)))

    def gathered(self, left: Tensor, width: int) -> Tensor:
        """Summed over shards."""
        return _sum(self._mapped(("gathered", None), _SHARE * left.shape[1], left))

    def turned(self, right: Tensor) -> Tensor:
        """Summed over shards."""
        return _sum(self._mapped(("turned", right), _SHARE * right.shape[1]))

    def lengths(self) -> Tensor:
        """Shards of about 64 MB, laid end to end."""
        return torch.cat(list(self._mapped(("lengths", None), 1)))

    def _mapped(self, what: tuple[str, Tensor | None], least: int, left: Tensor | None = None) -> Iterator[Tensor]:
        """The products of shards of `least` networks, or more."""
        size = max(block_members(self.population.spec), least)
        return self.cluster.map(self._work, self._shards(size, left), shared=settled(what))

    def _shards(self, size: int, left: Tensor | None) -> Iterator[_Shard]:
        for start, members in parts(self.population, size):
            rows = slice(start, start + len(members))
            yield members, self.groups[rows], None if left is None else settled(left[rows])


@dataclass(frozen=True, eq=False)
class _Work:
    """A product of some rows."""

    layout: Coordinates
    centres: Tensor

    def __call__(self, what: tuple[str, Tensor | None], shard: _Shard) -> Tensor:
        members, groups, left = shard
        x = Read(partial(deviations, members, self.layout, self.centres, groups))
        name, right = what
        if left is not None:
            return x.gathered(left, self.layout.size)
        if right is None:
            return x.lengths()
        return x.turned(right) if name == "turned" else x.times(right)


def _sum(parts: Iterator[Tensor]) -> Tensor:
    """Add up, in order."""
    total = next(parts)
    for part in parts:
        total += part
    return total
