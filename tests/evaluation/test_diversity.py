"""The diversity report of a population: numbers against brute force, collapse where it was planted."""

import json
import math
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.evaluation.diversity import LEVELS, PairStatistics, diversity
from onebasin.metrics.concordance import pearson, spearman
from onebasin.metrics.entropy import mutual_information
from onebasin.metrics.pairs import mutual_information_of_pairs
from onebasin.population.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predict import predict
from onebasin.state import spec_of, state_of

measure = import_module("onebasin.evaluation.diversity")

MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
GENERATOR = torch.Generator().manual_seed(1)
INSIDE, OUTSIDE = torch.randn(40, 4, generator=GENERATOR), 3 * torch.randn(60, 4, generator=GENERATOR)


def population_of(members: int, chain: list[int] | None = None, seed: int = 0) -> Population:
    generator = torch.Generator().manual_seed(seed)
    stacked = {k: torch.randn((members, *v.shape), generator=generator) for k, v in MODEL.state_dict().items()}
    return Population.from_stacked(stacked, chain=chain)


def exact_pairs(population: Population, inputs: Tensor) -> Tensor:
    values = predict(MODEL, population, inputs)
    return mutual_information_of_pairs(values, torch.triu_indices(len(population), len(population), 1).T)


def test_numbers_are_those_of_brute_force() -> None:
    population = population_of(9, chain=[0, 0, 0, 1, 1, 1, 2, 2, -1])
    found = diversity(MODEL, population, INSIDE, ood=OUTSIDE, closest=4)
    inside, outside = exact_pairs(population, INSIDE), exact_pairs(population, OUTSIDE)
    assert found.ood is not None
    for side, exact, inputs in ((found.in_distribution, inside, INSIDE), (found.ood, outside, OUTSIDE)):
        assert side.pairs.count == 36 and side.examples == len(inputs)
        assert side.pairs.mean == pytest.approx(float(exact.mean()), rel=1e-4)
        assert side.pairs.sd == pytest.approx(float(exact.std()), rel=1e-3)
        whole = mutual_information(predict(MODEL, population, inputs)).mean()
        assert side.population == pytest.approx(float(whole), rel=1e-9)
        assert side.within is not None and side.between is not None
        assert side.within.count == 3 + 3 + 1 and side.between.count == 28 - 7  # the last member is of no known chain
    within = [inside[place] for place in (0, 1, 8, 21, 22, 26, 33)]  # places of (0,1) (0,2) (1,2) (3,4) ... in rows
    assert found.in_distribution.within is not None
    assert found.in_distribution.within.mean == pytest.approx(float(torch.stack(within).mean()), rel=1e-4)
    assert found.pearson == pytest.approx(pearsonr(inside, outside).statistic, abs=1e-3)
    assert found.spearman == pytest.approx(spearmanr(inside, outside).statistic, abs=0.02)
    order = inside.argsort()[:4]
    rows = torch.triu_indices(9, 9, 1).T[order]
    assert [[pair.first, pair.second] for pair in found.closest] == rows.tolist()
    for pair, place in zip(found.closest, order.tolist(), strict=True):
        assert pair.in_distribution == pytest.approx(float(inside[place]), rel=1e-3)
        assert pair.ood == pytest.approx(float(outside[place]), rel=1e-3)
        assert pair.share == pytest.approx(float(inside[place] / np.median(inside)), rel=1e-3)


def test_planted_collapse_is_found() -> None:
    # Members 0, 3, 5 are one function (hidden units in another order), 1 and 4 nearly so.
    population = population_of(6, chain=[0, 1, 0, 0, 1, 1])
    tensors = {name: value.clone() for name, value in population.stacked().items()}
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    for name, values in tensors.items():
        values[3] = values[0][order] if name.startswith("0") else values[0]
        values[5] = values[0]
        values[4] = values[1] * (1 + 1e-3)
    tensors["2.weight"][3] = tensors["2.weight"][0][:, order]
    found = diversity(MODEL, Population.from_stacked(tensors, chain=population.chain), INSIDE)
    assert (found.collapse.pairs, found.collapse.within, found.collapse.functions) == (4, 2, 3)
    first = {(pair.first, pair.second, pair.same_chain) for pair in found.closest[:4]}
    assert first == {(0, 3, True), (0, 5, False), (3, 5, False), (1, 4, True)}
    assert found.closest[3].share < 1e-3 < 0.1 < found.closest[4].share
    assert found.ood is None and found.pearson is None and found.ood_matrix is None


