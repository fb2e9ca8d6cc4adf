import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.evaluation.diversity import correlation_of_pairs, mean_of_pairs
from onebasin.examples.published import FilterResponseNorm, ResNet, optunet
from onebasin.functional.call import global_seed
from onebasin.population.population import Population
from onebasin.posterior import predict
from onebasin.reporting.record import Claim, Figure, Record, Section, Table, read_record
from onebasin.symmetry.discover import discover
from onebasin_papers.study import Part, Study, Workspace, run_study
from onebasin_papers.symmetry import collapse, implicit, table
from onebasin_papers.symmetry.networks import (
    IMPLICIT,
    METHODS,
    hmc,
    multi_mode,
    one_mode,
    packed,
    problem,
    problem_of,
    reference,
    runs_of,
    starts,
    symmetry,
    with_batch_norm,
)
from onebasin_papers.symmetry.settings import (
    MEASURES,
    MULTI,
    ONE,
    TERMS,
    SymmetrySettings,
    column,
    preset_settings,
    published,
    summarise,
)
from onebasin_papers.symmetry.table import Row, gap_of_runs, pairs, rows, run_share
from onebasin_papers.verdicts import (
    CAVEAT,
    NOT,
    REPRODUCED,
    Correlation,
    Difference,
    as_often_as_not,
    better_in_most,
    correlation,
    difference,
    no_clear_correlation,
    none_collapsed,
    noticeable,
    runs_tell,
    stands_for,
    varies_more,
    weakly_correlated,
)
from tests.judging import sample

TINY = replace(
    preset_settings("quick"),
    examples=100,
    test_examples=40,
    reference_networks=6,
    epochs=2,
    groups=2,
    runs=2,
    singles=1,
    draws=4,
    members=2,
    rank_one=3,
    refine_steps=20,
    chains=4,
    chain_draws=5,
    warmup=4,
    leapfrog=3,
    vi_epochs=2,
    swag_collect=3,
    sghmc_thin=1,
    sghmc_warmup=1,
    workers=1,
    permutations=19,
)
STUDY = Study(
    "symmetry",
    "a part of it",
    (
        Part("table", table.TITLE, table.part),
        Part("implicit", implicit.TITLE, implicit.part),
        Part("collapse", collapse.TITLE, collapse.part),
    ),
    summarise,
    TERMS,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace[SymmetrySettings], Record]:
    workspace = Workspace(TINY, 0, tmp_path_factory.mktemp("study") / "run")
    return workspace, run_study(STUDY, workspace, "onebasin reproduce symmetry")


@pytest.fixture(scope="module")
def workspace(run: tuple[Workspace[SymmetrySettings], Record]) -> Workspace[SymmetrySettings]:
    return run[0]


@pytest.fixture(scope="module")
def record(run: tuple[Workspace[SymmetrySettings], Record]) -> Record:
    return run[1]


# --- the whole --------------------------------------------------------------------------------------------------------


def test_sections_answer_their_titles(record: Record, workspace: Workspace[SymmetrySettings]) -> None:
    assert [section.name for section in record.sections] == ["table", "implicit", "collapse"]
    assert read_record(workspace.folder) == record
    for section in record.sections:
        assert section.title.endswith("?")
        assert any(letter.isdigit() for letter in section.text[0])
        assert section.claims
    assert (workspace.folder / "record.json").stat().st_size < 400_000
    assert 2 <= len(record.summary) <= 12


