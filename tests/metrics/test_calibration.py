"""Calibration errors against other implementations, against brute force and on real softmax outputs; temperatures."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebasin.alignment.barrier import temperature as barrier_temperature
from onebasin.errors import InputError
from onebasin.metrics.calibration import COLDEST, HOTTEST, ace, best_temperature, ece, reliability, tempered
from onebasin.metrics.scores import accuracy, nll

REAL = {"lenet-5": (0.1079, 0.5308), "wideresnet-16-4": (0.0537, 0.9109)}
SIZES = st.tuples(st.integers(1, 40), st.integers(2, 5), st.integers(0, 2**31 - 1))
KINDS = ("class-wise", "top-label")


def examples(count: int, classes: int, seed: int, coarse: bool = False) -> tuple[Tensor, Tensor, torch.Generator]:
    """Probabilities and targets; coarse ones have many equal confidences."""
    generator = torch.Generator().manual_seed(seed)
    if coarse:
        parts = torch.randint(1, 4, (count, classes), generator=generator).double()
        p = parts / parts.sum(1, keepdim=True)
    else:
        p = (2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return p, torch.randint(classes, (count,), generator=generator), generator


def real(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    with np.load(folder / "calibration" / f"{name}-cifar-10.npz") as file:
        return torch.from_numpy(file["predictions"]), torch.from_numpy(file["ground_truth"])


def ece_by_counting(p: np.ndarray, y: np.ndarray, bins: int) -> float:
    confidence, right = p.max(1), (p.argmax(1) == y).astype(float)
    total = 0.0
    for b in range(bins):
        own = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if own.any():
            total += own.sum() * abs(right[own].mean() - confidence[own].mean())
    return total / len(y)


def ace_by_copies(predicted: np.ndarray, outcome: np.ndarray, bins: int) -> float:
    """Every example as `bins` copies, so that bins of equal size exist; equal values share their mean outcome."""
    shared = np.array([outcome[predicted == value].mean() for value in predicted])
    order = np.argsort(predicted, kind="stable")
    parts = [np.array_split(np.repeat(values[order], bins), bins) for values in (predicted, shared)]
    return float(np.mean([abs(a.mean() - b.mean()) for a, b in zip(*parts, strict=True)]))


# ---------------------------------------------------------------------- real outputs


@pytest.mark.parametrize("name", REAL)
def test_real_outputs_have_their_published_error(shared_data: Path, name: str) -> None:
    p, targets = real(shared_data, name)
    error, right = REAL[name]
    assert round(float(ece(p, targets)), 4) == error
    assert round(float(accuracy(p, targets)), 4) == right
    assert float(ece(p, targets)) == pytest.approx(ece_by_counting(p.numpy(), targets.numpy(), 15), abs=1e-7)


@pytest.mark.parametrize("name", REAL)
def test_real_outputs_against_netcal(shared_data: Path, name: str) -> None:
    netcal: Any = pytest.importorskip("netcal.metrics", reason="needs netcal (pip install --no-deps netcal==1.4.0)")
    p, targets = real(shared_data, name)
    theirs = netcal.ECE(15).measure(p.double().numpy(), targets.long().numpy())
    assert float(ece(p.double(), targets)) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("name", REAL)
def test_real_outputs_against_torchmetrics(shared_data: Path, name: str) -> None:
    theirs: Any = pytest.importorskip("torchmetrics.functional.classification", reason="needs torchmetrics")
    p, targets = real(shared_data, name)
    found = theirs.multiclass_calibration_error(p, targets.long(), num_classes=10, n_bins=15, norm="l1")
    assert float(ece(p, targets)) == pytest.approx(float(found), abs=1e-5)  # theirs sums in float32


@pytest.mark.parametrize("name", REAL)
def test_top_label_and_class_wise_errors_are_where_they_should_be(shared_data: Path, name: str) -> None:
    p, targets = real(shared_data, name)
    top, every, width = (
        float(value) for value in (ace(p, targets, kind="top-label"), ace(p, targets), ece(p, targets))
    )
    assert top == pytest.approx(width, rel=0.1)  # the same quantity with other bins
    assert 0 < every < top  # and the errors of ten classes, most of which are near zero


# ---------------------------------------------------------------------- bins of equal width


@settings(deadline=None)
@given(SIZES, st.integers(1, 20))
def test_ece_counts(sizes: tuple[int, int, int], bins: int) -> None:
    p, targets, _ = examples(*sizes)
    assert float(ece(p, targets, bins)) == pytest.approx(ece_by_counting(p.numpy(), targets.numpy(), bins), abs=1e-12)


@settings(deadline=None)
@given(SIZES, st.booleans())
def test_errors_do_not_depend_on_order(sizes: tuple[int, int, int], coarse: bool) -> None:
    p, targets, generator = examples(*sizes, coarse=coarse)
    rows = torch.randperm(sizes[0], generator=generator)
    for find in (ece, *(lambda *pair, kind=kind: ace(*pair, bins=4, kind=kind) for kind in KINDS)):
        torch.testing.assert_close(find(p[rows], targets[rows]), find(p, targets), rtol=1e-9, atol=1e-12)
    if not coarse:  # of equal probabilities the first class counts, and another order has another first class
        columns = torch.randperm(sizes[1], generator=generator)
        renamed = columns.argsort()[targets]
        torch.testing.assert_close(ece(p[:, columns], renamed), ece(p, targets), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ace(p[:, columns], renamed), ace(p, targets), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(SIZES)
def test_coarser_bins_hide_errors(sizes: tuple[int, int, int]) -> None:
    p, targets, _ = examples(*sizes)
    fine, coarse, one = (float(ece(p, targets, bins)) for bins in (15, 5, 1))
    assert 1 >= fine >= coarse - 1e-12
    assert coarse >= one - 1e-12
    assert one == pytest.approx(abs(float(accuracy(p, targets)) - float(p.amax(1).mean())), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_borders_belong_to_the_left_bin_and_one_to_the_last(dtype: torch.dtype) -> None:
    fifths = torch.full((1, 5), 0.2, dtype=dtype)
    assert reliability(fifths, torch.tensor([0]), bins=5).count.tolist() == [1, 0, 0, 0, 0]
    assert reliability(fifths, torch.tensor([0])).count.nonzero().item() == 2  # (2/15, 3/15]
    above = torch.tensor([[0.6 + 1e-6, 0.4 - 1e-6]], dtype=dtype)
    assert reliability(above, torch.tensor([0]), bins=5).count.tolist() == [0, 0, 0, 1, 0]
    certain = torch.tensor([[1.0, 0.0]], dtype=dtype)
    assert reliability(certain, torch.tensor([0])).count.nonzero().item() == 14


def test_a_calibrated_classifier_has_the_error_that_chance_gives() -> None:
    # With targets drawn from p, each bin's gap is normal with variance v = sum c (1 - c): E|gap| = sqrt(2 v / pi).
    generator = torch.Generator().manual_seed(7)
    p = torch.randn(30_000, 4, generator=generator, dtype=torch.float64).mul(1.5).softmax(1)
    targets = torch.multinomial(p, 1, generator=generator).squeeze(1)
    confidence = p.amax(1)
    place = (confidence * 15).ceil().long() - 1
    variance = torch.zeros(15, dtype=torch.float64).index_add(0, place, confidence * (1 - confidence))
    mean = (2 * variance / math.pi).sqrt().sum() / len(p)
    spread = ((1 - 2 / math.pi) * variance).sum().sqrt() / len(p)
    assert abs(float((ece(p, targets) - mean) / spread)) < 3.5
    overconfident = (3 * p.log()).softmax(1)
    assert float(ece(overconfident, targets)) > float(mean + 10 * spread)


def test_reliability_is_what_ece_sums_up() -> None:
    p, targets, _ = examples(500, 3, seed=5)
    found = reliability(p, targets)
    assert int(found.count.sum()) == 500
    gaps = (found.count * (found.accuracy - found.confidence).abs()).nansum() / 500
    torch.testing.assert_close(gaps, ece(p, targets))
    own = found.count > 0
    assert bool(((found.confidence > found.edges[:-1]) & (found.confidence <= found.edges[1:]))[own].all())
    assert bool(found.accuracy[~own].isnan().all())


# ---------------------------------------------------------------------- bins of equal mass


@settings(deadline=None)
@given(SIZES, st.integers(1, 9), st.booleans())
def test_ace_against_copies(sizes: tuple[int, int, int], bins: int, coarse: bool) -> None:
    p, targets, _ = examples(*sizes, coarse=coarse)
    table, y = p.numpy(), targets.numpy()
    top = ace_by_copies(table.max(1), (table.argmax(1) == y).astype(float), bins)
    assert float(ace(p, targets, bins, kind="top-label")) == pytest.approx(top, abs=1e-12)
    every = np.mean([ace_by_copies(table[:, k], (y == k).astype(float), bins) for k in range(sizes[1])])
    assert float(ace(p, targets, bins)) == pytest.approx(float(every), abs=1e-12)


def test_ace_without_ties_and_remainders_is_the_usual_one() -> None:
    p, targets, _ = examples(60, 3, seed=1)
    confidence, right = p.amax(1), (p.argmax(1) == targets).double()
    order = confidence.argsort()
    gaps = [(confidence[part] - right[part]).mean().abs() for part in order.split(60 // 15)]
    torch.testing.assert_close(ace(p, targets, kind="top-label"), torch.stack(gaps).mean())


# ---------------------------------------------------------------------- temperature


@pytest.mark.parametrize("name", REAL)
def test_the_best_temperature_is_the_minimum(shared_data: Path, name: str) -> None:
    from scipy.optimize import minimize_scalar

    p, targets = real(shared_data, name)
    logits = p.double().clamp(min=1e-12).log()
    found = best_temperature(logits, targets)
    direct = minimize_scalar(lambda t: float(nll(tempered(logits, t), targets)), bounds=(0.1, 10), method="bounded")
    assert found == pytest.approx(direct.x, rel=1e-4)
    assert float(nll(tempered(logits, found), targets)) <= direct.fun + 1e-12
    assert float(ece(tempered(logits, found), targets)) < float(ece(p, targets)) / 2


@settings(deadline=None)
@given(SIZES)
def test_it_is_the_temperature_of_barriers(sizes: tuple[int, int, int]) -> None:
    p, targets, _ = examples(*sizes)
    assert best_temperature(p.log(), targets) == pytest.approx(barrier_temperature(p.log(), targets), rel=1e-9)


def test_a_known_temperature_is_found() -> None:
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(50_000, 5, generator=generator, dtype=torch.float64)
    targets = torch.multinomial((z / 0.4).softmax(1), 1, generator=generator).squeeze(1)
    # Maximum likelihood of s = 1/T: its variance is 1 / (n E Var_p[z]).
    p = (z / 0.4).softmax(1)
    spread = (p * z.square()).sum(1) - (p * z).sum(1).square()
    error = 1 / float(spread.sum().sqrt())
    assert abs(1 / best_temperature(z, targets) - 2.5) < 3.5 * error


def test_ends_of_the_range() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert best_temperature(logits, torch.tensor([0, 1])) == COLDEST
    assert best_temperature(logits, torch.tensor([1, 0])) == HOTTEST
    torch.testing.assert_close(tempered(logits, 1.0), logits.double().softmax(1))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ece(torch.eye(2), torch.tensor([0, 1]), bins=0), "at least 1 bin"),
        (lambda: ace(torch.eye(2), torch.tensor([0, 1]), bins=0), "at least 1 bin"),
        (lambda: reliability(torch.eye(2), torch.tensor([0, 1]), bins=-1), "at least 1 bin"),
        (lambda: ace(torch.eye(2), torch.tensor([0, 1]), kind="mean"), "class-wise, top-label"),  # type: ignore[arg-type]
        (lambda: ece(torch.eye(2), torch.tensor([0, 5])), "class numbers"),
        (lambda: ace(torch.ones(2, 2), torch.tensor([0, 1])), "sum to 1"),
        (lambda: tempered(torch.eye(2), 0.0), "above 0"),
        (lambda: tempered(torch.ones(2, 1), 1.0), "two classes"),
        (lambda: best_temperature(torch.tensor([[0.0, -torch.inf]]), torch.tensor([0])), "finite logits"),
        (lambda: best_temperature(torch.eye(2), torch.tensor([0, 2])), "class numbers"),
    ],
)
def test_mistakes_get_a_sentence(call: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        call()
