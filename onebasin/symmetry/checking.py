"""Is a Symmetry that was read from a file one that can act? What a file says is believed only after this.

A Symmetry that `discover` made needs no such look, and one written by hand in Python is checked by its first use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onebasin.symmetry.act import labels, positions
from onebasin.symmetry.companions import COMPANIONS, Companions
from onebasin.symmetry.space import FREEDOMS, Grid, Leg, Space

LARGEST = 1 << 26  # units of one space with all its copies: half a gigabyte of indices
_SHIFT = 1e6  # of a variance
_POWER = 64  # exponents beyond any that an architecture has

Shape = tuple[int, ...]


def check_symmetry(spaces: tuple[Space, ...], shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError, with what was expected and what was found, unless every space fits the tensors."""
    for name, shape in shapes.items():
        _demand(name.isprintable(), "names that can be printed", repr(name))
        _demand(all(_whole(size, 0) for size in shape), f"the lengths of {name!r} as whole numbers", shape)
    names = [space.name for space in spaces]
    _demand(all(isinstance(name, str) and name.isprintable() for name in names), "texts as names of spaces", names)
    _demand(len(set(names)) == len(names), "another name for every space", names)
    for space in spaces:
        _check_space(space)
        for leg in space.legs:
            _check_leg(space, leg, shapes)


def check_unmoved(
    frozen: Mapping[str, Shape], companions: Companions, spaces: tuple[Space, ...], shapes: Mapping[str, Shape]
) -> None:
    """Raise ValueError unless constants and companions are tensors on which no space stands, and fit their shapes."""
    for name, axes in frozen.items():
        _demand(name in shapes, "constants among the tensors", name)
        _demand(all(0 <= axis < len(shapes[name]) for axis in axes), f"axes of the constant {name!r}", axes)
    for name, (leader, how) in companions.items():
        _demand(how in COMPANIONS, f"a companion that moves as one of {', '.join(COMPANIONS)}", how)
        fits = name in shapes and leader in shapes and shapes[name] == shapes[leader]
        _demand(fits, "companions of the shape of their tensor", f"{name} beside {leader}")
    moved = sorted({leg.tensor for space in spaces for leg in space.legs} & {*frozen, *companions})
    _demand(not moved, "spaces that stand on no constant and no companion", ", ".join(moved))


def _check_space(space: Space) -> None:
    _demand(_whole(space.size, 1), f"a number of units in {space.name!r}", space.size)
    _demand(isinstance(space.permutable, bool), f"true or false for permutable in {space.name!r}", space.permutable)
    known = all(kind in FREEDOMS[1:] for kind in space.generators)
    _demand(known, f"generators of {space.name!r} among {', '.join(FREEDOMS[1:])}", space.generators)
    fits = all(isinstance(name, str) and _whole(size, 1) for name, size in space.parents)
    _demand(fits, f"names and sizes of the parents of {space.name!r}", space.parents)
    _demand(bool(space.legs), f"tensors that {space.name!r} stands on", "none")
    _demand(len(space.parents) <= 8, f"at most 8 parents of {space.name!r}", len(space.parents))
    most = space.copies * space.size
    _demand(most <= LARGEST, f"at most {LARGEST:,} units in {space.name!r}", most)


def _check_leg(space: Space, leg: Leg, shapes: Mapping[str, Shape]) -> None:
    known = isinstance(leg.tensor, str) and leg.tensor in shapes
    _demand(known, f"legs of {space.name!r} on known tensors", leg.tensor)
    shape, where = shapes[leg.tensor], f"{leg.tensor!r} for {space.name!r}"
    _check_grid(leg.grid, shape, space.size, where)
    _demand(len(leg.over) == len(space.parents), f"one place per parent in {where}", len(leg.over))
    for grid, (_, size) in zip(leg.over, space.parents, strict=True):
        _check_grid(grid, shape, size, where)
        if grid.axis == leg.axis:
            owners = labels(grid, shape[grid.axis])[positions(leg.grid)[:, 0]]
            _demand(bool((owners >= 0).all()), f"a parent for every unit in {where}", "none for some")
    for grid in leg.within:
        _check_grid(grid, shape, None, where)
        _demand(grid.axis != leg.axis, f"restrictions to other axes in {where}", grid.axis)
    whole = all(_whole(power, -_POWER) and power <= _POWER for power in leg.powers)
    _demand(whole and len(leg.powers) <= len(space.generators), f"a small power per generator in {where}", leg.powers)
    real = isinstance(leg.shift, int | float) and not isinstance(leg.shift, bool)
    _demand(real and 0 <= leg.shift <= _SHIFT, f"a small shift in {where}", leg.shift)


def _check_grid(grid: Grid, shape: Shape, units: int | None, where: str) -> None:
    """Positions are whole numbers inside the axis, none of them twice, and as many as there are units."""
    _demand(_whole(grid.axis, 0) and grid.axis < len(shape), f"an axis of {shape} in {where}", grid.axis)
    runs = all(len(run) == 3 and _whole(run[0], 0) and _whole(run[1], 1) and _whole(run[2], 0) for run in grid.runs)
    rest = all(len(item) == 2 and _whole(item[0], 1) and _whole(item[1], 0) for item in grid.rest)
    _demand(bool(grid.runs) and runs and rest, f"runs (start, count, step) and rests (size, step) in {where}", grid)
    length = shape[grid.axis]
    count = sum(run[1] for run in grid.runs)
    _demand(units in (None, count), f"{units} units in {where}", count)
    last = max(start + step * (many - 1) for start, many, step in grid.runs)
    last += sum((size - 1) * step for size, step in grid.rest)
    total = count * math.prod(size for size, _ in grid.rest)
    inside = last < length and total <= min(length, LARGEST)
    _demand(inside and len(positions(grid).unique()) == total, f"different positions below {length} in {where}", grid)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _demand(fits: bool, expected: str, found: object) -> None:
    if not fits:
        raise ValueError(f"expected {expected}, found {str(found)[:80]}")
