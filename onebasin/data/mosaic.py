"""Images of 32 x 32 pixels in large lossless pictures: CIFAR in two thirds of the space.

``train_1.webp``, ``train_2.webp``, ..., ``test.webp``: 100 images per row, in the order of the labels beside them in
``labels.npz`` (``y_train``, ``y_test``).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Parts
from onebasin.data.images import as_inputs
from onebasin.data.npz import read_arrays
from onebasin.data.splitting import Pair
from onebasin.errors import StorageError

_SIDE, _ROW, _COLOURS = 32, 100, 3
_ROWS = 100  # in the largest picture
_LABELS = "labels.npz"
_AGAIN = "fetch the file again"


def is_mosaic(folder: Path) -> bool:
    """Whether a folder holds pictures and their labels, by names."""
    return (folder / _LABELS).is_file() and bool(_pictures(folder))


def read_folder(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """What the folder offers: pictures in the order of their numbers; labels without a picture are left out.

    Raises:
        StorageError: a file is damaged, or labels are missing.
    """
    file = folder / _LABELS
    verify(file, checksums)
    labels = read_arrays(file, lambda name: name.startswith("y_"))
    train, test = (_pair(folder, part, labels, checksums) for part in ("train", "test"))
    return Parts(folder.name, train, test, 1 + max(int(numbers.max()) for numbers in labels.values()))


def _pictures(folder: Path, part: str = "") -> list[Path]:
    found = [path for path in folder.glob(f"{part}*.webp") if path.is_file()]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _pair(folder: Path, part: str, labels: Mapping[str, Tensor], checksums: Mapping[str, str] | None) -> Pair | None:
    files = _pictures(folder, part)
    if not files:
        return None
    for path in files:
        verify(path, checksums)
    pixels = torch.cat([_cut(path) for path in files])
    names = [name for name in labels if name.startswith(f"y_{part}")]
    if len(names) != 1 or len(labels[names[0]]) < len(pixels):
        raise StorageError(
            f"expected y_{part} for {len(pixels):,} images in {folder / _LABELS}, found {names or 'none'} or too few: "
            f"{_AGAIN}"
        )
    return as_inputs(pixels), labels[names[0]][: len(pixels)].long()


def _opened(path: Path) -> Any:
    """A picture whose header was read; one that is too large is told apart by its size, not by a warning."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=["WEBP"])


def _cut(path: Path) -> Tensor:
    """The images of one picture, uint8 (n, 3, 32, 32), row by row."""
    import numpy as np
    from PIL import Image

    try:
        with _opened(path) as picture:
            width, height = picture.size  # known from the header, before anything is unpacked
            fits = width == _ROW * _SIDE and height % _SIDE == 0 and height <= _ROWS * _SIDE
            pixels = np.array(picture.convert("RGB")) if fits else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow does
        raise StorageError(f"expected a picture of images, but {path} cannot be read ({error}): {_AGAIN}") from error
    if pixels is None:
        raise StorageError(
            f"expected a picture with {_ROW} images of {_SIDE} x {_SIDE} pixels in each of at most {_ROWS} rows, found "
            f"{width} x {height} pixels in {path}: {_AGAIN}"
        )
    tiles = torch.from_numpy(pixels).reshape(-1, _SIDE, _ROW, _SIDE, _COLOURS)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, _COLOURS, _SIDE, _SIDE)
