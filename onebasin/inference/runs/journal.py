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

from onebasin.inference.kernel import Kernel
from onebasin.inference.runs.checkpoint import leaves, read_tensors, rebuilt, state_type
from onebasin.inference.runs.units import Unit
from onebasin.population.shard import Block, read_shard, shard_name
from onebasin.population.tensor_file import write_tensors
from onebasin.population.writer import PopulationWriter
from onebasin.state import Spec, State

RUN = "run"
_COUNTERS = ("stage", "step", "draw")


@dataclass(frozen=True, eq=False)
class Place:
    """Where a unit is: between two blocks.

    Attributes:
        stage: index of the stage.
        step: steps of that stage that are done.
        draw: draws that are done.
        state: the kernel's State.
    """

    stage: int
    step: int
    draw: int
    state: Any


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
        """Read the unit's checkpoint."""
        path = self._state(unit)
        if not path.is_file():
            return None
        tensors, facts = read_tensors(path)
        stage, step, draw = (int(facts[name]) for name in _COUNTERS)
        return Place(stage, step, draw, rebuilt(state_type(kernels[stage]), tensors))

    def remember(self, unit: Unit, place: Place) -> None:
        """Replace the unit's checkpoint."""
        facts = {name: str(getattr(place, name)) for name in _COUNTERS}
        write_tensors(self._state(unit), dict(leaves(place.state)), facts)

    def finished(self, unit: Unit) -> int:
        """Counted in the unit's shards."""
        sequences = range(self.writer(unit).sequence)
        shards = [read_shard(self.path / shard_name(sequence, unit.name)) for sequence in sequences]
        return sum(shard.source.count for shard in shards) // len(unit.keep)

    def write(self, unit: Unit, draws: Written) -> None:
        """Write the diagnostics, then the shard: one without the other will be written again."""
        writer = self.writer(unit)
        path = self.path / RUN / f"info-{unit.name}-{writer.sequence:05d}.safetensors"
        write_tensors(path, draws.info, {"unit": unit.name})
        writer.write(Block(draws.tensors, len(draws.chain), draws.chain, draws.log_density))

    def _state(self, unit: Unit) -> Path:
        return self.path / RUN / f"state-{unit.name}.safetensors"


def join_info(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Lay diagnostics (chains, steps) of several shards end to end."""
    told = [part for part in parts if part]  # a density that is fitted once has something to say only once
    return {name: torch.cat([part[name] for part in told], dim=1) for name in (told[0] if told else {})}


def read_info(path: Path) -> dict[str, Tensor]:
    """Diagnostics of a run on disk, name -> float64 (chains, steps); units with fewer shards are filled with NaN."""
    units: dict[str, list[Mapping[str, Tensor]]] = {}
    for file in sorted((path / RUN).glob("info-*.safetensors")):
        tensors, facts = read_tensors(file)
        units.setdefault(facts["unit"], []).append(tensors)
    return stack_info([join_info(units[name]) for name in sorted(units)])


def stack_info(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the diagnostics of units below each other, (chains, steps)."""
    if not rows or not rows[0]:
        return {}
    steps = max(next(iter(row.values())).shape[1] for row in rows)

    def filled(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (0, steps - value.shape[1]), value=float("nan"))

    return {name: torch.cat([filled(row[name]) for row in rows]) for name in rows[0]}
