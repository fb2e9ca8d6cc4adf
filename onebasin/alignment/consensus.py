"""One frame for a whole population, at a cost linear in its size.

Permutations and signs keep norms, so the sum over all pairs of <w_i, w_j> is |S|^2 / 2 minus a constant, with
S = sum_i w_i. Each network is matched to S - w_i, the sum of all others, and S is updated: coordinate ascent on
|S|^2, a sweep of which costs N matches instead of N^2 / 2. All networks are moved into the one frame of S, so the
result is cycle-consistent by construction.

Members are matched in chunks against one frozen S, so that they can be matched at the same time; a chunk that would
lower |S|^2 is repeated one by one. Chunks, and the shards that they are cut into, depend on N alone, and what shards
add to S is added in their order: results do not depend on the number of workers.

What is compared are `Features`: weights, or the activations of units (`activations.py`). Either way a network is a dict
of tensors that an element only rearranges and flips, so that sums over a population, and all that follows from them,
are the same for both.
"""

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
from onebasin.alignment.balance import balancing_scales
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import Overlap, is_better, polish, search
from onebasin.parallel import Executor, SerialExecutor, align_tensors
from onebasin.population import Population, complete_shards, map_blocks
from onebasin.state import State, check_finite, trained_parameters
from onebasin.symmetry import Element, ExpandedElement, Symmetry, apply_block

_CHUNKS = 16  # at least so many chunks per sweep: more together is staler, fewer at a time keeps fewer workers busy
_LARGEST = 512  # members of a chunk
_SHARDS = 32  # per chunk: enough to share out evenly, few enough not to spend the time on sending them
_SHARD = 16  # members matched together to a fixed reference

Shard = tuple[Population, Element]
"""Some members, and the batch of their elements so far."""


class Features(Protocol):
    """How networks are compared."""

    assignment: Assignment
    missing: Mapping[str, str]  # space name -> why it cannot be compared

    def features(self, state: Mapping[str, Tensor]) -> State:
        """The tensors of one network that are compared."""

    def apply(self, vertex: Vertex, features: State) -> State:
        """The features of the moved network."""

    def match(self, reference: State, features: State, *, full: bool) -> Vertex | None:
        """The vertex that brings the features closest to a reference; None if none is better than the identity."""


