"""What networks predict does not depend on who runs them: this process or others, one after the other or at once."""

import json
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onebasin.cli.load import load
from onebasin.errors import InputError
from onebasin.evaluation.discrepancy import MMDTest, compare_functions
from onebasin.evaluation.diversity import diversity
from onebasin.evaluation.evaluate import evaluate
from onebasin.evaluation.runs import Runs
from onebasin.functional.call import global_seed
from onebasin.functional.population_pass import MEMBERS
from onebasin.parallel import Executor, SerialExecutor, open_executor
from onebasin.parallel import choose as opening
from onebasin.parallel.serialize import align_tensors, serialized_copy
from onebasin.population import population as populations
from onebasin.population.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predict import Drawn, DrawStream, Predictive, PredictOptions, forward_passes, predict
from onebasin.state import spec_of, state_of
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}
Run = Callable[..., tuple[int, str, str]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp() -> nn.Module:
    with global_seed(0):
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def convolutions() -> nn.Module:
    with global_seed(0):
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)
        )


def population_of(model: nn.Module, members: int, seed: int = 0) -> Population:
    generator = seeded(seed)
    stacked = {
        name: value + torch.rand((members, *value.shape), generator=generator)
        if value.is_floating_point()
        else value.expand(members, *value.shape).clone()
        for name, value in state_of(model).items()
    }
    return Population.from_stacked(stacked, chain=torch.arange(members) % 4)


def posterior_of(model: nn.Module, rank: int = 2) -> Posterior:
    """Two components of unequal weight."""
    state = state_of(model)
    layout = FlatLayout(tuple(name for name, _ in model.named_parameters()), spec_of(state), {})
    gaussians: list[Gaussian] = []
    for number in range(2):
        centre = layout.flat(state).float() + number
        scale, factor = torch.full_like(centre, 0.1), torch.randn(len(centre), rank, generator=seeded(number))
        gaussians.append(Gaussian(centre, LowRank(scale, factor) if rank else Diagonal(scale)))
    rest = {name: state[name] for name in layout.buffer_names}
    return Posterior(tuple(gaussians), torch.tensor([0.3, 0.7], dtype=torch.float64), layout, (rest, rest))


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    executor = open_executor(workers=2)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Population:
    """Seventy networks in nine shards on disk, read in an order that mixes them."""
    whole = population_of(mlp(), 70)
    folder = tmp_path_factory.mktemp("stored") / "population"
    for start in range(0, 70, 8):
        with Population.writer(folder, whole.spec) as writer:
            for state in whole[start : start + 8]:
                writer.append(state)
    opened = Population.open(folder)
    assert len(opened._sources) == 9
    return opened[torch.randperm(70, generator=seeded(3))]


INPUTS = torch.randn(37, 5, generator=seeded(1))
OUTSIDE = 4 * torch.randn(20, 5, generator=seeded(2))
IMAGES = torch.randn(9, 1, 8, 8, generator=seeded(1))


def everywhere(two: Executor) -> list[dict[str, Any]]:
    return [{}, {"executor": SerialExecutor()}, {"executor": two}]


def test_running_statistics_do_not_depend_on_who_measures_them(two: Executor) -> None:
    model = convolutions()
    posterior, more = posterior_of(model), torch.randn(50, 1, 8, 8, generator=seeded(4))
    found = [
        predict(model, posterior, IMAGES, draws=7, chunk=3, statistics=more, quantity="values", **where)
        for where in everywhere(two)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])
    other = predict(model, posterior, IMAGES, draws=7, chunk=7, statistics=more, quantity="values")
    torch.testing.assert_close(found[0], other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, predict(model, posterior, IMAGES, draws=7, statistics=False, quantity="values"))


