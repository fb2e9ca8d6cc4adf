"""What a population predicts: against the networks one by one, for populations and for draws of a posterior."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import population_pass as networks
from onebasin.functional.call import outputs
from onebasin.functional.population_pass import portion
from onebasin.population.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank, Partial
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predict import Drawn, predict
from onebasin.state import State, spec_of, state_of
from tests.models import BATTERY

CASES = {case.name: case for case in BATTERY}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, classes))


def population_of(model: nn.Module, members: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Population:
    """Networks around the weights of the module; tied tensors stay equal, variances positive."""
    generator = seeded(seed)
    kept = model.state_dict(keep_vars=True)
    noise: dict[int, Tensor] = {}
    for value in kept.values():
        if id(value) not in noise:
            noise[id(value)] = torch.rand((members, *value.shape), generator=generator)
    stacked = {
        name: value.detach().expand(members, *value.shape).clone()
        if not value.is_floating_point()
        else (value.detach() + noise[id(value)]).to(dtype)
        for name, value in kept.items()
    }
    return Population.from_stacked(stacked)


def posterior_of(
    model: nn.Module, width: float, components: int = 1, weights: list[float] | None = None, rank: int = 0
) -> Posterior:
    """A mixture around networks like the module's, with buffers in its rest and tied tensors once."""
    centres = population_of(model, components, seed=9)
    kept = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    own = {name: first.setdefault(id(value), name) for name, value in kept.items()}
    parameters = {name for name, _ in model.named_parameters()}
    names = tuple(name for name in kept if name in parameters)
    layout = FlatLayout(names, spec_of(state_of(model)), {name: to for name, to in own.items() if name != to})
    gaussians, rests = [], []
    for index in range(components):
        state = centres.member(index)
        centre = layout.flat(state).float()
        scale = torch.full_like(centre, width)
        factor = width * torch.randn(len(centre), rank, generator=seeded(index))
        gaussians.append(Gaussian(centre, LowRank(scale, factor) if rank else Diagonal(scale)))
        rests.append({name: state[name] for name in layout.buffer_names})
    share = torch.tensor(weights or [1 / components] * components, dtype=torch.float64)
    return Posterior(tuple(gaussians), share, layout, tuple(rests))


def one_by_one(model: nn.Module, networks: Population, inputs: Any) -> Tensor:
    return torch.stack([outputs(model, state, inputs) for state in networks])


INPUTS = torch.randn(11, 4, generator=seeded(1))


