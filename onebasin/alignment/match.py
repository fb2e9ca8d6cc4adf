"""Two networks: the element that moves one onto the other.

An element enters the overlap <a, g.b> through one matrix per space and character, X_c[x, y] = chi_c(x) if coordinate x
comes from y. Each block of a tensor with k axes contributes a polynomial of degree k,

    sum  A[x1, ..., xk, r]  X[x1, y1] ... X[xk, yk]  B[y1, ..., yk, r],

which also makes sense between the vertices, for convex combinations of such matrices. Blocks with one axis are
linear: their Gram matrices are formed once.

Coordinate ascent from a vertex gets stuck: with everything else misplaced, the best place of one space means little.
At the barycentre of the group nothing is assumed. From there spaces are placed one by one (`grow`) or all together by
Frank-Wolfe (`descend`), guided first by what is rigid, inputs and outputs, and then by each other; the result is
polished one space after the other.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from onebasin.alignment.ascent import FLAT, NOISE, STEPS, SWEEPS, Ascent
from onebasin.alignment.assignment import Assignment, SpacePlacement, Vertex
from onebasin.alignment.balance import balancing_scales
from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.alignment.transpositions import transpositions
from onebasin.errors import InputError, SpecError
from onebasin.parallel import threads_for
from onebasin.reporting import Axis, Column, Figure, Panel, Record, Result, Series, Table, cells_of, result_record
from onebasin.state import State, as_state, check_finite, is_statistic
from onebasin.symmetry import Element, Symmetry

Point = SpacePlacement | Tensor  # of a space: a vertex, or relaxed matrices (characters, N, N)


@dataclass(frozen=True)
class Contact:
    """An axis of a block as the overlap sees it: its space, the number of its character there, its dims."""

    space: int
    character: int
    dims: tuple[int, ...]


@dataclass
class Piece:
    """Blocks with the same axes, as arrays of both networks.

    They are (N_1, ..., N_k, rest) and contact i has the dim (i,), unless axes share a dim (in a grouped convolution
    both know the group): then the block's own dims are kept.
    """

    contacts: tuple[Contact, ...]
    a: Tensor
    b: Tensor

    @property
    def entangled(self) -> bool:
        """Whether axes share dims."""
        return any(contact.dims != (number,) for number, contact in enumerate(self.contacts))


class Overlap:
    """f(X) for a fixed pair of networks; the first may be any State, a sum of networks for instance.

    Values are in units of the largest weights of both, `unit`.
    """

    def __init__(
        self,
        layout: BlockLayout,
        assignment: Assignment,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        *,
        std: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Cut both networks into blocks; computing is done in float32, or in float64 if `b` is.

        The overlap of standard deviations `std` is added: they move like weights but see no sign, and the assignment
        must be made with `plain=True`.
        """
        self.assignment = assignment
        example = b[layout.tensors[0]] if layout.tensors else torch.zeros(0)
        self.dtype, self.device = torch.promote_types(torch.float32, example.dtype), example.device
        self.linear = [
            torch.zeros(len(seen), n, n, dtype=self.dtype, device=self.device)
            for seen, n in zip(assignment.characters, map(assignment.size, range(len(layout.spaces))), strict=True)
        ]
        arrays: dict[tuple[Contact, ...], list[tuple[Tensor, Tensor]]] = {}
        sizes = _largest(layout, a), _largest(layout, b)  # products of very small or large weights would leave float32
        self.unit = sizes[0] * sizes[1]
        for left, right in [(a, b), *([std] if std else [])]:
            for block in layout.blocks:
                axes = _moving_axes(assignment, block)
                if axes:
                    pair = [
                        block.take((x[block.tensor] / size)[None].to(self.device, self.dtype))[0]
                        for x, size in zip((left, right), sizes, strict=True)
                    ]
                    self._add_block(axes, pair, arrays, signed=left is a)
        self.pieces = [
            Piece(contacts, torch.cat([x for x, _ in pairs], -1), torch.cat([y for _, y in pairs], -1))
            for contacts, pairs in arrays.items()
        ]
        self.degree = max((len(piece.contacts) for piece in self.pieces), default=1)

    @cached_property
    def ascent(self) -> Ascent | None:
        """What climbs between vertices where every tensor joins at most two trees; None where some do otherwise."""
        if self.device.type != "cpu" or not Ascent.suits(self.assignment, self.pieces):
            return None
        return Ascent(self.assignment, self.linear, self.pieces)

    def _add_block(
        self,
        axes: list[BlockAxis],
        pair: list[Tensor],
        arrays: dict[tuple[Contact, ...], list[tuple[Tensor, Tensor]]],
        *,
        signed: bool,
    ) -> None:
        """Add a block to the linear part, or to the pieces of its kind."""
        dims = [axis.dims for axis in axes]
        characters = [self._character(axis, signed) for axis in axes]
        if len(set().union(*dims)) == sum(map(len, dims)):
            pair = [_flat(array, dims) for array in pair]
            dims = [(number,) for number in range(len(axes))]
        if len(axes) == 1:
            self.linear[axes[0].space][characters[0]] += pair[0] @ pair[1].T
            return
        contacts = tuple(
            Contact(axis.space, character, where) for axis, character, where in zip(axes, characters, dims, strict=True)
        )
        arrays.setdefault(contacts, []).append((pair[0], pair[1]))

    def _character(self, axis: BlockAxis, signed: bool) -> int:
        seen = self.assignment.character(axis.space, axis.powers)
        return self.assignment.characters[axis.space].index(seen if signed else (0,) * len(seen))

    def gradient(self, points: Sequence[Point], wanted: Sequence[int] | None = None) -> list[Tensor]:
        """Derivative by each space's matrices: (characters, N, N); left at the linear part where not wanted."""
        gains = list(self.linear)
        for piece in self.pieces:
            for number, contact in enumerate(piece.contacts):
                if wanted is None or contact.space in wanted:
                    fresh = gains[contact.space] is self.linear[contact.space]
                    gains[contact.space] = self._add_slope(gains[contact.space], fresh, piece, number, points)
        return gains

    def _add_slope(self, gains: Tensor, fresh: bool, piece: Piece, number: int, points: Sequence[Point]) -> Tensor:
        """Add a piece's derivative, into the same memory unless that is the linear part's."""
        character = piece.contacts[number].character
        if fresh and len(gains) == 1 and not piece.entangled:
            left, right = self._sides(piece, number, points)
            return torch.addmm(gains[0], left, right.T)[None]
        gains = gains.clone() if fresh else gains
        if piece.entangled:
            gains[character] += self._slope(piece, number, points)
        else:
            left, right = self._sides(piece, number, points)
            gains[character].addmm_(left, right.T)
        return gains

    def value(self, points: Sequence[Point]) -> float:
        """The overlap at a point."""
        vertex = [point for point in points if isinstance(point, SpacePlacement)]
        if self.ascent is not None and len(vertex) == len(points):
            return self.ascent.value(vertex)
        total = self.dot(self.linear, points)
        for piece in self.pieces:
            slope = self._slope(piece, 0, points)
            contact = piece.contacts[0]
            total += _entry(slope, points[contact.space], contact.character, self.assignment, contact.space)
        return total

    def _slope(self, piece: Piece, number: int, points: Sequence[Point]) -> Tensor:
        """Derivative of a piece by the matrix of one of its axes: (N, N)."""
        if piece.entangled:
            return self._slope_entangled(piece, number, points)
        left, right = self._sides(piece, number, points)
        return left @ right.T

    def _sides(self, piece: Piece, number: int, points: Sequence[Point]) -> tuple[Tensor, Tensor]:
        """Both networks as (N, everything else), the second moved along all other axes."""
        moved = piece.b
        for other, contact in enumerate(piece.contacts):
            if other != number:
                moved = self._move(moved, other, contact, points[contact.space])
        n = moved.shape[number]
        return piece.a.movedim(number, 0).reshape(n, -1), moved.movedim(number, 0).reshape(n, -1)

    def _move(self, array: Tensor, dim: int, contact: Contact, point: Point) -> Tensor:
        """Apply one space to one dim."""
        if isinstance(point, Tensor):
            turned: Tensor = torch.tensordot(point[contact.character], array, ([1], [dim]))
            return turned.movedim(0, dim)
        moved = array.index_select(dim, point.source.to(self.device))
        chi = self.assignment.chi(point, contact.space, contact.character)
        if chi is None:
            return moved
        return moved * chi.to(moved).reshape([-1 if axis == dim else 1 for axis in range(moved.dim())])

    def _slope_entangled(self, piece: Piece, number: int, points: Sequence[Point]) -> Tensor:
        """The same where axes share dims: a lower letter per dim in new coordinates, an upper one in old ones."""
        count = piece.a.dim() - 1
        low, high = string.ascii_lowercase[:count], string.ascii_uppercase[:count]
        terms, arrays = [low + "z", high + "z"], [piece.a, piece.b]
        for other, contact in enumerate(piece.contacts):
            if other != number:
                sizes = [piece.a.shape[dim] for dim in contact.dims]
                matrix = self.matrix(contact.space, points[contact.space])[contact.character]
                arrays.append(matrix.reshape(*sizes, *sizes))
                terms.append("".join(low[dim] for dim in contact.dims) + "".join(high[dim] for dim in contact.dims))
        mine = piece.contacts[number].dims
        result = "".join(low[dim] for dim in mine) + "".join(high[dim] for dim in mine)
        slope = torch.einsum(",".join(terms) + "->" + result, *arrays)
        return slope.reshape(self.linear[piece.contacts[number].space].shape[1:])

    def matrix(self, space: int, point: Point) -> Tensor:
        """A point as matrices (characters, N, N)."""
        if isinstance(point, Tensor):
            return point
        matrices = torch.zeros_like(self.linear[space])
        rows = torch.arange(len(point.source), device=self.device)
        for character in range(len(matrices)):
            chi = self.assignment.chi(point, space, character)
            matrices[character, rows, point.source.to(self.device)] = 1.0 if chi is None else chi.to(matrices)
        return matrices

    def blend(self, space: int, old: Point, new: Point, length: float) -> Tensor:
        """(1 - length) old + length new, as matrices."""
        matrices = self.matrix(space, old) * (1 - length)
        if isinstance(new, Tensor):
            return matrices.add_(new, alpha=length)
        rows, columns = torch.arange(len(new.source), device=self.device), new.source.to(self.device)
        for character in range(len(matrices)):
            chi = self.assignment.chi(new, space, character)
            matrices[character, rows, columns] += length if chi is None else length * chi.to(matrices)
        return matrices

    def inner(self, gains: Sequence[Tensor], points: Sequence[Point], space: int) -> float:
        """<gains, point> of one space."""
        return sum(
            _entry(part, points[space], character, self.assignment, space)
            for character, part in enumerate(gains[space])
        )

    def dot(self, gains: Sequence[Tensor], points: Sequence[Point]) -> float:
        """<gains, point> of all spaces."""
        return sum(self.inner(gains, points, space) for space in range(len(points)))


