"""How many networks and examples go through one forward pass, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebasin.errors import InputError
from onebasin.functional.call import (
    BATCH,
    Bound,
    Call,
    Inputs,
    Pass,
    Vectorised,
    as_seen,
    batches,
    check_fits,
    examples_in,
    fixed_buffers,
    floating_dtype,
    mapped,
    moved,
    narrowed,
    one_tensor,
    undisturbed,
)
from onebasin.population import Population

# ----------------------------------------------------------------------
# What a whole population computes: members side by side through one vectorised forward pass.


def predictions(
    model: nn.Module,
    population: Population,
    inputs: Inputs,
    *,
    chunk: int = 8,
    batch: int = BATCH,
    several: Pass | None = None,
) -> Tensor:
    """Return what every member gives for `inputs`, (members, examples, ...).

    >>> population = Population.from_stacked({"weight": torch.tensor([[[1.0]], [[2.0]]]), "bias": torch.zeros(2, 1)})
    >>> predictions(nn.Linear(1, 1), population, torch.tensor([[3.0]])).flatten()
    tensor([3., 6.])

    Args:
        model: the function; left exactly as it was.
        population: the weights, read `chunk` members at a time.
        inputs: as in `outputs`.
        chunk: members in one vectorised pass. Models that torch cannot vectorise are run member by member.
        batch: largest number of examples in one pass.
        several: `side_by_side` of the model, for who calls again and again: it remembers whether torch can vectorise.
    """
    if not len(population):
        raise InputError("expected at least one network to predict with, found an empty population: add members")
    result: Tensor | None = None
    several = several or side_by_side(model)
    for start, block in population.blocks(chunk):
        check_fits(model, block, members=True)
        part = _over(several, block, inputs, batch)
        if result is None:
            result = part.new_empty((len(population), *part.shape[1:]))
        result[start : start + len(part)] = part
    assert result is not None  # the population is not empty
    return result


def side_by_side(model: nn.Module) -> Pass:
    """What runs a block of members; nothing is recorded for a gradient."""
    return Vectorised(_Together(model), _OneByOne(model))


def one_by_one(model: nn.Module) -> Pass:
    """The same for a model that torch cannot vectorise."""
    return _OneByOne(model)


def vectorises(model: nn.Module, state: Mapping[str, Tensor], call: Call) -> bool:
    """Whether torch can run several networks of a model in one pass, tried with one of them.

    >>> vectorises(nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), ((torch.zeros(2, 1),), {}))
    True
    """
    try:
        _Together(model)({name: value[None] for name, value in state.items()}, call)
    except Exception:  # vmap refuses in many ways; if the fault is the model's, a plain call will say so
        return False
    return True


def _over(several: Pass, block: Mapping[str, Tensor], inputs: Inputs, batch: int) -> Tensor:
    return narrowed(torch.cat([several(block, call) for _, call in batches(inputs, batch)], dim=1), block)


class _OneByOne:
    """Each member by itself: right for every model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, block: Mapping[str, Tensor], call: Call) -> Tensor:
        members = len(next(iter(block.values())))
        states = ({name: value[index] for name, value in block.items()} for index in range(members))
        return torch.stack([Bound(self.model, state)(call) for state in states])


