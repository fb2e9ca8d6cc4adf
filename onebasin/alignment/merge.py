"""Many networks into one: the mean of aligned members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onebasin.alignment.align import align
from onebasin.alignment.repair import blend, recalibrate, repair, unit_statistics
from onebasin.errors import InputError
from onebasin.functional import (
    Data,
    inputs_of,
    norms_used,
    refreshed_one,
    select_output,
    statistics_in,
    warn_stale,
)
from onebasin.population import Population
from onebasin.state import State, check_finite
from onebasin.symmetry import Symmetry


def merge(
    model: nn.Module | None,
    population: Population,
    symmetry: Symmetry | None = None,
    data: Data = None,
    *,
    variance: str | None = "auto",
    weights: Sequence[float] | Tensor | None = None,
) -> State:
    """Average a population into one network.

    Floating-point tensors are summed in float64, block by block, and given back in their dtypes; integer ones come
    from the first member. The mean of one member is that member.

    >>> merge(None, Population.from_states([{"w": torch.zeros(2)}, {"w": torch.ones(2)}]), weights=[1, 3])
    {'w': tensor([0.7500, 0.7500])}

    Args:
        model: the function, for `variance`; may be None where that needs no data.
        population: the networks; they are not changed.
        symmetry: align them first, see `align`; without it they are averaged as they are.
        data: for `variance`, inputs or data as in `evaluate`, of which the inputs are used. Two positional inputs of a
            model are a list or a dict, since a tuple of two is a pair.
        variance: "recalibrate" measures the statistics of batch norms on the data; "repair" also restores the spread of
            all other units to the mean of the members' (one pass over the data per member); None does neither;
            "auto" recalibrates several members with batch norms where model and data are given, and warns where
            they are not; statistics that are the same in all members are constants, and stay.
        weights: share of each member (members,), not negative; they are divided by their sum.

    Raises:
        InputError: no members, weights that are none, or data missing for `variance`.
        SpecError: a member is not finite.

    Warns:
        StatisticsWarning: the members have running statistics of their own, and there are no data to measure those of
            the mean on.
    """
    if variance not in (None, "auto", "recalibrate", "repair"):
        raise InputError(f'expected variance "auto", "recalibrate", "repair" or None, found {variance!r}')
    if not isinstance(population, Population):
        raise InputError(
            f"expected merge(model, population, ...) with a Population, found {type(population).__name__}: give None "
            "as the model where there is none"
        )
    if model is not None:
        select_output(model)
    shares = _shares(weights, len(population))
    members = population if symmetry is None else align(population, symmetry).population
    state = _mean(members, shares)
    check_finite(state, where="the mean of the networks")
    if variance is None or (variance == "auto" and len(population) == 1):
        return state
    given = data[0] if isinstance(data, tuple) and len(data) == 2 else data
    inputs = None if given is None else inputs_of(given, model)
    if model is None or inputs is None:
        if variance != "auto":
            raise InputError(f"variance={variance!r} measures activations: give a model and data= too")
        if names := own_statistics(members):
            remedy = "give merge a model and data= (on the command line --statistics), or variance=None to keep them"
            warn_stale("merged networks", names, remedy)
        return state
    if variance == "auto":
        used = norms_used(model, state, inputs)
        same = [name for name in used if not _differs(members, name)]
        return refreshed_one(model, state, inputs, constant=same)[0] if len(same) < len(used) else state
    if variance == "recalibrate":
        return recalibrate(model, state, inputs)
    parts = [unit_statistics(model, member, inputs) for member in members]
    return repair(model, state, blend(parts, shares.tolist()), inputs).state


def own_statistics(population: Population) -> tuple[str, ...]:
    """Names of the running means in which the networks of a population differ, as torch's norms call them."""
    return tuple(name for name in statistics_in(population.names) if _differs(population, name))


def _differs(population: Population, name: str) -> bool:
    """Whether a running mean, or the variance beside it, is not the same in all networks."""
    names = [name, f"{name.removesuffix('running_mean')}running_var"]
    tensors = [population.tensor(statistic) for statistic in names if statistic in population.spec]
    return any(not torch.equal(value, value[:1].expand_as(value)) for value in tensors)


def _shares(weights: Sequence[float] | Tensor | None, members: int) -> Tensor:
    """Weights that sum to one, (members,) float64."""
    if not members:
        raise InputError("expected at least one network to merge, found an empty population: add members")
    given = torch.ones(members) if weights is None else torch.as_tensor(weights)
    wide = given.detach().double().cpu()
    if tuple(wide.shape) != (members,) or not bool((wide >= 0).all()) or not 0 < float(wide.sum()) < float("inf"):
        raise InputError(
            f"expected {members} weights that are finite and not negative, one above zero, found {weights}: "
            "give one per member"
        )
    return wide / wide.sum()


def _mean(population: Population, shares: Tensor) -> State:
    """Weighted mean, one block in memory at a time; a tensor that all members share is kept as it is, to the bit."""
    total: State = {}
    first: State = population.member(0)
    shared = set(population.spec)
    for start, block in population.blocks():
        for name, values in block.items():
            if name in shared and not torch.equal(values, first[name].expand_as(values)):
                shared.discard(name)
            if not (values.is_floating_point() or values.is_complex()):
                continue
            share = shares[start : start + len(values)].to(values.device)
            wide = values.to(torch.complex128 if values.is_complex() else torch.float64)
            part = torch.tensordot(share.to(wide.dtype), wide, 1)
            total[name] = total[name] + part if name in total else part
    return {
        name: total[name].to(tensor.dtype) if name in total and name not in shared else first[name]
        for name, tensor in population.spec.items()
    }
