"""Conformal prediction: the exact law of what is covered, sets and intervals against loops, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, kstest
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.evaluation import Conformal
from onebasin.inference import LearnedNoise
from onebasin.metrics import class_scores, conformal_rank, conformal_threshold
from onebasin.state import state_of


def classifier(classes: int = 6) -> tuple[nn.Module, ob.Population]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, classes)
    return model, ob.Population.from_stacked({
        "weight": 2 * torch.randn(3, classes, 3, generator=generator),
        "bias": torch.randn(3, classes, generator=generator),
    })  # fmt: skip


MODEL, POPULATION = classifier()


def classes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Targets that the networks do not know well: half from their predictive, half uniform."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    p = 0.5 * ob.predict(MODEL, POPULATION, x, average=True) + 0.5 / 6
    return x, torch.multinomial(p, 1, generator=generator)[:, 0]


# ---------------------------------------------------------------------- the law


@pytest.mark.parametrize("method", ["thr", "aps", "raps"])
def test_the_number_covered_follows_its_exact_law(method: str) -> None:
    """Split conformal: given the scores' order, covered counts are beta-binomial, whatever the model.

    400 times 60 calibration and 100 new examples; the randomised probability integral transform of the counts is
    uniform. Scores are continuous, so the law is exact: the p-value of a wrong one would be tiny, that of a right one
    is uniform, and the seed is fixed.
    """
    generator = torch.Generator().manual_seed(5)
    n, m, repeats, coverage = 60, 100, 400, 0.85
    shape = repeats * (n + m)
    p = torch.randn(shape, 5, generator=generator, dtype=torch.float64).softmax(1)
    wrong = (0.3 * p.log()).softmax(1)  # targets come from another law than p
    targets = torch.multinomial(wrong, 1, generator=generator)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    scores = class_scores(p, method, rank=1, uniform=uniform).gather(1, targets).reshape(repeats, n + m)
    thresholds = torch.tensor([conformal_threshold(row, coverage) for row in scores[:, :n]])
    counts = (scores[:, n:] <= thresholds[:, None]).sum(1).numpy()
    place = conformal_rank(n, coverage)
    law = betabinom(m, place, n + 1 - place)
    assert abs(counts.mean() - law.mean()) < 4 * law.std() / math.sqrt(repeats)
    chance = torch.rand(repeats, generator=generator, dtype=torch.float64).numpy()
    transform = law.cdf(counts - 1) + chance * law.pmf(counts)
    assert kstest(transform, "uniform").pvalue > 0.01
    off = betabinom(m, place - 3, n + 4 - place)  # the test sees a threshold that is three places off
    assert kstest(off.cdf(counts - 1) + chance * off.pmf(counts), "uniform").pvalue < 1e-3


def test_the_rank_is_exact_in_floating_point() -> None:
    for n in range(1, 300):
        for percent in range(1, 100):
            assert conformal_rank(n, percent / 100) == -(-(n + 1) * percent // 100), (n, percent)
    assert conformal_threshold(torch.arange(8.0), 0.9) == math.inf
    assert conformal_threshold(torch.arange(9.0), 0.9) == 8.0


@pytest.mark.parametrize("method", ["thr", "aps", "raps"])
def test_promises_are_kept_on_new_examples(method: str) -> None:
    found = ob.conformal(MODEL, POPULATION, classes(400, 1), method=method, coverage=0.8)
    new = classes(3000, 2)
    measured = found.evaluate(new, n_resamples=20)
    place = conformal_rank(400, 0.8)
    low, high = betabinom(3000, place, 401 - place).ppf([1e-4, 1 - 1e-4]) / 3000
    assert low <= measured.numbers["coverage"].value <= high
    assert found.law[0] < 0.8 < found.law[1]
    sets = found.sets(new[0])
    assert measured.numbers["size"].value == pytest.approx(float(sets.sum(1).double().mean()))
    assert measured.numbers["single"].value == pytest.approx(float((sets.sum(1) == 1).double().mean()))
    assert sum(one.examples for one in measured.strata) == 3000
    whole = sum(one.examples * one.coverage for one in measured.strata if one.examples) / 3000
    assert whole == pytest.approx(measured.numbers["coverage"].value)
    assert measured.least == min(one.coverage for one in measured.strata[1:] if one.examples)
    assert measured.strata[0].coverage == 0 or not measured.strata[0].examples


# ---------------------------------------------------------------------- sets and intervals by hand


def in_words(p: np.ndarray, u: float, method: str, penalty: float, rank: int) -> list[float]:
    """Scores of the classes of one example, by their definitions."""
    order = sorted(range(len(p)), key=lambda label: -p[label])
    found = []
    for label in range(len(p)):
        place = order.index(label)
        if method == "thr":
            found.append(1 - p[label])
            continue
        score = sum(p[other] for other in order[:place]) + u * p[label]
        found.append(score + (penalty * max(0, place + 1 - rank) if method == "raps" else 0))
    return found


@pytest.mark.parametrize("method", ["thr", "aps", "raps"])
@pytest.mark.parametrize("randomised", [True, False])
def test_sets_are_those_of_the_definitions(method: str, randomised: bool) -> None:
    data, x = classes(40, 3), classes(30, 4)[0]
    options: dict[str, Any] = {"penalty": 0.2, "rank": 2, "randomised": randomised, "seed": 7}
    found = ob.conformal(MODEL, POPULATION, data, method=method, coverage=0.7, **options)

    def scores(inputs: Tensor, seed: int) -> np.ndarray:
        p = ob.predict(MODEL, POPULATION, inputs, quantity="logits").double().softmax(2).mean(0).numpy()
        u = torch.rand(len(p), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()
        u = u if randomised else np.ones(len(p))
        return np.array([in_words(row, share, method, 0.2, 2) for row, share in zip(p, u, strict=True)])

    own = sorted(scores(data[0], 7)[np.arange(40), data[1].numpy()])
    threshold = own[29 - 1]  # ceil(41 * 0.7) = 29
    assert float(found.thresholds) == pytest.approx(threshold, abs=1e-12)
    assert np.array_equal(found.sets(x).numpy(), scores(x, 8) <= threshold + 1e-12)
    assert torch.equal(found.sets(x), found.sets(x))


def regressor(members: int = 5) -> tuple[nn.Module, ob.Population, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = LearnedNoise(nn.Linear(2, 1))
    state = state_of(model)
    population = ob.Population.from_stacked({
        name: 0.5 * torch.randn(members, *value.shape, generator=generator) for name, value in state.items()
    })  # fmt: skip
    x = torch.randn(50, 2, generator=generator)
    return model, population, (x, x[:, :1] + torch.randn(50, 1, generator=generator))


@pytest.mark.parametrize("method", ["split", "normalised", "cqr"])
def test_intervals_are_those_of_the_definitions(method: str) -> None:
    model, population, (x, y) = regressor()
    found = ob.conformal(model, population, (x[:29], y[:29]), method=method, coverage=0.8, likelihood="gaussian")
    outputs = ob.predict(model, population, x, quantity="values").double()
    means, spread = outputs[..., :1], outputs[..., 1:].exp()
    centre = means.mean(0)
    unit = torch.ones_like(centre)
    low = high = centre
    if method == "normalised":
        unit = (spread.square().mean(0) + means.square().mean(0) - centre.square()).sqrt()
    if method == "cqr":
        low, high = ob.metrics.central_interval(means, spread, 0.8)
    scores = sorted(max(float(low[i] - y[i]), float(y[i] - high[i])) / float(unit[i]) for i in range(29))
    reach = scores[24 - 1] * unit[29:]  # ceil(30 * 0.8) = 24
    ends = found.intervals(x[29:])
    assert torch.allclose(ends[0], low[29:] - reach, atol=1e-9)
    assert torch.allclose(ends[1], high[29:] + reach, atol=1e-9)
    measured = found.evaluate((x[29:], y[29:]), n_resamples=20)
    inside = (y[29:] >= ends[0]) & (y[29:] <= ends[1])
    assert measured.numbers["coverage"].value == pytest.approx(float(inside.double().mean()))
    assert measured.numbers["width"].value == pytest.approx(float((ends[1] - ends[0]).mean()))
    wanted = ob.metrics.interval_score(*ends, y[29:], level=0.8)
    assert measured.numbers["interval_score"].value == pytest.approx(float(wanted))
    assert len(measured.strata) == (1 if method == "split" else 5)


def test_a_model_of_quantiles_is_conformalised_as_romano_did() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(1, 4)  # lower quantiles of two values, then upper ones
    weight, bias = torch.tensor([[1.0], [2.0], [1.0], [2.0]]), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    population = ob.Population.from_stacked({"weight": weight[None], "bias": bias[None]})
    x = torch.randn(19, 1, generator=generator)
    y = torch.cat([x, 2 * x], 1) + torch.randn(19, 2, generator=generator) * torch.tensor([2.0, 0.1])
    found = ob.conformal(model, population, (x, y), noise="quantiles", coverage=0.9)
    assert found.method == "cqr"
    for value in range(2):
        own = sorted(abs(float(y[i, value] - (value + 1) * x[i])) - 1 for i in range(19))
        assert float(found.thresholds[value]) == pytest.approx(own[18 - 1], abs=1e-6)  # ceil(20 * 0.9) = 18
    low, high = found.intervals(x)
    assert bool((low <= high).all())
    assert float((high - low)[:, 1].mean()) < 1  # an interval that was too wide is made narrower


def test_calls_of_one_input_with_seeds_of_their_own_draw_apart() -> None:
    """Class k is in the set of an input with the chance of a u with (sum above k) + u p_k <= threshold."""
    found = ob.conformal(MODEL, POPULATION, classes(300, 1), method="aps")
    x, calls = classes(1, 2)[0], 300
    assert torch.equal(found.sets(x), found.sets(x)) and torch.equal(found.sets(x), found.sets(x, seed=1))
    p = ob.predict(MODEL, POPULATION, x, average=True)[0]
    above = torch.stack([p[p > own].sum() for own in p])
    chance = ((found.thresholds - above) / p).clamp(0, 1)
    share = torch.stack([found.sets(x, seed=seed)[0] for seed in range(calls)]).double().mean(0)
    assert bool(((chance > 0.05) & (chance < 0.95)).any())
    assert bool(((share - chance).abs() <= 4 * (chance * (1 - chance) / calls).sqrt() + 1e-12).all())


def test_too_few_examples_cover_everything_and_say_so() -> None:
    found = ob.conformal(MODEL, POPULATION, classes(5, 1), coverage=0.9)
    assert bool(found.sets(classes(4, 2)[0]).all())
    assert "give at least 9" in str(found)
    assert found.law == (1.0, 1.0)
    model, population, (x, y) = regressor()
    intervals = ob.conformal(model, population, (x[:5], y[:5]), coverage=0.9, likelihood="gaussian")
    assert bool(intervals.intervals(x)[1].isinf().all())
    assert intervals.evaluate((x, y), n_resamples=5).numbers["coverage"].value == 1


def test_posteriors_and_single_logits() -> None:
    q = ob.fit(POPULATION)
    found = ob.conformal(MODEL, q, classes(60, 1), draws=10)
    assert torch.equal(found.sets(classes(10, 2)[0]), found.sets(classes(10, 2)[0]))
    model = nn.Linear(3, 1)
    one = ob.Population.from_states([{"weight": torch.ones(1, 3), "bias": torch.zeros(1)}])
    x, y = classes(60, 1)
    pair = ob.conformal(model, one, (x, (y > 2).float()), likelihood="bernoulli")
    assert pair.sets(x).shape == (60, 2)


def test_refusals_name_the_remedy() -> None:
    model, population, (x, y) = regressor()
    values: dict[str, Any] = {"likelihood": "gaussian"}
    with pytest.raises(InputError, match="give 'aps'"):
        ob.conformal(MODEL, POPULATION, classes(20, 1), method="cqr")
    with pytest.raises(InputError, match="give 'split'"):
        ob.conformal(model, population, (x, y), method="aps", **values)
    with pytest.raises(InputError, match=r"0\.9 is usual"):
        ob.conformal(MODEL, POPULATION, classes(20, 1), coverage=1.0)
    sets: Conformal = ob.conformal(MODEL, POPULATION, classes(20, 1))
    with pytest.raises(InputError, match=r"call .sets"):
        sets.intervals(x)
    with pytest.raises(InputError, match=r"call .intervals"):
        ob.conformal(model, population, (x, y), **values).sets(x)
    bare = nn.Linear(2, 1)
    single = ob.Population.from_models([bare])
    assert bool(torch.isfinite(ob.conformal(bare, single, (x, y), **values).thresholds).all())
    with pytest.raises(InputError, match='method="split"'):
        ob.conformal(bare, single, (x, y), method="normalised", **values)
    with pytest.raises(InputError, match="noise=standard deviation"):
        ob.conformal(bare, single, (x, y), noise="quantiles")
