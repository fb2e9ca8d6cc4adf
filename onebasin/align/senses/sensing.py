"""Where the activations of each space are read, and how they move.

A reader multiplies what it reads with its weights and sums over the units, so what it reads moves with the inverse of
its weights' factors; what a weight writes moves with its own. Hence, column (p, i) standing for unit i of copy p,

    activations(g.w)[:, (p, i)] = factor[p, i]^q * activations(w)[:, (σ(p), order[p, i])],

with the exponents q given beside the activations. Two things would break this rule, and spaces for which they do are
reported instead: blocks whose insides other spaces rearrange (heads), and samples that run over units of another space
(a token mixer sees one sample per channel). The first is read off the symmetry, the second shows in an experiment.
Both are cured by aligning the other spaces first and naming them as `settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onebasin.calling import Call
from onebasin.errors import SymmetryError
from onebasin.predict.activations import Activations, Reader
from onebasin.predict.taps import Exponents, Tap
from onebasin.state import as_spec
from onebasin.symmetry import Element, Leg, Space, Symmetry
from onebasin.symmetry.act import labels
from onebasin.symmetry.algebra import Wide, sources

TOLERANCE = 0.05  # relative error from which samples count as mixed: rounding stays far below, mixing comes near 1

Numbers = dict[int, Tensor]
"""Tensor axis -> what each position adds to the number of a column, -1 where the space does not stand."""


class Senses:
    """Reads the activations of networks of one architecture, as far as they move by the rule above."""

    def __init__(self, model: nn.Module, symmetry: Symmetry, settled: Collection[str] = ()) -> None:
        """Prepare the taps; units of the spaces `settled` count as positions."""
        fixed = {symmetry[name].name for name in settled}
        self.symmetry = symmetry
        self.free = [space.name for space in symmetry.spaces if space.name not in fixed]
        made, self.movers = taps(symmetry, _shapes(model, symmetry), fixed)
        self.reader = Reader(model, made)
        self.mixed: dict[str, str] | None = None

    def of(self, state: Mapping[str, Tensor]) -> Callable[[Call], Activations]:
        """A function that reads one network; whatever is read first also serves the experiment."""
        read = self.reader.of(state)

        def one(call: Call) -> Activations:
            found = read(call)
            if self.mixed is None:
                self.mixed = self._experiment(state, call, found)
            missing = {name: self._reason(name) for name in self.movers if name not in found.parts} | self.mixed
            return Activations({name: parts for name, parts in found.parts.items() if name not in missing}, missing)

        return one

    def _reason(self, name: str) -> str:
        if not self.movers[name]:
            return "no product or convolution with its weights shows all its units"
        others = ", ".join(sorted(self.movers[name]))
        return (
            f"its units are not seen apart from {others}: match it through these, or name them as settled once aligned"
        )

    def _experiment(self, state: Mapping[str, Tensor], call: Call, before: Activations) -> dict[str, str]:
        """Move everything that is free, and see whether the activations move as they should."""
        element = _stirring(self.symmetry, self.free)
        after = self.reader.of(self.symmetry.apply(element, state))(call).values
        wrong = {}
        for name, expected in transformed(before, self.symmetry, element).values.items():
            alike = name in after and after[name].shape == expected.shape
            if not alike or float((after[name] - expected).norm()) > TOLERANCE * float(expected.norm()):
                wrong[name] = "its samples run over units of other spaces: align those first, and name them as settled"
        return wrong


def transformed(read: Activations, symmetry: Symmetry, element: Element) -> Activations:
    """The activations of g.w from those of w, without running the network."""
    wide = Wide(symmetry, element)
    made: dict[str, dict[Exponents, Tensor]] = {}
    for number, space in enumerate(symmetry.spaces):
        source = sources(wide, number)[0]
        for exponents, samples in read.parts.get(space.name, {}).items():
            factor = _factor(wide, space, exponents).to(samples)
            made.setdefault(space.name, {})[exponents] = samples[:, source.to(samples.device)] * factor
    return Activations(made, read.missing)


def _factor(wide: Wide, space: Space, exponents: Exponents) -> Tensor:
    """What the columns (copies * size,) of a space are multiplied with: powers of its own and its parents' factors."""
    numbers = {other.name: number for number, other in enumerate(wide.symmetry.spaces)}
    sizes = [*[size for _, size in space.parents], space.size]
    index = torch.unravel_index(torch.arange(space.copies * space.size), sizes)
    places = dict(zip([*[name for name, _ in space.parents], space.name], index, strict=True))
    made = torch.ones(space.copies * space.size, dtype=torch.float64)
    for name, powers in exponents:
        other = wide.symmetry.spaces[numbers[name]]
        column = torch.zeros_like(index[0])
        for axis, size in (*other.parents, (name, other.size)):
            column = column * size + places[axis]
        for table, power in zip(wide.factors[numbers[name]], powers, strict=True):
            made = made * table.reshape(-1)[column] ** power
    return made


