"""One thread for work that consists of very many small operations.

Torch splits an operation over threads from a few thousand numbers on, and waits for the slowest. For thousands of
operations of microseconds each this gains little on an idle machine, and on a busy one every wait can cost
milliseconds: balancing was seen to take fifteen times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_LOCK = threading.Lock()
_INSIDE: list[int] = []  # how many threads each user found


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread until the last user has left; results do not change.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    with _LOCK:
        _INSIDE.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _LOCK:
            last = _INSIDE.pop()  # they are alike but for the first, which is popped last
            if not _INSIDE:
                torch.set_num_threads(last)


WIDE = 512  # from so many units on matrix products outweigh the waiting


def threads_for(units: int) -> AbstractContextManager[None]:
    """One thread while the widest space is narrow, all of them for wide ones."""
    return nullcontext() if units >= WIDE else one_thread()
