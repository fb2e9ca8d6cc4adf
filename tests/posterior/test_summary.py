"""Running summaries of thousands of networks: against all of them at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onebasin.errors import InputError
from onebasin.population.population import Population
from onebasin.posterior.predict import predict, summarise

INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
MODEL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def population_of(members: int, seed: int = 0, size: float = 1.0) -> Population:
    generator = torch.Generator().manual_seed(seed)
    return Population.from_stacked(
        {
            name: size * torch.randn((members, *value.shape), generator=generator, dtype=torch.float64)
            for name, value in MODEL.state_dict().items()
        }
    )


@settings(max_examples=20, deadline=None)
@given(members=st.integers(1, 9), chunk=st.integers(1, 10), size=st.sampled_from([0.0, 1.0, 30.0]))
def test_a_summary_is_that_of_all_members_at_once(members: int, chunk: int, size: float) -> None:
    population = population_of(members, size=size)
    every = predict(MODEL, population, INPUTS)
    found = summarise(MODEL, population, INPUTS, chunk=chunk)
    entropies = torch.distributions.Categorical(every).entropy()
    assert found.members == members
    torch.testing.assert_close(found.mean, every.mean(0), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found.variance(0), every.var(0, correction=0), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.expected_entropy, entropies.mean(0), rtol=1e-9, atol=1e-12)
    whole = torch.distributions.Categorical(every.mean(0)).entropy()
    torch.testing.assert_close(found.entropy, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.mutual_information, whole - entropies.mean(0), rtol=1e-9, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(first=st.integers(1, 6), second=st.integers(1, 6), output=st.sampled_from(["probabilities", "values"]))
def test_merged_summaries_are_that_of_both_populations(first: int, second: int, output: str) -> None:
    population = population_of(first + second)
    parts = [summarise(MODEL, population[rows], INPUTS, output=output) for rows in (slice(first), slice(first, None))]
    whole, merged = summarise(MODEL, population, INPUTS, output=output), parts[0].merge(parts[1])
    for name in ("mean", "deviations", "expected_entropy"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-10, atol=1e-13)
    assert merged.members == first + second


def test_values_far_from_zero_keep_their_variance() -> None:
    # 1e8 +- 1: a sum of squares would lose all digits of the variance in float32, and half of them in float64.
    layer = nn.Linear(1, 1)
    bias = 1e8 + torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    population = Population.from_stacked({"weight": torch.zeros(3, 1, 1, dtype=torch.float64), "bias": bias})
    found = summarise(layer, population, torch.zeros(2, 1), output="values")
    torch.testing.assert_close(found.variance(), torch.ones(2, 1, dtype=torch.float64), rtol=1e-12, atol=0)
    assert found.expected_entropy is None


def test_equal_networks_have_no_mutual_information() -> None:
    population = population_of(1)[[0] * 7].to(dtype=torch.float32)
    found = summarise(MODEL, population, INPUTS)
    assert float(found.mutual_information.max()) < 1e-13
    assert float(found.variance().max()) < 1e-28


def test_what_is_refused() -> None:
    values = summarise(MODEL, population_of(1), INPUTS, output="values")
    with pytest.raises(InputError, match='summarise with output="probabilities"'):
        _ = values.mutual_information
    with pytest.raises(InputError, match="at least 2 networks, found 1"):
        values.variance()
    with pytest.raises(InputError, match="summaries of the same predictions"):
        values.merge(summarise(MODEL, population_of(1), INPUTS))
    with pytest.raises(InputError, match="summaries of the same predictions"):
        values.merge(summarise(MODEL, population_of(1), INPUTS[:4], output="values"))
    with pytest.raises(InputError, match="did you mean 'draws'"):
        summarise(MODEL, population_of(1), INPUTS, drawn=3)  # type: ignore[call-arg]
    broken = {name: value.clone() for name, value in population_of(3).stacked().items()}
    broken["2.bias"][2] = torch.nan
    with pytest.raises(InputError, match="found NaN from network 2"):
        summarise(MODEL, Population.from_stacked(broken), INPUTS)