def test_every_row_of_the_table_has_all_numbers(record: Record) -> None:
    (methods,) = (item for item in record.items if isinstance(item, Table) and item.name == "methods")
    names = [(row[0], row[1]) for row in methods.rows]
    titles = [*METHODS.values(), *IMPLICIT.values()]
    assert names == [
        *((title, ONE) for title in titles),
        *((title, MULTI) for title in titles),
        ("Deep ensemble", MULTI),
        ("SWA", MULTI),
        ("EMA", MULTI),
        ("HMC", ONE),
        ("HMC", MULTI),
    ]
    for row in methods.rows:
        for head, cell in zip(methods.columns[3:], row[3:], strict=True):
            assert not isinstance(cell, str) and cell is not None
            if row[0] == IMPLICIT["packed"] and head.name in ("MMD", "NS"):
                assert (cell.value, cell.note) == (None, "another architecture")
                continue
            assert cell.value is not None and math.isfinite(cell.value)
            assert cell.error is None or cell.error >= 0
    shown = {column.name for column in methods.columns}
    assert {"MMD", "NS", "Acc", "ECE", "ACE", "Brier", "AUPR", "FPR95", "ID MI", "OOD MI", "NLL", "AUROC"} <= shown


def test_every_measure_of_the_paper_stands_beside_ours(record: Record) -> None:
    (methods,) = (item for item in record.items if isinstance(item, Table) and item.name == "methods")
    for row in methods.rows:
        for measure, cell in zip(table.COLUMNS, row[3:], strict=True):
            assert not isinstance(cell, str) and cell is not None
            assert cell.published == published(str(row[0]), str(row[1]), measure)


def test_a_second_look_computes_nothing(record: Record, workspace: Workspace[SymmetrySettings]) -> None:
    told: list[str] = []
    again = run_study(STUDY, workspace, "onebasin reproduce symmetry", tell=told.append)
    assert again.sections == record.sections
    assert not told


def test_figures_show_all_pairs_and_rows(record: Record, workspace: Workspace[SymmetrySettings]) -> None:
    figures = {item.name: item for item in record.items if isinstance(item, Figure)}
    count = TINY.reference_networks * (TINY.reference_networks - 1) / 2
    for panel in figures["pair-information"].panels:
        assert sum(value or 0 for value in panel.series[0].y) == count
    (heat,) = figures["pair-information-joint"].panels
    assert sum(cell or 0 for row in heat.grid for cell in row) == count
    for panel in figures["distance-and-worth"].panels:
        assert sum(len(series.x) for series in panel.series) == len(rows(workspace)) - 2  # packed: no distances


def test_starts_are_no_part_of_the_reference(workspace: Workspace[SymmetrySettings]) -> None:
    first, second = (
        population.tensor("0.weight").flatten(1) for population in (reference(workspace), starts(workspace))
    )
    assert len(reference(workspace)) == TINY.reference_networks
    assert torch.cdist(first, second).min() > 0.1
    assert torch.pdist(torch.cat([first, second])).min() > 0.1


def test_laplace_stays_around_the_ensemble(workspace: Workspace[SymmetrySettings]) -> None:
    population, begun = runs_of(workspace, "laplace"), starts(workspace)
    for run in range(TINY.groups * TINY.runs):
        drawn = one_mode(population, run)
        assert len(drawn) == TINY.draws
        first = begun.tensor("0.weight")[run]
        assert torch.allclose(drawn.tensor("0.weight"), first.expand(TINY.draws, *first.shape))
        assert (drawn.tensor("4.weight") - begun.tensor("4.weight")[run]).abs().max() > 0


def test_forms_of_a_method_have_as_many_networks(workspace: Workspace[SymmetrySettings]) -> None:
    population = runs_of(workspace, "swag")
    for group in range(TINY.groups):
        many = multi_mode(population, TINY, group)
        assert len(many) == len(one_mode(population, group)) == TINY.draws
        assert many.chain is not None
        assert many.chain.unique().tolist() == [TINY.runs * group + run for run in range(TINY.runs)]


def test_many_modes_are_spread_over_each_run() -> None:
    settings = replace(TINY, runs=2, draws=6)
    population = Population.from_stacked({"w": torch.arange(24.0)}, chain=torch.arange(4).repeat_interleave(6))
    assert multi_mode(population, settings, 1).tensor("w").tolist() == [12, 14, 16, 18, 20, 22]


def test_what_is_not_defined_has_no_number() -> None:
    row = Row("any", ONE, 1, 1, (({"x": math.nan, "y": 1.0},), ({"x": math.nan, "y": 3.0},)))
    assert row.number("x").value is None
    assert row.number("y").value == 2
    assert row.number("y").error == 1


