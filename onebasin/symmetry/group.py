"""The group: a `Symmetry` is plain data, its members are `Element`s.

A space is a set of n units tied across tensors. It may be *nested* in parents: then each combination of their
indices (a *copy*) has an order and factors of its own. With σ the parents' orders, an element acts on a tensor that
holds parent p and unit i as

    new[p, i] = factor[p, i]^power * old[σ(p), order[p, i]],

so orders and factors are written in the coordinates of the result.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SymmetryError, explained
from onebasin.reporting import (
    RECORD_FORMAT,
    SHOWN,
    Axis,
    Column,
    Figure,
    Record,
    Result,
    Series,
    Table,
    cells_of,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State
from onebasin.symmetry.apply import ExpandedElement, apply, apply_block, compose, invert, labels, positions
from onebasin.symmetry.solve import sparse_rank
from onebasin.symmetry.space import FREEDOMS, Element, Grid, Leg, Space
from onebasin.symmetry.unmoved import COMPANIONS, Companions

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


MOST_RIGID = 12


def render(symmetry: Symmetry) -> str:
    """Spaces, sizes, freedoms, tensors moved; the size of the orbit; what stayed rigid and why."""
    spaces = largest_first(symmetry.spaces, _size)
    rows = [("space", "units", "freedoms", "tensors moved")]
    rows += [(space.name, _units(space), _freedoms(space), _tensors(space)) for space in spaces[:SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*[cell.ljust(width) for cell, width in zip(row, widths, strict=False)], row[3]]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    if not symmetry.spaces:
        lines = ["no symmetries found"]
    if len(spaces) > SHOWN:
        lines.append(f"... and {len(spaces) - SHOWN:,} smaller spaces: to_dataframe() has all")
    lines += ["", _orbit(symmetry)]
    if symmetry.rigid:
        lines += ["", "rigid, as it must be:", *_rigid(symmetry)]
    if symmetry.unexplained:
        lines += ["", "not explained, or to be looked at:", *[f"  {sentence}" for sentence in symmetry.unexplained]]
    return "\n".join(lines)


_BARS = 20  # spaces of a figure
_SPACES = (
    Column("space", "a set of units that are tied across tensors"),
    Column("units", "units in one copy of the space", digits=0),
    Column("copies", "orders of their own, one per combination of its parents, as one per head", digits=0),
    Column("freedoms", "what may be done to its units"),
    Column("equivalent networks", "decimal logarithm of the number of permutations and signs", digits=1, unit="log10"),
    Column("scales", "positive factors, some of which may act alike", digits=0),
    Column("tensors moved", "axes that the units stand on"),
)


def symmetry_record(symmetry: Symmetry) -> Record:
    """Spaces, what is rigid, and the number of equivalent networks by space."""
    spaces = largest_first(symmetry.spaces, _size)
    rows = tuple(
        cells_of(
            space.name,
            space.size,
            space.copies,
            _freedoms(space),
            space.log10_order,
            _scales(space),
            _tensors(space),
        )
        for space in spaces
    )
    rigid = tuple((", ".join(axes), reason) for reason, axes in _by_reason(symmetry).items())
    items: list[Table | Figure] = [Table("spaces", "Which units may be moved?", _SPACES, rows)]
    if rigid:
        heads = (Column("tensor and axis"), Column("reason"))
        items.append(Table("rigid", "What no permutation moves, and why", heads, rigid))
    shown = largest_first(symmetry.spaces, _size, _BARS)[:_BARS]
    more = f" The {_BARS} largest of {len(spaces):,} spaces." if len(spaces) > _BARS else ""
    names, places = tuple(space.name for space in shown), tuple(map(float, range(len(shown))))
    items.append(
        one_panel(
            "spaces-figure",
            "How many equivalent networks does each space make?",
            f"{_orbit(symmetry)}.{more}",
            "bars",
            Axis("", names=names),
            "equivalent networks (log10)",
            series=(Series("", places, tuple(space.log10_order for space in shown)),),
        )
    )
    units = sum(space.size * space.copies for space in symmetry.spaces)
    many = f"{len(symmetry.spaces):,} space{'' if len(symmetry.spaces) == 1 else 's'} of {units:,} units"
    text = (f"{_orbit(symmetry)}; {many}.", *symmetry.unexplained)
    return result_record("symmetry", "Symmetries of a model", text, items, values=json.loads(symmetry.to_json()))


def _size(space: Space) -> float:
    return space.log10_order + _scales(space)


def _scales(space: Space) -> int:
    return space.copies * space.size * sum(kind.endswith("scale") for kind in space.generators)


def _units(space: Space) -> str:
    return str(space.size) if space.copies == 1 else f"{space.size} x {space.copies}"


def _freedoms(space: Space) -> str:
    counts = {kind: space.generators.count(kind) for kind in space.freedoms}
    return ", ".join(kind if counts[kind] < 2 else f"{kind} x{counts[kind]}" for kind in space.freedoms)


def _tensors(space: Space) -> str:
    axes = list(dict.fromkeys(f"{leg.tensor}[{leg.axis}]" for leg in space.legs))
    shown = ", ".join(axes[:4])
    return shown if len(axes) <= 4 else f"{shown}, and {len(axes) - 4} more"


def _orbit(symmetry: Symmetry) -> str:
    log10 = symmetry.log10_order
    count = f"{round(10**log10):,}" if log10 < 6 else f"10^{log10:,.1f}"
    scales = f", and a continuum of {symmetry.dimensions:,} scales" if symmetry.dimensions else ""
    return f"{count} equivalent networks by permutations and signs{scales}"


def _rigid(symmetry: Symmetry) -> list[str]:
    lines = []
    for reason, axes in _by_reason(symmetry).items():
        more = "" if len(axes) <= MOST_RIGID else f", and {len(axes) - MOST_RIGID} more"
        lines.append(f"  {', '.join(axes[:MOST_RIGID])}{more}: {reason}")
    return lines


def _by_reason(symmetry: Symmetry) -> dict[str, list[str]]:
    """Reason -> rigid axes, each once."""
    by_reason: dict[str, dict[str, None]] = {}
    for tensor, axis, reason in symmetry.rigid:
        by_reason.setdefault(reason, {})[f"{tensor}[{axis}]"] = None
    return {reason: list(axes) for reason, axes in by_reason.items()}


FORMAT = "onebasin symmetry 1"


class Mapped(Protocol):
    """What a whole population must offer: its size, and `map` over blocks of stacked members, as in `Population`."""

    def __len__(self) -> int: ...

    def map(self, function: Callable[[State, int], Mapping[str, Tensor]]) -> Any:
        """Apply a function of (tensors (n, *shape), index of the first member) to every block."""


MappedT = TypeVar("MappedT", bound=Mapped)


def require_symmetry(symmetry: object) -> None:
    """Refuse what is no Symmetry.

    Raises:
        InputError: a module, an element, or something else was given.
    """
    if isinstance(symmetry, Symmetry):
        return
    raise InputError(
        f"expected a Symmetry, found {type(symmetry).__name__}: discover it, as onebasin.discover(model, inputs)"
    )


@dataclass(frozen=True, repr=False)
class Symmetry(Result):
    """Everything that leaves a function unchanged: plain data, found by `discover` or written by hand.

    Attributes:
        spaces: the spaces, parents before children.
        shapes: shape of every tensor of the state.
        rigid: (tensor, axis, reason) for axes, or parts of them, that no permutation moves.
        unexplained: sentences about what stayed rigid without a full explanation; () when everything is explained.
        frozen: constant tensor -> the axes along which all its entries are equal. Constants (frozen parameters, and
            buffers that training does not update) are never moved; units with equal entries in them may be.
        companions: tensor -> (tensor that it goes along with, how), see `discover`.
    """

    spaces: tuple[Space, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rigid: tuple[tuple[str, int, str], ...] = ()
    unexplained: tuple[str, ...] = ()
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    companions: Companions = field(default_factory=dict)

    def __str__(self) -> str:
        """A table for people."""
        return render(self)

    def record(self) -> Record:
        """Tables of spaces and of rigid axes; under `values` what `to_json` writes."""
        return symmetry_record(self)

    def __getitem__(self, name: str) -> Space:
        """A space by its name."""
        for space in self.spaces:
            if space.name == name:
                return space
        raise SymmetryError(
            f"no space is called {name!r}; there are: {', '.join(space.name for space in self.spaces) or 'none'}."
        )

    @cached_property
    def log10_order(self) -> float:
        """Decimal logarithm of the number of equivalent networks by permutations and signs."""
        orders = sum(replace(space, generators=()).log10_order for space in self.spaces)
        return orders + independent_factors(self, "sign") * math.log10(2)

    @cached_property
    def dimensions(self) -> int:
        """Number of independent positive scales: the dimension of the continuum of equivalent networks.

        It is the rank of the generators, which is less than their number where some act equally on all weights.
        """
        return independent_factors(self, "scale")

    # ------------------------------------------------------------------ elements

    def identity(self, members: int | None = None) -> Element:
        """The element that moves nothing."""
        if members is not None and members < 1:
            raise SymmetryError(
                f"a batch needs at least one member, found {members}; leave members out for a single element."
            )
        batch = () if members is None else (members,)
        orders, factors = {}, {}
        for space in self.spaces:
            shape = (*batch, *[size for _, size in space.parents], space.size)
            if space.permutable:
                orders[space.name] = torch.arange(space.size).expand(shape).clone()
            if space.generators:
                factors[space.name] = torch.ones(len(space.generators), *shape, dtype=torch.float64)
        return Element(orders, factors, members)

    def random(
        self,
        generator: torch.Generator | int,
        *,
        members: int | None = None,
        freedoms: Iterable[str] = FREEDOMS,
        spaces: Iterable[str] | None = None,
    ) -> Element:
        """Draw an element: uniform orders and signs, log-uniform scales between 1/2 and 2.

        Scales before a batch norm are drawn between 1 and 2: shrinking could push a variance below zero.

        Args:
            generator: a `torch.Generator` or an integer seed.
            members: draw a batch of this many.
            freedoms: only these kinds move; the rest stays at the identity.
            spaces: only these spaces move.
        """
        generator, wanted, kinds = self._choices(generator, spaces, freedoms)
        element = self.identity(members)
        orders, factors = dict(element.orders), dict(element.factors)
        for space in self.spaces:
            if space.name not in wanted:
                continue
            if space.permutable and "permutation" in kinds:
                noise = torch.rand(orders[space.name].shape, generator=generator, device=generator.device)
                orders[space.name] = noise.argsort(-1).cpu()
            for number, kind in enumerate(space.generators):
                if kind in kinds:
                    noise = (
                        torch.rand(factors[space.name][number].shape, generator=generator, device=generator.device)
                        .double()
                        .cpu()
                    )
                    factors[space.name][number] = _draw(kind, noise)
        return Element(orders, factors, members)

    def _choices(
        self, generator: object, spaces: Iterable[str] | None, freedoms: Iterable[str]
    ) -> tuple[torch.Generator, set[str], set[str]]:
        """Check what `random` was asked for."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        if not isinstance(generator, torch.Generator):
            raise SymmetryError(f"random needs a torch.Generator or an integer seed, found {type(generator).__name__}.")
        wanted = {space.name for space in self.spaces} if spaces is None else {self[name].name for name in spaces}
        kinds = set(freedoms)
        if unknown := kinds - set(FREEDOMS):
            raise SymmetryError(
                f"expected freedoms among {', '.join(FREEDOMS)}, found {sorted(unknown)}: write ('permutation', 'sign')"
            )
        return generator, wanted, kinds

    def compose(self, first: Element, second: Element) -> Element:
        """The element that acts as `second`, then `first`: apply(compose(g, h), w) = apply(g, apply(h, w))."""
        return compose(ExpandedElement(self, first), ExpandedElement(self, second))

    def invert(self, element: Element) -> Element:
        """The element that undoes `element`."""
        return invert(ExpandedElement(self, element))

    @overload
    def apply(
        self, element: Element, state: Mapping[str, Tensor], *, kind: str = "value", check: bool = True
    ) -> State: ...

    @overload
    def apply(self, element: Element, state: MappedT, *, kind: str = "value", check: bool = True) -> MappedT: ...

    @explained
    def apply(
        self, element: Element, state: Mapping[str, Tensor] | MappedT, *, kind: str = "value", check: bool = True
    ) -> State | MappedT:
        """Move a network, or a whole population, along its orbit: the result computes the same function.

        Args:
            element: one element, or for a population a batch of as many elements as it has members.
            state: a State, or anything with a `map` like `Population`'s. It is not changed; tensors that no space
                touches are shared.
            kind: what the tensors are, since companions of weights move differently under factors m: "value" (times
                m), "std" (|m|),
                "variance" (m^2), "mask" (not at all), "gradient" (1/m), "squared-gradient" (1/m^2).
            check: whether the numbers of the element are checked; needless for one that this symmetry has made.

        Raises:
            SymmetryError: the element belongs to another symmetry, or shrinks a batch-norm variance below zero.
            SpecError: tensors are missing or have other shapes.
        """
        plan = ExpandedElement(self, element, check=check)
        if isinstance(state, nn.Module):
            raise SymmetryError("apply moves a State or a Population; give model.state_dict() and load the result.")
        if isinstance(state, Mapping):
            return apply(plan, state, kind)
        if plan.members not in (None, len(state)):
            raise SymmetryError(f"{plan.members} elements cannot act on {len(state)} members; draw one per member.")
        moved: MappedT = state.map(lambda stacked, start: apply_block(plan, stacked, start, kind))
        return moved

    # ------------------------------------------------------------------ text

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal Symmetry."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Symmetry:
        """Read what `to_json` or `save` wrote."""
        try:
            data = json.loads(text)
            if data.get("format") == RECORD_FORMAT:
                data = data["record"]["values"]
            if data.get("format") != FORMAT:
                raise ValueError(f"format is {data.get('format')!r}")
            spaces = tuple(Space.from_data(item) for item in data["spaces"])
            shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
            check_symmetry(spaces, shapes)
            rigid = tuple((str(name), int(axis), str(reason)) for name, axis, reason in data["rigid"])
            frozen = {str(name): tuple(map(int, axes)) for name, axes in data.get("frozen", {}).items()}
            companions = {str(name): (leader, how) for name, (leader, how) in data.get("companions", {}).items()}
            check_unmoved(frozen, companions, spaces, shapes)
            return Symmetry(spaces, shapes, rigid, tuple(map(str, data["unexplained"])), frozen, companions)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SymmetryError(
                f"this is no Symmetry in the format {FORMAT!r}: {error}. Write it with to_json() or save()."
            ) from error

    def without(self, removed: Mapping[str, Iterable[str]], reason: str) -> Symmetry:
        """The same symmetry with some freedoms of some spaces taken away, and a sentence that says why."""
        spaces, sentences = [], list(self.unexplained)
        for space in self.spaces:
            gone = set(removed.get(space.name, ()))
            if gone:
                sentences.append(
                    f"{space.name}: {', '.join(sorted(gone))} of its {space.size} units stays rigid: {reason}."
                )
                space = space.without(gone)
            spaces.append(space)
        remaining = [space for space in spaces if space.permutable or space.generators]
        return replace(self, spaces=tuple(remaining), unexplained=tuple(sentences))

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was computed of this symmetry once for all, under any key; no part of it, and never stored."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what can be computed again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("derived", "legs_of")}

    @cached_property
    def legs_of(self) -> dict[str, list[tuple[int, Leg]]]:
        """Tensor name -> (number of the space, leg), parents first."""
        legs: dict[str, list[tuple[int, Leg]]] = {}
        for number, space in enumerate(self.spaces):
            for leg in space.legs:
                legs.setdefault(leg.tensor, []).append((number, leg))
        return legs


