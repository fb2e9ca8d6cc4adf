"""Many networks matched to one fixed reference, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from onebasin.align.crowd.consensus import Progress
from onebasin.align.crowd.frame import Frame
from onebasin.align.crowd.matching import Matcher, Standing, Target, standing
from onebasin.align.crowd.view import View, added, norm
from onebasin.cluster import Cluster, settled
from onebasin.state import State
from onebasin.symmetry import Symmetry

_SHARD = 16  # members matched together


class Star:
    """Matches every member of a crowd to one network."""

    def __init__(self, frame: Frame, matcher: Matcher, cluster: Cluster, reference: Mapping[str, Tensor]) -> None:
        """`reference` is a whole network, in the scale in which members are compared."""
        self.frame, self.matcher, self.cluster = frame, matcher, cluster
        self.target = Target(settled(matcher.view.features(reference)), summed=False)
        self.missing: Mapping[str, str] = {}  # what could not be compared, see `View`

    def run(self, at: Progress, tell: Callable[[Progress], None]) -> Progress:
        """Go on from `at` to the end; `tell` is called after each shard."""
        members = range(at.place, len(self.frame))
        for found in self.cluster.map(self.matcher, self.frame.shards(members, _SHARD), shared=self.target):
            at.moved += self.frame.follow(at.place, found.vertices, self.matcher.view)
            at.place += len(found.vertices)
            self.missing = found.missing
            tell(at)
        at.sweep, at.done = 1, True
        return at


def medoid(frame: Frame, matcher: Matcher, cluster: Cluster) -> int:
    """The most central member: closest to the mean once all are matched to the first. The frame is left as it was.

    To compare all pairs would take N^2 matches; seen from one member, the crowd's centre takes N.
    """
    trial = frame.copy()
    Star(trial, matcher, cluster, frame.first()).run(Progress(), lambda at: None)
    everybody, apart = range(len(trial)), _Apart(matcher.view, frame.symmetry)
    total: State = {}
    stay = Target({})  # matched to nothing, members stay, and are summed
    for found in cluster.map(matcher, trial.shards(everybody, _SHARD), shared=stay):
        total = added(total, found.change) if total else found.change
    mean = {name: value / len(trial) for name, value in total.items()}
    distances = cluster.map(apart, trial.shards(everybody, _SHARD), shared=mean)
    return int(torch.tensor([own for part in distances for own in part]).argmin())


class _Apart:
    """Squared distances of members from a network."""

    def __init__(self, view: View, symmetry: Symmetry) -> None:
        self.view, self.symmetry = view, symmetry

    def __call__(self, mean: State, shard: Standing) -> list[float]:
        return [norm(added(mean, self.view.features(state), -1.0)) for state in standing(self.symmetry, shard)]
