"""Damage to files: of bytes, and of what the bytes mean.

Bytes are flipped, cut, repeated and replaced by numbers at the edge of what fits. As most of that ends at the first
checksum, the shells of a file are opened first: what gzip, zip, tar and safetensors hold is damaged and packed again
with correct lengths and sums, and JSON is damaged as a tree.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

SIZES = (0, 1, 2, 7, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63)
STRANGE: tuple[Any, ...] = (
    *SIZES, -1, -(2**63), 2**64, 10**30, 1e308, -0.0, 1e-320, float("nan"), float("inf"), 1.5, True, False, None,
    "", "x", "\x00", "\x1b[2J", "../../x", "<script>", "$\\frac{", "\ud800", "9" * 50, "torch", "float32", "__class__",
    [], {}, [[]], [None], {"": None}, [0] * 100, "a" * 10_000, "[" * 1000,
)  # fmt: skip
_ENDS = ("<", ">")


def mutate(content: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A damaged copy; `others` are contents to splice with."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = _shell(content, chance, others)
    return content


def _shell(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    for fits, inside in _SHELLS:
        if fits(content) and chance.random() < 0.8:
            try:
                return inside(content, chance)
            except Exception:
                break  # an earlier step has broken this shell, in one of many ways
    return _damage(content, chance, others)


def _damage(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    if others and chance.random() < 0.08:
        other = chance.choice(others)
        return content[: chance.randrange(len(content) + 1)] + other[chance.randrange(len(other) + 1) :]
    return chance.choice(_BYTES)(content, chance)


# ---------------------------------------------------------------------- bytes


def _place(content: bytes, chance: random.Random) -> int:
    """Anywhere; the beginning and the end, where heads and tables lie, more often."""
    if chance.random() < 0.4:
        return min(len(content), chance.randrange(64))
    if chance.random() < 0.2:
        return max(0, len(content) - chance.randrange(1, 64))
    return chance.randrange(len(content) + 1)


def _span(content: bytes, chance: random.Random) -> tuple[int, int]:
    start = _place(content, chance)
    return start, min(len(content), start + chance.choice((1, 2, 4, 8, 64, 512, 4096)))


def _flip(content: bytes, chance: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = _place(content, chance)
        if place < len(made):
            made[place] ^= 1 << chance.randrange(8)
    return bytes(made)


def _truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: _place(content, chance)]


def _delete(content: bytes, chance: random.Random) -> bytes:
    start, stop = _span(content, chance)
    return content[:start] + content[stop:]


def _repeat(content: bytes, chance: random.Random) -> bytes:
    start, stop = _span(content, chance)
    return content[:stop] + content[start:stop] * chance.choice((1, 2, 30)) + content[stop:]


def _insert(content: bytes, chance: random.Random) -> bytes:
    start = _place(content, chance)
    piece = chance.choice((b"\0", b"\xff", b"[", b"{", b'"', b",", b"\n")) * chance.choice((1, 3, 500, 20_000))
    return content[:start] + chance.choice((piece, chance.randbytes(chance.randrange(1, 40)))) + content[start:]


def _length(content: bytes, chance: random.Random) -> bytes:
    """A number of two, four or eight bytes at the edge of something."""
    code = chance.choice("HIQ")
    field = struct.pack(chance.choice(_ENDS) + code, chance.choice(SIZES) % 2 ** (8 * struct.calcsize(code)))
    start = _place(content, chance)
    return content[:start] + field + content[start + len(field) :]


def _digits(content: bytes, chance: random.Random) -> bytes:
    """Another number where one is written."""
    places = [place for place, byte in enumerate(content[:20_000]) if 48 <= byte <= 57]
    if not places:
        return _flip(content, chance)
    start = chance.choice(places)
    stop = start
    while stop < len(content) and 48 <= content[stop] <= 57:
        stop += 1
    number = chance.choice((*SIZES, -1, 10**30, "9" * 5000, "nan", "1e400"))
    return content[:start] + str(number).encode() + content[stop:]


_BYTES = (_flip, _flip, _truncate, _delete, _repeat, _insert, _length, _length, _digits)


# ---------------------------------------------------------------------- trees


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one place changed."""
    places = list(_places(tree))
    if not places:
        return chance.choice(STRANGE)
    holder, key = chance.choice(places)
    action = chance.randrange(10)
    if action < 1:
        del holder[key]
    elif action < 2:
        other, where = chance.choice(places)
        holder[key], other[where] = other[where], holder[key]
    elif action < 3 and isinstance(holder, dict):
        holder[str(chance.choice(STRANGE))] = holder.pop(key)
    elif action < 3:
        holder.insert(key, holder[key])
    elif action < 4:
        for _ in range(chance.choice((3, 100, 700))):
            holder[key] = [holder[key]]
    else:
        holder[key] = _changed(holder[key], chance)
    return tree


