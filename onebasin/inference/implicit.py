"""Implicit ensembles: several networks that share most of their numbers, trained at once, drawn one by one.

A member map makes M networks theta_1 ... theta_M of the user's module out of few numbers phi. What is trained is

    U(phi) = - (1 / M) sum_m sum_i log p(y_i | x_i, theta_m(phi)) - log p(phi) + penalty(phi),

by the same training as that of an ensemble, one phi per chain; a draw is one of the M networks. So nothing new is
stored or sampled: draws are ordinary networks of the module, and `chain` says which training they come from.

The likelihood is the mean over members: phi as a whole sees each example once, and the prior counts against it as it
does for one network. The prior acts on what the members share, on what each has for itself (a bias of its own) with the
share 1 / M, as its likelihood has, and is flat on what only multiplies shared weights. Members have running statistics
of batch norms of their own, as if each were trained for itself.

Random numbers that a step of training needs (`noise`) are drawn by named streams and given to the target among the
buffers: the target stays a function, so that it may be compiled, and chains do not depend on each other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from onebasin.errors import InputError
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Minibatches, ParameterLayout, Prior, Target
from onebasin.inference.training import Optimizer, Trained, TrainedMethod, Training
from onebasin.state import Spec, State, TensorSpec

_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)  # vmap refuses in many ways


@dataclass(frozen=True)
class MemberTensor:
    """One tensor of phi.

    Attributes:
        shape: its shape; with the members on the first axis where each has its own.
        own: whether each member has its own.
        of: name of the sampled tensor whose prior it has; None for a flat prior.
        share: what the precision of that prior is multiplied by.
    """

    shape: tuple[int, ...]
    own: bool = False
    of: str | None = None
    share: float = 1.0


class Unrolled(NamedTuple):
    """The members of one phi.

    Attributes:
        sampled: every sampled tensor of the module: (M, *shape) where members differ, else (*shape).
        penalty: what is added to the potential, (); None for nothing.
    """

    sampled: State
    penalty: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class MemberMap(ABC):
    """A map from few numbers phi to M networks; a method says in `tensors`, `initial` and `unroll` which.

    Attributes:
        target: the posterior of one network.
        members: M.
        tensors: the tensors of phi by name; what all members share has the name that it has in the module.
    """

    target: Target
    members: int
    tensors: dict[str, MemberTensor] = field(default_factory=dict)
    _looped: bool = False

    @abstractmethod
    def initial(self, shared: State, streams: Streams) -> tuple[State, State]:
        """Phi and constants, each (chains, ...), for start networks whose sampled tensors are `shared` (chains, ...).

        Constants are fixed numbers of a chain that are stored with its state, one per member (chains, M, ...).
        """

    @abstractmethod
    def unroll(self, phi: State, beside: State) -> Unrolled:
        """The members of one chain; `beside` holds constants and, in training, noise. Works for any number of them."""

    def noise(self, streams: Streams, examples: int) -> State:
        """The random numbers (chains, ...) of one step of training with so many examples."""
        return {}

    def latent(self, streams: Streams) -> State:
        """The random numbers (chains, 1, ...) of one draw."""
        return {}

    @property
    def layout(self) -> ParameterLayout:
        """The layout of phi."""
        base = self.target.layout
        spec: Spec = {name: TensorSpec(one.shape, base.dtype) for name, one in self.tensors.items()}
        return ParameterLayout(tuple(spec), spec, {}, base.dtype, base.device)

    @property
    def prior(self) -> Prior:
        """The prior of phi."""
        precision = self.target.layout.split(self.target.prior.precision)
        zero, parts, constant = self.target.prior.precision.new_zeros(()), [], 0.0
        for one in self.tensors.values():
            own = (zero if one.of is None else precision[one.of]).expand(one.shape)
            parts.append(one.share * own.reshape(-1))
            proper = own[own > 0].double()
            constant += 0.5 * one.share * float((proper / (2 * math.pi)).log().sum())
        return Prior(torch.cat(parts), constant)

    @cached_property
    def statistics(self) -> set[str]:
        """Names of the buffers that training may change, of which each member has its own; others are constants."""
        assert self.target.outputs is not None  # there are data
        frozen = dict(self.target.outputs.model.named_parameters(remove_duplicate=False))
        return self.target.buffers.keys() - frozen.keys()

    def derived(self) -> Target:
        """The density of phi as a target, which is trained as any other."""
        return replace(
            self.target,
            layout=self.layout,
            prior=self.prior,
            one=self.one,
            buffers={},  # those of a chain are made by the kernel
            _functions={},
        )

    def one(self, phi: Mapping[str, Tensor], buffers: State, given: Any, training: bool) -> tuple[Tensor, State]:
        """Mean over members of the log likelihood of each example (n,), less its share of the penalty."""
        with torch.autocast(self.target.layout.device.type, enabled=False):  # weights and penalty keep their digits
            unrolled = self.unroll(dict(phi), buffers)
        values, after = self.passed(unrolled.sampled, buffers, given, training)
        value = values.mean(0)
        if unrolled.penalty is not None:
            value = value - unrolled.penalty / self.target.examples
        return value, {**buffers, **after}

    def passed(self, sampled: State, buffers: State, given: Any, training: bool) -> tuple[Tensor, State]:
        """Log likelihoods (M, n) of the members, and their statistics (M, ...) after the pass."""
        shapes = dict(zip(self.target.layout.names, self.target.layout.shapes, strict=True))
        differ = {name: value for name, value in sampled.items() if value.dim() > len(shapes[name])}
        statistics = {name: buffers[name] for name in self.target.buffers if name in self.statistics}
        fixed = {name: buffers[name] for name in self.target.buffers if name not in statistics}

        def member(weights: State, own: State) -> tuple[Tensor, State]:
            values, after = self.target.one({**sampled, **weights}, {**own, **fixed}, given, training)
            return values, {name: after[name] for name in own}

        return self.each(member, differ, statistics)

    def each(
        self, member: Callable[[State, State], tuple[Tensor, State]], weights: State, own: State
    ) -> tuple[Tensor, State]:
        """A function of one member's tensors for all members: in one pass where vmap can, else one after the other."""
        if not self._looped:
            try:
                return vmap(member, randomness="different")(weights, own)
            except _REFUSALS:
                self._looped = True
        results = [
            member(*({name: value[number] for name, value in part.items()} for part in (weights, own)))
            for number in range(self.members)
        ]
        after = {name: torch.stack([state[name] for _, state in results]) for name in results[0][1]}
        return torch.stack([values for values, _ in results]), after

    def member(self, phi: State, buffers: State, number: int, latent: State) -> tuple[Tensor, State]:
        """Member `number` of every chain: its position (chains, D) and its buffers (chains, ...)."""
        row = slice(number, number + 1)
        own = {name: value[:, row] if self.tensors[name].own else value for name, value in phi.items()}
        beside = {name: value[:, row] for name, value in buffers.items() if name not in self.target.buffers}
        shapes = dict(zip(self.target.layout.names, self.target.layout.shapes, strict=True))
        sampled = vmap(lambda *parts: self.unroll(*parts).sampled)(own, {**beside, **latent})
        networks = {name: value.reshape(len(value), *shapes[name]) for name, value in sampled.items()}
        statistics = self.statistics
        kept = {name: buffers[name][:, number] if name in statistics else buffers[name] for name in self.target.buffers}
        return self.target.layout.join(networks), kept


