"""Examples and tables in one .npz file.

Examples are ``inputs`` and ``targets`` (or ``x``, ``y``, ``X``, ``Y``), perhaps with ``inputs_test`` and
``targets_test``. Tables with the splits that papers use are ``X`` (rows, features), ``y`` (rows,), and ``train_idx``
and ``test_idx`` (splits, rows of a part), ``test_mask`` (splits, rows), ``is_test`` (rows,), or nothing of these.
Instead of ``X`` there may be ``X_num`` and ``X_cat`` (rows, columns of category numbers), which become one column per
category.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from onebasin.data.checksum import verify
from onebasin.data.dataset import Pair, Parts, as_inputs, as_targets, check_columns
from onebasin.errors import InputError, StorageError
from onebasin.storage import read_arrays, stored_names

INPUTS = ("inputs", "x", "X")
TARGETS = ("targets", "y", "Y")
_SHOWN = 8  # names worth reading in one sentence
_FEW, _GAPS = 10_000, 10  # categories that any column may have, and so many times the rows
_DIVISIONS = ("test_idx", "test_mask", "is_test")
_ARRAYS = ("X", "X_num", "X_cat", "y", "train_idx", *_DIVISIONS)


def read_file(path: Path, checksums: Mapping[str, str] | None = None) -> Parts:
    """Examples: inputs and targets, alone or beside inputs_test and targets_test; or x and y, or X and Y.

    Raises:
        InputError: other names, or arrays of something else than numbers.
        StorageError: the file is absent or damaged.
        UnsafeFileError: an array is a pickle; it was not loaded.
    """
    if not path.is_file():
        raise StorageError(f"there is no file {path}: check the path of the data")
    verify(path, checksums)
    stored = stored_names(path)
    train = _pair(path, stored, ("", "_train"))
    test = _pair(path, stored, ("_test",)) if any(f"{name}_test" in stored for name in INPUTS) else None
    return Parts(path.stem, train, test)


def _pair(path: Path, stored: list[str], endings: tuple[str, ...]) -> Pair:
    chosen = [
        first_of([f"{name}{ending}" for ending in endings for name in names], stored, path)
        for names in (INPUTS, TARGETS)
    ]
    arrays = read_arrays(path, chosen.__contains__)
    for name in chosen:
        if not arrays[name].dim():
            raise InputError(f"expected one row per example in {name} of {path}, found a single number: save arrays")
    return as_inputs(arrays[chosen[0]]), as_targets(arrays[chosen[1]])


def first_of(names: Iterable[str], stored: Iterable[str], path: Path) -> str:
    """The first of the names that is stored.

    Raises:
        InputError: none is; says what was found.
    """
    wanted, present = list(names), list(stored)
    for name in wanted:
        if name in present:
            return name
    listed = ", ".join(present[:_SHOWN]) + (", ..." if len(present) > _SHOWN else "")
    raise InputError(
        f"{path} should hold {wanted[0]} (or {', '.join(wanted[1:])}), found {listed or 'nothing'}: rename it"
    )


def read_table(path: Path, split: int = 0, checksums: Mapping[str, str] | None = None) -> Parts:
    """One split of a table; numbers as they are stored (`Dataset.standardised` scales them).

    Raises:
        InputError: there is no split of this number.
        StorageError: the file is absent, damaged or no such table.
    """
    verify(path, checksums)
    stored = read_arrays(path, _ARRAYS.__contains__)
    if "test_idx" in stored and "train_idx" not in stored:
        raise StorageError(f"expected train_idx beside test_idx in {path}, found none: save both")
    if "y" not in stored or not ("X" in stored or {"X_num", "X_cat"} <= stored.keys()):
        raise StorageError(
            f"expected X (or X_num and X_cat) and y in {path}, found {', '.join(stored) or 'none'}: save a table so"
        )
    _check_rows(stored, path)
    inputs = stored["X"].float() if "X" in stored else _encoded(stored["X_num"], stored["X_cat"], path)
    targets = as_targets(stored["y"])
    classes = None if targets.is_floating_point() else int(targets.max()) + 1
    splits = _splits(stored)
    if not splits:
        return Parts(path.stem, (inputs, targets), None, classes)
    if split >= splits:
        raise InputError(f"{path.stem} has {splits} splits, found split {split}: give a number from 0 to {splits - 1}")
    train, test = ((inputs[part], targets[part]) for part in _rows(stored, split, path))
    return Parts(path.stem, train, test, classes, splits)


def has_splits(path: Path) -> bool:
    """Whether a file is a table with published splits."""
    return any(name in _DIVISIONS for name in stored_names(path))


def _check_rows(stored: dict[str, Tensor], path: Path) -> None:
    """Refuse arrays whose rows are not those of the table: what is left over would vanish in silence."""
    rows: dict[str, tuple[int, ...]] = {
        name: stored[name].shape[:1] for name in ("X", "X_num", "X_cat", "y", "is_test") if name in stored
    }
    if "test_mask" in stored:
        rows["test_mask"] = stored["test_mask"].shape[1:]
    flat = [name for name in ("train_idx", "test_idx", "X_num", "X_cat") if name in stored and stored[name].dim() != 2]
    if len(set(rows.values())) > 1 or () in rows.values() or flat or not len(stored["y"]):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in stored.items())
        raise StorageError(f"expected one row per example in {path}, found {shapes}: save arrays that fit together")


def _encoded(numbers: Tensor, categories: Tensor, path: Path) -> Tensor:
    numbered = categories.long()
    if numbered.numel() and (int(numbered.min()) < 0 or not torch.equal(numbered.to(categories.dtype), categories)):
        raise InputError(
            f"expected categories numbered from 0 in X_cat of {path}, found others: give missing ones a number too"
        )
    counts = [int(column.max()) + 1 for column in numbered.T]
    if max(counts, default=0) > max(_FEW, _GAPS * len(numbered)):  # one number must not ask for any amount of memory
        raise InputError(
            f"expected categories numbered without large gaps in X_cat of {path}, found {max(counts):,}: number them "
            "from 0 up"
        )
    check_columns(len(numbered), numbers.shape[1] + sum(counts), str(path))
    columns = [torch.nn.functional.one_hot(column, count) for column, count in zip(numbered.T, counts, strict=True)]
    return torch.cat([numbers.float(), *(column.float() for column in columns)], 1)


def _splits(stored: dict[str, Tensor]) -> int:
    """How many there are; 0 for a table without any."""
    if "test_idx" in stored and "train_idx" in stored:
        return min(len(stored["train_idx"]), len(stored["test_idx"]))
    if "test_mask" in stored:
        return len(stored["test_mask"])
    return 1 if "is_test" in stored else 0


def _rows(stored: dict[str, Tensor], split: int, path: Path) -> tuple[Tensor, Tensor]:
    """Rows of the training and of the test part."""
    if "test_idx" in stored and "train_idx" in stored:
        train, test = (stored[name][split].long() for name in ("train_idx", "test_idx"))
    else:
        mask = (stored["test_mask"][split] if "test_mask" in stored else stored["is_test"]).bool()
        train, test = (~mask).nonzero().flatten(), mask.nonzero().flatten()
    both = torch.cat([train, test])
    inside = bool(((both >= 0) & (both < len(stored["y"]))).all())  # a negative one would be a row of the other part
    if not len(train) or not len(test) or not inside or len(both.unique()) != len(both):
        raise StorageError(
            f"expected rows from 0 to {len(stored['y']) - 1:,}, each in one part only, in split {split} of {path}, "
            "found others: fetch the file again"
        )
    return train, test