def _changed(value: Any, chance: random.Random) -> Any:
    """Something else of the same kind, or anything."""
    if isinstance(value, str) and value[:1] in ("{", "["):  # JSON in JSON
        try:
            return json.dumps(mutate_tree(json.loads(value), chance))
        except ValueError:
            return chance.choice(STRANGE)
    if isinstance(value, bool) or chance.random() < 0.4:
        return chance.choice(STRANGE)
    if isinstance(value, int | float):
        return chance.choice((value + 1, value - 1, -value, value * 1000, *SIZES))
    if isinstance(value, str):
        return chance.choice((value[1:], value + "x", value * 3, str(chance.choice(SIZES)), value.upper()))
    return chance.choice(STRANGE)


def _places(tree: Any) -> Any:
    """(container, key) of every value below."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


# ---------------------------------------------------------------------- shells


def _in_json(content: bytes, chance: random.Random) -> bytes:
    return json.dumps(mutate_tree(json.loads(content), chance)).encode()


def _in_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Damage in the header, with the right length, or a valid file with other tensors and texts."""
    length = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + length], content[8 + length :]
    if chance.random() < 0.7:
        header, body = _retold(json.loads(header), body, chance)
    else:
        header = chance.choice((_in_json, _digits))(header, chance)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


_ALIKE = (("F64", "I64", "U64"), ("F32", "I32", "U32"), ("F16", "BF16", "I16", "U16"), ("I8", "U8", "BOOL", "F8_E4M3"))
_EDGES = (b"\0", b"\xff", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\0\0\0\xf0\x7f", b"\1\0\0\0")


def _retold(header: dict[str, Any], body: bytes, chance: random.Random) -> tuple[bytes, bytes]:
    """Another valid header and body: what a forger would write."""
    texts = header.pop("__metadata__", {})
    rows = [
        [name, entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]] for name, entry in header.items()
    ]
    if texts and chance.random() < 0.5:
        name = chance.choice(list(texts))
        texts[name] = str(_changed(texts[name], chance))
        if chance.random() < 0.1:
            del texts[name]
        if chance.random() < 0.1:
            texts[name] = "9" * 5000
    elif rows and chance.random() < 0.01:
        many = chance.choice((1000, 60_000))  # tensors that hold nothing, or one number
        each = chance.choice(([[0], b""], [[], bytes(4)]))
        rows += [[f"many{number}", "F32", *each] for number in range(many)]
    elif rows:
        _retell(rows, chance.randrange(len(rows)), chance)
    made: dict[str, Any] = {"__metadata__": texts} if texts else {}
    end = 0
    for name, code, shape, piece in rows:
        made[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + len(piece)]}
        end += len(piece)
    return json.dumps(made).encode(), b"".join(piece for *_, piece in rows)