def _entry(matrix: Tensor, point: Point, character: int, assignment: Assignment, space: int) -> float:
    """<matrix, X_character>."""
    if isinstance(point, Tensor):
        return float(torch.dot(matrix.reshape(-1), point[character].reshape(-1)))
    return assignment.taken(matrix, point, space, character)


def _largest(layout: BlockLayout, state: Mapping[str, Tensor]) -> float:
    """The largest weight, 1 if there is none."""
    sizes = [float(state[name].abs().max()) for name in layout.tensors if state[name].numel()]
    return max(sizes, default=0.0) or 1.0


def _moving_axes(assignment: Assignment, block: TensorBlock) -> list[BlockAxis]:
    """Axes of spaces that move. A parent without a sign here is left to the children that carry its index."""
    axes = [axis for axis in block.axes if assignment.moves[axis.space]]
    return [
        axis
        for axis in axes
        if any(assignment.character(axis.space, axis.powers))
        or not any(set(axis.dims) < set(other.dims) for other in axes)
    ]


def _flat(array: Tensor, dims: list[tuple[int, ...]]) -> Tensor:
    """(*dims, rest) -> (N_1, ..., N_k, everything else)."""
    used = [dim for group in dims for dim in group]
    others = [dim for dim in range(array.dim()) if dim not in used]
    sizes = [torch.Size([array.shape[dim] for dim in group]).numel() for group in dims]
    return array.permute(*used, *others).reshape(*sizes, -1)


