"""The leading directions of a crowd by random projection (Halko, Martinsson and Tropp, 2011), in a few readings.

X (N, D) are the deviations of N networks from their centres. They are read in blocks and never held. With Q a basis
(D, L) of the span of X^T times random numbers, improved by `passes` turns of Q <- orth(X^T X Q), and U (N, K) the
leading left singular vectors of X Q,

    factor = X^T U / sqrt(degrees),    so that    factor factor^T = X^T U U^T X / degrees <= X^T X / degrees:

since U U^T is a projection among the networks, no weight gets more variance than the crowd has. (Projecting the weights
by Q Q^T instead does not promise that.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebasin.posterior.matrix import Matrix, Read, Rows

_PIECE_VALUES = 1 << 20  # of a factor that are held in float64 at once


def leading_factor(
    rows: Rows | Matrix,
    size: tuple[int, int],
    rank: int,
    *,
    degrees: int,
    oversample: int,
    passes: int,
    like: Tensor,
    seed: int,
) -> Tensor:
    """The factor (D, K) of the best covariance of rank K, columns orthogonal, longest first.

    Exact, up to rounding, where K + oversample reaches the number of networks.

    Args:
        rows: X, or what begins a reading of it.
        size: N and D.
        rank: K; no more columns are returned than `degrees`, for there are no more directions.
        degrees: the divisor of the covariance, such as N - 1.
        oversample: further directions that are searched, L = K + oversample.
        passes: power passes, one reading each; more find directions whose variances differ little.
        like: dtype and device to compute in.
        seed: for the random projection.
    """
    x = rows if isinstance(rows, Matrix) else Read(rows)
    count, width = size
    kept = min(rank, degrees)
    searched = min(rank + oversample, count)
    if searched == count:  # nothing to project: the networks themselves span everything
        factor = x.gathered(torch.eye(count, dtype=like.dtype, device=like.device), width)
        return _ordered(factor)[:, :kept] / math.sqrt(degrees)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(count, searched, generator=generator, dtype=torch.float64).to(like)
    basis = _orthonormal(x.gathered(start, width))
    for _ in range(passes):
        basis = _orthonormal(x.turned(basis))
    projected = x.times(basis)
    del basis
    left: Tensor = torch.linalg.svd(projected.double(), full_matrices=False).U[:, :kept]
    return _ordered(x.gathered(left.to(like), width)) / math.sqrt(degrees)


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _ordered(factor: Tensor) -> Tensor:
    """The same factor factor^T with orthogonal columns, longest first.

    Inner products are float64: in those of float32 a column 1e-4 times as long as the longest is lost.
    """
    pieces = factor.split(max(1, _PIECE_VALUES // max(1, factor.shape[1])))
    inner = factor.new_zeros(factor.shape[1], factor.shape[1], dtype=torch.float64)
    for piece in pieces:
        inner.addmm_(piece.double().T, piece.double())
    turn: Tensor = torch.linalg.eigh(inner).eigenvectors.flip(1)
    return torch.cat([(piece.double() @ turn).to(factor) for piece in pieces])
