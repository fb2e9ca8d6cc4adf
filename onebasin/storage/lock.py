"""A lock file that one process holds; the system frees it when that process dies, however it dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from onebasin.errors import DiskError
from onebasin.storage.atomic import disk_errors

_SECONDS = 0.05  # between two attempts


class LockedElsewhere(Exception):  # noqa: N818 - a state of affairs; what it means is for the caller to say
    """Another process holds the lock."""


@contextmanager
def file_lock(path: Path, seconds: float = 0.0, meanwhile: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file inside the block.

    Args:
        path: the file; it is created where it is missing, and stays.
        seconds: how long to wait for another holder.
        meanwhile: called while waiting; it may raise to give up.

    Raises:
        LockedElsewhere: another process still holds it after all that time.
    """
    if path.is_symlink():
        raise DiskError(f"{path} is a link, which another program must have made: remove it")
    lock, end = FileLock(path), time.monotonic() + seconds
    while True:
        try:
            with disk_errors(path):
                lock.acquire(blocking=False)
            break
        except Timeout as error:
            if time.monotonic() >= end:
                raise LockedElsewhere(str(path)) from error
        if meanwhile is not None:
            meanwhile()
        time.sleep(_SECONDS)
    try:
        yield
    finally:
        lock.release()
