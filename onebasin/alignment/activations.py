"""Matching by activations: units that do the same on the same data belong together.

A reader multiplies what it reads with its weights and sums over the units, so what it reads moves with the inverse of
its weights' factors; what a weight writes moves with its own. Hence, column (p, i) standing for unit i of copy p,

    activations(g.w)[:, (p, i)] = factor[p, i]^q * activations(w)[:, (σ(p), order[p, i])],

with the exponents q given beside the activations. Two things would break this rule, and spaces for which they do are
reported instead: blocks whose insides other spaces rearrange (heads), and samples that run over units of another space
(a token mixer sees one sample per channel). The first is read off the symmetry, the second shows in an experiment.
Both are cured by aligning the other spaces first and naming them as `aligned`.

With a(x) and b(x) the units' activations, C[i, j] = sum over samples x of a_i(x) b_j(x). The order p that maximises
the sum of C[i, p(i)] minimises the distance between the activations, sum over x and i of (a_i(x) - b_p(i)(x))^2.
Unlike weights, activations of one space do not depend on the order of the others, so each space (with all that are
nested in it) is one exact assignment on its cross-covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.alignment.assignment import Assignment, Vertex
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import match_record
from onebasin.errors import InputError, SymmetryError
from onebasin.functional import (
    Activations,
    Call,
    Exponents,
    Inputs,
    Reader,
    Tap,
    batches,
    call_arguments,
    inputs_of,
    select_output,
)
from onebasin.reporting import Record, Result
from onebasin.state import State, as_spec, as_state, check_finite
from onebasin.symmetry import Element, ExpandedElement, Leg, Space, Symmetry, labels, require_symmetry, sources

TOLERANCE = 0.05  # relative error from which samples count as mixed: rounding stays far below, mixing comes near 1

Numbers = dict[int, Tensor]
"""Tensor axis -> what each position adds to the number of a column, -1 where the space has no unit."""


class ActivationReader:
    """Reads the activations of networks of one architecture, as far as they move by the rule above."""

    def __init__(self, model: nn.Module, symmetry: Symmetry, aligned: Collection[str] = ()) -> None:
        """Find the places to observe; units of the spaces `aligned` count as positions."""
        fixed = {symmetry[name].name for name in aligned}
        self.symmetry = symmetry
        self.free = [space.name for space in symmetry.spaces if space.name not in fixed]
        taps, self.movers = observed_places(symmetry, _shapes(model, symmetry), fixed)
        self.reader = Reader(model, taps)
        self.mixed: dict[str, str] | None = None

    def of(self, state: Mapping[str, Tensor]) -> Callable[[Call], Activations]:
        """A function that reads one network; the first call also serves the experiment."""
        read = self.reader.of(state)

        def read_movable(call: Call) -> Activations:
            activations = read(call)
            if self.mixed is None:
                self.mixed = self._experiment(state, call, activations)
            missing = {name: self._reason(name) for name in self.movers if name not in activations.parts} | self.mixed
            parts = {name: parts for name, parts in activations.parts.items() if name not in missing}
            return Activations(parts, missing)

        return read_movable

    def _reason(self, name: str) -> str:
        if not self.movers[name]:
            return "no product or convolution with its weights shows all its units"
        movers = ", ".join(sorted(self.movers[name]))
        return f"its units are not seen apart from {movers}: match it through these, or name them as aligned"

    def _experiment(self, state: Mapping[str, Tensor], call: Call, before: Activations) -> dict[str, str]:
        """Move all free spaces, and name those whose activations do not move by the rule."""
        element = _rolled(self.symmetry, self.free)
        after = self.reader.of(self.symmetry.apply(element, state))(call).values
        wrong = {}
        for name, expected in transformed(before, self.symmetry, element).values.items():
            alike = name in after and after[name].shape == expected.shape
            if not alike or float((after[name] - expected).norm()) > TOLERANCE * float(expected.norm()):
                wrong[name] = "its samples run over units of other spaces: align those first, and name them as aligned"
        return wrong


def transformed(read: Activations, symmetry: Symmetry, element: Element) -> Activations:
    """The activations of g.w from those of w, without running the network."""
    wide = ExpandedElement(symmetry, element)
    moved: dict[str, dict[Exponents, Tensor]] = {}
    for number, space in enumerate(symmetry.spaces):
        source = sources(wide, number)[0]
        for exponents, samples in read.parts.get(space.name, {}).items():
            factor = _factor(wide, space, exponents).to(samples)
            moved.setdefault(space.name, {})[exponents] = samples[:, source.to(samples.device)] * factor
    return Activations(moved, read.missing)


def _factor(wide: ExpandedElement, space: Space, exponents: Exponents) -> Tensor:
    """The product (copies * size,) of powers of the factors of a space and of its parents, for each column."""
    numbers = {other.name: number for number, other in enumerate(wide.symmetry.spaces)}
    sizes = [*[size for _, size in space.parents], space.size]
    index = torch.unravel_index(torch.arange(space.copies * space.size), sizes)
    places = dict(zip([*[name for name, _ in space.parents], space.name], index, strict=True))
    product = torch.ones(space.copies * space.size, dtype=torch.float64)
    for name, powers in exponents:
        other = wide.symmetry.spaces[numbers[name]]
        column = torch.zeros_like(index[0])
        for axis, size in (*other.parents, (name, other.size)):
            column = column * size + places[axis]
        for table, power in zip(wide.factors[numbers[name]], powers, strict=True):
            product = product * table.reshape(-1)[column] ** power
    return product


def _rolled(symmetry: Symmetry, names: Collection[str]) -> Element:
    """An element that moves every unit of some spaces and flips every other sign; scales stay."""
    still = symmetry.identity()
    factors = {name: table.clone() for name, table in still.factors.items()}
    for space in symmetry.spaces:
        for number, kind in enumerate(space.generators):
            if space.name in names and kind.endswith("sign"):
                factors[space.name][number, ..., ::2] = -1
    return Element({name: order.roll(int(name in names), -1) for name, order in still.orders.items()}, factors)


@dataclass(frozen=True, eq=False)
class _ObservedLeg:
    """A leg of a space, with the numbers that give the column of each entry."""

    space: Space
    leg: Leg
    numbers: Numbers

    def mixers(self, others: Iterable[_ObservedLeg], axis: int) -> list[str]:
        """The other spaces that tell entries of one of our columns apart along an axis."""
        columns = self.numbers.get(axis)
        return [other.space.name for other in others if axis in other.numbers and _splits(other.numbers[axis], columns)]

    def under(self, other: _ObservedLeg) -> bool:
        """Whether factors of another space act on our units."""
        if other.leg.axis != self.leg.axis or not any(other.leg.powers):
            return False
        return bool(((self.numbers[self.leg.axis] >= 0) & (other.numbers[self.leg.axis] >= 0)).any())


def _shapes(model: nn.Module, symmetry: Symmetry) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that spaces touch, if they are those of the symmetry."""
    shapes = {name: tensor.shape for name, tensor in as_spec(model).items()}
    for name in symmetry.legs_of:
        if name not in shapes or shapes[name] != tuple(symmetry.shapes.get(name, shapes[name])):
            found = f"is {shapes[name]}" if name in shapes else "does not exist"
            raise SymmetryError(
                f"tensor {name!r}, which this symmetry moves, {found} in {type(model).__name__}: give the Symmetry of "
                "this model, as `discover` finds it"
            )
    return shapes


