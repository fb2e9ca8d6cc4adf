"""How many factors of a symmetry are independent: generators of different spaces may act equally on all weights.

Write s_X,g(i) for the logarithm of the factor of generator g of space X at index i = (parents..., unit). It multiplies
every entry that a leg of X covers by its power, so a combination of factors does nothing iff for all entries

    sum over legs X that cover the entry, and generators g, of  power * s_X,g(index of the entry) = 0.

Cut each tensor into regions that every leg covers whole or not at all. In a region this is a sum of functions of some
of its directions each, zero everywhere. Every function of several indices is in one way a sum over subsets u of them of
functions that vanish as soon as one of their indices is 0, and a sum of functions is zero iff all these terms are. So
for every u there is one small system in the unknowns (X, g), with one equation for each region and each way in which u
stands there, and it counts once for each of the prod over u of (size - 1) values of the indices in u that are not 0.
The same holds for signs, over GF(2). Cost: the number of legs, not of units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onebasin.symmetry.apply import labels
from onebasin.symmetry.exact import sparse_rank
from onebasin.symmetry.space import Grid, Leg

if TYPE_CHECKING:
    from torch import Tensor

    from onebasin.symmetry.group import Symmetry

Dim = tuple[int, bytes]  # an axis, and the number of the unit at each of its positions
Foot = tuple[int, Leg, tuple[Dim, ...]]  # a leg in a region: its space, the leg, where each of its indices stands


def independent(symmetry: Symmetry, kind: str) -> int:
    """Number of independent factors of the generators whose kind ends in `kind`: "scale" or "sign"."""
    modulus = 2 if kind == "sign" else 0
    chosen = {
        number: [place for place, own in enumerate(space.generators) if own.endswith(kind)]
        for number, space in enumerate(symmetry.spaces)
    }
    regions = [feet for name in symmetry.legs_of for feet in _regions(symmetry, name, chosen)]
    names = _Names(symmetry)
    for feet in regions:
        names.join(feet)
    systems: dict[frozenset[str], list[dict[tuple[int, int], int]]] = {}
    for feet in regions:
        for (form, _), row in _equations(feet, names, chosen).items():
            systems.setdefault(form, []).append(row)
    return sum(
        math.prod(names.sizes[name] - 1 for name in form) * sparse_rank(rows, modulus) for form, rows in systems.items()
    )


class _Names:
    """One name for each index; those that number the same positions are one."""

    def __init__(self, symmetry: Symmetry) -> None:
        self.indices = [(*[name for name, _ in space.parents], space.name) for space in symmetry.spaces]
        self.sizes = {name: size for space in symmetry.spaces for name, size in space.parents}
        self.sizes |= {space.name: space.size for space in symmetry.spaces}
        self._first = {name: name for name in self.sizes}

    def first(self, name: str) -> str:
        while self._first[name] != name:
            name = self._first[name]
        return name

    def join(self, feet: list[Foot]) -> None:
        """Two spaces on the same positions number them alike."""
        seen: dict[Dim, str] = {}
        for space, _, dims in feet:
            for name, dim in zip(self.indices[space], dims, strict=True):
                known = self.first(seen.setdefault(dim, name))
                if self.sizes[known] == self.sizes[name]:
                    self._first[self.first(name)] = known


def _regions(symmetry: Symmetry, tensor: str, chosen: dict[int, list[int]]) -> Iterator[list[Foot]]:
    """The parts of a tensor that every leg with a factor covers whole or not at all, each with those that do."""
    shape = symmetry.shapes[tensor]
    legs = [
        (number, leg)
        for number, leg in symmetry.legs_of[tensor]
        if any(place < len(leg.powers) and leg.powers[place] for place in chosen[number])
    ]
    marks: list[dict[Grid, Tensor]] = [{} for _ in shape]
    for _, leg in legs:
        for grid in (leg.grid, *leg.over, *leg.within):
            if grid not in marks[grid.axis]:
                marks[grid.axis][grid] = labels(grid, shape[grid.axis])
    parts = [_classes(found, size) for found, size in zip(marks, shape, strict=True)]
    for combination in itertools.product(*parts):
        feet = []
        for number, leg in legs:
            held = [combination[grid.axis].get(grid) for grid in (*leg.over, leg.grid, *leg.within)]
            if all(place is not None for place in held):
                dims = [(grid.axis, combination[grid.axis][grid]) for grid in (*leg.over, leg.grid)]
                feet.append((number, leg, tuple(dims)))
        if feet:
            yield feet


def _classes(marks: dict[Grid, Tensor], size: int) -> list[dict[Grid, bytes]]:
    """Positions of an axis that stand in the same grids: for each class, grid -> the units at its positions."""
    found: dict[tuple[bool, ...], list[int]] = {}
    inside = [(numbers >= 0).tolist() for numbers in marks.values()]
    for position, key in enumerate(zip(*inside, strict=True) if marks else [()] * min(size, 1)):
        found.setdefault(key, []).append(position)
    return [
        {
            grid: numbers[places].numpy().tobytes()
            for (grid, numbers), held in zip(marks.items(), key, strict=True)
            if held
        }
        for key, places in found.items()
    ]


def _equations(
    feet: list[Foot], names: _Names, chosen: dict[int, list[int]]
) -> dict[tuple[frozenset[str], frozenset[Dim]], dict[tuple[int, int], int]]:
    """(names of the indices, where they stand) -> powers by (space, generator)."""
    rows: dict[tuple[frozenset[str], frozenset[Dim]], dict[tuple[int, int], int]] = {}
    for number, leg, dims in feet:
        places = [(dim, names.first(name)) for dim, name in zip(dims, names.indices[number], strict=True)]
        for count in range(len(places) + 1):
            for part in itertools.combinations(places, count):
                key = frozenset(name for _, name in part), frozenset(dim for dim, _ in part)
                row = rows.setdefault(key, {})
                for place in chosen[number]:
                    if place < len(leg.powers):
                        row[number, place] = row.get((number, place), 0) + leg.powers[place]
    return rows
