"""Read the files of an untrusted tar archive one after the other, without writing any of them to the disk.

The archive is read once from its beginning. What has no place in an archive of networks is refused before it is read:
links, devices, sparse files, names that lead out of a folder. An archive that unpacks to far more than it weighs is
given up as soon as it does.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Self, cast

from onebasin.errors import StorageError, UnsafeFileError

RATIO = 20  # unpacked over packed bytes; half-precision weights reach 1.1, tiny networks with long headers 5
FREE = 16 << 20  # bytes that any archive may unpack to, as the ratio says little about small ones
_GZIP = b"\x1f\x8b"
_LONGEST = 1024  # letters of a name
_BLOCK = 512  # bytes: tar's unit; an archive ends with at least one of zeros


def tar_files(path: Path, *, ratio: float = RATIO) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every regular file, in the order of the archive.

    Args:
        path: a tar archive, plain or packed with gzip; its first bytes decide, not its name.
        ratio: give up when it unpacks to more than 16 MB and more than this many times its own size.

    Raises:
        StorageError: the archive is truncated, corrupt or no tar archive.
        UnsafeFileError: it holds what no archive of networks needs, or unpacks to too much.
    """
    try:
        with path.open("rb") as packed:
            zipped = packed.read(2) == _GZIP
            packed.seek(0)
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=packed)) if zipped else packed
            limited = _Limited(stream, path, FREE + ratio * path.stat().st_size)
            with tarfile.open(fileobj=cast(IO[bytes], limited), mode="r|", tarinfo=_Member) as archive:
                for member in archive:
                    if _wanted(member, path):
                        content = archive.extractfile(member)
                        yield member.name, b"" if content is None else content.read()
            limited.end()
    except FileNotFoundError as error:
        raise StorageError(f"{path} does not exist: check the path") from error
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise StorageError(
            f"expected a whole tar archive, plain or gzipped, but {path} is truncated, corrupt or something else "
            f"({error}): copy it again from its source"
        ) from error


class _Member(tarfile.TarInfo):
    """A member whose damaged head is an error; tarfile would take it for the end, and lose what follows."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.SubsequentHeaderError):  # type: ignore[attr-defined]  # not in typeshed
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"the head of a member is damaged: {error}") from error


def leads_out(name: str) -> bool:
    """Whether a name in an archive or a repository leads out of its folder."""
    return name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name


def is_windows_path(name: str) -> bool:
    """Whether a name has a drive or a backslash, which another system would read in another way."""
    return bool(PureWindowsPath(name).drive) or "\\" in name


def _wanted(member: tarfile.TarInfo, path: Path) -> bool:
    """Whether a member is a regular file; raises for what is neither that nor a folder."""
    where = f"member {member.name!r} of {path}"
    if leads_out(member.name):
        raise UnsafeFileError(f"{where} has a name that leads out of its folder, expected one below it: {_DISTRUST}")
    if len(member.name) > _LONGEST:
        raise UnsafeFileError(
            f"a member of {path} has a name of {len(member.name):,} letters, expected at most {_LONGEST}: {_DISTRUST}"
        )
    if is_windows_path(member.name):
        raise UnsafeFileError(f"{where} has a name of another system, expected folders divided by /: {_DISTRUST}")
    if member.isdir():
        return False
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        kind = "a link" if member.issym() or member.islnk() else "a sparse file" if member.issparse() else "a device"
        raise UnsafeFileError(f"{where} is {kind}, expected a regular file: {_DISTRUST}")
    return True


_DISTRUST = "ask its author for another archive"


class _Limited:
    """A stream that gives up after so many bytes, and remembers the last ones."""

    def __init__(self, stream: IO[bytes], path: Path, limit: float) -> None:
        self.stream, self.path, self.left, self.last = stream, path, limit, b""

    def read(self, size: int) -> bytes:
        """At most `size` bytes."""
        content = self.stream.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise UnsafeFileError(
                f"{self.path} unpacks to far more than its {self.path.stat().st_size:,} bytes should hold, expected at "
                f"most {RATIO} times as much: {_DISTRUST}, or unpack it yourself and open the folder"
            )
        self.last = (self.last + content)[-_BLOCK:]
        return content

    def end(self) -> None:
        """Read what is behind the archive, so that checksums are compared, and see that its end was there."""
        while trailing := self.read(1 << 20):
            if trailing.strip(b"\0"):
                raise EOFError("something follows its end")
        if self.last.strip(b"\0"):
            raise EOFError("its end is missing")
