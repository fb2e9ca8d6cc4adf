"""Files from the network: in pieces, with a limit, compared with their digest, and kept.

A file appears in the cache whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from onebasin.errors import DiskError, InputError, StorageError

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
