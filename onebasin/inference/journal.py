"""What a run stores: draws, checkpoints and diagnostics, in memory or in a folder, and the definition of the run.

A folder is a population whose shards are the draws, with a folder `run` in it: `definition.json` says what is run,
`state-*` is the last checkpoint of each batch of chains, `info-*` are the diagnostics that belong to each shard. Shards
and checkpoints are whole or absent. Draws that a continued run repeats are the same as those on the disk, which stay.

A run that goes on must be the same run: the same data, settings, seed, and whatever else decides about its draws. So
the definition is written once, and compared before a run goes on; only the number of draws may grow.

A kernel's State is one file of tensors. It is a NamedTuple of tensors, of dicts of tensors, and of further NamedTuples;
its tensors are stored under their paths (`tuner/log_step`), and put back into a State of the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from onebasin.errors import InputError, StorageError
from onebasin.population import Block, PopulationWriter, read_shard, shard_key, shard_name, shard_paths
from onebasin.state import Spec, State
from onebasin.storage import (
    DAMAGED,
    NOTE,
    Finding,
    LockedElsewhere,
    file_lock,
    finding_of,
    make_folder,
    publish,
    read_header,
    read_tensors,
    tensor_problems,
    unfinished,
    write_tensors,
)

if TYPE_CHECKING:
    from onebasin.inference.job import ChainBatch


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a State with its path."""
    if isinstance(state, Tensor):
        yield path, state
        return
    entries = state.items() if isinstance(state, Mapping) else state._asdict().items()
    for name, value in entries:
        yield from leaves(value, f"{path}/{name}" if path else name)


def rebuilt(like: Any, tensors: Mapping[str, Tensor], path: str = "") -> Any:
    """A State in the form of `like` whose leaves are `tensors`.

    >>> from onebasin.inference.methods.hmc import MassEstimate
    >>> before = MassEstimate.empty(torch.zeros(2, 3))
    >>> rebuilt(before, dict(leaves(before))).mean.shape
    torch.Size([2, 3])
    """
    if isinstance(like, Tensor):
        return tensors[path]
    entries = like.items() if isinstance(like, Mapping) else like._asdict().items()
    parts = {name: rebuilt(value, tensors, f"{path}/{name}" if path else name) for name, value in entries}
    return parts if isinstance(like, Mapping) else type(like)(**parts)


RUN = "run"
_COUNTERS = ("stage", "step", "draw")
_MOST = 1 << 53  # of a counter
_LOSSES, _ENDED = "training/losses", "training/ended/"  # in checkpoints, beside the kernel's State
ENDED = ("final_loss", "gradient_norm", "loss_fall", "loss_noise")


@dataclass(frozen=True, eq=False)
class RunPlace:
    """Where a batch of chains is: between two blocks.

    Attributes:
        stage: index of the stage.
        step: steps of that stage that are done.
        draw: draws that are done.
        state: the kernel's State; as read from a journal its tensors by path.
        losses: of the end of a training that is to be judged, see `onebasin.inference.diagnostics.Tail`.
        ended: what is known of such a training that has ended, name -> float64 (chains,).
    """

    stage: int
    step: int
    draw: int
    state: Any
    losses: Tensor | None = None
    ended: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class FinishedDraws:
    """Some finished draws of a batch: networks (members, ...), ordered by chain, then by draw.

    Attributes:
        tensors: whole networks (chains * draws, *shape).
        chain: chain of each.
        log_density: of each.
        info: name -> float64 (chains, steps), of all steps before these draws since the draws before them.
    """

    tensors: State
    chain: Tensor
    log_density: Tensor
    info: Mapping[str, Tensor]


