"""Independent runs of a population, and what their number alone does to a discrepancy.

Members of one run (a chain, the samples around one trained network) are not independent. Let run r have the law P_r
with mean embedding mu_r, mu the mean of mu_r over runs, and let two members of one run be independent given the run.
The estimate U of `mmd` takes all m members as independent, and of its pairs within x the share

    f = sum_r S_r (S_r - 1) / m(m - 1)          (S_r members of run r)

is of one run. Such a pair has mean <mu_r, mu_r>, any other <mu, mu>, so that with V = E|mu_r - mu|^2

    E U = |mu_x - mu_y|^2 + f_x V_x + f_y V_y.

The last two terms are there although no law differs. With R runs of S members, m = RS, the share is
f = (S - 1) / (RS - 1) = (1/R - 1/m) / (1 - 1/m): it is 1 for one run, and 9/99 = 1/11 for 10 runs of 10. Where nothing
but the number of runs differs, 10 x 10 samples are therefore 11 times "better" than 1 x 100.

Both parts can be told apart without a model. With W the mean kernel over pairs of one run and B over pairs of two runs,
W - B is unbiased for V, and

    explained = f_x (W_x - B_x) + f_y (W_y - B_y),     remainder = U - explained,

where the remainder is the same three sums without pairs of one run: unbiased for |mu_x - mu_y|^2, however members
within a run depend on each other. A population of a single run has no B of its own; that of the other population
stands in, which is right if runs follow one law. The remainder is then unbiased for 2 <mu_y, mu_y - mu_x>: 0 if they
do, of either sign if not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.population import Population


def same_run_share(sizes: Iterable[int]) -> float:
    """Share of the pairs of members that come from one run.

    >>> same_run_share([100]), round(same_run_share([10] * 10), 4), same_run_share([1] * 100)
    (1.0, 0.0909, 0.0)

    Args:
        sizes: members of each run.
    """
    sizes = list(sizes)
    members = sum(sizes)
    return sum(size * (size - 1) for size in sizes) / max(1, members * (members - 1))


@dataclass(frozen=True, eq=False)
class Runs:
    """The run of each member of two populations.

    Attributes:
        labels: number of the run of each member (m + n,); runs of the first population come first.
        sizes: members of each run, float64 (runs,).
        split: runs of the first population.
        shared: whether members of one run are known to be in both populations.
    """

    labels: Tensor
    sizes: Tensor
    split: int
    shared: bool = False

    @classmethod
    def of(cls, a: Population, b: Population) -> Runs:
        """Read the chains; members whose chain is not known count as runs of their own."""
        first, second = _numbered(a), _numbered(b)
        split = int(first.max()) + 1
        labels = torch.cat([first, second + split])
        return cls(labels, labels.bincount().double(), split, _share(a, b))

    @property
    def counts(self) -> tuple[int, int]:
        """Number of runs of both populations."""
        return self.split, len(self.sizes) - self.split

    @property
    def shares(self) -> tuple[float, float]:
        """Share of pairs of one run in both populations."""
        sides = (self.sizes[: self.split], self.sizes[self.split :])
        first, second = (same_run_share(int(size) for size in side) for side in sides)
        return first, second

    @property
    def trivial(self) -> bool:
        """Whether every member is a run of its own."""
        return bool((self.sizes == 1).all())

    def sums(self, matrix: Tensor) -> Tensor:
        """Sum a matrix of pairs of members over the members of each pair of runs (runs, runs)."""
        if self.trivial:
            return matrix
        labels, count = self.labels.to(matrix.device), len(self.sizes)
        rows = matrix.new_zeros(count, len(matrix)).index_add_(0, labels, matrix)
        return matrix.new_zeros(count, count).index_add_(1, labels, rows)

    def one_of_each(self, generator: torch.Generator) -> Tensor:
        """Draw one member of each run (runs,)."""
        order = torch.randperm(len(self.labels), generator=generator)
        chosen = torch.empty(len(self.sizes), dtype=torch.long)
        return chosen.scatter_(0, self.labels[order], order)

    def explained(self, sums: Tensor) -> float:
        """The part of U that pairs of one run make, from `sums`; NaN where both populations are single runs."""
        left = _Side(sums[: self.split, : self.split], self.sizes[: self.split])
        right = _Side(sums[self.split :, self.split :], self.sizes[self.split :])
        return left.excess(right) + right.excess(left)


class _Side:
    """Kernel sums of one population over pairs of one run, and over pairs of two."""

    def __init__(self, sums: Tensor, sizes: Tensor) -> None:
        members, squared = float(sizes.sum()), float(sizes.square().sum())
        same, other = squared - members, members**2 - squared
        trace = float(sums.diagonal().sum())
        self.share = same / max(1.0, same + other)
        self.within = trace / same if same else math.nan
        self.between = (float(sums.sum()) - trace) / other if other else math.nan

    def excess(self, reference: _Side) -> float:
        """The part of pairs of one run: f (W - B)."""
        if not self.share:
            return 0.0
        between = reference.between if math.isnan(self.between) else self.between
        return self.share * (self.within - between)


def _share(a: Population, b: Population) -> bool:
    """Whether both are cut from one population, and a run with them."""
    if a.chain is None or b.chain is None or not a.overlaps(b):
        return False
    return bool(torch.isin(a.chain[a.chain >= 0], b.chain[b.chain >= 0]).any())


def _numbered(population: Population) -> Tensor:
    """Runs as numbers from 0 without gaps."""
    members = len(population)
    if population.chain is None:
        return torch.arange(members)
    chain = population.chain.cpu()
    apart = torch.where(chain < 0, -1 - torch.arange(members), chain)
    numbers: Tensor = apart.unique(return_inverse=True)[1]
    return numbers
