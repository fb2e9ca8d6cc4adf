"""Random elements near a given one, with known probabilities: what importance sampling over an orbit needs.

Spaces are drawn one after the other. Given all others, the log density of a diagonal Gaussian at g.w is a sum over
coordinates x of scores S[x, y, s]: what it is worth that x comes from unit y with signs s. The sum over all orders is
then a permanent; it is sampled row by row among the units that are left, with scores balanced by Sinkhorn's scaling so
that early rows leave late ones their due (Kou and McCullagh, 2009).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.align.pair.assign import Assignment, Place, Vertex
from onebasin.align.pair.overlap import Overlap

_BALANCED = 20  # rounds of Sinkhorn's scaling


@dataclass(frozen=True, eq=False)
class Proposal:
    """A distribution over elements around a vertex; spaces that others are fibred over stay at the vertex.

    Attributes:
        overlap: f(g) = log density at g.w up to a constant, in units of `overlap.unit`.
        vertex: where spaces stand that are not drawn yet.
    """

    overlap: Overlap
    vertex: Vertex

    @property
    def assignment(self) -> Assignment:
        """The spaces."""
        return self.overlap.assignment

    @property
    def reaches_all(self) -> bool:
        """Whether every element can be drawn: no space that moves has others fibred over it."""
        pairs = zip(self.assignment.moves, self.assignment.children, strict=True)
        return not any(moves and children for moves, children in pairs)

    def draw(self, count: int, generator: torch.Generator) -> tuple[list[Vertex], Tensor]:
        """Elements, as vertices, and the logarithms of their probabilities, float64 (count,)."""
        return self._walk([list(self.vertex) for _ in range(count)], None, generator)

    def log_probability(self, vertices: Sequence[Vertex]) -> Tensor:
        """The logarithm of the probability that each of these is drawn; -inf for what never is."""
        return self._walk([list(self.vertex) for _ in vertices], vertices, None)[1]

    def _walk(
        self, made: list[Vertex], given: Sequence[Vertex] | None, generator: torch.Generator | None
    ) -> tuple[list[Vertex], Tensor]:
        total = torch.zeros(len(made), dtype=torch.float64)
        for space in range(len(self.assignment.spaces)):
            wanted = None if given is None else [vertex[space] for vertex in given]
            if self.assignment.moves[space] and not self.assignment.children[space]:
                places, log_probability = self._placed(space, made, wanted, generator)
                total += log_probability
            else:
                places = [self.vertex[space] for _ in made] if wanted is None else wanted
                total[[not _equal(place, self.vertex[space]) for place in places]] = -torch.inf
            for vertex, place in zip(made, places, strict=True):
                vertex[space] = place
        return made, total

    def _placed(
        self, space: int, made: list[Vertex], wanted: list[Place] | None, generator: torch.Generator | None
    ) -> tuple[list[Place], Tensor]:
        """Draw one space of each element, or tell how probable the wanted places are."""
        size, permutable = self.assignment.spaces[space].size, self.assignment.spaces[space].permutable
        home = self.vertex[space]
        combos = _sign_vectors(len(self.assignment.signs[space]))
        scores, which = self._all_scores(space, made, combos)
        total = torch.zeros(len(made), dtype=torch.float64)
        if wanted is not None:  # what comes from another copy than here has a parent that moved, and is never drawn
            away = [not torch.equal(place.source // size, home.source // size) for place in wanted]
            total[away] = -torch.inf
            wanted = [home if gone else place for gone, place in zip(away, wanted, strict=True)]
        sources, signs = [], []
        for start in range(0, self.assignment.size(space), size):
            rows, old = slice(start, start + size), int(home.source[start]) // size * size
            part = scores[:, :, rows, old : old + size]
            chosen, log_order = torch.arange(size).expand(len(made), -1), torch.zeros_like(total)
            if permutable:
                order = None if wanted is None else torch.stack([place.source[rows] - old for place in wanted])
                chosen, log_order = _order(_balanced(part.logsumexp(1)), which, order, generator)
            picked = part[which[:, None], :, torch.arange(size), chosen].movedim(2, 1)  # (count, combos, n)
            flips = None if wanted is None else torch.stack([place.signs[:, rows] for place in wanted])
            taken, log_signs = _signs(picked, combos, flips, generator)
            total += log_order + log_signs
            sources.append(old + chosen)
            signs.append(taken)
        places = [Place(*pair) for pair in zip(torch.cat(sources, 1), torch.cat(signs, 2), strict=True)]
        return places, total

    def _all_scores(self, space: int, made: list[Vertex], combos: Tensor) -> tuple[Tensor, Tensor]:
        """S, (different, combinations of signs, N, N), and which of them each element has: equal ones share theirs."""
        numbers: dict[bytes, int] = {}
        different: list[Tensor] = []
        which = []
        for vertex in made:
            key = b"".join(tensor.numpy().tobytes() for place in vertex for tensor in (place.source, place.signs))
            if key not in numbers:
                numbers[key] = len(different)
                different.append(self._scores(space, vertex, combos))
            which.append(numbers[key])
        return torch.stack(different), torch.tensor(which)

    def _scores(self, space: int, vertex: Vertex, combos: Tensor) -> Tensor:
        """S, (combinations of signs, N, N), when the other spaces stand at the vertex."""
        gains = self.overlap.gradient(vertex, [space])[space].double().cpu() * self.overlap.unit
        seen = torch.tensor(self.assignment.characters[space]).bool().reshape(len(gains), -1)
        chi = torch.where(seen[None], combos[:, None, :], torch.ones((), dtype=torch.float64)).prod(2)
        scores: Tensor = torch.tensordot(chi, gains, 1)
        return scores


def _equal(a: Place, b: Place) -> bool:
    return torch.equal(a.source, b.source) and torch.equal(a.signs, b.signs)


def _sign_vectors(count: int) -> Tensor:
    """All sign vectors (2^count, count)."""
    return torch.tensor(list(itertools.product((1.0, -1.0), repeat=count)), dtype=torch.float64).reshape(
        2**count, count
    )


def _balanced(scores: Tensor) -> Tensor:
    """Scores (different, n, n) as logarithms of matrices whose rows, and nearly whose columns, sum to 1."""
    for _ in range(_BALANCED):
        scores = scores - scores.logsumexp(1, keepdim=True)
        scores = scores - scores.logsumexp(2, keepdim=True)
    return scores


def _order(
    scores: Tensor, which: Tensor, given: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Orders (count, n) drawn row by row for scores[which], the surest row first; and their log probability."""
    count, size = len(which), scores.shape[-1]
    rows, total = torch.arange(count), torch.zeros(count, dtype=torch.float64)
    order = torch.zeros(count, size, dtype=torch.int64)
    left = torch.ones(count, size, dtype=torch.bool)
    for row in scores.amax(2).argsort(1, descending=True)[which].T:
        odds = scores[which, row].masked_fill(~left, -torch.inf).log_softmax(1)
        chosen = _drawn(odds, generator) if given is None else given[rows, row]
        total += odds[rows, chosen]
        order[rows, row] = chosen
        left[rows, chosen] = False
    return order, total


def _signs(
    scores: Tensor, combos: Tensor, given: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Signs (count, generators, n) of each unit for scores (count, combinations, n), and their log probability."""
    odds = scores.log_softmax(1)
    if given is None:
        chosen = _drawn(odds.movedim(1, 2), generator)
    else:  # the combination that agrees in every sign
        chosen = (combos[None, :, :, None] == given[:, None].double()).all(2).double().argmax(1)
    taken = combos[chosen].movedim(2, 1).float()
    return taken, odds.gather(1, chosen[:, None])[:, 0].sum(1)


def _drawn(log_odds: Tensor, generator: torch.Generator | None) -> Tensor:
    """A category for each row of normalised log probabilities (..., categories), by the Gumbel trick."""
    noise = torch.rand(log_odds.shape, generator=generator, dtype=torch.float64)
    return (log_odds - (-noise.clamp(min=1e-300).log()).log()).argmax(-1)
