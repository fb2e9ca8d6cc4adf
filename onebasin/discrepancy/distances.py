"""Distances between all members of two populations, read from wherever they are, tensor by tensor.

Never more than one block of columns of one tensor of all members is in memory, beside matrices of pairs. Blocks of
columns are the cheapest order to read in: every weight is read once, and all pairs are served by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.board import is_statistic
from onebasin.errors import InputError, SpecError
from onebasin.metrics.distances import METRICS, add_absolutes, add_products, mirrored, squares
from onebasin.metrics.mmd import Pooled
from onebasin.population import Population
from onebasin.population.columns import device_of, read_columns
from onebasin.state import TensorSpec, check_spec

BLOCK_BYTES = 64 << 20  # of one block of columns
_ROUNDING = 8  # units of rounding that bringing a network into a form may cost each weight


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances of all pairs of members of two populations; squares and absolute values add up over tensors.

    Attributes:
        split: members of the first population; they come first.
        l2: *squared* Euclidean distances, float64 (m + n, m + n), or None if they were not asked for.
        l1: sums of absolute differences, likewise.
    """

    split: int
    l2: Tensor | None = None
    l1: Tensor | None = None

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


def tensor_distances(
    a: Population, b: Population, metrics: Sequence[str] = ("l2",), *, moved: bool = False
) -> Iterator[tuple[str, Distances]]:
    """Yield (name, distances) of one tensor after the other.

    Args:
        a: as in `pair_distances`.
        b: as in `pair_distances`.
        metrics: as in `pair_distances`.
        moved: the networks were brought into a form, which rounds. A form may give all networks the same tensor
            (batch norms of weight 1); distances of a tensor are 0 if all of them are no more than that rounding.
    """
    names = weight_names(a, b)
    if not metrics or set(metrics) - set(METRICS):
        raise InputError(f"expected metrics out of {', '.join(METRICS)}, found {tuple(metrics)}: choose one or both")
    if not len(a) or not len(b):
        raise InputError(f"expected networks on both sides, found {len(a)} and {len(b)}: add members")
    for name in names:
        yield name, _Pass(a, b, name, metrics).run(moved)


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
        self.unit = max(torch.finfo(dtype).eps for dtype in dtypes)
        self.device, self.members = device_of(a), len(a) + len(b)
        square = (self.members, self.members)
        self.sums = {metric: torch.zeros(square, dtype=torch.float64, device=self.device) for metric in metrics}
        self.norms = {metric: torch.zeros(self.members, dtype=torch.float64, device=self.device) for metric in metrics}

    def run(self, moved: bool) -> Distances:
        """Read everything; see `tensor_distances`."""
        for rows in self._blocks():
            for metric in self.sums if moved else ():
                self.norms[metric] += (rows.abs() if metric == "l1" else rows.square()).sum(1)
            centre = rows.mean(0)
            if not bool(torch.isfinite(centre).all()):
                raise _not_finite(rows, self.name, len(self.a))
            rows.sub_(centre)
            if "l1" in self.sums:
                add_absolutes(self.sums["l1"], rows)
            if "l2" in self.sums:
                add_products(self.sums["l2"], rows)
        l2, l1 = self.sums.get("l2"), self.sums.get("l1")
        if l2 is not None and not bool(torch.isfinite(l2.diagonal()).all()):
            raise _not_finite(l2.diagonal()[:, None], self.name, len(self.a))
        return Distances(
            len(self.a),
            None if l2 is None else self._without_rounding(squares(l2), "l2", moved),
            None if l1 is None else self._without_rounding(mirrored(l1), "l1", moved),
        )

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

    def _without_rounding(self, found: Tensor, metric: str, moved: bool) -> Tensor:
        reach = (_ROUNDING * self.unit) ** (2 if metric == "l2" else 1) * self.norms[metric].max()
        return torch.zeros_like(found) if moved and bool(found.max() <= reach) else found


def _not_finite(rows: Tensor, name: str, split: int) -> SpecError:
    """Name the first network that holds NaN, infinity, or numbers near the largest that there are."""
    bad = (~torch.isfinite(rows).all(1)).nonzero().flatten().tolist()
    first = bad[0] if bad else 0  # only their sum is too large: all are to blame
    where = f"member {first} of the first population" if first < split else f"member {first - split} of the second"
    return SpecError(
        f"tensor {name} of {where} holds NaN, infinity or numbers too large to be squared: leave this network out or "
        "train it again with a smaller step"
    )
