import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import onebasin as ob
from onebasin.alignment.transpositions import element_with
from onebasin.errors import InputError, OnebasinError
from onebasin.inference.start import fresh
from onebasin.posterior.pruning import LEVELS
from onebasin.reporting.record import VERDICTS, Figure, Number, Record, Table, encode, read_record
from onebasin.symmetry.discover import discover
from onebasin_papers.compact import STUDY, pruning, table, width
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import distance, setting
from onebasin_papers.compact.pruning import BORROWED, CRITERIA
from onebasin_papers.compact.settings import CompactSettings, preset_settings
from onebasin_papers.compact.table import Score
from onebasin_papers.compact.transpositions import published_near, sgd
from onebasin_papers.problems import mlp
from onebasin_papers.study import Workspace, run_study
from onebasin_papers.verdicts import falls, graded, grows, rank_correlation, smaller, survives

REPRODUCED, CAVEAT, NOT = VERDICTS
TINY = CompactSettings(
    units=8,
    planted=(1, 4, 7),
    runs=2,
    pairs=2,
    epochs=2,
    every=1,
    rates=(1.0, 10.0),
    seeds=2,
    hmc_runs=2,
    chains=2,
    warmup=2,
    draws=4,
    leapfrog=2,
    members=2,
    widths=(4, 8),
    ensemble_epochs=2,
    vi_epochs=2,
    posterior_draws=4,
    refine_steps=2,
    workers=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compact") / "run"


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    return run_study(STUDY, Workspace(TINY, 0, folder), "onebasin reproduce compact")


def named(record: Record, name: str) -> Table | Figure:
    return next(item for item in record.items if item.name == name)


def rows_of(record: Record, name: str) -> dict[object, tuple[object, ...]]:
    found = named(record, name)
    assert isinstance(found, Table)
    return {row[0]: row for row in found.rows}


def numbers_in(record: Record) -> list[Number]:
    tables = [item for item in record.items if isinstance(item, Table)]
    return [cell for item in tables for row in item.rows for cell in row if isinstance(cell, Number)]


# ------------------------------------------------------------------ the whole study


def test_every_part_answers_its_question(record: Record) -> None:
    assert [section.name for section in record.sections] == [part.name for part in STUDY.parts]
    for section, part in zip(record.sections, STUDY.parts, strict=True):
        assert section.title == part.title and section.title.endswith("?")
        assert any(character.isdigit() for character in section.text[0])
        assert section.items and section.claims
        assert all(claim.found and any(c.isdigit() for c in claim.found) for claim in section.claims)
    assert any(isinstance(item, Figure) and item.panels[0].kind == "heat" for item in record.items)


def test_numbers_are_finite_and_have_errors(record: Record) -> None:
    numbers = numbers_in(record)
    assert all(number.value is not None and math.isfinite(number.value) for number in numbers)
    assert sum(number.error is not None for number in numbers) > len(numbers) / 2
    assert all(number.error is None or math.isfinite(number.error) for number in numbers)


def test_record_is_small_and_reads_back(record: Record, folder: Path) -> None:
    assert encode(read_record(folder)) == encode(record)
    assert (folder / "record.json").stat().st_size < 400_000


def test_summary_counts_the_verdicts(record: Record) -> None:
    claims = list(record.claims)
    assert record.summary[0].startswith(f"Of {len(claims)} claims: ")
    failed = [claim for claim in claims if claim.verdict == NOT]
    assert sum(sentence.startswith("Not reproduced") for sentence in record.summary) == len(failed)


def test_published_values_stand_beside_ours(record: Record) -> None:
    rows = rows_of(record, "compact-table")
    for name, paper in published.TABLE.items():
        cells = rows[name][3:7]
        assert [cell and cell.published for cell in cells] == [
            paper.agreement,
            paper.variation,
            paper.draws,
            paper.mean,
        ]
        assert rows[name][1] == "paper"
    found = named(record, "pruning-table")
    assert isinstance(found, Table)
    curves = {
        row[0]: tuple(c.published for c in row[3:] if isinstance(c, Number)) for row in found.rows if "paper" in row[1]
    }
    assert {name: curves[name] for name in published.PRUNING} == published.PRUNING
    widths = rows_of(record, "sigma-table")
    assert [widths[name][1].published for name in published.SIGMA] == [own.mean for own in published.SIGMA.values()]


def test_hmc_samples_agree_with_themselves(record: Record) -> None:
    row = rows_of(record, "compact-table")["HMC samples"]
    assert row[3].value == 1 and row[4].value == 0


def test_unpruned_networks_do_not_depend_on_the_criterion(record: Record) -> None:
    found = named(record, "pruning-table")
    assert isinstance(found, Table)
    whole = {(row[0], row[1]): row[3].value for row in found.rows}
    for name in ("HMC q_r", "Ensemble q_r", "VI q"):
        assert len({value for (own, _), value in whole.items() if own == name}) == 1


# ------------------------------------------------------------------ again


def test_kept_networks_are_used_again(record: Record, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("nothing should be fitted again")

    kept = [path for path in (folder / "networks").rglob("*.safetensors") if path.parent.name != "run"]
    before = {path: path.read_bytes() for path in kept}
    (folder / "parts" / "sigma.json").unlink()
    monkeypatch.setattr(ob, "approximate", refuse)
    again = run_study(STUDY, Workspace(TINY, 0, folder), "onebasin reproduce compact")
    assert before and {path: path.read_bytes() for path in before} == before
    old, new = (next(s for s in own.sections if s.name == "sigma") for own in (record, again))
    assert encode(replace(new, seconds=0.0)) == encode(replace(old, seconds=0.0))


def test_seed_decides(record: Record, tmp_path: Path) -> None:
    def again(seed: int) -> object:
        found = run_study(
            STUDY, Workspace(TINY, seed, tmp_path / str(seed)), "onebasin reproduce compact", only=["dynamics"]
        )
        return encode(replace(found.sections[0], seconds=0.0))

    old = next(section for section in record.sections if section.name == "dynamics")
    assert again(0) == encode(replace(old, seconds=0.0))
    assert again(1) != again(0)


# ------------------------------------------------------------------ presets


def test_full_preset_is_the_papers() -> None:
    full = preset_settings("full", None)
    assert full.units == published.UNITS and len(full.planted) == 50 and full.planted[-1] == 511
    assert set(published.TRANSPOSITIONS) <= set(full.planted)
    assert (full.rate, full.epochs, full.seeds, full.prior) == (1e-3, 50, 5, 1.0)
    assert 0.01 < full.gradients / published.GRADIENTS < 0.02
    assert json.dumps(full.to_record())


def test_quick_numbers_of_transpositions_have_published_neighbours() -> None:
    quick = preset_settings("quick", None)
    assert [published_near(swaps, quick.units) for swaps in quick.planted] == list(published.TRANSPOSITIONS.values())
    assert published_near(11, published.UNITS) is None


def test_full_preset_without_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(OnebasinError, match="mnist"):
        setting(Workspace(preset_settings("full", str(tmp_path)), 0, tmp_path))


def test_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match="quick"):
        preset_settings("medium", None)


# ------------------------------------------------------------------ planted permutations


@pytest.mark.parametrize("swaps", published.TRANSPOSITIONS)
def test_published_start_distances_follow_the_closed_form(swaps: int) -> None:
    assert published.TRANSPOSITIONS[swaps].start == pytest.approx(expected_distance(swaps, 784, 512), rel=0.02)


@pytest.mark.parametrize("swaps", [1, 6, 15])
def test_start_distances_follow_the_closed_form(swaps: int) -> None:
    model = mlp(20, 16, 10)
    symmetry = discover(model, torch.zeros(2, 20))
    found = []
    for draw in range(300):
        start = fresh(model, draw, 0)
        found.append(distance(start, symmetry.apply(element_with(symmetry, swaps, draw, "paper"), start)))
    values = torch.tensor(found, dtype=torch.float64)
    off = (values.mean() - expected_distance(swaps, 20, 16)) / (values.std() / len(values) ** 0.5)
    assert abs(float(off)) < 3.5


def expected_distance(swaps: int, inputs: int, units: int) -> float:
    # Each moved unit carries inputs + 1 weights of variance 1 / (3 inputs) and 10 of variance 1 / (3 units), twice.
    cycles = units - swaps
    moved = units - cycles * (1 - 1 / cycles) ** swaps
    return 2 / 3 * ((inputs + 1) / inputs + 10 / units) * moved


def test_training_commutes_with_permutations(tmp_path: Path) -> None:
    workspace = Workspace(TINY, 0, tmp_path)
    here = setting(workspace)
    start = here.start(workspace, "any")
    element = element_with(here.symmetry, 5, 0)
    method = replace(sgd(workspace), epochs=2)
    ends = []
    for state in (start, here.symmetry.apply(element, start)):
        model = mlp(64, TINY.units, 10)
        model.load_state_dict(state)
        ends.append(ob.sample(model, here.problem.train, method, start="model", prior=None, seed=3).member(0))
    moved = here.symmetry.apply(element, ends[0])
    assert distance(start, ends[0]) > 1e-3
    for name, value in moved.items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ verdicts


def test_verdicts_can_say_everything() -> None:
    assert [graded(*case) for case in ((True, True), (False, True), (False, False))] == [REPRODUCED, CAVEAT, NOT]
    assert survives([2, -2], [0, 0], 2) == REPRODUCED
    assert survives([3, 0], [1, 0], 2) == CAVEAT
    assert survives([3, 0], [9, 0], 2) == NOT
    assert falls([1.0, 1.1, 0.9], [0.1, 0.1, 0.1], 0.5) == REPRODUCED
    assert falls([1.0, 1.1, 0.9], [0.8, 0.9, 0.7], 0.5) == CAVEAT
    assert falls([1.0, 1.1, 0.9], [1.0, 1.2, 0.9], 0.5) == NOT
    assert grows([1, 2, 3], [[1, 2, 3], [1, 2, 3]])[0] == REPRODUCED
    assert grows([1, 2, 3], [[1, 2, 3], [2, 1, 3]])[0] == CAVEAT
    assert grows([1, 2, 3], [[3, 2, 1], [3, 2, 1]])[0] == NOT


def test_smaller_needs_every_run_and_three_errors() -> None:
    assert smaller([0.0], [1.0])
    assert not smaller([0.0, 0.0], [1.0, -0.1])
    assert not smaller([0.0, 0.0], [1.0, 0.1])  # above zero in both, by 1.2 standard errors
    assert smaller([0.0, 0.0], [1.0, 1.1])


def test_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 6, (20,), generator=generator).tolist() for _ in range(2))
    assert rank_correlation(x, y) == pytest.approx(float(spearmanr(x, y).statistic), abs=1e-12)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


