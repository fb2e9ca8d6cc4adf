"""Hamiltonian Monte Carlo with full-batch gradients, every chain with its own step size.

Momentum p ~ N(0, T m), a leapfrog trajectory with a jittered number of steps, then accepted with probability
min(1, exp(-dH / T)). Chains start from independently trained networks. Step sizes (dual averaging) and, if wished, a
diagonal mass adapt during warm-up and are frozen afterwards. Reference: Neal (2011), Izmailov et al. (2021).
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


@dataclass(frozen=True, kw_only=True)
class HMC(TrainedMethod):
    """Hamiltonian Monte Carlo with full-batch gradients, from trained networks.

    Attributes:
        draws: kept from each chain.
        warmup: trajectories in which step size and mass adapt.
        thin: trajectories from one draw to the next.
        leapfrog: steps of a trajectory, on average.
        jitter: their number varies by this share in both directions.
        step: first step size; None to search for one.
        acceptance: what the step size is tuned to.
        mass: "identity", or "diagonal" from the spread of each weight in warm-up.
        temperature: T; 1 is the Bayesian posterior.
    """

    name: ClassVar[str] = "hmc"
    draws: int = 200
    warmup: int = 200
    thin: int = 1
    leapfrog: int = 50
    jitter: float = 0.5
    step: float | None = None
    acceptance: float = 0.75
    mass: str = "identity"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, thin=self.thin, leapfrog=self.leapfrog)
        check_counts(0, warmup=self.warmup)
        if self.mass not in ("identity", "diagonal"):
            raise InputError(f'expected mass "identity" or "diagonal", found {self.mass!r}: give mass="diagonal"')
        if self.step is not None and not self.step > 0:
            raise InputError(f"expected a positive step size, found {self.step}: leave it out, and one is searched")
        if not (0 <= self.jitter < 1 and 0 < self.acceptance < 1 and 0 < self.temperature < math.inf):
            raise InputError(
                f"expected 0 <= jitter < 1, 0 < acceptance < 1 and temperature > 0, found {self.jitter}, "
                f"{self.acceptance} and {self.temperature}: give others, such as 0.5, 0.75 and 1"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train, warm up, draw."""
        warmup = Stage("warm-up", HMCKernel(target, self), self.warmup)
        return ChainPlan((self.training(target), warmup), self.draws, (self.thin,), self.leapfrog)


# Hamiltonian dynamics: the leapfrog integrator, reversible and volume preserving.
#
#     H(theta, p) = U(theta) + 1/2 sum_i p_i^2 / m_i


class Phase(NamedTuple):
    """A point of phase space for every chain, with what is known of the potential there."""

    position: Tensor  # (chains, D)
    momentum: Tensor  # (chains, D)
    evaluation: DensityEvaluation


def leapfrog(target: Target, buffers: State, phase: Phase, step: Tensor, steps: int, inverse_mass: Tensor) -> Phase:
    """Follow the dynamics for `steps` steps, at the cost of as many gradients: that of the start is known.

    `step` (chains,) is the step size of each chain, a negative one goes back in time; `inverse_mass` is 1 / m, (D,) or
    (chains, D).
    """
    size = step.to(phase.position)[:, None]
    drift = size * inverse_mass
    position, evaluation = phase.position, phase.evaluation
    momentum = phase.momentum - 0.5 * size * evaluation.gradient
    for leap in range(steps):
        position = torch.addcmul(position, drift, momentum)
        evaluation = target(position, buffers)
        momentum = torch.addcmul(momentum, size if leap + 1 < steps else 0.5 * size, evaluation.gradient, value=-1)
    return Phase(position, momentum, evaluation)


def kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """1/2 sum_i p_i^2 / m_i in float64 (chains,)."""
    return 0.5 * (momentum.double().square() * inverse_mass.double()).sum(-1)


def energy_change(before: Phase, after: Phase, inverse_mass: Tensor) -> Tensor:
    """H(after) - H(before), float64 (chains,); likelihood, prior and kinetic parts are subtracted apart."""
    likelihood = before.evaluation.log_likelihood - after.evaluation.log_likelihood
    prior = before.evaluation.log_prior - after.evaluation.log_prior
    motion = kinetic(after.momentum, inverse_mass) - kinetic(before.momentum, inverse_mass)
    return likelihood + prior + motion


# A diagonal mass from the spread of each weight, learned in two windows of the warm-up.
#
# Stan's recipe: step sizes alone for the first 15 %, then two windows that estimate variances (Welford), and the last
# 10 % for the step size alone. An estimate from n draws is shrunk towards a small constant by 5 / (n + 5).

_BEGIN, _MIDDLE, _END = 0.15, 0.45, 0.9
_FLOOR = 1e-3
_REST = 10  # steps that a new mass leaves for the step size at least


