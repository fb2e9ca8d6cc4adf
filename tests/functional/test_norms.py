"""Running statistics of networks that nobody trained: measured exactly, for every draw, and missed aloud."""

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import onebasin as ob
from onebasin.alignment.align import align
from onebasin.alignment.merge import merge
from onebasin.data.dataset import split
from onebasin.data.load import digits
from onebasin.errors import InputError, SpecError, StatisticsWarning
from onebasin.evaluation.diversity import diversity
from onebasin.evaluation.evaluate import evaluate
from onebasin.functional.call import outputs
from onebasin.functional.losses import losses
from onebasin.functional.norms import frozen_norms, norms_used, refreshed, refreshed_one
from onebasin.population.population import Population
from onebasin.posterior.fidelity import fidelity
from onebasin.posterior.fit import fit
from onebasin.posterior.posterior import Posterior, load_posterior
from onebasin.posterior.predict import predict
from onebasin.posterior.pruning import pruning_curve
from onebasin.posterior.refine import refine
from onebasin.symmetry.discover import discover

Run = Callable[..., tuple[int, str, str]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


class Functional(nn.Module):
    """A norm that no module of torch makes, with statistics under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("width", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.layer(x), self.centre, self.width)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)), (5,)),
    "1d, places": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False), nn.Flatten()), (2, 6)),
    "2d, twice": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3, momentum=0.3),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 4, 2),
            nn.BatchNorm2d(4, eps=0.1),
            nn.Flatten(),
        ),
        (1, 5, 5),
    ),
    "3d, sync": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.Conv3d(2, 3, 1), nn.SyncBatchNorm(3), nn.Flatten()
        ),
        (1, 3, 3, 3),
    ),
    "instance": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 2),
            nn.InstanceNorm2d(3, track_running_stats=True, affine=True),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Conv2d(3, 2, 2),
            nn.BatchNorm2d(2),
            nn.Flatten(),
        ),
        (1, 5, 5),
    ),
}


def stacked(models: list[nn.Module]) -> dict[str, Tensor]:
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def built(build: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    made = []
    for seed in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made.append(build().double())
    return made


def by_torch(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One norm after the other, by torch's own module in training mode, with those before it in evaluation mode."""
    own = copy.deepcopy(model).eval()
    for norm in own.modules():
        if isinstance(norm, nn.modules.batchnorm._NormBase):
            norm.reset_running_stats()
            norm.momentum = 1.0 if isinstance(norm, nn.modules.instancenorm._InstanceNorm) else None
            norm.train()
            own(x)
            norm.eval()
    return own.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_that_torch_measures_norm_by_norm(name: str) -> None:
    build, shape = MODELS[name]
    models, x = built(build, 3), 2 + normal(30, *shape)
    before = stacked(models)
    kept = {key: value.clone() for key, value in before.items()}
    found, names = refreshed(models[0], before, x)
    assert names and all(key.endswith("running_mean") for key in names)
    for index, model in enumerate(models):
        expected = by_torch(model, x)
        for key, value in found.items():
            if not key.endswith("num_batches_tracked"):
                torch.testing.assert_close(value[index], expected[key], rtol=1e-9, atol=1e-11)
    assert all(torch.equal(before[key], kept[key]) for key in kept)  # nothing was changed in place
    assert all(torch.equal(models[0].state_dict()[key], kept[key][0]) for key in kept)


def test_before_any_norm_the_result_is_update_bn_and_behind_one_close_to_it() -> None:
    """Behind a norm torch shows a batch normalised by the biased variance: smaller by sqrt((n - 1) / n)."""
    model, x = built(MODELS["2d, twice"][0], 1)[0], normal(40, 1, 5, 5)
    found, _ = refreshed_one(model, model.state_dict(), x)
    theirs = copy.deepcopy(model)
    update_bn([x], theirs)
    expected, values = theirs.state_dict(), 40 * 9
    for key in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-11)
    for key in ("4.running_mean", "4.running_var"):
        assert not torch.equal(found[key], expected[key])
        torch.testing.assert_close(found[key], expected[key], rtol=2 / values, atol=2 / values)


