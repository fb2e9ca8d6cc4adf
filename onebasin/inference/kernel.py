"""The protocol of inference methods: a Method plans stages of kernels; a kernel steps many chains at once.

A method is any object with a `name` and `plan(target) -> ChainPlan`; those of onebasin are frozen dataclasses, one per
file in `methods/`. A kernel is `init`, `step` and `draw`. Its State is what the next step needs: a NamedTuple of
tensors with the chains on the first axis (or of dicts of such tensors, or further NamedTuples), so that every run can
be stored and continued. Its Info is what diagnostics need, one number per chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, get_args, get_type_hints

from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.seeds import Streams
from onebasin.state import State

if TYPE_CHECKING:
    from onebasin.inference.target import Target

Info = Mapping[str, Tensor]  # name -> float64 (chains,)


class Draws(NamedTuple):
    """One network per chain: where a kernel starts, and what is drawn from it.

    Attributes:
        position: the sampled weights (chains, D).
        buffers: the other tensors of each network: buffers and frozen parameters (chains, ...).
        log_density: log likelihood + log prior, float64 (chains,); NaN where it has not been computed.
    """

    position: Tensor
    buffers: State
    log_density: Tensor


class StepIndex(NamedTuple):
    """Which step of a stage is made.

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


S = TypeVar("S")  # the State


class Kernel(Protocol[S]):
    """The steps of a method, for many chains at once.

    Two methods are optional, for kernels that fit a Gaussian to the posterior of each chain: `components(state)`, the
    list of these Gaussians, which `approximate` returns, and `summary(state)`, Info about the fit.
    """

    def init(self, start: Draws, streams: Streams) -> S:
        """The State at the start."""

    def step(self, state: S, step_index: StepIndex, streams: Streams) -> tuple[S, Info]:
        """One step of every chain."""

    def draw(self, state: S, streams: Streams) -> Draws:
        """The networks that the State stands for; `streams` are those of the draw."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A kernel and the number of steps before the next stage starts, or before the first draw.

    Attributes:
        name: for progress, and part of the names of random streams.
        kernel: makes the steps.
        steps: how many.
        optimum: whether the result depends on the stage ending in an optimum: then the trend of the loss is judged
            (`onebasin.inference.diagnostics`). Such a kernel has an `optimizer`, `minibatches`, a "loss" in its Info,
            and `ending(state)`, the Info of its last State.
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
        gradients: gradients of one chain in one step of the last stage, for the speed that is shown.
    """

    stages: tuple[Stage, ...]
    draws: int
    thin: tuple[int, ...]
    gradients: int = 1

    @property
    def total_gradients(self) -> int:
        """Gradients of one chain in the whole run."""
        rounds, part = divmod(self.draws, len(self.thin))
        last = self.stages[-1].steps + rounds * sum(self.thin) + sum(self.thin[:part])
        return sum(stage.steps for stage in self.stages[:-1]) + last * self.gradients


class Method(Protocol):
    """How networks are inferred: the argument `method` of `sample` and `approximate`.

    A run on disk is compared with the fields of the method before it is continued: those of a dataclass, the
    attributes of any other object. One called `draws` may grow.
    """

    @property
    def name(self) -> str:
        """Stored with the draws, and the word that stands for the method with its defaults."""

    def plan(self, target: Target) -> ChainPlan:
        """The stages for this posterior."""


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}


def check_kind(hint: Any, name: str, value: object) -> None:
    """Raise where an option is a word but its annotation wants a number, and so on; other types are left alone."""
    kinds = {hint, *get_args(hint)} & _KINDS.keys()
    if type(value) in _KINDS and type(value) not in kinds and not (type(value) is int and float in kinds):
        wanted = " or ".join(word for kind, word in _KINDS.items() if kind in kinds)
        raise InputError(f"expected {wanted} for {name}, found {value!r}: give such a value")


def check_kinds(method: object) -> None:
    """Raise where a field of a dataclass has a value of another kind than its annotation."""
    for name, hint in get_type_hints(type(method)).items():
        if hasattr(method, name):
            check_kind(hint, name, getattr(method, name))


def check_counts(least: int, **counts: int | None) -> None:
    """Raise where a number is not whole or below `least`; None is left alone."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise InputError(
                f"expected {name} to be a whole number from {least} on, found {value!r}: give {name}={max(1, least)}"
            )
