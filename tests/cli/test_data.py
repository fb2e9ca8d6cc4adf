"""What a user may write for data on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebasin.cli.data import read, read_pair
from onebasin.cli.options import Sources
from onebasin.data.dataset import split
from onebasin.data.load import digits, load
from onebasin.errors import InputError, ModelError, StorageError
from onebasin.examples.small import digits_mlp
from onebasin.population.population import Population

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_imports: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONEBASIN_DATA", raising=False)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(20, 3)) * 4 + 2, generator.normal(size=20)
    rows = np.array([generator.permutation(20) for _ in range(4)])
    (tmp_path / "data" / "uci").mkdir(parents=True)
    np.savez(tmp_path / "data" / "uci" / "small.npz", X=x, y=y, train_idx=rows[:, :15], test_idx=rows[:, 15:])
    np.savez(tmp_path / "both.npz", x=x[:12], y=y[:12], x_test=x[12:], y_test=y[12:])
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def make():\n    return torch.arange(8.).reshape(4, 2), [0, 1, 0, 1]\n"
        "def two():\n    return (torch.zeros(3, 2), [0, 1, 2]), (torch.ones(2, 2), [0, 1])\n"
        "def test():\n    return torch.full((5, 1), 7.), [0.5] * 5\n"
        "def needy(n):\n    return n\n"
        "def broken():\n    raise ValueError('no disk')\n"
        "number = 3\n"
    )
    return tmp_path


def same(found: tuple[Any, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_word_alone_and_its_parts(folder: Path) -> None:
    train, test = split(*digits(), test=0.25, seed=0)
    assert same(read_pair("digits"), train)
    assert same(read_pair("digits:all"), digits())
    assert same(read_pair("digits#2"), split(*digits(), test=0.25, seed=2)[0])
    assert same(read_pair("digits:train"), train)
    assert same(read_pair("digits:test"), test)
    assert same(read_pair("digits#2:test"), split(*digits(), test=0.25, seed=2)[1])
    assert same(read_pair("digits", 7), tuple(part[:7] for part in train))  # type: ignore[arg-type]
    assert read("digits", targets=False).targets is None


def test_tables_with_numbered_splits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(folder / "data")
    for number, text in ((0, "uci/small"), (3, "uci/small#3")):
        wanted = load("uci/small", directory=folder / "data", split=number)
        assert same(read_pair(text, None, sources), wanted.train)  # divided: the training part
        assert same(read_pair(f"{text}:train", None, sources), wanted.train)
        assert same(read_pair(f"{text}:test", None, sources), wanted.test)
        scaled = wanted.standardised()
        wide = Sources(folder / "data", standardise=True)
        assert same(read_pair(text, None, wide), scaled.train)
        assert same(read_pair(f"{text}:test", None, wide), scaled.test)  # by the numbers of the training part
    with pytest.raises(InputError, match="4 splits"):
        read_pair("uci/small#4", None, sources)
    with pytest.raises(InputError, match="--data-dir"):
        read_pair("uci/small")
    monkeypatch.setenv("ONEBASIN_DATA", "data")
    assert len(read_pair("uci/small")[1]) == 15


def test_files_with_both_parts(folder: Path) -> None:
    wanted = load(folder / "both.npz")
    assert same(read_pair("both.npz:train"), wanted.train)
    assert same(read_pair("both.npz:test"), wanted.test)
    alone = read_pair("both.npz")
    assert isinstance(alone[0], torch.Tensor)
    assert alone[0].dtype == torch.float64  # a file alone is taken as it is stored
    with pytest.raises(InputError, match=r"write both\.npz:train or both\.npz:test"):
        read_pair("both.npz", None, Sources(standardise=True))


def test_functions(folder: Path) -> None:
    for text in ("own.py:make", "own:make", "./own.py:make", str(folder / "own.py:make")):
        inputs, targets = read_pair(text)
        assert isinstance(inputs, torch.Tensor)
        assert (inputs.tolist(), targets.tolist()) == ([[0, 1], [2, 3], [4, 5], [6, 7]], [0, 1, 0, 1])
    assert len(read_pair("own.py:make#0:test")[1]) == 1
    assert len(read_pair("own.py:make#0:train")[1]) == len(read_pair("own.py:make#0")[1]) == 3
    assert len(read_pair("own.py:make:all")[1]) == 4
    assert len(read_pair("own.py:two")[1]) == 3
    assert len(read_pair("own.py:two:test")[1]) == 2
    assert len(read_pair("own.py:two:all")[1]) == 5
    assert len(read_pair("own.py:test")[1]) == 5  # the name of a function, behind the name of a file
    assert len(read_pair("own.py:test#0:train")[1]) == 4


def rows(pair: tuple[Any, torch.Tensor]) -> set[tuple[float, ...]]:
    return {tuple(row) for row in pair[0].tolist()}


@pytest.mark.parametrize(
    "text", ["digits", "digits#3", "uci/small", "uci/small#2", "named", "whole.npz#0", "own.py:two"]
)
def test_nothing_alone_overlaps_with_its_own_test_part(folder: Path, text: str) -> None:
    generator = np.random.default_rng(0)
    for name in ("whole.npz", "data/named.npz"):
        np.savez(folder / name, x=generator.normal(size=(20, 3)), y=generator.normal(size=20))
    sources = Sources(folder / "data")
    alone, train, test, both = (read_pair(f"{text}{end}", None, sources) for end in ("", ":train", ":test", ":all"))
    assert same(alone, train)  # type: ignore[arg-type]
    if text.startswith("digits"):  # by number: some digits are drawn twice
        assert len(alone[1]) + len(test[1]) == len(both[1]) == 1797
        assert sorted([*alone[0].tolist(), *test[0].tolist()]) == sorted(both[0].tolist())
        return
    assert not rows(alone) & rows(test)
    assert rows(alone) | rows(test) == rows(both)


@pytest.mark.parametrize("text", ["whole.npz", "own.py:make"])
def test_what_a_user_has_not_divided_is_divided_by_number_only(folder: Path, text: str) -> None:
    np.savez(folder / "whole.npz", x=np.random.default_rng(0).normal(size=(20, 3)), y=np.arange(20) % 2)
    everything = read_pair(text)
    assert len(everything[1]) == len(read_pair(f"{text}:all")[1])
    for part in ("train", "test"):
        with pytest.raises(InputError, match=f"{text}#0:train and {text}#0:test"):
            read_pair(f"{text}:{part}")


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("own.py:mak", ModelError, "did you mean own.py:make"),
        ("own.py:needy", ModelError, "needs n;"),
        ("own.py:number", ModelError, "is a int"),
        ("own.py:broken", ModelError, "raised ValueError: no disk"),
        ("own.py:two#1", InputError, "one division"),
        ("absent.py:make", ModelError, "There is no file absent.py"),
        ("nowhere.at.all:make", ModelError, "There is no module"),
        ("digitz", StorageError, "did you mean digits"),
        ("digitz:test", StorageError, "there is no file digitz"),
        ("", InputError, "expected a word"),
        ("own.py", InputError, "data are read from a word"),
    ],
)
def test_what_cannot_be_meant(folder: Path, text: str, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        read_pair(text)


def test_parts_that_the_files_do_not_offer(folder: Path) -> None:
    place = folder / "data" / "cifar100"
    place.mkdir()
    (place / "test.bin").write_bytes(bytes(2 * 3074))
    sources = Sources(folder / "data")
    assert len(read_pair("cifar100:test", None, sources)[1]) == 2
    for text in ("cifar100", "cifar100:train"):
        with pytest.raises(InputError, match=r"no train.* part here: write cifar100:test"):
            read_pair(text, None, sources)


def test_verbs_take_words_and_folders(folder: Path, run: Run) -> None:
    Population.from_models([digits_mlp(), digits_mlp()]).save(folder / "draws")
    model = "onebasin.examples:digits_mlp"
    common = ("--n-resamples", 20, "--json", "--limit", 40)
    code, out, err = run("evaluate", model, "draws", "digits:test", "--ood", "digits:train", *common)
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert (record["given"]["data"], record["given"]["outside"]) == ("digits:test", "digits:train")
    code, _, err = run("evaluate", model, "draws", "mnist:test", "--data-dir", "data", *common)
    assert code == StorageError.exit_code
    assert "looked for mnist" in err
    code, _, err = run("evaluate", model, "draws", "openml/iris", *common)
    assert code == StorageError.exit_code
    assert "--download" in err
    code, out, err = run(
        "merge", "draws", "-o", "m.safetensors", "--reference", "none", "--recalibrate", "digits:train"
    )
    assert code == InputError.exit_code  # understood as data; the model is what is missing
    assert "--model" in err


def test_a_table_from_the_folder_to_a_posterior_sample(folder: Path, run: Run) -> None:
    (folder / "net.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(3, 1)\n")
    words = ("sample", "net.py:net", "uci/small#1", "--data-dir", "data", "--standardise", "--noise", "1")
    code, out, err = run(*words, "--method", "ensemble", "--chains", 2, "--epochs", 2, "-o", "draws")
    assert (code, err) == (0, "")
    assert "2 draws by ensemble" in out
    code, out, err = run(
        "evaluate", "net.py:net", "draws", "uci/small#1:test", *words[3:], "--n-resamples", 20, "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["examples"] == 5


def test_the_command_that_goes_on_names_flags_as_flags(folder: Path) -> None:
    from onebasin.cli.records import command_line as _again
    from onebasin.cli.sample import sample

    words = ["net.py:net", "openml/iris", "--download", "--standardise", "--data-dir", "data", "-o", "draws"]
    context = sample.make_context("sample", words)
    told = _again(context).split()
    assert "True" not in told
    assert {"--download", "--standardise", "--data-dir", "data"} <= set(told)