def observed_places(
    symmetry: Symmetry, shapes: Mapping[str, tuple[int, ...]], aligned: Collection[str]
) -> tuple[list[Tap], dict[str, set[str]]]:
    """Every place where activations might be read, and for each space the others that rearrange its columns."""
    taps: list[Tap] = []
    movers: dict[str, set[str]] = {space.name: set() for space in symmetry.spaces}
    for tensor, legs in symmetry.legs_of.items():
        shape = shapes[tensor]
        legs_here = [_ObservedLeg(symmetry.spaces[n], leg, _numbers(symmetry.spaces[n], leg, shape)) for n, leg in legs]
        for observed in legs_here:
            space, leg = observed.space, observed.leg
            others = [other for other in legs_here if other.space is not space and other.space.name not in aligned]
            above = [other for other in others if observed.under(other)]
            strange = {other.space.name for other in above} - set(dict(space.parents))
            movers[space.name] |= strange | set(observed.mixers(others, leg.axis))
            if strange:
                continue  # a column does not tell which of their factors it has
            mixed = frozenset(axis for axis in range(len(shape)) if observed.mixers(others, axis))
            acting = [*([] if space.name in aligned else [observed]), *above]
            read, written = (tuple((s.space.name, _powers(s.space, s.leg, side)) for s in acting) for side in (-1, 1))
            columns, parts = space.copies * space.size, tuple(observed.numbers.items())
            taps.append(Tap(space.name, columns, tensor, shape, leg.axis, parts, mixed, read, written))
    return taps, movers


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


