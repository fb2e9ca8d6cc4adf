"""Distances between all members of two populations, read from wherever they are, tensor by tensor.

Never more than one block of one tensor is in memory, beside a matrix of all pairs for each metric. Each tensor is
measured tile by tile: the members of one range against those of another.

A tile knows its own members only, and centres them by themselves. Tiles depend on the numbers of members alone, so
distances depend neither on which worker has measured which tile nor on how many workers there are.

A tensor of all members that fits into one block is read once, and every worker gets it as a whole. Of a larger one each
tile is read where it is measured, a range of columns after the other: a member is then read as often as there are
ranges of members. Small tiles are not worth sending, and are measured in this process.

Very large and very small weights are measured like others, in units of their own; only differences in float64 below
1e-154, whose squares are no numbers any more, count as none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError
from onebasin.metrics import METRICS, Across, Pooled, Within, add_absolutes, mirrored, unit_of
from onebasin.parallel import Executor, SerialExecutor
from onebasin.population import Population
from onebasin.state import TensorSpec, check_spec, trained_parameters

# Tiles of one tensor.

MEMBERS = 1024  # in a range, at most
WORTH = 1 << 30  # a tile of so many differences is worth sending to a worker ...
_SLOW = 10  # ... and for absolute values, which take so many times as long, one of so many times fewer


class Tile(NamedTuple):
    """Two ranges of members of both populations laid end to end; those of the right one do not come before the left."""

    left: slice
    right: slice


@dataclass(frozen=True, eq=False)
class TileDistances:
    """Distances of the pairs of a tile.

    Attributes:
        tile: which.
        l2: squared Euclidean distances, float64 (m, n), or None.
        l1: sums of absolute differences, likewise.
        largest: of these distances, and of l2 if both are there.
        norm: the largest norm of a member, squared where there is l2.
    """

    tile: Tile
    l2: Tensor | None
    l1: Tensor | None
    largest: float
    norm: float


def tiles(first: int, second: int) -> list[Tile]:
    """All pairs of ranges of the members of two populations; no range holds members of both.

    >>> [(tile.left.start, tile.right.start) for tile in tiles(1500, 10)]
    [(0, 0), (0, 1024), (0, 1500), (1024, 1024), (1024, 1500), (1500, 1500)]
    """
    ranges = [
        slice(start, min(start + MEMBERS, stop))
        for begin, stop in ((0, first), (first, first + second))
        for start in range(begin, stop, MEMBERS)
    ]
    return [Tile(left, right) for number, left in enumerate(ranges) for right in ranges[number:]]


def measure_tiles(
    a: Population, b: Population, name: str, metrics: Sequence[str], executor: Executor, *, block: int
) -> Iterator[TileDistances]:
    """Measure one tensor, tile by tile.

    Metrics are "l2", "l1" or both; the executor is used where a tile is worth it, and `block` bytes of columns are read
    together.
    """
    work = Work(name, tuple(metrics), len(a), a.spec[name].size, _dtype(a, b, name), block)
    pairs = tiles(len(a), len(b))
    largest = max(_count(tile.left) * _count(tile.right) for tile in pairs)
    costs = largest * work.columns * (_SLOW if "l1" in metrics else 1)
    workers = executor if costs >= WORTH else SerialExecutor()
    if (len(a) + len(b)) * work.columns * work.dtype.itemsize <= block:
        return workers.map(work, ((tile, None) for tile in pairs), shared=_rows(a, b, work))
    populations = (a.select(name), b.select(name))
    return workers.map(work, ((tile, _ends(populations, tile)) for tile in pairs), shared=None)


Ends = tuple[Population, Population | None]


@dataclass(frozen=True, eq=False)
class Work:
    """The distances in a tensor of so many columns, in a dtype; `split` members are of the first population."""

    name: str
    metrics: tuple[str, ...]
    split: int
    columns: int
    dtype: torch.dtype
    block: int

    def __call__(self, shared: Tensor | None, shard: tuple[Tile, Ends | None]) -> TileDistances:
        """Measure one tile, of rows that are shared or of members that come with it."""
        tile, ends = shard
        alone = tile.left == tile.right
        if ends is None:
            assert shared is not None  # one of both is given
            sums = _Sums(tile, self, shared.device)
            sums.add(shared[tile.left], None if alone else shared[tile.right])
            return sums.distances()
        sums = _Sums(tile, self, ends[0].device)
        members = _count(tile.left) + (0 if alone else _count(tile.right))
        step = max(1, self.block // (self.dtype.itemsize * members))
        for start in range(0, self.columns, step):
            columns = (start, min(start + step, self.columns))
            left, right = (None if end is None else self._read(end, columns, sums.device) for end in ends)
            assert left is not None  # only the right one may be the left one
            sums.add(left, right)
        return sums.distances()

    def _read(self, members: Population, columns: tuple[int, int], device: torch.device) -> Tensor:
        rows = torch.empty(len(members), columns[1] - columns[0], dtype=self.dtype, device=device)
        members.read_columns(self.name, *columns, rows)
        return rows


class _Sums:
    """Sums over columns of one tile."""

    def __init__(self, tile: Tile, work: Work, device: torch.device) -> None:
        self.tile, self.work, self.device = tile, work, device
        m, n = _count(tile.left), _count(tile.right)
        self.alone = tile.left == tile.right
        self.l2: Within | Across | None = None
        if "l2" in work.metrics:
            self.l2 = Within(m, device) if self.alone else Across(m, n, device)
        self.l1 = torch.zeros(m, n, dtype=torch.float64, device=device) if "l1" in work.metrics else None
        ends = (tile.left,) if self.alone else (tile.left, tile.right)
        self.norms = [torch.zeros(_count(end), dtype=torch.float64, device=device) for end in ends]

    def add(self, left: Tensor, right: Tensor | None) -> None:
        """Take in the same columns of both ranges; the right one is None where it is the left one."""
        given = [left] if right is None else [left, right]
        unit = unit_of(torch.stack([end for rows in given for end in rows.aminmax()]))
        if math.isnan(unit):
            raise self._not_finite(given)
        if unit != 1:
            given = [rows / unit for rows in given]
        order = 1 if self.l2 is None else 2
        for rows, norms in zip(given, self.norms, strict=True):
            norms += (torch.linalg.vector_norm(rows, order, dim=1).double() * unit) ** order
        if self.l1 is not None:
            add_absolutes(self.l1, given[0], None if self.alone else given[1], unit)
        if isinstance(self.l2, Across):
            self.l2.add(given[0], given[1], unit)
        elif self.l2 is not None:
            self.l2.add(given[0], unit)

    def distances(self) -> TileDistances:
        """The distances, all finite."""
        l2 = None if self.l2 is None else self.l2.found()
        l1 = mirrored(self.l1) if self.l1 is not None and self.alone else self.l1
        largest = [float(matrix.max()) for matrix in (l2, l1) if matrix is not None]
        if not all(map(math.isfinite, largest)):
            raise self._not_finite([norms[:, None] for norms in self.norms])
        return TileDistances(self.tile, l2, l1, largest[0], max(float(norms.max()) for norms in self.norms))

    def _not_finite(self, given: list[Tensor]) -> SpecError:
        """Name the first network that holds NaN, infinity, or numbers near the largest that there are."""
        bad = [
            end.start + row
            for end, rows in zip(self.tile[: len(given)], given, strict=True)
            for row in (~torch.isfinite(rows).all(1)).nonzero().flatten().tolist()
        ]
        first, split = bad[0] if bad else self.tile.left.start, self.work.split  # only a sum is too large: all to blame
        where = f"member {first} of the first population" if first < split else f"member {first - split} of the second"
        return SpecError(
            f"tensor {self.work.name} of {where} holds NaN, infinity or numbers too large to be squared: leave this "
            "network out or train it again with a smaller step"
        )


def _count(members: slice) -> int:
    return int(members.stop - members.start)


def _dtype(a: Population, b: Population, name: str) -> torch.dtype:
    """The dtype in which rows are compared."""
    return torch.float64 if torch.float64 in (a.spec[name].dtype, b.spec[name].dtype) else torch.float32


def _rows(a: Population, b: Population, work: Work) -> Tensor:
    """The tensor of all members (m + n, columns)."""
    rows = torch.empty(len(a) + len(b), work.columns, dtype=work.dtype, device=a.device)
    a.read_columns(work.name, 0, work.columns, rows[: len(a)])
    b.read_columns(work.name, 0, work.columns, rows[len(a) :])
    return rows


def _ends(populations: tuple[Population, Population], tile: Tile) -> Ends:
    """The members of both ranges."""
    ends = []
    for members in tile:
        before = 0 if members.start < len(populations[0]) else len(populations[0])
        population = populations[1] if before else populations[0]
        ends.append(population.part(members.start - before, members.stop - before, shared=True))
    return ends[0], None if tile.left == tile.right else ends[1]


# Sums over tiles and tensors.


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

        `spend` makes them in place, of these distances, which are not to be used any more.
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
        l2, l1 = (None if matrix is None else torch.zeros_like(matrix) for matrix in (self.l2, self.l1))
        return Distances(self.split, l2, l1, 0.0)

    def added_to(self, total: Distances | None) -> Distances:
        """Add these to the distances of other tensors, in place, as matrices of pairs are large; else a copy."""
        if total is None:
            l2, l1 = (None if matrix is None else matrix.clone() for matrix in (self.l2, self.l1))
            return Distances(self.split, l2, l1)
        for whole, matrix in ((total.l2, self.l2), (total.l1, self.l1)):
            if whole is not None and matrix is not None:
                whole += matrix
        return total

    def _matrix(self, metric: str) -> Tensor:
        matrix = self.l1 if metric == "l1" else self.l2
        if matrix is None:
            raise InputError(f"{metric} distances were not measured: name them in metrics=")
        return matrix


def pair_distances(
    a: Population, b: Population, metrics: Sequence[str] = ("l2",), executor: Executor | None = None
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
        executor: measures large tensors; this process by default.
    """
    total: Distances | None = None
    for _, part in tensor_distances(a, b, metrics, executor):
        total = part.added_to(total)
    assert total is not None  # weight_names refuses networks without weights
    return total


