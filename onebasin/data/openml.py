"""OpenML, thousands of tables under one interface: found by name or number, downloaded once, kept, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from onebasin.data.arff import read_table
from onebasin.data.checksum import digest
from onebasin.data.dataset import Parts
from onebasin.data.download import cache_folder, fetch
from onebasin.errors import InputError, StorageError

SERVER = "https://www.openml.org"
_NUMBERS = 1 << 40  # of data sets
_ANSWER = 4 << 20  # bytes of an answer in JSON


def read_openml(name: str, *, download: bool = False, server: str | None = None, target: str | None = None) -> Parts:
    """A data set from the cache or, with `download`, from the server.

    Args:
        name: of the data set, of which the oldest active version is taken; or its number.
        download: whether the network may be used for what is not in the cache.
        server: its address. Default: `SERVER`.
        target: attribute to predict. Default: what the description says.

    Raises:
        InputError: the server knows no such set, or it cannot be predicted from.
        StorageError: it is not in the cache and may not be downloaded, or the server cannot be reached, or a file is
            damaged.
    """
    address = (server or SERVER).rstrip("/")
    folder = cache_folder() / "openml" / quote(urlsplit(address).netloc, safe="")
    number = name if name.isdecimal() else _number(name, folder, address, download)
    about = folder / f"{int(number)}.json"
    _ensure(about, f"{address}/api/v1/json/data/{int(number)}", download, f"openml/{name}")
    description = _description(about)
    file = about.with_suffix(".arff")
    md5 = str(description.get("md5_checksum") or "").lower() or None
    if download and file.is_file() and md5 is not None and digest(file, "md5") != md5:
        file.unlink()
    _ensure(file, str(description.get("url") or ""), download, f"openml/{name}", md5=md5)
    if md5 is not None and (found := digest(file, "md5")) != md5:
        raise StorageError(
            f"expected md5 {md5} of {file}, found {found}: it was damaged after its download; download it again "
            "(download=True, on the command line --download)"
        )
    return _parts(file, description, target, name)


def _number(name: str, folder: Path, address: str, download: bool) -> str:
    """The number of the oldest active version."""
    listed = folder / f"name-{quote(name, safe='')}.json"
    url = f"{address}/api/v1/json/data/list/data_name/{quote(name, safe='')}/status/active"
    _ensure(listed, url, download, f"openml/{name}")
    try:
        found = _json(listed)["data"]["dataset"]
        number = int(min(found, key=lambda row: int(row["version"]))["did"])
        if not 0 <= number < _NUMBERS:
            raise ValueError(f"{number} is no number of a data set")
        return str(number)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _strange(listed, "a list of data sets") from error


def _ensure(path: Path, url: str, download: bool, name: str, md5: str | None = None) -> None:
    """Have the file in the cache."""
    if path.is_file():
        return
    if not download:
        raise StorageError(
            f"expected {name} in the cache, found no {path}: allow its download (download=True, on the command line "
            "--download)"
        )
    try:
        fetch(url, path, md5=md5, **({} if path.suffix == ".arff" else {"largest": _ANSWER}))
    except InputError as error:
        raise InputError(f"OpenML has no active data set {name.removeprefix('openml/')!r} ({error})") from error


def _description(about: Path) -> dict[str, Any]:
    found = _json(about).get("data_set_description")
    if not isinstance(found, dict) or not isinstance(found.get("url"), str):
        raise _strange(about, "a description with an address")
    if "arff" not in str(found.get("format", "arff")).lower():
        raise InputError(
            f"expected a table in ARFF, found {found['format']} for {found.get('name')}: convert it and give it as .npz"
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _strange(path, "JSON") from error
    if not isinstance(found, dict):
        raise _strange(path, "JSON of an answer")
    return found


def _strange(path: Path, wanted: str) -> StorageError:
    path.unlink(missing_ok=True)  # kept, it would be believed again
    return StorageError(f"expected {wanted} from the server, found something else: try again later")


def _parts(file: Path, description: dict[str, Any], target: str | None, name: str) -> Parts:
    goal = target or description.get("default_target_attribute")
    if not isinstance(goal, str) or not goal:
        raise InputError(f"openml/{name} does not say what to predict: give target=, the name of an attribute")
    skipped = [text for key in ("ignore_attribute", "row_id_attribute") for text in _texts(description.get(key))]
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:  # levels stay different
        inputs, targets, classes = read_table(lines, goal, str(file), skipped)
    return Parts(str(description.get("name") or name), (inputs, targets), None, classes)


def _texts(value: Any) -> list[str]:
    """One name, several, or none; OpenML also writes several into one text."""
    if isinstance(value, str):
        return [value, *value.split(",")]
    return [str(item) for item in value] if isinstance(value, list) else []