class Weights:
    """Compares weights: overlap <a, g.b> over all tensors that a space moves."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout, self.assignment = layout, Assignment.of(layout)
        tensors = set(layout.tensors)  # without the statistics of batch norms
        spaces = tuple(
            replace(space, legs=tuple(leg for leg in space.legs if leg.tensor in tensors)) for space in layout.spaces
        )
        self.symmetry = Symmetry(spaces, {name: layout.symmetry.shapes[name] for name in layout.tensors})
        self.missing: Mapping[str, str] = {}

    def features(self, state: Mapping[str, Tensor]) -> State:
        """The weights in blocks of the layout."""
        return {name: state[name] for name in self.layout.tensors}

    def apply(self, vertex: Vertex, features: State) -> State:
        """The moved weights."""
        return self.symmetry.apply(self.assignment.element(vertex), features)

    def match(self, reference: State, features: State, *, full: bool) -> Vertex | None:
        """Search from the barycentre if `full`, else climb from the identity."""
        overlap = Overlap(self.layout, self.assignment, reference, features)
        identity = self.assignment.identity()
        start = overlap.value(identity)
        if overlap.degree == 1 or not full:  # one exact assignment per space, or the cheap way
            vertex, value, _ = polish(overlap, identity)
        else:
            result = search(overlap)
            vertex, value = result.vertex, result.value
        return vertex if is_better(value, start) else None


def squared_norm(features: State) -> float:
    """Sum of all squares, in float64."""
    return sum(float(tensor.cpu().double().square().sum()) for tensor in features.values())


def add_features(total: State, features: State, sign: float = 1.0) -> State:
    """The sum total + sign * features, in float64, which some devices lack: on the CPU."""
    return {name: value.cpu().double().add(features[name].cpu().double(), alpha=sign) for name, value in total.items()}


@dataclass(frozen=True, eq=False)
class MatchTarget:
    """What members are matched to.

    Attributes:
        features: of the network to match to; of a population, the sum S. Without any, members stay.
        within: members are part of S, and are matched to what is left without them.
        full: search from the barycentre, else climb from where a member is.
        summed: also add up the moved members.
    """

    features: State
    within: bool = False
    full: bool = True
    summed: bool = True


@dataclass(eq=False)
class ShardMatches:
    """The matches of some members.

    Attributes:
        vertices: moves each member on; None where it stays.
        change: float64, by how much the members change S: w' - w where they were part of it, else w'.
        squares: the sum of |w|^2.
        missing: space name -> why it could not be compared.
    """

    vertices: list[Vertex | None] = field(default_factory=list)
    change: State = field(default_factory=dict)
    squares: float = 0.0
    missing: Mapping[str, str] = field(default_factory=dict)


class Matcher:
    """Matches members of one architecture by one kind of features; runs in workers."""

    def __init__(self, features: Features, symmetry: Symmetry) -> None:
        self.features, self.symmetry = features, symmetry

    def __call__(self, target: MatchTarget, shard: Shard) -> ShardMatches:
        """Match the members of a shard one after the other; no more than one of them is held with its features."""
        matches = ShardMatches()
        for state in moved_members(self.symmetry, shard):
            features = self.features.features(state)
            vertex = self._match(target, features)
            matches.vertices.append(vertex)
            if target.summed:
                self._add(matches, target, features, vertex)
        matches.missing = dict(self.features.missing)
        return matches

    def _match(self, target: MatchTarget, features: State) -> Vertex | None:
        if not target.features:
            return None
        reference: State = {}
        for name, value in features.items():
            total = target.features[name].to(value.device)
            total = total - value.double() if target.within else total
            reference[name] = total.to(torch.promote_types(torch.float32, value.dtype))  # a float64 sum, rounded once
        return self.features.match(reference, features, full=target.full)

    def _add(self, matches: ShardMatches, target: MatchTarget, features: State, vertex: Vertex | None) -> None:
        matches.squares += squared_norm(features)
        if vertex is None and target.within:
            return
        moved = features if vertex is None else self.features.apply(vertex, features)
        for name, value in moved.items():
            if name not in matches.change:
                matches.change[name] = torch.zeros(value.shape, dtype=torch.float64)
            matches.change[name] += value.cpu().double()
            if target.within:
                matches.change[name] -= features[name].cpu().double()


def moved_members(symmetry: Symmetry, shard: Shard) -> Iterator[State]:
    """The members of a shard, each moved by its element."""
    members, elements = shard
    stacked = symmetry.apply(elements, Population.from_stacked(members.stacked())).stacked()
    for row in range(len(members)):
        yield {name: value[row] for name, value in stacked.items()}


class AlignmentState:
    """A population and one element per member so far; members are read when asked for, and never changed."""

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
        layout = BlockLayout.of(self.symmetry, statistics=True)
        layout.check(
            {name: torch.empty(spec.shape, device="meta") for name, spec in self.population.spec.items()},
            where="the population",
        )
        digest = hashlib.sha256()
        weights = frozenset(layout.tensors)
        for sums in self.population.reading_executor(executor).map(
            _member_sums, self.population.parts(shared=True), shared=weights
        ):
            for name, values in sums.items():
                digest.update(name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    def balance(self, executor: Executor) -> None:
        """Start every member at its lightest form."""
        if not self.symmetry.dimensions:
            return
        layout = BlockLayout.of(self.symmetry, statistics=True)
        for start, scales in executor.map(_balancing_scales, self.population.parts(shared=True), shared=layout):
            for name, factor in scales.factors.items():
                self.elements.factors[name][:, start : start + factor.shape[1]] = factor

    def follow(self, start: int, vertices: Sequence[Vertex | None], features: Features) -> int:
        """Move members from `start` on by the vertices of their matches; return how many did not stay."""
        for member, vertex in enumerate(vertices, start):
            if vertex is None:
                continue
            element = self.symmetry.compose(features.assignment.element(vertex), self.elements.member(member))
            for name, order in element.orders.items():
                self.elements.orders[name][member] = order
            for name, factor in element.factors.items():
                self.elements.factors[name][:, member] = factor
        return sum(vertex is not None for vertex in vertices)

    def move_all(self, element: Element) -> None:
        """Move every member on by the same element."""
        self.elements = self.symmetry.compose(element, self.elements)

    def copy(self) -> AlignmentState:
        """The same population with elements of its own."""
        other = AlignmentState(self.population, self.symmetry)
        other.elements = self.symmetry.compose(self.symmetry.identity(), self.elements)
        return other

    def member(self, member: int) -> State:
        """One member, moved by its element so far."""
        return next(moved_members(self.symmetry, next(self.shards(range(member, member + 1), 1))))

    def shards(self, members: range, size: int) -> Iterator[Shard]:
        """Members, `size` at a time, with their elements so far."""
        for start in members[::size]:
            stop = min(members.stop, start + size)
            yield self.population.part(start, stop, shared=True), self.elements.some(start, stop)


def _member_sums(weights: frozenset[str], shard: tuple[int, Population]) -> State:
    """The sum of every tensor of every member, float64 (members,); refuses weights that are not finite."""
    start, members = shard
    sums: State = {}
    for name, values in members.stacked().items():
        flat = values.cpu().reshape(len(values), -1)
        flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
        sums[name] = flat.double().sum(1)
        for row in (~torch.isfinite(sums[name])).nonzero()[:, 0].tolist() if name in weights else ():
            check_finite({name: values[row]}, where=f"member {start + row}")
    return sums


def _balancing_scales(layout: BlockLayout, shard: tuple[int, Population]) -> tuple[int, Element]:
    start, members = shard
    return start, balancing_scales(layout, members.stacked())


def apply_elements(
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

    With `only`, the folder exists, and the shards of these numbers are written into it.
    """
    narrow = [
        name for name, spec in population.spec.items() if spec.dtype.is_floating_point and spec.dtype.itemsize < 4
    ]

    def move(block: State, start: int, elements: Element) -> tuple[State, None]:
        moved = apply_block(ExpandedElement(symmetry, elements), block, 0, kind)
        # Half precision ends at 65,504: a scale may carry a weight beyond.
        check_finite({name: moved[name] for name in narrow}, where=f"members from {start}, once moved,")
        return moved, None

    folder = None if path is None else Path(path)
    if folder is not None and only is not None:
        return complete_shards(population, move, executor or SerialExecutor(), folder, only, elements.some)
    return map_blocks(population, move, executor or SerialExecutor(), path=folder, extras=elements.some).population


