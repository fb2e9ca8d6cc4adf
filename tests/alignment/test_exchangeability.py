"""The exchangeability test: published counts, exact laws of tiny cases, and false alarms counted over many runs."""

import itertools
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.exchangeability import SHORTEST, adjust, exchangeability, inflation, uniformity
from onebasin.errors import InputError, SpecError
from onebasin.symmetry.apply import ExpandedElement
from tests.models import BATTERY

ENSEMBLE = [45, 49, 46, 43, 45, 54, 47, 56, 38, 47, 50, 44, 41, 44, 51, 53]
HMC = [33, 144, 0, 0, 64, 30, 6, 34, 8, 44, 213, 112, 40, 7, 0, 18]


@cache
def discovered(name: str) -> ob.Symmetry:
    case = next(case for case in BATTERY if case.name == name)
    return ob.discover(case.build().eval(), case.inputs())


@cache
def mlp() -> ob.Symmetry:
    return ob.discover(
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), torch.zeros(2, 3)
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def networks(symmetry: ob.Symmetry, members: int, seed: int) -> dict[str, Tensor]:
    generator = seeded(seed)
    return {name: torch.randn(members, *shape, generator=generator) for name, shape in symmetry.shapes.items()}


def sticky(members: int, keep: float, generator: torch.Generator) -> Tensor:
    """Which fresh draw each step of a chain shows: the last one again with probability `keep`."""
    stays = torch.rand(members, generator=generator) < keep
    return torch.where(stays, 0, torch.arange(members)).cummax(0).values


def near(rate: float, level: float, runs: int) -> bool:
    return abs(rate - level) < 3.5 * math.sqrt(level * (1 - level) / runs)


# ------------------------------------------------------------------------------------------------ counts


def test_the_two_rows_of_the_poster() -> None:
    """Laurent, Aldea & Franchi 2024: which of 16 filters holds the largest weight, over 753 samples."""
    ensemble, chains = uniformity(torch.tensor(ENSEMBLE)), uniformity(torch.tensor(HMC))
    assert sum(ENSEMBLE) == sum(HMC) == 753
    assert (round(ensemble.statistic, 1), ensemble.freedom, round(ensemble.p, 2)) == (7.5, 15, 0.94)
    assert round(chains.statistic) == 1157 and 1e-238 < chains.p < 1e-236
    assert ensemble.effective == 753
    # Were one draw in 100 independent, the chains would have shown nothing.
    assert uniformity(torch.tensor(HMC), inflation=100).p > 0.05


@pytest.mark.parametrize(("outcomes", "draws"), [(2, 10), (5, 40), (16, 753), (300, 5000)])
def test_tail_against_scipy(outcomes: int, draws: int) -> None:
    for seed in range(5):
        counts = torch.randint(outcomes, (draws,), generator=seeded(seed)).bincount(minlength=outcomes)
        found, expected = uniformity(counts), stats.chisquare(counts.numpy())
        assert found.statistic == pytest.approx(expected.statistic, rel=1e-9, abs=1e-9)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-6)


def test_copies_add_up() -> None:
    both = uniformity(torch.tensor([ENSEMBLE, HMC]))
    one, other = uniformity(torch.tensor(ENSEMBLE)), uniformity(torch.tensor(HMC))
    assert both.statistic == pytest.approx(one.statistic + other.statistic)
    assert both.freedom == 30


@pytest.mark.parametrize("counts", [[[4, 0, 0]], [[2, 1, 1]], [[3, 1, 0]], [[2, 0], [1, 1]], [[1, 0, 0, 0, 0]]])
def test_simulated_tail_against_all_outcomes(counts: list[list[int]]) -> None:
    """With few draws, p is the share of all equally likely sequences of draws that are at least as uneven."""
    copies, outcomes, draws = len(counts), len(counts[0]), sum(counts[0])
    observed = sum(count**2 for row in counts for count in row)
    sequences = list(itertools.product(range(outcomes), repeat=copies * draws))
    uneven = 0
    for sequence in sequences:
        rows = [sequence[copy * draws : (copy + 1) * draws] for copy in range(copies)]
        uneven += sum(row.count(unit) ** 2 for row in rows for unit in range(outcomes)) >= observed
    exact = uneven / len(sequences)
    found = uniformity(torch.tensor(counts), seed=1).p
    assert abs(found - exact) <= 4 * math.sqrt(exact * (1 - exact) / 9999) + 1e-4


def test_holm_by_closed_testing() -> None:
    """Holm rejects i if Bonferroni rejects every set of hypotheses that contains i."""
    for seed in range(20):
        p = (torch.rand(5, generator=seeded(seed), dtype=torch.float64) ** 3).tolist()
        for index, value in enumerate(adjust(p)):
            sets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size) if index in s]
            assert value == pytest.approx(max(min(1.0, len(s) * min(p[i] for i in s)) for s in sets))
        assert adjust(p, "bh") == pytest.approx(stats.false_discovery_control(p).tolist())
    assert adjust([0.4]) == [0.4]


