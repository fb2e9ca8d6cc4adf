"""IDX files and their folders: what is written is read, and what is damaged is told."""

import gzip
import hashlib
import math
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebasin.data.checksum import OFFICIAL
from onebasin.data.idx import TYPES, read_idx
from onebasin.data.load import load
from onebasin.errors import InputError, StorageError

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def idx_bytes(values: np.ndarray) -> bytes:
    """Written from the format's description, not from the reader."""
    codes = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
    head = bytes([0, 0, codes[values.dtype.str[1:]], values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write_set(folder: Path, *, packed: bool = True, train: int = 6, test: int = 4) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": generator.integers(0, 256, (train, 5, 7)).astype("u1"),
        "train-labels-idx1-ubyte": (np.arange(train) % 3).astype("u1"),
        "t10k-images-idx3-ubyte": generator.integers(0, 256, (test, 5, 7)).astype("u1"),
        "t10k-labels-idx1-ubyte": (np.arange(test) % 3).astype("u1"),
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


@SETTINGS
@given(
    st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_what_was_written_is_read(tmp_path: Path, kind: str, shape: list[int], packed: bool, seed: int) -> None:
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(kind).itemsize)
    values = np.frombuffer(raw, kind).reshape(shape)
    content = idx_bytes(values)
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    found = read_idx(path).numpy()
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()  # also for NaN
    assert found.shape == values.shape


@SETTINGS
@given(st.binary(max_size=40), st.booleans())
def test_any_other_bytes_are_a_sentence(tmp_path: Path, content: bytes, packed: bool) -> None:
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    try:
        found = read_idx(path)
    except StorageError as error:
        told = str(error)
    else:
        assert content[:2] == b"\0\0"
        assert content[2] in TYPES
        assert found.numel() * found.element_size() + 4 + 4 * found.dim() == len(content)
        return
    assert str(path) in told
    assert "again" in told


@SETTINGS
@given(st.sampled_from(sorted(TYPES)), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), st.booleans())
def test_a_header_that_promises_too_much_costs_nothing(
    tmp_path: Path, kind: int, shape: list[int], packed: bool
) -> None:
    content = bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + b"\1\2"
    size = math.prod(shape) * np.dtype(TYPES[kind]).itemsize
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    if size == 2:
        assert read_idx(path).numel() in (1, 2)
        return
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match=r"cannot hold|bytes after the header|found the shape"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_every_byte_of_the_first_four_counts(tmp_path: Path, place: int) -> None:
    content = bytearray(idx_bytes(np.arange(6, dtype="u1")))
    content[place] = 0x0A
    path = tmp_path / "values"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=f"found {content[:4].hex(' ')} in"):
        read_idx(path)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    # 60 MB of zeros in 60 kB, behind a header that promises 40 bytes.
    head = bytes([0, 0, 8, 1]) + struct.pack(">I", 40)
    path = tmp_path / "values.gz"
    path.write_bytes(gzip.compress(head + bytes(60 << 20), 9))
    tracemalloc.start()
    with pytest.raises(StorageError, match="expected 40 bytes"):
        read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_every_flipped_bit_and_every_cut_of_a_gzipped_file_is_noticed(tmp_path: Path) -> None:
    whole = gzip.compress(idx_bytes(np.arange(24, dtype="u1").reshape(2, 3, 4)), mtime=0)
    path = tmp_path / "values.gz"
    path.write_bytes(whole)
    good = read_idx(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError):
            read_idx(path)
    unnoticed = []
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert torch.equal(read_idx(path), good), "other values without a word"
            unnoticed.append(bit // 8)
        except StorageError:
            continue
    # Flags, time stamp and system in gzip's header, and the bits that fill up the last byte, carry no content.
    assert set(unnoticed) <= {3, 4, 5, 6, 7, 8, 9, len(whole) - 9}


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_is_a_data_set(tmp_path: Path, packed: bool) -> None:
    arrays = write_set(tmp_path / "mine", packed=packed)
    found = load(tmp_path / "mine")
    for (inputs, targets), part in ((found.train, "train"), (found.test, "t10k")):
        pixels = torch.from_numpy(arrays[f"{part}-images-idx3-ubyte"])
        assert torch.equal(inputs, pixels[:, None].float() / 255)
        assert inputs.dtype == torch.float32
        assert targets.tolist() == arrays[f"{part}-labels-idx1-ubyte"].tolist()
        assert targets.dtype == torch.int64
    assert (found.name, found.classes) == ("mine", 3)


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "mnist/raw"])
def test_a_word_finds_its_folder(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / place)
    monkeypatch.setenv("ONEBASIN_DATA", str(tmp_path))
    assert len(load("mnist").train[0]) == 6
    write_set(tmp_path / "other" / place, train=9)
    assert len(load("mnist", directory=tmp_path / "other").train[0]) == 9