def test_batches_count_by_their_examples() -> None:
    """update_bn gives a last batch of one example the weight of a whole one; 7 examples in batches of 3, 2 and 2."""
    model, x = built(MODELS["1d"][0], 1)[0], normal(7, 5)
    found, _ = refreshed_one(model, model.state_dict(), x, batch=3)
    hidden = model[0](x).detach()
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(found["1.running_var"], hidden.var(0))


class Slow(nn.Module):
    """Torch cannot vectorise it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x)) * (1 if self.layer.weight[0, 0].item() > -9 else 2)
        return out


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
@pytest.mark.parametrize("build", [Slow, MODELS["1d"][0], Functional])
def test_many_networks_are_measured_like_one(build: Callable[[], nn.Module]) -> None:
    models, x = built(build, 20), normal(60, 5)
    networks = stacked(models)
    found, names = refreshed(models[0], networks, x, batch=25)
    assert len(names) == 1
    for index, model in enumerate(models):
        own, _ = refreshed_one(models[0], model.state_dict(), x, batch=25)
        for key, value in found.items():
            torch.testing.assert_close(value[index], own[key], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(found[names[0]], networks[names[0]])


class Shared(nn.Module):
    """One norm under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.layer(self.norm(self.layer(x))))
        return out


def test_a_shared_norm_sees_all_that_enters_it_and_stays_one() -> None:
    models, x = built(Shared, 2), normal(50, 4)
    found, names = refreshed(models[0], stacked(models), x)
    assert names == ("norm.running_mean",)
    for index, model in enumerate(models):
        first = model.layer(x)
        second = model.layer((first - first.mean(0)) / (first.var(0) + model.norm.eps).sqrt())
        both = torch.cat([first, second]).detach()
        for key in ("norm", "again"):
            torch.testing.assert_close(found[f"{key}.running_mean"][index], both.mean(0))
            torch.testing.assert_close(found[f"{key}.running_var"][index], both.var(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    models, x = built(MODELS["1d"][0], 2), normal(50, 5).float()
    networks = {key: value.to(dtype) if value.is_floating_point() else value for key, value in stacked(models).items()}
    found, _ = refreshed(models[0].float(), networks, x)
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in networks.items()}
    hidden = x @ networks["0.weight"][1].float().T + networks["0.bias"][1].float()
    eps = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found["1.running_var"][1].float(), hidden.var(0), rtol=eps, atol=1e-6)


