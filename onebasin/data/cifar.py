"""CIFAR-10 and CIFAR-100 as they are published.

Python batches (``data_batch_1`` ..., ``test_batch``; ``train`` and ``test`` of CIFAR-100) are pickles and read as data.
Binary batches (``.bin``) are records of one label byte, or two with the fine one last, and 3,072 pixels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Parts
from onebasin.data.images import as_inputs
from onebasin.data.pickled import read_pickle
from onebasin.data.splitting import Pair
from onebasin.errors import StorageError

_SIDE, _COLOURS = 32, 3
_PIXELS = _COLOURS * _SIDE * _SIDE
_LARGEST = 1 << 30  # bytes of one batch; the largest official one has 154 million
_AGAIN = "fetch the file again"
_TRAIN, _TEST = re.compile(r"(data_batch_\d+|train)(\.bin)?"), re.compile(r"(test_batch|test)(\.bin)?")

Stored = tuple[Tensor, Tensor]  # pixels uint8 (n, 3, 32, 32), labels (n,)


def is_cifar(folder: Path) -> bool:
    """Whether a folder holds batches, by names."""
    return bool(_batches(folder, _TRAIN, _TEST))


def read_folder(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """What the folder offers: all batches that are there, in order.

    Raises:
        UnsafeFileError: a batch is a pickle that wants to run code.
        StorageError: a file is damaged.
    """
    hundred = not any(path.name.startswith(("data_batch", "test_batch")) for path in _batches(folder, _TRAIN, _TEST))
    parts = []
    for pattern in (_TRAIN, _TEST):
        stored = []
        for path in _batches(folder, pattern):
            verify(path, checksums)
            stored.append(_read_binary(path, hundred) if path.suffix == ".bin" else _read_python(path))
        parts.append(_joined(stored))
    train, test = parts
    return Parts(folder.name, train, test, 100 if hundred else 10)


def _batches(folder: Path, *patterns: re.Pattern[str]) -> list[Path]:
    """Batches in their order; binary ones only where there are no Python ones."""
    found = [path for path in folder.iterdir() if path.is_file() and any(p.fullmatch(path.name) for p in patterns)]
    python = [path for path in found if path.suffix != ".bin"]
    return sorted(python or found, key=lambda path: (len(path.name), path.name))


def _joined(stored: list[Stored]) -> Pair | None:
    if not stored:
        return None
    pixels, labels = (torch.cat([pair[place] for pair in stored]) for place in (0, 1))
    return as_inputs(pixels), labels.long()


def _read_python(path: Path) -> Stored:
    import numpy as np

    content = read_pickle(_bounded(path), str(path))
    entries = {_name(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    pixels, labels = entries.get("data"), entries.get("labels", entries.get("fine_labels"))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise StorageError(
            f"expected a batch with data (n, {_PIXELS}) of bytes in {path}, found {', '.join(entries)[:80] or 'none'}: "
            f"{_AGAIN}"
        )
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(type(label) is int and 0 <= label < 100 for label in labels)
    ):
        raise StorageError(f"expected a list of {len(pixels):,} labels or fine_labels in {path}, found none: {_AGAIN}")
    return torch.from_numpy(pixels).reshape(-1, _COLOURS, _SIDE, _SIDE), torch.tensor(labels)


def _name(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)


def _read_binary(path: Path, hundred: bool) -> Stored:
    width = _PIXELS + (2 if hundred else 1)
    content = _bounded(path)
    if not content or len(content) % width:
        raise StorageError(f"expected records of {width:,} bytes in {path}, found {len(content):,} bytes: {_AGAIN}")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, width)
    return records[:, -_PIXELS:].reshape(-1, _COLOURS, _SIDE, _SIDE), records[:, -_PIXELS - 1].long()


def _bounded(path: Path) -> bytes:
    if path.stat().st_size > _LARGEST:
        raise StorageError(f"expected a batch of CIFAR, found more than {_LARGEST:,} bytes in {path}: {_AGAIN}")
    return path.read_bytes()
