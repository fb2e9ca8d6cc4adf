"""Every example runs to its end, in less time than it promises, and prints what the tour shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onebasin.cli.main import main
from tests.page_blocks import ROOT, appears, blocks

USERS = ("researcher", "engineer", "student")
STORIES = ("one_basin", "compact_posterior", "two_populations")
MODELS = {"ani_1x": "network", "digits_cnn": "digits_cnn", "own_problem": "cnn"}
QUOTED = {
    block.note.removeprefix("output of "): block.code
    for block in blocks(ROOT / "docs" / "tour.md")
    if block.note.startswith("output of examples/")
}


def run_example(name: str, folder: Path) -> str:
    """What an example prints when it is run as a script somewhere else; warnings are errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_examples_are_known_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*STORIES, *USERS, *MODELS}
    assert set(QUOTED) == {f"examples/{name}.py" for name in STORIES}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_runs_and_prints_what_the_tour_shows(name: str, tmp_path: Path) -> None:
    shown, printed = QUOTED[f"examples/{name}.py"], run_example(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert appears(shown, printed), f"the tour shows\n{shown}\nprinted was\n{printed}"
    check = {"one_basin": one_basin_holds, "compact_posterior": compact_holds, "two_populations": populations_hold}[
        name
    ]
    check(printed)
    check(shown)


def one_basin_holds(text: str) -> None:
    raw, aligned = map(float, re.findall(r"barrier.* ([\d.]+) as trained, ([\d.]+) aligned", text)[0])
    before, after = map(float, re.findall(r"^mean of .*: ([\d.]+) of the points right", text, re.MULTILINE))
    assert aligned < raw / 10
    assert after > before + 0.2


def compact_holds(text: str) -> None:
    far = {
        name.strip(): float(number) for name, number in re.findall(r"^  (.{20}) stored.*variation ([\d.]+)", text, re.M)
    }
    assert far["refined"] < far["2 of the networks"] < far["fit"]


def populations_hold(text: str) -> None:
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()[2:]}
    raw, without, _, p, functions, diversity = map(float, rows["12 other trainings"])
    assert abs(raw) < 0.05 and abs(without) < 0.05 and abs(functions) < 0.05 and p > 1e-3
    one_raw, one_without, one_runs, _, one_functions, one_diversity = map(float, rows["SWAG, 1 run of 12"])
    assert one_raw > 4 * one_without > 0 and one_functions > 0.1
    assert 0.25 * one_without < one_runs
    assert one_diversity < diversity


@pytest.mark.parametrize("name", USERS)
def test_a_user_gets_a_page_and_a_picture(name: str, tmp_path: Path) -> None:
    printed = run_example(name, tmp_path)
    *_, last = printed.splitlines()
    if name == "engineer":
        _, mean, aligned = map(float, re.findall(r"cnn: ([\d.]+) of the digits wrong", printed))
        assert aligned < mean / 2
    page = tmp_path / last
    assert page.name == "report.html"
    assert page.read_text(encoding="utf-8").count("<figure") >= 3
    assert [picture.stat().st_size > 5_000 for picture in page.parent.parent.glob("*.png")] == [True]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_can_be_discovered(name: str, capsys: pytest.CaptureFixture[str], restored_imports: None) -> None:
    assert main(["discover", f"{ROOT}/examples/{name}.py:{MODELS[name]}", "--verify"]) == 0
    assert "the function is unchanged" in capsys.readouterr().out
