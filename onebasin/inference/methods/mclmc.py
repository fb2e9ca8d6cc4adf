"""Microcanonical Langevin Monte Carlo: motion at constant speed, for posteriors that are too stiff for HMC.

The momentum is a unit vector u. With D weights, step e, length L, g the gradient of U, n = -g / |g| and
d = h |g| / (D - 1), one step is a kick of h = e / 2, a drift, another kick, and a small turn at random:

    kick:   u <- (u + n (sinh d + (n . u) (cosh d - 1))) / (cosh d + (n . u) sinh d)
    drift:  theta <- theta + e u
    turn:   u <- u + v xi, then to length 1;   v^2 = (exp(2 e / L) - 1) / D,   xi ~ N(0, I)

A kick changes the kinetic energy by (D - 1) log(cosh d + (n . u) sinh d). Nothing is accepted or rejected: draws have a
bias that grows with the variance of the energy error per weight, which is what the step size is tuned to and what Info
tells. References: Robnik, De Luca, Silverstein and Seljak (2023); Sommer et al. (2025) for Bayesian ensembles.
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
from onebasin.inference.target import DensityEvaluation, Target
from onebasin.state import State

_MEMORY = 1000.0  # steps over which energy errors are averaged by the tuning
_TRUST = 1.5  # errors that are off by far more than the factor exp(6 * _TRUST) say little about the step size
_DIVERGENT = 10.0  # an energy error per weight beyond this is undone
_FIRST_STEP = 0.005


class Options(TrainingOptions, total=False):
    """Options of microcanonical sampling; those of training are for the networks that chains start from.

    Attributes:
        draws: kept from each chain.
        warmup: steps (one gradient each) in which the step size adapts.
        thin: steps from one draw to the next.
        length: L, over which the direction is forgotten; by default sqrt(D), the radius of a standard normal prior.
        variance: of the energy error per weight, what the step size is tuned to; smaller is slower and less biased.
        loose: the same at the begin of warm-up, from where it falls geometrically.
    """

    draws: int
    warmup: int
    thin: int
    length: float | None
    variance: float
    loose: float


class MCLMCState(NamedTuple):
    """What the next step needs."""

    position: Tensor
    rest: State
    direction: Tensor
    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    step: Tensor  # (chains,) float64, like the two sums of the tuning
    weighted: Tensor
    weights: Tensor

    @property
    def potential(self) -> Tensor:
        """U, float64 (chains,)."""
        return -(self.log_likelihood + self.log_prior)


def unit(vectors: Tensor) -> Tensor:
    """Rows (chains, D) at length 1."""
    return vectors / vectors.square().sum(1, keepdim=True).sqrt()


def kick(direction: Tensor, gradient: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Turn unit vectors (chains, D) downhill for a time (chains,); also returns the change of kinetic energy.

    Written with exp(-d), which cannot overflow. The energy is float64 (chains,).

    >>> u, energy = kick(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, -1.0]]), torch.tensor([50.0]))
    >>> u.round(decimals=4).tolist(), round(float(energy), 4) == round(50 - math.log(2), 4)
    ([[0.0, 1.0]], True)
    """
    size = gradient.square().sum(1, keepdim=True).sqrt().clamp(min=torch.finfo(gradient.dtype).tiny)
    downhill = -gradient / size
    other = direction.shape[1] - 1
    turn = time.to(size)[:, None] * size / other
    along = (downhill * direction).sum(1, keepdim=True)
    once = torch.exp(-turn)
    twice = once.square()
    scale = 1 + twice + along * (1 - twice)
    turned = 2 * once * direction + downhill * (1 - twice + along * (1 + twice - 2 * once))
    energy = other * (turn + torch.log(scale) - math.log(2))[:, 0].double()
    return unit(turned / scale), energy


