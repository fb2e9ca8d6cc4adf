"""Work that is done here and now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from onebasin.cluster.protocol import Cluster, Result, Shard, Shared
from onebasin.quiet import one_thread


class Serial(Cluster):
    """Works on one shard after the other in this process.

    >>> list(Serial().map(pow, [1, 2, 3], shared=2))
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
