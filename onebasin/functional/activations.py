"""Activations of the units of a network, read while it runs.

Every matrix product and convolution is watched. Where one of its operands is a view of a weight, that weight's `Tap`s
say which units the other operand, or the result, carries. So no layer has to be known by its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from onebasin.errors import InputError
from onebasin.functional.call import (
    Call,
    as_seen,
    check_fits,
    described,
    fixed_buffers,
    floating_dtype,
    moved,
    undisturbed,
)
from onebasin.functional.observe import READ, WRITTEN, Contraction, Cut, Exponents, Tap, contraction, find_cut
from onebasin.state import State


@dataclass(frozen=True, eq=False)
class Activations:
    """What was read from a network.

    Attributes:
        parts: space name -> samples (n, columns) by the exponents with which they transform. Samples run over
            examples, positions and all places that transform alike.
        missing: space name -> why nothing is there; known to those who know the spaces.
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
    residual stream see different states of it; what several read from the same memory counts once. Where nobody reads
    a space through a product, as between queries and keys, what is written into it is taken. The first run settles
    which it is.
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
            own = {name: value.clone(memory_format=torch.contiguous_format) for name, value in seen.items()}
            tensors = {**fixed_buffers(self.model, device, dtype), **own}
        return lambda call: self._read(tensors, moved(call, device, dtype))

    def _read(self, tensors: State, call: Call) -> Activations:
        sides = self.sides or dict.fromkeys(self.columns, READ)
        found = self._run(tensors, call, sides)
        left = [space for space in self.columns if space not in found]
        if left and not self.sides:
            found |= self._run(tensors, call, dict.fromkeys(left, WRITTEN))
        self.sides = self.sides or {space: WRITTEN if space in left else READ for space in self.columns}
        return Activations(found)

    def _run(self, tensors: State, call: Call, sides: Mapping[str, str]) -> dict[str, dict[Exponents, Tensor]]:
        watch = _Watch(self, tensors, sides)
        arguments, options = call
        with torch.inference_mode(False), undisturbed(self.model, call), _open_kernels(self.model), watch:
            try:
                functional_call(self.model, tensors, arguments, options, tie_weights=False)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise InputError(
                    f"{type(self.model).__name__} could not be called with ({described(call)}): "
                    f"{type(error).__name__}: {error}. Give inputs of the shapes and dtypes that its forward expects"
                ) from error
        joined = {space: _joined(pieces, self.columns[space]) for space, pieces in watch.pieces.items()}
        return {space: found for space, found in joined.items() if found}


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


class _Watch(TorchDispatchMode):
    """Looks at every contraction with a weight during one run."""

    def __init__(self, reader: Reader, tensors: State, sides: Mapping[str, str]) -> None:
        prepare: Callable[[], None] = super().__init__  # not annotated by torch
        prepare()
        self.reader, self.sides = reader, sides
        self.names = {_memory(tensors[name]): name for name in reader.taps}
        self.pieces: dict[str, list[Piece]] = {}
        self.kept: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and take what it shows."""
        out = func(*args, **kwargs or {})
        product = contraction(func.overloadpacket.__name__, args)
        if product is not None:
            self._look(product, out)
        return out

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
                    self._keep(tap.space, tap.read, cut, product.operands[1 - number], other)
                elif cut is not None:
                    self._keep(tap.space, tap.written, cut, product.view(out), product.result)

    def _cut(self, tap: Tap, weight: Tensor, letters: tuple[str, str, str], side: str) -> Cut | None:
        key = (id(tap), weight.shape, weight.stride(), weight.storage_offset(), letters, side)
        if key not in self.reader.cuts:
            self.reader.cuts[key] = find_cut(tap, weight, *letters, side)
        return self.reader.cuts[key]

    def _keep(self, space: str, exponents: Exponents, cut: Cut, tensor: Tensor, letters: str) -> None:
        """Copy at once, for the network may overwrite the tensor, but only once: queries and keys read one stream."""
        view = _memory(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version
        key = (space, exponents, cut.columns.numpy().tobytes(), view)
        if key not in self.kept:
            self.kept[key] = tensor  # so that nothing else gets its address
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
