"""Who computes the units: this process, or the workers of a cluster."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onebasin.errors import InputError, StorageError
from onebasin.inference.driver import Job, Progress, Tell, UnitRun
from onebasin.inference.journal import RUN, ChainBatch, Disk, Journal, RunPlace
from onebasin.inference.start import networks_at
from onebasin.parallel import Executor
from onebasin.storage import HeldElsewhere, held, make_folder, publish, real_path, temporary_beside

# ----------------------------------------------------------------------
# What the process that gives units away and those that run them tell each other: small files in the folder `run


_TELL_SECONDS = 0.5  # between two news of a unit
_HEED_SECONDS = 0.2  # between two looks at the token
_PREDECESSOR_SECONDS = 60.0  # for who still runs a unit, and will notice at its next step that it should not


@dataclass(frozen=True)
class Blackboard:
    """The folder, as one run sees it.

    Attributes:
        path: the folder of the population.
        token: of this run.
    """

    path: Path
    token: str

    @classmethod
    def opened(cls, path: Path) -> Blackboard:
        """Begin a run; workers of an earlier one, if there are any left, read here that they should end."""
        board = cls(real_path(path), secrets.token_hex(8))
        if board.folder.is_symlink():  # somebody's folder elsewhere, in which nothing should be written or deleted
            raise StorageError(f"expected a folder, found that {board.folder} is a link: delete it, and try again")
        make_folder(board.folder)
        for news in board.folder.glob("u*.json"):
            news.unlink(missing_ok=True)
        publish(board.folder / "token", lambda file: file.write(board.token.encode()), replace=True)
        return board

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.path / RUN / "crew"

    def end(self) -> None:
        """Tell all workers to end."""
        if self._wanted():
            with suppress(OSError):  # it has just gone, or a disk refuses everything, which is said elsewhere
                (self.folder / "token").unlink()

    def closed(self, seconds: float) -> None:
        """Tell all workers to end, and wait until they have written what they have, so long at most."""
        self.end()
        end = time.monotonic() + seconds
        try:
            for lock in self.folder.glob("*.lock"):
                with held(lock, end - time.monotonic()):
                    pass  # whoever takes it from now on finds no token
        except HeldElsewhere:
            return
        shutil.rmtree(self.folder, ignore_errors=True)

    def heed(self) -> Callable[[], None]:
        """What a worker calls at every step; raises KeyboardInterrupt when it should end."""
        parent, latest = os.getppid(), float("-inf")

        def look() -> None:
            nonlocal latest
            if time.monotonic() - latest < _HEED_SECONDS:
                return
            latest = time.monotonic()
            if os.getppid() != parent or not self._wanted():
                raise KeyboardInterrupt

        return look

    def _wanted(self) -> bool:
        try:
            return (self.folder / "token").read_text(encoding="utf-8") == self.token
        except OSError:
            return False

    @contextmanager
    def taken(self, unit: ChainBatch) -> Iterator[None]:
        """Hold a unit inside the block: never do two processes write the same draws.

        Raises:
            KeyboardInterrupt: nobody wants it any more.
        """
        if not (self.path / RUN).is_dir():
            raise InputError(
                f"expected the folder of the run at {self.path}, found none on the machine of a worker: give a path "
                "that all machines of the cluster see"
            )
        look = self.heed()
        look()
        try:
            with held(self.folder / f"{unit.name}.lock", _PREDECESSOR_SECONDS, look):
                self.heed()()
                yield
        except HeldElsewhere as error:
            raise StorageError(
                f"another process is at work on {unit.name} in {self.path} and does not end: end it, and resume the run"
            ) from error

    def write(self, unit: ChainBatch, progress: Progress) -> None:
        """Write how far a unit is. It is of no use later, and no reason to fail."""
        path = self.folder / f"{unit.name}.json"
        temporary = temporary_beside(path)
        with suppress(OSError):
            temporary.write_text(json.dumps(asdict(progress)), encoding="utf-8")
            os.replace(temporary, path)

    def read(self, unit: ChainBatch) -> Progress | None:
        """How far a unit is; None where it has not said so."""
        try:
            return Progress(**json.loads((self.folder / f"{unit.name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(eq=False)
class Reporter:
    """Writes the progress of a unit now and then; use it as a context manager, so that the end is told as well."""

    board: Blackboard
    unit: ChainBatch
    _latest: Progress | None = None
    _written: float = float("-inf")

    def __call__(self, unit: ChainBatch, progress: Progress) -> None:
        """Take news."""
        self._latest = progress
        if time.monotonic() - self._written > _TELL_SECONDS:
            self._write()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        self._write()

    def _write(self) -> None:
        if self._latest is not None:
            self.board.write(self.unit, self._latest)
            self._latest, self._written = None, time.monotonic()


@dataclass(eq=False)
class Listener:
    """Passes on what units have written since it last looked."""

    board: Blackboard
    units: list[ChainBatch]
    tell: Tell
    _heard: dict[str, Progress] = field(default_factory=dict)
    _looked: float = float("-inf")

    def __call__(self) -> None:
        """Look, unless it did so just now."""
        if time.monotonic() - self._looked > _TELL_SECONDS:
            self.look()

    def look(self) -> None:
        """Look now."""
        self._looked = time.monotonic()
        for unit in self.units:
            progress = self.board.read(unit)
            if progress is not None and progress != self._heard.get(unit.name):
                self._heard[unit.name] = progress
                self.tell(unit, progress)


# ----------------------------------------------------------------------
# Who computes the units: this process, or the workers of a cluster.


_PATIENCE = 10.0  # seconds that workers have to write what they have when a run is interrupted


class Runner:
    """A job made ready: target and plan are built once, units run one after the other."""

    def __init__(self, job: Job) -> None:
        """Build them."""
        self.job = job
        self.target = job.target()
        self.plan = job.plan(self.target)

    def __call__(
        self, unit: ChainBatch, journal: Journal, tell: Tell | None = None, heed: Callable[[], None] | None = None
    ) -> RunPlace:
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


def run_here(job: Job, units: list[ChainBatch], journal: Journal, tell: Tell | None) -> None:
    """Run units one after the other."""
    runner = Runner(job)
    for unit in units:
        runner(unit, journal, tell)


def run_apart(job: Job, units: list[ChainBatch], disk: Disk, tell: Tell | None, executor: Executor) -> None:
    """Run units in workers, which write to the disk. When this process is interrupted, they are too.

    A unit whose worker died is given to another, which goes on from the last checkpoint.
    """
    disk.writer(units[0])  # the manifest is there before several processes write
    board = Blackboard.opened(disk.path.absolute())
    listen = None if tell is None else Listener(board, units, tell)
    crew = Crew(job, disk.provenance, board, told=tell is not None)
    finished = []
    try:
        for found in executor.map(run_unit, units, shared=crew, idle=listen):
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


def run_unit(crew: Crew, unit: ChainBatch) -> bool:
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
