"""Checksums of bytes at the speed of memory, and digests of files.

Knows bytes only. A header keeps checksums as text: a JSON object {name: 8 hexadecimal digits}.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
