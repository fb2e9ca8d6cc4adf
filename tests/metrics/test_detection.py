"""Detection of foreign inputs: scikit-learn, brute force, orientation, ties; and the scores themselves."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.detection import (
    Positive,
    aupr,
    auroc,
    energy,
    entropy_score,
    fpr95,
    max_logit,
    msp,
    ood_scores,
    separation,
)
from onebasin.metrics.entropy import expected_entropy, mean_over_members, mutual_information

TIED = st.lists(st.integers(-3, 3), min_size=1, max_size=60)
FREE = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60)
SCORES = st.one_of(st.tuples(TIED, TIED), st.tuples(FREE, FREE))
KINDS: tuple[Positive, ...] = ("ood", "in_distribution")


def tensors(lists: tuple[list[float], list[float]]) -> tuple[Tensor, Tensor]:
    inside, outside = (torch.tensor(values, dtype=torch.float64) for values in lists)
    return inside, outside


def labelled(inside: Tensor, outside: Tensor, positive: Positive) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores as scikit-learn wants them: higher = more positive."""
    labels = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    scores = torch.cat([inside, outside]).numpy()
    return (labels, scores) if positive == "ood" else (1 - labels, -scores)


def fpr95_by_thresholds(inside: Tensor, outside: Tensor, positive: Positive) -> float:
    labels, scores = labelled(inside, outside, positive)
    best = math.inf
    for threshold in np.unique(scores):
        called = scores >= threshold
        if 20 * called[labels == 1].sum() >= 19 * (labels == 1).sum():
            best = min(best, called[labels == 0].mean())
    return best


@settings(deadline=None)
@given(SCORES)
def test_areas_are_those_of_scikit_learn(lists: tuple[list[float], list[float]]) -> None:
    inside, outside = tensors(lists)
    assert float(auroc(inside, outside)) == pytest.approx(roc_auc_score(*labelled(inside, outside, "ood")), abs=1e-12)
    for positive in KINDS:
        theirs = average_precision_score(*labelled(inside, outside, positive))
        assert float(aupr(inside, outside, positive=positive)) == pytest.approx(theirs, abs=1e-12)


@settings(deadline=None)
@given(SCORES)
def test_auroc_counts_pairs_and_fpr95_tries_thresholds(lists: tuple[list[float], list[float]]) -> None:
    inside, outside = tensors(lists)
    gap = outside[:, None] - inside
    pairs = ((gap > 0).double() + (gap == 0).double() / 2).mean()
    torch.testing.assert_close(auroc(inside, outside), pairs, rtol=1e-12, atol=1e-12)
    for positive in KINDS:
        assert float(fpr95(inside, outside, positive=positive)) == fpr95_by_thresholds(inside, outside, positive)


@settings(deadline=None)
@given(SCORES)
def test_orientation_and_order(lists: tuple[list[float], list[float]]) -> None:
    inside, outside = tensors(lists)
    assert float(auroc(inside, outside)) == pytest.approx(1 - float(auroc(outside, inside)), abs=1e-12)
    # Calling the other kind positive is the same as turning scores around and swapping the kinds.
    for measure in (aupr, fpr95):
        turned = measure(-outside, -inside, positive="ood")
        torch.testing.assert_close(measure(inside, outside, positive="in_distribution"), turned)
    named = separation(inside, outside)
    assert float(named["auroc"]) == float(auroc(inside, outside))
    for measure in (aupr, fpr95):
        for suffix, positive in (("in", "in_distribution"), ("out", "ood")):
            assert float(named[f"{measure.__name__}_{suffix}"]) == float(measure(inside, outside, positive=positive))
    assert float(auroc(inside.flip(0), outside.sort().values)) == float(auroc(inside, outside))


def test_perfect_reversed_and_useless_scores() -> None:
    low, high = torch.linspace(0, 1, 40), torch.linspace(2, 3, 60)
    assert {name: float(value) for name, value in separation(low, high).items()} == {
        "auroc": 1, "aupr_in": 1, "aupr_out": 1, "fpr95_in": 0, "fpr95_out": 0,
    }  # fmt: skip
    assert float(auroc(high, low)) == 0
    assert float(fpr95(high, low)) == 1
    same = torch.zeros(40), torch.zeros(60)
    assert float(auroc(*same)) == 0.5
    assert float(aupr(*same)) == pytest.approx(0.6)
    assert float(aupr(*same, positive="in_distribution")) == pytest.approx(0.4)
    assert float(fpr95(*same)) == 1