def test_a_population_of_one_function() -> None:
    found = diversity(MODEL, population_of(1)[[0, 0, 0, 0]], INSIDE, ood=OUTSIDE)
    assert found.in_distribution.pairs.mean < 1e-9 and found.in_distribution.population < 1e-12
    assert found.collapse.functions == 1 and found.collapse.pairs == 6 and found.collapse.within is None
    assert found.in_distribution.within is None and found.in_distribution.between is None
    json.loads(found.to_json())
    assert "different functions: 1" in str(found)


def test_a_posterior_is_drawn_from_and_its_components_are_chains() -> None:
    names = tuple(name for name, _ in MODEL.named_parameters())
    layout = FlatLayout(names, spec_of(state_of(MODEL)), {})
    centres = population_of(2, seed=5)
    flat = [layout.flat(centres.member(index)).float() for index in range(2)]
    for width, smallest in ((0.0, 0.0), (0.1, 1e-4)):
        gaussians = [Gaussian(centre, Diagonal(torch.full_like(centre, width))) for centre in flat]
        posterior = Posterior.equal(gaussians, layout, [{}, {}])
        found = diversity(MODEL, posterior, INSIDE, draws=6, seed=3)
        assert found.of == 6 and found.networks.tolist() == [0, 1, 2, 3, 4, 5]
        assert found.in_distribution.within is not None and found.in_distribution.between is not None
        assert found.in_distribution.within.count == 6 and found.in_distribution.between.count == 9
        assert smallest <= found.in_distribution.within.mean < 0.2 * found.in_distribution.between.mean
        if not width:
            two = exact_pairs(centres, INSIDE)
            assert found.collapse.functions == 2
            assert found.in_distribution.between.mean == pytest.approx(float(two[0]), rel=1e-3)


def test_a_large_population_is_thinned_by_the_seed() -> None:
    population = population_of(12, chain=[*range(12)])
    found, again, other = (diversity(MODEL, population, INSIDE, members=5, seed=seed) for seed in (1, 1, 2))
    assert found.of == 12 and len(found.networks) == 5 and found.in_distribution.pairs.count == 10
    assert torch.equal(found.networks, again.networks) and torch.equal(found.matrix, again.matrix)
    assert not torch.equal(found.networks, other.networks)
    torch.testing.assert_close(
        found.matrix,
        diversity(MODEL, population, INSIDE).matrix[found.networks][:, found.networks],
        rtol=1e-4,
        atol=1e-8,
    )
    assert {pair.first for pair in found.closest} <= set(found.networks.tolist())
    assert "5 networks chosen from 12" in str(found)


def test_pieces_of_inputs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    population = population_of(4).to(dtype=torch.float64)
    whole = diversity(MODEL, population, INSIDE)
    monkeypatch.setattr(measure, "HELD", 4 * 7 * 3 * 8)  # seven examples
    monkeypatch.setattr(measure, "_CELLS", 4 * 3 * 2)
    pieces = diversity(MODEL, population, (INSIDE,))
    torch.testing.assert_close(pieces.matrix, whole.matrix, rtol=1e-5, atol=1e-9)
    assert pieces.in_distribution.population == pytest.approx(whole.in_distribution.population, rel=1e-9)
    named = diversity(nn.Linear(4, 3), Population.from_models([nn.Linear(4, 3) for _ in range(3)]), {"input": INSIDE})
    assert named.in_distribution.examples == 40


