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
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.start import check_start
from onebasin.inference.target import DensityEvaluation, Target
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

_MEMORY = 1000.0  # steps over which energy errors are averaged by the tuning
_TRUST = 1.5  # errors that are off by far more than the factor exp(6 * _TRUST) say little about the step size
_DIVERGENT = 10.0  # an energy error per weight beyond this is undone
_FIRST_STEP = 0.005


@dataclass(frozen=True, kw_only=True)
class MCLMC(TrainedMethod):
    """Microcanonical Langevin Monte Carlo: motion at constant speed, for posteriors that are too stiff for HMC.

    Attributes:
        draws: kept from each chain.
        warmup: steps (one gradient each) in which the step size adapts.
        thin: steps from one draw to the next.
        length: L, over which the direction is forgotten; None for sqrt(D), the radius of a standard normal prior.
        variance: of the energy error per weight, what the step size is tuned to; smaller is slower and less biased.
        loose: the same at the begin of warm-up, from where it falls geometrically.
    """

    name: ClassVar[str] = "mclmc"
    draws: int = 100
    warmup: int = 5000
    thin: int = 100
    length: float | None = None
    variance: float = 0.1
    loose: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, thin=self.thin)
        check_counts(0, warmup=self.warmup)
        if not ((self.length is None or self.length > 0) and self.variance > 0 and self.loose > 0):
            raise InputError(
                f"expected positive length, variance and loose, found {self.length}, {self.variance} and {self.loose}: "
                "give others, such as None, 0.1 and 0.5"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train, warm up, draw."""
        if target.layout.size < 2:
            raise InputError(f"microcanonical motion needs at least 2 weights, found {target.layout.size}: use HMC()")
        warmup = Stage("warm-up", MCLMCKernel(target, self), self.warmup)
        return ChainPlan((self.training(target), warmup), self.draws, (self.thin,))


class MCLMCState(NamedTuple):
    """What the next step needs."""

    position: Tensor
    buffers: State
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
class MCLMCKernel:
    """One step of every chain."""

    target: Target
    method: MCLMC = MCLMC()

    @property
    def length(self) -> float:
        """L."""
        return self.method.length or math.sqrt(self.target.layout.size)

    def init(self, start: Draws, streams: Streams) -> MCLMCState:
        """Start at given networks in random directions."""
        evaluation = self.target(start.position, start.buffers)
        check_start(evaluation, streams.chains)
        direction = unit(streams.gaussian("direction", start.position))
        step = torch.full_like(evaluation.log_prior, _FIRST_STEP)
        zero = torch.zeros_like(step)
        gradient, likelihood, prior, _ = evaluation
        return MCLMCState(start.position, start.buffers, direction, gradient, likelihood, prior, step, zero, zero)

    def step(self, state: MCLMCState, step_index: StepIndex, streams: Streams) -> tuple[MCLMCState, Info]:
        """Kick, drift, kick, turn. A chain that diverges stays and goes back the way it came."""
        step = state.step
        direction, first = kick(state.direction, state.gradient, step / 2)
        position = torch.addcmul(state.position, step.to(state.position)[:, None], direction)
        evaluation = self.target(position, state.buffers)
        direction, second = kick(direction, evaluation.gradient, step / 2)
        error = first + second + evaluation.potential - state.potential
        weights = state.position.shape[1]
        sound = (error.abs() < _DIVERGENT * weights) & evaluation.finite
        moved = self._turned(_moved(state, position, direction, evaluation, sound), streams)
        info = {
            "potential": moved.potential,
            "energy_variance": torch.where(sound, error.square() / weights, torch.nan),
            "divergent": (~sound).double(),
            "step_size": step,
        }
        return (self._tuned(moved, error, sound, step_index) if step_index.warming else moved), info

    def _turned(self, state: MCLMCState, streams: Streams) -> MCLMCState:
        noise = streams.gaussian("turn", state.direction)
        amount = (torch.expm1(2 * state.step / self.length) / noise.shape[1]).sqrt()
        return state._replace(direction=unit(torch.addcmul(state.direction, amount.to(noise)[:, None], noise)))

    def _tuned(self, state: MCLMCState, error: Tensor, sound: Tensor, step_index: StepIndex) -> MCLMCState:
        """The error's variance grows as step^6, so each step tells which step would have had the wished one."""
        loose, variance = self.method.loose, self.method.variance
        wished = loose * (variance / loose) ** (step_index.step / step_index.warmup)
        ratio = torch.where(sound, error.square() / (wished * state.position.shape[1]), 100.0).clamp(min=1e-8)
        weight = torch.exp(-0.5 * (ratio.log() / (6 * _TRUST)) ** 2)
        decay = (_MEMORY - 1) / (_MEMORY + 1)
        weighted = decay * state.weighted + weight * ratio / state.step**6
        weights = decay * state.weights + weight
        step = torch.where(sound, (weighted / weights) ** (-1 / 6), 0.8 * state.step)
        return state._replace(step=step, weighted=weighted, weights=weights)

    def draw(self, state: MCLMCState, streams: Streams) -> Draws:
        """Where the chains are."""
        return Draws(state.position, state.buffers, -state.potential)


def _moved(
    state: MCLMCState, position: Tensor, direction: Tensor, evaluation: DensityEvaluation, sound: Tensor
) -> MCLMCState:
    rows = sound[:, None]
    return state._replace(
        position=torch.where(rows, position, state.position),
        direction=torch.where(rows, direction, -state.direction),
        gradient=torch.where(rows, evaluation.gradient, state.gradient),
        log_likelihood=torch.where(sound, evaluation.log_likelihood, state.log_likelihood),
        log_prior=torch.where(sound, evaluation.log_prior, state.log_prior),
    )
