"""How well the members of a population agree, weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebasin.alignment.features import (
    AlignmentState,
    Features,
    Matched,
    Matcher,
    MatchTarget,
    Standing,
    added,
    norm,
    standing,
)
from onebasin.parallel import Executor, SerialExecutor, settled
from onebasin.population import Population, parts, readers
from onebasin.state import State, trained_parameters
from onebasin.symmetry import Element, ExpandedElement, Symmetry, apply_block

# ----------------------------------------------------------------------
# One frame for a whole population, at a cost linear in its size.


_CHUNKS = 16  # at least so many chunks per sweep: more together is staler, fewer at a time keeps fewer workers busy
_LARGEST = 512
_SHARDS = 32  # per chunk: enough to share out evenly, few enough not to travel all the time


@dataclass
class Progress:
    """How far the sweeps have come; with the frame's elements all that is needed to go on."""

    sweep: int = 0
    place: int = 0  # the next member of this sweep
    moved: int = 0  # members moved in this sweep
    total: State = field(default_factory=dict)
    norms: float = 0.0  # sum of |w_i|^2
    history: list[float] = field(default_factory=list)  # mean overlap of a pair after each sweep
    done: bool = False
    stage: int = 0  # by activations there may be a second round

    def overlap(self, members: int) -> float:
        """Mean of <w_i, w_j> over pairs."""
        return (norm(self.total) - self.norms) / max(1, members * (members - 1))