@dataclass
class SweepProgress:
    """How far the sweeps have come; with the elements so far all that is needed to go on.

    The names of its fields are those of the journal's file.
    """

    sweep: int = 0
    place: int = 0  # the next member of this sweep
    moved: int = 0  # members moved in this sweep
    total: State = field(default_factory=dict)  # S
    norms: float = 0.0  # sum of |w_i|^2
    history: list[float] = field(default_factory=list)  # mean overlap of a pair after each sweep
    done: bool = False
    stage: int = 0  # by activations there may be a second round

    def overlap(self, members: int) -> float:
        """Mean of <w_i, w_j> over pairs."""
        return _mean_overlap(self.total, self.norms, members)


class Consensus:
    """Sweeps over a population until no member moves."""

    def __init__(
        self, current: AlignmentState, matcher: Matcher, executor: Executor, *, sweeps: int, tolerance: float
    ) -> None:
        self.current, self.matcher, self.executor = current, matcher, executor
        self.sweeps, self.tolerance = sweeps, tolerance
        self.missing: Mapping[str, str] = {}  # see `Features`

    def run(self, progress: SweepProgress, report: Callable[[SweepProgress], None]) -> SweepProgress:
        """Go on to the end; `report` is called after each chunk, when sum and elements are consistent."""
        members = len(self.current)
        while not progress.done:
            for start, stop in self._chunks(progress):
                self._chunk(progress, range(start, stop))
                progress.place = stop
                report(progress)
            progress.history.append(progress.overlap(members))
            progress.done = self._finished(progress)
            progress.sweep, progress.place, progress.moved = progress.sweep + 1, 0, 0
            report(progress)
        return progress

    def _finished(self, progress: SweepProgress) -> bool:
        if len(self.current) == 1 or progress.sweep + 1 >= self.sweeps:
            return True
        if progress.sweep == 0:
            return False  # it only placed members: the first improvement is still to come
        gained = progress.history[-1] - progress.history[-2]
        return not progress.moved or gained <= self.tolerance * abs(progress.history[-1])

    def _chunks(self, progress: SweepProgress) -> Iterator[tuple[int, int]]:
        """The first sweep builds S up, so its chunks must not outgrow what S already holds."""
        members = len(self.current)
        widest = max(1, min(_LARGEST, members // _CHUNKS))
        start = progress.place
        while start < members:
            width = min(widest, max(1, start)) if progress.sweep == 0 else widest
            yield start, min(members, start + width)
            start += width

    def _chunk(self, progress: SweepProgress, members: range) -> None:
        if progress.sweep == 0:
            self._place(progress, members)
        else:
            self._improve(progress, members, self.executor)

    def _place(self, progress: SweepProgress, members: range) -> None:
        """First sweep: match new members to the sum of those before, then add them."""
        for start, matches in self._matches(members, MatchTarget(progress.total), self.executor):
            progress.total = add_features(progress.total, matches.change) if progress.total else matches.change
            progress.norms += matches.squares
            self._move(progress, start, matches)

    def _improve(self, progress: SweepProgress, members: range, executor: Executor) -> None:
        """Later sweeps: match members to the sum of all others."""
        target = MatchTarget(progress.total, within=True, full=progress.sweep == 1)
        shards, total = [], progress.total
        for start, matches in self._matches(members, target, executor):
            shards.append((start, matches))
            total = add_features(total, matches.change) if matches.change else total
        movers = sum(vertex is not None for _, matches in shards for vertex in matches.vertices)
        if movers > 1 and squared_norm(total) < squared_norm(progress.total):
            for member in members:
                self._improve(progress, range(member, member + 1), SerialExecutor())
            return
        progress.total = total
        for start, matches in shards:
            self._move(progress, start, matches)

    def _matches(self, members: range, target: MatchTarget, executor: Executor) -> Iterator[tuple[int, ShardMatches]]:
        """Match the members of a chunk, shard by shard."""
        size = -(-len(members) // _SHARDS)
        shards = self.current.shards(members, size)
        return zip(members[::size], executor.map(self.matcher, shards, shared=target), strict=True)

    def _move(self, progress: SweepProgress, start: int, matches: ShardMatches) -> None:
        progress.moved += self.current.follow(start, matches.vertices, self.matcher.features)
        self.missing = matches.missing


class MatchToReference:
    """Matches every member of a population to one network, each once."""

    def __init__(
        self, current: AlignmentState, matcher: Matcher, executor: Executor, reference: Mapping[str, Tensor]
    ) -> None:
        """`reference` is a whole network, in the scale in which members are compared."""
        self.current, self.matcher, self.executor = current, matcher, executor
        self.target = MatchTarget(align_tensors(matcher.features.features(reference)), summed=False)
        self.missing: Mapping[str, str] = {}  # see `Features`

    def run(self, progress: SweepProgress, report: Callable[[SweepProgress], None]) -> SweepProgress:
        """Go on to the end; `report` is called after each shard."""
        members = range(progress.place, len(self.current))
        for matches in self.executor.map(self.matcher, self.current.shards(members, _SHARD), shared=self.target):
            progress.moved += self.current.follow(progress.place, matches.vertices, self.matcher.features)
            progress.place += len(matches.vertices)
            self.missing = matches.missing
            report(progress)
        progress.sweep, progress.done = 1, True
        return progress


def medoid(current: AlignmentState, matcher: Matcher, executor: Executor) -> int:
    """Number of the most central member: closest to the mean once all are matched to the first.

    To compare all pairs would take N^2 matches; seen from one member, the population's centre takes N. The elements so
    far are left as they were.
    """
    trial = current.copy()
    MatchToReference(trial, matcher, executor, current.member(0)).run(SweepProgress(), lambda progress: None)
    members = range(len(trial))
    total: State = {}
    stay = MatchTarget({})  # without features to match to, members stay, and are summed
    for matches in executor.map(matcher, trial.shards(members, _SHARD), shared=stay):
        total = add_features(total, matches.change) if total else matches.change
    mean = {name: value / len(trial) for name, value in total.items()}
    distances = executor.map(_DistancesTo(matcher), trial.shards(members, _SHARD), shared=mean)
    return int(torch.tensor([distance for shard in distances for distance in shard]).argmin())


class _DistancesTo:
    """Squared distances of members from a network."""

    def __init__(self, matcher: Matcher) -> None:
        self.features, self.symmetry = matcher.features, matcher.symmetry

    def __call__(self, mean: State, shard: Shard) -> list[float]:
        states = moved_members(self.symmetry, shard)
        return [squared_norm(add_features(mean, self.features.features(state), -1.0)) for state in states]


@dataclass(frozen=True, eq=False)
class Agreement:
    """Mean overlap of two different members, the mean network (or a given one), and distances to it (members,)."""

    overlap: float
    reference: State
    residual: Tensor


def overlap_of_moved(symmetry: Symmetry, population: Population, elements: Element, executor: Executor) -> float:
    """Mean overlap of two different members once each is moved by its element; the moved ones are not stored."""
    weights = _weights(symmetry, population)
    shards = ((members, elements.some(start, start + len(members))) for start, members in population.parts(shared=True))
    total, norms = _joined(population.reading_executor(executor).map(_Sums(symmetry, weights), shards, shared=None))
    return _mean_overlap({name: total[name] for name in weights}, norms, len(population))


def agreement(
    symmetry: Symmetry, population: Population, reference: Mapping[str, Tensor] | None, executor: Executor
) -> Agreement:
    """Overlap of members and distances to a network (None: to their mean), in two passes over blocks, in float64."""
    weights = _weights(symmetry, population)
    shards = ((members, None) for _, members in population.parts(shared=True))
    total, norms = _joined(population.reading_executor(executor).map(_Sums(symmetry, weights), shards, shared=None))
    members = len(population)
    first = population.member(0)
    mean = {
        name: (total[name] / members).to(spec.dtype) if name in total and name not in symmetry.frozen else first[name]
        for name, spec in population.spec.items()
    }
    centre = mean if reference is None else {**mean, **dict(reference)}
    weights_of_centre = {name: centre[name].cpu() for name in weights}
    distances = population.reading_executor(executor).map(
        _squared_distances, population.parts(shared=True), shared=weights_of_centre
    )
    overlap = _mean_overlap({name: total[name] for name in weights}, norms, members)
    return Agreement(overlap, centre, torch.cat(list(distances)))


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
                wide = values.cpu().double()
                total[name] = wide.sum(0)
                norms += float(wide.square().sum()) if name in self.weights else 0.0
        return total, norms


def _joined(sums: Iterable[tuple[State, float]]) -> tuple[State, float]:
    """Add sums up, in their order."""
    total: State = {}
    norms = 0.0
    for addend, squares in sums:
        total = {name: total[name] + value for name, value in addend.items()} if total else addend
        norms += squares
    return total, norms


def _mean_overlap(total: State, norms: float, members: int) -> float:
    """(|S|^2 - sum |w_i|^2) / (N (N - 1))."""
    return (squared_norm(total) - norms) / max(1, members * (members - 1))


def _squared_distances(centre: State, shard: tuple[int, Population]) -> Tensor:
    """Squared distances of some members from a network (members,)."""
    _, members = shard
    distances = torch.zeros(len(members), dtype=torch.float64)
    block = members.stacked()
    for name, middle in centre.items():
        distances += (block[name].cpu().double() - middle.double()).square().flatten(1).sum(1)
    return distances