def _splits(other: Tensor, columns: Tensor | None) -> bool:
    """Whether positions along an axis that belong to one column differ in the number of another space."""
    columns = torch.zeros_like(other) if columns is None else columns
    pairs = torch.stack([columns, other])[:, columns >= 0]
    return len(pairs.unique(dim=1).mT) > len(pairs[0].unique())


KINDS = ("uncentred", "centred", "correlation")
BATCH = 1000
ROUNDING = 32  # a spread of so many units in the last place of the mean is none
Batches = Inputs | Iterable[Inputs]


@dataclass(frozen=True, eq=False)
class CrossCovariance:
    """Sums of products of the units of two networks.

    Attributes:
        matrices: space name -> C (columns, columns) in float64 over all samples; rows are units of the first network,
            columns of the second, each numbered copy * size + unit.
        parts: the same by the exponents with which the samples transform: readers behind different norms see different
            signs, so that a search for signs must not add up their matrices.
        samples: space name -> number of samples.
        missing: space name -> why there is no matrix.
    """

    matrices: Mapping[str, Tensor]
    parts: Mapping[str, Mapping[Exponents, Tensor]]
    samples: Mapping[str, int]
    missing: Mapping[str, str]


def activations(
    model: nn.Module,
    state: Mapping[str, Tensor],
    symmetry: Symmetry,
    inputs: Batches,
    *,
    batch: int = BATCH,
    aligned: Collection[str] = (),
) -> Activations:
    """Read the activations of every space, (samples, copies * size) each.

    Args:
        model: the function; left exactly as it was, and run in evaluation mode.
        state: one network.
        symmetry: of this model.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, cut into batches; or any other iterable
            (a list, a loader), each item of which is one batch of such inputs.
        batch: largest number of examples in one pass.
        aligned: spaces that are aligned already, so that their units count as positions.
    """
    return read_batches(ActivationReader(model, symmetry, aligned).of(state), inputs, batch=batch)


def read_batches(read: Callable[[Call], Activations], inputs: Batches, *, batch: int = BATCH) -> Activations:
    """Read a network on all batches, and join the samples."""
    joined: dict[str, dict[Exponents, list[Tensor]]] = {}
    missing: dict[str, str] = {}
    for one in map(read, _calls(inputs, batch)):
        missing |= one.missing
        for name, exponents, samples in ((n, e, s) for n, parts in one.parts.items() for e, s in parts.items()):
            joined.setdefault(name, {}).setdefault(exponents, []).append(samples)
    readable = {name: parts for name, parts in joined.items() if name not in missing}
    return Activations({name: {e: torch.cat(s) for e, s in parts.items()} for name, parts in readable.items()}, missing)


