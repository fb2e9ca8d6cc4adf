"""The Gaussian prior: every weight is N(0, scale^2), with one scale per tensor or for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.density.layout import Layout

Scale = float | Mapping[str, float] | None


@dataclass(frozen=True, eq=False)
class Prior:
    """Independent Gaussians around zero.

    log p(theta) = -1/2 sum_i precision_i theta_i^2 + constant

    Attributes:
        precision: 1 / scale^2 of each weight (D,); 0 where the prior is flat.
        constant: what normalises the density of the weights that are not flat.
    """

    precision: Tensor
    constant: float

    @classmethod
    def of(cls, layout: Layout, scale: Scale) -> Prior:
        """Read `prior=`: one standard deviation, a dict of them by name or pattern (others get 1), or None for flat."""
        if scale is None:
            return cls(torch.zeros(layout.size, dtype=layout.dtype, device=layout.device), 0.0)
        named = scale if isinstance(scale, Mapping) else {"*": scale}
        for key, value in named.items():
            if not (isinstance(value, int | float) and value > 0):
                raise InputError(
                    f"expected a positive standard deviation of the prior for {key!r}, found {value!r}: "
                    "give a number above 0, or prior=None for a flat prior"
                )
        scales = layout.spread({key: float(value) for key, value in named.items()}, 1.0, "prior")
        proper = scales[torch.isfinite(scales)].double()
        constant = -float(proper.log().sum()) - 0.5 * math.log(2 * math.pi) * len(proper)
        return cls(scales.square().reciprocal(), constant)

    @property
    def flat(self) -> bool:
        """Whether some weight has no proper prior."""
        return bool((self.precision == 0).any())

    def log_density(self, position: Tensor) -> Tensor:
        """Log density of positions (..., D), summed in float64 (...)."""
        return -0.5 * (position.double().square() * self.precision.double()).sum(-1) + self.constant