def test_the_gap_of_runs_is_what_theory_says(workspace: Workspace[SymmetrySettings]) -> None:
    share = run_share(workspace)
    assert share == pytest.approx((2 - 1) / (4 - 1))  # 2 runs of 2 networks
    many = Row("any", MULTI, TINY.runs, TINY.draws // TINY.runs, (({"mmd_runs": 0.7},), ({"mmd_runs": 0.5},)))
    assert gap_of_runs(many) == pytest.approx(0.6 / share - 0.6)


def test_pairs_leave_out_what_has_one_form(workspace: Workspace[SymmetrySettings]) -> None:
    assert [(one.method, many.method) for one, many in pairs(rows(workspace))] == [
        (name, name) for name in METHODS.values()
    ]


def test_hmc_has_its_chains(workspace: Workspace[SymmetrySettings]) -> None:
    chain = hmc(workspace).chain
    assert chain is not None
    assert chain.bincount().tolist() == [TINY.chain_draws] * TINY.chains


# --- networks ---------------------------------------------------------------------------------------------------------


def test_optunet_has_the_orbit_of_the_paper() -> None:
    with global_seed(0):
        found = discover(optunet().eval(), torch.rand(2, 1, 28, 28))
    assert "28,800 equivalent networks" in str(found)


def test_a_residual_network_has_streams_and_inner_widths() -> None:
    with global_seed(0):
        found = discover(ResNet(width=2, blocks=(1, 1, 1)).eval(), torch.rand(2, 3, 8, 8))
    assert [space.size for space in found.spaces] == [2, 2, 4, 4, 8, 8]


def test_resnet_20_is_as_large_as_it_should_be() -> None:
    model = ResNet()
    weights = {name: value.numel() for name, value in model.named_parameters()}
    convolutions = sum(count for name, count in weights.items() if "conv" in name or "shortcut.0" in name)
    widths = (16, 32, 64)
    inner = 27 * 16 + 9 * (6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2) + 16 * 32 + 32 * 64
    assert convolutions == inner
    norms = 3 * (7 * widths[0] + 7 * widths[1] + 7 * widths[2])  # stem or projection, and two in each of three blocks
    assert sum(weights.values()) == inner + norms + 650
    assert {"layer3.2.bn2.tau", "layer2.0.shortcut.0.weight", "linear.bias"} <= set(weights)


@given(st.floats(0.1, 10.0), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_filter_response_norm_forgets_scale(scale: float, seed: int) -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    norm = FilterResponseNorm(3).double()
    with torch.no_grad():
        norm.tau.fill_(-9.0)
        assert torch.allclose(norm(scale * x), norm(x), atol=1e-3)
        assert torch.allclose(norm(x).square().mean((-2, -1)), torch.ones(2, 3, dtype=torch.float64), atol=1e-3)
        norm.tau.fill_(0.5)
        assert norm(x).min() >= 0.5


def test_a_residual_network_can_be_trained_side_by_side() -> None:
    with global_seed(0):
        model = ResNet(width=2, blocks=(1, 1, 1))
    generator = torch.Generator().manual_seed(0)
    inputs, classes = torch.rand(20, 3, 8, 8, generator=generator), torch.arange(20) % 10
    population = sample(model, (inputs, classes), "ensemble", chains=2, epochs=1, batch=10, compile=False)
    assert len(population) == 2
    assert not torch.equal(population.tensor("conv1.weight")[0], population.tensor("conv1.weight")[1])
    assert (population.tensor("bn1.gamma") - 1).abs().max() < 0.1  # starts at 1


def test_digits_need_no_folder() -> None:
    found = problem_of("mlp", None, 0)
    assert len(found.train[0]) + len(found.test[0]) == 1797
    assert isinstance(found.model, nn.Sequential)


def test_a_problem_is_cut_to_the_plan(workspace: Workspace[SymmetrySettings]) -> None:
    own = problem(workspace)
    assert (len(own.train[0]), len(own.test[0]), len(own.outside)) == (100, 40, 40)
    assert [space.size for space in symmetry(workspace).spaces] == [16, 16]


def test_presets() -> None:
    assert preset_settings("full", "somewhere").data_dir == "somewhere"
    with pytest.raises(InputError, match="quick or full"):
        preset_settings("slow")


# --- verdicts ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=6))
@settings(deadline=None)
def test_a_difference_is_a_paired_t_test(values: list[tuple[float, float]]) -> None:
    one, many = zip(*values, strict=True)
    found = difference("any", one, many, "lower")
    gains = torch.tensor(one, dtype=torch.float64) - torch.tensor(many, dtype=torch.float64)
    assert found.mean == pytest.approx(float(gains.mean()), abs=1e-12)
    assert found.error == pytest.approx(float(gains.std()) / math.sqrt(len(gains)), abs=1e-12)
    if float(gains.std()) > 1e-6:
        expected = stats.ttest_rel(one, many).pvalue
        assert found.p_value == pytest.approx(float(expected), rel=1e-6, abs=1e-12)
    other = difference("any", one, many, "higher")
    assert other.mean == -found.mean


def test_one_group_is_never_sure() -> None:
    found = difference("any", [1.0], [9.0], "higher")
    assert found.mean == 8 and not found.won and not found.lost


def _said(*means: float, p: float = 0.5) -> list[Difference]:
    return [Difference(str(place), mean, 1.0, p) for place, mean in enumerate(means)]


def test_better_in_most() -> None:
    assert better_in_most(_said(1, 1, 1, 1, 1)) == REPRODUCED
    assert better_in_most(_said(1, 1, 1, 1, -1)) == REPRODUCED
    assert better_in_most(_said(1, 1, 1, 1, -1, p=0.01)) == CAVEAT  # worse beyond chance
    assert better_in_most(_said(1, 1, 1, -1, -1)) == CAVEAT
    assert better_in_most(_said(1, 1, -1, -1, -1)) == NOT


def test_runs_tell() -> None:
    assert runs_tell([1.0, 2.0], [1.1, 2.1]) == REPRODUCED
    assert runs_tell([1.0, 2.0, 9.0], [1.1, 2.1, 3.0]) == CAVEAT
    assert runs_tell([1.0, 9.0], [2.0, 1.0]) == NOT
    assert runs_tell([-1.0], [-1.0]) == NOT  # multi-mode is not closer at all


@given(st.integers(0, 30), st.integers(1, 30))
@settings(deadline=None)
def test_as_often_as_not_is_symmetric(up: int, of: int) -> None:
    up = min(up, of)
    assert as_often_as_not(up, of)[1] == pytest.approx(as_often_as_not(of - up, of)[1])


def test_as_often_as_not() -> None:
    assert [as_often_as_not(up, 10)[0] for up in (4, 6, 3, 8, 1, 10)] == [
        REPRODUCED,
        REPRODUCED,
        CAVEAT,
        CAVEAT,
        NOT,
        NOT,
    ]


@given(st.integers(4, 40), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_what_is_noticeable_is_significant(count: int, tests: int) -> None:
    # Pearson's r of a sample of this size with a p-value of exactly the corrected level.
    r = noticeable(count, tests)
    p = 2 * stats.beta(count / 2 - 1, count / 2 - 1, loc=-1, scale=2).sf(r)
    assert p == pytest.approx(0.05 / tests, rel=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=9))
@settings(max_examples=40, deadline=None)
def test_correlation_is_spearmans(values: list[tuple[int, int]]) -> None:
    x, y = ([float(own[place]) for own in values] for place in (0, 1))
    found = correlation("any", x, y)
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert found.rho == pytest.approx(float(stats.spearmanr(x, y).statistic), abs=1e-9)
    else:
        assert (found.rho, found.p_value) == (0.0, 1.0)


def test_p_of_a_correlation_is_that_of_all_orders() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 4.0, 3.0, 5.0]
    exact = stats.permutation_test((x,), lambda own: stats.spearmanr(own, y).statistic, permutation_type="pairings")
    p = float(exact.pvalue)
    assert abs(correlation("any", x, y).p_value - p) < 4 * math.sqrt(p * (1 - p) / 9999) + 1e-4


def test_no_clear_correlation() -> None:
    quiet, loud = Correlation("quiet", 0.1, 0.5), Correlation("loud", 0.9, 0.001)
    assert no_clear_correlation([quiet, quiet]) == (REPRODUCED, [])
    assert no_clear_correlation([quiet, quiet, loud]) == (CAVEAT, ["loud"])
    assert no_clear_correlation([quiet, loud, loud]) == (NOT, ["loud", "loud"])
    assert no_clear_correlation([Correlation("nearly", 0.6, 0.04), quiet])[0] == REPRODUCED  # corrected for being many


def test_other_verdicts() -> None:
    assert [weakly_correlated(*ends) for ends in ((-0.4, 0.4), (0.3, 0.7), (0.6, 0.9), (-0.9, -0.6))] == [
        REPRODUCED,
        CAVEAT,
        NOT,
        NOT,
    ]
    assert [none_collapsed(count, 5000) for count in (0, 3, 5)] == [REPRODUCED, CAVEAT, NOT]
    assert [stands_for(*own) for own in ((0.5, 1.0), (0.001, 1.0), (0.001, -1.0))] == [REPRODUCED, NOT, REPRODUCED]
    assert [varies_more(0.1, 0.2), varies_more(0.2, 0.1)] == [REPRODUCED, NOT]


def test_the_published_table_is_whole() -> None:
    assert published("Dropout", ONE, "mmd") == 4.5
    assert published("Deep ensemble", MULTI, "ood_mi") == 58.0
    assert published("HMC", ONE, "mmd") is None
    assert published("SWAG", ONE, "nll") is None
    assert all(len(column(measure)) == 10 for measure in MEASURES)
    # Closeness goes with accuracy in the published numbers themselves.
    assert correlation("accuracy", column("mmd"), column("accuracy")).p_value < 0.01


def test_summary_names_what_failed() -> None:
    claims = (Claim("A.", REPRODUCED, "1"), Claim("B.", NOT, "2"))
    said = summarise([Section("x", "Is it?", ("It is 1.", "more"), claims=claims)])
    assert said == [
        "Of 2 claims 1 were reproduced, 0 with a caveat, and 1 not.",
        "Is it? It is 1.",
        "Not reproduced: B.",
    ]
    assert summarise([]) == []


# --- pairs that share networks ----------------------------------------------------------------------------------------


def _symmetric(size: int, generator: torch.Generator) -> Tensor:
    upper = torch.rand(size, size, generator=generator, dtype=torch.float64).triu(1)
    return upper + upper.T


def test_numbers_of_pairs_are_those_of_the_upper_triangle() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = _symmetric(9, generator), _symmetric(9, generator)
    first, second = torch.triu_indices(9, 9, 1)
    x, y = a[first, second], b[first, second]
    assert mean_of_pairs(a, generator).value == pytest.approx(float(x.mean()))
    found = correlation_of_pairs(a, b, generator)
    assert found.value == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]))
    assert found.low <= found.value <= found.high
    assert correlation_of_pairs(a, a + 3, generator).low == pytest.approx(1.0)


