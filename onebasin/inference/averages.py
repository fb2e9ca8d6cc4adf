"""Averages of the networks of a training, and running statistics of networks that training has never visited."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from onebasin.functional import refreshed, tracked
from onebasin.inference.kernel import Draws
from onebasin.inference.target import Target
from onebasin.state import State


def running_mean(mean: Tensor, number: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The mean (chains, D) of one network more, and their number (chains,).

        mean_n = mean_(n-1) + (w_n - mean_(n-1)) / n

    No sum grows, so nothing is lost in float32 however many networks there are.
    """
    number = number + 1
    return mean + (position - mean) / number[:, None].to(mean.dtype), number


def with_own_statistics(target: Target, position: Tensor, buffers: State) -> Draws:
    """Networks at `position` (chains, D) with running statistics of their own, and their log density."""
    measured = with_statistics(target, position, buffers)
    return Draws(position, measured, target.log_density(position, measured))


def with_statistics(target: Target, position: Tensor, buffers: State) -> State:
    """The buffers (chains, ...) with running statistics of the networks at `position` (chains, D), see `refreshed`.

    They are measured on the data of the target; without norms, or without data, they come back as they are.
    """
    if target.outputs is None or not tracked(target.outputs.model):
        return buffers
    (arguments, named), _ = tree_unflatten(target.leaves, target.structure)
    networks = target.layout.whole_state(target.layout.split(position), buffers)
    model, constant = target.outputs.model, target.outputs.constant
    states, _ = refreshed(model, networks, named or arguments, batch=target.piece, constant=constant)
    return {name: states[name] for name in buffers}