_POLISHED = 5e-3  # a grown vertex that the polish improves by less was hardly improved
_TIE = 1e-7  # overlaps closer than this, relatively, are equal up to rounding
_NARROW = 256  # up to this width a descent takes a tenth of a second
# Up to this width a descent costs a few per cent of a match. Ended early it lost up to 3 % of the overlap in 4 of 750
# pairs of widths 1 to 9, and none when it went on.
_SMALL = 32


def is_better(value: float, than: float) -> bool:
    """Whether an overlap is larger by more than rounding."""
    return value > than + _TIE * abs(than)


@dataclass(frozen=True)
class SearchResult:
    """The vertex of a search, the overlap there, Frank-Wolfe steps, the last gap, and coordinate sweeps."""

    vertex: Vertex
    value: float
    steps: int
    gap: float
    sweeps: int


def barycentre(overlap: Overlap) -> list[Tensor]:
    """The mean of the whole group: 1/n inside what can be exchanged, 0 for a character that sees a sign."""
    points = []
    assignment = overlap.assignment
    for number in range(len(assignment.spaces)):
        point = torch.zeros_like(overlap.linear[number])
        same = assignment.exchangeable[number].to(point)
        for character, seen in enumerate(assignment.characters[number]):
            if not any(seen):
                point[character] = same / same.sum(1, keepdim=True)
        points.append(point)
    return points


def descend(overlap: Overlap, start: Sequence[Point]) -> tuple[list[Point], int, float]:
    """Frank-Wolfe with an exact line search; returns the last point, the number of steps and the last gap.

    The gap max_S <grad f(X), S - X> bounds what any point could gain if f were linear around X.
    """
    return _quadratic(overlap, list(start)) if overlap.degree <= 2 else _polynomial(overlap, list(start))


def _quadratic(overlap: Overlap, points: list[Point]) -> tuple[list[Point], int, float]:
    """With f = <L, X> + Q(X, X) the gradient is affine: one gradient at a vertex per step is enough.

    Also <grad f(S), X> = <grad f(X), S> - <L, S> + <L, X>, so that no inner product of full matrices is needed.
    """
    gains = overlap.gradient(points)
    along, plain = overlap.dot(gains, points), overlap.dot(overlap.linear, points)  # <grad f(X), X> and <L, X>
    gap = 0.0
    for step in range(STEPS):
        targets, best = _targets(overlap, gains, points)
        gap = best - along
        if gap <= FLAT * 0.5 * abs(along + plain):
            return points, step, gap
        ahead = overlap.gradient(targets)
        there, flat = overlap.dot(ahead, targets), overlap.dot(overlap.linear, targets)
        back = best - flat + plain
        bend = 0.5 * (there - back - gap)
        length = 1.0 if 2 * bend >= -gap else -gap / (2 * bend)
        rest = 1.0 - length
        points = _blend(overlap, points, targets, length)
        gains = [torch.lerp(old, new, length) for old, new in zip(gains, ahead, strict=True)]
        along = rest**2 * along + rest * length * (best + back) + length**2 * there
        plain = rest * plain + length * flat
    return points, STEPS, gap


