"""Who does the matching: this process, or several."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch
from numpy.typing import NDArray

from onebasin.align.board import Board
from onebasin.align.crowd.view import View, Weights
from onebasin.align.pair.assign import Place, Vertex
from onebasin.quiet import threads_for
from onebasin.state import State
from onebasin.symmetry import Symmetry

Array = NDArray[Any]


class Crew:
    """Matches several members to their references; the results do not depend on the number of workers."""

    def __init__(self, view: View, workers: int = 1) -> None:
        """Start `workers` processes if there are more than one; they need weights, and no model."""
        self.view = view
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1 and isinstance(view, Weights):
            from multiprocessing import get_context

            # Not fork: torch's threads do not survive it.
            self._pool = ProcessPoolExecutor(
                workers, get_context("spawn"), initializer=_start, initargs=(view.board.symmetry.to_json(),)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def match(self, references: Sequence[State], features: Sequence[State], *, full: bool) -> list[Vertex | None]:
        """One vertex per member, or None for a member that stays."""
        references = [_as_precise(a, b) for a, b in zip(references, features, strict=True)]
        if self._pool is None or len(features) == 1:
            with threads_for(self.view.assignment.widest):
                return [self.view.match(a, b, full=full) for a, b in zip(references, features, strict=True)]
        # Arrays and not tensors: those would travel as file handles, of which a process has few.
        tasks = [
            self._pool.submit(_work, _arrays(a), _arrays(b), full) for a, b in zip(references, features, strict=True)
        ]
        return [
            None if found is None else [Place(torch.from_numpy(x), torch.from_numpy(y)) for x, y in found]
            for found in (task.result() for task in tasks)
        ]


def _as_precise(reference: State, features: State) -> State:
    """A sum in float64 is rounded once, here, so that every worker sees the same."""
    return {
        name: reference[name].to(torch.promote_types(torch.float32, value.dtype)) for name, value in features.items()
    }


def _arrays(state: State) -> dict[str, Array]:
    return {
        name: (value if value.dtype.itemsize >= 4 else value.float()).cpu().numpy() for name, value in state.items()
    }


_VIEW: list[Weights] = []  # of a worker process


def _start(symmetry: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    torch.set_num_threads(1)
    _VIEW.append(Weights(Board.of(Symmetry.from_json(symmetry))))


def _work(reference: dict[str, Array], features: dict[str, Array], full: bool) -> list[tuple[Array, Array]] | None:
    a, b = ({name: torch.from_numpy(value) for name, value in x.items()} for x in (reference, features))
    found = _VIEW[0].match(a, b, full=full)
    return None if found is None else [(place.source.numpy(), place.signs.numpy()) for place in found]