def test_names_of_other_sets_and_both_forms_of_one_file(tmp_path: Path) -> None:
    arrays = write_set(tmp_path, packed=True)
    for name, array in arrays.items():  # torchvision leaves the unpacked files beside the packed ones
        (tmp_path / name).write_bytes(idx_bytes(array))
    assert len(load(tmp_path).test[0]) == 4
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / f"emnist-{path.name}")
    assert len(load(tmp_path).train[0]) == 6
    for path in list(tmp_path.glob("*t10k*")):
        path.rename(tmp_path / path.name.replace("t10k", "test"))
    assert len(load(tmp_path).test[0]) == 4
    for path in list(tmp_path.glob("*-test-*")):
        path.unlink()
    found = load(tmp_path)  # only training files: divided at random
    assert (len(found.train[0]), len(found.test[0])) == (4, 2)


def test_digests_beside_the_data_or_as_an_argument(tmp_path: Path) -> None:
    write_set(tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    digests = {name: hashlib.new(name, path.read_bytes()).hexdigest() for name in ("md5", "sha1", "sha256")}
    for text in digests.values():
        load(tmp_path, checksums={path.name: text.upper()})
    with pytest.raises(StorageError, match=r"expected md5 0{32} of .*as given"):
        load(tmp_path, checksums={path.name: "0" * 32})
    with pytest.raises(InputError, match="copy the whole digest"):
        load(tmp_path, checksums={path.name: "12ab"})
    for name, lines in {
        "SHA256SUMS": f"{digests['sha256']}  {path.name}\n{'0' * 64}  another\n",
        "MD5SUMS": f"{digests['md5']} *./{path.name}\n",
        f"{path.name}.md5": digests["md5"],
        f"{path.name}.sha256": f"{digests['sha256']}  {path.name}\n",
    }.items():
        (tmp_path / name).write_text(lines)
        load(tmp_path)
        digest = digests["md5" if "md5" in name.lower() else "sha256"]
        (tmp_path / name).write_text(lines.replace(digest, "1" * len(digest)))
        with pytest.raises(StorageError, match=f"in {name}.*fetch it again"):
            load(tmp_path)
        (tmp_path / name).unlink()


def test_missing_files_and_folders_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEBASIN_DATA", raising=False)
    with pytest.raises(InputError, match=r"--data-dir.*ONEBASIN_DATA"):
        load("mnist")
    with pytest.raises(StorageError, match=r"as the data folder.*absent"):
        load("mnist", directory=tmp_path / "absent")
    monkeypatch.setenv("ONEBASIN_DATA", str(tmp_path / "absent"))
    with pytest.raises(StorageError, match="in ONEBASIN_DATA"):
        load("mnist")
    with pytest.raises(StorageError, match=r"looked for mnist, MNIST/raw.*train-images-idx3-ubyte.gz"):
        load("mnist", directory=tmp_path)
    (tmp_path / "mnist").mkdir()
    with pytest.raises(StorageError, match="found nothing: put the files there"):
        load("mnist", directory=tmp_path)
    write_set(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"one of labels for test.*t10k-images-idx3-ubyte.gz"):
        load("mnist", directory=tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    with pytest.raises(StorageError, match="found nothing in"):  # a file of no bytes, which must not be passed over
        load("mnist", directory=tmp_path)
    write_set(tmp_path / "mnist", train=8)
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(idx_bytes(np.zeros(7, "u1")))
    with pytest.raises(InputError, match="8 inputs and 7 targets"):
        load("mnist", directory=tmp_path)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mnist", [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
        ("fashion-mnist", [1000] * 10),
    ],
)
def test_the_official_files(shared_data: Path, name: str, counts: list[int]) -> None:
    found = load(name, directory=shared_data, checksums=OFFICIAL[name])
    assert found.train[0].shape == (60_000, 1, 28, 28)
    assert found.test[1].bincount().tolist() == counts  # as published
    assert found.classes == 10
    assert (float(found.train[0].min()), float(found.train[0].max())) == (0.0, 1.0)
    with pytest.raises(StorageError, match="damaged or another one"):
        load(name, directory=shared_data, checksums=OFFICIAL["mnist" if name != "mnist" else "fashion-mnist"])