class MemberState(NamedTuple):
    """State of the training of phi, and how many members were asked for since."""

    position: Tensor  # phi (chains, P)
    buffers: State  # statistics (chains, M, ...), frozen parameters (chains, ...), constants (chains, M, ...)
    first: Tensor
    second: Tensor
    turn: Tensor  # int64 (chains,)


@dataclass(frozen=True, eq=False)
class MemberKernel:
    """Training of phi; after it, each step turns to the next member, which is drawn.

    Attributes:
        map: from phi to members.
        training: makes the steps on phi.
    """

    map: MemberMap
    training: Training

    @property
    def optimizer(self) -> Optimizer:
        """That of training."""
        return self.training.optimizer

    @property
    def minibatches(self) -> Minibatches:
        """Those of training."""
        return self.training.minibatches

    def init(self, start: Draws, streams: Streams) -> MemberState:
        """Phi of the start networks, before the first member."""
        shared = self.map.target.layout.split(start.position)
        phi, constants = self.map.initial(shared, streams)
        statistics, members = self.map.statistics, self.map.members
        buffers = {
            name: value[:, None].repeat(1, members, *[1] * (value.dim() - 1)) if name in statistics else value
            for name, value in start.buffers.items()
        }
        position = self.training.target.layout.join(phi)
        trained = self.training.init(Draws(position, {**buffers, **constants}, start.log_density), streams)
        return MemberState(*trained, torch.zeros(len(position), dtype=torch.int64, device=position.device))

    def step(self, state: MemberState, step_index: StepIndex, streams: Streams) -> tuple[MemberState, Info]:
        """One step on phi; after training, one step to the next member."""
        if not step_index.warming:
            return state._replace(turn=state.turn + 1), {}
        examples = self.minibatches.size or self.minibatches.examples
        noise = self.map.noise(streams, examples)
        before = Trained(state.position, {**state.buffers, **noise}, state.first, state.second)
        after, info = self.training.step(before, step_index, streams)
        kept = {name: value for name, value in after.buffers.items() if name not in noise}
        return MemberState(after.position, kept, after.first, after.second, state.turn), info

    def ending(self, state: MemberState) -> Info:
        """Loss U / N of phi and the norm of its gradient on the whole data, in evaluation mode; not worth compiling."""
        eager = replace(self.training, target=replace(self.training.target, compile=False, _functions={}))
        return eager.ending(Trained(state.position, state.buffers, state.first, state.second))

    def draw(self, state: MemberState, streams: Streams) -> Draws:
        """The member whose turn it is, of every chain, with its log density as a network."""
        number = (int(state.turn[0]) - 1) % self.map.members
        phi = self.training.target.layout.split(state.position)
        position, buffers = self.map.member(phi, state.buffers, number, self.map.latent(streams))
        return Draws(position, buffers, self.map.target.log_density(position, buffers))


def member_plan(method: TrainedMethod, members: MemberMap, draws: int) -> ChainPlan:
    """The plan of an implicit ensemble: training of phi, then member after member."""
    stage = method.training(members.derived(), optimum=True)
    assert isinstance(stage.kernel, Training)
    kernel = MemberKernel(members, stage.kernel)
    return ChainPlan((Stage(stage.name, kernel, stage.steps, optimum=True),), draws, (1,), gradients=members.members)


def check_members(members: int, **counts: int | None) -> None:
    """Raise unless there are at least two members, and at least one of everything else."""
    check_counts(1, **counts)
    if isinstance(members, bool) or not isinstance(members, int) or members < 2:
        raise InputError(
            f"expected members to be a whole number from 2 on, found {members!r}: give members=4, or "
            "onebasin.Ensemble() for one network"
        )
