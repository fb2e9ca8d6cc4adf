"""SWAG: the Gaussian that the iterates of SGD with a constant rate make (Maddox et al., 2019).

After training, SGD goes on; after every so many steps a network w_n is collected. With the mean and the variance of all
of them, and the deviations d_n = w_n - (mean of w_1 ... w_n) of the last K as columns of D,

    covariance = scale * 1/2 ( diag(variance) + D D^T / (K - 1) ).

The variance is summed as squared deviations from the running mean (Welford), no difference of two large numbers. Drawn
networks get batch-norm statistics of their own from the training data; see `onebasin.norms.refreshed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Unpack, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from onebasin.errors import InputError
from onebasin.functional import refreshed, tracked
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex
from onebasin.inference.methods.ensemble import Optimiser, Trained, Training, TrainingOptions, count, training_stage
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target
from onebasin.posterior import Gaussian, LowRank, one_of_each
from onebasin.state import State


class Options(TrainingOptions, total=False):
    """Options of SWAG; those of training are for the networks it starts from, but batch, momentum and decay stay.

    Attributes:
        draws: networks drawn from each fitted Gaussian.
        step: the constant learning rate while networks are collected; that of training unless given.
        walk: the optimiser while networks are collected, "sgd" or "adam"; that of training unless given.
        collect: how many networks are collected.
        every: steps from one to the next; None for an epoch.
        rank: K, how many deviations are kept; 0 for the diagonal alone, which then counts fully.
        scale: multiplies the covariance.
    """

    draws: int
    step: float
    walk: str
    collect: int
    every: int | None
    rank: int
    scale: float


class Collected(NamedTuple):
    """The walk, and what was collected on it."""

    position: Tensor
    rest: State
    first: Tensor  # the optimiser's moments
    second: Tensor
    mean: Tensor  # (chains, D) of all collected networks
    deviations: Tensor  # (chains, D): sum of squared deviations from the mean
    columns: Tensor  # (chains, rank, D): the last deviations, in a ring
    number: Tensor  # int64 (chains,): networks collected


@dataclass(frozen=True, eq=False)
class SWAG:
    """The kernel: steps of SGD, and a Gaussian made of where they went.

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

    def __post_init__(self) -> None:
        if self.rank == 1 or self.rank < 0 or not self.scale >= 0:
            raise InputError(
                f"expected rank 0 or from 2 on and scale >= 0, found rank={self.rank} and scale={self.scale}: give "
                "such numbers, for example 20 and 1"
            )

    def init(self, start: Draws, streams: Streams) -> Collected:
        """Start at trained networks with nothing collected."""
        zero, chains = torch.zeros_like(start.position), len(start.position)
        columns = zero[:, None].repeat(1, self.rank, 1)
        number = torch.zeros(chains, dtype=torch.int64, device=zero.device)
        return Collected(*self.walk.init(start, streams), zero, zero, columns, number)

    def step(self, state: Collected, moment: StepIndex, streams: Streams) -> tuple[Collected, Info]:
        """One step, after which a network may be collected."""
        before = Trained(state.position, state.rest, state.first, state.second)
        walked, info = self.walk.step(before, moment, streams)
        moved = state._replace(**walked._asdict())
        return (self.collected(moved) if (moment.step + 1) % self.every == 0 else moved), info

    def collected(self, state: Collected) -> Collected:
        """Take in the networks as they are now."""
        number = state.number + 1
        gap = state.position - state.mean
        mean = state.mean + gap / number[:, None].to(gap.dtype)
        rest_of_gap = state.position - mean
        columns = state.columns
        if self.rank:
            columns = columns.clone()
            columns[torch.arange(len(number)), state.number % self.rank] = rest_of_gap
        deviations = state.deviations + gap * rest_of_gap
        return state._replace(mean=mean, deviations=deviations, columns=columns, number=number)

    def components(self, state: Collected) -> list[Gaussian]:
        """The Gaussian of each chain."""
        return [Gaussian(state.mean[chain], self._shape(state, chain)) for chain in range(len(state.mean))]

    def _shape(self, state: Collected, chain: int) -> LowRank:
        number = int(state.number[chain])
        if number < 2:
            raise InputError(f"a spread needs at least 2 collected networks, found {number}: collect more")
        kept = min(number, self.rank)
        share = 0.5 * self.scale if kept else self.scale
        variance = state.deviations[chain].clamp(min=0) / number
        factor = state.columns[chain, :kept].T * (share / max(1, kept - 1)) ** 0.5
        return LowRank((share * variance).sqrt(), factor)

    def centres(self, state: Collected) -> Draws:
        """The mean networks, those of stochastic weight averaging, with batch-norm statistics of their own."""
        return self._finished(state.mean, state.rest)

    def draw(self, state: Collected, streams: Streams) -> Draws:
        """One network from each Gaussian."""
        position = one_of_each(self.components(state), streams.each("draw"))
        return self._finished(position, state.rest)

    def _finished(self, position: Tensor, rest: State) -> Draws:
        target = self.walk.target
        own = with_statistics(target, position, rest)
        return Draws(position, own, target.log_density(position, own))


def with_statistics(target: Target, position: Tensor, rest: State) -> State:
    """The rest (chains, ...) with running statistics of the networks at `position` (chains, D), see `refreshed`.

    They are measured on the data of the target; without norms, or without data, the rest comes back as it is.
    """
    if target.outputs is None or not tracked(target.outputs.model):
        return rest
    (arguments, named), _ = tree_unflatten(target.leaves, target.structure)
    networks = target.layout.everything(target.layout.split(position), rest)
    model, constant = target.outputs.model, target.outputs.constant
    found, _ = refreshed(model, networks, named or arguments, batch=target.piece, constant=constant)
    return {name: found[name] for name in rest}


def build(target: Target, **options: Unpack[Options]) -> ChainPlan:
    """Plan SWAG: training, then 40 networks, one per epoch, unless told otherwise."""
    stage = training_stage(target, cast(TrainingOptions, options), optimum=True)
    batches = cast(Training, stage.kernel).minibatches
    decay, momentum = options.get("decay", 0.0), options.get("momentum", 0.9)
    walk = options.get("walk", options.get("optimiser", "adam"))
    optimiser = Optimiser(walk, options.get("step", options.get("rate", 1e-3)), momentum, decay, compile=target.compile)
    given = options.get("every")
    every = batches.per_epoch if given is None else count(given, "every")
    kernel = SWAG(
        Training(target, optimiser, batches),
        every,
        count(options.get("rank", 20), "rank", 0),
        options.get("scale", 1.0),
    )
    steps = count(options.get("collect", 40), "collect", 2) * every
    return ChainPlan((stage, Stage("collecting", kernel, steps)), count(options.get("draws", 10), "draws"), (0,))
