"""`diagnose` and `approximate`: what is said about chains, and densities that agree with draws."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.metrics.chains import ess, rhat
from tests.judging import approximate, sample


def chains(shift: float, chains: int = 4, draws: int = 50) -> ob.Population:
    """Networks Linear(2, 1) whose weights are independent noise, the first chain shifted."""
    stream = torch.Generator().manual_seed(0)
    weight = torch.randn(chains, draws, 1, 2, generator=stream)
    weight[0] += shift
    bias = torch.zeros(chains, draws, 1)
    return ob.Population.from_stacked({"weight": weight, "bias": bias}, by_chain=True)


def test_good_and_bad_mixing_are_told_apart() -> None:
    model, inputs = nn.Linear(2, 1), torch.eye(2)
    good, bad = (ob.diagnose(model, chains(shift), inputs) for shift in (0.0, 5.0))
    assert good.mixed and not bad.mixed
    assert good.functions is not None and bad.functions is not None
    assert good.functions.worst_rhat < 1.05 < 1.5 < bad.functions.worst_rhat
    assert bad.functions.least_bulk < 20 < good.functions.least_bulk
    assert "4 chains of 50 draws" in str(good)
    assert set(good.weights) == {"weight"}, "a bias that never varies says nothing"


def test_it_says_what_was_compared_and_what_was_taken_for_a_chain() -> None:
    model = nn.Linear(2, 3)
    weight = torch.randn(12, 3, 2, generator=torch.Generator().manual_seed(4))
    stacked = {"weight": weight, "bias": torch.zeros(12, 3)}
    known, unknown = (ob.Population.from_stacked(stacked, chain=chain) for chain in ([0] * 6 + [1] * 6, None))
    elsewhere = ob.diagnose(model, known, torch.eye(2))
    assert elsewhere.quantity == "values" and len(elsewhere.reasons) == 1
    assert 'of a classifier quantity="probabilities"' in str(elsewhere)
    asked = ob.diagnose(model, known, torch.eye(2), quantity="probabilities")
    assert asked.quantity == "probabilities" and "compared as probabilities" in str(asked)
    assert "classifier" not in str(ob.diagnose(model, known, torch.eye(2), quantity="values"))
    assert "classifier" not in str(ob.diagnose(nn.Linear(2, 1), chains(0.0), torch.eye(2))), "one number is no class"
    single = ob.diagnose(model, unknown, torch.eye(2))
    assert "all 12 networks were taken for one chain" in str(single) and "1 chain of 12 draws" in str(single)
    assert "no chain numbers" in single.record().sections[0].text[2]
    assert ob.diagnose(None, unknown).quantity is None and len(ob.diagnose(None, unknown).reasons) == 1
    assert single.record().values["quantity"] == single.record().settings["quantity"] == "values"


def test_the_figures_are_those_of_metrics() -> None:
    population = chains(0.5)
    found = ob.diagnose(None, population).weights["weight"]
    values = population.tensor("weight").reshape(4, 50, 2)
    assert found.worst_rhat == float(rhat(values).max())
    assert found.least_bulk == float(ess(values, "bulk").min())
    assert found.least_tail == float(ess(values, "tail").min())
    assert found.quantities == 2


def test_order_of_members_does_not_matter_as_long_as_each_chain_is_in_order() -> None:
    population = chains(0.5)
    assert population.chain is not None
    draw_first = torch.arange(200).reshape(4, 50).T.flatten()
    assert str(ob.diagnose(None, population[draw_first])) == str(ob.diagnose(None, population))


def test_classification_is_judged_by_probabilities() -> None:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    options = {"draws": 40, "warmup": 30, "leapfrog": 5, "epochs": 5, "chains": 2}
    population = sample(nn.Linear(2, 3), (x, y), "hmc", **options)
    model = nn.Linear(2, 3)
    guessed, told = (
        ob.diagnose(model, population, x, quantity=kind, weights=False) for kind in (None, "probabilities")
    )
    assert guessed == told != ob.diagnose(model, population, x, quantity="values", weights=False)
    assert guessed.sampler["divergences"] == [0, 0]


def test_bad_questions_get_sentences() -> None:
    population = chains(0.0)
    with pytest.raises(InputError, match="a model and inputs"):
        ob.diagnose(nn.Linear(2, 1), population)
    with pytest.raises(InputError, match="at least 4 draws"):
        ob.diagnose(None, population[[0, 1, 50, 51]])
    with pytest.raises(InputError, match="probabilities"):
        ob.diagnose(None, population, quantity="logits")
    with pytest.raises(InputError, match="use sample"):
        approximate(nn.Linear(1, 1), None, "hmc")


@pytest.mark.parametrize("method", ["vi", "swag", "laplace"])
def test_approximate_and_sample_tell_the_same_story(method: str) -> None:
    x = torch.linspace(-1, 1, 20)[:, None]
    settings = {"noise": 0.5, "epochs": 5, "seed": 3, "chains": 3, "chunk": 2}
    posterior = approximate(nn.Linear(1, 1), (x, 2 * x), method, **settings)
    draws = sample(nn.Linear(1, 1), (x, 2 * x), method, draws=400, **settings)
    assert draws.chain is not None and len(posterior.components) == 3
    for chain, component in enumerate(posterior.components):
        own = draws[(draws.chain == chain).nonzero()[:, 0]]
        flat = torch.cat([own.tensor("weight").reshape(400, 1), own.tensor("bias").reshape(400, 1)], 1).double()
        spread = component.covariance.std().double()
        z = (flat.mean(0) - component.centre.double()) / (spread / 20)
        assert float(z.abs().max()) < 4
        ratio = flat.var(0) / spread.square()
        assert float((ratio - 1).abs().max()) < 4 * (2 / 399) ** 0.5
    again = approximate(nn.Linear(1, 1), (x, 2 * x), method, **{**settings, "chunk": None})
    assert torch.equal(again.mean["weight"], posterior.mean["weight"])


def test_weights_are_diagnosed_before_and_after_alignment() -> None:
    """Two chains that are one chain with its units in another order agree only once they are aligned."""
    model, noise = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.Generator().manual_seed(0)
    centres = {
        name: torch.arange(value.numel()).float().reshape(value.shape) for name, value in model.state_dict().items()
    }
    base = {name: value + 0.1 * torch.randn(60, *value.shape, generator=noise) for name, value in centres.items()}
    turned = {"0.weight": 1, "0.bias": 1, "2.weight": 2}  # the axis of hidden units
    both = {
        name: torch.cat([value[:30], value[30:].flip(turned[name]) if name in turned else value[30:]])
        for name, value in base.items()
    }
    chains = ob.Population.from_stacked(both, chain=[0] * 30 + [1] * 30)
    straight = ob.Population.from_stacked(base, chain=[0] * 30 + [1] * 30)
    found = ob.diagnose(model, chains, torch.ones(4, 2), aligned=straight)
    assert found.weights["0.weight"].median_rhat > 1.5 > 1.1 > found.aligned["0.weight"].median_rhat
    assert sum(found.weights["0.weight"].rhats) == 8
    worst = found.traces[0]
    assert worst.rhat == pytest.approx(found.functions.worst_rhat)
    assert [sum(row) for row in worst.ranks] == [30, 30] and len(worst.values[0]) == 30
    with pytest.raises(InputError, match="same 60 networks"):
        ob.diagnose(None, chains, aligned=straight[:40])
