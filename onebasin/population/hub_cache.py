"""What the hub has, and the cache that keeps it: the only file that knows huggingface_hub.

Beside what that library keeps, each listing is noted in the cache: without the network it tells whether all files are
there, which the library's own cache cannot. Files are compared with the size and the digest that the listing promised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from onebasin.errors import InputError, StorageError, UnsafeFileError, first_line
from onebasin.population.checksum import sha256_of
from onebasin.population.durable import disk_errors, make_folder, need_space, publish

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[\w.-]*\w")  # names of files that the library makes of what the server calls their content
_NOTES = "onebasin"  # folder of our notes


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its name, its bytes, and where the hub knows it their SHA-256."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Listing:
    """All files of a repository in one version."""

    commit: str
    files: Sequence[RemoteFile]


def listed(repository: str, kind: str, revision: str) -> Listing:
    """List a repository: as the hub does now, or in offline mode as it did last.

    Args:
        repository: OWNER/NAME.
        kind: "model" or "dataset".
        revision: branch, tag or commit.

    Raises:
        InputError: the hub knows no such repository or revision.
        StorageError: the hub does not answer, or in offline mode the cache does not know it.
    """
    hub = _library()
    note = _folder(repository, kind) / _NOTES / f"{quote(revision, safe='')}.json"
    if hub.constants.HF_HUB_OFFLINE:
        return _noted(note) if note.is_file() else _snapshot(repository, kind, revision)
    with _hub_errors(f"{repository}@{revision}"):
        found = hub.HfApi().repo_info(repository, repo_type=kind, revision=revision, files_metadata=True)
        if not _COMMIT.fullmatch(found.sha):
            raise ValueError(f"{found.sha!r} is no commit")
        files = [
            RemoteFile(str(item.rfilename), int(item.size or 0), str(item.lfs.sha256) if item.lfs else None)
            for item in found.siblings or ()
        ]
    listing = Listing(found.sha, files)
    make_folder(note.parent)
    publish(note, lambda file: file.write(json.dumps(asdict(listing)).encode()), replace=True)
    return listing


def fetch(repository: str, kind: str, commit: str, files: Sequence[RemoteFile]) -> list[Path]:
    """Download what the cache does not have; a file that was cut off goes on where it was.

    Raises:
        StorageError: the hub does not answer, or what it sent is not what it promised.
        DiskError: the disk has too little room for all of it.
    """
    hub = _library()
    place = {"repo_id": repository, "repo_type": kind, "revision": commit}
    cached = {file.name: hub.try_to_load_from_cache(filename=file.name, **place) for file in files}
    missing = [file for file in files if not isinstance(cached[file.name], str)]
    if missing and hub.constants.HF_HUB_OFFLINE:
        raise StorageError(
            f"{len(missing)} of {len(files)} files of {repository} are not in the cache ({missing[0].name}, ...): "
            "fetch them once without HF_HUB_OFFLINE"
        )
    cache = Path(hub.constants.HF_HUB_CACHE)
    make_folder(cache)
    need_space(cache, sum(file.size for file in missing))
    for file in missing:
        with _hub_errors(f"{file.name} of {repository}"), disk_errors(cache):
            _refuse_strange_answer(hub.hf_hub_url(filename=file.name, **place), commit)
            cached[file.name] = hub.hf_hub_download(filename=file.name, **place)
        _check_content(Path(cached[file.name]), file)
    for file in files:
        _check_size(Path(cached[file.name]), file)
    return [Path(cached[file.name]) for file in files]


def _library() -> Any:
    try:
        for part in ("constants", "errors"):  # the package itself shows no modules
            import_module(f"huggingface_hub.{part}")
        return import_module("huggingface_hub")
    except ImportError as error:
        raise InputError(
            "networks by name on the hub need the package huggingface_hub, found none: pip install 'onebasin[hub]'"
        ) from error


def _endpoint() -> str:
    return str(_library().constants.ENDPOINT)


def _folder(repository: str, kind: str) -> Path:
    """Where the library keeps a repository."""
    return Path(_library().constants.HF_HUB_CACHE) / "--".join([f"{kind}s", *repository.split("/")])


def _noted(note: Path) -> Listing:
    try:
        content = json.loads(note.read_text())
        files = [RemoteFile(str(item["name"]), int(item["size"]), item["sha256"]) for item in content["files"]]
        if not _COMMIT.fullmatch(content["commit"]):
            raise ValueError("no commit")
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise StorageError(f"{note} is damaged: delete it and ask again without HF_HUB_OFFLINE") from error
    return Listing(content["commit"], files)


def _snapshot(repository: str, kind: str, revision: str) -> Listing:
    """What another program left in the library's cache; whether that is everything cannot be known."""
    folder = _folder(repository, kind)
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        raise StorageError(
            f"{repository}@{revision} is not in the cache {folder.parent}, and HF_HUB_OFFLINE forbids to ask: fetch it "
            "once without it"
        )
    paths = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
    return Listing(commit, [RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in paths])


def _refuse_strange_answer(url: str, commit: str) -> None:
    """The library makes file names of what the server calls a content and a version."""
    found = _library().get_hf_file_metadata(url)
    if found.commit_hash != commit or not _BLOB.fullmatch(found.etag or ""):
        raise UnsafeFileError(
            f"{url} is of version {found.commit_hash!r} with content {found.etag!r}, expected {commit!r} and a plain "
            "name: do not use this server"
        )


def _check_content(path: Path, file: RemoteFile) -> None:
    """Compare what was just fetched with its digest; what is wrong must not stay in the cache."""
    if file.sha256 is None:
        return
    found = sha256_of(path)
    if found != file.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise StorageError(f"expected sha256 {file.sha256} of {file.name}, found {found}: it was not kept; try again")


def _check_size(path: Path, file: RemoteFile) -> None:
    if not path.is_file() or path.stat().st_size != file.size:
        found = f"{path.stat().st_size:,}" if path.is_file() else "no"
        raise StorageError(f"expected {file.size:,} bytes in {path}, found {found}: delete the file and fetch it again")


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Translate what the library raises."""
    errors = _library().errors
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(f"{what} is only for those whom its owner lets in: ask for access on {_endpoint()}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(
            f"expected {what} on {_endpoint()}, found no such repository that you may read: check the name, or log in "
            "with hf auth login"
        ) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise InputError(f"expected {what} on {_endpoint()}, found no such version or file: check the name") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # an answer may be anything
        if getattr(error, "errno", None) is not None:  # the disk's
            raise
        raise StorageError(
            f"expected {what} from {_endpoint()}, found no usable answer ({first_line(error)}): connect to the "
            "network, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        ) from error