def _draw(kind: str, noise: Tensor) -> Tensor:
    if kind.endswith("sign"):
        return torch.where(noise < 0.5, -1.0, 1.0).double()
    return torch.exp(math.log(2) * (noise if kind == "norm-scale" else 2 * noise - 1))


# How many factors of a symmetry are independent: generators of different spaces may act equally on all weights.
#
# Write s_X,g(i) for the logarithm of the factor of generator g of space X at index i = (parents..., unit). It
# multiplies every entry that a leg of X covers by its power, so a combination of factors does nothing iff for all
# entries
#
#     sum over legs X that cover the entry, and generators g, of  power * s_X,g(index of the entry) = 0.
#
# Cut each tensor into regions that every leg covers whole or not at all. In a region this is a sum of functions of
# some of its directions each, zero everywhere. Every function of several indices is in one way a sum over subsets u
# of them of functions that vanish as soon as one of their indices is 0, and a sum of functions is zero iff all these
# terms are. So for every u there is one small system in the unknowns (X, g), with one equation for each region and
# each way in which u stands there, and it counts once for each of the prod over u of (size - 1) values of the indices
# in u that are not 0. The same holds for signs, over GF(2). Cost: the number of legs, not of units.
Dim = tuple[int, bytes]  # an axis, and the number of the unit at each of its positions
Standing = tuple[int, Leg, tuple[Dim, ...]]  # a leg in a region: its space, the leg, where each of its indices stands


