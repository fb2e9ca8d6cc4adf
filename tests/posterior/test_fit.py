import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError
from onebasin.functional.call import global_seed
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import Diagonal, LowRank
from onebasin.posterior.layout import flat_layout
from onebasin.posterior.moments import moments
from onebasin.posterior.posterior import Posterior, load_posterior
from onebasin.state import State, state_of


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def networks(members: int, seed: int = 0, dtype: torch.dtype = torch.float64, shift: float = 0.0) -> Population:
    noise = torch.randn(members, 17, generator=seeded(seed), dtype=torch.float64)
    rows = (noise @ torch.randn(17, 17, generator=seeded(seed + 1), dtype=torch.float64) + shift).to(dtype)
    chain = torch.arange(members) % 3
    return Population.from_stacked({"a": rows[:, :12].reshape(-1, 3, 4), "b": rows[:, 12:]}, chain=chain)


def flat(population: Population) -> Tensor:
    return torch.cat([value.flatten(1).double() for value in population.stacked().values()], 1)


def vector(state: State) -> Tensor:
    return torch.cat([value.reshape(-1).double() for value in state.values()])


@settings(max_examples=25, deadline=None)
@given(members=st.integers(2, 40), block=st.integers(1, 45), seed=st.integers(0, 99), shift=st.sampled_from([0.0, 1e6]))
def test_moments_over_blocks_are_those_of_all_members_at_once(
    members: int, block: int, seed: int, shift: float
) -> None:
    population = networks(members, seed, shift=shift)
    groups = (torch.arange(members) * 7 + seed) % 2 if members > 3 else torch.zeros(members, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        whole = Population.blocks
        patch.setattr(Population, "blocks", lambda self, size=None: whole(self, min(size or block, block)))
        found = moments(population, population.names, groups)
    rows = flat(population)
    for group in range(int(groups.max()) + 1):
        own = rows[groups == group]
        assert int(found.counts[group]) == len(own)
        torch.testing.assert_close(found.mean[group], own.mean(0), rtol=1e-12, atol=1e-12)
        # Exactly centred sums: with a shift of 1e6, a difference of squares would keep 4 digits.
        exact = (own - own.mean(0)).square().sum(0)
        torch.testing.assert_close(found.squares[group], exact, rtol=1e-8 if shift else 1e-12, atol=1e-8)


def test_diagonal_has_mean_and_unbiased_deviation_of_the_population() -> None:
    population = networks(30)
    found = fit(population)
    rows = flat(population)
    torch.testing.assert_close(vector(found.mean), rows.mean(0))
    torch.testing.assert_close(vector(found.std), rows.std(0, correction=1))
    assert isinstance(found.components[0].covariance, Diagonal)
    assert found.storage == 2.0
    title, _, text = repr(found).splitlines()[:3]
    assert title == "Posterior" and text.startswith("One diagonal Gaussian over 17 weights, 2 networks of storage; ")


def test_draws_of_numpy_are_fitted_with_a_model_of_another_dtype() -> None:
    model = nn.Linear(3, 2)
    draws = torch.randn(5, 2, 3, generator=seeded(1), dtype=torch.float64)
    found = fit(Population.from_stacked({"weight": draws.numpy(), "bias": draws[:, :, 0].numpy()}), model=model)
    torch.testing.assert_close(found.mean["weight"], draws.mean(0))
    assert found.mean["weight"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_weights_are_summed_wide_and_drawn_narrow(dtype: torch.dtype) -> None:
    # In half precision, 3,000 members of size 30 would sum beyond 65,504, and squares of 3e-4 vanish.
    noise = torch.randn(3000, 5, generator=seeded(0))
    scale = torch.tensor([1.0, 30.0, 3e-4, 1e-2, 0.0])
    stacked = (scale * noise + torch.tensor([0.0, 30.0, 0.0, 0.0, 1.0])).to(dtype)
    found = fit(Population.from_stacked({"w": stacked}))
    centre, std = found.components[0].centre, found.components[0].covariance.std()
    assert centre.dtype == std.dtype == torch.float32
    torch.testing.assert_close(centre.double(), stacked.double().mean(0), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(std.double(), stacked.double().std(0), rtol=1e-6, atol=1e-9)
    assert found.draw(2, seeded(0)).spec["w"].dtype == dtype


def test_members_on_disk_give_the_same_posterior_bit_for_bit(tmp_path: Path) -> None:
    population = networks(25, dtype=torch.float32)
    population.save(tmp_path / "population")
    for options in ({}, {"family": "low-rank", "rank": 3}):
        here, there = fit(population, **options), fit(Population.open(tmp_path / "population"), **options)
        for left, right in zip(here.components, there.components, strict=True):
            assert torch.equal(left.centre, right.centre)
            for name, value in left.covariance.tensors().items():
                assert torch.equal(value, right.covariance.tensors()[name])
        assert there.provenance["fit"]["from"] == str(tmp_path / "population")


def test_draws_have_the_moments_of_the_population() -> None:
    population, count = networks(50, shift=3.0), 20_000
    for options in ({}, {"family": "low-rank", "rank": 4}):
        drawn = flat(fit(population, **options).draw(count, seeded(1)))
        rows = flat(population)
        spread = rows.std(0)
        # Of 17 + 17 numbers none should be 4.5 standard errors away (7e-6 each).
        assert bool(((drawn.mean(0) - rows.mean(0)).abs() < 4.5 * spread / math.sqrt(count)).all())
        assert bool(((drawn.std(0) / spread - 1).abs() < 4.5 / math.sqrt(2 * count)).all())


def test_running_statistics_are_averaged_and_counters_taken_from_the_first() -> None:
    with global_seed(0):
        models = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(4)]
        for index, model in enumerate(models):
            norm = model[1]
            assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
            norm.running_mean.fill_(float(index))
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.fill_(index + 5)
    population = Population.from_models(models, chain=[0, 0, 1, 1])
    for model in (None, models[0]):
        found = fit(population, model=model)
        constant = () if model is None else ("1.weight", "1.bias")  # the same in all members: without a model no weight
        assert found.layout.names == ("0.weight", "0.bias", *constant)
        assert torch.equal(found.buffers[0]["1.running_mean"], torch.full((3,), 1.5))
        assert int(found.buffers[0]["1.num_batches_tracked"]) == 5
        models[0].load_state_dict(found.draw(1, seeded(0), statistics=False).member(0))
    found = fit(population, "mixture", components="chains")
    assert [float(rest["1.running_mean"][0]) for rest in found.buffers] == [0.5, 2.5]
    assert [int(rest["1.num_batches_tracked"]) for rest in found.buffers] == [5, 7]


class Tied(nn.Module):
    """Two names for one weight, a third tensor that merely starts equal, and a constant table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        nn.init.zeros_(self.first.bias)
        nn.init.zeros_(self.second.bias)
        self.register_buffer("table", torch.arange(4.0))


def test_tied_tensors_are_one_with_and_without_a_model() -> None:
    with global_seed(0):
        models = [Tied() for _ in range(3)]
    population = Population.from_models(models)
    known, guessed = flat_layout(population, models[0]), flat_layout(population)
    assert known.names == ("first.weight", "first.bias", "second.bias")
    assert known.tied == guessed.tied == {"second.weight": "first.weight"}
    # Table and biases are the same in every member: without a model nothing says that they are weights.
    assert guessed.names == ("first.weight",)
    drawn = fit(population, model=models[0]).draw(3, seeded(0))
    assert torch.equal(drawn.tensor("first.weight"), drawn.tensor("second.weight"))
    assert torch.equal(drawn.tensor("table")[1], torch.arange(4.0))


def test_tensors_equal_in_some_members_only_are_not_tied() -> None:
    same = torch.randn(4, 3, generator=seeded(0))
    other = same.clone()
    other[3, 1] += 1e-3
    assert flat_layout(Population.from_stacked({"a": same, "b": other})).tied == {}
    assert flat_layout(Population.from_stacked({"a": same, "b": same.clone()})).tied == {"b": "a"}


def test_mixture_by_chains_is_one_fit_per_chain_weighted_by_share() -> None:
    population = networks(31)
    for options in ({}, {"covariance": "low-rank", "rank": 2, "oversample": 0}):
        found = fit(population, "mixture", components="chains", **options)
        assert population.chain is not None
        for chain in range(3):
            part = population[(population.chain == chain).nonzero().flatten()]
            family = options.get("covariance", "diagonal")
            alone = fit(part, family, **{key: value for key, value in options.items() if key != "covariance"})
            assert torch.equal(found.components[chain].centre, alone.components[0].centre)
            torch.testing.assert_close(found.components[chain].covariance.std(), alone.components[0].covariance.std())
            assert float(found.weights[chain]) == pytest.approx(len(part) / 31)
    # Between and within: the mixture has the biased variance of the whole population, up to n - 1 within each.
    found = fit(population, "mixture", components="chains")
    rows = flat(population)
    within = sum(
        float(weight) * component.covariance.std().square()
        for weight, component in zip(found.weights, found.components, strict=True)
    )
    between = sum(
        float(weight) * (component.centre - rows.mean(0)).square()
        for weight, component in zip(found.weights, found.components, strict=True)
    )
    torch.testing.assert_close(vector(found.std).square(), within + between)
    torch.testing.assert_close(vector(found.mean), rows.mean(0))


def test_pooled_spread_is_that_around_the_means_of_the_components(tmp_path: Path) -> None:
    population = networks(30)
    labels = torch.arange(30) % 4
    labels[0] = 9  # a component of one network
    rows = flat(population)
    with pytest.raises(InputError, match="pooled=True"):
        fit(population, "mixture", components=labels)
    found = fit(population, "mixture", components=labels, pooled=True)
    means = torch.stack([rows[labels == own].mean(0) for own in (0, 1, 2, 3, 9)])
    groups = labels.unique(return_inverse=True)[1]
    gaps = rows - means[groups]
    exact = (gaps.square().sum(0) / (30 - 5)).sqrt()
    for component in found.components:
        torch.testing.assert_close(component.covariance.std(), exact)
    assert found.storage == 6.0
    assert load_posterior(found.save(tmp_path / "pooled.safetensors")).storage == 6.0
    low = fit(population, "mixture", components=labels, pooled=True, covariance="low-rank", rank=40)
    shape = low.components[3].covariance
    assert isinstance(shape, LowRank)
    torch.testing.assert_close(shape.factor @ shape.factor.T, gaps.T @ gaps / 25)
    torch.testing.assert_close(shape.std(), exact)


def test_a_posterior_without_independent_part_has_draws_but_no_density() -> None:
    population = networks(10)
    found = fit(population, "low-rank", rank=3, diagonal=False)
    assert found.storage == 4.0  # a centre and three directions
    drawn = flat(found.draw(6, seeded(0)))
    assert torch.linalg.matrix_rank(drawn - vector(found.mean)) == 3
    with pytest.raises(InputError, match="density"):
        found.log_density(population.member(0))
    for dtype in (torch.float32, torch.float64):  # nine directions are all that ten networks have
        whole = fit(networks(10, dtype=dtype), "low-rank", rank=9)
        shape = whole.components[0].covariance
        assert isinstance(shape, LowRank) and float(shape.scale.max()) == 0.0
    with pytest.raises(InputError, match="density"):
        whole.log_density(population.member(0))


def test_provenance_says_what_was_fitted_to_what(tmp_path: Path) -> None:
    population = Population.from_stacked({"w": torch.randn(6, 4, generator=seeded(0))}, provenance={"made": "by hand"})
    found = fit(population, "low-rank", rank=2, passes=3)
    assert found.provenance == {
        "fit": {
            "family": "low-rank",
            "networks": 6,
            "from": "in memory",
            "rank": 2,
            "passes": 3,
            "oversample": 10,
            "diagonal": True,
            "seed": 0,
        },
        "population": {"made": "by hand"},
    }
    assert load_posterior(found.save(tmp_path / "q.safetensors")).provenance == found.provenance
    mixture = fit(population, "mixture", components=[0, 0, 0, 1, 1, 1])
    assert mixture.provenance["fit"]["components"] == "given"
    assert mixture.provenance["fit"]["members"] == [3, 3]
    assert "2 diagonal Gaussians over 4 weights, 4 networks" in repr(mixture)


REFUSED = [
    ({"family": "round"}, "family"),
    ({"family": "low-rank"}, "rank"),
    ({"family": "low-rank", "rank": 0}, "rank"),
    ({"rank": 3}, "leave it out"),
    ({"components": 3}, "mixture"),
    ({"family": "mixture"}, "components"),
    ({"family": "mixture", "components": 0}, "clusters"),
    ({"family": "mixture", "components": 11}, "clusters"),
    ({"family": "mixture", "components": "basins"}, "basins"),
    ({"family": "mixture", "components": [0, 1]}, "each of 10 members"),
    ({"family": "mixture", "components": [0.5] * 10}, "integers"),
    ({"family": "mixture", "components": 2, "covariance": "round"}, "covariance"),
    ({"family": "mixture", "components": 2, "passes": 3}, "does not read passes=3"),
    ({"family": "low-rank", "rank": 2, "passes": -1}, "passes"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        fit(networks(10), **options)  # type: ignore[arg-type]


def test_populations_that_have_no_spread_or_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="at least 2 networks"):
        fit(networks(1))
    with pytest.raises(InputError, match="without known chains"):
        fit(Population.from_stacked({"w": torch.randn(4, 2)}), "mixture", components="chains")
    broken = torch.randn(4, 3, generator=seeded(0))
    broken[2, 1] = torch.nan
    with pytest.raises(SpecError, match="finite"):
        fit(Population.from_stacked({"w": broken}))
    with pytest.raises(SpecError, match="found none"):
        fit(Population.from_stacked({"n": torch.arange(4)}))
    with pytest.raises(SpecError, match="complex64"):
        fit(Population.from_stacked({"w": torch.zeros(3, 2, dtype=torch.complex64)}))
    with pytest.raises(SpecError):
        fit(networks(4), model=nn.Linear(2, 2))


def test_the_model_is_only_read() -> None:
    model = nn.Linear(3, 2)
    before = {name: value.clone() for name, value in state_of(model).items()}
    population = Population.from_models([model, nn.Linear(3, 2)])
    stacked = {name: value.clone() for name, value in population.stacked().items()}
    found: Posterior = fit(population, "low-rank", rank=1, model=model)
    assert found.layout.size == 8
    assert all(torch.equal(value, state_of(model)[name]) for name, value in before.items())
    assert all(torch.equal(value, population.tensor(name)) for name, value in stacked.items())
