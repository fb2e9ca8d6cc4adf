"""The choice of an executor, by the keywords `workers` and `executor`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onebasin.errors import InputError
from onebasin.parallel.executor import Executor, SerialExecutor


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
def executor_for(workers: int | None = None, executor: str | Executor | None = None) -> Iterator[Executor]:
    """Yield the executor that the keywords `workers` and `executor` of a public function ask for.

    One that was open before stays open. Results do not depend on it.
    """
    if executor is not None and not isinstance(executor, str):
        yield executor
        return
    with open_executor(workers, executor) as opened:
        yield opened