def cross_covariance(
    model: nn.Module,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    inputs: Batches,
    *,
    kind: str = "uncentred",
    batch: int = BATCH,
    aligned: Collection[str] = (),
) -> CrossCovariance:
    """Stream C[i, j] = sum over samples x of a_i(x) b_j(x), in one pass over the inputs; arguments of `activations`.

    `kind` is "uncentred" as above; "centred" with the means over all samples taken off; "correlation", from -1 to 1,
    and 0 for units that do not change.

    Raises:
        SpecError: a state is not one of this model.
        InputError: there are no inputs, the model cannot be called with them, or activations are not finite.
    """
    if kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, found {kind!r}")
    reader = ActivationReader(model, symmetry, aligned)
    first, second = reader.of(a), reader.of(b)
    sums: dict[str, dict[Exponents, _Sums]] = {}
    missing: dict[str, str] = {}
    for call in _calls(inputs, batch):
        one, other = first(call), second(call)
        missing |= {**one.missing, **other.missing}
        for name, parts in one.parts.items():
            partners = other.parts.get(name, {})
            if {e: len(s) for e, s in parts.items()} != {e: len(s) for e, s in partners.items()}:
                missing[name] = "the two networks show different samples of it for the same inputs"
            for exponents, samples in parts.items() if name not in missing else ():
                _check_finite(name, samples, partners[exponents])
                running = sums.setdefault(name, {}).setdefault(exponents, _Sums())
                running.add(samples, partners[exponents], centred=kind != "uncentred")
    readable = {name: parts for name, parts in sums.items() if name not in missing}
    return CrossCovariance(
        {name: _matrix(list(parts.values()), kind) for name, parts in readable.items()},
        {name: {e: _matrix([running], kind) for e, running in parts.items()} for name, parts in readable.items()},
        {name: sum(running.count for running in parts.values()) for name, parts in readable.items()},
        missing,
    )


def _calls(inputs: Batches, batch: int) -> Iterator[Call]:
    """Arguments of one pass after another."""
    if isinstance(inputs, Tensor | tuple | Mapping):
        yield from (call for _, call in batches(inputs, batch))
        return
    if not isinstance(inputs, Iterable):
        raise InputError(
            f"inputs must be a tensor, a tuple, a dict or an iterable of batches, found {type(inputs).__name__}: "
            "wrap what the model is called with"
        )
    empty = True
    for item in inputs:
        empty = False
        yield call_arguments(item)
    if empty:
        raise InputError("expected at least one batch of inputs, found none: an iterator can be used only once")


def _matrix(parts: list[_Sums], kind: str) -> Tensor:
    """The matrix over samples of several exponents; each part has means of its own."""
    products = torch.stack([sums.products for sums in parts]).sum(0)
    if kind != "correlation":
        return products
    squares = torch.stack([sums.spread() for sums in parts]).sum(0)
    spread = torch.where(squares > 0, squares, torch.inf).sqrt()  # a unit that does not change goes with none
    return products / torch.outer(spread[0], spread[1])


def _check_finite(name: str, *both: Tensor) -> None:
    for which, values in zip(("first", "second"), both, strict=True):
        if not bool(torch.isfinite(values).all()):
            raise InputError(
                f"activations of {name} in the {which} network are not finite: look for NaN or infinity in its weights "
                "and in the inputs, and leave such networks out"
            )


