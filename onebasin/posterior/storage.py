"""What a posterior costs to keep, in units of one network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebasin.posterior.gaussian import Gaussian


def stored_networks(components: Sequence[Gaussian]) -> float:
    """Numbers needed to write the Gaussians down, divided by D: a mean and a standard deviation are 2 networks.

    Tensors that several components share are counted once, and tensors of nothing but zeros not at all.

    >>> from onebasin.posterior.diagonal import Diagonal
    >>> stored_networks([Gaussian(torch.zeros(3) + shift, Diagonal(torch.ones(3))) for shift in (1, 2)])
    3.0
    """
    kept: dict[str, list[Tensor]] = {}
    for component in components:
        for role, value in {"centre": component.centre, **component.shape.tensors()}.items():
            own = kept.setdefault(role, [])
            if bool((value != 0).any()) and not any(_same(value, other) for other in own):
                own.append(value)
    return sum(value.numel() for own in kept.values() for value in own) / max(1, components[0].size)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
