"""``onebasin compact``: a posterior file, a record beside it, and a sentence for every mistake."""

import itertools
import json
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onebasin.alignment.align import align
from onebasin.cli.compact import compact as verb
from onebasin.cli.work.compact import Estimate
from onebasin.errors import InputError, StorageError
from onebasin.examples.small import digits_mlp
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.posterior import load_posterior
from onebasin.posterior.refine import refine
from onebasin.reporting import Number, Record, Table, read_record
from onebasin.state import state_of
from onebasin.symmetry.discover import discover

Run = Callable[..., tuple[int, str, str]]
MODELS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))

def line():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

def example_input():
    return torch.zeros(2, 3)
"""
EXAMPLES = [line.strip() for line in (verb.help or "").splitlines() if "onebasin compact" in line]

pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "compact")


def population(model: nn.Module, members: int = 12) -> Population:
    """One network in different disguises, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.zeros(2, next(model.parameters()).shape[1])
    symmetry = discover(model, inputs)
    states = []
    for _ in range(members):
        noisy = {name: x + 0.05 * torch.randn(x.shape, generator=generator) for name, x in state_of(model).items()}
        states.append(symmetry.apply(symmetry.random(generator), noisy))
    return Population.from_states(states, chain=torch.arange(members) % 2)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the examples of the help name."""
    tmp_path = tmp_path_factory.mktemp("stock")
    (tmp_path / "model.py").write_text(MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))
        line = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        population(digits_mlp(), 4).save(tmp_path / "digits")
    symmetry = discover(net, torch.zeros(2, 3))
    (tmp_path / "symmetry.json").write_text(symmetry.to_json())
    population(net).save(tmp_path / "draws")
    population(line).save(tmp_path / "lines")
    align(population(net, 30), symmetry).population.save(tmp_path / "aligned")
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).numpy()
    np.savez(tmp_path / "train.npz", x=x[:40])
    np.savez(tmp_path / "test.npz", x=x[40:])
    return tmp_path


@pytest.fixture
def folder(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current one."""
    shutil.copytree(stock, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_run(run: Run, folder: Path, example: str) -> None:
    words = shlex.split(example)[2:]
    if "digits_mlp" in example:
        words[words.index("draws/")] = "digits/"
    if "--refine" in words:
        words += ["--steps", "20"]
    code, out, err = run(*words)
    assert code == 0, err
    assert "q.safetensors" in out and (folder / "q.json").is_file()
    assert load_posterior(folder / "q.safetensors").storage >= 2


def test_it_is_the_fit_of_the_aligned_networks(run: Run, folder: Path) -> None:
    assert run("draws", "-o", "q.safetensors", "--model", "model.py:net")[0] == 0
    assert run("draws", "-o", "raw.safetensors", "--model", "model.py:net", "--raw")[0] == 0
    draws = Population.open("draws")
    symmetry = discover(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)), torch.zeros(2, 3))
    for name, expected in (("q", fit(align(draws, symmetry).population)), ("raw", fit(draws))):
        found = load_posterior(folder / f"{name}.safetensors")
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.std, expected.std)


def test_refinement_is_told_and_measured(run: Run, folder: Path) -> None:
    options = ("--model", "model.py:net", "--data", "train.npz", "--test", "test.npz", "--prior", "1")
    code, out, _ = run("draws", "-o", "q.safetensors", *options, "--refine", "--steps", "200", "--json")
    told = json.loads(out)
    assert code == 0 and told == json.loads((folder / "q.json").read_text())["record"]["values"]
    rows = told["predictions"]
    assert rows["posterior"]["total_variation"] < rows["before"]["total_variation"]
    assert set(rows) == {"before", "posterior", "2 of the networks"}
    assert told["storage"] == 2 and told["networks"] == 12 and told["aligned"] is True
    assert told["provenance"]["refined"]["steps"] == 200 and 0 <= told["prior"]["total"] <= 1
    code, out, _ = run("draws", "-o", "q.safetensors", *options, "--fit-scales", "--steps", "5", "--force")
    assert code == 0 and "no longer theirs" in out and "still at the prior" in out


def test_values(run: Run, folder: Path) -> None:
    options = ("--model", "model.py:line", "--values", "--data", "train.npz", "--test", "test.npz")
    code, out, err = run("lines", "-o", "q.safetensors", *options, "--refine", "--steps", "30", "--json")
    assert code == 0, err
    assert json.loads(out)["predictions"]["posterior"]["rms_difference"] >= 0


