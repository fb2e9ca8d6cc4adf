"""The numbers of a crowd that predicts values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebasin.assess.evaluation import Estimate
from onebasin.assess.intervals import Sampling, estimates, only
from onebasin.assess.intervals import means as averages
from onebasin.errors import InputError
from onebasin.metrics.bootstrap import Counts
from onebasin.metrics.regression import central_interval, log_density, rmse

Noise = float | str | None


def value_numbers(
    outputs: Tensor, targets: Tensor, noise: Noise, levels: Sequence[float], sampling: Sampling
) -> dict[str, Estimate]:
    """RMSE of the mean, NLL of the mixture, and coverage and width of its central intervals.

    Args:
        outputs: what members give, (members, examples, ...), see `gaussians`.
        targets: (examples, ...).
        noise: as in `gaussians`.
        levels: of the intervals.
        sampling: how intervals are made.
    """
    goals = targets.double()
    means, spread = gaussians(outputs, goals, noise)
    central = means.mean(0, keepdim=True)
    each = {"nll": -log_density(means, goals, spread)}
    for level in levels:
        low, high = central_interval(means, spread, level)
        each[f"coverage_{100 * level:g}"] = _per_example(((goals >= low) & (goals <= high)).double())
        each[f"width_{100 * level:g}"] = _per_example(high - low)

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        return {"rmse": rmse(central, goals, weights=only(counts)), **averages(each)(counts)}

    return estimates(numbers, [len(goals)], sampling)


def gaussians(outputs: Tensor, targets: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Means in float64 (members, *shape of targets), and a standard deviation that broadcasts to them.

    >>> means, spread = gaussians(torch.tensor([[[1.0, 0.0]]]), torch.tensor([2.0]), "learned")
    >>> means, spread
    (tensor([[1.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))

    Args:
        outputs: as many values per example as targets; or (members, examples, 2 k), k means and then k logarithms of
            standard deviations.
        targets: (examples, ...), of k values each.
        noise: the standard deviation of targets; "learned" where members give it; None: learned if they do.

    Raises:
        InputError: there is no noise, or outputs do not fit targets.
    """
    exact = outputs.detach().double()
    shape = (len(exact), *targets.shape)
    values = targets[0].numel()
    found = exact[0, 0].numel() if exact.dim() > 1 and exact.shape[1] == len(targets) else 0
    if noise is None and found == 2 * values:
        noise = "learned"
    if noise == "learned" and found == 2 * values and exact.dim() == 3:
        means, logs = exact.chunk(2, dim=2)
        return means.reshape(shape), logs.exp().reshape(shape)
    if isinstance(noise, int | float) and found == values and _core(exact[0]) == _core(targets):
        return exact.reshape(shape), torch.as_tensor(float(noise), dtype=torch.float64, device=exact.device)
    raise InputError(
        f"expected outputs like targets {tuple(targets.shape)} with noise=standard deviation, or (examples, "
        f'{2 * values}) with noise="learned", found outputs {tuple(exact.shape[1:])} and noise={noise!r}: give the '
        "noise level of the targets, or change the model's last layer"
    )


def _per_example(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _core(tensor: Tensor) -> tuple[int, ...]:
    """The shape of an example without axes of length 1, which may be added or left out."""
    return tuple(size for size in tensor.shape[1:] if size != 1)
