"""CIFAR-10 and CIFAR-100: binary batches, Python batches, and mosaics.

Binary batches (``data_batch_1.bin``, ..., ``test_batch.bin``; ``train.bin`` and ``test.bin`` of CIFAR-100) are records
of one label byte, or two with the fine one last, and 3,072 pixels. Python batches (``data_batch_1``, ...,
``test_batch``; ``train`` and ``test``) are pickles, of which a whitelist is read: plain values and arrays of numbers,
built by functions of this file. Mosaics (``train_1.webp``, ..., ``test.webp``) hold 100 images per row in the order of
``labels.npz`` (``y_train``, ``y_test``), without loss in two thirds of the space.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Pair, Parts, as_inputs
from onebasin.errors import StorageError, UnsafeFileError
from onebasin.storage import check_pickle, read_arrays

if TYPE_CHECKING:
    import numpy as np

_SIDE, _COLOURS = 32, 3
_PIXELS = _COLOURS * _SIDE * _SIDE
_LARGEST = 1 << 30  # bytes of one batch; the largest official one has 154 million
_AGAIN = "fetch the file again"
_TRAIN, _TEST = re.compile(r"(data_batch_\d+|train)(\.bin)?"), re.compile(r"(test_batch|test)(\.bin)?")
_COLUMNS, _ROWS = 100, 100  # images in a row of a mosaic, and rows in the largest one
_LABELS = "labels.npz"
_NUMBERS = ("u1", "i1", "b1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
_AXES, _LONGEST = 32, 1 << 32  # of an array in a pickle
_Unpickler: Any = pickle._Unpickler  # the one in Python, whose steps can be replaced

Stored = tuple[Tensor, Tensor]  # pixels uint8 (n, 3, 32, 32), labels (n,)


def is_batches(folder: Path) -> bool:
    """Whether a folder holds binary or Python batches, by names."""
    return bool(_batches(folder, _TRAIN, _TEST))


def read_batches(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """The training and test images of all batches in a folder, in order.

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
        parts.append(_concatenate(stored))
    train, test = parts
    return Parts(folder.name, train, test, 100 if hundred else 10)


def _batches(folder: Path, *patterns: re.Pattern[str]) -> list[Path]:
    """Batches in their order; binary ones only where there are no Python ones."""
    batches = [path for path in folder.iterdir() if path.is_file() and any(p.fullmatch(path.name) for p in patterns)]
    python = [path for path in batches if path.suffix != ".bin"]
    return sorted(python or batches, key=lambda path: (len(path.name), path.name))


def _concatenate(stored: list[Stored]) -> Pair | None:
    if not stored:
        return None
    pixels, labels = (torch.cat([pair[place] for pair in stored]) for place in (0, 1))
    return as_inputs(pixels), labels.long()


def _read_python(path: Path) -> Stored:
    import numpy as np

    content = read_pickle(_content(path), str(path))
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
    content = _content(path)
    if not content or len(content) % width:
        raise StorageError(f"expected records of {width:,} bytes in {path}, found {len(content):,} bytes: {_AGAIN}")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, width)
    return records[:, -_PIXELS:].reshape(-1, _COLOURS, _SIDE, _SIDE), records[:, -_PIXELS - 1].long()


def _content(path: Path) -> bytes:
    if path.stat().st_size > _LARGEST:
        raise StorageError(f"expected a batch of CIFAR, found more than {_LARGEST:,} bytes in {path}: {_AGAIN}")
    return path.read_bytes()


def is_mosaic(folder: Path) -> bool:
    """Whether a folder holds mosaics and their labels, by names."""
    return (folder / _LABELS).is_file() and bool(_pictures(folder))


