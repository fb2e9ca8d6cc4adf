"""Networks that others saved: torch files, safetensors, folders of them, and files that want to run code."""

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from onebasin.errors import SpecError, StorageError, UnsafeFileError
from onebasin.population.population import Population
from onebasin.state import spec_of, state_of

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "checkpoints"
real_data = pytest.mark.skipif(not DATA.exists(), reason=f"the shared checkpoints are not at {DATA}")


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2)))


def same(a, b):
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


STATE = state_of(network())
WRAPPED = {
    "flat": STATE,
    "with extras": {**STATE, "epoch": 3, "name": "net"},
    "state_dict": {"state_dict": STATE, "epoch": 3, "best": torch.tensor(93.0)},
    "model_state_dict": {"model_state_dict": STATE, "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 1}]}},
    "model": {"model": STATE, "ema": {name: value * 2 for name, value in STATE.items()}},
    "net": {"net": STATE, "acc": 91.0},
    "params": {"params": STATE},
    "ema only": {"ema_model": STATE, "step": 1},
    "twice": {"model": {"state_dict": STATE}},
    "another key": {"generator": STATE, "step": 1},
    "DataParallel": prefixed(STATE, "module."),
    "compiled": prefixed(STATE, "_orig_mod."),
    "both": {"state_dict": prefixed(STATE, "module._orig_mod.")},
    "lightning": {"state_dict": STATE, "callbacks": {"x": {"y": 1}}, "hyper_parameters": {"lr": 1}, "loops": {}},
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_torch_files_of_many_habits(tmp_path, wrapping, legacy):
    path = tmp_path / "net.pt"
    torch.save(WRAPPED[wrapping], path, _use_new_zipfile_serialization=not legacy)
    population = Population.open(path)
    assert len(population) == 1
    assert population.names == tuple(STATE)
    assert same(population.member(0), STATE)
    assert population.check(finite=True) == []


def test_a_list_of_state_dicts_is_a_population(tmp_path):
    torch.save([state_of(network(k)) for k in range(3)], tmp_path / "samples.pt")
    assert same(Population.open(tmp_path / "samples.pt").member(2), state_of(network(2)))


def test_prefixes_give_way_to_the_expected_names(tmp_path):
    torch.save({"state_dict": prefixed(STATE, "model.")}, tmp_path / "a.ckpt")
    save_file(prefixed(STATE, "module."), tmp_path / "b.safetensors")
    assert same(Population.open(tmp_path / "a.ckpt", spec=network()).member(0), STATE)
    assert same(Population.open(tmp_path / "b.safetensors", spec=STATE).member(0), STATE)
    assert same(Population.open(tmp_path, spec=network()).member(1), STATE)
    kept = Population.open(tmp_path / "b.safetensors", spec=prefixed(STATE, "module."))
    assert kept.names == tuple(prefixed(STATE, "module."))
    with pytest.raises(SpecError, match=r"a\.ckpt is missing weight, bias and has unexpected"):
        Population.open(tmp_path / "a.ckpt", spec=nn.Linear(1, 1))


def test_a_folder_of_networks_in_natural_order(tmp_path):
    for k in (10, 9, 1):
        torch.save(state_of(network(k)), tmp_path / f"net{k}.pth")
    save_file(state_of(network(2)), tmp_path / "net2.safetensors")
    (tmp_path / "notes.txt").write_text("not a network")
    (tmp_path / "logs.pt").mkdir()
    population = Population.open(tmp_path)
    assert len(population) == 4
    for index, k in enumerate((1, 2, 9, 10)):
        assert same(population.member(index), state_of(network(k)))
    assert same(population[1:3].member(0), state_of(network(2)))
    assert population.provenance["files"] == ["net1.pth", "net2.safetensors", "net9.pth", "net10.pth"]
    population.save(tmp_path / "saved")
    assert same(Population.open(tmp_path / "saved").stacked(), population.stacked())
    torch.save(state_of(nn.Linear(1, 1)), tmp_path / "net11.pt")
    with pytest.raises(SpecError, match=r"net11\.pt, compared with net1\.pth, is missing conv.weight"):
        Population.open(tmp_path)


def test_unaligned_safetensors_of_others(tmp_path):
    import json

    values = torch.arange(3, dtype=torch.float64)
    header = {"flag": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["w"] = {"dtype": "F64", "shape": [3], "data_offsets": [1, 25]}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"\x05" + values.numpy().tobytes()
    (tmp_path / "a.safetensors").write_bytes(content)
    assert torch.equal(Population.open(tmp_path / "a.safetensors").member(0)["w"], values)


class Malice:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def malicious_files(folder, marker):
    torch.save({"state_dict": STATE, "extra": Malice(marker)}, folder / "zip.pt")
    torch.save({**STATE, "extra": Malice(marker)}, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "bare.pth").write_bytes(pickle.dumps(Malice(marker)))
    torch.save(network(), folder / "module.th")
    return sorted(folder.iterdir())


def test_a_pickle_never_runs_code(tmp_path):
    marker = tmp_path / "marker"
    folder = tmp_path / "files"
    folder.mkdir()
    for path in malicious_files(folder, marker):
        with pytest.raises(
            UnsafeFileError, match=rf"{path.name} asks to run .*it was not run.*Population\.from_states"
        ):
            Population.open(path)
        assert not marker.exists()
    with pytest.raises(UnsafeFileError):
        Population.open(folder)
    assert not marker.exists()
    pickle.loads((folder / "bare.pth").read_bytes())
    assert marker.exists()  # the file is indeed malicious


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_torchscript_program_is_not_run(tmp_path):
    torch.jit.script(nn.Linear(1, 1)).save(str(tmp_path / "program.pt"))
    with pytest.raises(UnsafeFileError, match=r"program\.pt asks to run a TorchScript program"):
        Population.open(tmp_path / "program.pt")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.95])
def test_truncated_torch_files_are_explained(tmp_path, legacy, share):
    path = tmp_path / "net.pt"
    torch.save({"w": torch.zeros(5000)}, path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(StorageError, match=r"net\.pt is truncated, corrupt .*copy it again"):
        Population.open(path)


@pytest.mark.parametrize("content", [{"epoch": 3}, 7, [], {"a": {"w": STATE}, "b": {"w": STATE}}, "text"])
def test_a_torch_file_without_a_network(tmp_path, content):
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(StorageError, match=r"expected a state dict in .*net\.pt, found .*from_states"):
        Population.open(tmp_path / "net.pt")


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "page.pt").write_text("<html>404</html>")
    with pytest.raises(StorageError, match="is a text: give the file that torch"):
        Population.open(tmp_path / "page.pt")
    with zipfile.ZipFile(tmp_path / "zip.pth", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(StorageError, match="copy it again"):
        Population.open(tmp_path / "zip.pth")
    (tmp_path / "page.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(StorageError, match="copy it again"):
        Population.open(tmp_path / "page.safetensors")
    save_file({}, tmp_path / "nothing.safetensors")
    with pytest.raises(StorageError, match="holds no tensor"):
        Population.open(tmp_path / "nothing.safetensors")


@real_data
def test_a_real_resnet_in_the_old_format():
    population = Population.open(DATA / "resnet20-12fca82f.th")
    assert population.names[0] == "conv1.weight"
    assert population.spec["conv1.weight"].shape == (16, 3, 3, 3)
    assert population.check(finite=True) == []


@real_data
def test_a_real_network_of_the_cifar_tutorial():
    population = Population.open(DATA / "cifar10-tutorial-cnn-captum.pt", finite=True)
    assert population.names[0] == "conv1.weight"
    assert len(population.names) == 10


@real_data
def test_a_real_ensemble_in_safetensors(tmp_path):
    population = Population.open(DATA / "ani-1x-ensemble")
    assert len(population) == 8
    again = Population.open(population.save(tmp_path / "ani"), spec=spec_of(population.member(0)))
    assert same(again.member(5), population.member(5))
    assert not torch.equal(again.member(0)["C.0.weight"], again.member(1)["C.0.weight"])