@pytest.mark.parametrize("sizes", [{}, {"chunk": 3, "batch": 10}])
@pytest.mark.parametrize("place", ["memory", "backwards", "disk"])
def test_a_population(two: Executor, stored: Population, place: str, sizes: Any) -> None:
    whole = population_of(mlp(), 70)
    population = {"memory": whole, "backwards": whole[::-1], "disk": stored}[place]
    expected, *others = (
        predict(mlp(), population, INPUTS, quantity="logits", **where, **sizes) for where in everywhere(two)
    )
    assert all(torch.equal(expected, found) for found in others)
    expected, *others = (
        predict(mlp(), population, INPUTS, average=True, **where, **sizes) for where in everywhere(two)
    )
    assert all(torch.equal(expected, found) for found in others)


def test_progress_is_told_in_order(two: Executor, stored: Population) -> None:
    told: list[tuple[int, int, str]] = []
    predict(mlp(), stored, INPUTS, executor=two, progress=lambda *at: told.append(at))
    assert told == [(done, 70, "networks") for done in (16, 32, 48, 64, 70)]


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
@pytest.mark.parametrize("name", ["encoder_tied", "lstm_bidirectional", "resnet_bn"])
def test_models_of_all_kinds(two: Executor, name: str) -> None:
    model, inputs = CASES[name].build(), CASES[name].inputs()
    population = Population.from_states([state_of(CASES[name].build()) for _ in range(3)])
    expected, *others = (predict(model, population, inputs, chunk=1, batch=3, **where) for where in everywhere(two))
    assert all(torch.equal(expected, found) for found in others)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * self.w if self.w[0].item() > 0.5 else -x[:, :3]  # vmap has no `item`


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
def test_a_model_that_cannot_be_vectorised(two: Executor) -> None:
    population = Population.from_stacked({"w": torch.rand(9, 3, generator=seeded(0))})
    expected, *others = (predict(Branch(), population, INPUTS, chunk=2, batch=9, **where) for where in everywhere(two))
    assert all(torch.equal(expected, found) for found in others)


@pytest.mark.parametrize("rank", [0, 2])
def test_draws_of_a_posterior(two: Executor, rank: int) -> None:
    posterior = posterior_of(mlp(), rank)
    expected, *others = (predict(mlp(), posterior, INPUTS, draws=75, seed=4, **where) for where in everywhere(two))
    assert all(torch.equal(expected, found) for found in others)
    ((_, whole),) = Drawn(posterior, 75, 4).blocks(75)
    exact = predict(mlp(), Population.from_stacked(whole), INPUTS)
    torch.testing.assert_close(expected, exact, rtol=1e-5, atol=1e-6)


def test_tensors_that_lie_askew(two: Executor) -> None:
    """Products of matrices may round differently in other places of memory, so everybody has them in the same."""
    wide = torch.empty(38 * 5 + 1)[1:].view(38, 5)[1:]
    wide.copy_(INPUTS)
    across = INPUTS.T.contiguous().T
    images = IMAGES.expand(9, 3, 8, 8).contiguous(memory_format=torch.channels_last)[:, :1]
    model, conv = mlp(), convolutions()
    for net, inputs in ((model, wide), (model, across), (conv, images)):
        expected, *others = (predict(net, population_of(net, 5), inputs, **where) for where in everywhere(two))
        assert all(torch.equal(expected, found) for found in others)
    posterior = posterior_of(model, rank=7)
    (first, *_), size = posterior.components, posterior.layout.size
    assert isinstance(first.covariance, LowRank)
    factor = torch.empty(7 * size + 1)[1:].view(size, 7).copy_(first.covariance.factor)
    posterior = Posterior.equal(
        [Gaussian(first.centre, LowRank(first.covariance.scale, factor))], posterior.layout, [{}]
    )
    expected, *others = (predict(model, posterior, INPUTS, draws=5, **where) for where in everywhere(two))
    assert all(torch.equal(expected, found) for found in others)


def test_things_settle_where_workers_have_them() -> None:
    askew = torch.arange(9.0)[1:]
    things = (askew, {"x": askew.view(2, 4).T}, 3)
    for made in (align_tensors(things), serialized_copy(things)):
        first, named, number = made
        assert torch.equal(first, askew) and torch.equal(named["x"], askew.view(2, 4).T) and number == 3
        assert all(own.is_contiguous() and own.data_ptr() % 64 == 0 for own in (first, named["x"]))


