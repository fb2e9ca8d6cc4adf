"""``onebasin evaluate``: the library's numbers on the command line, a record, and a sentence for every mistake."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onebasin.cli.evaluate import evaluate as verb
from onebasin.cli.main import group
from onebasin.data.corruptions import corrupt
from onebasin.data.load import load
from onebasin.errors import InputError, ModelError, SpecError, StorageError
from onebasin.evaluation.evaluate import evaluate
from onebasin.examples.small import digits_mlp
from onebasin.population.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior, load_posterior
from onebasin.state import spec_of, state_of

Run = Callable[..., tuple[int, str, str]]
MODELS = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

def line():
    return nn.Linear(3, 1)

def mean_and_noise():
    return nn.Linear(3, 2)

def other():
    return nn.Linear(3, 3)
"""

EXAMPLES = [line.strip() for line in (verb.help or "").splitlines() if "onebasin evaluate" in line]

pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setitem(group.commands, "evaluate", verb)
    return partial(run, "evaluate")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the examples of the help name, as the current one."""
    (tmp_path / "model.py").write_text(MODELS)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    population(model, generator).save(tmp_path / "networks")
    population(nn.Linear(3, 1), generator).save(tmp_path / "lines")
    population(nn.Linear(3, 2), generator).save(tmp_path / "noisy")
    posterior(model).save(tmp_path / "posterior.safetensors")
    x = torch.randn(30, 3, generator=generator).numpy()
    y = torch.randint(3, (30,), generator=generator).numpy()
    np.savez(tmp_path / "test.npz", x=x, y=y.astype(np.uint8))
    np.savez(tmp_path / "train.npz", x=x)
    np.savez(tmp_path / "values.npz", x=x.astype(np.float64), y=x.sum(1))
    np.savez(tmp_path / "ood.npz", x=5 * x[:20])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def population(model: nn.Module, generator: torch.Generator, members: int = 4) -> Population:
    drawn = {
        name: torch.randn(members, *value.shape, generator=generator) for name, value in model.state_dict().items()
    }
    return Population.from_stacked(drawn)


def posterior(model: nn.Module) -> Posterior:
    state = state_of(model)
    layout = FlatLayout(tuple(state), spec_of(state), {})
    centre = layout.flat(state)
    return Posterior.equal([Gaussian(centre, Diagonal(torch.full_like(centre, 0.3)))], layout, [{}])


def arrays(name: str) -> dict[str, Any]:
    with np.load(name) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def plain(**numbers: Any) -> Any:
    return json.loads(json.dumps(numbers))


# ---------------------------------------------------------------------- numbers


def test_the_record_holds_what_the_library_finds(run: Run, folder: Path) -> None:
    words = "model.py:net networks test.npz --ood ood.npz --reference posterior.safetensors --seed 3"
    options = "--draws 7 --n-resamples 40 --confidence-level 0.9 --bins 5 -o out/record.json"
    code, out, err = run(*words.split(), *options.split())
    assert (code, err) == (0, "")
    record = json.loads((folder / "out" / "record.json").read_text())["record"]["values"]
    data = arrays("test.npz")
    networks = Population.open(folder / "networks")
    found = evaluate(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        networks,
        (data["x"], data["y"].long()),
        ood=arrays("ood.npz")["x"],
        reference=load_posterior(folder / "posterior.safetensors"),
        seed=3,
        draws=7,
        n_resamples=40,
        confidence_level=0.9,
        bins=5,
    )
    assert {key: record[key] for key in found.to_dict()} == plain(**found.to_dict())
    assert record["given"] == {
        "model": "model.py:net", "population": "networks", "data": "test.npz", "outside": "ood.npz",
        "reference": "posterior.safetensors", "statistics": None, "ood_mask": None,
    }  # fmt: skip
    assert out.rstrip() == f"{found}\n\nout/record.json"


@pytest.mark.parametrize("form", ["sampled", "probit"])
def test_a_linearised_posterior_is_evaluated_as_in_python(run: Run, folder: Path, form: Any) -> None:
    words = ("model.py:net", "posterior.safetensors", "test.npz", "--draws", 5, "--n-resamples", 20, "--json")
    code, out, err = run(*words, "--linearised", form)
    assert (code, err) == (0, "")
    data = arrays("test.npz")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    networks = load_posterior(folder / "posterior.safetensors")
    options: dict[str, Any] = {"draws": 5, "n_resamples": 20, "linearised": form}
    found = evaluate(model, networks, (data["x"], data["y"].long()), **options)
    record = json.loads(out)
    assert {key: record[key] for key in found.to_dict()} == plain(**found.to_dict())
    assert record["settings"]["linearised"] == form
    code, _, err = run("model.py:net", "networks", "test.npz", "--linearised", form)
    assert code == InputError.exit_code and "expected a Posterior" in err


def test_json_is_the_record_and_nothing_else(run: Run, folder: Path) -> None:
    words = ("model.py:net", "posterior.safetensors", "test.npz", "--draws", 5, "--n-resamples", 20, "--limit", 12)
    code, out, err = run(*words, "--json", "-o", "record.json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((folder / "record.json").read_text())["record"]["values"]
    assert (json.loads(out)["members"], json.loads(out)["examples"]) == (5, 12)


def test_values_with_given_and_with_learned_noise(run: Run, folder: Path) -> None:
    code, out, _ = run("model.py:line", "lines", "values.npz", "--noise", 0.5, "--n-resamples", 20, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["kind"] == "gaussian"
    weights = Population.open(folder / "lines").stacked()
    data = arrays("values.npz")
    means = torch.einsum("nd,mkd->mn", data["x"].float(), weights["weight"]) + weights["bias"]
    rmse = float((means.double().mean(0) - data["y"]).square().mean().sqrt())
    assert record["inside"]["rmse"]["value"] == pytest.approx(rmse, rel=1e-5)
    code, out, _ = run("model.py:mean_and_noise", "noisy", "values.npz", "--noise", "learned", "--n-resamples", 20)
    assert code == 0
    assert "coverage 95" in out


def test_digits_need_no_file(run: Run, folder: Path) -> None:
    model = digits_mlp()
    Population.from_models([model]).save(folder / "draws")
    code, out, err = run(
        "onebasin.examples:digits_mlp", "draws", "digits", "--limit", 50, "--n-resamples", 20, "--json"
    )
    assert (code, err) == (0, "")
    inputs, targets = (part[:50] for part in load("digits").train)
    right = float((model(inputs).argmax(1) == targets).double().mean())
    assert json.loads(out)["inside"]["accuracy"]["value"] == pytest.approx(right)


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_of_the_help_run(run: Run, folder: Path, line: str) -> None:
    if "digits_mlp" in line:
        Population.from_models([digits_mlp()]).save(folder / "draws")
    else:
        (folder / "networks").rename(folder / "draws")
    code, _, err = run(*shlex.split(line)[2:], "--n-resamples", 20)
    assert (code, err) == (0, "")


def test_the_help_has_examples(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert out.count("onebasin evaluate") >= 3


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ("model.py:net nowhere test.npz", StorageError, "there is no nowhere"),
        ("model.py:net networks nowhere.npz", StorageError, "there is no file nowhere.npz"),
        ("model.py:nets networks test.npz", ModelError, "did you mean model.py:net?"),
        ("model.py:other networks test.npz", SpecError, "networks"),
        ("model.py:other posterior.safetensors test.npz", SpecError, "expected"),
        ("model.py:net networks test.npz --reference lines", SpecError, "lines"),
        ("model.py:net networks ood.npz", InputError, "targets"),
        ("model.py:net networks test.npz --ood model.py", InputError, "model.py"),
        ("model.py:line lines values.npz", InputError, "noise"),
        ("model.py:line lines values.npz --noise loud", InputError, "a number or learned"),
        ("model.py:line lines values.npz --noise 1 --ood ood.npz", InputError, "gaussian"),
        ("model.py:line lines test.npz", InputError, "at least 2 classes"),
        ("model.py:net networks test.npz -o test.npz", InputError, "test.npz exists"),
    ],
)
def test_mistakes_get_a_sentence(run: Run, folder: Path, words: str, kind: Any, text: str) -> None:
    code, out, err = run(*words.split())
    assert (code, out) == (kind.exit_code, "")
    assert text in err
    assert err.count("\n") == 1


def test_a_record_is_replaced_only_by_force(run: Run, folder: Path) -> None:
    words = ("model.py:net", "networks", "test.npz", "--n-resamples", 20, "-o", "record.json")
    assert run(*words)[0] == 0
    before = (folder / "record.json").read_text()
    assert run(*words, "--seed", 1)[0] == InputError.exit_code
    assert (folder / "record.json").read_text() == before
    assert run(*words, "--seed", 1, "--force")[0] == 0
    assert json.loads((folder / "record.json").read_text())["record"]["values"]["settings"]["seed"] == 1


# ---------------------------------------------------------------------- shift


def test_shifts_by_word_are_those_of_the_library(run: Run, folder: Path) -> None:
    x = np.random.default_rng(0).random((30, 1, 3), dtype=np.float32)
    np.savez("images.npz", x=x[:, 0], y=np.arange(30) % 3)
    words = ("model.py:net", "networks", "images.npz", "--n-resamples", 10, "--image-size", "1x3")
    code, out, err = run(*words, "--shift", "contrast:2", "--shift", "brightness", "-o", "record.json")
    assert (code, err) == (0, "")
    assert "under shift" in out
    found = json.loads((folder / "record.json").read_text())["record"]["values"]
    numbers = found["shifted"]["numbers"]
    assert {name: list(levels) for name, levels in numbers.items()} == {"contrast": ["2"], "brightness": list("12345")}
    data = torch.from_numpy(x[:, 0]), torch.arange(30) % 3
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    shifted = {"contrast": {2: corrupt(data[0], "contrast", 2, size=(1, 3))}}
    own = evaluate(model, Population.open("networks"), data, shifted=shifted, n_resamples=10).shifted
    assert own is not None
    assert numbers["contrast"]["2"]["nll"]["value"] == pytest.approx(own.numbers["contrast"][2]["nll"].value)


def test_mistakes_about_shifts_are_sentences(run: Run, folder: Path) -> None:
    for words, remedy in {
        "--image-size 1x3": "give --shift all",
        "--shift fog --image-size 1x3": "give 'gaussian_noise'",
        "--shift contrast:9": "give contrast:3",
        "--shift all --image-size three": "as 8x8",
        "--shift all --image-size 8x8": "divide the 3 numbers of an example, found 8x8",
        "--shift all --image-size 0x3": "found 0x3: give the height and the width",
        "--shift all --image-size 1x3 --pixel-range 0": "as 0,1",
        "--shift all --image-size 1x3": "give range=",
    }.items():
        code, _, err = run("model.py:net", "networks", "test.npz", *words.split())
        assert code == InputError.exit_code, words
        assert remedy in err, words
    words = "--shift contrast:1 --image-size 1x3 --pixel-range -9,9 --n-resamples 10"
    assert run("model.py:net", "networks", "test.npz", *words.split())[0] == 0
