"""Files of draws, of mixed precision and of posteriors, wherever the command line takes a population."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.functional.call import global_seed
from tests.judging import numbers

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

def example_input():
    return torch.randn(3, 2)
"""
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("restored_imports")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same six networks as arrays of chains, flat, in a file of ArviZ, and as files of several precisions."""
    folder = tmp_path_factory.mktemp("draws")
    (folder / "model.py").write_text(MODEL)
    with global_seed(0):
        networks = ob.Population.from_models([net() for _ in range(6)], chain=[0, 0, 0, 1, 1, 1])
    symmetry = ob.discover(net(), torch.zeros(2, 2))
    (folder / "symmetry.json").write_text(symmetry.to_json())
    networks.save(folder / "population")
    arrays = {name: value.unflatten(0, (2, 3)).double().numpy() for name, value in networks.stacked().items()}
    np.savez(folder / "draws.npz", **arrays)
    np.savez(folder / "flat.npz", theta=networks.to_flat().numpy())
    np.save(folder / "flat.npy", networks.to_flat().unflatten(0, (2, 3)).numpy())
    networks.to_arviz().to_netcdf(folder / "draws.nc", engine="h5netcdf")
    (folder / "mixed").mkdir()
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        networks[number : number + 1].to(dtype=dtype).save(folder / "mixed" / f"{number}.safetensors")
    aligned = ob.align(networks, symmetry).population
    ob.fit(aligned, "diagonal").save(folder / "p.safetensors")
    element = symmetry.random(torch.Generator().manual_seed(0))
    ob.fit(symmetry.apply(element, aligned), "diagonal").save(folder / "q.safetensors")
    np.savez(folder / "data.npz", inputs=numbers(12, 2).float().numpy(), targets=np.arange(12) % 3)
    return folder


def same(a: ob.Population, b: ob.Population) -> bool:
    return all(torch.allclose(a.tensor(name).double(), b.tensor(name).double(), atol=1e-6) for name in a.names)


def test_draws_are_aligned_as_the_population_is(place: Path, run: Run, tmp_path: Path) -> None:
    known = {"model": ("--model", f"{place}/model.py:net"), "symmetry": ("--symmetry", place / "symmetry.json")}
    assert run("align", place / "population", "-o", tmp_path / "expected", *known["symmetry"])[0] == 0
    expected = ob.Population.open(tmp_path / "expected")
    for name, how in (
        ("draws.npz", "symmetry"),
        ("flat.npz", "symmetry"),
        ("flat.npy", "symmetry"),
        ("draws.nc", "model"),
    ):
        code, _, err = run("align", place / name, "-o", tmp_path / name, *known[how])
        assert code == 0, err
        assert same(ob.Population.open(tmp_path / name), expected)
    found = ob.Population.open(tmp_path / "draws.npz")
    assert found.spec["0.bias"].dtype == torch.float64 and found.chain is not None
    assert found.chain.tolist() == [0, 0, 0, 1, 1, 1]


def test_draws_are_evaluated_and_imported(place: Path, run: Run, tmp_path: Path) -> None:
    model = f"{place}/model.py:net"
    records = [
        json.loads(run("evaluate", model, place / name, place / "data.npz", "--n-resamples", 2, "--json", *dtype)[1])
        for name, dtype in (("population", ()), ("draws.npz", ("--dtype", "float32")))
    ]
    for record in records:
        record.pop("given")
    assert records[0] == records[1]
    code, _, err = run(
        "import", place / "draws.npz", "-o", tmp_path / "imported", "--model", model, "--dtype", "float32"
    )
    assert code == 0, err
    again, expected = ob.Population.open(tmp_path / "imported"), ob.Population.open(place / "population")
    assert again.spec == expected.spec and torch.equal(again.to_flat(), expected.to_flat())


def test_npy_files_are_data_and_draws(place: Path, run: Run, tmp_path: Path) -> None:
    model = f"{place}/model.py:net"
    data = np.load(place / "data.npz")
    for ending in ("", "_test"):
        np.save(tmp_path / f"x{ending}.npy", data["inputs"])
        np.save(tmp_path / f"y{ending}.npy", data["targets"])
    np.save(tmp_path / "alone.npy", data["inputs"])
    records = []
    for draws, file in (("population", place / "data.npz"), ("flat.npy", tmp_path / "x_test.npy")):
        code, out, err = run("evaluate", model, place / draws, file, "--n-resamples", 2, "--json")
        assert code == 0, err
        records.append({key: value for key, value in json.loads(out).items() if key != "given"})
    assert records[0] == records[1]
    assert run("evaluate", model, place / "flat.npy", tmp_path / "x.npy", "--ood", tmp_path / "alone.npy")[0] == 0
    code, _, err = run("evaluate", model, place / "flat.npy", tmp_path / "alone.npy")
    assert code == 10 and "call the files x.npy and y.npy" in err
    np.save(tmp_path / "objects.npy", np.array([{}]))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "several.npy").write_bytes((place / "flat.npz").read_bytes())
    for name, code, text in (
        ("objects", 6, "it was not loaded"), ("text", 5, "is damaged or none"), ("several", 5, "call the file .npz")
    ):  # fmt: skip
        found, _, err = run("evaluate", model, tmp_path / f"{name}.npy", tmp_path / "x.npy")
        assert found == code and text in err


def test_draws_that_do_not_fit_get_one_sentence(place: Path, run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", theta=np.zeros((5, 7), "float32"))
    for known in (("--model", f"{place}/model.py:net"), ("--symmetry", place / "symmetry.json")):
        code, _, err = run("align", tmp_path / "other.npz", "-o", tmp_path / "aligned", *known)
        assert code == 4 and "one array (draws, 27)" in err and "found theta (5, 7)" in err
    code, _, err = run("merge", place / "draws.npz", "-o", tmp_path / "merged.safetensors", "--reference", "none")
    assert code == 10 and "--model" in err


def test_mixed_precision_in_one_folder(place: Path, run: Run, tmp_path: Path) -> None:
    known = ("--symmetry", place / "symmetry.json")
    code, _, err = run("align", place / "mixed", "-o", tmp_path / "aligned", *known)
    assert code == 4 and "--dtype" in err and "bfloat16" in err
    for dtype in ("float32", "bfloat16"):
        code, _, err = run("align", place / "mixed", "-o", tmp_path / dtype, *known, "--dtype", dtype)
        assert code == 0, err
        found = ob.Population.open(tmp_path / dtype)
        assert {tensor.dtype for tensor in found.spec.values()} == {getattr(torch, dtype)}


def test_two_posteriors_are_compared_in_a_common_basin(place: Path, run: Run, tmp_path: Path) -> None:
    known = ("--symmetry", place / "symmetry.json")
    files = (place / "p.safetensors", place / "q.safetensors")
    code, out, err = run("compare", *files, *known, "--json")
    assert code == 0, err
    p, q = map(ob.load_posterior, files)
    symmetry = ob.Symmetry.from_json((place / "symmetry.json").read_text())
    expected = ob.distance(p, q, symmetry, generator=torch.Generator().manual_seed(0))
    told = json.loads(out)["distance"]
    assert told == json.loads(json.dumps(expected.to_dict()))
    assert told["wasserstein_before"]["value"] > 0.1 and abs(told["wasserstein_after"]["value"]) < 1e-4
    code, out, err = run("compare", *files, "--model", f"{place}/model.py:net")
    assert code == 0 and "in a common basin" in out and "Wasserstein" in out
    code, _, err = run("compare", files[0], place / "population", *known)
    assert code == 10 and "found the posterior" in err
    code, _, err = run("compare", *files, *known, "--preset", "paper")
    assert code == 10 and "--preset is for networks" in err
    code, _, err = run("align", files[0], "-o", tmp_path / "aligned", *known)
    assert code == 5 and "found a posterior" in err
    ob.fit(ob.Population.from_models([nn.Linear(2, 3) for _ in range(3)]), "diagonal").save(tmp_path / "r.safetensors")
    code, _, err = run("compare", files[0], tmp_path / "r.safetensors", *known)
    assert code == 4 and "missing" in err
