"""Out-of-distribution detection: five scores of inputs, and how well a score separates two kinds of inputs.

Each score takes what the members of a population give, (members, examples, classes), and returns one number per example
in float64, higher = more out-of-distribution. What is averaged over members, and when:

- `msp` and `entropy_score` judge the average of the probabilities (torch-uncertainty's entropy criterion is the mean of
  member entropies instead, which is `onebasin.metrics.entropy.expected_entropy`);
- `mutual_information` compares that average with its members;
- `max_logit` and `energy` judge the average of the logits. They see what softmax does not: a constant added to all
  logits of an example changes them.

Where only averages are kept, `msp`, `entropy_score`, `max_logit` and `energy` take them as (examples, classes).

`auroc`, `aupr`, `fpr95` and `separation` take scores (examples,) of in-distribution and of out-of-distribution examples
as `in_distribution` and `ood`. Only their order matters. A threshold calls everything at or above it
out-of-distribution (with positive="in_distribution": everything at or below it in-distribution), so equal scores are
always called the same. For bootstrap draws, `weights` is a pair (..., examples), one for `in_distribution` and one for
`ood`; see `onebasin.metrics.probabilities`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.entropy import entropy as _entropy
from onebasin.metrics.entropy import mean_over_members
from onebasin.metrics.probabilities import MEMBERS, as_probabilities, as_weights, at_most

Positive = Literal["ood", "in_distribution"]
Weights = tuple[Tensor, Tensor]
_WANTED = (19, 20)  # 95 % as whole numbers: 0.95 n is not exact in floating point


@accepts_arrays
def auroc(in_distribution: Tensor, ood: Tensor, *, weights: Weights | None = None) -> Tensor:
    """Area under the ROC curve: P(ood > in_distribution) + 1/2 P(ood = in_distribution) for one random score of each.

    It is the same whichever of the two is called positive.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))  # 5 of 6 pairs, and half of a tie
    tensor(0.9167, dtype=torch.float64)
    """
    return _counted(in_distribution, ood, weights).auroc()


@accepts_arrays
def aupr(in_distribution: Tensor, ood: Tensor, *, positive: Positive = "ood", weights: Weights | None = None) -> Tensor:
    """Area under the precision-recall curve as average precision, sum_t (recall_t - recall_t-1) precision_t.

    Thresholds t are the distinct scores, from the most to the least typical of the positive kind. There is no
    interpolation between them. It depends on the ratio of the two numbers of examples: a useless score has
    the share of positive ones.

    >>> in_distribution, ood = torch.tensor([0.1, 0.4]), torch.tensor([0.3, 0.9])
    >>> aupr(in_distribution, ood), aupr(in_distribution, ood, positive="in_distribution")
    (tensor(0.8333, dtype=torch.float64), tensor(0.8333, dtype=torch.float64))

    Args:
        in_distribution: scores of in-distribution examples (n,).
        ood: scores of out-of-distribution examples (m,).
        positive: which kind is to be found: "ood" gives what is called AUPR-out, "in_distribution" AUPR-in.
        weights: (..., n) and (..., m).
    """
    return _counted(in_distribution, ood, weights).aupr(positive)


@accepts_arrays
def fpr95(
    in_distribution: Tensor, ood: Tensor, *, positive: Positive = "ood", weights: Weights | None = None
) -> Tensor:
    """Share of the negative examples that are called positive when at least 95 % of the positive ones are.

    The threshold is the strictest one, among the distinct scores, that calls at least 95 % of the positive examples
    positive; scores equal to it are called positive too. (Libraries that take the recall nearest to 95 % may stop below
    it. In the literature on detection both orientations are called FPR95; "in_distribution" is the older one.)

    >>> in_distribution, ood = torch.arange(100.0), torch.arange(50.0, 150.0)
    >>> fpr95(in_distribution, ood)  # 95 of 100 are at least 55, and so are 45 in distribution
    tensor(0.4500, dtype=torch.float64)

    Args:
        in_distribution: scores of in-distribution examples (n,).
        ood: scores of out-of-distribution examples (m,).
        positive: which kind is to be found: "ood" or "in_distribution".
        weights: (..., n) and (..., m).
    """
    return _counted(in_distribution, ood, weights).fpr95(positive)


@accepts_arrays
def separation(in_distribution: Tensor, ood: Tensor, *, weights: Weights | None = None) -> dict[str, Tensor]:
    """All of the above by name, from one sort: auroc, aupr_in, aupr_out, fpr95_in and fpr95_out.

    >>> found = separation(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.9]))
    >>> {name: float(value) for name, value in found.items()}
    {'auroc': 1.0, 'aupr_in': 1.0, 'aupr_out': 1.0, 'fpr95_in': 0.0, 'fpr95_out': 0.0}

    Returns:
        Each (...), a single number without weights, float64; in and out say which kind is positive.
    """
    counts = _counted(in_distribution, ood, weights)
    return {
        "auroc": counts.auroc(),
        "aupr_in": counts.aupr("in_distribution"),
        "aupr_out": counts.aupr("ood"),
        "fpr95_in": counts.fpr95("in_distribution"),
        "fpr95_out": counts.fpr95("ood"),
    }


@dataclass(frozen=True, eq=False)
class _Counts:
    """How many scores of either kind are at most each distinct score, (..., 1 + distinct); the first is zero."""

    in_distribution: Tensor
    ood: Tensor

    def auroc(self) -> Tensor:
        below = (self.in_distribution[..., 1:] + self.in_distribution[..., :-1]) / 2
        return (self.ood.diff(dim=-1) * below).sum(-1) / (self.in_distribution[..., -1] * self.ood[..., -1])

    def aupr(self, positive: Positive) -> Tensor:
        hits, misses = self.called(positive)
        precision = hits[..., 1:] / (hits + misses)[..., 1:].clamp(min=torch.finfo(torch.float64).tiny)
        return (hits.diff(dim=-1) * precision).sum(-1) / hits[..., -1]

    def fpr95(self, positive: Positive) -> Tensor:
        hits, misses = self.called(positive)
        part, whole = _WANTED
        enough = whole * hits >= part * hits[..., -1:]
        return misses.masked_fill(~enough, torch.inf).amin(-1) / misses[..., -1]

    def called(self, positive: Positive) -> tuple[Tensor, Tensor]:
        """Positive and negative examples called positive, from the strictest threshold (none) to the laxest (all)."""
        if positive == "in_distribution":
            return self.in_distribution, self.ood
        if positive == "ood":
            return (self.ood[..., -1:] - self.ood).flip(-1), (
                self.in_distribution[..., -1:] - self.in_distribution
            ).flip(-1)
        raise InputError(f'expected positive to be "ood" or "in_distribution", found {positive!r}; give "ood"')


def _counted(in_distribution: Tensor, ood: Tensor, weights: Weights | None) -> _Counts:
    if weights is not None and (not isinstance(weights, tuple) or len(weights) != 2):
        raise InputError(
            "expected a pair of weights, for the scores in_distribution and ood, found something else; draw the two "
            "kinds separately"
        )
    near, far = _scores(in_distribution, "in_distribution"), _scores(ood, "ood").to(in_distribution.device)
    near_weights, far_weights = weights or (None, None)
    values = torch.cat([near, far]).unique()
    counts = [
        torch.nn.functional.pad(at_most(scores, as_weights(count, len(scores), scores.device), values), (1, 0))
        for scores, count in ((near, near_weights), (far, far_weights))
    ]
    return _Counts(counts[0], counts[1])


def _scores(values: Tensor, which: str) -> Tensor:
    if values.dim() != 1 or not len(values) or not values.is_floating_point() or bool(values.isnan().any()):
        raise InputError(
            f"expected {which} to be floating scores (examples,) without NaN, found {values.dtype} of shape "
            f"{tuple(values.shape)} with {int(values.isnan().sum())} NaN; give one score per example"
        )
    return values.detach().double()


@accepts_arrays
def msp(probabilities: Tensor) -> Tensor:
    """Minus the largest average probability, -max_k mean_m p_mk (maximum softmax probability).

    >>> msp(torch.tensor([[[0.9, 0.1]], [[0.3, 0.7]]]))
    tensor([-0.6000], dtype=torch.float64)
    """
    return -_predictive(probabilities).amax(1)


@accepts_arrays
def entropy_score(probabilities: Tensor) -> Tensor:
    """Entropy of the average probabilities in nats.

    >>> entropy_score(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931], dtype=torch.float64)
    """
    return _entropy(_predictive(probabilities))


@accepts_arrays
def max_logit(logits: Tensor) -> Tensor:
    """Minus the largest average logit, -max_k mean_m z_mk.

    >>> max_logit(torch.tensor([[[4.0, 0.0]], [[2.0, 6.0]]]))
    tensor([-3.], dtype=torch.float64)
    """
    return -_mean_logits(logits).amax(1)


@accepts_arrays
def energy(logits: Tensor) -> Tensor:
    """Energy of the average logits, -log sum_k exp(mean_m z_mk).

    >>> energy(torch.zeros(3, 1, 2))
    tensor([-0.6931], dtype=torch.float64)
    """
    return -_mean_logits(logits).logsumexp(1)


@accepts_arrays
def ood_scores(probabilities: Tensor, logits: Tensor, mutual_information: Tensor) -> dict[str, Tensor]:
    """Every score by its name, each (examples,): higher = further out of distribution.

    Args:
        probabilities: average probabilities (examples, classes).
        logits: average logits (examples, classes).
        mutual_information: of the networks (examples,).
    """
    return {
        "msp": msp(probabilities),
        "entropy": entropy_score(probabilities),
        "mutual_information": mutual_information,
        "max_logit": max_logit(logits),
        "energy": energy(logits),
    }


def _predictive(probabilities: Tensor) -> Tensor:
    if probabilities.dim() == 3:
        return mean_over_members(as_probabilities(probabilities, MEMBERS))
    return as_probabilities(probabilities)


def _mean_logits(logits: Tensor) -> Tensor:
    if logits.dim() not in (2, 3) or not logits.numel() or not bool(torch.isfinite(logits).all()):
        raise InputError(
            f"expected finite logits {MEMBERS}, or their average, found shape {tuple(logits.shape)} with "
            f"{int((~torch.isfinite(logits)).sum())} entries that are not finite; give what the last layer returns"
        )
    return mean_over_members(logits) if logits.dim() == 3 else logits.detach().double()