@settings(max_examples=30, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20)), min_size=1, max_size=6), seed=st.integers(0, 9)
)
def test_any_draws_in_any_order(ranges: list[tuple[int, int]], seed: int) -> None:
    drawn = Drawn(posterior_of(mlp()), 20, seed)
    ((_, whole),) = drawn.blocks(20)
    stream = DrawStream(drawn)
    for start, count in ranges:
        found = stream.take(start, min(20, start + count))
        assert all(torch.equal(found[name], whole[name][start : start + count]) for name in whole)


def test_evaluations(two: Executor, stored: Population) -> None:
    targets = torch.randint(3, (37,), generator=seeded(5))
    extra: Any = {"ood": OUTSIDE, "reference": posterior_of(mlp()), "draws": 40, "n_resamples": 20}
    expected, *others = (
        evaluate(mlp(), stored, (INPUTS, targets), **extra, **where).to_dict() for where in everywhere(two)
    )
    assert all(found == expected for found in others)


def test_evaluations_of_values(two: Executor) -> None:
    line = nn.Linear(5, 1)
    population, data = population_of(line, 40), (INPUTS, INPUTS.sum(1, keepdim=True))
    expected, *others = (
        evaluate(line, population, data, noise=0.5, n_resamples=20, **own).to_dict() for own in everywhere(two)
    )
    assert all(found == expected for found in others)


def test_predictives(two: Executor, stored: Population) -> None:
    expected, *others = (Predictive.of(mlp(), stored, INPUTS, PredictOptions(**where)) for where in everywhere(two))
    for found in others:
        assert torch.equal(found.mean, expected.mean) and torch.equal(found.variance(), expected.variance())
        assert torch.equal(found.mutual_information, expected.mutual_information)


