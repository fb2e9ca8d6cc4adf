"""From what users hold (dicts, arrays, indices) to stacked tensors (members, *shape)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError
from onebasin.population.shard import block_spec
from onebasin.population.sources import empty
from onebasin.state import State, check_spec, spec_of


def as_tensors(values: Mapping[str, Any]) -> State:
    """Take tensors as they are, detached, and arrays of numpy's kind without a copy where that is safe."""
    try:
        return {name: _as_tensor(value) for name, value in values.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"expected a dict of tensors or arrays, found something else: {error}") from error


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def stack_states(states: Iterable[Mapping[str, Any]]) -> State:
    """Stack state dicts into new tensors (members, *shape), in the order of names of the first."""
    # What a generator yields may be live (the weights of a network in training), so it is copied at once.
    live = not isinstance(states, Sequence)
    members: list[State] = []
    for index, given in enumerate(states):
        state = as_tensors(given)
        if members:
            where = f"member {index}, compared with member 0,"
            check_spec(spec_of(state), spec_of(members[0]), where=where)
        members.append({name: value.clone() for name, value in state.items()} if live else state)
    if not members:
        raise InputError("expected at least one network, found none: pass a list of modules or state dicts")
    return {name: torch.stack([state[name] for state in members]) for name in members[0]}


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


def member_values(values: Any, count: int, dtype: torch.dtype, what: str) -> Tensor | None:
    """Return one value per member (count,), or None."""
    if values is None:
        return None
    found = torch.as_tensor(values).detach().to(device="cpu", dtype=dtype)
    if tuple(found.shape) != (count,):
        raise InputError(
            f"expected {what} of shape ({count},), one per member, found {tuple(found.shape)}: give one per member"
        )
    return found


def as_rows(index: slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """Translate a slice, a list of integers, or a boolean or integer tensor into positions (n,)."""
    if isinstance(index, slice):
        return torch.arange(count)[index] if index.step is None or index.step > 0 else _reversed(index, count)
    if isinstance(index, int):
        raise InputError(f"population[{index}] is not a population: use population.member({index}) for one network")
    rows = torch.as_tensor(index).cpu()
    if rows.dtype == torch.bool:
        if tuple(rows.shape) != (count,):
            raise InputError(f"expected a mask of shape ({count},), found {tuple(rows.shape)}: give one per member")
        return rows.nonzero().flatten()
    rows = rows.to(torch.int64) if rows.numel() == 0 else rows
    wrong = rows.dtype.is_floating_point or rows.dim() != 1 or bool(((rows < -count) | (rows >= count)).any())
    if wrong:
        raise InputError(f"expected a list of members from {-count} to {count - 1}, found {index}: correct the list")
    return torch.where(rows < 0, rows + count, rows).to(torch.int64)


def _reversed(index: slice, count: int) -> Tensor:
    """Torch has no negative steps."""
    return torch.tensor(range(count)[index], dtype=torch.int64)


def flat_rows(matrix: Any) -> tuple[Tensor, Tensor | None]:
    """A matrix (members, D), and the chain of each member if it came as (chains, draws, D)."""
    rows, chain = as_tensors({"matrix": matrix})["matrix"], None
    if rows.dim() == 3:
        merged, chain = merge_chains({"matrix": rows})
        rows = merged["matrix"]
    if rows.dim() != 2:
        raise SpecError(
            f"expected a matrix (members, D) or (chains, draws, D), found shape {tuple(rows.shape)}: reshape it"
        )
    return rows, chain


def not_finite_rows(values: Tensor) -> list[int]:
    """Return the members of (n, *shape) that hold NaN or infinity."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex):
        return []
    wide = values.float() if values.dtype.itemsize == 1 else values  # torch knows too little of float8
    rows = ~torch.isfinite(wide.unsqueeze(-1)).flatten(1).all(1)
    return [int(row) for row in rows.nonzero().flatten()]


def checked_result(made: Mapping[str, Tensor], block: State, count: int) -> State:
    """What a function made of a block: it must have the names and the number of members of the block."""
    wrong = [name for name in made if made[name].shape[:1] != (count,)]
    if set(made) != set(block) or wrong:
        found = {name: tuple(value.shape) for name, value in made.items()}
        raise SpecError(
            f"a mapped function must return the names it was given ({', '.join(list(block)[:4])}, ...), "
            f"each with {count} members first; found {found}: correct the function"
        )
    return {name: made[name] for name in block}


def collect(results: Iterator[tuple[int, State]], count: int) -> State:
    """Join blocks into tensors (count, *shape); a single block is taken as it is."""
    whole: State = {}
    for start, block in results:
        size = len(next(iter(block.values())))
        if size == count:
            return block
        if not whole:
            devices = {name: value.device for name, value in block.items()}
            whole = {name: empty(tensor, count, devices[name]) for name, tensor in block_spec(block).items()}
        for name, value in block.items():
            whole[name][start : start + size].copy_(value)
    return whole