def _polynomial(overlap: Overlap, points: list[Point]) -> tuple[list[Point], int, float]:
    """The same for tensors with three or more moving axes: the line search fits the polynomial along the segment."""
    gap = 0.0
    for step in range(STEPS):
        gains = overlap.gradient(points)
        targets, best = _targets(overlap, gains, points)
        along = overlap.dot(gains, points)
        gap = best - along
        if gap <= FLAT * 0.5 * abs(along + overlap.dot(overlap.linear, points)):
            return points, step, gap
        points = _blend(overlap, points, targets, _longest(overlap, points, targets))
    return points, STEPS, gap


def _targets(overlap: Overlap, gains: list[Tensor], points: list[Point]) -> tuple[list[Point], float]:
    """The best vertex S for the gradient, and <gains, S>; a tree that feels no force stays where it is."""
    targets, total = list(points), 0.0
    for root in overlap.assignment.roots:
        places, value = overlap.assignment.best(gains, root)
        total += value
        for space, place in places.items() if value else ():
            targets[space] = place
    return targets, total


def _blend(overlap: Overlap, points: list[Point], targets: list[Point], length: float) -> list[Point]:
    if length >= 1.0:
        return list(targets)
    return [
        old if old is new else overlap.blend(space, old, new, length)
        for space, (old, new) in enumerate(zip(points, targets, strict=True))
    ]


def _longest(overlap: Overlap, points: list[Point], targets: list[Point]) -> float:
    """The best step in (0, 1] of the polynomial along the segment, fitted through degree + 1 of its values."""
    at = np.linspace(0.0, 1.0, overlap.degree + 1)
    values = [overlap.value(_blend(overlap, points, targets, float(t))) for t in at]
    polynomial = np.polynomial.Polynomial.fit(at, values, overlap.degree)
    turns = polynomial.deriv().roots()
    inside = [float(t) for t in turns[abs(turns.imag) < 1e-9].real if 0 < float(t) < 1]
    return max([*inside, 1.0], key=polynomial)


def nearest(overlap: Overlap, points: Sequence[Point]) -> Vertex:
    """The vertex closest to a relaxed point."""
    vertex: dict[int, SpacePlacement] = {}
    matrices = [overlap.matrix(space, point) for space, point in enumerate(points)]
    for root in overlap.assignment.roots:
        vertex.update(overlap.assignment.best(matrices, root)[0])
    return [vertex[space] for space in range(len(points))]


def polish(overlap: Overlap, start: Vertex) -> tuple[Vertex, float, int]:
    """Coordinate ascent: solve one tree after the other until none gains; returns vertex, overlap and sweeps."""
    if overlap.ascent is not None:
        vertex, _, sweeps = overlap.ascent.polish(start, overlap.value(start))
        return vertex, overlap.value(vertex), sweeps
    assignment, vertex = overlap.assignment, list(start)
    neighbours = _neighbours(overlap)
    waiting = set(assignment.roots)
    value, sweeps = overlap.value(vertex), 0
    while waiting and sweeps < SWEEPS:
        sweeps += 1
        for root in [root for root in assignment.roots if root in waiting]:
            waiting.discard(root)
            family = assignment.family(root)
            gains = overlap.gradient(vertex, family)
            before = sum(overlap.inner(gains, vertex, space) for space in family)
            places, after = assignment.best(gains, root)
            least = NOISE * (abs(value) + abs(before))
            if after - before <= least:
                continue
            moved = [places.get(space, place) for space, place in enumerate(vertex)]
            # A tree that meets itself in a tensor is not linear in its own place: then only the overlap itself counts.
            reached = overlap.value(moved) if root in neighbours[root] else value + after - before
            if reached - value > least:
                vertex, value = moved, reached
                waiting |= neighbours[root]
    return vertex, overlap.value(vertex), sweeps


def _neighbours(overlap: Overlap) -> dict[int, set[int]]:
    """For each tree the trees it shares a piece with."""
    assignment = overlap.assignment
    root_of = {space: root for root in assignment.roots for space in assignment.family(root)}
    neighbours: dict[int, set[int]] = {root: set() for root in assignment.roots}
    for piece in overlap.pieces:
        roots = [root_of[contact.space] for contact in piece.contacts]
        for number, root in enumerate(roots):
            neighbours[root] |= set(roots[:number] + roots[number + 1 :])
    return neighbours


def grow(overlap: Overlap) -> Vertex:
    """Place one tree after the other, in the order of the network, while those to come stay at the barycentre.

    A tree is placed by what is rigid and by the trees before it; those behind count by their mean. One assignment
    per tree, and for feed-forward networks a better start than any vertex.
    """
    points: list[Point] = list(barycentre(overlap))
    for root in overlap.assignment.roots:
        gains = overlap.gradient(points, overlap.assignment.family(root))
        for space, place in overlap.assignment.best(gains, root)[0].items():
            points[space] = place
    return [point for point in points if isinstance(point, SpacePlacement)]


