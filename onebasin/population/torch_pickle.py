"""A look at a torch file before torch reads it: is it packed as torch packs, and are its numbers those of a checkpoint?

Torch's reader without code still builds dicts. Python gives whole numbers beyond 2**61 few different hashes, so that a
dict of a hundred thousand of them, a file of one megabyte, would take minutes to build, and ten times as many hours.
"""

from __future__ import annotations

import pickletools
import zipfile
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from onebasin.errors import StorageError, UnsafeFileError

MOST = 1000  # such numbers; checkpoints hold seeds and moments, never many
_PICKLE = 256 << 20  # bytes of the pickle of a checkpoint; one tensor takes about 200
_OLD_PICKLES = 5  # at the start of an old file: magic number, version, system, content, names of storages


def check_torch_file(path: Path) -> None:
    """Refuse a torch file that would hang its reader, or that is packed.

    Raises:
        UnsafeFileError: it holds too many colliding numbers.
        StorageError: it is a zip file that torch did not write.
    """
    if path.exists() and not path.is_file():
        raise StorageError(f"expected a file, but {path} is a folder or a device: move it away to go on without it")
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            _check_numbers(file, _OLD_PICKLES, path)
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
        tensors = [entry for entry in entries if "/data/" in entry.filename]
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in [*pickles, *tensors])
        if packed or any(entry.file_size > _PICKLE for entry in pickles):
            raise StorageError(
                f"expected a torch file as torch.save writes it, found a packed or endless one in {path}: ask its "
                "author for the original"
            )
        for entry in pickles:
            _check_numbers(BytesIO(archive.read(entry)), 1, path)


def _check_numbers(file: BinaryIO, pickles: int, path: Path) -> None:
    found = 0
    for _ in range(pickles):
        try:
            for code, argument, _ in pickletools.genops(file):
                found += code.name in ("LONG", "LONG1", "LONG4") and abs(int(argument or 0)) >> 60 > 0
                if found > MOST:
                    break
        except Exception:
            return  # no pickle, or a damaged one: the reader says so
        if found > MOST:
            raise UnsafeFileError(
                f"{path} holds more than {MOST} numbers of a kind that only serves to keep its reader busy, expected "
                "tensors and settings: do not use the file unless you know who made it"
            )
