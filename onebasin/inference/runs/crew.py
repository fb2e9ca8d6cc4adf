"""Who computes the units: this process, or the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from onebasin.cluster import Cluster
from onebasin.errors import StorageError
from onebasin.inference.runs.blackboard import Blackboard, Listener, Reporter
from onebasin.inference.runs.job import Job
from onebasin.inference.runs.journal import Disk, Journal, Place
from onebasin.inference.runs.loop import Tell, UnitRun
from onebasin.inference.runs.start import networks_at
from onebasin.inference.runs.units import Unit

_PATIENCE = 10.0  # seconds that workers have to write what they have when a run is interrupted


class Runner:
    """A job made ready: target and plan are built once, units run one after the other."""

    def __init__(self, job: Job) -> None:
        """Build them."""
        self.job = job
        self.target = job.target()
        self.plan = job.plan(self.target)

    def __call__(
        self, unit: Unit, journal: Journal, tell: Tell | None = None, heed: Callable[[], None] | None = None
    ) -> Place:
        """Run one unit; `tell` and `heed` as in `UnitRun`."""
        job, layout = self.job, self.target.layout
        run = UnitRun(self.plan, layout, job.seed, tell, heed)
        with threads(job.threads):
            return run(unit, lambda: networks_at(job.model, layout, job.start, unit.window, job.seed), journal)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_here(job: Job, units: list[Unit], journal: Journal, tell: Tell | None) -> None:
    """Run units one after the other."""
    runner = Runner(job)
    for unit in units:
        runner(unit, journal, tell)


def run_apart(job: Job, units: list[Unit], disk: Disk, tell: Tell | None, cluster: Cluster) -> None:
    """Run units in workers, which write to the disk. When this process is interrupted, they are too.

    A unit whose worker died is given to another, which goes on from the last checkpoint.
    """
    disk.writer(units[0])  # the manifest is there before several processes write
    board = Blackboard.opened(disk.path.absolute())
    listen = None if tell is None else Listener(board, units, tell)
    crew = Crew(job, disk.provenance, board, told=tell is not None)
    finished = []
    try:
        for found in cluster.map(run_unit, units, shared=crew, idle=listen):
            finished.append(found)  # where one unit fails the others end early, and its error comes in its turn
            if listen is not None:
                listen.look()
    finally:
        board.closed(_PATIENCE)
    if not all(finished):
        raise StorageError(f"another process has ended the run in {disk.path}: wait for it, then resume")


@dataclass(frozen=True, eq=False)
class Crew:
    """What every worker needs to know.

    Attributes:
        job: what is run.
        provenance: stored with the population.
        board: where workers read whether to go on.
        told: whether anybody wants to know how far they are.
    """

    job: Job
    provenance: Mapping[str, Any]
    board: Blackboard
    told: bool

    @cached_property
    def runner(self) -> Runner:
        """Built once per worker, and compiled once where the job says so."""
        return Runner(self.job)


def run_unit(crew: Crew, unit: Unit) -> bool:
    """Run a unit in a worker, from where it was left; return whether it is finished."""
    board = crew.board
    reporter = Reporter(board, unit) if crew.told else None
    try:
        with board.taken(unit), reporter or nullcontext():
            # A journal of its own: another worker may have written since this one had the unit.
            disk = Disk(board.path, crew.runner.target.layout.spec, crew.provenance)
            crew.runner(unit, disk, reporter, board.heed())
    except KeyboardInterrupt:
        return False  # what was drawn is written
    except Exception:
        board.end()
        raise
    return True
