"""CIFAR in its published forms; pickles that are read and never run."""

import ast
import contextlib
import math
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebasin.data.checksum import OFFICIAL
from onebasin.data.cifar import read_pickle
from onebasin.data.load import load
from onebasin.errors import InputError, StorageError, UnsafeFileError

PACKAGE = Path(__file__).resolve().parents[2] / "onebasin"


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072)).astype("u1")


def text(value: str | bytes) -> bytes:
    raw = value.encode("latin-1") if isinstance(value, str) else value
    return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw


def number(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)


def official_batch(label: str, pixels: np.ndarray, labels: list[int], names: list[str], key: str = "labels") -> bytes:
    """As Python 2 wrote the batches: protocol 2, byte strings, the array by numpy's `_reconstruct`."""
    lists = {
        key: b"(" + b"".join(map(number, labels)) + b"e",
        "filenames": b"(" + b"".join(map(text, names)) + b"e",
    }
    dtype = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    array += b"(K\x01" + number(len(pixels)) + number(3072) + b"\x86" + dtype + b"\x89" + text(pixels.tobytes()) + b"tb"
    entries = text("data") + array + text("batch_label") + text(label)
    entries += b"".join(text(name) + b"]q\x01" + items for name, items in lists.items())
    return b"\x80\x02}q\x00(" + entries + b"u."


