"""Networks on the Hugging Face hub by name: `hf://OWNER/NAME[@REVISION][/PATH]`, or `hf://datasets/OWNER/NAME...`.

PATH is a file, a folder, or a pattern in which * stands for a part of one name. Only safetensors files and tar archives
are taken, never pickles. They are kept in the hub's own cache, where a download that was cut off goes on.

The only file that knows huggingface_hub, which lists, downloads, resumes and caches. Here: which files are meant, what
a server must not do, and a note of each listing in the cache: without the network it tells whether all files are there,
which the library's own cache cannot. Files are compared with the size and the digest that the listing promised.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from onebasin.errors import InputError, StorageError, UnsafeFileError, first_line
from onebasin.population.archive import ARCHIVES, is_archive
from onebasin.population.names import natural_key
from onebasin.storage import (
    digest,
    disk_errors,
    is_windows_path,
    leads_out,
    make_folder,
    need_space,
    read_json,
    write_json,
)

_ADDRESS = re.compile(
    r"hf:/(?:(?P<kind>datasets|models)/)?(?P<repository>(?!(?:datasets|models|spaces)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")  # one network cut into several files
_LISTED = 6  # names worth reading in one sentence
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[\w.-]*\w")  # names of files that the library makes of what the server calls their content
_NOTES = "onebasin"  # folder of our notes in the cache of a repository


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
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise InputError(
                f"expected hf://OWNER/NAME[@REVISION][/PATH] or hf://datasets/OWNER/NAME[@REVISION][/PATH], found "
                f"{text!r}: write the owner and the name of a repository"
            )
        kind = "dataset" if match["kind"] == "datasets" else "model"
        return cls(kind, match["repository"], unquote(match["revision"] or "main"), (match["path"] or "").strip("/"))

    def __str__(self) -> str:
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{prefix}{self.repository}@{self.revision}" + (f"/{self.path}" if self.path else "")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its name, its bytes, and where the hub knows it their SHA-256."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class RemoteNetworks:
    """The files of networks under an address, in natural order; nothing is fetched yet.

    Attributes:
        address: what was asked for.
        commit: the version that answers it.
        files: in natural order.
    """

    address: Address
    commit: str
    files: Sequence[RemoteFile]

    @property
    def archived(self) -> int:
        """Bytes of archives, as packed."""
        return sum(file.size for file in self.files if is_archive(Path(file.name)))

    def fetch(self) -> list[Path]:
        """Download what the cache does not have; a file that was cut off goes on where it was.

        Raises:
            StorageError: the hub does not answer, or what it sent is not what it promised.
            DiskError: the disk has too little room for all of it.
        """
        hub, repository = _library(), self.address.repository
        version = {"repo_id": repository, "repo_type": self.address.kind, "revision": self.commit}
        missing = [
            file
            for file in self.files
            if not isinstance(hub.try_to_load_from_cache(filename=file.name, **version), str)
        ]
        if missing and hub.constants.HF_HUB_OFFLINE:
            raise StorageError(
                f"{len(missing)} of {len(self.files)} files of {repository} are not in the cache ({missing[0].name}, "
                "...): fetch them once without HF_HUB_OFFLINE"
            )
        cache = Path(hub.constants.HF_HUB_CACHE)
        if missing:
            make_folder(cache)
            need_space(cache, sum(file.size for file in missing))
            with _hub_errors(f"{missing[0].name} of {repository}"), disk_errors(cache):
                for file in missing:
                    _check_answer(hub.hf_hub_url(filename=file.name, **version), self.commit)
                hub.snapshot_download(**version, allow_patterns=[glob.escape(file.name) for file in missing])
        snapshot = _cache_of(self.address) / "snapshots" / self.commit
        for file in missing:
            _check_content(snapshot / file.name, file)
        for file in self.files:
            _check_size(snapshot / file.name, file)
        return [snapshot / file.name for file in self.files]


def remote_networks(address: Address) -> RemoteNetworks:
    """The networks under an address, as the hub lists them now, or offline as it did last.

    Raises:
        InputError: there is no such repository or revision, or nothing in it that can be read.
        StorageError: no answer, or in offline mode the cache does not know it.
        UnsafeFileError: a name leads out of its folder.
    """
    commit, files = _listing(address)
    networks = [file for file in files if _readable(file.name)]
    chosen = [file for file in networks if _under(file.name, address.path)]
    if not chosen:
        raise _nothing(address, [file.name for file in files], [file.name for file in networks])
    for file in chosen:
        _check_name(file.name, address)
    parts = [file.name for file in chosen if _PART.search(file.name)]
    if parts:
        raise InputError(
            f"{address} has one network in several files ({parts[0]}, ...), expected one or more per file: join them "
            "yourself and use Population.from_states"
        )
    return RemoteNetworks(address, commit, sorted(chosen, key=lambda file: natural_key(PurePosixPath(file.name))))


def _listing(address: Address) -> tuple[str, list[RemoteFile]]:
    """The commit of a repository and all its files."""
    hub = _library()
    note = _cache_of(address) / _NOTES / f"{quote(address.revision, safe='')}.json"
    if hub.constants.HF_HUB_OFFLINE:
        return _noted_listing(note) if note.is_file() else _cached_listing(address)
    with _hub_errors(f"{address.repository}@{address.revision}"):
        info = hub.HfApi().repo_info(
            address.repository, repo_type=address.kind, revision=address.revision, files_metadata=True
        )
        if not _COMMIT.fullmatch(info.sha):
            raise ValueError(f"{info.sha!r} is no commit")
        files = [
            RemoteFile(str(item.rfilename), int(item.size or 0), str(item.lfs.sha256) if item.lfs else None)
            for item in info.siblings or ()
        ]
    write_json(note, {"commit": info.sha, "files": [asdict(file) for file in files]})
    return info.sha, files


def _noted_listing(note: Path) -> tuple[str, list[RemoteFile]]:
    try:
        content = read_json(note)
        files = [RemoteFile(str(item["name"]), int(item["size"]), item["sha256"]) for item in content["files"]]
        if not _COMMIT.fullmatch(content["commit"]):
            raise ValueError("no commit")
    except (StorageError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{note} is damaged: delete it and ask again without HF_HUB_OFFLINE") from error
    return content["commit"], files


def _cached_listing(address: Address) -> tuple[str, list[RemoteFile]]:
    """The files that another program left in the library's cache; whether these are all cannot be known."""
    hub = _library()
    try:
        version = {"repo_type": address.kind, "revision": address.revision}
        snapshot = Path(hub.snapshot_download(address.repository, **version, local_files_only=True))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{address.repository}@{address.revision} is not in the cache {hub.constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids to ask: fetch it once without it"
        ) from error
    paths = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
    files = [RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in paths]
    return snapshot.name, files


