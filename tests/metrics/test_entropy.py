"""Entropies and mutual information: closed forms, another formula for the same, exact zeros, bounds."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from onebasin.errors import InputError
from onebasin.metrics.entropy import entropy, expected_entropy, information, mutual_information, predictive_entropy

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 10), st.integers(2, 6), st.integers(0, 2**31 - 1))


def population(members: int, count: int, classes: int, seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(members, count, classes, generator=generator, dtype=torch.float64)).softmax(2)


@settings(deadline=None)
@given(SIZES)
def test_mutual_information_is_the_mean_divergence_from_the_average(sizes: tuple[int, int, int, int]) -> None:
    p = population(*sizes)
    average = Categorical(p.mean(0))
    divergence = torch.stack([kl_divergence(Categorical(own), average) for own in p]).mean(0)
    torch.testing.assert_close(mutual_information(p), divergence, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(predictive_entropy(p), average.entropy(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(expected_entropy(p), Categorical(p).entropy().mean(0), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(SIZES)
def test_identical_members_have_exactly_none(sizes: tuple[int, int, int, int]) -> None:
    members, *rest = sizes
    same = population(1, *rest).expand(7 * members, -1, -1)  # type: ignore[arg-type]
    assert bool((mutual_information(same) == 0).all())
    assert torch.equal(predictive_entropy(same), entropy(same[0]))


@settings(deadline=None)
@given(SIZES)
def test_bounds_and_orders(sizes: tuple[int, int, int, int]) -> None:
    p = population(*sizes, scale=30.0)
    found = mutual_information(p)
    assert bool((found >= 0).all())
    assert bool((found <= math.log(min(sizes[0], sizes[2])) + 1e-12).all())
    torch.testing.assert_close(predictive_entropy(p), expected_entropy(p) + found, rtol=1e-9, atol=1e-12)
    generator = torch.Generator().manual_seed(sizes[3])
    members, rows, columns = (torch.randperm(size, generator=generator) for size in sizes[:3])
    moved = mutual_information(p[members][:, rows][:, :, columns])
    torch.testing.assert_close(moved, found[rows], rtol=1e-9, atol=1e-12)


def test_rounding_never_makes_it_negative() -> None:
    p = (population(1, 2000, 5, seed=3).log() + 1e-9 * population(8, 2000, 5, seed=4)).softmax(2)
    plain = entropy(p.mean(0)) - entropy(p).mean(0)
    assert bool((plain < 0).any()), "members so alike that rounding decides"
    found = mutual_information(p)
    assert bool((found >= 0).all())
    assert float(found.max()) < 1e-14


def test_closed_forms_with_zeros() -> None:
    sure = torch.eye(4)[:, None, :]  # four members, each certain of its own class
    assert mutual_information(sure).tolist() == [pytest.approx(math.log(4), rel=1e-14)]
    assert expected_entropy(sure).tolist() == [0]
    assert entropy(torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.25, 0.75]])).tolist() == pytest.approx(
        [0, math.log(2), -0.25 * math.log(0.25) - 0.75 * math.log(0.75)], rel=1e-14
    )
    assert math.copysign(1, float(entropy(torch.tensor([[0.0, 1.0]])))) == 1


def test_single_precision_is_computed_in_double() -> None:
    p = population(3, 5, 4, seed=0).float()
    found = mutual_information(p)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, mutual_information(p.double()), rtol=0, atol=0)


def test_averages_give_the_same_information() -> None:
    p = population(5, 8, 3, seed=2)
    torch.testing.assert_close(information(p.mean(0), expected_entropy(p)), mutual_information(p))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mutual_information(torch.eye(3)), "members, examples, classes"),
        (lambda: predictive_entropy(torch.ones(1, 2, 3)), "sum to 1"),
        (lambda: expected_entropy(torch.full((1, 1, 2), torch.nan)), "NaN"),
        (lambda: entropy(torch.ones(3)), "probabilities"),
        (lambda: information(torch.eye(3), torch.zeros(2)), "mean entropy"),
    ],
)
def test_mistakes_get_a_sentence(call: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        call()
