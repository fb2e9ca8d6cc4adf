"""Distances between all members of two populations, read from wherever they are, tensor by tensor.

Never more than one block of columns of one tensor of all members is in memory, beside matrices of pairs. Blocks of
columns are the cheapest order to read in: every weight is read once, and all pairs are served by it.

Very large and very small weights are measured like others, in units of their own; only differences in float64 below
1e-154, whose squares are no numbers any more, count as none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError
from onebasin.metrics.distances import METRICS, Squares, add_absolutes, mirrored, unit_of
from onebasin.metrics.mmd import Pooled
from onebasin.population import Population
from onebasin.population.columns import device_of, read_columns
from onebasin.state import TensorSpec, check_spec, is_statistic

BLOCK_BYTES = 64 << 20  # of one block of columns


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

    def pooled(self, metric: str) -> Pooled:
        """Distances as `mmd` takes them: not squared."""
        matrix = self._matrix(metric)
        return Pooled(matrix.sqrt() if metric == "l2" else matrix, self.split, metric)

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

    def __add__(self, other: Distances) -> Distances:
        l2 = None if self.l2 is None or other.l2 is None else self.l2 + other.l2
        l1 = None if self.l1 is None or other.l1 is None else self.l1 + other.l1
        return Distances(self.split, l2, l1)

    def _matrix(self, metric: str) -> Tensor:
        found = self.l1 if metric == "l1" else self.l2
        if found is None:
            raise InputError(f"{metric} distances were not measured: name them in metrics=")
        return found


def pair_distances(a: Population, b: Population, metrics: Sequence[str] = ("l2",)) -> Distances:
    """Measure all pairs of members over all weights.

    >>> a = Population.from_stacked({"w": torch.tensor([[0.0], [3.0]])})
    >>> b = Population.from_stacked({"w": torch.tensor([[1.0]])})
    >>> pair_distances(a, b).xy.round(decimals=5).tolist()
    [[1.0], [4.0]]

    Args:
        a: networks of one architecture, in memory or on disk.
        b: others of the same names and shapes; dtypes may differ.
        metrics: "l2", "l1" or both. Products of matrices serve l2 only, so l1 takes many times as long.
    """
    total: Distances | None = None
    for _, part in tensor_distances(a, b, metrics):
        total = part if total is None else total + part
    assert total is not None  # weight_names refuses networks without weights
    return total


def tensor_distances(a: Population, b: Population, metrics: Sequence[str] = ("l2",)) -> Iterator[tuple[str, Distances]]:
    """Yield (name, distances) of one tensor after the other.

    Args:
        a: as in `pair_distances`.
        b: as in `pair_distances`.
        metrics: as in `pair_distances`.
    """
    names = weight_names(a, b)
    if not metrics or set(metrics) - set(METRICS):
        raise InputError(f"expected metrics out of {', '.join(METRICS)}, found {tuple(metrics)}: choose one or both")
    if not len(a) or not len(b):
        raise InputError(f"expected networks on both sides, found {len(a)} and {len(b)}: add members")
    for name in names:
        yield name, _Pass(a, b, name, metrics).run()


def weight_names(a: Population, b: Population) -> list[str]:
    """Names of the weights that both populations have.

    Running statistics of batch norms and tensors of whole numbers are no weights.

    Raises:
        SpecError: names or shapes differ, weights are complex, or there are none.
    """
    expected = {name: TensorSpec(spec.shape, torch.float32) for name, spec in a.spec.items()}
    found = {name: TensorSpec(spec.shape, torch.float32) for name, spec in b.spec.items()}
    check_spec(found, expected, where="the second population, compared with the first,")
    names = [name for name in a.spec if not is_statistic(name)]
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
    return names


class _Pass:
    """One pass over the columns of one tensor, for both metrics."""

    def __init__(self, a: Population, b: Population, name: str, metrics: Sequence[str]) -> None:
        self.a, self.b, self.name = a, b, name
        dtypes = (a.spec[name].dtype, b.spec[name].dtype)
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.rounding = max(min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) for dtype in dtypes)
        self.device, self.members = device_of(a), len(a) + len(b)
        self.l2 = Squares(self.members, len(a), self.device) if "l2" in metrics else None
        self.l1: Tensor | None = None
        if "l1" in metrics:
            self.l1 = torch.zeros(self.members, self.members, dtype=torch.float64, device=self.device)
        self.norms = torch.zeros(self.members, dtype=torch.float64, device=self.device)  # squared with l2

    def run(self) -> Distances:
        """Read everything."""
        for rows in self._blocks():
            unit = unit_of(rows)
            if math.isnan(unit):
                raise _not_finite(rows, self.name, len(self.a))
            if unit != 1:
                rows.div_(unit)
            order = 1 if self.l2 is None else 2
            self.norms += (torch.linalg.vector_norm(rows, order, dim=1).double() * unit) ** order
            if self.l1 is not None:
                add_absolutes(self.l1, rows, unit)
            if self.l2 is not None:
                self.l2.add(rows, unit)  # centres them, so it comes last
        l2, l1 = None if self.l2 is None else self.l2.found(), None if self.l1 is None else mirrored(self.l1)
        for found in (l2, l1):
            if found is not None and not bool(torch.isfinite(found).all()):
                raise _not_finite(self.norms[:, None], self.name, len(self.a))
        return Distances(len(self.a), l2, l1, self._spread(l2, l1))

    def _spread(self, l2: Tensor | None, l1: Tensor | None) -> float:
        distances = l1 if l2 is None else l2
        assert distances is not None  # there is a metric
        share = float(distances.max()) / max(float(self.norms.max()), 1e-300)
        return (share if l2 is None else math.sqrt(share)) / self.rounding

    def _blocks(self) -> Iterator[Tensor]:
        """Ranges of columns of all members (m + n, columns), in one buffer that is filled again and again."""
        size = self.a.spec[self.name].size
        step = max(1, min(size, BLOCK_BYTES // (self.dtype.itemsize * self.members)))
        buffer = torch.empty(self.members * step, dtype=self.dtype, device=self.device)
        for start in range(0, size, step):
            stop = min(start + step, size)
            rows = buffer[: self.members * (stop - start)].view(self.members, stop - start)
            read_columns(self.a, self.name, start, stop, rows[: len(self.a)])
            read_columns(self.b, self.name, start, stop, rows[len(self.a) :])
            yield rows


def _not_finite(rows: Tensor, name: str, split: int) -> SpecError:
    """Name the first network that holds NaN, infinity, or numbers near the largest that there are."""
    bad = (~torch.isfinite(rows).all(1)).nonzero().flatten().tolist()
    first = bad[0] if bad else 0  # only their sum is too large: all are to blame
    where = f"member {first} of the first population" if first < split else f"member {first - split} of the second"
    return SpecError(
        f"tensor {name} of {where} holds NaN, infinity or numbers too large to be squared: leave this network out or "
        "train it again with a smaller step"
    )
