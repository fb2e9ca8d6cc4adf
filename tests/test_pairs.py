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
from onebasin.metrics.pairs import ERROR, TERMS, mutual_information_of_pairs, pairwise_mutual_information


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


@settings(max_examples=25, deadline=None)
@given(
    members=st.integers(1, 7), examples=st.integers(1, 40), classes=st.sampled_from([2, 3, 10, 60]),
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
    values = probabilities(6, 3000 if classes == 10 else 200, classes, own=own).float()
    pairs = torch.triu_indices(6, 6, 1).T
    exact = mutual_information_of_pairs(values, pairs)
    found = pairwise_mutual_information(values)[pairs[:, 0], pairs[:, 1]]
    assert float(((found - exact) / exact).abs().max()) < share


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = probabilities(5, 37, 4)
    pairs = torch.tensor([[0, 1], [3, 1], [2, 2]])
    whole, exact = pairwise_mutual_information(values), mutual_information_of_pairs(values, pairs)
    monkeypatch.setattr("onebasin.metrics.pairs._CELLS", 5 * 4 * 3)
    torch.testing.assert_close(pairwise_mutual_information(values), whole, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(mutual_information_of_pairs(values, pairs), exact, rtol=1e-12, atol=1e-15)


def test_equal_networks_have_none_and_opposite_ones_log_two() -> None:
    crowd = probabilities(3, 500, 10)
    values = crowd[[0, 1, 0, 2, 1]]
    found = pairwise_mutual_information(values)
    assert max(float(found[0, 2]), float(found[1, 4])) < 1e-6 * float(found.max())
    assert not mutual_information_of_pairs(values, torch.tensor([[0, 2], [4, 1], [3, 3]])).any()
    sure = torch.eye(4)[:, None].expand(4, 20, 4)
    expected = math.log(2) * (1 - torch.eye(4, dtype=torch.float64))
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
    values = probabilities(4, 50, 10)
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
