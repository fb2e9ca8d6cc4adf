"""What an interrupted alignment needs to go on: elements, running sum and place, in one file beside the result."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.align.crowd.consensus import Progress
from onebasin.align.crowd.entry import damaged, put_back, read_entry
from onebasin.align.crowd.frame import Frame
from onebasin.errors import InputError
from onebasin.population.durable import make_folder, real_path
from onebasin.population.tensor_file import write_tensors
from onebasin.state import State

_SECONDS = 20.0  # between two entries: what a killed run may lose


def journal_of(path: Path) -> Path:
    """The journal of the alignment whose result will be under `path`."""
    return real_path(path).with_name(real_path(path).name + ".journal")


class Journal:
    """The file `<path>.journal`; it is written every few seconds, read when a run starts, gone when it is done."""

    def __init__(self, path: Path | None, frame: Frame, crowd: str, settings: dict[str, Any]) -> None:
        """Take the journal beside `path`; without a path nothing is kept.

        Args:
            path: where the aligned population will be.
            frame: the crowd and its elements.
            crowd: fingerprint of the members.
            settings: all that the result depends on; a journal of another run is refused.
        """
        self.path = None if path is None else journal_of(path)
        self.frame = frame
        self.key = _key(frame, crowd, settings)
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


def _key(frame: Frame, crowd: str, settings: dict[str, Any]) -> str:
    """A fingerprint of the crowd, its symmetry and the settings."""
    told = [crowd, frame.symmetry.to_json(), settings]
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
