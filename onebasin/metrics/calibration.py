"""Calibration errors of classifiers, over bins of equal width and of equal mass: are they as often right as they say?

Probabilities are (examples, classes), targets class numbers (examples,). The confidence of an example is its largest
probability; it is right if that class (the first one, of equal ones) is the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import as_class_numbers, as_probabilities, as_weights, at_most

KINDS = ("class-wise", "top-label")
PSEUDO = 1.0  # examples, half of them right, that each bin is given when its variance is judged ...
POOLED = 5.0  # ... or its share of so many: none wrong of n then allows for an error rate of 1.96 sqrt(2.5) / n


class Gaps(NamedTuple):
    """The signed parts of a calibration error, which is the sum of their absolute values.

    Attributes:
        values: float64 (..., cells), a cell being a bin, or a bin of one class; negative where outcomes are rarer than
            they were said to be.
        variance: of each value over test sets of this size, float64 (cells,); without weights only.
        unseen: how much of it resampling the examples cannot show, because few of them are in the cell, (cells,).
    """

    values: Tensor
    variance: Tensor
    unseen: Tensor


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram as numbers.

    Attributes:
        edges: borders of the bins, float64 (bins + 1,), from 0 to 1; a bin holds its right border, not its left one.
        count: examples in each bin, int64 (bins,).
        confidence: their mean confidence, float64 (bins,), NaN in an empty bin.
        accuracy: the share of them that is right, float64 (bins,), NaN in an empty bin.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


@accepts_arrays
def ece(probabilities: Tensor, targets: Tensor, bins: int = 15, *, weights: Tensor | None = None) -> Tensor:
    """Expected calibration error: sum_b n_b / n |accuracy_b - mean confidence_b| over bins of equal width.

    Bins are ((b - 1) / B, b / B]: right-closed, so confidence 1 is in the last one. Borders are rounded to the dtype of
    the probabilities: a float32 confidence of 0.2 lies on the border 3 / 15. The estimate is never below zero, and
    so too large on average: a perfectly calibrated classifier has about 0.8 sum_b sqrt(n_b c_b (1 - c_b)) / n.

    >>> p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6], [0.0, 1.0]])
    >>> ece(p, torch.tensor([0, 1, 0, 1]))  # (2 |0.5 - 0.8| + |0 - 0.6| + 0) / 4
    tensor(0.3000, dtype=torch.float64)

    Args:
        probabilities: (examples, classes).
        targets: (examples,).
        bins: their number B.
        weights: (..., examples), see `onebasin.metrics.probabilities`.
    """
    return ece_gaps(probabilities, targets, bins, weights=weights).values.abs().sum(-1)


def ece_gaps(probabilities: Tensor, targets: Tensor, bins: int = 15, *, weights: Tensor | None = None) -> Gaps:
    """The terms n_b / n (accuracy_b - mean confidence_b) of `ece`, with their sign; arguments as there.

    >>> p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6], [0.0, 1.0]])
    >>> ece_gaps(p, torch.tensor([0, 1, 0, 1]), bins=2).values  # (1 + 0 + 1 - 0.8 - 0.8 - 0.6 - 1) / 4
    tensor([ 0.0000, -0.3000], dtype=torch.float64)
    """
    confidence, right = top(probabilities, targets)
    place = _equal_width(probabilities, bins)
    counted = as_weights(weights, len(right), right.device)
    gap = right - confidence
    if weights is None:
        terms = torch.stack([gap, gap.square(), right, torch.ones_like(gap)])
        return _gaps(terms.new_zeros(4, bins).index_add_(1, place, terms) / len(gap), len(gap))
    cells = gap.new_zeros(len(gap), bins).scatter_(1, place[:, None], gap[:, None])
    return _gaps((counted @ cells / counted.sum(-1)[..., None])[None], len(gap))


@accepts_arrays
def mce(probabilities: Tensor, targets: Tensor, bins: int = 15, *, weights: Tensor | None = None) -> Tensor:
    """Maximum calibration error: the largest |accuracy_b - mean confidence_b| of the bins of `ece` that hold examples.

    A bin with a single example counts as much as any other, so it grows with the number of bins; look at `reliability`
    beside it.

    >>> p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6], [0.0, 1.0]])
    >>> mce(p, torch.tensor([0, 1, 0, 1]))
    tensor(0.6000, dtype=torch.float64)

    Args:
        probabilities: (examples, classes).
        targets: (examples,).
        bins: their number.
        weights: (..., examples), see `onebasin.metrics.probabilities`.
    """
    confidence, right = top(probabilities, targets)
    place = _equal_width(probabilities, bins)
    counted = as_weights(weights, len(right), right.device)
    cells = torch.nn.functional.one_hot(place, bins).double()
    gaps = (counted * (right - confidence)) @ cells / (counted @ cells)
    return gaps.abs().nan_to_num(nan=0.0).amax(-1)


@accepts_arrays
def reliability(probabilities: Tensor, targets: Tensor, bins: int = 15) -> Reliability:
    """Count, confidence and accuracy in each of the bins of `ece`.

    >>> found = reliability(torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.4, 0.6]]), torch.tensor([0, 1, 1]), bins=5)
    >>> found.count, found.accuracy
    (tensor([0, 0, 1, 2, 0]), tensor([   nan,    nan, 1.0000, 0.5000,    nan], dtype=torch.float64))

    Args:
        probabilities: (examples, classes).
        targets: (examples,).
        bins: their number.
    """
    confidence, right = top(probabilities, targets)
    place = _equal_width(probabilities, bins)
    count = torch.bincount(place, minlength=bins)
    sums = [torch.bincount(place, weights=values, minlength=bins) for values in (confidence, right)]
    edges = torch.arange(bins + 1, dtype=torch.float64, device=count.device) / bins
    return Reliability(edges, count, sums[0] / count, sums[1] / count)


@accepts_arrays
def ace(
    probabilities: Tensor,
    targets: Tensor,
    bins: int = 15,
    *,
    kind: Literal["class-wise", "top-label"] = "class-wise",
    weights: Tensor | None = None,
) -> Tensor:
    """Adaptive calibration error, after Nixon et al. (2019): bins that hold equally many examples.

    With R bins, "class-wise" takes the probability of every class k, whether it is the largest or not,

        1 / (K R) sum_k sum_r |share of class k_r - mean probability_r|,

    and "top-label" the confidence alone, 1 / R sum_r |accuracy_r - mean confidence_r|. The first is about 2 / K times
    the second: most probabilities of K classes are near zero, and so are their errors.

    Bin r holds the r-th of R equal parts of the examples in ascending order. Where n is no multiple of R, an example on
    a border counts in both bins by its share; equal probabilities are interchangeable, and each gets the mean of their
    outcomes. So the value depends neither on the order of examples nor on how a sort treats ties.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> ace(p, torch.tensor([0, 0, 1, 0]), bins=2, kind="top-label")  # (|0.5 - 0.65| + |1 - 0.85|) / 2
    tensor(0.1500, dtype=torch.float64)

    Args:
        probabilities: (examples, classes).
        targets: (examples,).
        bins: their number R.
        kind: "class-wise" or "top-label".
        weights: (..., examples), see `onebasin.metrics.probabilities`.
    """
    return ace_gaps(probabilities, targets, bins, kind=kind, weights=weights).values.abs().sum(-1)


def ace_gaps(
    probabilities: Tensor,
    targets: Tensor,
    bins: int = 15,
    *,
    kind: Literal["class-wise", "top-label"] = "class-wise",
    weights: Tensor | None = None,
) -> Gaps:
    """The terms of `ace` with their sign, bin by bin of the first class, then of the next; arguments as there.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> ace_gaps(p, torch.tensor([0, 0, 1, 0]), bins=2, kind="top-label").values  # (0.5 - 0.65) / 2, (1 - 0.85) / 2
    tensor([-0.0750,  0.0750], dtype=torch.float64)
    """
    _check_bins(bins)
    if kind not in KINDS:
        raise InputError(f"expected kind to be one of {', '.join(KINDS)}, found {kind!r}; leave it out for class-wise")
    exact = as_probabilities(probabilities)
    counted = as_weights(weights, len(exact), exact.device)
    if kind == "top-label":
        return _equal_mass(*top(probabilities, targets), counted, bins)
    numbers = as_class_numbers(targets, exact)
    classes = exact.shape[1]
    each = [_equal_mass(exact[:, label], (numbers == label).double(), counted, bins) for label in range(classes)]
    values, variance, unseen = (torch.cat(parts, -1) for parts in zip(*each, strict=True))
    return Gaps(values / classes, variance / classes**2, unseen / classes**2)


def top(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, and 1 where it is deserved, float64 (examples,)."""
    exact = as_probabilities(probabilities)
    confidence, label = exact.max(1)
    return confidence, (label == as_class_numbers(targets, exact)).double()