class Refuses(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise AssertionError("nobody should run this")


def test_a_model_without_norms_is_not_run() -> None:
    model = Refuses(2, 2)
    networks = stacked([model])
    found, names = refreshed(model, networks, torch.zeros(4, 2))
    assert names == () and all(found[key] is networks[key] for key in networks)


def test_frozen_norms_keep_their_statistics() -> None:
    build, shape = MODELS["2d, twice"]
    x = normal(20, *shape)
    by_gradient, by_mode, all_frozen = (built(build, 1)[0] for _ in range(3))
    by_gradient[1].requires_grad_(False)
    by_mode.train()[1].eval()
    all_frozen.requires_grad_(False).eval()  # a model that is only run says nothing about its norms
    for model, kept in ((by_gradient, ("1.running_mean",)), (by_mode, ("1.running_mean",)), (all_frozen, ())):
        assert frozen_norms(model) == set(kept)
        found, names = refreshed_one(model, model.state_dict(), x)
        assert set(names) == {"1.running_mean", "4.running_mean"} - set(kept)
        for key in ("1.running_mean", "1.running_var"):
            assert torch.equal(found[key], model.state_dict()[key]) == bool(kept)
    # What follows a frozen norm is measured as it arrives there.
    found, _ = refreshed_one(by_gradient, by_gradient.state_dict(), x)
    entering = by_gradient.eval()[:4](x).detach().movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(found["4.running_mean"], entering.mean(0))


def test_norms_that_compute_with_constants_themselves_are_left_alone() -> None:
    class Constant(nn.Module):
        """As torchvision's FrozenBatchNorm2d: buffers of these names, and no call of a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("running_mean", torch.ones(3))
            self.register_buffer("running_var", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) - self.running_mean) * self.running_var.rsqrt()

    model = Constant()
    assert refreshed(model, stacked([model]), torch.zeros(4, 3))[1] == ()
    assert norms_used(model, model.state_dict(), torch.zeros(4, 3)) == ()


def test_refusals() -> None:
    model = built(MODELS["1d"][0], 1)[0]
    with pytest.raises(InputError, match="give more examples"):
        refreshed(model, stacked([model]), normal(1, 5))
    with pytest.raises(InputError, match="expects 5 features and was given 4"):
        refreshed(model, stacked([model]), normal(8, 4))
    with pytest.raises(SpecError):
        refreshed(model, stacked([nn.Linear(2, 2)]), normal(8, 5))
    posterior = fit(Population.from_models(built(MODELS["1d"][0], 3)), model=model)
    with pytest.raises(InputError, match="give draw model= too"):
        posterior.draw(2, seeded(0), statistics=normal(8, 5))


# ------------------------------------------------------------------ draws


class Residual(nn.Module):
    """A small residual network with three batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.first = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem(x.unflatten(1, (1, 8, 8)))))
        h = torch.relu(h + self.second(self.two(torch.relu(self.first(self.one(h))))))
        out: Tensor = self.head(h.flatten(1))
        return out