def independent_factors(symmetry: Symmetry, kind: str) -> int:
    """Number of independent factors of the generators whose kind ends in `kind`: "scale" or "sign"."""
    modulus = 2 if kind == "sign" else 0
    chosen = {
        number: [place for place, freedom in enumerate(space.generators) if freedom.endswith(kind)]
        for number, space in enumerate(symmetry.spaces)
    }
    regions = [standing for name in symmetry.legs_of for standing in _regions(symmetry, name, chosen)]
    names = _Names(symmetry)
    for standing in regions:
        names.join(standing)
    systems: dict[frozenset[str], list[dict[tuple[int, int], int]]] = {}
    for standing in regions:
        for (form, _), row in _equations(standing, names, chosen).items():
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

    def join(self, standing: list[Standing]) -> None:
        """Two spaces on the same positions number them alike."""
        seen: dict[Dim, str] = {}
        for space, _, dims in standing:
            for name, dim in zip(self.indices[space], dims, strict=True):
                known = self.first(seen.setdefault(dim, name))
                if self.sizes[known] == self.sizes[name]:
                    self._first[self.first(name)] = known


def _regions(symmetry: Symmetry, tensor: str, chosen: dict[int, list[int]]) -> Iterator[list[Standing]]:
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
    parts = [_classes(grids, size) for grids, size in zip(marks, shape, strict=True)]
    for combination in itertools.product(*parts):
        standing = []
        for number, leg in legs:
            held = [combination[grid.axis].get(grid) for grid in (*leg.over, leg.grid, *leg.within)]
            if all(place is not None for place in held):
                dims = [(grid.axis, combination[grid.axis][grid]) for grid in (*leg.over, leg.grid)]
                standing.append((number, leg, tuple(dims)))
        if standing:
            yield standing


