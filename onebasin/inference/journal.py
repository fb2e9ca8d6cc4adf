"""Read everything that the folder `run` of a run holds, and say what is whole; its draws are a population's shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from onebasin.errors import InputError, StorageError
from onebasin.inference.kernel import Kernel
from onebasin.population import Block, PopulationWriter, read_shard, shard_key, shard_name, shard_paths
from onebasin.state import Spec, State
from onebasin.storage import (
    DAMAGED,
    NOTE,
    Finding,
    HeldElsewhere,
    held,
    looked_at,
    make_folder,
    publish,
    read_header,
    read_tensors,
    tensor_problems,
    unfinished,
    write_tensors,
)

# ----------------------------------------------------------------------
# Which chains run together.


LANES = 8  # chains in one vectorised pass; about what keeps activations of small networks in a core's cache


@dataclass(frozen=True)
class ChainBatch:
    """Chains `keep` out of the computed chains `window`."""

    window: range
    keep: range

    @property
    def name(self) -> str:
        """A name for files, which sorts by chain."""
        return f"u{self.keep.start:06d}"

    @property
    def rows(self) -> slice:
        """Where the kept chains are in the window."""
        return slice(self.keep.start - self.window.start, self.keep.stop - self.window.start)


def lanes_for(chains: int, *, small: bool = True) -> int:
    """Equal windows of at most `LANES` chains; two of small networks from four chains on: two workers find work.

    >>> [lanes_for(chains) for chains in (1, 3, 4, 8, 10, 17)]
    [1, 3, 2, 4, 5, 6]
    >>> lanes_for(5, small=False)  # large ones keep all cores busy by themselves
    5
    """
    windows = max(-(-chains // LANES), 2 if chains >= 4 and small else 1)
    return -(-chains // windows)


def units(chains: int, lanes: int, chunk: int | None = None) -> list[ChainBatch]:
    """Cut chains into units.

    >>> [(unit.window, unit.keep) for unit in units(5, 3, 2)]
    [(range(0, 3), range(0, 2)), (range(0, 3), range(2, 3)), (range(3, 6), range(3, 5))]

    Args:
        chains: how many.
        lanes: chains in a window.
        chunk: chains in a unit at most; by default a whole window.
    """
    if chunk is not None and chunk < 1:
        raise InputError(f"a chunk has at least 1 chain, found {chunk}: leave it out for {lanes}")
    step = min(chunk or lanes, lanes)
    return [
        ChainBatch(range(begin, begin + lanes), range(first, min(first + step, begin + lanes, chains)))
        for begin in range(0, chains, lanes)
        for first in range(begin, min(begin + lanes, chains), step)
    ]


# ----------------------------------------------------------------------
# A kernel's State as one file of tensors, so that a killed run goes on where it was.


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a State with its path."""
    if isinstance(state, Tensor):
        yield path, state
        return
    entries = state.items() if isinstance(state, Mapping) else state._asdict().items()
    for name, value in entries:
        yield from leaves(value, f"{path}/{name}" if path else name)


def rebuilt(kind: Any, tensors: Mapping[str, Tensor], path: str = "") -> Any:
    """The State of type `kind` whose leaves are `tensors`.

    >>> import torch
    >>> from onebasin.inference.methods.hmc import MassEstimate
    >>> before = MassEstimate.empty(torch.zeros(2, 3))
    >>> rebuilt(MassEstimate, dict(leaves(before))).mean.shape
    torch.Size([2, 3])
    """
    if path in tensors:
        return tensors[path]
    if not hasattr(kind, "_fields"):
        start = f"{path}/"
        return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    hints = get_type_hints(kind)
    return kind(*[rebuilt(hints[name], tensors, f"{path}/{name}" if path else name) for name in kind._fields])


def state_type(kernel: Any) -> Any:
    """The type of a kernel's State: what its `init` returns."""
    return get_type_hints(type(kernel).init)["return"]


# ----------------------------------------------------------------------
# Where finished draws go, and what is remembered so that a run can be continued.


