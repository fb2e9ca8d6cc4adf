"""Disagreement and variation ratio against all pairs and votes."""

from collections import Counter
from itertools import combinations

import pytest
import torch

from onebasin.errors import InputError
from onebasin.metrics import disagreement, variation_ratio


def test_all_pairs_and_all_votes() -> None:
    p = torch.randn(5, 30, 4, generator=torch.Generator().manual_seed(0)).softmax(2)
    labels = p.argmax(2).T.tolist()
    pairs = [sum(a != b for a, b in combinations(row, 2)) / 10 for row in labels]
    votes = [1 - max(Counter(row).values()) / 5 for row in labels]
    assert disagreement(p).tolist() == pytest.approx(pairs)
    assert variation_ratio(p).tolist() == pytest.approx(votes)
    same = p[:1].expand(3, -1, -1)
    assert not bool(disagreement(same).any())
    assert not bool(variation_ratio(same).any())


def test_a_single_network_cannot_disagree() -> None:
    with pytest.raises(InputError, match="give the networks of a population"):
        disagreement(torch.full((1, 2, 2), 0.5))
