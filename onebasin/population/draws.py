"""Draws of other samplers: arrays by name, or one flat matrix, as members of an architecture.

Arrays are named like the state dict and have one leading axis (draws) or two (chains, draws). Only the shapes of the
architecture tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.errors import SpecError
from onebasin.population.names import strip_prefix
from onebasin.state import Spec, State, TensorSpec, flat_size, restore

CHAIN, LOG_DENSITY = "chain", "log_density"  # arrays beside the weights that tell of each draw
_SHOWN = 4  # arrays worth reading in one sentence


class Draws(NamedTuple):
    """Members and what is known of each.

    Attributes:
        stacked: name -> (members, *shape), in the order of the spec and in the dtypes of the arrays.
        chain: chain of each member, or None.
        log_density: log density of each member, or None.
        left_out: names of arrays that are no part of a network.
    """

    stacked: State
    chain: Tensor | None
    log_density: Tensor | None
    left_out: list[str]


def stack_draws(arrays: Mapping[str, Tensor], spec: Spec, where: str, *, axes: Sequence[int] = (1, 2)) -> Draws:
    """Read arrays as draws of networks of a spec; its shapes count, and the dtypes are those of the arrays.

    Args:
        arrays: one array for each tensor, (draws, *shape) or (chains, draws, *shape); or one array (draws, D) or
            (chains, draws, D) of flat networks. Beside them there may be `chain` and `log_density`, one per draw.
        spec: names and shapes of a network.
        where: how a message names the arrays.
        axes: numbers of leading axes that are possible.

    Raises:
        SpecError: the arrays are no draws of such networks.
    """
    stored = strip_prefix(arrays, spec)
    used = [stored[name] for name in spec if name in stored]
    if len(used) == len(spec):
        stacked = {name: _in_kind(arrays[stored[name]], tensor) for name, tensor in spec.items()}
        leading = _leading(stacked, spec, where, axes)
    else:
        used = [_flat_name(arrays, spec, where, axes)]
        matrix = arrays[used[0]]
        leading = matrix.dim() - 1
        kinds = {
            name: TensorSpec(tensor.shape, matrix.dtype if tensor.dtype.is_floating_point else tensor.dtype)
            for name, tensor in spec.items()
        }
        stacked = restore(matrix, kinds)
    chain = None
    if leading == 2:
        stacked, chain = merge_chains(stacked)
    count = len(next(iter(stacked.values())))
    known = {
        name: arrays[name].reshape(-1)
        for name in (CHAIN, LOG_DENSITY)
        if name in arrays and name not in used and arrays[name].numel() == count
    }
    left_out = [name for name in arrays if name not in used and name not in known]
    return Draws(stacked, known.get(CHAIN, chain), known.get(LOG_DENSITY), left_out)


def merge_chains(stacked: State) -> tuple[State, Tensor]:
    """Turn (chains, draws, *shape) into (chains * draws, *shape) and the chain of each member."""
    leading = {name: tuple(value.shape[:2]) for name, value in stacked.items()}
    if len(set(leading.values())) != 1 or any(len(shape) != 2 for shape in leading.values()):
        raise SpecError(
            f"expected tensors (chains, draws, *shape) of equal chains and draws, found {leading}: "
            "stack each tensor over the same chains"
        )
    chains, draws = next(iter(leading.values()))
    return {name: value.flatten(0, 1) for name, value in stacked.items()}, torch.arange(chains).repeat_interleave(draws)


def _in_kind(value: Tensor, tensor: TensorSpec) -> Tensor:
    """Whole numbers where the network has whole ones, such as counters: other programs may have made them real."""
    return value.to(tensor.dtype) if not tensor.dtype.is_floating_point and value.is_floating_point() else value


def _leading(stacked: State, spec: Spec, where: str, axes: Sequence[int]) -> int:
    """The number of axes before those of the network, the same for all."""
    for number in axes:
        sizes = {tuple(value.shape[:number]) for value in stacked.values()}
        if len(sizes) == 1 and all(value.shape[number:] == spec[name].shape for name, value in stacked.items()):
            return number
    wrong = [
        name for name, value in stacked.items() if not any(value.shape[number:] == spec[name].shape for number in axes)
    ]
    rows = [f"{name} {tuple(stacked[name].shape)}" for name in wrong or stacked][:_SHOWN]
    shapes = [f"{name} {spec[name].shape}" for name in wrong or spec][:_SHOWN]
    ahead = " or ".join("(draws, *shape)" if number == 1 else "(chains, draws, *shape)" for number in axes)
    raise SpecError(
        f"expected {ahead} of the networks' {', '.join(shapes)} in {where}, found {', '.join(rows)}: transpose or "
        "reshape the arrays, and stack all of them over the same draws"
    )


def _flat_name(arrays: Mapping[str, Tensor], spec: Spec, where: str, axes: Sequence[int]) -> str:
    """The name of the array of flat networks."""
    size = flat_size(spec)
    flat = [
        name
        for name, value in arrays.items()
        if value.dim() - 1 in axes and value.shape[-1] == size and value.is_floating_point()
    ]
    if len(flat) == 1:
        return flat[0]
    missing = [f"{name} {tensor.shape}" for name, tensor in spec.items() if name not in arrays][:_SHOWN]
    found = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(arrays.items())[:_SHOWN]) or "no array"
    raise SpecError(
        f"expected draws of {', '.join(missing)} or one array (draws, {size}) of flat networks in {where}, found "
        f"{found}: name and shape the arrays like the state dict of the model, dense kernels as (outputs, inputs)"
    )
