"""Stochastic-gradient MCMC: SGHMC, its limit SGLD, and the cyclical form of both.

Underdamped Langevin dynamics with unit mass, integrated by kick, half drift, noise, half drift. With
h = sqrt(step / N), momentum decay b, temperature T, and grad U the mini-batch estimate of the whole sum:

    m <- m - h grad U(theta)
    theta <- theta + h/2 m;      m <- b m + sqrt((1 - b^2) T) xi,   xi ~ N(0, I);      theta <- theta + h/2 m

So `step` is a learning rate of the mean loss, and the noise follows from N, step and T; nothing else sets it. With
exact gradients a Gaussian posterior is sampled without bias at every stable step size; with b = 0 it is SGLD (in the
form of Leimkuhler and Matthews, with noise averaged over two steps). What remains is the noise of the mini-batches: it
shifts moments by an order of step / friction, and mostly heats: watch the temperatures in Info. References: Chen et al.
(2014), Leimkuhler and Matthews (2013), Wenzel et al. (2020), Zhang et al. (2020) for cycles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.start import check_start
from onebasin.inference.target import Minibatches, Target
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

_REGROWTH = 1.2  # per step, until a step size that was halved after a divergence is what it was
_LEAST = 1e-3  # share of the step size that no series of divergences goes below, or a chain would stand still for good
_CALM, _WILD = 1e2, 1e6  # mean squared momentum of a chain that may be gone back to, and of one that has diverged


@dataclass(frozen=True, kw_only=True)
class SGHMC(TrainedMethod):
    """Stochastic-gradient MCMC on mini-batches: SGHMC, its limit SGLD, and the cyclical form of both.

    Attributes:
        draws: kept from each chain.
        warmup: epochs before the first draw.
        thin: epochs from one draw to the next.
        step: the rate of the sampler, of the mean loss per example; `batch` is that of training.
        friction: 1 - b, how much momentum a step forgets; 1 is SGLD.
        temperature: T; 1 is the Bayesian posterior, 0 is SGD with momentum.
        cycles: draws are spread over so many cycles of a cosine rate (cyclical SG-MCMC); 0 for a constant one.
        cycle: epochs of one cycle.
        exploration: the share of a cycle that only explores, at temperature 0.
    """

    name: ClassVar[str] = "sghmc"
    draws: int = 100
    warmup: int = 100
    thin: int = 2
    step: float = 1e-2
    friction: float = 0.01
    temperature: float = 1.0
    cycles: int = 0
    cycle: int = 20
    exploration: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, thin=self.thin, cycle=self.cycle)
        check_counts(0, warmup=self.warmup, cycles=self.cycles)
        if not (0 < self.friction <= 1 and self.temperature >= 0 and self.step > 0 and 0 <= self.exploration < 1):
            raise InputError(
                f"expected 0 < friction <= 1, temperature >= 0, step > 0 and 0 <= exploration < 1, found "
                f"{self.friction}, {self.temperature}, {self.step} and {self.exploration}: give others, such as 0.01, "
                "1, 0.01 and 0.75"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train, warm up, draw; or train, and draw at the end of each cycle."""
        minibatches = Minibatches(target.examples, self.batch)
        epoch = minibatches.per_epoch
        kernel = SGHMCKernel(target, minibatches, self)
        if not self.cycles:
            stages = (self.training(target), Stage("warm-up", kernel, self.warmup * epoch))
            return ChainPlan(stages, self.draws, (self.thin * epoch,))
        thin = _spaced(self.draws, self.cycles, self.cycle * epoch, self.exploration)
        return ChainPlan((self.training(target), Stage("cycles", kernel, 0)), self.draws, thin)


class SGHMCState(NamedTuple):
    """What the next step needs."""

    position: Tensor
    momentum: Tensor
    buffers: State
    safe: Tensor  # (chains, D): the last position with a finite gradient and moderate speed
    shrink: Tensor  # (chains,): 1, or less for a while after a divergence


@dataclass(frozen=True, eq=False)
class SGHMCKernel:
    """One mini-batch step of every chain."""

    target: Target
    minibatches: Minibatches
    method: SGHMC = SGHMC()

    def init(self, start: Draws, streams: Streams) -> SGHMCState:
        """Start at given networks with thermal momentum."""
        check_start(self.target(start.position, start.buffers), streams.chains)
        momentum = streams.gaussian("momentum", start.position) * math.sqrt(self.method.temperature)
        ones = torch.ones(len(momentum), dtype=start.position.dtype, device=momentum.device)
        return SGHMCState(start.position, momentum, start.buffers, start.position, ones)

    def conditions(self, step_index: StepIndex) -> tuple[float, float]:
        """Rate and temperature of this step: constant, or those of the cycle."""
        method = self.method
        if not method.cycles:
            return method.step, method.temperature
        cycle = method.cycle * self.minibatches.per_epoch
        part = (step_index.step % cycle) / cycle
        rate = 0.5 * method.step * (1 + math.cos(math.pi * part))
        return rate, method.temperature if part >= method.exploration else 0.0

    def step(self, state: SGHMCState, step_index: StepIndex, streams: Streams) -> tuple[SGHMCState, Info]:
        """Kick, drift, noise, drift. A chain that diverges goes back, forgets its momentum and takes smaller steps."""
        rate, temperature = self.conditions(step_index)
        evaluation = self.target(state.position, state.buffers, self.minibatches.rows(step_index.step, streams))
        sound = evaluation.finite & _below(state, _WILD)
        kept = sound[:, None]
        shrink = torch.where(sound, (state.shrink * _REGROWTH).clamp(max=1.0), (state.shrink * 0.5).clamp(min=_LEAST))
        size = math.sqrt(rate / max(1, self.target.examples)) * shrink[:, None]
        decay = 1 - self.method.friction
        kicked = state.momentum - size * evaluation.gradient
        noise = streams.gaussian("noise", state.position)
        momentum = decay * kicked + math.sqrt((1 - decay**2) * temperature) * noise
        position = state.position + 0.5 * size * (kicked + momentum)
        info = {
            "potential": evaluation.potential,
            "kinetic_temperature": momentum.double().square().mean(1),
            "configurational_temperature": (state.position.double() * evaluation.gradient).mean(1),
            "divergent": (~sound).double(),
            "step_size": (rate * shrink.square()).double(),
        }
        moved = SGHMCState(
            torch.where(kept, position, state.safe),
            torch.where(kept, momentum, math.sqrt(temperature) * noise),
            state.buffers,
            torch.where((sound & _below(state, _CALM))[:, None], state.position, state.safe),
            shrink,
        )
        return moved, info

    def draw(self, state: SGHMCState, streams: Streams) -> Draws:
        """Where the chains are, or were last before they left the support or all bounds, with the log density there."""
        density = self.target.log_density(state.position, state.buffers)
        sound = torch.isfinite(density) & _below(state, _CALM)
        if bool(sound.all()):
            return Draws(state.position, state.buffers, density)
        position = torch.where(sound[:, None], state.position, state.safe)
        return Draws(position, state.buffers, self.target.log_density(position, state.buffers))


def _below(state: SGHMCState, limit: float) -> Tensor:
    """Whether the mean squared momentum of each chain, which heat alone makes T, is below a limit."""
    return state.momentum.square().mean(1) < limit


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
