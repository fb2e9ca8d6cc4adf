"""A population of networks: every member is moved into one basin, and no function is changed.

What an interrupted alignment needs to go on, the elements, the running sum and the place, is written every few seconds
into one file beside the result, `<path>.journal`; the same call with the same `path` goes on from it.
"""

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
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.alignment.activations import ActivationFeatures
from onebasin.alignment.consensus import (
    AlignmentState,
    Consensus,
    Features,
    Matcher,
    MatchToReference,
    SweepProgress,
    Weights,
    agreement,
    apply_elements,
    medoid,
    overlap_of_moved,
)
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import check_network, lightest
from onebasin.alignment.transpositions import Transpositions, transpositions
from onebasin.errors import InputError, StorageError
from onebasin.functional import inputs_of
from onebasin.parallel import Executor, Progress, executor_for, one_thread, progress_of
from onebasin.population import MANIFEST, Population, chain_series, check_population, missing_shards, shard_tensors
from onebasin.reporting import (
    Axis,
    Column,
    Figure,
    Record,
    Result,
    Series,
    Table,
    cells_of,
    largest_first,
    one_panel,
    result_record,
    size_in,
)
from onebasin.state import State, as_state
from onebasin.storage import fingerprint, is_taken, make_folder, read_tensors, real_path, write_tensors
from onebasin.symmetry import Element, Symmetry, require_symmetry

