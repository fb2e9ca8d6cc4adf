"""From weights to masses: every block of a board is reduced once to sums of squares in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.align.board import Block, Board, Foot
from onebasin.align.scale.mass import Gauge, Mass, Part, Powers, Side
from onebasin.errors import SpecError
from onebasin.state import is_statistic


@dataclass(frozen=True, eq=False)
class Layout:
    """Which gauges a board has, and which of them act where; nothing here depends on weights."""

    board: Board
    gauges: tuple[Gauge, ...]
    sides: tuple[tuple[Side, ...], ...]  # for every block

    @classmethod
    def of(cls, board: Board) -> Layout:
        """Find the gauges: generators of the kinds "scale" and "norm-scale"."""
        numbers: dict[tuple[int, int], int] = {}
        for number, space in enumerate(board.spaces):
            for generator, kind in enumerate(space.generators):
                if kind.endswith("scale"):
                    numbers[number, generator] = len(numbers)
        sides = tuple(_sides(block, numbers) for block in board.blocks)
        gauges = []
        for number, generator in numbers:
            space = board.spaces[number]
            kind, size = space.generators[generator], board.coordinates(number)
            gauges.append(Gauge(number, generator, kind, size, space.name))
        return cls(board, tuple(gauges), sides)

    def reduce(self, stacked: Mapping[str, Tensor], *, biases: bool = True, start: int = 0) -> Mass:
        """Sum squares of stacked weights (M, *shape), statistics left out, biases too if asked.

        `start` is the number of the first member, for messages.
        """
        single: dict[tuple[Powers, bool], Part] = {}
        coupled: list[Part] = []
        rest = _uncovered(self.board, stacked, biases)
        for block, sides in zip(self.board.blocks, self.sides, strict=True):
            if not _counts(block.tensor, biases):
                continue
            values = _squares(block.take(stacked[block.tensor]), block, sides)
            if not sides:
                rest = rest + values
                continue
            for part in _decoupled(Part(values, _renumbered(sides), is_bias(block.tensor))):
                if len(part.sides) > 1:
                    coupled.append(part)
                    continue
                flat = _flat(part)  # parts that move alike are one part
                key = (flat.sides[0].powers, flat.bias)
                known = single.get(key)
                single[key] = flat if known is None else replace(known, values=known.values + flat.values)
        rest = rest + sum(part.values.sum(1) for (powers, _), part in single.items() if not powers)
        mass = Mass(self.gauges, [*[part for (powers, _), part in single.items() if powers], *coupled], rest)
        if not bool(torch.isfinite(mass.total(mass.here)).all()):
            check_finite(stacked, start)
            raise SpecError(
                "the squares of some weights overflow: networks with weights beyond 1e150 are not supported"
            )
        return mass


def is_bias(name: str) -> bool:
    """Whether a tensor is a bias by its name: `bias`, `in_proj_bias`, `bias_hh_l0`, or the `beta` of a norm."""
    last = name.rsplit(".", 1)[-1]
    return "bias" in last or last == "beta"


def _counts(name: str, biases: bool) -> bool:
    return not is_statistic(name) and (biases or not is_bias(name))


def _sides(block: Block, numbers: Mapping[tuple[int, int], int]) -> tuple[Side, ...]:
    found: dict[tuple[int, tuple[int, ...]], Foot] = {(foot.space, foot.dims): foot for foot in block.feet}
    sides = []
    for (space, dims), foot in found.items():
        powers = {numbers[space, g]: power for g, power in enumerate(foot.powers) if power and (space, g) in numbers}
        if powers:
            sides.append(Side(space, dims, tuple(sorted(powers.items()))))
    return tuple(sides)


def _squares(part: Tensor, block: Block, sides: tuple[Side, ...]) -> Tensor:
    """Sum squares (M, *dims, rest) over the rest and over all dims that are in no side."""
    held = {dim for side in sides for dim in side.dims}
    gone = [1 + dim for dim in range(len(block.dims)) if dim not in held]
    if part.shape[-1] == 1:
        squares = part[..., 0].square() if part.dtype == torch.float64 else part[..., 0].double().square_()
    else:  # several times faster than a float64 copy, and as exact
        squares = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).square_()
    return squares.sum(gone) if gone else squares


def _renumbered(sides: tuple[Side, ...]) -> tuple[Side, ...]:
    """Number dims anew after those of no side are gone."""
    held = sorted({dim for side in sides for dim in side.dims})
    return tuple(replace(side, dims=tuple(held.index(dim) for dim in side.dims)) for side in sides)


def _flat(part: Part) -> Part:
    """A part with one side as a table (M, coordinates)."""
    side = part.sides[0]
    return replace(part, values=part.gather(side, part.values), sides=(replace(side, dims=(0,)),))


def _decoupled(part: Part) -> list[Part]:
    """Split entries that join a unit to itself off a part in which a space stands twice: there its powers add."""
    if len(part.sides) != 2 or part.sides[0].space != part.sides[1].space:
        return [part]
    first, second = part.sides
    sizes = part.values.shape[1:]
    count = math.prod(sizes[dim] for dim in first.dims)
    coordinates = torch.arange(count, device=part.values.device)[None]
    same = part.spread(first, coordinates) == part.spread(second, coordinates)
    powers = Counter(dict(first.powers))
    powers.update(dict(second.powers))
    added = tuple(sorted((gauge, power) for gauge, power in powers.items() if power))
    diagonal = Part(part.gather(first, part.values * same), (Side(first.space, (0,), added),), part.bias)
    return [diagonal, replace(part, values=part.values * ~same)]


def _uncovered(board: Board, stacked: Mapping[str, Tensor], biases: bool) -> Tensor:
    """Mass (M,) of what is not on the board: tensors without legs, constants left out, and parts that no leg covers."""
    covered: Counter[str] = Counter()
    blocks: dict[str, list[Block]] = {}
    for block in board.blocks:
        covered[block.tensor] += math.prod(math.prod(split) for split in block.split)
        blocks.setdefault(block.tensor, []).append(block)
    first = next(iter(stacked.values()))
    total = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for name, tensor in stacked.items():
        counted = tensor.is_floating_point() and _counts(name, biases) and name not in board.symmetry.frozen
        if not counted or covered[name] == tensor[0].numel():
            continue
        total = total + _all(tensor)
        for block in blocks.get(name, []):
            total = total - _all(block.take(tensor))
    return total


def _all(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1, dtype=torch.float64)
    return norms.square()


def check_finite(stacked: Mapping[str, Tensor], start: int = 0) -> None:
    """Refuse networks with NaN or infinity; `start` is the number of the first."""
    for name, tensor in stacked.items():
        wrong = ~torch.isfinite(tensor.flatten(1)).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
        if bool(wrong.any()):
            raise SpecError(
                f"member {start + int(wrong.nonzero()[0])} holds NaN or infinity in {name}: leave this network out or "
                "train it again with a smaller step"
            )