RUN = "run"
_COUNTERS = ("stage", "step", "draw")
_MOST = 1 << 53  # of a counter
_LOSSES, _ENDED = "training/losses", "training/ended/"  # in checkpoints, beside the kernel's State
ENDED = ("final_loss", "gradient_norm", "loss_fall", "loss_noise")


@dataclass(frozen=True, eq=False)
class RunPlace:
    """Where a unit is: between two blocks.

    Attributes:
        stage: index of the stage.
        step: steps of that stage that are done.
        draw: draws that are done.
        state: the kernel's State.
        losses: of the end of a training that is to be judged, see `onebasin.inference.convergence.Tail`.
        ended: what is known of such a training that has ended, name -> float64 (chains,).
    """

    stage: int
    step: int
    draw: int
    state: Any
    losses: Tensor | None = None
    ended: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Written:
    """Some finished draws of a unit: networks (members, ...), ordered by chain, then by draw.

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
    """What the loop over blocks needs of its surroundings."""

    def place(self, unit: ChainBatch, kernels: list[Kernel[Any]]) -> RunPlace | None:
        """Where the unit was when it was interrupted, None at the beginning."""

    def remember(self, unit: ChainBatch, place: RunPlace) -> None:
        """Store where the unit is."""

    def finished(self, unit: ChainBatch) -> int:
        """Draws of each of the unit's chains that are kept already."""

    def write(self, unit: ChainBatch, draws: Written) -> None:
        """Keep further draws."""


@dataclass(eq=False)
class Memory:
    """Draws in memory; nothing to continue."""

    shards: dict[str, list[Written]] = field(default_factory=dict)

    def place(self, unit: ChainBatch, kernels: list[Kernel[Any]]) -> RunPlace | None:
        """Always the beginning."""
        return None

    def remember(self, unit: ChainBatch, place: RunPlace) -> None:
        """Nothing outlives the process."""

    def finished(self, unit: ChainBatch) -> int:
        """None at the beginning."""
        return 0

    def write(self, unit: ChainBatch, draws: Written) -> None:
        """Keep the draws."""
        self.shards.setdefault(unit.name, []).append(draws)


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

    def writer(self, unit: ChainBatch) -> PopulationWriter:
        """The unit's writer, which continues the numbers of its own shards."""
        if unit.name not in self._writers:
            self._writers[unit.name] = PopulationWriter(
                self.path, self.spec, provenance=self.provenance, name=unit.name
            )
        return self._writers[unit.name]

    def place(self, unit: ChainBatch, kernels: list[Kernel[Any]]) -> RunPlace | None:
        """Read the unit's checkpoint; None also where draws before it were lost, so that they are made again."""
        path = self._state(unit)
        if not path.is_file():
            return None
        tensors, facts = read_tensors(path)
        try:
            stage, step, draw = (int(facts[name]) for name in _COUNTERS)
            if not 0 <= stage < len(kernels) or not 0 <= step <= _MOST or not 0 <= draw <= _MOST:
                raise ValueError(f"stage {stage}, step {step}, draw {draw}")
            state = rebuilt(state_type(kernels[stage]), tensors)
        except (KeyError, ValueError) as error:
            raise StorageError(
                f"{path} is no checkpoint of the run ({error}): delete it to repeat its steps"
            ) from error
        if draw > self.finished(unit):
            return None
        ended = {name: value for name in ENDED if (value := tensors.get(f"{_ENDED}{name}")) is not None}
        return RunPlace(stage, step, draw, state, tensors.get(_LOSSES), ended)

    def remember(self, unit: ChainBatch, place: RunPlace) -> None:
        """Replace the unit's checkpoint."""
        facts = {name: str(getattr(place, name)) for name in _COUNTERS}
        beside = {f"{_ENDED}{name}": value for name, value in place.ended.items()}
        if place.losses is not None:
            beside[_LOSSES] = place.losses
        write_tensors(self._state(unit), {**dict(leaves(place.state)), **beside}, facts)

    def finished(self, unit: ChainBatch) -> int:
        """Counted in the unit's shards."""
        paths = [self.path / shard_name(number, unit.name) for number in range(self.writer(unit).sequence)]
        lost = [path for path in paths if not path.exists()]
        if lost:
            later = [path.name for path in paths[paths.index(lost[0]) :] if path.exists()]
            raise StorageError(
                f"{lost[0]} is missing and later draws of the same chains are there: put it back from a copy, or move "
                f"{', '.join(later)} away too and resume, to make these draws again"
            )
        shards = [read_shard(path) for path in paths]
        return sum(shard.source.count for shard in shards) // len(unit.keep)

    def write(self, unit: ChainBatch, draws: Written) -> None:
        """Write the diagnostics, then the shard: one without the other will be written again."""
        writer = self.writer(unit)
        write_tensors(info_path(self.path, unit.name, writer.sequence), draws.info, {"unit": unit.name})
        writer.write(Block(draws.tensors, len(draws.chain), draws.chain, draws.log_density))

    def _state(self, unit: ChainBatch) -> Path:
        return self.path / RUN / f"state-{unit.name}.safetensors"