@settings(max_examples=25, deadline=None)
@given(members=st.integers(1, 7), chunk=st.integers(1, 9), batch=st.integers(1, 12))
def test_members_average_and_pieces(members: int, chunk: int, batch: int) -> None:
    model = mlp()
    networks = population_of(model, members, dtype=torch.float64)
    expected = one_by_one(model, networks, INPUTS)
    for output, exact in (("logits", expected), ("values", expected), ("probabilities", expected.softmax(2))):
        found = predict(model, networks, INPUTS, quantity=output, chunk=chunk, batch=batch)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
        mean = predict(model, networks, INPUTS, quantity=output, average=True, chunk=chunk, batch=batch)
        torch.testing.assert_close(mean, exact.mean(0), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
@pytest.mark.parametrize("name", ["tied_autoencoder_tanh", "resnet_bn", "encoder_tied", "lstm_bidirectional"])
def test_models_with_tied_weights_running_statistics_and_loops(name: str) -> None:
    case = CASES[name]
    model = case.build()
    networks, inputs = population_of(model, 5), case.inputs()
    expected = one_by_one(model, networks, inputs)
    torch.testing.assert_close(predict(model, networks, inputs, chunk=2), expected.softmax(2), rtol=1e-4, atol=1e-5)
    posterior = posterior_of(model, 0.0, components=2)
    found = predict(model, posterior, inputs, quantity="values", draws=4, chunk=3, statistics=False)
    centres = Population.from_states([population_of(model, 2, seed=9).member(index) for index in (0, 0, 1, 1)])
    torch.testing.assert_close(found, one_by_one(model, centres, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
def test_a_model_that_cannot_be_vectorised() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w if self.w[0].item() > 0 else -x  # vmap has no `item`

    networks = Population.from_stacked({"w": torch.tensor([[2.0, 1.0], [-1.0, 1.0], [3.0, 1.0]])})
    found = predict(Branch(), networks, torch.tensor([[1.0, 2.0]]), quantity="values", chunk=1)
    assert found.squeeze(1).tolist() == [[2.0, 2.0], [-1.0, -2.0], [3.0, 2.0]]


@pytest.mark.filterwarnings("ignore::onebasin.errors.SlowWarning")
def test_torch_is_asked_once_whether_it_can_vectorise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*given: Any) -> Any:
        asked.append(given)
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(networks._Together, "__call__", refuse)
    model = mlp()
    population = population_of(model, 4)
    found = predict(model, population, torch.zeros(3, 4), chunk=1, batch=1)
    assert len(asked) == 1 and len(found) == 4


def test_a_posterior_without_width_is_its_mean_network() -> None:
    model = mlp()
    posterior = posterior_of(model, 0.0)
    expected = outputs(model, posterior.mean, INPUTS).softmax(1)
    found = predict(model, posterior, INPUTS, draws=3)
    torch.testing.assert_close(found, expected.expand(3, -1, -1))
    torch.testing.assert_close(predict(model, posterior, INPUTS, draws=3, average=True), expected.double())


@settings(max_examples=25, deadline=None)
@given(
    draws=st.integers(1, 23), size=st.integers(1, 30), rank=st.sampled_from([0, 2]), seed=st.integers(0, 100),
    first=st.sampled_from([0.2, 0.5, 1.0]),
)  # fmt: skip
def test_draws_do_not_depend_on_the_size_of_blocks(draws: int, size: int, rank: int, seed: int, first: float) -> None:
    posterior = posterior_of(mlp(), 0.5, components=2, weights=[first, 1 - first], rank=rank)
    drawn = Drawn(posterior, draws, seed)
    (_, whole), *more = drawn.blocks(draws)
    assert not more and len(drawn) == draws
    blocks = [*drawn.blocks(size)]
    assert [start for start, _ in blocks] == [*range(0, draws, size)]
    for name, expected in whole.items():
        assert torch.equal(torch.cat([block[name] for _, block in blocks]), expected)
    assert torch.equal(drawn.chain, drawn.chain.sort().values)
    assert abs(int((drawn.chain == 0).sum()) - draws * first) < 1


def test_draws_have_the_moments_of_the_posterior() -> None:
    count, width = 4000, 0.5
    posterior = posterior_of(mlp(), width, components=2, weights=[0.75, 0.25])
    (_, drawn), *_ = Drawn(posterior, count, 3).blocks(count)
    mean, std = posterior.mean, posterior.std
    values = torch.cat([((drawn[name] - mean[name]) / std[name]).flatten(1) for name in drawn], 1).double()
    # Shares of the components are exact, so a mean has at most the variance of independent draws: |z| < 4.5.
    assert float((values.mean(0) * count**0.5).abs().max()) < 4.5
    within = torch.cat([((drawn[name][:3000] - drawn[name][:3000].mean(0)) / width).flatten(1) for name in drawn], 1)
    spread = (within.double().square().sum(0) - 2999) / (2 * 2999) ** 0.5
    assert float(spread.abs().max()) < 5


def test_the_seed_decides_the_draws_and_the_global_generator_is_left_alone() -> None:
    model, before = mlp(), torch.random.get_rng_state()
    posterior = posterior_of(model, 0.5)
    before = torch.random.get_rng_state()
    first, again, other = (predict(model, posterior, INPUTS, draws=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
    pieces = predict(model, posterior, INPUTS, draws=5, seed=1, chunk=2, batch=3)
    torch.testing.assert_close(first, pieces, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_and_out(dtype: torch.dtype) -> None:
    model = mlp()
    networks = population_of(model, 3, dtype=dtype)
    found = predict(model, networks, INPUTS)
    wide = predict(model, networks.to(dtype=torch.float64), INPUTS)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps  # logits of size < 16 err by 8 units, a probability by half of that and its own
    assert float((found.double() - wide).abs().max()) < 5 * unit
    assert predict(model, networks, INPUTS, average=True).dtype == torch.float64


def test_progress_is_told_and_ends_with_all() -> None:
    told: list[tuple[int, int, str]] = []
    predict(mlp(), population_of(mlp(), 40), INPUTS, progress=lambda *at: told.append(at))
    assert told == [(done, 40, "networks") for done in (16, 32, 40)]


def test_classes_on_axis_one_of_a_network_that_speaks_about_places() -> None:
    model = nn.Conv1d(2, 3, 1)
    networks, inputs = population_of(model, 4), torch.randn(5, 2, 7, generator=seeded(0))
    found = predict(model, networks, inputs)
    assert found.shape == (4, 5, 3, 7)
    torch.testing.assert_close(found.sum(2), torch.ones(4, 5, 7))


def test_what_is_refused() -> None:
    model = mlp()
    networks = population_of(model, 2)
    with pytest.raises(InputError, match='always 1, so ask for quantity="values"'):
        predict(mlp(1), population_of(mlp(1), 2), INPUTS)
    assert predict(mlp(1), population_of(mlp(1), 2), INPUTS, quantity="values").shape == (2, 11, 1)
    with pytest.raises(InputError, match="expected quantity to be one of probabilities, logits, values"):
        predict(model, networks, INPUTS, quantity="probs")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a chunk has at least 1 network, found 0"):
        predict(model, networks, INPUTS, chunk=0)
    with pytest.raises(InputError, match="a batch has at least 1 example, found 0"):
        predict(model, networks, INPUTS, batch=0)
    with pytest.raises(InputError, match="at least 1 network, found draws=0"):
        predict(model, posterior_of(model, 1.0), INPUTS, draws=0)
    with pytest.raises(InputError, match="empty population"):
        predict(model, networks[[]], INPUTS)
    with pytest.raises(InputError, match="a Population or a Posterior, found OrderedDict"):
        predict(model, model.state_dict(), INPUTS)  # type: ignore[arg-type]
    broken: State = {name: value.clone() for name, value in networks.stacked().items()}
    broken["2.bias"][1] = torch.nan
    with pytest.raises(InputError, match="found NaN from network 1"):
        predict(model, Population.from_stacked(broken), INPUTS, average=True)


def test_portions_shrink_with_the_width_of_activations() -> None:
    wide = nn.Sequential(nn.Conv2d(1, 512, 3, padding=1), nn.Flatten(), nn.Linear(512 * 256, 2))
    images = torch.zeros(3000, 1, 16, 16)
    chosen = portion(wide, state_of(wide), images)
    largest = 512 * 256 * 4  # bytes of the activations of one example
    assert chosen.chunk * chosen.batch * 3 * largest <= 256 << 20
    assert chosen.batch > 100
    slim = portion(mlp(), state_of(mlp()), torch.zeros(3000, 4))
    assert (slim.chunk, slim.batch) == (16, 1000)
    asked = portion(mlp(), state_of(mlp()), torch.zeros(3000, 4), chunk=5)
    assert (asked.chunk, asked.batch) == (5, 1000)


def test_a_model_for_one_number_of_examples_runs_if_it_is_told() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(11, 4))

    model = Fixed(4, 3)
    networks = population_of(model, 3)
    assert predict(model, networks, INPUTS, chunk=2, batch=11).shape == (3, 11, 3)
    with pytest.raises(InputError, match="could not be called"):
        predict(model, networks, INPUTS, chunk=2)


def test_members_on_disk_are_read_in_blocks(tmp_path: Path) -> None:
    model = mlp()
    networks = population_of(model, 7)
    opened = Population.open(networks.save(tmp_path / "population"))
    assert torch.equal(predict(model, opened, INPUTS, chunk=3), predict(model, networks, INPUTS, chunk=3))


@pytest.mark.parametrize("sizes", [{}, {"batch": 3}, {"chunk": 2, "batch": 3}, {"chunk": 2}])
def test_outputs_without_an_axis_of_examples(sizes: dict[str, int]) -> None:
    class Total(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    model = Total(4, 3)
    with pytest.raises(InputError, match="one row of outputs for each"):
        predict(model, population_of(model, 3), INPUTS, quantity="values", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [{"chunk": 2.0}, {"batch": 2.5}, {"chunk": -1}])
def test_sizes_that_are_no_counts(sizes: dict[str, int]) -> None:
    model = mlp()
    with pytest.raises(InputError, match="has at least 1"):
        predict(model, population_of(model, 3), INPUTS, **sizes)  # type: ignore[arg-type]


SEEN: list[bool] = []  # whether what reached the head of `Watched` had a member axis, call by call


class Watched(nn.Module):
    """A trunk and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        SEEN.append(torch._C._functorch.is_batchedtensor(hidden))
        return self.head(hidden)


def heads(model: nn.Module, members: int, *varying: str) -> Population:
    networks = population_of(model, members, dtype=torch.float64).stacked()
    return Population.from_stacked(
        {name: value if name in varying else value[:1].expand_as(value).clone() for name, value in networks.items()}
    )


def test_members_that_share_a_trunk_run_it_once() -> None:
    model, inputs = Watched(), torch.randn(9, 1, 4, 4, generator=seeded(2))
    networks = heads(model, 5, "head.weight", "head.bias")
    expected = one_by_one(model, networks, inputs)
    SEEN.clear()
    found = predict(model, networks, inputs, quantity="values", chunk=3, batch=9)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert SEEN[-2:] == [False, False], "blocks of three and of two members"
    apart = heads(model, 5, "trunk.0.weight", "head.weight")
    SEEN.clear()
    found = predict(model, apart, inputs, quantity="values", chunk=5, batch=9)
    assert SEEN[-1] is True
    torch.testing.assert_close(found, one_by_one(model, apart, inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("members", [1, 2, 4])
def test_equal_members_and_single_ones_run_as_before(members: int) -> None:
    model = mlp()
    networks = heads(model, members)
    found = predict(model, networks, INPUTS, quantity="values")
    torch.testing.assert_close(found, one_by_one(model, networks, INPUTS), rtol=1e-12, atol=1e-12)


def test_draws_of_a_last_layer_share_the_trunk() -> None:
    model, inputs = Watched(), torch.randn(9, 1, 4, 4, generator=seeded(2))
    posterior = posterior_of(model, 0.1)
    only = posterior.components[0]
    size, head = posterior.layout.size, 16 * 3 + 3
    last = Partial(Diagonal(torch.full((head,), 0.1)), torch.arange(size - head, size), size)
    posterior = replace(posterior, components=(Gaussian(only.centre, last),))
    networks = Population.from_stacked(next(Drawn(posterior, 6).blocks(6))[1])
    found = predict(model, posterior, inputs, draws=6, quantity="values", statistics=False)
    assert SEEN[-1] is False
    torch.testing.assert_close(found, one_by_one(model, networks, inputs), rtol=1e-4, atol=1e-5)


def test_a_shared_trunk_makes_room_for_more_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all members have in common is held once, so the memory of activations does not bound how many there are."""
    model, inputs = Watched(), torch.randn(400, 1, 4, 4, generator=seeded(2))
    monkeypatch.setattr(networks, "ROOM", 400 * 6000)
    together = heads(model, 8, "head.weight", "head.bias")
    apart = population_of(model, 8, dtype=torch.float64)
    sizes = []

    def noted(*given: Any, **options: Any) -> Any:
        sizes.append(portion(*given, **options))
        return sizes[-1]

    monkeypatch.setattr(sys.modules[Drawn.__module__], "portion", noted)
    for population in (together, apart):
        found = predict(model, population, inputs, quantity="values")
        torch.testing.assert_close(found, one_by_one(model, population, inputs), rtol=1e-12, atol=1e-12)
    assert sizes[0].chunk > sizes[1].chunk and sizes[0].batch == sizes[1].batch


class Counting(nn.Module):
    """Writes what depends on the members into a buffer that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.body(x))
        self.total += out.sum(0)
        return out


def test_a_model_that_writes_into_a_shared_buffer_runs_as_before() -> None:
    model = Counting()
    networks = heads(model, 4, "head.weight")
    found = predict(model, networks, INPUTS, quantity="values")
    torch.testing.assert_close(found, one_by_one(model, networks, INPUTS), rtol=1e-12, atol=1e-12)
