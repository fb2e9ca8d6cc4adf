"""Where data sets lie on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onebasin.errors import InputError, StorageError

VARIABLE = "ONEBASIN_DATA"


def data_folder(directory: str | Path | None) -> Path:
    """The folder that was given, or that the environment names.

    Raises:
        InputError: neither.
        StorageError: it does not exist.
    """
    chosen = directory if directory is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        raise InputError(
            f"expected a folder with data sets, found none: give directory= (on the command line --data-dir), or set "
            f"{VARIABLE}; only digits needs no folder"
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        source = f"in {VARIABLE}" if directory is None else "as the data folder"
        raise StorageError(f"expected a folder {source}, found nothing at {folder}: create it or name another")
    return folder


def first_existing(folder: Path, names: Sequence[str], what: str, remedy: str) -> Path:
    """The first of the names that exists in the folder.

    Args:
        folder: the data folder.
        names: paths below it, in order of preference.
        what: the data set, for the message.
        remedy: what to put there.

    Raises:
        StorageError: none exists; says where it looked.
    """
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise StorageError(f"expected {what} in {folder}, looked for {', '.join(names)} and found none: {remedy}")
