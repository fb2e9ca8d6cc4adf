"""Metrics of abstention against loops over all thresholds, closed forms and repeated samples."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics import (
    abstention,
    augrc,
    aurc,
    ause,
    confidence_and_errors,
    coverage_at_risk,
    interval,
    risk_at_coverage,
)

CASES = st.tuples(st.integers(1, 12), st.integers(0, 2**31 - 1), st.booleans(), st.booleans())


def case(count: int, seed: int, ties: bool, binary: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, losses and whole weights, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, generator=generator, dtype=torch.float64)
    scores = (scores * 4).round() / 4 if ties else scores
    losses = torch.rand(count, generator=generator, dtype=torch.float64)
    losses = (losses > 0.5).double() if binary else losses
    weights = torch.randint(0, 4, (count,), generator=generator).double()
    weights[0] = 1
    return scores, losses, weights


def shared(scores: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Losses in descending order of the scores, each the mean of its group of equal scores."""
    mean = np.array([losses[scores == value].mean() for value in scores])
    return mean[np.argsort(-scores, kind="stable")]


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_areas_are_means_over_all_numbers_of_answers(drawn: tuple[int, int, bool, bool]) -> None:
    scores, losses, _ = case(*drawn)
    ordered = shared(scores.numpy(), losses.numpy())
    n = len(ordered)
    risks = [ordered[:k].mean() for k in range(1, n + 1)]
    assert float(aurc(scores, losses)) == pytest.approx(np.mean(risks), abs=1e-12)
    joint = np.concatenate([[0], ordered.cumsum() / n])
    assert float(augrc(scores, losses)) == pytest.approx(np.trapezoid(joint, dx=1 / n), abs=1e-12)
    for k in range(1, n + 1):
        assert float(risk_at_coverage(scores, losses, k / n)) == pytest.approx(risks[k - 1], abs=1e-9)
    for risk in (0.0, 0.2, 0.5):
        called = [scores >= threshold for threshold in scores]
        known = [float(one.double().mean()) for one in called if float(losses[one].mean()) <= risk + 1e-15]
        assert float(coverage_at_risk(scores, losses, risk)) == pytest.approx(max(known, default=0.0))


@settings(max_examples=40, deadline=None)
@given(CASES)
def test_whole_weights_are_repetitions(drawn: tuple[int, int, bool, bool]) -> None:
    scores, losses, weights = case(*drawn)
    rows = torch.repeat_interleave(torch.arange(len(scores)), weights.long())
    found = abstention(scores, losses, weights=torch.stack([weights, torch.ones_like(weights)]))
    for name, value in abstention(scores[rows], losses[rows]).items():
        assert float(found[name][0]) == pytest.approx(float(value), abs=1e-12), name
    for name, value in abstention(scores, losses).items():
        assert float(found[name][1]) == pytest.approx(float(value), abs=1e-12), name
    if float(losses[rows].sum()) > 0:
        assert float(ause(-scores, losses, weights=weights)) == pytest.approx(float(ause(-scores[rows], losses[rows])))


def test_ties_are_the_mean_over_their_orders() -> None:
    losses = [1.0, 0.0, 0.0, 1.0]
    found = float(aurc(torch.tensor([0.9, 0.5, 0.5, 0.5]), torch.tensor(losses)))
    every = [float(aurc(torch.arange(4, 0, -1.0), torch.tensor([1.0, *rest]))) for rest in permutations(losses[1:])]
    assert found == pytest.approx(sum(every) / len(every))


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(2, 40), st.integers(0, 2**31 - 1), st.booleans()))
def test_augrc_is_traubs_formula(drawn: tuple[int, int, bool]) -> None:
    scores, losses, _ = case(*drawn, True)
    losses[0], losses[1] = 0, 1
    error = float(losses.mean())
    area = roc_auc_score(1 - losses.numpy(), scores.numpy())
    assert float(augrc(scores, losses)) == pytest.approx((1 - area) * error * (1 - error) + error**2 / 2, abs=1e-12)


def test_known_values() -> None:
    """Constant scores; and n examples of which the e least confident are wrong, by harmonic numbers."""
    losses = (torch.arange(100) < 30).double()
    assert float(aurc(torch.ones(100), losses)) == pytest.approx(0.3)
    assert float(augrc(torch.ones(100), losses)) == pytest.approx(0.15)
    best = float(aurc(-losses, losses))
    assert best == pytest.approx(sum((k - 70) / k for k in range(71, 101)) / 100)
    found = abstention(-losses + 0.001 * torch.arange(100), losses)
    assert float(found["risk_at_80"]) == pytest.approx(10 / 80)
    assert float(found["coverage_at_5"]) == 0.73  # 3 of 73 are wrong, 4.1 %; 4 of 74 are 5.4 %


@settings(max_examples=40, deadline=None)
@given(CASES)
def test_sparsification_against_its_two_curves(drawn: tuple[int, int, bool, bool]) -> None:
    scores, errors, _ = case(*drawn)
    errors = errors + 0.01
    n = len(errors)
    curves = []
    for order in (scores, errors):
        kept = shared(-order.numpy(), errors.numpy())
        curves.append([kept[: n - gone].mean() / errors.mean().item() for gone in range(n)])
    assert curves[0][0] == pytest.approx(1)
    wanted = np.mean(np.subtract(*curves))
    assert float(ause(scores, errors)) == pytest.approx(wanted, abs=1e-12)
    assert float(ause(scores, errors, normalised=False)) == pytest.approx(wanted * float(errors.mean()), abs=1e-12)
    assert float(ause(errors, errors)) == 0


def test_intervals_cover_the_truth() -> None:
    """The confidence is uniform c and right with probability c: P(wrong, c > t) = (1 - t)^2 / 2, so AUGRC is 1/6."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(60):
        confidence = torch.rand(200, generator=generator, dtype=torch.float64)
        wrong = (torch.rand(200, generator=generator, dtype=torch.float64) > confidence).double()
        found = interval(augrc, confidence, wrong, generator=generator, n_resamples=100)
        held += bool(found.low <= 1 / 6 <= found.high)
    assert held >= 57 - 3 * math.sqrt(60 * 0.95 * 0.05)


def test_confidence_and_errors_and_refusals() -> None:
    p = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    confidence, errors = confidence_and_errors(p, torch.tensor([0, 0]))
    assert confidence.tolist() == pytest.approx([0.5, 0.9])
    assert errors.tolist() == [0, 1]
    assert risk_at_coverage(confidence, errors, torch.tensor([0.5, 1.0])).tolist() == [1.0, 0.5]
    with pytest.raises(InputError, match="four in five"):
        risk_at_coverage(confidence, errors, 0.0)
    with pytest.raises(InputError, match="give 0 for right"):
        aurc(confidence, -errors)
    with pytest.raises(InputError, match="one number per example, found shape"):
        aurc(confidence, errors[:1])
