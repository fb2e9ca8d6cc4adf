"""Training of many networks at once: members of an ensemble, the start of chains, the centres of Gaussians.

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
from onebasin.inference.compile import Function, compiled
from onebasin.inference.kernel import Draws, Info, Stage, StepIndex, check_counts, check_kinds
from onebasin.inference.seeds import Streams, derived
from onebasin.inference.target import Minibatches, Target
from onebasin.state import State

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class TrainedMethod:
    """The training that a method begins with.

    Attributes:
        epochs: passes over the data in training.
        batch: examples in a mini-batch; None for all.
        lr: learning rate of training, of the mean loss per example.
        optimizer: "adam" or "sgd".
        momentum: of SGD, from 0 to below 1.
        decay: decoupled weight decay, beside the prior.
        lr_schedule: "constant", or "cosine" from `lr` to zero.
    """

    epochs: int = 100
    batch: int | None = 100
    lr: float = 1e-3
    optimizer: str = "adam"
    momentum: float = 0.9
    decay: float = 0.0
    lr_schedule: str = "constant"

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(0, epochs=self.epochs)
        check_counts(1, batch=self.batch)
        check_schedule(self.lr_schedule)
        self._optimizer()

    def training(self, target: Target, *, optimum: bool = False) -> Stage:
        """The stage that trains every chain; `optimum` where the result depends on where training ends."""
        minibatches = Minibatches(target.examples, self.batch)
        kernel = Training(target, self._optimizer(target.compile), minibatches)
        return Stage("training", kernel, self.epochs * minibatches.per_epoch, optimum)

    def _optimizer(self, compile_: bool = False) -> Optimizer:
        return Optimizer(self.optimizer, self.lr, self.momentum, self.decay, self.lr_schedule, compile=compile_)


def check_schedule(schedule: str) -> None:
    """Raise unless it is a schedule of a whole training."""
    if schedule not in SCHEDULES:
        raise InputError(f'expected lr_schedule "constant" or "cosine", found {schedule!r}: give lr_schedule="cosine"')


class Trained(NamedTuple):
    """State of training: weights, buffers, and the optimizer's moments."""

    position: Tensor
    buffers: State
    first: Tensor  # (chains, D): mean gradient of Adam, velocity of SGD
    second: Tensor  # (chains, D): mean squared gradient of Adam; empty (chains, 0) for SGD