class Consensus:
    """Sweeps over a population until nothing moves."""

    def __init__(
        self, frame: AlignmentState, matcher: Matcher, executor: Executor, *, sweeps: int, tolerance: float
    ) -> None:
        self.frame, self.matcher, self.executor = frame, matcher, executor
        self.sweeps, self.tolerance = sweeps, tolerance
        self.missing: Mapping[str, str] = {}  # what could not be compared, see `View`

    def run(self, at: Progress, tell: Callable[[Progress], None]) -> Progress:
        """Go on from `at` to the end; `tell` is called after each chunk, when everything is consistent."""
        members = len(self.frame)
        while not at.done:
            for start, stop in self._chunks(at):
                self._chunk(at, range(start, stop))
                at.place = stop
                tell(at)
            at.history.append(at.overlap(members))
            at.done = self._finished(at)
            at.sweep, at.place, at.moved = at.sweep + 1, 0, 0
            tell(at)
        return at

    def _finished(self, at: Progress) -> bool:
        if len(self.frame) == 1 or at.sweep + 1 >= self.sweeps:
            return True
        if at.sweep == 0:
            return False  # it only placed members: the first improvement is still to come
        gained = at.history[-1] - at.history[-2]
        return not at.moved or gained <= self.tolerance * abs(at.history[-1])

    def _chunks(self, at: Progress) -> Iterator[tuple[int, int]]:
        """The first sweep builds S up, so its chunks must not outgrow what S already holds."""
        members = len(self.frame)
        widest = max(1, min(_LARGEST, members // _CHUNKS))
        start = at.place
        while start < members:
            width = min(widest, max(1, start)) if at.sweep == 0 else widest
            yield start, min(members, start + width)
            start += width

    def _chunk(self, at: Progress, members: range) -> None:
        if at.sweep == 0:
            self._place(at, members)
        else:
            self._improve(at, members, self.executor)

    def _place(self, at: Progress, members: range) -> None:
        """First sweep: match new members to the sum of those before, then add them."""
        for start, found in self._matched(members, MatchTarget(at.total), self.executor):
            at.total = added(at.total, found.change) if at.total else found.change
            at.norms += found.squares
            self._move(at, start, found)

    def _improve(self, at: Progress, members: range, executor: Executor) -> None:
        """Later sweeps: match members to the sum of all others."""
        target = MatchTarget(at.total, within=True, full=at.sweep == 1)
        parts, total = [], at.total
        for start, found in self._matched(members, target, executor):
            parts.append((start, found))
            total = added(total, found.change) if found.change else total
        movers = sum(vertex is not None for _, found in parts for vertex in found.vertices)
        if movers > 1 and norm(total) < norm(at.total):
            for member in members:
                self._improve(at, range(member, member + 1), SerialExecutor())
            return
        at.total = total
        for start, found in parts:
            self._move(at, start, found)

    def _matched(self, members: range, target: MatchTarget, executor: Executor) -> Iterator[tuple[int, Matched]]:
        """Match the members of a chunk, shard by shard."""
        size = -(-len(members) // _SHARDS)
        shards = self.frame.shards(members, size)
        return zip(members[::size], executor.map(self.matcher, shards, shared=target), strict=True)

    def _move(self, at: Progress, start: int, found: Matched) -> None:
        at.moved += self.frame.follow(start, found.vertices, self.matcher.view)
        self.missing = found.missing


# ----------------------------------------------------------------------
# Many networks matched to one fixed reference, each once.


_SHARD = 16  # members matched together


class MatchToReference:
    """Matches every member of a population to one network."""

    def __init__(
        self, frame: AlignmentState, matcher: Matcher, executor: Executor, reference: Mapping[str, Tensor]
    ) -> None:
        """`reference` is a whole network, in the scale in which members are compared."""
        self.frame, self.matcher, self.executor = frame, matcher, executor
        self.target = MatchTarget(settled(matcher.view.features(reference)), summed=False)
        self.missing: Mapping[str, str] = {}  # what could not be compared, see `View`

    def run(self, at: Progress, tell: Callable[[Progress], None]) -> Progress:
        """Go on from `at` to the end; `tell` is called after each shard."""
        members = range(at.place, len(self.frame))
        for found in self.executor.map(self.matcher, self.frame.shards(members, _SHARD), shared=self.target):
            at.moved += self.frame.follow(at.place, found.vertices, self.matcher.view)
            at.place += len(found.vertices)
            self.missing = found.missing
            tell(at)
        at.sweep, at.done = 1, True
        return at


def medoid(frame: AlignmentState, matcher: Matcher, executor: Executor) -> int:
    """The most central member: closest to the mean once all are matched to the first. The frame is left as it was.

    To compare all pairs would take N^2 matches; seen from one member, the population's centre takes N.
    """
    trial = frame.copy()
    MatchToReference(trial, matcher, executor, frame.first()).run(Progress(), lambda at: None)
    everybody, apart = range(len(trial)), _Apart(matcher.view, frame.symmetry)
    total: State = {}
    stay = MatchTarget({})  # matched to nothing, members stay, and are summed
    for found in executor.map(matcher, trial.shards(everybody, _SHARD), shared=stay):
        total = added(total, found.change) if total else found.change
    mean = {name: value / len(trial) for name, value in total.items()}
    distances = executor.map(apart, trial.shards(everybody, _SHARD), shared=mean)
    return int(torch.tensor([own for part in distances for own in part]).argmin())


class _Apart:
    """Squared distances of members from a network."""

    def __init__(self, view: Features, symmetry: Symmetry) -> None:
        self.view, self.symmetry = view, symmetry

    def __call__(self, mean: State, shard: Standing) -> list[float]:
        return [norm(added(mean, self.view.features(state), -1.0)) for state in standing(self.symmetry, shard)]


# ----------------------------------------------------------------------
# How well the members of a population agree, weight by weight.


@dataclass(frozen=True, eq=False)
class Agreement:
    """Mean overlap of two different members, the mean network (or a given one), and distances to it (members,)."""

    overlap: float
    reference: State
    residual: Tensor


def mean_overlap(symmetry: Symmetry, population: Population, elements: Element, executor: Executor) -> float:
    """Mean overlap of two different members once each is moved by its element; nothing is kept."""
    weights = _weights(symmetry, population)
    shards = ((members, elements.some(start, start + len(members))) for start, members in parts(population))
    total, norms = _joined(readers(population, executor).map(_Sums(symmetry, weights), shards, shared=None))
    return _overlap({name: total[name] for name in weights}, norms, len(population))


def agreement(
    symmetry: Symmetry, population: Population, reference: Mapping[str, Tensor] | None, executor: Executor
) -> Agreement:
    """Measure a population in two passes over its blocks, in float64.

    Args:
        symmetry: says which tensors are the network's.
        population: the members.
        reference: measure distances to this network; to the mean of all members if None.
        executor: who reads them.
    """
    weights = _weights(symmetry, population)
    shards = ((members, None) for _, members in parts(population))
    total, norms = _joined(readers(population, executor).map(_Sums(symmetry, weights), shards, shared=None))
    members, heavy = len(population), {name: total[name] for name in weights}
    first = population.member(0)
    mean = {
        name: (total[name] / members).to(spec.dtype) if name in total and name not in symmetry.frozen else first[name]
        for name, spec in population.spec.items()
    }
    centre = mean if reference is None else {**mean, **dict(reference)}
    aim = {name: centre[name].cpu() for name in weights}
    residual = torch.cat(list(readers(population, executor).map(_residual, parts(population), shared=aim)))
    return Agreement(_overlap(heavy, norms, members), centre, residual)


def _weights(symmetry: Symmetry, population: Population) -> list[str]:
    trained = trained_parameters(population.spec, frozen=symmetry.frozen)
    return [name for name in trained if name in symmetry.shapes and population.spec[name].dtype.is_floating_point]


class _Sums:
    """The sum of every floating-point tensor over some members, moved or not, and the sum of squares of the weights."""

    def __init__(self, symmetry: Symmetry, weights: list[str]) -> None:
        self.symmetry, self.weights = symmetry, weights

    def __call__(self, shared: None, shard: tuple[Population, Element | None]) -> tuple[State, float]:
        members, elements = shard
        block = members.stacked()
        if elements is not None:
            block = apply_block(ExpandedElement(self.symmetry, elements), block, 0, "value")
        total: State = {}
        norms = 0.0
        for name, values in block.items():
            if values.is_floating_point():
                part = values.cpu().double()
                total[name] = part.sum(0)
                norms += float(part.square().sum()) if name in self.weights else 0.0
        return total, norms


def _joined(found: Iterable[tuple[State, float]]) -> tuple[State, float]:
    """Add sums up, in their order."""
    total: State = {}
    norms = 0.0
    for own, squares in found:
        total = {name: total[name] + value for name, value in own.items()} if total else own
        norms += squares
    return total, norms


def _overlap(total: State, norms: float, members: int) -> float:
    """(|S|^2 - sum |w_i|^2) / (N (N - 1))."""
    return (norm(total) - norms) / max(1, members * (members - 1))


def _residual(centre: State, shard: tuple[int, Population]) -> Tensor:
    """Squared distances of some members from a network (members,)."""
    _, members = shard
    found = torch.zeros(len(members), dtype=torch.float64)
    block = members.stacked()
    for name, middle in centre.items():
        found += (block[name].cpu().double() - middle.double()).square().flatten(1).sum(1)
    return found
