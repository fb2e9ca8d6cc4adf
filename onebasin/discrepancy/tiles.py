"""Distances of all pairs of members in one tensor, tile by tile: the members of one range against those of another.

A tile knows its own members only, and centres them by themselves. Tiles depend on the numbers of members alone, so
distances do not depend on who has worked on which, nor on how many were at it.

A tensor of all members that fits into one block is read once, here, and every worker gets it as a whole. Of a larger
one each tile is read where it is worked on, a range of columns after the other: a member is then read as often as there
are ranges of members. Small tiles are not worth a journey, and are worked on here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.cluster import Cluster, Serial
from onebasin.errors import SpecError
from onebasin.metrics.distances import Across, Within, add_absolutes, mirrored, unit_of
from onebasin.population import Population
from onebasin.population.columns import device_of, only, read_columns
from onebasin.population.parting import part

MEMBERS = 1024  # in a range, at most
WORTH = 1 << 30  # a tile of so many differences is worth a journey ...
_SLOW = 10  # ... and for absolute values, which take so many times as long, one of so many times fewer


class Tile(NamedTuple):
    """Two ranges of members of both populations laid end to end; those of the right one do not come before the left."""

    left: slice
    right: slice


@dataclass(frozen=True, eq=False)
class Found:
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


def measured(
    a: Population, b: Population, name: str, metrics: Sequence[str], cluster: Cluster, *, block: int
) -> Iterator[Found]:
    """Measure one tensor, tile by tile.

    Args:
        a: one population.
        b: the other.
        name: of the tensor.
        metrics: "l2", "l1" or both.
        cluster: who does it if it is worth it.
        block: bytes of columns that are read together.
    """
    work = Work(name, tuple(metrics), len(a), a.spec[name].size, _dtype(a, b, name), block)
    pairs = tiles(len(a), len(b))
    largest = max(_count(tile.left) * _count(tile.right) for tile in pairs)
    costs = largest * work.columns * (_SLOW if "l1" in metrics else 1)
    workers = cluster if costs >= WORTH else Serial()
    if (len(a) + len(b)) * work.columns * work.dtype.itemsize <= block:
        return workers.map(work, ((tile, None) for tile in pairs), shared=_rows(a, b, work))
    crowds = (only(a, name), only(b, name))
    return workers.map(work, ((tile, _ends(crowds, tile)) for tile in pairs), shared=None)


Ends = tuple[Population, Population | None]


@dataclass(frozen=True, eq=False)
class Work:
    """What is to be measured: a tensor of so many columns, in a dtype; `split` members are of the first population."""

    name: str
    metrics: tuple[str, ...]
    split: int
    columns: int
    dtype: torch.dtype
    block: int

    def __call__(self, shared: Tensor | None, shard: tuple[Tile, Ends | None]) -> Found:
        """Measure one tile, of rows that are shared or of members that come with it."""
        tile, ends = shard
        alone = tile.left == tile.right
        if ends is None:
            assert shared is not None  # one of both is given
            sums = _Sums(tile, self, shared.device)
            sums.add(shared[tile.left], None if alone else shared[tile.right])
            return sums.found()
        sums = _Sums(tile, self, device_of(ends[0]))
        members = _count(tile.left) + (0 if alone else _count(tile.right))
        step = max(1, self.block // (self.dtype.itemsize * members))
        for start in range(0, self.columns, step):
            columns = (start, min(start + step, self.columns))
            left, right = (None if end is None else self._read(end, columns, sums.device) for end in ends)
            assert left is not None  # only the right one may be the left one
            sums.add(left, right)
        return sums.found()

    def _read(self, members: Population, columns: tuple[int, int], device: torch.device) -> Tensor:
        rows = torch.empty(len(members), columns[1] - columns[0], dtype=self.dtype, device=device)
        read_columns(members, self.name, *columns, rows)
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

    def found(self) -> Found:
        """The distances, all finite."""
        l2 = None if self.l2 is None else self.l2.found()
        l1 = mirrored(self.l1) if self.l1 is not None and self.alone else self.l1
        largest = [float(matrix.max()) for matrix in (l2, l1) if matrix is not None]
        if not all(map(math.isfinite, largest)):
            raise self._not_finite([norms[:, None] for norms in self.norms])
        return Found(self.tile, l2, l1, largest[0], max(float(norms.max()) for norms in self.norms))

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
    """What rows are compared in."""
    return torch.float64 if torch.float64 in (a.spec[name].dtype, b.spec[name].dtype) else torch.float32


def _rows(a: Population, b: Population, work: Work) -> Tensor:
    """The tensor of all members (m + n, columns)."""
    rows = torch.empty(len(a) + len(b), work.columns, dtype=work.dtype, device=device_of(a))
    read_columns(a, work.name, 0, work.columns, rows[: len(a)])
    read_columns(b, work.name, 0, work.columns, rows[len(a) :])
    return rows


def _ends(crowds: tuple[Population, Population], tile: Tile) -> Ends:
    """The members of both ranges, ready to travel."""
    found = []
    for members in tile:
        before = 0 if members.start < len(crowds[0]) else len(crowds[0])
        crowd = crowds[1] if before else crowds[0]
        found.append(part(crowd, members.start - before, members.stop - before))
    return found[0], None if tile.left == tile.right else found[1]