REFERENCES = ("consensus", "first", "medoid")
ALIGN_SCALES = ("balanced", "reference", "keep")
Reference = str | Mapping[str, Tensor] | nn.Module


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(Result):
    """The result of `align`.

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
        return apply_elements(companion, self.symmetry, self.elements, kind=kind, path=path)

    def record(self) -> Record:
        """Agreement before and after, and for each network its distance to the reference and how far it was moved."""
        members, chain, moves = len(self.population), self.population.chain, self.transpositions
        distance, farthest = float(self.residual.mean()), int(self.residual.argmax())
        title = f"Alignment of {members} networks"
        text = [
            f"The mean overlap of two networks goes from {self.before:.6g} to {self.objective:.6g}; network "
            f"{farthest} is farthest from the reference, by a square of {float(self.residual[farthest]):.4g}.",
            *moves.record().summary,
            *(f"{name} stays where it is: {why}." for name, why in self.missing.items()),
        ]
        agreement = (
            cells_of("mean overlap of two networks", self.before, self.objective),
            cells_of("mean squared distance to the reference", None, distance),
        )
        rows = (
            cells_of(
                str(member),
                "" if chain is None else str(int(chain[member])),
                float(self.residual[member]),
                int(moves.total[member]),
                int(moves.moves[member] - moves.total[member]),
            )
            for member in range(members)
        )
        places = range(members)
        figures = [
            one_panel(
                "residual",
                "How far is each network from the reference?",
                f"{text[0]} Networks of one chain have one colour.",
                "points",
                "network, in the order of the population",
                Axis("squared distance to the reference", low=0.0),
                series=chain_series(places, chain, torch.arange(members), self.residual),
            )
        ]
        if self.history:
            figures.append(
                one_panel(
                    "sweeps",
                    "Has the search ended?",
                    f"{self.sweeps} sweeps; the last ones should gain nothing.",
                    "lines",
                    "sweep",
                    "mean overlap of two networks",
                    series=(Series("", tuple(map(float, range(1, len(self.history) + 1))), self.history),),
                )
            )
        figures += [item for item in moves.record().items if isinstance(item, Figure)]
        return result_record(
            "alignment",
            title,
            text,
            (
                Table("agreement", "How well do the networks agree?", _AGREEMENT, agreement),
                Table("members", "How far was each network moved?", _MEMBERS, tuple(largest_first(rows, size_in(2)))),
                *figures,
            ),
            values={
                **{"before": self.before, "objective": self.objective, "sweeps": self.sweeps},
                **{"history": self.history, "residual": self.residual.tolist(), "missing": dict(self.missing)},
                **{"chain": None if chain is None else chain.tolist(), "moves": moves.record().values},
            },
        )


_AGREEMENT = (Column("", "what is compared"), Column("before", digits=4), Column("after", digits=4))
_MEMBERS = (
    Column("network"),
    Column("chain"),
    Column("squared distance", "to the reference, after alignment", digits=4),
    Column("swaps", "of two units, all spaces together", digits=0),
    Column("flips", "signs that were turned", digits=0),
)


def align(
    population: Population,
    symmetry: Symmetry,
    *,
    reference: Reference = "consensus",
    by: str = "weights",
    path: str | os.PathLike[str] | None = None,
    scale: str | None = None,
    sweeps: int = 50,
    tolerance: float = 1e-3,
    model: nn.Module | None = None,
    inputs: Any = None,
    kind: str = "uncentred",
    workers: int | None = None,
    executor: str | Executor | None = None,
    progress: Progress | bool | None = None,
    finish: Callable[[Alignment], None] | None = None,
) -> Alignment:
    """Move every member of a population into one basin.

    Args:
        population: networks of one architecture, in memory or on disk; they are read block by block and not changed.
        symmetry: found by `discover` for that architecture.
        reference: "consensus": all members agree on a frame, at a cost linear in their number; "first": match all to
            the first member; "medoid": to the most central one; or a State or module to match them to.
        by: compare "weights", or "activations" (then give `model` and `inputs`).
        path: write the aligned population into this folder. Calling again with the same path goes on with an
            interrupted run, to the same result bit for bit, completes a result that has lost shards, and returns a
            finished one; a folder with anything else is refused.
        scale: "balanced" gives every member its lightest scales, "reference" those of the reference, "keep" leaves
            them. None is "reference" where a network is given as reference, else "balanced".
        sweeps: largest number of sweeps of a consensus.
        tolerance: stop when a sweep gains less than this part of the overlap; 0 goes on until no member moves.
        model: the function, for by="activations".
        inputs: what it is run on, for by="activations": as in `predict`, or a list of batches.
        kind: for by="activations", "uncentred" (as paper 1), "centred" or "correlation".
        workers: processes on this machine; without effect on the result.
        executor: "local" or the address of a Ray cluster, or an open executor.
        progress: True for a line on stderr with the time left, or a function that is called with (members done in this
            sweep, members, what is being done).
        finish: called with the Alignment when the moved networks are written. The run is over only when it returns: if
            it is interrupted, the same call goes on and finishes too.

    Returns:
        The moved population, the elements, and how well members agree.

    Raises:
        InputError: an option cannot be used, or `path` holds something else.
        SpecError: members do not fit the symmetry, or hold NaN.
    """
    check_population(population)
    require_symmetry(symmetry)
    if model is not None and inputs is not None:
        inputs = inputs_of(inputs, model)
    network = None if isinstance(reference, str) else as_state(reference)
    settings = AlignSettings(
        reference=reference if isinstance(reference, str) else None,
        network=network,
        by=by,
        scale=scale if scale is not None else "balanced" if network is None else "reference",
        sweeps=sweeps,
        tolerance=tolerance,
        model=model,
        inputs=inputs,
        kind=kind,
    )
    settings.check()
    _check_networks(population, symmetry, network, path)
    with one_thread(), executor_for(workers, executor) as opened:
        current = AlignmentState(population, symmetry)
        journal = Journal(None if path is None else Path(path), current, current.check(opened), settings.key())
        run = _Run(current, settings, journal, opened, progress_of(progress))
        alignment = run.align(None if path is None else Path(path))
        if finish is not None:
            finish(alignment)
        journal.close()
        return alignment


@dataclass(frozen=True, eq=False, kw_only=True)
class AlignSettings:
    """The arguments of `align` on which its result depends, besides the members."""

    reference: str | None  # None where a network is given
    network: State | None
    by: str
    scale: str
    sweeps: int
    tolerance: float
    model: nn.Module | None
    inputs: Any
    kind: str

    def check(self) -> None:
        """Raise for values that do not exist or do not go together."""
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
        given = {"model": self.model is not None, "inputs": self.inputs is not None, "kind": self.kind != "uncentred"}
        if self.by == "weights" and any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise InputError(f'{names} belong to by="activations": leave them out, or compare activations')
        if self.by == "activations" and (self.model is None or self.inputs is None):
            raise InputError('by="activations" runs the networks: give model= and inputs=')
        if not (self.sweeps >= 1 and self.tolerance >= 0 and math.isfinite(self.tolerance)):
            raise InputError(
                f"expected at least 1 sweep and a tolerance of at least 0, found {self.sweeps} and {self.tolerance}"
            )

    def key(self) -> dict[str, Any]:
        """The settings as JSON values; tensors by their hashes."""
        return {
            **{"reference": self.reference or _fingerprint(self.network), "by": self.by, "scale": self.scale},
            **{"sweeps": self.sweeps, "tolerance": self.tolerance, "kind": self.kind},
            **{"inputs": _fingerprint(self.inputs)},
        }


def _fingerprint(value: Any) -> str:
    """A hash of tensors, and of dicts, lists and tuples of them; of anything else the name of its type."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(str(tuple(value.shape)).encode() + raw.numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return str({str(name): _fingerprint(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return str([_fingerprint(item) for item in value])
    return type(value).__name__


