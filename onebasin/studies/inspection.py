"""Read everything that the folder of a study holds, but for its networks, and say what is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from onebasin.errors import StorageError
from onebasin.population.findings import Finding, looked_at, unfinished
from onebasin.record import read_record
from onebasin.record.store import FILE
from onebasin.studies.study import PARTS, PLAN, read_part


def inspect_study(folder: Path) -> Iterator[Finding]:
    """Look at the plan, the finished parts and the record of a study."""
    yield looked_at(folder / PLAN, "plan", partial(_plan, folder / PLAN))
    for path in sorted((folder / PARTS).glob("*.json")):
        yield looked_at(path, "part", partial(_part, path))
    if (folder / FILE).exists():
        yield looked_at(folder / FILE, "record", partial(_record, folder / FILE))
    yield from unfinished(folder)
    if (folder / PARTS).is_dir():
        yield from unfinished(folder / PARTS)


def _plan(path: Path) -> Finding:
    try:
        dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}): give --fresh to begin again") from error
    return Finding(path, "plan")


def _part(path: Path) -> Finding:
    if read_part(path) is None:
        raise StorageError(f"{path} is damaged or of another version: the command of the study makes this part again")
    return Finding(path, "part")


def _record(path: Path) -> Finding:
    read_record(path)
    return Finding(path, "record")
