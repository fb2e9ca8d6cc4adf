"""How well the members of a population agree, weight by weight."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onebasin.alignment.assignment import Assignment, Vertex
from onebasin.alignment.balance import balancing
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import Overlap, is_better, polish, search
from onebasin.parallel import Executor, SerialExecutor, settled
from onebasin.population import Population, completed, mapped, members_between, parts, readers
from onebasin.state import State, check_finite, trained_parameters
from onebasin.symmetry import Element, ExpandedElement, Symmetry, apply_block


class Features(Protocol):
    """How networks are compared."""

    assignment: Assignment
    missing: Mapping[str, str]  # space name -> why it cannot be compared

    def features(self, state: Mapping[str, Tensor]) -> State:
        """What is compared, of one network."""

    def turn(self, vertex: Vertex, features: State) -> State:
        """The features of the moved network."""

    def match(self, reference: State, features: State, *, full: bool) -> Vertex | None:
        """The vertex that brings the features closest to a reference; None if none is better than staying."""


class Weights:
    """Compare weights: overlap <a, g.b> over all tensors that a space moves."""

    def __init__(self, board: BlockLayout) -> None:
        self.board, self.assignment = board, Assignment(board)
        self.symmetry = _restricted(board)
        self.missing: Mapping[str, str] = {}

    def features(self, state: Mapping[str, Tensor]) -> State:
        """The weights on the board."""
        return {name: state[name] for name in self.board.tensors}

    def turn(self, vertex: Vertex, features: State) -> State:
        """Apply the vertex."""
        return self.symmetry.apply(self.assignment.element(vertex), features)

    def match(self, reference: State, features: State, *, full: bool) -> Vertex | None:
        """Search from the barycentre if `full`, else climb from where the network is."""
        overlap = Overlap(self.board, self.assignment, reference, features)
        home = self.assignment.identity()
        start = overlap.value(home)
        if overlap.degree == 1 or not full:  # one exact assignment per space, or the cheap way
            vertex, value, _ = polish(overlap, home)
        else:
            found = search(overlap)
            vertex, value = found.vertex, found.value
        return vertex if is_better(value, start) else None


def _restricted(board: BlockLayout) -> Symmetry:
    """The symmetry of the tensors on the board alone, without the statistics of batch norms."""
    kept = set(board.tensors)
    spaces = tuple(
        replace(space, legs=tuple(leg for leg in space.legs if leg.tensor in kept)) for space in board.spaces
    )
    return Symmetry(spaces, {name: board.symmetry.shapes[name] for name in board.tensors})


def norm(features: State) -> float:
    """Squared norm, in float64."""
    return sum(float(tensor.cpu().double().square().sum()) for tensor in features.values())


def added(total: State, features: State, sign: float = 1.0) -> State:
    """The sum total + sign * features, in float64, which some devices lack: on the CPU."""
    return {name: value.cpu().double().add(features[name].cpu().double(), alpha=sign) for name, value in total.items()}


Standing = tuple[Population, Element]
"""Some members, and the batch of elements that moves them to where they stand."""


@dataclass(frozen=True, eq=False)
class MatchTarget:
    """What members are matched to.

    Attributes:
        features: of the network to match to; of a population, the sum S. Nothing: members stay.
        within: members are part of S, and are matched to what is left without them.
        full: search from the barycentre, else climb from where a member is.
        summed: also add up what becomes of the members.
    """

    features: State
    within: bool = False
    full: bool = True
    summed: bool = True


@dataclass(eq=False)
class Matched:
    """What was found.

    Attributes:
        vertices: where each member goes; None where it stays.
        change: float64, by how much the members change S: w' - w where they were part of it, else w'.
        squares: the sum of |w|^2.
        missing: what could not be compared, see `View`.
    """

    vertices: list[Vertex | None] = field(default_factory=list)
    change: State = field(default_factory=dict)
    squares: float = 0.0
    missing: Mapping[str, str] = field(default_factory=dict)


class Matcher:
    """Matches members of one architecture, compared in one way."""

    def __init__(self, view: Features, symmetry: Symmetry) -> None:
        self.view, self.symmetry = view, symmetry

    def __call__(self, target: MatchTarget, shard: Standing) -> Matched:
        """Match the members of a shard one after the other; no more than one of them is held with its features."""
        found = Matched()
        for state in standing(self.symmetry, shard):
            own = self.view.features(state)
            vertex = self._match(target, own)
            found.vertices.append(vertex)
            if target.summed:
                self._sum(found, target, own, vertex)
        found.missing = dict(self.view.missing)
        return found

    def _match(self, target: MatchTarget, own: State) -> Vertex | None:
        if not target.features:
            return None
        aim: State = {}
        for name, value in own.items():
            total = target.features[name].to(value.device)
            total = total - value.double() if target.within else total
            aim[name] = total.to(torch.promote_types(torch.float32, value.dtype))  # a sum in float64, rounded once
        return self.view.match(aim, own, full=target.full)

    def _sum(self, found: Matched, target: MatchTarget, own: State, vertex: Vertex | None) -> None:
        found.squares += norm(own)
        if vertex is None and target.within:
            return
        new = own if vertex is None else self.view.turn(vertex, own)
        for name, value in new.items():
            if name not in found.change:
                found.change[name] = torch.zeros(value.shape, dtype=torch.float64)
            found.change[name] += value.cpu().double()
            if target.within:
                found.change[name] -= own[name].cpu().double()


def standing(symmetry: Symmetry, shard: Standing) -> Iterator[State]:
    """The members of a shard, each moved to where it stands."""
    part, elements = shard
    stacked = symmetry.apply(elements, Population.from_stacked(part.stacked())).stacked()
    for row in range(len(part)):
        yield {name: value[row] for name, value in stacked.items()}


class AlignmentState:
    """A population and one element per member; members are read when asked for, and never changed."""

    def __init__(self, population: Population, symmetry: Symmetry) -> None:
        self.population, self.symmetry = population, symmetry
        self.elements = symmetry.identity(len(population))

    def __len__(self) -> int:
        return len(self.population)

    def check(self, executor: Executor) -> str:
        """Raise unless members fit the symmetry and are finite; read one block at a time.

        Returns:
            A fingerprint of the population: the sum of every tensor of every member.
        """
        board = BlockLayout.of(self.symmetry, statistics=True)
        board.check(
            {name: torch.empty(spec.shape, device="meta") for name, spec in self.population.spec.items()},
            where="the population",
        )
        digest = hashlib.sha256()
        weights = frozenset(board.tensors)
        for sums in readers(self.population, executor).map(_sums, parts(self.population), shared=weights):
            for name, values in sums.items():
                digest.update(name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    def balance(self, executor: Executor) -> None:
        """Start every member at its lightest form."""
        if not self.symmetry.dimensions:
            return
        board = BlockLayout.of(self.symmetry, statistics=True)
        for start, found in executor.map(_balancing, parts(self.population), shared=board):
            for name, factor in found.factors.items():
                self.elements.factors[name][:, start : start + factor.shape[1]] = factor

    def element(self, member: int) -> Element:
        """The element of one member."""
        return self.elements.member(member)

    def move(self, member: int, element: Element) -> None:
        """Move a member on."""
        made = self.symmetry.compose(element, self.element(member))
        for name, order in made.orders.items():
            self.elements.orders[name][member] = order
        for name, factor in made.factors.items():
            self.elements.factors[name][:, member] = factor

    def follow(self, start: int, vertices: Sequence[Vertex | None], view: Features) -> int:
        """Move members from `start` on to the vertices that were found for them; return how many did not stay."""
        for member, vertex in enumerate(vertices, start):
            if vertex is not None:
                self.move(member, view.assignment.element(vertex))
        return sum(vertex is not None for vertex in vertices)

    def move_all(self, element: Element) -> None:
        """Move every member on by the same element."""
        self.elements = self.symmetry.compose(element, self.elements)

    def copy(self) -> AlignmentState:
        """Another frame of the same population, which moves by itself."""
        other = AlignmentState(self.population, self.symmetry)
        other.elements = self.symmetry.compose(self.symmetry.identity(), self.elements)
        return other

    def one(self, member: int) -> State:
        """One member as it stands now."""
        return next(standing(self.symmetry, next(self.shards(range(member, member + 1), 1))))

    def first(self) -> State:
        """The first member as it stands now."""
        return self.one(0)

    def shards(self, members: range, size: int) -> Iterator[Standing]:
        """Members, `size` at a time, with where they stand now; each travels alone."""
        for start in members[::size]:
            stop = min(members.stop, start + size)
            yield members_between(self.population, start, stop), self.elements.some(start, stop)


def _sums(weights: frozenset[str], shard: tuple[int, Population]) -> State:
    """The sum of every tensor of every member, float64 (members,); refuses weights that are not finite."""
    start, members = shard
    found: State = {}
    for name, values in members.stacked().items():
        flat = values.cpu().reshape(len(values), -1)
        flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
        found[name] = flat.double().sum(1)
        for row in (~torch.isfinite(found[name])).nonzero()[:, 0].tolist() if name in weights else ():
            check_finite({name: values[row]}, where=f"member {start + row}")
    return found


def _balancing(board: BlockLayout, shard: tuple[int, Population]) -> tuple[int, Element]:
    """The scales that balance some members."""
    start, members = shard
    return start, balancing(board, members.stacked())


def moved(
    population: Population,
    symmetry: Symmetry,
    elements: Element,
    *,
    kind: str = "value",
    path: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    only: list[int] | None = None,
) -> Population:
    """Apply one element to each member; into a new folder if there is a path, block by block, else in memory.

    With `only`, the folder is there, and the shards of these numbers are written into it.
    """
    narrow = [
        name for name, spec in population.spec.items() if spec.dtype.is_floating_point and spec.dtype.itemsize < 4
    ]

    def move(block: State, start: int, own: Element) -> tuple[State, None]:
        made = apply_block(ExpandedElement(symmetry, own), block, 0, kind)
        # Half precision ends at 65,504: a scale may carry a weight beyond.
        check_finite({name: made[name] for name in narrow}, where=f"members from {start}, once moved,")
        return made, None

    goal = None if path is None else Path(path)
    if goal is not None and only is not None:
        return completed(population, move, executor or SerialExecutor(), goal, only, elements.some)
    return mapped(population, move, executor or SerialExecutor(), path=goal, beside=elements.some).population


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
