"""Norms in evaluation mode, folded into the layers before them: statistics become weights.

In evaluation mode a batch norm is an affine map of every unit, and so is the layer before it. With s = gamma /
sqrt(variance + eps),

    gamma (W x + b - mean) / sqrt(variance + eps) + beta  =  (s W) x + s (b - mean) + beta,

so a network with the weights on the right, and with a norm that does nothing, is the same function. Two networks that
differ in running statistics alone, as the draws of Monte Carlo batch norm do, then differ in weights, and their
distance means something. Statistics themselves take no part in distances.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebasin.errors import InputError, ModelError
from onebasin.functional.call import (
    Inputs,
    as_seen,
    batches,
    check_fits,
    fixed_buffers,
    floating_dtype,
    moved,
    outputs,
    run_with,
    undisturbed,
)
from onebasin.functional.data import AnyInputs, inputs_of
from onebasin.functional.norms import frozen_norms, replaced, tracked
from onebasin.functional.observe import LayerCall, NormCall, Observer
from onebasin.population import Population, check_population
from onebasin.state import State, state_of

_EXAMPLES = 4  # on which a fold is proved
_CLOSE = 1e-9  # of the outputs' largest entry: float64 leaves room for rounding only
Networks = TypeVar("Networks", Population, State)


@dataclass(frozen=True)
class _Place:
    """A norm right behind a layer; names are those of the state dict, None for what there is not."""

    mean: str
    variance: str
    gain: str | None
    shift: str | None
    eps: float
    weight: str
    bias: str | None


def fold_norms(model: nn.Module, networks: Networks, inputs: AnyInputs) -> Networks:
    """Networks of the same functions whose batch norms do nothing: statistics, gains and shifts are in the weights.

    Every norm must come right behind the linear or convolution layer whose units it normalises. That the function stays
    is proved on the model, with random weights and statistics in float64, before any network is changed. Norms that are
    frozen, constants of the function, are left as they are.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, eps=0.0)).eval()
    >>> state = {**model.state_dict(), "0.weight": torch.tensor([[3.0]]), "0.bias": torch.tensor([1.0]),
    ...          "1.running_mean": torch.tensor([5.0]), "1.running_var": torch.tensor([4.0])}
    >>> folded = fold_norms(model, state, torch.zeros(2, 1))
    >>> folded["0.weight"], folded["0.bias"], folded["1.running_var"]
    (tensor([[1.5000]]), tensor([-2.]), tensor([1.]))

    Args:
        model: the function; left exactly as it was.
        networks: a Population, or one State.
        inputs: example inputs, as in `predict`; a few show which layer each norm follows.

    Returns:
        The same kind, of the same spec, so that `model` runs it. The log densities of a Population are left out: the
        prior of the new weights is another.

    Raises:
        InputError: the networks are neither of the two, or inputs are not finite.
        ModelError: a norm does not follow a layer right away, or what the layer gives is used elsewhere too; or neither
            of the two has a bias to take up the mean.
    """
    given = inputs_of(inputs, model)
    if isinstance(networks, nn.Module):
        raise InputError(
            f"expected a Population or a State to fold norms in, found the module {type(networks).__name__}: give "
            "module.state_dict()"
        )
    if not isinstance(networks, Population | Mapping):
        check_population(networks)
    if any(isinstance(leaf, Tensor) and not bool(leaf.isfinite().all()) for leaf in tree_leaves(given)):
        raise InputError("expected finite inputs to fold norms on, found NaN or infinity: leave these examples out")
    first: State = networks.member(0) if isinstance(networks, Population) else dict(networks)
    check_fits(model, first)
    places = _places(model, first, given)
    _prove(model, places, given)
    if isinstance(networks, Population):
        return replace(networks.map(lambda block, _: _folded(model, block, places)), log_density=None)
    stacked = _folded(model, {name: value.detach()[None] for name, value in first.items()}, places)
    return {name: value[0] for name, value in stacked.items()}


class _Pairs(Observer):
    """Notes each norm with the layer whose result it normalises."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._calls: list[LayerCall] = []  # with their results, so that no other tensor can have one of these ids
        self.found: list[tuple[NormCall, LayerCall | None, str | None, str | None]] = []

    def layer(self, call: LayerCall) -> Tensor:
        self._calls.append(call)
        return call.result

    def norm(self, call: NormCall) -> None:
        before = next((layer for layer in self._calls if layer.result is call.input and layer.axis == 1), None)
        self.found.append((call, before, self.name_of(call.weight), self.name_of(call.bias)))


