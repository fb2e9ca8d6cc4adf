"""Data as people have them: tensors, arrays, data sets, loaders and rows of tables, as inputs and targets of a model.

Every public function that takes data or inputs calls `pair_of` or `inputs_of` once, at its top. What is a tensor
already passes through as it is; everything else is read into memory once, in its order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from onebasin.errors import InputError, first_line
from onebasin.functional.call import BATCH, Inputs, check_targets, floating_dtype
from onebasin.functional.norms import Measured

Data = Any
"""(inputs, targets), a dict of columns, a Dataset, a DataLoader, or rows of a Hugging Face data set; see `pair_of`."""
AnyInputs = Any
"""A tensor, an array, a tuple or dict of these, a Dataset, a DataLoader, or rows of a table; see `inputs_of`."""

TARGETS = ("label", "labels", "target", "targets", "y")
_FEW = 8  # examples of a data set or a table that stand for all, where a small call is wanted


def columns(rows: Any, inputs: str | Collection[str], targets: str | None = None) -> Any:
    """Read named columns of a table, a data set or a loader: (inputs, targets), or inputs alone without `targets`.

    >>> rows = {"image": np.zeros((3, 4)), "age": np.arange(3), "class": np.array([0, 1, 1])}
    >>> x, y = columns(rows, inputs="image", targets="class")
    >>> x.shape, y
    (torch.Size([3, 4]), tensor([0, 1, 1]))
    >>> sorted(columns(rows, inputs=["image", "age"]))
    ['age', 'image']

    Args:
        rows: rows of a Hugging Face data set, a dict of columns, or a Dataset or DataLoader whose items are dicts. It
            is read once, in its order; that of a shuffling loader is kept.
        inputs: the column that the model is called with; several are given to it by their names.
        targets: the column of targets; None for inputs without targets.

    Returns:
        Inputs as `predict` takes them, or a pair of inputs and targets as `evaluate` takes it.

    Raises:
        InputError: there is no such column, or one that holds no numbers.
    """
    read = rows if isinstance(rows, Mapping) else _read(rows, None)
    if not isinstance(read, Mapping):
        raise InputError(
            f"expected rows with named columns, found {_word(rows)}: give (inputs, targets) where columns have no names"
        )
    names = [inputs] if isinstance(inputs, str) else list(inputs)
    for name in (*names, *([targets] if targets is not None else [])):
        if name not in read:
            raise InputError(f"expected a column {name!r}, found {_listed(read)}: name one of these")
    values = {name: _numbers(read[name], f"the column {name!r}", None) for name in names}
    chosen = values[names[0]] if isinstance(inputs, str) else values
    if targets is None:
        return chosen
    return chosen, _targets(read[targets], f"the column {targets!r}")


def inputs_of(inputs: AnyInputs, model: nn.Module | None = None, *, most: int | None = None) -> Inputs:
    """Return inputs as tensors that a model is called with.

    >>> inputs_of((np.zeros((2, 3)), 5), nn.Linear(3, 1))[0].dtype
    torch.float32

    Args:
        inputs: a tensor or an array; a tuple of positional or a dict of keyword inputs; a Dataset, a DataLoader, or
            rows of a Hugging Face data set, whose targets are left out. A loader is read once, and its order kept.
        model: floating-point inputs that were no tensors get the dtype of its parameters.
        most: read at most so many examples of a data set, or the first batch of a loader; tensors stay whole.

    Raises:
        InputError: the inputs are something else.
    """
    _check_place(inputs, "inputs")
    read = _read(inputs, most)
    if read is None:
        if isinstance(inputs, Tensor):
            return inputs
        _check_inputs(inputs)
        dtype = _dtype_of(model)
        converted: Inputs = tree_map(
            lambda leaf: _tensor(np.asarray(leaf), "the inputs", dtype) if _is_array(leaf) else leaf, inputs
        )
        return converted
    return _as_inputs(_divided(read)[0], _dtype_of(model))


def pair_of(data: Data, model: nn.Module | None = None) -> tuple[Inputs, Tensor]:
    """Return inputs as tensors that a model is called with, and one target for each example.

    >>> inputs, targets = pair_of((np.zeros((2, 3)), np.array([0, 1], dtype=np.uint8)), nn.Linear(3, 2))
    >>> inputs.dtype, targets
    (torch.float32, tensor([0, 1]))

    Args:
        data: (inputs, targets), each tensors or arrays, inputs as in `inputs_of`; a Dataset or DataLoader of pairs
            (of more, the last are the targets) or of dicts; a dict of columns; or rows of a Hugging Face data set.
            Targets are the column called label, labels, target, targets or y, and inputs all others; `columns` names
            them otherwise. A loader is read once, and its order kept.
        model: as in `inputs_of`; whole-number targets that were no tensors become int64.

    Raises:
        InputError: there are no targets, no examples, not as many targets as inputs, or NaN among them. Only among
            targets with pixels (examples, ..., height, width) NaN is allowed: it marks those that are not known.
    """
    _check_place(data, "data")
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise InputError(f"expected data as a pair (inputs, targets), found {_word(data)}: give (x, y)")
        inputs, targets = inputs_of(data[0], model), _targets(data[1], "the targets")
    else:
        read = data if isinstance(data, Mapping) else _read(data, None)
        if read is None:
            raise InputError(
                f"expected data as a pair (inputs, targets), found {_word(data)}: give (x, y), or a Dataset, a "
                "DataLoader or rows of a table"
            )
        given, found = _divided(read)
        if found is None:
            raise InputError(
                f"expected targets beside the inputs, found {_listed(read)}: give (inputs, targets), or name the "
                'columns, as in onebasin.columns(rows, inputs="image", targets="class")'
            )
        inputs, targets = _as_inputs(given, _dtype_of(model)), _targets(found, "the targets")
    check_targets(inputs, targets)
    for leaf in [*tree_leaves(inputs), *([targets] if targets.dim() < 3 else [])]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()):
            raise InputError("expected finite data, found NaN or infinity: leave these examples out")
    if targets.dim() >= 3 and targets.is_floating_point() and bool(targets.isnan().all()):
        raise InputError("expected targets that are known, found nothing but NaN: check the targets")
    return inputs, targets


def measured_of(statistics: Any, model: nn.Module | None = None) -> Measured:
    """What `statistics` means: None and False as they are, else `inputs_of`."""
    return statistics if statistics is None or statistics is False else inputs_of(statistics, model)


def few_of(inputs: AnyInputs, model: nn.Module | None = None) -> Inputs:
    """`inputs_of` for a call that stands for all: of a data set the first examples, of a loader the first batch."""
    return inputs_of(inputs, model, most=_FEW)


def _read(source: Any, most: int | None) -> Any:
    """What a collection of examples holds, with the examples on the first axis; None where it is no collection."""
    if isinstance(source, DataLoader):
        return _joined(source, most)
    if _is_table(source):
        chosen = source if source.format["type"] is not None else source.with_format("torch")
        return dict(chosen[: len(source) if most is None else most])
    if isinstance(source, TensorDataset):
        return tuple(tensor[:most] for tensor in source.tensors)
    if isinstance(source, IterableDataset) or (hasattr(source, "column_names") and not hasattr(source, "__len__")):
        raise InputError(
            f"expected a data set with a length, found {type(source).__name__}, which need not end: give a DataLoader "
            "over as much of it as is meant"
        )
    if isinstance(source, Dataset):
        return _joined(DataLoader(source, batch_size=most or BATCH), most)
    return None


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, or can become one: of jax, a column or table of pandas."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, Tensor | np.generic)


def _is_table(source: Any) -> bool:
    """Whether these are rows of a Hugging Face data set, which need not be installed."""
    return all(hasattr(source, name) for name in ("column_names", "with_format", "format", "__len__"))


def _joined(loader: DataLoader[Any], most: int | None) -> Any:
    """All batches of a loader end to end; the first one with `most`."""
    parts: list[Any] = []
    try:
        for batch in loader:
            parts.append(batch)
            if most is not None:
                break
    except TypeError as error:
        raise InputError(
            f"expected items of numbers in the data set, found what torch cannot collate ({first_line(error, 120)}): "
            "give a DataLoader with a collate_fn, or tensors"
        ) from error
    if not parts:
        raise InputError("the data hold no examples, found an empty loader: give at least one")
    if len(parts) == 1:
        return parts[0]
    try:
        return tree_map(lambda *each: _end_to_end(each), *parts)
    except (ValueError, RuntimeError, TypeError) as error:
        raise InputError(
            f"expected batches of one form, found others later on ({first_line(error, 120)}): pad or crop the examples "
            "to one shape"
        ) from error


def _end_to_end(each: tuple[Any, ...]) -> Any:
    if isinstance(each[0], np.ndarray):
        return np.concatenate(each)
    return torch.cat(each) if isinstance(each[0], Tensor) else each[0]  # what is no tensor is refused later


def _divided(read: Any) -> tuple[Any, Any]:
    """Inputs and targets, None where there are none, of what items or columns hold."""
    if isinstance(read, Mapping):
        found = [name for name in TARGETS if name in read]
        if len(found) > 1:
            raise InputError(
                f"expected one column of targets, found {' and '.join(found)}: name it, as in onebasin.columns(rows, "
                f'inputs="image", targets={found[0]!r})'
            )
        rest = {name: value for name, value in read.items() if name not in found}
        if not rest:
            raise InputError(f"expected columns of inputs, found {_listed(read)} alone: add them, or name the columns")
        inputs = next(iter(rest.values())) if len(rest) == 1 else rest
        return inputs, read[found[0]] if found else None
    if isinstance(read, tuple | list):
        return (read[0] if len(read) <= 2 else tuple(read[:-1])), read[-1] if len(read) > 1 else None
    return read, None


def _as_inputs(read: Any, dtype: torch.dtype | None) -> Inputs:
    if isinstance(read, Mapping):
        return {name: _numbers(value, f"the column {name!r}", dtype) for name, value in read.items()}
    if isinstance(read, tuple):
        return tuple(_numbers(value, "the inputs", dtype) for value in read)
    return _numbers(read, "the inputs", dtype)


def _targets(value: Any, where: str) -> Tensor:
    """Targets as a tensor: one that is given as it is, whole numbers of arrays and lists as int64."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        try:
            value = np.asarray(value)
        except ValueError as error:  # rows of several lengths
            raise InputError(f"expected one target for each example, found {first_line(error, 120)}") from error
    found = _numbers(value, where, None)
    return found if found.is_floating_point() or found.is_complex() else found.long()


