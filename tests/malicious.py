"""Files that mean harm, and marks by which one sees that they did it.

Whatever a file here would run makes a folder: the marker. Every builder takes the folder to write into and the marker,
and gives the path of its file.
"""

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

Build = Callable[[Path, Path], Path]


class Runs:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class SetsState:
    """Unpickled, its state is set by a function of its own."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __setstate__(self, state: dict[str, str]) -> None:
        os.mkdir(state["marker"])


def payloads(marker: Path) -> dict[str, Any]:
    """Values whose pickles act, each in another way."""
    code = f"import os; os.mkdir({str(marker)!r})"
    inner = pickle.dumps(Runs(os.mkdir, str(marker)))
    return {
        "mkdir": Runs(os.mkdir, str(marker)),
        "system": Runs(os.system, f"mkdir {marker}"),
        "exec": Runs(exec, code),
        "eval": Runs(eval, f"__import__('os').mkdir({str(marker)!r})"),
        "nested in a list": [[{"a": (Runs(os.mkdir, str(marker)),)}]],
        "as a key": {Runs(os.mkdir, str(marker)): 1},
        "setstate": SetsState(marker),
        "loads": Runs(pickle.loads, inner),
        "load_from_bytes": Runs(torch.storage._load_from_bytes, inner),
        "torch.load": Runs(torch.load, io.BytesIO(inner)),
        "getattr": Runs(getattr, os, "mkdir"),
        "a module": nn.Linear(1, 1),
        "a dtype's maker": Runs(np.dtype, "u1"),
    }


def bare_pickles(marker: Path) -> dict[str, bytes]:
    """Pickles written by hand, with the instructions that `pickle` seldom writes."""
    name = str(marker).encode()
    return {
        "inst": b"(S'" + name + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nS'" + name + b"'\no.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c" + bytes([len(name)]) + name + b"\x85R.",
        "newobj": b"\x80\x02cos\nmkdir\nX" + struct.pack("<I", len(name)) + name + b"\x85\x81.",
        "build": b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setstate__cos\nmkdir\nsb" + b"U"
        + bytes([len(name)]) + name + b"b.",
        "persistent": b"\x80\x02cos\nmkdir\nQ.",
        "extension": b"\x80\x02\x82\x01.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.mkdir\x93\x8c"
        + bytes([len(name)]) + name + b"\x85R.",
    }  # fmt: skip


def torch_files(folder: Path, marker: Path) -> Iterator[Path]:
    """Torch files of all three formats that hold such values."""
    weights = {"w": torch.ones(3)}
    for number, value in enumerate(payloads(marker).values()):
        for legacy in (False, True):
            path = folder / f"payload-{number}{'-legacy' if legacy else ''}.pt"
            try:
                torch.save({**weights, "extra": value}, path, _use_new_zipfile_serialization=not legacy)
            except (TypeError, pickle.PicklingError):  # an open file, a module: this one cannot be stored
                path.unlink(missing_ok=True)
                continue
            yield path
    for name, content in bare_pickles(marker).items():
        path = folder / f"bare-{name.replace(' ', '-')}.pth"
        path.write_bytes(content)
        yield path
        yield zipped_pickle(folder / f"zip-{name.replace(' ', '-')}.ckpt", content)
    yield old_tar(folder / "tar.pt", bare_pickles(marker)["stack global"])


def zipped_pickle(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A torch file of the new format around a pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(64))
    return path


def old_tar(path: Path, content: bytes) -> Path:
    """A torch file of the oldest format, which is a tar archive of pickles."""
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


# ---------------------------------------------------------------------- tensors that are more than they weigh


def swollen_tensors(folder: Path) -> Iterator[Path]:
    """Torch files that are safe to unpickle, and whose tensors are huge, nowhere, or no plain tensors."""
    one = torch.zeros(1)
    made = {
        "stride": {"w": one.expand(2**40)},
        "views": {f"w{number}": torch.zeros(2**16).expand(1000, -1) for number in range(100)},
        "meta": {"w": torch.empty(2**40, device="meta")},
        "quantized": {"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)},
        "sparse": {"w": torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (2**40,))},
        "conjugate": {"w": torch.ones(2, dtype=torch.complex64).conj()},
        "many axes": {"w": torch.zeros([1] * 90)},
        "compressed rows": {"w": torch.sparse_compressed_tensor(*_EYE, layout=torch.sparse_csr, check_invariants=True)},
        "nested": {"w": _nested(torch.strided)},
        "jagged": {"w": _nested(torch.jagged)},
    }
    for name, content in made.items():
        path = folder / f"swollen-{name.replace(' ', '-')}.pt"
        torch.save(content, path)
        yield path


_EYE = (torch.arange(4), torch.arange(3), torch.ones(3), (3, 3))


def _nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def side_bomb(path: Path, name: str, size: int) -> Path:
    """A torch file one of whose small entries, beside pickle and tensors, is packed and unpacks to `size` bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in (
            (DATA, b"\x80\x02}q\x00."),
            ("version", b"3\n"),
            ("byteorder", b"little"),
            ("data/0", bytes(64)),
        ):
            if entry != name:
                archive.writestr(zipfile.ZipInfo(f"archive/{entry}"), content)
        with archive.open(f"archive/{name}", "w", force_zip64=True) as file:
            zeros(file, size)
    return path


