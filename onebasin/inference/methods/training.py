"""Optimise many networks at once: the members of an ensemble, or the start of chains.

    minimise U(theta) / N   by Adam, or by SGD with momentum,

with an optional decoupled weight decay. U contains the prior, so the minimum is the MAP estimate; with a flat prior it
is maximum likelihood. Networks train in the model's training mode: batch norm uses batch statistics and updates its
running ones, the model's own dropout drops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.density.compiling import Function, compiled
from onebasin.inference.density.minibatch import Minibatches
from onebasin.inference.density.target import Target
from onebasin.inference.kernel import Info, Moment, Networks
from onebasin.inference.seeds import Streams, derived
from onebasin.state import State

SCHEDULES = ("constant", "cosine", "cyclical")


class Trained(NamedTuple):
    """State of training: weights, what is beside them, and the optimiser's moments."""

    position: Tensor
    rest: State
    first: Tensor  # (chains, D): mean gradient of Adam, velocity of SGD
    second: Tensor  # (chains, D): mean squared gradient of Adam; empty (chains, 0) for SGD


@dataclass(frozen=True)
class Optimiser:
    """How a gradient becomes a step.

    Attributes:
        name: "adam" or "sgd".
        rate: the learning rate, of the mean loss per example.
        momentum: of SGD.
        decay: decoupled weight decay: each step also multiplies the weights by 1 - rate * decay.
        schedule: "constant"; "cosine", from the rate to zero over the stage; "cyclical", the same in each cycle.
        cycle: steps of a cycle.
        compile: whether Adam is compiled.
    """

    name: str = "adam"
    rate: float = 1e-3
    momentum: float = 0.9
    decay: float = 0.0
    schedule: str = "constant"
    cycle: int = 0
    compile: bool = False
    _made: dict[tuple[int, ...], Function] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.name not in ("adam", "sgd"):
            raise InputError(f'expected optimiser "adam" or "sgd", found {self.name!r}: choose one of them')
        if self.schedule not in SCHEDULES:
            raise InputError(f"expected a schedule out of {', '.join(SCHEDULES)}, found {self.schedule!r}: choose one")
        if not (self.rate > 0 and 0 <= self.momentum < 1 and self.decay >= 0):
            raise InputError(
                f"expected a positive learning rate, 0 <= momentum < 1 and decay >= 0, found {self.rate}, "
                f"{self.momentum} and {self.decay}: give others, such as 1e-3, 0.9 and 0"
            )

    def rate_at(self, moment: Moment) -> float:
        """The learning rate of this step."""
        if self.schedule == "constant":
            return self.rate
        length = max(1, self.cycle if self.schedule == "cyclical" else moment.warmup)
        done = moment.step % length if self.schedule == "cyclical" else min(moment.step, length)
        return 0.5 * self.rate * (1 + math.cos(math.pi * done / length))

    def update(self, state: Trained, gradient: Tensor, moment: Moment, scale: float = 1.0) -> tuple[Trained, Tensor]:
        """New weights and moments; a chain whose gradient is not finite stays where it is, without momentum.

        Args:
            state: weights and moments, which are not changed.
            gradient: a multiple of the gradient of the mean loss (chains, D).
            moment: when.
            scale: what makes the gradient of it.

        Returns:
            The new state, and which chains have moved (chains,).
        """
        position, first, second = self._stepped(state, gradient, moment, scale)
        good = torch.isfinite(gradient.sum(dim=1))  # one entry that is not spoils the sum
        if not bool(good.all()):
            keep = good[:, None]
            position = torch.where(keep, position, state.position)
            first, second = torch.where(keep, first, 0), torch.where(keep, second, state.second)
        return Trained(position, state.rest, first, second), good

    def _stepped(self, state: Trained, gradient: Tensor, moment: Moment, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        rate = self.rate_at(moment)
        if self.name == "sgd":
            first = self.momentum * state.first + scale * gradient
            return state.position * (1 - rate * self.decay) - rate * first, first, state.second
        count = moment.step + 1
        numbers = (rate / (1 - _BETA1**count), math.sqrt(1 - _BETA2**count), 1 - rate * self.decay, scale)
        tensors = (state.position, state.first, state.second, gradient)
        if not self.compile:
            return adam(*tensors, *numbers)
        places = (*tensors, *(torch.tensor(number, dtype=gradient.dtype, device=gradient.device) for number in numbers))
        key = tuple(gradient.shape)
        if key not in self._made:
            self._made[key] = compiled(adam, places) or adam
        position, first, second = self._made[key](*places)
        return position, first, second


Number = float | Tensor
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # as everybody has them


def adam(
    position: Tensor, first: Tensor, second: Tensor, gradient: Tensor, *numbers: Number
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam; `numbers` are rate / (1 - b1^t), sqrt(1 - b2^t), 1 - rate * decay and the gradient's scale.

    Compiled it is one pass over the weights, which for large networks takes as long as the gradient otherwise.
    """
    rate, root, shrink, scale = numbers
    gradient = gradient * scale
    first = torch.lerp(first, gradient, 1 - _BETA1)
    second = torch.lerp(second, gradient * gradient, 1 - _BETA2)
    return position * shrink - rate * first / (second.sqrt() / root + _EPSILON), first, second


@dataclass(frozen=True, eq=False)
class Training:
    """The kernel: one optimiser step of every chain on its own mini-batch.

    Attributes:
        target: the posterior.
        optimiser: how gradients become steps.
        minibatches: which examples each step sees.
    """

    target: Target
    optimiser: Optimiser
    minibatches: Minibatches

    def init(self, start: Networks, streams: Streams) -> Trained:
        """Start at given networks, without momentum."""
        second = torch.zeros_like(start.position if self.optimiser.name == "adam" else start.position[:, :0])
        return Trained(start.position, start.rest, torch.zeros_like(start.position), second)

    def step(self, state: Trained, moment: Moment, streams: Streams) -> tuple[Trained, Info]:
        """One step on U / N."""
        rows = self.minibatches.rows(moment.step, streams)
        seed = derived(streams.seed, "forward", streams.chains[0], moment.step)
        found = self.target(state.position, state.rest, rows, training=True, seed=seed)
        scale = 1 / max(1, self.target.examples)
        after, good = self.optimiser.update(state, found.gradient, moment, scale)
        return after._replace(rest=found.rest), {"loss": found.potential * scale, "divergent": ~good}

    def ending(self, state: Trained) -> Info:
        """Loss U / N and the norm of its gradient on the whole data, in evaluation mode."""
        found, scale = self.target(state.position, state.rest), 1 / max(1, self.target.examples)
        norm = torch.linalg.vector_norm(found.gradient, dim=1, dtype=torch.float64)
        return {"final_loss": found.potential * scale, "gradient_norm": norm * scale}

    def draw(self, state: Trained, streams: Streams) -> Networks:
        """The weights as they are, with the log density in evaluation mode."""
        return Networks(state.position, state.rest, self.target.log_density(state.position, state.rest))