def _numbers(value: Any, where: str, dtype: torch.dtype | None) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if _is_array(value):
        return _tensor(np.asarray(value), where, dtype)
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray | Tensor):
        shapes = {tuple(each.shape) for each in value if isinstance(each, np.ndarray | Tensor)}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            raise InputError(f"expected rows of one shape in {where}, found {first} and {second}: pad or crop them")
    raise InputError(
        f"expected numbers in {where}, found {_word(value)}: choose other columns with onebasin.columns(rows, inputs=, "
        'targets=), and for a table rows.with_format("torch")'
    )


def _tensor(array: np.ndarray[Any, Any], where: str, dtype: torch.dtype | None) -> Tensor:
    """An array as a tensor of the same numbers, without a copy where torch can share the memory."""
    if array.dtype.kind not in "fiubc":
        raise InputError(
            f"expected numbers in {where}, found an array of {array.dtype}: convert it with .astype(float)"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative or not array.flags.writeable or any(step < 0 for step in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _dtype_of(model: nn.Module | None) -> torch.dtype | None:
    """The dtype of the parameters, None if they have several; float32 without any."""
    if not isinstance(model, nn.Module):
        return None
    parameters = dict(model.named_parameters())
    return floating_dtype(parameters) if parameters else torch.get_default_dtype()


def _check_place(value: Any, name: str) -> None:
    """Refuse what stands in the place of another argument, or stands for data without being some."""
    if isinstance(value, nn.Module):
        raise InputError(
            f"expected {name}, found the module {type(value).__name__}: the order is model, networks, data"
        )
    if isinstance(value, str):
        raise InputError(
            f'expected {name}, found the text {value[:40]!r}: load data first, as onebasin.data.load("digits").train'
        )
    if hasattr(value, "train") and hasattr(value, "test") and not callable(value.train):
        raise InputError(f"expected {name}, found a data set with a train and a test part: give one, as data.train")
    if isinstance(value, Mapping) and value and all(_is_table(each) for each in value.values()):
        first = next(iter(value))
        raise InputError(f"expected {name}, found data sets {_listed(value)}: give one of them, as data[{first!r}]")
    if hasattr(value, "spec") and hasattr(value, "provenance"):  # a Population or a Posterior
        raise InputError(f"expected {name}, found a {type(value).__name__}: the order is model, networks, data")


def _check_inputs(inputs: Any) -> None:
    """Refuse lists of numbers, which would be as many positional inputs."""
    leaves = tree_leaves(inputs)
    if isinstance(inputs, list | tuple) and leaves and all(isinstance(leaf, int | float) for leaf in leaves):
        raise InputError("expected inputs as a tensor or an array, found a list of numbers: give torch.tensor(inputs)")


def _listed(names: Any) -> str:
    """The names of columns, or what stands in their place."""
    if not isinstance(names, Mapping):
        return _word(names)
    known = list(map(str, names))
    return f"the columns {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def _word(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        what = f" of {type(value[0]).__name__}" if value else ""
        return f"a {type(value).__name__} of {len(value)}{what if len(value) != 1 else ''}"
    return f"a {type(value).__name__}" if isinstance(value, Iterable) else type(value).__name__