def search(
    overlap: Overlap, *, restarts: int = 0, generator: torch.Generator | None = None, thorough: bool = False
) -> SearchResult:
    """Grow a vertex; descend from the barycentre as well where that is cheap or needed; polish; keep the best.

    Growing misjudges spaces that meet themselves in a tensor (recurrent weights): there Frank-Wolfe is needed. In
    wide feed-forward networks it takes ten times as long as growing and seldom ends higher: there it runs if the
    search is `thorough`, or together with `restarts` from points between the barycentre and random vertices.
    """
    vertex, value, sweeps, grown = _grow_and_polish(overlap)
    best = SearchResult(vertex, value, 0, 0.0, sweeps)
    if overlap.degree == 1:
        return best  # a single assignment per tree: this is the optimum
    neighbours = _neighbours(overlap)
    needed = any(root in others for root, others in neighbours.items())
    if not (thorough or restarts or needed or overlap.assignment.widest <= _NARROW):
        return best
    if overlap.ascent is not None and not restarts:
        hopeful = thorough or overlap.assignment.widest <= _SMALL or value - grown > _POLISHED * abs(value)
        return _descend_and_climb(overlap, overlap.ascent, best, hopeful=hopeful)
    middle = barycentre(overlap)
    starts: list[list[Point]] = [list(middle)]
    for _ in range(restarts):
        starts.append(_blend(overlap, list(middle), list(_random(overlap, generator)), 0.5))
    return max((best, *(_descend_and_polish(overlap, start) for start in starts)), key=lambda result: result.value)


def _grow_and_polish(overlap: Overlap) -> tuple[Vertex, float, int, float]:
    """The polished vertex, its overlap, sweeps, and the overlap before the polish."""
    ascent = overlap.ascent
    if ascent is None:
        start = grow(overlap)
        return *polish(overlap, start), overlap.value(start)
    start, reached = ascent.grow()
    vertex, _, sweeps = ascent.polish(start, reached, ascent.settled())
    return vertex, overlap.value(vertex), sweeps, reached


def _descend_and_climb(overlap: Overlap, ascent: Ascent, best: SearchResult, *, hopeful: bool) -> SearchResult:
    """The better of a known result and of what Frank-Wolfe leads to, unless that ends early."""
    other = ascent.descend(best.vertex, best.value, hopeful=hopeful)
    if other is None:
        return best
    vertex, steps, gap = other
    vertex, _, sweeps = ascent.polish(vertex, ascent.value(vertex))
    value = overlap.value(vertex)
    return SearchResult(vertex, value, steps, max(0.0, gap), sweeps) if value > best.value else best


def _descend_and_polish(overlap: Overlap, start: list[Point]) -> SearchResult:
    points, steps, gap = descend(overlap, start)
    vertex, value, sweeps = polish(overlap, nearest(overlap, points))
    return SearchResult(vertex, value, steps, max(0.0, gap), sweeps)


def _random(overlap: Overlap, generator: torch.Generator | None) -> Vertex:
    """A random vertex: the best one for random gains."""
    noise = [torch.rand(part.shape, generator=generator).to(part) - 0.5 for part in overlap.linear]
    vertex: dict[int, SpacePlacement] = {}
    for root in overlap.assignment.roots:
        vertex.update(overlap.assignment.best(noise, root)[0])
    return [vertex[space] for space in range(len(noise))]


Spreads = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
EFFORTS = ("full", "cheap", "thorough")
MATCH_SCALES = ("reference", "keep")
_NEAR = 0.25  # part of the overlap, above that of the mean over the group, from which networks count as close
_SAME = 1e-9  # what is left of a distance when only rounding is left
_ROUNDING = 1e-12  # of the squared norms: a distance that differs by less is the same
_HALF = 0.5  # part of a barrier that is left by the move, below which networks are not unrelated
_NULLS = 3  # searches against scrambled copies that say what unrelated networks reach


