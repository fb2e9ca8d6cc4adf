"""An own problem for `onebasin reproduce`: a CNN with a width, data, and a sampling method of one's own.

onebasin reproduce symmetry --model examples/own_problem.py:cnn --data examples/own_problem.py:images \
    --method examples/own_problem.py:Langevin
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onebasin.data import digits
from onebasin.inference import ChainPlan, Draws, Info, Stage, StepIndex, Streams, Target


def cnn(width: int = 4) -> nn.Module:
    """Build a small convolutional network for 8x8 images; `width` channels, then twice as many."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def images() -> tuple[Tensor, Tensor]:
    """Return the embedded digits as images (1797, 1, 8, 8), and their classes."""
    inputs, classes = digits()
    return inputs.reshape(-1, 1, 8, 8), classes


def example_input() -> Tensor:
    """Make one batch that runs through the network."""
    return torch.randn(2, 1, 8, 8)


@dataclass(frozen=True, kw_only=True)
class Langevin:
    """Langevin steps on all training examples: half a step downhill, and noise of the variance of the step."""

    name = "Langevin"
    draws: int = 100
    warmup: int = 100
    thin: int = 10
    size: float = 1e-4

    def plan(self, target: Target) -> ChainPlan:
        """Plan the warm-up, and `thin` steps before each draw."""
        stage = Stage("Langevin", LangevinSteps(target, self.size), self.warmup)
        return ChainPlan((stage,), self.draws, (self.thin,))


@dataclass(frozen=True, eq=False)
class LangevinSteps:
    """The steps of many chains at once; the networks of the chains are the whole state."""

    target: Target
    size: float

    def init(self, start: Draws, streams: Streams) -> Draws:
        """Start where the chains are."""
        return start

    def step(self, state: Draws, step_index: StepIndex, streams: Streams) -> tuple[Draws, Info]:
        """Move every chain."""
        here = self.target(state.position, state.buffers)
        noise = streams.gaussian("noise", state.position)
        position = state.position - 0.5 * self.size * here.gradient + self.size**0.5 * noise
        return Draws(position, state.buffers, -here.potential), {"potential": here.potential}

    def draw(self, state: Draws, streams: Streams) -> Draws:
        """Give the networks of the chains."""
        return state