# ------------------------------------------------------------------------------------------------ chains


@pytest.mark.parametrize(("keep", "chains"), [(0.0, 1), (0.5, 1), (0.8, 1), (0.8, 4)])
def test_autocorrelation_time_is_known(keep: float, chains: int) -> None:
    """A draw kept with probability r has autocorrelations r^l: the time is (1 + r) / (1 - r)."""
    length, found = 4000 // chains, []
    for seed in range(20):
        generator = seeded(seed)
        fresh = torch.randint(6, (chains, length), generator=generator)
        series = torch.cat([row[sticky(length, keep, generator)] for row in fresh])
        found.append(inflation(series[:, None], torch.arange(chains).repeat_interleave(length), 6))
    mean, spread = torch.tensor(found).mean(), torch.tensor(found).std()
    exact = (1 + keep) / (1 - keep)
    assert abs(mean - exact) < 4 * spread / math.sqrt(20) + 0.03 * exact  # the sum over lags is cut off


def test_the_order_of_interleaved_chains_does_not_matter() -> None:
    generator = seeded(0)
    series = torch.randint(6, (2, 300), generator=generator)[:, sticky(300, 0.7, generator)]
    laid_out = inflation(series.reshape(-1, 1), torch.tensor([3] * 300 + [8] * 300), 6)
    interleaved = inflation(series.T.reshape(-1, 1), torch.tensor([3, 8] * 300), 6)
    assert laid_out == pytest.approx(interleaved) and laid_out > 2