class Verdict(NamedTuple):
    """What one network is to another.

    Attributes:
        word: "already aligned"; "moved"; "partly alike"; or "independent".
        reason: the number, the threshold and the margin that decided, as a sentence without its full stop.
        thresholds: overlaps above which networks count as partly alike and as moved; None where they decided nothing.
    """

    word: str
    reason: str
    thresholds: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Match(Result):
    """The result of `match`.

    Attributes:
        element: moves b onto a: `symmetry.apply(element, b)` lies close to a and computes the function of b.
        before: overlap <a, b> over all weights, in the scale in which they were compared.
        after: overlap <a, g.b>, in the same scale.
        distance_before: |a - b|^2 over all weights as they were given.
        distance_after: |a - g.b|^2, likewise.
        iterations: Frank-Wolfe steps; 0 where growing was better or enough.
        sweeps: coordinate sweeps of the polish.
        gap: what the last Frank-Wolfe step could still have gained if the overlap were linear there; 0 without one: no
            space by itself can gain anything.
        exact: the overlap was linear in the element, so that a single assignment gave the true optimum.
    """

    element: Element
    before: float
    after: float
    distance_before: float
    distance_after: float
    iterations: int
    sweeps: int
    gap: float
    exact: bool
    _reached: float
    _moved: bool
    _unrelated: Callable[[], tuple[float, ...]]

    @cached_property
    def null(self) -> tuple[float, float]:
        """Mean and spread of the overlap that networks like b reach when they have nothing to do with a.

        The search is repeated on copies of b whose weights have changed places within each tensor: equally large and
        unrelated. To be compared with `after`. It takes three times as long as the match itself and is done when first
        asked for.
        """
        values = torch.tensor(self._unrelated(), dtype=torch.float64) + (self.after - self._reached)
        return float(values.mean()), float(values.std())

    @property
    def thresholds(self) -> tuple[float, float]:
        """The overlaps above which `after` counts as "partly alike" and as "moved".

        With m and s of `null` and r the overlap that the search reached, moved is m + max(4 s, 5 % of r), and partly
        alike m + max(8 s, 3 % of r) where that is less: three draws know their spread only roughly.
        """
        mean, spread = self.null
        reached = abs(self._reached)
        moved = mean + max(4 * spread, 0.05 * reached)
        return min(moved, mean + max(8 * spread, 0.03 * reached)), moved

    @property
    def verdict(self) -> str:
        """What `judged` says without a barrier: "already aligned", "moved", "partly alike" or "independent"."""
        return self.judged().word

    def judged(self, barrier: tuple[float, float] | None = None) -> Verdict:
        """What b is to a, with the numbers that decided.

        Args:
            barrier: of the loss on the straight path from a to b, and to g.b, where it was measured. A barrier that
                the move takes below half of what it was speaks against "independent", whatever the overlap says.
        """
        if not self._moved:
            return Verdict("already aligned", "no order or sign of its units brings B closer to A")
        if self.distance_after <= _SAME * self.distance_before:
            return Verdict("moved", "moved, B is A up to rounding")
        (mean, spread), (alike, moved) = self.null, self.thresholds
        reason = f"overlap {_short(self.after)}, unrelated networks {_short(mean)} ± {_short(spread)}; "
        reason += f"partly alike above {_short(alike)}, " if alike < moved else ""
        reason += f"moved above {_short(moved)}"
        word = "moved" if self.after > moved else "partly alike" if self.after > alike else "independent"
        if barrier is not None:
            before, after = barrier
            falls = before > 0 and after < _HALF * before
            reason += (
                f"; the loss barrier between A and B goes from {_short(before)} to {_short(after)} when B is moved"
            )
            if word == "independent" and falls:
                word = "partly alike"
                reason += ", less than half, which unrelated networks do not show"
        return Verdict(word, reason, (alike, moved))

    def record(self) -> Record:
        """Overlap and distance before and after, and how far units were moved; the verdict where it was asked for."""
        left = self.distance_after / self.distance_before if self.distance_before else 1.0
        text = [
            f"The squared distance of both networks goes from {_short(self.distance_before)} to "
            f"{_short(self.distance_after)}, {100 * left:.1f} % of it, when the second is moved."
        ]
        if "null" in self.__dict__:  # it takes further searches
            text.append(f"{self.verdict.capitalize()}: {self.judged().reason}.")
        pairs = {"overlap": (self.before, self.after)}
        pairs["squared distance"] = (self.distance_before, self.distance_after)
        values = {name: getattr(self, name) for name in _NUMBERS}
        return match_record("match", "Match of two networks", text, pairs, self.element, values)


_NUMBERS = ("before", "after", "distance_before", "distance_after", "iterations", "sweeps", "gap", "exact")


def match_record(
    name: str,
    title: str,
    text: Sequence[str],
    pairs: Mapping[str, tuple[float, float]],
    element: Element,
    values: Mapping[str, Any],
) -> Record:
    """The record of a match: numbers before and after it, and the moves of its element.

    Args:
        name: of the record.
        title: of the record.
        text: its sentences.
        pairs: quantity -> before and after.
        element: what was found.
        values: numbers for programs.
    """
    heads = (Column("", "what is compared"), Column("before", digits=4), Column("after", digits=4))
    rows = tuple(cells_of(what, *numbers) for what, numbers in pairs.items())
    moves = transpositions(element).record()
    figure = Figure(
        "before-and-after",
        "How alike are the networks before and after?",
        " ".join(text),
        tuple(
            Panel("bars", "", Axis("", names=("before", "after")), Axis(what), (Series("", (0.0, 1.0), numbers),))
            for what, numbers in reversed(list(pairs.items()))
        ),
    )
    items = (Table("agreement", "How alike are the networks?", heads, rows), figure, *moves.items)
    return result_record(name, title, (*text, *moves.summary), items, values={**values, "moves": moves.values})


