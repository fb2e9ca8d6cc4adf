"""Distances between all members of two populations, read from wherever they are, tensor by tensor.

Never more than one block of one tensor is in memory, beside a matrix of all pairs for each metric; see `tiles`.

Very large and very small weights are measured like others, in units of their own; only differences in float64 below
1e-154, whose squares are no numbers any more, count as none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.cluster import Cluster, Serial
from onebasin.discrepancy.tiles import measured
from onebasin.errors import InputError, SpecError
from onebasin.metrics.distances import METRICS
from onebasin.metrics.mmd import Pooled
from onebasin.population import Population, constant_tensors
from onebasin.population.columns import device_of
from onebasin.state import TensorSpec, check_spec, trained_parameters

BLOCK_BYTES = 64 << 20  # of columns of one tensor that are read together


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances of all pairs of members of two populations; squares and absolute values add up over tensors.

    Attributes:
        split: members of the first population; they come first.
        l2: *squared* Euclidean distances, float64 (m + n, m + n), or None if they were not asked for.
        l1: sums of absolute differences, likewise.
        spread: of a single tensor the largest distance by the largest norm, in units of the rounding of float32 or, for
            weights in float64, of that; else NaN.
    """

    split: int
    l2: Tensor | None = None
    l1: Tensor | None = None
    spread: float = math.nan

    def pooled(self, metric: str, *, spend: bool = False) -> Pooled:
        """Distances as `mmd` takes them: not squared.

        Args:
            metric: which.
            spend: make them of these in place, which are not to be used any more.
        """
        matrix = self._matrix(metric)
        if metric == "l2":
            matrix = matrix.sqrt_() if spend else matrix.sqrt()
        return Pooled(matrix, self.split, metric)

    @property
    def xx(self) -> Tensor:
        """Squared Euclidean distances within the first population (m, m)."""
        return self._matrix("l2")[: self.split, : self.split]

    @property
    def yy(self) -> Tensor:
        """Squared Euclidean distances within the second population (n, n)."""
        return self._matrix("l2")[self.split :, self.split :]

    @property
    def xy(self) -> Tensor:
        """Squared Euclidean distances from the first to the second population (m, n)."""
        return self._matrix("l2")[: self.split, self.split :]

    @property
    def means(self) -> tuple[float, float, float]:
        """Mean squared Euclidean distance of pairs within the first population, within the second, and across."""
        first, second = (float(part.sum()) / max(1, len(part) * (len(part) - 1)) for part in (self.xx, self.yy))
        return first, second, float(self.xy.mean())

    def none(self) -> Distances:
        """Distances of the same networks if all of them were one."""
        l2, l1 = (None if own is None else torch.zeros_like(own) for own in (self.l2, self.l1))
        return Distances(self.split, l2, l1, 0.0)

    def added_to(self, total: Distances | None) -> Distances:
        """Add these to the distances of other tensors, in place: matrices of pairs are large. A copy if there are none.

        Args:
            total: of the others, which is changed and returned.
        """
        if total is None:
            l2, l1 = (None if own is None else own.clone() for own in (self.l2, self.l1))
            return Distances(self.split, l2, l1)
        for whole, own in ((total.l2, self.l2), (total.l1, self.l1)):
            if whole is not None and own is not None:
                whole += own
        return total

    def _matrix(self, metric: str) -> Tensor:
        found = self.l1 if metric == "l1" else self.l2
        if found is None:
            raise InputError(f"{metric} distances were not measured: name them in metrics=")
        return found


def pair_distances(
    a: Population, b: Population, metrics: Sequence[str] = ("l2",), cluster: Cluster | None = None
) -> Distances:
    """Measure all pairs of members over all weights.

    >>> a = Population.from_stacked({"w": torch.tensor([[0.0], [3.0]])})
    >>> b = Population.from_stacked({"w": torch.tensor([[1.0]])})
    >>> pair_distances(a, b).xy.round(decimals=5).tolist()
    [[1.0], [4.0]]

    Args:
        a: networks of one architecture, in memory or on disk.
        b: others of the same names and shapes; dtypes may differ.
        metrics: "l2", "l1" or both. Products of matrices serve l2 only, so l1 takes many times as long.
        cluster: who measures large tensors; this process by default.
    """
    total: Distances | None = None
    for _, part in tensor_distances(a, b, metrics, cluster):
        total = part.added_to(total)
    assert total is not None  # weight_names refuses networks without weights
    return total