@dataclass(frozen=True)
class Optimizer:
    """How a gradient becomes a step.

    Attributes:
        name: "adam" or "sgd".
        lr: the learning rate, of the mean loss per example.
        momentum: of SGD.
        decay: decoupled weight decay: each step also multiplies the weights by 1 - lr * decay.
        schedule: "constant"; "cosine", from `lr` to zero over the stage; "cyclical", the same in each cycle.
        cycle: steps of a cycle.
        compile: whether Adam is compiled.
    """

    name: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    decay: float = 0.0
    schedule: str = "constant"
    cycle: int = 0
    compile: bool = False
    _adam_for_shape: dict[tuple[int, ...], Function] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.name not in ("adam", "sgd"):
            raise InputError(f'expected optimizer "adam" or "sgd", found {self.name!r}: give optimizer="adam"')
        if not (self.lr > 0 and 0 <= self.momentum < 1 and self.decay >= 0):
            raise InputError(
                f"expected a positive learning rate, 0 <= momentum < 1 and decay >= 0, found {self.lr}, "
                f"{self.momentum} and {self.decay}: give others, such as 1e-3, 0.9 and 0"
            )

    def lr_at(self, step_index: StepIndex) -> float:
        """The learning rate of this step."""
        if self.schedule == "constant":
            return self.lr
        length = max(1, self.cycle if self.schedule == "cyclical" else step_index.warmup)
        done = step_index.step % length if self.schedule == "cyclical" else min(step_index.step, length)
        return 0.5 * self.lr * (1 + math.cos(math.pi * done / length))

    def update(
        self, state: Trained, gradient: Tensor, step_index: StepIndex, scale: float = 1.0
    ) -> tuple[Trained, Tensor]:
        """New weights and moments, and which chains have moved (chains,).

        `scale` makes the gradient of the mean loss of `gradient` (chains, D). A chain whose gradient is not finite
        stays where it is, without momentum.
        """
        position, first, second = self._stepped(state, gradient, step_index, scale)
        good = torch.isfinite(gradient.sum(dim=1))  # one entry that is not spoils the sum
        if not bool(good.all()):
            keep = good[:, None]
            position = torch.where(keep, position, state.position)
            first, second = torch.where(keep, first, 0), torch.where(keep, second, state.second)
        return Trained(position, state.buffers, first, second), good

    def _stepped(
        self, state: Trained, gradient: Tensor, step_index: StepIndex, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        lr = self.lr_at(step_index)
        if self.name == "sgd":
            first = self.momentum * state.first + scale * gradient
            return state.position * (1 - lr * self.decay) - lr * first, first, state.second
        count = step_index.step + 1
        numbers = (lr / (1 - _BETA1**count), math.sqrt(1 - _BETA2**count), 1 - lr * self.decay, scale)
        tensors = (state.position, state.first, state.second, gradient)
        if not self.compile:
            return adam(*tensors, *numbers)
        arguments = (
            *tensors,
            *(torch.tensor(number, dtype=gradient.dtype, device=gradient.device) for number in numbers),
        )
        key = tuple(gradient.shape)
        if key not in self._adam_for_shape:
            self._adam_for_shape[key] = compiled(adam, arguments) or adam
        position, first, second = self._adam_for_shape[key](*arguments)
        return position, first, second


Number = float | Tensor
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # those of torch.optim.Adam


def adam(
    position: Tensor, first: Tensor, second: Tensor, gradient: Tensor, *numbers: Number
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam; `numbers` are lr / (1 - b1^t), sqrt(1 - b2^t), 1 - lr * decay and the gradient's scale.

    Compiled it is one pass over the weights, which for large networks takes as long as the gradient otherwise.
    """
    lr, root, shrink, scale = numbers
    gradient = gradient * scale
    first = torch.lerp(first, gradient, 1 - _BETA1)
    second = torch.lerp(second, gradient * gradient, 1 - _BETA2)
    return position * shrink - lr * first / (second.sqrt() / root + _EPSILON), first, second


@dataclass(frozen=True, eq=False)
class Training:
    """The kernel: one optimizer step of every chain on its own mini-batch.

    Attributes:
        target: the posterior.
        optimizer: how gradients become steps.
        minibatches: which examples each step sees.
    """

    target: Target
    optimizer: Optimizer
    minibatches: Minibatches

    def init(self, start: Draws, streams: Streams) -> Trained:
        """Start at given networks, without momentum."""
        second = torch.zeros_like(start.position if self.optimizer.name == "adam" else start.position[:, :0])
        return Trained(start.position, start.buffers, torch.zeros_like(start.position), second)

    def step(self, state: Trained, step_index: StepIndex, streams: Streams) -> tuple[Trained, Info]:
        """One step on U / N."""
        rows = self.minibatches.rows(step_index.step, streams)
        seed = derived(streams.seed, "forward", streams.chains[0], step_index.step)
        evaluation = self.target(state.position, state.buffers, rows, training=True, seed=seed)
        scale = 1 / max(1, self.target.examples)
        after, good = self.optimizer.update(state, evaluation.gradient, step_index, scale)
        info = {"loss": evaluation.potential * scale, "divergent": ~good}
        return after._replace(buffers=evaluation.buffers), info

    def ending(self, state: Trained) -> Info:
        """Loss U / N and the norm of its gradient on the whole data, in evaluation mode."""
        evaluation, scale = self.target(state.position, state.buffers), 1 / max(1, self.target.examples)
        norm = torch.linalg.vector_norm(evaluation.gradient, dim=1, dtype=torch.float64)
        return {"final_loss": evaluation.potential * scale, "gradient_norm": norm * scale}

    def draw(self, state: Trained, streams: Streams) -> Draws:
        """The weights as they are, with the log density in evaluation mode."""
        return Draws(state.position, state.buffers, self.target.log_density(state.position, state.buffers))