def match(
    a: Mapping[str, Tensor] | nn.Module,
    b: Mapping[str, Tensor] | nn.Module,
    symmetry: Symmetry,
    *,
    effort: str = "full",
    restarts: int = 0,
    seed: int = 0,
    scale: str = "reference",
    std: Spreads | None = None,
) -> Match:
    """Find the element g of the symmetry that brings g.b closest to a, over permutations, signs and scales.

    Maximises <a, g.b> from the barycentre of the group: by growing (one space after the other, the rest in the
    mean) and by Frank-Wolfe with exact line search, then by coordinate ascent; the best is kept. Positive scales
    have no best overlap: both networks are first brought to their lightest form (`balance`) and compared there;
    then b is given the scales of a, or keeps its own where it is closer with them. Where neither is closer than b
    was, the search is repeated with scales as they are: g.b is never farther from a than b.

    Args:
        a: the network that stays; a State or a module.
        b: the network that moves. Neither is changed.
        symmetry: found by `discover` for their architecture.
        effort: "full"; "cheap" for coordinate ascent from where b is: often stuck; "thorough" for Frank-Wolfe also
            where it takes long and seldom helps, in wide feed-forward networks.
        restarts: further searches from random places; the best result is kept.
        seed: for the restarts and the verdict.
        scale: "reference" as above; "keep" leaves all scales as they are.
        std: standard deviations of a and b, when they are means of posteriors: their overlap counts as well, so that
            the squared Wasserstein distance of the two diagonal Gaussians is what is made small. Move the second with
            `symmetry.apply(found.element, std_b, kind="std")`.

    Raises:
        SpecError: a network does not fit the symmetry, or holds NaN.
    """
    if effort not in EFFORTS or scale not in MATCH_SCALES or restarts < 0:
        raise InputError(
            f"expected effort in {EFFORTS}, scale in {MATCH_SCALES} and restarts >= 0, found {effort!r}, {scale!r} and "
            f"{restarts}"
        )
    left, right = as_state(a), as_state(b)
    layout = BlockLayout.of(symmetry)
    _check(symmetry, left, right, std)
    light_scales, light = (
        _lightest(symmetry, left, right, std) if scale == "reference" and symmetry.dimensions else (None, None)
    )
    first, second, spreads = light or (left, right, std)
    assignment = Assignment.of(layout, plain=std is not None)
    with threads_for(assignment.widest):
        overlap = Overlap(layout, assignment, first, second, std=spreads)
        result = _search(overlap, effort, restarts, seed)
        start = overlap.value(assignment.identity())
    moved = is_better(result.value, start)
    element = assignment.element(result.vertex) if moved else symmetry.identity()
    after = _inner(layout, first, _weights_moved(layout, element, second))
    element, distance, closer = _scaled(layout, (left, right), std, element, light_scales)
    if light_scales is not None and not closer:
        # Closer in the lightest form, farther in every scale that is offered: an order for the scales as they are.
        return match(left, right, symmetry, effort=effort, restarts=restarts, seed=seed, scale="keep", std=std)
    return Match(
        element,
        _inner(layout, first, second),
        after,
        _distance(layout, left, right),
        distance,
        result.steps,
        result.sweeps,
        result.gap,
        overlap.degree == 1,
        result.value * overlap.unit,
        moved,
        partial(_unrelated, layout, (first, second, spreads), effort, seed),
    )


def _scaled(
    layout: BlockLayout,
    pair: tuple[State, State],
    std: Spreads | None,
    element: Element,
    light_scales: tuple[Element, Element] | None,
) -> tuple[Element, float, bool]:
    """The element with the scales of a, or with those of b if that is closer, and |a - g.b|^2 of the means.

    Closeness counts deviations where they are given, as the search did; also returned is whether the moved network is
    no farther from a than b was.
    """
    symmetry, (a, b) = layout.symmetry, pair
    choices = [element]
    if light_scales is not None:
        choices.append(symmetry.compose(symmetry.invert(light_scales[0]), symmetry.compose(element, light_scales[1])))

    def distance_of(choice: Element, state: State) -> float:
        total = _distance(layout, a, state)
        if std is not None:
            total += _distance(layout, std[0], symmetry.apply(choice, std[1], kind="std"))
        return total

    narrow = any(b[name].is_floating_point() and b[name].dtype.itemsize < 4 for name in symmetry.shapes)
    # Statistics may leave half precision too; else they are finite wherever the weights are.
    moved = [symmetry.apply(g, b, check=False) if narrow else _weights_moved(layout, g, b) for g in choices]
    gaps = [distance_of(choice, state) for choice, state in zip(choices, moved, strict=True)]
    best = min(range(len(choices)), key=lambda n: (not math.isfinite(gaps[n]), gaps[n]))
    check_finite(moved[best], where="the moved network")
    slack = _ROUNDING * (_inner(layout, a, a) + _inner(layout, b, b))
    closer = gaps[best] <= distance_of(symmetry.identity(), b) + slack
    return choices[best], _distance(layout, a, moved[best]), closer


def _unrelated(
    layout: BlockLayout, sides: tuple[State, State, Spreads | None], effort: str, seed: int
) -> tuple[float, ...]:
    """Overlaps reached by copies of b whose weights have changed places inside each tensor."""
    a, b, std = sides
    generator, assignment = torch.Generator().manual_seed(seed), Assignment.of(layout, plain=std is not None)
    reached = []
    for _ in range(_NULLS):
        places = {name: torch.randperm(b[name].numel(), generator=generator) for name in layout.tensors}

        def shuffled(state: Mapping[str, Tensor], places: Mapping[str, Tensor] = places) -> State:
            return {n: state[n].reshape(-1)[p.to(state[n].device)].reshape(state[n].shape) for n, p in places.items()}

        spreads = None if std is None else (std[0], shuffled(std[1]))
        with threads_for(assignment.widest):
            overlap = Overlap(layout, assignment, a, shuffled(b), std=spreads)
            reached.append(_search(overlap, effort, 0, seed).value * overlap.unit)
    return tuple(reached)