def read_mosaics(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """The training and test images of the mosaics in a folder, in order; labels without an image are left out.

    Raises:
        StorageError: a file is damaged, or labels are missing.
    """
    file = folder / _LABELS
    verify(file, checksums)
    labels = read_arrays(file, lambda name: name.startswith("y_"))
    train, test = (_pair(folder, part, labels, checksums) for part in ("train", "test"))
    return Parts(folder.name, train, test, 1 + max(int(numbers.max()) for numbers in labels.values()))


def _pictures(folder: Path, part: str = "") -> list[Path]:
    paths = [path for path in folder.glob(f"{part}*.webp") if path.is_file()]
    return sorted(paths, key=lambda path: (len(path.name), path.name))


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


def _open_picture(path: Path) -> Any:
    """A picture whose header was read; one that is too large is refused by its size, without a warning."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=["WEBP"])


def _cut(path: Path) -> Tensor:
    """The images of one picture, uint8 (n, 3, 32, 32), row by row."""
    import numpy as np
    from PIL import Image

    try:
        with _open_picture(path) as picture:
            width, height = picture.size  # known from the header, before anything is unpacked
            fits = width == _COLUMNS * _SIDE and height % _SIDE == 0 and height <= _ROWS * _SIDE
            pixels = np.array(picture.convert("RGB")) if fits else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow does
        raise StorageError(f"expected a picture of images, but {path} cannot be read ({error}): {_AGAIN}") from error
    if pixels is None:
        raise StorageError(
            f"expected a picture with {_COLUMNS} images of {_SIDE} x {_SIDE} "
            f"pixels in each of at most {_ROWS} rows, found "
            f"{width} x {height} pixels in {path}: {_AGAIN}"
        )
    tiles = torch.from_numpy(pixels).reshape(-1, _SIDE, _COLUMNS, _SIDE, _COLOURS)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, _COLOURS, _SIDE, _SIDE)


@dataclass
class _Dtype:
    code: str
    order: str = "|"


@dataclass
class _Array:
    """An array whose content comes later in the pickle."""

    content: np.ndarray[Any, Any] | None = None


def read_pickle(content: bytes, where: str) -> Any:
    """The value that a pickle describes, without running anything that it names.

    A pickle is a program for a small machine whose worst instruction calls any function. Here only dicts, lists,
    tuples, texts, bytes and numbers are built, and the functions by which numpy describes an array are replaced by
    those of this file. Everything else is refused before anything happens.

    Args:
        content: the pickle, protocol 0 to 5.
        where: the file, for messages.

    Returns:
        Dicts, lists, tuples, texts, bytes, numbers and numpy arrays of numbers. Texts of Python 2, which are bytes,
        become texts with one character per byte.

    Raises:
        UnsafeFileError: it wants to call something else, or only serves to keep its reader busy.
        StorageError: it is truncated, damaged or no pickle.
    """
    check_pickle(content, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of odd escapes in a damaged text
            value = _Whitelist(content, where).load()
        if isinstance(value, dict):
            return {key: _finished(item) for key, item in value.items()}
        return [_finished(item) for item in value] if isinstance(value, list) else _finished(value)
    except UnsafeFileError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise StorageError(
            f"expected a whole pickle, but {where} is truncated, damaged or none "
            f"({(str(error) or type(error).__name__)[:100]}): fetch it again"
        ) from error


def _finished(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.content is None:
            raise ValueError("an array without content")
        return value.content
    return value


class _Whitelist(_Unpickler):  # type: ignore[misc]
    """Builds plain values; of what a pickle may name and call it knows the functions below, and nothing of numpy's.

    Bytes that it copies are limited: a pickle of a few bytes could otherwise ask for the same large array again and
    again.
    """

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.where, self.left = where, 2 * len(content)
        multiarray, numeric = "numpy.core.multiarray _reconstruct", "numpy.core.numeric _frombuffer"
        self.known: dict[str, Callable[..., Any]] = {
            multiarray: lambda *_: _Array(),
            multiarray.replace("core", "_core"): lambda *_: _Array(),
            numeric: lambda content, dtype, shape, order: _Array(self.array(content, dtype, shape, order == "F")),
            "numpy ndarray": lambda: self.refuse("a call of numpy.ndarray"),
            "numpy dtype": lambda code, *_: _Dtype(_text(code)),
            "_codecs encode": lambda text, *_: self.spend(_text(text)).encode("latin-1"),
            "__builtin__ bytes": bytes,  # how old protocols write no bytes at all
        }
        self.known[numeric.replace("core", "_core")] = self.known[numeric]

    def find_class(self, module: str, name: str) -> Any:
        """A function of this file in the place of the one that is named."""
        return self.known.get(f"{module} {name}") or self.refuse(f"{module}.{name}")

    def refuse(self, what: str) -> Any:
        raise UnsafeFileError(
            f"expected a pickle of plain values and arrays, but {self.where} asks for {what[:100]}; nothing of it was "
            "run: do not use the file unless you know its author"
        )

    def spend(self, content: Any) -> Any:
        self.left -= len(content)
        if self.left < 0:
            raise ValueError("it asks for more bytes than it holds")
        return content

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function not in self.known.values() or type(arguments) is not tuple or (function is bytes and arguments):
            self.refuse("a call of something else than a known function")
        self.stack.append(function(*arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Dtype):
            target.order = _text(state[1])
        elif isinstance(target, _Array):
            _, shape, dtype, fortran, content = state
            target.content = self.array(content, dtype, shape, bool(fortran))
        else:
            self.refuse("a change of something that is no array")

    def array(self, content: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray[Any, Any]:
        import numpy as np

        if not isinstance(dtype, _Dtype) or dtype.code not in _NUMBERS or dtype.order not in "|<>=":
            raise ValueError("an array of something else than numbers")
        if not isinstance(shape, tuple) or len(shape) > _AXES:
            raise ValueError("an array without a shape")
        if not all(type(size) is int and 0 <= size <= _LONGEST for size in shape):  # before any are multiplied
            raise ValueError("an array without a size")
        kind, raw = np.dtype(f"{dtype.order}{dtype.code}"), self.spend(content)
        stored = raw.encode("latin-1") if isinstance(raw, str) else raw
        if not isinstance(stored, bytes | bytearray) or len(stored) != math.prod(shape) * kind.itemsize:
            raise ValueError("an array whose content does not fill its shape")
        flat = np.frombuffer(stored, kind) if stored else np.empty(0, kind)
        return flat.reshape(shape, order="F" if fortran else "C").astype(kind.newbyteorder("="))

    dispatch: ClassVar[dict[int, Any]] = {
        **_Unpickler.dispatch,
        pickle.REDUCE[0]: call,
        pickle.BUILD[0]: build,
        **{
            code[0]: lambda self: self.refuse("an instruction that makes objects")
            for code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.PERSID, pickle.BINPERSID)
        },
        **{code[0]: lambda self: self.refuse("an extension") for code in (pickle.EXT1, pickle.EXT2, pickle.EXT4)},
    }


def _text(value: Any) -> str:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise ValueError("a text is missing")
    return text
