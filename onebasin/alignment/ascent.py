"""Climbing between the vertices of an overlap whose tensors join two spaces each, in few and large operations.

A space x that shares tensors A_1, A_2, ... with other spaces has the gains

    G_x = L_x + [A_1 | A_2 | ...] [X_1 B_1 ; X_2 B_2 ; ...],

one product over all tensors at once: `Side` keeps the left factor with a column, and the rows on the right with a row,
for every pair (unit of the other space, position), and the rows that the other spaces are moved to as one index. Where
the others stand at the barycentre, their part has the rank of a mean, and is formed from sums.

Spaces are placed in the order of the network and sides are sorted by it, so that what is placed is a prefix. A space
whose neighbours were all placed before it has seen them where they are: the polish begins with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.alignment.assignment import Assignment, SpacePlacement, Vertex, assign

NOISE = 1e-6  # gains below this part of the overlap are rounding, in float32
SWEEPS = 100
STEPS = 24  # Frank-Wolfe steps at most; related networks take 2 to 5, and unrelated ones gain little afterwards
FLAT = 1e-4  # a step that promises less than this part of the overlap ends the search: the polish is cheaper
# After the first step f(X) + gap is what a linear f could still reach. Over the known overlap it was 1.00 to 1.03 on
# ResNet-20s, where the search always ended lower, and 1.03 to 1.16 on smaller networks, where it mostly ended higher.
PROMISE = 1.03


@dataclass(frozen=True)
class Entry:
    """One tensor in a side: the other space, the character it sees there, and the columns start:stop of the side."""

    other: int
    character: int
    start: int
    stop: int
    rest: int  # positions per unit of the other space


@dataclass(eq=False)
class Side:
    """The tensors of one space that see one character of it.

    Attributes:
        character: number of the character.
        left: of the network that stays, (units, columns).
        right: of the one that moves, (columns, units).
        entries: tensors, in the order in which the other spaces are placed.
        index: row of `right` for every column, where the other spaces stand now.
        signs: of every column, likewise; None while none has any.
    """

    character: int
    left: Tensor
    right: Tensor
    entries: list[Entry]
    index: Tensor
    signs: Tensor | None = None
    means: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # entry -> sums of left, means of right

    def columns(self, entry: Entry, place: SpacePlacement, chi: Tensor | None) -> None:
        """Move the other space of an entry."""
        rows = place.source[:, None] * entry.rest + torch.arange(entry.start, entry.start + entry.rest)
        self.index[entry.start : entry.stop] = rows.reshape(-1)
        if chi is None and self.signs is None:
            return
        if self.signs is None:
            self.signs = torch.ones(len(self.index), 1, dtype=self.left.dtype)
        part = self.signs[entry.start : entry.stop].reshape(-1, entry.rest)
        part.copy_(torch.ones(()) if chi is None else chi[:, None])

    def add(self, gains: Tensor, columns: int) -> None:
        """Add the first columns' part to gains (units, units)."""
        if not columns:
            return
        whole = columns == len(self.index)
        rows = self.right.index_select(0, self.index if whole else self.index[:columns])
        if self.signs is not None:
            rows.mul_(self.signs if whole else self.signs[:columns])
        gains.addmm_(self.left if whole else self.left[:, :columns], rows)


