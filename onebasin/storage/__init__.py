"""Bytes on disk: atomic writes, locks, checksums, journals, integrity, tensor files.

What needs torch is imported when it is first asked for: reports are written without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onebasin.storage.atomic import (
    TEMPORARY,
    disk_errors,
    is_taken,
    leftovers,
    make_folder,
    need_space,
    publish,
    real_path,
    rename_folder,
    sync_folder,
    temporary_beside,
    whole_folder,
    write_text,
)
from onebasin.storage.integrity import (
    DAMAGED,
    NOTE,
    WHOLE,
    Finding,
    Tally,
    chunks,
    digest,
    finding_of,
    fingerprint,
    fold,
    seal,
    sentences,
    tally,
    unfinished,
)
from onebasin.storage.journal import check_same_run, read_json, write_json
from onebasin.storage.lock import LockedElsewhere, file_lock
from onebasin.storage.tar_stream import RATIO, is_windows_path, leads_out, tar_files

if TYPE_CHECKING:
    from onebasin.storage.npz_file import read_array, read_arrays, stored_names
    from onebasin.storage.tensor_file import (
        CHECKSUMS,
        CODES,
        TENSORS,
        TensorFile,
        bytes_of,
        expected_checksums,
        is_usual,
        map_tensors,
        read_header,
        read_tensors,
        tensor_problems,
        write_tensors,
    )
    from onebasin.storage.torch_file import check_pickle, check_plain, check_torch_file


__all__ = [
    "CHECKSUMS",
    "CODES",
    "DAMAGED",
    "NOTE",
    "RATIO",
    "TEMPORARY",
    "TENSORS",
    "WHOLE",
    "Finding",
    "LockedElsewhere",
    "Tally",
    "TensorFile",
    "bytes_of",
    "check_pickle",
    "check_plain",
    "check_same_run",
    "check_torch_file",
    "chunks",
    "digest",
    "disk_errors",
    "expected_checksums",
    "file_lock",
    "finding_of",
    "fingerprint",
    "fold",
    "is_taken",
    "is_usual",
    "is_windows_path",
    "leads_out",
    "leftovers",
    "make_folder",
    "map_tensors",
    "need_space",
    "publish",
    "read_array",
    "read_arrays",
    "read_header",
    "read_json",
    "read_tensors",
    "real_path",
    "rename_folder",
    "seal",
    "sentences",
    "stored_names",
    "sync_folder",
    "tally",
    "tar_files",
    "temporary_beside",
    "tensor_problems",
    "unfinished",
    "whole_folder",
    "write_json",
    "write_tensors",
    "write_text",
]

_FILES = {
    **dict.fromkeys(("check_pickle", "check_plain", "check_torch_file"), "torch_file"),
    **dict.fromkeys(("read_array", "read_arrays", "stored_names"), "npz_file"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES.get(name, 'tensor_file')}"), name)
