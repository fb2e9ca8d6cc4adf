"""Studies: parts are run once and kept; the demo is one of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onebasin as ob
from onebasin.errors import InputError, StorageError
from onebasin.reporting.record import Claim, Column, Figure, Number, Section, Series, Table, read_record
from onebasin_papers.demo import _LEVELS as LEVELS
from onebasin_papers.demo import STUDY as DEMO
from onebasin_papers.demo import preset_settings as demo_settings
from onebasin_papers.numbers import estimate_number, mean_number
from onebasin_papers.problems import digits_problem, mlp
from onebasin_papers.study import Part, Settings, Study, Workspace, run_study

Run = Callable[..., tuple[int, str, str]]
TINY = {"hidden": 6, "members": 4, "epochs": 3, "chains": 2, "draws": 6, "warmup": 8, "leapfrog": 4, "steps": 10,
        "judged": 20, "workers": 1}  # fmt: skip


@dataclass(frozen=True)
class Width(Settings):
    width: int = 3


def study(calls: list[str], fail: str = "") -> Study:
    def part(name: str) -> Part:
        def run(workspace: Workspace[Width]) -> Section:
            calls.append(name)
            if name == fail:
                raise KeyboardInterrupt
            number = Number(float(torch.rand((), generator=workspace.generator(name))) * workspace.settings.width)
            table = Table(f"{name}-table", "T", (Column("row"), Column("value")), (("a", number),))
            return Section(name, f"{name}?", (f"{name} is {number.value}",), (table,), (Claim("c", "reproduced", "1"),))

        return Part(name, f"{name}?", run)

    return Study("twice", "Twice", (part("one"), part("two")), lambda sections: [s.text[0] for s in sections], {})


def test_finished_parts_are_kept_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_study(study(calls, fail="two"), Workspace(Width(), 0, tmp_path / "a"), "command")
    resumed = run_study(study(calls), Workspace(Width(), 0, tmp_path / "a"), "command")
    assert calls == ["one", "two", "two"]
    whole = run_study(study(calls), Workspace(Width(), 0, tmp_path / "b"), "command")
    assert [section.items for section in resumed.sections] == [section.items for section in whole.sections]
    assert read_record(tmp_path / "a") == resumed
    assert [section.command for section in resumed.sections] == ["command --only one", "command --only two"]
    assert resumed.settings == {"preset": "quick", "width": 3, "seed": 0}


def test_only_runs_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    calls: list[str] = []
    first = run_study(study(calls), Workspace(Width(), 0, tmp_path), "command", only=["two"])
    assert ([section.name for section in first.sections], calls) == (["two"], ["two"])
    second = run_study(study(calls), Workspace(Width(), 0, tmp_path), "command", only=["one"])
    assert ([section.name for section in second.sections], calls) == (["one", "two"], ["two", "one"])
    with pytest.raises(InputError, match="has the parts one, two, found 'three'"):
        run_study(study(calls), Workspace(Width(), 0, tmp_path), "command", only=["three"])


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    run_study(study([]), Workspace(Width(), 0, tmp_path / "run"), "command")
    before = (tmp_path / "run" / "record.json").read_bytes()
    for other in (Workspace(Width(width=4), 0, tmp_path / "run"), Workspace(Width(), 1, tmp_path / "run")):
        with pytest.raises(InputError, match="other settings"):
            run_study(study([]), other, "command")
    assert (tmp_path / "run" / "record.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(InputError, match="something else"):
            run_study(study([]), Workspace(Width(), 0, tmp_path / "mine"), "command", fresh=fresh)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_fresh_begins_again(tmp_path: Path) -> None:
    calls: list[str] = []
    run_study(study(calls), Workspace(Width(), 0, tmp_path), "command")
    record = run_study(study(calls), Workspace(Width(width=5), 0, tmp_path), "command", fresh=True)
    assert calls == ["one", "two"] * 2
    assert record.settings["width"] == 5


def test_a_damaged_part_is_run_again_and_a_damaged_plan_is_named(tmp_path: Path) -> None:
    calls: list[str] = []
    whole = run_study(study(calls), Workspace(Width(), 0, tmp_path), "command")
    file = tmp_path / "parts" / "one.json"
    file.write_text(file.read_text().replace("one is", "one was"))
    again = run_study(study(calls), Workspace(Width(), 0, tmp_path), "command")
    assert calls == ["one", "two", "one"]
    assert [section.text for section in again.sections] == [section.text for section in whole.sections]
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(StorageError, match=r"plan.json is damaged"):
        run_study(study(calls), Workspace(Width(), 0, tmp_path), "command")


def test_networks_are_drawn_once_and_found_again(tmp_path: Path) -> None:
    data = (torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))
    method, options = ob.Ensemble(epochs=1, batch=4), {"chains": 2}
    first = Workspace(Width(), 0, tmp_path).sample("population", mlp(2, 3, 2), data, method, **options)
    again = Workspace(Width(), 0, tmp_path).sample("population", mlp(2, 3, 2), data, method, **options)
    other = Workspace(Width(), 1, tmp_path / "b").sample("population", mlp(2, 3, 2), data, method, **options)
    assert all(torch.equal(first.stacked()[name], again.stacked()[name]) for name in first.names)
    assert not torch.equal(first.stacked()["0.weight"], other.stacked()["0.weight"])


def test_numbers_of_runs_and_of_intervals() -> None:
    from onebasin.evaluation.evaluate import Estimate

    assert mean_number([0.5]) == Number(0.5)
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    number = mean_number(values.tolist(), scale=10)
    assert number.value == pytest.approx(10 * float(values.mean()))
    assert number.error == pytest.approx(10 * float(values.std()) / 50**0.5)
    assert estimate_number(Estimate(0.5, 0.4, 0.6), 100).error == pytest.approx(20 / 3.919928)


def test_the_digits_come_with_inputs_of_another_kind() -> None:
    problem = digits_problem(5)
    assert problem.model(problem.outside).shape == (1950, 10)
    assert problem.model(problem.test[0]).shape == (449, 10)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, run_study(DEMO, Workspace(replace(demo_settings(), **TINY), 0, folder), "onebasin demo")


def test_the_demo_answers_its_questions(shown: tuple[Path, Any]) -> None:
    _, record = shown
    assert [section.name for section in record.sections] == [part.name for part in DEMO.parts]
    tables = {item.name: item for item in record.items if isinstance(item, Table)}
    assert {"methods", "basin", "compact", "symmetries"} <= set(tables)
    proofs = [row[-1].value for row in tables["symmetries"].rows]
    assert len(proofs) == 6 and max(proofs) < 1e-10
    assert [row[0] for row in tables["methods"].rows] == ["HMC", "ensemble", "VI", "SWAG"]
    forms = {row[0]: row for row in tables["compact"].rows}
    assert forms["mean and deviation, aligned and refined"][1].value == pytest.approx(2, abs=0.1)
    assert len(json.dumps(record.summary)) < 3000


def test_the_curves_of_the_demo_begin_at_the_whole_network(shown: tuple[Path, Any]) -> None:
    _, record = shown
    figure = next(item for item in record.items if isinstance(item, Figure) and item.name == "pruning-curves")
    series: tuple[Series, ...] = figure.panels[0].series
    assert {one.y[0] for one in series} == {series[0].y[0]}
    assert all(len(one.y) == len(LEVELS) for one in series)


def test_the_demo_is_the_same_again(shown: tuple[Path, Any], tmp_path: Path) -> None:
    _, record = shown
    again = run_study(
        DEMO,
        Workspace(replace(demo_settings(), **TINY), 0, tmp_path / "b"),
        "onebasin demo",
        only=["symmetries", "methods"],
    )
    for section in again.sections:
        assert section.items == next(one for one in record.sections if one.name == section.name).items


def test_the_verb_prints_a_summary_and_the_path_of_the_report(
    run: Run, shown: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = shown
    monkeypatch.setattr("onebasin_papers.demo.preset_settings", lambda: replace(demo_settings(), **TINY))
    code, out, _ = run("demo", "--output", folder)
    assert code == 0
    assert out.splitlines()[-1] == str(folder / "report.html")
    words = " ".join(out.split())
    assert all(f"- {sentence}" in words for sentence in record.summary)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert DEMO.title in page and "<svg" in page
