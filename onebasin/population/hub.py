"""Which files are meant by a word that is no path: a pattern such as runs/*/best.safetensors, or a name on the hub."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from onebasin.errors import InputError, StorageError, UnsafeFileError, first_line
from onebasin.population.archive import ARCHIVES, is_archive
from onebasin.population.files import natural_key
from onebasin.storage import digest, disk_errors, is_windows_path, leads_out, make_folder, need_space, publish

# ----------------------------------------------------------------------
# What the hub has, and the cache that keeps it: the only file that knows huggingface_hub.


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
    found = digest(path)
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


# ----------------------------------------------------------------------
# Networks on the Hugging Face hub by name: hf://OWNER/NAME[@REVISION][/PATH], or hf://datasets/OWNER/NAME...


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
    files: Sequence[RemoteFile]

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
        return fetch(self.address.repository, self.address.kind, self.commit, self.files)


def offered(address: Address) -> Offer:
    """Ask the hub, or offline its cache, which networks are under an address.

    Raises:
        InputError: there is no such repository or revision, or nothing in it that can be read.
        StorageError: no answer.
        UnsafeFileError: a name leads out of its folder.
    """
    listing = listed(address.repository, address.kind, address.revision)
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
    if leads_out(name) or is_windows_path(name) or name != "/".join(PurePosixPath(name).parts):
        raise UnsafeFileError(
            f"file {name!r} of {address} has a name that leads elsewhere, expected one below its folder: choose "
            "another repository"
        )


# ----------------------------------------------------------------------
# Which files are meant by a word that is no path: a pattern such as runs/*/best.safetensors, or a name on the h


@dataclass(frozen=True)
class NetworkSource:
    """Files in their order.

    Attributes:
        name: the word, as one would write it.
        paths: files or folders, each with one network or several.
        origin: what else is known about where they come from, JSON-able.
        offer: where they still have to be fetched from; `paths` is empty until then.
    """

    name: str
    paths: Sequence[Path]
    origin: Mapping[str, Any] = field(default_factory=dict)
    offer: Offer | None = None

    def fetched(self) -> NetworkSource:
        """The same place with all its files on this machine."""
        return self if self.offer is None else replace(self, paths=self.offer.fetch(), offer=None)


def is_there(where: Path) -> bool:
    """Whether a word can be looked up: a path that exists, a pattern, or a name on the hub.

    >>> [is_there(Path(word)) for word in ("runs/*/best.pt", "hf://owner/name", "no/such/path")]
    [True, True, False]
    """
    return where.exists() or glob.has_magic(str(where)) or Address.parse(where) is not None


def find(where: Path) -> NetworkSource:
    """Find what a word means. What exists under this very name is meant before anything else.

    Raises:
        StorageError: nothing exists or matches.
        InputError: a name on the hub that is malformed, unknown there, or has nothing of use.
    """
    if where.exists():
        return NetworkSource(str(where), [where])
    if (address := Address.parse(where)) is not None:
        offer = offered(address)
        return NetworkSource(str(address), [], {"commit": offer.commit}, offer)
    if glob.has_magic(str(where)):
        found = sorted(map(Path, glob.glob(str(where), recursive=True)), key=natural_key)
        if not found:
            raise StorageError(f"expected files that match {where}, found none: check the pattern and the folder")
        return NetworkSource(str(where), found)
    raise StorageError(f"{where} does not exist: check the path")
