"""Where a study works: its settings, its seed, its folder, and networks that several parts share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from onebasin.inference import sample
from onebasin.inference.seeds import derived, generator
from onebasin.population import Population

Show = Callable[[int, int, str], None]  # (done, of so many, what is being done)
Watch = Callable[[str], AbstractContextManager[Show]]  # a title -> a bar that is shown until the block ends
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Plan:
    """What a study runs; studies add their own fields, plain values all.

    Attributes:
        preset: "quick" or "full".
        data_dir: the folder with data sets that do not come with the package; None where none is needed.
    """

    preset: str = "quick"
    data_dir: str | None = None

    def settings(self) -> dict[str, Any]:
        """The fields that decide results: all but the place of the data. Sequences become text."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "data_dir"}
        plain = (str, int, float, bool, type(None))
        return {name: value if isinstance(value, plain) else str(value) for name, value in fields.items()}


_Settings = TypeVar("_Settings", bound=Plan)


@dataclass(eq=False)
class Bench(Generic[_Settings]):
    """Handed to every part of a study.

    Attributes:
        plan: the settings.
        seed: of everything random.
        folder: of the run; networks are kept below it.
        show: moves the bar of the part that is running.
    """

    plan: _Settings
    seed: int
    folder: Path
    show: Show = lambda done, total, doing: None
    _made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], _Made]) -> _Made:
        """What `make` gives, made once in this process: problems, symmetries, aligned crowds."""
        if name not in self._made:
            self._made[name] = make()
        found: _Made = self._made[name]
        return found

    def networks(
        self,
        name: str,
        model: nn.Module,
        data: Any,
        method: str,
        options: Mapping[str, Any],
        *,
        seed: int | None = None,
    ) -> Population:
        """`sample` into the folder of the run: an interrupted run goes on, and parts that ask again get the same.

        Args:
            name: of the crowd, as "hmc-0"; its folder and, without `seed`, its stream of random numbers.
            model: as for `sample`.
            data: as for `sample`.
            method: as for `sample`.
            options: everything else that `sample` takes.
            seed: where several crowds shall share one.
        """

        def made() -> Population:
            path = self.folder / "networks" / name
            drawn = self.number(name) if seed is None else seed
            return sample(
                model, data, method, seed=drawn, path=path, resume=path.exists(), progress=self.show, **options
            )

        return self.once(f"networks/{name}", made)

    def number(self, *name: str | int) -> int:
        """A seed for a purpose, where one is asked for: 31 bits, which every generator takes."""
        return derived(self.seed, *name) >> 32

    def stream(self, *name: str | int) -> torch.Generator:
        """Random numbers for a purpose; the same whatever else was drawn."""
        return generator(self.seed, *name)