def _equal_width(probabilities: Tensor, bins: int) -> Tensor:
    """The bin of each example's confidence, int64 (examples,)."""
    return bins_of(probabilities.detach().amax(1), bins)


def bins_of(confidence: Tensor, bins: int) -> Tensor:
    """The bin of `ece` of each confidence, int64 of the same shape.

    >>> bins_of(torch.tensor([0.1, 0.5, 0.6]), 2)
    tensor([0, 0, 1])
    """
    _check_bins(bins)
    borders = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    return torch.searchsorted(borders.to(confidence.dtype).double(), confidence.double().contiguous())


def _equal_mass(predicted: Tensor, outcome: Tensor, weights: Tensor, bins: int) -> Gaps:
    """Share of the mass times (mean outcome - mean predicted) in each bin, for (examples,) and weights (..., examples).

    In ascending order of `predicted` let W be the weight so far and G the weighted sum of gaps so far; G as a function
    of W, straight between distinct values, gives the sum of any part by its two ends.
    """
    values = predicted.unique()
    mass = torch.nn.functional.pad(at_most(predicted, weights, values), (1, 0))
    parts = torch.arange(1, bins, dtype=torch.float64, device=mass.device) / bins
    ends = (parts * mass[..., -1:]).contiguous()
    after = torch.searchsorted(mass.contiguous(), ends).clamp(1, len(values))
    left, right = mass.gather(-1, after - 1), mass.gather(-1, after)

    def parted(terms: Tensor) -> Tensor:
        sums = torch.nn.functional.pad(at_most(predicted, weights * terms, values), (1, 0))
        low, high = sums.gather(-1, after - 1), sums.gather(-1, after)
        inner = low + (ends - left) / (right - left) * (high - low)
        return torch.cat([sums[..., :1], inner, sums[..., -1:]], dim=-1).diff(dim=-1) / mass[..., -1:]

    gap = outcome - predicted
    if weights.dim() > 1:
        return _gaps(parted(gap)[None], len(predicted))
    return _gaps(torch.stack([parted(own) for own in (gap, gap.square(), outcome, torch.ones_like(gap))]), len(gap))


