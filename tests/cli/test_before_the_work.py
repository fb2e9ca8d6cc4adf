"""Arguments are checked before the work, results are not replaced without --force, and --force takes only its own."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onebasin import (
    Ensemble,
    Population,
    barrier,
    barrier_report,
    diagnose,
    discover,
    fit,
    pruning_curve,
    refine,
    sample,
)
from onebasin.cli.options import check_writable
from onebasin.reporting import read_record

Run = Callable[..., tuple[int, str, str]]
MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

def example_input():
    return torch.randn(2, 3)
"""
NET = ("--model", "model.py:net")

pytestmark = pytest.mark.usefixtures("restored_imports")


def networks(count: int) -> Population:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Population.from_models(
            [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(count)]
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    networks(3).save("population")
    fit(networks(3)).save("q.safetensors")
    inputs = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    labels = (inputs.sum(1) > 0).astype(np.int64)
    np.savez("data.npz", x=inputs, y=labels)
    np.savez("labels.npz", x=inputs, y=np.r_[labels[:-1], 7])  # only the last one is wrong
    np.savez("wide.npz", x=np.zeros((5, 4), np.float32), y=np.zeros(5, np.int64))
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every long piece of work fails the test."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    for name in (
        "networks.discover",
        "work.align.move",
        "work.merge.align",
        "work.compact.align",
        "work.evaluate.assess",
        "work.prune.pruning_curve",
        "work.sample.draw",
        "work.compare.barrier_report",
        "work.compare.discrepancy",
    ):
        monkeypatch.setattr(f"onebasin.cli.{name}", never)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("evaluate model.py:net population labels.npz", "class numbers from 0 to 1, found 0 to 7"),
        ("evaluate model.py:net population wide.npz", "4"),
        ("evaluate model.py:net population data.npz --ood wide.npz", "4"),
        ("evaluate model.py:net population data.npz -o file/x.json", "choose another place"),
        ("compare population#0 population#1 --model model.py:net --data labels.npz", "found 0 to 7"),
        ("compare population#0 population#1 --model model.py:net --data data.npz --test labels.npz", "found 0 to 7"),
        ("compare population#0 population#1 --model model.py:net --data data.npz --points 4", "odd number"),
        ("compare population population --model model.py:net --data wide.npz", "4"),
        ("compare population#0 population#1 --model model.py:net -o data.npz", "give --force to replace it"),
        ("compact population -o file/q.safetensors --model model.py:net", "choose another place"),
        ("compact population -o new.safetensors --model model.py:net --data wide.npz", "4"),
        ("compact population -o new.safetensors --model model.py:net --test absent.npz", "absent.npz"),
        ("compact population -o new.safetensors --model model.py:net --components some", "a number or chains"),
        ("compact population -o new.safetensors --model model.py:net --draws-per-step 4", "give --refine too"),
        ("prune model.py:net q.safetensors --data labels.npz", "found 0 to 7"),
        ("prune model.py:net q.safetensors --statistics wide.npz", "4"),
        ("prune model.py:net q.safetensors -o file/p.safetensors", "choose another place"),
        ("merge population -o file/m.safetensors --model model.py:net", "choose another place"),
        ("merge population -o m.safetensors --model model.py:net --repair wide.npz", "4"),
        ("align population -o file/aligned --model model.py:net", "choose another place"),
        ("align population -o new --model model.py:net --by activations --data wide.npz", "4"),
        ("sample model.py:net labels.npz -o new --method ensemble", "found 0 to 7"),
        ("sample model.py:net data.npz -o file/new --method ensemble", "choose another place"),
        ("import population -o file/new", "choose another place"),
        ("check population --save q.safetensors", "give --force"),
        ("discover model.py:net -o file/x.json", "choose another place"),
    ],
)
def test_mistakes_are_found_before_the_work(run: Run, folder: Path, words: str, sentence: str) -> None:
    before = sorted(folder.rglob("*"))
    code, out, err = run(*words.split())
    assert code not in (0, 1, 2), err
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, who may write everywhere
    with pytest.raises(Exception, match="cannot be written by this user: choose another --output"):
        check_writable(tmp_path / "x.json")