class Journal(Protocol):
    """Where the loop over blocks stores draws and checkpoints."""

    def place(self, batch: ChainBatch) -> RunPlace | None:
        """Where the batch was when it was interrupted, None at the beginning."""

    def remember(self, batch: ChainBatch, place: RunPlace) -> None:
        """Store where the batch is."""

    def finished(self, batch: ChainBatch) -> int:
        """Draws of each of the batch's chains that are stored already."""

    def write(self, batch: ChainBatch, draws: FinishedDraws) -> None:
        """Store further draws."""


@dataclass(eq=False)
class Memory:
    """Draws in memory; nothing to continue."""

    shards: dict[str, list[FinishedDraws]] = field(default_factory=dict)

    def place(self, batch: ChainBatch) -> RunPlace | None:
        """Always the beginning."""
        return None

    def remember(self, batch: ChainBatch, place: RunPlace) -> None:
        """Nothing outlives the process."""

    def finished(self, batch: ChainBatch) -> int:
        """None at the beginning."""
        return 0

    def write(self, batch: ChainBatch, draws: FinishedDraws) -> None:
        """Keep the draws."""
        self.shards.setdefault(batch.name, []).append(draws)


@dataclass(eq=False)
class Disk:
    """Draws and checkpoints in a folder.

    Attributes:
        path: the population's folder.
        spec: of one network.
        provenance: stored with the population.
    """

    path: Path
    spec: Spec
    provenance: Mapping[str, Any]
    _writers: dict[str, PopulationWriter] = field(default_factory=dict)

    def writer(self, batch: ChainBatch) -> PopulationWriter:
        """The batch's writer, which continues the numbers of its own shards."""
        if batch.name not in self._writers:
            self._writers[batch.name] = PopulationWriter(
                self.path, self.spec, provenance=self.provenance, name=batch.name
            )
        return self._writers[batch.name]

    def place(self, batch: ChainBatch) -> RunPlace | None:
        """Read the batch's checkpoint; None also where draws before it were lost, so that they are made again."""
        path = self._state(batch)
        if not path.is_file():
            return None
        tensors, facts = read_tensors(path)
        try:
            stage, step, draw = (int(facts[name]) for name in _COUNTERS)
            if not 0 <= stage <= _MOST or not 0 <= step <= _MOST or not 0 <= draw <= _MOST:
                raise ValueError(f"stage {stage}, step {step}, draw {draw}")
        except (KeyError, ValueError) as error:
            raise StorageError(
                f"{path} is no checkpoint of the run ({error}): delete it to repeat its steps"
            ) from error
        if draw > self.finished(batch):
            return None
        losses = tensors.pop(_LOSSES, None)
        ended = {name: tensors.pop(f"{_ENDED}{name}") for name in ENDED if f"{_ENDED}{name}" in tensors}
        state = {re.sub("^rest/", "buffers/", name): value for name, value in tensors.items()}  # as 0.1 called them
        return RunPlace(stage, step, draw, state, losses, ended)

    def remember(self, batch: ChainBatch, place: RunPlace) -> None:
        """Replace the batch's checkpoint."""
        facts = {name: str(getattr(place, name)) for name in _COUNTERS}
        training = {f"{_ENDED}{name}": value for name, value in place.ended.items()}
        if place.losses is not None:
            training[_LOSSES] = place.losses
        write_tensors(self._state(batch), {**dict(leaves(place.state)), **training}, facts)

    def finished(self, batch: ChainBatch) -> int:
        """Counted in the batch's shards."""
        paths = [self.path / shard_name(number, batch.name) for number in range(self.writer(batch).sequence)]
        lost = [path for path in paths if not path.exists()]
        if lost:
            later = [path.name for path in paths[paths.index(lost[0]) :] if path.exists()]
            raise StorageError(
                f"{lost[0]} is missing and later draws of the same chains are there: put it back from a copy, or move "
                f"{', '.join(later)} away too and call sample again, to make these draws again"
            )
        shards = [read_shard(path) for path in paths]
        return sum(shard.source.count for shard in shards) // len(batch.keep)

    def write(self, batch: ChainBatch, draws: FinishedDraws) -> None:
        """Write the diagnostics, then the shard: one without the other will be written again."""
        writer = self.writer(batch)
        write_tensors(info_path(self.path, batch.name, writer.sequence), draws.info, {"unit": batch.name})
        writer.write(Block(draws.tensors, len(draws.chain), draws.chain, draws.log_density))

    def _state(self, batch: ChainBatch) -> Path:
        return self.path / RUN / f"state-{batch.name}.safetensors"


