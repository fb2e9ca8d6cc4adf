"""Images of 32 x 32 pixels in large lossless pictures: CIFAR in two thirds of the space.

``train_1.webp``, ``train_2.webp``, ..., ``test.webp``: 100 images per row, in the order of the labels beside them in
``labels.npz`` (``y_train``, ``y_test``).
"""

from __future__ import annotations

import math
import pickletools
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Pair, Parts, as_inputs
from onebasin.data.npz import read_arrays
from onebasin.errors import StorageError, UnsafeFileError

if TYPE_CHECKING:
    import numpy as np


# ----------------------------------------------------------------------
# Plain values out of a pickle that is read as data and never run.


_NUMBERS = ("u1", "i1", "b1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
_AXES = 32
_LARGEST_PICKLE = 1 << 32  # of a length, and of a place in the memo
_ODD_KEYS = 1000
_MARK = object()


def read_pickle(content: bytes, where: str) -> Any:
    """The value that a pickle describes.

    Args:
        content: the pickle, protocol 0 to 5.
        where: the file, for messages.

    Returns:
        Dicts, lists, tuples, texts, bytes, numbers and numpy arrays of numbers. Texts of Python 2, which are bytes,
        become texts with one character per byte.

    Raises:
        UnsafeFileError: it wants to call something else.
        StorageError: it is truncated, damaged or no pickle.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of odd escapes in a damaged text
            return _Machine(where, 2 * len(content)).run(content)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, AssertionError) as error:
        reason = str(error) or type(error).__name__
        raise StorageError(
            f"expected a whole pickle, but {where} is truncated, damaged or none ({reason[:100]}): fetch it again"
        ) from error


@dataclass
class _Dtype:
    code: str
    order: str = "|"


@dataclass
class _Array:
    """An array that still waits for its content."""

    ready: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class _Function:
    """Something the pickle may name; only `_Machine.call` gives it a meaning."""

    name: str


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Function("reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"): _Function("reconstruct"),
    ("numpy", "ndarray"): _Function("ndarray"),
    ("numpy", "dtype"): _Function("dtype"),
    ("_codecs", "encode"): _Function("encode"),
    ("__builtin__", "bytes"): _Function("bytes"),  # how old protocols write no bytes at all
    ("numpy.core.numeric", "_frombuffer"): _Function("frombuffer"),
    ("numpy._core.numeric", "_frombuffer"): _Function("frombuffer"),
}


class _Machine:
    """A stack, a memo, and the instructions that are allowed.

    Bytes that it may copy are limited: a pickle of a few bytes could otherwise ask for the same large array again and
    again.
    """

    def __init__(self, where: str, limit: int) -> None:
        self.where = where
        self.left = limit
        self.odd_keys = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for code, argument, _ in pickletools.genops(content):
            if code.name == "STOP":
                return _finished(self.stack.pop())
            if code.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[code.name]())
            elif code.name in _LITERALS:
                self.stack.append(argument)
            elif code.name in _STEPS:
                _STEPS[code.name](self, argument)
            elif code.name not in _IGNORED:
                raise self.refusal(f"the instruction {code.name}")
        raise ValueError("it has no end")

    def refusal(self, what: str) -> UnsafeFileError:
        return UnsafeFileError(
            f"expected a pickle of plain values and arrays, but {self.where} asks for {what[:100]}; nothing of it was "
            "run: do not use the file unless you know who made it"
        )

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("a mark is missing")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def make_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise ValueError("a tuple lacks items")
        items = tuple(self.stack[-length:])
        del self.stack[-length:]
        self.stack.append(items)

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items for something that is no list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("entries for something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int):
                raise ValueError("a key that is neither text nor number")
            self.odd_keys += isinstance(key, int) and abs(key) >= _LARGEST_PICKLE
            if self.odd_keys > _ODD_KEYS:
                raise ValueError("more large numbers as keys than anybody needs")  # they share hashes: a slow dict
            target[key] = value

    def name(self, module: str, name: str) -> None:
        if (module, name) not in _KNOWN:
            raise self.refusal(f"{module}.{name}")
        self.stack.append(_KNOWN[module, name])

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise self.refusal("a call of something that is no function")
        if function.name == "reconstruct":
            self.stack.append(_Array())
        elif function.name == "dtype":
            self.stack.append(_Dtype(_text(arguments[0])))
        elif function.name == "bytes" and not arguments:
            self.stack.append(b"")
        elif function.name == "encode":
            self.stack.append(self.spend(_text(arguments[0])).encode("latin-1"))
        elif function.name == "frombuffer":
            content, dtype, shape, order = arguments
            self.stack.append(_Array(_array(self.spend(content), dtype, shape, order == "F")))
        else:
            raise self.refusal(f"a call of {function.name}")

    def spend(self, content: Any) -> Any:
        self.left -= len(content)
        if self.left < 0:
            raise ValueError("it asks for more bytes than it holds")
        return content

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Dtype):
            target.order = _text(state[1])
        elif isinstance(target, _Array):
            _, shape, dtype, fortran, content = state
            target.ready = _array(self.spend(content), dtype, shape, bool(fortran))
        else:
            raise self.refusal("a change of something that is no array")


def _text(value: Any) -> str:
    found = value.decode("latin-1") if isinstance(value, bytes) else value
    if not isinstance(found, str):
        raise ValueError("a text is missing")
    return found


def _array(content: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray[Any, Any]:
    import numpy as np

    if not isinstance(dtype, _Dtype) or dtype.code not in _NUMBERS or dtype.order not in "|<>=":
        raise ValueError("an array of something else than numbers")
    if not isinstance(shape, tuple) or len(shape) > _AXES:
        raise ValueError("an array without a shape")
    if not all(type(size) is int and 0 <= size <= _LARGEST_PICKLE for size in shape):  # before any are multiplied
        raise ValueError("an array without a size")
    kind = np.dtype(f"{dtype.order}{dtype.code}")
    stored = content.encode("latin-1") if isinstance(content, str) else content
    if not isinstance(stored, bytes | bytearray) or len(stored) != math.prod(shape) * kind.itemsize:
        raise ValueError("an array whose content does not fill its shape")
    flat = np.frombuffer(stored, kind) if stored else np.empty(0, kind)
    return flat.reshape(shape, order="F" if fortran else "C").astype(kind.newbyteorder("="))


def _finished(value: Any) -> Any:
    """Arrays in place of what described them, in the value and in the dicts and lists right below it."""
    if isinstance(value, dict):
        return {key: _settled(item) for key, item in value.items()}
    return [_settled(item) for item in value] if isinstance(value, list) else _settled(value)


def _settled(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.ready is None:
            raise ValueError("an array without content")
        return value.ready
    return value


def _store(machine: _Machine, place: int | None) -> None:
    if place is not None and not 0 <= place < _LARGEST_PICKLE:
        raise ValueError("a place in the memo that no pickle needs")
    machine.memo[len(machine.memo) if place is None else place] = machine.stack[-1]


def _fetch(machine: _Machine, place: int) -> None:
    machine.stack.append(machine.memo[place])


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(_text(module), _text(name))


def _dict_since_mark(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack.append({})
    machine.update(items)


def _pair_off(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.update([key, value])


_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PUT": lambda machine, place: _store(machine, place),
    "BINPUT": lambda machine, place: _store(machine, place),
    "LONG_BINPUT": lambda machine, place: _store(machine, place),
    "MEMOIZE": lambda machine, _: _store(machine, None),
    "GET": lambda machine, place: _fetch(machine, place),
    "BINGET": lambda machine, place: _fetch(machine, place),
    "LONG_BINGET": lambda machine, place: _fetch(machine, place),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "LIST": lambda machine, _: machine.stack.append(machine.since_mark()),
    "DICT": lambda machine, _: _dict_since_mark(machine),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: _pair_off(machine),
    "SETITEMS": lambda machine, _: machine.update(machine.since_mark()),
    "GLOBAL": lambda machine, text: machine.name(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: _stack_global(machine),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}


# ----------------------------------------------------------------------
# CIFAR-10 and CIFAR-100 as they are published.


_SIDE, _COLOURS = 32, 3
_PIXELS = _COLOURS * _SIDE * _SIDE
_LARGEST = 1 << 30  # bytes of one batch; the largest official one has 154 million
_AGAIN = "fetch the file again"
_TRAIN, _TEST = re.compile(r"(data_batch_\d+|train)(\.bin)?"), re.compile(r"(test_batch|test)(\.bin)?")

Stored = tuple[Tensor, Tensor]  # pixels uint8 (n, 3, 32, 32), labels (n,)


def is_cifar(folder: Path) -> bool:
    """Whether a folder holds batches, by names."""
    return bool(_batches(folder, _TRAIN, _TEST))


def read_cifar_folder(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
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


# ----------------------------------------------------------------------
# Images of 32 x 32 pixels in large lossless pictures: CIFAR in two thirds of the space.


_MOSAIC_SIDE, _ROW, _MOSAIC_COLOURS = 32, 100, 3
_ROWS = 100  # in the largest picture
_LABELS = "labels.npz"
_MOSAIC_AGAIN = "fetch the file again"


def is_mosaic(folder: Path) -> bool:
    """Whether a folder holds pictures and their labels, by names."""
    return (folder / _LABELS).is_file() and bool(_pictures(folder))


def read_mosaic_folder(folder: Path, checksums: Mapping[str, str] | None = None) -> Parts:
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
            f"{_MOSAIC_AGAIN}"
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
            fits = width == _ROW * _MOSAIC_SIDE and height % _MOSAIC_SIDE == 0 and height <= _ROWS * _MOSAIC_SIDE
            pixels = np.array(picture.convert("RGB")) if fits else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow does
        raise StorageError(
            f"expected a picture of images, but {path} cannot be read ({error}): {_MOSAIC_AGAIN}"
        ) from error
    if pixels is None:
        raise StorageError(
            f"expected a picture with {_ROW} images of {_MOSAIC_SIDE} x {_MOSAIC_SIDE} "
            f"pixels in each of at most {_ROWS} rows, found "
            f"{width} x {height} pixels in {path}: {_MOSAIC_AGAIN}"
        )
    tiles = torch.from_numpy(pixels).reshape(-1, _MOSAIC_SIDE, _ROW, _MOSAIC_SIDE, _MOSAIC_COLOURS)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, _MOSAIC_COLOURS, _MOSAIC_SIDE, _MOSAIC_SIDE)
