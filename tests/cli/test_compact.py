"""``onebasin compact``: a posterior file, a record beside it, and a sentence for every mistake."""

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
from onebasin.errors import InputError, StorageError
from onebasin.examples.small import digits_mlp
from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.posterior import load_posterior
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
