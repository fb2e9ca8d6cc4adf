"""Networks on the Hugging Face hub by name: hf://OWNER/NAME[@REVISION][/PATH], or hf://datasets/OWNER/NAME...

PATH is a file, a folder, or a pattern in which * stands for a part of one name. Only safetensors files and tar archives
are taken, never pickles. They are kept in the hub's own cache, where a download that was cut off goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from onebasin.errors import InputError, UnsafeFileError
from onebasin.population import hub_cache
from onebasin.population.archive import ARCHIVES, is_archive
from onebasin.population.read import natural_key
from onebasin.population.tar_stream import is_foreign, leads_out

_ADDRESS = re.compile(
    r"hf:/(?:(?P<kind>datasets|models)/)?(?P<repository>(?!(?:datasets|models|spaces)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")  # one network cut into several files
_LISTED = 6  # names worth reading in one sentence


@dataclass(frozen=True)
class Address:
    """A place on the hub.

    >>> Address.parse(Path("hf://datasets/torch-uncertainty/Checkpoints/models/mnist-optunet"))
    Address(kind='dataset', repository='torch-uncertainty/Checkpoints', revision='main', path='models/mnist-optunet')
    """

    kind: str
    repository: str
    revision: str = "main"
    path: str = ""

    @classmethod
    def parse(cls, where: Path) -> Address | None:
        """Read an address, of which a path keeps only one of the two slashes; None for what is none.

        Raises:
            InputError: it begins like one.
        """
        text = where.as_posix()
        if where.parts[:1] != ("hf:",):
            return None
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise InputError(
                f"expected hf://OWNER/NAME[@REVISION][/PATH] or hf://datasets/OWNER/NAME[@REVISION][/PATH], found "
                f"{text!r}: write the owner and the name of a repository"
            )
        kind = "dataset" if found["kind"] == "datasets" else "model"
        return cls(kind, found["repository"], unquote(found["revision"] or "main"), (found["path"] or "").strip("/"))

    def __str__(self) -> str:
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{prefix}{self.repository}@{self.revision}" + (f"/{self.path}" if self.path else "")


@dataclass(frozen=True)
class Offer:
    """What a repository has to offer for an address; nothing is fetched yet.

    Attributes:
        address: what was asked for.
        commit: the version that answers it.
        files: in natural order.
    """

    address: Address
    commit: str
    files: Sequence[hub_cache.RemoteFile]

    @property
    def archived(self) -> int:
        """Bytes of archives, as packed."""
        return sum(file.size for file in self.files if is_archive(Path(file.name)))

    def fetch(self) -> list[Path]:
        """Download what the cache does not have, file by file.

        Raises:
            StorageError: the server does not answer, or what it sent is damaged.
            DiskError: the disk has too little room.
        """
        return hub_cache.fetch(self.address.repository, self.address.kind, self.commit, self.files)


def offered(address: Address) -> Offer:
    """Ask the hub, or offline its cache, which networks are under an address.

    Raises:
        InputError: there is no such repository or revision, or nothing in it that can be read.
        StorageError: no answer.
        UnsafeFileError: a name leads out of its folder.
    """
    listing = hub_cache.listed(address.repository, address.kind, address.revision)
    networks = [file for file in listing.files if _readable(file.name)]
    chosen = [file for file in networks if _under(file.name, address.path)]
    if not chosen:
        raise _nothing(address, [file.name for file in listing.files], [file.name for file in networks])
    for file in chosen:
        _refuse_strange(file.name, address)
    parts = [file.name for file in chosen if _PART.search(file.name)]
    if parts:
        raise InputError(
            f"{address} has one network in several files ({parts[0]}, ...), expected one or more per file: join them "
            "yourself and use Population.from_states"
        )
    return Offer(address, listing.commit, sorted(chosen, key=lambda file: natural_key(PurePosixPath(file.name))))


def _readable(name: str) -> bool:
    hidden = PurePosixPath(name).name.startswith(".")
    return not hidden and (name.lower().endswith(".safetensors") or is_archive(Path(name)))


def _under(name: str, path: str) -> bool:
    """Whether a file is meant by a path: itself, directly in the folder, or matched by the pattern.

    >>> [_under("runs/3/net.safetensors", path) for path in ("runs/3", "runs/*/net.*", "runs", "runs/3/n")]
    [True, True, False, False]
    """
    parts, wanted = PurePosixPath(name).parts, PurePosixPath(path).parts
    if len(parts) not in (len(wanted), len(wanted) + 1):
        return False
    return all(fnmatchcase(part, pattern) for part, pattern in zip(parts, wanted, strict=False))


def _nothing(address: Address, names: Sequence[str], networks: Sequence[str]) -> InputError:
    folders = list(dict.fromkeys(str(PurePosixPath(name).parent) for name in networks))
    if folders:
        found = f"none there but some in {', '.join(folders[:_LISTED])}" + (", ..." if len(folders) > _LISTED else "")
        remedy = f"add the folder, as in hf://.../{folders[0]}"
    else:
        found = (
            f"{', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}" if names else "an empty repository"
        )
        remedy = "convert what it holds to safetensors, or load it yourself and use Population.from_states"
    return InputError(f"expected files .safetensors, {', '.join(ARCHIVES)} in {address}, found {found}: {remedy}")


def _refuse_strange(name: str, address: Address) -> None:
    if leads_out(name) or is_foreign(name) or name != "/".join(PurePosixPath(name).parts):
        raise UnsafeFileError(
            f"file {name!r} of {address} has a name that leads elsewhere, expected one below its folder: choose "
            "another repository"
        )
