"""EMA: the exponential moving average of the networks of a training (Polyak and Juditsky, 1992, forgetting).

After step t of training, at weights w_t and with d = `ema_decay`,

    m_t = d m_(t-1) + (1 - d) w_t.

`bias="corrected"` starts at m_0 = 0 and divides by 1 - d^t, the sum of the coefficients, so that the average is one of
w_1 ... w_t alone (as in Adam). `bias="start"` starts at the initial network, m_0 = w_0, which keeps the coefficient
d^t. The two agree once d^t is small, that is after several times the 1 / (1 - d) steps that the average remembers.

What is drawn has batch-norm statistics of its own, measured on the training data (`onebasin.functional.refreshed`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.averages import with_own_statistics
from onebasin.inference.kernel import ChainPlan, Draws, Info, StepIndex, check_counts
from onebasin.inference.methods.ensemble import check_checkpoints
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Minibatches, Target
from onebasin.inference.training import Optimizer, Trained, TrainedMethod, Training
from onebasin.state import State

BIASES = ("corrected", "start")


@dataclass(frozen=True, kw_only=True)
class EMA(TrainedMethod):
    """EMA: the exponential moving average of the networks of a training.

    Attributes:
        draws: networks from each training: 1 gives the average at its end; further draws are the average again.
        ema_decay: d, from 0 to below 1, the share that the average keeps in each step: it remembers about 1 / (1 - d)
            steps.
        bias: "corrected" for an average of the networks after the steps alone; "start" for one that begins with the
            initial network.
        every: epochs between draws.
    """

    name: ClassVar[str] = "ema"
    draws: int = 1
    ema_decay: float = 0.99
    bias: str = "corrected"
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, every=self.every)
        check_checkpoints(self.draws, self.lr_schedule)
        if not 0 <= self.ema_decay < 1:
            raise InputError(f"expected ema_decay from 0 to below 1, found {self.ema_decay}: give ema_decay=0.99")
        if self.bias not in BIASES:
            raise InputError(f'expected bias "corrected" or "start", found {self.bias!r}: give bias="corrected"')

    def plan(self, target: Target) -> ChainPlan:
        """Train and average in one stage."""
        stage = self.training(target, optimum=True)
        kernel = EMAKernel(cast(Training, stage.kernel), self.ema_decay, self.bias == "corrected")
        every = self.every * kernel.minibatches.per_epoch
        if self.draws == 1:
            return ChainPlan((replace(stage, kernel=kernel),), 1, (0,))
        return ChainPlan((replace(stage, kernel=kernel, steps=max(0, stage.steps - every)),), self.draws, (every,))


class EMAState(NamedTuple):
    """A training, and the average of its networks."""

    position: Tensor
    buffers: State
    first: Tensor  # the optimizer's moments
    second: Tensor
    mean: Tensor  # (chains, D)
    number: Tensor  # int64 (chains,): steps so far


@dataclass(frozen=True, eq=False)
class EMAKernel:
    """Steps of training, each of which enters the average.

    Attributes:
        walk: makes the steps.
        ema_decay: d.
        corrected: whether the initial network is left out.
    """

    walk: Training
    ema_decay: float
    corrected: bool

    @property
    def optimizer(self) -> Optimizer:
        """That of training."""
        return self.walk.optimizer

    @property
    def minibatches(self) -> Minibatches:
        """Those of training."""
        return self.walk.minibatches

    def init(self, start: Draws, streams: Streams) -> EMAState:
        """Start at given networks."""
        number = torch.zeros(len(start.position), dtype=torch.int64, device=start.position.device)
        return EMAState(*self.walk.init(start, streams), start.position, number)

    def step(self, state: EMAState, step_index: StepIndex, streams: Streams) -> tuple[EMAState, Info]:
        """One step.

        The corrected average is kept as such: m_t / (1 - d^t) moves from its last value towards w_t by the share
        (1 - d) / (1 - d^t), which is 1 in the first step and falls to 1 - d.
        """
        walked, info = self.walk.step(self._trained(state), step_index, streams)
        number = state.number + 1
        share = torch.full_like(number, 1 - self.ema_decay, dtype=torch.float64)
        if self.corrected:
            share = share / (1 - torch.pow(torch.full_like(share, self.ema_decay), number))
        mean = state.mean + share[:, None].to(state.mean.dtype) * (walked.position - state.mean)
        return EMAState(*walked, mean, number), info

    def ending(self, state: EMAState) -> Info:
        """Loss and gradient where training ended, not those of the average."""
        return self.walk.ending(self._trained(state))

    def draw(self, state: EMAState, streams: Streams) -> Draws:
        """The average networks, with batch-norm statistics of their own."""
        return with_own_statistics(self.walk.target, state.mean, state.buffers)

    def _trained(self, state: EMAState) -> Trained:
        return Trained(state.position, state.buffers, state.first, state.second)
