"""A crowd of networks: every member is moved into one basin, and no function is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from onebasin.align.board import Board
from onebasin.align.crowd.agreement import agreement, mean_overlap
from onebasin.align.crowd.consensus import Consensus, Progress
from onebasin.align.crowd.entry import check_total
from onebasin.align.crowd.frame import Frame, moved
from onebasin.align.crowd.journal import Journal
from onebasin.align.crowd.matching import Matcher
from onebasin.align.crowd.plan import Options, Plan, Reference
from onebasin.align.crowd.star import Star, medoid
from onebasin.align.crowd.view import View, Weights
from onebasin.align.pair.match import lightest
from onebasin.align.senses.activity import Activity
from onebasin.align.transpositions import Transpositions, transpositions
from onebasin.cluster import Cluster, cluster_for
from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.population.mapping import caller_bytes, missing_shards, shard_tensors
from onebasin.population.parting import parts
from onebasin.population.store import MANIFEST
from onebasin.population.writer import BLOCK_BYTES, member_bytes
from onebasin.quiet import one_thread
from onebasin.state import Spec, State
from onebasin.symmetry import Element, Symmetry


@dataclass(frozen=True, eq=False)
class Alignment:
    """What `align` found.

    Attributes:
        population: the moved networks; on disk if a path was given.
        elements: a batch with the element of each member.
        symmetry: the group they belong to.
        reference: the network that members were matched to; for a consensus the mean of all moved members.
        objective: mean overlap <w_i, w_j> of two different members after alignment, over all weights.
        before: the same before alignment, in the same scale (of balanced members, if they are).
        residual: |w_i - reference|^2 of each moved member (members,).
        history: for a consensus, the mean overlap over what the spaces move after each sweep.
        missing: by activations, space name -> why its units could not be read; they stay where they are.
    """

    population: Population
    elements: Element
    symmetry: Symmetry
    reference: State
    objective: float
    before: float
    residual: Tensor
    history: tuple[float, ...]
    missing: Mapping[str, str]

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
    plan = Plan(reference, by, options)
    plan.check(population, symmetry, path)
    each = shard_bytes(population.spec, population.nbytes)
    here = _here(population, symmetry) + caller_bytes(population, path)
    with one_thread(), cluster_for(plan.options, each=each, here=here) as cluster:
        return _aligned(Frame(population, symmetry), plan, None if path is None else Path(path), cluster)


def shard_bytes(spec: Spec, nbytes: int) -> int:
    """Bytes of work on one shard of a crowd of `nbytes`.

    A few networks, in float64 too, or a block that is balanced or written.
    """
    return 16 * member_bytes(spec) + 4 * min(nbytes, BLOCK_BYTES)


def _here(population: Population, symmetry: Symmetry) -> int:
    """Bytes that the caller holds: the sum of all members in float64 twice, and an element for each of them."""
    numbers = sum(space.size * (1 + len(space.generators)) for space in symmetry.spaces)
    return 8 * member_bytes(population.spec) + 2 * 8 * numbers * len(population)


def _aligned(frame: Frame, plan: Plan, path: Path | None, cluster: Cluster) -> Alignment:
    population, symmetry = frame.population, frame.symmetry
    journal = Journal(path, frame, frame.check(cluster), plan.settings())
    if plan.scale != "keep":
        frame.balance(cluster)
    home = _home(frame, plan) if plan.scale == "reference" else None
    before = mean_overlap(symmetry, population, frame.elements, cluster)
    tell = _teller(len(frame), journal, plan.options.get("progress"))
    at, target, missing = _run(frame, plan, home, tell, journal, cluster)
    journal.note(at, now=True)
    if home is not None:  # back from the lightest form into the scales of the reference
        frame.move_all(symmetry.invert(home))
        target = None if target is None else symmetry.apply(symmetry.invert(home), target)
    lost = _lost(path, frame)
    result = moved(population, symmetry, frame.elements, path=path, cluster=cluster, only=lost)
    found = agreement(symmetry, result, target, cluster)
    alignment = Alignment(
        result,
        frame.elements,
        symmetry,
        found.reference,
        found.overlap,
        before,
        found.residual,
        tuple(at.history),
        missing,
    )
    if "finish" in plan.options:
        plan.options["finish"](alignment)
    journal.close()
    return alignment


def _lost(path: Path | None, frame: Frame) -> list[int] | None:
    """Numbers of the shards that a result lacks whose others are there, bit for bit; None where nothing is there yet.

    So it is where a run was interrupted after it had written its networks, or where some of them were lost since.

    Raises:
        InputError: the folder holds other networks.
    """
    if path is None or not (path / MANIFEST).exists():
        return None
    lost = missing_shards(frame.population, path)
    there = [shard for shard in enumerate(parts(frame.population)) if lost is not None and shard[0] not in lost]
    if lost is None or not all(_same(frame, path, number, *part) for number, part in there):
        raise InputError(
            f"expected a new or empty folder for the result, or what this alignment has written there before, but "
            f"{path} holds something else: choose another path"
        )
    return lost


def _same(frame: Frame, path: Path, number: int, start: int, members: Population) -> bool:
    """Whether a shard of the result holds these members, moved."""
    written = shard_tensors(frame.population, path, number)
    expected = moved(members, frame.symmetry, frame.elements.some(start, start + len(members))).stacked()
    return all(torch.equal(value, expected[name]) for name, value in written.items())


def _run(
    frame: Frame,
    plan: Plan,
    home: Element | None,
    tell: Callable[[Progress], None],
    journal: Journal,
    cluster: Cluster,
) -> tuple[Progress, State | None, Mapping[str, str]]:
    """Match everybody; by activations once more for units that show only when the others are in place."""
    view = _view(frame.symmetry, plan)
    matcher = Matcher(view, frame.symmetry)
    target = _target(frame, matcher, plan, home, cluster)
    at = journal.resume()
    while True:
        if at.stage and isinstance(view, Activity):
            matcher = Matcher(view.second(frame.first()), frame.symmetry)
        way: Consensus | Star
        if target is None:
            if at.total:
                check_total(journal.path, at, matcher.view.features(frame.first()))
            way = Consensus(frame, matcher, cluster, sweeps=plan.sweeps, tolerance=plan.tolerance)
        else:
            way = Star(frame, matcher, cluster, target)
        at = way.run(at, tell)
        if at.stage or not way.missing:
            return at, target, way.missing
        at = Progress(stage=1, history=at.history)


def _view(symmetry: Symmetry, plan: Plan) -> View:
    board = Board.of(symmetry)
    if plan.by == "weights":
        return Weights(board)
    options = plan.options
    return Activity(board, options["model"], options["inputs"], kind=options.get("kind", "uncentred"))


def _home(frame: Frame, plan: Plan) -> Element:
    """The scales that balance the reference."""
    state = plan.fixed if plan.fixed is not None else frame.population.member(0)
    return lightest(Board.of(frame.symmetry, statistics=True), state)


def _target(frame: Frame, matcher: Matcher, plan: Plan, home: Element | None, cluster: Cluster) -> State | None:
    """The network to match to, in the scale of comparison; None for a consensus."""
    if plan.reference == "consensus":
        return None
    if plan.fixed is None:
        return frame.first() if plan.reference == "first" else frame.one(medoid(frame, matcher, cluster))
    return plan.fixed if home is None else frame.symmetry.apply(home, plan.fixed)


def _teller(
    members: int, journal: Journal, progress: Callable[[int, int, str], None] | None
) -> Callable[[Progress], None]:
    def tell(at: Progress) -> None:
        journal.note(at)
        if progress is not None and at.place:
            reached = f", overlap {at.history[-1]:.6g}" if at.history else ""
            progress(at.place, members, f"sweep {at.sweep + 1}{reached}")

    return tell
