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
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex
from onebasin.inference.methods.ensemble import Optimiser, Trained, count
from onebasin.inference.seeds import Streams, derived
from onebasin.inference.target import DensityEvaluation, Minibatches, Target
from onebasin.posterior import Diagonal, Gaussian, one_of_each
from onebasin.state import State

_LEAST = 1e-5  # of a standard deviation: log std stays finite where the data leave no spread


class Options(TypedDict, total=False):
    """Options of variational inference.

    Attributes:
        draws: networks drawn from each fitted Gaussian.
        epochs: passes over the data.
        batch: examples in a mini-batch; None for all.
        rate: learning rate of Adam, for means and for logarithms of standard deviations.
        schedule: "cosine", from the rate to zero, or "constant".
        init_std: standard deviation of every weight at the start.
        kl_weight: how much the prior and the spread count; 1 is Bayes.
        samples: weight draws in each step, which are averaged.
    """

    draws: int
    epochs: int
    batch: int | None
    rate: float
    schedule: str
    init_std: float
    kl_weight: float
    samples: int


class Fit(NamedTuple):
    """What the next step needs; `first` and `second` are Adam's moments (chains, 2 D), of means, then of log stds."""

    mean: Tensor
    log_std: Tensor
    rest: State
    first: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class Variational:
    """The kernel: one step of Adam on the Gaussian of every chain.

    Attributes:
        target: the posterior.
        optimiser: how gradients become steps.
        minibatches: which examples each step sees.
        init_std: standard deviation at the start.
        kl_weight: of KL(q || prior) in the loss.
        samples: weight draws in each step.
    """

    target: Target
    optimiser: Optimiser
    minibatches: Minibatches
    init_std: float = 0.05
    kl_weight: float = 1.0
    samples: int = 1

    def __post_init__(self) -> None:
        if self.target.prior.flat and self.target.examples:
            raise InputError(
                "variational inference needs a proper prior, found a flat one: give prior= a standard deviation"
            )
        if not self.init_std >= _LEAST or not self.kl_weight >= 0:
            raise InputError(
                f"expected init_std >= {_LEAST:g} and kl_weight >= 0, found {self.init_std} and {self.kl_weight}: "
                "give such numbers, for example 0.05 and 1"
            )

    def init(self, start: Draws, streams: Streams) -> Fit:
        """Every mean at the given network, every weight with the same small spread."""
        mean = start.position
        none = torch.zeros(len(mean), 2 * mean.shape[1], dtype=mean.dtype, device=mean.device)
        return Fit(mean, torch.full_like(mean, math.log(self.init_std)), start.rest, none, none)

    def step(self, state: Fit, moment: StepIndex, streams: Streams) -> tuple[Fit, Info]:
        """One step on the loss."""
        like = state.mean[:, None].expand(-1, self.samples, -1)
        noise = streams.gaussian("weights", like)
        seed = derived(streams.seed, "forward", streams.chains[0], moment.step)
        slope, found = self.gradient(state, noise, self.minibatches.rows(moment.step, streams), seed)
        before = Trained(torch.cat([state.mean, state.log_std], 1), state.rest, state.first, state.second)
        moved, good = self.optimiser.update(before, slope, moment)
        mean, log_std = moved.position.chunk(2, dim=1)
        kl = self.divergence(state)
        likelihood = found.log_likelihood.reshape(len(mean), self.samples).mean(1)
        loss = (self.kl_weight * kl - likelihood) / max(1, self.target.examples)
        after = Fit(mean, log_std.clamp(min=math.log(_LEAST)), self._rest(found.rest), moved.first, moved.second)
        return after, {"loss": loss, "kl": kl, "divergent": ~good}

    def ending(self, state: Fit) -> Info:
        """The norm of the gradient along mean and log std, averaged over the last ten steps or so, as Adam does."""
        return {"gradient_norm": torch.linalg.vector_norm(state.first, dim=1, dtype=torch.float64)}

    def gradient(
        self, state: Fit, noise: Tensor, rows: Tensor | None, seed: int = 0
    ) -> tuple[Tensor, DensityEvaluation]:
        """The slope (chains, 2 D) of the loss along mean and log std, with noise (chains, samples, D).

        With g the gradient of -log likelihood at theta, and p the precision of the prior,

            d/d mean = g + w p mean,    d/d log std = g eps std + w (p std^2 - 1),    both / N.
        """
        chains, samples, size = noise.shape
        std, precision = state.log_std.exp(), self.target.prior.precision
        theta = (state.mean[:, None] + std[:, None] * noise).reshape(chains * samples, size)
        rest = {name: value.repeat_interleave(samples, 0) for name, value in state.rest.items()}
        own = rows if rows is None or rows.dim() == 1 else rows.repeat_interleave(samples, 0)
        found = self.target(theta, rest, own, training=True, seed=seed)
        # The target's prior is that of the draw; the divergence is known exactly and takes its place.
        each = (found.gradient - precision * theta).reshape(noise.shape)
        of_mean = each.mean(1) + self.kl_weight * precision * state.mean
        of_log_std = (each * noise).mean(1) * std + self.kl_weight * (precision * std.square() - 1)
        return torch.cat([of_mean, of_log_std], 1) / max(1, self.target.examples), found

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
        return Draws(position, state.rest, self.target.log_density(position, state.rest))

    def _rest(self, rest: State) -> State:
        """One rest per chain: the average over its samples, of integers the first."""
        if self.samples == 1:
            return rest
        apart = {name: value.unflatten(0, (-1, self.samples)) for name, value in rest.items()}
        return {
            name: value.mean(1).to(value.dtype) if value.is_floating_point() else value[:, 0]
            for name, value in apart.items()
        }


def build(target: Target, **options: Unpack[Options]) -> ChainPlan:
    """Plan variational inference: 100 epochs on batches of 100, unless told otherwise."""
    batches = Minibatches(target.examples, options.get("batch", 100))
    optimiser = Optimiser(
        "adam", options.get("rate", 1e-2), schedule=options.get("schedule", "cosine"), compile=target.compile
    )
    samples = count(options.get("samples", 1), "samples")
    kernel = Variational(
        target, optimiser, batches, options.get("init_std", 0.05), options.get("kl_weight", 1.0), samples
    )
    steps = count(options.get("epochs", 100), "epochs") * batches.per_epoch
    return ChainPlan(
        (Stage("variational", kernel, steps, optimum=True),), count(options.get("draws", 10), "draws"), (0,), samples
    )
