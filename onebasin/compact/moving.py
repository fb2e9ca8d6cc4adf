"""A posterior whose numbers can be moved by gradient: draws are a differentiable function of a few free tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior import Diagonal, Gaussian, LowRank, Posterior
from onebasin.posterior.gaussian import standard_normal
from onebasin.state import State


@dataclass(frozen=True, eq=False)
class Bell:
    """N(centre, diag(scale^2) + factor factor^T): what diagonal and low-rank Gaussians have in common.

    Attributes:
        centre: (D,).
        scale: (D,), from zero up.
        factor: (D, K), K may be 0.
    """

    centre: Tensor
    scale: Tensor
    factor: Tensor

    @classmethod
    def of(cls, gaussian: Gaussian) -> Bell:
        """Take a Gaussian apart, in float32 or wider."""
        shape = gaussian.shape
        if not isinstance(shape, Diagonal | LowRank):
            raise InputError(
                f"expected diagonal or low-rank Gaussians, found a {shape.kind} one: fit one of these to draws"
            )
        dtype = torch.promote_types(gaussian.centre.dtype, torch.float32)
        factor = shape.factor if isinstance(shape, LowRank) else shape.scale.new_zeros(shape.size, 0)
        return cls(*(tensor.detach().to(dtype) for tensor in (gaussian.centre, shape.scale, factor)))

    def gaussian(self, like: Gaussian) -> Gaussian:
        """Put it together again, in the dtypes of `like`."""
        scale = self.scale.detach().to(like.shape.std().dtype)
        if not self.factor.shape[1]:
            return Gaussian(self.centre.detach().to(like.centre.dtype), Diagonal(scale))
        return Gaussian(self.centre.detach().to(like.centre.dtype), LowRank(scale, self.factor.detach().to(scale)))

    def variance(self) -> Tensor:
        """Of each weight, (D,)."""
        return self.scale.square() + self.factor.square().sum(1)

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Vectors (count, D), count even; each second one mirrors the one before: their mean is the centre."""
        half = count // 2
        own = standard_normal((half, len(self.scale)), self.scale, generator)
        along = standard_normal((half, self.factor.shape[1]), self.factor, generator)
        offset = self.scale * own + along @ self.factor.T
        return torch.stack([self.centre + offset, self.centre - offset], 1).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors whose weights the flat vector holds.

    Attributes:
        index: number of the tensor that a weight belongs to, int64 (D,).
        unit: root mean square standard deviation, within and between components, of the weights of each tensor.
    """

    index: Tensor
    unit: Tensor


class Free:
    """Every number moves: centre + unit u, scale e^v, factor + unit t.

    `unit` is the root mean square standard deviation of the weights of a tensor, so that one learning rate fits
    tensors of different sizes. Weights whose scale is zero keep it.
    """

    def __init__(self, start: Bell, tensors: Tensors, share: float) -> None:
        """Begin at a share of the widths of `start`."""
        self.start, self.unit = start, tensors.unit[tensors.index]
        self.shift = torch.zeros_like(start.centre).requires_grad_()
        self.width = torch.full_like(start.scale, share).log_().requires_grad_()
        self.turn = torch.zeros_like(start.factor).requires_grad_()
        self.share = share

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimiser moves."""
        return [self.shift, self.width, self.turn]

    def pool(self, other: Free) -> None:
        """Have one spread with another from now on."""
        self.width, self.turn = other.width, other.turn

    def bell(self) -> Bell:
        """The Gaussian at the present values."""
        start = self.start
        factor = self.share * start.factor + self.unit[:, None] * self.turn
        return Bell(start.centre + self.unit * self.shift, start.scale * self.width.exp(), factor)


