"""OpenML, thousands of tables under one interface: found by name or number, downloaded once, kept, and checked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from onebasin.data.checksum import digest
from onebasin.data.dataset import Parts, check_columns
from onebasin.errors import DiskError, InputError, StorageError

# ----------------------------------------------------------------------
# Files from the network: in pieces, with a limit, compared with their digest, and kept.


VARIABLE = "ONEBASIN_CACHE"
SECONDS = 30.0  # without a byte
LARGEST = 4 << 30
_PIECE = 1 << 20


def cache_folder() -> Path:
    """$ONEBASIN_CACHE, or onebasin below the user's cache folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onebasin"


def fetch(url: str, path: Path, *, md5: str | None = None, largest: int = LARGEST) -> None:
    """Download a file.

    Args:
        url: http or https.
        path: where it is kept.
        md5: the digest that it must have.
        largest: bytes that are accepted.

    Raises:
        InputError: the server knows no such address.
        StorageError: the server cannot be reached or fails, or what it sent is cut or has another digest.
        DiskError: it cannot be kept.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise StorageError(f"expected an address with http or https, found {url!r}: report it to whoever published it")
    temporary = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            _check_digest(url, md5, _copy(url, file, largest))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except HTTPError as error:
        error.close()
        raise _refused(url, error) from error
    except (URLError, TimeoutError, ConnectionError) as error:
        raise unreachable(url, str(getattr(error, "reason", None) or error)) from error
    except (HTTPException, ValueError) as error:  # an answer that breaks the rules, an address that is none
        raise StorageError(
            f"expected a file from {url}, found an answer or address that cannot be understood ({error!r}): try again "
            "later"
        ) from error
    except OSError as error:
        raise DiskError(
            f"cannot keep {url} in {path.parent} ({error.strerror or error}): free some space, or name another folder "
            f"in {VARIABLE}"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def unreachable(url: str, reason: str) -> StorageError:
    """The sentence for who is offline."""
    server = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    return StorageError(
        f"expected an answer from {server}, found none ({reason}): connect to the network, or copy {cache_folder()} "
        "from a machine that has it; digits needs no download"
    )


def _refused(url: str, error: HTTPError) -> InputError | StorageError:
    if error.code in (404, 412):  # OpenML says 412 for what it does not know
        return InputError(f"{url} is not known there (HTTP {error.code}): check the name or number of the data set")
    return StorageError(f"expected a file from {url}, found HTTP {error.code}: try again later")


def _copy(url: str, file: BinaryIO, largest: int) -> str:
    """Copy a response in pieces; its md5."""
    summed, size = hashlib.md5(usedforsecurity=False), 0
    with urlopen(Request(url, headers={"User-Agent": "onebasin"}), timeout=SECONDS) as response:
        promised = response.headers.get("Content-Length")
        while piece := response.read(_PIECE):
            size += len(piece)
            if size > largest:
                raise StorageError(f"expected at most {largest:,} bytes from {url}, found more: fetch it by hand")
            summed.update(piece)
            file.write(piece)
    if promised is not None and size != int(promised):
        raise StorageError(f"expected {int(promised):,} bytes from {url}, found {size:,}: try again")
    return summed.hexdigest()


def _check_digest(url: str, wanted: str | None, found: str) -> None:
    if wanted is not None and found != wanted.lower():
        raise StorageError(
            f"expected md5 {wanted.lower()} of {url}, found {found}: it arrived damaged and was not kept; try again"
        )


# ----------------------------------------------------------------------
# ARFF, the text format of OpenML: a list of attributes, then one line of values per example.


_NUMERIC = ("numeric", "real", "integer")
_WORD = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,{}]+"""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_WORD})\s+(\{{.*\}}|\w+)", re.IGNORECASE)
# No two parts of it could share a run of spaces in many ways: a damaged line must not take minutes.
_VALUE = re.compile(r"""\s*((?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*(?=,|$)|[^,]*)(?:,|$)""")
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Attribute:
    """A column: its name, and its levels where it is nominal; `kind` is numeric, nominal, or what it says."""

    name: str
    kind: str
    levels: tuple[str, ...] = ()


