"""The verbs that move networks: planted populations are recovered, functions stay, nothing is lost, errors help."""

import hashlib
import io
import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onebasin import Population, Symmetry, discover
from onebasin.alignment.align import Alignment
from onebasin.alignment.consensus import Consensus
from onebasin.alignment.transpositions import transpositions
from onebasin.cli import data
from onebasin.cli import progress as progress_module
from onebasin.cli.work import align as align_verb
from onebasin.errors import InputError, StorageError, UnsafeFileError

ROOT = Path(__file__).resolve().parents[2]
MODELS = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))

def wider():
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))

def normed():
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))

def example_input():
    return torch.randn(4, 5)
"""
Run = Callable[..., tuple[int, str, str]]


def mlp(seed: int = 0, *, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if norm:
            return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)).eval()
        return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))


pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture(scope="module")
def symmetry() -> Symmetry:
    return discover(mlp(), torch.zeros(2, 5))


class Shop:
    """A folder with models, their symmetry, planted copies of one network, independent networks and data."""

    def __init__(self, folder: Path, symmetry: Symmetry) -> None:
        self.folder, self.found = folder, symmetry
        self.models, self.symmetry = folder / "models.py", folder / "symmetry.json"
        self.models.write_text(MODELS)
        self.symmetry.write_text(symmetry.to_json())
        self.origin = {name: value.clone() for name, value in mlp().state_dict().items()}
        self.element = symmetry.random(7, members=4)
        one = Population.from_states([self.origin] * 4)
        self.planted = symmetry.apply(self.element, one)
        (folder / "planted").mkdir()
        for number, state in enumerate(self.planted):
            torch.save(state, folder / "planted" / f"net{number}.pt")
        save_file(self.origin, folder / "origin.safetensors")
        Population.from_models([mlp(seed) for seed in range(1, 13)]).save(folder / "population")
        x = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
        np.savez(folder / "data.npz", x=x.numpy(), y=(x[:, 0] > 0).numpy().astype("uint8"))

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def known(self) -> tuple[Any, ...]:
        return ("--symmetry", self.symmetry)

    def model(self, name: str = "mlp") -> tuple[Any, ...]:
        return ("--model", f"{self.models}:{name}")


@pytest.fixture
def shop(tmp_path: Path, symmetry: Symmetry) -> Shop:
    return Shop(tmp_path, symmetry)


def outputs(state: dict[str, Tensor], *, norm: bool = False) -> Tensor:
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(9))
    return torch.func.functional_call(mlp(norm=norm), state, x).detach()


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def fingerprint(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---------------------------------------------------------------------- align


def test_align_brings_planted_copies_together_and_changes_no_function(run: Run, shop: Shop) -> None:
    before = fingerprint(shop.folder)
    code, out, err = run("align", shop / "planted", "-o", shop / "out" / "aligned", *shop.model())
    assert (code, err) == (0, "")
    assert "4 networks aligned to their consensus" in out
    assert str(shop / "out" / "aligned" / "record.json") in out
    aligned = Population.open(shop / "out" / "aligned")
    for state in aligned:
        assert torch.allclose(outputs(state), outputs(shop.origin), atol=1e-5)
        assert close(state, aligned.member(0))  # copies of one network become one network
    assert {path: mark for path, mark in fingerprint(shop.folder).items() if "/out/" not in path} == before


def test_the_record_of_an_alignment(run: Run, shop: Shop) -> None:
    code, _, _ = run("align", shop / "planted", "-o", shop / "aligned", *shop.known, "--tolerance", "0")
    record = json.loads((shop / "aligned" / "record.json").read_text())["record"]["values"]
    assert code == 0
    assert record["members"] == 4
    assert record["overlap"]["after"] > record["overlap"]["before"]
    assert max(record["residual"]) < 1e-8
    assert record["sweeps"] == len(record["history"]) > 0
    assert Symmetry.from_json(json.dumps(record["symmetry"])) == shop.found
    moved = record["transpositions"]
    assert [sum(counts) for counts in zip(*moved["spaces"].values(), strict=True)] == moved["total"]
    assert max(moved["total"]) <= moved["maximum"] == 8 + 7
    assert not list(shop.folder.glob("*.journal"))


@pytest.mark.parametrize("reference", ["first", "medoid"])
def test_align_to_one_of_them(run: Run, shop: Shop, reference: str) -> None:
    code, out, _ = run("align", shop / "planted", "-o", shop / "aligned", *shop.known, "--reference", reference)
    assert code == 0
    assert reference in out
    record = json.loads((shop / "aligned" / "record.json").read_text())["record"]["values"]
    assert max(record["residual"]) < 1e-8
    if reference == "first":
        assert record["transpositions"]["total"][0] == 0


def test_align_to_a_given_network_takes_its_place_in_scale_too(run: Run, shop: Shop) -> None:
    arguments = ("align", shop / "planted", *shop.known, "--reference", shop / "origin.safetensors")
    assert run(*arguments, "-o", shop / "aligned")[0] == 0
    for number, state in enumerate(Population.open(shop / "aligned")):
        assert close(state, shop.origin), number
    # What was undone is what was planted: the inverse needs as many swaps.
    record = json.loads((shop / "aligned" / "record.json").read_text())["record"]["values"]
    assert record["transpositions"]["total"] == transpositions(shop.element, shop.found).total.tolist()
    assert run(*arguments, "-o", shop / "kept", "--scale", "keep")[0] == 0
    assert not close(Population.open(shop / "kept").member(1), shop.origin)


def test_align_by_activations(run: Run, shop: Shop) -> None:
    arguments = ("--by", "activations", "--data", shop / "data.npz", "--limit", "20")
    code, _, err = run("align", shop / "planted", "-o", shop / "aligned", *shop.model(), *arguments)
    assert (code, err) == (0, "")
    aligned = Population.open(shop / "aligned")
    assert all(close(state, aligned.member(0)) for state in aligned)


def test_companions_move_along(run: Run, shop: Shop) -> None:
    # |g.w| = |g| |w|, so standard deviations |w| must end as the absolute values of the aligned weights.
    population = Population.open(shop / "population")[:5]
    population.save(shop / "means")
    population.map(lambda block, start: {name: value.abs() for name, value in block.items()}, path=shop / "spreads")
    code, _, err = run(
        "align", shop / "means", "-o", shop / "aligned", *shop.known, "--companion", f"std={shop / 'spreads'}"
    )
    assert (code, err) == (0, "")
    for state, spread in zip(Population.open(shop / "aligned"), Population.open(shop / "aligned-std"), strict=True):
        assert close({name: value.abs() for name, value in state.items()}, spread)


def test_the_record_is_there_before_the_companions(run: Run, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(Alignment, "carry", full)
    code, _, err = run(
        "align", shop / "population", "-o", shop / "out", *shop.known, "--companion", f"std={shop / 'population'}"
    )
    assert code == 5 and "the disk is full" in err
    assert json.loads((shop / "out" / "record.json").read_text())["record"]["values"]["members"] == 12


def test_names_with_a_prefix_and_half_precision(run: Run, shop: Shop) -> None:
    (shop / "half").mkdir()
    for number, state in enumerate(shop.planted):
        half = {f"model.{name}": value.half() for name, value in state.items()}
        torch.save(half, shop / "half" / f"{number}.pt")
    code, _, err = run("align", shop / "half", "-o", shop / "aligned", *shop.model())
    assert (code, err) == (0, "")
    aligned = Population.open(shop / "aligned")
    assert {str(spec.dtype) for spec in aligned.spec.values()} == {"torch.float16"}
    assert set(aligned.names) == set(shop.origin)


def test_an_interrupted_alignment_goes_on(run: Run, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    finished, chunk = Consensus._finished, Consensus._chunk

    def counted(self: Consensus, at: Any, members: range) -> None:
        sweeps.append(at.sweep)
        chunk(self, at, members)

    def stopped(self: Consensus, at: Any) -> bool:
        if at.sweep == 1:
            raise KeyboardInterrupt
        return finished(self, at)

    monkeypatch.setattr(Consensus, "_chunk", counted)
    assert run("align", shop / "population", "-o", shop / "whole", *shop.known)[0] == 0
    whole, sweeps[:] = max(sweeps), []
    assert whole > 1, "there is something left after the second sweep"

    monkeypatch.setattr(import_module("onebasin.alignment.align"), "_SECONDS", -1.0)  # an entry after each chunk
    monkeypatch.setattr(Consensus, "_finished", stopped)
    code, out, err = run("align", shop / "population", "-o", shop / "parts", *shop.known)
    assert (code, out) == (130, "")
    assert f"{shop / 'parts'}.journal keeps what was reached; give the same command again to go on" in err
    assert not (shop / "parts").exists()

    # Another run must not take the journal for its own.
    code, _, err = run("align", shop / "population", "-o", shop / "parts", *shop.known, "--scale", "keep")
    assert code == InputError.exit_code
    assert "other settings" in err

    monkeypatch.setattr(Consensus, "_finished", finished)
    sweeps.clear()
    code, _, err = run("align", shop / "population", "-o", shop / "parts", *shop.known)
    assert code == 0
    assert "going on" in err
    assert min(sweeps) >= 1, "the first sweep was not repeated"
    one, two = Population.open(shop / "whole"), Population.open(shop / "parts")
    assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.names)
    records = [json.loads((shop / name / "record.json").read_text())["record"]["values"] for name in ("whole", "parts")]
    assert records[0] == records[1]
    assert not list(shop.folder.glob("*.journal"))


def test_an_interrupt_before_the_first_entry_says_so(run: Run, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Consensus, "_chunk", stopped)
    code, _, err = run("align", shop / "population", "-o", shop / "aligned", *shop.known)
    assert code == 130
    assert "nothing was written" in err
    assert not (shop / "aligned").exists()


def test_an_interrupt_after_the_last_entry_says_so(run: Run, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, path: Path, **__: Any) -> None:
        Population.open(shop / "population").save(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(align_verb, "move", stopped)
    code, _, err = run("align", shop / "population", "-o", shop / "out", *shop.known)
    assert code == 130
    assert f"the aligned networks are in {shop / 'out'}" in err


# ---------------------------------------------------------------------- compare


def test_compare_finds_what_was_planted(run: Run, shop: Shop) -> None:
    second = shop / "planted" / "net2.pt"
    code, out, err = run("compare", shop / "origin.safetensors", second, *shop.model(), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["verdict"] == "moved"
    assert told["squared_distance"]["after"] < 1e-9 < told["squared_distance"]["before"]
    assert told["cosine"]["after"] == pytest.approx(1)
    assert told["function_error"] < 1e-12
    planted = transpositions(shop.element.member(2), shop.found)
    for name, counts in told["transpositions"]["spaces"].items():
        assert counts["swaps"] == planted.spaces[name]
        assert counts["flips"] == planted.flips[name]
    apart = sum(float((shop.origin[n].double() - b.double()).square().sum()) for n, b in shop.planted.member(2).items())
    assert told["squared_distance"]["before"] == pytest.approx(apart)


def test_the_page_of_a_comparison(run: Run, shop: Shop) -> None:
    population = shop / "population"
    arguments = ("compare", f"{population}#3", f"{population}#11", *shop.model())
    told = json.loads(run(*arguments, "--json")[1])
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert f"verdict: {told['verdict']}" in out
    assert f"because: {told['reason']}" in out
    assert told["verdict"] == "independent"
    assert told["objective"]["after"] <= told["thresholds"]["partly alike"] <= told["thresholds"]["moved"]
    assert f"{told['cosine']['after']:.4g}" in out
    assert f"{told['transpositions']['total']}  " in out
    assert "function of B: largest relative change" in out
    assert told["cosine"]["after"] > told["cosine"]["before"]


def test_identical_networks_are_already_aligned(run: Run, shop: Shop) -> None:
    path = shop / "origin.safetensors"
    told = json.loads(run("compare", path, path, *shop.known, "--json")[1])
    assert told["verdict"] == "already aligned"
    assert told["transpositions"]["total"] == 0
    assert told["squared_distance"] == {"before": 0, "after": pytest.approx(0, abs=1e-10)}
    assert told["unrelated_overlap"] is None
    assert told["function_error"] is None
    assert "--model" in told["function_not_checked"]


def test_the_barrier_is_measured_with_and_without_alignment(run: Run, shop: Shop) -> None:
    # A network that is sure of its answers: between two disguises of it nothing is sure.
    sure = {name: value * (20 if name == "4.weight" else 1) for name, value in shop.origin.items()}
    ends = sure, shop.found.apply(shop.element.member(1), sure)
    for state, name in zip(ends, ("a", "b"), strict=True):
        save_file(state, shop / f"{name}.safetensors")
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(5))
    y = torch.func.functional_call(mlp(), sure, x).argmax(1)
    save_file({"x": x, "y": y}, shop / "sure.safetensors")
    arguments = ("compare", shop / "a.safetensors", shop / "b.safetensors", *shop.model())
    arguments += ("--data", shop / "sure.safetensors")
    code, out, _ = run(*arguments, "--test", shop / "sure.safetensors", "--limit", "50", "--points", "5", "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "moved"
    told = json.loads(out)["barrier"]

    def loss(t: float) -> float:
        state = {name: torch.lerp(ends[0][name], ends[1][name], t) for name in sure}
        return float(F.cross_entropy(torch.func.functional_call(mlp(), state, x[:50]), y[:50]))

    given = next(curve for curve in told["curves"] if curve["step"] == "as given")
    assert given["loss"] == pytest.approx([loss(t) for t in (0, 0.25, 0.5, 0.75, 1)], rel=1e-4)
    rows = {row["step"]: row for row in told["rows"] if row["data"] == "test"}
    assert rows["as given"]["loss_barrier"] > 0.1
    assert rows["scale"]["loss_barrier"] < 1e-5  # one function in two disguises: nothing is left
    page = run(*arguments, "--points", "3")[1]
    assert "permutation and sign" in page


def test_targets_that_are_no_class_numbers_mean_regression(run: Run, shop: Shop) -> None:
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(4))
    save_file({"inputs": x, "targets": outputs(shop.origin)[:10]}, shop / "values.safetensors")
    first, second = shop / "origin.safetensors", shop / "planted" / "net0.pt"
    code, out, _ = run("compare", first, second, *shop.model(), "--data", shop / "values.safetensors", "--json")
    assert code == 0
    row = json.loads(out)["barrier"]["rows"][0]
    assert row["error_barrier"] is None


def test_the_ani_ensemble(run: Run, shared_data: Path) -> None:
    folder = shared_data / "checkpoints" / "ani-1x-ensemble"
    members = [folder / f"member_{number}.safetensors" for number in (0, 1)]
    code, out, err = run("compare", *members, "--model", f"{ROOT / 'examples' / 'ani_1x.py'}:network", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["cosine"]["before"] < 0.03 < 0.3 < told["cosine"]["after"]
    assert told["function_error"] < 1e-12
    # Trainings from different starts: as many swaps as chance, four standard deviations wide.
    moved = told["transpositions"]
    assert abs(moved["total"] - moved["expected"]) < 4 * moved["spread"]
    assert told["verdict"] == "moved"


# ---------------------------------------------------------------------- merge


def test_merging_disguises_of_one_network_gives_that_network(run: Run, shop: Shop) -> None:
    target = shop / "new" / "merged.safetensors"
    code, out, err = run("merge", shop / "planted", shop / "origin.safetensors", "-o", target, *shop.model())
    assert (code, err) == (0, "")
    assert out.startswith("5 networks merged into one")
    assert out.splitlines()[-1] == str(target)
    model = mlp(1)
    model.load_state_dict(load_file(target))
    assert torch.allclose(outputs(model.state_dict()), outputs(shop.origin), atol=1e-5)


def test_merge_as_they_are_and_by_shares(run: Run, shop: Shop) -> None:
    target = shop / "merged.safetensors"
    code, out, _ = run("merge", shop / "population", "-o", target, "--reference", "none")
    assert code == 0
    assert "without alignment" in out
    mean = {
        name: value.double().mean(0).float() for name, value in Population.open(shop / "population").stacked().items()
    }
    assert close(load_file(target), mean)
    files = [shop / "planted" / f"net{number}.pt" for number in (0, 1)]
    arguments = ("merge", *files, "-o", target, "--reference", "none")
    code, _, err = run(*arguments)
    assert code == InputError.exit_code
    assert "--force" in err
    assert run(*arguments, "--force", "--shares", "0,2")[0] == 0
    assert close(load_file(target), shop.planted.member(1))


def test_merge_recalibrates_batch_norms(run: Run, shop: Shop) -> None:
    files = [shop / f"normed{number}.pt" for number in range(3)]
    for number, path in enumerate(files):
        torch.save(mlp(number, norm=True).state_dict(), path)
    arguments = ("merge", *files, *shop.model("normed"), "--reference", "first")
    x = torch.from_numpy(np.load(shop / "data.npz")["x"])
    for option in ("--recalibrate", "--repair"):
        target = shop / f"{option}.safetensors"
        code, out, _ = run(*arguments, "-o", target, option, shop / "data.npz", "--limit", "30")
        assert code == 0
        assert "batch norms recalibrated" in out
        merged = load_file(target)
        hidden = x[:30] @ merged["0.weight"].T + merged["0.bias"]
        assert torch.allclose(merged["1.running_mean"], hidden.mean(0), atol=1e-5)
        assert torch.allclose(merged["1.running_var"], hidden.var(0), atol=1e-5)


# ---------------------------------------------------------------------- what can go wrong


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, symmetry: Symmetry) -> dict[str, Any]:
    """A shop with bad files, which no mistake may change; what commands can name."""
    shop = Shop(tmp_path_factory.mktemp("broken"), symmetry)
    nan = {**shop.origin, "4.bias": torch.full((3,), float("nan"))}
    (shop / "sick").mkdir()
    torch.save(shop.origin, shop / "sick" / "net0.pt")
    torch.save(nan, shop / "sick" / "net1.pt")
    (shop / "wide").mkdir()
    wide = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
    (shop / "mixed").mkdir()
    for number in range(2):
        torch.save(wide.state_dict(), shop / "wide" / f"net{number}.pt")
        torch.save(wide.state_dict() if number else shop.origin, shop / "mixed" / f"net{number}.pt")
    torch.save({"other": torch.zeros(3)}, shop / "other.pt")
    (shop / "pair").mkdir()
    for number in range(2):
        torch.save(shop.origin, shop / "pair" / f"net{number}.pt")
    (shop / "taken-std").write_text("do not touch")
    (shop / "full").mkdir()
    (shop / "full" / "thesis.txt").write_text("do not touch")
    (shop / "no.json").write_text("{}")
    np.savez(shop / "names.npz", pictures=np.zeros(3), labels=np.zeros(3))
    return {
        "planted": shop / "planted",
        "one": shop / "origin.safetensors",
        "known": " ".join(map(str, shop.known)),
        "model": " ".join(map(str, shop.model())),
        "folder": shop.folder,
    }


ALIGN, COMPARE = "align {planted} -o {folder}/out", "compare {one} {one}"
MERGE = "merge {planted} -o {folder}/m.safetensors"
MISTAKES = [
    (ALIGN, 10, "Of which architecture are the networks? Give --model"),
    ("align {folder}/absent -o {folder}/out {known}", 5, "absent does not exist"),
    ("align {folder}/wide -o {folder}/out {known}", 4, "(10, 5)"),
    ("align {folder}/wide -o {folder}/out {model}", 4, "0.weight (10, 5) where (9, 5) is expected"),
    ("align {folder}/mixed -o {folder}/out {known}", 4, "net1.pt"),
    ("align {folder}/sick -o {folder}/out {known}", 4, "member 1 of"),
    ("align {one} -o {folder}/out {known}", 10, "holds 1 network, and nothing to align it with"),
    ("align {planted} -o {folder}/full {known}", 10, "choose another --output, or give --force"),
    (ALIGN + " --symmetry {folder}/absent.json", 5, "absent.json cannot be read (No such file"),
    (ALIGN + " --symmetry {folder}/no.json", 9, "no.json holds no symmetry"),
    (ALIGN + " {known} --model {folder}/models.py:wider", 9, "it belongs to another model"),
    (ALIGN + " {known} --reference {folder}/absent.pt", 5, "absent.pt does not exist"),
    (ALIGN + " {known} --reference {folder}/other.pt", 4, "0.weight"),
    (ALIGN + " {known} --reference {planted}", 10, "holds 4 networks, expected one"),
    (ALIGN + " {known} --scale reference", 10, "a consensus has no reference scale"),
    (ALIGN + " {known} --by activations", 10, "a symmetry alone cannot: give --model"),
    (ALIGN + " {model} --by activations", 10, "give --data"),
    (ALIGN + " {model} --data {folder}/data.npz", 10, "examples for --by activations"),
    (ALIGN + " {known} --companion {planted}", 10, "expected KIND=PATH"),
    (ALIGN + " {known} --companion std={folder}/population", 4, "12 members for 4 networks"),
    (ALIGN + " {known} --companion std={planted} --companion std={planted}", 10, "std twice"),
    (ALIGN + " {known} --companion mask={planted} --companion std={folder}/population", 4, "12 members for 4 networks"),
    ("align {folder}/pair -o {folder}/out {known} --companion std={folder}/wide", 4, "the companion"),
    ("align {planted} -o {folder}/taken {known} --companion std={planted}", 10, "taken-std, which exists"),
    (COMPARE, 10, "Of which architecture"),
    ("compare {one} {folder}/other.pt {known}", 4, "is missing 0.weight"),
    ("compare {one} {folder}/sick/net1.pt {known}", 4, "tensor 4.bias holds NaN"),
    ("compare {one} {planted} {known}", 10, "choose it by number, as in"),
    ("compare {one} {planted}#4 {known}", 10, "there are 4 members, found index 4"),
    (COMPARE + " {known} --data {folder}/data.npz", 10, "--data runs the networks"),
    (COMPARE + " {model} --test {folder}/data.npz", 10, "--test goes with --data"),
    (COMPARE + " {model} --data {folder}/names.npz", 10, "found pictures, labels"),
    (COMPARE + " {model} --data {folder}/absent.npz", 5, "there is no file"),
    (COMPARE + " {model} --data {folder}/models.py", 10, ".npz, .npy or .safetensors"),
    (COMPARE + " {model} --data {folder}/data.npz --points 4", 10, "odd number of --points"),
    (COMPARE + " {model} --data {folder}/data.npz --loss mse", 10, "target values"),
    ("merge {one} -o {folder}/m.safetensors {known}", 10, "the mean of one is itself"),
    ("merge {planted} -o {folder}/m.pt {known}", 10, ".safetensors"),
    ("merge {planted} {folder}/wide -o {folder}/m.safetensors {model}", 4, "(10, 5)"),
    (MERGE, 10, "Of which architecture"),
    (MERGE + " {known} --shares 1,2", 10, "expected 4 numbers in --shares"),
    (MERGE + " {known} --shares 1,1,-1,1", 10, "not negative"),
    (MERGE + " {known} --repair {folder}/data.npz", 10, "--repair runs the networks"),
    (MERGE + " {model} --repair {folder}/data.npz --recalibrate {folder}/data.npz", 10, "give only one"),
    (MERGE + " {model} --recalibrate {folder}/data.npz", 10, "nothing to recalibrate"),
]


@pytest.mark.parametrize(("command", "code", "sentence"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_gets_one_sentence(run: Run, broken: dict[str, Any], command: str, code: int, sentence: str) -> None:
    arguments = command.format(**broken).split()
    before = fingerprint(broken["folder"])
    found, out, err = run(*arguments)
    assert (found, out) == (code, ""), err
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert fingerprint(broken["folder"]) == before


# ---------------------------------------------------------------------- data and progress


def test_data_are_read_by_their_usual_names(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6, dtype=">u2")
    np.savez(tmp_path / "a.npz", X=x.astype(">f4"), y=y, class_names=np.array(["no", "numbers"]))
    found = data.read(tmp_path / "a.npz", limit=4)
    assert isinstance(found.inputs, Tensor)
    assert found.inputs.tolist() == x[:4].tolist()
    assert found.targets is not None
    assert found.targets.dtype == torch.int64
    assert found.targets.tolist() == [0, 1, 2, 3]
    np.savez(tmp_path / "b.npz", **{"inputs.ids": y.astype("i8"), "inputs.mask": y < 3, "targets": x})
    several = data.read(tmp_path / "b.npz")
    assert isinstance(several.inputs, dict)
    assert set(several.inputs) == {"ids", "mask"}
    assert several.pair[1].dtype == torch.float64
    assert data.read(tmp_path / "b.npz", targets=False).targets is None


@pytest.mark.parametrize(
    ("arrays", "kind", "sentence"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, InputError, "x (3, 2), y (4,)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, InputError, "one row per example"),
        ({"x": np.array([1.0, np.nan]), "y": np.zeros(2)}, InputError, "x in"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, InputError, "expected numbers"),
        ({"x": np.array([{}, {}], dtype=object), "y": np.zeros(2)}, UnsafeFileError, "it was not loaded"),
        ({"x": np.zeros(2)}, InputError, "should hold targets (or y, Y), found x"),
    ],
)
def test_data_that_are_none(tmp_path: Path, arrays: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(kind, match=r".") as caught:
        data.read(tmp_path / "data.npz")
    assert sentence in str(caught.value)


def test_damaged_data(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((50, 50)), y=np.zeros(50))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StorageError, match="save it again"):
        data.read(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(path)
    with pytest.raises(StorageError, match="a single array"):
        data.read(path)
    (tmp_path / "data.safetensors").write_bytes(b"nonsense")
    with pytest.raises(StorageError, match="truncated or corrupt"):
        data.read(tmp_path / "data.safetensors")


def test_the_bar_waits_and_stays_off_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*, terminal: bool, patience: float) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
        monkeypatch.setattr("rich.console.Console", lambda stderr: console)
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
        monkeypatch.setattr(progress_module, "PATIENCE", patience)
        with progress_module.progress_bar("aligning") as show:
            show(4, 8, "sweep 1")
            if patience == 0:
                while "sweep 1" not in console.file.getvalue():  # another thread starts it
                    time.sleep(0.01)
            show(8, 8, "sweep 1")
            show(2, 8, "sweep 2, overlap 3.5")
        return console.file.getvalue()

    assert shown(terminal=False, patience=0.001) == ""
    assert "sweep" not in shown(terminal=True, patience=60)
    text = shown(terminal=True, patience=0)
    assert "4/8" in text
    assert "sweep 2, overlap 3.5" in text
    assert "2/8" in text
