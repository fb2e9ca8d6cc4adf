"""Which backend is meant, and how many workers the memory allows."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict, cast

from onebasin.errors import InputError
from onebasin.parallel.executor import Executor, SerialExecutor

_LOG = logging.getLogger("onebasin")
PROCESS = 400 << 20  # bytes of a process that has done nothing but import torch and this package, with a margin
_LARGEST = 1e30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class ExecutionOptions(TypedDict, total=False):
    """Where an operation on a population runs; all optional, and without effect on its result.

    Attributes:
        workers: processes on this machine, each with one thread (1); on a cluster, shards worked on at once (all
            processors).
        executor: "local" to start Ray on this machine, the address of a Ray cluster to join, or a `Executor` that is
            open already.
        memory: bytes that this process and its workers may take in all, as a number or as "2GB". Fewer workers are
            used where that is not enough for all, and the work is refused where it is not enough for one.
    """

    workers: int
    executor: str | Executor
    memory: int | str


class MemoryNeeds(TypedDict):
    """What `executor_for` asks for.

    Attributes:
        each: bytes that work on one shard takes.
        here: bytes that this process takes besides.
    """

    each: int
    here: int


def execution_options_of(options: Mapping[str, Any]) -> ExecutionOptions:
    """Those of some options that say where work runs.

    >>> execution_options_of({"workers": 2, "seed": 0})
    {'workers': 2}
    """
    return cast(
        "ExecutionOptions", {name: value for name, value in options.items() if name in ExecutionOptions.__annotations__}
    )


def open_executor(workers: int | None = None, executor: str | None = None) -> Executor:
    """Open a backend; whoever opens it closes it, or uses it in a `with` block.

    >>> with open_executor() as executor:
    ...     executor.workers
    1

    Args:
        workers: processes; with `executor` shards worked on at once, by default one per processor.
        executor: "local", or the address of a Ray cluster; None for processes of this machine.
    """
    if workers is not None:
        _check_workers(workers)
    if executor is not None:
        from onebasin.parallel.ray_cluster import OnRay

        return OnRay(executor, workers)
    if workers is None or workers == 1:
        return SerialExecutor()
    from onebasin.parallel.processes import Processes

    return Processes(workers)


def _check_workers(workers: object) -> None:
    if not isinstance(workers, int) or workers < 1:
        raise InputError(
            f"expected a whole number of at least 1 worker, found {workers!r}: leave workers out to work in this "
            "process"
        )


@contextmanager
def executor_for(places: Mapping[str, Any], *, each: int = 0, here: int = 0) -> Iterator[Executor]:
    """The cluster that options ask for, closed at the end unless it was open before.

    Args:
        places: options, of which those of `ExecutionOptions` are read.
        each: see `Needs`.
        here: see `Needs`.
    """
    given, workers, memory = places.get("executor"), places.get("workers"), places.get("memory")
    if given is not None and not isinstance(given, str):
        _check_open(given, memory, each, here)
        if each or here:  # else it was said by whoever opened it for several steps
            _state(given.workers, each, here)
        yield given
        return
    if given is None:
        workers = affordable(1 if workers is None else workers, memory, each=each, here=here)
        _state(workers, each, here)
    with open_executor(workers, given) as opened:
        if given is not None:  # each machine has a memory of its own; that of this one holds the caller
            affordable(1, memory, each=0, here=here)
            _state(opened.workers, each, here)
        yield opened


def _check_open(given: Executor, memory: int | str | None, each: int, here: int) -> None:
    """Raise unless all workers that are there fit into the memory."""
    fitting = affordable(given.workers, memory, each=each, here=here)
    if fitting < given.workers:
        raise InputError(
            f"the cluster that is open has {given.workers} workers, of which memory={memory} is enough for {fitting}: "
            "open one of so many, or give more memory"
        )


def _state(workers: int, each: int, here: int) -> None:
    """Say, to who listens to the logger "onebasin", what memory this will take at most."""
    total = _gigabytes(needed(workers, each=each, here=here))
    _LOG.info("%d worker%s, about %s of memory at most", workers, "" if workers == 1 else "s", total)


def _gigabytes(count: int) -> str:
    """In words, rounded up: who gives so much gives enough."""
    return f"{-(-count // 10**8) / 10:.1f} GB"


def needed(workers: int, *, each: int, here: int) -> int:
    """Bytes of this process and its workers; alone it works itself."""
    return PROCESS + here + (each if workers == 1 else workers * (PROCESS + each))


def affordable(workers: int, memory: int | str | None, *, each: int, here: int) -> int:
    """How many of so many workers the memory allows.

    >>> affordable(8, "2GB", each=100 << 20, here=0)
    3

    Raises:
        InputError: not even one.
    """
    _check_workers(workers)
    if memory is None:
        return workers
    limit = as_bytes(memory)
    fitting = [count for count in range(workers, 0, -1) if needed(count, each=each, here=here) <= limit]
    if not fitting:
        least = needed(1, each=each, here=here)
        raise InputError(
            f"this takes about {_gigabytes(least)} with one worker, found memory={memory}: give at least that much"
        )
    return fitting[0]


def as_bytes(memory: int | str) -> int:
    """Read an amount of memory.

    >>> as_bytes("2GB"), as_bytes("512 MiB"), as_bytes(1000)
    (2000000000, 536870912, 1000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(memory).lower())
    if found is None or not 0 < float(found[1]) < _LARGEST:
        raise InputError(f"expected an amount of memory such as 2GB or 512MiB, found {memory!r}")
    return int(float(found[1]) * _UNITS[found[2] or ""])