class MassEstimate(NamedTuple):
    """Running mean and sum of squared deviations of each weight, (chains, D), after `seen` draws (chains,)."""

    mean: Tensor
    squares: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> MassEstimate:
        """Nothing seen yet."""
        seen = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        return cls(torch.zeros_like(like), torch.zeros_like(like), seen)

    def add(self, position: Tensor) -> MassEstimate:
        """Take one more draw into account."""
        seen = self.seen + 1
        offset = position - self.mean
        mean = self.mean + offset / seen.to(offset)[:, None]
        return MassEstimate(mean, torch.addcmul(self.squares, offset, position - mean), seen)

    def variance(self) -> Tensor:
        """The shrunk estimate (chains, D)."""
        n = self.seen.to(self.squares)[:, None]
        return self.squares / (n - 1).clamp(min=1) * (n / (n + 5)) + _FLOOR * 5 / (n + 5)


def mass_update(
    spread: MassEstimate, position: Tensor, inverse_mass: Tensor, step_index: StepIndex
) -> tuple[MassEstimate, Tensor]:
    """Collect a draw; at the end of a window return the new inverse mass (chains, D), else the old one itself."""
    begin, middle, end = (int(part * step_index.warmup) for part in (_BEGIN, _MIDDLE, _END))
    if not begin <= step_index.step < end:
        return spread, inverse_mass
    spread = spread.add(position)
    if (
        step_index.step + 1 in (middle, end)
        and step_index.warmup - step_index.step > _REST
        and float(spread.seen[0]) > 10
    ):
        return MassEstimate.empty(position), spread.variance()
    return spread, inverse_mass


# Dual averaging: a step size per chain, tuned until proposals are accepted as often as wished.
#
# Hoffman and Gelman (2014), section 3.2. Numbers are (chains,), float64.

_FEW = 10  # proposals below which the average means nothing
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75
_SMALLEST, _LARGEST = math.log(1e-9), math.log(1e3)  # a run of rejections must not end in a frozen chain


class Tuner(NamedTuple):
    """State of the tuning.

    Attributes:
        log_step: of the next proposal.
        log_mean: its weighted average, used once tuning has ended.
        shortfall: running mean of (wished - observed) acceptance.
        centre: what log_step is drawn back to.
        seen: proposals seen.
    """

    log_step: Tensor
    log_mean: Tensor
    shortfall: Tensor
    centre: Tensor
    seen: Tensor

    @property
    def settled(self) -> Tensor:
        """The logarithm of the step size that tuning has ended at; after too few proposals, where it began."""
        return torch.where(self.seen >= _FEW, self.log_mean, self.centre)

    @classmethod
    def at(cls, step: Tensor) -> Tuner:
        """Begin at a step size, which is what the search is drawn back to.

        Hoffman and Gelman lean towards ten times larger ones, which a short warm-up does not survive.
        """
        log_step = step.double().log()
        zero = torch.zeros_like(log_step)
        return cls(log_step, log_step, zero, log_step, zero)

    def update(self, acceptance: Tensor, wished: float) -> Tuner:
        """Learn from acceptance probabilities (chains,); a divergence counts as 0."""
        seen = self.seen + 1
        weight = 1 / (seen + _T0)
        shortfall = (1 - weight) * self.shortfall + weight * (wished - acceptance)
        log_step = (self.centre - seen.sqrt() / _GAMMA * shortfall).clamp(_SMALLEST, _LARGEST)
        shortfall = (self.centre - log_step) * _GAMMA / seen.sqrt()  # what lies beyond the clamp is not owed back
        share = seen**-_KAPPA
        return Tuner(log_step, share * log_step + (1 - share) * self.log_mean, shortfall, self.centre, seen)


_TRIAL = 8  # leapfrog steps of a trial: at the mode one step says little
_DIVERGENT = 1000.0  # an energy error beyond this says that the trajectory has left the typical set


class HMCState(NamedTuple):
    """What the next trajectory needs."""

    position: Tensor
    buffers: State
    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    tuner: Tuner
    inverse_mass: Tensor  # (chains, D), or (chains, 1) for the identity
    spread: MassEstimate

    @property
    def evaluation(self) -> DensityEvaluation:
        """The evaluation at the position."""
        return DensityEvaluation(self.gradient, self.log_likelihood, self.log_prior, self.buffers)


