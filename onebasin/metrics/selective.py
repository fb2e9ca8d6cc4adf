"""Selective prediction: what errors cost when the least confident examples are left out.

Each metric takes scores `confidence` (examples,), higher = surer, and `losses` (examples,) >= 0, such as 1 for a wrong
class and 0 for a right one; only the order of the scores matters. Let S(k) be the sum of losses of the k most confident
of n examples. At the coverage c = k / n,

    selective risk S(k) / k,    generalised risk S(k) / n,

the mean loss of what is answered, and the loss per example when an abstention costs nothing. Equal scores are
interchangeable: each example gets the mean loss of its group, which is the mean over all their orders, so no value
depends on how a sort treats ties. `weights` (..., examples) counts examples more than once, as in
`onebasin.metrics.probabilities`: copies of an example are ties, and whole weights give exactly the repeated sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.probabilities import as_class_numbers, as_probabilities, as_weights, at_most


@accepts_arrays
def aurc(confidence: Tensor, losses: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Area under the risk-coverage curve, 1/n sum_k S(k) / k: the mean selective risk (Geifman and El-Yaniv, 2017).

    It weighs the most confident examples most: an error of the first one counts in every term. With constant scores it
    is the mean loss.

    >>> aurc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.0, 1.0, 0.0]))  # (0 + 1/2 + 1/3) / 3
    tensor(0.2778, dtype=torch.float64)

    Args:
        confidence: (examples,).
        losses: (examples,).
        weights: (..., examples).
    """
    return _accepted(confidence, losses, weights).area()


@accepts_arrays
def augrc(confidence: Tensor, losses: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Area under the generalised risk-coverage curve, the integral of S / n over coverage (Traub et al., 2024).

    The curve is straight between groups of equal scores. For losses of 0 and 1 with mean e it is

        (1 - AUROC) e (1 - e) + e^2 / 2,

    AUROC being that of telling right from wrong by the scores: half the mean loss for constant scores.

    >>> augrc(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.0, 1.0, 0.0]))  # (0 + 1/2 + 1) / 9
    tensor(0.1667, dtype=torch.float64)

    Args:
        confidence: (examples,).
        losses: (examples,).
        weights: (..., examples).
    """
    return _accepted(confidence, losses, weights).generalised_area()


@accepts_arrays
def risk_at_coverage(
    confidence: Tensor, losses: Tensor, coverage: float | Tensor = 0.8, *, weights: Tensor | None = None
) -> Tensor:
    """Mean loss of the most confident share `coverage` of the examples; the one on the border counts by its share.

    >>> risk_at_coverage(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.0, 1.0, 0.0, 1.0]), coverage=0.5)
    tensor(0.5000, dtype=torch.float64)

    Args:
        confidence: (examples,).
        losses: (examples,).
        coverage: share of the examples that are answered, above 0, at most 1; of a tensor (c,) each is a result.
        weights: (..., examples).

    Returns:
        (...), or (..., c) for a tensor of coverages.
    """
    wanted = torch.as_tensor(coverage, dtype=torch.float64)
    _check_coverages(wanted, coverage)
    risks = _accepted(confidence, losses, weights).risk_at(wanted.reshape(-1).to(confidence.device))
    return risks if wanted.dim() else risks[..., 0]


@accepts_arrays
def coverage_at_risk(
    confidence: Tensor, losses: Tensor, risk: float = 0.05, *, weights: Tensor | None = None
) -> Tensor:
    """Largest share of the examples that a threshold on the scores answers with a mean loss of at most `risk`.

    Equal scores are answered together, as a threshold must. 0 where no threshold does it.

    >>> coverage_at_risk(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.0, 0.0, 0.0, 1.0]), risk=0.1)
    tensor(0.7500, dtype=torch.float64)

    Args:
        confidence: (examples,).
        losses: (examples,).
        risk: the mean loss that is allowed, from 0 on; above 1 only where losses are.
        weights: (..., examples).
    """
    _check_risk(risk, losses)
    return _accepted(confidence, losses, weights).coverage_at(risk)


@accepts_arrays
def ause(uncertainty: Tensor, errors: Tensor, *, normalised: bool = True, weights: Tensor | None = None) -> Tensor:
    """Area under the sparsification error (Ilg et al., 2018): how far scores of uncertainty are from ordering errors.

    The sparsification curve is the mean error of what is left when the most uncertain share goes; from it that of the
    oracle, which orders by the errors themselves, is taken away:

        1/n sum_k (S(k) / k of the scores - S(k) / k of the oracle),

    so it is the excess of `aurc` over its least value. 0 for the order of the errors.

    >>> ause(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 2.0, 1.0]))  # ((0+1+1) - (0+1/2+1)) / 3, mean error 1
    tensor(0.1667, dtype=torch.float64)

    Args:
        uncertainty: (examples,), higher = less sure.
        errors: (examples,) >= 0: absolute errors, or squared ones.
        normalised: divide by the mean error, as is usual, so that the curves begin at 1.
        weights: (..., examples).
    """
    own, oracle = (_accepted(-scores, errors, weights, ("uncertainty", "errors")) for scores in (uncertainty, errors))
    excess = (own.area() - oracle.area()).clamp(min=0)
    return excess / own.mean if normalised else excess


@accepts_arrays
def abstention(
    confidence: Tensor,
    losses: Tensor,
    *,
    coverage: float = 0.8,
    risk: float = 0.05,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """All of the above but `ause` by name, from one sort: aurc, augrc, risk_at_80 and coverage_at_5 (per cent).

    >>> found = abstention(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.0, 0.0, 1.0]))
    >>> {name: round(float(value), 4) for name, value in found.items()}
    {'aurc': 0.1111, 'augrc': 0.0556, 'risk_at_80': 0.1667, 'coverage_at_5': 0.6667}

    Args:
        confidence: (examples,).
        losses: (examples,).
        coverage: as in `risk_at_coverage`.
        risk: as in `coverage_at_risk`.
        weights: (..., examples).
    """
    _check_coverages(torch.as_tensor(coverage, dtype=torch.float64), coverage)
    _check_risk(risk, losses)
    found = _accepted(confidence, losses, weights)
    share = torch.tensor([coverage], dtype=torch.float64, device=found.count.device)
    return {
        "aurc": found.area(),
        "augrc": found.generalised_area(),
        f"risk_at_{100 * coverage:g}": found.risk_at(share)[..., 0],
        f"coverage_at_{100 * risk:g}": found.coverage_at(risk),
    }


@accepts_arrays
def confidence_and_errors(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The largest probability of each example, and 1 where its class is not the target, each float64 (examples,).

    >>> confidence_and_errors(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    (tensor([0.9000, 0.6000], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))

    Args:
        probabilities: (examples, classes).
        targets: class numbers (examples,).
    """
    exact = as_probabilities(probabilities)
    confidence, label = exact.max(1)
    return confidence, (label != as_class_numbers(targets, exact)).double()


