"""Training of many networks at once: members of an ensemble, the start of chains, the centres of Gaussians.

    minimise U(theta) / N   by Adam, or by SGD with momentum,

with optional weight decay. U contains the prior, so the minimum is the MAP estimate; with a flat prior it is maximum
likelihood. Networks train in the model's training mode: batch norm uses batch statistics and updates its running ones,
the model's own dropout drops. With g the gradient of U / N and v the velocity, a step of SGD is

    g <- g + weight_decay theta,    v <- momentum v + g,    theta <- (1 - lr decay) theta - lr v,

with Nesterov's momentum lr (g + momentum v) in place of lr v. `weight_decay` is L2 added to the gradient, as in SGD and
Adam of torch: under SGD the same as a Gaussian prior of variance 1 / (N weight_decay). `decay` is decoupled from the
gradient, as in AdamW of torch: no density stands behind it.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError, PrecisionWarning
from onebasin.inference.augment import BatchTransform, changed, transforms_of
from onebasin.inference.compile import Function, compiled
from onebasin.inference.kernel import Draws, Info, Stage, StepIndex, check_counts, check_kinds
from onebasin.inference.seeds import Streams, derived, generator
from onebasin.inference.target import Minibatches, Target
from onebasin.state import State, dtype_name

SCHEDULES = ("constant", "cosine", "milestones")
PRECISIONS = ("full", "bf16")


@dataclass(frozen=True, kw_only=True)
class TrainedMethod:
    """The training that a method begins with.

    Attributes:
        epochs: passes over the data in training.
        batch: examples in a mini-batch; None for all.
        lr: learning rate of training, of the mean loss per example.
        optimizer: "adam" or "sgd".
        momentum: of SGD, from 0 to below 1.
        nesterov: whether SGD looks ahead along its momentum.
        decay: decoupled weight decay, as in AdamW of torch, beside the prior.
        weight_decay: L2 added to the gradient of the mean loss, as in SGD and Adam of torch, beside the prior; the same
            as a prior of deviation 1 / sqrt(N weight_decay), so give prior=None with it.
        lr_schedule: "constant"; "cosine" from `lr` to zero; or "milestones", steps down.
        milestones: epochs from which the learning rate is multiplied by `gamma`, once for each.
        gamma: what a milestone multiplies the learning rate by.
        lr_warmup: epochs in which the learning rate first grows linearly to `lr`; they count among `epochs`.
        augment: random changes of mini-batches in training: "crop", "flip", "mixup", or objects with their options such
            as onebasin.RandomCrop(padding=2); one or several, in this order. Only training sees them.
        precision: "full", as the weights are stored, or "bf16": matrix products and convolutions of training in
            bfloat16, weights, losses and drawn log densities as they are.
    """

    epochs: int = 100
    batch: int | None = 100
    lr: float = 1e-3
    optimizer: str = "adam"
    momentum: float = 0.9
    nesterov: bool = False
    decay: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    lr_warmup: int = 0
    augment: tuple[BatchTransform | str, ...] = ()
    precision: str = "full"

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(0, epochs=self.epochs, lr_warmup=self.lr_warmup)
        check_counts(1, batch=self.batch)
        check_schedule(self.lr_schedule, SCHEDULES)
        object.__setattr__(self, "milestones", _milestones(self.lr_schedule, self.milestones))
        object.__setattr__(self, "augment", transforms_of(self.augment))
        check_precision(self.precision)
        self._optimizer()

    def training(self, target: Target, *, optimum: bool = False) -> Stage:
        """The stage that trains every chain; `optimum` where the result depends on where training ends."""
        minibatches = Minibatches(target.examples, self.batch)
        per_epoch = minibatches.per_epoch
        kernel = self.trainer(target, self._optimizer(target.compile, per_epoch), minibatches)
        return Stage("training", kernel, self.epochs * per_epoch, optimum)

    def trainer(self, target: Target, optimizer: Optimizer, minibatches: Minibatches) -> Training:
        """The kernel that makes steps of an optimizer, with the transforms and in the precision of this training."""
        transforms = transforms_of(self.augment)
        check_transforms(transforms, target, minibatches)
        return Training(target, optimizer, minibatches, transforms, self.precision == "bf16" and in_bf16(target))

    def _optimizer(self, compile_: bool = False, per_epoch: int = 1) -> Optimizer:
        return Optimizer(
            self.optimizer,
            self.lr,
            self.momentum,
            self.decay,
            self.lr_schedule,
            compile=compile_,
            milestones=tuple(epoch * per_epoch for epoch in self.milestones),
            gamma=self.gamma,
            warmup=self.lr_warmup * per_epoch,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


def check_schedule(schedule: str, known: tuple[str, ...] = ("constant", "cosine")) -> None:
    """Raise unless it is a schedule of a whole training."""
    if schedule not in known:
        words = ", ".join(f'"{word}"' for word in known[:-1])
        raise InputError(
            f'expected lr_schedule {words} or "{known[-1]}", found {schedule!r}: give lr_schedule="cosine"'
        )


def check_precision(precision: str) -> None:
    """Raise unless it is a precision of trainings."""
    if precision not in PRECISIONS:
        raise InputError(f'expected precision "full" or "bf16", found {precision!r}: give precision="bf16"')


def _milestones(schedule: str, milestones: Any) -> tuple[int, ...]:
    """Epochs in increasing order, where the schedule has some."""
    if not isinstance(milestones, tuple | list):
        raise InputError(f"expected a tuple of epochs as milestones, found {milestones!r}: give milestones=(25, 50)")
    for epoch in milestones:
        check_counts(1, milestones=epoch)
    if list(milestones) != sorted(set(milestones)):
        raise InputError(f"expected increasing milestones, found {milestones}: give milestones=(25, 50)")
    if bool(milestones) != (schedule == "milestones"):
        raise InputError(
            f'expected milestones with lr_schedule="milestones" and with no other, found {milestones} with '
            f'{schedule!r}: give lr_schedule="milestones", milestones=(25, 50)'
        )
    return tuple(milestones)


def check_transforms(transforms: tuple[BatchTransform, ...], target: Target, minibatches: Minibatches) -> None:
    """Raise where the data of a target cannot be changed so, or are not taken in mini-batches."""
    if not transforms:
        return
    if not target.leaves:
        raise InputError("expected data to augment, found none: give data=(inputs, targets), or leave augment out")
    if minibatches.size is None:
        raise InputError(
            f"expected mini-batches to augment, found all {target.examples} examples in each step: give batch=128, or "
            "another number below that of the examples"
        )
    for transform in transforms:
        transform.check(target.leaves[:-1], target.leaves[-1])


def pass_options(
    transforms: tuple[BatchTransform, ...], bf16: bool, step: int, streams: Streams, samples: int = 1
) -> dict[str, Any]:
    """Keywords of the pass over a mini-batch that changes it and computes in bfloat16; none where it does neither.

    The random numbers of a chain depend on its number and the step, not on blocks of steps.

    Args:
        transforms: what is done to the mini-batch.
        bf16: whether the model computes in bfloat16.
        step: of the stage.
        streams: whose chains and seed count.
        samples: rows of the pass that each chain has, one after the other.
    """
    options: dict[str, Any] = {"bf16": True} if bf16 else {}
    if transforms:
        each = [generator(streams.seed, "augment", chain, step) for chain in streams.chains]
        generators = [one for one in each for _ in range(samples)]
        options["change"] = partial(changed, transforms=transforms, generators=generators)
    return options


def in_bf16(target: Target) -> bool:
    """Whether a target can be computed in bfloat16; a PrecisionWarning where its weights are stored in more digits."""
    if target.layout.dtype == torch.float32 and target.outputs is not None:
        return True
    found = dtype_name(target.layout.dtype) if target.outputs is not None else "a density without a model's outputs"
    warnings.warn(
        f'expected weights in float32 and data for precision="bf16", found {found}, which is computed as it is: give '
        'data and model.float(), or leave precision="bf16" out',
        PrecisionWarning,
        stacklevel=2,
    )
    return False


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
        schedule: "constant"; "cosine", from `lr` to zero over the stage; "cyclical", the same in each cycle;
            "milestones", times `gamma` at each of them.
        cycle: steps of a cycle.
        compile: whether Adam is compiled.
        milestones: steps from which the learning rate is smaller.
        gamma: what each of them multiplies it by.
        warmup: steps in which the learning rate first grows linearly, times (step + 1) / warmup; a cosine begins after
            them.
        nesterov: whether SGD steps along gradient + momentum * velocity.
        weight_decay: L2: this times the weights is added to the gradient.
    """

    name: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    decay: float = 0.0
    schedule: str = "constant"
    cycle: int = 0
    compile: bool = False
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup: int = 0
    nesterov: bool = False
    weight_decay: float = 0.0
    _adam_for_shape: dict[tuple[int, ...], Function] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.name not in ("adam", "sgd"):
            raise InputError(f'expected optimizer "adam" or "sgd", found {self.name!r}: give optimizer="adam"')
        if not (self.lr > 0 and 0 <= self.momentum < 1 and self.decay >= 0):
            raise InputError(
                f"expected a positive learning rate, 0 <= momentum < 1 and decay >= 0, found {self.lr}, "
                f"{self.momentum} and {self.decay}: give others, such as 1e-3, 0.9 and 0"
            )
        if not (self.weight_decay >= 0 and self.gamma > 0):
            raise InputError(
                f"expected weight_decay >= 0 and gamma > 0, found {self.weight_decay} and {self.gamma}: give others, "
                "such as 5e-4 and 0.1"
            )
        if self.nesterov and not (self.name == "sgd" and self.momentum > 0):
            raise InputError(
                f"expected SGD with momentum for nesterov=True, found {self.name!r} with momentum {self.momentum}: "
                'give optimizer="sgd", momentum=0.9'
            )

    def lr_at(self, step_index: StepIndex) -> float:
        """The learning rate of this step."""
        step = step_index.step
        if self.schedule == "cyclical":
            length = max(1, self.cycle)
            return 0.5 * self.lr * (1 + math.cos(math.pi * (step % length) / length))
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "constant":
            return rise * self.lr
        if self.schedule == "milestones":
            return rise * self.lr * self.gamma ** bisect_right(self.milestones, step)
        length = max(1, step_index.warmup - self.warmup)
        done = min(max(0, step - self.warmup), length)
        return rise * (0.5 * self.lr * (1 + math.cos(math.pi * done / length)))

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
        if self.weight_decay:
            gradient = gradient.add(state.position, alpha=self.weight_decay / scale)
        if self.name == "sgd":
            first = self.momentum * state.first + scale * gradient
            along = self.momentum * first + scale * gradient if self.nesterov else first
            return state.position * (1 - lr * self.decay) - lr * along, first, state.second
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
        transforms: random changes of them.
        bf16: whether the model computes in bfloat16 while it trains.
    """

    target: Target
    optimizer: Optimizer
    minibatches: Minibatches
    transforms: tuple[BatchTransform, ...] = ()
    bf16: bool = False

    def init(self, start: Draws, streams: Streams) -> Trained:
        """Start at given networks, without momentum."""
        second = torch.zeros_like(start.position if self.optimizer.name == "adam" else start.position[:, :0])
        return Trained(start.position, start.buffers, torch.zeros_like(start.position), second)

    def step(self, state: Trained, step_index: StepIndex, streams: Streams) -> tuple[Trained, Info]:
        """One step on U / N."""
        rows = self.minibatches.rows(step_index.step, streams)
        seed = derived(streams.seed, "forward", streams.chains[0], step_index.step)
        options = pass_options(self.transforms, self.bf16, step_index.step, streams)
        evaluation = self.target(state.position, state.buffers, rows, training=True, seed=seed, **options)
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