def _library() -> Any:
    try:
        for part in ("constants", "errors"):  # the package itself shows no modules
            import_module(f"huggingface_hub.{part}")
        return import_module("huggingface_hub")
    except ImportError as error:
        raise InputError(
            "networks by name on the hub need the package huggingface_hub, found none: pip install 'onebasin[hub]'"
        ) from error


def _cache_of(address: Address) -> Path:
    """The folder in which the library keeps a repository."""
    return Path(_library().constants.HF_HUB_CACHE) / "--".join([f"{address.kind}s", *address.repository.split("/")])


def _check_answer(url: str, commit: str) -> None:
    """Refuse a server whose names for a content or a version the library would make paths of that lead elsewhere."""
    answer = _library().get_hf_file_metadata(url)
    if answer.commit_hash != commit or not _BLOB.fullmatch(answer.etag or ""):
        raise UnsafeFileError(
            f"{url} is of version {answer.commit_hash!r} with content {answer.etag!r}, expected {commit!r} and a plain "
            "name: do not use this server"
        )


def _check_content(path: Path, file: RemoteFile) -> None:
    """Compare what was just fetched with its digest; what is wrong must not stay in the cache."""
    if file.sha256 is None or not path.is_file():
        return
    actual = digest(path)
    if actual != file.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise StorageError(f"expected sha256 {file.sha256} of {file.name}, found {actual}: it was not kept; try again")


def _check_size(path: Path, file: RemoteFile) -> None:
    if not path.is_file() or path.stat().st_size != file.size:
        actual = f"{path.stat().st_size:,}" if path.is_file() else "no"
        raise StorageError(
            f"expected {file.size:,} bytes in {path}, found {actual}: delete the file and fetch it again"
        )


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Raise the errors of the library as ours, with a remedy."""
    errors, endpoint = _library().errors, _library().constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(f"access to {what} has to be granted by its owner: ask for it on {endpoint}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(
            f"expected {what} on {endpoint}, found no such repository that you may read: check the name, or log in "
            "with hf auth login"
        ) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise InputError(f"expected {what} on {endpoint}, found no such version or file: check the name") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # an answer may be anything
        if getattr(error, "errno", None) is not None:  # the disk's
            raise
        raise StorageError(
            f"expected {what} from {endpoint}, found no usable answer ({first_line(error)}): connect to the "
            "network, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        ) from error


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
        content = f"none there but some in {', '.join(folders[:_LISTED])}" + (", ..." if len(folders) > _LISTED else "")
        remedy = f"add the folder, as in hf://.../{folders[0]}"
    else:
        content = (
            f"{', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}" if names else "an empty repository"
        )
        remedy = "convert what it holds to safetensors, or load it yourself and use Population.from_states"
    return InputError(f"expected files .safetensors, {', '.join(ARCHIVES)} in {address}, found {content}: {remedy}")


def _check_name(name: str, address: Address) -> None:
    if leads_out(name) or is_windows_path(name) or name != "/".join(PurePosixPath(name).parts):
        raise UnsafeFileError(
            f"file {name!r} of {address} has a name that leads elsewhere, expected one below its folder: choose "
            "another repository"
        )
