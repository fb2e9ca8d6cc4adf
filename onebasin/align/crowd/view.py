"""What is compared when networks are aligned: their weights, or the activations of their units.

Either way a network is a dict of tensors that an element only rearranges and flips, so that sums over a crowd, and
all that follows from them, are the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from onebasin.align.board import Board
from onebasin.align.pair.assign import Assignment, Vertex
from onebasin.align.pair.overlap import Overlap
from onebasin.align.pair.search import is_better, polish, search
from onebasin.state import State
from onebasin.symmetry import Symmetry


class View(Protocol):
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

    def __init__(self, board: Board) -> None:
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


def _restricted(board: Board) -> Symmetry:
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
