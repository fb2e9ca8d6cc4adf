"""Likelihoods: the log probability of each target given the model's outputs.

Outputs and targets have the examples on their first axis. A Gaussian with learned noise reads twice as many columns
as there are targets: first the means, then the logarithms of the standard deviations. Of targets with pixels (three
axes or more) some may be missing: NaN among values, `IGNORED` among class numbers. They count nothing, and give no
gradient. Other distributions, and losses, are in `onebasin.functional.heads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import IGNORED, LIKELIHOODS, Likelihood, check_classes_fit

LogLikelihood = Callable[[Tensor, Tensor], Tensor]  # (outputs (n, ...), targets (n, ...)) -> (n,)
Noise = float | str | None
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def categorical(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log softmax(outputs)[target]; classes on axis 1, further axes (pixels, tokens) are summed; 0 for `IGNORED`."""
    return (
        -F.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)
        if outputs.dim() > 2
        else (-F.cross_entropy(outputs, targets, reduction="none"))
    )


def bernoulli(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log probability of targets 0 or 1 under logits; both (n,) or (n, k), or with pixels."""
    logits = outputs.reshape(targets.shape)
    known = None
    if targets.dim() > 2:
        known = ~targets.isnan() if targets.is_floating_point() else targets != IGNORED
        targets = torch.where(known, targets, 0)
    each = -F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return _summed(each, known)


def gaussian(noise: float) -> LogLikelihood:
    """Log N(target; output, noise^2), summed over the entries of an example."""
    constant = math.log(noise) + _HALF_LOG_TWO_PI

    def log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        goals, known = _known(targets)
        residual = (goals - outputs.reshape(targets.shape)) / noise
        return _summed(-0.5 * residual.square() - constant, known)

    log_likelihood.__name__ = "gaussian"
    return log_likelihood


def learned_gaussian(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log N(target; mean, exp(s)^2) where outputs (n, 2 k, ...) are k means, then k values s."""
    mean, log_std = outputs.chunk(2, dim=1)
    goals, known = _known(targets)
    residual = (goals.reshape(mean.shape) - mean) * torch.exp(-log_std)
    each = -0.5 * residual.square() - log_std - _HALF_LOG_TWO_PI
    return _summed(each, None if known is None else known.reshape(mean.shape))


def _known(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Targets with 0 in the place of missing ones, and where they are not missing; None where none can be."""
    if targets.dim() < 3:
        return targets, None
    known = ~targets.isnan()
    return torch.where(known, targets, 0.0), known


def _summed(each: Tensor, known: Tensor | None) -> Tensor:
    """The sum over the entries of an example, of those that are known."""
    counted = each if known is None else torch.where(known, each, 0.0)
    return counted.reshape(len(each), -1).sum(1)


class LearnedNoise(nn.Module):
    """A regression model with one learned noise level per output: gives (means, log standard deviations).

    >>> LearnedNoise(nn.Linear(3, 2), outputs=2)(torch.zeros(5, 3)).shape
    torch.Size([5, 4])
    """

    def __init__(self, model: nn.Module, outputs: int = 1) -> None:
        super().__init__()
        self.model = model
        self.log_noise = nn.Parameter(torch.zeros(outputs))

    def forward(self, *arguments: object, **options: object) -> Tensor:
        """The model's outputs (n, k) beside the log noise, (n, 2 k)."""
        mean: Tensor = self.model(*arguments, **options)
        mean = mean.reshape(len(mean), -1)
        return torch.cat([mean, self.log_noise.expand_as(mean)], dim=1)


def choose(kind: str | LogLikelihood, noise: Noise, outputs: Tensor, targets: Tensor) -> LogLikelihood:
    """The likelihood for these outputs and targets.

    Args:
        kind: what `onebasin.functional.kind_of_targets` says of all targets, or a function (outputs, targets) -> (n,).
        noise: for gaussian: the standard deviation, or "learned" where the model gives it.
        outputs: what the model gives for some examples.
        targets: the targets of these examples.
    """
    if isinstance(kind, str) and kind in LIKELIHOODS:
        kind = LIKELIHOODS[kind]
    if isinstance(kind, Likelihood):
        kind.check(outputs, targets)
        return kind
    if callable(kind):
        return _checked(kind, outputs, targets)
    if kind == "categorical":
        check_classes_fit(outputs, targets)
        return categorical
    if kind == "bernoulli":
        _check_same(outputs, targets, 1)
        return bernoulli
    return _gaussian(noise, outputs, targets)


def _gaussian(noise: Noise, outputs: Tensor, targets: Tensor) -> LogLikelihood:
    if noise is None and _columns(outputs) == 2 * _columns(targets):
        noise = "learned"
    if noise == "learned":
        _check_same(outputs, targets, 2)
        return learned_gaussian
    if not isinstance(noise, int | float) or not noise > 0:
        raise InputError(
            f"a gaussian likelihood needs the noise level of the targets, found {noise!r}: give noise=standard "
            'deviation, or noise="learned" with a model that gives a mean and a log standard deviation per target '
            "(onebasin.inference.LearnedNoise(model) makes one)"
        )
    _check_same(outputs, targets, 1)
    return gaussian(float(noise))


def _core(tensor: Tensor) -> tuple[int, ...]:
    """The shape of an example without axes of length 1, which may be added or left out; nothing is laid out anew."""
    return tuple(size for size in tensor.shape[1:] if size != 1)


def _columns(tensor: Tensor) -> int:
    return tensor[0].numel()


def _check_same(outputs: Tensor, targets: Tensor, times: int) -> None:
    one = outputs[:, : outputs.shape[1] // times] if times > 1 and outputs.dim() > 1 else outputs
    same = _core(one) == _core(targets)
    if len(outputs) != len(targets) or _columns(outputs) != times * _columns(targets) or not same:
        wanted = f"{times * _columns(targets)} values per example"
        raise InputError(
            f"expected {wanted} from the model for targets {tuple(targets.shape)}, found outputs "
            f"{tuple(outputs.shape)}: change the model's last layer or the shape of the targets"
        )


def check_shares(targets: Tensor) -> None:
    """Refuse bernoulli targets outside of 0 ... 1."""
    missing = (
        targets.isnan() | (targets == IGNORED) if targets.dim() > 2 else torch.zeros_like(targets, dtype=torch.bool)
    )
    low, high = float(targets[~missing].min()), float(targets[~missing].max())
    if low < 0 or high > 1:
        raise InputError(f"expected bernoulli targets from 0 to 1, found {low:g} to {high:g}: give 0 or 1")


def _checked(function: LogLikelihood, outputs: Tensor, targets: Tensor) -> LogLikelihood:
    values = function(outputs, targets)
    if not isinstance(values, Tensor) or values.shape != (len(targets),):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"expected one log likelihood for each of {len(targets)} examples from the function, found {found}: "
            "sum over the other axes, not over the examples"
        )
    return function