def info_path(path: Path, batch: str, sequence: int) -> Path:
    """The diagnostics that belong to a shard of a run."""
    return path / RUN / f"info-{batch}-{sequence:05d}.safetensors"


def join_info(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Lay diagnostics (chains, steps) of several shards end to end."""
    parts = [part for part in parts if part]  # a density that is fitted once has Info only once
    return {name: torch.cat([_entry(part, name) for part in parts], dim=1) for name in _names(parts)}


def _names(parts: list[Mapping[str, Tensor]]) -> list[str]:
    """Every name in the order of its first use."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _entry(part: Mapping[str, Tensor], name: str) -> Tensor:
    """An entry (chains, steps), NaN where these steps have none: a training is judged once, before the first draw."""
    return part[name] if name in part else torch.full_like(next(iter(part.values())), float("nan"))


def read_info(path: Path) -> dict[str, Tensor]:
    """Diagnostics of a run on disk, name -> float64 (chains, steps); batches with fewer shards are filled with NaN."""
    batches: dict[str, list[Mapping[str, Tensor]]] = {}
    for shard in shard_paths(path):  # diagnostics of draws that were lost are of no use
        sequence, name = shard_key(shard) or (0, "")
        file = info_path(path, name, sequence)
        if file.exists():
            batches.setdefault(name, []).append(_checked_info(read_tensors(file)[0], batches.get(name), file))
    return stack_info([join_info(batches[name]) for name in sorted(batches)])


def _checked_info(info: State, before: list[Mapping[str, Tensor]] | None, file: Path) -> State:
    """Raise for diagnostics that cannot be laid behind those before them."""
    shapes = {tuple(value.shape) if value.dim() == 2 else None for value in info.values()}
    chains = {len(value) for part in [*(before or []), info] for value in part.values() if value.dim()}
    if info and (None in shapes or len(shapes) > 1 or len(chains) > 1):
        raise StorageError(f"{file} holds other diagnostics than the run has: delete it to go on without them")
    return info


def stack_info(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the diagnostics of batches below each other, (chains, steps)."""
    rows = [row for row in rows if row]
    if not rows:
        return {}
    steps = max(next(iter(row.values())).shape[1] for row in rows)

    def filled(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, steps - value.shape[1]), value=float("nan"))

    return {name: torch.cat([filled(_entry(row, name)) for row in rows]) for name in _names([*rows])}


_MAY_CHANGE = {"draws"}
_LARGEST_DEFINITION = 1 << 20  # chains, and threads
_PARTS = ("options", "density")  # dicts of options, which are compared one by one
# What 0.1 called otherwise.
_KEYS_OF_0_1 = {"modes": "chains", "lanes": "chains_per_batch"}
_OPTIONS_OF_0_1 = {"rate": "lr", "optimiser": "optimizer", "schedule": "lr_schedule"}


def write_definition(path: Path, definition: Mapping[str, Any]) -> None:
    """Store what is run; it is written once."""
    make_folder(path / RUN)
    text = json.dumps(definition, indent=1, sort_keys=True)
    publish(path / RUN / "definition.json", lambda file: file.write(text.encode()))


def read_definition(path: Path) -> dict[str, Any] | None:
    """What is run in a folder, None where there is no run."""
    file = path / RUN / "definition.json"
    if not file.is_file():
        return None
    try:
        definition: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(definition, dict) or not all(isinstance(definition[part], dict) for part in _PARTS):
            raise TypeError("it is no definition")
        if "modes" in definition:
            definition = {_KEYS_OF_0_1.get(name, name): value for name, value in definition.items()}
            options = definition["options"]
            definition["options"] = {_OPTIONS_OF_0_1.get(name, name): value for name, value in options.items()}
        _check_numbers(definition)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{file} is damaged ({error}): restore it from a copy, or start the run again in another folder"
        ) from error
    return definition


def _check_numbers(definition: Mapping[str, Any]) -> None:
    """Raise unless the parts that a continued run takes over can be used."""
    for name in ("chains", "threads", "chains_per_batch"):
        if type(definition[name]) is not int or not 1 <= definition[name] <= _LARGEST_DEFINITION:
            raise ValueError(f"{name} is {str(definition[name])[:40]}")
    if not isinstance(definition["compile"], bool) or not isinstance(definition["chunk"], int | None):
        raise TypeError("compile or chunk is of another kind")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the folder of a run, so that no second process works on it; freed by the system when a process dies."""
    make_folder(path / RUN)
    try:
        with file_lock(path / RUN / "lock"):
            yield
    except LockedElsewhere as error:
        raise StorageError(f"another process is at work on {path}: wait for it, or choose another path") from error


def agreed(
    path: Path, definition: dict[str, Any], stored: Mapping[str, Any] | None, defaults: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Store the definition of a new run, or compare it with that of the run to be continued.

    `defaults` are the values of options that a stored definition does not name. The first difference is an error.
    """
    if stored is None:
        write_definition(path, definition)
        return definition
    _check_same(path, "method", stored["method"], definition["method"])  # whose options would all differ
    for part in _PARTS:
        before, now = {**defaults[part], **stored[part]}, definition[part]
        for name in sorted({*before, *now} - _MAY_CHANGE):
            _check_same(path, name, before.get(name), now.get(name))
    for key in sorted({*stored, *definition} - {*_PARTS, "chunk"}):
        _check_same(path, key, stored.get(key), definition.get(key))
    return {**definition, "chunk": stored["chunk"]}


def _check_same(path: Path, name: str, before: Any, now: Any) -> None:
    if before != now:
        raise InputError(
            f"{path} holds a run with another {name}: {before!r}, found {now!r} now; give the same to go on with it, "
            "choose another path, or delete it to begin anew (--force on the command line)"
        )


def is_run(folder: Path) -> bool:
    """Whether a folder is, or was about to become, that of a run."""
    return any((folder / RUN / name).exists() for name in ("definition.json", "lock"))


def inspect_run(folder: Path) -> Iterator[Finding]:
    """Look at the definition, the checkpoints and the diagnostics of a run."""
    place = folder / RUN
    yield finding_of(place / "definition.json", "definition", partial(_definition, folder))
    for path in sorted(place.glob("*.safetensors")):
        kind = "checkpoint" if path.name.startswith("state-") else "diagnostics"
        yield finding_of(path, kind, partial(_tensors, path, kind))
    for shard in shard_paths(folder):
        sequence, name = shard_key(shard) or (0, "")
        path = info_path(folder, name, sequence)
        if not path.exists():
            said = (
                f"{path}, the diagnostics of {shard.name}, is missing: its draws are whole, their diagnostics are not"
            )
            yield Finding(path, "diagnostics", NOTE, said)
    yield from unfinished(place)


def _definition(folder: Path) -> Finding:
    path = folder / RUN / "definition.json"
    if read_definition(folder) is None:
        raise StorageError(f"{path} is missing, so this run cannot go on: put it back from a copy")
    return Finding(path, "definition")


def _tensors(path: Path, kind: str) -> Finding:
    problems = tensor_problems(read_header(path))
    if not problems:
        return Finding(path, kind)
    if kind == "checkpoint":
        return Finding(path, kind, DAMAGED, f"{problems[0]}; the run makes these draws again when it goes on")
    return Finding(path, kind, DAMAGED, problems[0])
