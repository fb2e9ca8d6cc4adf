"""A population of networks: every member is moved into one basin, and no function is changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from onebasin.alignment.activations import Activity
from onebasin.alignment.consensus import (
    AlignmentState,
    Consensus,
    Features,
    Matcher,
    MatchToReference,
    Progress,
    Weights,
    agreement,
    mean_overlap,
    medoid,
    moved,
)
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import check_network, lightest
from onebasin.alignment.transpositions import Transpositions, transpositions
from onebasin.errors import InputError, StorageError, check_options
from onebasin.parallel import ExecutionOptions, Executor, executor_for, one_thread
from onebasin.population import (
    BLOCK_BYTES,
    MANIFEST,
    Population,
    caller_bytes,
    member_bytes,
    missing_shards,
    parts,
    shard_tensors,
)
from onebasin.state import Spec, State, as_state
from onebasin.storage import is_taken, make_folder, read_tensors, real_path, write_tensors
from onebasin.symmetry import Element, Symmetry

_LARGEST = 1e100  # of a sum: its products must still be numbers
_FACTOR = 1e15
_COUNTS = ("sweep", "place", "moved", "stage")


def read_entry(path: Path) -> tuple[dict[str, Any], State]:
    """What a journal tells, and its tensors.

    Raises:
        StorageError: the file is no journal, or damaged.
    """
    try:
        tensors, header = read_tensors(path)
        told = json.loads(header.get("onebasin", "{}"))
    except (StorageError, ValueError, RecursionError) as error:
        raise damaged(path) from error
    if not isinstance(told, dict) or not {"key", "progress", "names", "sum"} <= told.keys():
        raise damaged(path)
    return told, tensors


def damaged(path: Path) -> StorageError:
    """What to say of a journal that cannot be gone on from."""
    return StorageError(
        f"{path} is no journal of an alignment, or is damaged: delete it to start again, or choose another path"
    )


def put_back(path: Path, told: Mapping[str, Any], tensors: State, elements: Element) -> Progress:
    """The progress of an entry; its elements are copied into `elements`, once all of it is found usable.

    Raises:
        StorageError: it is not.
    """
    goals = {f"order/{name}": value for name, value in elements.orders.items()}
    goals |= {f"factor/{name}": value for name, value in elements.factors.items()}
    try:
        at = Progress(**told["progress"])
        at.total = {name: tensors[f"total/{name}"] for name in told["names"]}  # in the order in which sums were formed
        usable = _is_progress(at, elements.members or 1) and all(_fits(tensors[name], goals[name]) for name in goals)
    except (KeyError, TypeError) as error:
        raise damaged(path) from error
    if not usable:
        raise damaged(path)
    for name, goal in goals.items():
        goal.copy_(tensors[name])
    return at


def check_total(path: Path | None, at: Progress, features: State) -> None:
    """Refuse a sum over members that is not of their kind: `features` are those of one of them.

    Raises:
        StorageError: it is not.
    """
    alike = at.total.keys() == features.keys() and all(
        value.shape == features[name].shape and value.dtype == torch.float64 and bool((value.abs() < _LARGEST).all())
        for name, value in at.total.items()
    )
    if at.total and not alike:
        raise damaged(path or Path("the journal"))


def _is_progress(at: Progress, members: int) -> bool:
    counts = [getattr(at, name) for name in _COUNTS]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(at.done, bool):
        return False
    if not isinstance(at.history, list) or not all(map(_finite, (at.norms, *at.history))):
        return False
    return at.place <= members and at.stage <= 1 and len(at.history) >= (at.sweep if at.total else 0)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _fits(found: Tensor, goal: Tensor) -> bool:
    """Whether orders are orders, and factors numbers that leave weights numbers."""
    if found.shape != goal.shape or found.dtype != goal.dtype:
        return False
    if found.is_floating_point():
        return bool(((found.abs() > 1 / _FACTOR) & (found.abs() < _FACTOR)).all())
    return torch.equal(found.sort(-1).values, torch.arange(found.shape[-1]).expand(found.shape))


_SECONDS = 20.0  # between two entries: what a killed run may lose


def journal_of(path: Path) -> Path:
    """The journal of the alignment whose result will be under `path`."""
    return real_path(path).with_name(real_path(path).name + ".journal")


class Journal:
    """The file `<path>.journal`; it is written every few seconds, read when a run starts, gone when it is done."""

    def __init__(self, path: Path | None, frame: AlignmentState, population: str, settings: dict[str, Any]) -> None:
        """Take the journal beside `path`; without a path nothing is kept.

        Args:
            path: where the aligned population will be.
            frame: the population and its elements.
            population: fingerprint of the members.
            settings: all that the result depends on; a journal of another run is refused.
        """
        self.path = None if path is None else journal_of(path)
        self.frame = frame
        self.key = _key(frame, population, settings)
        self._last = time.monotonic()

    def resume(self) -> Progress:
        """The progress of an interrupted run, whose elements are put into the frame; a fresh one if there is none.

        Raises:
            InputError: the journal belongs to another run.
        """
        if self.path is None or not self.path.exists():
            return Progress()
        told, tensors = read_entry(self.path)
        if told["sum"] != _checksum(tensors):
            raise damaged(self.path)
        if told["key"] != self.key:
            raise InputError(
                f"{self.path} is the journal of an interrupted alignment of other networks or with other settings: "
                "repeat that one to finish it, choose another path, or delete the journal to give it up"
            )
        return put_back(self.path, told, tensors, self.frame.elements)

    def note(self, at: Progress, *, now: bool = False) -> None:
        """Write an entry if the last one is old enough."""
        if self.path is None or not (now or time.monotonic() - self._last > _SECONDS):
            return
        elements = self.frame.elements
        tensors = {
            **{f"total/{name}": value for name, value in at.total.items()},
            **{f"order/{name}": value for name, value in elements.orders.items()},
            **{f"factor/{name}": value for name, value in elements.factors.items()},
        }
        facts = {name: value for name, value in vars(at).items() if name != "total"}
        text = json.dumps({"key": self.key, "progress": facts, "names": list(at.total), "sum": _checksum(tensors)})
        make_folder(self.path.parent)
        write_tensors(self.path, tensors, {"onebasin": text})
        self._last = time.monotonic()

    def close(self) -> None:
        """The result is safe: the journal is not needed any more."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _checksum(tensors: State) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value


