"""Who computes the units: this process, or several."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onebasin.errors import InputError
from onebasin.inference.job import Job
from onebasin.inference.journal import Disk, Journal, Place
from onebasin.inference.run import Progress, Tell, UnitRun
from onebasin.inference.start import networks_at
from onebasin.inference.units import Unit


@dataclass(eq=False)
class Runner:
    """A job made ready: target and plan are built once, units run one after the other."""

    job: Job
    tell: Tell | None = None

    def __post_init__(self) -> None:
        self.target = self.job.target()
        self.plan = self.job.plan(self.target)

    def __call__(self, unit: Unit, journal: Journal) -> Place:
        """Run one unit."""
        job, layout = self.job, self.target.layout
        run = UnitRun(self.plan, layout, job.seed, self.tell)
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


def run_here(job: Job, units: list[Unit], journal: Journal, tell: Tell | None) -> dict[str, Any]:
    """Run units one after the other; returns their last States by name."""
    runner = Runner(job, tell)
    return {unit.name: runner(unit, journal).state for unit in units}


def run_apart(job: Job, units: list[Unit], disk: Disk, tell: Tell | None, workers: int) -> None:
    """Run units in processes of their own, which write to the disk."""
    from multiprocessing import get_context
    from pickle import PicklingError

    context = get_context("spawn")  # not fork: torch's threads do not survive it
    news = context.SimpleQueue() if tell is not None else None
    start = partial(_start, job, disk.path, disk.provenance, news)
    disk.writer(units[0])  # the manifest is there before several processes write
    try:
        with ProcessPoolExecutor(min(workers, len(units)), context, initializer=start) as pool:
            tasks = {pool.submit(_work, unit) for unit in units}
            _listen(tasks, news, tell)
            for task in as_completed(tasks):
                task.result()
    except (PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error):
            raise
        raise InputError(
            f"several workers need a model and options that can be sent to another process, found one that cannot "
            f"({error}): define classes and functions at the top of a module, or use workers=1"
        ) from error


def _listen(tasks: set[Any], news: Any, tell: Tell | None) -> None:
    """Pass on what workers tell, until all have finished."""
    while tell is not None and not all(task.done() for task in tasks):
        if news.empty():
            from time import sleep

            sleep(0.05)
            continue
        tell(*news.get())


_RUNNER: list[tuple[Runner, Disk]] = []  # of a worker process


def _start(job: Job, path: Path, provenance: Mapping[str, Any], news: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    tell: Callable[[Unit, Progress], None] | None = None
    if news is not None:

        def tell(unit: Unit, progress: Progress) -> None:
            news.put((unit, progress))

    runner = Runner(job, tell)
    _RUNNER.append((runner, Disk(path, runner.target.layout.spec, provenance)))


def _work(unit: Unit) -> None:
    runner, disk = _RUNNER[0]
    runner(unit, disk)
