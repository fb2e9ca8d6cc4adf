"""The Executor protocol, the executor of this process, and how many threads torch uses.

`Executor.map(function, shards, shared=...)` hands every shard to the function, and results come back in the order of
the shards. The function computes with one thread and sees one shard at a time, wherever it runs, so that results do not
depend on the executor or on the number of workers, not even in their last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, Self, TypeVar

import torch

Progress = Callable[[int, int, str], None]  # (done, total, what is being done), of all long work
"""Called with (work done, work in all, a sentence about it); gradients, networks or shards, as the sentence says."""


Shared = TypeVar("Shared")
Shard = TypeVar("Shard")
Result = TypeVar("Result")

_LOCK = threading.Lock()
_THREADS: list[int] = []  # the number of threads before each block of `one_thread` that is open
_WIDE = 512  # from so many units on matrix products outweigh the waiting


class Executor(Protocol):
    """Calls a function on many shards, in order.

    Attributes:
        workers: how many shards are worked on at once.
    """

    workers: int

    def map(
        self,
        function: Callable[[Shared, Shard], Result],
        shards: Iterable[Shard],
        *,
        shared: Shared,
        idle: Callable[[], None] | None = None,
    ) -> Iterator[Result]:
        """Yield function(shared, shard) of one shard after the other, in their order.

        Shards are asked for a few ahead of what is worked on, and never all at once. Closing the iterator stops the
        work.

        Args:
            function: it must not change `shared`, and must give the same result when it is called twice: the shards
                of a worker that died are given to another.
            shards: second argument of each call.
            shared: first argument of every call, sent once to every worker.
            idle: called a few times per second while this process waits for workers.
        """

    def close(self) -> None:
        """End the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SerialExecutor(Executor):
    """Works on one shard after the other in this process.

    >>> list(SerialExecutor().map(pow, [1, 2, 3], shared=2))
    [2, 4, 8]
    """

    workers = 1

    def map(
        self,
        function: Callable[[Shared, Shard], Result],
        shards: Iterable[Shard],
        *,
        shared: Shared,
        idle: Callable[[], None] | None = None,
    ) -> Iterator[Result]:
        """Call the function when a result is asked for; `idle` is never called."""
        remaining = iter(shards)
        while True:
            with one_thread():  # as in every worker: sums of matrix products may depend on how threads share them
                try:
                    shard = next(remaining)
                except StopIteration:
                    return
                result = function(shared, shard)
            yield result

    def close(self) -> None:
        """Do nothing: there are no workers."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread until the last such block ends; results do not change.

    Torch splits an operation over threads from a few thousand numbers on, and waits for the slowest. For thousands of
    operations of microseconds each this gains little on an idle machine, and on a busy one every wait can cost
    milliseconds: balancing was seen to take fifteen times as long.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    with _LOCK:
        _THREADS.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _LOCK:
            before = _THREADS.pop()  # they are alike but for the first, which is popped last
            if not _THREADS:
                torch.set_num_threads(before)


def threads_for(units: int) -> AbstractContextManager[None]:
    """A block with one thread while the widest space is narrow, with all of them for wide ones."""
    return nullcontext() if units >= _WIDE else one_thread()
