"""Look into a forward pass: which weights are used by which layer, and what comes out of it.

A `Bound` model computes with tensors we handed over, so a call of `F.linear(x, weight, bias)` tells by the identity of
`weight` which layer it is, whether a module made the call or a line of somebody's forward. Nothing is attached to the
user's module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onebasin.functional.norms import Norms

# ----------------------------------------------------------------------
# Where a unit's activation can be read: taps are plain data, and contractions are what they are held against.


READ, WRITTEN = "read", "written"
Exponents = tuple[tuple[str, tuple[int, ...]], ...]
"""(space, exponent of each of its generators): a column is multiplied by these powers of their factors."""


@dataclass(frozen=True, eq=False)
class Tap:
    """One place where the units of a space stand in a tensor.

    The entry at coordinates c of the tensor belongs to the column given by the sum over parts of numbers[c[axis]], and
    to none where one of these is -1.

    Attributes:
        space: name of the space.
        columns: number of its columns: copies * size.
        tensor: state-dict name.
        shape: shape of that tensor.
        axis: the tensor axis on which the units lie.
        parts: (axis, numbers (length of that axis,)), at most one for an axis.
        mixed: axes along which other spaces move entries of one column; such entries are no samples of it.
        read: how a column transforms where this tensor reads it.
        written: how a column transforms where this tensor writes it.
    """

    space: str
    columns: int
    tensor: str
    shape: tuple[int, ...]
    axis: int
    parts: tuple[tuple[int, Tensor], ...]
    mixed: frozenset[int] = frozenset()
    read: Exponents = ()
    written: Exponents = ()

    def column(self, place: tuple[Tensor, ...]) -> Tensor:
        """The column, -1 for none, of entries at coordinates `place`, one tensor for each axis."""
        column, inside = torch.zeros_like(place[0]), torch.ones_like(place[0], dtype=torch.bool)
        for axis, numbers in self.parts:
            number = numbers[place[axis]]
            column, inside = column + number, inside & (number >= 0)
        return column.where(inside, -1)


@dataclass(frozen=True, eq=False)
class Contraction:
    """One sum of products, perhaps plus a bias; axes of operands, bias and result have letters as in `torch.einsum`."""

    operands: tuple[Tensor, ...]
    letters: tuple[str, ...]
    result: str
    groups: int | None = None

    def view(self, result: Tensor) -> Tensor:
        """The result with one axis per letter."""
        return result if self.groups is None else result.unflatten(1, (self.groups, -1))


# operation -> position of the first operand, letters of the operands, letters of the result
_PRODUCTS = {
    "mm": (0, "nk", "km", "nm"),
    "addmm": (1, "nk", "km", "nm"),
    "bmm": (0, "bnk", "bkm", "bnm"),
    "baddbmm": (1, "bnk", "bkm", "bnm"),
    "mv": (0, "nk", "k", "n"),
    "addmv": (1, "nk", "k", "n"),
}


def contraction(operation: str, arguments: tuple[Any, ...]) -> Contraction | None:
    """The sum of products that an aten operation is, or None."""
    if operation in _PRODUCTS:
        first, *letters, result = _PRODUCTS[operation]
        operands = arguments[first : first + 2]
        if first and arguments[0].dim() == 1:  # a bias is added along the last axis
            operands, letters = (*operands, arguments[0]), [*letters, result[-1]]
        return Contraction(operands, tuple(letters), result)
    if operation == "convolution":
        x, weight, bias, *_, transposed, _, groups = arguments
        return _convolution(x, weight, bias, transposed=transposed, groups=groups)
    return None


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, groups: int) -> Contraction:
    """Channels are (group, channel in the group); positions of input, kernel and output have letters of their own."""
    places = weight.dim() - 2
    operands = [x.unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))]
    letters = ["ngc" + "xyz"[:places], ("gco" if transposed else "goc") + "uvw"[:places]]
    if bias is not None:
        operands.append(bias.unflatten(0, (groups, -1)))
        letters.append("go")
    return Contraction(tuple(operands), tuple(letters), "ngo" + "XYZ"[:places], groups)


@dataclass(frozen=True, eq=False)
class Cut:
    """How to cut columns out of a tensor.

    Attributes:
        letters: the axes that carry the columns, flattened in this order.
        entries: (found columns, repeats) positions along the flattened axes; repeats are further samples.
        columns: (found columns,) numbers of the columns, ascending.
    """

    letters: str
    entries: Tensor
    columns: Tensor

    def __call__(self, tensor: Tensor, letters: str) -> Tensor:
        """Samples (n, found columns) from a tensor whose axes are `letters`."""
        rest = [axis for axis, letter in enumerate(letters) if letter not in self.letters]
        own = [letters.index(letter) for letter in self.letters]
        rows = math.prod(tensor.shape[axis] for axis in rest)
        flat = tensor.permute(*rest, *own).reshape(rows, math.prod(tensor.shape[axis] for axis in own))
        found = flat[:, self.entries.reshape(-1).to(flat.device)].reshape(rows, *self.entries.shape)
        return found.transpose(1, 2).reshape(-1, len(self.columns))

    def spreads(self, coordinate: Tensor) -> bool:
        """Whether repeats of a column differ in a coordinate, given along the flattened axes."""
        repeats = coordinate[self.entries]
        return bool((repeats != repeats[:, :1]).any())


def find_cut(tap: Tap, weight: Tensor, letters: str, other: str, result: str, side: str) -> Cut | None:
    """How the tensor on one side of a contraction carries the columns of a tap.

    Args:
        tap: on the tensor of which `weight` is a view.
        weight: an operand, or the bias.
        letters: its axes.
        other: axes of the other operand; "" beside a bias.
        result: axes of the result.
        side: READ to look in the other operand, WRITTEN to look in the result.

    Returns:
        None if the units are not there one by one. Their axis must be summed over to be read, and be left over to be
        written. An axis of all three tensors, as the channels of a depthwise convolution, is neither: factors of what
        is read and of what is written cannot be told apart there.
    """
    held = other if side == READ else result
    gone = [axis for axis, letter in enumerate(letters) if letter not in held]
    place = torch.unravel_index(_entries(tap, weight, gone), tap.shape)
    moving = {letters[axis] for axis in _moving(place[tap.axis])}
    if not moving:  # an axis of length one is recognised if it is the only one
        single = [letter for letter, size in zip(letters, weight.shape, strict=True) if size == 1]
        moving = set(single) if len(single) == 1 else moving
    if not moving <= set(held) or moving <= set(result if side == READ else other):
        return None
    column = tap.column(place)
    lowest, highest = column.where(column >= 0, tap.columns), column
    if gone:
        lowest, highest = lowest.amin(gone), highest.amax(gone)
    if bool(((highest >= 0) & (highest != lowest)).any()):
        return None  # one activation would stand for two units
    cut = _cut("".join(letter for letter in letters if letter in held), highest.reshape(-1))
    if cut is None or any(cut.spreads(_first(place[axis], gone)) for axis in tap.mixed):
        return None
    return cut


def _first(coordinate: Tensor, gone: list[int]) -> Tensor:
    """One value for all of the axes `gone`, flat."""
    for axis in gone:
        coordinate = coordinate.narrow(axis, 0, 1)
    return coordinate.reshape(-1)


def _entries(tap: Tap, weight: Tensor, gone: list[int]) -> Tensor:
    """Which entries of the contiguous tensor stand in `weight`, a view of it.

    Along the axes `gone` one entry is enough where the tap does not look: that saves most of the memory.
    """
    start = weight.storage_offset()
    steps = [math.prod(tap.shape[axis + 1 :]) for axis in range(len(tap.shape))]
    idle = set(range(len(tap.shape))) - {axis for axis, _ in tap.parts}
    entries = torch.tensor(start)
    for axis, (size, step) in enumerate(zip(weight.shape, weight.stride(), strict=True)):
        along = (a for a in idle if steps[a] == step and start // step % tap.shape[a] + size <= tap.shape[a])
        enough = axis in gone and next(along, None) is not None
        entries = entries[..., None] + step * torch.arange(1 if enough else size)
    return entries


def _moving(coordinate: Tensor) -> list[int]:
    """The axes along which a coordinate changes."""
    return [axis for axis in range(coordinate.dim()) if bool((coordinate != coordinate.narrow(axis, 0, 1)).any())]


def _cut(letters: str, column: Tensor) -> Cut | None:
    """Gather the entries of each column (n,); all columns must occur equally often."""
    order = column.argsort(stable=True)[int((column < 0).sum()) :]
    columns, counts = column[order].unique_consecutive(return_counts=True)
    if not len(columns) or bool((counts != counts[0]).any()):
        return None
    return Cut(letters, order.reshape(len(columns), -1), columns)


# ----------------------------------------------------------------------
# Look into a forward pass: which weights are used by which layer, and what comes out of it.


_LAYERS: tuple[Callable[..., Tensor], ...] = (F.linear, F.conv1d, F.conv2d, F.conv3d)
_VIEWS = ("T", "mT", "H", "mH", "data")  # attributes that hand the values on; `shape` and the like do not


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One use of a linear or convolutional layer.

    Attributes:
        weight: state-dict name of the weight, units on axis 0.
        bias: state-dict name of the bias, None without one, "" for one that is computed.
        result: what the layer gave.
        axis: the axis of the result on which the units lie.
    """

    weight: str
    bias: str | None
    result: Tensor
    axis: int


class Watch(Norms):
    """Reports layers and norms of a forward pass; what `layer` and `norm` return is what the model goes on with.

    Functions of torch that are layers inside (attention, recurrent networks) are seen from outside only.
    """

    def layer(self, call: LayerCall) -> Tensor:
        """A linear or convolutional layer was used."""
        return call.result

    def touched(self, name: str) -> None:
        """A tensor of the state was used by anything else."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        if func is F.batch_norm or func is F.instance_norm:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _LAYERS:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if (weight := self.name_of(given["weight"])) is not None:
                return self._layer(weight, given.get("bias"), func, func(*args, **kwargs))
        if not _only_looks(func):
            for name in map(self.name_of, tree_leaves((args, kwargs))):
                if name is not None:
                    self.touched(name)
        return func(*args, **kwargs)

    def _layer(self, weight: str, bias: Tensor | None, func: Any, result: Tensor) -> Tensor:
        places = 0 if func is F.linear else self.tensors[weight].dim() - 2
        name = None if bias is None else self.name_of(bias) or ""
        return self.layer(LayerCall(weight, name, result, result.dim() - 1 - places))


def _only_looks(func: Any) -> bool:
    """Whether a function is an attribute such as `shape`, which does not hand on the values."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in _VIEWS