class Problem(NamedTuple):
    model: nn.Module
    aligned: Population
    train: Tensor
    test: Tensor
    labels: Tensor


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Six networks on handwritten digits, in one basin."""
    (x, y), (test, labels) = split(*digits(), test=0.5, seed=0)
    models = []
    for seed in range(6):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Residual()
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        generator = seeded(seed)
        for _ in range(8):
            for rows in torch.randperm(len(x), generator=generator).split(128)[:-1]:
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
        models.append(model.eval())
    population = Population.from_models(models)
    symmetry = discover(models[0], x[:2])
    return Problem(models[0], align(population, symmetry).population, x, test, labels)


@pytest.fixture(scope="module")
def low_rank(problem: Problem) -> Posterior:
    return fit(problem.aligned, "low-rank", rank=5, model=problem.model)


def error(share: float, count: int) -> float:
    """The standard error of a share."""
    return math.sqrt(share * (1 - share) / count)


def test_draws_without_data_warn_and_with_data_predict(problem: Problem, low_rank: Posterior) -> None:
    """Measured: agreement 0.85 with averaged statistics, 0.98 with those of each draw, as of a single network."""
    with pytest.warns(StatisticsWarning, match="3 norms, such as first.running_mean"):
        stale = predict(problem.model, low_rank, problem.test, average=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = predict(problem.model, low_rank, problem.test, average=True, statistics=problem.train)
        same = predict(problem.model, low_rank, problem.test, average=True, statistics=False)
    assert torch.equal(stale, same)
    goal, count = predict(problem.model, problem.aligned, problem.test, average=True), len(problem.test)
    before, after = (float(ob.metrics.agreement(own, goal)) for own in (stale, fresh))
    assert after - before > 4 * (error(before, count) + error(after, count))
    assert after + 3 * error(after, count) > 0.975
    right = float((fresh.argmax(1) == problem.labels).double().mean())
    assert right + 3 * error(right, count) > 0.97


def test_drawn_networks_carry_statistics_of_their_own(problem: Problem, low_rank: Posterior) -> None:
    with pytest.warns(StatisticsWarning, match="statistics=False to say so"):
        plain = low_rank.draw(3, seeded(1))
    drawn = low_rank.draw(3, seeded(1), model=problem.model, statistics=problem.train)
    expected, _ = refreshed(problem.model, plain.stacked(), problem.train)
    for key, value in drawn.stacked().items():
        torch.testing.assert_close(value, expected[key])
    assert torch.equal(drawn.tensor("head.weight"), plain.tensor("head.weight"))
    # Drawn and then run, they predict what `predict` says of the same networks.
    one = Population.from_states([drawn.member(0)])
    torch.testing.assert_close(
        predict(problem.model, one, problem.test[:50], quantity="values")[0],
        outputs(problem.model, drawn.member(0), problem.test[:50]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_results_say_that_statistics_are_missing(problem: Problem, low_rank: Posterior) -> None:
    model, data = problem.model, (problem.test[:60], problem.labels[:60])
    quick = {"draws": 4, "n_resamples": 10}
    with pytest.warns(StatisticsWarning) as seen:
        found = evaluate(model, low_rank, data, ood=problem.train[:20], reference=problem.aligned, **quick)
    assert len(seen) == 1  # once, although there were three passes
    assert "averaged running statistics" in found.remarks[-1] and found.remarks[-1] in str(found)
    assert found.to_dict()["remarks"] == list(found.remarks)
    fresh = evaluate(model, low_rank, data, statistics=problem.train, **quick)
    assert not any("running" in text for text in fresh.remarks)
    assert fresh.in_distribution["accuracy"].value > found.in_distribution["accuracy"].value
    with pytest.warns(StatisticsWarning) as seen:
        spread = diversity(model, low_rank, data[0], ood=problem.train[:20], draws=4)
    assert len(seen) == 1 and "averaged running statistics" in str(spread) and spread.to_dict()["remarks"]
    assert diversity(model, low_rank, data[0], draws=4, statistics=problem.train[:100]).remarks == ()
    with pytest.raises(InputError, match="whose networks have their own"):
        evaluate(model, problem.aligned, data, statistics=problem.train)


def test_statistics_that_all_networks_share_are_constants(problem: Problem) -> None:
    """As after HMC, which samples in evaluation mode: they belong to the function, and are not measured anew."""
    networks = problem.aligned.stacked()
    same = {key: value[:1].expand_as(value) if "running" in key else value for key, value in networks.items()}
    population = Population.from_stacked(same)
    x = problem.test[:50]
    for posterior in (
        fit(population, model=problem.model),
        fit(population, "mixture", components=[0, 0, 0, 1, 1, 1], model=problem.model),
    ):
        assert posterior.constant_statistics == {"norm.running_mean", "first.running_mean", "second.running_mean"}
        assert posterior.own_statistics == ()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain = predict(problem.model, posterior, x, draws=3)
            given = predict(problem.model, posterior, x, draws=3, statistics=problem.train)
            drawn = posterior.draw(2, seeded(0))
        assert torch.equal(plain, given)
        torch.testing.assert_close(drawn.tensor("norm.running_var")[0], networks["norm.running_var"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = merge(None, population)
    again = merge(problem.model, population, data=problem.train)
    assert all(torch.equal(merged[key], again[key]) for key in merged)
    assert fit(problem.aligned, model=problem.model).constant_statistics == frozenset()
    # Components of one network show no spread within, which does not make their statistics constants.
    mixed = {
        key: torch.cat([value[:4], value[4:5], value[4:5]]) if "running" in key else value
        for key, value in networks.items()
    }
    pooled = fit(Population.from_stacked(mixed), "mixture", components=[0, 1, 2, 3, 4, 4], pooled=True)
    assert pooled.constant_statistics == frozenset()


def test_merged_networks_say_so(problem: Problem) -> None:
    with pytest.warns(StatisticsWarning, match="give merge a model and data="):
        plain = merge(None, problem.aligned)
    fresh = merge(problem.model, problem.aligned, data=(problem.train, problem.labels))
    expected, _ = refreshed_one(problem.model, plain, problem.train)
    assert all(torch.equal(fresh[key], expected[key]) for key in fresh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(merge(None, problem.aligned, variance=None)["head.bias"], plain["head.bias"])


def test_pruning_measures_the_statistics_of_what_is_left(problem: Problem) -> None:
    posterior, data = fit(problem.aligned, model=problem.model), (problem.test[:200], problem.labels[:200])
    given = {"by": ["magnitude"], "levels": [0.5]}
    with pytest.warns(StatisticsWarning, match="pruned means of this posterior"):
        plain = pruning_curve(problem.model, posterior, data, **given)
    assert plain.to_dict()["remarks"] and "averaged running statistics" in str(plain)
    found = pruning_curve(problem.model, posterior, data, statistics=problem.train, **given)
    left = ob.prune(posterior, keep=0.5, by="magnitude").apply(posterior.mean)
    own, _ = refreshed_one(problem.model, left, problem.train)
    expected = losses(problem.model, own, *data)
    assert found.remarks == () and found.loss("magnitude")[0] == pytest.approx(expected.loss)
    assert found.loss("magnitude") != plain.loss("magnitude")
    silent = pruning_curve(problem.model, posterior, data, state=problem.aligned.member(0), **given)  # has its own
    assert silent.remarks == ()


# ------------------------------------------------------------------ refined posteriors, and how good they are


def test_a_gradient_goes_through_measured_statistics() -> None:
    """The derivative of outputs by weights, with statistics of each draw, against differences of `refreshed`."""
    from onebasin.functional.population_pass import Differentiable

    build, shape = MODELS["instance"]
    model, x, seen = built(build, 1)[0], normal(4, *shape, seed=3), normal(30, *shape, seed=4)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    weight = state["0.weight"].clone().requires_grad_()
    function = Differentiable(model, torch.device("cpu"), torch.float64)
    for together in (True, False):
        function._several._refused = not together
        live = {key: (weight if key == "0.weight" else value)[None] for key, value in state.items()}
        result = function(live, ((x,), {}), ((seen,), {}))
        torch.testing.assert_close(result[0].detach(), outputs(model, refreshed_one(model, state, seen)[0], x))
        (slope,) = torch.autograd.grad(result.sum(), weight)
        direction = normal(*weight.shape, seed=5)

        def value(step: float, direction: Tensor = direction) -> float:
            moved = {**state, "0.weight": state["0.weight"] + step * direction}
            return float(outputs(model, refreshed_one(model, moved, seen)[0], x).sum())

        expected = (value(1e-5) - value(-1e-5)) / 2e-5
        assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-5)


def test_refinement_measures_the_statistics_of_each_draw(problem: Problem) -> None:
    fitted = fit(problem.aligned, model=problem.model)
    x = problem.train[:300]
    given = {"steps": 25, "draws": 8, "batch": 60, "mixed": 1, "lr": 0.05}
    fresh = refine(problem.model, fitted, problem.aligned, x, **given)
    told = fresh.provenance["refined"]
    assert told["statistics"] == "measured for each draw" and fresh.own_statistics == fitted.own_statistics
    assert "statistics" not in json.loads(json.dumps(told["fidelity"]))
    before, after = (
        fidelity(problem.model, q, problem.aligned, problem.test, statistics=x, augment=False)["inputs"]
        for q in (fitted, fresh)
    )
    assert before.low and after.agreement > before.agreement + 4 * error(0.5, before.examples)
    # Moved with the averages, they are constants of the result, and nobody is warned.
    constant = refine(problem.model, fitted, problem.aligned, x, **{**given, "steps": 3}, statistics=False)
    assert constant.provenance["refined"]["statistics"] == "averages of the networks"
    assert constant.own_statistics == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constant.draw(2, seeded(0))


def test_refinement_tells_how_it_does_around_the_inputs() -> None:
    """Ten inputs say little about the space around them: inside they agree, on noise they do not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    states = {
        key: value + 0.7 * torch.randn(20, *value.shape, generator=seeded(1))
        for key, value in model.state_dict().items()
    }
    population = Population.from_stacked(states)
    x = 0.1 * torch.randn(10, 6, generator=seeded(2)) + torch.eye(6)[torch.arange(10) % 2]
    refined = refine(model, fit(population), population, x, steps=150, draws=32, noise=0, mixed=0)
    told = refined.provenance["refined"]["fidelity"]
    assert list(told) == ["inputs", "noisy inputs", "mixed inputs", "uniform noise"]
    assert told["inputs"]["agreement"] == 1.0
    direct = fidelity(model, refined, population, x, seed=1)
    assert {name: own.to_dict() for name, own in direct.items()} == told  # the same numbers, whoever asks
    goal = predict(model, population, x, average=True)
    own = predict(model, refined, x, average=True, seed=1)
    assert told["inputs"]["total_variation"] == pytest.approx(float(ob.metrics.total_variation(own, goal)))
    tokens = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    words = torch.randint(5, (20, 2), generator=seeded(0))
    few = Population.from_models([copy.deepcopy(tokens) for _ in range(3)])
    assert list(fidelity(tokens, fit(few), few, words)) == ["inputs"]  # there is nothing around tokens


