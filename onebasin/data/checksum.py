"""Compare data files with the digests of their publisher.

Digests come from an argument, or from files beside the data: ``SHA256SUMS``, ``MD5SUMS`` (lines of digest and name, as
`sha256sum` writes them) or ``NAME.sha256``, ``NAME.md5``. Those of well-known files are in `OFFICIAL`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from onebasin.errors import InputError, StorageError
from onebasin.storage import digest

_ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256"}  # by the number of hexadecimal digits
_LISTS = ("SHA256SUMS", "MD5SUMS")
_LINE = re.compile(r"([0-9a-fA-F]{32,64})(?:\s+\*?(?:\./)?(\S.*))?")
_LONGEST = 1 << 20  # bytes of a list of digests

OFFICIAL: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    "cifar10": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar100": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
}


def verify(path: Path, checksums: Mapping[str, str] | None = None) -> None:
    """Compare a file with every digest that is known for its name; without one, do nothing.

    Args:
        path: the file.
        checksums: name -> hexadecimal md5, sha1 or sha256.

    Raises:
        StorageError: the digest is another one.
    """
    for wanted, source in _digests(path, checksums or {}):
        actual = digest(path, _ALGORITHMS[len(wanted)])
        if actual != wanted.lower():
            raise StorageError(
                f"expected {_ALGORITHMS[len(wanted)]} {wanted.lower()} of {path} ({source}), found {actual}: the file "
                "is damaged or another one; fetch it again"
            )


def _digests(path: Path, checksums: Mapping[str, str]) -> list[tuple[str, str]]:
    """The digests that are known for a file, each with its source."""
    digests = []
    if path.name in checksums:
        if not re.fullmatch("(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{40}|[0-9a-fA-F]{64})", checksums[path.name]):
            raise InputError(
                f"expected a hexadecimal md5, sha1 or sha256 for {path.name}, found {checksums[path.name]!r}: "
                "copy the whole digest"
            )
        digests.append((checksums[path.name], "as given"))
    for name in (*_LISTS, f"{path.name}.sha256", f"{path.name}.md5"):
        file = path.with_name(name)
        if file.is_file():
            digests += [(text, f"in {name}") for text, file in _listed(file) if file == path.name]
    return digests


def _listed(listing: Path) -> list[tuple[str, str]]:
    """(digest, file name) of every line; a lone digest belongs to the file that its list is named after."""
    with listing.open("rb") as file:
        lines = file.read(_LONGEST).decode("utf-8", "replace").splitlines()
    matches = [match for line in lines if (match := _LINE.fullmatch(line.strip()))]
    return [(match[1], match[2] or listing.stem) for match in matches if len(match[1]) in _ALGORITHMS]
