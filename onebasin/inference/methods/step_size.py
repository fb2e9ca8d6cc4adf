"""Dual averaging: a step size per chain, tuned until proposals are accepted as often as wished.

Hoffman and Gelman (2014), section 3.2. Numbers are (chains,), float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 10  # proposals below which the average means nothing
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75
_SMALLEST, _LARGEST = math.log(1e-9), math.log(1e3)  # a run of rejections must not end in a frozen chain


class Tuner(NamedTuple):
    """State of the tuning.

    Attributes:
        log_step: of the next proposal.
        log_mean: its weighted average, used once tuning has ended.
        shortfall: running mean of (wished - found) acceptance.
        centre: what log_step is drawn back to.
        seen: proposals seen.
    """

    log_step: Tensor
    log_mean: Tensor
    shortfall: Tensor
    centre: Tensor
    seen: Tensor

    @property
    def settled(self) -> Tensor:
        """The logarithm of the step size that tuning has ended at; after too few proposals, where it began."""
        return torch.where(self.seen >= _FEW, self.log_mean, self.centre)

    @classmethod
    def at(cls, step: Tensor) -> Tuner:
        """Begin at a step size, which is what the search is drawn back to.

        Hoffman and Gelman lean towards ten times larger ones, which a short warm-up does not survive.
        """
        log_step = step.double().log()
        zero = torch.zeros_like(log_step)
        return cls(log_step, log_step, zero, log_step, zero)

    def update(self, acceptance: Tensor, wished: float) -> Tuner:
        """Learn from acceptance probabilities (chains,); a divergence counts as 0."""
        seen = self.seen + 1
        weight = 1 / (seen + _T0)
        shortfall = (1 - weight) * self.shortfall + weight * (wished - acceptance)
        log_step = (self.centre - seen.sqrt() / _GAMMA * shortfall).clamp(_SMALLEST, _LARGEST)
        shortfall = (self.centre - log_step) * _GAMMA / seen.sqrt()  # what lies beyond the clamp is not owed back
        share = seen**-_KAPPA
        return Tuner(log_step, share * log_step + (1 - share) * self.log_mean, shortfall, self.centre, seen)
