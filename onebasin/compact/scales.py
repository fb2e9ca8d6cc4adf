"""The positive scales that bring one posterior closest to another, by descent on the distance itself.

Under log scales s of all units (one per scale generator and coordinate) every weight w moves to w exp(E s), with E a
sparse matrix of small integers, the powers. So |m_p - e^{Es} m_q|^2 + |sigma_p - e^{Es} sigma_q|^2, and the KL
divergence of the marginals, are smooth functions of s whose gradient is E^T of an elementwise one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.align.board import Board
from onebasin.posterior import Posterior
from onebasin.symmetry import Element, Symmetry

_STEPS = 300


class Scales:
    """All positive scales of a symmetry, acting on the flat vector of uncertain weights of a posterior.

    Attributes:
        size: number of log scales; 0 if the symmetry has none.
    """

    def __init__(self, symmetry: Symmetry, like: Posterior) -> None:
        """Write down E for the weights of `like`."""
        self.symmetry = symmetry
        self.board = Board.of(symmetry)
        self.gauges: dict[tuple[int, int], int] = {}  # (space, generator) -> its first column
        self.size = 0
        for number, space in enumerate(symmetry.spaces):
            for generator, kind in enumerate(space.generators):
                if kind.endswith("scale"):
                    self.gauges[number, generator] = self.size
                    self.size += self.board.coordinates(number)
        self.powers = self._powers(like)

    def _powers(self, like: Posterior) -> Any:
        """E as a sparse matrix of scipy, float64 (weights, scales)."""
        from scipy.sparse import csr_matrix

        starts = dict(zip(like.layout.names, np.cumsum([0, *like.layout.sizes]).tolist(), strict=False))
        rows, columns, values = [], [], []
        for block in self.board.blocks:
            if block.tensor not in starts:
                continue
            shape = self.symmetry.shapes[block.tensor]
            stop = starts[block.tensor] + math.prod(shape)
            places = block.take(torch.arange(starts[block.tensor], stop).reshape(1, *shape))
            for foot in block.feet:
                units = block.spread(foot, torch.arange(self.board.coordinates(foot.space))[None]).expand_as(places)
                for generator, power in enumerate(foot.powers):
                    if power and (foot.space, generator) in self.gauges:
                        rows.append(places.flatten())
                        columns.append(self.gauges[foot.space, generator] + units.flatten())
                        values.append(torch.full((places.numel(),), float(power), dtype=torch.float64))
        if not rows:
            return csr_matrix((like.layout.size, self.size))
        where = torch.cat(rows).numpy(), torch.cat(columns).numpy()
        return csr_matrix((torch.cat(values).numpy(), where), (like.layout.size, self.size))

    def element(self, logs: Tensor) -> Element:
        """The element with these log scales (size,), without orders and signs."""
        found = self.symmetry.identity()
        factors = {name: own.clone() for name, own in found.factors.items()}
        for (number, generator), start in self.gauges.items():
            own = factors[self.symmetry.spaces[number].name]
            part = logs[start : start + self.board.coordinates(number)].exp()
            own[generator] = part.reshape(own[generator].shape).to(own)
        return Element(found.orders, factors)

    def descended(self, p: Posterior, q: Posterior, objective: str) -> Element:
        """The scales s that make the distance of the marginals of p and e^{Es} q least, from where q is.

        L-BFGS; for diagonal Gaussians the objective is the squared Wasserstein distance or the KL divergence itself,
        for others that of independent weights with the same means and standard deviations.
        """
        left, right, turned = _marginals(p), _marginals(q), self.powers.T.tocsr()
        logs = torch.zeros(self.size, dtype=torch.float64)
        descent = torch.optim.LBFGS(
            [logs], max_iter=_STEPS, tolerance_grad=1e-10, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        )

        def measured() -> float:
            value, slope = _OBJECTIVES[objective](*left, *right, torch.from_numpy(self.powers @ logs.numpy()))
            logs.grad = torch.from_numpy(turned @ slope.numpy())
            return value

        descent.step(measured)
        return self.element(logs if bool(logs.isfinite().all()) else torch.zeros_like(logs))


def _marginals(posterior: Posterior) -> tuple[Tensor, Tensor]:
    return posterior.flat_mean.double().cpu(), posterior.flat_std.double().cpu()


def _wasserstein(mean: Tensor, std: Tensor, other: Tensor, spread: Tensor, logs: Tensor) -> tuple[float, Tensor]:
    """|mean - m other|^2 + |std - m spread|^2 and its gradient by log m."""
    factor = logs.exp()
    gaps = mean - factor * other, std - factor * spread
    slope = -2 * factor * (gaps[0] * other + gaps[1] * spread)
    return float(gaps[0].square().sum() + gaps[1].square().sum()), slope


def _kl(mean: Tensor, std: Tensor, other: Tensor, spread: Tensor, logs: Tensor) -> tuple[float, Tensor]:
    """The sum of log m + (std^2 + (mean - m other)^2) / (2 m^2 spread^2), and its gradient by log m."""
    factor = logs.exp()
    variance = (factor * spread).square()
    gap = mean - factor * other
    ratio = (std.square() + gap.square()) / variance
    return float((logs + ratio / 2).sum()), 1 - ratio - gap * factor * other / variance


_OBJECTIVES = {"kl": _kl, "wasserstein": _wasserstein}
