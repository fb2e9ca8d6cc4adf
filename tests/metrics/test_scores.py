"""Accuracy, likelihood, Brier score, agreement and total variation: closed forms, scikit-learn, symmetries."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.scores import accuracy, agreement, brier, nll, total_variation

SCORES = (accuracy, nll, brier)
PAIRS = (agreement, total_variation)
SIZES = st.tuples(st.integers(1, 30), st.integers(2, 6), st.integers(0, 2**31 - 1))


def examples(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(1), torch.randint(classes, (count,), generator=generator), generator


@settings(deadline=None)
@given(SIZES)
def test_scores_are_those_of_scikit_learn(sizes: tuple[int, int, int]) -> None:
    p, targets, _ = examples(*sizes)
    labels, y, table = list(range(sizes[1])), targets.numpy(), p.numpy()
    assert float(accuracy(p, targets)) == pytest.approx(accuracy_score(y, table.argmax(1)), abs=1e-12)
    # scikit-learn takes two classes as the probability of the second.
    likely = log_loss(y, table, labels=labels)
    assert float(nll(p, targets)) == pytest.approx(likely, rel=1e-9)
    squares = brier_score_loss(y, table, labels=labels, scale_by_half=False) if sizes[1] > 2 else None
    direct = float(((table - np.eye(sizes[1])[y]) ** 2).sum(1).mean())
    assert float(brier(p, targets)) == pytest.approx(direct if squares is None else squares, rel=1e-9)


@settings(deadline=None)
@given(SIZES)
def test_orders_of_examples_and_classes_do_not_matter(sizes: tuple[int, int, int]) -> None:
    p, targets, generator = examples(*sizes)
    q, _, _ = examples(sizes[0], sizes[1], sizes[2] ^ 1)
    rows, columns = (torch.randperm(size, generator=generator) for size in sizes[:2])
    renamed = columns.argsort()[targets]
    for score in SCORES:
        moved = score(p[rows][:, columns], renamed[rows])
        torch.testing.assert_close(moved, score(p, targets), rtol=1e-12, atol=1e-12)
    for measure in PAIRS:
        moved = measure(p[rows][:, columns], q[rows][:, columns])
        torch.testing.assert_close(moved, measure(p, q), rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(SIZES)
def test_bounds_of_pairs(sizes: tuple[int, int, int]) -> None:
    p, _, _ = examples(*sizes)
    q, _, _ = examples(sizes[0], sizes[1], sizes[2] ^ 1)
    assert float(agreement(p, p)) == 1
    assert float(total_variation(p, p)) == 0
    for measure in PAIRS:
        assert float(measure(p, q)) == float(measure(q, p))
        assert 0 <= float(measure(p, q)) <= 1
    # The largest difference of the probabilities of one event, over all events.
    events = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * sizes[1])
    largest = ((p - q) @ events.T).amax(1).mean()
    torch.testing.assert_close(total_variation(p, q), largest, rtol=1e-9, atol=1e-12)


def test_a_certain_and_wrong_prediction_costs_everything() -> None:
    certain = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert float(nll(certain, torch.tensor([1, 0]))) == math.inf
    assert float(nll(certain, torch.tensor([0, 0]))) == pytest.approx(math.log(2) / 2)
    assert float(brier(certain, torch.tensor([1, 0]))) == pytest.approx((2 + 0.5) / 2)
    weights = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    assert nll(certain, torch.tensor([1, 0]), weights=weights).tolist() == [math.inf, pytest.approx(math.log(2))]


def test_the_zero_of_certainty_has_no_sign() -> None:
    assert math.copysign(1, float(nll(torch.tensor([[1.0, 0.0]]), torch.tensor([0])))) == 1


def test_of_equal_probabilities_the_first_class_counts() -> None:
    even = torch.full((1, 3), 1 / 3)
    assert float(accuracy(even, torch.tensor([0]))) == 1
    assert float(accuracy(even, torch.tensor([1]))) == 0
    assert float(agreement(even, torch.tensor([[0.4, 0.3, 0.3]]))) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_precision_is_taken_and_float64_returned(dtype: torch.dtype) -> None:
    p = torch.randn(50, 10, generator=torch.Generator().manual_seed(0)).softmax(1).to(dtype)
    targets = torch.arange(50) % 10
    for found in (*(score(p, targets) for score in SCORES), *(measure(p, p) for measure in PAIRS)):
        assert found.dtype == torch.float64
        assert bool(torch.isfinite(found))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_every_integer_type_is_a_class_number(dtype: torch.dtype) -> None:
    assert float(accuracy(torch.eye(3), torch.tensor([0, 1, 2], dtype=dtype))) == 1


@pytest.mark.parametrize(
    ("p", "targets", "text"),
    [
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), "the lowest at -1"),
        (torch.tensor([[3.0, 1.0]]), torch.tensor([0]), "sums off by up to 3"),
        (torch.tensor([[torch.nan, 1.0]]), torch.tensor([0]), "found 1 NaN"),
        (torch.eye(2)[None], torch.tensor([0, 1]), r"expected probabilities \(examples, classes\)"),
        (torch.ones(2), torch.tensor([0, 1]), r"found shape \(2,\); add an axis"),
        (torch.eye(2).long(), torch.tensor([0, 1]), "floating"),
        (torch.zeros(0, 2), torch.zeros(0).long(), "give at least one example"),
        (torch.eye(2), torch.tensor([0, 2]), "from 0 to 1, found 0 to 2"),
        (torch.eye(2), torch.tensor([-1, 1]), "found -1 to 1"),
        (torch.eye(2), torch.tensor([0, 1, 1]), r"expected class numbers \(2,\)"),
        (torch.eye(2), torch.tensor([0.0, 1.0]), "integer type"),
    ],
)
def test_what_is_no_prediction_is_refused(p: Tensor, targets: Tensor, text: str) -> None:
    for score in SCORES:
        with pytest.raises(InputError, match=text):
            score(p, targets)


def test_predictives_of_other_examples_are_not_compared() -> None:
    for measure in PAIRS:
        with pytest.raises(InputError, match="same examples and classes"):
            measure(torch.eye(2), torch.eye(3))


def test_weights_that_are_none_are_refused() -> None:
    p, targets = torch.eye(2), torch.tensor([0, 1])
    for weights in (torch.ones(3), torch.tensor([1.0, -1.0]), torch.zeros(2)):
        with pytest.raises(InputError, match="weights"):
            accuracy(p, targets, weights=weights)
