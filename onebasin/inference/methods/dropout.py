"""Monte Carlo dropout as draws of networks: after training with dropout, a draw drops units once and for all.

A draw multiplies the columns of dropped units by zero and those of kept ones by 1 / (1 - p), so it is a network like
any other, used in evaluation mode (Gal and Ghahramani, 2016). The same units are dropped for all examples, where
dropout at training time drops others for each.

A mask m on the inputs of a layer is the same as weights whose columns are multiplied: W (m x) = (W diag(m)) x. The mask
may also act earlier, if nothing but positively homogeneous steps (relu, pooling, flattening) lies between. Whether that
is so is not read from the code but proved: with random weights, in float64, on training inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from onebasin.errors import InputError
from onebasin.functional import Call, moved, random_twin
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.layers import WEIGHTED, by_layer, columns, few, input_units, ran, sampled_weight
from onebasin.inference.seeds import Streams, generator
from onebasin.inference.target import Outputs, Target, judged
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CLOSE = 1e-9  # of the outputs' largest entry: float64 leaves room for the order of sums only


_KINDS = (_DropoutNd, *WEIGHTED)
Dropping = float | Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Dropout(TrainedMethod):
    """Monte Carlo dropout as draws of networks: after training with dropout, a draw drops units once and for all.

    Attributes:
        draws: networks drawn from each training.
        dropout: for models without dropout layers: the probability to drop an input unit of every linear and
            convolution layer but the first, or a dict of probabilities by layer name or pattern; None for 0.1.
            Convolutions drop whole channels.
    """

    name: ClassVar[str] = "dropout"
    draws: int = 10
    dropout: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws)

    def plan(self, target: Target) -> ChainPlan:
        """Train with dropout, then draw masks."""
        if target.outputs is None:
            raise InputError("dropout needs data to train on, found none: give data=(inputs, targets)")
        model, call = target.outputs.model, few(target)
        places = own_places(model, call)
        if places and self.dropout is not None:
            raise InputError(
                f"{type(model).__name__} has dropout layers of its own ({places[0].module}), and dropout= was given "
                "too: leave one of them out"
            )
        trained = target
        if not places:
            _check_other_randomness(target)
            places = new_places(model, call, 0.1 if self.dropout is None else self.dropout)
            trained = dropping(target, target.outputs, places)
        for place in places:
            sampled_weight(target.layout, place.layer, "dropout")
        prove(model, places, call, generator(0, "dropout", "proof"))
        kernel = DropoutKernel(target, target.outputs, tuple(places))
        stages = (self.training(trained, optimum=True), Stage("dropout", kernel, 0))
        return ChainPlan(stages, self.draws, (0,))


@dataclass(frozen=True)
class MaskPlace:
    """One place where units are dropped.

    Attributes:
        module: name of the module whose outputs (a dropout layer) or inputs (any other) are masked.
        layer: name of the layer whose columns are multiplied instead.
        rate: probability that a unit is dropped.
        shape: of the mask, as it multiplies one example.
    """

    module: str
    layer: str
    rate: float
    shape: tuple[int, ...]

    @property
    def units(self) -> int:
        """Number of units that are dropped or kept."""
        return math.prod(self.shape)

    def mask(self, generator: torch.Generator) -> Tensor:
        """One mask (units,): 0 with probability `rate`, else 1 / (1 - rate); float64."""
        kept = torch.rand(self.units, generator=generator, dtype=torch.float64) >= self.rate
        return kept.double() / (1 - self.rate)


def own_places(model: nn.Module, call: Call) -> list[MaskPlace]:
    """The places of the model's own dropout layers, each with the linear or convolution layer that runs next."""
    places = []
    order = list(ran(model, call, _KINDS))
    for index, (name, module, shape) in enumerate(order):
        if not isinstance(module, _DropoutNd) or not module.p:
            continue
        if not isinstance(module, (nn.Dropout, *_CHANNELS)) or module.p >= 1:
            raise _impossible(name, f"it is {type(module).__name__} with p={module.p}")
        if sum(other is module for _, other, _ in order) > 1:
            raise _impossible(name, "it runs more than once")
        following = [other for other, layer, _ in order[index + 1 :] if not isinstance(layer, _DropoutNd)]
        if not following:
            raise _impossible(name, "no linear or convolution layer runs after it")
        own = shape[1:] if isinstance(module, nn.Dropout) else (shape[1], *[1] * (len(shape) - 2))
        places.append(MaskPlace(name, following[0], module.p, own))
    return places


def new_places(model: nn.Module, call: Call, rates: Dropping) -> list[MaskPlace]:
    """Places before linear and convolution layers: before all but the first, or those that names or patterns choose."""
    layers = {name: module for name, module, _ in ran(model, call)}
    for key, rate in (rates if isinstance(rates, Mapping) else {"*": rates}).items():
        if not 0 <= rate < 1:
            raise InputError(f"expected a dropout rate from 0 to below 1, found {rate} for {key!r}: give such a number")
    chosen = by_layer(list(layers), rates, "dropout", "rate")
    return [MaskPlace(name, name, rate, mask_shape(layers[name])) for name, rate in chosen.items() if rate]


