"""How much two networks disagree, for all pairs of a crowd at the price of one matrix product.

The mutual information of a pair, H((p + q) / 2) - (H(p) + H(q)) / 2, adds up over classes, and what one class adds is
a squared distance (Fuglede & Topsøe 2004): with s log s = integral of exp(-t s) / t^2 dt + a + b s,

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
from onebasin.metrics.distances import COLUMNS, add_products, mirrored, squares
from onebasin.metrics.probabilities import MEMBERS, as_probabilities

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
SMALL = 1e-3  # nats: crowds whose median pair is below are sure of the same
_SAMPLED = 64  # pairs that are computed exactly: to decide, or because there are no more
_CELLS = 1 << 22  # probabilities that are looked at a time: 32 MB in float64


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

    Raises:
        InputError: these are no probabilities.
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

    Raises:
        InputError: these are no probabilities, or there are no such members.
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
        own: Tensor = torch.special.entr(exact).sum((1, 2))
        for number, (first, second) in enumerate(places.tolist()):
            together: Tensor = torch.special.entr((exact[first] + exact[second]) / 2)
            total[number] += together.sum() - (own[first] + own[second]) / 2
    return (total / examples).clamp(min=0)
