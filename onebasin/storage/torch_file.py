"""Checks of a torch file that its reader could hang, crash or run out of memory on, though it runs no code.

Torch's reader without code still unpacks entries of a zip file, and still builds dicts, sets and tuples:

- A packed entry of some kilobytes may unpack to gigabytes. Torch packs nothing, so that any packed entry is refused,
  and so are the small entries beside pickle and tensors (version, byte order, ...) if they are not small.
- Python hashes texts with a secret, but not numbers and tuples of them: whoever writes the file can choose thousands of
  keys with one hash, each of which costs as much as all before it. A hundred thousand, a file of one megabyte, take
  minutes, ten times as many hours.
- The hash, the text and the end of a tuple in a tuple in a tuple ... are computed by recursion, which a depth of a
  hundred thousand ends by a crash of the interpreter.

So `check_torch_file` follows the instructions of the pickle before torch reads it, without making anything: how deep
containers are, and how many keys there are that are neither texts nor small numbers. `check_plain` looks at the
tensors, for a pickle without code can still describe what no machine holds: a view may repeat one stored number 2**40
times, a tensor of the device "meta" has a shape and no numbers at all.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from onebasin.errors import StorageError, UnsafeFileError
from onebasin.storage.tensor_file import is_usual

_KEYS = 1000  # keys or large numbers that may share a hash; checkpoints hold seeds and moments, never many
_DEPTH = 100  # of containers in containers
STEPS = 6_000_000  # instructions of a pickle; a tensor takes about 45
_PICKLE = 256 << 20  # bytes of the pickle of a checkpoint; one tensor takes about 200
_SMALL = 1 << 16  # bytes of an entry that is neither pickle nor tensor
_OLD_PICKLES = 5  # at the start of an old file: magic number, version, system, content, names of storages


def check_torch_file(path: Path) -> None:
    """Refuse a torch file that would hang or crash its reader, or that is packed.

    Raises:
        UnsafeFileError: its pickle holds too many colliding keys, or containers that are too deep.
        StorageError: it is a zip file that torch did not write.
    """
    if path.exists() and not path.is_file():
        raise StorageError(f"expected a file, but {path} is a folder or a device: move it away to go on without it")
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            _follow(file, _OLD_PICKLES, path)
        return
    with zipfile.ZipFile(path) as archive:
        # Code of TorchScript is packed and never read: the reader refuses such files by their names.
        entries = [entry for entry in archive.infolist() if "/code/" not in entry.filename]
        for entry in entries:
            most = _PICKLE if entry.filename.endswith(".pkl") else _SMALL
            stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
            if not stored or (entry.file_size > most and "/data/" not in entry.filename):
                raise StorageError(
                    f"expected a torch file as torch.save writes it, found a packed or endless entry "
                    f"{entry.filename[:80]!r} in {path}: ask its author for the original"
                )
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                _follow(BytesIO(archive.read(entry)), 1, path)


def check_pickle(content: bytes, where: str) -> None:
    """Refuse a pickle that would hang its reader, or that is not whole; nothing of it is run.

    Raises:
        UnsafeFileError: it holds too many colliding keys, or containers that are too deep.
        StorageError: it is truncated, damaged or no pickle.
    """
    if not _follow(BytesIO(content), 1, where):
        raise StorageError(f"expected a whole pickle, but {where} is truncated, damaged or none: fetch it again")


@dataclass(slots=True)
class _Value:
    """What is known of a value that a pickle makes.

    Attributes:
        hashed: it may be a key that was chosen for its hash.
        depth: of containers in it.
        items: members, and members of members, that are `hashed`; what a set or dict made of it would have for keys.
        gathers: it is a function that makes keys of the members of its argument.
        text: where it is a short one, which may be the name of such a function.
    """

    hashed: bool = True
    depth: int = 0
    items: int = 0
    gathers: bool = False
    text: str = ""


_MARK = _Value()
_PLAIN = _Value(hashed=False)
_GATHERING = ("set", "frozenset", "Counter", "OrderedDict")
# How many values an instruction takes from below the mark, or all in all; whether it takes what is above a mark too.
_READS = {
    code.name: (
        code.stack_before.index(pickletools.markobject)
        if pickletools.markobject in code.stack_before
        else len(code.stack_before),
        pickletools.markobject in code.stack_before,
    )
    for code in pickletools.opcodes
}


def _follow(file: BinaryIO, pickles: int, path: Path | str) -> bool:
    """Whether the first pickles of a file are whole; raises where they would hang their reader."""
    keys = steps = 0
    for _ in range(pickles):
        stack: list[_Value] = []
        memo: dict[int, _Value] = {}
        try:
            for code, argument, _ in pickletools.genops(file):
                keys += _step(code, argument, stack, memo)
                steps += 1
                if keys > _KEYS or steps > STEPS or (stack and stack[-1].depth > _DEPTH):
                    break
        except Exception:
            return False
        if keys > _KEYS or steps > STEPS or (stack and stack[-1].depth > _DEPTH):
            raise UnsafeFileError(
                f"expected tensors and settings in {path}, found {_excess(keys, steps)}, which only serve to keep its "
                "reader busy: do not use the file unless you know its author"
            )
    return True


def _excess(keys: int, steps: int) -> str:
    if keys > _KEYS:
        return f"more than {_KEYS:,} keys or large numbers that may share a hash"
    return f"more than {STEPS:,} instructions" if steps > STEPS else f"containers that are {_DEPTH} deep"


def _step(code: Any, argument: Any, stack: list[_Value], memo: dict[int, _Value]) -> int:
    """Follow one instruction; returns how many keys, or numbers with few hashes, it adds."""
    name = code.name
    if name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
        memo[len(memo) if argument is None else int(argument)] = stack[-1]
        return 0
    if name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[int(argument)])
        return 0
    if name == "DUP":
        stack.append(stack[-1])
        return 0
    if name == "MARK":
        stack.append(_MARK)
        return 0
    taken = _pop(code, stack)
    if name in ("SETITEM", "SETITEMS"):
        holder, pairs = taken[0], taken[1:]
        stack.append(holder)
        _fill(holder, pairs)
        return sum(key.hashed for key in pairs[::2])
    if name in ("APPEND", "APPENDS", "ADDITEMS"):
        holder = taken[0]
        stack.append(holder)
        _fill(holder, taken[1:])
        return sum(one.hashed for one in taken[1:]) if name == "ADDITEMS" else 0
    if name == "FROZENSET":
        stack.append(_container(taken))
        return sum(one.hashed for one in taken)
    if name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "BUILD"):
        called = taken[0] if taken else _PLAIN
        stack.append(_container(taken))
        return sum(one.items for one in taken[1:]) if called.gathers else 0
    if name in ("GLOBAL", "STACK_GLOBAL"):
        last = str(argument).split(" ")[-1] if name == "GLOBAL" else taken[-1].text
        stack.append(_Value(gathers=last in _GATHERING))
        return 0
    if not code.stack_after:
        return 0
    if isinstance(argument, str | bytes):
        stack.append(_Value(hashed=False, text=argument) if argument in _GATHERING else _PLAIN)
        return 0
    if isinstance(argument, int):
        stack.append(_PLAIN)
        return int(abs(argument) >> 60 > 0)  # beyond 2**61 numbers have few different hashes
    stack.append(_PLAIN if name in ("NONE", "NEWTRUE", "NEWFALSE") else _container(taken))
    return 0


def _pop(code: Any, stack: list[_Value]) -> list[_Value]:
    """Take from the stack what an instruction reads, in order; what lies above a mark where it reads down to one."""
    count, marked = _READS[code.name]
    above: list[_Value] = []
    if marked:
        place = next(number for number in range(len(stack) - 1, -1, -1) if stack[number] is _MARK)
        above = stack[place + 1 :]
        del stack[place:]
    if not count:
        return above
    below = stack[-count:]
    del stack[-count:]
    return below + above if above else below


def _container(parts: list[_Value]) -> _Value:
    """A new value that holds others."""
    container = _Value()
    _fill(container, parts)
    return container


def _fill(holder: _Value, parts: list[_Value]) -> None:
    if holder is _PLAIN or not parts:
        return
    holder.depth = max(holder.depth, 1 + max(one.depth for one in parts))
    holder.items += sum(one.hashed + one.items for one in parts)


_FREE = 64 << 20  # bytes that any file may describe
_TIMES = 8  # and so many times its own size: tied and repeated weights are stored once


def check_plain(networks: Iterable[Mapping[str, Tensor]], path: Path) -> None:
    """Raise `UnsafeFileError` unless all tensors are plain ones in memory, and together about as large as the file."""
    total, most = 0, _FREE + _TIMES * path.stat().st_size
    for network in networks:
        for name, value in network.items():
            if reason := _unusual(name, value):
                raise UnsafeFileError(
                    f"expected plain tensors in {path}, found {name[:80]!r} {reason}: load the file yourself, if "
                    "you trust it, and pass dense copies to Population.from_states"
                )
            total += value.numel() * value.element_size()
    if total > most:
        raise UnsafeFileError(
            f"the tensors of {path} would take {total:,} bytes, which its {path.stat().st_size:,} bytes should not "
            "hold: load the file yourself, if you trust it, and pass what you need to Population.from_states"
        )


def _unusual(name: str, value: Tensor) -> str:
    if type(value) not in (Tensor, nn.Parameter):
        return f"of the class {type(value).__name__}"
    if value.is_nested or value.is_quantized or value.layout != torch.strided:  # a nested one has no shape to look at
        return "in a form that is not dense: nested, quantised or sparse"
    if not is_usual(name, value.shape):
        return f"with {value.dim()} axes, or a name that cannot be printed"
    if value.device.type != "cpu":
        return f"on the device {value.device.type}"
    return "that is a view to be negated or conjugated" if value.is_conj() or value.is_neg() else ""
