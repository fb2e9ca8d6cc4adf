"""An executor on a Ray cluster: shared values lie in its object store, failed tasks are tried again."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from onebasin.errors import ClusterError, InputError, first_line
from onebasin.parallel.serialize import work
from onebasin.parallel.workers import DEATHS, WorkerDied, WorkerPool

LOCAL = "local"
_PATIENCE = 5.0  # seconds until an address counts as wrong


class RayExecutor(WorkerPool):
    """A Ray cluster: one that is started here and ended with us, or one that runs already.

    Args:
        address: "local", or that of a running cluster, as "auto", "host:6379" or "ray://host:10001".
        workers: shards worked on at once; by default one per processor of the cluster.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        ray = _ray()
        if ray.is_initialized():
            self._ours = False  # this process is connected already
        else:
            self._ours = True
            _connect(ray, address, workers)
        super().__init__(workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
        self._ray = ray
        self._task = ray.remote(num_cpus=1, max_retries=DEATHS)(_work)

    def broadcast(self, content: bytes) -> Any:
        """Put bytes into the object store, from where every worker of a machine reads them without a copy."""
        return self._ray.put(np.frombuffer(content, dtype=np.uint8))

    def forget(self, address: Any) -> None:
        """Do nothing: Ray deletes objects without references."""

    def send(self, function: Any, shared: Any, payload: bytes) -> Any:
        """Start a task."""
        names = (function.hex(), shared.hex())
        return self._task.remote(names, function, shared, payload)

    def ready(self, ticket: Any, seconds: float) -> bool:
        """Wait for a task; its result stays where it is until it is collected."""
        return bool(self._ray.wait([ticket], timeout=seconds, fetch_local=False)[0])

    def collect(self, ticket: Any) -> bytes:
        """The result of a task that Ray has tried several times."""
        try:
            content: bytes = self._ray.get(ticket)
            return content
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(first_line(error)) from error

    def cancel(self, ticket: Any) -> None:
        """Ask Ray to drop a task."""
        self._ray.cancel(ticket, force=False)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._sent.clear()
        if self._ours:
            self._ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError("a cluster needs Ray, which is not installed: pip install 'onebasin[ray]'") from error
    return ray


def _connect(ray: Any, address: str, workers: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": True, "logging_level": logging.ERROR}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no statistics
    if address == LOCAL:
        options |= {"address": LOCAL, "num_cpus": workers, "include_dashboard": False}
    else:
        options |= {"address": address}
    try:
        _check_port(address)
        ray.init(**options)
    except Exception as error:  # Ray raises what it likes: ConnectionError, RuntimeError, ValueError, ...
        raise ClusterError(
            f'expected a Ray cluster at {address!r}, found none ({first_line(error)}): give "local", or the address '
            "that `ray start --head` printed"
        ) from error


def _check_port(address: str) -> None:
    """Raise `OSError` where no server listens; Ray itself would try for minutes."""
    import socket

    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()


def _work(names: tuple[str, str], function: Any, shared: Any, payload: bytes) -> bytes:
    """Run in a worker of Ray; the first two arrive as arrays out of the object store."""
    content = dict(zip(names, (function, shared), strict=True))
    return work(lambda name: memoryview(content[name]), *names, payload)