def _check_networks(
    population: Population, symmetry: Symmetry, network: State | None, path: str | os.PathLike[str] | None
) -> None:
    """Raise unless there are networks, the reference fits them, and the path is free or belongs to this result."""
    if not len(population):
        raise InputError("expected at least one network to align, found an empty population")
    if network is not None:
        check_network(BlockLayout.of(symmetry, statistics=True), network, where="the reference")
    if path is None or journal_of(Path(path)).exists():
        return  # of an interrupted run, which may have written its networks already: the journal decides
    if is_taken(Path(path)) and missing_shards(population, Path(path)) is None:  # else it is compared, and completed
        raise InputError(f"expected a new or empty folder for the result, but {path} is not: choose another path")


class _Run:
    """One alignment: members are compared in one scale, matched, and written."""

    def __init__(
        self,
        current: AlignmentState,
        settings: AlignSettings,
        journal: Journal,
        executor: Executor,
        progress: Progress | None,
    ) -> None:
        self.current, self.settings, self.journal, self.executor = current, settings, journal, executor
        self.symmetry = current.symmetry
        self.progress = progress

    def align(self, path: Path | None) -> Alignment:
        current, symmetry, executor = self.current, self.symmetry, self.executor
        if self.settings.scale != "keep":
            current.balance(executor)
        scales = self._reference_scales() if self.settings.scale == "reference" else None
        before = overlap_of_moved(symmetry, current.population, current.elements, executor)
        progress, target, missing = self._match(scales)
        self.journal.write(progress, now=True)
        if scales is not None:  # from the lightest form back into the scales of the reference
            current.move_all(symmetry.invert(scales))
            target = None if target is None else symmetry.apply(symmetry.invert(scales), target)
        result = apply_elements(
            current.population,
            symmetry,
            current.elements,
            path=path,
            executor=executor,
            only=_missing_shards(path, current),
        )
        reached = agreement(symmetry, result, target, executor)
        return Alignment(
            result,
            current.elements,
            symmetry,
            reached.reference,
            reached.overlap,
            before,
            reached.residual,
            tuple(progress.history),
            missing,
        )

    def _match(self, scales: Element | None) -> tuple[SweepProgress, State | None, Mapping[str, str]]:
        """Match all members; by activations once more for units that show only when the others are in place."""
        current, settings, executor = self.current, self.settings, self.executor
        features = self._features()
        matcher = Matcher(features, self.symmetry)
        target = self._target(matcher, scales)
        progress = self.journal.resume()
        while True:
            if progress.stage and isinstance(features, ActivationFeatures):
                matcher = Matcher(features.second(current.member(0)), self.symmetry)
            matching: Consensus | MatchToReference
            if target is None:
                if progress.total:
                    _check_total(self.journal.path, progress, matcher.features.features(current.member(0)))
                matching = Consensus(current, matcher, executor, sweeps=settings.sweeps, tolerance=settings.tolerance)
            else:
                matching = MatchToReference(current, matcher, executor, target)
            progress = matching.run(progress, self._report)
            if progress.stage or not matching.missing:
                return progress, target, matching.missing
            progress = SweepProgress(stage=1, history=progress.history)

    def _features(self) -> Features:
        settings, layout = self.settings, BlockLayout.of(self.symmetry)
        if settings.model is None:
            return Weights(layout)
        return ActivationFeatures(layout, settings.model, settings.inputs, kind=settings.kind)

    def _reference_scales(self) -> Element:
        """The scales that balance the reference."""
        network = self.settings.network
        state = self.current.population.member(0) if network is None else network
        return lightest(BlockLayout.of(self.symmetry, statistics=True), state)

    def _target(self, matcher: Matcher, scales: Element | None) -> State | None:
        """The network to match to, in the scale of comparison; None for a consensus."""
        current, network = self.current, self.settings.network
        if network is not None:
            return network if scales is None else self.symmetry.apply(scales, network)
        if self.settings.reference == "consensus":
            return None
        first = self.settings.reference == "first"
        return current.member(0 if first else medoid(current, matcher, self.executor))

    def _report(self, progress: SweepProgress) -> None:
        self.journal.write(progress)
        if self.progress is not None and progress.place:
            reached = f", overlap {progress.history[-1]:.6g}" if progress.history else ""
            self.progress(progress.place, len(self.current), f"sweep {progress.sweep + 1}{reached}")