def tensor_distances(
    a: Population,
    b: Population,
    metrics: Sequence[str] = ("l2",),
    cluster: Cluster | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, Distances]]:
    """Yield (name, distances) of one tensor after the other.

    Args:
        a: as in `pair_distances`.
        b: as in `pair_distances`.
        metrics: as in `pair_distances`.
        cluster: as in `pair_distances`.
        names: the tensors to compare; by default those that `weight_names` lists.
    """
    names = weight_names(a, b) if names is None else names
    if not metrics or set(metrics) - set(METRICS):
        raise InputError(f"expected metrics out of {', '.join(METRICS)}, found {tuple(metrics)}: choose one or both")
    if not len(a) or not len(b):
        raise InputError(f"expected networks on both sides, found {len(a)} and {len(b)}: add members")
    for name in names:
        yield name, _measured(a, b, name, metrics, cluster or Serial())


def weight_names(a: Population, b: Population, frozen: Collection[str] = ()) -> list[str]:
    """Names of the trained weights of both populations.

    Running statistics of batch norms, tensors of whole numbers and what is `frozen` are no weights, nor are tensors
    that are the same in all networks of both populations while others are not.

    Raises:
        SpecError: names or shapes differ, weights are complex, or there are none.
    """
    expected = {name: TensorSpec(spec.shape, torch.float32) for name, spec in a.spec.items()}
    found = {name: TensorSpec(spec.shape, torch.float32) for name, spec in b.spec.items()}
    check_spec(found, expected, where="the second population, compared with the first,")
    trained = {*trained_parameters(a.spec, frozen=frozen), *trained_parameters(b.spec, frozen=frozen)}
    names = [name for name in a.spec if name in trained]
    for name in names:
        kinds = {spec[name].dtype for spec in (a.spec, b.spec)}
        if any(dtype.is_complex for dtype in kinds) or len({dtype.is_floating_point for dtype in kinds}) > 1:
            raise SpecError(
                f"distances take real weights, found {name} of {' and '.join(sorted(map(str, kinds)))}: convert it "
                "first, complex weights with torch.view_as_real"
            )
    names = [name for name in names if a.spec[name].dtype.is_floating_point and a.spec[name].size]
    if not names:
        raise SpecError(f"expected weights to compare, found only {', '.join(a.spec) or 'nothing'}: give networks")
    constant = constant_tensors(b, constant_tensors(a, names))
    same = {name for name in constant if torch.equal(a.member(0)[name], b.member(0)[name])}
    return names if len(same) == len(names) else [name for name in names if name not in same]


def _measured(a: Population, b: Population, name: str, metrics: Sequence[str], cluster: Cluster) -> Distances:
    """The distances in one tensor."""
    members, device = len(a) + len(b), device_of(a)
    l2, l1 = (
        torch.empty(members, members, dtype=torch.float64, device=device) if metric in metrics else None
        for metric in ("l2", "l1")
    )
    largest = norm = 0.0
    for found in measured(a, b, name, metrics, cluster, block=BLOCK_BYTES):
        left, right = found.tile
        for whole, part in ((l2, found.l2), (l1, found.l1)):
            if whole is not None and part is not None:
                whole[left, right] = part
                whole[right, left] = part.T.contiguous()  # turned within the cache: twice as fast
        largest, norm = max(largest, found.largest), max(norm, found.norm)
    share = largest / max(norm, 1e-300)
    rounding = max(torch.finfo(crowd.spec[name].dtype).eps for crowd in (a, b))
    rounding = min(rounding, torch.finfo(torch.float32).eps)  # networks in half precision are compared in float32
    return Distances(len(a), l2, l1, (share if l2 is None else math.sqrt(share)) / rounding)
