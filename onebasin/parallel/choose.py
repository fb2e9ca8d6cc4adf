"""Which executor `workers` and `executor` ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict, cast

from onebasin.errors import InputError
from onebasin.parallel.executor import Executor, SerialExecutor


class ExecutionOptions(TypedDict, total=False):
    """Where an operation on a population runs; all optional, and without effect on its result.

    Attributes:
        workers: processes on this machine, each with one thread (1); on a cluster, shards worked on at once (all
            processors).
        executor: "local" to start Ray on this machine, the address of a Ray cluster to join, or an open `Executor`.
    """

    workers: int
    executor: str | Executor
    memory: int | str  # ignored, until the branches are merged


class MemoryNeeds(TypedDict):
    """Ignored; until the branches are merged."""

    each: int
    here: int


def execution_options_of(options: Mapping[str, Any]) -> ExecutionOptions:
    """The entries of `options` that say where work runs.

    >>> execution_options_of({"workers": 2, "seed": 0})
    {'workers': 2}
    """
    return cast(
        "ExecutionOptions", {name: value for name, value in options.items() if name in ExecutionOptions.__annotations__}
    )


def open_executor(workers: int | None = None, executor: str | None = None) -> Executor:
    """Open an executor, to be closed by its caller or by a `with` block.

    >>> with open_executor() as executor:
    ...     executor.workers
    1

    Args:
        workers: processes; with `executor` shards worked on at once, by default one per processor.
        executor: "local", or the address of a Ray cluster; None for processes of this machine.
    """
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise InputError(
            f"expected a whole number of at least 1 worker, found {workers!r}: leave workers out to work in this "
            "process"
        )
    if executor is not None:
        from onebasin.parallel.ray import RayExecutor

        return RayExecutor(executor, workers)
    if workers is None or workers == 1:
        return SerialExecutor()
    from onebasin.parallel.processes import ProcessExecutor

    return ProcessExecutor(workers)


@contextmanager
def executor_for(options: Mapping[str, Any], *, each: int = 0, here: int = 0) -> Iterator[Executor]:
    """Yield the executor that `options["workers"]` and `options["executor"]` ask for.

    One that was open before stays open. `each` and `here` are ignored, until the branches are merged.
    """
    given, workers = options.get("executor"), options.get("workers")
    if given is not None and not isinstance(given, str):
        yield given
        return
    with open_executor(workers, given) as executor:
        yield executor
