"""What a worker does with some members of a crowd: move them to where they stand, and match each to a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from onebasin.align.crowd.view import View, norm
from onebasin.align.pair.assign import Vertex
from onebasin.population import Population
from onebasin.state import State
from onebasin.symmetry import Element, Symmetry

Standing = tuple[Population, Element]
"""Some members, and the batch of elements that moves them to where they stand."""


@dataclass(frozen=True, eq=False)
class Target:
    """What members are matched to.

    Attributes:
        features: of the network to match to; of a crowd, the sum S. Nothing: members stay.
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

    def __init__(self, view: View, symmetry: Symmetry) -> None:
        self.view, self.symmetry = view, symmetry

    def __call__(self, target: Target, shard: Standing) -> Matched:
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

    def _match(self, target: Target, own: State) -> Vertex | None:
        if not target.features:
            return None
        aim: State = {}
        for name, value in own.items():
            total = target.features[name].to(value.device)
            total = total - value.double() if target.within else total
            aim[name] = total.to(torch.promote_types(torch.float32, value.dtype))  # a sum in float64, rounded once
        return self.view.match(aim, own, full=target.full)

    def _sum(self, found: Matched, target: Target, own: State, vertex: Vertex | None) -> None:
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