def test_a_drawing_counts_pairs_of_copies_only_between_networks() -> None:
    # Brute force: draw the networks, list all pairs of different ones, take their mean.
    generator = torch.Generator().manual_seed(1)
    a = _symmetric(5, generator)
    chosen = torch.randint(5, (400, 5), generator=torch.Generator().manual_seed(2))
    means = [
        float(torch.stack([a[i, j] for i in row for j in row if i != j]).mean())
        for row in chosen
        if len(row.unique()) > 1
    ]
    found = mean_of_pairs(a, torch.Generator().manual_seed(2), n_resamples=400)
    assert found.error == pytest.approx(float(torch.tensor(means).double().std()))


def _coverage(rounds: int) -> Iterator[bool]:
    """Numbers of pairs that are sums over networks: their mean over pairs has the error of a mean over networks."""
    for seed in range(rounds):
        generator = torch.Generator().manual_seed(seed)
        own = torch.randn(40, generator=generator, dtype=torch.float64)
        found = mean_of_pairs(own[:, None] + own, generator, n_resamples=300)
        yield found.low <= 0 <= found.high


def test_intervals_know_that_pairs_share_networks() -> None:
    rounds = 200
    covered = sum(_coverage(rounds))
    # As if pairs were independent, the interval would be 4.5 times too short and cover in a third of the rounds.
    assert stats.binom.cdf(covered, rounds, 0.92) > 1e-3
    assert stats.binom.sf(covered - 1, rounds, 0.98) > 1e-3


