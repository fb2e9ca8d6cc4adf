"""Distances of all pairs of rows, summed over blocks of columns: nothing larger than (rows, rows) is kept.

Squared Euclidean distances come from products of matrices, |x|^2 + |y|^2 - 2 <x, y>. What is lost when nearly equal
numbers are subtracted is kept small in two ways: each block of columns is centred first, every group of rows about its
own centre, and products of blocks are summed in float64. For rows in float32 errors are then below 1e-6 of |x - c|^2, c
being the centre of the group. With D the way from the centre of y to that of x, and x', y' about their own,

    |x - y|^2 = |x' - y'|^2 + 2 <D, x'> - 2 <D, y'> + |D|^2.

Rows that are copies of each other are 0 apart, exactly: they are known by their bits (`Fingerprints`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebasin.errors import InputError

METRICS = ("l1", "l2")
COLUMNS = 2048  # of one product in the precision of the rows; longer sums are taken in float64
_ROWS = 192  # of one product, with all rows from there on: little is computed below the diagonal
_CACHED = 256  # rows and columns whose differences stay in the cache
_NEARLY = 1e-5  # of |x - c|^2 + |y - c|^2: above, rows are no copies
_ORDINARY = 30  # binary digits above and below 1 of numbers whose squares float32 can sum


class Squares:
    """Squared Euclidean distances of all pairs of rows (N, columns), which arrive in blocks of columns.

    Args:
        rows: N.
        split: the first so many rows are one group, the others another.
        device: where the rows are.
    """

    def __init__(self, rows: int, split: int, device: torch.device | None = None) -> None:
        self.split = split
        self.products = torch.zeros(rows, rows, dtype=torch.float64, device=device)
        self.leaning = torch.zeros(rows, dtype=torch.float64, device=device)  # <D, x'>
        self.apart = torch.zeros((), dtype=torch.float64, device=device)  # |D|^2
        self.prints = Fingerprints(rows, device)

    def add(self, rows: Tensor, unit: float = 1.0) -> None:
        """Take in a block (N, columns) in float32 or float64, finite and in units of `unit`; it is centred in place."""
        self.prints.add(rows)
        groups = [group for group in (rows[: self.split], rows[self.split :]) if len(group)]
        centres = [group.mean(0) for group in groups]
        for group, centre in zip(groups, centres, strict=True):
            group.sub_(centre)
        area = unit * unit  # infinite where float64 has no such number
        add_products(self.products, rows, area)
        if len(groups) == 2:
            way = centres[0] - centres[1]
            self.apart += area * way.double().square().sum()
            for part, step in zip(rows.split(COLUMNS, dim=1), way.split(COLUMNS), strict=True):
                self.leaning.add_(part @ step, alpha=area)

    def found(self) -> Tensor:
        """The squared distances so far, float64 (N, N), symmetric with zeros on the diagonal and for copies."""
        result = squares(self.products)
        first, second = self.leaning[: self.split, None], self.leaning[None, self.split :]
        across = result[: self.split, self.split :]
        across.add_(self.apart + 2 * first - 2 * second).clamp_min_(0)
        result[self.split :, : self.split] = across.T
        sizes = self.products.diagonal() + self.apart
        near = result <= _NEARLY * (sizes[:, None] + sizes)  # if two prints are equal by chance, their rows are not
        return result.masked_fill_(self.prints.equal() & near, 0)


class Fingerprints:
    """One number for each row, equal for rows of equal numbers and, but for a chance of 2^-30, for no others.

    The bits of a row, taken as whole numbers, are summed with random weights modulo 2^64, which no order of summation
    changes.
    """

    def __init__(self, rows: int, device: torch.device | None = None) -> None:
        self.sums = torch.zeros(rows, dtype=torch.int64, device=device)
        self.generator = torch.Generator().manual_seed(0)

    def add(self, rows: Tensor) -> None:
        """Take in the next columns (N, columns), in float32 or float64."""
        for part in rows.split(COLUMNS, dim=1):
            drawn = torch.randint(-(2**62), 2**62, (part.shape[1],), generator=self.generator)
            bits = (part + 0.0).view(torch.int32 if part.dtype == torch.float32 else torch.int64)  # -0 becomes 0
            mixed = bits.long() if bits.dtype == torch.int32 else bits ^ (bits >> 32)  # low bits are often all 0
            self.sums += mixed.mul_(drawn.to(part.device)).sum(1)

    def equal(self) -> Tensor:
        """Which rows are the same, bool (N, N)."""
        return self.sums[:, None] == self.sums


def unit_of(rows: Tensor) -> float:
    """Return the power of two in whose units rows can be squared: 1 for all but very large and very small numbers.

    >>> unit_of(torch.tensor([[0.001, 5.0]])), unit_of(torch.tensor([[0.0, 2.0**-100]]))
    (1.0, 1.57...e-30)

    Args:
        rows: of any shape, in float32 or float64.

    Returns:
        The unit; NaN where an entry is NaN or infinite.
    """
    low, high = (float(end) for end in rows.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.nan
    _, exponent = math.frexp(max(-low, high))
    reach = 120 if rows.dtype == torch.float32 else 1000  # units that are numbers of this dtype, and so their inverses
    return 1.0 if abs(exponent) <= _ORDINARY else 2.0 ** max(-reach, min(reach, exponent))


def add_products(total: Tensor, rows: Tensor, factor: float = 1.0) -> None:
    """Add factor <r_i, r_j> to the upper part of `total`.

    Args:
        total: float64 (N, N); entries below the diagonal are not to be relied on, see `squares`.
        rows: (N, columns), float32 or float64, centred already.
        factor: of the products.
    """
    for part in rows.split(COLUMNS, dim=1):
        for start in range(0, len(rows), _ROWS):
            stop = start + _ROWS
            total[start:stop, start:].add_(part[start:stop] @ part[start:].T, alpha=factor)


def squares(products: Tensor) -> Tensor:
    """Turn products (N, N) of `add_products` into squared distances, symmetric with zeros on the diagonal."""
    norms = products.diagonal()
    upper = (norms[:, None] + norms[None] - 2 * products).clamp_min_(0).triu_(1)
    return upper + upper.T


def add_absolutes(total: Tensor, rows: Tensor, unit: float = 1.0) -> None:
    """Add unit sum_k |r_ik - r_jk| to `total`, float64 (N, N), in the upper tiles only; see `mirrored`."""
    for left, right in _tiles(len(rows), _CACHED):
        for columns in range(0, rows.shape[1], _CACHED):
            part = rows[:, columns : columns + _CACHED]
            there = part[right].contiguous()
            difference = torch.empty_like(there)
            sums = [torch.sub(there, row, out=difference).abs_().sum(1) for row in part[left]]
            total[left, right].add_(torch.stack(sums), alpha=unit)


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
    unit = unit_of(rows.double()) if rows.numel() else 1.0
    if math.isnan(unit):
        raise InputError("expected finite rows, found NaN or infinity: leave these members out")
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    found = Squares(len(rows), len(rows), rows.device)
    for part in rows.split(COLUMNS, dim=1):
        wide = part.double() / unit
        if metric == "l1":
            add_absolutes(total, wide)
        else:
            found.add(wide)
    return (mirrored(total) if metric == "l1" else found.found().sqrt_()) * unit


def _tiles(rows: int, size: int) -> list[tuple[slice, slice]]:
    """Pairs of row ranges that cover everything on and above the diagonal."""
    parts = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    return [(left, right) for number, left in enumerate(parts) for right in parts[number:]]
