"""Where finished draws go, and what is remembered so that a run can be continued.

On disk a run is a population folder with a folder `run` inside: `definition.json` says what is run, `state-*` is where
each unit of chains was, `info-*` are the diagnostics that belong to each shard. Shards and checkpoints are whole or
absent. Draws that a resumed run repeats are the same as those on the disk, which stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from onebasin.errors import StorageError
from onebasin.inference.kernel import Kernel
from onebasin.inference.runs.checkpoint import leaves, rebuilt, state_type
from onebasin.inference.runs.units import Unit
from onebasin.population.shard import Block, read_shard, shard_key, shard_name
from onebasin.population.store import shard_paths
from onebasin.population.tensor_file import read_tensors, write_tensors
from onebasin.population.writer import PopulationWriter
from onebasin.state import Spec, State

RUN = "run"
_COUNTERS = ("stage", "step", "draw")
_MOST = 1 << 53  # of a counter
_LOSSES, _ENDED = "training/losses", "training/ended/"  # in checkpoints, beside the kernel's State
ENDED = ("final_loss", "gradient_norm", "loss_fall", "loss_noise")


@dataclass(frozen=True, eq=False)
class Place:
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

    def place(self, unit: Unit, kernels: list[Kernel[Any]]) -> Place | None:
        """Where the unit was when it was interrupted, None at the beginning."""

    def remember(self, unit: Unit, place: Place) -> None:
        """Store where the unit is."""

    def finished(self, unit: Unit) -> int:
        """Draws of each of the unit's chains that are kept already."""

    def write(self, unit: Unit, draws: Written) -> None:
        """Keep further draws."""


@dataclass(eq=False)
class Memory:
    """Draws in memory; nothing to continue."""

    shards: dict[str, list[Written]] = field(default_factory=dict)

    def place(self, unit: Unit, kernels: list[Kernel[Any]]) -> Place | None:
        """Always the beginning."""
        return None

    def remember(self, unit: Unit, place: Place) -> None:
        """Nothing outlives the process."""

    def finished(self, unit: Unit) -> int:
        """None at the beginning."""
        return 0

    def write(self, unit: Unit, draws: Written) -> None:
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

    def writer(self, unit: Unit) -> PopulationWriter:
        """The unit's writer, which continues the numbers of its own shards."""
        if unit.name not in self._writers:
            self._writers[unit.name] = PopulationWriter(
                self.path, self.spec, provenance=self.provenance, name=unit.name
            )
        return self._writers[unit.name]

    def place(self, unit: Unit, kernels: list[Kernel[Any]]) -> Place | None:
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
        return Place(stage, step, draw, state, tensors.get(_LOSSES), ended)

    def remember(self, unit: Unit, place: Place) -> None:
        """Replace the unit's checkpoint."""
        facts = {name: str(getattr(place, name)) for name in _COUNTERS}
        beside = {f"{_ENDED}{name}": value for name, value in place.ended.items()}
        if place.losses is not None:
            beside[_LOSSES] = place.losses
        write_tensors(self._state(unit), {**dict(leaves(place.state)), **beside}, facts)

    def finished(self, unit: Unit) -> int:
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

    def write(self, unit: Unit, draws: Written) -> None:
        """Write the diagnostics, then the shard: one without the other will be written again."""
        writer = self.writer(unit)
        write_tensors(info_path(self.path, unit.name, writer.sequence), draws.info, {"unit": unit.name})
        writer.write(Block(draws.tensors, len(draws.chain), draws.chain, draws.log_density))

    def _state(self, unit: Unit) -> Path:
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
