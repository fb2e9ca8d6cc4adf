"""A diagonal mass from the spread of each weight, learned in two windows of the warm-up.

Stan's recipe: step sizes alone for the first 15 %, then two windows that estimate variances (Welford), and the last
10 % for the step size alone. An estimate from n draws is shrunk towards a small constant by 5 / (n + 5).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.inference.kernel import Moment

_BEGIN, _MIDDLE, _END = 0.15, 0.45, 0.9
_FLOOR = 1e-3
_REST = 10  # steps that a new mass leaves for the step size at least


class Spread(NamedTuple):
    """Running mean and sum of squared deviations of each weight, (chains, D), after `seen` draws (chains,)."""

    mean: Tensor
    squares: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Spread:
        """Nothing seen yet."""
        seen = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        return cls(torch.zeros_like(like), torch.zeros_like(like), seen)

    def add(self, position: Tensor) -> Spread:
        """Take one more draw into account."""
        seen = self.seen + 1
        offset = position - self.mean
        mean = self.mean + offset / seen.to(offset)[:, None]
        return Spread(mean, torch.addcmul(self.squares, offset, position - mean), seen)

    def variance(self) -> Tensor:
        """The shrunk estimate (chains, D)."""
        n = self.seen.to(self.squares)[:, None]
        return self.squares / (n - 1).clamp(min=1) * (n / (n + 5)) + _FLOOR * 5 / (n + 5)


def mass_update(spread: Spread, position: Tensor, inverse_mass: Tensor, moment: Moment) -> tuple[Spread, Tensor]:
    """Collect a draw; at the end of a window return the new inverse mass (chains, D), else the old one itself."""
    begin, middle, end = (int(part * moment.warmup) for part in (_BEGIN, _MIDDLE, _END))
    if not begin <= moment.step < end:
        return spread, inverse_mass
    spread = spread.add(position)
    if moment.step + 1 in (middle, end) and moment.warmup - moment.step > _REST and float(spread.seen[0]) > 10:
        return Spread.empty(position), spread.variance()
    return spread, inverse_mass
