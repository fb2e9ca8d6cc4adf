"""Mean-field variational inference: the Gaussian with independent weights that is closest to the posterior.

With q = N(mean, diag(std^2)) every step descends an estimate of the negative evidence bound per example,

    loss = ( - E_q[log likelihood] + kl_weight * KL(q || prior) ) / N,

by Adam on mean and log std. The expectation is taken at theta = mean + std * eps, one draw of eps per chain and step
shared by the mini-batch (Kingma and Welling, 2014; Blundell et al., 2015); the KL is exact,

    KL = sum_i [ log(prior_i / std_i) + (std_i^2 + mean_i^2) / (2 prior_i^2) - 1/2 ].

A `kl_weight` below 1 is what some call the temperature: the optimum is then that of the likelihood raised to the power
1 / kl_weight under the same prior, so that kl_weight -> 0 is maximum likelihood without spread. Passes are made in the
model's training mode: the running statistics of a batch norm have seen the noise of the weights, and draws carry them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.augment import BatchTransform, transforms_of
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts, check_kinds
from onebasin.inference.seeds import Streams, derived
from onebasin.inference.target import DensityEvaluation, Minibatches, Target
from onebasin.inference.training import (
    Optimizer,
    Trained,
    check_precision,
    check_schedule,
    check_transforms,
    in_bf16,
    pass_options,
)
from onebasin.posterior import Diagonal, Gaussian, one_of_each
from onebasin.state import State

_LEAST = 1e-5  # of a standard deviation: log std stays finite where the data leave no spread


@dataclass(frozen=True, kw_only=True)
class VI:
    """Mean-field variational inference: the Gaussian with independent weights that is closest to the posterior.

    Attributes:
        draws: networks drawn from each fitted Gaussian.
        epochs: passes over the data.
        batch: examples in a mini-batch; None for all.
        lr: learning rate of Adam, for means and for logarithms of standard deviations.
        lr_schedule: "cosine", from `lr` to zero, or "constant".
        init_std: standard deviation of every weight at the start.
        kl_weight: how much the prior and the spread count; 1 is Bayes.
        samples: weight draws in each step, which are averaged.
        augment: random changes of mini-batches, as in training: "crop", "flip", "mixup", or objects with their options.
        precision: "full", or "bf16": matrix products and convolutions of the fit in bfloat16.
    """

    name: ClassVar[str] = "vi"
    draws: int = 10
    epochs: int = 100
    batch: int | None = 100
    lr: float = 1e-2
    lr_schedule: str = "cosine"
    init_std: float = 0.05
    kl_weight: float = 1.0
    samples: int = 1
    augment: tuple[BatchTransform | str, ...] = ()
    precision: str = "full"

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(1, draws=self.draws, epochs=self.epochs, batch=self.batch, samples=self.samples)
        check_schedule(self.lr_schedule)
        check_precision(self.precision)
        object.__setattr__(self, "augment", transforms_of(self.augment))
        Optimizer("adam", self.lr)
        if not self.init_std >= _LEAST or not self.kl_weight >= 0:
            raise InputError(
                f"expected init_std >= {_LEAST:g} and kl_weight >= 0, found {self.init_std} and {self.kl_weight}: "
                "give such numbers, for example 0.05 and 1"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Fit, then draw."""
        kernel = VIKernel(target, Minibatches(target.examples, self.batch), self)
        stage = Stage("variational", kernel, self.epochs * kernel.minibatches.per_epoch, optimum=True)
        return ChainPlan((stage,), self.draws, (0,), self.samples)


