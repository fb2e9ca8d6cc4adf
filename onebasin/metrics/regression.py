"""Metrics of regression, for populations that predict numbers: each member a Gaussian, the population their mixture.

Everywhere `means` are (members, examples, *shape), targets are (examples, *shape), and `noise` is the standard
deviation of targets around a member's mean: one number, or a tensor that broadcasts to `means` (per member:
(members, 1, ...)).
The predictive is p(y) = 1/M sum_m N(y; mean_m, noise_m^2). `weights` (..., examples) counts examples more than once,
as in `onebasin.metrics.probabilities`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import weighted_mean

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_BLOCK_VALUES = 1 << 21  # members x entries whose densities are held at once: 16 MB in float64
_STEPS = 200
_CLOSE = 1e-15  # of the size of a quantile: about what rounding leaves


@accepts_arrays
def rmse(means: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Root of the mean squared error of the population's mean, over examples and the entries of `shape`.

    >>> rmse(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([2.0, 4.0]))
    tensor(1.4142, dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        targets: (examples, *shape).
        weights: (..., examples).
    """
    mean, goal = _checked(means, targets)
    error = (mean.mean(0) - goal).square()
    return weighted_mean(error.reshape(len(error), -1).mean(1), weights).sqrt()


@accepts_arrays
def gaussian_nll(means: Tensor, targets: Tensor, noise: float | Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean over examples of -log 1/M sum_m N(target; mean_m, noise_m^2), in nats; entries of an example are one event.

    >>> gaussian_nll(torch.zeros(3, 2), torch.zeros(2), noise=1.0)
    tensor(0.9189, dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        targets: (examples, *shape).
        noise: a number or a tensor that broadcasts to `means`, positive.
        weights: (..., examples).
    """
    return weighted_mean(-log_density(means, targets, noise), weights)


@accepts_arrays
def log_density(means: Tensor, targets: Tensor, noise: float | Tensor) -> Tensor:
    """Log of 1/M sum_m N(target; mean_m, noise_m^2) for each example, float64 (examples,).

    >>> log_density(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), noise=1.0)
    tensor([-1.4189], dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        targets: (examples, *shape); the entries of an example are one event.
        noise: a number or a tensor that broadcasts to `means`, positive.
    """
    mean, goal = _checked(means, targets)
    std = _spread(noise, mean)
    each = -0.5 * ((goal - mean) / std).square() - std.log() - _HALF_LOG_TWO_PI
    return each.reshape(*each.shape[:2], -1).sum(2).logsumexp(0) - math.log(len(mean))


@accepts_arrays
def central_interval(means: Tensor, noise: float | Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Ends of the central interval of the mixture: its quantiles (1 - level) / 2 and (1 + level) / 2.

    Entries of an example are looked at one by one.

    >>> low, high = central_interval(torch.zeros(3, 1), 1.0, 0.95)
    >>> low, high
    (tensor([-1.9600], dtype=torch.float64), tensor([1.9600], dtype=torch.float64))

    Args:
        means: (members, examples, *shape).
        noise: a number or a tensor that broadcasts to `means`, positive.
        level: probability inside, above 0 and below 1.

    Returns:
        Two tensors float64 (examples, *shape).
    """
    if not 0 < level < 1:
        raise InputError(f"expected a level between 0 and 1, found {level}; 0.95 is usual")
    mean, _ = _checked(means, None)
    std = _spread(noise, mean)
    members, shape = len(mean), mean.shape[1:]
    flat, spread = mean.reshape(members, -1), std.reshape(members, -1)
    ends = flat.new_empty(2, flat.shape[1])
    step = max(1, _BLOCK_VALUES // members)
    for start in range(0, flat.shape[1], step):
        part = slice(start, start + step)
        for row, share in enumerate(((1 - level) / 2, (1 + level) / 2)):
            ends[row, part] = _quantile(flat[:, part], spread[:, part], share)
    return ends[0].reshape(shape), ends[1].reshape(shape)


@accepts_arrays
def coverage(
    means: Tensor, targets: Tensor, noise: float | Tensor, level: float = 0.95, *, weights: Tensor | None = None
) -> Tensor:
    """Share of the targets inside the central interval of the mixture; `level` of them if the population is calibrated.

    >>> coverage(torch.zeros(3, 4), torch.tensor([0.0, 1.9, -1.9, 2.0]), noise=1.0)
    tensor(0.7500, dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        targets: (examples, *shape); entries count one by one.
        noise: a number or a tensor that broadcasts to `means`, positive.
        level: probability inside.
        weights: (..., examples).
    """
    _, goal = _checked(means, targets)
    low, high = central_interval(means, noise, level)
    held = ((goal >= low) & (goal <= high)).double()
    return weighted_mean(held.reshape(len(held), -1).mean(1), weights)


@accepts_arrays
def width(means: Tensor, noise: float | Tensor, level: float = 0.95, *, weights: Tensor | None = None) -> Tensor:
    """Mean width of the central intervals of the mixture; at equal coverage the sharper is better.

    >>> width(torch.zeros(3, 4), 1.0)
    tensor(3.9199, dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        noise: a number or a tensor that broadcasts to `means`, positive.
        level: probability inside.
        weights: (..., examples).
    """
    low, high = central_interval(means, noise, level)
    return weighted_mean((high - low).reshape(len(low), -1).mean(1), weights)


@accepts_arrays
def interval_score(
    low: Tensor, high: Tensor, targets: Tensor, level: float = 0.95, *, weights: Tensor | None = None
) -> Tensor:
    """Mean interval score (Gneiting and Raftery, 2007): width, and a fine for targets outside; lower is better.

        high - low + 2 / (1 - level) (distance of the target from the interval),

    whose expectation is least for the central interval of the true law.

    >>> interval_score(torch.tensor([0.0, 0.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 3.0]), level=0.9)
    tensor(12.0000, dtype=torch.float64)

    Args:
        low: lower ends (examples, *shape).
        high: upper ends (examples, *shape).
        targets: (examples, *shape); entries count one by one.
        level: probability that the intervals should hold.
        weights: (..., examples).
    """
    if not 0 < level < 1:
        raise InputError(f"expected a level between 0 and 1, found {level}; 0.95 is usual")
    if not low.shape == high.shape == targets.shape or not low.numel() or bool((low > high).any()):
        raise InputError(
            f"expected ends low <= high and targets of one shape (examples, *shape), found {tuple(low.shape)}, "
            f"{tuple(high.shape)} and {tuple(targets.shape)}; give the two ends of central_interval"
        )
    below, above, goal = low.detach().double(), high.detach().double(), targets.detach().double()
    outside = (below - goal).clamp(min=0) + (goal - above).clamp(min=0)
    each = above - below + 2 / (1 - level) * outside
    return weighted_mean(each.reshape(len(each), -1).mean(1), weights)


@accepts_arrays
def cumulative_probability(means: Tensor, targets: Tensor, noise: float | Tensor) -> Tensor:
    """Return u = P(y <= target) under the mixture, float64 (examples, *shape): uniform for a calibrated population.

    >>> cumulative_probability(torch.zeros(3, 2), torch.tensor([0.0, 1.96]), noise=1.0)
    tensor([0.5000, 0.9750], dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        targets: (examples, *shape).
        noise: a number or a tensor that broadcasts to `means`, positive.
    """
    mean, goal = _checked(means, targets)
    each: Tensor = torch.special.ndtr((goal - mean) / _spread(noise, mean))
    return each.mean(0)


QUANTILES = tuple(number / 20 for number in range(1, 20))


@accepts_arrays
def quantile_calibration_error(
    means: Tensor,
    targets: Tensor,
    noise: float | Tensor,
    levels: Sequence[float] = QUANTILES,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean over quantiles q of |share of targets at or below the predicted quantile - q| (after Kuleshov et al., 2018).

    0 for a calibrated population and infinitely many examples, at most about 1/2.

    >>> quantile_calibration_error(torch.zeros(1, 3), torch.tensor([-9.0, 0.1, 9.0]), 1.0, levels=[0.5])  # |1/3 - 1/2|
    tensor(0.1667, dtype=torch.float64)

    Args:
        means: (members, examples, *shape).
        targets: (examples, *shape); entries count one by one.
        noise: a number or a tensor that broadcasts to `means`, positive.
        levels: the quantiles, each above 0 and below 1.
        weights: (..., examples).
    """
    if not levels or not all(0 < level < 1 for level in levels):
        raise InputError(f"expected quantiles between 0 and 1, found {list(levels)}; leave them out for 0.05 to 0.95")
    u = cumulative_probability(means, targets, noise)
    rows = u.reshape(len(u), -1)
    gaps = [weighted_mean((rows <= level).double().mean(1), weights) - level for level in levels]
    return torch.stack(gaps).abs().mean(0)


def _quantile(mean: Tensor, std: Tensor, share: float) -> Tensor:
    """The quantile of each mixture of columns (members, entries).

    The quantile of a mixture lies between the smallest and the largest one of its members.
    """
    quantile = mean + std * torch.special.ndtri(torch.tensor(share, dtype=torch.float64))

    def chance(at: Tensor) -> tuple[Tensor, Tensor]:
        offset = (at - mean) / std
        density = (torch.exp(-0.5 * offset.square() - _HALF_LOG_TWO_PI) / std).mean(0)
        return torch.special.ndtr(offset).mean(0), density

    return mixture_quantile(chance, quantile.amin(0), quantile.amax(0), std.amin(0), share)


def mixture_quantile(
    chance: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor, size: Tensor, share: float
) -> Tensor:
    """Where a cumulative probability reaches `share`, by Newton's method inside a bracket; entries one by one.

    >>> def chance(at):
    ...     return at.clamp(0, 1), torch.ones_like(at)  # uniform on [0, 1]
    >>> mixture_quantile(chance, torch.tensor([-1.0]), torch.tensor([4.0]), torch.tensor([1.0]), 0.25)
    tensor([0.2500])

    Args:
        chance: points (entries,) -> cumulative probability and density there.
        low: no more than the quantile (entries,).
        high: no less than the quantile (entries,).
        size: a typical length (entries,); the result is exact to rounding of it.
        share: probability below the quantile.
    """
    enough = _CLOSE * (torch.maximum(low.abs(), high.abs()) + size)
    at: Tensor = (low + high) / 2
    for _ in range(_STEPS):
        below, density = chance(at)
        excess = below - share
        low, high = torch.where(excess < 0, at, low), torch.where(excess > 0, at, high)
        step = at - excess / density
        inside = (step > low) & (step < high)
        new = torch.where(inside, step, (low + high) / 2)
        new = torch.where(excess == 0, at, new)
        done = (new - at).abs() <= enough
        at = new
        if bool(done.all()):
            break
    return at


def _checked(means: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means and targets in float64; without targets the first member's means stand in for them."""
    goal = means[0] if targets is None and means.dim() else targets
    if goal is None or means.dim() < 2 or not means.numel() or tuple(means.shape[1:]) != tuple(goal.shape):
        shape = None if targets is None else tuple(targets.shape)
        raise InputError(
            f"expected means (members, examples, *shape) and targets (examples, *shape), found {tuple(means.shape)} "
            f"and {shape}; give a single network as means[None]"
        )
    exact, wanted = means.detach().double(), goal.detach().to(means.device).double()
    for name, values in (("means", exact), ("targets", wanted)):
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"expected finite {name}, found NaN or infinity; leave these members or examples out")
    return exact, wanted


def _spread(noise: float | Tensor, means: Tensor) -> Tensor:
    std = torch.as_tensor(noise, dtype=torch.float64, device=means.device).detach()
    if not bool((std > 0).all()) or not bool(torch.isfinite(std).all()):
        raise InputError(
            f"expected a noise above 0, a standard deviation, found {float(std.min()):g} to {float(std.max()):g}; give "
            "the exponential of log standard deviations"
        )
    try:
        return std.expand_as(means)
    except RuntimeError as error:
        raise InputError(
            f"expected one noise or a tensor that broadcasts to means {tuple(means.shape)}, found shape "
            f"{tuple(std.shape)}; for one per member give (members, 1, ...)"
        ) from error
