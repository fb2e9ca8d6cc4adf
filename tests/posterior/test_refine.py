"""Refined and scaled posteriors: what they keep, and what they never touch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from onebasin import metrics
from onebasin.errors import InputError, SpecError
from onebasin.functional.population_pass import Differentiable, predictions
from onebasin.population.population import Population
from onebasin.posterior.fidelity import augment
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import Diagonal, Full, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior, load_posterior
from onebasin.posterior.predict import predict
from onebasin.posterior.refine import (
    DiagLowRank,
    FreeParameters,
    RefinedParameters,
    ScaleParameters,
    Teacher,
    fit_scales,
    refine,
)
from onebasin.state import spec_of


def classifier() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))


def around(model: nn.Module, count: int = 60, width: float = 0.4, seed: int = 1) -> Population:
    """Networks of one basin whose weights move together along a few directions: no diagonal Gaussian is right."""
    generator = torch.Generator().manual_seed(seed)
    stacked = {}
    sizes = {name: value.numel() for name, value in model.state_dict().items()}
    directions = torch.randn(3, sum(sizes.values()), generator=generator)
    flat = width * torch.randn(count, 3, generator=generator) @ directions
    for (name, value), piece in zip(model.state_dict().items(), flat.split(list(sizes.values()), 1), strict=True):
        stacked[name] = value + piece.reshape(count, *value.shape)
    return Population.from_stacked(stacked)


@pytest.fixture(scope="module")
def problem() -> tuple[nn.Module, Population, Tensor, Tensor]:
    model = classifier()
    inputs = torch.randn(300, 2, generator=torch.Generator().manual_seed(2))
    return model, around(model), inputs[:200], inputs[200:]


def far(model: nn.Module, posterior: Posterior, population: Population, inputs: Tensor) -> float:
    """Total variation between the average predictives."""
    goal = predict(model, population, inputs, average=True)
    return float(metrics.total_variation(predict(model, posterior, inputs, average=True, draws=400), goal))


def test_a_refined_posterior_predicts_what_the_population_predicts(
    problem: tuple[nn.Module, Population, Tensor, Tensor],
) -> None:
    model, population, train, test = problem
    fitted = fit(population)
    refined = refine(model, fitted, population, train, steps=300)
    thinned = predictions(model, population[:6], test).softmax(2).mean(0)
    goal = predict(model, population, test, average=True)
    assert far(model, refined, population, test) < 0.4 * far(model, fitted, population, test)
    assert far(model, refined, population, test) < float(metrics.total_variation(thinned.double(), goal))
    own, other = (metrics.mutual_information(predict(model, q, test, draws=400)).mean() for q in (population, refined))
    assert abs(float(own - other)) < 0.25 * float(own)


def test_it_says_what_it_is_and_survives_a_file(
    problem: tuple[nn.Module, Population, Tensor, Tensor], tmp_path: Path
) -> None:
    model, population, train, _ = problem
    refined = refine(model, fit(population), population, train, steps=5)
    told = refined.provenance["refined"]
    assert (
        told["networks"] == len(population)
        and told["steps"] == 5
        and told["distance"] > 0
        and 0 < told["narrowing"] < 1
    )
    again = load_posterior(refined.save(tmp_path / "q.safetensors"))
    assert again.provenance["refined"] == told
    assert all(torch.equal(again.mean[name], refined.mean[name]) for name in refined.mean)


def test_the_seed_decides(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    first, same, other = (
        refine(model, fit(population), population, train, steps=4, seed=seed).mean for seed in (3, 3, 4)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("form", [refine, fit_scales])
def test_nothing_that_was_given_changes(problem: tuple[nn.Module, Population, Tensor, Tensor], form: object) -> None:
    model, population, train, _ = problem
    fitted = fit(population)
    before = [
        {name: value.clone() for name, value in each.items()}
        for each in (model.state_dict(), fitted.mean, fitted.std, population.stacked())
    ]
    mode, state = model.training, torch.random.get_rng_state()
    assert callable(form)
    form(model, fitted, population, train, steps=3)
    after = [model.state_dict(), fitted.mean, fitted.std, population.stacked()]
    assert all(torch.equal(old[name], new[name]) for old, new in zip(before, after, strict=True) for name in old)
    assert model.training is mode and torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_calibration_keeps_ratios_within_a_tensor(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, test = problem
    fitted = fit(population)
    found = fit_scales(model, fitted, population, train)
    numbers = found.provenance["scaled"]["tensors"][0]
    for name, (width, gain) in numbers.items():
        torch.testing.assert_close(found.std[name], fitted.std[name] * width)
        torch.testing.assert_close(found.mean[name], fitted.mean[name] * gain)
    assert far(model, found, population, test) < far(model, fitted, population, test)


def test_a_short_leash_holds(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    fitted = fit(population)
    loose, held = (
        refine(model, fitted, population, train, steps=60, start=1.0, kl_weight=leash).provenance["refined"][
            "narrowing"
        ]
        for leash in (0.0, 1e4)
    )
    assert abs(held - 1) < 0.05 < abs(loose - 1)


def test_the_leash_is_the_divergence_of_the_marginals() -> None:
    generator = torch.Generator().manual_seed(0)
    coordinates = FlatLayout(("w",), spec_of({"w": torch.zeros(7)}), {})
    scale = torch.rand(7, generator=generator) + 0.1
    moving = RefinedParameters(
        Posterior.equal([Gaussian(torch.zeros(7), Diagonal(scale))], coordinates, [{}]), FreeParameters, 0.3
    )
    with torch.no_grad():
        moving.parameters[0].copy_(torch.randn(7, generator=generator))
    bell = moving.parts[0].gaussian()
    expected = kl_divergence(Normal(bell.centre, bell.scale), Normal(torch.zeros(7), scale)).mean()
    torch.testing.assert_close(moving.kl(), expected)


def test_draws_have_the_stated_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    bell = DiagLowRank(
        torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0.5, 0.0, 2.0]), torch.tensor([[1.0], [2.0], [0.0]])
    )
    draws = bell.draws(200_000, generator).double()
    torch.testing.assert_close(draws.mean(0), bell.centre.double(), atol=1e-5, rtol=0)  # mirrored: exact but rounding
    expected = bell.scale.diag().square() + bell.factor @ bell.factor.T
    # The variance of a product of two Gaussians with variances a, b and covariance c is ab + c^2, over 100,000 pairs.
    error = ((expected.diag()[:, None] * expected.diag() + expected.square()) / 100_000).sqrt().double()
    assert bool(((torch.cov(draws.T) - expected).abs() <= 4.5 * error + 1e-6).all())


def test_the_population_itself_is_at_distance_zero(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    weights, rows = torch.full((len(population),), 1 / len(population), dtype=torch.float64), torch.arange(50)
    for classes in (True, False):
        teacher = Teacher.ask(model, population, train, classes=classes)
        outputs = predictions(model, population, train[:50]).double()
        assert abs(float(teacher.distance(outputs, weights, rows, 1.0))) < 1e-6
        assert float(teacher.distance(outputs[:5], weights[:5] * len(population) / 5, rows, 1.0)) > 1e-3


def test_the_distance_is_the_stated_formula(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    teacher = Teacher.ask(model, population, train, classes=True)
    few = predictions(model, population[:4], train).double()
    p, q = predictions(model, population, train).double().softmax(2), few.softmax(2)
    gap = (p.mean(0) * (p.mean(0) / q.mean(0)).log()).sum(1).mean()
    h_p, h_q = (-(x * x.log()).sum(2).mean(0) for x in (p, q))
    found = teacher.distance(few, torch.full((4,), 0.25, dtype=torch.float64), torch.arange(len(train)), 0.7)
    torch.testing.assert_close(found, gap + 0.7 * (h_p - h_q).abs().mean(), atol=1e-6, rtol=1e-5)


def test_few_draws_are_not_punished_for_disagreeing(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    moving, rows = RefinedParameters(fit(population), FreeParameters, 0.6), torch.arange(40)
    function = Differentiable(model, *moving.place)
    teacher = Teacher.ask(model, population, train[:40], classes=True)

    def distances(draws: int, repeats: int, mirrored: bool) -> Tensor:
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(repeats):
            networks, weights = moving.draw(draws, generator)
            outputs = function(networks, ((train[:40],), {}))
            found.append(teacher.distance(outputs, weights, rows, 0.0, mirrored=mirrored).detach())
        return torch.stack(found).double()

    many, few, corrected = distances(4000, 4, False).mean(), distances(16, 1500, False), distances(16, 1500, True)
    error = float(few.std() + corrected.std()) / 1500**0.5
    assert float(few.mean() - many) > 5 * error
    assert abs(float(corrected.mean() - many)) < 0.35 * float(few.mean() - many) + 3 * error


def test_values_match_mean_and_spread() -> None:
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    population = around(model, seed=5, width=0.15)
    inputs = torch.linspace(-2, 2, 120)[:, None]
    fitted = fit(population)
    refined = refine(model, fitted, population, inputs[::2], quantity="values", steps=300, noise=0)
    goal, before, after = (
        predict(model, q, inputs[1::2], quantity="values", draws=500) for q in (population, fitted, refined)
    )
    for statistic in (Tensor.mean, Tensor.std):
        error = [(statistic(each, 0) - statistic(goal, 0)).square().mean() for each in (before, after)]
        assert error[1] < 0.5 * error[0]


def test_low_rank_and_mixtures_move_too(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, test = problem
    for fitted in (fit(population, "low-rank", rank=2), fit(population, "mixture", components=2)):
        refined = refine(model, fitted, population, train, steps=150)
        assert [type(part.covariance) for part in refined.components] == [
            type(part.covariance) for part in fitted.components
        ]
        assert far(model, refined, population, test) < far(model, fitted, population, test)


@pytest.mark.parametrize("form", [refine, fit_scales])
def test_a_pooled_spread_stays_one(problem: tuple[nn.Module, Population, Tensor, Tensor], form: object) -> None:
    model, population, train, _ = problem
    fitted = fit(population, "mixture", components=3, pooled=True)
    assert callable(form)
    found = form(model, fitted, population, train, steps=3)
    assert found.storage == fitted.storage == 4
    assert not torch.equal(found.components[0].centre, fitted.components[0].centre)


def test_weights_without_spread_keep_none() -> None:
    model = classifier()
    stacked = around(model).stacked()
    stacked["2.bias"] = stacked["2.bias"][:1].expand(60, 3).clone()
    population = Population.from_stacked(stacked)
    refined = refine(
        model, fit(population), population, torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), steps=5
    )
    assert not refined.std["2.bias"].any() and refined.std["0.bias"].all()


class Tied(nn.Module):
    """Batch norm, tied weights and tokens in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.embedding(tokens)))
        return result


