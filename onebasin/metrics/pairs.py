"""Pairs of a population: distances of all pairs of rows, and the mutual information of all pairs of networks.

Distances are summed over blocks of columns, and nothing larger than (rows, rows) is kept. Squared Euclidean distances
come from products of matrices, |x|^2 + |y|^2 - 2 <x, y>. What is lost when nearly equal numbers are subtracted is kept
small in two ways: each block of columns is centred first, every group of rows about its own centre, and products of
blocks are summed in float64. For rows in float32 errors are then below 1e-6 of |x - c|^2, c being the centre of the
group. Between two groups, with D the way from the centre of y to that of x, and x', y' about their own,

    |x - y|^2 = |x' - y'|^2 + 2 <D, x'> - 2 <D, y'> + |D|^2.

Rows that are copies of each other are 0 apart, exactly: they are known by their bits (`Fingerprints`).

How much two networks disagree takes one matrix product for all pairs. The mutual information of a pair,
H((p + q) / 2) - (H(p) + H(q)) / 2, adds up over classes, and what one class adds is a squared distance (Fuglede &
Topsøe 2004): with s log s = integral of exp(-t s) / t^2 dt + a + b s,

    J(p, q) = 1/4 integral (exp(-t p) - exp(-t q))^2 / t^2 dt.

`TERMS` replaces the integral by a sum of eight terms, so each probability becomes eight numbers, and all pairs of M
networks need one product of a matrix with M rows with itself instead of M (M - 1) / 2 times as many logarithms as
there are probabilities. The sum is the best there is: its error, as a function of s in [0, 2], has 19 equally high
peaks of alternating sign (found by Remez' exchange). They are 3.41e-6 high, and J takes the error at p + q, 2 p and
2 q with weights 1, 1/2 and 1/2; hence `ERROR`.

Of networks that agree and are sure, J is as small as that. For them `MANY_TERMS` take the integral over u = log t by
the rule of trapezoids, whose step h costs a share of about exp(-pi^2 / h) of J, whatever its size: the error is a share
of the value for all probabilities above 1e-9.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import MEMBERS, as_probabilities

METRICS = ("l1", "l2")
COLUMNS = 2048  # of one product in the precision of the rows; longer sums are taken in float64
_ROWS = 192  # of one product, with all rows from there on: little is computed below the diagonal
_CACHED = 256  # rows and columns whose differences stay in the cache
_NEARLY = 1e-5  # of |x - c|^2 + |y - c|^2: above, rows are no copies
_ORDINARY = 30  # binary digits above and below 1 of numbers whose squares float32 can sum


class Within:
    """Squared Euclidean distances of all pairs of rows x (N, columns), which arrive in blocks of columns.

    Args:
        rows: N.
        device: where the rows are.
    """

    def __init__(self, rows: int, device: torch.device | None = None) -> None:
        self.products = torch.zeros(rows, rows, dtype=torch.float64, device=device)
        self.prints = Fingerprints(rows, device)

    def add(self, rows: Tensor, unit: float = 1.0) -> None:
        """Take in a block (N, columns) in float32 or float64, finite and in units of `unit`; it is not changed."""
        self.prints.add(rows)
        add_products(self.products, rows - rows.mean(0), unit * unit)  # infinite where float64 has no such number

    def found(self) -> Tensor:
        """The squared distances so far, float64 (N, N), symmetric with zeros on the diagonal and for copies."""
        norms, distances = self.products.diagonal(), squares(self.products)
        if len(self.prints.sums.unique()) == len(distances):
            return distances
        return _without_copies(distances, (norms, norms), (self.prints, self.prints))


class Across:
    """Squared Euclidean distances of rows x (m, columns) from rows y (n, columns), in blocks of columns.

    Args:
        left: m.
        right: n.
        device: where the rows are.
    """

    def __init__(self, left: int, right: int, device: torch.device | None = None) -> None:
        self.products = torch.zeros(left, right, dtype=torch.float64, device=device)
        self.norms = self.products.new_zeros(left), self.products.new_zeros(right)  # |x'|^2, |y'|^2
        self.leaning = self.products.new_zeros(left), self.products.new_zeros(right)  # <D, x'>, <D, y'>
        self.apart = self.products.new_zeros(())  # |D|^2
        self.prints = Fingerprints(left, device), Fingerprints(right, device)

    def add(self, x: Tensor, y: Tensor, unit: float = 1.0) -> None:
        """Take in blocks of the same columns, as `Within` does."""
        area = unit * unit
        centres = [rows.mean(0) for rows in (x, y)]
        way = centres[0] - centres[1]
        self.apart += area * way.double().square().sum()
        left, right = (rows - centre for rows, centre in zip((x, y), centres, strict=True))
        for rows, centred, prints, norms, leaning in zip(
            (x, y), (left, right), self.prints, self.norms, self.leaning, strict=True
        ):
            prints.add(rows)
            norms.add_(torch.linalg.vector_norm(centred, dim=1, dtype=torch.float64).square(), alpha=area)
            for part, step in zip(centred.split(COLUMNS, dim=1), way.split(COLUMNS), strict=True):
                leaning.add_(part @ step, alpha=area)
        for here, there in zip(left.split(COLUMNS, dim=1), right.split(COLUMNS, dim=1), strict=True):
            self.products.add_(here @ there.T, alpha=area)

    def found(self) -> Tensor:
        """The squared distances so far, float64 (m, n), zero for copies."""
        x, y = self.norms
        leaning = self.leaning[0][:, None] - self.leaning[1]
        result = (x[:, None] + y).sub_(self.products, alpha=2).add_(leaning, alpha=2).add_(self.apart).clamp_min_(0)
        return _without_copies(result, (x + self.apart, y + self.apart), self.prints)


def _without_copies(squares: Tensor, sizes: tuple[Tensor, Tensor], prints: tuple[Fingerprints, Fingerprints]) -> Tensor:
    """Set the distances (m, n) of copies to 0, in place; if two prints are equal by chance, their rows are not near."""
    left, right = (one.sums for one in prints)
    for row in torch.isin(left, right).nonzero().flatten().tolist():
        near = squares[row] <= _NEARLY * (sizes[0][row] + sizes[1])
        squares[row].masked_fill_((left[row] == right) & near, 0)
    return squares


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
        total: float64 (N, N); entries below the diagonal are not to be relied on.
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
    return mirrored((norms[:, None] + norms).sub_(products, alpha=2).clamp_min_(0))


def add_absolutes(total: Tensor, left: Tensor, right: Tensor | None = None, unit: float = 1.0) -> None:
    """Add unit sum_k |x_ik - y_jk| to `total`, float64 (m, n).

    Args:
        total: where to.
        left: x, (m, columns).
        right: y, (n, columns); x itself if it is left out, and then only upper tiles are filled, see `mirrored`.
        unit: of the numbers.
    """
    other = left if right is None else right
    for rows in _ranges(len(left), _CACHED):
        for columns in _ranges(left.shape[1], _CACHED):
            here = left[rows, columns]
            for others in _ranges(len(other), _CACHED):
                if right is None and others.start < rows.start:
                    continue
                there = other[others, columns].contiguous()
                difference = torch.empty_like(there)
                sums = [torch.sub(there, row, out=difference).abs_().sum(1) for row in here]
                total[rows, others].add_(torch.stack(sums), alpha=unit)


@accepts_arrays
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
        raise InputError(f"expected metric {' or '.join(METRICS)}, found {metric!r}: give 'l2'")
    unit = unit_of(rows.double()) if rows.numel() else 1.0
    if math.isnan(unit):
        raise InputError("expected finite rows, found NaN or infinity: leave these members out")
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    sums = Within(len(rows), rows.device)
    for part in rows.split(COLUMNS, dim=1):
        wide = part.double() / unit
        if metric == "l1":
            add_absolutes(total, wide)
        else:
            sums.add(wide)
    return (mirrored(total) if metric == "l1" else sums.found().sqrt_()) * unit


def _ranges(count: int, size: int) -> list[slice]:
    """Ranges of at most `size` that cover everything."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


