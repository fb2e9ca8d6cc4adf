"""Batches of chains in worker processes, which write to the folder of the run.

The process that gives batches away and the workers exchange small files in `run/workers`. Files reach every kind of
worker, on this machine or on another that sees the folder. `token` says for which call the work is done: a worker goes
on as long as its own token stands there, so that removing it ends all workers, and a run that is continued ends those
that an earlier call has left behind. `BATCH.lock` is held by whoever runs a batch, `BATCH.json` says how far it is.
"""

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

from onebasin.errors import InputError, StorageError
from onebasin.inference.driver import BatchProgress, Report, Runner
from onebasin.inference.job import ChainBatch, Job
from onebasin.inference.journal import RUN, Disk
from onebasin.parallel import Executor
from onebasin.storage import LockedElsewhere, file_lock, make_folder, publish, real_path, temporary_beside

_REPORT_SECONDS = 0.5  # between two reports of a batch
_TOKEN_SECONDS = 0.2  # between two looks at the token
_PREDECESSOR_SECONDS = 60.0  # for a worker of an earlier run, which notices at its next step that it should end
_PATIENCE = 10.0  # seconds that workers have to write what they have when a run is interrupted


@dataclass(frozen=True)
class WorkerChannel:
    """The files through which one run and its workers speak.

    Attributes:
        path: the folder of the population.
        token: the name of this run.
    """

    path: Path
    token: str

    @classmethod
    def opened(cls, path: Path) -> WorkerChannel:
        """Begin a run; workers of an earlier one, if there are any left, read here that they should end."""
        channel = cls(real_path(path), secrets.token_hex(8))
        if channel.folder.is_symlink():  # to a folder elsewhere, in which nothing should be written or deleted
            raise StorageError(f"expected a folder, found that {channel.folder} is a link: delete it, and try again")
        make_folder(channel.folder)
        for report in channel.folder.glob("u*.json"):
            report.unlink(missing_ok=True)
        publish(channel.folder / "token", lambda file: file.write(channel.token.encode()), replace=True)
        return channel

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.path / RUN / "workers"

    def end(self) -> None:
        """Tell all workers to end."""
        if self._wanted():
            with suppress(OSError):  # it is gone already, or the disk refuses, which the draws will say
                (self.folder / "token").unlink()

    def closed(self, seconds: float) -> None:
        """Tell all workers to end, and wait until they have written what they have, so long at most."""
        self.end()
        end = time.monotonic() + seconds
        try:
            for lock in self.folder.glob("*.lock"):
                with file_lock(lock, end - time.monotonic()):
                    pass  # the next worker that takes it finds no token
        except LockedElsewhere:
            return
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_stop(self) -> Callable[[], None]:
        """A function for every step of a worker, which raises KeyboardInterrupt when it should end."""
        parent, latest = os.getppid(), float("-inf")

        def look() -> None:
            nonlocal latest
            if time.monotonic() - latest < _TOKEN_SECONDS:
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
    def taken(self, batch: ChainBatch) -> Iterator[None]:
        """Hold a batch, so that no two processes write the same draws; KeyboardInterrupt where the run has ended."""
        if not (self.path / RUN).is_dir():
            raise InputError(
                f"expected the folder of the run at {self.path}, found none on the machine of a worker: give a path "
                "that all machines of the cluster see"
            )
        look = self.check_stop()
        look()
        try:
            with file_lock(self.folder / f"{batch.name}.lock", _PREDECESSOR_SECONDS, look):
                self.check_stop()()
                yield
        except LockedElsewhere as error:
            raise StorageError(
                f"another process is at work on {batch.name} in {self.path} and does not end: end it, and call sample "
                "again"
            ) from error

    def write(self, batch: ChainBatch, progress: BatchProgress) -> None:
        """Write how far a batch is; a failure to do so is no reason to stop."""
        path = self.folder / f"{batch.name}.json"
        temporary = temporary_beside(path)
        with suppress(OSError):
            temporary.write_text(json.dumps(asdict(progress)), encoding="utf-8")
            os.replace(temporary, path)

    def read(self, batch: ChainBatch) -> BatchProgress | None:
        """How far a batch is; None where nothing is written."""
        try:
            return BatchProgress(**json.loads((self.folder / f"{batch.name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(eq=False)
class ReportWriter:
    """A Report in a worker, which writes now and then; as a context manager it also writes the last one."""

    channel: WorkerChannel
    batch: ChainBatch
    _latest: BatchProgress | None = None
    _written: float = float("-inf")

    def __call__(self, batch: ChainBatch, progress: BatchProgress) -> None:
        """Take the progress of the batch."""
        self._latest = progress
        if time.monotonic() - self._written > _REPORT_SECONDS:
            self._write()

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._write()

    def _write(self) -> None:
        if self._latest is not None:
            self.channel.write(self.batch, self._latest)
            self._latest, self._written = None, time.monotonic()


@dataclass(eq=False)
class ReportReader:
    """Passes on what workers have written since it last looked."""

    channel: WorkerChannel
    batches: list[ChainBatch]
    report: Report
    _known: dict[str, BatchProgress] = field(default_factory=dict)
    _looked: float = float("-inf")

    def __call__(self) -> None:
        """Look, unless it did so just now."""
        if time.monotonic() - self._looked > _REPORT_SECONDS:
            self.look()

    def look(self) -> None:
        """Look now."""
        self._looked = time.monotonic()
        for batch in self.batches:
            progress = self.channel.read(batch)
            if progress is not None and progress != self._known.get(batch.name):
                self._known[batch.name] = progress
                self.report(batch, progress)


def run_in_workers(job: Job, batches: list[ChainBatch], disk: Disk, report: Report | None, executor: Executor) -> None:
    """Run batches in workers, which write to the disk. When this process is interrupted, they are too.

    A batch whose worker died is given to another, which goes on from the last checkpoint.
    """
    disk.writer(batches[0])  # the manifest is there before several processes write
    channel = WorkerChannel.opened(disk.path.absolute())
    reader = None if report is None else ReportReader(channel, batches, report)
    shared = WorkerJob(job, disk.provenance, channel, reporting=report is not None)
    finished = []
    try:
        for done in executor.map(run_batch, batches, shared=shared, idle=reader):
            finished.append(done)  # where one batch fails the others end early, and its error comes in its turn
            if reader is not None:
                reader.look()
    finally:
        channel.closed(_PATIENCE)
    if not all(finished):
        raise StorageError(f"another process has ended the run in {disk.path}: wait for it, then call sample again")


@dataclass(frozen=True, eq=False)
class WorkerJob:
    """What is sent to every worker.

    Attributes:
        job: what is run.
        provenance: stored with the population.
        channel: where workers read whether to go on.
        reporting: whether workers write their progress.
    """

    job: Job
    provenance: Mapping[str, Any]
    channel: WorkerChannel
    reporting: bool

    @cached_property
    def runner(self) -> Runner:
        """Built once per worker, and compiled once where the job says so."""
        return Runner(self.job)


def run_batch(shared: WorkerJob, batch: ChainBatch) -> bool:
    """Run a batch in a worker, from where it was left; return whether it is finished."""
    channel = shared.channel
    report = ReportWriter(channel, batch) if shared.reporting else None
    try:
        with channel.taken(batch), report or nullcontext():
            # A journal of its own: another worker may have written since this one had the batch.
            disk = Disk(channel.path, shared.runner.target.layout.spec, shared.provenance)
            shared.runner(batch, disk, report, channel.check_stop())
    except KeyboardInterrupt:
        return False  # what was drawn is written
    except Exception:
        channel.end()
        raise
    return True
