"""An entry of a journal, read from its file and believed only if an alignment can go on from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.align.crowd.consensus import Progress
from onebasin.errors import StorageError
from onebasin.population.tensor_file import read_tensors
from onebasin.state import State
from onebasin.symmetry import Element

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