def _places(model: nn.Module, state: State, inputs: Inputs) -> list[_Place]:
    """The norms that can be folded, in the order in which they run."""
    _, call = next(batches(inputs, _EXAMPLES))
    tensors = as_seen(model, state)
    dtype, device = floating_dtype(tensors), next(iter(tensors.values())).device
    observer = _Pairs(tensors)
    with undisturbed(model, call), observer:
        run_with(model, {**fixed_buffers(model, device, dtype), **tensors}, moved(call, device, dtype))
    still = frozen_norms(model)
    places = []
    for norm, layer, gain, shift in observer.found:
        if norm.mean in still:
            continue
        name = norm.mean.rpartition(".")[0]
        if layer is None or layer.bias == "":
            raise _impossible(name, "no linear or convolution layer comes right before it")
        if layer.bias is None and shift is None:
            raise _impossible(name, f"neither it nor {layer.weight.rpartition('.')[0]} has a bias to take up the mean")
        places.append(_Place(norm.mean, norm.variance, gain, shift, norm.eps, layer.weight, layer.bias))
    return places


def _folded(model: nn.Module, block: Mapping[str, Tensor], places: list[_Place]) -> State:
    """Networks (n, *shape) with these norms folded."""
    new: State = {}
    for place in places:
        mean, variance = block[place.mean].double(), block[place.variance].double()
        scale = (variance + place.eps).rsqrt()
        if place.gain is not None:
            scale = scale * block[place.gain].double()
            new[place.gain] = torch.ones_like(block[place.gain])
        weight = block[place.weight].double()
        new[place.weight] = weight * scale.reshape(*scale.shape, *[1] * (weight.dim() - 2))
        shift = torch.zeros_like(mean) if place.shift is None else block[place.shift].double()
        if place.bias is not None:
            new[place.bias] = scale * (block[place.bias].double() - mean) + shift
        left = torch.zeros_like(mean) if place.bias is not None else shift - scale * mean
        if place.shift is not None:
            new[place.shift] = left
        new[place.mean] = torch.zeros_like(mean)
        new[place.variance] = torch.full_like(variance, 1 - place.eps)
    return replaced(model, block, new)


def _prove(model: nn.Module, places: list[_Place], inputs: Inputs) -> None:
    """Raise `ModelError` unless the model with random weights gives the same outputs before and after each fold."""
    if not places:
        return
    twin = random_twin(model, torch.Generator().manual_seed(0))
    state = state_of(twin)
    _, (arguments, named) = next(batches(inputs, _EXAMPLES))
    given = named or arguments
    expected = outputs(twin, state, given)
    for place in places:
        stacked = _folded(twin, {name: value[None] for name, value in state.items()}, [place])
        found = outputs(twin, {name: value[0] for name, value in stacked.items()}, given)
        if not bool((found - expected).abs().max() <= _CLOSE * expected.abs().max()):
            layer = place.weight.rpartition(".")[0]
            raise _impossible(
                place.mean.rpartition(".")[0], f"what {layer} gives, or its weight, is also used elsewhere"
            )


def random_twin(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A float64 copy of a model in evaluation mode with random weights and running statistics, to prove an identity on.

    What holds for these weights holds for all but those of a set of measure zero: both sides are analytic in them,
    piece by piece.
    """
    wide = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for value in wide.parameters():
            fan = max(1, value.numel() // len(value)) if value.dim() > 1 else 1
            value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype) / math.sqrt(fan))
        for layer in tracked(wide).values():
            for buffer in (layer.running_mean, layer.running_var):
                assert buffer is not None  # tracked
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype))
    return wide


def _impossible(name: str, reason: str) -> ModelError:
    return ModelError(
        f"expected norms right behind linear or convolution layers of their own, found {name or 'the model itself'}, "
        f"where that is not so ({reason}): compare such networks by their predictions (ob.discrepancy, ob.diversity)"
    )