class Ascent:
    """Vertices of one overlap, and the gains of its spaces there."""

    def __init__(self, assignment: Assignment, linear: Sequence[Tensor], pieces: Iterable[Any]) -> None:
        """Lay the pieces out, every one from both of its sides.

        Args:
            assignment: of the symmetry.
            linear: gains that depend on no other space, per space (characters, units, units).
            pieces: tensors with `contacts`, `a` and `b`, see `Piece`; each joins two spaces of different trees.
        """
        self.assignment, self.linear, self.classes = assignment, linear, assignment.classes
        self.pieces = list(pieces)
        self.families = {root: assignment.family(root) for root in assignment.roots}
        self.root_of = {space: root for root, family in self.families.items() for space in family}
        self.turn = {root: turn for turn, root in enumerate(assignment.roots)}
        self.sides: list[list[Side]] = [[] for _ in linear]
        self.touching: list[list[tuple[Side, Entry]]] = [[] for _ in linear]  # entries whose other space this is
        self.neighbours: dict[int, set[int]] = {root: set() for root in assignment.roots}
        entries: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for number, piece in enumerate(self.pieces):
            for mine in (0, 1):
                contact, other = piece.contacts[mine], piece.contacts[1 - mine]
                turn = self.turn[self.root_of[other.space]]
                entries.setdefault((contact.space, contact.character), []).append((turn, number, mine))
                self.neighbours[self.root_of[contact.space]].add(self.root_of[other.space])
        for (space, character), items in entries.items():
            self._add_side(space, character, sorted(items))
        self.vertex: Vertex = assignment.identity()

    @staticmethod
    def suits(assignment: Assignment, pieces: Iterable[Any]) -> bool:
        """Whether every piece joins two spaces of different trees, in plain arrays on the processor."""
        root_of = {space: root for root in assignment.roots for space in assignment.family(root)}
        return all(
            len(piece.contacts) == 2
            and not piece.entangled
            and piece.a.device.type == "cpu"
            and root_of[piece.contacts[0].space] != root_of[piece.contacts[1].space]
            for piece in pieces
        )

    def _add_side(self, space: int, character: int, items: list[tuple[int, int, int]]) -> None:
        left, right, entries, start = [], [], [], 0
        for _, number, mine in items:
            piece = self.pieces[number]
            n, other, rest = piece.a.shape[mine], piece.a.shape[1 - mine], piece.a.shape[2]
            stop = start + other * rest
            left.append((piece.a if mine == 0 else piece.a.transpose(0, 1)).reshape(n, -1))
            right.append((piece.b.permute(1, 2, 0) if mine == 0 else piece.b.permute(0, 2, 1)).reshape(-1, n))
            contact = piece.contacts[1 - mine]
            entries.append(Entry(contact.space, contact.character, start, stop, rest))
            start = stop
        whole = left[0].contiguous() if len(left) == 1 else torch.cat(left, 1)
        below = right[0].contiguous() if len(right) == 1 else torch.cat(right)
        side = Side(character, whole, below, entries, torch.arange(start))
        self.sides[space].append(side)
        for entry in entries:
            self.touching[entry.other].append((side, entry))

    def stand(self, vertex: Vertex) -> None:
        """Go to a vertex."""
        for space, place in enumerate(vertex):
            if place is not self.vertex[space]:
                self.place(space, place)

    def place(self, space: int, place: SpacePlacement) -> None:
        """Put one space somewhere."""
        self.vertex[space] = place
        chis: dict[int, Tensor | None] = {}
        for side, entry in self.touching[space]:
            if entry.character not in chis:
                chis[entry.character] = self.assignment.chi(place, space, entry.character)
            side.columns(entry, place, chis[entry.character])

    def gains(self, space: int) -> Tensor:
        """The gains of a space where all others stand: (characters, units, units)."""
        gains = self.linear[space].clone()
        for side in self.sides[space]:
            side.add(gains[side.character], len(side.index))
        return gains

    def gains_placed(self, space: int, turn: int) -> tuple[Tensor, Tensor]:
        """The gains by spaces of an earlier turn alone, and with the others at the barycentre."""
        placed = self.linear[space].clone()
        means: list[tuple[int, Tensor, Tensor]] = []
        for side in self.sides[space]:
            columns, ahead = 0, []
            for number, entry in enumerate(side.entries):
                if self.turn[self.root_of[entry.other]] < turn:
                    columns = entry.stop
                elif not any(self.assignment.characters[entry.other][entry.character]):
                    ahead.append(self._means(side, number, entry))
            side.add(placed[side.character], columns)
            if ahead:
                left, right = zip(*ahead, strict=True)
                means.append((side.character, torch.cat(left, 1), torch.cat(right)))
        if not means:
            return placed, placed
        gains = placed.clone()
        for character, mean_left, mean_right in means:
            gains[character].addmm_(mean_left, mean_right)
        return placed, gains

    def _means(self, side: Side, number: int, entry: Entry) -> tuple[Tensor, Tensor]:
        """Factors of the part of an entry whose other space is at the barycentre."""
        if number not in side.means:
            units = len(side.left)
            left = side.left[:, entry.start : entry.stop].reshape(units, -1, entry.rest)
            right = side.right[entry.start : entry.stop].reshape(-1, entry.rest * units)
            classes = self.classes[entry.other]
            if classes is None:
                side.means[number] = left.sum(1), right.mean(0).reshape(entry.rest, units)
            else:
                table = classes.to(left)
                sums = torch.matmul(table, left).reshape(units, -1)
                side.means[number] = sums, (table / table.sum(1, keepdim=True) @ right).reshape(-1, units)
        return side.means[number]

    def best(self, root: int, gains: Mapping[int, Tensor]) -> tuple[dict[int, SpacePlacement], float]:
        """The best placement of a tree for gains, and its value."""
        fast = self.assignment.single_signs[root]
        if fast is None:
            return self.assignment.best(gains, root)  # type: ignore[arg-type]  # indexed by space alone
        table = gains[root].numpy()
        merged = table[0] if len(table) else table
        if len(table) != 1 or fast:
            signed = {character for _, character in fast}
            plain = [number for number in range(len(table)) if number not in signed]
            merged = table[plain].sum(0, dtype=np.float64)
            for _, character in fast:
                merged += np.abs(table[character])
        units = np.arange(len(merged))
        order = assign(merged) if self.assignment.spaces[root].permutable else units
        flips = torch.ones(len(self.assignment.signs[root]), len(order))
        for number, character in fast:
            flips[number][torch.from_numpy(table[character][units, order] < 0)] = -1.0
        place = SpacePlacement(torch.from_numpy(order), flips)
        return {root: place}, float(merged[units, order].sum(dtype=np.float64))

    def inner(self, gains: Mapping[int, Tensor], places: Mapping[int, SpacePlacement]) -> float:
        """<gains, placement> of a tree."""
        total = 0.0
        for space, table in gains.items():
            place = places[space]
            source = place.source.numpy()
            units = np.arange(len(source))
            for character, part in enumerate(table.numpy()):
                picked = part[units, source]
                chi = self.assignment.chi(place, space, character)
                total += float(picked.sum(dtype=np.float64) if chi is None else picked.astype(np.float64) @ chi.numpy())
        return total

    def grow(self) -> tuple[Vertex, float]:
        """Place one tree after the other; returns the vertex and the overlap there."""
        value = 0.0
        for turn, root in enumerate(self.assignment.roots):
            both = {space: self.gains_placed(space, turn) for space in self.families[root]}
            places, _ = self.best(root, {space: gains for space, (_, gains) in both.items()})
            value += self.inner({space: placed for space, (placed, _) in both.items()}, places)
            for space, place in places.items():
                self.place(space, place)
        return list(self.vertex), value

    def polish(self, start: Vertex, value: float, settled: Iterable[int] = ()) -> tuple[Vertex, float, int]:
        """Coordinate ascent from a vertex of known overlap; `settled` trees are the best for their neighbours there."""
        self.stand(start)
        waiting, sweeps = set(self.assignment.roots) - set(settled), 0
        while waiting and sweeps < SWEEPS:
            sweeps += 1
            for root in [root for root in self.assignment.roots if root in waiting]:
                waiting.discard(root)
                gains = {space: self.gains(space) for space in self.families[root]}
                places, after = self.best(root, gains)
                before = self.inner(gains, {space: self.vertex[space] for space in gains})
                if after - before > NOISE * (abs(value) + abs(before)):
                    for space, place in places.items():
                        self.place(space, place)
                    value += after - before
                    waiting |= self.neighbours[root]
        return list(self.vertex), value, sweeps

    def descend(self, known: Vertex | None, value: float, *, hopeful: bool) -> tuple[Vertex, int, float] | None:
        """Frank-Wolfe from the barycentre with an exact line search, then the nearest vertex.

        With f = <L, X> + Q(X, X) the gradient is affine: a step takes the gradient at one vertex, and along the way
        <grad f(S), X> = <grad f(X), S> - <L, S> + <L, X>. The point is kept as a sum of vertices.

        Args:
            known: the best vertex so far; two steps in a row that lead to it end the search.
            value: the overlap there.
            hopeful: go on even where the first step promises little, see `PROMISE`.

        Returns:
            A vertex, steps and the last gap; None where the search was not worth going on with.
        """
        spaces = range(len(self.linear))
        gains = [self.gains_placed(space, -1)[1].clone() for space in spaces]
        along = sum(self._inner_of_mean(space, gains[space]) for space in spaces)
        plain = sum(self._inner_of_mean(space, self.linear[space]) for space in spaces)
        path: list[tuple[float, Vertex]] = []
        middle, gap, again = 1.0, 0.0, 0
        for step in range(STEPS):
            targets, best = self._targets(gains)
            gap = best - along
            reached = 0.5 * (along + plain)
            if gap <= FLAT * abs(reached):
                break
            if step == 1 and not hopeful and reached + gap < PROMISE * value:
                return None
            again = again + 1 if known is not None and _same(targets, known) else 0
            if again == 2:
                return None
            self.stand(targets)
            ahead = [self.gains(space) for space in spaces]
            there = sum(self.inner({space: ahead[space]}, {space: targets[space]}) for space in spaces)
            flat = sum(self.inner({space: self.linear[space]}, {space: targets[space]}) for space in spaces)
            back = best - flat + plain
            bend = 0.5 * (there - back - gap)
            length = 1.0 if 2 * bend >= -gap else -gap / (2 * bend)
            rest = 1.0 - length
            middle, path = rest * middle, [*((rest * weight, vertex) for weight, vertex in path), (length, targets)]
            for old, new in zip(gains, ahead, strict=True):
                old.lerp_(new, length)
            along = rest**2 * along + rest * length * (best + back) + length**2 * there
            plain = rest * plain + length * flat
        else:
            step = STEPS
        return self._targets([self._matrices(space, middle, path) for space in spaces])[0], step, gap

    def value_of_mean(self) -> float:
        """The overlap at the barycentre, which a random element reaches on average where signs do not matter."""
        spaces = range(len(self.linear))
        gains = (self._inner_of_mean(space, self.gains_placed(space, -1)[1]) for space in spaces)
        return 0.5 * sum(gain + self._inner_of_mean(space, self.linear[space]) for space, gain in enumerate(gains))

    def _targets(self, gains: Sequence[Tensor]) -> tuple[Vertex, float]:
        """The best vertex for gains, and its value."""
        vertex, total = list(self.vertex), 0.0
        for root, family in self.families.items():
            places, value = self.best(root, {space: gains[space] for space in family})
            total += value
            for space, place in places.items():
                vertex[space] = place
        return vertex, total

    def _inner_of_mean(self, space: int, gains: Tensor) -> float:
        """<gains, barycentre> of a space."""
        total, classes = 0.0, self.classes[space]
        for seen, part in zip(self.assignment.characters[space], gains, strict=True):
            if any(seen):
                continue
            if classes is None:
                total += float(part.sum(dtype=torch.float64)) / len(part)
            else:
                table = classes.double()
                total += float(((table @ part.double()) * table).sum(1).div(table.sum(1)).sum())
        return total

    def _matrices(self, space: int, middle: float, path: list[tuple[float, Vertex]]) -> Tensor:
        """The point `middle` * barycentre + sum of weight * vertex, as matrices (characters, units, units)."""
        matrices = torch.zeros_like(self.linear[space])
        for character, seen in enumerate(self.assignment.characters[space]):
            if not any(seen) and middle:
                classes = self.classes[space]
                if classes is None:
                    matrices[character] = middle / len(matrices[character])
                else:
                    table = classes.to(matrices)
                    matrices[character] = middle * table.T @ (table / table.sum(1, keepdim=True))
            for weight, vertex in path:
                place = vertex[space]
                chi = self.assignment.chi(place, space, character)
                rows = torch.arange(len(place.source))
                matrices[character, rows, place.source] += weight if chi is None else weight * chi.to(matrices)
        return matrices

    def settled(self) -> list[int]:
        """Trees all of whose neighbours come before them: the best for those when they are grown."""
        return [
            root
            for root, others in self.neighbours.items()
            if all(self.turn[other] < self.turn[root] for other in others)
        ]

    def value(self, vertex: Vertex) -> float:
        """The overlap at a vertex: products as precise as the weights, summed in float64."""
        total = 0.0
        for space, table in enumerate(self.linear):
            total += self.inner({space: table}, {space: vertex[space]}) if len(table) else 0.0
        for piece in self.pieces:
            moved = piece.b
            for dim, contact in enumerate(piece.contacts):
                place = vertex[contact.space]
                moved = moved.index_select(dim, place.source)
                chi = self.assignment.chi(place, contact.space, contact.character)
                if chi is not None:
                    moved.mul_(chi.to(moved)[:, None, None] if dim == 0 else chi.to(moved)[:, None])
            total += float(moved.mul_(piece.a).sum(dtype=torch.float64))
        return total


def _same(first: Vertex, second: Vertex) -> bool:
    return all(
        torch.equal(a.source, b.source) and torch.equal(a.signs, b.signs) for a, b in zip(first, second, strict=True)
    )
