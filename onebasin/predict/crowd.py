"""What a whole population computes: members side by side through one vectorised forward pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onebasin.calling import Call, Inputs
from onebasin.errors import InputError
from onebasin.memory import undisturbed
from onebasin.population import Population
from onebasin.predict.batches import batches, moved
from onebasin.predict.forward import (
    BATCH,
    Bound,
    as_seen,
    check_fits,
    fixed_buffers,
    floating_dtype,
    narrowed,
    one_tensor,
)
from onebasin.predict.vectorised import Pass, Vectorised, mapped


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