def test_low_means_worse_than_a_single_network() -> None:
    """Networks that are sure of class 0 for x > 0: a posterior of them agrees, one of the other class does not."""
    model = nn.Linear(1, 2, bias=False)
    population = Population.from_stacked({"weight": torch.tensor([[[9.0], [0.0]], [[8.0], [0.0]], [[7.0], [0.0]]])})
    x = torch.linspace(0.1, 1, 40)[:, None]
    good = fit(population)
    found = fidelity(model, good, population, x, augment=False)["inputs"]
    assert (found.agreement, found.single, found.low) == (1.0, 1.0, False) and found.warning("inputs") is None
    wrong = fit(Population.from_stacked({"weight": -population.tensor("weight")}))
    found = fidelity(model, wrong, population, x, augment=False)["inputs"]
    assert (found.agreement, found.low) == (0.0, True)
    assert "0.0 % of 40 inputs" in (found.warning("inputs") or "")
    values = fidelity(model, wrong, population, x, augment=False, quantity="values")["inputs"]
    assert values.low and values.agreement is None
    # Mean 8 x of the networks against about -8 x: rms 16 sqrt(mean x^2) in the first of two outputs.
    expected = 16 * float(x.double().square().mean().sqrt()) / math.sqrt(2)
    spread = 16 / 8 / math.sqrt(100)  # draws of the mean have a standard deviation of 1, 100 of them
    assert values.rms_difference == pytest.approx(expected, rel=4 * spread / 16 + 1e-6)