def _missing_shards(path: Path | None, current: AlignmentState) -> list[int] | None:
    """Numbers of the shards that a result lacks whose others are there, bit for bit; None where none is there yet.

    So it is where a run was interrupted after it had written its networks, or where some of them were lost since.

    Raises:
        InputError: the folder holds other networks.
    """
    if path is None or not (path / MANIFEST).exists():
        return None
    missing = missing_shards(current.population, path)
    if missing is None or not all(
        _is_written(current, path, number, *shard)
        for number, shard in enumerate(current.population.parts())
        if number not in missing
    ):
        raise InputError(
            f"expected a new or empty folder for the result, or what this alignment has written there before, but "
            f"{path} holds something else: choose another path"
        )
    return missing


def _is_written(current: AlignmentState, path: Path, number: int, start: int, members: Population) -> bool:
    """Whether a shard of the result holds these members, moved."""
    written = shard_tensors(current.population, path, number)
    elements = current.elements.some(start, start + len(members))
    expected = apply_elements(members, current.symmetry, elements).stacked()
    return all(torch.equal(value, expected[name]) for name, value in written.items())


_SECONDS = 20.0  # between two entries of a journal: what a killed run may lose
_LARGEST = 1e100  # of a sum in a journal: its products must still be numbers
_FACTOR = 1e15
_COUNTS = ("sweep", "place", "moved", "stage")


def journal_of(path: Path) -> Path:
    """The journal of the alignment whose result will be under `path`."""
    return real_path(path).with_name(real_path(path).name + ".journal")


