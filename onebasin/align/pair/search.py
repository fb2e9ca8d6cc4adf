"""Maximise the overlap: from the barycentre of the group into a vertex, then one space after the other.

Coordinate ascent from a vertex gets stuck: with everything else misplaced, the best place of one space means little.
At the barycentre nothing is assumed. From there spaces are placed one by one (`grow`) or all together by Frank-Wolfe
(`descend`), guided first by what is rigid, inputs and outputs, and then by each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onebasin.align.pair.assign import Assignment, Place, Vertex
from onebasin.align.pair.overlap import Overlap, Point

STEPS = 24  # Frank-Wolfe steps at most; related networks take 2 to 5, and unrelated ones gain little afterwards
_FLAT = 1e-4  # a step that promises less than this part of the overlap ends the search: the polish is cheaper
_SWEEPS = 100
_TIE = 1e-7  # overlaps closer than this, relatively, are equal up to rounding
_NARROW = 256  # up to this width a descent takes a tenth of a second
_NOISE = 1e-6  # gains below this part of the overlap are rounding, in float32


def is_better(value: float, than: float) -> bool:
    """Whether an overlap is larger by more than rounding."""
    return value > than + _TIE * abs(than)


@dataclass(frozen=True)
class Found:
    """Where a search ended: the vertex, the overlap there, Frank-Wolfe steps, the last gap, and coordinate sweeps."""

    vertex: Vertex
    value: float
    steps: int
    gap: float
    sweeps: int


def barycentre(overlap: Overlap) -> list[Tensor]:
    """The mean of the whole group: 1/n inside what can be exchanged, 0 for a character that sees a sign."""
    made = []
    assignment = overlap.assignment
    for number in range(len(assignment.spaces)):
        point = torch.zeros_like(overlap.linear[number])
        same = _exchangeable(assignment, number).to(point)
        for character, seen in enumerate(assignment.characters[number]):
            if not any(seen):
                point[character] = same / same.sum(1, keepdim=True)
        made.append(point)
    return made


def _exchangeable(assignment: Assignment, number: int) -> Tensor:
    """(N, N): which coordinates can take each other's place."""
    space = assignment.spaces[number]
    free = torch.ones(1, 1)
    kinds = [parent is not None and assignment.spaces[parent].permutable for parent in assignment.parents[number]]
    sizes = [size for _, size in space.parents]
    for size, moves in zip([*sizes, space.size], [*kinds, space.permutable], strict=True):
        free = torch.kron(free, torch.ones(size, size) if moves else torch.eye(size))
    return free


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
        if gap <= _FLAT * 0.5 * abs(along + plain):
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
        if gap <= _FLAT * 0.5 * abs(along + overlap.dot(overlap.linear, points)):
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
    found: dict[int, Place] = {}
    matrices = [overlap.matrix(space, point) for space, point in enumerate(points)]
    for root in overlap.assignment.roots:
        found.update(overlap.assignment.best(matrices, root)[0])
    return [found[space] for space in range(len(points))]


def polish(overlap: Overlap, start: Vertex) -> tuple[Vertex, float, int]:
    """Coordinate ascent: solve one tree after the other until none gains; returns vertex, overlap and sweeps."""
    assignment, vertex = overlap.assignment, list(start)
    neighbours = _neighbours(overlap)
    waiting = set(assignment.roots)
    value, sweeps = overlap.value(vertex), 0
    while waiting and sweeps < _SWEEPS:
        sweeps += 1
        for root in [root for root in assignment.roots if root in waiting]:
            waiting.discard(root)
            family = assignment.family(root)
            gains = overlap.gradient(vertex, family)
            before = sum(overlap.inner(gains, vertex, space) for space in family)
            places, after = assignment.best(gains, root)
            least = _NOISE * (abs(value) + abs(before))
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
    found: dict[int, set[int]] = {root: set() for root in assignment.roots}
    for piece in overlap.pieces:
        roots = [root_of[touch.space] for touch in piece.touches]
        for number, root in enumerate(roots):
            found[root] |= set(roots[:number] + roots[number + 1 :])
    return found


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
    return [point for point in points if isinstance(point, Place)]


def search(
    overlap: Overlap, *, restarts: int = 0, generator: torch.Generator | None = None, thorough: bool = False
) -> Found:
    """Grow a vertex; descend from the barycentre as well where that is cheap or needed; polish; keep the best.

    Growing misjudges spaces that meet themselves in a tensor (recurrent weights): there Frank-Wolfe is needed. In
    wide feed-forward networks it takes ten times as long as growing and seldom ends higher: there it runs if the
    search is `thorough`, or together with `restarts` from points between the barycentre and random vertices.
    """
    vertex, value, sweeps = polish(overlap, grow(overlap))
    best = Found(vertex, value, 0, 0.0, sweeps)
    if overlap.degree == 1:
        return best  # a single assignment per tree: this is the optimum
    neighbours = _neighbours(overlap)
    needed = any(root in others for root, others in neighbours.items())
    if not (thorough or restarts or needed or overlap.assignment.widest <= _NARROW):
        return best
    middle = barycentre(overlap)
    starts: list[list[Point]] = [list(middle)]
    for _ in range(restarts):
        starts.append(_blend(overlap, list(middle), list(_random(overlap, generator)), 0.5))
    return max((best, *(_from(overlap, start) for start in starts)), key=lambda found: found.value)


def _from(overlap: Overlap, start: list[Point]) -> Found:
    points, steps, gap = descend(overlap, start)
    vertex, value, sweeps = polish(overlap, nearest(overlap, points))
    return Found(vertex, value, steps, max(0.0, gap), sweeps)


def _random(overlap: Overlap, generator: torch.Generator | None) -> Vertex:
    """A random vertex: the best one for random gains."""
    noise = [torch.rand(part.shape, generator=generator).to(part) - 0.5 for part in overlap.linear]
    found: dict[int, Place] = {}
    for root in overlap.assignment.roots:
        found.update(overlap.assignment.best(noise, root)[0])
    return [found[space] for space in range(len(noise))]
