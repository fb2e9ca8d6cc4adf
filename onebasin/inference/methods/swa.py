"""SWA: the average of the networks at the end of a training (Izmailov et al., 2018).

After a share of the epochs the rate stays constant, or falls anew in cycles, so that the weights go around the optimum
instead of into it. At the end of every cycle a network w_n is taken, and what is drawn is

    mean_N = 1/N sum_n w_n,

a network nearer to the middle of the basin than any that training has visited. It has batch-norm statistics of its own,
measured on the training data (`onebasin.functional.refreshed`): those of training belong to other weights.

In a cycle of c steps the rate of step i = 1 ... c is (1 - i/c) step + (i/c) low, as in the paper; without `low` it is
`step` throughout. The network from which the walk starts does not count. So the draw of a chain is the mean of `SWAG`
with the same training, walk and number of networks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.averages import running_mean, with_own_statistics
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target
from onebasin.inference.training import Optimizer, Trained, TrainedMethod, Training
from onebasin.state import State


@dataclass(frozen=True, kw_only=True)
class SWA(TrainedMethod):
    """SWA: the average of the networks at the end of a training, at a constant or a cyclical rate.

    Attributes:
        draws: networks from each training: 1 gives the average; each further draw is the average again, with one
            network more in it.
        share: the share of the epochs in which networks are averaged, the last ones.
        step: the learning rate while networks are averaged, at the start of a cycle; None for `lr`. Batch, momentum,
            decay, transforms and precision are those of training.
        low: the learning rate at the end of a cycle, to which it falls in a line; None for a constant rate.
        every: steps in a cycle, from one averaged network to the next; None for an epoch.
        walk: the optimizer while networks are averaged, "sgd" or "adam"; None for that of training.
    """

    name: ClassVar[str] = "swa"
    draws: int = 1
    share: float = 0.25
    step: float | None = None
    low: float | None = None
    every: int | None = None
    walk: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, every=self.every)
        walk = self._walk(1)
        if not 0 < self.share <= 1:
            raise InputError(f"expected a share above 0 and up to 1, found {self.share}: give share=0.25")
        if self.low is not None and not 0 <= self.low <= walk.lr:
            raise InputError(
                f"expected low from 0 to the rate at the start of a cycle, {walk.lr:g}, found {self.low}: give "
                f"low={walk.lr / 10:g}"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train, then walk on and average."""
        whole = self.training(target, optimum=True)
        minibatches = cast(Training, whole.kernel).minibatches
        every = minibatches.per_epoch if self.every is None else self.every
        cycles = max(1, round(self.share * whole.steps / every))
        before = replace(whole, steps=max(0, whole.steps - cycles * every))
        kernel = SWAKernel(self.trainer(target, self._walk(every, target.compile), minibatches), every)
        return ChainPlan((before, Stage("averaging", kernel, (cycles - 1) * every)), self.draws, (every,))

    def _walk(self, every: int, compile_: bool = False) -> Optimizer:
        step = self.lr if self.step is None else self.step
        name = self.walk or self.optimizer
        options: dict[str, Any] = {
            "compile": compile_,
            "nesterov": self.nesterov and name == "sgd",
            "weight_decay": self.weight_decay,
        }
        if self.low is None:
            return Optimizer(name, step, self.momentum, self.decay, **options)
        return CyclicalOptimizer(name, step, self.momentum, self.decay, cycle=every, low=self.low, **options)


@dataclass(frozen=True)
class CyclicalOptimizer(Optimizer):
    """An optimizer whose rate falls from `lr` to `low` in a line, in every cycle anew.

    Attributes:
        low: the rate of the last step of a cycle.
    """

    low: float = 0.0

    def lr_at(self, step_index: StepIndex) -> float:
        """The learning rate of this step."""
        done = (step_index.step % self.cycle + 1) / self.cycle
        return (1 - done) * self.lr + done * self.low


class SWAState(NamedTuple):
    """The walk, and the mean of the networks at the ends of its cycles."""

    position: Tensor
    buffers: State
    first: Tensor  # the optimizer's moments
    second: Tensor
    mean: Tensor  # (chains, D)
    number: Tensor  # int64 (chains,): networks in the mean


@dataclass(frozen=True, eq=False)
class SWAKernel:
    """Steps of training, and the mean of the networks after every so many.

    Attributes:
        walk: makes the steps.
        every: steps from one averaged network to the next.
    """

    walk: Training
    every: int

    def init(self, start: Draws, streams: Streams) -> SWAState:
        """Start at trained networks with nothing averaged."""
        number = torch.zeros(len(start.position), dtype=torch.int64, device=start.position.device)
        return SWAState(*self.walk.init(start, streams), torch.zeros_like(start.position), number)

    def step(self, state: SWAState, step_index: StepIndex, streams: Streams) -> tuple[SWAState, Info]:
        """One step, after which a cycle may end."""
        before = Trained(state.position, state.buffers, state.first, state.second)
        walked, info = self.walk.step(before, step_index, streams)
        moved = state._replace(**walked._asdict())
        if (step_index.step + 1) % self.every:
            return moved, info
        mean, number = running_mean(moved.mean, moved.number, moved.position)
        return moved._replace(mean=mean, number=number), info

    def draw(self, state: SWAState, streams: Streams) -> Draws:
        """The mean networks, with batch-norm statistics of their own."""
        return with_own_statistics(self.walk.target, state.mean, state.buffers)