# (t, v): 1/2 s log s = a + b s + sum of v exp(-t s), for 0 <= s <= 2
TERMS = (
    (0.466340239934, 2.82116755496),
    (2.76281787863, 0.237225898885),
    (8.76226652201, 0.0608865817111),
    (25.3404023442, 0.0213313407761),
    (78.7229997439, 0.00761534509589),
    (286.569649261, 0.00244656819272),
    (1369.87119288, 0.000645423860814),
    (11750.5047837, 0.000116593190321),
)
ERROR = 6.82e-6  # nats per class, at most; signs alternate, so sums over classes and examples are far better
_STEP = 1.0  # of u = log t
_RATES = tuple(math.exp(_STEP * number) for number in range(-5, 29))
# Below the first rate exp(-t p) is a straight line: what is left of the integral there is a multiple of its first term.
MANY_TERMS = tuple((rate, _STEP / (2 * rate) / (-math.expm1(-_STEP) if rate == _RATES[0] else 1)) for rate in _RATES)
SMALL = 1e-3  # nats: populations whose median pair is below are sure of the same
_SAMPLED = 64  # pairs that are computed exactly: to decide, or because there are no more
_CELLS = 1 << 22  # probabilities that are looked at a time: 32 MB in float64


@accepts_arrays
def pairwise_mutual_information(probabilities: Tensor) -> Tensor:
    """Return the mutual information of every pair of networks in nats, averaged over examples, float64 (M, M).

    Symmetric, with zeros on the diagonal; between 0 for equal functions and log 2 for networks that are sure of
    different classes everywhere. Up to eleven networks are compared in float64. For more the error is

    * at most `ERROR` nats per class where half of the pairs have more than `SMALL` nats; measured, it is 2e-4 of a
      typical value or less for ten classes and 1e-3 for a thousand. A single pair that is far closer than the others is
      known up to `ERROR` only.
    * a share of 1e-3 of each value where they have less, and 1e-6 of the largest; that takes about four times as long.

    `mutual_information_of_pairs` gives chosen pairs in float64.

    >>> sure = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]])
    >>> pairwise_mutual_information(sure)
    tensor([[0.0000, 0.6931, 0.6931],
            [0.6931, 0.0000, 0.0000],
            [0.6931, 0.0000, 0.0000]], dtype=torch.float64)

    Args:
        probabilities: (members, examples, classes). They are read in blocks of examples; beside them and the result
            about 100 MB are needed.
    """
    _check_axes(probabilities)
    members, examples, classes = probabilities.shape
    first, second = torch.triu_indices(members, members, 1)
    chosen = torch.linspace(0, len(first) - 1, min(_SAMPLED, len(first)), dtype=torch.float64).long()
    sampled = mutual_information_of_pairs(probabilities, torch.stack([first[chosen], second[chosen]], 1))
    total = torch.zeros(members, members, dtype=torch.float64, device=probabilities.device)
    if len(chosen) == len(first):
        total[first, second] = sampled
        return mirrored(total)
    columns = min(2 * COLUMNS, _CELLS // members)
    terms = TERMS if float(sampled.median()) >= SMALL else MANY_TERMS
    for block in probabilities.detach().split(max(1, columns // classes), dim=1):
        cells = as_probabilities(block, MEMBERS).float().flatten(1)
        feature = torch.empty_like(cells)
        for rate, weight in terms:
            torch.mul(cells, -rate, out=feature)
            feature = feature.exp_() if terms is TERMS else feature.expm1_()  # digits of small numbers
            feature.sub_(feature.mean(0)).mul_(math.sqrt(weight / 2))  # distances are the same around any centre
            add_products(total, feature)
    return squares(total) / examples


def _check_axes(probabilities: Tensor) -> None:
    as_probabilities(probabilities[:1] if probabilities.dim() else probabilities, MEMBERS)


def mutual_information_of_pairs(probabilities: Tensor, pairs: Tensor) -> Tensor:
    """Return the mutual information of chosen pairs of networks in nats, averaged over examples, float64 (pairs,).

    >>> mutual_information_of_pairs(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[0, 1], [1, 1]]))
    tensor([0.6931, 0.0000], dtype=torch.float64)

    Args:
        probabilities: (members, examples, classes).
        pairs: numbers of members, integers (pairs, 2).
    """
    _check_axes(probabilities)
    members, examples, classes = probabilities.shape
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.is_floating_point():
        raise InputError(
            f"expected pairs of members as integers (pairs, 2), found {pairs.dtype} {tuple(pairs.shape)}: "
            "give two numbers per pair"
        )
    if not len(pairs):
        return torch.zeros(0, dtype=torch.float64, device=probabilities.device)
    if not 0 <= int(pairs.min()) <= int(pairs.max()) < members:
        raise InputError(
            f"expected members from 0 to {members - 1}, found {int(pairs.min())} to {int(pairs.max())}: "
            "number the members from 0"
        )
    total = torch.zeros(len(pairs), dtype=torch.float64, device=probabilities.device)
    chosen, places = pairs.to(probabilities.device).unique(return_inverse=True)
    for block in probabilities.detach().split(max(1, _CELLS // (len(chosen) * classes)), dim=1):
        exact = as_probabilities(block[chosen], MEMBERS)
        entropies: Tensor = torch.special.entr(exact).sum((1, 2))
        for number, (first, second) in enumerate(places.tolist()):
            together: Tensor = torch.special.entr((exact[first] + exact[second]) / 2)
            total[number] += together.sum() - (entropies[first] + entropies[second]) / 2
    return (total / examples).clamp(min=0)
