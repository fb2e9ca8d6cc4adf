"""Hamiltonian dynamics: the leapfrog integrator, reversible and volume preserving.

H(theta, p) = U(theta) + 1/2 sum_i p_i^2 / m_i
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.inference.density.target import Evaluation, Target
from onebasin.state import State


class Phase(NamedTuple):
    """A point of phase space for every chain, with what is known of the potential there."""

    position: Tensor  # (chains, D)
    momentum: Tensor  # (chains, D)
    found: Evaluation


def leapfrog(target: Target, rest: State, phase: Phase, step: Tensor, steps: int, inverse_mass: Tensor) -> Phase:
    """Follow the dynamics for `steps` steps of size `step` (chains,); `steps` + 0 gradients, the first is known.

    Args:
        target: the potential.
        rest: what each chain carries beside its weights.
        phase: where to start.
        step: step size of each chain; a negative one goes back in time.
        steps: number of steps.
        inverse_mass: 1 / m, (D,) or (chains, D).
    """
    size = step.to(phase.position)[:, None]
    drift = size * inverse_mass
    position, found = phase.position, phase.found
    momentum = phase.momentum - 0.5 * size * found.gradient
    for count in range(steps):
        position = torch.addcmul(position, drift, momentum)
        found = target(position, rest)
        momentum = torch.addcmul(momentum, size if count + 1 < steps else 0.5 * size, found.gradient, value=-1)
    return Phase(position, momentum, found)


def kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """1/2 sum_i p_i^2 / m_i in float64 (chains,)."""
    return 0.5 * (momentum.double().square() * inverse_mass.double()).sum(-1)


def energy_change(before: Phase, after: Phase, inverse_mass: Tensor) -> Tensor:
    """H(after) - H(before), float64 (chains,); likelihood, prior and kinetic parts are subtracted apart."""
    likelihood = before.found.log_likelihood - after.found.log_likelihood
    prior = before.found.log_prior - after.found.log_prior
    motion = kinetic(after.momentum, inverse_mass) - kinetic(before.momentum, inverse_mass)
    return likelihood + prior + motion
