"""Plain values out of a pickle that is read as data and never run.

A pickle is a program for a small machine whose worst instruction calls any function. The machine here has only the
instructions that build dicts, lists, tuples, texts, bytes and numbers, and knows a few functions, all of them its own:
those by which numpy describes an array. Everything else is refused before anything happens.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebasin.errors import StorageError, UnsafeFileError

if TYPE_CHECKING:
    import numpy as np

_NUMBERS = ("u1", "i1", "b1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
_AXES = 32
_LARGEST = 1 << 32  # of a length, and of a place in the memo
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
            self.odd_keys += isinstance(key, int) and abs(key) >= _LARGEST
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
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in shape):  # before any are multiplied
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
    if place is not None and not 0 <= place < _LARGEST:
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
