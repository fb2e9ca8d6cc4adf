"""Which files are meant by a word that is no path: a pattern such as runs/*/best.safetensors, or a name on the hub."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onebasin.errors import StorageError
from onebasin.population.hub import Address, Offer, offered
from onebasin.population.read import natural_key


@dataclass(frozen=True)
class Place:
    """Files in their order.

    Attributes:
        name: the word, as one would write it.
        paths: files or folders, each with one network or several.
        origin: what else is known about where they come from, JSON-able.
        offer: where they still have to be fetched from; `paths` is empty until then.
    """

    name: str
    paths: Sequence[Path]
    origin: Mapping[str, Any] = field(default_factory=dict)
    offer: Offer | None = None

    def fetched(self) -> Place:
        """The same place with all its files on this machine."""
        return self if self.offer is None else replace(self, paths=self.offer.fetch(), offer=None)


def is_there(where: Path) -> bool:
    """Whether a word can be looked up: a path that exists, a pattern, or a name on the hub.

    >>> [is_there(Path(word)) for word in ("runs/*/best.pt", "hf://owner/name", "no/such/path")]
    [True, True, False]
    """
    return where.exists() or glob.has_magic(str(where)) or Address.parse(where) is not None


def find(where: Path) -> Place:
    """Find what a word means. What exists under this very name is meant before anything else.

    Raises:
        StorageError: nothing exists or matches.
        InputError: a name on the hub that is malformed, unknown there, or has nothing of use.
    """
    if where.exists():
        return Place(str(where), [where])
    if (address := Address.parse(where)) is not None:
        offer = offered(address)
        return Place(str(address), [], {"commit": offer.commit}, offer)
    if glob.has_magic(str(where)):
        found = sorted(map(Path, glob.glob(str(where), recursive=True)), key=natural_key)
        if not found:
            raise StorageError(f"expected files that match {where}, found none: check the pattern and the folder")
        return Place(str(where), found)
    raise StorageError(f"{where} does not exist: check the path")