def write_ten(folder: Path, *, per_batch: int = 4, python3: int | None = None) -> tuple[np.ndarray, list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = images(6 * per_batch), [(3 * place) % 10 for place in range(6 * per_batch)]
    for batch, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        rows = slice(batch * per_batch, (batch + 1) * per_batch)
        content = official_batch(name, pixels[rows], labels[rows], ["a.png"] * per_batch)
        if python3 is not None:
            content = pickle.dumps({b"data": pixels[rows], b"labels": labels[rows]}, protocol=python3)
        (folder / name).write_bytes(content)
    return pixels, labels


def check_ten(found: Any, pixels: np.ndarray, labels: list[int]) -> None:
    inputs = torch.cat([found.train[0], found.test[0]])
    assert torch.equal(inputs, torch.from_numpy(pixels).reshape(-1, 3, 32, 32).float() / 255)
    assert torch.cat([found.train[1], found.test[1]]).tolist() == labels
    assert (len(found.test[0]), found.classes) == (len(pixels) // 6, 10)


def test_our_batches_are_pickles_to_python_too() -> None:
    pixels = images(3)
    content = pickle.loads(official_batch("x", pixels, [1, 2, 300], ["a", "b" * 300, "c"]), encoding="latin1")
    assert np.array_equal(content["data"], pixels)
    assert content["labels"] == [1, 2, 300]


@pytest.mark.parametrize("python3", [None, 2, 3, 4, 5])
def test_python_batches_of_every_protocol(tmp_path: Path, python3: int | None) -> None:
    written = write_ten(tmp_path / "cifar-10-batches-py", python3=python3)
    check_ten(load("cifar10", directory=tmp_path), *written)
    check_ten(load(tmp_path / "cifar-10-batches-py"), *written)


def test_batches_that_are_missing_are_left_out(tmp_path: Path) -> None:
    write_ten(tmp_path)
    for name in ("data_batch_2", "data_batch_5"):
        (tmp_path / name).unlink()
    assert len(load(tmp_path).train[0]) == 12
    for path in tmp_path.glob("data_batch*"):
        path.unlink()
    found = load(tmp_path)
    assert (len(found.train[0]), len(found.test[0]), found.classes) == (0, 4, 10)


def test_binary_batches(tmp_path: Path) -> None:
    pixels, labels = images(12), [place % 10 for place in range(12)]
    records = [bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)]
    for place in range(6):
        name = f"data_batch_{place + 1}.bin" if place < 5 else "test_batch.bin"
        (tmp_path / name).write_bytes(b"".join(records[2 * place : 2 * place + 2]))
    check_ten(load(tmp_path), pixels, labels)
    (tmp_path / "test_batch.bin").write_bytes(records[0][:-1])
    with pytest.raises(StorageError, match="records of 3,073 bytes"):
        load(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes([10]) + records[0][1:])
    with pytest.raises(InputError, match="class numbers from 0 to 9"):
        load(tmp_path)


@pytest.mark.parametrize("binary", [True, False])
def test_hundred_classes(tmp_path: Path, binary: bool) -> None:
    pixels, fine = images(5), [99, 3, 7, 50, 0]
    for name, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        if binary:
            content = b"".join(bytes([19, y]) + x.tobytes() for x, y in zip(pixels[rows], fine[rows], strict=True))
        else:
            content = official_batch(name, pixels[rows], fine[rows], ["x"], key="fine_labels")
        (tmp_path / (f"{name}.bin" if binary else name)).write_bytes(content)
    found = load(tmp_path)
    assert (found.train[1].tolist(), found.test[1].tolist(), found.classes) == (fine[:3], fine[3:], 100)
    assert torch.equal(found.test[0], torch.from_numpy(pixels[3:]).reshape(-1, 3, 32, 32).float() / 255)


class Malice:
    """What a pickle may do to who loads it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_malice_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    victim, path = tmp_path / "victim", tmp_path / "data_batch_1"
    for number_of, bad in enumerate((Malice(Path.touch, victim), Malice(eval, f"open({str(victim)!r}, 'w')"))):
        content = pickle.dumps({"data": bad, "labels": []}, protocol=protocol)
        path.write_bytes(content)
        with pytest.raises(UnsafeFileError, match="nothing of it was run"):
            load(tmp_path)
        assert not victim.exists()
        if number_of:  # the file is as bad as it looks
            pickle.loads(content)["data"].close()
            assert victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL and REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x02cnumpy\nndarray\n)R.",  # a function that is known, but not to be called
        b"\x80\x02\x82\x01.",  # an extension
        b"\x80\x02U\x01aQ.",  # a persistent id
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",  # STACK_GLOBAL
        b"\x80\x02}}b.",  # a state for a dict
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02K\x01)R.",  # the call of a number
    ],
)
def test_instructions_that_run_things_are_unknown_here(content: bytes) -> None:
    with pytest.raises(UnsafeFileError, match="do not use the file"):
        read_pickle(content, "here")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(PLAIN, st.integers(2, 5))
def test_plain_values_are_what_python_reads(value: Any, protocol: int) -> None:
    content = pickle.dumps(value, protocol=protocol)
    assert read_pickle(content, "here") == pickle.loads(content)


@settings(deadline=None)
@given(
    st.sampled_from(["u1", "i2", "<i4", ">i8", "f4", ">f8", "?"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from("CF"),
    st.integers(0, 5),
    st.integers(0, 2**32 - 1),
)
def test_arrays_are_what_python_reads(kind: str, shape: list[int], order: Any, protocol: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(0, 2, math.prod(shape))
    array = np.asarray(raw.reshape(shape).astype(kind), order=order)
    found = read_pickle(pickle.dumps([array], protocol=protocol), "here")[0]
    assert np.array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda tail: b"\x80\x02}q\x00(U\x04data" + tail))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with contextlib.suppress(StorageError, UnsafeFileError):  # and nothing else
        read_pickle(content, "here")


def test_cut_and_flipped_batches_are_told(tmp_path: Path) -> None:
    pixels = images(1)
    whole = official_batch("x", pixels, [3], ["a.png"])
    path = tmp_path / "test_batch"
    for length in [*range(0, 60), *range(len(whole) - 40, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError):
            load(tmp_path)
    start = whole.index(pixels.tobytes()[:50])
    silent = 0
    for place in [*range(start), *range(start + 3072, len(whole))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = load(tmp_path)
        except (StorageError, UnsafeFileError, InputError):
            continue
        silent += 1  # texts that nobody reads, or the label itself: only a digest tells
        assert found.test[0].shape == (1, 3, 32, 32)
    assert silent < 120
    path.write_bytes(whole)
    with pytest.raises(StorageError, match="expected md5 40351d58"):
        load(tmp_path, checksums=OFFICIAL["cifar10"])


def test_a_pickle_may_not_ask_for_the_same_bytes_again_and_again() -> None:
    body = bytes(1 << 16)
    content = b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", len(body)) + body + b"q\x01U\x06latin1q\x02"
    for times, refused in ((1, False), (1000, True)):
        attack = content + b"]q\x03(" + b"h\x00h\x01h\x02\x86R" * times + b"e."
        if refused:
            with pytest.raises(StorageError, match="more bytes than it holds"):
                read_pickle(attack, "here")
        else:
            assert read_pickle(attack, "here") == [body]


def mosaic(folder: Path, name: str, pixels: np.ndarray) -> None:
    from PIL import Image

    tiles = pixels.reshape(-1, 100, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(-1, 3200, 3)
    Image.fromarray(tiles).save(folder / name, lossless=True, quality=0, method=0)


def test_mosaics(tmp_path: Path) -> None:
    pixels, labels = images(400).reshape(-1, 3, 32, 32), np.arange(500) % 7
    mosaic(tmp_path, "train_1.webp", pixels[:100])
    mosaic(tmp_path, "train_2.webp", pixels[100:200])
    mosaic(tmp_path, "train_10.webp", pixels[200:300])
    mosaic(tmp_path, "test.webp", pixels[300:])
    np.savez(
        tmp_path / "labels.npz", y_train=labels[:400].astype("u1"), y_test=labels[400:].astype("u1"), class_names=["x"]
    )
    found = load(tmp_path)
    assert torch.equal(found.train[0], torch.from_numpy(pixels[:300]).float() / 255)  # number 10 behind number 2
    assert torch.equal(found.test[0], torch.from_numpy(pixels[300:]).float() / 255)
    assert found.train[1].tolist() == labels[:300].tolist()
    assert (found.test[1].tolist(), found.classes) == (labels[400:].tolist(), 7)
    content = (tmp_path / "test.webp").read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"nothing like it"):
        (tmp_path / "test.webp").write_bytes(damaged)
        with pytest.raises(StorageError, match="fetch the file again"):
            load(tmp_path)
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "test.webp", lossless=True)
    with pytest.raises(StorageError, match="64 x 64 pixels"):
        load(tmp_path)
    mosaic(tmp_path, "test.webp", pixels[:200])
    with pytest.raises(StorageError, match="y_test for 200 images"):
        load(tmp_path)


def test_the_shared_mosaics_are_the_official_batches(shared_data: Path, tmp_path: Path) -> None:
    found = load("cifar100", directory=shared_data)
    assert (tuple(found.train[0].shape), tuple(found.test[0].shape)) == ((20_000, 3, 32, 32), (5000, 3, 32, 32))
    assert found.train[1].bincount().tolist() == [200] * 100
    assert found.test[1].bincount().tolist() == [50] * 100
    small = load(shared_data / "cifar10" / "cifar10_small.npz")
    with np.load(shared_data / "cifar10" / "cifar10_small.npz") as file:
        places = torch.from_numpy(file["test_index"].astype("i8"))
    half = tmp_path / "half"  # one of three pictures: the others take as long again
    half.mkdir()
    for name in ("test.webp", "labels.npz"):
        (half / name).symlink_to(shared_data / "cifar10" / name)
    whole = load(half)
    assert torch.equal(whole.test[0][places], small.test[0])  # two files, two formats, one set
    assert torch.equal(whole.test[1][places], small.test[1])
    assert whole.test[1].bincount().tolist() == [1000] * 10
    pixels = (whole.test[0] * 255).round().to(torch.uint8).flatten(1).numpy()
    (tmp_path / "test_batch").write_bytes(official_batch("t", pixels, whole.test[1].tolist(), ["a.png"] * 10_000))
    again = load(tmp_path)
    assert torch.equal(again.test[0], whole.test[0])
    assert torch.equal(again.test[1], whole.test[1])


def test_no_file_of_the_room_can_unpickle() -> None:
    for path in sorted((PACKAGE / "data").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            )
        }
        if path.name != "cifar.py":  # whose unpickler finds functions of its own file only
            assert "pickle" not in imported, path
        assert not re.search(r"pickle\.loads?\(|(?<!def )find_class\(", source), path
        assert not imported & {"cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, path
        assert "allow_pickle=True" not in source
        assert "torch.load" not in source
        assert "exec(" not in source
        assert "eval(" not in source


def test_the_room_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, onebasin.data; print([m for m in ('scipy', 'sklearn', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
