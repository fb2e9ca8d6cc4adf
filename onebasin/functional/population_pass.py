"""Many networks through one forward pass: in blocks of bounded memory, with or without a gradient.

Members of a block are the leading axis of `torch.func.vmap`; a model that cannot be vectorised is run member by member,
with the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from onebasin.errors import InputError
from onebasin.functional.call import (
    BATCH,
    Bound,
    Call,
    Inputs,
    Inventory,
    Pass,
    Vectorised,
    as_seen,
    batches,
    check_fits,
    examples_in,
    fixed_buffers,
    floating_dtype,
    mapped,
    member_by_member,
    moved,
    narrowed,
    warn_loop,
)
from onebasin.functional.norms import Given, frozen_norms, measured
from onebasin.functional.observe import OperationObserver
from onebasin.functional.output import one_tensor
from onebasin.population import Population
from onebasin.state import shared_names


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
        several: `side_by_side` of the model, for repeated calls: it remembers whether torch can vectorise.
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
    """A forward pass of a block of members; nothing is recorded for a gradient."""
    return Vectorised(model, _Together(model), _OneByOne(model))


def one_by_one(model: nn.Module) -> Pass:
    """The same for a model that torch cannot vectorise."""
    return _OneByOne(model)


def vectorises(model: nn.Module, state: Mapping[str, Tensor], call: Call, members: int = 1) -> bool:
    """Whether torch can run several networks of a model in one pass, tried with one of them.

    Warns:
        SlowWarning: it cannot, and there are several `members`, which then run one after the other.

    >>> vectorises(nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), ((torch.zeros(2, 1),), {}))
    True
    """
    try:
        _Together(model)({name: value[None] for name, value in state.items()}, call)
    except Exception as error:  # vmap refuses in many ways; if the fault is the model's, the plain call says so
        Bound(model, state)(call)
        if members > 1:
            warn_loop(model, error)
        return False
    return True


def _over(several: Pass, block: Mapping[str, Tensor], inputs: Inputs, batch: int) -> Tensor:
    return narrowed(torch.cat([several(block, call) for _, call in batches(inputs, batch)], dim=1), block)


class Differentiable:
    """What members give for a batch, (members, examples, ...), in evaluation mode and with a gradient.

    With `statistics` the running statistics of norms are measured on these inputs first, for each member and with a
    gradient, as for networks that are drawn.

    The gradient is taken through all members at once with `torch.func.vmap`, or member by member if the model cannot
    be vectorised. Weights are expected as the model sees them: every state-dict name, float32 or wider.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, *, constant: Collection[str] = ()
    ) -> None:
        """Buffers outside of the state dict are part of the function, and so are `constant` norms."""
        self.model, self.device, self.dtype = model, device, dtype
        self._constant, self._first = frozen_norms(model) | set(constant), shared_names(model)
        self._fixed = fixed_buffers(model, device, dtype)
        self._inventory = Inventory(model)
        self._several = Vectorised(model, partial(mapped, self._one), partial(member_by_member, model, self._one))

    def __call__(self, stacked: Mapping[str, Tensor], call: Call, statistics: Call | None = None) -> Tensor:
        """Outputs of members (members, *shape) of every tensor for one batch."""
        given = (call, statistics) if statistics is not None else (call,)
        placed: Any = tuple(moved(each, self.device, self.dtype) for each in given)
        inventory = self._inventory
        with inventory.evaluation_mode(), torch.random.fork_rng(devices=[]), inventory.own_tables(call):
            return self._several(stacked, placed)

    def _one(self, tensors: Mapping[str, Tensor], placed: Any) -> Tensor:
        (arguments, options), *measured_on = placed  # one Call, or two
        everything = {**self._fixed, **tensors}
        if measured_on:  # a shared tensor must be one object for its norm to be known by it
            everything |= {name: everything[first] for name, first in self._first.items()}
            statistics = measured(self.model, everything, measured_on[0], self._constant)
            observed: contextlib.AbstractContextManager[Any] = Given(everything, statistics)
        else:
            observed = contextlib.nullcontext()
        # evaluation_mode restores buffers afterwards, so an update in place must not reach the caller's tensors
        with observed:
            return one_tensor(
                self.model, functional_call(self.model, everything, arguments, options, tie_weights=False)
            )


def constant_over_members(model: nn.Module, block: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the tensors that all members of a block share, if some parameter is among them and some is not.

    What the model computes from them and from its inputs alone has no member axis under `torch.func.vmap`, so the trunk
    of networks that differ in their heads runs once for all of them.

    >>> model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1, bias=False))
    >>> block = {"0.weight": torch.ones(3, 2, 1), "0.bias": torch.ones(3, 2), "1.weight": torch.rand(3, 1, 2)}
    >>> sorted(constant_over_members(model, block))
    ['0.bias', '0.weight']
    """
    if len(next(iter(block.values()), ())) < 2:
        return frozenset()
    shared = frozenset(name for name, value in block.items() if _constant(value))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return shared if parameters & shared and parameters - shared else frozenset()


def _constant(value: Tensor) -> bool:
    """Whether all members (n, ...) are equal; most that differ do so in their first entries."""
    flat = value.reshape(len(value), -1)
    return torch.equal(flat[1:, :_PROBES], flat[:-1, :_PROBES]) and torch.equal(flat[1:], flat[:-1])


class _OneByOne:
    """Each member by itself: right for every model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, block: Mapping[str, Tensor], call: Call) -> Tensor:
        members = len(next(iter(block.values())))
        states = ({name: value[index] for name, value in block.items()} for index in range(members))
        return torch.stack([Bound(self.model, state)(call) for state in states])