def test_ninety_five_per_cent_is_counted_exactly() -> None:
    # With 20 positive ones 19 are enough, for every offset of floating point; with 19 all are needed.
    for count, needed in ((20, 19), (19, 19), (60, 57), (140, 133), (21, 20)):
        outside = torch.arange(count, dtype=torch.float64)
        inside = outside - 0.5
        threshold = count - needed  # the strictest that calls `needed` of them foreign
        assert float(fpr95(inside, outside)) == pytest.approx((count - 1 - threshold) / count)


def test_infinite_scores_are_ordered() -> None:
    assert float(auroc(torch.tensor([-torch.inf, 0.0]), torch.tensor([torch.inf]))) == 1


# ---------------------------------------------------------------------- the scores


def all_scores(logits: Tensor) -> dict[str, Tensor]:
    probabilities = logits.double().softmax(2)
    means = mean_over_members(probabilities), mean_over_members(logits)
    return ood_scores(*means, mutual_information(probabilities))


def test_scores_are_their_formulas() -> None:
    z = 3 * torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = np.exp(z.numpy()) / np.exp(z.numpy()).sum(2, keepdims=True)
    mean, logits = p.mean(0), z.numpy().mean(0)
    total = -(mean * np.log(mean)).sum(1)
    expected = {
        "msp": -mean.max(1),
        "entropy": total,
        "mutual_information": total + (p * np.log(p)).sum(2).mean(0),
        "max_logit": -logits.max(1),
        "energy": -np.log(np.exp(logits).sum(1)),
    }
    found = all_scores(z)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-9, err_msg=name)


def test_averages_give_the_same_scores() -> None:
    z = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = z.softmax(2)
    for score in (msp, entropy_score):
        torch.testing.assert_close(score(p.mean(0)), score(p))
    for score in (max_logit, energy):
        torch.testing.assert_close(score(z.mean(0)), score(z))
    assert not torch.allclose(entropy_score(p), expected_entropy(p)), (
        "the entropy of the average, not the average entropy"
    )


def test_higher_is_further_out_of_distribution() -> None:
    # Inside: confident and unanimous members. Outside: small logits on which members disagree.
    generator = torch.Generator().manual_seed(2)
    inside = torch.zeros(5, 50, 3) + torch.tensor([9.0, 0.0, 0.0]) + 0.1 * torch.randn(5, 50, 3, generator=generator)
    outside = torch.randn(5, 50, 3, generator=generator)
    for name, scores in all_scores(outside).items():
        assert float(auroc(all_scores(inside)[name], scores)) == 1, name


def test_large_logits_do_not_overflow() -> None:
    for name, scores in all_scores(torch.tensor([[[1e4, -1e4]], [[-1e4, 1e4]]])).items():
        assert bool(torch.isfinite(scores).all()), name


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: auroc(torch.zeros(0), torch.zeros(2)), "expected in_distribution"),
        (lambda: auroc(torch.zeros(2), torch.zeros(2, 1)), "expected ood"),
        (lambda: fpr95(torch.zeros(2), torch.tensor([torch.nan])), "1 NaN"),
        (lambda: aupr(torch.zeros(2), torch.tensor([1, 2])), "floating"),
        (lambda: aupr(torch.zeros(2), torch.zeros(2), positive="both"), '"ood" or "in_distribution"'),  # type: ignore[arg-type]
        (lambda: auroc(torch.zeros(2), torch.zeros(2), weights=torch.ones(2)), "separately"),  # type: ignore[arg-type]
        (lambda: auroc(torch.zeros(2), torch.zeros(3), weights=(torch.ones(3), torch.ones(3))), "weights"),
        (lambda: energy(torch.tensor([[0.0, torch.inf]])), "1 entries that are not finite"),
        (lambda: msp(torch.zeros(2, 3)), "sum to 1"),
    ],
)
def test_mistakes_get_a_sentence(call: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        call()
