"""``onebasin prune``: the verb does what the function does, writes what it says, and refuses in one sentence."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import onebasin as ob
from onebasin.cli.prune import prune as verb
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.pruning import CRITERIA, LEVELS, Masks, prune, transfer
from onebasin.state import State, spec_of, state_of

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

def wider():
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))

def example_input():
    return torch.randn(4, 5)
"""
Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("restored_imports")


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))


class Shop:
    """A folder with a model, a posterior around a network, that network moved, and data that it classifies."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, "model.py:net"
        (folder / "model.py").write_text(MODEL)
        self.mean: State = {name: value.clone() for name, value in state_of(net()).items()}
        layout = FlatLayout(tuple(self.mean), spec_of(self.mean), {})
        std = torch.rand(layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.posterior = Posterior.equal([Gaussian(layout.flat(self.mean), Diagonal(std))], layout, [self.mean])
        self.posterior.save(folder / "posterior.safetensors")
        save_file(self.mean, folder / "network.safetensors")
        self.symmetry = ob.discover(net(), torch.zeros(1, 5))
        self.other = self.symmetry.apply(self.symmetry.random(3, freedoms=["permutation"]), self.mean)
        save_file(self.other, folder / "other.safetensors")
        x = torch.randn(60, 5, generator=torch.Generator().manual_seed(3))
        np.savez(folder / "test.npz", x=x.numpy(), y=net()(x).argmax(1).numpy())
        np.savez(folder / "values.npz", x=x.numpy(), y=net()(x).detach().numpy())


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.chdir(tmp_path)
    return Shop(tmp_path)


def test_the_pruned_network_and_its_record(run: Run, shop: Shop) -> None:
    code, out, err = run("prune", shop.model, "posterior.safetensors", "--keep", "0.3", "-o", "new/pruned.safetensors")
    assert (code, err) == (0, "")
    expected = prune(shop.posterior, 0.3, "snr")
    found = load_file("new/pruned.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.apply(shop.mean).items())
    net().load_state_dict(found)
    record = json.loads(Path("new/pruned.json").read_text())["record"]["values"]
    assert (record["kept"], record["size"], record["keep"], record["by"]) == (25, 84, 0.3, "snr")
    assert sum(tensor["kept"] for tensor in record["tensors"].values()) == 25
    assert record["curve"] is None
    assert "25 of 84 weights kept, by snr" in out
    assert str(expected) in out


def test_masks_are_written_and_only_the_named_tensors_have_one(run: Run, shop: Shop) -> None:
    options = ("--by", "magnitude", "--per", "tensor", "--names", "*.weight", "--masks", "masks.safetensors")
    code, _, err = run("prune", shop.model, "network.safetensors", *options)
    assert (code, err) == (0, "")
    masks = Masks.load("masks.safetensors")
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"0.weight": 9, "2.weight": 5}


def test_a_curve_of_all_criteria(run: Run, shop: Shop) -> None:
    code, out, _ = run("prune", shop.model, "posterior.safetensors", "--data", "test.npz", "--json")
    curve = json.loads(out)["curve"]
    assert code == 0
    assert list(curve["criteria"]) == list(CRITERIA)
    assert curve["levels"] == list(LEVELS)
    assert all(points[0]["accuracy"] == 1 for points in curve["criteria"].values())
    _, out, _ = run("prune", shop.model, "posterior.safetensors", "--data", "test.npz", "--limit", "20")
    assert "% right on 20 examples" in out
    code, out, _ = run("prune", shop.model, "network.safetensors", "--by", "magnitude", "--data", "values.npz")
    assert code == 0
    assert "loss on 60 examples" in out
    assert "snr" not in out


def test_another_network_is_pruned_in_its_own_basis(run: Run, shop: Shop) -> None:
    code, _, err = run(
        "prune", shop.model, "posterior.safetensors", "--by", "sigma", "--onto", "other.safetensors", "-o",
        "pruned.safetensors",
    )  # fmt: skip
    assert (code, err) == (0, "")
    expected = prune(transfer(shop.posterior, shop.other, shop.symmetry), 0.2, "sigma").apply(shop.other)
    assert all(torch.equal(value, expected[name]) for name, value in load_file("pruned.safetensors").items())
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))
    same = prune(shop.posterior, 0.2, "sigma").apply(shop.mean)
    pair = [torch.func.functional_call(net(), state, x) for state in (expected, same)]
    assert torch.allclose(*pair, atol=1e-6)


def test_examples_of_the_help_run(run: Run, shop: Shop) -> None:
    lines = re.findall(r"^ +onebasin (prune .*)$", verb.help or "", flags=re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        code, out, err = run(*shlex.split(line))
        assert (code, err) == (0, ""), line
        assert "weights kept" in out


def test_refusals(run: Run, shop: Shop) -> None:
    posterior = "posterior.safetensors"
    assert run("prune", shop.model, posterior, "-o", "pruned.safetensors")[0] == 0
    cases = [
        ((shop.model, posterior, "-o", "pruned.safetensors"), 10, "--force"),
        ((shop.model, posterior, "-o", "pruned.pt"), 10, ".safetensors"),
        ((shop.model, "network.safetensors", "--by", "snr"), 10, "standard deviations"),
        ((shop.model, "nothing.safetensors"), 5, "no file"),
        (("model.py:wider", posterior), 4, "shape"),
        (("model.py:wider", "network.safetensors", "--by", "random"), 4, "shape"),
        ((shop.model, "network.safetensors", "--by", "magnitude", "--onto", "other.safetensors"), 10, "directly"),
        ((shop.model, posterior, "--names", "9.weight"), 10, "9.weight"),
        ((shop.model, posterior, "--keep", "0"), 2, "--keep"),
    ]
    for arguments, expected, word in cases:
        code, out, err = run("prune", *arguments)
        assert code == expected, err
        assert word in err
        assert not out
    assert run("prune", shop.model, posterior, "-o", "pruned.safetensors", "--force")[0] == 0