DATA = "data.pkl"
SIDES = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")


def colliding_tuples(count: int) -> dict[str, bytes]:
    """Pickles with tuples of one hash, as keys of dicts and sets of every making: hash(-1) is hash(-2)."""
    ones = b"".join(b"(" + b"".join(b"J" + struct.pack("<i", -1 - (number >> bit & 1)) for bit in range(16)) + b"t%s"
                    for number in range(count))  # fmt: skip
    pairs = ones.replace(b"%s", b"N")
    alone = ones.replace(b"%s", b"")
    couples = b"".join(b"(" + piece + b"tNt" for piece in pairs.split(b"tN")[:-1])
    return {
        "dict": b"\x80\x02}(" + pairs + b"u.",
        "one by one": b"\x80\x02}" + b"".join(piece + b"tNs" for piece in pairs.split(b"tN")[:-1]) + b".",
        "set of a list": b"\x80\x02c__builtin__\nset\n](" + alone + b"e\x85R.",
        "set": b"\x80\x04\x8f(" + alone + b"\x90.",
        "ordered dict of a list": b"\x80\x02ccollections\nOrderedDict\n](" + couples + b"e\x85R.",
        "named on the stack": b"\x80\x04\x8c\x08builtins\x8c\x03set\x93](" + alone + b"e\x85R.",
    }


def deep_key(depth: int) -> bytes:
    """A pickle of a dict whose key is a tuple in a tuple in a tuple ..., whose hash is computed by recursion."""
    return b"\x80\x02}()" + b"\x85" * depth + b"Nu."


def colliding_keys(path: Path, count: int) -> Path:
    """A torch file with a dict whose keys all have the same hash: each costs as much as all before it."""
    keys = b"".join(
        b"\x8a" + bytes([len(raw)]) + raw + b"N"
        for raw in ((place * (2**61 - 1)).to_bytes(12, "little") for place in range(1, count + 1))
    )
    return zipped_pickle(path, b"\x80\x02}(" + keys + b"u.")


# ---------------------------------------------------------------------- safetensors


