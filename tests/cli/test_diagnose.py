"""onebasin diagnose: the numbers of the library, a record, and sentences before the work."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onebasin import Population, diagnose, fit
from onebasin.errors import InputError

Run = Callable[..., tuple[int, str, str]]
MODEL = """
from torch import nn

def net():
    return nn.Linear(3, 2)
"""

pytestmark = pytest.mark.usefixtures("restored_imports")


def draws(shift: float) -> Population:
    """Two chains of 50 independent draws, the second one shifted: R-hat is known to be near 1, or far above it."""
    generator = torch.Generator().manual_seed(3)
    chain = torch.arange(2).repeat_interleave(50)
    weight = torch.randn(100, 2, 3, generator=generator) + shift * chain[:, None, None]
    return Population.from_stacked({"weight": weight, "bias": torch.randn(100, 2, generator=generator)}, chain=chain)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    draws(0.0).save("mixed")
    draws(5.0).save("apart")
    np.savez("inputs.npz", x=np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32))
    return tmp_path


@pytest.fixture
def verb(run: Run) -> Run:
    return partial(run, "diagnose", "model.py:net")


def test_the_record_holds_what_the_library_finds(verb: Run, folder: Path) -> None:
    code, out, err = verb("mixed", "inputs.npz", "-o", "new/record.json")
    assert (code, err) == (0, "")
    record = json.loads((folder / "new" / "record.json").read_text())["record"]["values"]
    inputs = torch.from_numpy(np.load("inputs.npz")["x"])
    found = diagnose(nn.Linear(3, 2), draws(0.0), inputs)
    assert found.functions is not None
    assert record["functions"] == json.loads(json.dumps(vars(found.functions)))
    assert {name: one["worst_rhat"] for name, one in record["weights"].items()} == {
        name: one.worst_rhat for name, one in found.weights.items()
    }
    assert (record["chains"], record["draws"], record["notes"]) == (2, 50, [])
    assert str(found) in out


def test_the_verdict_is_about_functions(verb: Run, folder: Path) -> None:
    _, out, _ = verb("mixed", "inputs.npz", "--no-weights", "--json")
    mixed = json.loads(out)
    _, out, _ = verb("apart", "inputs.npz", "--no-weights", "--json")
    apart = json.loads(out)
    assert apart["weights"] == mixed["weights"] == {}
    assert (apart["mixed"], apart["functions"]["worst_rhat"] > 1.5) == (False, True)
    assert mixed["functions"]["median_rhat"] < 1.05 < 1.5 < apart["functions"]["median_rhat"]
    assert "verdict: not mixed as functions" in verb("apart", "inputs.npz")[1]


def test_fewer_examples_are_taken_and_it_is_said(verb: Run, folder: Path) -> None:
    _, out, _ = verb("mixed", "inputs.npz", "--examples", 7, "--json")
    record = json.loads(out)
    assert record["functions"]["quantities"] == 7 * 2
    assert record["notes"] == ["7 of 40 examples were taken, at random: --examples 0 takes all"]
    assert json.loads(verb("mixed", "inputs.npz", "--examples", 0, "--json")[1])["functions"]["quantities"] == 80


def test_mistakes_are_found_before_the_work(verb: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("onebasin.cli.work.diagnose.judge", never)
    fit(draws(0.0)).save("q.safetensors")
    draws(0.0)[::20].save("short")
    np.savez("wide.npz", x=np.zeros((5, 4), np.float32))
    (folder / "record.json").write_text("")
    for words, sentence in {
        ("mixed", "inputs.npz", "-o", "record.json"): "give --force to replace it",
        ("q.safetensors", "inputs.npz"): "found a posterior",
        ("short", "inputs.npz"): "at least 4 draws of each chain",
        ("mixed", "wide.npz"): "5, 4",
    }.items():
        code, out, err = verb(*words)
        assert (code, out) == (InputError.exit_code, ""), err
        assert sentence in err or "x4" in err
        assert len(err.strip().splitlines()) == 1
