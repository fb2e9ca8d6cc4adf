"""Averages of predictions that are streamed over networks: against all of them at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onebasin.errors import InputError
from onebasin.population.population import Population
from onebasin.posterior.predict import Predictive, PredictOptions, predict

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
    found = Predictive.of(MODEL, population, INPUTS, PredictOptions(chunk=chunk))
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
def test_networks_are_added_in_blocks_of_any_size(first: int, second: int, output: str) -> None:
    population = population_of(first + second)
    logits = predict(MODEL, population, INPUTS, quantity="logits")
    blocks, whole = Predictive(output), Predictive.of(MODEL, population, INPUTS, quantity=output)
    for block in (logits[:first], logits[first:]):
        blocks.add(block)
    assert blocks.members == whole.members == first + second
    assert torch.equal(blocks.mean, whole.mean) and torch.equal(blocks.variance(0), whole.variance(0))
    if output == "probabilities":
        assert torch.equal(blocks.log_mean, whole.log_mean)
        torch.testing.assert_close(whole.log_mean, whole.mean.log(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(whole.logits, logits.mean(0), rtol=1e-10, atol=1e-12)


def test_the_mean_alone_is_that_of_what_predict_returns() -> None:
    population = population_of(7).to(dtype=torch.float32)
    for output in ("probabilities", "values"):
        every = predict(MODEL, population, INPUTS, quantity=output)
        alone = Predictive.of(MODEL, population, INPUTS, quantity=output, mean_only=True).mean
        torch.testing.assert_close(alone, every.double().mean(0), rtol=1e-14, atol=1e-15)
    layer = nn.Linear(1, 1)  # a mean of infinite values is infinite, not NaN
    weights = {"weight": torch.zeros(3, 1, 1), "bias": torch.tensor([[torch.inf], [1.0], [2.0]])}
    assert (
        float(predict(layer, Population.from_stacked(weights), torch.zeros(1, 1), quantity="values", average=True))
        == torch.inf
    )


def test_values_far_from_zero_keep_their_variance() -> None:
    # 1e8 +- 1: a sum of squares would lose all digits of the variance in float32, and half of them in float64.
    layer = nn.Linear(1, 1)
    bias = 1e8 + torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    population = Population.from_stacked({"weight": torch.zeros(3, 1, 1, dtype=torch.float64), "bias": bias})
    found = Predictive.of(layer, population, torch.zeros(2, 1), quantity="values")
    torch.testing.assert_close(found.variance(), torch.ones(2, 1, dtype=torch.float64), rtol=1e-12, atol=0)


def test_equal_networks_have_no_mutual_information() -> None:
    population = population_of(1)[[0] * 7].to(dtype=torch.float32)
    found = Predictive.of(MODEL, population, INPUTS)
    assert float(found.mutual_information.max()) < 1e-13
    assert float(found.variance().max()) < 1e-28


def test_what_is_refused() -> None:
    values = Predictive.of(MODEL, population_of(1), INPUTS, quantity="values")
    for name in ("mutual_information", "entropy", "expected_entropy", "log_mean", "logits"):
        with pytest.raises(InputError, match='predict with quantity="probabilities"'):
            getattr(values, name)
    with pytest.raises(InputError, match="at least one network to average over"):
        _ = Predictive().mean
    with pytest.raises(InputError, match="at least 2 networks, found 1"):
        values.variance()
    broken = {name: value.clone() for name, value in population_of(3).stacked().items()}
    broken["2.bias"][2] = torch.nan
    with pytest.raises(InputError, match="found NaN from network 2"):
        Predictive.of(MODEL, Population.from_stacked(broken), INPUTS)
    broken["2.bias"][2] = torch.inf
    with pytest.raises(InputError, match="found infinity from network 2"):
        Predictive.of(MODEL, Population.from_stacked(broken), INPUTS, quantity="values")
