"""``onebasin calibrate``: calibrated networks on disk, the library's numbers, and a sentence for every mistake."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.cli.calibrate import calibrate as verb
from onebasin.reporting import read_record

Run = Callable[..., tuple[int, str, str]]
MODELS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

class Bent(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()

def bent():
    return Bent(3, 3)
"""
EXAMPLES = [line.strip() for line in (verb.help or "").splitlines() if "onebasin calibrate" in line]

pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "calibrate")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODELS)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    base = {name: 2 * torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}
    networks = ob.Population.from_stacked({
        name: value + 0.3 * torch.randn(4, *value.shape, generator=generator) for name, value in base.items()
    })  # fmt: skip
    networks.save(tmp_path / "draws")
    ob.fit(networks).save(tmp_path / "posterior.safetensors")
    bent = {"weight": torch.randn(2, 3, 3, generator=generator), "bias": torch.zeros(2, 3)}
    ob.Population.from_stacked(bent).save(tmp_path / "bent")
    x = torch.randn(60, 3, generator=generator)
    p = ob.predict(model, networks, x, average=True) ** 0.5
    np.savez(tmp_path / "test.npz", x=x.numpy(), y=torch.multinomial(p, 1, generator=generator)[:, 0].numpy())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_run(example: str, run: Run, folder: Path) -> None:
    code, _, err = run(*example.split()[2:], "--n-resamples", 10)
    assert (code, err) == (0, "")


def test_what_is_written_is_what_the_library_finds(run: Run, folder: Path) -> None:
    words = (
        "model.py:net draws test.npz --method vector --ridge 0.1 --folds 3 --n-resamples 10 --seed 2 -o out/calibrated"
    )
    code, out, err = run(*words.split())
    assert (code, err) == (0, "")
    with np.load("test.npz") as file:
        data = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    found = ob.calibrate(model, ob.Population.open("draws"), data, "vector", ridge=0.1, folds=3, n_resamples=10, seed=2)
    assert isinstance(found.networks, ob.Population)
    written = ob.Population.open("out/calibrated")
    assert all(torch.equal(written.tensor(name), found.networks.tensor(name)) for name in written.names)
    values = read_record("out/calibrated").values
    assert values["after"] == json.loads(json.dumps(found.to_dict()["after"]))
    assert values["folded"] is True
    assert out.rstrip() == f"{found}\n\nout/calibrated"
    assert run(*words.split())[0] != 0
    assert run(*words.split(), "--force")[0] == 0


def test_a_posterior_becomes_a_posterior(run: Run, folder: Path) -> None:
    code, _, err = run("model.py:net", "posterior.safetensors", "test.npz", "--draws", 5, "-o", "new.safetensors",
                       "--n-resamples", 10)  # fmt: skip
    assert (code, err) == (0, "")
    assert ob.load_posterior("new.safetensors").provenance["calibrated"] is True
    assert read_record("new.json").values["method"] == "temperature"


def test_json_and_what_cannot_be_folded(run: Run, folder: Path) -> None:
    code, out, _ = run("model.py:bent", "bent", "test.npz", "--n-resamples", 10, "--json")
    assert code == 0
    assert json.loads(out)["folded"] is False
    code, _, err = run("model.py:bent", "bent", "test.npz", "--n-resamples", 10, "-o", "nothing")
    assert code != 0
    assert "leave --output out to see the scores" in err
    assert not Path("nothing").exists()


def test_mistakes_are_sentences(run: Run, folder: Path) -> None:
    cases = {
        "model.py:net draws test.npz --method isotonic -o there": "--method temperature --per population",
        "model.py:net draws test.npz --draws 5": "leave it out",
        "model.py:net draws test.npz -o there.safetensors": "give the name of a folder",
        "model.py:net posterior.safetensors test.npz -o there": "end it so",
        "model.py:net posterior.safetensors test.npz --per member": "leave per out",
        "model.py:net draws test.npz -o draws --force": "choose another --output",
    }
    for words, remedy in cases.items():
        code, _, err = run(*words.split())
        assert code == 2 or err.startswith("error: "), words
        assert remedy in err, words
    assert len(ob.Population.open("draws")) == 4


def test_statistics_of_draws_are_measured(run: Run, folder: Path) -> None:
    (folder / "normed.py").write_text(
        "from torch import nn\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))\n"
    )
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    x, y = (torch.from_numpy(value) for value in np.load("test.npz").values())
    networks = ob.sample(model, (x, y), ob.Ensemble(epochs=1), chains=3)
    posterior = ob.fit(networks, model=model)
    posterior.save(folder / "normed.safetensors")
    given = ("normed.py:net", "normed.safetensors", "test.npz", "--draws", "5", "--n-resamples", "20", "--json")
    code, out, err = run(*given, "--statistics", "test.npz")
    found = json.loads(out)
    assert code == 0 and not err and found["given"]["statistics"] == "test.npz"
    expected = ob.calibrate(model, posterior, (x, y), draws=5, n_resamples=20, statistics=x)
    assert found["after"] == json.loads(json.dumps(expected.to_dict()))["after"]
    _, out, err = run(*given)
    assert "--statistics" in err and json.loads(out)["after"] != found["after"]
