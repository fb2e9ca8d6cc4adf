"""Moments and leading directions of a population, of groups of members as well as of all, read block by block.

Mean and spread take one reading. Sums of squares are those of deviations from a block's own mean, and blocks are merged
as Chan, Golub and LeVeque (1979) do: no difference of two large numbers is ever taken. Shards of a population are
merged in the same way and in their order, so that results do not depend on who has read them.

Leading directions come by random projection (Halko, Martinsson and Tropp, 2011), in a few readings. X (N, D) are the
deviations of N networks from their centres. They are read in blocks and never held. With Q a basis (D, L) of the span
of X^T times random numbers, improved by `passes` turns of Q <- orth(X^T X Q), and U (N, K) the leading left singular
vectors of X Q,

    factor = X^T U / sqrt(degrees),    so that    factor factor^T = X^T U U^T X / degrees <= X^T X / degrees:

since U U^T is a projection among the networks, no weight gets more variance than the population has. (Projecting the
weights by Q Q^T instead does not promise that.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError
from onebasin.parallel import Executor, SerialExecutor, align_tensors
from onebasin.population import Population, block_members
from onebasin.posterior.layout import FlatLayout, vector_dtype
from onebasin.state import State

Rows = Callable[[], Iterator[tuple[int, Tensor]]]
"""Begins a reading: yields (start, rows (n, D)) of X, which may be reused for the next."""


@dataclass(frozen=True, eq=False)
class RowMatrix:
    """A matrix X (N, D) that is too large to be held, and is read, in this process, whenever it is multiplied.

    >>> halves = RowMatrix(lambda: iter([(0, torch.eye(2)), (2, torch.ones(1, 2))]))
    >>> halves.turned(torch.ones(2, 1)).flatten().tolist(), halves.lengths().tolist()
    ([3.0, 3.0], [1.0, 1.0, 2.0])
    """

    rows: Rows

    def times(self, right: Tensor) -> Tensor:
        """X right, (N, L), for `right` (D, L)."""
        return torch.cat([block @ right for _, block in self.rows()])

    def gathered(self, left: Tensor, width: int) -> Tensor:
        """X^T left, (D, L), for `left` (N, L) and D = `width`."""
        total = left.new_zeros(width, left.shape[1])
        for start, block in self.rows():
            total.addmm_(block.T, left[start : start + len(block)])
        return total

    def turned(self, right: Tensor) -> Tensor:
        """X^T X right, (D, L), for `right` (D, L)."""
        total = torch.zeros_like(right)
        for _, block in self.rows():
            total.addmm_(block.T, block @ right)
        return total

    def lengths(self) -> Tensor:
        """The squared norm of each row, float64 (N,)."""
        return torch.cat([block.square().sum(1, dtype=torch.float64) for _, block in self.rows()])


_CACHED = 1 << 17  # numbers in float64 that stay in a processor's cache between two operations
_TOGETHER = 128  # columns
_SHARE = 16  # networks in a shard for each group, at least: what comes back are the numbers of four of them
_BLOCK_BYTES = 256 << 20  # of a centred block: its products with a sketch are then bound by arithmetic, not by memory


@dataclass(frozen=True, eq=False)
class Moments:
    """Counts, means and sums of squared deviations of G groups of members, over the tensors `names` laid end to end.

    Attributes:
        names: the tensors.
        counts: members of each group, int64 (G,).
        mean: float64 (G, D).
        squares: sums of squared deviations from the group's own mean, float64 (G, D).
    """

    names: tuple[str, ...]
    counts: Tensor
    mean: Tensor
    squares: Tensor

    def std(self) -> Tensor:
        """Standard deviations (G, D) with the divisor n - 1 of each group."""
        few = int(self.counts.min())
        if few < 2:
            raise InputError(
                f"a spread needs at least 2 networks in every group, found a group of {few}: give more networks, ask "
                "for fewer components, or let components share one spread with pooled=True"
            )
        return (self.squares / (self.counts[:, None].to(self.squares) - 1)).sqrt()

    def pooled_std(self) -> Tensor:
        """Standard deviations (D,) of all members around the means of their groups, divisor N - G."""
        members, groups = int(self.counts.sum()), len(self.counts)
        if members <= groups:
            raise InputError(
                f"a pooled spread needs more networks than groups, found {members} networks in {groups} groups: give "
                "more networks, or ask for fewer components"
            )
        return (self.squares.sum(0) / (members - groups)).sqrt()


def moments(population: Population, names: Sequence[str], groups: Tensor, executor: Executor | None = None) -> Moments:
    """The moments of groups of members; `groups` gives the group of each, int64 (N,), from 0 up, none empty.

    >>> population = Population.from_stacked({"w": torch.tensor([[1.0], [3.0], [8.0]])})
    >>> found = moments(population, ["w"], torch.tensor([0, 0, 1]))
    >>> found.mean, found.squares
    (tensor([[2.],
            [8.]], dtype=torch.float64), tensor([[2.],
            [0.]], dtype=torch.float64))

    Raises:
        SpecError: a member holds NaN or infinity, or numbers whose squares are infinite.
    """
    number, width = int(groups.max()) + 1, sum(population.spec[name].size for name in names)
    total = Moments(
        tuple(names),
        torch.zeros(number, dtype=torch.int64),
        torch.zeros(number, width, dtype=torch.float64, device=_device(population)),
        torch.zeros(number, width, dtype=torch.float64, device=_device(population)),
    )
    size = max(block_members(population.spec), _SHARE * number)
    shards = ((members, groups[start : start + len(members)]) for start, members in population.parts(size, shared=True))
    for present, part in population.reading_executor(executor or SerialExecutor()).map(
        _moments, shards, shared=total.names
    ):
        for row, group in enumerate(present):
            _merge(total, group, int(part.counts[row]), part.mean[row], part.squares[row])
    if not bool(torch.isfinite(total.squares).all()):
        raise _not_finite(population, names)
    return total


def _moments(names: tuple[str, ...], shard: tuple[Population, Tensor]) -> tuple[list[int], Moments]:
    """Those groups that some members belong to, and their moments in this order."""
    members, groups = shard
    present: list[int] = groups.unique().tolist()
    sizes = [members.spec[name].size for name in names]
    room = torch.zeros(2, len(present), sum(sizes), dtype=torch.float64, device=_device(members))
    total = Moments(names, torch.zeros(len(present), dtype=torch.int64), room[0], room[1])
    for start, block in members.blocks():
        labels = groups[start : start + len(next(iter(block.values())))]
        for row, group in enumerate(present):
            chosen = (labels == group).nonzero().flatten()
            if len(chosen):
                pairs = [_own(_rows(block[name], chosen)) for name in names]
                mean, squares = (torch.cat(pieces) for pieces in zip(*pairs, strict=True))
                _merge(total, row, len(chosen), mean, squares)
    return present, total


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """Some members of a block, laid flat (n, d)."""
    picked = values if len(chosen) == len(values) else values[chosen.to(values.device)]
    return picked.reshape(len(chosen), -1)


def _own(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations from it (d,), float64, of rows (n, d).

    A range of columns at a time, that stays in the cache: memory fetched for a copy of all would cost more than the
    sums. Ranges are multiples of what torch adds up together, so that they change no bit.
    """
    columns = max(1, _CACHED // max(1, len(rows)) // _TOGETHER) * _TOGETHER
    pieces = [_own_columns(part) for part in rows.split(columns, dim=1)]
    if len(pieces) == 1:
        return pieces[0]
    means, squares = zip(*pieces, strict=True)
    return torch.cat(means), torch.cat(squares)


def _own_columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.empty(rows.shape, dtype=torch.float64, device=rows.device).copy_(rows)
    mean = wide.mean(0)
    return mean, wide.sub_(mean).square_().sum(0)


def _merge(total: Moments, group: int, count: int, mean: Tensor, squares: Tensor) -> None:
    """Add `count` members of these moments (D,) to a group, in place."""
    before = int(total.counts[group])
    gap = mean - total.mean[group]
    total.squares[group] += squares
    total.squares[group] += gap.square() * (before * count / (before + count))
    total.mean[group] += gap * (count / (before + count))
    total.counts[group] += count


def _not_finite(population: Population, names: Sequence[str]) -> SpecError:
    """The error of a population whose sum of squares is not finite."""
    sizes = [float(block[name].abs().max()) for _, block in population.blocks() for name in names]
    if all(map(math.isfinite, sizes)):
        return SpecError(
            f"expected weights whose squares are finite, found one of size {max(sizes):g} in the population: leave "
            "such networks out, or measure weights in other units"
        )
    return SpecError(
        "expected finite weights, found NaN or infinity in the population: name the members with "
        "population.check(finite=True) and leave them out"
    )


def deviations(
    population: Population, layout: FlatLayout, centres: Tensor, groups: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, rows (n, D)) for consecutive members: weights minus the centre (G, D), float64, of their group.

    Rows are of `vector_dtype` and are reused: take what you need before asking for the next. The rounded centre is
    subtracted first and what rounding took from it next, so that weights far from zero lose no digits.
    """
    rounded = centres.to(vector_dtype(layout))
    parts = (rounded, (centres.double() - rounded.double()).to(rounded))
    size = rows_at_once(layout, len(population))
    room = torch.empty(size, layout.size, dtype=rounded.dtype, device=rounded.device)
    for start, block in population.blocks(size):
        yield start, _centred(block, layout, parts, groups[start : start + size], room)


def rows_at_once(layout: FlatLayout, members: int) -> int:
    """Number of members that `deviations` holds together."""
    return max(1, min(members, _BLOCK_BYTES // max(1, vector_dtype(layout).itemsize * layout.size)))


def _centred(block: State, layout: FlatLayout, parts: tuple[Tensor, Tensor], own: Tensor, room: Tensor) -> Tensor:
    rows = room[: len(own)]
    pieces = (tensor.split(layout.sizes, dim=1) for tensor in (rows, *parts))
    for name, place, rounded, small in zip(layout.names, *pieces, strict=True):
        value = block[name].reshape(len(own), -1).to(rounded.dtype)
        which = slice(None) if len(rounded) == 1 else own.to(rounded.device)
        torch.sub(value, rounded[which], out=place).sub_(small[which])
    return rows


def _device(population: Population) -> torch.device:
    return next(iter(next(population.blocks(1))[1].values())).device


_DEVIATIONS_SHARE = 4  # networks in a shard for each column of a product (D, L), which comes back from every shard
_Shard = tuple[Population, Tensor, Tensor | None]


class Deviations:
    """X (N, D) with a row w - centre of its group for each network w, in the precision of `vector_dtype`.

    It is multiplied shard by shard, wherever the work runs. Shards depend on the population, and on how large a product
    is, but not on the executor: sums over shards are taken in their order.

    Attributes:
        size: N and D.
        degrees: N - G, the divisor of an unbiased covariance.

    Centres are those of G groups, float64 (G, D); groups the group of each network, int64 (N,), one for all by default.
    """

    def __init__(
        self,
        population: Population,
        layout: FlatLayout,
        centres: Tensor,
        groups: Tensor | None = None,
        *,
        executor: Executor,
    ) -> None:
        self.population, self.executor = population, executor
        self.groups = torch.zeros(len(population), dtype=torch.int64) if groups is None else groups
        self.size = (len(population), layout.size)
        self.degrees = len(population) - len(centres)
        small = len(population) * layout.size * vector_dtype(layout).itemsize <= _BLOCK_BYTES
        one_shard = population.in_memory and len(population) <= block_members(population.spec)
        hold = small and one_shard and isinstance(executor, SerialExecutor)
        self._work = _Work(layout, centres, [] if hold else None)  # one object for all products, so it is sent once

    def times(self, right: Tensor) -> Tensor:
        """Shards of about 64 MB, laid end to end."""
        return torch.cat(list(self._mapped(("times", right), 1)))

    def gathered(self, left: Tensor, width: int) -> Tensor:
        """Summed over shards."""
        return _sum(self._mapped(("gathered", None), _DEVIATIONS_SHARE * left.shape[1], left))

    def turned(self, right: Tensor) -> Tensor:
        """Summed over shards."""
        return _sum(self._mapped(("turned", right), _DEVIATIONS_SHARE * right.shape[1]))

    def lengths(self) -> Tensor:
        """Shards of about 64 MB, laid end to end."""
        return torch.cat(list(self._mapped(("lengths", None), 1)))

    def _mapped(self, what: tuple[str, Tensor | None], least: int, left: Tensor | None = None) -> Iterator[Tensor]:
        """The products of shards of `least` networks, or more."""
        size = max(block_members(self.population.spec), least)
        return self.executor.map(self._work, self._shards(size, left), shared=align_tensors(what))

    def _shards(self, size: int, left: Tensor | None) -> Iterator[_Shard]:
        for start, members in self.population.parts(size, shared=True):
            rows = slice(start, start + len(members))
            yield members, self.groups[rows], None if left is None else align_tensors(left[rows])


@dataclass(frozen=True, eq=False)
class _Work:
    """A product of some rows; where all networks are one shard, in this process, its rows are held."""

    layout: FlatLayout
    centres: Tensor
    held: list[tuple[int, Tensor]] | None

    def __call__(self, what: tuple[str, Tensor | None], shard: _Shard) -> Tensor:
        members, groups, left = shard
        rows: Rows = partial(deviations, members, self.layout, self.centres, groups)
        if self.held is not None:
            self.held.extend(() if self.held else rows())
            rows = partial(iter, self.held)
        x = RowMatrix(rows)
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


_PIECE_VALUES = 1 << 20  # of a factor that are held in float64 at once


def leading_factor(
    x: Deviations | RowMatrix,
    size: tuple[int, int],
    rank: int,
    *,
    degrees: int,
    oversample: int,
    passes: int,
    like: Tensor,
    seed: int,
) -> Tensor:
    """The factor (D, K) of the best covariance of rank K, columns orthogonal, longest first.

    Exact, up to rounding, where K + oversample reaches the number of networks.

    `size` is N and D. No more columns than `degrees`, the divisor of the
    covariance, are returned: there are no more directions. L = rank + oversample directions are searched, in power
    passes of one reading each, in the dtype and on the device of `like`.
    """
    count, width = size
    columns = min(rank, degrees)
    searched = min(rank + oversample, count)
    if searched == count:  # nothing to project: the networks themselves span everything
        factor = x.gathered(torch.eye(count, dtype=like.dtype, device=like.device), width)
        return _ordered(factor)[:, :columns] / math.sqrt(degrees)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(count, searched, generator=generator, dtype=torch.float64).to(like)
    basis = _orthonormal(x.gathered(start, width))
    for _ in range(passes):
        basis = _orthonormal(x.turned(basis))
    projected = x.times(basis)
    del basis
    left: Tensor = torch.linalg.svd(projected.double(), full_matrices=False).U[:, :columns]
    return _ordered(x.gathered(left.to(like), width)) / math.sqrt(degrees)


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _ordered(factor: Tensor) -> Tensor:
    """The same factor factor^T with orthogonal columns, longest first.

    Inner products are float64: in those of float32 a column 1e-4 times as long as the longest is lost.
    """
    pieces = factor.split(max(1, _PIECE_VALUES // max(1, factor.shape[1])))
    inner = factor.new_zeros(factor.shape[1], factor.shape[1], dtype=torch.float64)
    for piece in pieces:
        inner.addmm_(piece.double().T, piece.double())
    turn: Tensor = torch.linalg.eigh(inner).eigenvectors.flip(1)
    return torch.cat([(piece.double() @ turn).to(factor) for piece in pieces])
