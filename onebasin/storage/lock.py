"""A file that one process holds; the system frees it when that process dies, however it dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onebasin.errors import DiskError
from onebasin.storage.atomic import disk_errors

_SECONDS = 0.05  # between two attempts


class HeldElsewhere(Exception):  # noqa: N818 - a state of affairs; what it means is for the caller to say
    """Another process holds the file."""


@contextmanager
def held(lock: Path, seconds: float = 0.0, meanwhile: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file inside the block, which nobody else can do meanwhile.

    Args:
        lock: the file; it is created where it is missing, and stays.
        seconds: how long to wait for another holder.
        meanwhile: called while waiting; it may raise to give up.

    Raises:
        HeldElsewhere: after all that time.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    if lock.is_symlink():
        raise DiskError(f"{lock} is a link, which somebody else must have made: remove it")
    with disk_errors(lock):
        file = lock.open("a")  # nothing that is there is lost
    with file:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= end:
                    raise HeldElsewhere(str(lock)) from error
            if meanwhile is not None:
                meanwhile()
            time.sleep(_SECONDS)
        yield
