"""The loop of a run: stages in turn, block by block, then draws; here, or in worker processes that report.

Between two blocks, and between two draws, a run can be stored and continued. A block of at most 20 steps has one set of
random streams, named after the stage and the number of its first step, so that a run which was interrupted goes on with
the numbers it would have had.

The process that gives batches away and the workers exchange small files in `run/workers`. Files reach every kind of
worker, on this machine or on another that sees the folder. `token` names the call for which the work is done: a worker
goes on as long as its own token stands there, so that removing it ends all workers, and a run that is continued ends
those that an earlier call has left behind. `BATCH.lock` is held while a batch runs, `BATCH.json` says how far it is.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onebasin.errors import InputError, StorageError
from onebasin.inference.diagnostics import Tail
from onebasin.inference.job import ChainBatch, Job
from onebasin.inference.journal import RUN, Disk, FinishedDraws, Journal, RunPlace, leaves, rebuilt
from onebasin.inference.kernel import ChainPlan, Draws, Info, StepIndex
from onebasin.inference.seeds import Streams
from onebasin.inference.start import first_networks
from onebasin.inference.target import ParameterLayout
from onebasin.parallel import Executor, Progress
from onebasin.state import check_state, spec_of
from onebasin.storage import LockedElsewhere, file_lock, make_folder, publish, real_path, temporary_beside

BLOCK = 20  # steps with one set of random streams
_CHECKPOINT_SECONDS = 2.0
_SECONDS = 2.0  # what a killed process may have to repeat, as between two checkpoints ...
_SHARE = 0.02  # ... or this share of its time so far, so that a long run does not end in thousands of files ...
_LONGEST = 120.0  # ... but no longer than this,
_BYTES = 64 << 20  # and never more than this


@dataclass(frozen=True)
class BatchProgress:
    """How far one batch of chains is.

    Attributes:
        done: gradients of one chain so far, out of `total`.
        total: gradients of one chain in the whole run.
        stage: what is being done.
        draws: draws of each chain that are stored.
        chains: chains of the batch.
        divergences: of these chains so far, since the process has begun.
        info: the latest Info, averaged over chains and the last block.
    """

    done: int
    total: int
    stage: str
    draws: int
    chains: int
    divergences: int
    info: Mapping[str, float]


Report = Callable[[ChainBatch, BatchProgress], None]


class Runner:
    """A job made ready: target and plan are built once, batches of chains run one after the other."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.target = job.target()
        self.plan = job.plan(self.target)

    def __call__(
        self,
        batch: ChainBatch,
        journal: Journal,
        report: Report | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> RunPlace:
        """Run one batch until all draws are made, and return the last place.

        `report` receives the progress after each block; `check_stop` is called after each step, and raises to end the
        run.
        """
        job, layout = self.job, self.target.layout
        run = BatchRun(batch, self.plan, layout, job.seed, journal, report, check_stop)
        with _threads(job.threads):
            return run(lambda: first_networks(job.model, layout, job.start, batch.window, job.seed))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(eq=False)
class BatchRun:
    """One batch of chains on its way through a plan.

    Attributes:
        batch: which chains.
        plan: the stages.
        layout: how positions become networks.
        seed: that of the run.
        journal: where draws and checkpoints go.
        report: see `Runner`.
        check_stop: see `Runner`.
    """

    batch: ChainBatch
    plan: ChainPlan
    layout: ParameterLayout
    seed: int
    journal: Journal
    report: Report | None = None
    check_stop: Callable[[], None] | None = None
    _checkpointed: float = field(default_factory=time.monotonic)
    _stored: int = 0  # draws that are stored, and divergences so far: for the report
    _divergences: int = 0

    def __call__(self, start: Callable[[], Draws]) -> RunPlace:
        """Run from the checkpoint, if there is one, until all draws are made; return the last place."""
        stages = self.plan.stages
        place = self.journal.place(self.batch)
        if place is not None and place.stage >= len(stages):
            raise StorageError(f"the checkpoint of {self.batch.name} is of another run: delete it to repeat its steps")
        stage = 0 if place is None else place.stage
        initial = stages[stage].kernel.init(start(), self._streams(stage, "init"))
        if place is None:
            place = RunPlace(0, 0, 0, initial)
        else:
            where = f"the checkpoint of {self.batch.name}"
            check_state(place.state, spec_of(dict(leaves(initial))), where=where)
            place = replace(place, state=rebuilt(initial, place.state))
        self._report(place, [])  # how much there is to do, before the first steps, which may take long
        return self._draws(self._stages(place))

    def _stages(self, place: RunPlace) -> RunPlace:
        """Everything before the first draw."""
        stages = self.plan.stages
        while True:
            stage = stages[place.stage]
            tail = Tail.of(stage) if stage.optimum and stage.steps and not place.draw else None
            while place.step < stage.steps and not place.draw:
                place, infos = self._block(place, min(BLOCK, stage.steps - place.step))
                if tail is not None:
                    losses = tail.added(place.losses, place.step - len(infos), infos)
                    place = replace(place, losses=losses)
                self._checkpoint(place)
            if tail is not None and place.losses is not None:
                kernel: Any = stage.kernel  # see `Stage.optimum`
                place = replace(place, losses=None, ended={**tail.trend(place.losses), **kernel.ending(place.state)})
            if place.stage + 1 == len(stages):
                return place
            networks = stage.kernel.draw(place.state, self._streams(place.stage, "end"))
            following = place.stage + 1
            state = stages[following].kernel.init(networks, self._streams(following, "init"))
            place = RunPlace(following, 0, 0, state, ended=place.ended)
            self._checkpoint(place)

    def _draws(self, place: RunPlace) -> RunPlace:
        """All draws, written every now and then, and at once when the run is interrupted."""
        kernel = self.plan.stages[-1].kernel
        pending = PendingDraws(self.batch, self.layout, self.journal, place.draw)
        try:
            while place.draw < self.plan.draws:
                infos = self._fit_info(place)
                left = self.plan.thin[place.draw % len(self.plan.thin)]
                while left:
                    place, block = self._block(place, min(BLOCK, left))
                    infos += block
                    left -= min(BLOCK, left)
                networks = kernel.draw(place.state, self._streams(place.stage, f"draw {place.draw}"))
                place = replace(place, draw=place.draw + 1)
                pending.add(networks, infos)
                if pending.due():
                    pending.flush()
                    self._checkpoint(place)
                self._stored = pending.stored
        finally:
            pending.flush()
        self.journal.remember(self.batch, place)
        self._stored = pending.stored
        self._report(place, [])
        return place

    def _fit_info(self, place: RunPlace) -> list[Info]:
        """Before the first draw, Info about the training, and about the fit of a kernel that fits a density."""
        if place.draw:
            return []
        summary = getattr(self.plan.stages[-1].kernel, "summary", None)
        info = {**place.ended, **({} if summary is None else summary(place.state))}
        return [info] if info else []

    def _block(self, place: RunPlace, steps: int) -> tuple[RunPlace, list[Info]]:
        """A few steps with one set of streams."""
        stage = self.plan.stages[place.stage]
        streams = self._streams(place.stage, f"step {place.step}")
        state, infos = place.state, []
        for step in range(place.step, place.step + steps):
            state, info = stage.kernel.step(state, StepIndex(step, stage.steps), streams)
            infos.append(info)
            if self.check_stop is not None:
                self.check_stop()
        place = replace(place, step=place.step + steps, state=state)
        self._report(place, infos)
        return place, infos

    def _checkpoint(self, place: RunPlace) -> None:
        """Remember the place from time to time; what lies between would be computed again."""
        if time.monotonic() - self._checkpointed > _CHECKPOINT_SECONDS:
            self.journal.remember(self.batch, place)
            self._checkpointed = time.monotonic()

    def _streams(self, stage: int, block: str) -> Streams:
        return Streams(self.seed, self.batch.window, f"{self.plan.stages[stage].name} {stage} {block}")

    def _report(self, place: RunPlace, infos: list[Info]) -> None:
        if self.report is None:
            return
        plan, stage, rows = self.plan, self.plan.stages[place.stage], self.batch.rows
        last = place.stage + 1 == len(plan.stages)
        self._divergences += sum(int(one["divergent"][rows].sum()) for one in infos if "divergent" in one)
        names = infos[0] if infos else {}
        progress = BatchProgress(
            done=sum(before.steps for before in plan.stages[: place.stage])
            + place.step * (plan.gradients if last else 1),
            total=plan.total_gradients,
            stage="drawing" if last and place.step >= stage.steps else stage.name,
            draws=self._stored,
            chains=len(self.batch.keep),
            divergences=self._divergences,
            info={name: float(torch.stack([one[name].double() for one in infos]).mean()) for name in names},
        )
        self.report(self.batch, progress)


@dataclass(eq=False)
class PendingDraws:
    """Draws of a batch that are written together.

    Attributes:
        batch: whose draws.
        layout: how positions become networks.
        journal: where they go.
        first: number of the draw that comes first; a continued run may repeat some that are stored already.
    """

    batch: ChainBatch
    layout: ParameterLayout
    journal: Journal
    first: int
    _networks: list[Draws] = field(default_factory=list)
    _infos: list[Info] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stored = self.journal.finished(self.batch)
        self._repeated = self.stored - self.first
        self._began = self._written = time.monotonic()

    def add(self, networks: Draws, infos: list[Info]) -> None:
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
        return waited > max(_SECONDS, min(_LONGEST, _SHARE * all_in_all)) or size > _BYTES

    def flush(self) -> None:
        """Write what is there."""
        if self._networks:
            self.journal.write(self.batch, self._joined())
            self.stored += len(self._networks)
        self._networks, self._infos, self._written = [], [], time.monotonic()

    def _joined(self) -> FinishedDraws:
        """Whole networks of the kept chains, ordered by chain, then by draw."""
        networks, infos, keep = self._networks, self._infos, self.batch.rows
        position = torch.stack([one.position[keep] for one in networks], dim=1).flatten(0, 1)
        buffers = {
            name: torch.stack([one.buffers[name][keep] for one in networks], dim=1).flatten(0, 1)
            for name in networks[0].buffers
        }
        density = torch.stack([one.log_density[keep] for one in networks], dim=1).flatten()
        tensors = {name: value.cpu() for name, value in self.layout.networks(position, buffers).items()}
        chain = torch.tensor(list(self.batch.keep)).repeat_interleave(len(networks))
        names = dict.fromkeys(name for one in infos for name in one)
        none = torch.full_like(networks[0].log_density, float("nan"))
        info = {name: torch.stack([one.get(name, none).double()[keep] for one in infos], dim=1).cpu() for name in names}
        return FinishedDraws(tensors, chain, density.cpu(), info)


_SHOWN = {
    "acceptance": "acceptance {:.2f}",
    "step_size": "step {:.2g}",
    "kinetic_temperature": "kinetic T {:.2f}",
    "loss": "loss {:.4g}",
}


@dataclass(eq=False)
class ProgressSum:
    """A Report that adds up the progress of all batches for `progress`."""

    progress: Progress
    batches: int
    latest: dict[str, BatchProgress] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    first: dict[str, int] = field(default_factory=dict)

    def __call__(self, batch: ChainBatch, progress: BatchProgress) -> None:
        """Take the progress of one batch into account, and call `progress` with the sum."""
        before = self.latest.get(batch.name)
        self.first.setdefault(batch.name, progress.done if before is None else before.done)
        self.latest[batch.name] = progress
        chains = sum(one.chains for one in self.latest.values())
        done = sum(one.done for one in self.latest.values())
        fresh = sum((one.done - self.first[name]) * one.chains for name, one in self.latest.items())
        speed = fresh / max(1e-9, time.monotonic() - self.began)
        words = [progress.stage]
        if progress.draws:
            words.append(f"{sum(one.draws * one.chains for one in self.latest.values())} draws of {chains} chains")
        words += [text.format(progress.info[name]) for name, text in _SHOWN.items() if name in progress.info]
        words.append(f"{sum(one.divergences for one in self.latest.values())} divergences")
        words.append(f"{speed:,.0f} gradients/s")
        self.progress(done, progress.total * self.batches, ", ".join(words))


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
