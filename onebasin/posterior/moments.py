"""Mean and spread of a crowd, read once, block by block; for groups of members as well as for all.

Sums of squares are those of deviations from a block's own mean, and blocks are merged as Chan, Golub and LeVeque (1979)
do: no difference of two large numbers is ever taken. Shards of a crowd are merged in the same way and in their order,
so that results do not depend on who has read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.cluster import Cluster, Serial
from onebasin.errors import InputError, SpecError
from onebasin.population import Population
from onebasin.population.parting import parts, readers
from onebasin.population.writer import block_members
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.uncertain import vector_dtype
from onebasin.state import State

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


def moments(population: Population, names: Sequence[str], groups: Tensor, cluster: Cluster | None = None) -> Moments:
    """The moments of groups of members; `groups` gives the group of each, int64 (N,), from 0 up, none empty.

    >>> crowd = Population.from_stacked({"w": torch.tensor([[1.0], [3.0], [8.0]])})
    >>> found = moments(crowd, ["w"], torch.tensor([0, 0, 1]))
    >>> found.mean, found.squares
    (tensor([[2.],
            [8.]], dtype=torch.float64), tensor([[2.],
            [0.]], dtype=torch.float64))

    Args:
        population: the members.
        names: the tensors to look at, floating-point ones.
        groups: the group of each member.
        cluster: who reads them; this process by default.

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
    shards = ((members, groups[start : start + len(members)]) for start, members in parts(population, size))
    for present, own in readers(population, cluster or Serial()).map(_moments, shards, shared=total.names):
        for row, group in enumerate(present):
            _merge(total, group, int(own.counts[row]), own.mean[row], own.squares[row])
    if not bool(torch.isfinite(total.squares).all()):
        raise _not_finite(population, names)
    return total


def _moments(names: tuple[str, ...], shard: tuple[Population, Tensor]) -> tuple[list[int], Moments]:
    """Those groups that some members belong to, and their moments in this order."""
    members, groups = shard
    present: list[int] = groups.unique().tolist()
    sizes = [members.spec[name].size for name in names]
    room = torch.zeros(2, len(present), sum(sizes), dtype=torch.float64, device=_device(members))
    found = Moments(names, torch.zeros(len(present), dtype=torch.int64), room[0], room[1])
    for start, block in members.blocks():
        labels = groups[start : start + len(next(iter(block.values())))]
        for row, group in enumerate(present):
            chosen = (labels == group).nonzero().flatten()
            if len(chosen):
                own = [_own(_rows(block[name], chosen)) for name in names]
                mean, squares = (torch.cat(pieces) for pieces in zip(*own, strict=True))
                _merge(found, row, len(chosen), mean, squares)
    return present, found


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """Some members of a block, laid flat (n, d)."""
    picked = values if len(chosen) == len(values) else values[chosen.to(values.device)]
    return picked.reshape(len(chosen), -1)


def _own(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations from it (d,), float64, of rows (n, d)."""
    wide = rows.double()
    if wide is rows:
        wide = rows.clone()
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
    """What to say where a sum of squares is not finite."""
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
    population: Population, layout: Coordinates, centres: Tensor, groups: Tensor
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


def rows_at_once(layout: Coordinates, members: int) -> int:
    """How many of so many members `deviations` holds together."""
    return max(1, min(members, _BLOCK_BYTES // max(1, vector_dtype(layout).itemsize * layout.size)))


def _centred(block: State, layout: Coordinates, parts: tuple[Tensor, Tensor], own: Tensor, room: Tensor) -> Tensor:
    rows = room[: len(own)]
    pieces = (tensor.split(layout.sizes, dim=1) for tensor in (rows, *parts))
    for name, place, rounded, small in zip(layout.names, *pieces, strict=True):
        value = block[name].reshape(len(own), -1).to(rounded.dtype)
        which = slice(None) if len(rounded) == 1 else own.to(rounded.device)
        torch.sub(value, rounded[which], out=place).sub_(small[which])
    return rows


def _device(population: Population) -> torch.device:
    return next(iter(next(population.blocks(1))[1].values())).device
