"""Which tensors of a crowd are uncertain weights: the model tells, or else their names and values do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onebasin.errors import SpecError
from onebasin.population import Population, constant_tensors
from onebasin.posterior.coordinates import Coordinates
from onebasin.state import State, as_spec, check_spec, dtype_name, shared_names, trained_parameters


def uncertain(population: Population, model: nn.Module | None = None) -> Coordinates:
    """The layout of the uncertain weights of a crowd.

    With a model: its trained parameters, see `trained_parameters`, tied ones once. Without one: all floating-point
    tensors but the running statistics of norms, known by torch's names for them, and but tensors that are the same in
    all members while others are not, because a constant has no spread; two tensors that are equal bit for bit in every
    member, and not the same in all members, count as one tied tensor.

    >>> crowd = Population.from_models([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    >>> uncertain(crowd).names
    ('weight', 'bias')

    Raises:
        SpecError: the model is of another architecture, or there is no real weight.
    """
    if model is None:
        names = _real(population, trained_parameters(population.spec))
        constant = constant_tensors(population, names) if len(population) > 1 else set()
        if len(constant) < len(names):
            names = [name for name in names if name not in constant]
        tied = _equal_everywhere(population, names)
    else:
        check_spec(population.spec, as_spec(model), where="the population, compared with the model,")
        names = _real(population, trained_parameters(model))
        tied = {name: first for name, first in shared_names(model).items() if first in names and name != first}
    return Coordinates(tuple(name for name in names if name not in tied), population.spec, tied)


def _real(population: Population, names: Sequence[str]) -> list[str]:
    """The floating-point tensors among these; complex ones are refused, and so is a crowd without any."""
    for name in names:
        if population.spec[name].dtype.is_complex:
            raise SpecError(
                f"expected real weights, found {dtype_name(population.spec[name].dtype)} under {name}: store real and "
                "imaginary parts as two tensors (torch.view_as_real)"
            )
    found = [name for name in names if population.spec[name].dtype.is_floating_point and population.spec[name].size]
    if not found:
        raise SpecError(
            "expected floating-point weights, found none in the population: give networks with parameters to infer"
        )
    return found


def _equal_everywhere(population: Population, names: list[str]) -> dict[str, str]:
    """Names whose tensor equals an earlier one in all members: name -> the first such name."""
    if not len(population):
        return {}
    begin = population.member(0)
    groups = _equal_groups(begin, names)
    moving: set[str] = set()
    for _, block in population.blocks() if groups else ():
        groups = [part for group in groups for part in _equal_groups(block, group)]
        moving |= {name for group in groups for name in group if not bool((block[name] == begin[name]).all())}
        if not groups:
            break
    return {name: own for own, *others in groups if own in moving for name in others}


def _equal_groups(state: State, names: list[str]) -> list[list[str]]:
    """Names whose tensors are equal, of those that equal any other."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[list[str]]] = {}
    for name in names:
        value: Tensor = state[name]
        alike = groups.setdefault((tuple(value.shape), value.dtype), [])
        own = next((group for group in alike if torch.equal(state[group[0]], value)), None)
        if own is None:
            alike.append([name])
        else:
            own.append(name)
    return [group for alike in groups.values() for group in alike if len(group) > 1]


def vector_dtype(layout: Coordinates) -> torch.dtype:
    """What flat vectors are computed in: the widest dtype of the uncertain tensors, at least float32."""
    dtype = torch.float32
    for name in layout.names:
        dtype = torch.promote_types(dtype, layout.spec[name].dtype)
    return dtype
