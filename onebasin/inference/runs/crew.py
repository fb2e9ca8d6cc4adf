"""Who computes the units: this process, or several."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onebasin.errors import InputError
from onebasin.inference.runs.job import Job
from onebasin.inference.runs.journal import Disk, Journal, Place
from onebasin.inference.runs.loop import Progress, Tell, UnitRun
from onebasin.inference.runs.start import networks_at
from onebasin.inference.runs.units import Unit


@dataclass(eq=False)
class Runner:
    """A job made ready: target and plan are built once, units run one after the other."""

    job: Job
    tell: Tell | None = None
    heed: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.target = self.job.target()
        self.plan = self.job.plan(self.target)

    def __call__(self, unit: Unit, journal: Journal) -> Place:
        """Run one unit."""
        job, layout = self.job, self.target.layout
        run = UnitRun(self.plan, layout, job.seed, self.tell, self.heed)
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
    runner = Runner(job, tell)
    for unit in units:
        runner(unit, journal)


def run_apart(job: Job, units: list[Unit], disk: Disk, tell: Tell | None, workers: int) -> None:
    """Run units in processes of their own, which write to the disk. When this process is interrupted, they are too."""
    from multiprocessing import get_context

    context = get_context("spawn")  # not fork: torch's threads do not survive it
    news, stop = context.SimpleQueue(), context.Event()
    start = partial(_start, job, disk.path, disk.provenance, news if tell is not None else None, stop)
    disk.writer(units[0])  # the manifest is there before several processes write
    try:
        with ProcessPoolExecutor(min(workers, len(units)), context, initializer=start) as pool:
            try:
                with _deaf():
                    tasks = {pool.submit(_work, unit) for unit in units}
                _listen(tasks, news, tell)
            except BaseException:
                stop.set()  # workers write what they have, and end
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            for task in as_completed(tasks):
                task.result()
    except BrokenProcessPool as error:
        raise InputError(
            'a worker process died, or could not start: begin a script with `if __name__ == "__main__":`, and look '
            "for a lack of memory; with path= and resume=True the run goes on where it was"
        ) from error
    except Exception as error:
        if "pickle" not in str(error).lower():
            raise
        raise InputError(
            f"several workers need a model and options that can be sent to another process, found one that cannot "
            f"({error}): define classes and functions at the top of a module, or use workers=1"
        ) from error


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore Ctrl-C inside the block, and let processes that are started there ignore it for good."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what happens to signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _listen(tasks: set[Any], news: Any, tell: Tell | None) -> None:
    """Pass on what workers tell, until all have finished or one has failed."""
    while not all(task.done() for task in tasks):
        if any(task.done() and task.exception() for task in tasks):
            return
        if tell is None or news.empty():
            time.sleep(0.05)
        else:
            tell(*news.get())


_RUNNER: list[tuple[Runner, Disk]] = []  # of a worker process


def _start(job: Job, path: Path, provenance: Mapping[str, Any], news: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then tells its workers

    def tell(unit: Unit, progress: Progress) -> None:
        news.put((unit, progress))

    def heed() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    runner = Runner(job, None if news is None else tell, heed)
    _RUNNER.append((runner, Disk(path, runner.target.layout.spec, provenance)))


def _work(unit: Unit) -> None:
    runner, disk = _RUNNER[0]
    try:
        runner(unit, disk)
    except KeyboardInterrupt:
        return  # what was drawn is written
