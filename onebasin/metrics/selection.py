"""The k-th smallest of very many numbers, without sorting them or a copy of all: exact, in a few readings.

A few of the numbers tell between which two values it probably lies; how many are below is counted, and only those in
between are looked at one by one. Where the guess was wrong the interval is open on that side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PIECE = 1 << 15  # numbers that stay in the cache, and that torch does not share out to threads, which would wait
_FEW = 1 << 20  # numbers that are sorted out at once
_GUESSED = 1 << 16  # numbers that the guess is made from
_MARGIN = 0.02  # of all ranks on both sides of it: ten standard deviations of a random guess


def smallest(values: Tensor, rank: int) -> float:
    """Return the number that `rank` others of a tensor come before, in ascending order.

    >>> smallest(torch.tensor([[4.0, 1.0], [2.0, 3.0]]), 2)
    3.0

    Args:
        values: of any shape and any floating-point type, without NaN.
        rank: from 0 on.
    """
    flat = values.reshape(-1)
    if len(flat) <= _FEW:
        return float(flat.kthvalue(rank + 1).values)
    low, high = _guess(flat, rank / len(flat))
    below, inside = _between(flat, low, high)
    if not below <= rank < below + len(inside):  # the guess was wrong
        below, inside = 0, flat
    return float(inside.kthvalue(rank - below + 1).values)


def _between(flat: Tensor, low: float, high: float) -> tuple[int, Tensor]:
    """How many numbers are below, and those that are in between."""
    below, inside = 0, []
    for piece in flat.split(_PIECE):
        less = piece < low
        below += int(torch.count_nonzero(less))
        inside.append(piece[(piece <= high).logical_and_(less.logical_not_())])
    return below, torch.cat(inside)


def _guess(flat: Tensor, share: float) -> tuple[float, float]:
    """Two values that this share of the numbers probably lies between."""
    places = torch.randint(len(flat), (_GUESSED,), generator=torch.Generator().manual_seed(0))
    some = flat[places.to(flat.device)].sort().values
    last = len(some) - 1
    low, high = (round((share + side * _MARGIN) * last) for side in (-1, 1))
    return (float(some[low]) if low > 0 else -math.inf), (float(some[high]) if high < last else math.inf)