@dataclass(frozen=True, eq=False)
class Microcanonical:
    """The kernel: one step of every chain.

    Attributes are those of `Options`.
    """

    target: Target
    length: float
    variance: float = 0.1
    loose: float = 0.5

    def init(self, start: Draws, streams: Streams) -> MCLMCState:
        """Start at given networks in random directions."""
        found = self.target(start.position, start.rest)
        check_start(found, streams.chains)
        direction = unit(streams.gaussian("direction", start.position))
        step = torch.full_like(found.log_prior, _FIRST_STEP)
        zero = torch.zeros_like(step)
        gradient, likelihood, prior, _ = found
        return MCLMCState(start.position, start.rest, direction, gradient, likelihood, prior, step, zero, zero)

    def step(self, state: MCLMCState, moment: StepIndex, streams: Streams) -> tuple[MCLMCState, Info]:
        """Kick, drift, kick, turn. A chain that diverges stays and goes back the way it came."""
        step = state.step
        direction, first = kick(state.direction, state.gradient, step / 2)
        position = torch.addcmul(state.position, step.to(state.position)[:, None], direction)
        found = self.target(position, state.rest)
        direction, second = kick(direction, found.gradient, step / 2)
        error = first + second + found.potential - state.potential
        weights = state.position.shape[1]
        sound = (error.abs() < _DIVERGENT * weights) & found.finite
        moved = self._turned(_moved(state, position, direction, found, sound), streams)
        info = {
            "potential": moved.potential,
            "energy_variance": torch.where(sound, error.square() / weights, torch.nan),
            "divergent": (~sound).double(),
            "step_size": step,
        }
        return (self._tuned(moved, error, sound, moment) if moment.warming else moved), info

    def _turned(self, state: MCLMCState, streams: Streams) -> MCLMCState:
        noise = streams.gaussian("turn", state.direction)
        amount = (torch.expm1(2 * state.step / self.length) / noise.shape[1]).sqrt()
        return state._replace(direction=unit(torch.addcmul(state.direction, amount.to(noise)[:, None], noise)))

    def _tuned(self, state: MCLMCState, error: Tensor, sound: Tensor, moment: StepIndex) -> MCLMCState:
        """The error's variance grows as step^6, so each step tells which step would have had the wished one."""
        wished = self.loose * (self.variance / self.loose) ** (moment.step / moment.warmup)
        ratio = torch.where(sound, error.square() / (wished * state.position.shape[1]), 100.0).clamp(min=1e-8)
        weight = torch.exp(-0.5 * (ratio.log() / (6 * _TRUST)) ** 2)
        decay = (_MEMORY - 1) / (_MEMORY + 1)
        weighted = decay * state.weighted + weight * ratio / state.step**6
        weights = decay * state.weights + weight
        step = torch.where(sound, (weighted / weights) ** (-1 / 6), 0.8 * state.step)
        return state._replace(step=step, weighted=weighted, weights=weights)

    def draw(self, state: MCLMCState, streams: Streams) -> Draws:
        """Where the chains are."""
        return Draws(state.position, state.rest, -state.potential)


def _moved(
    state: MCLMCState, position: Tensor, direction: Tensor, found: DensityEvaluation, sound: Tensor
) -> MCLMCState:
    rows = sound[:, None]
    return state._replace(
        position=torch.where(rows, position, state.position),
        direction=torch.where(rows, direction, -state.direction),
        gradient=torch.where(rows, found.gradient, state.gradient),
        log_likelihood=torch.where(sound, found.log_likelihood, state.log_likelihood),
        log_prior=torch.where(sound, found.log_prior, state.log_prior),
    )


def build(target: Target, **options: Unpack[Options]) -> ChainPlan:
    """Plan microcanonical sampling: train, warm up, draw."""
    size = target.layout.size
    length = options.get("length") or math.sqrt(size)
    variance, loose = options.get("variance", 0.1), options.get("loose", 0.5)
    if not (length > 0 and variance > 0 and loose > 0):
        raise InputError(
            f"expected positive length, variance and loose, found {length}, {variance} and {loose}: give others"
        )
    if size < 2:
        raise InputError(f"microcanonical motion needs at least 2 weights, found {size}: use method hmc")
    kernel = Microcanonical(target, length, variance, loose)
    train = training_stage(target, cast(TrainingOptions, options))
    warmup = count(options.get("warmup", 5000), "warmup", 0)
    thin = count(options.get("thin", 100), "thin")
    return ChainPlan((train, Stage("warm-up", kernel, warmup)), count(options.get("draws", 100), "draws"), (thin,))