def test_pairs_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(InputError, match="at least 3"):
        mean_of_pairs(torch.zeros(2, 2), torch.Generator())
    with pytest.raises(InputError, match="same networks"):
        correlation_of_pairs(torch.zeros(4, 4), torch.zeros(3, 3), torch.Generator())


def test_a_folder_of_another_run_is_refused(
    record: Record, workspace: Workspace[SymmetrySettings], tmp_path: Path
) -> None:
    other = Workspace(replace(TINY, draws=6), 0, workspace.folder)
    with pytest.raises(InputError, match="draws"):
        run_study(STUDY, other, "onebasin reproduce symmetry")


# --- implicit ensembles -----------------------------------------------------------------------------------------------


def test_share_within_runs_by_hand() -> None:
    """Two runs at 0 and 10, members one apart: 1 within; between 100, 121, 81 and 100."""
    population = Population.from_stacked(
        {"w": torch.tensor([[0.0], [1.0], [10.0], [11.0]])}, chain=torch.tensor([0, 0, 1, 1])
    )
    assert implicit.share_within(population, ["w"]) == pytest.approx(1 / ((100 + 121 + 81 + 100) / 4))


def test_runs_without_meaning_have_a_share_of_one() -> None:
    values = torch.randn(4_000, 1, generator=torch.Generator().manual_seed(0))
    population = Population.from_stacked({"w": values}, chain=torch.arange(4_000) % 2)
    assert implicit.share_within(population, ["w"]) == pytest.approx(1.0, abs=0.05)