def _key(frame: AlignmentState, population: str, settings: dict[str, Any]) -> str:
    """A fingerprint of the population, its symmetry and the settings."""
    told = [population, frame.symmetry.to_json(), settings]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def fingerprint(value: Any) -> str:
    """A hash of tensors, and of dicts, lists and tuples of them; of anything else the name of its type."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(str(tuple(value.shape)).encode() + raw.numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return str({str(name): fingerprint(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return str([fingerprint(item) for item in value])
    return type(value).__name__


REFERENCES = ("consensus", "first", "medoid")
ALIGN_SCALES = ("balanced", "reference", "keep")
Reference = str | Mapping[str, Tensor] | nn.Module


class AlignOptions(ExecutionOptions, total=False):
    """The finer points of `align`, all optional; where it runs is said as in `ExecutionOptions`.

    Attributes:
        scale: "balanced" gives every member its lightest scales, "reference" those of the reference, "keep" none.
            The default is "reference" where a network is given as reference, else "balanced".
        sweeps: of the consensus, at most (50).
        tolerance: stop when a sweep gains less than this part of the overlap (1e-3); 0 goes on until nothing moves.
        progress: called with (members done in this sweep, members, what is being done).
        finish: called with the Alignment when the moved networks are written. The run is over only when it returns: if
            it is interrupted, the same call goes on and finishes too.
        model: for by="activations", the model ...
        inputs: ... the inputs it is run on ...
        kind: ... and "uncentred" (as paper 1), "centred" or "correlation".
    """

    scale: str
    sweeps: int
    tolerance: float
    progress: Callable[[int, int, str], None]
    finish: Callable[[Any], None]
    model: nn.Module
    inputs: Any
    kind: str


SWEEPS, TOLERANCE = 50, 1e-3  # when nothing else is said


class AlignPlan:
    """The options of one alignment, all of them known and usable.

    Attributes:
        reference: "consensus", "first" or "medoid", or None where a network is given.
        fixed: that network.
        scale: "balanced", "reference" or "keep".
        by: "weights" or "activations".
        options: all others.
    """

    def __init__(self, reference: Reference, by: str, options: AlignOptions) -> None:
        """Refuse what nobody knows or nobody can use."""
        check_options(options, [*AlignOptions.__annotations__, "reference", "by", "path"], "align")
        self.reference = reference if isinstance(reference, str) else None
        self.fixed = None if isinstance(reference, str) else as_state(reference)
        self.scale = options.get("scale", "balanced" if self.fixed is None else "reference")
        self.by, self.options = by, options
        self.sweeps, self.tolerance = options.get("sweeps", SWEEPS), options.get("tolerance", TOLERANCE)
        self._check_words()
        if not (self.sweeps >= 1 and self.tolerance >= 0 and math.isfinite(self.tolerance)):
            raise InputError(
                f"expected at least 1 sweep and a tolerance of at least 0, found {self.sweeps} and {self.tolerance}"
            )

    def _check_words(self) -> None:
        if self.reference is not None and self.reference not in REFERENCES:
            raise InputError(f"reference must be one of {', '.join(REFERENCES)}, or a State; found {self.reference!r}")
        if self.scale not in ALIGN_SCALES or (self.scale == "reference" and self.reference == "consensus"):
            raise InputError(
                f"scale must be one of {', '.join(ALIGN_SCALES)}, and a consensus has no reference scale; "
                f"found {self.scale!r}"
            )
        if self.scale == "reference" and self.reference == "medoid":
            raise InputError('the scale of a medoid is not known beforehand: use scale="balanced" or reference="first"')
        if self.by not in ("weights", "activations"):
            raise InputError(f'by must be "weights" or "activations", found {self.by!r}')
        given = [name for name in ("model", "inputs", "kind") if name in self.options]
        if self.by == "weights" and given:
            raise InputError(f'{", ".join(given)} belong to by="activations": leave them out, or compare activations')
        if self.by == "activations" and not {"model", "inputs"} <= set(given):
            raise InputError('by="activations" runs the networks: give model= and inputs=')

    def check(self, population: Population, symmetry: Symmetry, path: str | os.PathLike[str] | None) -> None:
        """Refuse networks and places that do not fit."""
        if not isinstance(population, Population):
            raise InputError(
                f"expected a Population, found {type(population).__name__}: make one with Population.from_models or "
                "Population.from_states"
            )
        if not len(population):
            raise InputError("expected at least one network to align, found an empty population")
        if self.fixed is not None:
            check_network(BlockLayout.of(symmetry, statistics=True), self.fixed, where="the reference")
        if path is None or journal_of(Path(path)).exists():
            return  # of an interrupted run, which may have written its networks already: the journal decides
        if is_taken(Path(path)) and not missing_shards(population, Path(path)):  # one that has lost some is completed
            raise InputError(f"expected a new or empty folder for the result, but {path} is not: choose another path")

    def settings(self) -> dict[str, Any]:
        """All that the result depends on, besides the members."""
        return {
            **{"reference": self.reference or fingerprint(self.fixed), "by": self.by, "scale": self.scale},
            **{"sweeps": self.sweeps, "tolerance": self.tolerance, "kind": self.options.get("kind", "uncentred")},
            **{"inputs": fingerprint(self.options.get("inputs"))},
        }


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
        """Number of sweeps over the population; 1 for a fixed reference."""
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
    **options: Unpack[AlignOptions],
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
    plan = AlignPlan(reference, by, options)
    plan.check(population, symmetry, path)
    each = shard_bytes(population.spec, population.nbytes)
    here = _here(population, symmetry) + caller_bytes(population, path)
    with one_thread(), executor_for(plan.options, each=each, here=here) as executor:
        return _aligned(AlignmentState(population, symmetry), plan, None if path is None else Path(path), executor)


def shard_bytes(spec: Spec, nbytes: int) -> int:
    """Bytes of work on one shard of a population of `nbytes`.

    A few networks, in float64 too, or a block that is balanced or written.
    """
    return 16 * member_bytes(spec) + 4 * min(nbytes, BLOCK_BYTES)


def _here(population: Population, symmetry: Symmetry) -> int:
    """Bytes that the caller holds: the sum of all members in float64 twice, and an element for each of them."""
    numbers = sum(space.size * (1 + len(space.generators)) for space in symmetry.spaces)
    return 8 * member_bytes(population.spec) + 2 * 8 * numbers * len(population)


def _aligned(frame: AlignmentState, plan: AlignPlan, path: Path | None, executor: Executor) -> Alignment:
    population, symmetry = frame.population, frame.symmetry
    journal = Journal(path, frame, frame.check(executor), plan.settings())
    if plan.scale != "keep":
        frame.balance(executor)
    home = _home(frame, plan) if plan.scale == "reference" else None
    before = mean_overlap(symmetry, population, frame.elements, executor)
    tell = _teller(len(frame), journal, plan.options.get("progress"))
    at, target, missing = _run(frame, plan, home, tell, journal, executor)
    journal.note(at, now=True)
    if home is not None:  # back from the lightest form into the scales of the reference
        frame.move_all(symmetry.invert(home))
        target = None if target is None else symmetry.apply(symmetry.invert(home), target)
    lost = _lost(path, frame)
    result = moved(population, symmetry, frame.elements, path=path, executor=executor, only=lost)
    found = agreement(symmetry, result, target, executor)
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


def _lost(path: Path | None, frame: AlignmentState) -> list[int] | None:
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


def _same(frame: AlignmentState, path: Path, number: int, start: int, members: Population) -> bool:
    """Whether a shard of the result holds these members, moved."""
    written = shard_tensors(frame.population, path, number)
    expected = moved(members, frame.symmetry, frame.elements.some(start, start + len(members))).stacked()
    return all(torch.equal(value, expected[name]) for name, value in written.items())


def _run(
    frame: AlignmentState,
    plan: AlignPlan,
    home: Element | None,
    tell: Callable[[Progress], None],
    journal: Journal,
    executor: Executor,
) -> tuple[Progress, State | None, Mapping[str, str]]:
    """Match everybody; by activations once more for units that show only when the others are in place."""
    view = _view(frame.symmetry, plan)
    matcher = Matcher(view, frame.symmetry)
    target = _target(frame, matcher, plan, home, executor)
    at = journal.resume()
    while True:
        if at.stage and isinstance(view, Activity):
            matcher = Matcher(view.second(frame.first()), frame.symmetry)
        way: Consensus | MatchToReference
        if target is None:
            if at.total:
                check_total(journal.path, at, matcher.view.features(frame.first()))
            way = Consensus(frame, matcher, executor, sweeps=plan.sweeps, tolerance=plan.tolerance)
        else:
            way = MatchToReference(frame, matcher, executor, target)
        at = way.run(at, tell)
        if at.stage or not way.missing:
            return at, target, way.missing
        at = Progress(stage=1, history=at.history)


def _view(symmetry: Symmetry, plan: AlignPlan) -> Features:
    board = BlockLayout.of(symmetry)
    if plan.by == "weights":
        return Weights(board)
    options = plan.options
    return Activity(board, options["model"], options["inputs"], kind=options.get("kind", "uncentred"))


def _home(frame: AlignmentState, plan: AlignPlan) -> Element:
    """The scales that balance the reference."""
    state = plan.fixed if plan.fixed is not None else frame.population.member(0)
    return lightest(BlockLayout.of(frame.symmetry, statistics=True), state)


def _target(
    frame: AlignmentState, matcher: Matcher, plan: AlignPlan, home: Element | None, executor: Executor
) -> State | None:
    """The network to match to, in the scale of comparison; None for a consensus."""
    if plan.reference == "consensus":
        return None
    if plan.fixed is None:
        return frame.first() if plan.reference == "first" else frame.one(medoid(frame, matcher, executor))
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
