"""How far populations are apart: streamed as if dense, blind to symmetries where asked, honest about runs."""

import json
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, SpecError
from onebasin.evaluation.discrepancy import NORMAL_FORMS, MMDTest, discrepancy
from onebasin.evaluation.distances import pair_distances, tensor_distances
from onebasin.evaluation.runs import Runs, same_run_share
from onebasin.functional.call import global_seed
from onebasin.metrics.mmd import Pooled, kernel_matrix, mmd, side_statistics
from onebasin.population.population import Population
from tests.alignment.test_canonical import decayed, perceptron
from tests.judging import assert_mean, numbers, seeded

QUICK: dict[str, Any] = {"permutations": 19, "n_resamples": 20}


def population(members: int, seed: int = 0, dtype: torch.dtype = torch.float64, **facts: Any) -> Population:
    """Random weights of a layer with batch norm."""
    tensors = {
        "0.weight": numbers(members, 4, 3, seed=seed).to(dtype) + 3,
        "0.bias": numbers(members, 4, seed=seed + 1).to(dtype),
        "1.running_mean": numbers(members, 4, seed=seed + 2).to(dtype),
        "1.num_batches_tracked": torch.arange(members),
        "temperature": numbers(members, seed=seed + 3).to(dtype),
    }
    return Population.from_stacked(tensors, **facts)


def dense(population: Population) -> Tensor:
    names = ("0.weight", "0.bias", "temperature")
    return torch.cat([population.tensor(name).reshape(len(population), -1).double() for name in names], 1)


def direct(rows: Tensor, order: float) -> Tensor:
    return torch.stack([(rows - row).abs().pow(order).sum(1) for row in rows])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few columns, so that a small tensor takes several."""
    monkeypatch.setattr(import_module("onebasin.evaluation.distances"), "BLOCK_BYTES", 8 * 23 * 5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_streamed_from_shards_as_if_dense(dtype: torch.dtype, tmp_path: Path) -> None:
    """From several shards, in another order than theirs, against one population in memory of another precision."""
    whole = population(13, dtype=dtype)
    with Population.writer(tmp_path / "population", whole.spec, shard_members=4) as writer:
        for state in whole:
            writer.append(state)
    order = torch.randperm(13, generator=seeded(0))
    a, b = Population.open(tmp_path / "population")[order], population(10, seed=9, dtype=torch.float32)
    found = pair_distances(a, b, ("l1", "l2"))
    rows = torch.cat([dense(a), dense(b)])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype != torch.float64 else {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found.l1, direct(rows, 1), **tolerance)
    torch.testing.assert_close(found.l2, direct(rows, 2), **tolerance)
    torch.testing.assert_close(found.xy, direct(rows, 2)[:13, 13:], **tolerance)
    assert (found.xx.shape, found.yy.shape) == ((13, 13), (10, 10))
    spread = [2 * dense(population).var(0).sum() for population in (a, b)]  # E|x - x'|^2 = 2 tr cov
    torch.testing.assert_close(torch.tensor(found.means[:2]).double(), torch.stack(spread), rtol=1e-5, atol=0)
    assert bool((found.l2.diagonal() == 0).all()) and torch.equal(found.l2, found.l2.T)
    parts = dict(tensor_distances(a, b))
    assert list(parts) == ["0.weight", "0.bias", "temperature"]
    torch.testing.assert_close(sum(part.l2 for part in parts.values()), found.l2)
    weights = torch.cat([a.tensor("0.bias"), b.tensor("0.bias").to(dtype)]).double()
    torch.testing.assert_close(parts["0.bias"].l2, direct(weights, 2), rtol=1e-3, atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_columns_of_any_rows(data: st.DataObject) -> None:
    parts = [Population.from_stacked({"w": numbers(n, 2, 3, seed=n)}) for n in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]  # fmt: skip  # noqa: E501
    whole = Population.concatenate(parts)
    rows = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=8))
    start = data.draw(st.integers(0, 5))
    stop = data.draw(st.integers(start + 1, 6))
    out = torch.empty(len(rows), stop - start, dtype=torch.float64)
    whole[rows].read_columns("w", start, stop, out)
    assert torch.equal(out, whole.stacked()["w"][rows].flatten(1)[:, start:stop])


def test_near_copies_far_from_zero_keep_their_digits() -> None:
    """Networks of one chain: weights of size 100 in float32 that differ by a thousandth."""
    start = 100 * numbers(1, 40_000)
    rows = (start + 1e-3 * numbers(6, 40_000, seed=1).cumsum(0)).float()
    found = pair_distances(Population.from_stacked({"w": rows[:3]}), Population.from_stacked({"w": rows[3:]}))
    torch.testing.assert_close(found.l2, direct(rows.double(), 2), rtol=1e-5, atol=0)


def test_statistics_of_batch_norm_and_counters_are_no_weights() -> None:
    a, b = population(5), population(6, seed=9)
    other = {**b.stacked(), "1.running_mean": 1e3 * numbers(6, 4), "1.num_batches_tracked": torch.arange(6) + 7}
    assert torch.equal(pair_distances(a, b).l2, pair_distances(a, Population.from_stacked(other)).l2)


@pytest.mark.parametrize("preset", ["median", "pooled", "paper", "paper-floors"])
def test_the_numbers_are_those_of_mmd(preset: str) -> None:
    a, b = population(9), population(7, seed=9)
    found = discrepancy(a, b, preset=preset, **QUICK)
    expected = [mmd(dense(a), dense(b), kernel="gaussian", bandwidth=preset).reshape(-1)]
    if preset != "median":
        expected.insert(0, mmd(dense(a), dense(b), kernel="laplace", bandwidth=preset))
    values = torch.cat(expected)
    assert [row.squared for row in found.raw.total.kernels] == pytest.approx(values.tolist(), rel=1e-8, abs=1e-12)
    assert found.raw.total.squared == pytest.approx(float(values.mean()))
    assert found.raw.total.explained == 0 and found.mmd_canonical is None and found.function is None
    bias = mmd(a.tensor("0.bias"), b.tensor("0.bias"))
    layers = discrepancy(a, b, **QUICK).raw.layers
    assert layers["0.bias"].squared == pytest.approx(float(bias), rel=1e-8)
    assert not discrepancy(a, b, layers=False, **QUICK).raw.layers


def model(seed: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    with global_seed(seed):
        return nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 2)).double()


class Normed(nn.Module):
    """Convolutions with batch norm, whose statistics move with their units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu().mean((2, 3)))


