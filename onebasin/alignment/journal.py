"""What an interrupted alignment needs to go on: elements, running sum and place, in one file beside the result."""

from __future__ import annotations

import hashlib
import json
import math
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.alignment.consensus import Progress
from onebasin.alignment.features import AlignmentState
from onebasin.errors import InputError, StorageError
from onebasin.state import State
from onebasin.storage import make_folder, read_tensors, real_path, write_tensors
from onebasin.symmetry import Element

# ----------------------------------------------------------------------
# An entry of a journal, read from its file and believed only if an alignment can go on from it.


_LARGEST = 1e100  # of a sum: its products must still be numbers
_FACTOR = 1e15
_COUNTS = ("sweep", "place", "moved", "stage")


def read_entry(path: Path) -> tuple[dict[str, Any], State]:
    """What a journal tells, and its tensors.

    Raises:
        StorageError: the file is no journal, or damaged.
    """
    try:
        tensors, header = read_tensors(path)
        told = json.loads(header.get("onebasin", "{}"))
    except (StorageError, ValueError, RecursionError) as error:
        raise damaged(path) from error
    if not isinstance(told, dict) or not {"key", "progress", "names", "sum"} <= told.keys():
        raise damaged(path)
    return told, tensors


def damaged(path: Path) -> StorageError:
    """What to say of a journal that cannot be gone on from."""
    return StorageError(
        f"{path} is no journal of an alignment, or is damaged: delete it to start again, or choose another path"
    )


def put_back(path: Path, told: Mapping[str, Any], tensors: State, elements: Element) -> Progress:
    """The progress of an entry; its elements are copied into `elements`, once all of it is found usable.

    Raises:
        StorageError: it is not.
    """
    goals = {f"order/{name}": value for name, value in elements.orders.items()}
    goals |= {f"factor/{name}": value for name, value in elements.factors.items()}
    try:
        at = Progress(**told["progress"])
        at.total = {name: tensors[f"total/{name}"] for name in told["names"]}  # in the order in which sums were formed
        usable = _is_progress(at, elements.members or 1) and all(_fits(tensors[name], goals[name]) for name in goals)
    except (KeyError, TypeError) as error:
        raise damaged(path) from error
    if not usable:
        raise damaged(path)
    for name, goal in goals.items():
        goal.copy_(tensors[name])
    return at


def check_total(path: Path | None, at: Progress, features: State) -> None:
    """Refuse a sum over members that is not of their kind: `features` are those of one of them.

    Raises:
        StorageError: it is not.
    """
    alike = at.total.keys() == features.keys() and all(
        value.shape == features[name].shape and value.dtype == torch.float64 and bool((value.abs() < _LARGEST).all())
        for name, value in at.total.items()
    )
    if at.total and not alike:
        raise damaged(path or Path("the journal"))


def _is_progress(at: Progress, members: int) -> bool:
    counts = [getattr(at, name) for name in _COUNTS]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(at.done, bool):
        return False
    if not isinstance(at.history, list) or not all(map(_finite, (at.norms, *at.history))):
        return False
    return at.place <= members and at.stage <= 1 and len(at.history) >= (at.sweep if at.total else 0)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _fits(found: Tensor, goal: Tensor) -> bool:
    """Whether orders are orders, and factors numbers that leave weights numbers."""
    if found.shape != goal.shape or found.dtype != goal.dtype:
        return False
    if found.is_floating_point():
        return bool(((found.abs() > 1 / _FACTOR) & (found.abs() < _FACTOR)).all())
    return torch.equal(found.sort(-1).values, torch.arange(found.shape[-1]).expand(found.shape))


# ----------------------------------------------------------------------
# What an interrupted alignment needs to go on: elements, running sum and place, in one file beside the result.


_SECONDS = 20.0  # between two entries: what a killed run may lose


def journal_of(path: Path) -> Path:
    """The journal of the alignment whose result will be under `path`."""
    return real_path(path).with_name(real_path(path).name + ".journal")


class Journal:
    """The file `<path>.journal`; it is written every few seconds, read when a run starts, gone when it is done."""

    def __init__(self, path: Path | None, frame: AlignmentState, population: str, settings: dict[str, Any]) -> None:
        """Take the journal beside `path`; without a path nothing is kept.

        Args:
            path: where the aligned population will be.
            frame: the population and its elements.
            population: fingerprint of the members.
            settings: all that the result depends on; a journal of another run is refused.
        """
        self.path = None if path is None else journal_of(path)
        self.frame = frame
        self.key = _key(frame, population, settings)
        self._last = time.monotonic()

    def resume(self) -> Progress:
        """The progress of an interrupted run, whose elements are put into the frame; a fresh one if there is none.

        Raises:
            InputError: the journal belongs to another run.
        """
        if self.path is None or not self.path.exists():
            return Progress()
        told, tensors = read_entry(self.path)
        if told["sum"] != _checksum(tensors):
            raise damaged(self.path)
        if told["key"] != self.key:
            raise InputError(
                f"{self.path} is the journal of an interrupted alignment of other networks or with other settings: "
                "repeat that one to finish it, choose another path, or delete the journal to give it up"
            )
        return put_back(self.path, told, tensors, self.frame.elements)

    def note(self, at: Progress, *, now: bool = False) -> None:
        """Write an entry if the last one is old enough."""
        if self.path is None or not (now or time.monotonic() - self._last > _SECONDS):
            return
        elements = self.frame.elements
        tensors = {
            **{f"total/{name}": value for name, value in at.total.items()},
            **{f"order/{name}": value for name, value in elements.orders.items()},
            **{f"factor/{name}": value for name, value in elements.factors.items()},
        }
        facts = {name: value for name, value in vars(at).items() if name != "total"}
        text = json.dumps({"key": self.key, "progress": facts, "names": list(at.total), "sum": _checksum(tensors)})
        make_folder(self.path.parent)
        write_tensors(self.path, tensors, {"onebasin": text})
        self._last = time.monotonic()

    def close(self) -> None:
        """The result is safe: the journal is not needed any more."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _checksum(tensors: State) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value


def _key(frame: AlignmentState, population: str, settings: dict[str, Any]) -> str:
    """A fingerprint of the population, its symmetry and the settings."""
    told = [population, frame.symmetry.to_json(), settings]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def fingerprint(value: Any) -> str:
    """A hash of tensors, and of dicts, lists and tuples of them; of anything else the name of its type."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(str(tuple(value.shape)).encode() + raw.numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return str({str(name): fingerprint(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return str([fingerprint(item) for item in value])
    return type(value).__name__