def _gaps(sums: Tensor, examples: int) -> Gaps:
    """Gaps from the sums over each cell, as shares of all examples, of gaps, their squares, outcomes and ones.

    A cell of m examples whose outcomes are all alike has no variance to show; that of outcomes is judged as if c more
    were in it, half of them of each kind: rate a -> (m a + c / 2) / (m + c) with c = max(PSEUDO, POOLED * share).
    None wrong of n then allows for an error rate of 3.1 / n, which n examples do not show in 4.5 % of all cases.
    """
    if len(sums) == 1:
        nothing = sums.new_zeros(sums.shape[-1])
        return Gaps(sums[0], nothing, nothing)
    gap, square, outcome, share = sums
    rate = torch.where(share > 0, outcome / share, 0.5)
    more = (POOLED * share).clamp(min=PSEUDO)
    smooth = (examples * outcome + more / 2) / (examples * share + more)
    unseen = (share * (smooth * (1 - smooth) - rate * (1 - rate))).clamp(min=0) / examples
    return Gaps(gap, (square - gap.square()).clamp(min=0) / examples + unseen, unseen)


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise InputError(f"expected at least 1 bin, found {bins}; leave bins out for 15")


COLDEST = 1e-6
HOTTEST = 1e6
_STEPS = 200
_CLOSE = 1e-13  # relative


@accepts_arrays
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


@accepts_arrays
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
