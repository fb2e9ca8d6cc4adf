"""Distances of all pairs of rows, summed over blocks of columns: nothing larger than (rows, rows) is kept.

Squared Euclidean distances come from products of matrices, |x|^2 + |y|^2 - 2 <x, y>. What is lost when nearly equal
numbers are subtracted is kept small in two ways: each block of columns is centred first, which changes no distance, and
products of blocks are summed in float64. For rows in float32 errors are then below 1e-6 of |x - c|^2, c being the
centre of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError

METRICS = ("l1", "l2")
COLUMNS = 2048  # of one product in the precision of the rows; longer sums are taken in float64
_TILE = 512  # rows of one product: only tiles on and above the diagonal are computed
_CACHED = 256  # rows and columns whose differences stay in the cache


def add_products(total: Tensor, rows: Tensor) -> None:
    """Add <r_i, r_j> to the upper tiles of `total`.

    Args:
        total: float64 (N, N); entries below the diagonal are not to be relied on, see `squares`.
        rows: (N, columns), float32 or float64, centred already.
    """
    for part in rows.split(COLUMNS, dim=1):
        for left, right in _tiles(len(rows), _TILE):
            total[left, right].add_(part[left] @ part[right].T)


def squares(products: Tensor) -> Tensor:
    """Turn products (N, N) of `add_products` into squared distances, symmetric with zeros on the diagonal."""
    norms = products.diagonal()
    upper = (norms[:, None] + norms[None] - 2 * products).clamp_min_(0).triu_(1)
    return upper + upper.T


def add_absolutes(total: Tensor, rows: Tensor) -> None:
    """Add sum_k |r_ik - r_jk| to `total`, float64 (N, N), in the upper tiles only; see `mirrored`."""
    for left, right in _tiles(len(rows), _CACHED):
        for columns in range(0, rows.shape[1], _CACHED):
            part = rows[:, columns : columns + _CACHED]
            there = part[right].contiguous()
            difference = torch.empty_like(there)
            sums = [torch.sub(there, row, out=difference).abs_().sum(1) for row in part[left]]
            total[left, right].add_(torch.stack(sums))


def mirrored(upper: Tensor) -> Tensor:
    """Return the symmetric matrix whose part above the diagonal is given, with zeros on the diagonal."""
    above = upper.triu(1)
    return above + above.T


def pairwise(rows: Tensor, metric: str = "l2") -> Tensor:
    """Return the distances of all pairs of rows.

    >>> pairwise(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), "l2").tolist()
    [[0.0, 5.0], [5.0, 0.0]]

    Args:
        rows: (N, columns) of any floating-point type; computed in float64.
        metric: "l1" or "l2".

    Returns:
        float64 (N, N).
    """
    if metric not in METRICS:
        raise InputError(f"expected metric {' or '.join(METRICS)}, found {metric!r}: choose one of them")
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in rows.split(COLUMNS, dim=1):
        wide = part.double()
        if metric == "l1":
            add_absolutes(total, wide)
        else:
            add_products(total, wide - wide.mean(0))
    return mirrored(total) if metric == "l1" else squares(total).sqrt_()


def _tiles(rows: int, size: int) -> list[tuple[slice, slice]]:
    """Pairs of row ranges that cover everything on and above the diagonal."""
    parts = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    return [(left, right) for number, left in enumerate(parts) for right in parts[number:]]