class _Sums:
    """Sums over samples of two networks, formed in the activations' own dtype and gathered in float64.

    Pieces are combined exactly. With n and m samples of means p and q,

        centred products = those of both pieces + (q_a - p_a) (q_b - p_b)^T n m / (n + m),

    and so for the squares (2, units) of both networks.
    """

    def __init__(self) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.count, self.precision = 0, 0.0
        self.products, self.squares, self.means = zero, zero, zero.expand(2, 1)

    def add(self, a: Tensor, b: Tensor, *, centred: bool) -> None:
        """Take in samples (m, units) of both networks."""
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(a.device, dtype)
        old, new = self.count, len(a)
        self.count, self.precision = old + new, torch.finfo(dtype).eps
        if not centred:
            self.products = self.products + _wide(a.mT @ b)
            return
        means = torch.stack([a.mean(0), b.mean(0)])
        a, b = a - means[0], b - means[1]
        gap, weight = _wide(means) - self.means, old * new / self.count
        self.products = self.products + _wide(a.mT @ b) + weight * torch.outer(gap[0], gap[1])
        squares = torch.stack([a.square().sum(0), b.square().sum(0)])
        self.squares = self.squares + _wide(squares) + weight * gap.square()
        self.means = self.means + gap * (new / self.count)

    def spread(self) -> Tensor:
        """The squares, 0 where they are but rounding: the mean of equal numbers is off in their last places."""
        rounding = (ROUNDING * self.precision) ** 2 * self.count * self.means.square()
        return torch.where(self.squares > rounding, self.squares, 0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()  # some devices have no float64


Key = tuple[int, int]  # a space, and a character of it


class ActivationFeatures:
    """Compares networks by the activations of their units on fixed inputs; `Features` of `consensus.py`."""

    def __init__(
        self,
        layout: BlockLayout,
        model: nn.Module,
        inputs: Any,
        *,
        kind: str = "uncentred",
        aligned: Collection[str] = (),
    ) -> None:
        """Kinds: "uncentred" (paper 1), "centred", and "correlation" (unit variance as well).

        Units of the spaces `aligned` are in place already and count as positions.
        """
        if kind not in KINDS:
            raise InputError(f"kind must be one of {', '.join(KINDS)}, found {kind!r}")
        self.layout, self.assignment = layout, Assignment(layout)
        self.model, self.inputs, self.kind = model, inputs, kind
        self._reader = ActivationReader(model, layout.symmetry, aligned)  # its experiment serves all networks
        self.missing: Mapping[str, str] = {}

    def features(self, state: Mapping[str, Tensor]) -> State:
        """Activations (samples, N), centred or normalised as asked, under "character/space"."""
        read = read_batches(self._reader.of(state), self.inputs)
        self.missing = read.missing
        check_finite(read.values, where="the activations of a network")
        sorted_in = by_character(self.assignment, read.parts, torch.cat)
        return {f"{seen}/{self.layout.spaces[s].name}": self._normal(x) for (s, seen), x in sorted_in.items()}

    def second(self, state: Mapping[str, Tensor]) -> ActivationFeatures:
        """Features of the spaces whose units show only once all others are in place, as they are in `state`."""
        self.features(state)
        readable = [space.name for space in self.layout.spaces if space.name not in self.missing]
        return ActivationFeatures(self.layout, self.model, self.inputs, kind=self.kind, aligned=readable)

    def _key(self, text: str) -> Key:
        seen, _, name = text.partition("/")
        return next(s for s, space in enumerate(self.layout.spaces) if space.name == name), int(seen)

    def _normal(self, values: Tensor) -> Tensor:
        if self.kind == "uncentred":
            return values
        values = values - values.mean(0)
        if self.kind == "centred":
            return values
        spread = values.square().mean(0).sqrt()
        return torch.where(spread > 1e-6 * spread.amax(), values / spread.clamp_min(torch.finfo(spread.dtype).tiny), 0)

    def apply(self, vertex: Vertex, features: State) -> State:
        """Rearrange and flip the columns."""
        moved = {}
        for text, values in features.items():
            space, seen = self._key(text)
            turned = values[:, vertex[space].source.to(values.device)]
            chi = self.assignment.chi(vertex[space], space, seen)
            moved[text] = turned if chi is None else turned * chi.to(values)
        return moved

    def match(self, reference: State, features: State, *, full: bool) -> Vertex | None:
        """One assignment per tree; `full` changes nothing, since this is exact already."""
        matrices = {self._key(text): reference[text].mT.to(value) @ value for text, value in features.items()}
        vertex = _solve(self.assignment, matrices)
        still = all(
            torch.equal(place.source, torch.arange(len(place.source))) and bool((place.signs == 1).all())
            for place in vertex
        )
        return None if still else vertex


@dataclass(frozen=True, eq=False, repr=False)
class ActivationMatch(Result):
    """The result of `match_activations`.

    Attributes:
        element: moves b onto a.
        before: sum over spaces and units of C[i, i], the agreement of activations as they were.
        after: the same for the moved network, the largest possible for each space.
        missing: space name -> why its activations could not be read; it stays where it is.
    """

    element: Element
    before: float
    after: float
    missing: Mapping[str, str]

    def record(self) -> Record:
        """Agreement of activations before and after, and how far units were moved."""
        text = [f"The agreement of activations goes from {self.before:,.4g} to {self.after:,.4g}."]
        text += [f"{name} stays where it is: {why}." for name, why in self.missing.items()]
        pairs = {"agreement of activations": (self.before, self.after)}
        values = {"before": self.before, "after": self.after, "missing": dict(self.missing)}
        title = "Match of two networks by their activations"
        return match_record("activation-match", title, text, pairs, self.element, values)


def match_activations(
    model: nn.Module,
    a: Mapping[str, Tensor] | nn.Module,
    b: Mapping[str, Tensor] | nn.Module,
    symmetry: Symmetry,
    inputs: Any,
    *,
    kind: str = "uncentred",
) -> ActivationMatch:
    """Find the permutations and signs that bring the activations of b closest to those of a, in one pass over data.

    Args:
        model: the function; left as it was.
        a: the network that stays; a State or a module.
        b: the network that moves. Neither is changed.
        symmetry: found by `discover` for the model. Scales are left as they are, and so are signs that activations do
            not show (before a batch norm).
        inputs: as in `predict`, or another iterable of batches of inputs.
        kind: C[i, j] = sum_x a_i(x) b_j(x) as in paper 1 ("uncentred"), with means taken off ("centred"), or the
            correlation.

    Returns:
        The element, and the agreement before and after. Spaces whose units show only once others are aligned take a
        second pass.
    """
    select_output(model)
    require_symmetry(symmetry)
    inputs = inputs_of(inputs, model)
    layout = BlockLayout.of(symmetry)
    left, moved = as_state(a), as_state(b)
    for where, state in (("the first network", left), ("the second network", moved)):
        layout.check(state, where=where)
    assignment, element = Assignment(layout), symmetry.identity()
    aligned: list[str] = []
    before = after = 0.0
    missing: Mapping[str, str] = {}
    again = isinstance(inputs, Tensor | tuple | Mapping | list)  # any other iterable is used up by the first pass
    for _ in range(2 if again else 1):
        covariance = cross_covariance(model, left, moved, symmetry, inputs, kind=kind, aligned=aligned)
        matrices = by_character(assignment, covariance.parts, sum)
        vertex = _solve(assignment, matrices)
        before += _agreement(assignment, matrices, assignment.identity())
        after += _agreement(assignment, matrices, vertex)
        step = assignment.element(vertex)
        element, moved = symmetry.compose(step, element), symmetry.apply(step, moved)
        missing = covariance.missing
        aligned = [space.name for space in symmetry.spaces if space.name not in missing]
        if not missing or not aligned:
            break
    return ActivationMatch(element, before, after, missing)


def by_character(
    assignment: Assignment, parts: Mapping[str, Mapping[Exponents, Tensor]], join: Callable[[list[Tensor]], Any]
) -> dict[Key, Tensor]:
    """Join the tensors of each space that see the same signs: (space, number of the character) -> tensor."""
    sorted_in: dict[Key, list[Tensor]] = {}
    for space, kind in enumerate(assignment.spaces):
        for exponents, tensor in parts.get(kind.name, {}).items():
            powers = dict(exponents).get(kind.name, (0,) * len(kind.generators))
            seen = assignment.character(space, powers)
            if seen in assignment.characters[space]:
                sorted_in.setdefault((space, assignment.characters[space].index(seen)), []).append(tensor)
    return {key: join(tensors) for key, tensors in sorted_in.items()}


def _solve(assignment: Assignment, matrices: Mapping[Key, Tensor]) -> Vertex:
    """The vertex that maximises the sum of matched entries, tree by tree; what has no matrix stays."""
    gains, vertex = [], assignment.identity()
    for space in range(len(assignment.spaces)):
        n = assignment.size(space)
        table = torch.zeros(len(assignment.characters[space]), n, n, dtype=torch.float64)
        for seen in range(len(table)):
            if (space, seen) in matrices:
                table[seen] = matrices[space, seen].double().cpu()
        gains.append(table)
    touched = {space for space, _ in matrices}
    for root in assignment.roots:
        if touched & set(assignment.family(root)):
            for member, place in assignment.best(gains, root)[0].items():
                vertex[member] = place
    return vertex


def _agreement(assignment: Assignment, matrices: Mapping[Key, Tensor], vertex: Vertex) -> float:
    """Sum of C[i, source(i)] chi(i) over all spaces."""
    return sum(assignment.taken(matrix, vertex[space], space, seen) for (space, seen), matrix in matrices.items())
