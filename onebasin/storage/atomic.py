"""Files and folders that appear whole or not at all: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from onebasin.errors import DiskError, InputError

TEMPORARY = ".partial-"  # infix of names that readers ignore
_SYNC_SECONDS = 0.004  # pause between two early syncs; a small file is written before the first
_MARGIN = 16 << 20  # bytes left free, so that a full disk does not also break the user's logs

_REFUSALS = {
    errno.ENOSPC: "the disk is full: free some space or choose another place",
    errno.EDQUOT: "your quota is used up: free some space or choose another place",
    errno.EROFS: "the disk is read-only: choose another place",
    errno.EACCES: "permission is refused: choose another place or change the permissions",
    errno.EPERM: "permission is refused: choose another place or change the permissions",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another place",
    errno.EFBIG: "files of this size are not allowed there: choose another place",
}


def real_path(path: Path) -> Path:
    """The absolute path without links; `Path.resolve` raises on links that lead to each other, this one stops there."""
    return Path(os.path.realpath(path))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise refusals of the disk as `DiskError` with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS or isinstance(error, FileExistsError):  # a claimed name is for the caller
            raise
        raise DiskError(f"cannot write {path}: {_REFUSALS[error.errno]}") from error


def need_space(folder: Path, nbytes: int) -> None:
    """Raise `DiskError` unless `folder` has room for `nbytes` and a margin."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + _MARGIN:
        raise DiskError(
            f"writing to {folder} needs {(nbytes + _MARGIN) / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free: "
            "free some space or choose another place"
        )


def make_folder(folder: Path) -> None:
    """Create a folder and its parents."""
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DiskError(f"cannot write {folder}: a file of this name is in the way; choose another place") from error


def temporary_beside(path: Path) -> Path:
    """Return a fresh name in the folder of `path` that readers ignore."""
    return path.with_name(f".{path.name}{TEMPORARY}{secrets.token_hex(4)}")


def leftovers(folder: Path) -> list[Path]:
    """List temporary files: each belongs to a writer at work, or to one that was killed."""
    return sorted(path for path in folder.iterdir() if TEMPORARY in path.name)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can."""
    with suppress(OSError, AttributeError):  # Windows cannot open a folder
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str, *, replace: bool = True) -> None:
    """Create or replace a text file; readers see the old one or the new one."""
    make_folder(path.parent)
    publish(path, lambda file: file.write(text.encode()), replace=replace)


def publish(path: Path, write: Callable[[BinaryIO], object], *, size: int = 0, replace: bool = False) -> None:
    """Create `path` with what `write` writes: readers see the whole file or none.

    Args:
        path: the final name.
        write: receives the open temporary file.
        size: bytes to reserve beforehand, no more than will be written: a full disk is noticed early, and the disk
            can start while we still write.
        replace: whether an existing file may be replaced; otherwise `FileExistsError`, and that file stays.
    """
    temporary = temporary_beside(path)
    try:
        with disk_errors(path):
            with temporary.open("xb") as file:
                _reserve(file, size)
                with _early_sync(file):
                    write(file)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(temporary, path)
            else:
                _claim(temporary, path)
    finally:
        with suppress(OSError):  # gone already, or the disk refuses everything; the first error is the one to show
            temporary.unlink()
    sync_folder(path.parent)


def _reserve(file: BinaryIO, size: int) -> None:
    """Reserve room for a file, where the system can."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno in _REFUSALS:
                raise


@contextmanager
def _early_sync(file: BinaryIO) -> Iterator[None]:
    """Push bytes to the disk while more are written: the fsync at the end then has little left to wait for."""
    finished, failures = threading.Event(), list[OSError]()

    def push() -> None:
        while not finished.wait(_SYNC_SECONDS) and not failures:
            try:
                os.fsync(file.fileno())
            except OSError as error:  # the system reports it once, so it must not be lost here
                failures.append(error)

    helper = threading.Thread(target=push, daemon=True)
    helper.start()
    try:
        yield
    finally:
        finished.set()
        helper.join()
    if failures:
        raise failures[0]


def _claim(temporary: Path, path: Path) -> None:
    """Give the file its name unless the name is taken: a link is atomic where a rename would overwrite."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:  # a disk without hard links; names carry a writer's identity, so a clash is unlikely
        if path.exists():
            raise FileExistsError(path) from error
        os.rename(temporary, path)


def is_taken(path: Path) -> bool:
    """Whether `path` exists and is anything but an empty folder."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the name `path` when the block succeeds, and is deleted when it fails."""
    if is_taken(path):
        raise InputError(
            f"expected a new or empty folder, but {path} exists and is not empty: "
            "choose another path, or append to a population with Population.writer(path, spec)"
        )
    make_folder(path.parent)
    temporary = temporary_beside(path)
    make_folder(temporary)
    try:
        yield temporary
        rename_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def rename_folder(folder: Path, path: Path) -> None:
    """Give a finished folder its name, under which there is nothing or an empty folder."""
    with disk_errors(path):
        if path.is_dir():  # empty; not every system renames onto it
            path.rmdir()
        os.rename(folder, path)
    sync_folder(path.parent)
