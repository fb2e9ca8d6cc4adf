"""Kendall's tau against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from onebasin.errors import InputError
from onebasin.metrics.concordance import kendall_tau


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 30), rows=st.integers(1, 4), values=st.integers(2, 50), seed=st.integers(0, 2**31 - 1)
)  # few values make many ties
def test_it_is_scipys(n: int, rows: int, values: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(values, (rows, n), generator=generator).double() for _ in range(2))
    expected = [kendalltau(a.numpy(), b.numpy()).statistic for a, b in zip(first, second, strict=True)]
    assert np.allclose(kendall_tau(first, second).numpy(), expected, atol=1e-12, equal_nan=True)


def test_the_ends_and_the_middle() -> None:
    order = torch.arange(7.0)
    assert float(kendall_tau(order, order)) == 1
    assert float(kendall_tau(order, order.flip(0))) == -1
    swapped = order.clone()
    swapped[2], swapped[3] = order[3], order[2]
    assert float(kendall_tau(order, swapped)) == pytest.approx(1 - 2 / 21)  # one of 21 pairs


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((1,), (1,)), ((), ())])
def test_what_cannot_be_ranked(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(InputError, match="one shape"):
        kendall_tau(*(torch.zeros(shape) for shape in shapes))