class _Together:
    """All members of a block in one pass through `torch.func.vmap`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, block: Mapping[str, Tensor], call: Call) -> Tensor:
        stacked = as_seen(self.model, block)
        dtype, device = floating_dtype(stacked), next(iter(stacked.values())).device
        fixed = fixed_buffers(self.model, device, dtype)

        def one(tensors: Mapping[str, Tensor], placed: Call) -> Tensor:
            arguments, options = placed
            everything = {**fixed, **tensors}
            return one_tensor(
                self.model, functional_call(self.model, everything, arguments, options, tie_weights=False)
            )

        with undisturbed(self.model, call):
            return mapped(one, stacked, moved(call, device, dtype))


# ----------------------------------------------------------------------
# How many networks and examples go through one forward pass, so that memory stays bounded.


MEMBERS = 16  # more networks in one pass gain nothing on a processor
ROOM = 256 << 20  # bytes for the activations of one pass
HELD = 64 << 20  # bytes for the weights of the networks in one pass, and for their outputs
ALIVE = 3  # the widest activations that a forward pass holds at a time: read, written, and a skip connection


@dataclass(frozen=True)
class Portion:
    """What goes through a model at a time.

    Attributes:
        chunk: networks in one pass, which one worker reads, and whose outputs it hands on.
        batch: examples in one pass.
    """

    chunk: int
    batch: int


def portion(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, chunk: int | None = None, batch: int | None = None
) -> Portion:
    """Choose what is not given, from one pass of one network over two examples; with both given there is no such pass.

    Args:
        model: the function.
        state: one of its networks.
        inputs: all examples.
        chunk: networks in one pass, if somebody has chosen.
        batch: examples in one pass, if somebody has chosen.

    Raises:
        InputError: a chunk of no networks was asked for, or a network does not give one row for each example.
    """
    for name, what, number in (("chunk", "network", chunk), ("batch", "example", batch)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise InputError(f"a {name} has at least 1 {what}, found {number}: leave {name} out to have it chosen")
    if chunk is not None and batch is not None:
        return Portion(chunk, batch)
    examples, own = examples_in(inputs), footprint(model, state, inputs)
    batch = max(1, min(BATCH, examples, ROOM // (own.activations * (chunk or 1)))) if batch is None else batch
    weights = sum(tensor.nbytes for tensor in state.values()) + 1
    most = min(MEMBERS, HELD // (own.outputs * examples), HELD // weights)
    return Portion(chunk or max(1, min(most, ROOM // max(1, min(batch, examples) * own.activations))), batch)


@dataclass(frozen=True)
class Footprint:
    """Bytes that one network needs for one example.

    Attributes:
        activations: while it runs.
        outputs: of the result.
    """

    activations: int
    outputs: int


def footprint(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs) -> Footprint:
    """Measure one network on two examples; see `answers` for what is refused."""
    watch = _Widest()
    result = answers(model, state, inputs, watch)
    return Footprint(ALIVE * watch.nbytes // len(result) + 1, result.nbytes // len(result) + 1)


def answers(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, watch: _Widest | None = None) -> Tensor:
    """What one network gives for the first two examples, or the only one.

    Raises:
        InputError: that is not one row for each of them.
    """
    rows, call = next(batches(inputs, 2))
    bound = Bound(model, state)
    if watch is None:
        result = bound(call)
    else:
        watch.ignore(bound.tensors.values())
        with watch:
            result = bound(call)
    check_rows(result, rows.stop - rows.start)
    return result


def check_rows(result: Tensor, examples: int) -> None:
    """Refuse what a network gives unless it has one row for each example.

    Raises:
        InputError: it has not.
    """
    if not result.dim() or len(result) != examples:
        raise InputError(
            f"expected one row of outputs for each of {examples} examples, found outputs {tuple(result.shape)}: wrap "
            "the model in a module that keeps the examples on the first axis"
        )


def pieces(answer: Tensor, members: int, inputs: Inputs, held: int) -> Iterator[Inputs]:
    """Inputs in pieces for which the outputs of all networks fit into memory.

    Args:
        answer: of one network for a few examples, see `answers`.
        members: number of networks.
        inputs: all examples.
        held: bytes for the outputs.
    """
    each = members * answer.nbytes // len(answer)
    for _, (arguments, named) in batches(inputs, max(1, held // max(1, each))):
        yield named or arguments


class _Widest(TorchDispatchMode):
    """Looks for the largest result of any operation that is no view of a weight."""

    def __init__(self) -> None:
        prepare: Callable[[], None] = super().__init__  # not annotated by torch
        prepare()
        self.nbytes = 0
        self.known: set[int] = set()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Take views of these for what they are."""
        self.known.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and measure what it gives."""
        out = func(*args, **kwargs or {})
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.nbytes = max([self.nbytes, *map(self._own, leaves)])
        return out

    def _own(self, leaf: Tensor) -> int:
        """Bytes of a result; an expanded one has fewer than entries."""
        stored = leaf.untyped_storage()
        return 0 if stored.data_ptr() in self.known else min(leaf.nbytes, stored.nbytes())
