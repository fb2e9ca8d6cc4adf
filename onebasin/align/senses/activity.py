"""Matching by activations: units that do the same on the same data belong together.

Unlike weights, activations of one space do not depend on the order of the others, so each space (with all that hangs
on it) is one exact assignment on its cross-covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.align.board import Board
from onebasin.align.pair.assign import Assignment, Vertex
from onebasin.align.senses.covariance import KINDS, cross_covariance, gathered
from onebasin.align.senses.sensing import Senses
from onebasin.errors import InputError
from onebasin.predict.taps import Exponents
from onebasin.state import State, as_state, check_finite
from onebasin.symmetry import Element, Symmetry

Key = tuple[int, int]  # a space, and a character of it


class Activity:
    """Compare networks by the activations of their units on fixed inputs; a `View`."""

    def __init__(
        self, board: Board, model: nn.Module, inputs: Any, *, kind: str = "uncentred", settled: Collection[str] = ()
    ) -> None:
        """Remember the data. Kinds: "uncentred" (paper 1), "centred", and "correlation" (unit variance as well).

        Units of the spaces `settled` are in place already and count as positions.
        """
        if kind not in KINDS:
            raise InputError(f"kind must be one of {', '.join(KINDS)}, found {kind!r}")
        self.board, self.assignment = board, Assignment(board)
        self.model, self.inputs, self.kind = model, inputs, kind
        self._senses = Senses(model, board.symmetry, settled)  # what it learns of the model serves all networks
        self.missing: Mapping[str, str] = {}

    def features(self, state: Mapping[str, Tensor]) -> State:
        """Activations (samples, N), centred or normalised as asked, under "character/space"."""
        found = gathered(self._senses.of(state), self.inputs)
        self.missing = found.missing
        check_finite(found.values, where="the activations of a network")
        sorted_in = by_character(self.assignment, found.parts, torch.cat)
        return {f"{seen}/{self.board.spaces[s].name}": self._normal(x) for (s, seen), x in sorted_in.items()}

    def second(self, state: Mapping[str, Tensor]) -> Activity:
        """The view for spaces whose units show only once all others are in place, as they are in `state`."""
        self.features(state)
        seen = [space.name for space in self.board.spaces if space.name not in self.missing]
        return Activity(self.board, self.model, self.inputs, kind=self.kind, settled=seen)

    def _key(self, text: str) -> Key:
        seen, _, name = text.partition("/")
        return next(s for s, space in enumerate(self.board.spaces) if space.name == name), int(seen)

    def _normal(self, values: Tensor) -> Tensor:
        if self.kind == "uncentred":
            return values
        values = values - values.mean(0)
        if self.kind == "centred":
            return values
        spread = values.square().mean(0).sqrt()
        return torch.where(spread > 1e-6 * spread.amax(), values / spread.clamp_min(torch.finfo(spread.dtype).tiny), 0)

    def turn(self, vertex: Vertex, features: State) -> State:
        """Rearrange and flip the columns."""
        moved = {}
        for text, values in features.items():
            space, seen = self._key(text)
            turned = values[:, vertex[space].source.to(values.device)]
            chi = self.assignment.chi(vertex[space], space, seen)
            moved[text] = turned if chi is None else turned * chi.to(values)
        return moved

    def match(self, reference: State, features: State, *, full: bool) -> Vertex | None:
        """One assignment per tree; `full` changes nothing, since this is exact already."""
        matrices = {self._key(text): reference[text].mT.to(value) @ value for text, value in features.items()}
        vertex = _solve(self.assignment, matrices)
        still = all(
            torch.equal(place.source, torch.arange(len(place.source))) and bool((place.signs == 1).all())
            for place in vertex
        )
        return None if still else vertex


@dataclass(frozen=True, eq=False)
class ActivationMatch:
    """What `match_activations` found.

    Attributes:
        element: moves b onto a.
        before: sum over spaces and units of C[i, i], the agreement of activations as they were.
        after: the same for the moved network, the largest possible for each space.
        missing: space name -> why its activations could not be read; it stays where it is.
    """

    element: Element
    before: float
    after: float
    missing: Mapping[str, str]


def match_activations(
    model: nn.Module,
    a: Mapping[str, Tensor] | nn.Module,
    b: Mapping[str, Tensor] | nn.Module,
    symmetry: Symmetry,
    inputs: Any,
    *,
    kind: str = "uncentred",
) -> ActivationMatch:
    """Find the permutations and signs that bring the activations of b closest to those of a, in one pass over data.

    Args:
        model: the function; left as it was.
        a: the network that stays.
        b: the network that moves; neither is changed.
        symmetry: found by `discover` for the model. Scales are left as they are, and so are signs that activations do
            not show (before a batch norm).
        inputs: a tensor, a tuple, a dict, or an iterable of batches.
        kind: C[i, j] = sum_x a_i(x) b_j(x) as in paper 1 ("uncentred"), with means taken off ("centred"), or the
            correlation.

    Returns:
        The element, and the agreement before and after. Spaces whose units show only once others are aligned take a
        second pass.
    """
    board = Board.of(symmetry)
    left, moved = as_state(a), as_state(b)
    for where, state in (("the first network", left), ("the second network", moved)):
        board.check(state, where=where)
    assignment, element = Assignment(board), symmetry.identity()
    settled: list[str] = []
    before = after = 0.0
    missing: Mapping[str, str] = {}
    again = isinstance(inputs, Tensor | tuple | Mapping | list)  # any other iterable is used up by the first pass
    for _ in range(2 if again else 1):
        found = cross_covariance(model, left, moved, symmetry, inputs, kind=kind, settled=settled)
        matrices = by_character(assignment, found.parts, sum)
        vertex = _solve(assignment, matrices)
        before += _agreement(assignment, matrices, assignment.identity())
        after += _agreement(assignment, matrices, vertex)
        step = assignment.element(vertex)
        element, moved = symmetry.compose(step, element), symmetry.apply(step, moved)
        missing = found.missing
        settled = [space.name for space in symmetry.spaces if space.name not in missing]
        if not missing or not settled:
            break
    return ActivationMatch(element, before, after, missing)


def by_character(
    assignment: Assignment, parts: Mapping[str, Mapping[Exponents, Tensor]], join: Callable[[list[Tensor]], Any]
) -> dict[Key, Tensor]:
    """Sort what was read of each space by the character that says which signs it sees."""
    found: dict[Key, list[Tensor]] = {}
    for space, kind in enumerate(assignment.spaces):
        for exponents, tensor in parts.get(kind.name, {}).items():
            own = dict(exponents).get(kind.name, (0,) * len(kind.generators))
            seen = assignment.character(space, own)
            if seen in assignment.characters[space]:
                found.setdefault((space, assignment.characters[space].index(seen)), []).append(tensor)
    return {key: join(tensors) for key, tensors in found.items()}


def _solve(assignment: Assignment, matrices: Mapping[Key, Tensor]) -> Vertex:
    """The vertex that maximises the sum of matched entries, tree by tree; what has no matrix stays."""
    gains, vertex = [], assignment.identity()
    for space in range(len(assignment.spaces)):
        n = assignment.size(space)
        table = torch.zeros(len(assignment.characters[space]), n, n, dtype=torch.float64)
        for seen in range(len(table)):
            if (space, seen) in matrices:
                table[seen] = matrices[space, seen].double().cpu()
        gains.append(table)
    touched = {space for space, _ in matrices}
    for root in assignment.roots:
        if touched & set(assignment.family(root)):
            for member, place in assignment.best(gains, root)[0].items():
                vertex[member] = place
    return vertex


def _agreement(assignment: Assignment, matrices: Mapping[Key, Tensor], vertex: Vertex) -> float:
    """Sum of C[i, source(i)] chi(i) over all spaces."""
    return sum(assignment.taken(matrix, vertex[space], space, seen) for (space, seen), matrix in matrices.items())