def _stirring(symmetry: Symmetry, names: Collection[str]) -> Element:
    """An element that moves every unit of some spaces and flips every other sign; scales stay."""
    still = symmetry.identity()
    factors = {name: table.clone() for name, table in still.factors.items()}
    for space in symmetry.spaces:
        for number, kind in enumerate(space.generators):
            if space.name in names and kind.endswith("sign"):
                factors[space.name][number, ..., ::2] = -1
    return Element({name: order.roll(int(name in names), -1) for name, order in still.orders.items()}, factors)


# ---------------------------------------------------------------------- taps


@dataclass(frozen=True, eq=False)
class _Stand:
    """A leg of a space, with the numbers that give the column of each entry."""

    space: Space
    leg: Leg
    numbers: Numbers

    def mixers(self, others: Iterable[_Stand], axis: int) -> list[str]:
        """The other spaces that tell entries of one of our columns apart along an axis."""
        own = self.numbers.get(axis)
        return [other.space.name for other in others if axis in other.numbers and _splits(other.numbers[axis], own)]

    def under(self, other: _Stand) -> bool:
        """Whether factors of another space act on our units."""
        if other.leg.axis != self.leg.axis or not any(other.leg.powers):
            return False
        return bool(((self.numbers[self.leg.axis] >= 0) & (other.numbers[self.leg.axis] >= 0)).any())


def _shapes(model: nn.Module, symmetry: Symmetry) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that spaces touch, if they are those of the symmetry."""
    held = {name: tensor.shape for name, tensor in as_spec(model).items()}
    for name in symmetry.legs_of:
        if name not in held or held[name] != tuple(symmetry.shapes.get(name, held[name])):
            found = f"is {held[name]}" if name in held else "does not exist"
            raise SymmetryError(
                f"tensor {name!r}, which this symmetry moves, {found} in {type(model).__name__}: give the Symmetry of "
                "this model, as `discover` finds it"
            )
    return held


def taps(
    symmetry: Symmetry, shapes: Mapping[str, tuple[int, ...]], settled: Collection[str]
) -> tuple[list[Tap], dict[str, set[str]]]:
    """Every place where activations might be read, and for each space the others that stand in the way."""
    made: list[Tap] = []
    movers: dict[str, set[str]] = {space.name: set() for space in symmetry.spaces}
    for tensor, legs in symmetry.legs_of.items():
        shape = shapes[tensor]
        stands = [_Stand(symmetry.spaces[n], leg, _numbers(symmetry.spaces[n], leg, shape)) for n, leg in legs]
        for stand in stands:
            space, leg = stand.space, stand.leg
            others = [other for other in stands if other.space is not space and other.space.name not in settled]
            above = [other for other in others if stand.under(other)]
            strange = {other.space.name for other in above} - set(dict(space.parents))
            movers[space.name] |= strange | set(stand.mixers(others, leg.axis))
            if strange:
                continue  # a column does not tell which of their factors it has
            mixed = frozenset(axis for axis in range(len(shape)) if stand.mixers(others, axis))
            acting = [*([] if space.name in settled else [stand]), *above]
            read, written = (tuple((s.space.name, _powers(s.space, s.leg, side)) for s in acting) for side in (-1, 1))
            columns, parts = space.copies * space.size, tuple(stand.numbers.items())
            made.append(Tap(space.name, columns, tensor, shape, leg.axis, parts, mixed, read, written))
    return made, movers


def _numbers(space: Space, leg: Leg, shape: tuple[int, ...]) -> Numbers:
    """Column of an entry = sum over axes of these numbers, in the order (parents..., unit)."""
    grids, stride = [(leg.grid, 1)], space.size
    for (_, size), grid in reversed(list(zip(space.parents, leg.over, strict=True))):
        grids.append((grid, stride))
        stride *= size
    numbers: Numbers = {}
    for grid, step in [*grids, *[(grid, 0) for grid in leg.within]]:
        label = labels(grid, shape[grid.axis])
        old = numbers.get(grid.axis, torch.zeros_like(label))
        numbers[grid.axis] = torch.where((label < 0) | (old < 0), -1, old + step * label)
    return numbers


def _powers(space: Space, leg: Leg, side: int) -> tuple[int, ...]:
    """Exponents of what is written (side 1) or read (side -1); those of signs are 0 or 1."""
    pairs = zip(space.generators, leg.powers, strict=True)
    return tuple(power % 2 if kind.endswith("sign") else side * power for kind, power in pairs)


def _splits(other: Tensor, own: Tensor | None) -> bool:
    """Whether positions along an axis with the same number of our own differ in that of another space."""
    own = torch.zeros_like(other) if own is None else own
    pairs = torch.stack([own, other])[:, own >= 0]
    return len(pairs.unique(dim=1).mT) > len(pairs[0].unique())