def read_table(
    lines: Iterable[str], target: str, where: str, skipped: Collection[str] = ()
) -> tuple[Tensor, Tensor, int | None]:
    """Inputs, targets and the number of classes.

    >>> lines = ["@relation r", "@attribute a numeric", "@attribute b {no, yes}", "@data", "1.5, yes", "2,no"]
    >>> read_table(lines, "b", "here")
    (tensor([[1.5000], [2.0000]]), tensor([1, 0]), 2)

    Args:
        lines: of the file.
        target: name of the attribute to predict. Several, separated by commas, must all be numeric.
        where: the file, for messages.
        skipped: names of attributes to leave out.

    Returns:
        Inputs float32 (n, columns); class numbers int64 (n,) in the order of the levels, or values float32
        (n, targets).

    Raises:
        InputError: there is no such target, a value is missing, or an attribute is no number and no category.
        StorageError: a line does not fit the attributes.
    """
    remaining = iter(lines)
    attributes = _attributes(remaining, where)
    names = [attribute.name for attribute in attributes]
    goals = [target] if target in names else [goal.strip() for goal in target.split(",")]
    if len(set(names)) < len(names):
        raise StorageError(
            f"expected a name of its own for every attribute of {where}, found one twice: fetch it again"
        )
    if unknown := [goal for goal in goals if goal not in names]:
        raise InputError(f"expected {unknown[0]!r} among the attributes of {where}, found {', '.join(names[:8])}")
    used = [place for place, name in enumerate(names) if name not in skipped or name in goals]
    for place in used:
        if attributes[place].kind not in ("numeric", "nominal"):
            raise InputError(
                f"expected numbers or categories in {where}, found {attributes[place].kind} in {names[place]!r}: "
                "convert the table and give it as .npz"
            )
    values = _values(remaining, attributes, used, where)
    columns = {names[place]: (attributes[place], values[:, number]) for number, place in enumerate(used)}
    shown = [columns[name] for name in columns if name not in goals]
    check_columns(len(values), sum(max(1, len(attribute.levels)) for attribute, _ in shown), where)
    inputs = [_input(*column) for column in shown]
    if not inputs:
        raise InputError(f"expected attributes beside the target in {where}, found none: choose another target")
    outputs, classes = _targets([columns[goal] for goal in goals], where)
    return torch.cat(inputs, 1), outputs, classes


def _attributes(lines: Iterator[str], where: str) -> list[Attribute]:
    """The head of the file, up to and with @data."""
    found: list[Attribute] = []
    for line in lines:
        text = line.strip()
        if text.lower().startswith("@data"):
            if not found:
                break
            return found
        if text.lower().startswith("@attribute"):
            match = _ATTRIBUTE.match(text)
            if match is None:
                raise StorageError(f"expected @attribute NAME KIND in {where}, found {text[:80]!r}: fetch it again")
            found.append(_attribute(_plain(match[1]), match[2]))
    raise StorageError(f"expected attributes and @data in {where}, found its end: fetch it again")


def _attribute(name: str, kind: str) -> Attribute:
    if kind.startswith("{"):
        return Attribute(name, "nominal", tuple(_fields(kind[1:-1])))
    return Attribute(name, "numeric" if kind.lower() in _NUMERIC else kind.lower())


def _plain(text: str) -> str:
    """A value without its quotes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return _ESCAPE.sub(r"\1", text[1:-1])
    return text


def _fields(line: str) -> list[str]:
    """The values of one line."""
    if "'" not in line and '"' not in line:
        return [text.strip() for text in line.split(",")]
    found, place = [], 0
    while place <= len(line):
        match = _VALUE.match(line, place)
        if match is None:
            return []
        found.append(_plain(match[1].strip()))
        if match.end() == len(line) and not match[0].endswith(","):
            break
        place = match.end()
    return found


def _values(lines: Iterable[str], attributes: list[Attribute], used: list[int], where: str) -> Tensor:
    """(n, used attributes), float64: numbers, and places of levels."""
    codes = [{level: float(place) for place, level in enumerate(attributes[number].levels)} for number in used]
    values, rows = array("d"), 0
    for line in lines:
        text = line.strip()
        if not text or text.startswith("%"):
            continue
        if text.startswith("{"):
            raise InputError(f"expected all values in every row of {where}, found sparse rows: convert it to .npz")
        fields = _fields(text)
        rows += 1
        if len(fields) != len(attributes):
            raise StorageError(
                f"expected {len(attributes)} values in row {rows} of {where}, found {len(fields)}: fetch it again"
            )
        try:
            values.extend(
                code[fields[place]] if code else float(fields[place]) for place, code in zip(used, codes, strict=True)
            )
        except (ValueError, KeyError) as error:
            raise _unreadable(fields, attributes, used, rows, where) from error
    if not rows:
        raise StorageError(f"expected rows after @data in {where}, found none: fetch it again")
    return torch.frombuffer(values, dtype=torch.float64).reshape(rows, len(used)).clone()


def _unreadable(fields: list[str], attributes: list[Attribute], used: list[int], row: int, where: str) -> Exception:
    missing = [attributes[place].name for place in used if fields[place] == "?"]
    if missing:
        return InputError(
            f"expected a value everywhere in {where}, found {', '.join(missing[:3])} missing in row {row}: fill the "
            "gaps or leave such rows out, and give the table as .npz"
        )
    return StorageError(f"expected numbers and declared levels in {where}, found others in row {row}: fetch it again")


def _input(attribute: Attribute, values: Tensor) -> Tensor:
    if attribute.kind == "numeric":
        return values.float()[:, None]
    return torch.nn.functional.one_hot(values.long(), len(attribute.levels)).float()


def _targets(columns: list[tuple[Attribute, Tensor]], where: str) -> tuple[Tensor, int | None]:
    kinds = {attribute.kind for attribute, _ in columns}
    if kinds == {"numeric"}:
        return torch.stack([values for _, values in columns], 1).float(), None
    if len(columns) > 1:
        raise InputError(
            f"expected one category or several numbers to predict in {where}, found {len(columns)} targets"
        )
    attribute, values = columns[0]
    return values.long(), len(attribute.levels)


# ----------------------------------------------------------------------
# OpenML, thousands of tables under one interface: found by name or number, downloaded once, kept, and checked.


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