def info_path(path: Path, unit: str, sequence: int) -> Path:
    """The diagnostics that belong to a shard of a run."""
    return path / RUN / f"info-{unit}-{sequence:05d}.safetensors"


def join_info(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Lay diagnostics (chains, steps) of several shards end to end."""
    told = [part for part in parts if part]  # a density that is fitted once has something to say only once
    return {name: torch.cat([_entry(part, name) for part in told], dim=1) for name in _names(told)}


def _names(parts: list[Mapping[str, Tensor]]) -> list[str]:
    """Every name in the order of its first use."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _entry(part: Mapping[str, Tensor], name: str) -> Tensor:
    """An entry (chains, steps), NaN where these steps have none: a training is judged once, before the first draw."""
    return part[name] if name in part else torch.full_like(next(iter(part.values())), float("nan"))


def read_info(path: Path) -> dict[str, Tensor]:
    """Diagnostics of a run on disk, name -> float64 (chains, steps); units with fewer shards are filled with NaN."""
    units: dict[str, list[Mapping[str, Tensor]]] = {}
    for shard in shard_paths(path):  # diagnostics of draws that were lost are of no use
        sequence, unit = shard_key(shard) or (0, "")
        file = info_path(path, unit, sequence)
        if file.exists():
            units.setdefault(unit, []).append(_checked_info(read_tensors(file)[0], units.get(unit), file))
    return stack_info([join_info(units[name]) for name in sorted(units)])


def _checked_info(found: State, before: list[Mapping[str, Tensor]] | None, file: Path) -> State:
    """Refuse diagnostics that cannot be laid behind those before them."""
    shapes = {tuple(value.shape) if value.dim() == 2 else None for value in found.values()}
    chains = {len(value) for part in [*(before or []), found] for value in part.values() if value.dim()}
    if found and (None in shapes or len(shapes) > 1 or len(chains) > 1):
        raise StorageError(f"{file} holds other diagnostics than the run has: delete it to go on without them")
    return found


def stack_info(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the diagnostics of units below each other, (chains, steps)."""
    rows = [row for row in rows if row]
    if not rows:
        return {}
    steps = max(next(iter(row.values())).shape[1] for row in rows)

    def filled(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, steps - value.shape[1]), value=float("nan"))

    return {name: torch.cat([filled(_entry(row, name)) for row in rows]) for name in _names([*rows])}


# ----------------------------------------------------------------------
# What is run in a folder: written once, and compared before a run goes on.


_MAY_CHANGE = {"draws"}
_LARGEST_DEFINITION = 1 << 20  # chains, and threads
_PARTS = ("options", "density")  # dicts of options, which are compared one by one


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
        found = json.loads(file.read_text(encoding="utf-8"))
        _check_definition(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{file} is damaged ({error}): restore it from a copy, or start the run again in another folder"
        ) from error
    definition: dict[str, Any] = found
    return definition


def _check_definition(found: Any) -> None:
    """Raise unless the parts that a resumed run takes over can be used."""
    if not isinstance(found, dict) or not all(isinstance(found[part], dict) for part in _PARTS):
        raise TypeError("it is no definition")
    for name, most in {
        "modes": _LARGEST_DEFINITION,
        "lanes": max(1, found["modes"]),
        "threads": _LARGEST_DEFINITION,
    }.items():
        if type(found[name]) is not int or not 1 <= found[name] <= most:
            raise ValueError(f"{name} is {str(found[name])[:40]}")
    if not isinstance(found["compile"], bool) or not isinstance(found["chunk"], int | None):
        raise TypeError("compile or chunk is of another kind")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the folder of a run, so that no second process works on it; freed by the system when a process dies."""
    make_folder(path / RUN)
    try:
        with held(path / RUN / "lock"):
            yield
    except HeldElsewhere as error:
        raise StorageError(f"another process is at work on {path}: wait for it, or choose another path") from error


def check_run(path: Path, stored: Mapping[str, Any] | None, resume: bool) -> None:
    """Refuse a folder that holds something else, or a run that nobody asked to go on with."""
    if stored is not None and not resume:
        raise InputError(f"{path} holds a run already: give resume=True to go on with it, or choose another path")
    if stored is None and path.is_dir() and {entry.name for entry in path.iterdir()} - {RUN}:
        raise InputError(f"expected a new or empty folder, but {path} is not empty: choose another path")


def agreed(path: Path, definition: dict[str, Any], stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Store the definition of a new run, or compare it with that of the run to be resumed."""
    if stored is None:
        write_definition(path, definition)
        return definition
    for part in _PARTS:
        before, now = dict(stored[part]), dict(definition[part])
        for name in sorted({*before, *now} - _MAY_CHANGE):
            _refuse_change(path, name, before.get(name), now.get(name))
    for key in sorted({*stored, *definition} - {*_PARTS, "chunk"}):
        _refuse_change(path, key, stored.get(key), definition.get(key))
    return {**definition, "chunk": stored["chunk"]}


def _refuse_change(path: Path, name: str, before: Any, now: Any) -> None:
    if before != now:
        raise InputError(
            f"expected the settings of the run in {path}, found another {name}: {now!r} instead of {before!r}; resume "
            "it with the same settings, or choose another path"
        )


# ----------------------------------------------------------------------
# Read everything that the folder `run` of a run holds, and say what is whole; its draws are a population's shar


def is_run(folder: Path) -> bool:
    """Whether a folder is, or was about to become, that of a run."""
    return any((folder / RUN / name).exists() for name in ("definition.json", "lock"))


def inspect_run(folder: Path) -> Iterator[Finding]:
    """Look at the definition, the checkpoints and the diagnostics of a run."""
    place = folder / RUN
    yield looked_at(place / "definition.json", "definition", partial(_definition, folder))
    for path in sorted(place.glob("*.safetensors")):
        kind = "checkpoint" if path.name.startswith("state-") else "diagnostics"
        yield looked_at(path, kind, partial(_tensors, path, kind))
    for shard in shard_paths(folder):
        sequence, unit = shard_key(shard) or (0, "")
        path = info_path(folder, unit, sequence)
        if not path.exists():
            said = (
                f"{path}, the diagnostics of {shard.name}, is missing: its draws are whole, their diagnostics are not"
            )
            yield Finding(path, "diagnostics", NOTE, said)
    yield from unfinished(place)


def _definition(folder: Path) -> Finding:
    path = folder / RUN / "definition.json"
    if read_definition(folder) is None:
        raise StorageError(f"{path} is missing, so this run cannot be resumed: put it back from a copy")
    return Finding(path, "definition")


def _tensors(path: Path, kind: str) -> Finding:
    problems = tensor_problems(read_header(path))
    if not problems:
        return Finding(path, kind)
    if kind == "checkpoint":
        return Finding(path, kind, DAMAGED, f"{problems[0]}; a resumed run then makes these draws again")
    return Finding(path, kind, DAMAGED, problems[0])
