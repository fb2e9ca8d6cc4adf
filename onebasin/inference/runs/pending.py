"""Finished draws on their way to the journal."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from onebasin.inference.density.layout import Layout
from onebasin.inference.kernel import Info, Networks
from onebasin.inference.runs.journal import Journal, Written
from onebasin.inference.runs.units import Unit

_SECONDS = 2.0  # what a killed process may have to repeat, as between two checkpoints ...
_SHARE = 0.02  # ... or this share of its time so far, so that a long run does not end in thousands of files ...
_LONGEST = 120.0  # ... but no longer than this,
BYTES = 64 << 20  # and never more than this


@dataclass(eq=False)
class Pending:
    """Collects draws of a unit, and writes them together.

    Attributes:
        unit: whose draws.
        layout: how positions become networks.
        journal: where they go.
        first: number of the draw that comes first; a resumed run may repeat some that are kept already.
    """

    unit: Unit
    layout: Layout
    journal: Journal
    first: int
    _networks: list[Networks] = field(default_factory=list)
    _infos: list[Info] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = self.journal.finished(self.unit)
        self._repeated = self.finished - self.first
        self._began = self._written = time.monotonic()

    def add(self, networks: Networks, infos: list[Info]) -> None:
        """Take one draw, with the Info of the steps before it."""
        if self._repeated > 0:
            self._repeated -= 1
            return
        self._networks.append(networks)
        self._infos += infos

    def due(self) -> bool:
        """Whether it is time to write."""
        waited, all_in_all = time.monotonic() - self._written, time.monotonic() - self._began
        size = sum(one.position.nbytes for one in self._networks)
        return waited > max(_SECONDS, min(_LONGEST, _SHARE * all_in_all)) or size > BYTES

    def flush(self) -> None:
        """Write what is there."""
        if self._networks:
            self.journal.write(self.unit, self._together())
            self.finished += len(self._networks)
        self._networks, self._infos, self._written = [], [], time.monotonic()

    def _together(self) -> Written:
        """Whole networks of the kept chains, ordered by chain, then by draw."""
        networks, infos, keep = self._networks, self._infos, self.unit.rows
        position = torch.stack([one.position[keep] for one in networks], dim=1).flatten(0, 1)
        rest = {
            name: torch.stack([one.rest[name][keep] for one in networks], dim=1).flatten(0, 1)
            for name in networks[0].rest
        }
        density = torch.stack([one.log_density[keep] for one in networks], dim=1).flatten()
        tensors = {name: value.cpu() for name, value in self.layout.networks(position, rest).items()}
        chain = torch.tensor(list(self.unit.keep)).repeat_interleave(len(networks))
        names = dict.fromkeys(name for one in infos for name in one)
        none = torch.full_like(networks[0].log_density, float("nan"))
        info = {name: torch.stack([one.get(name, none).double()[keep] for one in infos], dim=1).cpu() for name in names}
        return Written(tensors, chain, density.cpu(), info)
