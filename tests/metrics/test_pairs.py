"""Mutual information of all pairs: the sum of exponentials behind it, and the values against plain float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.entropy import mutual_information
from onebasin.metrics.pairs import (
    ERROR,
    MANY_TERMS,
    SMALL,
    TERMS,
    mutual_information_of_pairs,
    pairwise_mutual_information,
)


def probabilities(members: int, examples: int, classes: int, *, own: float = 1.0, seed: int = 0) -> Tensor:
    """Networks that agree on logits of size 4 and differ by logits of size `own`."""
    generator = torch.Generator().manual_seed(seed)
    together = 4 * torch.randn(1, examples, classes, generator=generator, dtype=torch.float64)
    apart = torch.randn(members, examples, classes, generator=generator, dtype=torch.float64)
    return (together + own * apart).softmax(2)


def by_definition(values: Tensor) -> np.ndarray:
    """The straightforward way, in float64: one pair after the other."""
    p = values.double().numpy()

    def entropies(q: np.ndarray) -> np.ndarray:
        return -np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0).sum(-1)

    result = np.zeros((len(p), len(p)))
    for i in range(len(p)):
        for j in range(len(p)):
            result[i, j] = (entropies((p[i] + p[j]) / 2) - (entropies(p[i]) + entropies(p[j])) / 2).mean()
    return result


def test_the_sum_of_exponentials_is_the_best_there_is() -> None:
    s = np.concatenate([[0.0], np.geomspace(1e-9, 2, 4000)])
    exact = 0.5 * s * np.log(np.where(s > 0, s, 1))
    rest = 1e6 * (exact - sum(weight * np.exp(-rate * s) for rate, weight in TERMS))
    # a + b s cancel in J, so they may be chosen: minimise e subject to |rest - a - b s| <= e.
    rest = rest - np.polyval(np.polyfit(s, rest, 1), s)
    rows = np.stack([np.ones_like(s), s], 1)
    above = np.block([[-rows, -np.ones((len(s), 1))], [rows, -np.ones((len(s), 1))]])
    found = linprog([0, 0, 1], A_ub=above, b_ub=np.concatenate([-rest, rest]), bounds=[(None, None)] * 3)
    error = (rest - rows @ found.x[:2]) * 1e-6
    assert np.abs(error).max() <= ERROR / 2
    # As many equal peaks of alternating sign as there are numbers to choose, and one more: no other sum is better.
    ends = np.flatnonzero(np.diff(np.sign(error))) + 1
    peaks = [np.abs(part).max() for part in np.split(error, ends)]
    assert len(peaks) == 2 * len(TERMS) + 3
    assert max(peaks) / min(peaks) < 1.001


def test_one_class_of_a_pair_never_errs_more_than_the_bound() -> None:
    # Two classes (x, 1 - x) and (y, 1 - y) on a grid that is fine near zero: at most two bounds.
    x = torch.cat([torch.zeros(1), torch.logspace(-9, math.log10(0.5), 400)]).double()
    grid = torch.cat([x, 1 - x])
    values = torch.stack([grid, 1 - grid], -1)
    own = torch.special.entr(values).sum(-1)
    together = torch.special.entr((values[:, None] + values) / 2).sum(-1)
    exact = together - (own[:, None] + own) / 2
    error = (pairwise_mutual_information(values[:, None]) - exact).abs().max()
    assert ERROR / 4 < float(error) < 2 * ERROR  # and the bound is not far above what happens


def test_many_terms_err_by_a_share_of_any_value() -> None:
    grid = np.concatenate([[0.0], np.geomspace(1e-9, 1, 300)])
    p, q = (side.flatten() for side in np.meshgrid(grid, grid))
    p, q = p[p > 1.01 * q], q[p > 1.01 * q]  # of closer ones float64 loses digits of what is expected

    def product(s: np.ndarray) -> np.ndarray:
        return s * np.log(np.where(s > 0, s, 1))

    exact = (product(p) + product(q)) / 2 - product((p + q) / 2)
    found = sum(weight / 2 * (np.expm1(-rate * p) - np.expm1(-rate * q)) ** 2 for rate, weight in MANY_TERMS)
    assert np.abs(found / exact - 1).max() < 1e-3


@pytest.mark.parametrize("certainty", [0.0, 8.0, 12.0, 16.0])
@pytest.mark.parametrize("own", [0.05, 1.0])
def test_networks_that_are_sure_of_the_same(certainty: float, own: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 300, 10, generator=generator) + own * torch.randn(30, 300, 10, generator=generator)
    logits[:, :, 0] += certainty
    values = logits.softmax(2)
    pairs = torch.triu_indices(30, 30, 1).T
    exact = mutual_information_of_pairs(values, pairs)
    found = pairwise_mutual_information(values)[pairs[:, 0], pairs[:, 1]]
    assert float((found / exact - 1).abs().max()) < 1e-3
    assert certainty == 0 or own == 1 or float(exact.median()) < SMALL  # both kinds of terms are looked at
    few = pairwise_mutual_information(values[:5])
    torch.testing.assert_close(few[0, 1], exact[0], rtol=1e-12, atol=0)


@settings(max_examples=25, deadline=None)
@given(
    members=st.sampled_from([1, 2, 5, 14]), examples=st.integers(1, 40), classes=st.sampled_from([2, 3, 10, 60]),
    own=st.sampled_from([0.01, 0.3, 3.0, 30.0]), seed=st.integers(0, 50),
)  # fmt: skip
def test_all_pairs_are_those_of_the_definition(
    members: int, examples: int, classes: int, own: float, seed: int
) -> None:
    values = probabilities(members, examples, classes, own=own, seed=seed)
    expected = by_definition(values)
    found = pairwise_mutual_information(values)
    assert found.dtype == torch.float64 and torch.equal(found, found.T) and not found.diagonal().any()
    assert np.abs(found.numpy() - expected).max() < classes * ERROR
    rows = torch.triu_indices(members, members).T
    exact = mutual_information_of_pairs(values, rows)
    np.testing.assert_allclose(exact, expected[rows[:, 0], rows[:, 1]], rtol=1e-9, atol=1e-14)
    if members > 1:
        whole = mutual_information(values[:2]).mean()
        torch.testing.assert_close(mutual_information_of_pairs(values, torch.tensor([[0, 1]]))[0], whole)


@pytest.mark.parametrize(("own", "classes", "share"), [(1.0, 10, 1e-4), (0.03, 10, 3e-4), (1.0, 300, 1e-3)])
def test_over_many_examples_the_error_is_a_small_share(own: float, classes: int, share: float) -> None:
    values = probabilities(14, 3000 if classes == 10 else 200, classes, own=own).float()
    pairs = torch.triu_indices(14, 14, 1).T
    exact = mutual_information_of_pairs(values, pairs)
    found = pairwise_mutual_information(values)[pairs[:, 0], pairs[:, 1]]
    assert float(((found - exact) / exact).abs().max()) < share


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = probabilities(13, 37, 4)
    pairs = torch.tensor([[0, 1], [3, 1], [2, 2]])
    whole, exact = pairwise_mutual_information(values), mutual_information_of_pairs(values, pairs)
    monkeypatch.setattr("onebasin.metrics.pairs._CELLS", 13 * 4 * 3)
    torch.testing.assert_close(pairwise_mutual_information(values), whole, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(mutual_information_of_pairs(values, pairs), exact, rtol=1e-12, atol=1e-15)


def test_equal_networks_have_none_and_opposite_ones_log_two() -> None:
    population = probabilities(11, 500, 10)
    values = population[[0, 1, 0, 2, 1, *range(3, 11)]]
    found = pairwise_mutual_information(values)
    assert max(float(found[0, 2]), float(found[1, 4])) < 1e-6 * float(found.max())
    assert not mutual_information_of_pairs(values, torch.tensor([[0, 2], [4, 1], [3, 3]])).any()
    sure = torch.eye(14)[:, None].expand(14, 20, 14)
    expected = math.log(2) * (1 - torch.eye(14, dtype=torch.float64))
    torch.testing.assert_close(pairwise_mutual_information(sure), expected, rtol=0, atol=2 * ERROR)


def test_ten_networks_have_near_1_8_times_the_information_of_two() -> None:
    # To second order MI = 1/2 sum_k var_k / p_k with divisor M: (M - 1) / M times the variance, 9/10 against 1/2.
    # The next order is of relative size (own logits)^2; over seeds both averages have independent relative errors.
    ratios = []
    for seed in range(20):
        values = probabilities(10, 500, 10, own=0.02, seed=seed)
        pairs = pairwise_mutual_information(values)
        ratios.append(float(mutual_information(values).mean() * 90 / pairs.sum()))
    mean, error = np.mean(ratios), np.std(ratios, ddof=1) / math.sqrt(20)
    assert abs(mean - 1.8) < 4 * error + 1.8 * (0.02**2 + 3e-4)
    assert error < 1e-3


def test_half_precision_and_float32_are_taken() -> None:
    values = probabilities(13, 50, 10)
    exact = by_definition(values)
    for dtype, share in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
        found = pairwise_mutual_information(values.to(dtype))
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found, exact, rtol=share, atol=1e-12)


def test_what_is_refused() -> None:
    values = probabilities(3, 5, 4)
    with pytest.raises(InputError, match=r"probabilities \(members, examples, classes\)"):
        pairwise_mutual_information(values[0])
    with pytest.raises(InputError, match="give softmax"):
        pairwise_mutual_information(values.log())
    with pytest.raises(InputError, match="give softmax"):
        pairwise_mutual_information(torch.cat([values, torch.full((1, 5, 4), torch.nan)]))
    with pytest.raises(InputError, match="members from 0 to 2, found 0 to 3"):
        mutual_information_of_pairs(values, torch.tensor([[0, 3]]))
    with pytest.raises(InputError, match=r"integers \(pairs, 2\)"):
        mutual_information_of_pairs(values, torch.tensor([0, 1]))
    assert mutual_information_of_pairs(values, torch.zeros(0, 2, dtype=torch.int64)).shape == (0,)
