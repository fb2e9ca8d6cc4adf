"""Keys by which units are put in order, the same wherever on its orbit a network comes from.

A key may not depend on the order of any other space. "max" and "mean" run over all entries of a unit in the first
tensor of its space (as a rule what writes it: a row of a layer), "norm" over all its entries in all tensors. "first"
is the released code of paper 2: the first entry of the row, taken after what the row reads has been put in order; along
axes that have no order yet the maximum is taken.

All tables are in the coordinates of the given network: copy * size + unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.align.board import Block, Foot
from onebasin.align.form.pieces import Pieces, along
from onebasin.align.form.sign_rule import open_signs
from onebasin.align.scale.squares import is_bias

ORDERS = ("max", "first", "norm", "mean")
_TIE = 1e-10  # keys closer than this, relative to the largest, are equal

Open = list[tuple[int, int]]
"""(space, generator) of signs that could not be settled: there only absolute values say something."""


def orders(pieces: Pieces, order: str, still: Open) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Put the units of every permutable space in descending order.

    Returns:
        Space -> the units of each copy, in order (M, copies, n); space -> (M,) number of units that stayed tied.
    """
    made: dict[int, Tensor] = {}
    ties: dict[int, Tensor] = {}
    for number, space in enumerate(pieces.board.spaces):
        if space.permutable:
            keys = [key(pieces, number, order, still, made), *_second(pieces, number)]
            shape = (len(keys[0]), space.copies, space.size)
            made[number], tied = _ranked([table.reshape(shape) for table in keys])
            ties[number] = tied.sum((1, 2))
    return made, ties


def key(pieces: Pieces, space: int, order: str, still: Open, known: dict[int, Tensor]) -> Tensor:
    """The key of every unit of a space: (M, coordinates)."""
    if order == "norm":
        return _second(pieces, space)[0]
    standing = [item for item in pieces.standing(space) if not is_bias(item[0].tensor)] or list(pieces.standing(space))
    first = standing[0][0].tensor
    tables, seen = [], set()
    for block, foot, values in standing:
        if block.tensor == first and id(block) not in seen:  # a space that stands twice in a block counts once
            seen.add(id(block))
            if open_signs(block, still):
                values = values.abs()
            tables.append(_reduce(pieces, block, foot, values, order, known))
    stacked = torch.stack(tables)
    return stacked.mean(0) if order == "mean" else stacked.amax(0) if order == "max" else stacked[0]


def _reduce(pieces: Pieces, block: Block, foot: Foot, values: Tensor, order: str, known: dict[int, Tensor]) -> Tensor:
    """One number for every coordinate of a foot: (M, coordinates)."""
    others = [1 + dim for dim in range(len(block.dims)) if dim not in foot.dims]
    if order == "mean":
        return along(foot, values.mean([*others, values.dim() - 1]))
    if order == "max":
        return along(foot, values.amax([*others, values.dim() - 1]))
    values = values[..., 0]
    for dim in reversed(others):
        units = [
            other for other in block.feet if other.dims[-1] == dim - 1 and pieces.board.spaces[other.space].permutable
        ]
        ordered = [other for other in units if other.space in known and len(other.dims) == 1]
        if not units:
            values = values.select(dim, 0)
        elif ordered:
            leader = known[ordered[0].space][:, 0, 0]  # the unit that comes first, in each member
            shape = [len(values), *[1] * (values.dim() - 1)]
            index = leader.reshape(shape).expand(*[1 if d == dim else n for d, n in enumerate(values.shape)])
            values = values.gather(dim, index).squeeze(dim)
        else:
            values = values.amax(dim)
    return along(foot, values)


def _second(pieces: Pieces, space: int) -> list[Tensor]:
    """What decides where first keys are equal: sums of squares and of fourth powers of all that hangs on a unit."""
    totals: list[Tensor] = []
    for power in (2, 4):
        tables = [
            along(foot, (values**power).sum([*[1 + d for d in range(len(block.dims)) if d not in foot.dims], -1]))
            for block, foot, values in pieces.standing(space)
        ]
        totals.append(torch.stack(tables).sum(0))
    return totals


def _ranked(keys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sort (M, copies, n) by several keys, descending; which units are equal in all of them."""
    runs = torch.zeros_like(keys[0], dtype=torch.long)
    for table in keys:
        scale = table.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(table.dtype).tiny)
        order = _lexicographic(runs, table)
        sorted_runs, sorted_keys = runs.gather(-1, order), table.gather(-1, order) / scale
        new = torch.zeros_like(sorted_runs)
        new[..., 1:] = ((sorted_keys.diff(dim=-1).abs() > _TIE) | (sorted_runs.diff(dim=-1) > 0)).long().cumsum(-1)
        runs = torch.empty_like(runs).scatter(-1, order, new)
    order = _lexicographic(runs, torch.zeros_like(keys[0]))
    same = runs.gather(-1, order).diff(dim=-1) == 0
    tied = torch.zeros_like(runs, dtype=torch.bool)
    tied[..., 1:] |= same
    tied[..., :-1] |= same
    return order, tied


def _lexicographic(runs: Tensor, table: Tensor) -> Tensor:
    """Order by runs ascending, within a run by the table descending, then as it was."""
    by_key = table.argsort(dim=-1, descending=True, stable=True)
    by_run = runs.gather(-1, by_key).argsort(dim=-1, stable=True)
    return by_key.gather(-1, by_run)