def test_align_begins_anew_by_force(run: Run, folder: Path) -> None:
    words = ("align", "population", "-o", "aligned", *NET)
    assert run(*words)[0] == 0
    stamp = (folder / "aligned" / "population.json").stat().st_mtime_ns
    assert run(*words)[0] == 0, "the same call returns what is there"
    assert (folder / "aligned" / "population.json").stat().st_mtime_ns == stamp
    other = ("align", "population", "-o", "aligned", *NET, "--companion", "std=population")
    (folder / "aligned-std").mkdir()
    (folder / "aligned-std" / "thesis.tex").write_text("years of work")
    code, _, err = run(*other, "--force")
    assert (code, "which --force does not remove" in err) == (10, True)
    assert (folder / "aligned-std" / "thesis.tex").exists()
    (folder / "aligned-std" / "thesis.tex").unlink()
    assert run(*words, "--force")[0] == 0
    assert (folder / "aligned" / "population.json").stat().st_mtime_ns != stamp
    code, _, err = run("align", "aligned", "-o", "aligned", *NET, "--force")
    assert (code, "is read from" in err) == (10, True)
    assert len(Population.open("aligned")) == 3


def test_sample_begins_anew_by_force_and_removes_only_runs(run: Run, folder: Path) -> None:
    words = ("sample", "model.py:net", "data.npz", "--method", "ensemble", "--batch", 10)
    assert run(*words, "--epochs", 1, "-o", "run")[0] == 0
    code, _, err = run(*words, "--epochs", 2, "-o", "run")
    assert (code, "(--force on the command line)" in err) == (10, True)
    assert run(*words, "--epochs", 2, "-o", "run", "--force")[0] == 0
    assert Population.open("run").provenance["options"]["epochs"] == 2
    code, _, err = run(*words, "-o", "population", "--force")
    assert (code, "found something else" in err) == (10, True)
    code, _, err = run("align", "population", "-o", "run", *NET, "--force")
    assert (code, "found something else" in err) == (10, True), "draws took hours: align does not remove them"
    assert len(Population.open("run")) == 1


def test_import_begins_anew_by_force(run: Run, folder: Path) -> None:
    networks(2).save("other")
    assert run("import", "population", "-o", "goal")[0] == 0
    assert run("import", "other", "-o", "goal")[0] == 10
    assert run("import", "other", "-o", "goal", "--force")[0] == 0
    assert len(Population.open("goal")) == 2
    assert run("check", "population", "--save", "goal", "--force")[0] == 0
    assert len(Population.open("goal")) == 3


def test_compare_takes_some_examples_and_says_so(run: Run, folder: Path) -> None:
    words = ("compare", "population#0", "population#1", *NET, "--data", "data.npz", "--points", 3)
    code, out, err = run(*words, "--examples", 12, "-o", "record.json")
    assert (code, err) == (0, "")
    sentence = "--data: 12 of 30 examples were taken, at random: --examples 0 takes all"
    assert sentence in out
    record = json.loads((folder / "record.json").read_text())["record"]["values"]
    assert record["barrier"]["notes"] == [sentence]
    few, every = (json.loads(run(*words, "--examples", number, "--json")[1])["barrier"] for number in (12, 0))
    assert few == record["barrier"]
    assert every["notes"] == []
    assert every["rows"][0]["midpoint_loss"] != few["rows"][0]["midpoint_loss"]


def test_refine_takes_some_examples_and_draws_per_step(run: Run, folder: Path) -> None:
    code, out, err = run(
        *("compact", "population", "-o", "new.safetensors", *NET, "--data", "data.npz", "--refine", "--steps", 2),
        *("--draws-per-step", 4, "--batch", 5, "--draws", 4, "--examples", 10, "--json"),
    )
    assert code == 0, err
    record = json.loads(out)
    refined = record["provenance"]["refined"]
    assert (refined["draws"], refined["batch"], refined["steps"]) == (4, 5, 2)
    assert record["notes"][0] == "--data: 10 of 30 examples were taken, at random: --examples 0 takes all"