def safetensors_file(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    """A file in this format with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def tensor(shape: list[int], start: int = 0, stop: int = 0, dtype: str = "F32") -> dict[str, Any]:
    """The entry of one tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def many_tensors(path: Path, count: int, *, scalars: bool) -> Path:
    """A file of so many tensors that hold nothing, or one number each."""
    each = 4 if scalars else 0
    header = {
        f"w{number}": tensor([] if scalars else [0], each * number, each * (number + 1)) for number in range(count)
    }
    return safetensors_file(path, header, bytes(each * count))


def bad_headers() -> dict[str, tuple[Any, bytes, int | None]]:
    """Headers that lie: (header, body, length)."""
    shard = {"onebasin": "onebasin-shard", "version": "1", "writer": "a", "sequence": "0"}
    endless = {**shard, "members": str(10**12), "checksums": "{}"}
    empty = {**shard, "members": str(2**40), "checksums": '{"w": "00000000"}'}
    one, short = b'"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}', tensor([1], 0, 4)
    return {
        "length 2**63": (b"{}", b"", 2**63),
        "length 2**64-1": (b"{}", b"", 2**64 - 1),
        "length of the whole": (b"{" * 100, b"", 100),
        "overlap": ({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12), None),
        "beyond the end": ({"a": tensor([2**40], 0, 2**42)}, bytes(8), None),
        "negative shape": ({"a": tensor([-2], 0, 8)}, bytes(8), None),
        "negative offset": ({"a": tensor([2], -8, 0)}, bytes(8), None),
        "backwards": ({"a": tensor([2], 8, 0)}, bytes(8), None),
        "overflowing shape": ({"a": tensor([2**32, 2**32, 2], 0, 8)}, bytes(8), None),
        "empty and endless": ({"a": tensor([0, 2**64 - 1])}, b"", None),
        "a thousand axes": ({"a": tensor([1] * 1000, 0, 4)}, bytes(4), None),
        "odd dtype": ({"a": tensor([2], 0, 8, "object")}, bytes(8), None),
        "twice": (b"{" + one % (2, 8) + b"," + one % (1, 4) + b"}", bytes(8), None),
        "deep": (b"[" * 100_000, b"", None),
        "a long number": (b"{" + one.replace(b"%d", b"9" * 10**6) + b"}", bytes(4), None),
        "members without tensors": ({"__metadata__": endless}, b"", None),
        "members of empty tensors": ({"__metadata__": empty, "w": tensor([2**40, 0])}, b"", None),
        "checksums that are a list": ({"__metadata__": {**empty, "checksums": "[1]"}, "w": short}, bytes(4), None),
        "checksums that are deep": ({"__metadata__": {**empty, "checksums": "[" * 10**5}, "w": short}, bytes(4), None),
        "version of 5,000 digits": ({"__metadata__": {**empty, "version": "9" * 5000}, "w": short}, bytes(4), None),
        "members of 5,000 digits": ({"__metadata__": {**empty, "members": "9" * 5000}, "w": short}, bytes(4), None),
        "sequence of 5,000 digits": ({"__metadata__": {**empty, "sequence": "9" * 5000}, "w": short}, bytes(4), None),
        "a name that steers the terminal": ({"\x1b[2J": short}, bytes(4), None),
    }  # fmt: skip


# ---------------------------------------------------------------------- archives


def network_bytes() -> bytes:
    """An honest network."""
    return save({"w": torch.ones(3)})


def tar_file(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], *, honest: bool = True) -> Path:
    """A tar archive, packed where its name ends in gz, after an honest network."""
    if honest:
        members = [(tarfile.TarInfo("net-0.safetensors"), network_bytes()), *members]
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """A member of a kind."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def bad_members(outside: Path) -> dict[str, tarfile.TarInfo]:
    """Members that no archive of networks has; `outside` is where they would be written."""
    return {
        "climbs": tarfile.TarInfo(f"../../../../../../..{outside}"),
        "climbs in the middle": tarfile.TarInfo("a/../../x.safetensors"),
        "absolute": tarfile.TarInfo(f"/{outside}"),
        "windows": tarfile.TarInfo("C:\\x.safetensors"),
        "symbolic link": special("x.safetensors", tarfile.SYMTYPE, "/etc/passwd"),
        "hard link": special("x.safetensors", tarfile.LNKTYPE, "/etc/passwd"),
        "device": special("x.safetensors", tarfile.CHRTYPE),
        "block device": special("x.safetensors", tarfile.BLKTYPE),
        "pipe": special("x.safetensors", tarfile.FIFOTYPE),
        "sparse": special("x.safetensors", tarfile.GNUTYPE_SPARSE),
        "pickle": tarfile.TarInfo("x.pt"),
        "long name": tarfile.TarInfo("a" * 5000 + ".safetensors"),
    }


def packed_bomb(path: Path, size: int) -> Path:
    """A gzipped archive with one network of zeros that unpacks to `size` bytes."""
    header = json.dumps({"w": tensor([size // 4], 0, size)}).encode()
    head = tarfile.TarInfo("n.safetensors")
    head.size = 8 + len(header) + size
    with gzip.open(path, "wb", 6) as file:
        file.write(head.tobuf())
        file.write(struct.pack("<Q", len(header)) + header)
        zeros(file, size)
        file.write(bytes(-head.size % 512 + 1024))
    return path


def pax_bomb(path: Path, size: int) -> Path:
    """An archive whose first member has an extended header of `size` bytes."""
    head = special("x", tarfile.XHDTYPE)
    head.size = size
    with gzip.open(path, "wb", 6) as file:
        file.write(head.tobuf() + f"{size} comment=".encode())
        zeros(file, size)
    return path


def zeros(file: Any, size: int) -> None:
    """Write zeros in pieces."""
    piece = bytes(1 << 20)
    for _ in range(size >> 20):
        file.write(piece)
    file.write(bytes(size % (1 << 20)))


# ---------------------------------------------------------------------- arrays and JSON


def npy(header: str | bytes, body: bytes = b"") -> bytes:
    """An .npy file with any header."""
    text = header.encode() if isinstance(header, str) else header
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def npz_files(folder: Path, marker: Path) -> Iterator[Path]:
    """.npz files with pickles, with code in headers, with lengths that lie, and bombs."""
    claims = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s,), }\n"
    code = f"__import__('os').mkdir({str(marker)!r})"
    acts = pickle.dumps(Runs(os.mkdir, str(marker)))
    made = {
        "object": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", acts),
        "code": npy(f"{{'descr': {code}, 'fortran_order': False, 'shape': (1,), }}\n"),
        "claim": npy(claims % 2**60),
        "large claim": npy(claims % 2**34),
        "overflow": npy(claims % 2**64),
        "negative": npy(claims % -1),
        "deep": npy("(" * 60_000),
        "long number": npy(claims % ("9" * 60_000)),
        "bare pickle": acts,
        "structured": npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }\n", b"x" * 8),
    }  # fmt: skip
    for name, content in made.items():
        yield zipped_arrays(folder / f"npz-{name.replace(' ', '-')}.npz", content)
    path = folder / "npz-lzma.npz"
    yield zipped_arrays(path, npy(claims % 10**6, bytes(8 * 10**6)), zipfile.ZIP_LZMA)
    bomb = folder / "npz-bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("targets.npy", npy(claims % 3, bytes(24)))
        with archive.open("inputs.npy", "w", force_zip64=True) as file:
            file.write(npy(claims % (5 << 23)))
            zeros(file, 5 << 26)
    yield bomb
    plain = folder / "npz-plain.npz"
    plain.write_bytes(made["object"])
    yield plain


def zipped_arrays(path: Path, content: bytes, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """Both arrays of examples with this content."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in ("inputs", "targets"):
            archive.writestr(f"{name}.npy", content)
    return path


def json_texts() -> dict[str, str]:
    """JSON that hangs, overflows or confuses a careless reader."""
    return {
        "deep list": "[" * 100_000 + "]" * 100_000,
        "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
        "half deep": '{"format":' + "[" * 900 + "]" * 900 + "}",
        "long number": "9" * 1_000_000,
        "long number inside": '{"format": ' + "9" * 1_000_000 + "}",
        "huge exponent": '{"version": 1e999999999}',
        "nan": '{"version": NaN, "format": Infinity}',
        "twice": '{"format": "onebasin-population", "format": 1, "version": 1}',
        "long text": json.dumps({"format": "a" * 5_000_000}),
        "lone surrogate": '{"format": "\\ud800", "spec": {"\\ud800": 1}}',
        "a number": "3",
        "a list": "[]",
        "null": "null",
        "nothing": "",
        "binary": "\x00\x01",
    }
