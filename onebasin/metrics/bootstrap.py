"""Bootstrap intervals of metrics, from drawing the examples again, with replacement.

The examples are what is random here. Networks stay as they are: an interval tells how a number would scatter on other
test sets of the same size, not how it would scatter with another population.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.calibration import Gaps, ace, ace_gaps, ece, ece_gaps

Method = Literal["bca", "percentile", "absolute"]
METHODS = ("bca", "percentile", "absolute")
SUMS: dict[Callable[..., Any], Callable[..., Gaps]] = {ece: ece_gaps, ace: ace_gaps}  # metrics that are |.| of gaps
_CERTAIN = 3.0  # standard deviations from 0 at which the sign of a gap is taken as known
Counts = tuple[Tensor, ...]  # of each sample (draws, examples): how often an example was drawn
Statistic = Callable[[Counts], Tensor]  # -> (draws, *shape)
_BLOCK_VALUES = 1 << 18  # counts that are held at once: 2 MB, for larger blocks cost more in memory than they save
_GROUPS = 200  # of examples that are left out in turn; the acceleration they give is exact to about 0.65 / 200


class Interval(NamedTuple):
    """A number and its interval; each float64, of the shape that the metric returns.

    Both ends are NaN where the draws say nothing about where it would lie.
    """

    value: Tensor
    low: Tensor
    high: Tensor


@accepts_arrays
def interval(
    metric: Callable[..., Tensor],
    *tensors: Tensor,
    generator: torch.Generator,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    axis: int | Sequence[int] = 0,
    separately: bool = False,
    method: Method | None = None,
) -> Interval:
    """A metric and its bootstrap interval.

    "bca" (bias-corrected and accelerated, Efron 1987) takes quantiles of the draws that are moved for the bias and the
    skewness of the metric, which shares near 1 and likelihoods with rare large losses have; plain quantiles
    ("percentile") then miss on one side. Both have no width where no draw differs: a test set without a single error
    knows nothing of errors. Where draws differ and all of them lie on one side of the value, "bca" has no interval,
    and both ends are NaN.

    "absolute" is for `ece` and `ace`, and their default: see `absolute`.

    A metric with an argument `weights`, as all of `onebasin.metrics` have, gets many draws at once as counts of
    examples; any other one is called once per draw with the drawn examples.

    >>> generator = torch.Generator().manual_seed(0)
    >>> from onebasin.metrics.scores import accuracy
    >>> p, targets = torch.tensor([[0.8, 0.2]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> [round(float(number), 2) for number in interval(accuracy, p, targets, generator=generator)]
    [0.8, 0.72, 0.87]

    Args:
        metric: (*tensors) -> a number or a tensor (*shape). Fix further arguments with `functools.partial`.
        *tensors: what it takes.
        generator: random numbers of the draws.
        n_resamples: how many times the examples are drawn; 1,000 give ends of 95 % intervals to a tenth of their
            width.
        confidence_level: probability that the interval should cover.
        axis: the axis of examples, one for all tensors or one for each.
        separately: draw the examples of each tensor by itself, as for scores in distribution and out of it; otherwise
            the same examples are drawn from all.
        method: "bca", "percentile" or "absolute"; by default "absolute" for `ece` and `ace`, "bca" for others.
    """
    axes = [axis] * len(tensors) if isinstance(axis, int) else list(axis)
    sizes = _sizes(tensors, axes, separately)
    gaps = gaps_of(metric)
    if method == "absolute" and gaps is None:
        raise InputError('expected ece or ace for method="absolute", found another metric; leave it out for bca')
    if gaps is not None and method in (None, "absolute"):
        parts = partial(gaps, *tensors)
        return absolute(
            parts,
            sizes[0],
            generator=generator,
            n_resamples=n_resamples,
            confidence_level=confidence_level,
            on=tensors[0].device,
        )

    def weighed(counts: Counts) -> Tensor:
        values: Tensor = metric(*tensors, weights=counts if separately else counts[0])
        return values

    def drawn(counts: Counts) -> Tensor:
        return torch.stack([_of_drawn(metric, tensors, axes, row) for row in zip(*counts, strict=True)])

    device = tensors[0].device
    statistic = weighed if takes_weights(metric) else drawn
    value = torch.as_tensor(metric(*tensors)).detach().double()
    chosen = method or "bca"
    return resampled(
        statistic,
        value,
        sizes,
        generator=generator,
        n_resamples=n_resamples,
        confidence_level=confidence_level,
        method=chosen,
        on=device,
    )


def gaps_of(metric: Callable[..., Any]) -> Callable[..., Gaps] | None:
    """The function that gives the signed parts of a metric, with the same keywords fixed; None if it has none."""
    if isinstance(metric, partial):
        inner = None if metric.args else gaps_of(metric.func)
        return None if inner is None else partial(inner, **metric.keywords)
    try:
        return SUMS.get(metric)
    except TypeError:  # a metric that cannot be hashed
        return None


def absolute(
    gaps: Callable[..., Gaps],
    examples: int,
    *,
    generator: torch.Generator,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    on: torch.device | None = None,
) -> Interval:
    """The interval of T = sum_c |m_c|, a sum of absolute values of means m_c over cells: a calibration error.

    What is covered is T of the population the examples come from, in the bins of these examples: those of `ace` are
    where these examples put them, and the population's own quantiles may give another error. Its estimate
    t = sum_c |x_c| is never below zero and so too large on average, by as much as t itself where T = 0, and resampling
    adds the same bias once more: quantiles of draws of t lie above T, and their bias correction ends outside of what
    was drawn. T has a kink wherever m_c = 0, and there no bootstrap of t itself is consistent (Fang and Santos, 2019).
    What is resampled is therefore x, and the error e = x* - x of a draw is carried through the directional derivative
    of T:

        low  = t - the (1 + confidence_level) / 2 quantile of  sum_{certain c} s_c e_c + sum_{other c} |e_c|,
        high = t + the (1 + confidence_level) / 2 quantile of  sum_c s_c e_c,

    s_c the sign of x_c, and a cell certain where |x_c| is more than 3 standard deviations. As T is convex,
    t - T >= sum_c sign(m_c) e_c in truth, so the upper end is on the safe side, and so is the lower one, since a
    |e_c| in place of |m_c + e_c| - |m_c| is the most that a cell can add. A cell with few examples shows too little
    variance; `Gaps.unseen` is what it lacks, and is drawn beside, normal. So 0 <= low <= t <= high <= 1 with
    low < high always. Low is 0 where the examples do not contradict perfect calibration. benchmarks/calibration.py
    measures how often T is covered; docs/metrics.md shows its table.

    Args:
        gaps: weights=(draws, examples) or None -> `Gaps`.
        examples: how many.
        generator: random numbers of the draws.
        n_resamples: how many draws.
        confidence_level: probability that the interval should cover at least.
        on: the device of the counts.
    """
    _check(n_resamples, confidence_level, "absolute")
    own = gaps()
    value = own.values.abs().sum(-1)
    certain = own.values.abs() > _CERTAIN * own.variance.sqrt()
    sign = torch.where(own.values >= 0, 1.0, -1.0).to(own.values)
    linear, largest = [], []
    for (counts,) in _drawn([examples], n_resamples, generator, on):
        error = gaps(weights=counts).values - own.values
        noise = torch.randn(error.shape, generator=generator, dtype=error.dtype, device=generator.device)
        error = error + own.unseen.sqrt() * noise.to(error.device)
        linear.append((sign * error).sum(-1))
        largest.append(torch.where(certain, sign * error, error.abs()).sum(-1))
    place = min(n_resamples - 1, math.ceil((1 + confidence_level) / 2 * n_resamples) - 1)
    below, above = (torch.cat(parts).sort().values[place].clamp(min=0) for parts in (largest, linear))
    return Interval(value, (value - below).clamp(min=0), (value + above).clamp(max=1))


def resampled(
    statistic: Statistic,
    value: Tensor,
    sizes: Sequence[int],
    *,
    generator: torch.Generator,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    method: Method = "bca",
    on: torch.device | None = None,
) -> Interval:
    """The interval of anything that can be computed from counts of examples; many numbers share the same draws.

    >>> values = torch.arange(100.0).double()
    >>> ends = resampled(lambda counts: counts[0] @ values / 100, values.mean(), [100],
    ...                  generator=torch.Generator().manual_seed(0))
    >>> abs(float(ends.low - (49.5 - 1.96 * values.std(correction=0) / 10))) < 0.7
    True

    Args:
        statistic: counts, one (n, examples) for each sample, -> (n, *shape).
        value: the numbers of the sample as it is (*shape).
        sizes: examples in each sample.
        generator: random numbers of the draws.
        n_resamples: how many draws.
        confidence_level: probability that the interval should cover.
        method: "bca" or "percentile".
        on: the device of the counts.
    """
    _check(n_resamples, confidence_level, method)
    drawn = torch.cat([statistic(counts).detach().double() for counts in _drawn(sizes, n_resamples, generator, on)])
    ends = torch.tensor(
        [(1 - confidence_level) / 2, (1 + confidence_level) / 2], dtype=torch.float64, device=drawn.device
    )
    shares = ends.reshape(2, *[1] * value.dim()).expand(2, *value.shape)
    if method == "bca":
        shares = _corrected(shares, drawn, value, _acceleration(statistic, sizes, on))
    # Order statistics, not means of two: one of them may be infinite.
    ordered = drawn.sort(0).values
    places = (shares * (n_resamples - 1)).round().long()
    low, high = ordered.gather(0, places)
    if method == "bca":
        # No draw on one side of the value, yet draws differ: its bias is beyond what they can correct.
        untrusted = ((drawn > value).all(0) | (drawn < value).all(0)) | (value < low) | (value > high)
        untrusted |= (low == high) & (drawn != drawn[:1]).any(0)  # draws that differ, but an interval without a width
        low, high = (end.masked_fill(untrusted, math.nan) for end in (low, high))
    return Interval(value, low, high)


def _check(n_resamples: int, confidence_level: float, method: str) -> None:
    if n_resamples < 2 or not 0 < confidence_level < 1 or method not in METHODS:
        raise InputError(
            f"expected n_resamples >= 2, a confidence_level between 0 and 1 and a method out of {', '.join(METHODS)}, "
            f"found {n_resamples}, {confidence_level} and {method!r}; leave them out for 1000, 0.95 and bca"
        )


def takes_weights(metric: Callable[..., Tensor]) -> bool:
    """Whether a metric has an argument `weights`; functions of C, as torch's own, have none that Python can see."""
    try:
        return "weights" in inspect.signature(metric).parameters
    except ValueError:
        return False


def _drawn(
    sizes: Sequence[int], n_resamples: int, generator: torch.Generator, on: torch.device | None
) -> Iterator[Counts]:
    """Counts of examples drawn with replacement, as many draws at a time as memory should hold."""
    step = max(1, _BLOCK_VALUES // max(sizes))
    for start in range(0, n_resamples, step):
        rows = min(step, n_resamples - start)
        yield tuple(_counts(size, rows, generator).to(on) for size in sizes)


def _counts(size: int, rows: int, generator: torch.Generator) -> Tensor:
    places = torch.randint(size, (rows, size), generator=generator, device=generator.device)
    ones = torch.ones((), dtype=torch.float64, device=places.device).expand_as(places)
    return torch.zeros(rows, size, dtype=torch.float64, device=places.device).scatter_add_(1, places, ones)


def _corrected(shares: Tensor, drawn: Tensor, value: Tensor, acceleration: Tensor) -> Tensor:
    """The shares of draws at which the ends lie: Phi(b + (b + z) / (1 - a (b + z))), b the bias and a acceleration."""
    below = ((drawn < value).double().mean(0) + (drawn <= value).double().mean(0)) / 2
    edge = 0.5 / len(drawn)  # what is seen in no draw may be as frequent as half of one
    bias = torch.special.ndtri(below.clamp(edge, 1 - edge))
    moved = bias + torch.special.ndtri(shares)
    corrected: Tensor = torch.special.ndtr(bias + moved / (1 - acceleration * moved))
    return corrected


def _acceleration(statistic: Statistic, sizes: Sequence[int], on: torch.device | None) -> Tensor:
    """sum_i l_i^3 / (6 (sum_i l_i^2)^1.5), l_i the influence of group i of examples; 0 where nothing has any."""
    third = second = torch.zeros((), dtype=torch.float64, device=on)
    for which, size in enumerate(sizes):
        if size == 1:
            continue  # without its only example there is no sample
        groups = min(size, _GROUPS)
        group = torch.arange(size, device=on) % groups
        left = (group != torch.arange(groups, device=on)[:, None]).double()
        ones = [torch.ones(groups, other, dtype=torch.float64, device=on) for other in sizes]
        without = torch.cat([
            statistic(tuple(rows[part] for rows in (*ones[:which], left, *ones[which + 1 :]))).double()
            for part in torch.arange(groups, device=on).split(max(1, _BLOCK_VALUES // max(sizes)))
        ])  # fmt: skip
        influence = without.mean(0) - without
        third, second = third + influence.pow(3).sum(0), second + influence.square().sum(0)
    return (third / (6 * second.pow(1.5))).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _of_drawn(metric: Callable[..., Tensor], tensors: Sequence[Tensor], axes: Sequence[int], row: Counts) -> Tensor:
    """The metric of the examples that one row of counts stands for."""
    chosen = [torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.long()) for counts in row]
    chosen = chosen if len(chosen) == len(tensors) else chosen * len(tensors)
    parts = [tensor.index_select(axis, rows) for tensor, axis, rows in zip(tensors, axes, chosen, strict=True)]
    return torch.as_tensor(metric(*parts)).detach().double()


def _sizes(tensors: Sequence[Tensor], axes: Sequence[int], separately: bool) -> list[int]:
    """Number of examples in each sample that is drawn by itself."""
    if not tensors or len(axes) != len(tensors) or any(not tensor.numel() for tensor in tensors):
        raise InputError(
            f"expected tensors with examples and an axis for each, found shapes "
            f"{[tuple(tensor.shape) for tensor in tensors]} and axes {list(axes)}; give what the metric takes"
        )
    sizes = [tensor.shape[axis] for tensor, axis in zip(tensors, axes, strict=True)]
    if separately:
        return sizes
    if len(set(sizes)) > 1:
        raise InputError(
            f"expected tensors of the same examples, found {sizes} of them; say separately=True to draw from each by "
            "itself, or name the axis of examples of each tensor"
        )
    return sizes[:1]