@dataclass(frozen=True, eq=False)
class _Accepted:
    """Number and losses of the examples at or above each distinct score, descending (..., 1 + distinct); 0 first.

    Between its entries both are straight: the examples of a group have their mean loss.
    """

    count: Tensor
    loss: Tensor

    @property
    def mean(self) -> Tensor:
        return self.loss[..., -1] / self.count[..., -1]

    def area(self) -> Tensor:
        """Return 1/n sum_k S(k) / k.

        In a group from a to b with mean loss m, S(k) = S(a) + (k - a) m, so its part of the sum is

            sum_{k=a+1..b} S(k) / k = (b - a) m + (S(a) - a m) (H_b - H_a),

        H_k = 1 + 1/2 + ... + 1/k being the harmonic numbers, digamma(k + 1) up to a constant.
        """
        start, width = self.count[..., :-1], self.count.diff(dim=-1)
        mean = (self.loss.diff(dim=-1) / width).nan_to_num(nan=0.0)
        logarithms: Tensor = torch.special.digamma(self.count + 1)
        harmonic = logarithms.diff(dim=-1)
        return (width * mean + (self.loss[..., :-1] - start * mean) * harmonic).sum(-1) / self.count[..., -1]

    def generalised_area(self) -> Tensor:
        total = self.count[..., -1]
        return (self.count.diff(dim=-1) * (self.loss[..., 1:] + self.loss[..., :-1])).sum(-1) / (2 * total.square())

    def risk_at(self, coverage: Tensor) -> Tensor:
        ends = (coverage * self.count[..., -1:]).contiguous()
        after = torch.searchsorted(self.count.contiguous(), ends).clamp(1, self.count.shape[-1] - 1)
        low, high = self.count.gather(-1, after - 1), self.count.gather(-1, after)
        left, right = self.loss.gather(-1, after - 1), self.loss.gather(-1, after)
        return (left + (ends - low) / (high - low) * (right - left)) / ends

    def coverage_at(self, risk: float) -> Tensor:
        share = self.count / self.count[..., -1:]
        within = (self.loss <= risk * self.count) & (self.count > 0)
        return torch.where(within, share, 0.0).amax(-1)


def _check_coverages(wanted: Tensor, given: object) -> None:
    if wanted.dim() > 1 or not bool(((wanted > 0) & (wanted <= 1)).all()):
        raise InputError(f"expected coverages above 0 and at most 1, found {given}; 0.8 answers four in five")


def _check_risk(risk: float, losses: Tensor) -> None:
    """Refuse negative risks, and those above 1 where no loss is: a risk in per cent, that every example meets."""
    if not risk >= 0 or (risk > 1 and losses.numel() and bool((losses <= 1).all())):
        raise InputError(
            f"expected a risk from 0 to 1, as the losses are, found {risk}; 0.05 allows five errors in 100 answers"
        )


def _accepted(
    confidence: Tensor, losses: Tensor, weights: Tensor | None, names: tuple[str, str] = ("confidence", "losses")
) -> _Accepted:
    for name, values in zip(names, (confidence, losses), strict=True):
        if values.dim() == 1 and not len(confidence):
            raise InputError(f"expected {name} of at least one example, found none; give one number per example")
        if values.dim() != 1 or len(values) != len(confidence):
            wanted = f" ({len(confidence)},)" if confidence.dim() == 1 else " (examples,)"
            raise InputError(
                f"expected {name}{wanted}, one number per example, found shape {tuple(values.shape)}; average over "
                "other axes, or leave out what the other argument does not have"
            )
        if bool(values.isnan().any()):
            raise InputError(
                f"expected {name} without NaN, found {int(values.isnan().sum())} NaN among {len(values)} numbers; "
                "leave these examples out"
            )
    exact = losses.detach().double()
    if not bool((exact >= 0).all()) or not bool(exact.isfinite().all()):
        raise InputError(
            f"expected finite losses >= 0, found {float(exact.min()):g} to {float(exact.max()):g}; give 0 for right "
            "and 1 for wrong, or absolute errors"
        )
    scores = -confidence.detach().double().to(exact.device)
    counted = as_weights(weights, len(scores), scores.device)
    values = scores.unique()
    parts = (at_most(scores, each, values) for each in (counted, counted * exact))
    return _Accepted(*(torch.nn.functional.pad(part, (1, 0)) for part in parts))
