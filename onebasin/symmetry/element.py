"""One member of a symmetry group, as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import SymmetryError


@dataclass(frozen=True, eq=False)
class Element:
    """One member of the group.

    Attributes:
        orders: space name -> (*parents, size) integers; spaces that are not permuted are left out.
        factors: space name -> (generators, *parents, size) positive numbers and signs; spaces without generators are
            left out.
        members: None for one element; N for a batch, all tensors then having a leading axis of N (in `factors` after
            the generators).
    """

    orders: Mapping[str, Tensor]
    factors: Mapping[str, Tensor]
    members: int | None = None

    def __repr__(self) -> str:
        """Say how much is moved."""
        moved = sum(
            int((order != torch.arange(order.shape[-1], device=order.device)).sum()) for order in self.orders.values()
        )
        batch = "" if self.members is None else f", {self.members} members"
        return f"Element({len(self.orders)} orders, {moved} units moved, {len(self.factors)} factor tables{batch})"

    def some(self, start: int, stop: int) -> Element:
        """The elements start:stop of a batch, as a batch."""
        return Element(
            {name: order[start:stop] for name, order in self.orders.items()},
            {name: factor[:, start:stop] for name, factor in self.factors.items()},
            stop - start,
        )

    def member(self, index: int) -> Element:
        """One element of a batch."""
        if self.members is None:
            raise SymmetryError("this Element is a single one, not a batch; use it as it is.")
        return Element(
            {name: order[index] for name, order in self.orders.items()},
            {name: factor[:, index] for name, factor in self.factors.items()},
        )