class _Together:
    """All members of a block in one pass through `torch.func.vmap`; what they share is computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.inventory = model, Inventory(model)

    def __call__(self, block: Mapping[str, Tensor], call: Call) -> Tensor:
        shared = constant_over_members(self.model, block)
        if shared:
            with contextlib.suppress(Exception):  # the model writes into a shared tensor: each member gets its own
                return self.run(block, call, shared)
        return self.run(block, call, frozenset())

    def run(self, block: Mapping[str, Tensor], call: Call, shared: Collection[str]) -> Tensor:
        """The same with the names of the tensors that all members share."""
        stacked = as_seen(self.model, block)
        dtype, device = floating_dtype(stacked), next(iter(stacked.values())).device
        fixed = fixed_buffers(self.model, device, dtype)
        fixed |= {name: stacked.pop(name)[0] for name in shared}

        def one(tensors: Mapping[str, Tensor], placed: Call) -> Tensor:
            arguments, options = placed
            everything = {**fixed, **tensors}
            return one_tensor(
                self.model, functional_call(self.model, everything, arguments, options, tie_weights=False)
            )

        with self.inventory.undisturbed(call):
            return mapped(one, stacked, moved(call, device, dtype))


_PROBES = 16  # entries of a tensor by which most unequal members are told apart
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
    model: nn.Module,
    state: Mapping[str, Tensor],
    inputs: Inputs,
    *,
    chunk: int | None = None,
    batch: int | None = None,
    shared: Collection[str] = (),
) -> Portion:
    """Choose what is not given, from one pass of one network over two examples; with both given there is no such pass.

    Args:
        model: the function.
        state: one of its networks.
        inputs: all examples.
        chunk: networks in one pass; None chooses.
        batch: examples in one pass; None chooses.
        shared: names of the tensors that all networks have in common: what these determine is held once.

    Raises:
        InputError: a chunk of no networks was asked for, or a network does not give one row for each example.
    """
    for name, what, number in (("chunk", "network", chunk), ("batch", "example", batch)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise InputError(f"a {name} has at least 1 {what}, found {number}: leave {name} out to have it chosen")
    if chunk is not None and batch is not None:
        return Portion(chunk, batch)
    examples, each = examples_in(inputs), footprint(model, state, inputs)
    batch = max(1, min(BATCH, examples, ROOM // (each.activations * (chunk or 1)))) if batch is None else batch
    weights = sum(tensor.nbytes for tensor in state.values()) + 1
    most = min(MEMBERS, HELD // (each.outputs * examples), HELD // weights)
    if shared and chunk is None:
        most = min(MEMBERS, HELD // (each.outputs * examples), ROOM // weights)
        while most > 1 and _shared_activations(model, state, inputs, shared, most) * min(batch, examples) > ROOM:
            most //= 2
        return Portion(max(1, most), batch)
    return Portion(chunk or max(1, min(most, ROOM // max(1, min(batch, examples) * each.activations))), batch)


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
    """Bytes that one network needs, measured on two examples; see `answers` for what is refused."""
    widest = _Widest()
    result = answers(model, state, inputs, widest)
    return Footprint(ALIVE * widest.nbytes // len(result) + 1, result.nbytes // len(result) + 1)


def _shared_activations(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, shared: Collection[str], members: int
) -> int:
    """Bytes of activations for one example of so many networks that share tensors, measured on two examples."""
    rows, call = next(batches(inputs, 2))
    examples: int = rows.stop - rows.start
    block = {name: value.expand(members, *value.shape) for name, value in state.items()}
    widest = _Widest()
    try:
        with widest:
            _Together(model).run(block, call, shared)
    except Exception:  # vmap refuses in many ways; then there is nothing to share
        return ROOM + 1
    return ALIVE * widest.nbytes // examples + 1


def answers(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, widest: _Widest | None = None) -> Tensor:
    """What one network gives for the first two examples, or the only one.

    Raises:
        InputError: that is not one row for each of them.
    """
    rows, call = next(batches(inputs, 2))
    bound = Bound(model, state)
    if widest is not None:
        widest.weights |= {tensor.untyped_storage().data_ptr() for tensor in bound.tensors.values()}
    with widest or contextlib.nullcontext():
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


class _Widest(OperationObserver):
    """Measures the largest result of any operation that is no view of `weights`, addresses of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.weights: set[int] = set()

    def operation(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Take the bytes of what an operation gives; an expanded tensor has fewer than its entries."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (stored := leaf.untyped_storage()).data_ptr() not in self.weights:
                self.nbytes = max(self.nbytes, min(leaf.nbytes, stored.nbytes()))
