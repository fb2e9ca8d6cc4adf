"""Several numbers of the same examples, with one set of bootstrap draws for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.assess.evaluation import Estimate
from onebasin.metrics.bootstrap import Counts, interval, resampled
from onebasin.metrics.weighing import weighted_mean

# Counts of the examples of each sample (draws, examples) -> numbers by name (draws,); None: the samples as they are.
Numbers = Callable[[Counts | None], Mapping[str, Tensor]]


class Sampling(NamedTuple):
    """How intervals are made: draws of examples, the probability they should cover, and a seed."""

    draws: int
    level: float
    seed: int


def estimates(numbers: Numbers, sizes: Sequence[int], sampling: Sampling) -> dict[str, Estimate]:
    """Each number with its interval, all from the same draws of examples.

    >>> estimates(means({"x": torch.arange(5.0)}), [5], Sampling(100, 0.9, 0))["x"].value
    2.0

    Args:
        numbers: computes them.
        sizes: examples in each sample that is drawn by itself.
        sampling: how intervals are made.
    """
    whole = numbers(None)
    value = torch.stack(list(whole.values()))
    found = resampled(
        lambda counts: torch.stack(list(numbers(counts).values()), dim=-1),
        value,
        sizes,
        generator=torch.Generator().manual_seed(sampling.seed),
        draws=sampling.draws,
        level=sampling.level,
        on=value.device,
    )
    rows = zip(*(part.tolist() for part in found), strict=True)
    return {name: Estimate(*row) for name, row in zip(whole, rows, strict=True)}


def calibration_estimates(
    metrics: Mapping[str, Callable[..., Tensor]], probabilities: Tensor, targets: Tensor, sampling: Sampling
) -> dict[str, Estimate]:
    """Calibration errors, each with the interval of `onebasin.metrics.bootstrap.absolute`.

    >>> from onebasin.metrics.calibration import ece
    >>> p, targets = torch.tensor([[0.8, 0.2]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> [round(end, 2) for end in calibration_estimates({"ece": ece}, p, targets, Sampling(200, 0.95, 0))["ece"]]
    [0.0, 0.0, 0.08]

    Args:
        metrics: by name: `ece` or `ace`, or a `functools.partial` of one with further keywords.
        probabilities: (examples, classes).
        targets: (examples,).
        sampling: how intervals are made; every metric sees the same draws.
    """
    found = {}
    for name, metric in metrics.items():
        generator = torch.Generator().manual_seed(sampling.seed)
        ends = interval(metric, probabilities, targets, generator=generator, draws=sampling.draws, level=sampling.level)
        found[name] = Estimate(*map(float, ends))
    return found


def means(values: Mapping[str, Tensor]) -> Numbers:
    """Means over the examples of one sample.

    >>> means({"x": torch.tensor([1.0, 3.0])})((torch.tensor([[0.0, 2.0]]),))
    {'x': tensor([3.], dtype=torch.float64)}

    Args:
        values: one per example (examples,), by name.
    """
    return lambda counts: {name: weighted_mean(own, only(counts)) for name, own in values.items()}


def only(counts: Counts | None) -> Tensor | None:
    """The counts of a single sample, as metrics take them."""
    return None if counts is None else counts[0]
