"""What a posterior costs to keep: tensors that are equal are kept once, and tensors of nothing but zeros not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.posterior.gaussian import Gaussian, Shape

_PROBES = 16  # numbers of a tensor by which most unequal ones are told apart


class Kept(NamedTuple):
    """Tensors without repetition.

    Attributes:
        tensors: those that have to be written.
        same: name of another tensor -> name of the one it equals bit for bit.
        zeros: further tensors, of zeros only.
    """

    tensors: dict[str, Tensor]
    same: dict[str, str]
    zeros: dict[str, Tensor]


def kept(tensors: Mapping[str, Tensor]) -> Kept:
    """Sort tensors `<component>.<role>` into those that have to be written, repetitions within a role, and zeros.

    >>> found = kept({"0.scale": torch.ones(2), "1.scale": torch.ones(2), "0.centre": torch.zeros(2)})
    >>> list(found.tensors), found.same, list(found.zeros)
    (['0.scale'], {'1.scale': '0.scale'}, ['0.centre'])
    """
    found = Kept({}, {}, {})
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, value in tensors.items():
        bits = _bits(value)
        if not bool(bits.any()):
            found.zeros[name] = value
            continue
        probes = bits[:: max(1, len(bits) // _PROBES)].tolist()
        others = alike.setdefault((name.partition(".")[2], value.dtype, tuple(value.shape), *probes), [])
        first = next((other for other in others if torch.equal(_bits(found.tensors[other]), bits)), None)
        if first is None:
            found.tensors[name] = value
            others.append(name)
        else:
            found.same[name] = first
    return found


def stored_networks(components: Sequence[Gaussian]) -> float:
    """Numbers needed to write the Gaussians down, divided by D: a mean and a standard deviation are 2 networks.

    Numbers, not bytes: those of float16 networks are kept in float32, and take twice the bytes of such a network.

    >>> from onebasin.posterior.diagonal import Diagonal
    >>> stored_networks([Gaussian(torch.zeros(3) + shift, Diagonal(torch.ones(3))) for shift in (1, 2)])
    3.0
    """
    named = {
        f"{index}.{role}": value
        for index, component in enumerate(components)
        for role, value in {"centre": component.centre, **component.shape.tensors()}.items()
    }
    return sum(value.numel() for value in kept(named).tensors.values()) / max(1, components[0].size)


def same_shape(a: Shape, b: Shape) -> bool:
    """Whether two Gaussians spread alike, bit for bit."""
    left, right = a.tensors(), b.tensors()
    return a.kind == b.kind and left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)))


def _bits(value: Tensor) -> Tensor:
    """What is stored: 0 and -0 differ, and NaN equals itself."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