def test_statistics_of_batches_are_networks_without_batch_norm(workspace: Workspace[SymmetrySettings]) -> None:
    """Folded draws are networks of the study's architecture, and compute what the perceptron with batch norm does."""
    task, settings = problem(workspace), workspace.settings
    folded = runs_of(workspace, "mcbatchnorm")
    drawn = Population.open(workspace.folder / "networks" / "mcbatchnorm")
    normed = with_batch_norm(task.model)
    ours = predict(task.model, folded, task.test[0], quantity="values")
    theirs = predict(normed, drawn, task.test[0], quantity="values")
    order = torch.argsort(drawn.chain, stable=True)
    torch.testing.assert_close(ours, theirs[order], rtol=1e-4, atol=1e-4)
    assert folded.chain is not None
    assert folded.chain.bincount().tolist() == [settings.draws] * settings.groups * settings.runs


def test_packed_networks_are_narrow(workspace: Workspace[SymmetrySettings]) -> None:
    narrow = packed(workspace)
    widths = [layer.out_features for layer in narrow.model.modules() if isinstance(layer, nn.Linear)]
    assert widths == [8, 8, 10]
    assert narrow.population.chain is not None
    assert narrow.population.chain.bincount().tolist() == [TINY.members] * TINY.groups * TINY.runs


def test_storage_of_a_rank_one_ensemble_by_hand(workspace: Workspace[SymmetrySettings]) -> None:
    """64-16-16-10: 1,440 entries of matrices, 42 biases; each member has 42 biases and 138 factors."""
    stored = {one.title: one.networks for one in implicit.stored_forms(workspace)}
    assert stored["BatchEnsemble of 2"] == pytest.approx((1440 + 2 * (42 + 138)) / 1482)