def tensor_distances(
    a: Population,
    b: Population,
    metrics: Sequence[str] = ("l2",),
    executor: Executor | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, Distances]]:
    """Yield (name, distances) of one tensor after the other."""
    names = weight_names(a, b) if names is None else names
    if not metrics or set(metrics) - set(METRICS):
        raise InputError(f"expected metrics out of {', '.join(METRICS)}, found {tuple(metrics)}: choose one or both")
    if not len(a) or not len(b):
        raise InputError(f"expected networks on both sides, found {len(a)} and {len(b)}: add members")
    for name in names:
        yield name, _measured(a, b, name, metrics, executor or SerialExecutor())


def weight_names(a: Population, b: Population, frozen: Collection[str] = ()) -> list[str]:
    """Names of the trained weights of both populations.

    Running statistics of batch norms, tensors of whole numbers and what is `frozen` are no weights, nor are tensors
    that are the same in all networks of both populations while others are not.

    Raises:
        SpecError: names or shapes differ, weights are complex, or there are none.
    """
    expected = {name: TensorSpec(spec.shape, torch.float32) for name, spec in a.spec.items()}
    wide = {name: TensorSpec(spec.shape, torch.float32) for name, spec in b.spec.items()}
    check_spec(wide, expected, where="the second population, compared with the first,")
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
    constant = b.constant_tensors(a.constant_tensors(names))
    same = {name for name in constant if torch.equal(a.member(0)[name], b.member(0)[name])}
    return names if len(same) == len(names) else [name for name in names if name not in same]


def _measured(a: Population, b: Population, name: str, metrics: Sequence[str], executor: Executor) -> Distances:
    """The distances in one tensor."""
    members, device = len(a) + len(b), a.device
    l2, l1 = (
        torch.empty(members, members, dtype=torch.float64, device=device) if metric in metrics else None
        for metric in ("l2", "l1")
    )
    largest = norm = 0.0
    for part in measure_tiles(a, b, name, metrics, executor, block=BLOCK_BYTES):
        left, right = part.tile
        for whole, block in ((l2, part.l2), (l1, part.l1)):
            if whole is not None and block is not None:
                whole[left, right] = block
                whole[right, left] = block.T.contiguous()  # turned within the cache: twice as fast
        largest, norm = max(largest, part.largest), max(norm, part.norm)
    share = largest / max(norm, 1e-300)
    rounding = max(torch.finfo(population.spec[name].dtype).eps for population in (a, b))
    rounding = min(rounding, torch.finfo(torch.float32).eps)  # networks in half precision are compared in float32
    return Distances(len(a), l2, l1, (share if l2 is None else math.sqrt(share)) / rounding)