def prove(
    model: nn.Module, places: list[MaskPlace], call: Call, generator: torch.Generator, option: str = "dropout"
) -> None:
    """Raise `InputError` unless masked units and multiplied columns give the same outputs at every place.

    The identity is shown for random weights and statistics, so it holds whatever training makes of them, and for
    several places at once. `option` is the one that chooses layers.
    """
    wide = random_twin(model, generator)
    device = next(wide.parameters()).device
    arguments, options = moved(call, device, torch.float64)
    for place in places:
        mask = replace(place, rate=0.5).mask(generator).to(device)
        mask[0], mask[-1] = 2.0, 0.0  # something is kept, and something dropped
        layer = wide.get_submodule(place.layer)
        factor = columns(layer, mask)
        if factor is None:
            reason = f"it drops {place.units} units of shape {place.shape}, which are not the inputs of {place.layer}"
            raise _impossible(place.module, reason)
        with torch.no_grad():
            with _masked(wide, place, mask):
                expected = wide(*arguments, **options)
            weight = layer.get_parameter("weight")
            before = weight.clone()
            weight.mul_(factor)
            found = wide(*arguments, **options)
            weight.copy_(before)
        if not bool((found - expected).abs().max() <= _CLOSE * expected.abs().max()):
            if place.module == place.layer:
                raise InputError(
                    f"expected layers that are the only users of their weights, found {place.layer}, whose weights "
                    f"also act elsewhere: give {option}= as a dict of the other layers"
                )
            raise _impossible(place.module, f"what lies between it and {place.layer} does not pass a mask on unchanged")


def training_hook(place: MaskPlace) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A forward pre-hook that drops inputs of a layer in training mode, each example with a mask of its own."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not module.training:
            return arguments
        inputs = arguments[0]
        between = [1] * (inputs.dim() - 1 - len(place.shape))
        ones = inputs.new_ones(len(inputs), *between, *place.shape)
        return (inputs * nn.functional.dropout(ones, place.rate), *arguments[1:])

    return hook


def mask_shape(layer: nn.Module) -> tuple[int, ...]:
    """Shape of a mask on the inputs of one example: features on the last axis, channels on the first."""
    ones = [1] * len(layer.kernel_size) if isinstance(layer, _ConvNd) else []
    return (input_units(layer), *ones)


@contextmanager
def _masked(model: nn.Module, place: MaskPlace, mask: Tensor) -> Iterator[None]:
    """Multiply the outputs of a dropout layer, or the inputs of another one, by a mask."""
    module, own = model.get_submodule(place.module), mask.reshape(place.shape)
    if isinstance(module, _DropoutNd):
        handle = module.register_forward_hook(lambda module, given, result: result * own)
    else:
        handle = module.register_forward_pre_hook(lambda module, given: (given[0] * own, *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def _impossible(name: str, reason: str) -> InputError:
    return InputError(
        f"expected a dropout layer that can be folded into weights, found {name}, which cannot ({reason}): put it "
        "right before a linear layer, as Dropout1d/2d/3d before a convolution, or take it out and give dropout= instead"
    )


class Masked(NamedTuple):
    """Trained networks."""

    position: Tensor
    buffers: State


@dataclass(frozen=True, eq=False)
class DropoutKernel:
    """Trained networks that do not move, and masks on them.

    Attributes:
        target: the posterior.
        outputs: the model.
        places: where units are dropped.
    """

    target: Target
    outputs: Outputs
    places: tuple[MaskPlace, ...]

    def init(self, start: Draws, streams: Streams) -> Masked:
        """Take trained networks."""
        return Masked(start.position, start.buffers)

    def step(self, state: Masked, step_index: StepIndex, streams: Streams) -> tuple[Masked, Info]:
        """Nothing: training is over."""
        return state, {}

    def draw(self, state: Masked, streams: Streams) -> Draws:
        """Each network with one set of masks."""
        factors = torch.stack([self.factors(stream) for stream in streams.each("draw")])
        position = state.position * factors.to(state.position)
        return Draws(position, state.buffers, self.target.log_density(position, state.buffers))

    def factors(self, stream: torch.Generator) -> Tensor:
        """What one draw multiplies each weight by (D,), float64."""
        layout = self.target.layout
        parts = {
            name: torch.ones(shape, dtype=torch.float64)
            for name, shape in zip(layout.names, layout.shapes, strict=True)
        }
        for place in self.places:
            factor = columns(self.outputs.model.get_submodule(place.layer), place.mask(stream))
            assert factor is not None  # proved
            parts[sampled_weight(layout, place.layer, "dropout")] *= factor
        return torch.cat([part.reshape(-1) for part in parts.values()])


def _check_other_randomness(target: Target) -> None:
    """Raise for a model that is random in training mode although it has no dropout layer: its masks cannot be seen."""
    position = target.layout.join({name: value[None] for name, value in _weights_of(target).items()})
    buffers = target.buffers_for(1)
    rows = torch.arange(min(4, target.examples), device=position.device)
    found = [float(target(position, buffers, rows, training=True, seed=seed).log_likelihood[0]) for seed in (0, 1)]
    if found[0] != found[1]:
        raise InputError(
            "the model draws random numbers of its own in training mode, but has no dropout layer (nn.Dropout) to be "
            "folded into weights: use nn.Dropout instead of a function, or another method"
        )


def _weights_of(target: Target) -> State:
    assert target.outputs is not None  # there are data
    return {name: value.detach() for name, value in target.outputs.model.named_parameters()}


def dropping(target: Target, outputs: Outputs, places: list[MaskPlace]) -> Target:
    """The same posterior, with a model that also drops inputs of its layers in training mode."""
    called, likelihood = copy.deepcopy(outputs), target.likelihood
    assert likelihood is not None  # there are outputs
    for place in places:
        called.model.get_submodule(place.layer).register_forward_pre_hook(training_hook(place))
    return replace(target, one=judged(called, likelihood), outputs=called, _functions={})
