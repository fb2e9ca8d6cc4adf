"""Mean and spread of a crowd, read once, block by block; for groups of members as well as for all.

Sums of squares are those of deviations from a mean that is known so far, and blocks are merged as Chan, Golub and
LeVeque (1979) do: no difference of two large numbers is ever taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError
from onebasin.population import Population
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.uncertain import vector_dtype
from onebasin.state import State

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


def moments(population: Population, names: Sequence[str], groups: Tensor) -> Moments:
    """The moments of groups of members; `groups` gives the group of each, int64 (N,), from 0 up, none empty.

    >>> crowd = Population.from_stacked({"w": torch.tensor([[1.0], [3.0], [8.0]])})
    >>> found = moments(crowd, ["w"], torch.tensor([0, 0, 1]))
    >>> found.mean, found.squares
    (tensor([[2.],
            [8.]], dtype=torch.float64), tensor([[2.],
            [0.]], dtype=torch.float64))

    Raises:
        SpecError: a member holds NaN or infinity, or numbers whose squares are infinite.
    """
    sizes = [population.spec[name].size for name in names]
    counts = torch.zeros(int(groups.max()) + 1, dtype=torch.int64)
    mean = torch.zeros(len(counts), sum(sizes), dtype=torch.float64, device=_device(population))
    squares = torch.zeros_like(mean)
    for start, block in population.blocks():
        own = groups[start : start + len(next(iter(block.values())))]
        for group in own.unique().tolist():
            members = (own == group).nonzero().flatten()
            pieces = zip(names, mean[group].split(sizes), squares[group].split(sizes), strict=True)
            for name, centre, spread in pieces:
                value = block[name] if len(members) == len(own) else block[name][members.to(block[name].device)]
                _take_in(value.reshape(len(members), -1), int(counts[group]), centre, spread)
            counts[group] += len(members)
    if not bool(torch.isfinite(squares).all()):
        raise _not_finite(population, names)
    return Moments(tuple(names), counts, mean, squares)


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


def _take_in(rows: Tensor, before: int, mean: Tensor, squares: Tensor) -> None:
    """Merge rows (n, d) into the mean and sum of squares (d,) of `before` others, in place."""
    wide, count = rows.double(), len(rows)
    if wide is rows:
        wide = rows.clone()
    own = wide.mean(0)
    squares += wide.sub_(own).square_().sum(0)
    gap = own - mean
    squares += gap.square() * (before * count / (before + count))
    mean += gap * (count / (before + count))


def deviations(
    population: Population, layout: Coordinates, centres: Tensor, groups: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, rows (n, D)) for consecutive members: weights minus the centre (G, D), float64, of their group.

    Rows are of `vector_dtype` and are reused: take what you need before asking for the next. The rounded centre is
    subtracted first and what rounding took from it next, so that weights far from zero lose no digits.
    """
    rounded = centres.to(vector_dtype(layout))
    parts = (rounded, (centres.double() - rounded.double()).to(rounded))
    size = max(1, min(len(population), _BLOCK_BYTES // max(1, rounded.element_size() * layout.size)))
    room = torch.empty(size, layout.size, dtype=rounded.dtype, device=rounded.device)
    for start, block in population.blocks(size):
        yield start, _centred(block, layout, parts, groups[start : start + size], room)


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
