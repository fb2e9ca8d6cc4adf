"""Which unit owns which entries of a tensor, and what a unit is worth by what it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onebasin.align.scale.balance import balance
from onebasin.errors import InputError
from onebasin.posterior import Posterior
from onebasin.pruning.criteria import signal_to_noise
from onebasin.state import trained_parameters
from onebasin.symmetry import Leg, Space, Symmetry
from onebasin.symmetry.act import labels

UNIT_CRITERIA = ("norm", "snr", "random")


def owners(space: Space, leg: Leg, shape: Sequence[int]) -> Tensor:
    """For each entry of a tensor the number copy * n + unit of the unit that owns it through this leg, -1 for none.

    >>> from onebasin.symmetry import Grid
    >>> hidden = Space("hidden", 2, True, (), (), (Leg("out.weight", Grid(1, ((0, 2, 2),), ((2, 1),))),))
    >>> owners(hidden, hidden.legs[0], (1, 4))
    tensor([[0, 0, 1, 1]])
    """
    number = torch.zeros([1] * len(shape), dtype=torch.long)
    outside = torch.zeros([1] * len(shape), dtype=torch.bool)
    places = [*zip(leg.over, [size for _, size in space.parents], strict=True), (leg.grid, space.size)]
    for grid, size in places:
        label = _along(labels(grid, shape[grid.axis]), grid.axis, len(shape))
        outside, number = outside | (label < 0), number * size + label
    for grid in leg.within:
        outside = outside | (_along(labels(grid, shape[grid.axis]), grid.axis, len(shape)) < 0)
    return torch.where(outside, -1, number).expand(tuple(shape))


def _along(values: Tensor, axis: int, axes: int) -> Tensor:
    return values.reshape([-1 if number == axis else 1 for number in range(axes)])


def gone(symmetry: Symmetry, removed: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Tensor name -> True where an entry belongs to a removed unit; `removed` is (copies * n,) for each space."""
    found: dict[str, Tensor] = {}
    for space in symmetry.spaces:
        for leg in space.legs if space.name in removed else ():
            owner = owners(space, leg, shapes[leg.tensor])
            own = removed[space.name][owner.clamp_min(0)] & (owner >= 0)
            found[leg.tensor] = found[leg.tensor] | own if leg.tensor in found else own
    return found


def unit_worth(
    state: Mapping[str, Tensor], symmetry: Symmetry, by: str, posterior: Posterior | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """What each unit of each permutable space is worth, float64 (copies * n,).

    Args:
        state: the network.
        symmetry: its symmetry.
        by: "norm": the norm of all weights of the unit, in the lightest scales of the network, so that it does not
            depend on how a layer shares its scale with the next; 0 for a unit whose scale has no best value because
            nothing comes in or nothing goes out. "snr": the norm of |weight| / std. "random": a fresh order.
        posterior: whose standard deviations "snr" takes.
        seed: of "random".
    """
    spaces = [space for space in symmetry.spaces if space.permutable]
    if by == "random":
        stream = torch.Generator().manual_seed(seed)
        return {
            s.name: torch.rand(s.copies * s.size, generator=stream, dtype=torch.float64) for s in spaces
        }  # fmt: skip
    if by not in UNIT_CRITERIA:
        raise InputError(f"expected a criterion out of {', '.join(UNIT_CRITERIA)}, found {by!r}: choose one of them")
    lightest = balance(state, symmetry) if by == "norm" and symmetry.dimensions else None
    squares = _squares(state if lightest is None or lightest.state is None else lightest.state, by, posterior)
    found = {space.name: _owned(space, squares) for space in spaces}
    for unit in () if lightest is None else lightest.dead:
        if unit.space in found:
            space = symmetry[unit.space]
            sizes = [*[size for _, size in space.parents], space.size]
            found[unit.space].view(sizes)[unit.unit] = 0
    return found


def _squares(state: Mapping[str, Tensor], by: str, posterior: Posterior | None) -> dict[str, Tensor]:
    """What every weight adds to the square of its unit's worth; running statistics add nothing."""
    floating = {name: state[name] for name in trained_parameters(state) if state[name].is_floating_point()}
    weights = {name: value.detach().double().cpu() for name, value in floating.items()}
    if by == "norm":
        return {name: value.square() for name, value in weights.items()}
    if posterior is None:
        raise InputError("snr needs standard deviations, found no posterior: give one, or choose by='norm'")
    std = posterior.layout.shaped(posterior.flat_std)
    return {
        name: signal_to_noise(value.abs(), std[name].cpu()).square() for name, value in weights.items() if name in std
    }  # fmt: skip


def _owned(space: Space, squares: Mapping[str, Tensor]) -> Tensor:
    total = torch.zeros(space.copies * space.size, dtype=torch.float64)
    for leg in space.legs:
        if leg.tensor in squares:
            owner = owners(space, leg, squares[leg.tensor].shape)
            inside = owner >= 0
            total.index_add_(0, owner[inside], squares[leg.tensor][inside])
    return total.sqrt()
