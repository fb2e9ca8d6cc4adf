"""Temperature scaling: the one number that makes a classifier as sure as it should be."""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.probabilities import as_class_numbers

COLDEST, HOTTEST = 1e-6, 1e6
_STEPS = 200
_CLOSE = 1e-13  # relative


def best_temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the T > 0 that minimises the mean negative log-likelihood of softmax(logits / T).

    With s = 1/T it is convex: its slope is the mean of E_p[z] - z_target, its curvature the mean of Var_p[z], where
    p = softmax(s z). Newton's method, with bisection where a step would leave the bracket. For a population give the
    logarithm of its average predictive, which is tempered as a whole.

    >>> logits = torch.tensor([[1.0, 0.0]]).expand(4, 2)  # right three times out of four: log 3 would be honest
    >>> round(1 / best_temperature(logits, torch.tensor([0, 0, 0, 1])), 6)
    1.098612

    Args:
        logits: (examples, classes), at least two classes. Examples it is to be judged on should not be among them.
        targets: class numbers (examples,).

    Returns:
        T, within 1e-6 and 1e6. The lower end means that the largest logit is always right, the upper one that the
        logits say nothing.
    """
    z = _as_logits(logits)
    wanted = z.gather(1, as_class_numbers(targets, z)[:, None]).mean()
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


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / T), float64 (examples, classes): T > 1 doubts more, T < 1 less.

    >>> tempered(torch.tensor([[2.0, 0.0]]), 2.0)
    tensor([[0.7311, 0.2689]], dtype=torch.float64)

    Args:
        logits: (examples, classes).
        temperature: T > 0.
    """
    if not temperature > 0:
        raise InputError(f"expected a temperature above 0, found {temperature}; 1 changes nothing")
    return (_as_logits(logits) / temperature).softmax(1)


def _as_logits(logits: Tensor) -> Tensor:
    z = logits.detach().double()
    if z.dim() != 2 or not len(z) or z.shape[1] < 2 or not bool(torch.isfinite(z).all()):
        raise InputError(
            "expected finite logits (examples, classes) of at least two classes to temper, found shape "
            f"{tuple(z.shape)} with {int((~torch.isfinite(z)).sum())} entries that are not finite; of a population "
            "give the logarithm of the average predictive"
        )
    return z


def _slope(z: Tensor, wanted: Tensor, s: float) -> tuple[float, float]:
    """Slope and curvature of the mean negative log-likelihood at s."""
    p = torch.softmax(s * z, -1)
    mean = (p * z).sum(-1)
    spread = (p * (z - mean.unsqueeze(-1)).square()).sum(-1)
    return float(mean.mean() - wanted), float(spread.mean())