def _classes(marks: dict[Grid, Tensor], size: int) -> list[dict[Grid, bytes]]:
    """Positions of an axis that stand in the same grids: for each class, grid -> the units at its positions."""
    classes: dict[tuple[bool, ...], list[int]] = {}
    inside = [(numbers >= 0).tolist() for numbers in marks.values()]
    for position, key in enumerate(zip(*inside, strict=True) if marks else [()] * min(size, 1)):
        classes.setdefault(key, []).append(position)
    return [
        {
            grid: numbers[places].numpy().tobytes()
            for (grid, numbers), held in zip(marks.items(), key, strict=True)
            if held
        }
        for key, places in classes.items()
    ]


def _equations(
    standing: list[Standing], names: _Names, chosen: dict[int, list[int]]
) -> dict[tuple[frozenset[str], frozenset[Dim]], dict[tuple[int, int], int]]:
    """(names of the indices, where they stand) -> powers by (space, generator)."""
    rows: dict[tuple[frozenset[str], frozenset[Dim]], dict[tuple[int, int], int]] = {}
    for number, leg, dims in standing:
        places = [(dim, names.first(name)) for dim, name in zip(dims, names.indices[number], strict=True)]
        for count in range(len(places) + 1):
            for part in itertools.combinations(places, count):
                key = frozenset(name for _, name in part), frozenset(dim for dim, _ in part)
                row = rows.setdefault(key, {})
                for place in chosen[number]:
                    if place < len(leg.powers):
                        row[number, place] = row.get((number, place), 0) + leg.powers[place]
    return rows
