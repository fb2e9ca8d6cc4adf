"""A crowd of networks: every member is moved into one basin, and no function is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch import Tensor, nn

from onebasin.align.board import Board
from onebasin.align.crowd.agreement import agreement
from onebasin.align.crowd.consensus import Consensus, Progress
from onebasin.align.crowd.crew import Crew
from onebasin.align.crowd.frame import Frame, moved
from onebasin.align.crowd.journal import Journal
from onebasin.align.crowd.star import Star, medoid
from onebasin.align.crowd.view import View, Weights, norm
from onebasin.align.pair.match import lightest
from onebasin.align.transpositions import Transpositions, transpositions
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.state import State, check_finite, state_of
from onebasin.symmetry import Element, Symmetry

REFERENCES = ("consensus", "first", "medoid")
SCALES = ("balanced", "reference", "keep")
Reference = str | Mapping[str, Tensor] | nn.Module


class Options(TypedDict, total=False):
    """The finer points of `align`, all optional.

    Attributes:
        scale: "balanced" gives every member its lightest scales, "reference" those of the reference, "keep" none.
            The default is "reference" where a network is given as reference, else "balanced".
        sweeps: of the consensus, at most (50).
        tolerance: stop when a sweep gains less than this part of the overlap (1e-3); 0 goes on until nothing moves.
        workers: processes that match (1); with more, a script needs `if __name__ == "__main__":`.
        progress: called with (members done in this sweep, members, what is being done).
        model: for by="activations", the model ...
        inputs: ... the inputs it is run on ...
        kind: ... and "uncentred" (as paper 1), "centred" or "correlation".
    """

    scale: str
    sweeps: int
    tolerance: float
    workers: int
    progress: Callable[[int, int, str], None]
    model: nn.Module
    inputs: Any
    kind: str


@dataclass(frozen=True, eq=False)
class Alignment:
    """What `align` found.

    Attributes:
        population: the moved networks; on disk if a path was given.
        elements: a batch with the element of each member.
        symmetry: the group they belong to.
        reference: the network that members were matched to; for a consensus the mean of all moved members.
        objective: mean overlap <w_i, w_j> of two different members after alignment, over all weights.
        before: the same before alignment.
        residual: |w_i - reference|^2 of each moved member (members,).
        history: for a consensus, the mean overlap over what the spaces move after each sweep.
    """

    population: Population
    elements: Element
    symmetry: Symmetry
    reference: State
    objective: float
    before: float
    residual: Tensor
    history: tuple[float, ...]

    @property
    def sweeps(self) -> int:
        """Number of sweeps over the crowd; 1 for a fixed reference."""
        return max(1, len(self.history))

    @cached_property
    def transpositions(self) -> Transpositions:
        """How far the units of each member were moved."""
        return transpositions(self.elements, self.symmetry)

    def carry(self, companion: Population, kind: str = "std", path: str | os.PathLike[str] | None = None) -> Population:
        """Move what belongs to the members (standard deviations, masks, gradients, ...) along with them.

        Args:
            companion: as many members as were aligned, with the same tensors.
            kind: what they are, as in `Symmetry.apply`.
            path: write the result into this folder instead of memory.
        """
        if len(companion) != len(self.population):
            raise InputError(
                f"expected one companion for each of {len(self.population)} members, found {len(companion)}"
            )
        return moved(companion, self.symmetry, self.elements, kind=kind, path=path)

    def __repr__(self) -> str:
        """Say what was reached."""
        return (
            f"Alignment of {len(self.population)} networks: overlap {self.before:.6g} -> {self.objective:.6g} in "
            f"{self.sweeps} sweeps, mean squared distance to the reference {float(self.residual.mean()):.6g}"
        )


def align(
    population: Population,
    symmetry: Symmetry,
    *,
    reference: Reference = "consensus",
    by: str = "weights",
    path: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Alignment:
    """Move every member of a population into one basin.

    Args:
        population: networks of one architecture, in memory or on disk; they are read block by block and not changed.
        symmetry: found by `discover` for that architecture.
        reference: "consensus": all members agree on a frame, at a cost linear in their number; "first": match all to
            the first member; "medoid": to the most central one; or a State or module to match them to.
        by: compare "weights", or "activations" (then give `model` and `inputs`).
        path: write the aligned population into this folder. An interrupted run goes on when it is called again.
        **options: see `Options`.

    Returns:
        The moved population, the elements, and how well members agree.

    Raises:
        InputError: an option cannot be used, or `path` holds something else.
        SpecError: members do not fit the symmetry, or hold NaN.
    """
    fixed = None if isinstance(reference, str) else dict(_state(reference))
    scale = options.get("scale", "balanced" if fixed is None else "reference")
    _check(population, reference, scale, path)
    frame = Frame(population, symmetry)
    frame.check()
    if fixed is not None:
        Board.of(symmetry).check(fixed, where="the reference")
        check_finite(fixed, where="the reference")
    view = _view(symmetry, by, options)
    journal = Journal(None if path is None else Path(path), frame, _settings(reference, by, scale, options))
    if scale != "keep":
        frame.balance()
    home = _home(frame, fixed, reference) if scale == "reference" else None
    tell = _teller(len(frame), journal, options.get("progress"))
    with Crew(view, options.get("workers", 1)) as crew:
        target = _target(frame, view, crew, reference, fixed, home)
        at = journal.resume()
        if target is None:
            sweeps, tolerance = options.get("sweeps", 50), options.get("tolerance", 1e-3)
            at = Consensus(frame, view, crew, sweeps=sweeps, tolerance=tolerance).run(at, tell)
        else:
            at = Star(frame, view, crew, target).run(at, tell)
    journal.note(at, now=True)
    if home is not None:  # back from the lightest form into the scales of the reference
        frame.move_all(symmetry.invert(home))
        target = None if target is None else symmetry.apply(symmetry.invert(home), target)
    result = moved(population, symmetry, frame.elements, path=path)
    journal.close()
    found = agreement(symmetry, result, target)
    raw = agreement(symmetry, population, None, distances=False)
    return Alignment(
        result, frame.elements, symmetry, found.reference, found.overlap, raw.overlap, found.residual, tuple(at.history)
    )


def _state(reference: Mapping[str, Tensor] | nn.Module) -> Mapping[str, Tensor]:
    return state_of(reference) if isinstance(reference, nn.Module) else reference


def _check(population: Population, reference: Reference, scale: str, path: str | os.PathLike[str] | None) -> None:
    if not len(population):
        raise InputError("expected at least one network to align, found an empty population")
    if isinstance(reference, str) and reference not in REFERENCES:
        raise InputError(f"reference must be one of {', '.join(REFERENCES)}, or a State; found {reference!r}")
    if scale not in SCALES or (scale == "reference" and reference == "consensus"):
        raise InputError(
            f"scale must be one of {', '.join(SCALES)}, and a consensus has no reference scale; found {scale!r}"
        )
    if path is not None and Path(path).exists() and (Path(path).is_file() or any(Path(path).iterdir())):
        raise InputError(f"expected a new or empty folder for the result, but {path} is not: choose another path")


def _view(symmetry: Symmetry, by: str, options: Options) -> View:
    if by == "weights":
        return Weights(Board.of(symmetry))
    if by != "activations":
        raise InputError(f'by must be "weights" or "activations", found {by!r}')
    if "model" not in options or "inputs" not in options:
        raise InputError('by="activations" runs the networks: give model= and inputs=')
    from onebasin.align.senses.activity import Activity

    return Activity(Board.of(symmetry), options["model"], options["inputs"], kind=options.get("kind", "uncentred"))


def _settings(reference: Reference, by: str, scale: str, options: Options) -> dict[str, Any]:
    """All that the result depends on, besides the networks."""
    named = reference if isinstance(reference, str) else norm(dict(_state(reference)))
    inputs = options.get("inputs")
    return {
        **{"reference": named, "by": by, "scale": scale, "kind": options.get("kind")},
        **{"inputs": float(inputs.double().sum()) if isinstance(inputs, Tensor) else str(type(inputs))},
        **{"sweeps": options.get("sweeps"), "tolerance": options.get("tolerance")},
    }


def _home(frame: Frame, fixed: State | None, reference: Reference) -> Element:
    """The scales that balance the reference."""
    state = fixed if fixed is not None else frame.population.member(0)
    if reference == "medoid":
        raise InputError('the scale of a medoid is not known beforehand: use scale="balanced" or reference="first"')
    return lightest(Board.of(frame.symmetry, statistics=True), state)


def _target(
    frame: Frame, view: View, crew: Crew, reference: Reference, fixed: State | None, home: Element | None
) -> State | None:
    """The network to match to, in the scale of comparison; None for a consensus."""
    if reference == "consensus":
        return None
    if fixed is None:
        member = medoid(frame, view, crew) if reference == "medoid" else 0
        return next(iter(frame.moved(range(member, member + 1))))
    return fixed if home is None else frame.symmetry.apply(home, fixed)


def _teller(
    members: int, journal: Journal, progress: Callable[[int, int, str], None] | None
) -> Callable[[Progress], None]:
    def tell(at: Progress) -> None:
        journal.note(at)
        if progress is not None and at.place:
            reached = f", overlap {at.history[-1]:.6g}" if at.history else ""
            progress(at.place, members, f"sweep {at.sweep + 1}{reached}")

    return tell
