"""Activations of the units of a network, read while it runs.

Every matrix product and convolution is observed. Where one of its operands is a view of a weight, that weight's `Tap`s
say which units the other operand, or the result, carries. So no layer has to be known by its class.

In out[.., m] = sum over k of x[.., k] w[k, m] the weights name the units. A tap on the axis that is summed over finds
its units in x, as their readers see them; a tap on an axis that is left over finds them in out, as they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.functional.call import (
    Call,
    as_seen,
    check_fits,
    fixed_buffers,
    floating_dtype,
    moved,
    run_with,
    undisturbed,
)
from onebasin.functional.observe import OperationObserver
from onebasin.state import State

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
        samples = [axis for axis, letter in enumerate(letters) if letter not in self.letters]
        units = [letters.index(letter) for letter in self.letters]
        rows = math.prod(tensor.shape[axis] for axis in samples)
        flat = tensor.permute(*samples, *units).reshape(rows, math.prod(tensor.shape[axis] for axis in units))
        cut = flat[:, self.entries.reshape(-1).to(flat.device)].reshape(rows, *self.entries.shape)
        return cut.transpose(1, 2).reshape(-1, len(self.columns))

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


@dataclass(frozen=True, eq=False)
class Activations:
    """What was read from a network.

    Attributes:
        parts: space name -> samples (n, columns) by the exponents with which they transform. Samples run over
            examples, positions and all places that transform alike.
        missing: space name -> why nothing is there.
    """

    parts: Mapping[str, Mapping[Exponents, Tensor]]
    missing: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Space name -> all samples (n, columns)."""
        return {name: torch.cat([*parts.values()]) for name, parts in self.parts.items()}


class Reader:
    """Reads the activations of networks of one architecture.

    Readers of a space come first: they see it after its nonlinearity. All of them count, since the readers of a
    residual stream see different states of it; what several read from the same memory counts once. A space
    that no product reads, as between queries and keys, is seen where it is written. The first run settles which it is.
    """

    def __init__(self, model: nn.Module, taps: Sequence[Tap]) -> None:
        """Remember the taps by tensor; the model is never changed."""
        self.model = model
        self.columns = {tap.space: tap.columns for tap in taps}
        self.taps: dict[str, list[Tap]] = {}
        for tap in taps:
            self.taps.setdefault(tap.tensor, []).append(tap)
        self.sides: dict[str, str] = {}
        self.cuts: dict[Any, Cut | None] = {}

    def of(self, state: Mapping[str, Tensor]) -> Callable[[Call], Activations]:
        """A function that runs one network on a batch of arguments, and gives what is read.

        Raises:
            SpecError: the state is not one of this model.
        """
        check_fits(self.model, state)
        with torch.inference_mode(False):  # tensors made in that mode reach us in undivided `linear` and `matmul`
            seen = as_seen(self.model, state)
            dtype, device = floating_dtype(seen), next(iter(seen.values()), torch.zeros(())).device
            # Each tensor gets memory of its own, so that an address says which one an operand is a view of.
            copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in seen.items()}
            tensors = {**fixed_buffers(self.model, device, dtype), **copies}
        return lambda call: self._read(tensors, moved(call, device, dtype))

    def _read(self, tensors: State, call: Call) -> Activations:
        sides = self.sides or dict.fromkeys(self.columns, READ)
        parts = self._run(tensors, call, sides)
        left = [space for space in self.columns if space not in parts]
        if left and not self.sides:
            parts |= self._run(tensors, call, dict.fromkeys(left, WRITTEN))
        self.sides = self.sides or {space: WRITTEN if space in left else READ for space in self.columns}
        return Activations(parts)

    def _run(self, tensors: State, call: Call, sides: Mapping[str, str]) -> dict[str, dict[Exponents, Tensor]]:
        observer = _Products(self, tensors, sides)
        with torch.inference_mode(False), undisturbed(self.model, call), _open_kernels(self.model), observer:
            run_with(self.model, tensors, call)
        joined = {space: _joined(pieces, self.columns[space]) for space, pieces in observer.pieces.items()}
        return {space: parts for space, parts in joined.items() if parts}


