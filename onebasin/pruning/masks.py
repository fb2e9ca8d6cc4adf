"""Masks: which weights of a network are kept, in the basis of that network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from onebasin.errors import SpecError, StorageError
from onebasin.population import Population
from onebasin.population.durable import make_folder, need_space
from onebasin.population.tensor_file import read_header, read_tensors, write_tensors
from onebasin.state import State
from onebasin.symmetry import Element, Symmetry

FORMAT = "onebasin-masks"
VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class Masks(Mapping[str, Tensor]):
    """A mapping from the name of a tensor to a bool tensor of its shape, True where the weight is kept.

    >>> masks = Masks({"w": torch.tensor([True, False, True])})
    >>> masks.apply({"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([4.0])})
    {'w': tensor([1., 0., 3.]), 'b': tensor([4.])}
    >>> masks.kept, masks.size, masks["w"].tolist()
    (2, 3, [True, False, True])

    Tensors without a mask are left alone: running statistics, and whatever was not asked for.

    Attributes:
        tensors: name -> mask; a tied tensor stands here once, under its first name.
        tied: further names of a tensor -> its first name.
        facts: how the masks were made, JSON-able.
    """

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [name for name, mask in self.tensors.items() if mask.dtype is not torch.bool]
        wrong += [first for first in self.tied.values() if first not in self.tensors]
        if wrong:
            raise SpecError(
                f"expected a bool tensor under every name, found none under {wrong[0]!r}: give True where a weight is "
                "kept"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks) or self.tied != other.tied or list(self) != list(other):
            return False
        return all(torch.equal(mask, other[name]) for name, mask in self.tensors.items())

    @classmethod
    def ones(cls, network: Mapping[str, Tensor]) -> Masks:
        """Masks that keep everything, one for each floating-point tensor of a network."""
        return cls(
            {name: torch.ones_like(value, dtype=torch.bool) for name, value in network.items()
             if value.is_floating_point()}
        )  # fmt: skip

    @property
    def kept(self) -> int:
        """Number of weights that are kept."""
        return sum(int(mask.sum()) for mask in self.tensors.values())

    @property
    def size(self) -> int:
        """Number of weights that have a mask."""
        return sum(mask.numel() for mask in self.tensors.values())

    @property
    def share(self) -> float:
        """Part of the masked tensors that is kept."""
        return self.kept / max(1, self.size)

    def __repr__(self) -> str:
        """Say how much is kept."""
        return f"Masks({self.kept:,} of {self.size:,} weights kept in {len(self)} tensors)"

    def __str__(self) -> str:
        """A table of tensors."""
        rows = [(name, int(mask.sum()), mask.numel()) for name, mask in self.tensors.items()]
        rows.append(("all", self.kept, self.size))
        width = max(6, *[len(name) for name, _, _ in rows])
        lines = [f"{'tensor':<{width}}{'kept':>14}{'of':>14}{'share':>9}"]
        lines += [f"{name:<{width}}{kept:>14,}{size:>14,}{kept / max(1, size):>9.2%}" for name, kept, size in rows]
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join(lines)

    @overload
    def apply(self, network: Mapping[str, Tensor]) -> State: ...

    @overload
    def apply(self, network: Population) -> Population: ...

    def apply(self, network: Mapping[str, Tensor] | Population) -> State | Population:
        """The network, or every member of the population, with zeros where a mask is False; nothing is changed.

        Raises:
            SpecError: a masked tensor is missing or has another shape.
        """
        if isinstance(network, Population):
            self._check({name: tensor.shape for name, tensor in network.spec.items()})
            return network.map(lambda stacked, start: self._zeroed(stacked))
        self._check({name: tuple(value.shape) for name, value in network.items()})
        return {name: value.detach().clone() for name, value in self._zeroed(network).items()}

    def _zeroed(self, tensors: Mapping[str, Tensor]) -> State:
        whole = self._whole()
        return {
            name: value.detach().masked_fill(~whole[name].to(value.device), 0) if name in whole else value
            for name, value in tensors.items()
        }

    def _whole(self) -> dict[str, Tensor]:
        """The masks under all names, those of tied tensors included."""
        return {**self.tensors, **{name: self.tensors[first] for name, first in self.tied.items()}}

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, mask in self._whole().items():
            if shapes.get(name) != tuple(mask.shape):
                found = f"shape {shapes[name]}" if name in shapes else "no such tensor"
                raise SpecError(
                    f"expected {name} with shape {tuple(mask.shape)} for its mask, found {found}: give a network "
                    "of the architecture that the masks were made for"
                )

    def carried(self, element: Element, symmetry: Symmetry) -> Masks:
        """The masks that belong to the network after it was moved.

        masks.carried(g, s).apply(s.apply(g, w)) is s.apply(g, masks.apply(w)), for every network w.

        Args:
            element: what moved the network; orders are followed, factors do not matter to a mask.
            symmetry: the group it belongs to.
        """
        whole = self._whole()
        rest = {
            name: torch.ones(tuple(shape), dtype=torch.bool) for name, shape in symmetry.shapes.items()
            if name not in whole
        }  # fmt: skip
        moved = symmetry.apply(element, {**whole, **rest}, kind="mask")
        return Masks({name: moved[name] for name in self.tensors}, self.tied, self.facts)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; a file of this name is replaced when the new one is whole."""
        goal = Path(path)
        make_folder(goal.parent)
        need_space(goal.parent, self.size)
        parts = {"names": list(self.tensors), "tied": dict(self.tied), "facts": dict(self.facts)}
        told = {name: json.dumps(value) for name, value in parts.items()}
        write_tensors(goal, self.tensors, {"onebasin": FORMAT, "version": str(VERSION), **told})
        return goal

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Masks:
        """Read back what `save` wrote.

        Raises:
            StorageError: when the file is absent, cut off, or holds no masks.
        """
        facts = read_header(Path(path)).metadata
        if facts.get("onebasin") != FORMAT or facts.get("version") != str(VERSION):
            raise StorageError(
                f"expected masks of version {VERSION} in {path}, found another kind of file: write them with Masks.save"
            )
        tensors, _ = read_tensors(Path(path))
        try:
            names, tied, told = (json.loads(facts[part]) for part in ("names", "tied", "facts"))
            if not isinstance(names, list) or not isinstance(tied, dict) or not isinstance(told, dict):
                raise TypeError("names, tied or facts are of another kind")
            return cls({name: tensors[name] for name in names}, tied, told)
        except (KeyError, ValueError, TypeError, RecursionError, SpecError) as error:
            raise StorageError(
                f"expected whole masks in {path}, found parts that do not fit ({error}): save them again"
            ) from error
