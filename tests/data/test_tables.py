"""Tables, arrays and functions as data sets, and how words find them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebasin.data.dataset import Dataset, split
from onebasin.data.load import Reading, digits, load, read_parts
from onebasin.errors import InputError, StorageError, UnsafeFileError

X = np.arange(24.0).reshape(8, 3)
Y = np.arange(8.0) ** 2


def save(path: Path, **arrays: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def test_digits_are_divided_by_the_number_of_the_split() -> None:
    for number in (0, 3):
        found, wanted = load("digits", split=number), split(*digits(), test=0.25, seed=number)
        assert all(
            torch.equal(a, b) for a, b in zip((*found.train, *found.test), (*wanted[0], *wanted[1]), strict=True)
        )
    assert found.classes == 10
    assert read_parts("digits").test is None


def test_published_splits_by_number(tmp_path: Path) -> None:
    rows = np.array([[0, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3, 2]], dtype="u2")
    held = np.array([[6, 7], [1, 0]], dtype="u2")
    path = save(tmp_path / "uci" / "small.npz", X=X, y=Y, train_idx=rows, test_idx=held, ref_mcdropout_ll=np.zeros(2))
    for number in (0, 1):
        for found in (load("uci/small", directory=tmp_path, split=number), load(path, split=number)):
            assert found.train[0].numpy().tolist() == X[rows[number]].tolist()  # in the published order
            assert found.test[1].numpy().tolist() == Y[held[number], None].tolist()
            assert (found.train[0].dtype, found.train[1].dtype) == (torch.float32, torch.float32)
            assert found.classes is None
    for wrong in (2, 17):
        with pytest.raises(InputError, match=r"2 splits, .*give a number from 0 to 1"):
            load("uci/small", directory=tmp_path, split=wrong)
    with pytest.raises(InputError, match="from 0 on"):
        load("uci/small", directory=tmp_path, split=-1)


def test_folds_official_tests_and_tables_without_splits(tmp_path: Path) -> None:
    mask = np.eye(8, dtype=bool)
    save(tmp_path / "uci" / "folds.npz", X=X, y=Y, test_mask=mask)
    for number in range(8):
        found = load("uci/folds", directory=tmp_path, split=number)
        assert found.test[0].tolist() == X[[number]].tolist()
        assert len(found.train[0]) == 7
    save(tmp_path / "uci" / "official.npz", X=X, y=Y.astype("u1") % 3, is_test=mask[2])
    found = load("uci/official", directory=tmp_path)
    assert (found.test[0].tolist(), found.classes) == (X[[2]].tolist(), 2)
    with pytest.raises(InputError, match="1 splits"):
        load("uci/official", directory=tmp_path, split=1)
    save(tmp_path / "uci" / "plain.npz", X=X, y=Y)
    tests = [load("uci/plain", directory=tmp_path, split=number).test[0] for number in range(4)]
    assert all(len(test) == 2 for test in tests)
    assert any(not torch.equal(tests[0], test) for test in tests[1:])


def test_categories_become_columns(tmp_path: Path) -> None:
    categories = np.array([[0, 1], [2, 0], [1, 1], [0, 0]], dtype="u1")
    save(tmp_path / "uci" / "mixed.npz", X_num=X[:4, :1], X_cat=categories, y=np.array([0, 1, 0, 1], dtype="u1"))
    parts = read_parts("uci/mixed", Reading(tmp_path))
    assert parts.train is not None
    assert parts.train[0].tolist() == [[0, 1, 0, 0, 0, 1], [3, 0, 0, 1, 1, 0], [6, 0, 1, 0, 0, 1], [9, 1, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    "rows",
    [
        {"train_idx": [[0, 1]], "test_idx": [[1, 2]]},  # a row in both parts
        {"train_idx": [[0, 1]], "test_idx": [[8, 2]]},  # a row that does not exist
        {"test_mask": np.zeros((1, 8), bool)},  # no test rows
        {"test_mask": np.ones((1, 8), bool)},
    ],
)
def test_splits_that_leak_or_lead_nowhere_are_refused(tmp_path: Path, rows: dict[str, Any]) -> None:
    save(tmp_path / "uci" / "bad.npz", X=X, y=Y, **{name: np.asarray(value) for name, value in rows.items()})
    with pytest.raises(StorageError, match="each in one part only"):
        load("uci/bad", directory=tmp_path)


def test_tables_that_are_none(tmp_path: Path) -> None:
    save(tmp_path / "uci" / "boston.npz", X=X, z=Y)
    with pytest.raises(StorageError, match=r"expected X .* and y in .*found X"):
        load("uci/boston", directory=tmp_path)
    with pytest.raises(StorageError, match=r"did you mean uci/boston\?"):
        load("uci/bosten", directory=tmp_path)
    with pytest.raises(StorageError, match=r"looked for uci/xyz\.npz and found none: it has boston"):
        load("uci/xyz", directory=tmp_path)
    with pytest.raises(StorageError, match="put the file there"):
        load("uci/xyz", directory=tmp_path / "uci")


@pytest.mark.parametrize(
    ("name", "examples", "features"),
    [("boston", (455, 51), 13), ("airfoil", (1352, 151), 5), ("protein", (41157, 4573), 9)],
)
def test_shared_tables(shared_data: Path, name: str, examples: tuple[int, int], features: int) -> None:
    found = load(f"uci/{name}", directory=shared_data, split=2)
    assert (len(found.train[0]), len(found.test[0])) == examples
    assert found.train[0].shape[1] == features
    scaled = found.standardised()
    assert torch.allclose(scaled.train[0].double().mean(0), torch.zeros(features, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(scaled.train[1].double().std(correction=0), torch.ones((), dtype=torch.float64), atol=1e-4)
    unit = found.train[1].double().std(correction=0)
    wanted = (found.test[1].double() - found.train[1].double().mean()) / unit
    assert torch.allclose(scaled.test[1].double(), wanted, atol=1e-4)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 2**31), st.booleans())
def test_standardising_uses_the_training_part_alone(rows: int, columns: int, seed: int, classes: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows + 3, columns, generator=generator) * 5 + 3
    inputs[:rows, 0] = 7.0  # constant in training
    targets = torch.arange(rows + 3) if classes else torch.randn(rows + 3, 2, generator=generator) * 9
    data = Dataset("d", (inputs[:rows], targets[:rows]), (inputs[rows:], targets[rows:]), None)
    found = data.standardised()
    train = inputs[:rows].double()
    spread = train.std(0, correction=0)
    wanted = (inputs[rows:].double() - train.mean(0)) / torch.where(spread > 0, spread, 1.0)
    assert torch.allclose(found.test[0].double(), wanted, rtol=1e-3, atol=1e-4)
    assert not found.train[0][:, 0].any()
    assert torch.equal(found.train[1], targets[:rows]) == classes
    assert found.train[0].dtype == torch.float32
    with pytest.raises(InputError, match="needs training examples"):
        Dataset("d", (inputs[:0], targets[:0]), data.test, None).standardised()


def test_arrays_in_a_file(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 4, 5, 3)).astype("u1")
    path = save(
        tmp_path / "a.npz", x_train=pixels, y_train=np.arange(8) % 2, x_test=pixels[:3], y_test=np.arange(3) % 2
    )
    found = load(path)
    assert torch.equal(found.train[0], torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    assert (len(found.test[0]), found.classes, found.name) == (3, 2, "a")
    with pytest.raises(InputError, match="one division"):
        load(path, split=1)
    for names in (("inputs", "targets"), ("x", "y"), ("X", "Y")):
        save(path, **dict(zip(names, (X.astype(">f8"), Y), strict=True)))
        found = load("a", directory=tmp_path)  # any file of the folder by its name
        assert (len(found.train[0]), len(found.test[0]), found.classes) == (6, 2, None)
        assert sorted(torch.cat([found.train[0], found.test[0]])[:, 0].tolist()) == X[:, 0].tolist()


@pytest.mark.parametrize(
    ("arrays", "error", "told"),
    [
        ({"pictures": X, "y": Y}, InputError, "should hold inputs .*found pictures, y"),
        ({"x": X, "y": Y[:5]}, InputError, "8 inputs and 5 targets"),
        ({"x": X, "y": np.float64(3)}, InputError, "a single number"),
        ({"x": np.where(X == 4, np.nan, X), "y": Y}, InputError, "NaN or infinity"),
        ({"x": X, "y": np.arange(8) - 1}, InputError, "class numbers from 0"),
        ({"x": X, "y": np.array(["a"] * 8)}, InputError, "expected numbers"),
        ({"x": X, "y": np.array([None] * 8)}, UnsafeFileError, "not loaded"),
        ({"x": X, "y": Y, "x_test": X}, InputError, "should hold targets_test"),
    ],
)
def test_arrays_that_are_no_examples(tmp_path: Path, arrays: dict[str, Any], error: type, told: str) -> None:
    path = save(tmp_path / "bad.npz", **arrays)
    with pytest.raises(error, match=told):
        load(path)


def test_damaged_archives(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=Y)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError, match="save it again"):
            load(path)
    middle = whole.index(X.tobytes()) + 20
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(StorageError, match="save the file again"):  # a zip archive has checksums of its own
        load(path)


def test_an_archive_that_grows_too_large_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((50_000, 3)), y=np.zeros(50_000))
    assert path.stat().st_size < 10_000
    monkeypatch.setattr("onebasin.storage.npz_file.LARGEST", 1_000_000)
    with pytest.raises(StorageError, match="at most 1,000,000 bytes"):
        load(path)


def test_a_function_gives_data() -> None:
    def whole() -> Any:
        return X, Y

    def divided() -> Any:
        return (torch.from_numpy(X), [0, 1] * 4), (X[:2].tolist(), np.array([1, 0]))

    found = load(whole, split=1)
    assert (found.name, len(found.train[0]), len(found.test[0]), found.classes) == ("whole", 6, 2, None)
    found = load(divided)
    assert (len(found.train[0]), found.test[1].tolist(), found.classes) == (8, [1, 0], 2)
    assert found.test[0].tolist() == X[:2].tolist()
    with pytest.raises(InputError, match="one division"):
        load(divided, split=1)
    two = load(lambda: ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[0.0], [1.0], [2.0]]))
    assert two.train[0].shape[1] == 2


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "found a NoneType"),
        ((1, 2, 3), "found a tuple of 3"),
        ((3, 4), "a single number"),
        ((["a"], [1]), "found a list of 1"),
        (((X, Y), (X, Y[:3])), "8 inputs and 3 targets"),
    ],
)
def test_a_function_that_gives_something_else(value: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load(lambda: value)


def test_what_is_nothing_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEBASIN_DATA", raising=False)
    with pytest.raises(StorageError, match=r"there is no file minst: did you mean mnist\?"):
        load("minst")
    with pytest.raises(
        StorageError, match=r"there is no file zzz, nor is it in .*: check the path, or give one of digits"
    ):
        load("zzz", directory=tmp_path)
    with pytest.raises(StorageError, match="there is no file"):
        load(tmp_path / "absent.npz")
    with pytest.raises(InputError, match="import the function and give it itself"):
        load("module:function")
    for name, told in (("cifar-10-python.tar.gz", "unpack it"), ("table.csv", "convert it")):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match=told):
            load(tmp_path / name)
    with pytest.raises(StorageError, match=r"expected IDX files.*found cifar-10-python.tar.gz, table.csv"):
        load(tmp_path)