@contextmanager
def _open_kernels(model: nn.Module) -> Iterator[None]:
    """Keep torch from fused kernels, which hide their products: attention always, recurrent layers if there are any.

    (The libraries that fuse recurrent layers also make convolutions fast, so they are left alone where they can be.)
    """
    libraries: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled, fast = [library.enabled for library in libraries], torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            for library in libraries:
                library.enabled = False
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for library, before in zip(libraries, enabled, strict=True):
            library.enabled = before


Piece = tuple[Exponents, Tensor, Tensor]
"""Exponents, numbers of the columns (n,), samples (m, n)."""


class _Products(OperationObserver):
    """Copies activations out of every contraction with a weight during one run."""

    def __init__(self, reader: Reader, tensors: State, sides: Mapping[str, str]) -> None:
        super().__init__()
        self.reader, self.sides = reader, sides
        self.names = {_memory(tensors[name]): name for name in reader.taps}
        self.pieces: dict[str, list[Piece]] = {}
        self.copied: dict[Any, Tensor] = {}

    def operation(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Take what a product shows."""
        product = contraction(name, arguments)
        if product is not None:
            self._look(product, result)

    def _look(self, product: Contraction, out: Tensor) -> None:
        names = [self.names.get(_memory(operand)) for operand in product.operands]
        if None not in names[:2]:
            return  # a product of two weights shows no activations
        for number, name in enumerate(names):
            other = product.letters[1 - number] if number < 2 else ""  # beside a bias there is none
            letters = product.letters[number], other, product.result
            for tap in self.reader.taps[name] if name is not None else ():
                side = self.sides.get(tap.space)
                cut = self._cut(tap, product.operands[number], letters, side) if side else None
                if cut is not None and side == READ:
                    self._copy(tap.space, tap.read, cut, product.operands[1 - number], other)
                elif cut is not None:
                    self._copy(tap.space, tap.written, cut, product.view(out), product.result)

    def _cut(self, tap: Tap, weight: Tensor, letters: tuple[str, str, str], side: str) -> Cut | None:
        key = (id(tap), weight.shape, weight.stride(), weight.storage_offset(), letters, side)
        if key not in self.reader.cuts:
            self.reader.cuts[key] = find_cut(tap, weight, *letters, side)
        return self.reader.cuts[key]

    def _copy(self, space: str, exponents: Exponents, cut: Cut, tensor: Tensor, letters: str) -> None:
        """Copy at once, for the network may overwrite the tensor, but only once: queries and keys read one stream."""
        view = _memory(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version
        key = (space, exponents, cut.columns.numpy().tobytes(), view)
        if key not in self.copied:
            self.copied[key] = tensor  # so that nothing else gets its address
            self.pieces.setdefault(space, []).append((exponents, cut.columns, cut(tensor, letters)))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _joined(pieces: list[Piece], columns: int) -> dict[Exponents, Tensor]:
    """Samples of all columns, from pieces that may hold some of them each: heads can be computed one by one."""
    whole: dict[Exponents, list[Tensor]] = {}
    begun: list[Piece] = []  # exponents, whether each column is there, samples (m, columns)
    for exponents, numbers, samples in pieces:
        if len(numbers) == columns:
            whole.setdefault(exponents, []).append(samples)
            continue
        fits = (block for block in begun if block[0] == exponents and len(block[2]) == len(samples))
        block = next((block for block in fits if not bool(block[1][numbers].any())), None)
        if block is None:
            block = (exponents, torch.zeros(columns, dtype=torch.bool), samples.new_zeros(len(samples), columns))
            begun.append(block)
        block[1][numbers] = True
        block[2][:, numbers.to(samples.device)] = samples
    for exponents, there, samples in begun:
        if bool(there.all()):
            whole.setdefault(exponents, []).append(samples)
    return {exponents: torch.cat(samples) for exponents, samples in whole.items()}
