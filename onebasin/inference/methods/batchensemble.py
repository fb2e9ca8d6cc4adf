"""BatchEnsemble: networks whose weights differ by factors of units (Wen, Tran and Ba, 2020).

Member m has in every linear and convolution layer

    W_m = diag(s_m) W diag(r_m),        its own bias b_m,

so its output is s_m * (W (r_m * x)) + b_m: r_m multiplies the inputs and s_m the outputs, features of a linear layer or
channels of a convolution. W, norms and embeddings are shared. A weight that several layers use has one pair of factors.

The prior acts on W, on each b_m with the share 1 / M, and is flat on r and s. Each member sees every example of a
mini-batch, as in the reference code. Factors begin as random signs, which make different functions of the same W, or as
normal numbers around 1.

Behind a ReLU a positive r is no freedom of its own: r_m * relu(z) = relu(r_m * z), so it may as well be part of s_m and
b_m of the layer before. Up to signs about half of the factors are gauge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from onebasin.errors import InputError
from onebasin.inference.implicit import MemberMap, MemberTensor, Unrolled, check_members, member_plan
from onebasin.inference.kernel import ChainPlan
from onebasin.inference.layers import WeightLayer, columns, rows, weight_layers
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

FACTORS = ("signs", "normal")


@dataclass(frozen=True, kw_only=True)
class BatchEnsemble(TrainedMethod):
    """BatchEnsemble: networks that share their weights up to factors of input and output units, trained together.

    Attributes:
        members: networks of each training, which are its draws.
        factors: how factors begin: "signs", at random 1 or -1, or "normal", around 1.
        spread: standard deviation of the normal numbers.
    """

    name: ClassVar[str] = "batchensemble"
    members: int = 4
    factors: str = "signs"
    spread: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_members(self.members)
        check_factors(self.factors, self.spread)

    def plan(self, target: Target) -> ChainPlan:
        """Train shared weights and factors, then draw each member."""
        layers = weight_layers(target, self.name)
        members = RankOne(target=target, members=self.members, layers=layers, factors=self.factors, spread=self.spread)
        return member_plan(self, members, self.members)


def check_factors(factors: str, spread: float) -> None:
    """Raise unless factors can begin so."""
    if factors not in FACTORS or not spread >= 0:
        raise InputError(
            f'expected factors "signs" or "normal" and spread >= 0, found {factors!r} and {spread}: give '
            'factors="signs"'
        )


@dataclass(eq=False, kw_only=True)
class RankOne(MemberMap):
    """Shared weights and a rank-one factor s r^T per member and layer.

    Attributes:
        layers: the layers that have factors.
        factors: how they begin.
        spread: standard deviation of normal ones.
    """

    layers: tuple[WeightLayer, ...]
    factors: str = "signs"
    spread: float = 0.5

    def __post_init__(self) -> None:
        layout, biases = self.target.layout, {layer.bias for layer in self.layers}
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            shared = MemberTensor(shape, of=name)
            own = MemberTensor((self.members, *shape), True, name, 1 / self.members)
            self.tensors[name] = own if name in biases else shared
        for layer in self.layers:
            self.tensors[before(layer)] = MemberTensor((self.members, layer.inputs), True)
            self.tensors[behind(layer)] = MemberTensor((self.members, layer.outputs), True)

    def initial(self, shared: State, streams: Streams) -> tuple[State, State]:
        """The start networks with random factors; every member begins with the bias of the start."""
        phi = {name: each_member(shared[name], one) for name, one in self.tensors.items() if name in shared}
        like = next(iter(shared.values()))
        for name, one in self.tensors.items():
            if name not in shared:
                phi[name] = torch.stack([self.factor(one.shape, stream) for stream in streams.each(name)]).to(like)
        return phi, {}

    def factor(self, shape: Sequence[int], stream: torch.Generator) -> Tensor:
        """Factors as they begin, float64."""
        if self.factors == "signs":
            return 2.0 * torch.randint(0, 2, tuple(shape), generator=stream).double() - 1
        return 1 + self.spread * torch.randn(tuple(shape), generator=stream, dtype=torch.float64)

    def unroll(self, phi: State, beside: State) -> Unrolled:
        """W_m = diag(s_m) W diag(r_m) in every layer; all else as it is."""
        sampled = {name: phi[name] for name in self.target.layout.names}
        for layer in self.layers:
            sampled[layer.weight] = rank_one(layer, phi[layer.weight], phi[before(layer)], phi[behind(layer)])
        return Unrolled(sampled)


def before(layer: WeightLayer) -> str:
    """Name of the factors r (M, inputs) of a layer."""
    return f"{layer.weight}:inputs"


def behind(layer: WeightLayer) -> str:
    """Name of the factors s (M, outputs) of a layer."""
    return f"{layer.weight}:outputs"


def each_member(value: Tensor, tensor: MemberTensor) -> Tensor:
    """A tensor (chains, ...) of start networks as the one of phi that begins there."""
    return value[:, None].expand(len(value), *tensor.shape) if tensor.own else value


def rank_one(layer: WeightLayer, weight: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """diag(s_m) W diag(r_m) for r (M, inputs) and s (M, outputs): (M, *shape)."""

    def factor(own: Tensor, other: Tensor) -> Tensor:
        inputs = columns(layer.module, other)
        assert inputs is not None  # one factor for each
        return rows(layer.module, own) * inputs

    return weight * vmap(factor)(s, r)
