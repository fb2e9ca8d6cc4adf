"""What a method is made of: kernels that step, stages that follow each other, and draws at the end.

A kernel is `init` and `step`. Its State is what the next step needs, all of it tensors with the chains on the first
axis, so that any run can be stored and continued; its Info is what a diagnostician wants to know, one number per chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from onebasin.inference.seeds import Streams
from onebasin.state import State

Info = Mapping[str, Tensor]  # name -> float64 (chains,)


class Draws(NamedTuple):
    """One network per chain: where a kernel starts, and what is drawn from it.

    Attributes:
        position: the sampled weights (chains, D).
        rest: what each network carries beside them (chains, ...).
        log_density: log likelihood + log prior, float64 (chains,); NaN where nobody has computed it.
    """

    position: Tensor
    rest: State
    log_density: Tensor


class StepIndex(NamedTuple):
    """When a step is made.

    Attributes:
        step: steps of this stage before this one.
        warmup: steps of this stage before the first draw, in which a kernel may adapt.
    """

    step: int
    warmup: int

    @property
    def warming(self) -> bool:
        """Whether the kernel may still adapt."""
        return self.step < self.warmup


S = TypeVar("S")  # a NamedTuple of tensors and dicts of tensors, chains on the first axis


class Kernel(Protocol[S]):
    """One method, for many chains at once."""

    def init(self, start: Draws, streams: Streams) -> S:
        """The State at the start."""

    def step(self, state: S, moment: StepIndex, streams: Streams) -> tuple[S, Info]:
        """One step of every chain."""

    def draw(self, state: S, streams: Streams) -> Draws:
        """The networks that the State stands for; `streams` are those of the draw."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A kernel and the number of steps before the next stage starts, or before the first draw.

    Attributes:
        name: for people.
        kernel: makes the steps.
        steps: how many.
        optimum: whether the end should be an optimum, as the result depends on it: then the trend of the loss is
            judged (`onebasin.inference.convergence`). Such a kernel has an `optimiser`, a "loss" in its Info, and
            `ending`, the Info of its last State.
    """

    name: str
    kernel: Kernel[Any]
    steps: int
    optimum: bool = False


@dataclass(frozen=True, eq=False)
class ChainPlan:
    """What a run does: the stages in turn, each from where the one before ended; then draws from the last.

    Attributes:
        stages: at least one.
        draws: networks to be drawn from each chain.
        thin: steps of the last stage before each draw, a pattern that repeats; (0,) where the kernel draws afresh.
        gradients: gradients of one chain in one step of the last stage, for the rate that is shown.
    """

    stages: tuple[Stage, ...]
    draws: int
    thin: tuple[int, ...]
    gradients: int = 1
