"""Many networks matched to one fixed reference, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from onebasin.align.crowd.consensus import Progress
from onebasin.align.crowd.crew import Crew
from onebasin.align.crowd.frame import Frame
from onebasin.align.crowd.view import added, norm, zeros
from onebasin.state import State

_CHUNK = 16  # members matched together


class Star:
    """Matches every member of a crowd to one network."""

    def __init__(self, frame: Frame, crew: Crew, reference: Mapping[str, Tensor]) -> None:
        """`reference` is a whole network, in the scale in which members are compared."""
        self.frame, self.view, self.crew = frame, crew.view, crew
        self.target = crew.view.features(reference)

    def run(self, at: Progress, tell: Callable[[Progress], None]) -> Progress:
        """Go on from `at` to the end; `tell` is called after each chunk."""
        while at.place < len(self.frame):
            members = range(at.place, min(len(self.frame), at.place + _CHUNK))
            features = [self.view.features(state) for state in self.frame.moved(members)]
            found = self.crew.match([self.target] * len(members), features, full=True)
            for member, vertex in zip(members, found, strict=True):
                if vertex is not None:
                    self.frame.move(member, self.view.assignment.element(vertex))
                    at.moved += 1
            at.place = members.stop
            tell(at)
        at.sweep, at.done = 1, True
        return at


def medoid(frame: Frame, crew: Crew) -> int:
    """The most central member: closest to the mean once all are matched to the first. The frame is left as it was.

    To compare all pairs would take N^2 matches; seen from one member, the crowd's centre takes N.
    """
    trial, view = frame.copy(), crew.view
    Star(trial, crew, frame.first()).run(Progress(), lambda at: None)
    total: State = {}
    for member in range(len(trial)):
        features = view.features(trial.one(member))
        total = added(total or zeros(features), features)
    mean = {name: value / len(trial) for name, value in total.items()}
    apart = [norm(added(mean, view.features(trial.one(member)), -1.0)) for member in range(len(trial))]
    return int(torch.tensor(apart).argmin())
