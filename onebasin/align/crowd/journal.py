"""What an interrupted alignment needs to go on: elements, running sum and place, in one file beside the result."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from onebasin.align.crowd.consensus import Progress
from onebasin.align.crowd.frame import Frame
from onebasin.errors import InputError
from onebasin.population.durable import make_folder, publish
from onebasin.population.tensor_file import read_header

_SECONDS = 20.0  # between two entries: what a killed run may lose


class Journal:
    """The file `<path>.journal`; it is written every few seconds, read when a run starts, gone when it is done."""

    def __init__(self, path: Path | None, frame: Frame, settings: dict[str, Any]) -> None:
        """Take the journal beside `path`; without a path nothing is kept.

        Args:
            path: where the aligned population will be.
            frame: the crowd and its elements.
            settings: all that the result depends on; a journal of another run is refused.
        """
        self.path = None if path is None else path.with_name(path.name + ".journal")
        self.frame = frame
        self.key = _key(frame, settings)
        self._last = time.monotonic()

    def resume(self) -> Progress:
        """The progress of an interrupted run, whose elements are put into the frame; a fresh one if there is none.

        Raises:
            InputError: the journal belongs to another run.
        """
        if self.path is None or not self.path.exists():
            return Progress()
        from safetensors import safe_open

        told = json.loads(read_header(self.path).metadata["onebasin"])
        if told["key"] != self.key:
            raise InputError(
                f"{self.path} is the journal of an interrupted alignment of other networks or with other settings: "
                "repeat that one to finish it, choose another path, or delete the journal to give it up"
            )
        at = Progress(**told["progress"])
        with safe_open(self.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                kind, _, rest = name.partition("/")
                tensor = file.get_tensor(name)
                if kind == "total":
                    at.total[rest] = tensor
                else:
                    (self.frame.elements.orders if kind == "order" else self.frame.elements.factors)[rest].copy_(tensor)
        at.total = {name: at.total[name] for name in told["names"]}  # sums over tensors keep their order, to the bit
        return at

    def note(self, at: Progress, *, now: bool = False) -> None:
        """Write an entry if the last one is old enough."""
        if self.path is None or not (now or time.monotonic() - self._last > _SECONDS):
            return
        from safetensors.torch import save

        elements = self.frame.elements
        tensors = {
            **{f"total/{name}": value.contiguous() for name, value in at.total.items()},
            **{f"order/{name}": value.contiguous() for name, value in elements.orders.items()},
            **{f"factor/{name}": value.contiguous() for name, value in elements.factors.items()},
        }
        facts = {name: value for name, value in vars(at).items() if name != "total"}
        text = json.dumps({"key": self.key, "progress": facts, "names": list(at.total)})
        make_folder(self.path.parent)
        publish(self.path, lambda file: file.write(save(tensors, {"onebasin": text})), replace=True)
        self._last = time.monotonic()

    def close(self) -> None:
        """The result is safe: the journal is not needed any more."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _key(frame: Frame, settings: dict[str, Any]) -> str:
    """A fingerprint of the crowd, its symmetry and the settings."""
    population = frame.population
    first = population.member(0)
    told = {
        "members": len(population),
        "symmetry": hashlib.sha256(frame.symmetry.to_json().encode()).hexdigest(),
        "spec": {name: str(spec) for name, spec in population.spec.items()},
        "first": {name: float(value.double().sum()) for name, value in first.items() if value.dtype != torch.bool},
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