def normed(seed: int) -> nn.Module:
    with global_seed(seed):
        made = Normed().double().eval()
        made.norm.running_mean.normal_()
        made.norm.running_var.uniform_(0.5, 2)
        for weight in (made.norm.weight, made.norm.bias):
            nn.init.normal_(weight)
    return made


CASES = {
    "relu": (lambda seed: model(seed), torch.zeros(1, 3).double()),
    "tanh": (lambda seed: model(seed, nn.Tanh), torch.zeros(1, 3).double()),
    "batch norm": (normed, torch.zeros(1, 1, 5, 5).double()),
}


def moved(population: Population, symmetry: ob.Symmetry, seed: int) -> Population:
    """Every member somewhere else on its orbit."""
    return Population.from_states(
        [symmetry.apply(symmetry.random(seed + number), state) for number, state in enumerate(population)]
    )


@pytest.mark.parametrize("case", sorted(CASES))
def test_without_symmetries_an_orbit_is_one_point(case: str) -> None:
    build, example = CASES[case]
    symmetry = ob.discover(build(0), example)
    a, b = (Population.from_models([build(first + n) for n in range(8)]) for first in (0, 20))
    forms = [
        form for form in NORMAL_FORMS if form.count("/") and not form.startswith("keep") and not form.endswith("keep")
    ]
    given = {"symmetry": symmetry, "normal_forms": forms, "model": build(0), "preset": "pooled", **QUICK}
    inputs = numbers(6, *example.shape[1:], seed=5)
    before = discrepancy(a, b, inputs=inputs, **given)
    after = discrepancy(moved(a, symmetry, 100), moved(b, symmetry, 200), inputs=inputs, **given)
    for form in forms:
        here, there = before.normal_forms[form], after.normal_forms[form]
        assert there.total.squared == pytest.approx(here.total.squared, rel=1e-8, abs=1e-10)
        for name in here.layers:
            assert there.layers[name].squared == pytest.approx(here.layers[name].squared, rel=1e-8, abs=1e-10), name
        assert there.total.p_value == here.total.p_value
    assert after.function.squared == pytest.approx(before.function.squared, rel=1e-8, abs=1e-10)
    assert abs(after.raw.total.squared - before.raw.total.squared) > 1e-4


