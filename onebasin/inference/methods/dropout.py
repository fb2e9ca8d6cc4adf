"""Monte Carlo dropout as draws of networks: after training with dropout, a draw drops units once and for all.

A draw multiplies the columns of dropped units by zero and those of kept ones by 1 / (1 - p), so it is a network like
any other, used in evaluation mode (Gal and Ghahramani, 2016). The same units are dropped for all examples, where
dropout at training time drops others for each.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from onebasin.calling import Call
from onebasin.errors import InputError
from onebasin.inference.density.layout import Layout
from onebasin.inference.density.network import judged
from onebasin.inference.density.target import Outputs, Target
from onebasin.inference.kernel import Info, Moment, Networks, Plan, Stage
from onebasin.inference.methods.ensemble import TrainingOptions, count, training_stage
from onebasin.inference.methods.masks import Dropping, Place, factor, new_places, own_places, prove, training_hook
from onebasin.inference.seeds import Streams, generator
from onebasin.state import State

_EXAMPLES = 4  # on which masks are proved to be foldable


class Options(TrainingOptions, total=False):
    """Options of dropout; those of training come first.

    Attributes:
        draws: networks drawn from each training.
        dropout: for models without dropout layers: the probability to drop an input unit of every linear and
            convolution layer but the first, or a dict of probabilities by layer name or pattern. Convolutions drop
            whole channels.
    """

    draws: int
    dropout: Dropping


class Kept(NamedTuple):
    """Trained networks."""

    position: Tensor
    rest: State


@dataclass(frozen=True, eq=False)
class Dropout:
    """The kernel: trained networks that do not move, and masks on them.

    Attributes:
        target: the posterior.
        outputs: the model.
        places: where units are dropped.
    """

    target: Target
    outputs: Outputs
    places: tuple[Place, ...]

    def init(self, start: Networks, streams: Streams) -> Kept:
        """Take trained networks."""
        return Kept(start.position, start.rest)

    def step(self, state: Kept, moment: Moment, streams: Streams) -> tuple[Kept, Info]:
        """Nothing: training is over."""
        return state, {}

    def draw(self, state: Kept, streams: Streams) -> Networks:
        """Each network with one set of masks."""
        factors = torch.stack([self.factors(stream) for stream in streams.each("draw")])
        position = state.position * factors.to(state.position)
        return Networks(position, state.rest, self.target.log_density(position, state.rest))

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


def build(target: Target, **options: Unpack[Options]) -> Plan:
    """Plan dropout: training with it, then draws."""
    if target.outputs is None:
        raise InputError("dropout needs data to train on, found none: give data=(inputs, targets)")
    model, call = target.outputs.model, _few(target)
    places = own_places(model, call)
    if places and "dropout" in options:
        raise InputError(
            f"{type(model).__name__} has dropout layers of its own ({places[0].module}), and dropout= was given too: "
            "leave one of them out"
        )
    trained = target
    if not places:
        _refuse_other_randomness(target)
        places = new_places(model, call, options.get("dropout", 0.1))
        trained = dropping(target, target.outputs, places)
    for place in places:
        _weight(target.layout, place)
    prove(model, places, call, generator(0, "dropout", "proof"))
    stage = training_stage(trained, cast(TrainingOptions, options), optimum=True)
    kernel = Dropout(target, target.outputs, tuple(places))
    return Plan((stage, Stage("dropout", kernel, 0)), count(options.get("draws", 10), "draws"), (0,))


def _refuse_other_randomness(target: Target) -> None:
    """Refuse a model that is random in training mode although it has no dropout layer: its masks cannot be seen."""
    position = target.layout.join({name: value[None] for name, value in _weights_of(target).items()})
    rest = target.rest_of(1)
    rows = torch.arange(min(_EXAMPLES, target.examples), device=position.device)
    found = [float(target(position, rest, rows, training=True, seed=seed).log_likelihood[0]) for seed in (0, 1)]
    if found[0] != found[1]:
        raise InputError(
            "the model draws random numbers of its own in training mode, but has no dropout layer (nn.Dropout) to be "
            "folded into weights: use nn.Dropout instead of a function, or another method"
        )


def _weights_of(target: Target) -> State:
    assert target.outputs is not None  # there are data
    return {name: value.detach() for name, value in target.outputs.model.named_parameters()}


def dropping(target: Target, outputs: Outputs, places: list[Place]) -> Target:
    """The same posterior, with a model that also drops inputs of its layers in training mode."""
    called, likelihood = copy.deepcopy(outputs), target.likelihood
    assert likelihood is not None  # there are outputs
    for place in places:
        called.model.get_submodule(place.layer).register_forward_pre_hook(training_hook(place))
    return replace(target, one=judged(called, likelihood), outputs=called, _made={})


def _few(target: Target) -> Call:
    """The model's arguments for a few training examples."""
    call, _ = tree_unflatten([leaf[:_EXAMPLES] for leaf in target.leaves], target.structure)
    return cast(Call, call)


def _weight(layout: Layout, place: Place) -> str:
    """Name of the sampled tensor that a place multiplies."""
    name = f"{place.layer}.weight" if place.layer else "weight"
    first = layout.tied.get(name, name)
    if first not in layout.names:
        raise InputError(
            f"expected {name} among the trained tensors to fold dropout into, found it frozen or made of others: train "
            f"it, or drop nothing before {place.layer}"
        )
    return first
