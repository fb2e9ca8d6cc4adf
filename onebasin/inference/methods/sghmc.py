"""Stochastic-gradient MCMC: SGHMC, its limit SGLD, and the cyclical form of both.

Underdamped Langevin dynamics with unit mass, integrated by kick, half drift, noise, half drift. With
h = sqrt(rate / N), momentum decay b, temperature T, and grad U the mini-batch estimate of the whole sum:

    m <- m - h grad U(theta)
    theta <- theta + h/2 m;      m <- b m + sqrt((1 - b^2) T) xi,   xi ~ N(0, I);      theta <- theta + h/2 m

So `rate` is a learning rate of the mean loss, and the noise follows from N, rate and T; nothing else sets it. With
exact gradients a Gaussian posterior is sampled without bias at every stable step size; with b = 0 it is SGLD (in the
form of Leimkuhler and Matthews, with noise averaged over two steps). What remains is the noise of the mini-batches: it
shifts moments by an order of rate / friction, and mostly heats: watch the temperatures in Info. References: Chen et al.
(2014), Leimkuhler and Matthews (2013), Wenzel et al. (2020), Zhang et al. (2020) for cycles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Unpack, cast

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex
from onebasin.inference.methods.ensemble import TrainingOptions, count, training_stage
from onebasin.inference.seeds import Streams
from onebasin.inference.start import check_start
from onebasin.inference.target import Minibatches, Target
from onebasin.state import State

_REGROWTH = 1.2  # per step, until a step size that was halved after a divergence is what it was
_LEAST = 1e-3  # share of the step size that no series of divergences goes below, or a chain would stand still for good
_CALM, _WILD = 1e2, 1e6  # mean squared momentum of a chain that may be gone back to, and of one that has diverged


class Options(TrainingOptions, total=False):
    """Options of SG-MCMC; those of training, but for `batch`, are for the networks that chains start from.

    Attributes:
        draws: kept from each chain.
        warmup: epochs before the first draw.
        thin: epochs from one draw to the next.
        step: the rate of the sampler, of the mean loss per example.
        friction: 1 - b, how much momentum a step forgets; 1 is SGLD.
        temperature: T; 1 is the Bayesian posterior, 0 is SGD with momentum.
        cycles: draws are spread over so many cycles of a cosine rate (cyclical SG-MCMC); 0 for a constant one.
        cycle: epochs of one cycle.
        exploration: the share of a cycle that only explores, at temperature 0.
    """

    draws: int
    warmup: int
    thin: int
    step: float
    friction: float
    temperature: float
    cycles: int
    cycle: int
    exploration: float


class SGHMCState(NamedTuple):
    """What the next step needs."""

    position: Tensor
    momentum: Tensor
    rest: State
    safe: Tensor  # (chains, D): the last position with a finite gradient and moderate speed
    shrink: Tensor  # (chains,): 1, or less for a while after a divergence


@dataclass(frozen=True, eq=False)
class SGMCMC:
    """The kernel: one mini-batch step of every chain.

    Attributes:
        target: the posterior.
        minibatches: which examples each step sees.
        rate: learning rate of the mean loss.
        friction: 1 - b.
        temperature: T.
        cycle: steps of a cycle; 0 for a constant rate.
        exploration: the share of a cycle at temperature 0.
    """

    target: Target
    minibatches: Minibatches
    rate: float = 1e-2
    friction: float = 0.01
    temperature: float = 1.0
    cycle: int = 0
    exploration: float = 0.0

    def init(self, start: Draws, streams: Streams) -> SGHMCState:
        """Start at given networks with thermal momentum."""
        check_start(self.target(start.position, start.rest), streams.chains)
        momentum = streams.gaussian("momentum", start.position) * math.sqrt(self.temperature)
        ones = torch.ones(len(momentum), dtype=start.position.dtype, device=momentum.device)
        return SGHMCState(start.position, momentum, start.rest, start.position, ones)

    def conditions(self, moment: StepIndex) -> tuple[float, float]:
        """Rate and temperature of this step: constant, or those of the cycle."""
        if not self.cycle:
            return self.rate, self.temperature
        part = (moment.step % self.cycle) / self.cycle
        rate = 0.5 * self.rate * (1 + math.cos(math.pi * part))
        return rate, self.temperature if part >= self.exploration else 0.0

    def step(self, state: SGHMCState, moment: StepIndex, streams: Streams) -> tuple[SGHMCState, Info]:
        """Kick, drift, noise, drift. A chain that diverges goes back, forgets its momentum and takes smaller steps."""
        rate, temperature = self.conditions(moment)
        found = self.target(state.position, state.rest, self.minibatches.rows(moment.step, streams))
        sound = found.finite & _below(state, _WILD)
        kept = sound[:, None]
        shrink = torch.where(sound, (state.shrink * _REGROWTH).clamp(max=1.0), (state.shrink * 0.5).clamp(min=_LEAST))
        size = math.sqrt(rate / max(1, self.target.examples)) * shrink[:, None]
        decay = 1 - self.friction
        kicked = state.momentum - size * found.gradient
        noise = streams.gaussian("noise", state.position)
        momentum = decay * kicked + math.sqrt((1 - decay**2) * temperature) * noise
        position = state.position + 0.5 * size * (kicked + momentum)
        info = {
            "potential": found.potential,
            "kinetic_temperature": momentum.double().square().mean(1),
            "configurational_temperature": (state.position.double() * found.gradient).mean(1),
            "divergent": (~sound).double(),
            "step_size": (rate * shrink.square()).double(),
        }
        moved = SGHMCState(
            torch.where(kept, position, state.safe),
            torch.where(kept, momentum, math.sqrt(temperature) * noise),
            state.rest,
            torch.where((sound & _below(state, _CALM))[:, None], state.position, state.safe),
            shrink,
        )
        return moved, info

    def draw(self, state: SGHMCState, streams: Streams) -> Draws:
        """Where the chains are, or were last before they left the support or all bounds, with the log density there."""
        density = self.target.log_density(state.position, state.rest)
        sound = torch.isfinite(density) & _below(state, _CALM)
        if bool(sound.all()):
            return Draws(state.position, state.rest, density)
        position = torch.where(sound[:, None], state.position, state.safe)
        return Draws(position, state.rest, self.target.log_density(position, state.rest))


def _below(state: SGHMCState, limit: float) -> Tensor:
    """Whether the mean squared momentum of each chain, which heat alone makes T, is below a limit."""
    return state.momentum.square().mean(1) < limit


def build(target: Target, **options: Unpack[Options]) -> ChainPlan:
    """Plan SG-MCMC: train, warm up, draw."""
    batches = Minibatches(target.examples, options.get("batch", 100))
    friction, temperature = options.get("friction", 0.01), options.get("temperature", 1.0)
    rate, exploration = options.get("step", 1e-2), options.get("exploration", 0.75)
    if not (0 < friction <= 1 and temperature >= 0 and rate > 0 and 0 <= exploration < 1):
        raise InputError(
            f"expected 0 < friction <= 1, temperature >= 0, step > 0 and 0 <= exploration < 1, found {friction}, "
            f"{temperature}, {rate} and {exploration}: give others"
        )
    draws, cycles = count(options.get("draws", 100), "draws"), count(options.get("cycles", 0), "cycles", 0)
    epochs_in_cycle = count(options.get("cycle", 20), "cycle")
    cycle = epochs_in_cycle * batches.per_epoch if cycles else 0
    kernel = SGMCMC(target, batches, rate, friction, temperature, cycle, exploration)
    train = training_stage(target, cast(TrainingOptions, options))
    if cycles:
        return ChainPlan((train, Stage("cycles", kernel, 0)), draws, _spaced(draws, cycles, cycle, exploration))
    warmup = count(options.get("warmup", 100), "warmup", 0) * batches.per_epoch
    thin = count(options.get("thin", 2), "thin") * batches.per_epoch
    return ChainPlan((train, Stage("warm-up", kernel, warmup)), draws, (thin,))


def _spaced(draws: int, cycles: int, cycle: int, exploration: float) -> tuple[int, ...]:
    """Steps before each draw of a cycle: draws are equally spaced after the exploration, the last ends the cycle.

    >>> _spaced(draws=6, cycles=2, cycle=100, exploration=0.7)
    (80, 10, 10)
    """
    each = -(-draws // cycles)
    explored = int(exploration * cycle)
    ends = [explored + (cycle - explored) * (place + 1) // each for place in range(each)]
    if each > cycle - explored:
        raise InputError(
            f"expected room for {each} draws in the last {cycle - explored} steps of a cycle: ask for fewer draws, "
            "more cycles, or a longer cycle"
        )
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