# ------------------------------------------------------------------ command line

FILE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

def example_input():
    return torch.zeros(2, 5)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight disguises of nearly one network with batch norm, with statistics of their own, and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(FILE)
    x = normal(80, 5, seed=7).float()
    model = built(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), 1)[0].float()
    with torch.no_grad():
        model[3].weight.mul_(5)  # or the biases decide
    symmetry, generator, states = discover(model, x[:2]), seeded(8), []
    for _ in range(8):
        noisy = {
            key: value + 0.1 * torch.randn(value.shape, generator=generator) if value.dtype.is_floating_point else value
            for key, value in model.state_dict().items()
        }
        state, _ = refreshed_one(model, noisy, x)
        states.append(symmetry.apply(symmetry.random(generator), state))
    Population.from_states(states).save(tmp_path / "networks")
    np.savez(tmp_path / "train.npz", x=x[:60].numpy())
    labels = outputs(model, states[0], x[60:]).argmax(1)
    np.savez(tmp_path / "test.npz", x=x[60:].numpy(), y=labels.numpy())
    return tmp_path


@pytest.mark.usefixtures("restored_imports")
def test_compact_and_evaluate_say_what_was_measured(run: Run, folder: Path) -> None:
    words = ("compact", "networks", "--model", "model.py:net", "--draws", 10)
    code, out, err = run(*words, "-o", "a.safetensors")
    assert code == 0 and "nothing was measured: give --data or --test" in out
    assert "the running statistics of 1 norms are averages" in out and err == ""
    told = json.loads((folder / "a.json").read_text())["record"]["values"]
    assert told["fidelity"] is None and len(told["notes"]) == 2

    code, out, err = run(*words, "-o", "b.safetensors", "--data", "train.npz", "--json")
    told = json.loads(out)
    assert code == 0 and told == json.loads((folder / "b.json").read_text())["record"]["values"]
    assert set(told["fidelity"]) == {"inputs", "noisy inputs", "mixed inputs", "uniform noise"}
    assert told["predictions"]["posterior"]["agreement"] == pytest.approx(told["fidelity"]["inputs"]["agreement"])
    assert "were measured for each draw here" in told["notes"][0]
    lows = [own["low"] for own in told["fidelity"].values()]
    assert err.count("warning: draws of this posterior") == sum(lows) == len(told["notes"]) - 1
    code, out, _ = run(*words, "-o", "c.safetensors", "--test", "test.npz", "--statistics", "train.npz")
    assert code == 0 and "uniform noise" in out and "total variation" in out

    posterior = load_posterior(folder / "b.safetensors")
    assert posterior.own_statistics == ("1.running_mean",)
    judged = ("evaluate", "model.py:net", "b.safetensors", "test.npz", "--draws", 5, "--n-resamples", 10)
    code, out, err = run(*judged)
    assert code == 0 and err.startswith("warning: draws of the posterior use the averaged running statistics")
    assert err.count("\n") == 1 and "averaged running statistics" in out
    code, out, err = run(*judged, "--statistics", "train.npz", "--json")
    assert (code, err) == (0, "") and json.loads(out)["given"]["statistics"] == "train.npz"


