"""A symmetry laid out as blocks: parts of tensors in which every axis is read in the units of its spaces.

Discovery describes the units of a space by grids along axes: gates of an LSTM, heads inside a fused projection,
channels that own a run of flattened columns. Alignment wants plain arrays. A `TensorBlock` is a part of one tensor that
each leg covers whole or not at all, rearranged to

    (*dims, rest),   one dim per index that some space permutes or that a nested space depends on.

A `BlockAxis` is a leg inside a block. Its coordinates are those of `Element.orders` laid flat: copy * size + unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import SpecError, SymmetryError
from onebasin.state import is_statistic
from onebasin.symmetry import Grid, Leg, Space, Symmetry, labels, require_symmetry


@dataclass(frozen=True)
class BlockAxis:
    """A leg inside a block: its space, the dims that hold (parents..., unit), and how factors act there."""

    space: int
    dims: tuple[int, ...]
    powers: tuple[int, ...]
    shift: float = 0.0

    def flatten(self, table: Tensor) -> Tensor:
        """A table (M, *sizes of the dims, in their order in the block) as (M, copies * size)."""
        order = sorted(self.dims)
        return table.permute(0, *[1 + order.index(dim) for dim in self.dims]).flatten(1)


@dataclass(frozen=True, eq=False)
class TensorBlock:
    """Part of one tensor, as (*dims, rest)."""

    tensor: str
    picks: tuple[Tensor | None, ...]  # positions taken along each axis; None is the whole axis as it is
    split: tuple[tuple[int, ...], ...]  # how each axis falls into its dims and a rest
    turn: tuple[int, ...]  # the order that puts dims first and rests last
    dims: tuple[int, ...]
    axes: tuple[BlockAxis, ...]
    devices: dict[torch.device, tuple[Tensor | None, ...]] = field(default_factory=dict, repr=False)

    def take(self, stacked: Tensor) -> Tensor:
        """Cut the block out of (M, *shape): (M, *dims, rest)."""
        part = stacked
        for dim, pick in enumerate(self._picks_on(stacked.device), start=1):
            if pick is not None:
                part = part.index_select(dim, pick)
        part = part.reshape(len(stacked), *itertools.chain.from_iterable(self.split))
        part = part.permute(0, *[1 + number for number in self.turn])
        return part.reshape(len(stacked), *self.dims, -1)

    def _picks_on(self, device: torch.device) -> tuple[Tensor | None, ...]:
        if device not in self.devices:
            self.devices[device] = tuple(None if pick is None else pick.to(device) for pick in self.picks)
        return self.devices[device]

    def spread(self, axis: BlockAxis, table: Tensor) -> Tensor:
        """Lay a table over coordinates (M, copies * size) along the block: (M, *dims with ones elsewhere, 1)."""
        sizes = [self.dims[dim] for dim in axis.dims]
        table = table.reshape(len(table), *sizes)
        by_dim = sorted(range(len(sizes)), key=lambda position: axis.dims[position])
        table = table.permute(0, *[1 + position for position in by_dim])
        shape = [size if dim in axis.dims else 1 for dim, size in enumerate(self.dims)]
        return table.reshape(len(table), *shape, 1)

    def gather(self, axis: BlockAxis, part: Tensor) -> Tensor:
        """Sum (M, *dims) over all dims that are not the axis': (M, copies * size)."""
        summed = self.other_dims(axis)
        return axis.flatten(part.sum(summed) if summed else part)

    def reduce(self, axis: BlockAxis, part: Tensor, function: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """Reduce (M, *dims, rest) by `torch.amax` or the like over all but the axis' dims: (M, copies * size)."""
        return axis.flatten(function(part, [*self.other_dims(axis), part.dim() - 1]))

    def other_dims(self, axis: BlockAxis) -> list[int]:
        """Dims of (M, *dims) that are not the axis'."""
        return [1 + dim for dim in range(len(self.dims)) if dim not in axis.dims]


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """All blocks of a symmetry. Tensors without legs, and parts that no leg covers, are in none."""

    symmetry: Symmetry
    blocks: tuple[TensorBlock, ...]

    @classmethod
    def of(cls, symmetry: Symmetry, *, statistics: bool = False) -> BlockLayout:
        """The blocks of a symmetry; `statistics` also takes in the running mean and variance of batch norms.

        These are no weights: they move with their unit but say nothing about which unit it is.
        """
        require_symmetry(symmetry)
        key = (cls, statistics, torch.get_default_device())
        if key not in symmetry.derived:
            with torch.inference_mode(False):  # tensors that are made in that mode cannot be used outside
                symmetry.derived[key] = cls._of(symmetry, statistics)
        layout: BlockLayout = symmetry.derived[key]
        return layout

    @classmethod
    def _of(cls, symmetry: Symmetry, statistics: bool) -> BlockLayout:
        legs: dict[str, list[tuple[int, Leg]]] = {}
        for number, space in enumerate(symmetry.spaces):
            for leg in space.legs:
                legs.setdefault(leg.tensor, []).append((number, leg))
        blocks = []
        for name, legs_here in legs.items():
            if not statistics and is_statistic(name):
                continue
            if name not in symmetry.shapes:
                mover = symmetry.spaces[legs_here[0][0]].name
                raise SymmetryError(f"space {mover!r} moves {name}, whose shape the symmetry lacks: add it to shapes")
            blocks += list(_blocks(symmetry, name, legs_here))
        return cls(symmetry, tuple(blocks))

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was computed of this layout once for all, under any key."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what can be computed again."""
        return {name: value for name, value in self.__dict__.items() if name != "derived"}

    @cached_property
    def spaces(self) -> tuple[Space, ...]:
        """The spaces, numbered as in `BlockAxis.space`."""
        return self.symmetry.spaces

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that have blocks."""
        return tuple(dict.fromkeys(block.tensor for block in self.blocks))

    def coordinates(self, space: int) -> int:
        """Number of coordinates of a space: copies * size."""
        return self.spaces[space].copies * self.spaces[space].size

    def check(self, state: Mapping[str, Tensor], *, where: str, batched: bool = False) -> None:
        """Raise unless every tensor of the symmetry is there with its shape."""
        for name, shape in self.symmetry.shapes.items():
            if name not in state:
                raise SpecError(
                    f"{where} has no tensor {name}, which the symmetry speaks of: give a network of the model that the "
                    "symmetry was found for"
                )
            found = tuple(state[name].shape)[int(batched) :]
            if found != tuple(shape):
                raise SpecError(
                    f"{where} has {name} of shape {found}, the symmetry was found for {tuple(shape)}: networks of "
                    "other widths need a symmetry of their own (ob.discover)"
                )


def _blocks(symmetry: Symmetry, name: str, legs: list[tuple[int, Leg]]) -> Iterator[TensorBlock]:
    """Cut a tensor along every axis where the set of legs changes."""
    shape = symmetry.shapes[name]
    grids = {leg: (leg.grid, *leg.over, *leg.within) for _, leg in legs}
    every = dict.fromkeys(grid for _, leg in legs for grid in grids[leg])
    parts = [_classes(length, [grid for grid in every if grid.axis == axis]) for axis, length in enumerate(shape)]
    for classes in itertools.product(*parts):
        covering = [pair for pair in legs if all(grid in classes[grid.axis][0] for grid in grids[pair[1]])]
        if covering:
            yield _block(symmetry, name, covering, [places for _, places in classes])


def _classes(length: int, grids: list[Grid]) -> list[tuple[frozenset[Grid], Tensor]]:
    """Positions of an axis, sorted into classes that lie in the same grids."""
    if not grids:
        return [(frozenset(), torch.arange(length))]
    inside = torch.stack([labels(grid, length) >= 0 for grid in grids])
    if bool(inside.all()):
        return [(frozenset(grids), torch.arange(length))]
    classes = []
    for key in inside.unique(dim=1).T:
        places = (inside == key[:, None]).all(0).nonzero()[:, 0]
        classes.append((frozenset(grid for grid, held in zip(grids, key, strict=True) if held), places))
    return sorted(classes, key=lambda item: int(item[1][0]))


def _block(symmetry: Symmetry, name: str, legs: list[tuple[int, Leg]], places: list[Tensor]) -> TensorBlock:
    """Sort the positions of each axis by unit, parents first, and remember which dim is whose."""
    shape = symmetry.shapes[name]
    picks: list[Tensor | None] = []
    split: list[tuple[int, ...]] = []
    sizes: list[int] = []
    where: dict[tuple[int, bytes], int] = {}  # (axis, labels) -> dim
    dims_first, rests_last, counter = [], [], 0
    for axis, positions in enumerate(places):
        # The different ways in which this axis is numbered, parents before children: labels as bytes -> labels.
        grids = [grid for _, leg in legs for grid in (*leg.over, leg.grid) if grid.axis == axis]
        columns = {_key(column): column for column in (labels(grid, shape[axis])[positions] for grid in grids)}
        widths = [int(column.max()) + 1 for column in columns.values()]
        rest, left = divmod(len(positions), math.prod(widths))
        key = torch.zeros(len(positions), dtype=torch.long)
        for width, column in zip(widths, columns.values(), strict=True):
            key = key * width + column
        if left or (widths and not bool((key.bincount(minlength=math.prod(widths)) == rest).all())):
            raise SymmetryError(
                f"the legs on axis {axis} of {name} do not form a grid of units: a hand-written symmetry must give "
                "every unit the same number of positions"
            )
        order = positions[key.argsort(stable=True)]
        picks.append(None if torch.equal(order, torch.arange(shape[axis])) else order)
        split.append((*widths, rest))
        for number, (bits, width) in enumerate(zip(columns, widths, strict=True)):
            where[axis, bits] = len(sizes)
            sizes.append(width)
            dims_first.append(counter + number)
        rests_last.append(counter + len(widths))
        counter += len(widths) + 1
    axes = []
    for number, leg in legs:
        grids = [*leg.over, leg.grid]
        dims = (where[grid.axis, _key(labels(grid, shape[grid.axis])[places[grid.axis]])] for grid in grids)
        axes.append(BlockAxis(number, tuple(dims), leg.powers, leg.shift))
    return TensorBlock(name, tuple(picks), tuple(split), (*dims_first, *rests_last), tuple(sizes), tuple(axes))


def _key(column: Tensor) -> bytes:
    return column.numpy().tobytes()
