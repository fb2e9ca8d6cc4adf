"""Read everything that the folder of a study holds, but for its networks, and say what is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import onebasin as ob
from onebasin_papers.study import PARTS, PLAN, read_part


def inspect_study(folder: Path) -> Iterator[ob.storage.Finding]:
    """Look at the plan, the finished parts and the record of a study."""
    yield ob.storage.looked_at(folder / PLAN, "plan", partial(_plan, folder / PLAN))
    for path in sorted((folder / PARTS).glob("*.json")):
        yield ob.storage.looked_at(path, "part", partial(_part, path))
    if (folder / ob.reporting.FILE).exists():
        yield ob.storage.looked_at(folder / ob.reporting.FILE, "record", partial(_record, folder / ob.reporting.FILE))
    yield from ob.storage.unfinished(folder)
    if (folder / PARTS).is_dir():
        yield from ob.storage.unfinished(folder / PARTS)


def _plan(path: Path) -> ob.storage.Finding:
    try:
        dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ob.errors.StorageError(f"{path} is damaged ({error}): give --fresh to begin again") from error
    return ob.storage.Finding(path, "plan")


def _part(path: Path) -> ob.storage.Finding:
    if read_part(path) is None:
        raise ob.errors.StorageError(
            f"{path} is damaged or of another version: the command of the study makes this part again"
        )
    return ob.storage.Finding(path, "part")


def _record(path: Path) -> ob.storage.Finding:
    ob.reporting.read_record(path)
    return ob.storage.Finding(path, "record")
