"""Work that is done here and now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, Self, TypeVar

from onebasin.parallel.threads import one_thread

# ----------------------------------------------------------------------
# What every backend can do.


Shared = TypeVar("Shared")
Shard = TypeVar("Shard")
Result = TypeVar("Result")


class Executor(Protocol):
    """Somebody who works on shards.

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

        Shards are asked for a few ahead of what is worked on, and never all at once. Who stops asking for results
        stops the work.

        Args:
            function: what is done. It must not change `shared`, and it gives the same result when it is called twice:
                the shards of a worker that died are given to another.
            shards: what it is done to.
            shared: sent once to every worker, not with every shard.
            idle: called a few times per second while this process waits for others.
        """

    def close(self) -> None:
        """Send the workers home."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# ----------------------------------------------------------------------
# Work that is done here and now.


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
        """Call the function when a result is asked for; nobody ever waits."""
        waiting = iter(shards)
        while True:
            with one_thread():  # as everywhere: sums of matrix products may depend on how threads share them
                try:
                    shard = next(waiting)
                except StopIteration:
                    return
                result = function(shared, shard)
            yield result

    def close(self) -> None:
        """There is nobody to send home."""