class Fit(NamedTuple):
    """What the next step needs; `first` and `second` are Adam's moments (chains, 2 D), of means, then of log stds."""

    mean: Tensor
    log_std: Tensor
    buffers: State
    first: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class VIKernel:
    """One step of Adam on the Gaussian of every chain."""

    target: Target
    minibatches: Minibatches
    method: VI = VI()
    optimizer: Optimizer = field(init=False)
    transforms: tuple[BatchTransform, ...] = field(init=False)
    bf16: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.target.prior.flat and self.target.examples:
            raise InputError(
                "variational inference needs a proper prior, found a flat one: give prior= a standard deviation"
            )
        method = self.method
        optimizer = Optimizer("adam", method.lr, schedule=method.lr_schedule, compile=self.target.compile)
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "transforms", transforms_of(method.augment))
        check_transforms(self.transforms, self.target, self.minibatches)
        object.__setattr__(self, "bf16", method.precision == "bf16" and in_bf16(self.target))

    def init(self, start: Draws, streams: Streams) -> Fit:
        """Every mean at the given network, every weight with the same small spread."""
        mean = start.position
        none = torch.zeros(len(mean), 2 * mean.shape[1], dtype=mean.dtype, device=mean.device)
        return Fit(mean, torch.full_like(mean, math.log(self.method.init_std)), start.buffers, none, none)

    def step(self, state: Fit, step_index: StepIndex, streams: Streams) -> tuple[Fit, Info]:
        """One step on the loss."""
        like = state.mean[:, None].expand(-1, self.method.samples, -1)
        noise = streams.gaussian("weights", like)
        seed = derived(streams.seed, "forward", streams.chains[0], step_index.step)
        options = pass_options(self.transforms, self.bf16, step_index.step, streams, self.method.samples)
        rows = self.minibatches.rows(step_index.step, streams)
        slope, evaluation = self.gradient(state, noise, rows, seed, **options)
        before = Trained(torch.cat([state.mean, state.log_std], 1), state.buffers, state.first, state.second)
        moved, good = self.optimizer.update(before, slope, step_index)
        mean, log_std = moved.position.chunk(2, dim=1)
        kl = self.divergence(state)
        likelihood = evaluation.log_likelihood.reshape(len(mean), self.method.samples).mean(1)
        loss = (self.method.kl_weight * kl - likelihood) / max(1, self.target.examples)
        after = Fit(
            mean,
            log_std.clamp(min=math.log(_LEAST)),
            self._one_per_chain(evaluation.buffers),
            moved.first,
            moved.second,
        )
        return after, {"loss": loss, "kl": kl, "divergent": ~good}

    def ending(self, state: Fit) -> Info:
        """The norm of the gradient along mean and log std, averaged over the last ten steps or so, as Adam does."""
        return {"gradient_norm": torch.linalg.vector_norm(state.first, dim=1, dtype=torch.float64)}

    def gradient(
        self, state: Fit, noise: Tensor, rows: Tensor | None, seed: int = 0, **options: Any
    ) -> tuple[Tensor, DensityEvaluation]:
        """The slope (chains, 2 D) of the loss along mean and log std, with noise (chains, samples, D).

        With g the gradient of -log likelihood at theta, and p the precision of the prior,

            d/d mean = g + w p mean,    d/d log std = g eps std + w (p std^2 - 1),    both / N.
        """
        chains, samples, size = noise.shape
        std, precision = state.log_std.exp(), self.target.prior.precision
        theta = (state.mean[:, None] + std[:, None] * noise).reshape(chains * samples, size)
        buffers = {name: value.repeat_interleave(samples, 0) for name, value in state.buffers.items()}
        own = rows if rows is None or rows.dim() == 1 else rows.repeat_interleave(samples, 0)
        evaluation = self.target(theta, buffers, own, training=True, seed=seed, **options)
        # The target's prior is that of the draw; the divergence is known exactly and takes its place.
        each = (evaluation.gradient - precision * theta).reshape(noise.shape)
        of_mean = each.mean(1) + self.method.kl_weight * precision * state.mean
        of_log_std = (each * noise).mean(1) * std + self.method.kl_weight * (precision * std.square() - 1)
        return torch.cat([of_mean, of_log_std], 1) / max(1, self.target.examples), evaluation

    def divergence(self, state: Fit) -> Tensor:
        """KL(q || prior), float64 (chains,); where the prior is flat, the negative entropy of q takes its place."""
        precision, log_std = self.target.prior.precision.double(), state.log_std.double()
        squares = state.mean.double().square() + (2 * log_std).exp()
        scale = torch.where(precision > 0, precision, 2 * math.pi)
        return (0.5 * (precision * squares - 1 - scale.log()) - log_std).sum(1)

    def components(self, state: Fit) -> list[Gaussian]:
        """The Gaussian of each chain."""
        std = state.log_std.exp()
        return [Gaussian(mean, Diagonal(own)) for mean, own in zip(state.mean, std, strict=True)]

    def draw(self, state: Fit, streams: Streams) -> Draws:
        """One network from each Gaussian."""
        position = one_of_each(self.components(state), streams.each("draw"))
        return Draws(position, state.buffers, self.target.log_density(position, state.buffers))

    def _one_per_chain(self, buffers: State) -> State:
        """Buffers of each chain: the average over its samples, of integers the first."""
        if self.method.samples == 1:
            return buffers
        apart = {name: value.unflatten(0, (-1, self.method.samples)) for name, value in buffers.items()}
        return {
            name: value.mean(1).to(value.dtype) if value.is_floating_point() else value[:, 0]
            for name, value in apart.items()
        }