class Widths:
    """Two numbers per tensor move: scale and factor times e^v, centre times e^g."""

    def __init__(self, start: Bell, tensors: Tensors, share: float) -> None:
        """Begin at a share of the widths of `start`."""
        self.start, self.index = start, tensors.index
        self.width = torch.full_like(tensors.unit, share).log_().requires_grad_()
        self.gain = torch.zeros_like(tensors.unit).requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimiser moves."""
        return [self.width, self.gain]

    def pool(self, other: Widths) -> None:
        """Have one spread with another from now on."""
        self.width = other.width

    def bell(self) -> Bell:
        """The Gaussian at the present values."""
        width, gain = self.width.exp()[self.index], self.gain.exp()[self.index]
        return Bell(self.start.centre * gain, self.start.scale * width, self.start.factor * width[:, None])


Part = TypeVar("Part", Free, Widths)


class Moving:
    """A mixture of such Gaussians with fixed weights, and networks drawn from it with a gradient.

    Attributes:
        posterior: where it began.
        weights: of the components, (M,).
    """

    def __init__(self, posterior: Posterior, kind: type[Free] | type[Widths], share: float) -> None:
        """Take the components apart, and begin at a share of their widths."""
        self.posterior = posterior
        layout, deviations = posterior.layout, posterior.std
        self.first = [Bell.of(component) for component in posterior.components]
        dtype, device = self.first[0].centre.dtype, self.first[0].centre.device
        index = torch.repeat_interleave(torch.arange(len(layout.sizes)), torch.tensor(layout.sizes)).to(device)
        units = [deviations[name].double().square().mean().sqrt() for name in layout.names]
        tensors = Tensors(index, torch.stack(units).to(device=device, dtype=dtype))
        self.parts: Sequence[Free | Widths] = (
            _parts(Free, self.first, tensors, share) if kind is Free else _parts(Widths, self.first, tensors, share)
        )
        self.weights = posterior.weights.to(device=device, dtype=dtype)
        self._rest = [{name: _wide(value, dtype) for name, value in rest.items()} for rest in posterior.rest]

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimiser moves."""
        every = [tensor for part in self.parts for tensor in part.parameters if tensor.numel()]
        return list({id(tensor): tensor for tensor in every}.values())

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Where networks are drawn, and how wide."""
        return self.weights.device, self.weights.dtype

    def draw(self, count: int, generator: torch.Generator) -> tuple[State, Tensor]:
        """Networks (n, *shape) and the weight (n,) of each in an average.

        All components are drawn equally often; networks 2 k and 2 k + 1 are mirror images.
        """
        each = 2 * max(1, count // (2 * len(self.parts)))
        flat = torch.cat([part.bell().draws(each, generator) for part in self.parts])
        rest = {
            name: torch.stack([own[name] for own in self._rest]).repeat_interleave(each, 0)
            for name in self.posterior.layout.others
        }
        return self.posterior.layout.laid_out(flat, rest), self.weights.repeat_interleave(each) / each

    def leash(self) -> Tensor:
        """KL divergence of the marginals from where they began, mean over weights and components.

        With r = std / first std: ((centre - first centre)^2 / first variance + r^2 - 1) / 2 - log r; weights without
        spread are left out.
        """
        total = self.weights.new_zeros(())
        for weight, part, first in zip(self.weights, self.parts, self.first, strict=True):
            now, variance = part.bell(), first.variance()
            free = (variance > 0) & (now.variance() > 0)
            if not bool(free.any()):
                continue
            ratio = now.variance()[free] / variance[free]
            gap = (now.centre - first.centre)[free].square() / variance[free]
            total = total + weight * (gap + ratio - 1 - ratio.log()).mean() / 2
        return total

    def result(self, provenance: dict[str, object]) -> Posterior:
        """The posterior at the present values."""
        pairs = zip(self.parts, self.posterior.components, strict=True)
        components = tuple(part.bell().gaussian(like) for part, like in pairs)
        return replace(self.posterior, components=components, provenance=provenance)

    def numbers(self) -> list[dict[str, list[float]]]:
        """For each component, tensor -> [width, gain] where there are only these."""
        names, widths = self.posterior.layout.names, [part for part in self.parts if isinstance(part, Widths)]
        pairs = [torch.stack(part.parameters, 1).exp().tolist() for part in widths]
        return [dict(zip(names, own, strict=True)) for own in pairs]

    def narrowing(self) -> float:
        """Median over weights with spread of std / first std."""
        ratios = []
        for part, first in zip(self.parts, self.first, strict=True):
            variance = first.variance()
            ratios.append((part.bell().variance().detach()[variance > 0] / variance[variance > 0]).sqrt())
        every = torch.cat(ratios)
        return float(every.median()) if len(every) else 1.0


def _parts(kind: type[Part], bells: list[Bell], tensors: Tensors, share: float) -> list[Part]:
    """One for each component; a pooled spread stays one."""
    parts = [kind(bell, tensors, share) for bell in bells]
    for part, bell in zip(parts[1:], bells[1:], strict=True):
        if torch.equal(bell.scale, bells[0].scale) and torch.equal(bell.factor, bells[0].factor):
            part.pool(parts[0])
    return parts


def _wide(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