class Journal:
    """The file `<path>.journal`: written every few seconds, read when a run starts, deleted when it is done."""

    def __init__(
        self, path: Path | None, current: AlignmentState, population: str, settings: Mapping[str, Any]
    ) -> None:
        """The journal beside `path`; without a path nothing is written.

        Args:
            path: where the aligned population will be.
            current: the population and its elements.
            population: fingerprint of the members.
            settings: all else that the result depends on; a journal of another run is refused.
        """
        self.path = None if path is None else journal_of(path)
        self.current = current
        identity = [population, current.symmetry.to_json(), settings]
        self.key = fingerprint(identity)
        self._last = time.monotonic()

    def resume(self) -> SweepProgress:
        """The progress of an interrupted run, with its elements set; a fresh one if there is none.

        Raises:
            InputError: the journal belongs to another run.
            StorageError: the file is no journal, or damaged.
        """
        if self.path is None or not self.path.exists():
            return SweepProgress()
        try:
            tensors, header = read_tensors(self.path)
            entry = json.loads(header.get("onebasin", "{}"))
        except (StorageError, ValueError, RecursionError) as error:
            raise _damaged(self.path) from error
        if not isinstance(entry, dict) or not {"key", "progress", "names", "sum"} <= entry.keys():
            raise _damaged(self.path)
        if entry["sum"] != _checksum(tensors):
            raise _damaged(self.path)
        if entry["key"] != self.key:
            raise InputError(
                f"{self.path} is the journal of an interrupted alignment of other networks or with other settings: "
                "repeat that one to finish it, choose another path, or delete the journal to give it up"
            )
        return _restore(self.path, entry, tensors, self.current.elements)

    def write(self, progress: SweepProgress, *, now: bool = False) -> None:
        """Replace the file if it is old enough."""
        if self.path is None or not (now or time.monotonic() - self._last > _SECONDS):
            return
        tensors = {f"total/{name}": value for name, value in progress.total.items()} | _named(self.current.elements)
        fields = {name: value for name, value in vars(progress).items() if name != "total"}
        entry = {"key": self.key, "progress": fields, "names": list(progress.total), "sum": _checksum(tensors)}
        make_folder(self.path.parent)
        write_tensors(self.path, tensors, {"onebasin": json.dumps(entry)})
        self._last = time.monotonic()

    def close(self) -> None:
        """Delete the file: the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _named(elements: Element) -> State:
    """The tensors of elements under their names in a journal."""
    orders = {f"order/{name}": value for name, value in elements.orders.items()}
    return orders | {f"factor/{name}": value for name, value in elements.factors.items()}


def _checksum(tensors: State) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value


def _damaged(path: Path | None) -> StorageError:
    return StorageError(
        f"{path or 'the journal'} is no journal of an alignment, or is damaged: delete it to start again, or choose "
        "another path"
    )


def _restore(path: Path, entry: Mapping[str, Any], tensors: State, elements: Element) -> SweepProgress:
    """The progress of an entry; its elements are copied into `elements`, once all of it is known to be usable."""
    targets = _named(elements)
    try:
        progress = SweepProgress(**entry["progress"])
        progress.total = {name: tensors[f"total/{name}"] for name in entry["names"]}  # in the order of the sums
        usable = _is_usable(progress, elements.members or 1) and all(
            _is_element(tensors[name], target) for name, target in targets.items()
        )
    except (KeyError, TypeError) as error:
        raise _damaged(path) from error
    if not usable:
        raise _damaged(path)
    for name, target in targets.items():
        target.copy_(tensors[name])
    return progress


def _is_usable(progress: SweepProgress, members: int) -> bool:
    counts = [getattr(progress, name) for name in _COUNTS]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(progress.done, bool):
        return False
    if not isinstance(progress.history, list) or not all(map(_is_finite, (progress.norms, *progress.history))):
        return False
    least = progress.sweep if progress.total else 0
    return progress.place <= members and progress.stage <= 1 and len(progress.history) >= least


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_element(read: Tensor, target: Tensor) -> bool:
    """Whether orders are orders, and factors numbers that leave weights numbers."""
    if read.shape != target.shape or read.dtype != target.dtype:
        return False
    if read.is_floating_point():
        return bool(((read.abs() > 1 / _FACTOR) & (read.abs() < _FACTOR)).all())
    return torch.equal(read.sort(-1).values, torch.arange(read.shape[-1]).expand(read.shape))


def _check_total(path: Path | None, progress: SweepProgress, features: State) -> None:
    """Raise unless a sum read from a journal has the shapes of features of a member, and finite numbers."""
    total = progress.total
    if total.keys() != features.keys() or not all(
        value.shape == features[name].shape and value.dtype == torch.float64 and bool((value.abs() < _LARGEST).all())
        for name, value in total.items()
    ):
        raise _damaged(path)
