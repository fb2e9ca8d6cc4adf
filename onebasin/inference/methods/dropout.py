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
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_unflatten

from onebasin.errors import InputError
from onebasin.functional import Call, moved, random_twin
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams, generator
from onebasin.inference.target import Outputs, ParameterLayout, Target, judged
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CLOSE = 1e-9  # of the outputs' largest entry: float64 leaves room for the order of sums only


_EXAMPLES = 4  # on which masks are proved to be foldable
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
        model, call = target.outputs.model, _few(target)
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
            _weight(target.layout, place)
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
    ran = list(_ran(model, call))
    for index, (name, module, shape) in enumerate(ran):
        if not isinstance(module, _DropoutNd) or not module.p:
            continue
        if not isinstance(module, (nn.Dropout, *_CHANNELS)) or module.p >= 1:
            raise _impossible(name, f"it is {type(module).__name__} with p={module.p}")
        if sum(other is module for _, other, _ in ran) > 1:
            raise _impossible(name, "it runs more than once")
        following = [other for other, layer, _ in ran[index + 1 :] if not isinstance(layer, _DropoutNd)]
        if not following:
            raise _impossible(name, "no linear or convolution layer runs after it")
        own = shape[1:] if isinstance(module, nn.Dropout) else (shape[1], *[1] * (len(shape) - 2))
        places.append(MaskPlace(name, following[0], module.p, own))
    return places


def new_places(model: nn.Module, call: Call, rates: Dropping) -> list[MaskPlace]:
    """Places before linear and convolution layers: before all but the first, or those that names or patterns choose."""
    layers = {name: module for name, module, _ in _ran(model, call) if not isinstance(module, _DropoutNd)}
    named = rates if isinstance(rates, Mapping) else dict.fromkeys(list(layers)[1:], rates)
    for key, rate in named.items():
        if not 0 <= rate < 1:
            raise InputError(f"expected a dropout rate from 0 to below 1, found {rate} for {key!r}: give such a number")
        if not any(fnmatchcase(name, key) for name in layers):
            raise InputError(
                f"expected names or patterns of linear and convolution layers in dropout, found {key!r}, which fits "
                f"none of {', '.join(layers)}: correct it"
            )
    if not named:
        raise InputError(
            "expected a layer behind which something can be dropped, found a model with fewer than two linear or "
            "convolution layers: name layers in dropout={name: rate}, or use another method"
        )
    places = []
    for name, layer in layers.items():
        chosen = [rate for key, rate in named.items() if fnmatchcase(name, key)]
        if chosen and chosen[-1]:
            places.append(MaskPlace(name, name, chosen[-1], _inputs(layer)))
    return places


def factor(place: MaskPlace, layer: nn.Module, mask: Tensor) -> Tensor | None:
    """What the layer's weight is multiplied by for a mask (units,), or None where shapes forbid it."""
    if isinstance(layer, nn.Linear):
        if layer.in_features % place.units:
            return None
        return mask.repeat_interleave(layer.in_features // place.units)
    assert isinstance(layer, _ConvNd)
    if layer.in_channels != place.units:
        return None
    ones = [1] * len(layer.kernel_size)
    if layer.transposed:
        return mask.reshape(-1, 1, *ones)
    groups = mask.reshape(layer.groups, -1).repeat_interleave(layer.out_channels // layer.groups, 0)
    return groups.reshape(layer.out_channels, -1, *ones)


def prove(model: nn.Module, places: list[MaskPlace], call: Call, generator: torch.Generator) -> None:
    """Raise `InputError` unless masked units and multiplied columns give the same outputs at every place.

    The identity is shown for random weights and statistics, so it holds whatever training makes of them, and for
    several places at once.
    """
    wide = random_twin(model, generator)
    device = next(wide.parameters()).device
    arguments, options = moved(call, device, torch.float64)
    for place in places:
        mask = replace(place, rate=0.5).mask(generator).to(device)
        mask[0], mask[-1] = 2.0, 0.0  # something is kept, and something dropped
        layer = wide.get_submodule(place.layer)
        columns = factor(place, layer, mask)
        if columns is None:
            reason = f"it drops {place.units} units of shape {place.shape}, which are not the inputs of {place.layer}"
            raise _impossible(place.module, reason)
        with torch.no_grad():
            with _masked(wide, place, mask):
                expected = wide(*arguments, **options)
            weight = layer.get_parameter("weight")
            before = weight.clone()
            weight.mul_(columns)
            found = wide(*arguments, **options)
            weight.copy_(before)
        if not bool((found - expected).abs().max() <= _CLOSE * expected.abs().max()):
            if place.module == place.layer:
                raise InputError(
                    f"expected layers that are the only users of their weights, found {place.layer}, whose weights "
                    "also act elsewhere: give dropout= as a dict of the other layers"
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


def _inputs(layer: nn.Module) -> tuple[int, ...]:
    """Shape of a mask on the inputs of one example: features on the last axis, channels on the first."""
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    assert isinstance(layer, _ConvNd)
    return (layer.in_channels, *[1] * len(layer.kernel_size))


def _ran(model: nn.Module, call: Call) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Dropout, linear and convolution layers in the order in which they run, with the shapes of their inputs."""
    found: list[tuple[str, nn.Module, tuple[int, ...]]] = []
    handles = [
        module.register_forward_pre_hook(lambda own, given, name=name: found.append((name, own, tuple(given[0].shape))))
        for name, module in model.named_modules()
        if isinstance(module, _DropoutNd | nn.Linear | _ConvNd)
    ]
    try:
        with torch.no_grad():
            model.eval()(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    yield from found


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
            columns = factor(place, self.outputs.model.get_submodule(place.layer), place.mask(stream))
            assert columns is not None  # proved
            parts[_weight(layout, place)] *= columns
        return torch.cat([part.reshape(-1) for part in parts.values()])


def _check_other_randomness(target: Target) -> None:
    """Raise for a model that is random in training mode although it has no dropout layer: its masks cannot be seen."""
    position = target.layout.join({name: value[None] for name, value in _weights_of(target).items()})
    buffers = target.buffers_for(1)
    rows = torch.arange(min(_EXAMPLES, target.examples), device=position.device)
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


def _few(target: Target) -> Call:
    """The model's arguments for a few training examples."""
    call, _ = tree_unflatten([leaf[:_EXAMPLES] for leaf in target.leaves], target.structure)
    return cast(Call, call)


def _weight(layout: ParameterLayout, place: MaskPlace) -> str:
    """Name of the sampled tensor that a place multiplies."""
    name = f"{place.layer}.weight" if place.layer else "weight"
    first = layout.tied.get(name, name)
    if first not in layout.names:
        raise InputError(
            f"expected {name} among the trained tensors to fold dropout into, found it frozen or made of others: train "
            f"it, or drop nothing before {place.layer}"
        )
    return first
