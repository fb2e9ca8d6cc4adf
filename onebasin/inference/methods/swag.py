"""SWAG: the Gaussian that the iterates of SGD with a constant rate make (Maddox et al., 2019).

After training, SGD goes on; after every so many steps a network w_n is collected. With the mean and the variance of all
of them, and the deviations d_n = w_n - (mean of w_1 ... w_n) of the last K as columns of D,

    covariance = scale * 1/2 ( diag(variance) + D D^T / (K - 1) ).

The variance is summed as squared deviations from the running mean (Welford), no difference of two large numbers. Drawn
networks get batch-norm statistics of their own from the training data; see `onebasin.functional.refreshed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.averages import running_mean, with_own_statistics
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target
from onebasin.inference.training import Optimizer, Trained, TrainedMethod, Training
from onebasin.posterior import Gaussian, LowRank, one_of_each
from onebasin.state import State


@dataclass(frozen=True, kw_only=True)
class SWAG(TrainedMethod):
    """SWAG: the Gaussian that the iterates of SGD with a constant rate make.

    Attributes:
        draws: networks drawn from each fitted Gaussian.
        step: the constant learning rate while networks are collected; None for `lr`. Batch, momentum,
            decay, transforms and precision are those of training.
        walk: the optimizer while networks are collected, "sgd" or "adam"; None for that of training.
        collect: how many networks are collected.
        every: steps from one to the next; None for an epoch.
        rank: K, how many deviations are kept; 0 for the diagonal alone, which then counts fully.
        scale: multiplies the covariance.
    """

    name: ClassVar[str] = "swag"
    draws: int = 10
    step: float | None = None
    walk: str | None = None
    collect: int = 40
    every: int | None = None
    rank: int = 20
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, every=self.every)
        check_counts(2, collect=self.collect)
        check_counts(0, rank=self.rank)
        self._walk()
        if self.rank == 1 or not self.scale >= 0:
            raise InputError(
                f"expected rank 0 or from 2 on and scale >= 0, found rank={self.rank} and scale={self.scale}: give "
                "such numbers, for example 20 and 1"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train, collect, draw."""
        stage = self.training(target, optimum=True)
        minibatches = cast(Training, stage.kernel).minibatches
        every = minibatches.per_epoch if self.every is None else self.every
        walk = self.trainer(target, self._walk(target.compile), minibatches)
        kernel = SWAGKernel(walk, every, self.rank, self.scale)
        return ChainPlan((stage, Stage("collecting", kernel, self.collect * every)), self.draws, (0,))

    def _walk(self, compile_: bool = False) -> Optimizer:
        step = self.lr if self.step is None else self.step
        name = self.walk or self.optimizer
        return Optimizer(
            name,
            step,
            self.momentum,
            self.decay,
            compile=compile_,
            nesterov=self.nesterov and name == "sgd",
            weight_decay=self.weight_decay,
        )


class Collected(NamedTuple):
    """The walk, and what was collected on it."""

    position: Tensor
    buffers: State
    first: Tensor  # the optimizer's moments
    second: Tensor
    mean: Tensor  # (chains, D) of all collected networks
    deviations: Tensor  # (chains, D): sum of squared deviations from the mean
    columns: Tensor  # (chains, rank, D): the last deviations, in a ring
    number: Tensor  # int64 (chains,): networks collected


@dataclass(frozen=True, eq=False)
class SWAGKernel:
    """Steps of SGD, and a Gaussian made of where they went.

    Attributes:
        walk: makes the steps.
        every: steps from one collected network to the next.
        rank: K.
        scale: multiplies the covariance.
    """

    walk: Training
    every: int
    rank: int = 20
    scale: float = 1.0

    def init(self, start: Draws, streams: Streams) -> Collected:
        """Start at trained networks with nothing collected."""
        zero, chains = torch.zeros_like(start.position), len(start.position)
        columns = zero[:, None].repeat(1, self.rank, 1)
        number = torch.zeros(chains, dtype=torch.int64, device=zero.device)
        return Collected(*self.walk.init(start, streams), zero, zero, columns, number)

    def step(self, state: Collected, step_index: StepIndex, streams: Streams) -> tuple[Collected, Info]:
        """One step, after which a network may be collected."""
        before = Trained(state.position, state.buffers, state.first, state.second)
        walked, info = self.walk.step(before, step_index, streams)
        moved = state._replace(**walked._asdict())
        return (self.collected(moved) if (step_index.step + 1) % self.every == 0 else moved), info

    def collected(self, state: Collected) -> Collected:
        """Take in the networks as they are now."""
        gap = state.position - state.mean
        mean, number = running_mean(state.mean, state.number, state.position)
        gap_to_new_mean = state.position - mean
        columns = state.columns
        if self.rank:
            columns = columns.clone()
            columns[torch.arange(len(number)), state.number % self.rank] = gap_to_new_mean
        deviations = state.deviations + gap * gap_to_new_mean
        return state._replace(mean=mean, deviations=deviations, columns=columns, number=number)

    def components(self, state: Collected) -> list[Gaussian]:
        """The Gaussian of each chain."""
        return [Gaussian(state.mean[chain], self._covariance(state, chain)) for chain in range(len(state.mean))]

    def _covariance(self, state: Collected, chain: int) -> LowRank:
        number = int(state.number[chain])
        if number < 2:
            raise InputError(f"a spread needs at least 2 collected networks, found {number}: collect more")
        columns = min(number, self.rank)
        share = 0.5 * self.scale if columns else self.scale
        variance = state.deviations[chain].clamp(min=0) / number
        factor = state.columns[chain, :columns].T * (share / max(1, columns - 1)) ** 0.5
        return LowRank((share * variance).sqrt(), factor)

    def centres(self, state: Collected) -> Draws:
        """The mean networks, those of stochastic weight averaging, with batch-norm statistics of their own."""
        return with_own_statistics(self.walk.target, state.mean, state.buffers)

    def draw(self, state: Collected, streams: Streams) -> Draws:
        """One network from each Gaussian."""
        position = one_of_each(self.components(state), streams.each("draw"))
        return with_own_statistics(self.walk.target, position, state.buffers)
