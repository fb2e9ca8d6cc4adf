"""An executor of several processes on this machine, by joblib's loky.

It needs no `if __name__ == "__main__":` in a user's script.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onebasin.errors import DiskError, first_line
from onebasin.parallel.serialize import pack_error, work
from onebasin.parallel.workers import WorkerDied, WorkerPool

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SHORT = 2048  # bytes of a result; with what is around it no more than the 4,096 that a pipe takes as a whole
_SECONDS, _GRACE = 1.0, 10.0  # between two looks for the parent, and after it is gone


class ProcessExecutor(WorkerPool):
    """Processes of one thread each.

    What all of them need, and large results, are files in a private folder, which is deleted at the end.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        with _folder_errors():
            self._folder = tempfile.TemporaryDirectory(prefix="onebasin-")
        self._pool: Any = None

    def broadcast(self, content: bytes) -> str:
        """Write the bytes into a file."""
        return _write(self._folder.name, content)

    def forget(self, address: str) -> None:
        """Delete the file."""
        Path(address).unlink(missing_ok=True)

    def send(self, function: str, shared: str, payload: bytes) -> Any:
        """Submit a shard; a pool that has lost a worker is replaced by a new one."""
        from joblib.externals.loky.process_executor import BrokenProcessPool

        with self._lock:
            pool = self._pool = self._pool or self._start_pool()
            try:
                with _without_sigint():  # the first shard starts the processes
                    return pool, pool.submit(_work, self._folder.name, function, shared, payload)
            except BrokenProcessPool as error:
                self._end(pool)
                raise WorkerDied(first_line(error)) from error

    def ready(self, ticket: Any, seconds: float) -> bool:
        """Wait for a future."""
        from concurrent.futures import wait

        return bool(wait([ticket[1]], timeout=seconds).done)

    def collect(self, ticket: Any) -> bytes:
        """The result of a future, out of its file if it has one."""
        from concurrent.futures import CancelledError

        from joblib.externals.loky.process_executor import BrokenProcessPool, ShutdownExecutorError

        pool, future = ticket
        try:
            content: bytes | str = future.result()
        except (BrokenProcessPool, ShutdownExecutorError, CancelledError) as error:
            self._end(pool)
            raise WorkerDied(first_line(error)) from error
        if isinstance(content, bytes):
            return content
        with _folder_errors():
            result = _read(content)
        self.forget(content)
        return result

    def cancel(self, ticket: Any) -> None:
        """Cancel a future that has not begun."""
        ticket[1].cancel()

    def close(self) -> None:
        """End all processes at once."""
        if self._pool is not None:
            self._end(self._pool)
        self._folder.cleanup()

    def _start_pool(self) -> Any:
        from multiprocessing import resource_tracker

        from joblib.externals.loky.backend import resource_tracker as loky_tracker
        from joblib.externals.loky.process_executor import ProcessPoolExecutor

        for tracker in (resource_tracker, loky_tracker):
            tracker.ensure_running()  # started later, it would let Ctrl-C through again, see `_without_sigint`
        return ProcessPoolExecutor(
            self.workers,
            timeout=None,
            initializer=_start_worker,
            initargs=(os.getpid(), self._folder.name),
            env=dict.fromkeys(_THREADS, "1"),
        )

    def _end(self, pool: Any) -> None:
        """End a pool, unless another one has taken its place already."""
        with self._lock:
            if pool is self._pool:
                self._pool = None
                pool.shutdown(wait=True, kill_workers=True)


def _work(folder: str, function: str, shared: str, payload: bytes) -> bytes | str:
    """Run in a worker: the result, or the file that holds it.

    A worker that is killed in the middle of a message would leave all others waiting for the rest of it. A short
    one is written to a pipe as a whole or not at all.
    """
    content = work(_read, function, shared, payload)
    if len(content) <= _SHORT:
        return content
    try:
        return _write(folder, content)
    except DiskError as error:
        return pack_error(error)


def _write(folder: str, content: bytes) -> str:
    """Write a new file."""
    with _folder_errors():
        number, path = tempfile.mkstemp(dir=folder)
        with open(number, "wb") as file:
            file.write(content)
    return path


@contextmanager
def _folder_errors() -> Iterator[None]:
    """Raise errors of the temporary folder as `DiskError` with a remedy."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"expected room for what workers are sent in {tempfile.gettempdir()}, found {error}: free some space, or "
            "name another folder in the environment variable TMPDIR"
        ) from error


@contextmanager
def _without_sigint() -> Iterator[None]:
    """Block SIGINT: processes that are started inside ignore Ctrl-C from their first instruction on."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _end_with_parent(parent: int, folder: str) -> None:
    """End this process some seconds after its parent was killed: until then it may write what it has."""
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    time.sleep(_GRACE)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _start_worker(parent: int, folder: str) -> None:
    """Prepare a new worker, which ends after its parent does."""
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    _unshare_tqdm_lock()
    # Where psutil is installed, loky ends workers that have grown by 300 MB, which for us is a block of networks.
    executor = sys.modules.get("joblib.externals.loky.process_executor")
    if executor is not None:
        executor._USE_PSUTIL = False  # type: ignore[attr-defined]


def _unshare_tqdm_lock() -> None:
    """Give tqdm, with which torch compiles, a lock of this process only.

    By default it makes one between processes, a semaphore of the system, which a worker that is killed leaves behind:
    the resource tracker then complains at the end of leaked objects.
    """
    from torch import hub  # workers need torch anyway

    set_lock = getattr(getattr(hub, "tqdm", None), "set_lock", None)  # torch works without tqdm too
    if set_lock is not None:
        set_lock(threading.RLock())
