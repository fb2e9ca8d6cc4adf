"""Bootstrap intervals: counts are draws, the fast way is the slow way, scipy, and how often the truth is covered."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from benchmarks.calibration import CASES as CALIBRATION_CASES
from benchmarks.calibration import METRICS, Classifier, Truth, covered, drawn_examples
from onebasin.errors import InputError
from onebasin.metrics.bootstrap import interval
from onebasin.metrics.calibration import ace, ece
from onebasin.metrics.detection import aupr, auroc, fpr95
from onebasin.metrics.probabilities import weighted_mean
from onebasin.metrics.regression import coverage, gaussian_nll, rmse, width
from onebasin.metrics.scores import accuracy, agreement, brier, nll, total_variation

N = 40


def predictives() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, N, 3, generator=generator, dtype=torch.float64).mul(2).softmax(2)
    p[5:9] = p[4]  # ties
    return p, q, torch.randint(3, (N,), generator=generator)


def values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, N, 2, generator=generator).double(), torch.randn(N, 2, generator=generator).double()


def scores() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(6, (N,), generator=generator).double(), torch.randint(
        3, 9, (25,), generator=generator
    ).double()


P, Q, TARGETS = predictives()
MEANS, GOALS = values()
INSIDE, OUTSIDE = scores()
# metric, tensors, axes of examples, drawn separately
Case = tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[int, ...], bool]
CASES: dict[str, Case] = {
    "accuracy": (accuracy, (P, TARGETS), (0, 0), False),
    "nll": (nll, (P, TARGETS), (0, 0), False),
    "brier": (brier, (P, TARGETS), (0, 0), False),
    "ece": (ece, (P, TARGETS), (0, 0), False),
    "ace class-wise": (partial(ace, bins=7), (P, TARGETS), (0, 0), False),
    "ace top-label": (partial(ace, bins=7, kind="top-label"), (P, TARGETS), (0, 0), False),
    "agreement": (agreement, (P, Q), (0, 0), False),
    "total variation": (total_variation, (P, Q), (0, 0), False),
    "mean": (weighted_mean, (P[:, 0],), (0,), False),
    "rmse": (rmse, (MEANS, GOALS), (1, 0), False),
    "gaussian nll": (partial(gaussian_nll, noise=0.5), (MEANS, GOALS), (1, 0), False),
    "coverage": (partial(coverage, noise=0.5, level=0.8), (MEANS, GOALS), (1, 0), False),
    "width": (partial(width, noise=0.5, level=0.8), (MEANS,), (1,), False),
    "auroc": (auroc, (INSIDE, OUTSIDE), (0, 0), True),
    "aupr out": (aupr, (INSIDE, OUTSIDE), (0, 0), True),
    "aupr in": (partial(aupr, positive="in_distribution"), (INSIDE, OUTSIDE), (0, 0), True),
    "fpr95 out": (fpr95, (INSIDE, OUTSIDE), (0, 0), True),
    "fpr95 in": (partial(fpr95, positive="in_distribution"), (INSIDE, OUTSIDE), (0, 0), True),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_are_copies_of_examples(name: str) -> None:
    metric, tensors, axes, separately = CASES[name]
    generator = torch.Generator().manual_seed(3)
    sizes = [tensor.shape[axis] for tensor, axis in zip(tensors, axes, strict=True)]
    drawn = [torch.randint(size, (6, size), generator=generator) for size in sizes]
    drawn = drawn if separately else [drawn[0]] * len(drawn)
    counts = tuple(torch.stack([row.bincount(minlength=len(row)) for row in own]).double() for own in drawn)
    found = metric(*tensors, weights=counts if separately else counts[0])
    assert found.shape == (6,)
    for row in range(6):
        parts = [t.index_select(axis, own[row]) for t, axis, own in zip(tensors, axes, drawn, strict=True)]
        torch.testing.assert_close(found[row], metric(*parts), rtol=1e-10, atol=1e-12)
    every = tuple(torch.ones(size) for size in sizes)
    torch.testing.assert_close(metric(*tensors, weights=every if separately else every[0]), metric(*tensors))


@pytest.mark.parametrize("name", CASES)
def test_the_fast_way_is_the_slow_way(name: str) -> None:
    metric, tensors, axes, separately = CASES[name]
    options: dict[str, Any] = {"draws": 60, "axis": axes, "separately": separately, "method": "percentile"}
    fast = interval(metric, *tensors, generator=torch.Generator().manual_seed(4), **options)
    slow = interval(lambda *parts: metric(*parts), *tensors, generator=torch.Generator().manual_seed(4), **options)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fast.value, metric(*tensors))
    assert float(fast.low) <= float(fast.high)


def ends_by_scipy(sample: np.ndarray, statistic: Any, method: str, draws: int, seed: int) -> tuple[float, float]:
    found = stats.bootstrap(
        (sample,), statistic, n_resamples=draws, method=method, confidence_level=0.9, rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(found.low), float(found.high)


@pytest.mark.parametrize(("method", "theirs"), [("bca", "BCa"), ("percentile", "percentile")])
def test_ends_are_those_of_scipy(method: Any, theirs: str) -> None:
    # A skewed sample of a skewed statistic. Ends scatter with the draws: our distance must be one that scipy's own
    # repetitions have.
    sample = torch.distributions.Exponential(1.0).icdf(torch.linspace(0.01, 0.99, 25, dtype=torch.float64)) ** 2

    def spread(values: Tensor, weights: Tensor | None = None) -> Tensor:
        mean = weighted_mean(values, weights)
        return weighted_mean(values.square(), weights) - mean.square()

    draws = 20_000
    ours = interval(
        spread,
        sample,
        generator=torch.Generator().manual_seed(0),
        n_resamples=draws,
        confidence_level=0.9,
        method=method,
    )
    repeated = np.array([ends_by_scipy(sample.numpy(), np.var, theirs, draws, seed) for seed in range(12)])
    mean, error = repeated.mean(0), repeated.std(0, ddof=1)
    distance = (np.array([float(ours.low), float(ours.high)]) - mean) / (error * math.sqrt(1 + 1 / 12))
    assert np.abs(distance).max() < stats.t.ppf(1 - 1e-3 / 4, df=11)


def test_bca_knows_bias_where_quantiles_do_not() -> None:
    # Calibration errors grow with every draw: the median draw lies above the value.
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    p, targets = (2 * z).softmax(1), torch.multinomial(z.softmax(1), 1, generator=generator).squeeze(1)
    plain = interval(ece, p, targets, generator=torch.Generator().manual_seed(0), method="percentile")
    better = interval(ece, p, targets, generator=torch.Generator().manual_seed(0), method="bca")
    assert float(better.low) < float(plain.low)
    assert float(better.high) < float(plain.high)
    assert float(better.low) < float(better.value) < float(better.high)


def test_the_truth_is_covered_as_often_as_promised() -> None:
    # Means of 100 skewed values; what BCa still misses is of order 1/100.
    repeats, misses = 800, [0, 0]
    generator = torch.Generator().manual_seed(6)
    for _ in range(repeats):
        values = -torch.rand(100, generator=generator, dtype=torch.float64).log()
        found = interval(weighted_mean, values, generator=generator, n_resamples=400, confidence_level=0.9)
        misses[0] += float(found.low) > 1
        misses[1] += float(found.high) < 1
    for count in misses:
        assert abs(count / repeats - 0.05) < 0.01 + 3.3 * math.sqrt(0.05 * 0.95 / repeats)


def test_two_samples_scatter_by_themselves() -> None:
    # The standard error of an AUROC by DeLong's formula, of which an interval is 2 x 1.96 wide.
    generator = torch.Generator().manual_seed(8)
    inside, outside = torch.randn(300, generator=generator), torch.randn(200, generator=generator) + 1
    wins = (outside[:, None] > inside).double()
    error = float((wins.mean(0).var() / 300 + wins.mean(1).var() / 200).sqrt())
    found = interval(auroc, inside, outside, generator=generator, n_resamples=4000, separately=True)
    assert float(found.high - found.low) == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_seeds_draws_and_shapes() -> None:
    one, two, three = (
        interval(nll, P, TARGETS, generator=torch.Generator().manual_seed(seed), n_resamples=100) for seed in (0, 0, 1)
    )
    assert one == two
    assert one != three

    def both(p: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        return torch.stack([accuracy(p, y, weights=weights), nll(p, y, weights=weights)], -1)

    found = interval(both, P, TARGETS, generator=torch.Generator().manual_seed(0), n_resamples=100)
    assert found.low.shape == found.high.shape == found.value.shape == (2,)
    assert (found.low[1], found.high[1]) == (one.low, one.high)
    state = torch.random.get_rng_state()
    interval(nll, P, TARGETS, generator=torch.Generator().manual_seed(0), n_resamples=10)
    assert torch.equal(state, torch.random.get_rng_state())


def test_blocks_do_not_change_draws_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = interval(brier, P, TARGETS, generator=torch.Generator().manual_seed(0), n_resamples=50)
    monkeypatch.setattr("onebasin.metrics.bootstrap._BLOCK_VALUES", 3 * N)
    parts = interval(brier, P, TARGETS, generator=torch.Generator().manual_seed(0), n_resamples=50)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("examples", [1, 2, 20, 100, 700])
def test_the_interval_of_a_calibration_error_has_a_width_and_holds_its_value(name: str, examples: int) -> None:
    # In 5 of 20 fresh test sets BCa intervals had no width or excluded their value.
    generator = torch.Generator().manual_seed(examples)
    for case in (*CALIBRATION_CASES, Classifier(4, 0.5, 1.0), Classifier(3, 300.0, 1.0), Classifier(2, 40.0, 0.001)):
        p, _, targets = drawn_examples(case, examples, generator)
        for said in (p, p.float()):
            found = interval(METRICS[name], said, targets, generator=generator, n_resamples=50)
            low, high = float(found.low), float(found.high)
            assert 0 <= low <= float(found.value) <= high <= 1
            assert high - low > 1 / (20 * examples)


def test_the_interval_of_a_perfect_score_still_allows_errors() -> None:
    # 100 examples, all right, all said to be surely right: an error rate of 3 % shows none in 5 % of such test sets.
    p, targets = torch.eye(2)[torch.zeros(100).long()], torch.zeros(100).long()
    found = interval(ece, p, targets, generator=torch.Generator().manual_seed(0))
    assert float(found.value) == float(found.low) == 0
    assert 0.028 < float(found.high) < 0.037  # Clopper and Pearson: 0.0362 at 97.5 %


@pytest.mark.parametrize(
    ("case", "examples"),
    [
        (Classifier(10, 2.0, 1.0), 100),
        (Classifier(10, 6.0, 1.0), 250),
        (Classifier(4, 2.0, 1.1), 400),
        (Classifier(2, 2.0, 1.5), 400),
        (Classifier(5, 60.0, 10.0), 200),  # wrong once in 83, always sure: 200 examples may show no error at all
        (Classifier(3, 8.0, 0.5), 800),
    ],
)
def test_calibration_errors_are_covered_as_often_as_promised(case: Classifier, examples: int) -> None:
    # The whole grid is benchmarks/calibration.py. 60 test sets: at 95 % fewer than 52 happen once in 1,000 times.
    truth, repeats = Truth(case, 100_000), 60
    for name in METRICS:
        share, _, width = covered(case, examples, name, truth, repeats=repeats, draws=100)
        assert share * repeats >= stats.binom.ppf(1e-3, repeats, 0.95), name
        # Below, 15 normal gaps with variances 1 / 60 n at most add up to 1.55 +- 0.3 / sqrt(n); above, to 0 +- 0.5.
        assert width < (1.55 + 1.96 * 0.3 + 1.96 * 0.5) / math.sqrt(examples)


def test_a_large_calibration_error_is_told_from_none() -> None:
    # An interval from 0 to 1 would cover as well: at 5,000 examples this one is narrow, and does not hold 0.
    case, generator = Classifier(10, 2.0, 1.5), torch.Generator().manual_seed(0)
    truth = Truth(case, 100_000)
    p, _, targets = drawn_examples(case, 5000, generator)
    for name, metric in METRICS.items():
        found = interval(metric, p, targets, generator=generator, n_resamples=100)
        value = truth.of(name, p)
        assert 0.5 * value < float(found.low) < value < float(found.high) < 1.3 * value


def test_a_value_that_no_draw_reaches_has_no_interval() -> None:
    # Hidden in another function, the calibration error is a statistic like any other: every draw of it is larger.
    generator = torch.Generator().manual_seed(5)
    p, _, targets = drawn_examples(Classifier(4, 2.0, 1.0), 300, generator)
    found = interval(lambda *parts: ace(*parts, bins=50), p, targets, generator=generator, n_resamples=30)
    assert found.low.isnan() and found.high.isnan()
    assert float(found.value) > 0


def test_no_errors_no_width_and_infinite_losses() -> None:
    sure, targets = torch.eye(2)[torch.zeros(20).long()], torch.zeros(20).long()
    found = interval(accuracy, sure, targets, generator=torch.Generator().manual_seed(0))
    assert [float(part) for part in found] == [1, 1, 1]
    targets[0] = 1  # one example with probability zero, which is in 64 % of the draws
    found = interval(nll, sure, targets, generator=torch.Generator().manual_seed(0), method="percentile")
    assert [float(part) for part in found] == [math.inf, 0, math.inf]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: interval(accuracy, P, TARGETS, generator=g, n_resamples=1), "n_resamples >= 2"),
        (
            lambda g: interval(accuracy, P, TARGETS, generator=g, confidence_level=1.0),
            "confidence_level between 0 and 1",
        ),
        (lambda g: interval(accuracy, P, TARGETS, generator=g, method="basic"), "bca, percentile"),
        (lambda g: interval(accuracy, P, TARGETS[:3], generator=g), "separately=True"),
        (lambda g: interval(accuracy, P, TARGETS, generator=g, axis=[0]), "an axis for each"),
        (lambda g: interval(auroc, INSIDE, INSIDE, generator=g), "separately"),
        (lambda g: interval(accuracy, generator=g), "expected tensors"),
        (lambda g: interval(accuracy, P, TARGETS, generator=g, method="absolute"), "expected ece or ace"),
    ],
)
def test_mistakes_get_a_sentence(call: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        call(torch.Generator().manual_seed(0))
