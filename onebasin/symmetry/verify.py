"""Proof by evaluation: f(g.w, x) against f(w, x) in float64, for random elements g.

Weights are made generic first: ones and zeros, as layers are initialised, would hide errors. Whatever the model casts
to a shorter floating type is kept in float64, so that a symmetry shows an error of rounding size and nothing else
does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from onebasin.calling import Inputs, call_arguments, evaluation_mode, global_seed
from onebasin.errors import SymmetryError
from onebasin.state import State, state_of
from onebasin.symmetry.element import Element
from onebasin.symmetry.group import Symmetry
from onebasin.symmetry.memory import nothing_remembered
from onebasin.symmetry.space import FREEDOMS
from onebasin.trace import shared_memory

TOLERANCE = 1e-9
DRAWS = 2


@dataclass(frozen=True)
class Row:
    """One experiment: the freedom of a space that was used, and the relative error of the outputs."""

    space: str
    freedom: str
    error: float
    passed: bool


@dataclass(frozen=True)
class Proof:
    """What `verify` found: one row per space and freedom, and a last one for elements of the whole group."""

    rows: tuple[Row, ...]
    tolerance: float

    @property
    def max_error(self) -> float:
        """Largest relative error."""
        return max((row.error for row in self.rows), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every row is within the tolerance."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        """A table for people."""
        width = max([len(row.space) for row in self.rows] + [5])
        lines = [f"{'space'.ljust(width)}  freedom      relative error"]
        lines += [
            f"{r.space.ljust(width)}  {r.freedom:<11}  {r.error:.1e}{'' if r.passed else '  FAILED'}" for r in self.rows
        ]
        verdict = "the function is unchanged" if self.passed else "THE FUNCTION CHANGES"
        return "\n".join(
            [*lines, f"{verdict}: largest relative error {self.max_error:.1e}, tolerance {self.tolerance:.0e}, float64"]
        )


def verify(
    model: nn.Module,
    symmetry: Symmetry,
    inputs: Inputs,
    *,
    spaces: Collection[str] | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> Proof:
    """Prove a symmetry by evaluation, one row per space and freedom.

    Args:
        model: the module; evaluated in evaluation mode and float64, and left as it was.
        symmetry: found by `discover` or written by hand.
        inputs: as for `discover`.
        spaces: names of the spaces to try; all of them, and elements of the whole group, if not given.
        seed: seeds elements, weights and inputs of the experiment.
        tolerance: largest |f(g.w, x) - f(w, x)| relative to the largest |f(w, x)|.
    """
    rows = []
    with nothing_remembered(model, inputs):
        bench = _Bench(model, symmetry, inputs, seed)
        for space in symmetry.spaces:
            for freedom in space.freedoms if spaces is None or space.name in spaces else ():
                rows.append(_row(bench, symmetry, tolerance, (space.name,), (freedom,)))
        if spaces is None:
            rows.append(_row(bench, symmetry, tolerance, None, FREEDOMS))
    return Proof(tuple(rows), tolerance)


def proven(
    model: nn.Module,
    symmetry: Symmetry,
    inputs: Inputs,
    *,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    brief: bool = False,
    reason: str = "the proof by evaluation failed, so the analysis missed something (please report the model)",
) -> Symmetry:
    """The part of a symmetry that holds: the same object if all of it does.

    Random elements of the whole group are tried first: if they leave the function alone, so does each of their parts,
    save for cancellations of probability zero. Only if they fail is every space and freedom tried on its own, and
    what fails removed.

    With `brief` one element is tried at one input, for further examples beside one that is proved in full; `reason`
    says why a freedom was removed.
    """
    if not symmetry.spaces:
        return symmetry
    bench = _Bench(model, symmetry, inputs, seed, brief)
    if all(_row(bench, symmetry, tolerance, None, FREEDOMS).passed for _ in range(1 if brief else DRAWS)):
        return symmetry
    removed: dict[str, list[str]] = {}
    for space in symmetry.spaces:
        for freedom in space.freedoms:
            if not _row(bench, symmetry, tolerance, (space.name,), (freedom,)).passed:
                removed.setdefault(space.name, []).append(freedom)
    rest = symmetry.without(removed, reason)
    if rest.spaces and not _row(bench, rest, tolerance, None, FREEDOMS).passed:
        everything = {space.name: space.freedoms for space in rest.spaces}
        rest = rest.without(
            everything, "its freedoms pass the proof one by one but not together (please report the model)"
        )
    return rest


def _row(
    bench: _Bench, symmetry: Symmetry, tolerance: float, spaces: tuple[str, ...] | None, freedoms: tuple[str, ...]
) -> Row:
    element = _stirred(symmetry.random(bench.generator, spaces=spaces, freedoms=freedoms), symmetry, spaces, freedoms)
    error = bench.error(symmetry, element)
    name, kind = ("all", "everything") if spaces is None else (spaces[0], freedoms[0])
    return Row(name, kind, error, error <= tolerance)


def _stirred(
    element: Element, symmetry: Symmetry, spaces: Collection[str] | None, freedoms: Collection[str]
) -> Element:
    """Make sure that what may move does: of two units, a random order moves none half of the time.

    In each space the first copy is not left alone, and copies are not all treated alike.
    """
    orders = {name: order.clone() for name, order in element.orders.items()}
    factors = {name: factor.clone() for name, factor in element.factors.items()}
    for space in symmetry.spaces:
        if spaces is not None and space.name not in spaces:
            continue
        if space.permutable and "permutation" in freedoms:
            rows = orders[space.name].view(-1, space.size)
            still = torch.arange(space.size)
            if torch.equal(rows[0], still):
                rows[0] = still.roll(1)
            if len(rows) > 1 and bool((rows == rows[0]).all()):
                rows[1] = still
        for number, kind in enumerate(space.generators):
            if kind.endswith("sign") and kind in freedoms and bool((factors[space.name][number] == 1).all()):
                factors[space.name][number].view(-1)[0] = -1
    return Element(orders, factors)


class _Bench:
    """Generic weights and inputs, and the function's values there."""

    def __init__(self, model: nn.Module, symmetry: Symmetry, inputs: Inputs, seed: int, brief: bool = False) -> None:
        self.model = model
        self.generator = torch.Generator().manual_seed(seed)
        variances = {leg.tensor for space in symmetry.spaces for leg in space.legs if leg.shift}
        self.state = {name: self._generic(tensor, name in variances) for name, tensor in state_of(model).items()}
        for name, first in shared_memory(model)[0].items():
            if name in self.state:
                self.state[name] = self.state[first]
        self.inputs = self._inputs(inputs)[: 1 if brief else None]
        self.values = [self._outputs(self.state, given) for given in self.inputs]
        if not any(bool(torch.isfinite(value).any()) for values in self.values for value in values):
            raise SymmetryError(
                "the model returns no finite number for the example input, so nothing can be proved; give other inputs."
            )

    def _generic(self, tensor: Tensor, positive: bool) -> Tensor:
        """A tensor without special values: positive ones stay positive, others get noise of their own size."""
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        wide = tensor.detach().double()
        if wide.layout != torch.strided:
            return wide  # a sparse matrix is data: which entries it has is no accident
        noise = torch.randn(wide.shape, generator=self.generator, dtype=torch.float64).to(wide.device)
        if positive or (wide.numel() and bool((wide > 0).all())):
            return wide.clamp_min(0.1) * torch.exp(0.3 * noise)
        fan_in = math.prod(wide.shape[1:]) if wide.dim() > 1 else 4
        return wide + noise * 0.5 / math.sqrt(max(fan_in, 1))

    def _inputs(self, inputs: Inputs) -> list[Any]:
        """The inputs as given and, for floating-point ones, with noise: a zero input would hide errors."""
        given = call_arguments(inputs)
        wide = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, given)

        def noisy(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            noise = torch.randn(value.shape, generator=self.generator, dtype=torch.float64).to(value.device)
            return value + 0.5 * noise

        if any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(given)):
            return [tree_map(noisy, wide), wide]
        return [wide]

    def _outputs(self, state: Mapping[str, Tensor], inputs: Any) -> list[Tensor]:
        arguments, options = inputs
        buffers = {name: buffer.double() for name, buffer in self.model.named_buffers() if buffer.is_floating_point()}
        tensors = {**buffers, **state}
        with _same_conditions(), evaluation_mode(self.model), torch.no_grad(), _Float64():  # type: ignore[no-untyped-call]
            result = torch.func.functional_call(self.model, tensors, arguments, options, tie_weights=False)
        return [leaf.double() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def error(self, symmetry: Symmetry, element: Element) -> float:
        """Largest relative error over inputs and outputs."""
        moved: State = symmetry.apply(element, self.state)
        worst = 0.0
        for given, values in zip(self.inputs, self.values, strict=True):
            for before, after in zip(values, self._outputs(moved, given), strict=True):
                worst = max(worst, _relative_error(before, after))
        return worst


def _relative_error(before: Tensor, after: Tensor) -> float:
    finite = torch.isfinite(before)
    if not torch.equal(finite, torch.isfinite(after)):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    scale = before[finite].abs().max().clamp_min(1e-300)
    return float((after[finite] - before[finite]).abs().max() / scale)


@contextmanager
def _same_conditions() -> Iterator[None]:
    """Float64 by default, and the same random numbers at every evaluation; the user's settings come back afterwards."""
    dtype = torch.get_default_dtype()
    with global_seed(0):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


class _Float64(TorchDispatchMode):
    """Keep every floating-point tensor in float64, whatever dtype the model asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Widen arguments and requested dtypes."""
        kwargs = {key: _widened(value) for key, value in kwargs.items()} if kwargs else {}
        return func(*[_widened(value) for value in args], **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype is not torch.float64 else value
    if isinstance(value, tuple | list):
        return type(value)(_widened(item) for item in value)
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