@pytest.mark.usefixtures("restored_imports")
def test_compact_warns_of_a_useless_posterior(run: Run, folder: Path) -> None:
    """Raw networks, each in its own basin: their mean is nobody."""
    code, _, err = run(
        "compact", "networks", "--raw", "--model", "model.py:net", "-o", "q.safetensors", "--data", "train.npz",
        "--statistics", "none", "--draws", 20,
    )  # fmt: skip
    told = json.loads((folder / "q.json").read_text())["record"]["values"]
    own = told["fidelity"]["inputs"]
    assert code == 0 and own["low"] and own["agreement"] < own["single"]
    assert f"agree with the networks on {100 * own['agreement']:.1f} % of 60 inputs" in err
    assert any("one stored network would predict better" in note for note in told["notes"])


@pytest.mark.usefixtures("restored_imports")
def test_merge_says_what_was_not_measured(run: Run, folder: Path) -> None:
    words = ("merge", "networks", "--reference", "none", "--model", "model.py:net", "-o")
    code, out, err = run(*words, "a.safetensors")
    assert code == 0 and err.startswith("warning: merged networks use the averaged running statistics")
    assert "running statistics are averages, and were not measured" in out
    for option in ("--statistics", "--recalibrate"):
        code, out, err = run(*words, "b.safetensors", option, "train.npz", "--force")
        assert (code, err) == (0, "") and "batch norms recalibrated" in out


@pytest.mark.usefixtures("restored_imports")
def test_prune_measures_what_it_writes(run: Run, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    posterior = fit(Population.open(folder / "networks"), model=model)
    posterior.save(folder / "q.safetensors")
    words = ("prune", "model.py:net", "q.safetensors", "--by", "magnitude", "-o")
    code, _, err = run(*words, "a.safetensors")
    assert code == 0 and err.startswith("warning: pruned means of this posterior use the averaged running statistics")
    code, _, err = run(*words, "b.safetensors", "--statistics", "train.npz")
    assert (code, err) == (0, "")
    plain, fresh = (Population.open(folder / name).member(0) for name in ("a.safetensors", "b.safetensors"))
    seen = torch.from_numpy(np.load(folder / "train.npz")["x"])
    expected, _ = refreshed_one(model, plain, seen)
    assert all(torch.allclose(fresh[key], expected[key]) for key in expected)
