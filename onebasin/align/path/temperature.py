"""The temperature at which a classifier is as sure as it should be: merged networks doubt too much."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.predict import score

COLDEST, HOTTEST = 1e-6, 1e6
_STEPS = 200
_CLOSE = 1e-13  # relative


def temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the T > 0 that minimises the cross-entropy of logits / T.

    With s = 1/T the mean cross-entropy is convex: its slope is the mean of E_p[z] - z_target, its curvature the mean
    of Var_p[z], p = softmax(s z). Newton's method, with bisection where a step would leave the bracket.

    >>> logits = torch.tensor([[1.0, 0.0]]).expand(4, 2)  # right three times out of four: log 3 would be honest
    >>> round(1 / temperature(logits, torch.tensor([0, 0, 0, 1])), 6)
    1.098612

    Args:
        logits: (examples, classes, ...).
        targets: class numbers (examples, ...).

    Returns:
        T in float64, within 1e-6 and 1e6. The lower end means that the largest logit is always right, the upper one
        that the logits say nothing.
    """
    score(logits, targets)  # refuses what is not a classification
    z = logits.detach().double().movedim(1, -1).flatten(0, -2)
    if z.shape[-1] < 2:
        raise InputError("a temperature needs at least two classes, found one: give logits (examples, classes)")
    wanted = z.gather(-1, targets.to(z.device).long().reshape(-1, 1)).squeeze(-1).mean()
    low, high = 1 / HOTTEST, 1 / COLDEST
    if _slope(z, wanted, low)[0] >= 0:
        return HOTTEST
    if _slope(z, wanted, high)[0] <= 0:
        return COLDEST
    s = 1.0
    for _ in range(_STEPS):
        slope, curvature = _slope(z, wanted, s)
        step = s - slope / curvature if curvature > 0 else high  # where softmax is saturated, only the sign is known
        if abs(step - s) <= _CLOSE * s or high - low <= _CLOSE * high:
            break
        low, high = (s, high) if slope < 0 else (low, s)
        s = step if low < step < high else (low * high) ** 0.5
    return 1 / s


def _slope(z: Tensor, wanted: Tensor, s: float) -> tuple[float, float]:
    """Slope and curvature of the mean cross-entropy at s."""
    p = torch.softmax(s * z, -1)
    mean = (p * z).sum(-1)
    spread = (p * (z - mean.unsqueeze(-1)).square()).sum(-1)
    return float(mean.mean() - wanted), float(spread.mean())
