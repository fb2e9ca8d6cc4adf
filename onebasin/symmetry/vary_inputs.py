"""Other examples of a call: the same model at other sizes and other numbers, wherever it runs there.

One example can hide what others show. With one time step a recurrent weight meets only zeros, with one token every
attention is 1, with a batch of one a `view` may stand for a transpose, and the number 0 may choose a branch. So
further examples are made out of the given one. Nothing is assumed about what an axis means: sizes that may belong
together are changed together, and the model itself says by running whether that is a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from onebasin.errors import first_line
from onebasin.functional import Inputs, call_arguments, evaluation_mode

Axis = tuple[int, int]  # (number of the input among all leaves of the call, axis of that tensor)
DOUBLED = 32  # sizes up to here are tried twice as large: one patch of an image becomes four
NUMBERS = 16  # how many other values of an integer input are tried: a number may choose among several heads


@dataclass(frozen=True)
class Variants:
    """Examples made out of one.

    Attributes:
        wider: the example with every axis of size 1 enlarged that the model accepts otherwise; None if there is none.
        others: examples at which a symmetry must hold as well: other sizes, and other values of Python numbers.
        doubts: sentences about what could not be varied and may hide something.
    """

    wider: Inputs | None = None
    others: tuple[Inputs, ...] = ()
    doubts: tuple[str, ...] = ()


def variants(model: nn.Module, inputs: Inputs) -> Variants:
    """Make further examples of a call that are known to run: one with other sizes, one per other value of a number."""
    call = _Call(model, inputs)
    wide = call.resized({}, [group for group in _groups(call.axes) if call.axes[group[0]] == 1])
    doubts = list(call.stuck(wide))
    sizes = call.resized(wide, [group for group in _groups(call.axes) if call.axes[group[0]] > 1])
    others = [call.at(sizes or wide)] if sizes or wide else []
    for number, value in enumerate(call.leaves):
        if isinstance(value, int | float):
            found, ran = call.renumbered(number)
            others += found
            if not ran:
                doubts.append(
                    f"input {call.name(number)} is the number {value!r}, and the model does not run at other values "
                    "that were tried: what they would show is not proved; give further examples as also=[...]"
                )
    return Variants(call.at(wide) if wide else None, tuple(others), tuple(doubts))


def _groups(axes: Mapping[Axis, int]) -> Iterator[list[Axis]]:
    """Axes that may have to change together, likely groups first.

    The first axis of all inputs (a batch), all other axes of one size (a length, and a mask of length x length), those
    of one size at one place, and for sizes of 1, which are alike by chance, each axis alone.
    """
    first = next(iter(axes.values()), 0)
    yield from ([group] if (group := [key for key, n in axes.items() if key[1] == 0 and n == first]) else [])
    for size in dict.fromkeys(axes.values()):
        equal = [key for key, n in axes.items() if n == size]
        yield [key for key in equal if key[1] > 0] or equal
        for place in dict.fromkeys(axis for _, axis in equal):
            yield [key for key in equal if key[1] == place]
        if size == 1:
            yield from ([key] for key in equal)


class _Call:
    """A call taken apart: its leaves, and the sizes of the axes of its tensors."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model
        arguments, options = call_arguments(inputs)
        self.given: Any = options or arguments
        self.leaves, self.form = tree_flatten(self.given)
        self.axes = {
            (number, axis): size
            for number, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided
            for axis, size in enumerate(leaf.shape)
            if size > 0
        }
        self.widths = {size for tensor in model.parameters() for size in tensor.shape}
        # An index beyond a table is an exception on a CPU, but on other devices it may end the process.
        self.safe = all(t.device.type == "cpu" for t in [*model.parameters(), *self.leaves] if isinstance(t, Tensor))
        self.error: Exception | None = None

    def name(self, number: int) -> str:
        """How a user knows an input."""
        if isinstance(self.given, dict):
            owners = [key for key, value in self.given.items() for _ in tree_leaves(value)]
        else:
            owners = [place for place, value in enumerate(self.given) for _ in tree_leaves(value)]
        return repr(owners[number]) if number < len(owners) else str(number)

    def at(self, sizes: Mapping[Axis, int]) -> Inputs:
        """The call with other sizes."""
        leaves = [self._resized(number, leaf, sizes) for number, leaf in enumerate(self.leaves)]
        made: Inputs = tree_unflatten(leaves, self.form)
        return made

    def _resized(self, number: int, leaf: Any, sizes: Mapping[Axis, int]) -> Any:
        """Repeat or cut a tensor along axes; further tokens are drawn between 0 and the largest in the example."""
        chosen = {axis: size for (owner, axis), size in sizes.items() if owner == number}
        if not chosen:
            return leaf
        made = leaf
        for axis, size in chosen.items():
            places = torch.arange(size, device=leaf.device) % leaf.shape[axis]
            made = made.index_select(axis, places)
        whole = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype is not torch.bool
        if whole and int(leaf.min()) >= 0 and int(leaf.max()) > 1:
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randint(int(leaf.max()) + 1, made.shape, generator=generator).to(leaf.device, leaf.dtype)
            kept = tuple(slice(0, min(n, m)) for n, m in zip(leaf.shape, made.shape, strict=True))
            drawn[kept] = leaf[kept]
            made = drawn
        return made

    def resized(self, sizes: Mapping[Axis, int], groups: list[list[Axis]]) -> dict[Axis, int]:
        """`sizes` and, group by group, the first other size at which the model runs."""
        chosen = dict(sizes)
        tried: set[tuple[Axis, ...]] = set()
        for number, group in enumerate(groups):
            if tuple(group) in tried or any(key in chosen for key in group):
                continue
            tried.add(tuple(group))
            for size in self._sizes(self.axes[group[0]], batch=number == 0 and group[0][1] == 0):
                changed = {**chosen, **dict.fromkeys(group, size)}
                if self.runs(self.at(changed)) is not None:
                    chosen = changed
                    break
        return {} if chosen == sizes else chosen

    def _sizes(self, size: int, batch: bool) -> list[int]:
        """Other sizes to try, in this order."""
        if size == 1:
            # A size that a weight has, too, may run by broadcasting without being a call.
            return sorted((2, 3), key=lambda other: other in self.widths)
        if size > 2 and (batch or not self.safe):
            return [size - 1]
        return [2 * size, size + 1] if size <= DOUBLED and not batch else [size + 1]

    def runs(self, inputs: Inputs, mode: Any = None) -> Any:
        """What the model returns, or None if it raises an error."""
        arguments, options = call_arguments(inputs)
        with evaluation_mode(self.model), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                if mode is None:
                    return (self.model(*arguments, **options),)
                with mode:
                    return (self.model(*arguments, **options),)
            except Exception as error:  # it is not a call, whatever the model says about it
                self.error = error
                return None

    def stuck(self, wide: Mapping[Axis, int]) -> Iterator[str]:
        """Sentences about axes of size 1 that cannot be varied, unless it is a weight that does not fit."""
        for (number, axis), size in self.axes.items():
            if size != 1 or (number, axis) in wide:
                continue
            operands = _Operands(self.model)
            if self.runs(self.at({(number, axis): 2}), operands) is None and not operands.weights:
                assert self.error is not None
                yield (
                    f"input {self.name(number)} has size 1 along axis {axis}, and size 1 proves nothing about others; "
                    f"the model does not run at those that were tried ({first_line(self.error)}): give a larger "
                    "example, or further ones as also=[...]"
                )

    def renumbered(self, number: int) -> tuple[list[Inputs], bool]:
        """Calls with other values of a Python number that give results of the same form, and whether any ran at all."""
        value = self.leaves[number]
        before = self.runs(self.given)
        if isinstance(value, bool):
            values: list[Any] = [not value]
        elif isinstance(value, int):
            values = [value + step for step in range(1, NUMBERS + 1)] + [
                value - step for step in range(1, NUMBERS + 1) if value >= step
            ]
        else:
            values = [1.7 * value + 0.3, 0.6 * value + 0.1]
        found: list[Inputs] = []
        ran = False
        for other in values:
            made: Inputs = tree_unflatten([*self.leaves[:number], other, *self.leaves[number + 1 :]], self.form)
            result = self.runs(made)
            ran = ran or result is not None
            if _alike(before, result):
                found.append(made)
        return found, ran


def _alike(one: Any, other: Any) -> bool:
    """Whether two results have one form: an output with hidden states beside it is the answer to another question."""
    if one is None or other is None or tree_structure(one) != tree_structure(other):
        return False
    shapes = [[x.shape if isinstance(x, Tensor) else type(x) for x in tree_leaves(result)] for result in (one, other)]
    return shapes[0] == shapes[1]


class _Operands(TorchFunctionMode):
    """Watches whether the last operation had an operand made of weights alone: then it is they that fix a size."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # the tensors are kept, or a new one could get the id of an old one
        self.made = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self.weights = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and remember what is made of weights alone."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        ours = [id(tensor) in self.made for tensor in tensors]
        self.weights = any(ours)
        result = func(*args, **(kwargs or {}))
        if ours and all(ours):
            self.made |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        self.weights = False
        return result