def test_buffers_ties_and_tokens() -> None:
    model = Tied()
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(8):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["embedding.weight"] += 0.3 * torch.randn(5, 4, generator=generator)
        state["head.weight"] = state["embedding.weight"]
        state["norm.running_var"] *= 1 + torch.rand((), generator=generator)
        states.append(state)
    population = Population.from_states(states)
    tokens = torch.randint(5, (40,), generator=generator)
    refined = refine(model, fit(population, model=model), population, tokens, steps=5)
    drawn = refined.draw(3, generator, statistics=False)
    assert torch.equal(drawn.tensor("embedding.weight"), drawn.tensor("head.weight"))
    assert bool((drawn.tensor("norm.running_var") > 0).all())
    assert augment(tokens, noise=2.0, mixed=2, generator=generator) is tokens


def test_surroundings_of_several_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 3, generator=generator), torch.randn(400, 2, 2, generator=generator)
    given = {"x": x, "y": y, "ids": torch.arange(400)}
    found = augment(given, noise=1.5, mixed=1, generator=generator)
    assert isinstance(found, dict) and {len(value) for value in found.values()} == {1200}
    assert torch.equal(found["x"][:400], x) and torch.equal(found["ids"][400:800], given["ids"])
    # noise: variance (1.5 s u)^2 over examples with u uniform, so 1.5^2 s^2 / 3
    change = (found["x"][400:800] - x).double()
    assert float(change.square().mean()) == pytest.approx(0.75 * float(x.var()), rel=0.15)
    # mixtures lie on the line between two of the inputs, with one share for both tensors of an example
    for row in range(800, 810):
        places = torch.cat([found["x"][row], found["y"][row].flatten()])
        both = torch.cat([x, y.flatten(1)], 1)
        own, others = both[row - 800], both - both[row - 800]
        along = ((places - own) @ others.T) / others.square().sum(1).clamp(min=1e-9)
        misses = (own + along[:, None] * others - places).square().sum(1)
        assert float(misses.min()) < 1e-9 and 0 <= float(along[misses.argmin()]) <= 1


