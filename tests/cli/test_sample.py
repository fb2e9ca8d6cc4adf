"""``onebasin sample``: every method gives draws that predict, interrupts lose nothing, mistakes get a sentence."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onebasin import SGHMC, SWAG, Ensemble, Mixup, Population, RandomFlip
from onebasin.cli.work import sample as sample_verb
from onebasin.cli.work.sample import KEYWORDS, diagnostics_table
from onebasin.data.load import load
from onebasin.errors import DiskError, InputError, ModelError, StorageError
from onebasin.examples.small import digits_mlp
from onebasin.functional.population_pass import predictions
from onebasin.inference.methods import METHODS
from onebasin.parallel import Progress

Run = Callable[..., tuple[int, str, str]]
DIGITS = ("onebasin.examples:digits_mlp", "digits", "--limit", 200, "--epochs", 2)
TINY = {
    "hmc": ("--set", "warmup=4", "--set", "leapfrog=3"),
    "sghmc": ("--set", "warmup=1"),
    "swag": ("--set", "collect=3", "--set", "rank=2"),
}
QUICK = (*DIGITS, "--method", "hmc", *TINY["hmc"])
MODELS = """
from torch import nn

class Line(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

def mean_and_noise():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, left, right):
        return self.layer(left * right)
"""


pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "sample")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def same(a: Population, b: Population) -> bool:
    return a.names == b.names and all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names)


# ---------------------------------------------------------------------- methods


def number_of(method: str) -> str:
    """The option that says how many networks a training gives."""
    return "members" if hasattr(METHODS[method](), "members") else "draws"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mcbatchnorm"])
def test_every_method_gives_draws_that_predict(run: Run, tmp_path: Path, method: str) -> None:
    number = f"--{number_of(method)}"
    code, out, err = run(
        *DIGITS, "--method", method, number, 3, "--chains", 2, *TINY.get(method, ()), "-o", tmp_path / "draws"
    )
    assert (code, err) == (0, "")
    assert f"6 draws by {method}, 2 chains, in {tmp_path / 'draws'}" in out
    population = Population.open(tmp_path / "draws")
    inputs, targets = (part[:200] for part in load("digits").train)
    outputs = predictions(digits_mlp(), population, inputs)
    assert outputs.shape == (6, 200, 10)
    # The last line, computed in another way: probabilities are averaged, then judged.
    pooled = outputs.double().softmax(2).mean(0)
    right = float((pooled.argmax(1) == targets).double().mean())
    density = float(pooled[torch.arange(200), targets].log().mean())
    assert f"accuracy {100 * right:.1f} %, mean log density {density:.4g}, on 200 training examples" in out


def test_batch_norm_draws_need_a_model_with_batch_norm(run: Run, tmp_path: Path) -> None:
    code, _, err = run(*DIGITS, "--method", "mcbatchnorm", "--epochs", 1, "-o", tmp_path / "none")
    assert code == InputError.exit_code and "use another method, such as Dropout" in err
    layers = "nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)"
    (tmp_path / "model.py").write_text(f"from torch import nn\n\ndef net():\n    return nn.Sequential({layers})\n")
    words = ("--method", "mcbatchnorm", "--draws", 2, "--epochs", 1, "--set", "mode=update", "-o", tmp_path / "draws")
    code, out, err = run(f"{tmp_path / 'model.py'}:net", *DIGITS[1:], *words)
    assert (code, err) == (0, "")
    means = Population.open(tmp_path / "draws").tensor("1.running_mean")
    assert "2 draws by mcbatchnorm, 1 chain" in out and not torch.equal(means[0], means[1])


def test_diagnostics_are_those_of_the_run(run: Run, tmp_path: Path) -> None:
    _, out, _ = run(*QUICK, "--draws", 6, "-o", tmp_path / "draws")
    for label in ("acceptance probability", "step size", "divergences per chain", "exp(-dH)", "E-BFMI"):
        assert label in out
    assert "lowest" not in out, "one chain has no spread"


def test_table_of_several_chains() -> None:
    rows = diagnostics_table({"divergences": [0, 4], "stuck": [], "words": "none"}).splitlines()
    assert rows[2].split() == ["divergences", "per", "chain", "2", "0", "4"]
    assert len(rows) == 3
    assert diagnostics_table({"stuck": []}) == ""


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_explained(run: Run, method: str) -> None:
    code, out, _ = run("--options", method)
    assert code == 0
    own = {field.name for field in fields(METHODS[method])}
    shown = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "}
    assert {*own, *KEYWORDS} - shown == {"log_density"}
    assert shown <= {*own, *KEYWORDS}
    assert f"Default: {getattr(METHODS[method](), number_of(method))}." in " ".join(out.split())


def test_the_list_shows_every_method_with_every_option_and_default(run: Run) -> None:
    code, out, _ = run("--list")
    assert code == 0
    sections = out.split("\n\n")
    titles = [section.partition(":")[0] for section in sections]
    assert [title for title in titles if title in METHODS] == [*METHODS]
    for name, method in METHODS.items():
        own = sections[titles.index(name) + 2]
        text = " ".join(own.split())
        for field in fields(method):
            if field.name in method.__annotations__:
                value = field.default
                word = str(value).lower() if isinstance(value, bool | None) else value
                word = f"{word:g}" if isinstance(word, float) else word
                after = text.partition(f"{field.name} ")[2]
                assert f"Default: {word}." in after, (name, field.name)
    trained = sum("optimizer" in vars(method()) for method in METHODS.values())
    assert out.count("The training that a method begins with.") == trained
    assert "Hamiltonian Monte Carlo" in out


# ---------------------------------------------------------------------- options


def test_options_reach_the_library_under_their_names(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, Any] = {}

    def heard(model: Any, data: tuple[Tensor, Tensor], method: Any, **options: Any) -> Population:
        received.update(options, method=method, examples=len(data[1]))
        raise InputError("heard")

    monkeypatch.setattr(sample_verb, "draw", heard)
    texts = "--method sghmc --chains 3 --draws 4 --seed 5 --prior 0.5 --noise 0.25 --likelihood gaussian --lr 1e-2"
    more = "--temperature 0.5 --epochs 0 --batch 50 --workers 2 --chunk 1 --limit 60 --set friction=1"
    words = "--set lr_schedule=cosine --set compile=false --set thin=2"
    code, _, _ = run(*DIGITS[:2], *texts.split(), *more.split(), *words.split(), "-o", tmp_path / "draws")
    assert code == InputError.exit_code
    received.pop("progress")
    assert received == {
        "method": SGHMC(
            draws=4, lr=0.01, temperature=0.5, epochs=0, batch=50, friction=1, lr_schedule="cosine", thin=2
        ),
        "chains": 3, "seed": 5, "prior": 0.5, "noise": 0.25, "likelihood": "gaussian", "workers": 2, "executor": None,
        "chunk": 1, "examples": 60, "compile": False, "path": tmp_path / "draws",
    }  # fmt: skip


@pytest.mark.parametrize(("words", "kind"), [("", Ensemble), ("--method swag", SWAG)])
def test_recipes_and_options_of_several_values_reach_the_library(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, kind: Any
) -> None:
    received: dict[str, Any] = {}

    def heard(model: Any, data: tuple[Tensor, Tensor], method: Any, **options: Any) -> Population:
        received.update(method=method)
        raise InputError("heard")

    monkeypatch.setattr(sample_verb, "draw", heard)
    given = "--recipe resnet18-cifar10 --set milestones=40,60 --set augment=flip,mixup --set precision=bf16 --epochs 80"
    assert run(*DIGITS[:2], *words.split(), *given.split(), "-o", tmp_path / "draws")[0] == InputError.exit_code
    assert received["method"] == kind(
        epochs=80, batch=128, lr=0.05, optimizer="sgd", momentum=0.9, nesterov=True, weight_decay=5e-4,
        lr_schedule="milestones", milestones=(40, 60), gamma=0.1, augment=(RandomFlip(), Mixup()), precision="bf16",
    )  # fmt: skip
    alone = "--method ensemble --set lr_schedule=milestones --set milestones=3 --set augment=none"
    run(*DIGITS[:2], *alone.split(), "-o", tmp_path / "draws")
    assert received["method"] == Ensemble(lr_schedule="milestones", milestones=(3,))


def test_a_method_that_does_not_train_has_no_recipe(run: Run, tmp_path: Path) -> None:
    code, _, err = run(*DIGITS[:2], "--method", "vi", "--recipe", "optunet-mnist", "-o", tmp_path / "draws")
    assert code == InputError.exit_code and "expected a method that trains, found VI" in err


def test_one_seed_one_result(run: Run, tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        assert run(*QUICK, "--draws", 2, "--seed", seed, "-o", tmp_path / name)[0] == 0
    one, two, other = (Population.open(tmp_path / name) for name in ("one", "two", "other"))
    assert same(one, two)
    assert not same(one, other)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["2.5"], 2.5),
        (["flat"], None),
        (["none"], None),
        (["*.bias=2", "0.weight=0.5"], {"*.bias": 2, "0.weight": 0.5}),
        (["*.bias=flat"], {"*.bias": float("inf")}),
    ],
)
def test_priors(given: list[str], expected: Any) -> None:
    found = sample_verb._chosen(prior=tuple(given), noise=None, settings=())
    assert found == {"prior": expected}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["--set", "warmpu=3"],
            "method hmc has no option 'warmpu': did you mean 'warmup'? See onebasin sample --options hmc",
        ),
        (["--set", "warmup"], "expected --set NAME=VALUE, found 'warmup'"),
        (["--set", "=3"], "expected --set NAME=VALUE"),
        (["--set", "path=here"], "found path in --set"),
        (["--set", "chains=2"], "found chains in --set"),
        (["--set", "progress=1"], "found progress in --set"),
        (["--set", "workers=two"], "found workers in --set"),
        (["--draws", "2", "--set", "draws=2"], "found draws in --set"),
        (
            ["--set", "warmup=some"],
            "for warmup, found 'some'",
        ),
        (["--set", "warmup=2.5"], "expected a whole number for warmup, found 2.5"),
        (["--set", "warmup=-1"], "expected warmup to be a whole number from 0 on, found -1"),
        (["--set", "jitter=none"], "expected a number for jitter, found None"),
        (["--set", "step=quick"], "expected a number or none for step, found 'quick'"),
        (["--set", "compile=1"], "expected true or false or none for compile, found 1"),
        (["--set", "mass=full"], 'expected mass "identity" or "diagonal"'),
        (["--set", "start=chain"], 'expected start "fresh", "model" or a Population'),
        (["--method", "vi", "--temperature", "2"], "method vi has no option 'temperature'"),
        (["--temperature", "0"], "temperature > 0"),
        (["--prior", "-1"], "expected a positive standard deviation of the prior"),
        (["--prior", "wide"], "expected a number or none for prior, found 'wide'"),
        (["--prior", "*.bias=wide"], "expected a positive standard deviation of the prior for '*.bias'"),
        (["--prior", "1", "--prior", "*.bias=2"], "expected one --prior X, or only --prior NAME=X"),
        (["--prior", "*.absent=1"], "*.absent"),
        (["--likelihood", "gaussian"], "needs the noise level of the targets, found None"),
        (["--likelihood", "gaussian", "--noise", "loud"], "found 'loud'"),
        (["--likelihood", "bernoulli"], "expected 1 values per example from the model"),
    ],
)
def test_a_wrong_option_gets_one_sentence(run: Run, tmp_path: Path, given: list[str], sentence: str) -> None:
    code, out, err = run(*DIGITS[:4], *given, "-o", tmp_path / "draws")
    assert sentence in err
    assert (code, out) == (InputError.exit_code, "")
    assert len(err.strip().splitlines()) == 1


def test_usage_errors_have_their_own_code(run: Run, tmp_path: Path) -> None:
    assert run(*DIGITS)[0] == 2  # no --output
    assert run(*DIGITS, "--method", "magic", "-o", tmp_path / "draws")[0] == 2
    assert run(*DIGITS, "--draws", "0", "-o", tmp_path / "draws")[0] == 2
    assert not (tmp_path / "draws").exists()


def test_wrong_models_data_and_places(run: Run, tmp_path: Path, models: Path) -> None:
    output = tmp_path / "draws"
    assert run("onebasin.examples:digits_mlq", "digits", "-o", output)[0] == ModelError.exit_code
    code, _, err = run(*DIGITS[:1], "digitz", "-o", output)
    assert code == StorageError.exit_code
    assert "there is no file digitz" in err
    code, _, err = run(f"{models}:Line", "digits", "-o", output)
    assert code in (InputError.exit_code, ModelError.exit_code)
    assert not output.exists()
    code, _, err = run(*QUICK, "--draws", 2, "-o", models)
    assert code == DiskError.exit_code
    assert "choose another place" in err
    code, _, err = run(*QUICK, "--draws", 2, "-o", tmp_path)
    assert code == InputError.exit_code
    assert "is not empty" in err


# ---------------------------------------------------------------------- data


def test_regression_from_a_file(run: Run, tmp_path: Path, models: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(60, generator=generator)
    np.savez(tmp_path / "data.npz", x=x.double().numpy(), y=y.double().numpy())
    settings = ("--set", "warmup=30", "--set", "leapfrog=10", "--epochs", 20, "--draws", 20)
    code, out, err = run(f"{models}:Line", tmp_path / "data.npz", "--noise", 0.1, *settings, "-o", tmp_path / "line")
    assert (code, err) == (0, "")
    mean = predictions(torch.nn.Linear(3, 1), Population.open(tmp_path / "line"), x).mean(0).flatten()
    assert f"RMSE {float((mean - y).square().mean().sqrt()):.4g}, " in out
    code, out, err = run(
        f"{models}:mean_and_noise", tmp_path / "data.npz", "--noise", "learned", *settings, "-o", tmp_path / "noisy"
    )
    assert (code, err) == (0, "")
    assert "RMSE" in out
    code, _, err = run(f"{models}:Line", tmp_path / "data.npz", "-o", tmp_path / "none")
    assert code == InputError.exit_code
    assert "noise" in err


def test_a_model_of_a_file_goes_to_workers(run: Run, tmp_path: Path, models: Path) -> None:
    x = torch.linspace(-1, 1, 90).reshape(30, 3)
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=x.sum(1).numpy())
    settings = ("--noise", 0.1, "--chains", 4, "--draws", 2, "--epochs", 2, "--set", "warmup=3", "--set", "leapfrog=3")
    for name, places in (("one", ()), ("two", ("--workers", 2))):
        code, _, err = run(f"{models}:Line", tmp_path / "data.npz", *settings, *places, "-o", tmp_path / name)
        assert (code, err) == (0, "")
    assert same(Population.open(tmp_path / "one"), Population.open(tmp_path / "two"))


METHOD = """
import onebasin as ob