@dataclass(frozen=True, eq=False)
class HMCKernel:
    """One trajectory of every chain."""

    target: Target
    method: HMC = HMC()

    def init(self, start: Draws, streams: Streams) -> HMCState:
        """Evaluate the start and find a step size of the right magnitude."""
        position, buffers = start.position, start.buffers
        evaluation = self.target(position, buffers)
        check_start(evaluation, streams.chains)
        inverse_mass = torch.ones_like(position[:, :1])
        if self.method.step is None:
            step = self._first_step(
                Phase(position, torch.zeros_like(position), evaluation), buffers, inverse_mass, streams
            )
        else:
            step = torch.full((len(position),), self.method.step, dtype=torch.float64, device=position.device)
        spread = MassEstimate.empty(position if self.method.mass == "diagonal" else position[:, :0])
        return HMCState(
            position,
            buffers,
            evaluation.gradient,
            evaluation.log_likelihood,
            evaluation.log_prior,
            Tuner.at(step),
            inverse_mass,
            spread,
        )

    def _first_step(self, phase: Phase, buffers: State, inverse_mass: Tensor, streams: Streams) -> Tensor:
        """Double or halve each chain's step until a short trajectory is accepted about as often as wished."""
        noise = streams.gaussian("first step", phase.position)
        before = phase._replace(momentum=noise * self.method.temperature**0.5)
        step = torch.full((len(noise),), 1e-3, dtype=torch.float64, device=noise.device)
        direction = torch.zeros_like(step)
        for _ in range(40):
            after = leapfrog(self.target, buffers, before, step, min(self.method.leapfrog, _TRIAL), inverse_mass)
            change = energy_change(before, after, inverse_mass)
            good = torch.isfinite(change) & (change / self.method.temperature < 0.25)
            turn = torch.where(good, 1.0, -1.0)
            direction = torch.where(direction == 0, turn, direction)
            going = turn == direction
            if not bool(going.any()):
                break
            step = torch.where(going, step * 2.0**direction, step)
        return torch.where(direction > 0, step / 2, step)  # the last doubling went too far

    def step(self, state: HMCState, step_index: StepIndex, streams: Streams) -> tuple[HMCState, Info]:
        """One trajectory and its acceptance; rejected chains stay, with what is known there."""
        step = (state.tuner.log_step if step_index.warming else state.tuner.settled).exp()
        noise = streams.gaussian("momentum", state.position)
        before = Phase(state.position, noise * (self.method.temperature / state.inverse_mass).sqrt(), state.evaluation)
        after = leapfrog(self.target, state.buffers, before, step, self._steps(streams), state.inverse_mass)
        change = energy_change(before, after, state.inverse_mass) / self.method.temperature
        change = torch.where(change.isnan(), torch.inf, change)  # where there is no density, it is zero
        sound = torch.isfinite(change) & after.evaluation.finite
        chance = torch.where(sound, (-change).exp().clamp(max=1.0), 0.0)
        accepted = streams.uniform("accept").to(chance.device) < chance
        energy = before.evaluation.potential + kinetic(before.momentum, state.inverse_mass)
        info = {
            "acceptance": chance,
            "accepted": accepted.double(),
            "energy_change": change,
            "energy": energy,
            "divergent": (~sound | (change > _DIVERGENT)).double(),
            "step_size": step,
        }
        state = self._moved(state, after, accepted)
        return (self._adapted(state, chance, step_index) if step_index.warming else state), info

    def _steps(self, streams: Streams) -> int:
        """The jittered number of leapfrog steps, the same for all chains."""
        place = float(torch.rand((), generator=streams.all("length")))
        return max(1, round(self.method.leapfrog * (1 + self.method.jitter * (2 * place - 1))))

    def _moved(self, state: HMCState, after: Phase, accepted: Tensor) -> HMCState:
        rows = accepted[:, None]
        return state._replace(
            position=torch.where(rows, after.position, state.position),
            gradient=torch.where(rows, after.evaluation.gradient, state.gradient),
            log_likelihood=torch.where(accepted, after.evaluation.log_likelihood, state.log_likelihood),
            log_prior=torch.where(accepted, after.evaluation.log_prior, state.log_prior),
        )

    def _adapted(self, state: HMCState, chance: Tensor, step_index: StepIndex) -> HMCState:
        state = state._replace(tuner=state.tuner.update(chance, self.method.acceptance))
        if self.method.mass == "identity":
            return state
        spread, inverse_mass = mass_update(state.spread, state.position, state.inverse_mass, step_index)
        if inverse_mass is not state.inverse_mass:  # another geometry needs another step size
            state = state._replace(tuner=Tuner.at(state.tuner.log_mean.exp() * _rescale(state, inverse_mass)))
        return state._replace(spread=spread, inverse_mass=inverse_mass)

    def draw(self, state: HMCState, streams: Streams) -> Draws:
        """Where the chains are."""
        return Draws(state.position, state.buffers, state.log_likelihood + state.log_prior)


def _rescale(state: HMCState, inverse_mass: Tensor) -> Tensor:
    """What keeps the typical speed the same when the mass changes, (chains,)."""
    return (state.inverse_mass.mean(1) / inverse_mass.mean(1)).sqrt().double()