def test_half_precision_stays_half(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    half = population.to(dtype=torch.float16)
    refined = refine(model, fit(half), half, train, steps=3)
    assert {value.dtype for value in refined.mean.values()} == {torch.float16}
    assert {value.dtype for value in refined.draw(2, torch.Generator()).stacked().values()} == {torch.float16}


class Branching(nn.Module):
    """A forward pass that looks at a number: torch cannot vectorise it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if float(y.sum().detach()) > 0 else 2 * y


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
def test_models_that_cannot_be_vectorised_are_run_one_by_one() -> None:
    model = Branching()
    stacked = {name: torch.stack([value, -value]).requires_grad_() for name, value in model.state_dict().items()}
    inputs = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    found = Differentiable(model, torch.device("cpu"), torch.float32)(stacked, ((inputs,), {}))
    states = [{name: value[i].detach() for name, value in stacked.items()} for i in range(2)]
    torch.testing.assert_close(found.detach(), predictions(model, Population.from_states(states), inputs))
    found.sum().backward()
    assert stacked["layer.bias"].grad is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps to be a whole number >= 1"),
        ({"lr": 0.0}, "lr > 0"),
        ({"start": float("nan")}, "start > 0"),
        ({"quantity": "logits"}, '"values"'),
    ],
)
def test_bad_options_are_refused(
    problem: tuple[nn.Module, Population, Tensor, Tensor], options: dict[str, object], words: str
) -> None:
    model, population, train, _ = problem
    with pytest.raises(InputError, match=words):
        refine(model, fit(population), population, train, **options)  # type: ignore[arg-type]


def test_other_shapes_and_models_are_refused(problem: tuple[nn.Module, Population, Tensor, Tensor]) -> None:
    model, population, train, _ = problem
    fitted = fit(population)
    size = fitted.layout.size
    full = Posterior.equal([Gaussian(torch.zeros(size), Full(torch.eye(size)))], fitted.layout, [{}])
    with pytest.raises(InputError, match="diagonal or low-rank"):
        refine(model, full, population, train)
    with pytest.raises(SpecError):
        refine(nn.Linear(2, 3), fitted, population, train)


def test_one_width_per_tensor_only() -> None:
    bell = DiagLowRank(torch.ones(5), torch.ones(5), torch.ones(5, 1))
    coordinates = FlatLayout(("a", "b"), spec_of({"a": torch.zeros(2), "b": torch.zeros(3)}), {})
    shape = LowRank(bell.scale, bell.factor)
    moving = RefinedParameters(Posterior.equal([Gaussian(bell.centre, shape)], coordinates, [{}]), ScaleParameters, 0.5)
    assert [len(parameter) for parameter in moving.parameters] == [2, 2]


def test_layers_whose_fused_inference_has_no_gradient_are_refined() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 1, 4, 0.0, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).mean(1))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Encoder().eval()
    population = around(model, 6, 0.05)
    inputs = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    before = torch.backends.mha.get_fastpath_enabled()
    refined = refine(model, fit(population, model=model), population, inputs, steps=2, draws=2, batch=4)
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert not torch.equal(refined.mean["head.bias"], fit(population).mean["head.bias"])
