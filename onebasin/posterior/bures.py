"""The Bures metric: the part of the 2-Wasserstein distance of Gaussians that their covariances make.

d^2(A, B) = tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.posterior.spread import Spread

_DENSE = 2048  # up to so many weights covariances are written out


def squared_bures(a: Spread, b: Spread) -> tuple[float, float]:
    """Lower and upper bound of d^2; they are equal where it has a closed form.

    With no directions it is |scale_a - scale_b|^2. If both independent parts are multiples s and t of the identity (0
    also), all happens in the span of both factors but for (D - rank) (s - t)^2. Otherwise x = scale_a z + F u and
    y = scale_b z + G R u, with R the best rotation, is a coupling: above lies

        |scale_a - scale_b|^2 + |F|^2 + |G|^2 - 2 |F^T G|_*,

    and below lie the distances of the marginals, sum_i (std_a - std_b)_i^2.
    """
    if not (a.factor.shape[1] or b.factor.shape[1]):
        exact = float((a.scale - b.scale).square().sum())
        return exact, exact
    if _isotropic(a) and _isotropic(b):
        exact = _in_the_span(a, b)
        return exact, exact
    if len(a.scale) <= _DENSE:
        exact = _dense(_covariance(a.scale, a.factor), _covariance(b.scale, b.factor))
        return exact, exact
    low = float((_std(a) - _std(b)).square().sum())
    directions = a.factor.square().sum() + b.factor.square().sum() - 2 * _nuclear(a.factor.T @ b.factor)
    return low, max(low, float((a.scale - b.scale).square().sum() + directions.clamp(min=0)))


def _isotropic(spread: Spread) -> bool:
    return bool((spread.scale == spread.scale[0]).all())


def _in_the_span(a: Spread, b: Spread) -> float:
    """Both covariances are multiples of the identity outside of the span of their factors."""
    together = torch.cat([a.factor, b.factor], 1)
    if together.shape[1] >= len(together):
        return _dense(_covariance(a.scale, a.factor), _covariance(b.scale, b.factor))
    basis = torch.linalg.qr(together).Q
    kept = basis.shape[1]
    inside = [_covariance(spread.scale[:kept], basis.T @ spread.factor) for spread in (a, b)]
    outside: float = (len(together) - kept) * float(a.scale[0] - b.scale[0]) ** 2
    return _dense(inside[0], inside[1]) + outside


def _covariance(scale: Tensor, factor: Tensor) -> Tensor:
    return torch.diag(scale.square()) + factor @ factor.T


def _dense(a: Tensor, b: Tensor) -> float:
    """d^2 of two matrices: tr (A^1/2 B A^1/2)^1/2 is the nuclear norm of A^1/2 B^1/2."""
    return max(0.0, float(a.trace() + b.trace() - 2 * _nuclear(_root(a) @ _root(b))))


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def _nuclear(matrix: Tensor) -> Tensor:
    total: Tensor = torch.linalg.svdvals(matrix).sum()
    return total


def _std(spread: Spread) -> Tensor:
    return (spread.scale.square() + spread.factor.square().sum(1)).sqrt()
