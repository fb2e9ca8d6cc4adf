"""Errors of positive values at pixels, such as depths: relative errors, threshold accuracy, the error of logarithms.

`predicted` and `targets` are (images, ...) of one shape; entries whose target is NaN do not count. All pixels of all
images are taken together, and with `weights` (..., images) an image counts more than once. Evaluations keep the sums of
each image alone (`depth_sums`), and `depth_errors` makes all numbers from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import as_weights

POWERS = (1, 2, 3)
_RATIO = 1.25


@accepts_arrays
def silog(predicted: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Scale-invariant error of logarithms: the standard deviation of d = log predicted - log target over all pixels.

    It is sqrt(mean d^2 - (mean d)^2), that of Eigen et al. (2014) with lambda = 1; times 100 it is KITTI's. A common
    factor of all predictions changes nothing.

    >>> silog(torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, 2.0]]))
    tensor(0., dtype=torch.float64)

    Args:
        predicted: (images, ...), positive.
        targets: (images, ...), positive.
        weights: (..., images).
    """
    return depth_errors(depth_sums(*_checked(predicted, targets)), weights)["silog"]


@accepts_arrays
def threshold_accuracy(predicted: Tensor, targets: Tensor, power: int = 1, *, weights: Tensor | None = None) -> Tensor:
    """Share of pixels with max(predicted / target, target / predicted) < 1.25^power.

    >>> threshold_accuracy(torch.tensor([[1.0, 1.3]]), torch.tensor([[1.0, 1.0]]))
    tensor(0.5000, dtype=torch.float64)

    Args:
        predicted: (images, ...), positive.
        targets: (images, ...), positive.
        power: 1, 2 or 3.
        weights: (..., images).
    """
    if power not in POWERS:
        raise InputError(f"expected a power out of {POWERS}, found {power!r}; give 1")
    return depth_errors(depth_sums(*_checked(predicted, targets)), weights)[f"delta_{power}"]


@accepts_arrays
def absolute_relative_error(predicted: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean of |predicted - target| / target over pixels.

    >>> absolute_relative_error(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 2.0]]))
    tensor(0.2500, dtype=torch.float64)

    Args:
        predicted: (images, ...).
        targets: (images, ...), positive.
        weights: (..., images).
    """
    return depth_errors(depth_sums(*_checked(predicted, targets)), weights)["abs_rel"]


@accepts_arrays
def squared_relative_error(predicted: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean of (predicted - target)^2 / target over pixels.

    >>> squared_relative_error(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 2.0]]))
    tensor(0.2500, dtype=torch.float64)

    Args:
        predicted: (images, ...).
        targets: (images, ...), positive.
        weights: (..., images).
    """
    return depth_errors(depth_sums(*_checked(predicted, targets)), weights)["sq_rel"]


def depth_sums(predicted: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Sums over the pixels of each image, float64 (images,), of what `depth_errors` needs.

    Where a prediction is not positive its logarithm is NaN, and it is further off than any threshold.

    >>> {name: each.tolist() for name, each in depth_sums(torch.ones(1, 2), torch.ones(1, 2)).items()}["delta_1"]
    [2.0]
    """
    known = ~targets.isnan()
    goal, guess = torch.where(known, targets, 1.0).double(), torch.where(known, predicted, 1.0).double()
    apart = guess.clamp(min=0).log() - goal.log()
    error = guess - goal
    values = {
        "log": apart,
        "log_square": apart.square(),
        "abs_rel": error.abs() / goal,
        "sq_rel": error.square() / goal,
    }
    values |= {
        f"delta_{power}": (torch.maximum(guess / goal, goal / guess) < _RATIO**power) & (guess > 0) for power in POWERS
    }
    values["pixels"] = torch.ones_like(goal)
    return {name: torch.where(known, each, 0).double().flatten(1).sum(1) for name, each in values.items()}


def depth_errors(sums: dict[str, Tensor], weights: Tensor | None = None) -> dict[str, Tensor]:
    """silog, abs_rel, sq_rel and delta_1 to delta_3, each (...), from `depth_sums`."""
    counts = as_weights(weights, len(sums["pixels"]), sums["pixels"].device)
    pixels = counts @ sums["pixels"]
    means = {name: counts @ each / pixels for name, each in sums.items() if name != "pixels"}
    result = {"silog": (means.pop("log_square") - means.pop("log").square()).clamp(min=0).sqrt()}
    return result | means


def _checked(predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if predicted.shape != targets.shape or predicted.dim() < 2:
        raise InputError(
            f"expected predictions and targets (images, ...) of one shape, found {tuple(predicted.shape)} and "
            f"{tuple(targets.shape)}; give one value per pixel"
        )
    if not bool(((targets > 0) | targets.isnan()).all()):
        raise InputError(
            f"expected positive targets, found {float(targets.nan_to_num().min()):g}; mark pixels without one by NaN"
        )
    return predicted.detach(), targets.detach().to(predicted.device)