class Mine(ob.HMC):
    name = "mine"

short = Mine(warmup=3, leapfrog=3, epochs=2)
"""


def test_a_method_of_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    words = (*DIGITS[:4], "--method", f"{tmp_path / 'mine.py'}:short", "--draws", 2, "--chains", 4)
    code, out, err = run(*words, "--workers", 2, "-o", tmp_path / "mine")
    assert (code, err) == (0, "")
    assert "8 draws by mine, 4 chains" in out
    assert run(*DIGITS, "--chains", 4, "--draws", 2, "--set", "warmup=3", "--set", "leapfrog=3", "-o", tmp_path / "hmc")
    assert same(Population.open(tmp_path / "mine"), Population.open(tmp_path / "hmc"))
    code, _, err = run(*DIGITS[:4], "--method", f"{tmp_path / 'mine.py'}:METHODS", "-o", tmp_path / "none")
    assert code == ModelError.exit_code


def test_several_inputs_and_two_classes(run: Run, tmp_path: Path, models: Path) -> None:
    left, right = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1))
    targets = (left * right)[:, 0] > 0
    named = {"inputs.left": left.numpy(), "inputs.right": right.numpy(), "targets": targets.numpy().astype("uint8")}
    np.savez(tmp_path / "data.npz", **named)
    code, out, err = run(
        f"{models}:Pair", tmp_path / "data.npz", "--likelihood", "bernoulli", "--method", "ensemble", "--chains", 3,
        "--epochs", 30, "--lr", 0.05, "--set", "batch=none", "-o", tmp_path / "draws",
    )  # fmt: skip
    assert (code, err) == (0, "")
    weights = Population.open(tmp_path / "draws").stacked()
    logits = (left * right) @ weights["layer.weight"].mT + weights["layer.bias"][:, None]
    pooled = logits.sigmoid().mean(0).flatten()
    right_ones = float(((pooled > 0.5) == targets).double().mean())
    density = float(torch.where(targets, pooled, 1 - pooled).log().mean())
    assert f"accuracy {100 * right_ones:.1f} %, mean log density {density:.4g}, on 40 training examples" in out


# ---------------------------------------------------------------------- interrupts


def test_a_finished_run_makes_more_draws(run: Run, tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert run(*QUICK, "--draws", 2, "-o", parts)[0] == 0
    code, _, err = run(*QUICK, "--draws", 5, "--seed", 1, "-o", parts)
    assert code == InputError.exit_code
    assert "another seed: 0, found 1 now" in err
    assert "choose another path" in err
    code, out, _ = run(*QUICK, "--draws", 5, "-o", parts)
    assert code == 0
    assert "5 draws" in out
    assert run(*QUICK, "--draws", 5, "-o", whole)[0] == 0
    assert same(Population.open(parts), Population.open(whole))


def stopping(after: Callable[[str], bool]) -> Callable[[str], Any]:
    @contextmanager
    def bar(text: str) -> Iterator[Progress]:
        def show(done: int, total: int, doing: str) -> None:
            if after(doing):
                raise KeyboardInterrupt

        yield show

    return bar


def test_ctrl_c_tells_what_is_kept_and_how_to_go_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def enough(doing: str) -> bool:
        told.append(doing)
        return sum(one.startswith("drawing") for one in told) > 6

    parts, whole = tmp_path / "the parts", tmp_path / "whole"
    with monkeypatch.context() as patched:
        patched.setattr(sample_verb, "progress_bar", stopping(enough))
        code, out, err = run(*QUICK, "--draws", 9, "-o", parts)
    kept = len(Population.open(parts))
    assert (code, out) == (130, "")
    assert 0 < kept < 9
    assert f"{parts} keeps {kept} draws; go on with" in err
    command = shlex.split(err.splitlines()[1])
    assert command[:2] == ["onebasin", "sample"]
    assert run(*command[2:])[0] == 0
    assert run(*QUICK, "--draws", 9, "-o", whole)[0] == 0
    assert same(Population.open(parts), Population.open(whole))


def test_ctrl_c_before_the_first_draw(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sample_verb, "progress_bar", stopping(lambda doing: True))
        code, _, err = run(*QUICK, "-o", tmp_path / "draws")
    assert code == 130
    assert "keeps 0 draws; go on with" in err
    monkeypatch.setattr(sample_verb, "draw", stopped)
    code, _, err = run(*QUICK, "-o", tmp_path / "others")
    assert code == 130
    assert "nothing was written" in err