def test_a_moved_copy_is_far_raw_and_near_without_symmetries() -> None:
    """Copies on other places of their orbits by permutations alone; alignment sees it too."""
    symmetry = ob.discover(model(0), torch.zeros(1, 3).double())
    base = Population.from_models([model(3)] * 12)
    noisy = base.map(lambda block, _: {k: v + 0.02 * numbers(*v.shape, seed=len(k)) for k, v in block.items()})
    element = symmetry.random(5)
    there = Population.from_states([symmetry.apply(element, state) for state in noisy[6:]])
    found = discrepancy(noisy[:6], there, symmetry=symmetry, normal_forms=["unit-norm/norm", "aligned"], **QUICK)
    assert found.raw.total.squared > 0.5 and found.raw.total.p_value == 0.05
    assert abs(found.normal_forms["unit-norm/norm"].total.squared) < 0.2
    assert abs(found.normal_forms["aligned"].total.squared) < 0.2
    assert found.sensitivity["aligned"] == found.normal_forms["aligned"].total.squared
    assert found.mmd_canonical is found.normal_forms["unit-norm/norm"].total
    other = there.map(lambda block, _: {**block, "4.bias": block["4.bias"] + 5})  # no symmetry: another function
    far = discrepancy(noisy[:6], other, symmetry=symmetry, normal_forms="aligned", **QUICK)
    assert far.mmd_canonical.squared > 0.5 and far.mmd_canonical.p_value == 0.05
    assert far.normal_forms["aligned"].across > far.normal_forms["aligned"].within_first + 25


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_large_populations_take_a_form_on_disk(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetry = ob.discover(model(0), torch.zeros(1, 3).double())
    a, b = (Population.from_models([model(first + n) for n in range(4)]).to(dtype=dtype) for first in (0, 20))
    forms = ["balanced/norm", "aligned"]
    expected = discrepancy(a, b, symmetry=symmetry, normal_forms=forms, **QUICK)
    monkeypatch.setattr(import_module("onebasin.evaluation.discrepancy"), "LARGE", 0)
    told: list[tuple[int, int, str]] = []
    found = discrepancy(
        a, b, symmetry=symmetry, normal_forms=forms, scratch=tmp_path, progress=lambda *at: told.append(at), **QUICK
    )
    assert found.to_dict() == expected.to_dict()
    assert list(tmp_path.iterdir()) == []
    assert [at[:2] for at in told] == [(0, 3), (1, 3), (2, 3)]
    assert all(form in at[2] for form, at in zip(["raw", *forms], told, strict=True))


# Runs: modes N(0, I) in d dimensions, members N(mode, noise^2 I); a Gaussian kernel of bandwidth b.
D, B = 6, 4.0


def mean_kernel(variance: float) -> float:
    """E exp(-|z|^2 / b^2) for z ~ N(0, variance I)."""
    return (1 + 2 * variance / B**2) ** (-D / 2)


def parts(x: Tensor, y: Tensor, chain: Tensor, other: Tensor | None = None) -> tuple[float, float]:
    """U and what runs explain, at the fixed bandwidth."""
    a = Population.from_stacked({"w": x}, chain=chain)
    b = Population.from_stacked({"w": y}, chain=other)
    runs = Runs.of(a, b)
    matrix = kernel_matrix(Pooled.of(x, y), B, "gaussian")
    sides = (torch.arange(len(matrix)) < len(x)).double()[:, None]
    return float(side_statistics(matrix, sides)[0]), runs.explained(runs.sums(matrix))


def draws(sizes: list[int], noise: float, seed: int) -> tuple[Tensor, Tensor]:
    chain = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return numbers(len(sizes), D, seed=seed)[chain] + noise * numbers(sum(sizes), D, seed=seed + 1), chain


@pytest.mark.parametrize("noise", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("sizes", [[10] * 10, [1, 2, 3, 4, 5, 15]])
def test_what_runs_explain_is_unbiased_and_so_is_the_rest(sizes: list[int], noise: float) -> None:
    """Members of the reference are modes themselves, so that with noise the laws differ as well."""
    within, between = mean_kernel(2 * noise**2), mean_kernel(2 + 2 * noise**2)
    apart = between + mean_kernel(2) - 2 * mean_kernel(2 + noise**2)
    share = same_run_share(sizes)
    rows = []
    for seed in range(0, 1200, 3):
        x, chain = draws(sizes, noise, seed)
        rows.append(parts(x, numbers(40, D, seed=seed + 2), chain))
    squared, explained = torch.tensor(rows, dtype=torch.float64).T
    assert_mean(explained, share * (within - between))
    assert_mean(squared - explained, apart)
    assert_mean(squared, apart + share * (within - between))


def test_the_law_of_one_eleventh() -> None:
    """If runs follow the law of the reference, 10 x 10 against 1 x 100 gives 9/99, and nothing remains."""
    assert same_run_share([10] * 10) / same_run_share([100]) == pytest.approx(1 / 11)
    assert same_run_share([7] * 5) == pytest.approx((1 / 5 - 1 / 35) / (1 - 1 / 35))
    noise, squared, rest = 0.3, {}, {}
    for runs in (1, 10):
        found = []
        for seed in range(0, 2400, 4):
            x, chain = draws([100 // runs] * runs, noise, seed)
            y, _ = draws([1] * 60, noise, seed + 2)
            found.append(parts(x, y, chain))
        values = torch.tensor(found, dtype=torch.float64)
        squared[runs], rest[runs] = values[:, 0], values[:, 0] - values[:, 1]
        assert_mean(rest[runs], 0.0)
    assert_mean(11 * squared[10] - squared[1], 0.0)


def test_runs_on_both_sides_and_of_one_run() -> None:
    x, chain = draws([5, 5], 0.3, 0)
    y, other = draws([3, 4, 5], 0.3, 2)
    matrix = kernel_matrix(Pooled.of(x, y), B, "gaussian")
    squared, explained = parts(x, y, chain, other)
    keep_x, keep_y = (c[:, None] != c[None] for c in (chain, other))
    rest = matrix[:10, :10][keep_x].mean() + matrix[10:, 10:][keep_y].mean() - 2 * matrix[:10, 10:].mean()
    assert squared - explained == pytest.approx(float(rest))
    _, told = parts(x, y, torch.zeros(10).long(), other)
    here = matrix[:10, :10].sum() / 90 - matrix[10:, 10:][keep_y].mean()
    share, sizes = same_run_share([3, 4, 5]), matrix[10:, 10:]
    there = share * (sizes[~keep_y].sum() / (9 + 16 + 25 - 12) - sizes[keep_y].mean())
    assert told == pytest.approx(float(here + there))
    both = parts(x, y, torch.zeros(10).long(), torch.zeros(12).long())
    assert math.isnan(both[1])


def test_whole_runs_change_sides_in_the_statistic_without_pairs_of_one_run() -> None:
    (x, chain), (y, other) = draws([3] * 4, 0.3, 0), draws([3] * 5, 0.3, 2)
    a, b = Population.from_stacked({"w": x}, chain=chain), Population.from_stacked({"w": y}, chain=other)
    runs = Runs.of(a, b)
    test = MMDTest(runs, permutations=19, n_resamples=0)
    matrix = kernel_matrix(Pooled.of(x, y), B, "gaussian")
    squared, explained = parts(x, y, chain, other)
    assert test.sides is not None
    found = side_statistics(test._exchangeable(matrix, runs.sums(matrix)), test.sides)
    assert float(found[0]) == pytest.approx(squared - explained)


def nulls(sizes: tuple[list[int], list[int]]) -> Iterator[float]:
    for seed in range(300):
        (x, chain), (y, other) = draws(sizes[0], 0.05, 4 * seed), draws(sizes[1], 0.05, 4 * seed + 2)
        a, b = Population.from_stacked({"w": x}, chain=chain), Population.from_stacked({"w": y}, chain=other)
        yield discrepancy(a, b, permutations=19, n_resamples=0, layers=False, seed=seed).raw.total.p_value


@pytest.mark.parametrize(
    "sizes", [([1] * 9, [1] * 8), ([3] * 6, [3] * 7), ([4] * 5, [1] * 9), ([12], [1] * 9)], ids=str
)
def test_p_values_are_uniform_whatever_the_runs(sizes: tuple[list[int], list[int]]) -> None:
    """Members of a run are nearly copies here."""
    found = torch.tensor(list(nulls(sizes)))
    spread = found - torch.rand(len(found), generator=seeded(1)) / 20
    assert stats.kstest(spread.numpy(), "uniform").pvalue > 1e-4


def test_members_of_a_run_are_not_to_be_exchanged() -> None:
    """As if every member were independent, equal laws are rejected far more often than in 5 % of the cases."""
    rejected = 0
    for seed in range(60):
        a, b = (Population.from_stacked({"w": draws([10] * 4, 0.05, 4 * seed + n)[0]}) for n in (0, 2))
        rejected += discrepancy(a, b, permutations=19, n_resamples=0, layers=False).raw.total.p_value <= 0.05
    assert stats.binomtest(rejected, 60, 0.05, alternative="greater").pvalue < 1e-6


def test_halves_of_one_population_are_0_apart() -> None:
    """Without symmetries too: a normal form is a function of the network alone."""
    symmetry = ob.discover(model(0), torch.zeros(1, 3).double())
    found = {"raw": [], "ns": [], "function": []}
    for seed in range(30):
        whole = Population.from_models([model(1000 + 12 * seed + n) for n in range(12)])
        report = discrepancy(
            whole[:6], whole[6:], symmetry=symmetry, model=model(0), inputs=numbers(4, 3), permutations=0, n_resamples=0
        )
        for name, gap in (("raw", report.raw.total), ("ns", report.mmd_canonical), ("function", report.function)):
            found[name].append(gap.squared)
            assert math.isnan(gap.p_value) and math.isnan(gap.low)
    for values in found.values():
        assert_mean(torch.tensor(values), 0.0)


def test_the_interval_is_that_of_runs() -> None:
    """Copies of a member add nothing: the interval must not shrink."""
    x, y = numbers(20, D), numbers(25, D, seed=1) + 1
    alone = discrepancy(Population.from_stacked({"w": x}), Population.from_stacked({"w": y}), n_resamples=400)
    many = discrepancy(
        Population.from_stacked({"w": x.repeat_interleave(3, 0)}, chain=torch.arange(20).repeat_interleave(3)),
        Population.from_stacked({"w": y.repeat_interleave(3, 0)}, chain=torch.arange(25).repeat_interleave(3)),
        n_resamples=400,
    )
    gaps = alone.raw.total, many.raw.total
    assert [gap.high - gap.low > 0 for gap in gaps] == [True, True]
    assert gaps[1].remainder == pytest.approx(gaps[0].remainder, rel=0.05)  # bandwidths differ a little
    assert gaps[1].high - gaps[1].low == pytest.approx(gaps[0].high - gaps[0].low, rel=0.05)
    assert gaps[1].explained > 0 == gaps[0].explained


def test_functions_need_no_form() -> None:
    a, b = (Population.from_models([model(first + n) for n in range(6)]) for first in (0, 20))
    inputs = numbers(5, 3)
    outputs = [torch.stack([net(inputs).detach() for net in map(model, range(f, f + 6))]) for f in (0, 20)]
    given: dict[str, Any] = {"model": model(0), "inputs": inputs, **QUICK}
    probabilities = mmd(outputs[0].softmax(-1), outputs[1].softmax(-1))
    assert discrepancy(a, b, **given).function.squared == pytest.approx(float(probabilities), rel=1e-8)
    raw = float(mmd(*outputs))
    assert discrepancy(a, b, quantity="values", **given).function.squared == pytest.approx(raw, rel=1e-8)


def test_the_report_can_be_read_and_stored() -> None:
    symmetry = ob.discover(model(0), torch.zeros(1, 3).double())
    a = Population.from_models([model(n) for n in range(4)], chain=[0, 0, 0, 0])
    b = Population.from_models([model(20 + n) for n in range(5)])
    found = discrepancy(a, b, symmetry=symmetry, model=model(0), inputs=numbers(5, 3), **QUICK)
    told = json.loads(found.to_json())
    assert told == found.to_dict()
    assert told["runs"] == [1, 5] and told["shares"] == [1.0, 0.0]
    assert told["raw"]["total"]["low"] is None and told["raw"]["total"]["explained"] is not None
    assert set(told["forms"]) == {"balanced/max"} and told["function"]["squared"] == found.function.squared
    page = str(found)
    assert "4 against 5 networks of 1 and 5 runs" in page and "no interval" in page and "unequal" in page
    assert all(row in page for row in ("raw", "balanced/max", "function", "2.weight", "from runs"))


@pytest.mark.parametrize("metrics", [("l2",), ("l1",)])
@pytest.mark.parametrize("power", [-140, -90, 70, 125])
def test_the_unit_of_weights_does_not_matter(power: int, metrics: tuple[str, ...]) -> None:
    """float32 from its smallest numbers to its largest; weights are whole numbers, so that none is rounded."""
    rows = torch.randint(-3, 4, (7, 9), generator=seeded(0)).float()
    usual, other = (
        pair_distances(Population.from_stacked({"w": scaled[:3]}), Population.from_stacked({"w": scaled[3:]}), metrics)
        for scaled in (rows, torch.ldexp(rows.double(), torch.tensor(power)).float())
    )
    power = 2 * power if metrics == ("l2",) else power
    torch.testing.assert_close(
        torch.ldexp(other._matrix(metrics[0]), torch.tensor(-power).double()), usual._matrix(metrics[0])
    )


@pytest.mark.parametrize("counts", [(3, 3), (2, 6), (1, 5), (3, 20)])
def test_the_smallest_p_value_is_said(counts: tuple[int, int]) -> None:
    m, n = counts
    a = Population.from_stacked({"w": numbers(2 * m, D)}, chain=torch.arange(m).repeat_interleave(2))
    b = Population.from_stacked({"w": numbers(2 * n, D, seed=1) + 100}, chain=torch.arange(n).repeat_interleave(2))
    found = discrepancy(a, b, permutations=1999, n_resamples=0)
    least = (2 if m == n else 1) / math.comb(m + n, m)
    assert found.raw.total.p_value == pytest.approx(max(least, 1 / 2000), abs=4 * math.sqrt(least / 2000) + 1e-3)
    assert any("cannot be much below" in note for note in found.notes) == (least > 0.05)


def test_halves_of_one_chain_are_not_independent() -> None:
    whole = Population.from_stacked({"w": numbers(8, D)}, chain=torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    assert any("one run" in note for note in discrepancy(whole[::2], whole[1::2], **QUICK).notes)
    apart = discrepancy(whole[:4], whole[4:], **QUICK)
    assert not any("not independent" in note for note in apart.notes)


def test_pieces_of_inputs_do_not_change_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (Population.from_models([model(first + n) for n in range(4)]) for first in (0, 20))
    given: dict[str, Any] = {"model": model(0), "inputs": numbers(23, 3), "preset": "pooled", **QUICK}
    whole = discrepancy(a, b, **given).function
    monkeypatch.setattr(import_module("onebasin.evaluation.discrepancy"), "HELD", 8 * 2 * 8 * 5)  # five examples
    pieces = discrepancy(a, b, **given).function
    assert pieces.squared == pytest.approx(whole.squared, rel=1e-9) and pieces.p_value == whole.p_value


def test_a_form_keeps_small_differences_and_drops_rounding() -> None:
    """Batch norms of weight 1 are equal in the form; populations 1e-6 apart stay so where nothing was moved."""
    symmetry = ob.discover(normed(0), torch.zeros(1, 1, 5, 5).double())
    a, b = (Population.from_models([normed(first + n) for n in range(5)]) for first in (0, 20))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        given = (population.to(dtype=dtype) for population in (a, b))
        found = discrepancy(*given, symmetry=symmetry, normal_forms="unit-norm/max", **QUICK)
        layers = found.normal_forms["unit-norm/max"].layers
        assert found.raw.layers["norm.weight"].squared != 0 == layers["norm.weight"].squared
        assert layers["norm.weight"].p_value == 1 and layers["last.weight"].squared != 0
    start = normed(0).float().state_dict()
    near = [
        Population.from_states(
            [
                {k: v * (1 + 3e-7 * (n + side)) if v.is_floating_point() else v for k, v in start.items()}
                for n in range(4)
            ]
        )
        for side in (0, 2)
    ]
    still = discrepancy(*near, symmetry=symmetry, normal_forms="keep/keep", **QUICK)
    assert still.normal_forms["keep/keep"].total.squared == still.raw.total.squared


def test_refusals() -> None:
    a, b = population(4), population(5, seed=9)
    broken = {**b.stacked(), "0.bias": b.tensor("0.bias").clone()}
    broken["0.bias"][3, 1] = math.nan
    huge = {"w": torch.full((3, 2), 1e200, dtype=torch.float64)}
    huge["w"][1] = -1e200
    complex_population = Population.from_stacked({"w": torch.ones(3, 2, dtype=torch.complex64)})
    counters = Population.from_stacked({"n": torch.arange(3)})
    nets = Population.from_models([model(n) for n in range(3)])
    found = ob.discover(model(0), torch.zeros(1, 3).double())
    spec = {name: value for name, value in b.stacked().items() if name != "0.bias"}
    for error, words, call in [
        (InputError, "expected a form", lambda: discrepancy(a, b, normal_forms="sorted")),
        (InputError, "form", lambda: discrepancy(a, b, normal_forms=["unit-norm/max", "unit-norm/random"])),
        (InputError, "preset", lambda: discrepancy(a, b, preset="mean")),
        (InputError, "permutations", lambda: discrepancy(a, b, permutations=-1)),
        (InputError, "confidence", lambda: discrepancy(a, b, confidence_level=1.5)),
        (InputError, "go together", lambda: discrepancy(a, b, inputs=torch.zeros(1))),
        (
            InputError,
            "quantity",
            lambda: discrepancy(nets, nets, model=model(0), inputs=numbers(2, 3), quantity="x", **QUICK),
        ),
        (InputError, "at least 2", lambda: discrepancy(a[:1], b)),
        (InputError, "metrics", lambda: pair_distances(a, b, ("l3",))),
        (InputError, "not measured", lambda: pair_distances(a, b).pooled("l1")),
        (InputError, "both sides", lambda: pair_distances(a[:0], b)),
        (SpecError, "member 3 of the second", lambda: pair_distances(a, Population.from_stacked(broken))),
        (SpecError, "too large", lambda: pair_distances(Population.from_stacked(huge), Population.from_stacked(huge))),
        (InputError, "symmetry", lambda: discrepancy(a, b, normal_forms="unit-norm/max")),
        (InputError, "scratch", lambda: discrepancy(nets, nets, symmetry=found, scratch="absent", **QUICK)),
        (SpecError, "missing 0.bias", lambda: discrepancy(a, Population.from_stacked(spec))),
        (SpecError, "complex", lambda: pair_distances(complex_population, complex_population)),
        (SpecError, "weights", lambda: pair_distances(counters, counters)),
        (SpecError, "real weights", lambda: pair_distances(counters, Population.from_stacked({"n": torch.ones(3)}))),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_decayed_units_make_no_difference_between_halves_of_one_population() -> None:
    # In the paper's form a single canonical bias of 1e12 was all that distances saw: MMD^2 0.42, p 0.01.
    symmetry, spurious = perceptron(), 0
    for seed in range(4):
        one, other = decayed(24, seed), decayed(24, 100 + seed)
        found = discrepancy(
            one, other, symmetry=symmetry, normal_forms=["balanced/max", "unit-norm/max"], permutations=99,
            n_resamples=0, layers=False,
        )  # fmt: skip
        default = discrepancy(one, other, symmetry=symmetry, permutations=99, n_resamples=0, layers=False)
        assert list(default.normal_forms) == ["balanced/max"] and default.mmd_canonical == found.mmd_canonical
        assert default.normal_forms["balanced/max"].notes == ()
        assert found.mmd_canonical is not None and abs(found.mmd_canonical.squared) < 0.02
        spurious += found.mmd_canonical.p_value < 0.05
        notes = found.normal_forms["unit-norm/max"].notes
        assert notes and all("unit-norm/max: ill-conditioned" in note for note in notes)
        assert "ill-conditioned" in str(found)
    assert spurious <= 2  # of 4 at 5 %: three happen once in 2,000 times
