"""Checksums of tensors and files, and findings of an inspection: whole or damaged, and what to do."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebasin.errors import OnebasinError
from onebasin.storage.atomic import leftovers

CHUNK = 4 << 20  # bytes per step: stays in the cache between summing and writing
_SEAL = "seal"
_ROW_WORDS = 1021
_ROW_BYTES = 8 * _ROW_WORDS


def chunks(view: memoryview) -> Iterator[memoryview]:
    """Cut bytes into the pieces that `fold` sums."""
    return (view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK))


def fold(piece: memoryview, value: int) -> int:
    """Continue a checksum with the next piece of at most `CHUNK` bytes.

    The piece is read as rows of 1021 words of 64 bits; the sums of the columns, modulo 2**64, and the bytes that
    fill no row go into a CRC-32. Any change inside one row is seen as surely as by the CRC itself. This takes a
    quarter of the time of a CRC over all bytes, which would cost as much as writing them. A prime number of
    columns keeps pages that swap places from going unseen.
    """
    import numpy as np  # here, since reports are read and written without it

    rows = piece.nbytes // _ROW_BYTES
    words = np.frombuffer(piece, dtype="<u8", count=rows * _ROW_WORDS).reshape(rows, _ROW_WORDS)
    value = zlib.crc32(np.add.reduce(words, axis=0), value) if rows else value
    return zlib.crc32(piece[rows * _ROW_BYTES :], value)


def checksum(view: memoryview) -> str:
    """The checksum of bytes in memory, 8 hexadecimal digits.

    >>> checksum(memoryview(b"123456789"))  # fewer bytes than fill a row: CRC-32 itself
    'cbf43926'
    """
    value = 0
    for piece in chunks(view):
        value = fold(piece, value)
    return f"{value:08x}"


def stored_checksum(path: Path, offset: int, nbytes: int) -> str:
    """The checksum of bytes of a file as they lie on the disk; "cut off" where it ends before them."""
    left, value = nbytes, 0
    with path.open("rb") as handle:
        handle.seek(offset)
        while left > 0 and (piece := handle.read(min(CHUNK, left))):
            value, left = fold(memoryview(piece), value), left - len(piece)
    return "cut off" if left else f"{value:08x}"


def digest(path: Path, algorithm: str = "sha256") -> str:
    """The hexadecimal digest of a file, by the name of a hash function."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def fingerprint(value: Any) -> str:
    """The SHA-256 of a value that JSON can hold; equal values have equal fingerprints, in whatever order of keys.

    >>> fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(texts: Mapping[str, str]) -> dict[str, str]:
    """Texts of a header, and with them a checksum of them all under "seal"."""
    return {**texts, _SEAL: _seal_of(texts)}


def has_valid_seal(texts: Mapping[str, str]) -> bool:
    """Whether texts are those that were sealed; those without a seal are taken as they are.

    >>> texts = seal({"draw": "3"})
    >>> has_valid_seal(texts), has_valid_seal({**texts, "draw": "2"}), has_valid_seal({"draw": "2"})
    (True, False, True)
    """
    return _SEAL not in texts or texts[_SEAL] == _seal_of(texts)


def _seal_of(texts: Mapping[str, str]) -> str:
    pairs = sorted((name, text) for name, text in texts.items() if name != _SEAL)
    return f"{zlib.crc32(json.dumps(pairs).encode()):08x}"


def checksums_from(text: str) -> Mapping[str, str] | None:
    """The checksums in a header, None where its text is not name -> text.

    >>> checksums_from('{"w": "00ff00ff"}'), checksums_from("[1]"), checksums_from("{")
    ({'w': '00ff00ff'}, None, None)
    """
    try:
        checksums = json.loads(text)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(checksums, dict) and all(isinstance(value, str) for value in checksums.values())
    return checksums if valid else None


WHOLE = "whole"
NOTE = "note"
DAMAGED = "damaged"


@dataclass(frozen=True)
class Finding:
    """What the inspection of one file found.

    Attributes:
        path: the file, or the folder where something is missing.
        kind: what it is: "shard", "manifest", "network", "posterior", ...
        state: "whole"; "note" for what deserves a word though nothing is lost; or "damaged".
        sentence: what is wrong and what to do; empty if it is whole.
        members: networks in it, as far as it says; None for a damaged file that does not say it any more.
    """

    path: Path
    kind: str
    state: str = WHOLE
    sentence: str = ""
    members: int | None = 0

    def to_json(self) -> dict[str, object]:
        """The fields as JSON can hold them."""
        return {**vars(self), "path": str(self.path)}


@dataclass(frozen=True)
class Tally:
    """How many networks and files are whole or damaged.

    Attributes:
        networks: networks that are whole.
        lost: networks in damaged files, as far as these say it.
        files: damaged files with networks.
        unknown: damaged files that do not say how many networks they hold.
        damaged: all damaged files, with or without networks.
    """

    networks: int
    lost: int
    files: int
    unknown: int
    damaged: int


def tally(findings: Sequence[Finding]) -> Tally:
    """Count the networks and files of findings.

    >>> tally([Finding(Path("a"), "shard", members=3), Finding(Path("b"), "shard", DAMAGED, "It is cut off.", None)])
    Tally(networks=3, lost=0, files=1, unknown=1, damaged=1)
    """
    damaged = [one for one in findings if one.state == DAMAGED]
    holding = [one for one in damaged if one.members != 0]
    return Tally(
        networks=sum(one.members or 0 for one in findings if one.state == WHOLE),
        lost=sum(one.members or 0 for one in holding),
        files=len(holding),
        unknown=sum(one.members is None for one in holding),
        damaged=len(damaged),
    )


def finding_of(path: Path, kind: str, look: Callable[[], Finding]) -> Finding:
    """The finding that `look` returns; an error of it is damage, to an unknown number of networks."""
    try:
        return look()
    except (OnebasinError, OSError) as error:
        return Finding(path, kind, DAMAGED, " ".join(str(error).split()), None)


def unfinished(folder: Path, concerns: Callable[[Path], bool] = lambda path: True) -> Iterator[Finding]:
    """Temporary files and folders: of writers at work, or left by killed ones; never part of anything finished."""
    for path in leftovers(folder):
        if concerns(path):
            yield Finding(
                path,
                "leftover",
                NOTE,
                f"{path} is unfinished: it belongs to a writer at work or to one that was killed; "
                "delete it when no writer is running",
            )


def sentences(findings: Iterable[Finding]) -> list[str]:
    """The sentences of all findings that have one."""
    return [finding.sentence for finding in findings if finding.sentence]