def _retell(rows: list[list[Any]], place: int, chance: random.Random) -> None:
    """Change one tensor: its name, type, shape or values."""
    name, code, shape, piece = rows[place]
    action = chance.randrange(7)
    if action == 0:
        rows[place][0] = chance.choice(
            (name + "x", "onebasin.chain", "\x1b[2J", "a" * 3000, "", rows[0][0] + ".y", "../x")
        )
    elif action == 1:
        del rows[place]
    elif action == 2:
        rows[place][1] = chance.choice(next((kind for kind in _ALIKE if code in kind), (code,)))
    elif action == 3:
        rows[place][2] = chance.choice((shape[::-1], [*shape, 1], [1, *shape], [1] * 70 + shape, [math.prod(shape)]))
    elif action == 4:
        rows[place][2:] = [chance.choice(([0], [0, 2**62], [2**40, 0], [0, 2**64 - 1], [*shape, 0], [1, 0])), b""]
    elif action == 5:
        edge = chance.choice(_EDGES)
        rows[place][3] = (edge * len(piece))[: len(piece)]
    else:
        shorter = [max(0, shape[0] - 1), *shape[1:]] if shape else []
        rows[place][2:] = [shorter, piece[: len(piece) // max(1, math.prod(shape)) * math.prod(shorter)]]


def _in_gzip(content: bytes, chance: random.Random) -> bytes:
    return gzip.compress(_shell(gzip.decompress(content), chance, ()), 1, mtime=0)


def _colliding(chance: random.Random) -> bytes:
    """A pickle of a dict or set with thousands of keys of one hash: hash(-1) is hash(-2)."""
    count = chance.choice((10, 2000, 20_000))
    keys = [
        b"(" + b"".join(b"J" + struct.pack("<i", -1 - (number >> bit & 1)) for bit in range(16)) + b"t"
        for number in range(count)
    ]
    if chance.random() < 0.5:
        return b"\x80\x02}(" + b"N".join(keys) + b"Nu."
    return b"\x80\x02c__builtin__\nset\n](" + b"".join(keys) + b"e\x85R."


def _deep(chance: random.Random) -> bytes:
    """A pickle of a dict whose key is a tuple in a tuple in a tuple ..."""
    return b"\x80\x02}()" + b"\x85" * chance.choice((5, 90, 3000, 200_000)) + b"Nu."


_PICKLES = (_colliding, _deep)


def _in_zip(content: bytes, chance: random.Random) -> bytes:
    """One member damaged, all sums right."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    if not files:
        return _flip(content, chance)
    pickles = [name for name in files if name.endswith(".pkl")]
    chosen = chance.choice(pickles if pickles and chance.random() < 0.6 else list(files))
    if pickles and chance.random() < 0.1:
        files[pickles[0]] = chance.choice(_PICKLES)(chance)
    elif pickles and chance.random() < 0.1:
        side = chance.choice(("byteorder", "version", ".format_version", ".data/serialization_id"))
        files[f"{pickles[0].split('/')[0]}/{side}"] = bytes(chance.choice((1 << 10, 1 << 20, 1 << 27)))
    else:
        files[chosen] = _shell(files[chosen], chance, ())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, value in files.items():
            if name != chosen or chance.random() < 0.95:
                archive.writestr(name, value)
    return made.getvalue()


def _inside_tar(content: bytes, chance: random.Random) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content)) as before, tarfile.open(fileobj=made, mode="w") as after:
        members = before.getmembers()
        chosen = chance.randrange(len(members))
        for number, member in enumerate(members):
            file = before.extractfile(member)
            inside = file.read() if file else b""
            inside = _shell(inside, chance, ()) if number == chosen else inside
            member.size = len(inside)
            after.addfile(member, io.BytesIO(inside))
    return made.getvalue()


def _in_tar(content: bytes, chance: random.Random) -> bytes:
    """One field of one head damaged, its sum right; or one file inside."""
    if chance.random() < 0.4:
        return _inside_tar(content, chance)
    heads = [place for place in range(0, len(content) - 511, 512) if content[place + 257 : place + 262] == b"ustar"]
    if not heads:
        return _flip(content, chance)
    start = chance.choice(heads)
    head = bytearray(content[start : start + 512])
    field, size = chance.choice(((0, 100), (100, 8), (108, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)))
    filler = chance.choice(
        (b"\0", b"7", b"-1", b"../", b"/etc/x", b"\x80\0\0\1", b"\xff", b"2", b"x", b"L", b"K", b"g")
    )
    head[field : field + size] = (filler * size)[: chance.randrange(1, size + 1)].ljust(size, b"\0")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return content[:start] + bytes(head) + content[start + 512 :]


def _is_safetensors(content: bytes) -> bool:
    return content[8:9] == b"{" and int.from_bytes(content[:8], "little") <= len(content)


_SHELLS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes, random.Random], bytes]], ...] = (
    (lambda content: content[:2] == b"\x1f\x8b", _in_gzip),
    (lambda content: content[:4] == b"PK\x03\x04", _in_zip),
    (lambda content: content[257:262] == b"ustar", _in_tar),
    (_is_safetensors, _in_safetensors),
    (lambda content: content.lstrip()[:1] in (b"{", b"["), _in_json),
)
