"""What is run in a folder: written once, and compared before a run goes on.

A resumed run must be the same run: the same data, settings, seed, and whatever else decides about its draws. Only the
number of draws may grow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onebasin.errors import InputError, StorageError
from onebasin.inference.runs.holding import HeldElsewhere, held
from onebasin.inference.runs.journal import RUN
from onebasin.population.durable import make_folder, publish

_MAY_CHANGE = {"draws"}
_MOST = 1 << 20  # chains, and threads
_PARTS = ("options", "density")  # dicts of options, which are compared one by one


def write_definition(path: Path, definition: Mapping[str, Any]) -> None:
    """Store what is run; it is written once."""
    make_folder(path / RUN)
    text = json.dumps(definition, indent=1, sort_keys=True)
    publish(path / RUN / "definition.json", lambda file: file.write(text.encode()))


def read_definition(path: Path) -> dict[str, Any] | None:
    """What is run in a folder, None where there is no run."""
    file = path / RUN / "definition.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        _check_definition(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{file} is damaged ({error}): restore it from a copy, or start the run again in another folder"
        ) from error
    definition: dict[str, Any] = found
    return definition


def _check_definition(found: Any) -> None:
    """Raise unless the parts that a resumed run takes over can be used."""
    if not isinstance(found, dict) or not all(isinstance(found[part], dict) for part in _PARTS):
        raise TypeError("it is no definition")
    for name, most in {"modes": _MOST, "lanes": max(1, found["modes"]), "threads": _MOST}.items():
        if type(found[name]) is not int or not 1 <= found[name] <= most:
            raise ValueError(f"{name} is {str(found[name])[:40]}")
    if not isinstance(found["compile"], bool) or not isinstance(found["chunk"], int | None):
        raise TypeError("compile or chunk is of another kind")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the folder of a run, so that no second process works on it; freed by the system when a process dies."""
    make_folder(path / RUN)
    try:
        with held(path / RUN / "lock"):
            yield
    except HeldElsewhere as error:
        raise StorageError(f"another process is at work on {path}: wait for it, or choose another path") from error


def refuse_stranger(path: Path, stored: Mapping[str, Any] | None, resume: bool) -> None:
    """Refuse a folder that holds something else, or a run that nobody asked to go on with."""
    if stored is not None and not resume:
        raise InputError(f"{path} holds a run already: give resume=True to go on with it, or choose another path")
    if stored is None and path.is_dir() and {entry.name for entry in path.iterdir()} - {RUN}:
        raise InputError(f"expected a new or empty folder, but {path} is not empty: choose another path")


def agreed(path: Path, definition: dict[str, Any], stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Store the definition of a new run, or compare it with that of the run to be resumed."""
    if stored is None:
        write_definition(path, definition)
        return definition
    for part in _PARTS:
        before, now = dict(stored[part]), dict(definition[part])
        for name in sorted({*before, *now} - _MAY_CHANGE):
            _refuse_change(path, name, before.get(name), now.get(name))
    for key in sorted({*stored, *definition} - {*_PARTS, "chunk"}):
        _refuse_change(path, key, stored.get(key), definition.get(key))
    return {**definition, "chunk": stored["chunk"]}


def _refuse_change(path: Path, name: str, before: Any, now: Any) -> None:
    if before != now:
        raise InputError(
            f"expected the settings of the run in {path}, found another {name}: {now!r} instead of {before!r}; resume "
            "it with the same settings, or choose another path"
        )
