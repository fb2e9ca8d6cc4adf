"""Structured pruning: whole units go, and the tensors become smaller.

A unit of a Space stands on several tensors (its row, its bias, its norm, its column in the next layer), and all of
them lose it together. Copies of a fibred space lose equally many units each, not the same ones: the network is first
moved along its orbit so that the units to keep come first in every copy, and then everything behind them is cut off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError, SymmetryError
from onebasin.posterior import Posterior
from onebasin.predict import outputs
from onebasin.pruning.criteria import ranks
from onebasin.pruning.masks import Masks
from onebasin.pruning.owners import gone, unit_worth
from onebasin.pruning.ranking import count, shared_memory
from onebasin.pruning.resizing import resized
from onebasin.state import State, as_state
from onebasin.symmetry import Element, Space, Symmetry
from onebasin.symmetry.algebra import Wide

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Keep = float | Mapping[str, float | Tensor | Sequence[int]]


@dataclass(frozen=True, eq=False)
class Removal:
    """What `remove_units` made.

    Attributes:
        state: the smaller network; units keep their order.
        kept: space name -> numbers of the units that are left, (*parents, m), in the old numbering.
        masks: in the shapes of the old network, False on everything that belonged to a removed unit.
        zeroed: the old network with zeros there.
    """

    state: State
    kept: Mapping[str, Tensor]
    masks: Masks
    zeroed: State

    def __str__(self) -> str:
        """A table of spaces, and what is left in all."""
        before = sum(value.numel() for value in self.zeroed.values())
        after = sum(value.numel() for value in self.state.values())
        width = max([len(name) for name in self.kept] + [5])
        lines = [f"{'space':<{width}}{'units left':>12}"]
        lines += [f"{name:<{width}}{_counted(kept):>12}" for name, kept in self.kept.items()]
        return "\n".join([*lines, f"{after:,} of {before:,} numbers are left ({after / max(1, before):.2%})"])

    def error(self, model: nn.Module, inputs: Inputs, known: Collection[type[nn.Module]] = ()) -> float:
        """How far the smaller network is from the old one with its removed units at zero, in float64.

        The largest difference of outputs relative to the largest output. It is of rounding size where units are only
        summed over; not where something depends on their number: the mean of a layer norm, the 1 / sqrt(width) of
        attention. Arguments as in `resized`.
        """
        wide, small = ({n: v.double() if v.is_floating_point() else v for n, v in s.items()}
                       for s in (self.zeroed, self.state))  # fmt: skip
        before = outputs(model, wide, inputs)
        after = outputs(resized(model, self.state, inputs, known), small, inputs)
        return float((after - before).abs().max() / before.abs().max().clamp_min(1e-300))


def remove_units(
    state: Mapping[str, Tensor] | nn.Module,
    symmetry: Symmetry,
    keep: Keep = 0.5,
    by: str = "norm",
    *,
    posterior: Posterior | None = None,
    seed: int = 0,
) -> Removal:
    """Remove whole units of the permutable spaces of a network; its tensors become smaller.

    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> smaller = remove_units(model, ob.discover(model, torch.zeros(1, 3)), keep=0.5)
    >>> {name: tuple(value.shape) for name, value in smaller.state.items()}
    {'0.weight': (4, 3), '0.bias': (4,), '2.weight': (2, 4), '2.bias': (2,)}

    Args:
        state: the network; it is not changed.
        symmetry: found by `discover` for its architecture.
        keep: the part of the units to keep in every space, at least one unit each; or a dict from the name of a space
            to its part, or to the numbers of the units to keep, (m,) or (*parents, m): other spaces are left whole.
        by: what decides where numbers do not: "norm", "snr" or "random"; see `owners.unit_worth`.
        posterior: whose standard deviations "snr" takes, in the basis of the network.
        seed: of "random".

    Returns:
        The smaller state, what was kept, and the old network with zeros in place of what went. Build the smaller
        module with `resized`, and see with `Removal.error` whether the function is that of the zeroed network.

    Raises:
        SymmetryError: what a removed unit owns in a tensor is no whole slice of it.
    """
    network = as_state(state)
    wanted = _wanted(symmetry, keep)
    worth = unit_worth(network, symmetry, by, posterior, seed) if _undecided(wanted) else {}
    kept = {space.name: _kept(space, wanted[space.name], worth) for space in symmetry.spaces if space.name in wanted}
    removed = {name: _removed(symmetry[name], units) for name, units in kept.items()}
    away = gone(symmetry, removed, {name: tuple(value.shape) for name, value in network.items()})
    tied = shared_memory(network, list(away))
    masks = Masks({name: ~lost.to(network[name].device) for name, lost in away.items() if name not in tied}, tied)
    element = _kept_first(symmetry, removed)
    moved, left = symmetry.apply(element, network), masks.carried(element, symmetry)
    small = {
        name: _cut(name, value, left[tied.get(name, name)]) if name in away else value.clone()
        for name, value in moved.items()
    }
    shaped = {name: units.reshape(*[size for _, size in symmetry[name].parents], -1) for name, units in kept.items()}
    return Removal(small, shaped, masks, masks.apply(network))


def _wanted(symmetry: Symmetry, keep: Keep) -> dict[str, float | Tensor]:
    """What to keep of each space that loses units."""
    every = [space.name for space in symmetry.spaces if space.permutable]
    given = keep if isinstance(keep, Mapping) else dict.fromkeys(every, keep)
    for name in given:
        if not symmetry[name].permutable:
            raise InputError(f"expected spaces whose units may change places, found {name!r}: leave it out of keep")
    return {name: _share(name, own) for name, own in given.items()}


def _share(name: str, given: Any) -> float | Tensor:
    """A share of the units of a space, or their numbers, int64 (..., m)."""
    try:
        numbers = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(torch.nan)
    if numbers.dim() and numbers.dtype in _WHOLE:
        return numbers.long()
    if not numbers.dim() and 0 < float(numbers) <= 1:
        return float(given)
    raise InputError(
        f"expected a share with 0 < keep <= 1 or the numbers of units, found {given!r} for {name!r}: give 0.5 for "
        "half, or a list such as [0, 2]"
    )


def _undecided(wanted: Mapping[str, float | Tensor]) -> bool:
    return any(not isinstance(share, Tensor) for share in wanted.values())


def _kept(space: Space, share: float | Tensor, worth: Mapping[str, Tensor]) -> Tensor:
    """Numbers of the units that are left in each copy, (copies, m), ascending."""
    if isinstance(share, Tensor):
        units = share.long().expand(*[size for _, size in space.parents], -1).reshape(space.copies, -1).sort(1).values
        if not units.shape[1] or bool((units < 0).any() | (units >= space.size).any() | (units.diff() == 0).any()):
            raise InputError(
                f"expected different numbers below {space.size} of the units of {space.name!r} to keep, found "
                f"{share.tolist()}: give each unit once"
            )
        return units
    many = max(1, count(share, space.size))
    rows = [ranks(row, row) for row in worth[space.name].reshape(space.copies, space.size)]
    return torch.stack([(row < many).nonzero()[:, 0] for row in rows])


def _removed(space: Space, units: Tensor) -> Tensor:
    """True for each unit that goes, (copies * n,)."""
    return torch.ones(space.copies, space.size, dtype=torch.bool).scatter(1, units, False).reshape(-1)


def _kept_first(symmetry: Symmetry, removed: Mapping[str, Tensor]) -> Element:
    """The element that moves, in every copy of every space, the units that stay before those that go."""
    orders: dict[str, Tensor] = {}
    for number, space in enumerate(symmetry.spaces):  # parents come first, so their orders are known here
        if space.name in removed:
            origin = Wide(symmetry, Element(orders, {})).origin(number)[0]
            lost = removed[space.name].reshape(space.copies, space.size)[origin]
            order = lost.int().argsort(dim=1, stable=True)
            orders[space.name] = order.reshape(*[size for _, size in space.parents], space.size)
    return Element(orders, {})


def _cut(name: str, value: Tensor, left: Tensor) -> Tensor:
    """The part of a tensor that is left, when that is a smaller box."""
    for axis in range(value.dim()):
        others = [other for other in range(value.dim()) if other != axis]
        inside = (left.any(dim=others) if others else left).nonzero()[:, 0]
        value, left = value.index_select(axis, inside), left.index_select(axis, inside)
    if not bool(left.all()):
        raise SymmetryError(
            f"expected the removed units to own whole slices of {name}, found parts of slices: keep the spaces that "
            "stand on it whole, by a dict as keep"
        )
    return value


def _counted(kept: Tensor) -> str:
    copies = kept[..., 0].numel()
    return str(kept.shape[-1]) if copies == 1 else f"{kept.shape[-1]} x {copies}"