def test_every_verb_leaves_a_record_with_its_command(run: Run, folder: Path) -> None:
    """One format for all: `read_record` opens it, numbers are under values, and the command is what was typed."""
    for words, place in {
        "align population -o aligned --model model.py:net": "aligned",
        "sample model.py:net data.npz -o run --method ensemble --epochs 1": "run",
        "merge population -o m.safetensors --model model.py:net": "m.json",
        "compact population -o p.safetensors --model model.py:net": "p.json",
        "prune model.py:net q.safetensors -o pruned.safetensors": "pruned.json",
        "evaluate model.py:net population data.npz --n-resamples 5 -o evaluation.json": "evaluation.json",
        "calibrate model.py:net population data.npz --n-resamples 5 -o calibrated": "calibrated",
        "compare population#0 population#1 --model model.py:net -o comparison.json": "comparison.json",
    }.items():
        code, _, err = run(*words.split())
        assert code == 0, err
        record = read_record(place)
        assert sorted(shlex.split(record.command)) == sorted(f"onebasin {words}".replace("-o", "--output").split()), (
            "the same words, options in the order of --help"
        )
        assert record.values and record.sections[0].text
    assert read_record("aligned").values["members"] == 3
    assert read_record("m.json").values["overlap"]["after"] >= read_record("m.json").values["overlap"]["before"]
    code, out, err = run("report", "m.json", "comparison.json", "evaluation.json", "-o", "page", "--no-figures")
    assert (code, err) == (0, "")
    page = Path(out.strip()).read_text()
    assert "Merging of 3 networks" in page and "Comparison of population#0 with population#1" in page


def test_long_work_tells_how_much_there_is() -> None:
    """Every function counts to its own total, and what is found does not depend on being watched."""
    population, generator = networks(4), torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    inputs = torch.randn(12, 3, generator=generator)
    data = (inputs, (inputs.sum(1) > 0).long())
    symmetry = discover(model, inputs[:2])
    a, b = population.member(0), population.member(1)
    seen: list[tuple[int, int, str]] = []

    def show(done: int, total: int, doing: str) -> None:
        assert 0 <= done <= total and doing
        seen.append((done, total, doing))

    watched = barrier(model, a, b, data, points=3, symmetry=symmetry, progress=show)
    assert seen[-1] == (6, 6, "aligned")
    assert torch.equal(watched.loss, barrier(model, a, b, data, points=3, symmetry=symmetry).loss)
    seen.clear()
    barrier_report(model, a, b, symmetry, data, points=3, progress=show)
    assert [one for one in seen if one[0] == 0] == [(0, 12, "as given")]
    assert seen[-1] == (12, 12, "variance and temperature")
    seen.clear()
    posterior = fit(population)
    pruning_curve(model, posterior, data, by=["snr", "magnitude"], levels=[0.5, 0.2], progress=show)
    assert seen == [(0, 4, "snr"), (1, 4, "snr"), (2, 4, "magnitude"), (3, 4, "magnitude")]
    seen.clear()
    diagnose(model, population, inputs, progress=show)
    assert seen == [(number, 5, name) for number, name in enumerate(["functions", *population.names])]
    seen.clear()
    refine(model, posterior, population, inputs, steps=2, draws=2, batch=4, progress=show)
    stages = list(dict.fromkeys(doing.partition(" 0.")[0] for _, _, doing in seen))
    assert stages[0] == "asking the networks"
    assert stages[-1] == "comparing on uniform noise"
    assert [(done, total) for done, total, doing in seen if doing.startswith("distance")] == [(1, 2), (2, 2)]
    seen.clear()
    sample(model, data, Ensemble(epochs=1, batch=6), progress=show)
    assert seen[0][:2] == (0, seen[-1][1]), "the total is known before the first step"
    assert seen[-1][0] == seen[-1][1]
