"""The density of a network averaged over its orbit: how probable a function is, whichever of its copies is looked at.

A posterior fitted in one basin gives almost no density to the n! other copies of a network. Spread evenly over all of
them (Gelberg et al., 2024, symmetrise variational posteriors this way) it becomes

    q_G(w) = 1/|G| sum over g in G of q(g.w),    G all permutations and signs.

The sum is estimated by importance sampling, with elements drawn around the best one (`Proposal`). Spaces are drawn one
after the other. Given all others, the log density of a diagonal Gaussian at g.w is a sum over coordinates x of scores
S[x, y, s]: what it is worth that x comes from unit y with signs s. The sum over all orders is then a permanent; it is
sampled row by row among the units that are left, with scores balanced by Sinkhorn's scaling so that early rows leave
late ones their due (Kou and McCullagh, 2009).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.alignment import Assignment, BlockLayout, Overlap, SpacePlacement, Vertex, polish, search
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.posterior.gaussian import Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.reporting import Axis, Column, Number, Record, Result, Series, Table, one_panel, result_record
from onebasin.state import State, check_state
from onebasin.symmetry import Element, Symmetry

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
        self, space: int, made: list[Vertex], wanted: list[SpacePlacement] | None, generator: torch.Generator | None
    ) -> tuple[list[SpacePlacement], Tensor]:
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
        places = [SpacePlacement(*pair) for pair in zip(torch.cat(sources, 1), torch.cat(signs, 2), strict=True)]
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


def _equal(a: SpacePlacement, b: SpacePlacement) -> bool:
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


_CHUNK = 1 << 24  # scores of so many numbers at once


@dataclass(frozen=True, repr=False)
class OrbitDensity(Result):
    """An estimate of log q_G(w).

    Attributes:
        value: the estimate, in nats.
        error: its standard error, as far as the draws show, and 1 / samples for what they did not show.
        bound: log q(g.w) - log |G| for the best g found, which the truth is never below.
        effective: effective number of draws behind the value.
    """

    value: float
    error: float
    bound: float
    effective: float

    def record(self) -> Record:
        """A table of the numbers, and the estimate beside its bound."""
        text = (
            f"The log density is {self.value:.6g} ± {self.error:.2g} nats, at least {self.bound:.6g}, from "
            f"{self.effective:.0f} effective draws."
        )
        rows = (
            ("estimate", Number(self.value, self.error)),
            ("lower bound", Number(self.bound)),
            ("effective draws", Number(self.effective)),
        )
        places = (self.bound, self.value)
        ends = ((self.bound, self.value - self.error), (self.bound, self.value + self.error))
        points = Series("", (0.0, 1.0), places, *ends)
        return result_record(
            "orbit-density",
            "Log density averaged over the orbit of a network",
            text,
            (
                Table(
                    "numbers",
                    "The estimate",
                    (Column(""), Column("value (nats)", digits=3)),
                    rows,
                    "± one standard error",
                ),
                one_panel(
                    "interval",
                    "How sure is the estimate?",
                    text,
                    "points",
                    Axis("", low=-0.6, high=1.6, names=("lower bound", "estimate")),
                    "log density (nats)",
                    series=(points,),
                ),
            ),
            values={"value": self.value, "error": self.error, "bound": self.bound, "effective": self.effective},
        )


class _Part(NamedTuple):
    """Logarithms of one component's part: estimate, its relative variance, bound, and the draws' effective number."""

    value: float
    variance: float
    bound: float
    effective: float


def orbit_log_density(
    posterior: Posterior,
    state: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    samples: int = 200,
    generator: torch.Generator,
) -> OrbitDensity:
    """Estimate log 1/|G| sum_g q(g.w) over permutations and signs by importance sampling.

    Uniform elements never hit the few that count. So the best element is searched first, and elements are drawn around
    it by `Proposal`. It reaches the whole group, unless spaces are fibred over spaces that move (features in heads):
    what moves heads is added by uniform draws, which see it only where it counts in the mean. The estimate of q_G is
    unbiased, so its logarithm is low on average; trust it where `error` is small.

    Args:
        posterior: q; it needs a density.
        state: the network w.
        symmetry: of its architecture; positive scales take no part.
        samples: draws for each component of q.
        generator: for the draws.
    """
    if samples < 10:
        raise InputError(f"expected at least 10 samples, found {samples}: give more")
    check_state(state, posterior.spec, where="the network")
    orbit = _Orbit(posterior.layout, state, symmetry)
    weights = posterior.weights.tolist()
    parts = [
        orbit.part(component, samples, generator)
        for component, weight in zip(posterior.components, weights, strict=True)
        if weight
    ]
    shares = torch.tensor([weight for weight in weights if weight], dtype=torch.float64).log()
    values, bounds = (torch.tensor([part[i] for part in parts], dtype=torch.float64) + shares for i in (0, 2))
    value = float(values.logsumexp(0))
    part_of = (values - value).exp()
    error = math.sqrt(float((part_of.square() * torch.tensor([part.variance for part in parts])).sum()))
    effective = float((part_of * torch.tensor([part.effective for part in parts])).sum())
    return OrbitDensity(value, error, float(bounds.logsumexp(0)), effective)


class _Orbit:
    """One network and its group."""

    def __init__(self, layout: FlatLayout, state: Mapping[str, Tensor], symmetry: Symmetry) -> None:
        self.layout, self.symmetry = layout, symmetry
        self.state: State = {name: state[name].detach() for name in layout.spec}
        self.board = BlockLayout.of(symmetry)
        self.assignment = Assignment(self.board, plain=True)
        self.log_order = symmetry.log10_order * math.log(10)

    def part(self, component: Gaussian, samples: int, generator: torch.Generator) -> _Part:
        """The orbit average of one Gaussian: over what the proposal reaches, and over the rest."""
        component.log_density(self.layout.flat(self.state))  # refuses Gaussians that have none
        overlap = self._overlap(component)
        best = _best(overlap)
        proposal = Proposal(overlap, best)
        bound = float(self._log_densities(component, [best])) - self.log_order
        near = []
        for count in _portions(samples, overlap):
            vertices, chance = proposal.draw(count, generator)
            near.append(self._log_densities(component, vertices) - self.log_order - chance)
        logs = [torch.cat(near)]
        if not proposal.reaches_all:
            away = [self._beyond(proposal, component, count, generator) for count in _portions(samples, overlap)]
            logs.append(torch.cat(away))
        return _judged(logs, bound)

    def _beyond(self, proposal: Proposal, component: Gaussian, count: int, generator: torch.Generator) -> Tensor:
        """Log densities at uniform elements; -inf where the proposal has been already."""
        freedoms = ("permutation", "sign", "norm-sign")
        elements = (self.symmetry.random(generator, freedoms=freedoms) for _ in range(count))
        vertices = [self.assignment.vertex(element, self.board) for element in elements]
        reached = proposal.log_probability(vertices) > -torch.inf
        return self._log_densities(component, vertices).masked_fill(reached, -torch.inf)

    def _overlap(self, component: Gaussian) -> Overlap:
        """The function log q(g.w) of g for independent weights, up to a constant.

        - 1/2 |(g.w - mean) / std|^2 = <mean / std^2, g.w> - <1 / (2 std^2), g.w^2> + constant.
        """
        spread = component.covariance.std().double()
        pull = self._tensors(component.centre.double() / spread.square())
        hold = self._tensors(-0.5 / spread.square())
        weights = {name: value.double() for name, value in self.state.items()}
        squares = {name: value.square() for name, value in weights.items()}
        return Overlap(self.board, self.assignment, pull, weights, std=(hold, squares))

    def _tensors(self, flat: Tensor) -> State:
        """A vector (D,) as tensors; zeros for what is not in it."""
        pieces = dict(zip(self.layout.names, flat.split(self.layout.sizes), strict=True))
        return {
            name: pieces[name].reshape(tensor.shape) if name in pieces else flat.new_zeros(tensor.shape)
            for name, tensor in self.layout.spec.items()
        }

    def _log_densities(self, component: Gaussian, vertices: list[Vertex]) -> Tensor:
        step = max(1, _CHUNK // max(1, self.layout.size))
        parts = [self._some(component, vertices[start : start + step]) for start in range(0, len(vertices), step)]
        return torch.cat(parts).cpu()

    def _some(self, component: Gaussian, vertices: list[Vertex]) -> Tensor:
        """Log densities (n,) at the network moved by each of n elements at once."""
        elements = [self.assignment.element(vertex) for vertex in vertices]
        orders = {name: torch.stack([element.orders[name] for element in elements]) for name in elements[0].orders}
        factors = {
            name: torch.stack([element.factors[name] for element in elements], 1) for name in elements[0].factors
        }
        copies = {name: value.expand(len(elements), *value.shape) for name, value in self.state.items()}
        batch = Element(orders, factors, len(elements))
        moved = self.symmetry.apply(batch, Population.from_stacked(copies)).stacked()
        return component.log_density(torch.cat([moved[name].flatten(1).double() for name in self.layout.names], 1))


def _best(overlap: Overlap) -> Vertex:
    """The element with the largest log density that the search finds."""
    searched = search(overlap)
    vertex, value, _ = polish(overlap, overlap.assignment.identity())
    return vertex if value > searched.value else searched.vertex


def _portions(samples: int, overlap: Overlap) -> list[int]:
    """Cut a number of draws so that the scores of one portion fit in memory."""
    signs = overlap.assignment.signs
    scores = (
        2 ** len(characters) * part.shape[-1] ** 2 for characters, part in zip(signs, overlap.linear, strict=True)
    )
    step = max(1, _CHUNK // max(scores, default=1))
    return [min(step, samples - start) for start in range(0, samples, step)]


def _judged(logs: list[Tensor], bound: float) -> _Part:
    """The sum over parts of the orbit of the means of their weights, given as logarithms, and its variance."""
    value = float(torch.stack([part.logsumexp(0) - math.log(len(part)) for part in logs]).logsumexp(0))
    relative = [(part - value).exp() for part in logs]
    unseen = 1 / len(logs[0]) ** 2  # an element that is drawn once in so many times may be missing
    variance = unseen + sum(float(part.var()) / len(part) for part in relative)
    return _Part(value, variance, bound, float(relative[0].sum().square() / relative[0].square().sum()))
