"""From a model and data to a Target: the user's module as a function of one network's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from onebasin.calling import Inputs, call_arguments, global_seed
from onebasin.cluster import settled
from onebasin.errors import InputError
from onebasin.inference.density.layout import Layout, is_frozen
from onebasin.inference.density.likelihood import (
    LogLikelihood,
    Noise,
    bernoulli,
    categorical,
    check_shares,
    choose,
)
from onebasin.inference.density.prior import Prior, Scale
from onebasin.inference.density.target import PIECE, OneNetwork, Outputs, Target
from onebasin.norms import frozen_norms
from onebasin.predict.batches import batches, check_targets, moved
from onebasin.predict.forward import Bound, one_tensor
from onebasin.predict.losses import check_class_numbers
from onebasin.predict.targets import kind_of_targets
from onebasin.state import State, state_of

Data = tuple[Inputs, Tensor] | None
LogDensity = Callable[[Mapping[str, Tensor]], Tensor]


class Density(TypedDict, total=False):
    """What the posterior is, apart from model and data.

    Attributes:
        prior: standard deviation of the Gaussian prior; a dict of them by tensor name or pattern; None for a flat one.
        likelihood: "categorical", "bernoulli", "gaussian" or a function (outputs, targets) -> (examples,).
        noise: standard deviation of gaussian targets, or "learned".
        log_density: a function of one network's parameters that replaces prior and likelihood; then there are no data.
        compile: compile gradients; by default where a C++ compiler is found and the run is long.
        piece: examples in one pass over the whole data.
    """

    prior: Scale
    likelihood: str | LogLikelihood | None
    noise: Noise
    log_density: LogDensity | None
    compile: bool | None
    piece: int


class Called:
    """A copy of the model, called with somebody else's weights; the original is never touched again."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.model = copy.deepcopy(model)
        self.frozen = [module for module in self.model.modules() if is_frozen(module)]  # stay in evaluation mode
        self.model.to(layout.dtype).requires_grad_(False)
        self._train()
        self.constant = frozen_norms(self.model)
        self.model.eval()
        stored = layout.spec
        # Buffers outside of the state dict are part of the function.
        self.fixed = {name: value for name, value in self.model.named_buffers() if name not in stored}

    def __call__(self, sampled: Mapping[str, Tensor], rest: State, call: Any, training: bool) -> tuple[Tensor, State]:
        """The outputs, and the rest as the pass has left it."""
        if training:
            self._train()
        else:
            self.model.eval()
        after = {name: value.clone() for name, value in rest.items()} if training else rest
        weights = {**self.fixed, **self.layout.everything(sampled, after)}
        arguments, options = call
        return one_tensor(
            self.model, functional_call(self.model, weights, arguments, options, tie_weights=False)
        ), after

    def _train(self) -> None:
        """Training mode for all but what is frozen."""
        self.model.train()
        for module in self.frozen:
            module.training = False


def target_of(model: nn.Module, data: Data, **options: Unpack[Density]) -> Target:
    """The posterior of a model's weights given data, or another density over them.

    >>> target = target_of(nn.Linear(2, 1), (torch.zeros(5, 2), torch.zeros(5)), noise=0.5, prior=2.0)
    >>> target(torch.zeros(3, 3), target.rest_of(3)).gradient.shape
    torch.Size([3, 3])
    """
    layout = Layout.of(model)
    custom = options.get("log_density")
    if custom is not None and (data is not None or "prior" in options or "likelihood" in options):
        raise InputError(
            "log_density= is the whole density, but data, prior or likelihood were given too: leave them out, or put "
            "them into the function"
        )
    prior = Prior.of(layout, None if custom is not None else options.get("prior", 1.0))
    rest = layout.rest(model)
    compile_, piece = bool(options.get("compile")), options.get("piece", PIECE)

    if custom is not None or data is None:

        def alone(sampled: Mapping[str, Tensor], own: State, given: Any, training: bool) -> tuple[Tensor, State]:
            if custom is None:
                return sampled[layout.names[0]].new_zeros(1), own
            return custom(sampled).reshape(1), own

        if custom is not None:
            _check_density(custom, {name: value.detach() for name, value in model.named_parameters()})
        return Target(layout, prior, alone, [], None, 0, rest, compile_, piece)

    call, targets = _checked(model, layout, data)
    likelihood = _likelihood(model, data, targets, options.get("likelihood"), options.get("noise"))
    leaves, structure = tree_flatten((call, targets))
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        raise InputError(
            "expected only tensors with one row per example as inputs of the model: bind other arguments with a "
            "wrapper module"
        )
    called = Called(model, layout)
    return Target(
        layout,
        prior,
        judged(called, likelihood),
        settled(leaves),
        structure,
        len(targets),
        rest,
        compile_,
        piece,
        called,
        likelihood,
    )


def judged(called: Outputs, likelihood: LogLikelihood) -> OneNetwork:
    """The log likelihoods of one network, from its outputs."""

    def one(sampled: Mapping[str, Tensor], own: State, given: Any, training: bool) -> tuple[Tensor, State]:
        arguments, goal = given
        outputs, after = called(sampled, own, arguments, training)
        return likelihood(outputs, goal), after

    return one


def _checked(model: nn.Module, layout: Layout, data: tuple[Inputs, Tensor]) -> tuple[Any, Tensor]:
    """Inputs as arguments and targets, on the model's device and in its working dtype."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError(f"expected data as a pair (inputs, targets), found {type(data).__name__}: give (x, y)")
    inputs, targets = data[0], torch.as_tensor(data[1])
    check_targets(inputs, targets)
    call = moved(call_arguments(inputs), layout.device, layout.dtype)
    for leaf in [*tree_flatten(call)[0], targets]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise InputError("expected finite data, found NaN or infinity: leave these examples out")
    kind = layout.dtype if targets.is_floating_point() else torch.int64
    return call, targets.to(device=layout.device, dtype=kind)


def _likelihood(
    model: nn.Module, data: tuple[Inputs, Tensor], targets: Tensor, kind: str | LogLikelihood | None, noise: Noise
) -> LogLikelihood:
    """Choose the likelihood by what the model gives for a few examples; refuse a model without a definite answer."""
    rows, call = next(batches(data[0], 8))
    bound = Bound(model, state_of(model))
    outputs = bound(call)
    with global_seed(1):
        again = bound(call)
        if not torch.allclose(outputs, again, rtol=0, atol=0, equal_nan=True):
            raise InputError(
                f"expected one output for one network, but {type(model).__name__} draws random numbers in evaluation "
                "mode: use nn.Dropout, or dropout with training=self.training"
            )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise InputError(
                f"expected batch norm with running statistics, found {name!r} without: its outputs depend on who else "
                "is in the batch, so that weights alone have no density; use track_running_stats=True"
            )
    if not callable(kind):
        kind = kind_of_targets(targets, kind, noise)
    chosen = choose(kind, noise, outputs, targets[rows].to(outputs.device))
    if chosen is categorical:
        check_class_numbers(targets, outputs.shape[1])
    elif chosen is bernoulli:
        check_shares(targets)
    return chosen


def _check_density(log_density: LogDensity, parameters: State) -> None:
    value = log_density(parameters)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"expected one number, as a tensor, from log_density, found {found}: sum over all weights")