def test_short_chains_independent_members_and_constant_chains() -> None:
    winners = torch.randint(4, (60, 2), generator=seeded(0))
    assert inflation(winners, torch.full((60,), -1), 4) == 1
    assert inflation(winners, torch.arange(60), 4) == 1
    assert inflation(winners, torch.arange(60) // 5, 4) == 5  # twelve chains of five draws count as twelve draws
    assert inflation(torch.zeros(60, 1, dtype=torch.long), torch.zeros(60, dtype=torch.long), 4) == 1
    half = torch.where(torch.arange(60) < 30, -1, torch.arange(60) // 10)
    assert SHORTEST > 10 and inflation(winners, half, 4) == pytest.approx((30 * 1 + 30 * 10) / 60)


@pytest.mark.parametrize(("keep", "chains"), [(0.5, 1), (0.8, 4)])
def test_false_alarms_of_sticky_chains(keep: float, chains: int) -> None:
    """Populations whose chains forget slowly: corrected, alarms stay at their level; uncorrected they do not."""
    runs, length = 120, 800 // chains
    alarms, naive = 0, 0
    for seed in range(runs):
        generator = seeded(10_000 + seed)
        fresh = networks(mlp(), chains * length, seed)
        shown = torch.cat([sticky(length, keep, generator) + chain * length for chain in range(chains)])
        stacked = {name: value[shown] for name, value in fresh.items()}
        population = ob.Population.from_stacked(stacked, chain=torch.arange(chains).repeat_interleave(length))
        found = exchangeability(population, mlp(), seed=seed)
        alarms += sum(row.p < 0.05 for row in found.rows)
        independent = exchangeability(population, mlp(), chain=[-1] * len(population), seed=seed)
        naive += sum(row.p < 0.05 for row in independent.rows)
    assert near(alarms / (2 * runs), 0.05, 2 * runs)
    assert naive / (2 * runs) > 0.3


# ------------------------------------------------------------------------------------------------ populations


def test_p_values_of_independent_networks_are_uniform() -> None:
    values = []
    for seed in range(200):
        found = exchangeability(ob.Population.from_stacked(networks(mlp(), 150, seed)), mlp(), seed=seed)
        values += [row.p for row in found.rows]
        assert all(row.effective == row.members == 150 for row in found.rows)
    assert len(values) == 400
    assert stats.kstest(values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("statistic", ["max", "norm"])
def test_chains_around_one_network_each_are_rejected(statistic: str) -> None:
    """Autoregressive noise around a start; with many starts and one draw each, the same draws pass."""
    generator, length, keep = seeded(0), 200, 0.9
    states = []
    for start in range(60):
        centre = {name: value[0] for name, value in networks(mlp(), 1, start).items()}
        noise = {name: torch.zeros_like(value) for name, value in centre.items()}
        for _ in range(length if start < 3 else 1):
            fresh = {name: torch.randn(value.shape, generator=generator) for name, value in centre.items()}
            noise = {name: keep * noise[name] + math.sqrt(1 - keep**2) * 0.3 * fresh[name] for name in noise}
            states.append({name: centre[name] + noise[name] for name in centre})
    chain = [draw // length for draw in range(3 * length)] + list(range(3, 60))
    population = ob.Population.from_states(states, chain=chain)
    one = exchangeability(population[:length], mlp(), statistic=statistic)
    assert not one.passed and {row.verdict for row in one.rows} == {"rejected"}
    assert all(1 <= row.effective < 0.7 * length for row in one.rows)
    three = exchangeability(population[: 3 * length], mlp(), statistic=statistic)
    assert not three.passed and {row.verdict for row in three.rows} == {"rejected"}
    starts = population[[0, length, 2 * length, *range(3 * length, len(population))]]
    assert exchangeability(starts, mlp(), statistic=statistic, level=1e-3).passed


def test_a_frozen_chain_is_rejected() -> None:
    stacked = {name: value.expand(50, *value.shape[1:]) for name, value in networks(mlp(), 1, 0).items()}
    found = exchangeability(ob.Population.from_stacked(stacked, chain=[0] * 50), mlp())
    assert [row.verdict for row in found.rows] == ["rejected"] * 2
    assert all(row.statistic == pytest.approx(50 * (row.units - 1)) for row in found.rows)


def test_sorted_units_are_rejected() -> None:
    stacked = networks(mlp(), 100, 0)
    order = stacked["0.weight"].abs().amax(2).argsort(1)
    ordered = mlp().apply(ob.Element({"0": order}, {}, 100), ob.Population.from_stacked(stacked))
    found = exchangeability(ordered, mlp())
    assert [row.verdict for row in found.rows] == ["rejected", "consistent"]


@pytest.mark.parametrize("statistic", ["max", "norm"])
def test_winners_by_hand(statistic: str) -> None:
    stacked = networks(mlp(), 40, 3)
    scores = torch.zeros(40, 5)
    for name, rest in (("0.weight", (2,)), ("0.bias", ()), ("2.weight", (1,))):
        value = stacked[name].abs()
        value = value / value.flatten(1).mean(1).reshape(-1, *[1] * (value.dim() - 1))
        for axis in rest:
            value = value.amax(axis) if statistic == "max" else value.square().sum(axis)
        value = value if rest or statistic == "max" else value.square()
        scores = torch.maximum(scores, value) if statistic == "max" else scores + value
    found = exchangeability(ob.Population.from_stacked(stacked), mlp(), statistic=statistic)
    assert torch.equal(found.counts["0"], scores.argmax(1).bincount(minlength=5)[None])


@pytest.mark.parametrize("statistic", ["max", "norm"])
@pytest.mark.parametrize(
    "name",
    ["residual_mlp", "resnet_bn", "conv_flatten", "grouped", "lstm", "attention_fused", "decoder_gqa", "experts",
     "tied_autoencoder_tanh"],
)  # fmt: skip
def test_winners_move_with_their_units(name: str, statistic: str) -> None:
    """Permuting a network moves each winner to where the element puts its unit, in every copy of every space."""
    symmetry = discovered(name)
    stacked = {key: value.double().abs() for key, value in networks(symmetry, 1, 5).items()}

    def winners(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        twice = {key: torch.cat([value, value]) for key, value in tensors.items()}
        counts = exchangeability(ob.Population.from_stacked(twice), symmetry, statistic=statistic).counts
        assert all(bool((count.amax(1) == 2).all()) for count in counts.values())
        return {key: count.argmax(1) for key, count in counts.items()}

    element = symmetry.random(1, freedoms=["permutation"])
    wide = ExpandedElement(symmetry, element)
    before = winners(stacked)
    after = winners(
        {key: value[None] for key, value in symmetry.apply(element, {k: v[0] for k, v in stacked.items()}).items()}
    )
    assert set(before) == {space.name for space in symmetry.spaces if space.permutable and space.size > 1}
    for number, space in enumerate(symmetry.spaces):
        if space.name in before:
            came_from = wide.orders[number][0].gather(1, after[space.name][:, None])[:, 0]
            assert torch.equal(came_from, before[space.name][wide.origin(number)[0]])


def test_ties_are_broken_at_random() -> None:
    """Networks whose units are all equal, and half-precision networks in which ties are common."""
    equal = {name: torch.ones(400, *shape) for name, shape in mlp().shapes.items()}
    found = exchangeability(ob.Population.from_stacked(equal), mlp(), level=1e-3)
    assert found.passed and all(bool((count > 0).all()) for count in found.counts.values())
    zero = {name: torch.zeros(400, *shape) for name, shape in mlp().shapes.items()}
    assert exchangeability(ob.Population.from_stacked(zero), mlp(), level=1e-3).passed
    coarse = {name: (2 * value).round().to(torch.bfloat16) for name, value in networks(mlp(), 2000, 0).items()}
    assert exchangeability(ob.Population.from_stacked(coarse), mlp(), level=1e-3).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_and_nothing_is_changed(dtype: torch.dtype) -> None:
    stacked = {name: value.to(dtype) for name, value in networks(mlp(), 60, 0).items()}
    before = {name: value.clone() for name, value in stacked.items()}
    found = exchangeability(ob.Population.from_stacked(stacked), mlp())
    assert [int(count.sum()) for count in found.counts.values()] == [60, 60]
    assert all(torch.equal(stacked[name], before[name]) for name in stacked)


def test_reads_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    population = ob.Population.from_stacked(networks(mlp(), 50, 0))
    whole = exchangeability(population, mlp())
    population.save(tmp_path / "population")
    blocks = ob.Population.blocks
    monkeypatch.setattr(ob.Population, "blocks", lambda self: blocks(self, 7))
    monkeypatch.delattr(ob.Population, "stacked")
    streamed = exchangeability(ob.Population.open(tmp_path / "population"), mlp())
    assert streamed.rows == whole.rows
    assert all(torch.equal(streamed.counts[name], count) for name, count in whole.counts.items())


def test_heads_have_a_row_per_space() -> None:
    symmetry = discovered("attention_fused")
    found = exchangeability(ob.Population.from_stacked(networks(symmetry, 300, 0)), symmetry, correction="bh")
    row = next(row for row in found.rows if row.space == "qkv inside")
    assert (row.units, row.copies, row.freedom) == (3, 2, 4)
    each = stats.chisquare(found.counts["qkv inside"].numpy(), axis=1)
    assert row.statistic == pytest.approx(each.statistic.sum())
    assert row.p == pytest.approx(stats.chi2.sf(each.statistic.sum(), 4))
    assert [row.adjusted for row in found.rows] == pytest.approx(
        stats.false_discovery_control([row.p for row in found.rows]).tolist()
    )
    assert "3 x 2" in str(found)


def test_table() -> None:
    lines = str(exchangeability(ob.Population.from_stacked(networks(mlp(), 150, 0)), mlp())).splitlines()
    assert lines[2] == "passed: 0 of 2 spaces rejected at 0.05"
    assert lines[4].split() == [
        "space",
        "units",
        "members",
        "effective",
        "chi-square",
        "on",
        "p",
        "adjusted",
        "verdict",
    ]
    assert lines[6].split()[:4] == ["0", "5", "150", "150.0"] and lines[6].endswith("consistent")


def test_too_few_to_tell() -> None:
    found = exchangeability(ob.Population.from_stacked(networks(mlp(), 2, 0)), mlp())
    assert {row.verdict for row in found.rows} == {"too few to tell"} and not found.passed
    assert "too few members to tell: 0 of 2 spaces rejected at 0.05" in str(found)


def test_bad_input() -> None:
    stacked = networks(mlp(), 4, 0)
    population = ob.Population.from_stacked(stacked)
    with pytest.raises(InputError, match="at least 2 members, found 1"):
        exchangeability(population[:1], mlp())
    with pytest.raises(InputError, match="max, norm, found 'mean'"):
        exchangeability(population, mlp(), statistic="mean")
    with pytest.raises(InputError, match="between 0 and 1, found 5"):
        exchangeability(population, mlp(), level=5)
    with pytest.raises(InputError, match="'holm' or 'bh'"):
        exchangeability(population, mlp(), correction="bonferroni")
    with pytest.raises(InputError, match="4 integers, one per member"):
        exchangeability(population, mlp(), chain=[0, 1])
    with pytest.raises(InputError, match="permutes no units"):
        exchangeability(population, ob.Symmetry(()))
    with pytest.raises(SpecError, match="the symmetry"):
        exchangeability(population, discovered("residual_mlp"))
    broken = {name: value.clone() for name, value in stacked.items()}
    broken["2.bias"][2, 0] = math.nan
    with pytest.raises(SpecError, match=r"member 2 is not finite: tensor 2\.bias"):
        exchangeability(ob.Population.from_stacked(broken), mlp())
    with pytest.raises(InputError, match="same number of draws"):
        uniformity(torch.tensor([[1, 2], [1, 1]]))


def test_eight_real_trainings_pass_and_one_of_them_repeated_does_not(shared_data: Path) -> None:
    symmetry = discovered("ani_1x")
    population = ob.Population.open(shared_data / "checkpoints" / "ani-1x-ensemble")
    found = exchangeability(population, symmetry)
    assert found.passed and len(found.rows) == 12
    repeated = exchangeability(population[[3] * 8], symmetry)
    assert {row.verdict for row in repeated.rows} == {"rejected"}
