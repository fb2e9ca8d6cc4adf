"""One frame for a whole crowd, at a cost linear in its size.

Permutations and signs keep norms, so the sum over all pairs of <w_i, w_j> is |S|^2 / 2 minus a constant, with
S = sum_i w_i. Each network is matched to S - w_i, the sum of all others, and S is updated: coordinate ascent on
|S|^2, a sweep of which costs N matches instead of N^2 / 2. All networks are moved into the one frame of S, so the
result is cycle-consistent by construction.

Members are matched in chunks against one frozen S, so that they can be matched at the same time; a chunk that would
lower |S|^2 is repeated one by one. The size of chunks depends on N alone: results do not depend on who does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onebasin.align.crowd.crew import Crew
from onebasin.align.crowd.frame import Frame
from onebasin.align.crowd.view import added, norm, zeros
from onebasin.align.pair.assign import Vertex
from onebasin.state import State

_CHUNKS = 16  # at least so many chunks per sweep: more together is staler, fewer at a time is slower
_LARGEST = 64


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
    """Sweeps over a crowd until nothing moves."""

    def __init__(self, frame: Frame, crew: Crew, *, sweeps: int, tolerance: float) -> None:
        self.frame, self.view, self.crew = frame, crew.view, crew
        self.sweeps, self.tolerance = sweeps, tolerance

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
        features = [self.view.features(state) for state in self.frame.moved(members)]
        if at.sweep == 0:
            self._place(at, members, features)
        else:
            self._improve(at, members, features)

    def _place(self, at: Progress, members: range, features: Sequence[State]) -> None:
        """First sweep: match new members to the sum of those before, then add them."""
        if not at.total:
            at.total = zeros(features[0])
        found = self.crew.match([at.total] * len(features), features, full=True) if members.start else [None]
        for member, vertex, own in zip(members, found, features, strict=True):
            at.total = added(at.total, self._move(member, vertex, own))
            at.norms += norm(own)
            at.moved += vertex is not None

    def _improve(self, at: Progress, members: range, features: Sequence[State]) -> None:
        """Later sweeps: match members to the sum of all others."""
        full = at.sweep == 1
        others = [added(at.total, own, -1.0) for own in features]
        found = self.crew.match(others, features, full=full)
        moves = [(own, self.view.turn(vertex, own)) for vertex, own in zip(found, features, strict=True) if vertex]
        total = at.total
        for old, new in moves:
            total = added(added(total, old, -1.0), new)
        if len(moves) > 1 and norm(total) < norm(at.total):
            for member, own in zip(members, features, strict=True):
                self._improve(at, range(member, member + 1), [own])
            return
        for member, vertex, own in zip(members, found, features, strict=True):
            self._move(member, vertex, own)
        at.total = total
        at.moved += len(moves)

    def _move(self, member: int, vertex: Vertex | None, features: State) -> State:
        if vertex is None:
            return features
        self.frame.move(member, self.view.assignment.element(vertex))
        return self.view.turn(vertex, features)
