"""All pairs of some networks, and which of them come from one chain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.diversity.report import Collapse, Pair, Side
from onebasin.diversity.spread import Spread, median

NOISE = 1e-9  # nats: less than this is rounding


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs i < j of M networks.

    Attributes:
        first: i, int64 (pairs,).
        second: j, int64 (pairs,).
        same: 1 if both come from one chain, 0 if not, -1 if that is unknown, int64 (pairs,).
    """

    first: Tensor
    second: Tensor
    same: Tensor

    @classmethod
    def of(cls, count: int, chain: Tensor | None) -> Pairs:
        """The pairs of `count` networks with chains (count,), -1 or None where they are unknown."""
        first, second = torch.triu_indices(count, count, 1)
        chain = torch.full((count,), -1) if chain is None else chain
        known = (chain[first] >= 0) & (chain[second] >= 0)
        return cls(first, second, torch.where(known, (chain[first] == chain[second]).long(), -1))

    def values(self, matrix: Tensor) -> Tensor:
        """The entries (pairs,) of a symmetric matrix (M, M)."""
        return matrix[self.first, self.second]

    def side(self, matrix: Tensor, examples: int, crowd: float) -> Side:
        """The distribution of mutual information (M, M) over pairs, by chains."""
        values = self.values(matrix)
        whole = Spread.of(values)
        assert whole is not None  # there are at least two networks
        return Side(examples, crowd, whole, Spread.of(values[self.same == 1]), Spread.of(values[self.same == 0]))

    def collapse(self, matrix: Tensor, threshold: float) -> Collapse:
        """The pairs whose entries are at most this share of the median, or rounding."""
        from scipy.sparse.csgraph import connected_components

        values = self.values(matrix)
        limit = max(threshold * median(values), NOISE)
        below = values <= limit
        known = bool((self.same >= 0).any())
        groups, _ = connected_components((matrix <= limit).numpy(), directed=False)
        within = int((below & (self.same == 1)).sum()) if known else None
        return Collapse(limit, int(below.sum()), within, int(groups))

    def closest(self, matrix: Tensor, foreign: Tensor | None, networks: Tensor, count: int) -> tuple[Pair, ...]:
        """The pairs with the smallest entries, ascending, with the numbers of `networks` in the crowd."""
        values = self.values(matrix)
        middle = median(values)
        order = values.argsort(stable=True)[:count].tolist()
        return tuple(
            Pair(
                int(networks[self.first[place]]),
                int(networks[self.second[place]]),
                float(values[place]),
                None if foreign is None else float(foreign[self.first[place], self.second[place]]),
                float(values[place]) / middle if middle > 0 else 0.0,
                None if self.same[place] < 0 else bool(self.same[place]),
            )
            for place in order
        )
