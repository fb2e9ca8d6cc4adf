"""What a weight is worth, from its mean and its standard deviation; the most valuable are kept.

- snr: |mean| / std, how surely the weight differs from zero
- signal-plus-noise: |mean| + std, which also keeps weights that matter in some draws (Deo et al. 2025)
- magnitude: |mean|, the plain baseline, and often the best one
- sigma: -std, the least uncertain are kept, which is the rule of paper 1
- sigma-high: +std, the most uncertain are kept; where a prior shrinks unused weights, better than its opposite
- random: a fresh order, which every other criterion has to beat
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebasin.errors import InputError

Worth = Callable[[Tensor, Tensor], Tensor]  # (|mean|, std), both (D,) float64 -> worth (D,)


def signal_to_noise(signal: Tensor, noise: Tensor) -> Tensor:
    """Signal / noise; without noise a signal counts as infinitely sure, and nothing as nothing.

    >>> signal_to_noise(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))
    tensor([0.5000,    inf, 0.0000])
    """
    return torch.where((signal == 0) & (noise == 0), 0, signal / noise)


_OF_BOTH: dict[str, Worth] = {
    "snr": signal_to_noise,
    "signal-plus-noise": lambda signal, noise: signal + noise,
    "sigma": lambda signal, noise: -noise,
    "sigma-high": lambda signal, noise: noise,
}
CRITERIA = ("snr", "signal-plus-noise", "magnitude", "sigma", "sigma-high", "random")


def worth(mean: Tensor, std: Tensor | None, by: str, seed: int) -> Tensor:
    """What each weight is worth by a criterion, float64 (D,).

    Args:
        mean: the weights (D,).
        std: their standard deviations (D,); None where they are not known.
        by: one of `CRITERIA`.
        seed: of the random order.

    Raises:
        InputError: the criterion is unknown, needs standard deviations that are not there, or meets NaN.
    """
    signal = mean.double().abs()
    if not bool(torch.isfinite(signal).all()):
        raise InputError("expected finite weights to prune, found NaN or infinity: leave this network out")
    if by == "magnitude":
        return signal
    if by == "random":
        order = torch.randperm(len(signal), generator=torch.Generator().manual_seed(seed))
        return order.to(signal)
    if by not in _OF_BOTH:
        raise InputError(f"expected a criterion out of {', '.join(CRITERIA)}, found {by!r}: choose one of them")
    if std is None:
        raise InputError(
            f"{by} needs standard deviations, found a network without any: give a Posterior, or prune it by magnitude "
            "or random"
        )
    return _OF_BOTH[by](signal, std.double())


def ranks(worth: Tensor, signal: Tensor) -> Tensor:
    """The place of each weight, int64 (D,): 0 for the most valuable.

    Equal worth is decided by |mean|, and equal |mean| by position, so that the same input always gives the same ranks.

    >>> ranks(torch.tensor([1.0, 3.0, 1.0]), torch.tensor([1.0, 1.0, 2.0]))
    tensor([2, 0, 1])
    """
    by_signal = signal.argsort(descending=True, stable=True)
    order = by_signal[worth[by_signal].argsort(descending=True, stable=True)]
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
