"""Journals of runs: how one that was interrupted goes on when it is called again with the same path.

A run is known by its definition, a dict that JSON can hold: written once (`write_json`, or the manifest of a
population), and compared before the run goes on (`check_same_run`, which names the setting that differs; or
`fingerprint`, where only equality counts). How far it is, is a file that is replaced as a whole every now and then:
`write_json` for numbers, `write_tensors` for tensors. The file goes when the result is safe.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from onebasin.errors import InputError, StorageError
from onebasin.storage.atomic import write_text

_LARGEST = 64 << 20  # bytes of a JSON file
_SHOWN = 60  # letters of a value in a sentence


def check_same_run(
    path: Path, stored: Mapping[str, Any], given: Mapping[str, Any], *, may_change: Collection[str] = ()
) -> None:
    """Raise `InputError` with the first setting in which two definitions of a run differ.

    Args:
        path: where the run is kept, for the message.
        stored: the definition of the run that is to go on.
        given: the definition of the run that was asked for.
        may_change: settings that may differ, such as how many draws to make.
    """
    for name in sorted({*stored, *given} - {*may_change}):
        before, now = stored.get(name), given.get(name)
        if before != now:
            raise InputError(
                f"expected the settings of the run in {path}, found another {name}: {_shown(now)} instead of "
                f"{_shown(before)}; go on with the same settings, give another path, or delete it to start again "
                "(--force on the command line)"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def write_json(path: Path, content: Any, *, replace: bool = True) -> None:
    """Write what JSON can hold; readers see the old file or the new one."""
    write_text(path, json.dumps(content, indent=1), replace=replace)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        StorageError: the file is absent, damaged, too large or holds something else.
    """
    if not path.is_file() or path.stat().st_size > _LARGEST:
        raise StorageError(f"expected a JSON file of at most {_LARGEST >> 20} MB, found none at {path}: check the path")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(
            f"expected JSON in {path}, found a damaged file ({error}): restore it from a copy, or delete it to start "
            "again"
        ) from error
    if not isinstance(content, dict):
        raise StorageError(f"expected a JSON object in {path}, found a {type(content).__name__}: delete it")
    return content
