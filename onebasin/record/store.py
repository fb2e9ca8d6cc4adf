"""Records on disk: one JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from onebasin.errors import DiskError, InputError, StorageError
from onebasin.record.codec import decode, encode
from onebasin.record.record import Record

FORMAT, VERSION = "onebasin record", 1
_LARGEST = 256 << 20  # bytes of a record
FILE = "record.json"  # inside the folder of a run


def write_record(record: Record, path: str | os.PathLike[str]) -> None:
    """Write a record; it appears whole or not at all.

    Raises:
        DiskError: the folder cannot be written.
    """
    file = Path(path)
    text = json.dumps({"format": FORMAT, "version": VERSION, "record": encode(record)}, indent=1, allow_nan=False)
    try:
        write_whole(file, text + "\n")
    except OSError as error:
        raise DiskError(f"{file} cannot be written ({error.strerror or error}): choose another folder") from error


def write_whole(file: Path, text: str) -> None:
    """Write a file under another name first: it appears whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)  # a link that somebody left there would be followed
    with part.open("x", encoding="utf-8") as opened:
        opened.write(text)
    part.replace(file)


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record from its file, or from the folder of a run.

    Raises:
        StorageError: there is none, or the file is damaged or of another version; the message names the place.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if file.exists() and (not file.is_file() or file.stat().st_size > _LARGEST):
        raise StorageError(f"expected a record, but {file} is a device, a folder or endless: give another one")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageError(f"there is no record {file}: give the folder of a finished run, or its {FILE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{file} cannot be read as JSON ({error}): run the command that makes it again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        found = (
            {key: content.get(key) for key in ("format", "version")} if isinstance(content, dict) else "something else"
        )
        raise StorageError(
            f"{file} should be a {FORMAT} of version {VERSION}, found {found}: make it again with this version"
        )
    try:
        found_record: Record = decode(content.get("record"))
    except InputError as error:  # of the right types, and still no table or figure
        raise StorageError(f"{file} holds what no record can ({error})") from error
    return found_record