def scores(**values: float) -> list[Score]:
    plain = {"agreement": 1.0, "variation": 0.0, "draws": 0.98, "mean": None, "nll": 0.1, "ece": 0.01, "stored": 2.0}
    return [Score(**{**plain, **values})] * 2


@pytest.mark.parametrize(
    ("variation", "right", "verdict"), [(0.05, 0.97, REPRODUCED), (0.3, 0.96, CAVEAT), (0.05, 0.9, NOT)]
)
def test_closeness_is_judged_at_the_largest_width(variation: float, right: float, verdict: str) -> None:
    wide, narrow = [width.CompactScore(variation, right, 0.98, 0.1)] * 2, [width.CompactScore(0.9, 0.1, 0.98, 0.1)] * 2
    assert width.claim({8: {"q_r": narrow}, 16: {"q_r": wide}}).verdict == verdict


def test_claims_about_forms_follow_the_numbers() -> None:
    good, bad = scores(variation=0.05, draws=0.97), scores(variation=0.8, draws=0.2)
    names = ("HMC samples", "HMC q_d", "Ensemble members", "Ensemble q_d")
    found = dict.fromkeys(names, good) | {"HMC q_r": bad, "Ensemble q_r": bad}
    assert [claim.verdict for claim in table.claims(found)] == [NOT, NOT, REPRODUCED]
    found = dict.fromkeys(names, bad) | {"HMC q_r": good, "Ensemble q_r": good, "HMC samples": good}
    assert [claim.verdict for claim in table.claims(found)] == [REPRODUCED, REPRODUCED, NOT]


@pytest.mark.parametrize("way", [1, -1])
def test_claims_about_pruning_follow_the_numbers(way: int) -> None:
    levels = {("HMC q_r", "sigma"): 1, ("Ensemble q_r", "sigma"): 2, (BORROWED, "sigma"): 3}
    levels |= {("Ensemble q_r", "magnitude"): 4, ("Ensemble q_r", "random"): 5}
    found = {key: [(50.0 + way * 5 * level + run,) * len(LEVELS) for run in range(3)] for key, level in levels.items()}
    assert [claim.verdict for claim in pruning.claims(found)] == [REPRODUCED if way > 0 else NOT] * 3
    assert {by for _, by in found} <= set(CRITERIA)