def test_diversities(two: Executor, stored: Population, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = diversity(mlp(), stored, INPUTS, ood=OUTSIDE)
    measure = import_module("onebasin.evaluation.diversity")
    monkeypatch.setattr(measure, "HELD", 4 * 70 * 3 * 20)  # twenty examples
    monkeypatch.setattr(measure, "SLICE", 70 * 3 * 7)  # seven
    expected, *others = (diversity(mlp(), stored, INPUTS, ood=OUTSIDE, **where) for where in everywhere(two))
    for found in others:
        assert found.matrix is not None and expected.matrix is not None and torch.equal(found.matrix, expected.matrix)
        assert found.ood_matrix is not None and torch.equal(found.ood_matrix, expected.ood_matrix)  # type: ignore[arg-type]
        assert found.in_distribution == expected.in_distribution
    torch.testing.assert_close(expected.matrix, whole.matrix, rtol=1e-3, atol=1e-6)
    assert expected.in_distribution.population == pytest.approx(whole.in_distribution.population, rel=1e-9)


def test_functions_of_two_populations(two: Executor, stored: Population) -> None:
    other = population_of(mlp(), 12, seed=8)
    test = MMDTest(Runs.of(stored, other), permutations=19, n_resamples=0)
    expected, found = (compare_functions(test, mlp(), stored, other, INPUTS, executor=own) for own in (None, two))
    assert found == expected


def test_no_more_than_a_chunk_is_read_and_handed_on(stored: Population, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = populations.gather

    def spy(sources: Any, rows: Tensor, spec: Any) -> Any:
        read.append(len(rows))
        return original(sources, rows, spec)

    monkeypatch.setattr(populations, "gather", spy)
    with forward_passes(mlp(), stored, INPUTS, PredictOptions()) as chunks:
        handed = [len(outputs) for _, outputs in chunks]
    assert max(read) == MEMBERS and sum(read) == 1 + 2 + 70  # a look at the first and at two, to choose sizes and a way
    assert handed == [16, 16, 16, 16, 6]


def test_draws_are_made_once_and_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    drawn: list[int] = []
    take, flat = DrawStream.take, Gaussian.draw_flat
    monkeypatch.setattr(DrawStream, "take", lambda self, *at: taken.append(at) or take(self, *at))
    monkeypatch.setattr(Gaussian, "draw_flat", lambda self, count, own: drawn.append(count) or flat(self, count, own))
    predict(mlp(), posterior_of(mlp()), INPUTS, draws=75)
    assert taken == [(0, 1), (0, 16), (16, 32), (32, 48), (48, 64), (64, 75)]
    assert sum(drawn) == 1 + 75


class Recorded(SerialExecutor):
    """Remembers what became of it."""

    def __init__(self) -> None:
        self.shards: list[Any] = []
        self.closed = False

    def map(self, function: Any, shards: Iterable[Any], **options: Any) -> Iterator[Any]:
        return super().map(function, (self.shards.append(own) or own for own in shards), **options)  # type: ignore[func-returns-value]

    def close(self) -> None:
        self.closed = True


def test_workers_go_home_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    population = population_of(mlp(), 9)
    broken = {name: value.clone() for name, value in population.stacked().items()}
    broken["0.bias"][4] = torch.nan
    recorded = Recorded()
    monkeypatch.setattr(opening, "open_executor", lambda *given: recorded)
    with pytest.raises(InputError, match="found NaN from network 4"):
        predict(mlp(), Population.from_stacked(broken), INPUTS, chunk=2, batch=37)
    assert recorded.closed and len(recorded.shards) == 3  # networks 0, 1; 2, 3; 4, 5


def test_shards_do_not_depend_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for workers in (1, 7):
        recorded = Recorded()
        monkeypatch.setattr(opening, "open_executor", lambda *given, own=recorded: own)
        predict(mlp(), population_of(mlp(), 70), INPUTS, workers=workers)
        predict(mlp(), posterior_of(mlp()), INPUTS, draws=70, workers=workers)
        found.append([len(shard) for shard in recorded.shards])
    assert found == [2 * [16, 16, 16, 16, 6]] * 2


class Total(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_errors_of_workers_arrive(two: Executor) -> None:
    model = Total(5, 3)
    with pytest.raises(InputError, match="one row of outputs for each"):
        predict(model, population_of(model, 3), INPUTS, executor=two, chunk=2, batch=7)


NETWORK = """
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, SIZE)

    def forward(self, x):
        return twice(self.linear(x))

def twice(x):
    return 2 * x

def net():
    return Scaled()

SIZE = 3
"""


def scaled_population() -> Population:
    with global_seed(0):
        layer = population_of(nn.Linear(5, 3), 40).stacked()
    return Population.from_stacked({f"linear.{name}": value for name, value in layer.items()})


@pytest.mark.usefixtures("restored_imports")
def test_a_model_in_a_file_that_workers_cannot_import(two: Executor, tmp_path: Path) -> None:
    (tmp_path / "scaled_net.py").write_text(NETWORK)
    model = load(f"{tmp_path / 'scaled_net.py'}:net").model
    (tmp_path / "scaled_net.py").unlink()
    expected, *others = (predict(model, scaled_population(), INPUTS, **where) for where in everywhere(two))
    assert all(torch.equal(expected, found) for found in others)


@pytest.mark.usefixtures("restored_imports")
def test_the_command_line_and_a_model_in_a_package(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "its_package"
    folder.mkdir()
    for name, text in (("__init__", ""), ("scaled", NETWORK), ("net", "from .scaled import Scaled as net\n")):
        (folder / f"{name}.py").write_text(text)
    scaled_population().save(tmp_path / "population")
    np.savez(tmp_path / "test.npz", x=INPUTS.numpy(), y=(np.arange(37) % 3).astype(np.uint8))
    records = []
    for workers in (1, 2):
        code, out, error = run(
            *("evaluate", f"{folder / 'net.py'}:net", tmp_path / "population", tmp_path / "test.npz", "--json"),
            *("--workers", workers, "--n-resamples", 20),
        )
        assert not code, error
        records.append(json.loads(out))
    assert records[0] == records[1]
