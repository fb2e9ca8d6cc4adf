"""Split conformal prediction: scores of how strange a target is, and the threshold that covers a promised share.

If examples for calibration and new ones are exchangeable, a set that holds every target with a score of at most the
ceil((n + 1) coverage)-th smallest of n calibration scores holds the true one with probability of at least `coverage`,
whatever the model (Vovk et al., 2005). Given the calibration examples, and for scores without ties, the share that is
covered follows Beta(k, n + 1 - k) with k = ceil((n + 1) coverage).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import as_probabilities

SETS = ("thr", "aps", "raps")
INTERVALS = ("cqr", "split", "normalised")


@accepts_arrays
def conformal_threshold(scores: Tensor, coverage: float = 0.9) -> float:
    """The ceil((n + 1) coverage)-th smallest of n scores; infinite where there are fewer than that.

    >>> conformal_threshold(torch.arange(1.0, 10.0), 0.8), conformal_threshold(torch.arange(1.0, 10.0), 0.95)
    (8.0, inf)

    Args:
        scores: of calibration examples (examples,), not NaN.
        coverage: the share that is promised, above 0 and below 1.
    """
    if not 0 < coverage < 1:
        raise InputError(f"expected a coverage between 0 and 1, found {coverage}; 0.9 is usual")
    if scores.dim() != 1 or not len(scores) or bool(scores.isnan().any()):
        raise InputError(
            f"expected scores (examples,) without NaN, found shape {tuple(scores.shape)} with "
            f"{int(scores.isnan().sum())} NaN; give one score per calibration example"
        )
    place = conformal_rank(len(scores), coverage)
    return math.inf if place > len(scores) else float(scores.double().sort().values[place - 1])


def conformal_rank(examples: int, coverage: float) -> int:
    """Return k = ceil((n + 1) coverage), not moved by the rounding of a product that is a whole number.

    >>> conformal_rank(9, 0.9), conformal_rank(99, 0.07)
    (9, 7)
    """
    product = (examples + 1) * coverage
    return round(product) if math.isclose(product, round(product), rel_tol=1e-12) else math.ceil(product)


@accepts_arrays
def class_scores(
    probabilities: Tensor,
    method: str = "aps",
    *,
    penalty: float = 0.01,
    rank: int = 5,
    uniform: Tensor | None = None,
) -> Tensor:
    """Scores of every class of every example, float64 (examples, classes); a set holds those at or below a threshold.

    With the classes of an example in descending order of probability, r_k the place of class k from 1 and u uniform
    in [0, 1]:

    - "thr": 1 - p_k (Sadinle et al., 2019): the smallest sets on average;
    - "aps": the sum of the probabilities above p_k, + u p_k (Romano et al., 2020): larger sets where it is harder;
    - "raps": the same + penalty max(0, r_k - rank) (Angelopoulos et al., 2021), which keeps long tails out.

    >>> class_scores(torch.tensor([[0.5, 0.2, 0.3]]))
    tensor([[0.5000, 1.0000, 0.8000]], dtype=torch.float64)

    Args:
        probabilities: (examples, classes).
        method: one of `SETS`.
        penalty: of "raps".
        rank: of "raps": places that cost nothing.
        uniform: u of each example (examples,), for "aps" and "raps"; None takes 1, which covers too much.
    """
    exact = as_probabilities(probabilities)
    if method not in SETS:
        raise InputError(f"expected a method of sets out of {', '.join(SETS)}, found {method!r}: give 'aps'")
    if method == "thr":
        return 1 - exact
    ordered, places = exact.sort(dim=1, descending=True, stable=True)
    u = torch.ones(len(exact), dtype=torch.float64) if uniform is None else uniform.double()
    scores = ordered.cumsum(1) - (1 - u.to(exact.device)[:, None]) * ordered
    if method == "raps":
        steps = torch.arange(1, exact.shape[1] + 1, dtype=torch.float64, device=exact.device)
        scores = scores + penalty * (steps - rank).clamp(min=0)
    return torch.empty_like(exact).scatter_(1, places, scores)


@accepts_arrays
def interval_excess(low: Tensor, high: Tensor, targets: Tensor) -> Tensor:
    """Return max(low - y, y - high), how far targets are outside of intervals, negative inside; float64, as targets.

    The score of conformalised quantile regression (Romano et al., 2019); |y - m| where both ends are m.

    >>> interval_excess(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([3.0]))
    tensor([2.], dtype=torch.float64)
    """
    goal = targets.double()
    return torch.maximum(low.double() - goal, goal - high.double())
