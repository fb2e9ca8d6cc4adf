"""Deep ensembles: independent trainings, batched over members; also snapshots and checkpoints of one training.

Members differ in their initial weights and in the order of their data. One member is a MAP estimate, or a maximum
likelihood one with prior=None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypedDict, Unpack, cast

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.compile import Function, compiled
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex
from onebasin.inference.seeds import Streams, derived
from onebasin.inference.target import Minibatches, Target
from onebasin.state import State

# ----------------------------------------------------------------------
# Optimise many networks at once: the members of an ensemble, or the start of chains.


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

    def rate_at(self, moment: StepIndex) -> float:
        """The learning rate of this step."""
        if self.schedule == "constant":
            return self.rate
        length = max(1, self.cycle if self.schedule == "cyclical" else moment.warmup)
        done = moment.step % length if self.schedule == "cyclical" else min(moment.step, length)
        return 0.5 * self.rate * (1 + math.cos(math.pi * done / length))

    def update(self, state: Trained, gradient: Tensor, moment: StepIndex, scale: float = 1.0) -> tuple[Trained, Tensor]:
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

    def _stepped(
        self, state: Trained, gradient: Tensor, moment: StepIndex, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
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

    def init(self, start: Draws, streams: Streams) -> Trained:
        """Start at given networks, without momentum."""
        second = torch.zeros_like(start.position if self.optimiser.name == "adam" else start.position[:, :0])
        return Trained(start.position, start.rest, torch.zeros_like(start.position), second)

    def step(self, state: Trained, moment: StepIndex, streams: Streams) -> tuple[Trained, Info]:
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

    def draw(self, state: Trained, streams: Streams) -> Draws:
        """The weights as they are, with the log density in evaluation mode."""
        return Draws(state.position, state.rest, self.target.log_density(state.position, state.rest))


# ----------------------------------------------------------------------
# Deep ensembles: independent trainings, batched over members; also snapshots and checkpoints of one training.


class TrainingOptions(TypedDict, total=False):
    """How networks are trained.

    Attributes:
        epochs: passes over the data.
        batch: examples in a mini-batch; None for all.
        rate: learning rate, of the mean loss per example.
        optimiser: "adam" or "sgd".
        momentum: of SGD.
        decay: decoupled weight decay, beside the prior.
        schedule: "constant", or "cosine" from the rate to zero.
    """

    epochs: int
    batch: int | None
    rate: float
    optimiser: str
    momentum: float
    decay: float
    schedule: str


class Options(TrainingOptions, total=False):
    """Options of an ensemble.

    Attributes:
        draws: networks from each training: 1 gives a deep ensemble.
        snapshots: several draws share the epochs in equal cycles of a cosine rate, each ending in a draw; without it,
            further draws are checkpoints after the training.
        every: epochs between checkpoints.
    """

    draws: int
    snapshots: bool
    every: int


def count(value: int, what: str, least: int = 1) -> int:
    """A number of something; refuses what is below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"expected {what} to be a whole number from {least} on, found {value!r}: give such a number")
    return value


def training_stage(target: Target, options: TrainingOptions, *, optimum: bool = False) -> Stage:
    """The stage that trains every chain, with Adam for 100 epochs on batches of 100 unless told otherwise.

    Args:
        target: the posterior.
        options: those that were given.
        optimum: whether the result depends on where training ends; not where chains only start there.
    """
    batches = Minibatches(target.examples, options.get("batch", 100))
    optimiser = Optimiser(
        options.get("optimiser", "adam"),
        options.get("rate", 1e-3),
        options.get("momentum", 0.9),
        options.get("decay", 0.0),
        options.get("schedule", "constant"),
        compile=target.compile,
    )
    steps = count(options.get("epochs", 100), "epochs", 0) * batches.per_epoch
    return Stage("training", Training(target, optimiser, batches), steps, optimum)


def build(target: Target, **options: Unpack[Options]) -> ChainPlan:
    """Plan an ensemble."""
    draws = count(options.get("draws", 1), "draws")
    stage = training_stage(target, cast(TrainingOptions, options), optimum=True)
    kernel = cast(Training, stage.kernel)
    per_epoch = kernel.minibatches.per_epoch
    if draws == 1:
        return ChainPlan((stage,), 1, (0,))
    if not options.get("snapshots", False):
        if kernel.optimiser.schedule == "cosine":
            raise InputError(
                "expected a constant rate for checkpoints after the training, found a cosine schedule, which has ended "
                "at zero there: use snapshots=True, or schedule='constant'"
            )
        every = count(options.get("every", 1), "every") * per_epoch
        return ChainPlan((Stage(stage.name, kernel, max(0, stage.steps - every), optimum=True),), draws, (every,))
    cycle = max(1, stage.steps // draws)
    chosen = kernel.optimiser
    optimiser = replace(chosen, schedule="cyclical", cycle=cycle)
    return ChainPlan((Stage(stage.name, Training(target, optimiser, kernel.minibatches), 0),), draws, (cycle,))