def _short(value: float) -> str:
    """Four digits, thousands apart.

    >>> _short(10472.3), _short(324.93), _short(0.26)
    ('10,472', '324.9', '0.26')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def check_network(layout: BlockLayout, state: Mapping[str, Tensor], *, where: str) -> None:
    """Raise unless a network fits the symmetry, is finite, and has no negative variance; statistics are looked at."""
    layout.check(state, where=where)
    check_finite({name: state[name] for name in layout.symmetry.shapes}, where=where)
    for block in layout.blocks:
        if any(axis.shift for axis in block.axes) and bool((state[block.tensor] < 0).any()):
            raise SpecError(f"{where} has negative variances in {block.tensor}: its batch norm cannot be run")


def _check(symmetry: Symmetry, a: State, b: State, std: Spreads | None) -> None:
    layout = BlockLayout.of(symmetry, statistics=True)
    check_network(layout, a, where="the first network")
    check_network(layout, b, where="the second network")
    for where, state in zip(("the first std", "the second std"), std or (), strict=False):
        layout.check(state, where=where)
        check_finite(dict(state), where=where)


def _lightest(
    symmetry: Symmetry, a: State, b: State, std: Spreads | None
) -> tuple[tuple[Element, Element], tuple[State, State, tuple[State, State] | None]]:
    """Both networks in their lightest form, and the elements that bring them there."""
    layout = BlockLayout.of(symmetry, statistics=True)
    light_scales = _lightest_pair(layout, a, b)
    spreads = (
        (symmetry.apply(light_scales[0], std[0], kind="std"), symmetry.apply(light_scales[1], std[1], kind="std"))
        if std
        else None
    )
    first, second = (_weights_moved(layout, scales, x) for scales, x in zip(light_scales, (a, b), strict=True))
    return light_scales, (first, second, spreads)


def _weights_moved(layout: BlockLayout, element: Element, state: State) -> State:
    """The moved network; running statistics, which are no weights, stay as they were."""
    key = _weights_moved
    if key not in layout.symmetry.derived:
        spaces = (
            replace(space, legs=tuple(leg for leg in space.legs if not is_statistic(leg.tensor)))
            for space in layout.spaces
        )
        layout.symmetry.derived[key] = replace(layout.symmetry, spaces=tuple(spaces))
    weights: Symmetry = layout.symmetry.derived[key]
    return weights.apply(element, state, check=False)


_TOGETHER = 1 << 21  # weights up to which two networks are balanced together: a copy of both costs little then


def _lightest_pair(layout: BlockLayout, a: State, b: State) -> tuple[Element, Element]:
    """The scales that balance either network; small ones together, in half of the operations."""
    alike = all(a[name].dtype == b[name].dtype and a[name].device == b[name].device for name in layout.symmetry.shapes)
    if not alike or sum(a[name].numel() for name in layout.symmetry.shapes) > _TOGETHER:
        return lightest(layout, a), lightest(layout, b)
    both = balancing_scales(layout, {name: torch.stack((a[name], b[name])) for name in layout.symmetry.shapes})
    return both.member(0), both.member(1)


def lightest(layout: BlockLayout, state: Mapping[str, Tensor]) -> Element:
    """The scales that balance one network; the layout must know statistics."""
    return balancing_scales(layout, {name: tensor[None] for name, tensor in state.items()}).member(0)


def _search(overlap: Overlap, effort: str, restarts: int, seed: int) -> SearchResult:
    generator = torch.Generator().manual_seed(seed)
    result = None
    if effort != "cheap":
        result = search(overlap, restarts=restarts, generator=generator, thorough=effort == "thorough")
    identity = overlap.assignment.identity()
    if result is not None:
        chance = 0.0 if overlap.ascent is None else overlap.ascent.value_of_mean()
        if overlap.value(identity) - chance < _NEAR * (result.value - chance):
            return result
    vertex, value, sweeps = polish(overlap, identity)  # networks that are close already: climb from there as well
    if result is not None and result.value >= value:
        return result
    return SearchResult(
        vertex, value, 0 if result is None else result.steps, 0.0 if result is None else result.gap, sweeps
    )


def weights_of(layout: BlockLayout) -> list[str]:
    """Names of all tensors that count as weights: statistics of batch norms and constants do not."""
    symmetry = layout.symmetry
    return [name for name in symmetry.shapes if not is_statistic(name) and name not in symmetry.frozen]


def _inner(layout: BlockLayout, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """<a, b> over all weights; products as precise as the weights, sums in float64."""
    return sum(float((x * y).sum(dtype=torch.float64)) for x, y in _pairs(layout, a, b))


def _distance(layout: BlockLayout, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """|a - b|^2 over all weights, likewise."""
    return sum(float((x - y).square().sum(dtype=torch.float64)) for x, y in _pairs(layout, a, b))


def _pairs(layout: BlockLayout, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Both networks' weights on the CPU, since some devices have no float64; at least float32."""
    for name in weights_of(layout):
        if a[name].is_floating_point():
            dtype = torch.promote_types(torch.float32, torch.promote_types(a[name].dtype, b[name].dtype))
            yield a[name].to("cpu", dtype), b[name].to("cpu", dtype)
