"""One frame for a whole crowd, at a cost linear in its size.

Permutations and signs keep norms, so the sum over all pairs of <w_i, w_j> is |S|^2 / 2 minus a constant, with
S = sum_i w_i. Each network is matched to S - w_i, the sum of all others, and S is updated: coordinate ascent on
|S|^2, a sweep of which costs N matches instead of N^2 / 2. All networks are moved into the one frame of S, so the
result is cycle-consistent by construction.

Members are matched in chunks against one frozen S, so that they can be matched at the same time; a chunk that would
lower |S|^2 is repeated one by one. Chunks, and the shards that they are cut into, depend on N alone, and what shards
add to S is added in their order: results do not depend on who does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from onebasin.align.crowd.frame import Frame
from onebasin.align.crowd.matching import Matched, Matcher, Target
from onebasin.align.crowd.view import added, norm
from onebasin.cluster import Cluster, Serial
from onebasin.state import State

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
    """Sweeps over a crowd until nothing moves."""

    def __init__(self, frame: Frame, matcher: Matcher, cluster: Cluster, *, sweeps: int, tolerance: float) -> None:
        self.frame, self.matcher, self.cluster = frame, matcher, cluster
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
            self._improve(at, members, self.cluster)

    def _place(self, at: Progress, members: range) -> None:
        """First sweep: match new members to the sum of those before, then add them."""
        for start, found in self._matched(members, Target(at.total), self.cluster):
            at.total = added(at.total, found.change) if at.total else found.change
            at.norms += found.squares
            self._move(at, start, found)

    def _improve(self, at: Progress, members: range, cluster: Cluster) -> None:
        """Later sweeps: match members to the sum of all others."""
        target = Target(at.total, within=True, full=at.sweep == 1)
        parts, total = [], at.total
        for start, found in self._matched(members, target, cluster):
            parts.append((start, found))
            total = added(total, found.change) if found.change else total
        movers = sum(vertex is not None for _, found in parts for vertex in found.vertices)
        if movers > 1 and norm(total) < norm(at.total):
            for member in members:
                self._improve(at, range(member, member + 1), Serial())
            return
        at.total = total
        for start, found in parts:
            self._move(at, start, found)

    def _matched(self, members: range, target: Target, cluster: Cluster) -> Iterator[tuple[int, Matched]]:
        """Match the members of a chunk, shard by shard."""
        size = -(-len(members) // _SHARDS)
        shards = self.frame.shards(members, size)
        return zip(members[::size], cluster.map(self.matcher, shards, shared=target), strict=True)

    def _move(self, at: Progress, start: int, found: Matched) -> None:
        at.moved += self.frame.follow(start, found.vertices, self.matcher.view)
        self.missing = found.missing
