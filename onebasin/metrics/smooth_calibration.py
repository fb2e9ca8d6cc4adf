"""The smooth calibration error (Blasiok and Nakkiran, 2023): a calibration error without bins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.calibration import top
from onebasin.metrics.probabilities import as_weights

_FEWEST, _MOST = 256, 4096  # cosines
_ENOUGH = 6.0  # exp(-36 / 2) = 1.5e-8 is what the first cosine that is left out would still weigh
_STEPS = 40
_BLOCK_VALUES = 1 << 22


@accepts_arrays
def smooth_ece(
    probabilities: Tensor, targets: Tensor, *, bandwidth: float | None = None, weights: Tensor | None = None
) -> Tensor:
    """Smooth calibration error of the confidence: the s with E(s) = s, where E is the error seen at bandwidth s.

    With confidence c_i, and r_i = 1 where it is deserved, the gaps r_i - c_i are smoothed by a Gaussian K_s that is
    reflected at 0 and 1, and what is left is integrated:

        E(s) = integral over [0, 1] of | 1/n sum_i K_s(t, c_i) (r_i - c_i) | dt.

    E falls with s, so there is one such s. There are no bins to choose, and a small change of the probabilities
    changes it little. Reflected Gaussians are diagonal in cosines, K_s(t, c) = 1 + 2 sum_k exp(-(pi k s)^2 / 2)
    cos(pi k t) cos(pi k c), so nothing is put on a grid but the integral. Like `ece` it is never below zero, and too
    large on average. s below 5e-4 is not resolved.

    >>> p = torch.tensor([[0.75, 0.25]]).expand(4, 2)
    >>> smooth_ece(p, torch.tensor([0, 0, 0, 1]))  # three of four are right: calibrated
    tensor(0., dtype=torch.float64)
    >>> round(float(smooth_ece(p, torch.tensor([0, 1, 1, 1]))), 3)
    0.5

    Args:
        probabilities: (examples, classes).
        targets: (examples,).
        bandwidth: a fixed s, whose E(s) is returned; None finds the s that equals its error.
        weights: (..., examples), see `onebasin.metrics.probabilities`.
    """
    confidence, right = top(probabilities, targets)
    counted = as_weights(weights, len(right), right.device)
    shares = counted / counted.sum(-1, keepdim=True)
    count = _FEWEST
    while True:
        error = _Smoothed.of(confidence, right - confidence, shares, count)
        if bandwidth is not None:
            if bandwidth * math.pi * count >= _ENOUGH or count >= _MOST:
                return error.at(shares.new_full(shares.shape[:-1], bandwidth))
        else:
            fixed = error.fixed_point()
            smallest = fixed[fixed > 0].amin() if bool((fixed > 0).any()) else 1.0
            if float(smallest) * math.pi * count >= _ENOUGH or count >= _MOST:
                return fixed
        count *= 2


class _Smoothed:
    """E(s) from the coefficients of the gaps (..., cosines)."""

    def __init__(self, coefficients: Tensor) -> None:
        self.coefficients = coefficients
        count = coefficients.shape[-1]
        self.orders = torch.arange(count, dtype=torch.float64, device=coefficients.device)
        places = (torch.arange(4 * count, dtype=torch.float64, device=coefficients.device) + 0.5) / (4 * count)
        self.cosines = torch.cos(math.pi * self.orders[:, None] * places)

    @classmethod
    def of(cls, confidence: Tensor, gaps: Tensor, shares: Tensor, count: int) -> _Smoothed:
        orders = torch.arange(count, dtype=torch.float64, device=gaps.device)
        total = shares.new_zeros(*shares.shape[:-1], count)
        step = max(1, _BLOCK_VALUES // count)
        for start in range(0, len(gaps), step):
            part = slice(start, start + step)
            total += (shares[..., part] * gaps[part]) @ torch.cos(math.pi * confidence[part, None] * orders)
        total[..., 1:] *= 2
        return cls(total)

    def at(self, bandwidth: Tensor) -> Tensor:
        """E at bandwidths (...)."""
        damping = torch.exp(-0.5 * (math.pi * self.orders * bandwidth[..., None]).square())
        return ((self.coefficients * damping) @ self.cosines).abs().mean(-1)

    def fixed_point(self) -> Tensor:
        """The s with E(s) = s, (...), by bisection; 0 where E(0) is rounding."""
        low = torch.zeros_like(self.coefficients[..., 0])
        high = torch.ones_like(low)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            above = self.at(middle) > middle
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        found = (low + high) / 2
        return torch.where(found < 1e-11, 0.0, found)