@pytest.mark.parametrize("components", ["2", "chains"])
def test_mixtures(run: Run, folder: Path, components: str) -> None:
    options = ("--symmetry", "symmetry.json", "--family", "mixture", "--components", components)
    assert run("draws", "-o", "q.safetensors", *options)[0] == 0
    assert len(load_posterior(folder / "q.safetensors").components) == 2


@pytest.mark.parametrize(
    ("words", "said", "kind"),
    [
        (("draws", "-o", "q.bin", "--symmetry", "symmetry.json"), ".safetensors", InputError),
        (("nowhere", "-o", "q.safetensors", "--symmetry", "symmetry.json"), "nowhere", StorageError),
        (("draws", "-o", "q.safetensors"), "--model", InputError),
        (("draws", "-o", "q.safetensors", "--model", "model.py:net", "--refine"), "--data", InputError),
        (("draws", "-o", "q.safetensors", "--model", "model.py:net", "--steps", "3"), "--refine", InputError),
        (("draws", "-o", "q.safetensors", "--symmetry", "symmetry.json", "--test", "test.npz"), "--model", InputError),
        (("draws", "-o", "q.safetensors", "--symmetry", "symmetry.json", "--family", "low-rank"), "rank", InputError),
        (
            ("draws", "-o", "q.safetensors", "--symmetry", "symmetry.json", "--family", "mixture", "--components", "x"),
            "chains",
            InputError,
        ),
        (("draws", "-o", "here.safetensors", "--symmetry", "symmetry.json"), "--force", InputError),
    ],
)
def test_mistakes_become_sentences(
    run: Run, folder: Path, words: tuple[str, ...], said: str, kind: type[InputError]
) -> None:
    (folder / "here.safetensors").write_text("something")
    code, _, err = run(*words)
    assert code == kind.exit_code and said in err and err.count("\n") == 1
    assert not (folder / "q.safetensors").exists()


def _table(record: Record, name: str) -> Table:
    return next(item for item in record.items if isinstance(item, Table) and item.name == name)


@pytest.mark.parametrize("test", [(), ("--test", "test.npz")])
def test_page_and_console_show_the_same_comparison(run: Run, folder: Path, test: tuple[str, ...]) -> None:
    options = ("--model", "model.py:net", "--data", "train.npz", *test, "--draws", "20", "--refine", "--steps", "3")
    code, out, _ = run("draws", "-o", "q.safetensors", *options, "--json")
    values = json.loads(out)
    refined = values["provenance"]["refined"]
    assert code == 0 and values["fidelity_draws"] == refined["fidelity_draws"] == 20
    assert (values["fidelity"] == refined["fidelity"]) is not bool(test)
    assert values["fidelity_seed"] == (0 if test else refined["fidelity_seed"])
    row = values["predictions"]["posterior"]
    assert row == {name: values["fidelity"]["inputs"][name] for name in row}  # one choice of draws for both tables
    shown = _table(read_record(folder / "q.json"), "fidelity" if test else "refined-fidelity")
    seed = values["fidelity_seed"]
    assert f"20 draws of the posterior, with seed {seed}" in shown.note
    for kind, *cells in shown.rows:
        numbers = [cell.value for cell in cells if isinstance(cell, Number)]
        own = values["fidelity"][kind]
        assert numbers[:3] == [own[name] for name in ("examples", "agreement", "total_variation")]
    code, out, _ = run("draws", "-o", "q.safetensors", *options, "--force")
    assert code == 0 and f"20 draws, seed {seed}" in out
    assert all(f"{own[name]:.4f}" in out for own in values["fidelity"].values() for name in ("agreement", "single"))


def test_a_long_descent_is_estimated_once_with_quicker_settings(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"move": "refine", "steps": None, "draws_per_step": 32, "batch": None}
    for pace, lines in ((0.5, 1), (0.03, 0)):  # 25 minutes, and 90 seconds
        ticks = (pace * tick for tick in itertools.count())
        news: list[tuple[int, int, str]] = []
        show = Estimate(lambda *one, news=news: news.append(one), options, refine, ticks.__next__)
        show(1, 4, "asking the networks")
        for step in range(1, 30):
            show(step, 3000, "distance 0.1")
        err = capsys.readouterr().err
        assert len(news) == 30 and err.count("\n") == lines
        if lines:  # 1,500 s x 16/32 x 100/250 = 300 s, x 1000/3000 = 100 s
            assert "about 25 min: 3,000 steps of 32 networks on 250 examples" in err
            assert "--draws-per-step 16 --batch 100 --steps 1000 would take about 2 min" in err
