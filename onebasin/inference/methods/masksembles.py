"""Masksembles: networks that share their weights and differ by fixed masks on units (Durasov et al., 2021).

Before training each layer gets M masks m_1 ... m_M of its input units, whose overlap is controlled: with `scale` s each
mask keeps K units such that K out of s K places, drawn M times, use as many places as the layer has units,

    units = K s (1 - (1 - 1 / s)^M),        two masks share the part 1 / s of their units.

s = 1 gives M equal networks, a large s disjoint ones. Member k is the trained network whose layers see m_k * x, so its
weights are W diag(m_k); nothing is rescaled, as in the reference. Masks are those of a chain, and stay.

In the reference each example of a mini-batch meets one mask; here each meets all of them, which is the same loss on
average with less noise, and members have batch-norm statistics of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from onebasin.errors import InputError
from onebasin.inference.implicit import MemberMap, MemberTensor, Unrolled, check_members, member_plan
from onebasin.inference.kernel import ChainPlan
from onebasin.inference.layers import WeightLayer, by_layer, columns, few, weight_layers
from onebasin.inference.methods.dropout import MaskPlace, mask_shape, prove
from onebasin.inference.seeds import Streams, generator
from onebasin.inference.target import Target
from onebasin.inference.training import TrainedMethod
from onebasin.state import State


@dataclass(frozen=True, kw_only=True)
class Masksembles(TrainedMethod):
    """Masksembles: networks that share their weights and differ by fixed masks on units, trained together.

    Attributes:
        members: networks of each training, which are its draws.
        scale: how little masks overlap: two share the part 1 / scale of their units; for the inputs of all linear and
            convolution layers but the first, or a dict of scales by layer name or pattern. Of 8 units 4 members keep 4
            each with scale 2, 3 with scale 3, and 2, the least, with scale 100; of 100 units 53, 42 and 25.
    """

    name: ClassVar[str] = "masksembles"
    members: int = 4
    scale: float | Mapping[str, float] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_members(self.members)
        for scale in self.scale.values() if isinstance(self.scale, Mapping) else [self.scale]:
            if not scale >= 1:
                raise InputError(f"expected a scale of masks from 1 on, found {scale}: give scale=2.0")

    def plan(self, target: Target) -> ChainPlan:
        """Train with all masks at once, then draw each member."""
        layers = {layer.name: layer for layer in weight_layers(target, self.name)}
        scales = by_layer(list(layers), self.scale, "scale", "scale")
        places = [MaskPlace(name, name, 0.5, mask_shape(layers[name].module)) for name in scales]
        assert target.outputs is not None  # there are layers
        prove(target.outputs.model, places, few(target), generator(0, self.name, "proof"), "scale")
        chosen = tuple((layers[name], scale) for name, scale in scales.items())
        return member_plan(self, Masked(target=target, members=self.members, layers=chosen), self.members)


@dataclass(eq=False, kw_only=True)
class Masked(MemberMap):
    """Shared weights, and masks on the inputs of layers, which are constants of a chain.

    Attributes:
        layers: the layers that have masks, with the scale of each.
    """

    layers: tuple[tuple[WeightLayer, float], ...]

    def __post_init__(self) -> None:
        layout = self.target.layout
        self.tensors.update(
            {name: MemberTensor(shape, of=name) for name, shape in zip(layout.names, layout.shapes, strict=True)}
        )

    def initial(self, shared: State, streams: Streams) -> tuple[State, State]:
        """The start networks, and the masks."""
        like = next(iter(shared.values()))
        constants = {
            _mask(layer): torch.stack(
                [masks(layer.inputs, self.members, scale, stream) for stream in streams.each(_mask(layer))]
            ).to(like)
            for layer, scale in self.layers
        }
        return shared, constants

    def unroll(self, phi: State, beside: State) -> Unrolled:
        """W diag(m_k) in every masked layer; all else as it is."""
        sampled = dict(phi)
        for layer, _ in self.layers:

            def factor(mask: Tensor, layer: WeightLayer = layer) -> Tensor:
                found = columns(layer.module, mask)
                assert found is not None  # one entry for each
                return found

            sampled[layer.weight] = phi[layer.weight] * vmap(factor)(beside[_mask(layer)])
        return Unrolled(sampled)


def _mask(layer: WeightLayer) -> str:
    """Name of the masks (M, inputs) of a layer."""
    return f"{layer.weight}:mask"


def kept_units(units: int, members: int, scale: float) -> int:
    """How many units each mask keeps.

    >>> kept_units(60, 4, 2.0), kept_units(60, 4, 1.0), kept_units(60, 4, 1e9)
    (32, 60, 15)
    """
    used = scale * -torch.expm1(members * torch.log1p(torch.tensor(-1 / scale, dtype=torch.float64))).item()
    return min(units, max(-(-units // members), round(units / used)))


def masks(units: int, members: int, scale: float, stream: torch.Generator) -> Tensor:
    """Masks (members, units) of zeros and ones, float64: each keeps `kept_units`, and each unit is kept by some mask.

    All families of such masks are equally likely. They are drawn as in the reference, subsets of more places than there
    are units, and again until exactly as many places as units are used: given these places the family is uniform.
    """
    kept = kept_units(units, members, scale)
    places = _places(units, members, kept)
    while True:
        chosen = torch.zeros(members, places, dtype=torch.float64)
        for row in chosen:
            row[torch.randperm(places, generator=stream)[:kept]] = 1
        used = chosen.any(0)
        if int(used.sum()) == units:
            return chosen[:, used]


def _places(units: int, members: int, kept: int) -> int:
    """The number of places of which `members` subsets of `kept` use `units` on average, at least approximately."""
    if kept == units:
        return units
    low, high = units, units + members**2 * kept**2  # there subsets hardly meet
    while low < high:
        middle = (low + high) // 2
        if middle * (1 - (1 - kept / middle) ** members) < units:
            low = middle + 1
        else:
            high = middle
    return low
