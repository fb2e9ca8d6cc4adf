"""Shards that are given away: kept in order, given again when a worker dies.

A backend says how something is sent to all workers, how a shard is sent to one, and what came of it. The rest is here.
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

# ----------------------------------------------------------------------
# What torch was told in this process and what changes numbers: workers are told the same before they work.


@dataclass(frozen=True)
class Circumstances:
    """Settings of torch.

    Attributes:
        dtype: of tensors of which none is said.
        precision: of products of matrices in float32.
        deterministic: whether only deterministic algorithms may be used.
        automatic: the dtype of an `autocast` on the processor, None outside of one.
    """

    dtype: torch.dtype
    precision: str
    deterministic: bool
    automatic: torch.dtype | None

    @classmethod
    def here(cls) -> Self:
        """Those of this process."""
        automatic = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_default_dtype(), torch.get_float32_matmul_precision(), deterministic, automatic)


@dataclass(frozen=True, eq=False)
class UnderThese:
    """A function, and the circumstances under which a worker calls it; the worker keeps them until the next call."""

    function: Callable[[Any, Any], Any]
    circumstances: Circumstances

    def __call__(self, shared: Any, shard: Any) -> Any:
        """Call it."""
        given = self.circumstances
        torch.set_default_dtype(given.dtype)
        torch.set_float32_matmul_precision(given.precision)
        if given.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports half of torch
            torch.use_deterministic_algorithms(given.deterministic)
        with torch.autocast("cpu", dtype=given.automatic or torch.bfloat16, enabled=given.automatic is not None):
            return self.function(shared, shard)


# ----------------------------------------------------------------------
# Shards that are given away: kept in order, given again when a worker dies.


LIVES = 3  # workers that may die before a shard is finished: one may be bad luck, four are the shard's fault
_AHEAD = 2  # shards per worker that wait or are worked on
_FUNCTIONS = 2  # functions whose workers' copies are kept for the next call
_SECONDS = 0.1  # between two calls of `idle`


class WorkerDied(Exception):  # noqa: N818 - it happened; whether it is an error is decided here
    """A worker is gone, and with it the shards that it had."""


@dataclass
class _Errand:
    parcel: bytes
    ticket: Any
    content: bytes | None = None  # what came of it


@dataclass(eq=False)
class _Known:
    """A function that was sent: under which circumstances, where it is, and how many calls of `map` use it now."""

    function: Any
    circumstances: Circumstances
    place: Any
    users: int = 0


class Errands(Executor):
    """A cluster of other processes."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._known: list[_Known] = []
        self._lock = threading.RLock()  # several threads may use one cluster

    @abstractmethod
    def broadcast(self, content: bytes) -> Any:
        """Lay something where every worker finds it; return where."""

    @abstractmethod
    def forget(self, place: Any) -> None:
        """Nobody will ask for it any more."""

    @abstractmethod
    def send(self, function: Any, shared: Any, parcel: bytes) -> Any:
        """Give a shard to a worker, together with two places; return a ticket."""

    @abstractmethod
    def ready(self, ticket: Any, seconds: float) -> bool:
        """Whether there is something to collect, after waiting so long at most."""

    @abstractmethod
    def collect(self, ticket: Any) -> bytes:
        """What the worker returned.

        Raises:
            WorkerDied: nothing will come any more.
        """

    @abstractmethod
    def cancel(self, ticket: Any) -> None:
        """Nobody will collect it."""

    @abstractmethod
    def close(self) -> None:
        """Send the workers home."""

    def map(
        self,
        function: Callable[[Shared, Shard], Result],
        shards: Iterable[Shard],
        *,
        shared: Shared,
        idle: Callable[[], None] | None = None,
    ) -> Iterator[Result]:
        """See `Executor.map`."""
        beside = self.broadcast(_packed(shared))
        waiting: deque[_Errand] = deque()
        try:
            with self._sent(function) as place:
                for shard in shards:
                    parcel = _packed(shard)
                    waiting.append(_Errand(parcel, self._send_off((place, beside), parcel)))
                    if len(waiting) >= _AHEAD * self.workers:
                        yield self._next(waiting, (place, beside), idle)
                while waiting:
                    yield self._next(waiting, (place, beside), idle)
        finally:
            for errand in waiting:
                self.cancel(errand.ticket)
            self.forget(beside)

    @contextmanager
    def _sent(self, function: Any) -> Iterator[Any]:
        """Where workers find a function; one that was used just now is there already."""
        now = Circumstances.here()
        with self._lock:
            same = (known for known in self._known if known.function is function and known.circumstances == now)
            known = next(same, None)
            if known is None:
                known = _Known(function, now, self.broadcast(_packed(UnderThese(function, now))))
                self._known.append(known)
            known.users += 1
        try:
            yield known.place
        finally:
            with self._lock:
                known.users -= 1
                unused = [own for own in self._known if not own.users]
                for own in unused[: max(0, len(self._known) - _FUNCTIONS)]:
                    self._known.remove(own)
                    self.forget(own.place)

    def _send_off(self, places: tuple[Any, Any], parcel: bytes) -> Any:
        """Send a shard; a worker that dies meanwhile is replaced."""
        for _ in range(LIVES):
            try:
                return self.send(*places, parcel)
            except WorkerDied as error:
                died = error
        raise ClusterError(f"workers die as soon as they are started ({died}): look for a lack of memory") from died

    def _next(self, waiting: deque[_Errand], places: tuple[Any, Any], idle: Callable[[], None] | None) -> Any:
        """The result of the first shard."""
        first, lives = waiting[0], LIVES
        while first.content is None:
            while not self.ready(first.ticket, _SECONDS):
                if idle is not None:
                    idle()
            try:
                first.content = self.collect(first.ticket)
            except WorkerDied as error:
                lives -= 1
                if lives < 0:
                    raise ClusterError(
                        f"{LIVES + 1} workers died one after the other before a shard was finished ({error}): look for "
                        "a lack of memory, use fewer workers, or workers=1 to see what happens"
                    ) from error
                for errand in waiting:
                    self._again(errand, places)
        waiting.popleft()
        return result_of(first.content)

    def _again(self, errand: _Errand, places: tuple[Any, Any]) -> None:
        """After a worker died: take the result of a shard if it is there, else send the shard once more."""
        if errand.content is None and self.ready(errand.ticket, 0):
            with suppress(WorkerDied):
                errand.content = self.collect(errand.ticket)
        if errand.content is None:
            errand.ticket = self._send_off(places, errand.parcel)


def _packed(thing: Any) -> bytes:
    try:
        return pack(thing)
    except Exception as error:
        raise InputError(
            f"several workers need a model and options that can be sent to another process, found one that cannot "
            f"({type(error).__name__}: {error}): define classes and functions at the top of a module, or use workers=1"
        ) from error
