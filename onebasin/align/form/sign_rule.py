"""One sign for every unit that may change it: a rule that gives the same network from wherever on its orbit it comes.

A sign can be read off weights that it turns and that no other open sign turns: the sum of their cubes, which does not
depend on the order of units, is to be positive. So signs are settled outwards from the rigid axes: inputs, outputs,
the gamma of a norm (which is looked at first, so that gammas come out positive). Several signs of one unit that only
occur together are told apart by elimination over GF(2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.align.board import Block, Foot
from onebasin.align.form.pieces import Pieces, Tables, along
from onebasin.align.scale.squares import is_bias

_NOTHING = 1e-12  # an odd sum that is smaller, relative to the sum of absolute values, says nothing


def settle_signs(pieces: Pieces) -> tuple[Tables, list[tuple[int, int]]]:
    """Turn the pieces; return the signs (M, n) of each (space, generator) that was settled, and those left open."""
    spaces = pieces.board.spaces
    still = [
        (n, g) for n, space in enumerate(spaces) for g, kind in enumerate(space.generators) if kind.endswith("sign")
    ]
    settled: Tables = {}
    while still:
        found: Tables = {}
        for space in dict.fromkeys(number for number, _ in still):
            found = _of_space(pieces, space, still)
            if found:
                break
        if not found:
            break
        pieces.rescale(found)
        settled.update(found)
        still = [key for key in still if key not in found]
    return settled, still


def open_signs(block: Block, still: list[tuple[int, int]]) -> list[tuple[Foot, frozenset[int]]]:
    """The feet of a block that open signs turn, with the generators that do."""
    found = []
    for foot in block.feet:
        odd = frozenset(g for g, power in enumerate(foot.powers) if power % 2 and (foot.space, g) in still)
        if odd:
            found.append((foot, odd))
    return found


def _of_space(pieces: Pieces, space: int, still: list[tuple[int, int]]) -> Tables:
    """The signs of one space that can be read now."""
    seen: dict[frozenset[int], list[tuple[tuple[bool, bool], Block, Foot, Tensor]]] = {}
    for block, foot, values in pieces.standing(space):
        turned = open_signs(block, still)
        if [held for held, _ in turned] == [foot]:
            bias = is_bias(block.tensor)
            rank = (bias, set(foot.dims) != set(range(len(block.dims))) or values.shape[-1] > 1)  # a gamma comes first
            seen.setdefault(turned[0][1], []).append((rank, block, foot, values))
    found: Tables = {}
    for generator, combination in _eliminate(list(seen)).items():
        sign = torch.ones((), dtype=torch.float64)
        for odd in combination:
            ranked = sorted(seen[odd], key=lambda item: item[0])
            sign = sign * _first([_odd(block, foot, values) for _, block, foot, values in ranked])
        found[space, generator] = sign
    return found


def _eliminate(rows: list[frozenset[int]]) -> dict[int, list[frozenset[int]]]:
    """Generator -> rows whose sum over GF(2) is that generator alone, where there are such rows."""
    reduced: list[tuple[set[int], set[frozenset[int]]]] = []
    for row in rows:
        left, made = set(row), {row}
        for pivot, combination in reduced:
            if min(pivot) in left:
                left, made = left ^ pivot, made ^ combination
        if left:
            reduced = [
                (other ^ left, combination ^ made) if min(left) in other else (other, combination)
                for other, combination in reduced
            ]
            reduced.append((left, made))
    return {min(left): sorted(made, key=sorted) for left, made in reduced if len(left) == 1}


def _odd(block: Block, foot: Foot, values: Tensor) -> list[Tensor]:
    """Sums over a unit's entries (M, n) that turn with its sign: of cubes, and of cubes weighted along the rest."""
    cubes = values**3
    others = [1 + dim for dim in range(len(block.dims)) if dim not in foot.dims]
    sums = []
    for table in (cubes.sum(-1), (cubes * torch.arange(1, cubes.shape[-1] + 1, device=cubes.device)).sum(-1)):
        total = along(foot, table.sum(others) if others else table)
        size = along(foot, cubes.abs().sum(-1).sum(others) if others else cubes.abs().sum(-1))
        sums.append(torch.where(total.abs() > _NOTHING * cubes.shape[-1] * size, total, 0.0))
    return sums


def _first(options: list[list[Tensor]]) -> Tensor:
    """The sign of the first number that says something; 1 where none does."""
    sign = torch.zeros_like(options[0][0])
    for tables in options:
        for table in tables:
            sign = torch.where(sign == 0, table.sign(), sign)
    return torch.where(sign == 0, 1.0, sign)
