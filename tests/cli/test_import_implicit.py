"""`onebasin import` of a file with an implicit ensemble: the networks of the base module, or a posterior."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.errors import InputError, SpecError
from tests.implicit_layers import Batched, Bayes, LatentPosterior

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

def other():
    return nn.Linear(4, 3)
"""
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("restored_imports")


def base() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model, and a checkpoint of Lightning for each kind of layers."""
    torch.manual_seed(0)
    (tmp_path / "model.py").write_text(MODEL)
    networks = {
        "batched": nn.Sequential(Batched(3, 4, 8), nn.ReLU(), Batched(3, 8, 3)),
        "latent": nn.Sequential(LatentPosterior(3, 4, 8), nn.ReLU(), LatentPosterior(3, 8, 3)),
        "bayes": nn.Sequential(Bayes(4, 8), nn.ReLU(), Bayes(8, 3)),
        "plain": base(),
    }
    for name, network in networks.items():
        state = {f"model.{key}": value for key, value in network.state_dict().items()}
        torch.save({"state_dict": state, "epoch": 3, "optimizer_states": []}, tmp_path / f"{name}.ckpt")
    return tmp_path


def test_a_checkpoint_becomes_a_folder_of_members(place: Path, run: Run) -> None:
    command = ("import", place / "batched.ckpt", "-o", place / "out", "--model", f"{place}/model.py:net")
    for _ in range(2):  # the same command again does nothing
        code, out, err = run(*command)
        assert code == 0, err
        assert "3 networks" in out and "BatchEnsemble" in err
    found = ob.Population.open(place / "out", spec=base())
    expected = ob.unroll(base(), place / "batched.ckpt")
    assert isinstance(expected, ob.Population) and torch.equal(found.to_flat(), expected.to_flat())
    assert found.provenance == expected.provenance and found.chain is not None and found.chain.tolist() == [0, 0, 0]
    code, _, err = run("import", place / "latent.ckpt", *command[2:])
    assert code == InputError.exit_code and "--force" in err
    code, out, _ = run("import", place / "latent.ckpt", *command[2:], "--draws", 2, "--dtype", "float32", "--force")
    assert code == 0 and "6 networks" in out and "float32" in out
    assert ob.Population.open(place / "out").provenance["draws"] == 2


def test_a_bayesian_network_becomes_the_file_of_a_posterior(place: Path, run: Run) -> None:
    command = ("import", place / "bayes.ckpt", "--model", f"{place}/model.py:net", "-o")
    code, _, err = run(*command, place / "out")
    assert code == InputError.exit_code and "give -o FILE.safetensors" in err and not (place / "out").exists()
    code, _, err = run(*command, place / "q.safetensors", "--dtype", "float32")
    assert code == InputError.exit_code and "without --dtype" in err
    code, out, err = run(*command, place / "q.safetensors")
    assert code == 0 and "diagonal" in out, err
    found, expected = ob.load_posterior(place / "q.safetensors"), ob.unroll(base(), place / "bayes.ckpt")
    assert isinstance(expected, ob.Posterior) and torch.equal(found.flat_std, expected.flat_std)
    code, _, err = run(*command, place / "q.safetensors")
    assert code == InputError.exit_code and "--force" in err
    assert run(*command, place / "q.safetensors", "--force")[0] == 0


def test_ordinary_networks_and_other_ones_are_told_as_before(place: Path, run: Run) -> None:
    model = ("--model", f"{place}/model.py:net")
    code, out, _ = run("import", place / "plain.ckpt", "-o", place / "one", *model)
    assert code == 0 and "Population of 1 network" in out
    code, _, err = run("import", place / "plain.ckpt", "-o", place / "two", "--model", f"{place}/model.py:other")
    assert code == SpecError.exit_code and "is missing weight, bias" in err
    code, _, err = run("import", place / "plain.ckpt", "-o", place / "three", *model, "--draws", 2)
    assert code == InputError.exit_code and "ordinary network: open it" in err and not (place / "three").exists()
    for name, kind in (("batched", "BatchEnsemble"), ("latent", "LPBNN"), ("bayes", "mean-field VI")):
        code, out, _ = run("import", place / f"{name}.ckpt", "-o", place / name)
        assert code == 0 and f"by their names these are layers of {kind}: --model makes" in out
    assert "by their names" not in run("import", place / "plain.ckpt", "-o", place / "four")[1]
    code, _, err = run("import", place / "latent.ckpt", "-o", place / "three", "--draws", 2)
    assert code == InputError.exit_code and "give --model" in err
    code, _, err = run("import", place / "batched.ckpt", "-o", place / "three", *model, "--draws", 2)
    assert code == InputError.exit_code and "found BatchEnsemble" in err
