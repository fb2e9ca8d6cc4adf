"""LP-BNN: BatchEnsemble whose input factors are decoded from a latent Gaussian (Franchi et al., 2020).

Every layer has a small variational auto-encoder of the factors of its inputs. Member m has a code c_m, normal numbers
around 1 that stay as they are drawn:

    h = relu(E c_m + e),    q_m = N(A h + a, diag exp(B h + b)),    z ~ q_m,    r_m = D z + d,
    W_m = diag(s_m) W diag(r_m),        its own bias b_m,

and the penalty, of the potential U and not of the mean loss, is

    latent_weight * sum over layers of [ mean_{m,i} (r_mi - c_mi)^2 + sum_m KL(q_m || N(0, I)) ].

The published training adds that sum to the mean loss per example, which is latent_weight = N. A draw decodes a fresh z,
so a chain gives as many networks as one likes; they take turns, member by member. In evaluation mode, for `final_loss`,
z is the mean.

The published layer lays latents out as (example, member) while inputs are repeated as (member, example): with a batch
that is a multiple of M every example meets one member only. Here each member sees every example. Mean and log variance
have weights of their own, and d begins at 1 rather than near 0, so that signals pass at first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from onebasin.errors import InputError
from onebasin.inference.implicit import MemberTensor, Unrolled, check_members, member_plan
from onebasin.inference.kernel import ChainPlan, check_counts
from onebasin.inference.layers import WeightLayer, weight_layers
from onebasin.inference.methods.batchensemble import RankOne, before, behind, rank_one
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target
from onebasin.inference.training import TrainedMethod
from onebasin.state import State


@dataclass(frozen=True, kw_only=True)
class LPBNN(TrainedMethod):
    """LP-BNN: BatchEnsemble whose input factors are decoded from a latent Gaussian; a draw decodes a fresh latent.

    Attributes:
        members: networks that are trained together.
        draws: networks drawn from each training, member after member; None for one of each.
        latent: size of the latent of each layer, and of the encoder's hidden layer.
        spread: standard deviation of codes and output factors around 1 at the start.
        latent_weight: how much reconstruction and KL divergence count beside the log likelihood of all examples.
    """

    name: ClassVar[str] = "lpbnn"
    members: int = 4
    draws: int | None = None
    latent: int = 32
    spread: float = 0.1
    latent_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_members(self.members)
        check_counts(1, draws=self.draws, latent=self.latent)
        if not (self.spread >= 0 and self.latent_weight >= 0):
            raise InputError(
                f"expected spread and latent_weight from 0 on, found {self.spread} and {self.latent_weight}: give "
                "such numbers, for example 0.1 and 1"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train shared weights, factors and auto-encoders, then draw member after member."""
        members = Latent(
            target=target,
            members=self.members,
            layers=weight_layers(target, self.name),
            factors="normal",
            spread=self.spread,
            latent_size=self.latent,
            latent_weight=self.latent_weight,
        )
        return member_plan(self, members, self.draws or self.members)


@dataclass(eq=False, kw_only=True)
class Latent(RankOne):
    """Rank-one factors whose input side is decoded.

    Attributes:
        latent_size: of each layer.
        latent_weight: factor of the penalty.
    """

    latent_size: int = 32
    latent_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer in self.layers:
            del self.tensors[before(layer)]  # decoded
        for name, (rows, columns) in self.auto_encoders.items():
            layers = (len(self.layers),) if name == _HEADS else ()
            self.tensors[f"{name}.weight"] = MemberTensor((*layers, rows, columns))
            self.tensors[f"{name}.bias"] = MemberTensor((*layers, rows))

    @property
    def auto_encoders(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the encoder and decoder of each layer; mean and log variance of all layers are one."""
        size = self.latent_size
        sizes = {_encoder(layer): (size, layer.inputs) for layer in self.layers}
        return {**sizes, _HEADS: (2 * size, size), **{_decoder(layer): (layer.inputs, size) for layer in self.layers}}

    def initial(self, shared: State, streams: Streams) -> tuple[State, State]:
        """The start networks, normal output factors, auto-encoders initialised as linear layers of torch, and codes."""
        phi, constants = super().initial(shared, streams)
        like = next(iter(shared.values()))
        for name, (_, columns) in self.auto_encoders.items():
            for part in (f"{name}.weight", f"{name}.bias"):
                drawn = [
                    2 * torch.rand(self.tensors[part].shape, generator=stream, dtype=torch.float64) - 1
                    for stream in streams.each(part)
                ]
                phi[part] = (torch.stack(drawn) / math.sqrt(columns)).to(like)
        for layer in self.layers:
            bias = f"{_decoder(layer)}.bias"
            phi[bias] = torch.ones_like(phi[bias])
            shape = (self.members, layer.inputs)
            codes = [self.factor(shape, stream) for stream in streams.each(_code(layer))]
            constants[_code(layer)] = torch.stack(codes).to(like)
        return phi, constants

    def noise(self, streams: Streams, examples: int) -> State:
        """Standard normal numbers (chains, M, layers, latent)."""
        return self._normal(streams, self.members)

    def latent(self, streams: Streams) -> State:
        """Standard normal numbers (chains, 1, layers, latent)."""
        return self._normal(streams, 1)

    def _normal(self, streams: Streams, members: int) -> State:
        layout, shape = self.target.layout, (members, len(self.layers), self.latent_size)
        like = torch.empty(len(streams.chains), *shape, dtype=layout.dtype, device=layout.device)
        return {_NOISE: streams.gaussian(_NOISE, like)}

    def unroll(self, phi: State, beside: State) -> Unrolled:
        """W_m = diag(s_m) W diag(r_m) with r_m decoded from a draw of the latent, or from its mean without noise."""
        codes = [beside[_code(layer)] for layer in self.layers]
        hidden = torch.stack(
            [_linear(phi, _encoder(layer), code) for layer, code in zip(self.layers, codes, strict=True)]
        ).relu()  # (layers, M, latent)
        heads = torch.baddbmm(phi[f"{_HEADS}.bias"][:, None], hidden, phi[f"{_HEADS}.weight"].mT)
        mean, log_variance = heads.chunk(2, dim=-1)
        z = mean
        if _NOISE in beside:
            z = mean + (0.5 * log_variance).exp() * beside[_NOISE].movedim(1, 0)
        penalty = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        sampled = {name: phi[name] for name in self.target.layout.names}
        for layer, code, own in zip(self.layers, codes, z.unbind(), strict=True):
            r = _linear(phi, _decoder(layer), own)
            penalty = penalty + (r - code).square().mean()
            sampled[layer.weight] = rank_one(layer, phi[layer.weight], r, phi[behind(layer)])
        return Unrolled(sampled, self.latent_weight * penalty)


_HEADS, _NOISE = ":latent", ":noise"  # of all layers


def _linear(phi: State, name: str, x: Tensor) -> Tensor:
    return linear(x, phi[f"{name}.weight"], phi[f"{name}.bias"])


def _encoder(layer: WeightLayer) -> str:
    return f"{layer.weight}:encoder"


def _decoder(layer: WeightLayer) -> str:
    return f"{layer.weight}:decoder"


def _code(layer: WeightLayer) -> str:
    return f"{layer.weight}:code"
