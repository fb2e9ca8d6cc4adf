"""A pool of other processes: results in order, shards sent again when a worker dies.

A subclass says how bytes are sent to all workers, how a shard is sent to one, and how its result is fetched. What is
common to processes and Ray is here: order, settings of torch, functions that workers have already, deaths of workers.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import torch

from onebasin.errors import ClusterError, InputError
from onebasin.parallel.executor import Executor, Result, Shard, Shared
from onebasin.parallel.serialize import pack, result_of

DEATHS = 3  # workers that may die before a shard is finished: one may be bad luck, four are the shard's fault
_AHEAD = 2  # shards per worker that wait or are worked on
_FUNCTIONS = 2  # functions whose copies in the workers are kept for the next call
_SECONDS = 0.1  # between two calls of `idle`


@dataclass(frozen=True)
class TorchSettings:
    """Global settings of torch that change numbers; workers get those of this process before they work.

    Attributes:
        dtype: default dtype of new tensors.
        precision: of products of matrices in float32.
        deterministic: whether only deterministic algorithms may be used.
        autocast: the dtype of an `autocast` on the processor, None outside of one.
    """

    dtype: torch.dtype
    precision: str
    deterministic: bool
    autocast: torch.dtype | None

    @classmethod
    def current(cls) -> Self:
        """The settings of this process."""
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_default_dtype(), torch.get_float32_matmul_precision(), deterministic, autocast)


@dataclass(frozen=True, eq=False)
class FunctionWithSettings:
    """A function that a worker calls under given settings of torch, which stay until the next call."""

    function: Callable[[Any, Any], Any]
    settings: TorchSettings

    def __call__(self, shared: Any, shard: Any) -> Any:
        """Call the function."""
        settings = self.settings
        torch.set_default_dtype(settings.dtype)
        torch.set_float32_matmul_precision(settings.precision)
        if settings.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports half of torch
            torch.use_deterministic_algorithms(settings.deterministic)
        with torch.autocast("cpu", dtype=settings.autocast or torch.bfloat16, enabled=settings.autocast is not None):
            return self.function(shared, shard)


class WorkerDied(Exception):  # noqa: N818 - it happened; whether it is an error is decided here
    """A worker is gone, and with it the shards that it had."""


@dataclass
class _Task:
    payload: bytes  # the shard, packed
    ticket: Any
    content: bytes | None = None  # the result, packed


@dataclass(eq=False)
class _SentFunction:
    """A function that workers have: its settings, its address, and how many calls of `map` use it now."""

    function: Any
    settings: TorchSettings
    address: Any
    users: int = 0


class WorkerPool(Executor):
    """An executor of other processes."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._sent: list[_SentFunction] = []
        self._lock = threading.RLock()  # several threads may use one pool

    @abstractmethod
    def broadcast(self, content: bytes) -> Any:
        """Store bytes where every worker finds them; return their address."""

    @abstractmethod
    def forget(self, address: Any) -> None:
        """Delete what was broadcast."""

    @abstractmethod
    def send(self, function: Any, shared: Any, payload: bytes) -> Any:
        """Give a shard to a worker, with the addresses of the function and its first argument; return a ticket."""

    @abstractmethod
    def ready(self, ticket: Any, seconds: float) -> bool:
        """Whether there is something to collect, after waiting so long at most."""

    @abstractmethod
    def collect(self, ticket: Any) -> bytes:
        """The bytes that the worker returned.

        Raises:
            WorkerDied: nothing will come any more.
        """

    @abstractmethod
    def cancel(self, ticket: Any) -> None:
        """Drop a shard that is not worked on yet."""

    @abstractmethod
    def close(self) -> None:
        """End the workers."""

    def map(
        self,
        function: Callable[[Shared, Shard], Result],
        shards: Iterable[Shard],
        *,
        shared: Shared,
        idle: Callable[[], None] | None = None,
    ) -> Iterator[Result]:
        """See `Executor.map`."""
        argument = self.broadcast(_packed(shared))
        waiting: deque[_Task] = deque()
        try:
            with self._sent_function(function) as address:
                for shard in shards:
                    payload = _packed(shard)
                    waiting.append(_Task(payload, self._send((address, argument), payload)))
                    if len(waiting) >= _AHEAD * self.workers:
                        yield self._next(waiting, (address, argument), idle)
                while waiting:
                    yield self._next(waiting, (address, argument), idle)
        finally:
            for task in waiting:
                self.cancel(task.ticket)
            self.forget(argument)

    @contextmanager
    def _sent_function(self, function: Any) -> Iterator[Any]:
        """The address of a function; one that was used just now is there already."""
        settings = TorchSettings.current()
        with self._lock:
            same = (sent for sent in self._sent if sent.function is function and sent.settings == settings)
            sent = next(same, None)
            if sent is None:
                address = self.broadcast(_packed(FunctionWithSettings(function, settings)))
                sent = _SentFunction(function, settings, address)
                self._sent.append(sent)
            sent.users += 1
        try:
            yield sent.address
        finally:
            with self._lock:
                sent.users -= 1
                unused = [entry for entry in self._sent if not entry.users]
                for entry in unused[: max(0, len(self._sent) - _FUNCTIONS)]:
                    self._sent.remove(entry)
                    self.forget(entry.address)

    def _send(self, addresses: tuple[Any, Any], payload: bytes) -> Any:
        """Send a shard; a worker that dies meanwhile is replaced."""
        for _ in range(DEATHS):
            try:
                return self.send(*addresses, payload)
            except WorkerDied as error:
                died = error
        raise ClusterError(f"workers die as soon as they are started ({died}): look for a lack of memory") from died

    def _next(self, waiting: deque[_Task], addresses: tuple[Any, Any], idle: Callable[[], None] | None) -> Any:
        """The result of the first shard."""
        first, deaths = waiting[0], 0
        while first.content is None:
            while not self.ready(first.ticket, _SECONDS):
                if idle is not None:
                    idle()
            try:
                first.content = self.collect(first.ticket)
            except WorkerDied as error:
                deaths += 1
                if deaths > DEATHS:
                    raise ClusterError(
                        f"{deaths} workers died one after the other before a shard was finished ({error}): look for "
                        "a lack of memory, use fewer workers, or workers=1 to see what happens"
                    ) from error
                for task in waiting:
                    self._send_again(task, addresses)
        waiting.popleft()
        return result_of(first.content)

    def _send_again(self, task: _Task, addresses: tuple[Any, Any]) -> None:
        """After a worker died: take the result of a shard if it is there, else send the shard once more."""
        if task.content is None and self.ready(task.ticket, 0):
            with suppress(WorkerDied):
                task.content = self.collect(task.ticket)
        if task.content is None:
            task.ticket = self._send(addresses, task.payload)


def _packed(value: Any) -> bytes:
    try:
        return pack(value)
    except Exception as error:
        raise InputError(
            f"several workers need a model and options that can be sent to another process, found one that cannot "
            f"({type(error).__name__}: {error}): define classes and functions at the top of a module, or use workers=1"
        ) from error
