"""The posterior as a function of flat positions: potential and gradient of many chains at once.

    U(theta) = - sum_i log p(y_i | x_i, theta) - log p(theta)

Chains are a tensor axis: positions are (chains, D). A mini-batch of n out of N examples estimates the first sum by
N / n times its own. Sums over examples and weights are kept in float64, log likelihood and log prior apart, so that
energy differences are exact enough to accept or reject by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_unflatten

from onebasin.calling import global_seed
from onebasin.errors import InputError
from onebasin.inference.density.compiling import Function, compiled
from onebasin.inference.density.layout import Layout
from onebasin.inference.density.likelihood import LogLikelihood
from onebasin.inference.density.prior import Prior
from onebasin.inference.seeds import derived
from onebasin.predict.batches import batches
from onebasin.state import State

PIECE = 4096  # examples in one pass over the whole data; bounds the memory of activations


class Evaluation(NamedTuple):
    """What one pass over the data (or a mini-batch) tells about every chain.

    Attributes:
        gradient: dU/dtheta (chains, D).
        log_likelihood: of the whole data, or its estimate from the mini-batch; float64 (chains,).
        log_prior: float64 (chains,).
        rest: what is carried beside the weights; new running statistics after a pass in training mode.
    """

    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    rest: State

    @property
    def potential(self) -> Tensor:
        """U, float64 (chains,)."""
        return -(self.log_likelihood + self.log_prior)

    @property
    def finite(self) -> Tensor:
        """Whether potential and gradient are numbers, (chains,)."""
        return torch.isfinite(self.gradient).all(1) & torch.isfinite(self.potential)


# What is known of a single network, without a chain axis: (sampled weights, rest, data, training mode) -> log
# likelihoods (n,) of the examples in `data`, and the rest after the pass.
OneNetwork = Callable[[Mapping[str, Tensor], State, Any, bool], tuple[Tensor, State]]


class Outputs(Protocol):
    """The model as a function of one network's weights, for those who look inside: curvature, activations.

    Attributes:
        model: the module that is called; hooks may be put on it and must be taken off again.
        constant: names of running means that training does not touch.
    """

    model: nn.Module
    constant: frozenset[str]

    def __call__(self, sampled: Mapping[str, Tensor], rest: State, call: Any, training: bool) -> tuple[Tensor, State]:
        """The outputs (n, ...), and the rest as the pass has left it."""


class Mode(NamedTuple):
    """How a pass is made.

    Attributes:
        own: every chain has a mini-batch of its own.
        prior: whether the prior is added; once in several pieces.
        training: the model's training mode.
        factor: N / n.
    """

    own: bool
    prior: bool
    training: bool
    factor: float


class Ready(NamedTuple):
    """A pass for certain shapes; what is compiled draws no random numbers."""

    function: Function
    compiled: bool


@dataclass(eq=False)
class Target:
    """The density exp(-U(theta)) that is to be sampled.

    Attributes:
        layout: where the weights lie.
        prior: the Gaussian prior.
        one: what is known of a single network.
        leaves: the tensors of inputs and targets, examples on the first axis; empty without data.
        structure: how `data` for `one` is made of the leaves.
        examples: N.
        rest: what a network carries beside its sampled weights.
        compile: whether gradients are compiled.
        piece: examples in one pass over the whole data.
        outputs: the model's outputs for the arguments in `data`; None without data.
        likelihood: the log probability of the targets in `data` given these outputs; None without data.
    """

    layout: Layout
    prior: Prior
    one: OneNetwork
    leaves: list[Tensor]
    structure: Any
    examples: int
    rest: State
    compile: bool = False
    piece: int = PIECE
    outputs: Outputs | None = None
    likelihood: LogLikelihood | None = None
    _made: dict[tuple[Any, ...], Ready] = field(default_factory=dict)

    def rest_of(self, chains: int) -> State:
        """The model's own rest, once per chain (chains, ...)."""
        return {name: value.expand(chains, *value.shape).clone() for name, value in self.rest.items()}

    def __call__(
        self, position: Tensor, rest: State, rows: Tensor | None = None, *, training: bool = False, seed: int = 0
    ) -> Evaluation:
        """Potential and gradient at positions (chains, D).

        Args:
            position: the weights.
            rest: what each chain carries beside them (chains, ...).
            rows: None for the whole data; indices (n,) of a mini-batch shared by all chains, or (chains, n).
            training: run the model in training mode: batch statistics are used and running ones updated, dropout drops.
            seed: of the model's own random numbers in training mode.
        """
        with torch.no_grad():
            if rows is not None:
                taken, factor = [leaf[rows] for leaf in self.leaves], self.examples / rows.shape[-1]
                return self._pass(position, rest, taken, Mode(rows.dim() == 2, True, training, factor), seed)
            if self.examples <= self.piece:
                return self._pass(position, rest, self.leaves, Mode(False, True, training, 1.0), seed)
            return self._pieces(position, rest, training, seed)

    def log_density(self, position: Tensor, rest: State) -> Tensor:
        """Log likelihood of the whole data + log prior, in evaluation mode, float64 (chains,)."""
        return -self(position, rest).potential

    def _pieces(self, position: Tensor, rest: State, training: bool, seed: int) -> Evaluation:
        """The whole data, piece by piece; gradients and log likelihoods add up."""
        total: Evaluation | None = None
        for number, (rows, _) in enumerate(batches(tuple(self.leaves), self.piece)):
            taken = [leaf[rows] for leaf in self.leaves]
            mode = Mode(False, total is None, training, 1.0)
            found = self._pass(position, rest, taken, mode, derived(seed, "piece", number))
            rest = found.rest
            if total is not None:
                likelihood = total.log_likelihood + found.log_likelihood
                found = Evaluation(total.gradient + found.gradient, likelihood, total.log_prior, rest)
            total = found
        assert total is not None  # there are leaves
        return total

    def _pass(self, position: Tensor, rest: State, taken: list[Tensor], mode: Mode, seed: int) -> Evaluation:
        arguments = [position, *rest.values(), *taken]
        key = (mode, *(tensor.shape for tensor in arguments))
        if key not in self._made:
            self._made[key] = self._ready(list(rest), arguments, mode)
        ready = self._made[key]
        with global_seed(seed) if mode.training and not ready.compiled else nullcontext():
            gradient, likelihood, prior, *changed = ready.function(*arguments)
        after = dict(zip(rest, changed, strict=True)) if mode.training else rest
        return Evaluation(gradient, likelihood, prior, after)

    def _ready(self, names: Sequence[str], arguments: list[Tensor], mode: Mode) -> Ready:
        made = self._vectorised(names, mode)
        with global_seed(0):  # trials must not move the generator
            try:
                made(*arguments)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:  # vmap refuses in many ways
                raise InputError(
                    f"the model could not be computed for {len(arguments[0])} chains at once ({type(error).__name__}: "
                    f"{error}): it must work under torch.func.functional_call and vmap, in "
                    f"{'training' if mode.training else 'evaluation'} mode with {_examples(arguments, mode)}"
                ) from error
            fast = compiled(made, arguments) if self.compile else None
        return Ready(fast or made, fast is not None)

    def _vectorised(self, names: Sequence[str], mode: Mode) -> Function:
        """All chains in one pass, as a function of flat tensors."""
        layout, prior = self.layout, self.prior

        def negative(sampled: State, rest: State, data: list[Tensor]) -> tuple[Tensor, tuple[Tensor, State]]:
            given = tree_unflatten(data, self.structure) if data else None
            values, after = self.one(sampled, rest, given, mode.training)
            return -mode.factor * values.sum(), (mode.factor * values.detach().double().sum(), after)

        axes = (0, 0, 0 if mode.own else None)
        several = vmap(grad(negative, has_aux=True), in_dims=axes, randomness="different")

        def function(position: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            rest = dict(zip(names, others[: len(names)], strict=True))
            with warnings.catch_warnings():
                # An operation without a batching rule is looped over by torch, which then warns that this is slow.
                warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
                slopes, (likelihood, after) = several(layout.split(position), rest, list(others[len(names) :]))
            gradient = torch.cat([slopes[name].reshape(len(position), -1) for name in layout.names], dim=1)
            before = torch.zeros_like(likelihood)
            if mode.prior:
                gradient = gradient + prior.precision * position
                before = prior.log_density(position)
            return (gradient, likelihood, before, *([after[name] for name in names] if mode.training else []))

        return function


def _examples(arguments: list[Tensor], mode: Mode) -> str:
    """How many examples a pass sees, for messages."""
    count = arguments[-1].shape[1 if mode.own else 0] if len(arguments) > 1 and arguments[-1].dim() else 0
    return f"{count} examples"
