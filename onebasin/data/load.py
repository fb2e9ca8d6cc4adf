"""Data sets by word, by path or from a function."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.data.cifar import is_batches, is_mosaic, read_batches, read_mosaics
from onebasin.data.dataset import Dataset, Pair, Parts, as_inputs, as_targets
from onebasin.data.idx import idx_files, read_idx_folder
from onebasin.data.npz import has_splits, read_file, read_table
from onebasin.data.openml import read_openml
from onebasin.errors import InputError, StorageError

_INK = 16  # the largest pixel value of the digits
_BRIGHTEST = 255  # the same of the photographs


def digits() -> tuple[Tensor, Tensor]:
    """The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels in ten classes.

    >>> inputs, targets = digits()
    >>> inputs.shape, targets.shape, float(inputs.min()), float(inputs.max())
    (torch.Size([1797, 64]), torch.Size([1797]), 0.0, 1.0)

    Returns:
        Pixels in [0, 1], float32 (1797, 64), and class numbers, int64 (1797,).
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return torch.from_numpy(pixels / _INK).float(), torch.from_numpy(classes).long()


def photographs(side: int = 8, zoom: int = 4) -> Tensor:
    """Grey patches of scikit-learn's two photographs, a temple and a flower: real images that are no digits.

    >>> patches = photographs()
    >>> patches.shape, float(patches.min()) >= 0, float(patches.max()) <= 1
    (torch.Size([1950, 64]), True, True)

    Args:
        side: of the square patches, in pixels. Neighbours overlap by half.
        zoom: how many pixels of the photograph are averaged into one, in each direction.

    Returns:
        Pixels in [0, 1], float32 (patches, side * side).
    """
    from sklearn.datasets import load_sample_images

    patches = []
    for photograph in load_sample_images().images:
        grey = torch.from_numpy(photograph.copy()).float().mean(-1)[None] / _BRIGHTEST
        small = torch.nn.functional.avg_pool2d(grey, zoom)[0]
        cut = small.unfold(0, side, side // 2).unfold(1, side, side // 2)
        patches.append(cut.reshape(-1, side * side))
    return torch.cat(patches)


VARIABLE = "ONEBASIN_DATA"


def data_folder(directory: str | Path | None) -> Path:
    """The folder that was given, or that the environment names.

    Raises:
        InputError: neither.
        StorageError: it does not exist.
    """
    chosen = directory if directory is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        raise InputError(
            f"expected a folder with data sets, found none: give directory= (on the command line --data-dir), or set "
            f"{VARIABLE}; only digits needs no folder"
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        source = f"in {VARIABLE}" if directory is None else "as the data folder"
        raise StorageError(f"expected a folder {source}, found nothing at {folder}: create it or name another")
    return folder


def first_existing(folder: Path, names: Sequence[str], what: str, remedy: str) -> Path:
    """The first of the names that exists in the folder.

    Raises:
        StorageError: none exists; says where it looked.
    """
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise StorageError(f"expected {what} in {folder}, looked for {', '.join(names)} and found none: {remedy}")


def call(function: Callable[[], Any]) -> Parts:
    """What the function returns: (inputs, targets), or ((inputs, targets), (inputs, targets)), training first.

    >>> parts = call(lambda: ([[1.0], [2.0]], [0, 1]))
    >>> parts.train
    (tensor([[1.], [2.]]), tensor([0, 1]))

    Args:
        function: without arguments. Tensors, arrays and lists of numbers are all understood; bytes are pixels.

    Raises:
        InputError: it returned something else.
    """
    name = getattr(function, "__name__", type(function).__name__)
    result = function()
    if not _is_pair(result):
        raise InputError(
            f"expected (inputs, targets) or two such pairs from {name}(), found {_kind(result)}: return tensors so"
        )
    if all(isinstance(part, tuple) and _is_pair(part) for part in result):
        train, test = (_convert(part, name) for part in result)
        return Parts(name, train, test)
    return Parts(name, _convert(result, name), None)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _convert(pair: Any, name: str) -> Pair:
    inputs, targets = (_tensor(part, name) for part in pair)
    return as_inputs(inputs), as_targets(targets)


def _tensor(value: Any, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"expected arrays of numbers from {name}(), found {_kind(value)}: convert it to tensors or arrays"
        ) from error
    if tensor.is_complex():
        raise InputError(f"expected real numbers from {name}(), found {tensor.dtype}: return its parts as columns")
    if not tensor.dim():
        raise InputError(f"expected one row per example from {name}(), found a single number: return arrays")
    return tensor.detach()


def _kind(value: Any) -> str:
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{length}"


Source = str | Path | Callable[[], Any]

_IDX = (
    "put its four files there (train-images-idx3-ubyte.gz, train-labels-..., t10k-images-..., t10k-labels-...), from "
)
_BATCHES = "unpack there, from https://www.cs.toronto.edu/~kriz/cifar.html, "
# Folders, also those that torchvision makes, and how to fill the first.
PLACES = {
    "mnist": (("mnist", "MNIST/raw", "MNIST"), f"{_IDX}https://ossci-datasets.s3.amazonaws.com/mnist/"),
    "fashion-mnist": (
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        f"{_IDX}https://github.com/zalandoresearch/fashion-mnist",
    ),
    "cifar10": (("cifar10", "cifar-10-batches-py", "cifar-10-batches-bin"), f"{_BATCHES}cifar-10-python.tar.gz"),
    "cifar100": (("cifar100", "cifar-100-python", "cifar-100-binary"), f"{_BATCHES}cifar-100-python.tar.gz"),
}
WORDS = ("digits", *PLACES, "uci/NAME", "openml/NAME")
_BELOW = ("raw", *(name for places, _ in PLACES.values() for name in places[1:]))  # where archives unpack to
_FOLDERS = "IDX files or CIFAR batches (data_batch_1 ..., test_batch; with .bin too)"
_RECOGNISED = f"{_FOLDERS} in a folder, or an .npz file"


@dataclass(frozen=True)
class Reading:
    """How sources are read; see `load` for the fields."""

    directory: str | Path | None = None
    split: int = 0
    download: bool = False
    checksums: Mapping[str, str] | None = None


def load(
    source: Source,
    *,
    directory: str | Path | None = None,
    split: int = 0,
    download: bool = False,
    checksums: Mapping[str, str] | None = None,
) -> Dataset:
    """Load a data set.

    >>> data = load("digits")
    >>> data.train[0].shape, data.test[0].shape, data.classes
    (torch.Size([1348, 64]), torch.Size([449, 64]), 10)

    Args:
        source: a word: digits, mnist, fashion-mnist, cifar10, cifar100, uci/NAME, openml/NAME or openml/NUMBER, or the
            name of any folder or .npz file in `directory`. Or a path: of a folder with IDX files or CIFAR batches, or
            of an .npz file with inputs and targets (or x, y) and perhaps inputs_test and targets_test. Or a function
            without arguments that returns (inputs, targets) or ((inputs, targets), (inputs, targets)).
        directory: folder with data sets. Default: what ONEBASIN_DATA names.
        split: number of the division, from 0: one of the published ones of a UCI table; the seed of a random one for a
            source without a division of its own.
        download: whether OpenML may be asked for what is not in the cache.
        checksums: file name -> hexadecimal md5, sha1 or sha256, such as `OFFICIAL["mnist"]`; digests in SHA256SUMS,
            MD5SUMS, NAME.sha256 or NAME.md5 beside the data are always compared.

    Returns:
        Inputs float32, bytes scaled to [0, 1]; images (n, channels, height, width), but digits (n, 64). Targets int64
        class numbers (n,) or float32 values (n, outputs). Without a division of its own, a quarter of the examples is
        taken for the test at random, by the seed `split`.

    Raises:
        InputError: nothing has this name, or a number of a split does not exist.
        StorageError: a file is absent, truncated or damaged, or has another digest.
        UnsafeFileError: a file holds a pickle that wants to run code; it was not run.
    """
    return read_parts(source, Reading(directory, split, download, checksums)).dataset(split)


def read_parts(source: Source, reading: Reading | None = None) -> Parts:
    """What a source holds, not yet divided where it has no division of its own; `source` is as for `load`."""
    reading = reading or Reading()
    if reading.split < 0:
        raise InputError(f"expected the number of a split from 0 on, found {reading.split}: choose another")
    parts = call(source) if callable(source) else _read(source, reading)
    if parts.test is not None and reading.split >= parts.splits:
        raise InputError(
            f"{parts.name} has one division into training and test, found split {reading.split}: leave it out"
        )
    return parts


def _read(source: str | Path, reading: Reading) -> Parts:
    """Everything but functions."""
    if isinstance(source, Path):
        return _read_path(source, reading)
    if source == "digits":
        return Parts("digits", digits(), None, 10)
    if source.startswith("uci/"):
        return _uci(source.removeprefix("uci/"), reading)
    if source.startswith("openml/"):
        name = source.removeprefix("openml/")
        return read_openml(name, download=reading.download)
    if source in PLACES:
        places, remedy = PLACES[source]
        folder = data_folder(reading.directory)
        return _read_folder(first_existing(folder, places, source, remedy), reading.checksums)
    return _read_path(_named(source, reading.directory), reading)


def _uci(name: str, reading: Reading) -> Parts:
    folder = data_folder(reading.directory)
    known = sorted(path.stem for path in (folder / "uci").glob("*.npz"))
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean uci/{near[0]}?" if near else f"it has {', '.join(known)}" if known else "put the file there"
    path = first_existing(folder, [f"uci/{name}.npz"], f"the table {name}", remedy)
    return read_table(path, reading.split, reading.checksums)


def _named(source: str, directory: str | Path | None) -> Path:
    """A path as it stands, or a folder or file of that name in the data folder."""
    if Path(source).exists():
        return Path(source)
    try:
        folder = data_folder(directory)
    except InputError:
        folder = None
    for name in (source, f"{source}.npz"):
        if folder is not None and (folder / name).exists():
            return folder / name
    if ":" in source:
        raise InputError(
            f"expected a word or a path, found {source!r}: import the function and give it itself; its name is "
            "understood on the command line only"
        )
    near = difflib.get_close_matches(source, WORDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"check the path, or give one of {', '.join(WORDS)}"
    where = "" if folder is None else f", nor is it in {folder}"
    raise StorageError(f"expected data, but there is no file {source}{where}: {hint}")


def _read_path(path: Path, reading: Reading) -> Parts:
    checksums = reading.checksums
    if path.is_dir():
        return _read_folder(path, checksums)
    if path.name.endswith((".tar", ".tar.gz", ".tgz", ".zip")):
        raise InputError(f"expected {_RECOGNISED}, found the archive {path}: unpack it and give the folder")
    if path.is_file() and path.suffix != ".npz":
        raise InputError(f"expected {_RECOGNISED}, found {path}: convert it to one of these")
    if path.is_file() and has_splits(path):
        return read_table(path, reading.split, checksums)
    return read_file(path, checksums)


def _read_folder(folder: Path, checksums: Mapping[str, str] | None) -> Parts:
    """A folder, or the one below it that an archive was unpacked to."""
    for place in (folder, *(folder / name for name in _BELOW)):
        if not place.is_dir():
            continue
        if is_mosaic(place):
            return read_mosaics(place, checksums)
        if is_batches(place):
            return read_batches(place, checksums)
        if idx_files(place):
            return read_idx_folder(place, checksums)
    names = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else []
    remedy = (
        "give the path of the .npz file itself"
        if any(".npz" in name for name in names)
        else "put the files there, unpacked"
    )
    raise StorageError(f"expected {_FOLDERS} in {folder}, found {', '.join(names) or 'nothing'}: {remedy}")