def test_places_of_a_segmentation_count_like_examples() -> None:
    model = nn.Conv1d(2, 3, 1)
    generator = torch.Generator().manual_seed(2)
    population = Population.from_stacked(
        {"weight": torch.randn(4, 3, 2, 1, generator=generator), "bias": torch.zeros(4, 3)}
    )
    inputs = torch.randn(5, 2, 7, generator=generator)
    rows = inputs.movedim(1, 2).flatten(0, 1)[:, :, None]
    expected = diversity(model, population, rows)
    torch.testing.assert_close(diversity(model, population, inputs).matrix, expected.matrix, rtol=1e-4, atol=1e-8)


def test_the_record_is_plain_and_the_text_readable() -> None:
    found = diversity(MODEL, population_of(5, chain=[0, 0, 1, 1, 1]), INSIDE, ood=OUTSIDE, closest=2)
    record = json.loads(found.to_json())
    assert record == json.loads(json.dumps(found.to_dict()))
    assert record["inside"]["pairs"]["quantiles"]["0.5"] == found.in_distribution.pairs.quantiles[0.5]
    assert sum(record["outside"]["pairs"]["counts"]) == 10
    assert record["closest"][0]["first"] == found.closest[0].first
    text = str(found)
    for word in ("5 networks, 10 pairs", "in distribution", "ood", "within a chain", "between chains", "correlation"):
        assert word in text


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=60), seed=st.integers(0, 9))
def test_distribution_and_correlations_are_those_of_others(values: list[float], seed: int) -> None:
    numbers = torch.tensor(values, dtype=torch.float64)
    found = PairStatistics.of(numbers)
    assert found is not None and sum(found.counts) == len(values) == found.count
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    for level in LEVELS:
        assert found.quantiles[level] == pytest.approx(np.quantile(values, level), abs=1e-9)
    if len(set(values)) > 1:
        counts, edges = np.histogram(values, bins=len(found.counts))
        np.testing.assert_allclose(found.edges, edges, atol=1e-12)
        assert abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= (np.isin(values, edges)).sum() + 2
    other = torch.randn(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).round()
    if len(values) > 2 and numbers.std() > 1e-3 and other.std() > 0:
        assert pearson(numbers, other) == pytest.approx(pearsonr(values, other).statistic, abs=1e-9)
        assert spearman(numbers, other) == pytest.approx(spearmanr(values, other).statistic, abs=1e-9)
    assert pearson(torch.ones(4) / 3, torch.arange(4.0)) is None and PairStatistics.of(numbers[:0]) is None


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2 networks to compare, found 1"):
        diversity(MODEL, population_of(1), INSIDE)
    with pytest.raises(InputError, match="members >= 2, threshold >= 0"):
        diversity(MODEL, population_of(3), INSIDE, members=1)
    with pytest.raises(InputError, match='quantity="values"'):
        diversity(nn.Linear(4, 1), Population.from_models([nn.Linear(4, 1), nn.Linear(4, 1)]), INSIDE)
    with pytest.raises(InputError, match="a Population or a Posterior"):
        diversity(MODEL, MODEL.state_dict(), INSIDE)  # type: ignore[arg-type]
    assert math.isfinite(diversity(MODEL, population_of(2), INSIDE, closest=0).in_distribution.population)
    assert "closest" not in str(diversity(MODEL, population_of(2), INSIDE, closest=0))


def test_half_precision_of_many_classes() -> None:
    """Probabilities in bfloat16 do not sum to 1; those of the networks do."""
    generator = torch.Generator().manual_seed(3)
    population = Population.from_stacked(
        {"weight": torch.randn(3, 60, 4, generator=generator), "bias": torch.zeros(3, 60)}
    )
    found, expected = (
        diversity(nn.Linear(4, 60), population.to(dtype=dtype), INSIDE) for dtype in (torch.bfloat16, None)
    )
    torch.testing.assert_close(found.matrix, expected.matrix, rtol=0.02, atol=0)
