"""Draws in arrays and in trees of ArviZ become populations and come back; mixed precision; folders of transformers."""

import json
import sys
from pathlib import Path

import arviz_base
import numpy as np
import pytest
import torch
import xarray
from torch import nn

import onebasin as ob
from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population import import_networks
from onebasin.population.files import POSTERIOR
from onebasin.posterior import FORMAT
from onebasin.state import as_spec
from tests.judging import numbers


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def population(members: int = 6, **facts) -> ob.Population:
    return ob.Population.from_models([model() for _ in range(members)], **facts)


def same(a: ob.Population, b: ob.Population) -> bool:
    return a.spec == b.spec and all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names)


# ArviZ.


@pytest.fixture(scope="module")
def chains() -> ob.Population:
    return population(8, chain=[3, 1] * 4, log_density=[*range(7), float("nan")], provenance={"method": "hmc"})


def test_a_tree_holds_weights_log_densities_and_outputs_by_chain_and_draw(chains: ob.Population) -> None:
    inputs = numbers(5, 2).float()
    network = model()
    tree = chains.to_arviz(network, inputs)
    assert isinstance(tree, xarray.DataTree) and set(tree.children) == {"posterior", "sample_stats", "predictions"}
    weight = tree.posterior["0.weight"]
    assert weight.dims == ("chain", "draw", "0.weight_dim_0", "0.weight_dim_1")
    assert tree.posterior.chain.values.tolist() == [3, 1]
    outputs = tree.predictions["outputs"]
    assert outputs.dims == ("chain", "draw", "example", "output")
    for chain, draw, member in ((3, 2, 4), (1, 0, 1)):
        place = {"chain": chain, "draw": draw}
        state = chains.member(member)
        assert np.array_equal(weight.sel(place).values, state["0.weight"].numpy())
        assert float(tree.sample_stats["lp"].sel(place)) == member
        expected = torch.func.functional_call(network.eval(), state, inputs)
        assert torch.allclose(torch.from_numpy(outputs.sel(place).values), expected, atol=1e-6)


def test_what_went_to_arviz_comes_back_with_values_dtypes_and_chains(chains: ob.Population, tmp_path: Path) -> None:
    tree = chains.to_arviz()
    tree.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    by_chain = chains[[0, 2, 4, 6, 1, 3, 5, 7]]
    for data in (tree, tmp_path / "draws.nc", str(tmp_path / "draws.nc")):
        for spec in (None, model()):
            again = ob.Population.from_arviz(data, spec)
            assert same(again, by_chain) and again.provenance == {"method": "hmc"}
            assert again.chain is not None and again.chain.tolist() == [3] * 4 + [1] * 4
            assert again.log_density is not None and again.log_density[:7].tolist() == [0, 2, 4, 6, 1, 3, 5]
    for data in (tree.posterior, tree.posterior.to_dataset(), {"posterior": tree.posterior.to_dataset()}):
        assert same(ob.Population.from_arviz(data), by_chain)
    opened = ob.Population.open(tmp_path / "draws.nc", spec=model())
    assert same(opened, by_chain) and opened.chain is not None and opened.chain.tolist() == [3] * 4 + [1] * 4
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        other = by_chain.to(dtype=dtype)
        assert same(ob.Population.from_arviz(other.to_arviz()), other)


def test_inference_data_of_old_arviz_is_known_by_its_posterior(chains: ob.Population) -> None:
    class InferenceData:
        posterior = chains.to_arviz().posterior.to_dataset()

    assert same(ob.Population.from_arviz(InferenceData()), chains[[0, 2, 4, 6, 1, 3, 5, 7]])


def test_trees_of_other_programs() -> None:
    draws = numbers(2, 5, 13).float().numpy()
    small = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    flat = arviz_base.from_dict({"posterior": {"theta": draws, "sigma": draws[..., 0]}})
    found = ob.Population.from_arviz(flat, small)
    assert torch.equal(found.to_flat(), torch.from_numpy(draws).flatten(0, 1))
    assert found.chain is not None and found.chain.tolist() == [0] * 5 + [1] * 5
    turned = xarray.Dataset({"w": (("draw", "chain", "unit"), np.arange(24.0).reshape(4, 2, 3))})
    weights = ob.Population.from_arviz(turned).tensor("w")
    assert weights[:, 0].tolist() == [0.0, 6.0, 12.0, 18.0, 3.0, 9.0, 15.0, 21.0]
    with pytest.raises(SpecError, match=r"0.weight \(3, 2\).*one array \(draws, 13\).*found theta \(2, 5, 12\)"):
        ob.Population.from_arviz({"theta": draws[..., 1:]}, small)
    with pytest.raises(SpecError, match="axes chain and draw in w"):
        ob.Population.from_arviz(xarray.Dataset({"w": (("draw",), np.zeros(3))}))
    with pytest.raises(SpecError, match="group posterior, found prior"):
        ob.Population.from_arviz(arviz_base.from_dict({"prior": {"w": np.zeros((1, 3))}}))


def test_a_part_of_the_weights_and_chains_of_unequal_length() -> None:
    networks = population(5, chain=[0, 0, 1, 1, 1])
    assert list(networks[:4].to_arviz(names=["2.bias"]).posterior.data_vars) == ["2.bias"]
    with pytest.raises(InputError, match=r"equal length, found \{0: 2, 1: 3\}.*cut=True"):
        networks.to_arviz()
    cut = networks.to_arviz(cut=True).posterior["2.bias"].values
    assert np.array_equal(cut, networks.tensor("2.bias")[:4].unflatten(0, (2, 2)).numpy())
    assert population(4).to_arviz().posterior.sizes["draw"] == 4  # one chain
    with pytest.raises(InputError, match="no draws"):
        networks[:0].to_arviz()
    with pytest.raises(InputError, match="model and inputs"):
        networks.to_arviz(model())


def test_without_arviz_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chains: ob.Population
) -> None:
    (tmp_path / "draws.nc").write_bytes(b"no netCDF")
    with pytest.raises(StorageError, match=r"netCDF file of ArviZ, but .*draws\.nc cannot be read"):
        ob.Population.from_arviz(tmp_path / "draws.nc")
    for name in ("arviz_base", "h5netcdf"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (chains.to_arviz, lambda: ob.Population.from_arviz(tmp_path / "draws.nc")):
        with pytest.raises(InputError, match=r"pip install 'onebasin\[arviz\]'"):
            call()
    with pytest.raises(StorageError, match="does not exist"):
        ob.Population.from_arviz(tmp_path / "none.nc")


# Arrays in .npz files.


def test_arrays_of_draws_or_chains_and_flat_ones(tmp_path: Path) -> None:
    networks = population(6)
    arrays = {name: value.numpy() for name, value in networks.stacked().items()}
    np.savez(tmp_path / "draws.npz", **arrays, chain=[0, 0, 1, 1, 2, 2], log_density=np.arange(6.0))
    found = ob.Population.open(tmp_path / "draws.npz", spec=model())
    assert same(found, networks) and found.chain is not None and found.chain.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.log_density is not None and found.log_density.tolist() == [*range(6)]
    np.savez(tmp_path / "chains.npz", sigma=np.ones(3), **{n: v.reshape(2, 3, *v.shape[1:]) for n, v in arrays.items()})
    found = ob.Population.open(tmp_path / "chains.npz", spec=model())
    assert same(found, networks) and found.chain is not None and found.chain.tolist() == [0] * 3 + [1] * 3
    assert found.provenance["left_out"] == ["sigma"]
    np.savez(tmp_path / "flat.npz", networks.to_flat().numpy())
    assert same(ob.Population.open(tmp_path / "flat.npz", spec=model()), networks)
    both = ob.Population.open(tmp_path / "[df]*.npz", spec=model())
    assert len(both) == 12 and torch.equal(both.to_flat(), networks.to_flat().repeat(2, 1))
    import_networks(tmp_path / "chains.npz", tmp_path / "imported", spec=as_spec(model()))
    assert same(ob.Population.open(tmp_path / "imported"), networks)


def test_precision_of_draws_is_checked_kept_or_converted(tmp_path: Path) -> None:
    wide = population(3).to(dtype=torch.float64)
    np.savez(tmp_path / "draws.npz", **{name: value.numpy() for name, value in wide.stacked().items()})
    with pytest.raises(SpecError, match=r"float64, not float32.*dtype= \(on the command line --dtype\)"):
        ob.Population.open(tmp_path / "draws.npz", spec=model())
    assert same(ob.Population.open(tmp_path / "draws.npz", spec=model(), dtype="stored"), wide)
    narrow = ob.Population.open(tmp_path / "draws.npz", spec=model(), dtype=torch.float32)
    assert same(narrow, wide.to(dtype=torch.float32))


def test_draws_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "draws.npz"
    np.savez(path, **{name: value.numpy().swapaxes(0, -1) for name, value in population(5).stacked().items()})
    with pytest.raises(SpecError, match=r"networks' 0.weight \(3, 2\).*found 0.weight \(2, 3, 5\)"):
        ob.Population.open(path, spec=model())
    with pytest.raises(InputError, match="give spec=model"):
        ob.Population.open(path)
    np.savez(path, draws=np.zeros((4, 7), "float32"))
    with pytest.raises(SpecError, match=r"one array \(draws, 29\) of flat networks in .*found draws \(4, 7\)"):
        ob.Population.open(path, spec=model())


# Mixed precision.


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, ob.Population]:
    folder = tmp_path / "mixed"
    folder.mkdir()
    networks = population(3)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for number, dtype in enumerate(kinds):
        networks[number : number + 1].to(dtype=dtype).save(folder / f"net{number}.safetensors")
    state = networks[0:1].to(dtype=torch.float16).member(0)
    torch.save(state, folder / "net3.pt")
    rounded = [
        networks[number : number + 1].to(dtype=dtype).to(dtype=torch.float32) for number, dtype in enumerate(kinds)
    ]
    again = networks[0:1].to(dtype=torch.float16).to(dtype=torch.float32)
    return folder, ob.Population.concatenate([*rounded, again])


def test_mixed_precision_is_converted_when_asked(mixed: tuple[Path, ob.Population]) -> None:
    folder, expected = mixed
    with pytest.raises(
        SpecError, match=r"bfloat16, not float32.*open files with dtype= \(on the command line --dtype\)"
    ):
        ob.Population.open(folder)
    for spec in (None, model()):
        found = ob.Population.open(folder, spec=spec, dtype=torch.float32)
        assert same(found, expected) and found.spec["1.num_batches_tracked"].dtype == torch.int64
        assert torch.equal(found.member(1)["0.weight"], expected.member(1)["0.weight"])  # a view of one file
        assert all(torch.equal(found[[2, 0]].tensor(name), expected[[2, 0]].tensor(name)) for name in found.names)
        columns = torch.empty(4, 2)
        found.read_columns("0.weight", 1, 3, columns)
        assert torch.equal(columns, expected.tensor("0.weight").flatten(1)[:, 1:3])
    import_networks(folder, folder.parent / "imported", dtype=torch.float64)
    assert same(ob.Population.open(folder.parent / "imported"), expected.to(dtype=torch.float64))
    with pytest.raises(InputError, match="floating-point dtype"):
        ob.Population.open(folder, dtype=torch.int64)


def test_archives_are_converted_as_well(tmp_path: Path) -> None:
    networks = population(2)
    (archive,) = ob.write_archives(networks, tmp_path, "moons-mlp")
    expected = networks.to(dtype=torch.float16).to(dtype=torch.float32)
    assert same(ob.Population.open(archive, spec=model(), dtype=torch.float32), expected)
    assert same(ob.Population.open(archive, spec=model(), dtype="stored"), networks.to(dtype=torch.float16))
    import_networks(archive, tmp_path / "imported", dtype=torch.float32)
    assert same(ob.Population.open(tmp_path / "imported"), expected)


# Posteriors are no populations.


def test_posteriors_and_populations_are_not_taken_for_each_other(tmp_path: Path) -> None:
    assert POSTERIOR == FORMAT
    networks = ob.Population.from_models([nn.Linear(2, 3) for _ in range(4)])
    ob.fit(networks, "diagonal").save(tmp_path / "posterior.safetensors")
    networks.save(tmp_path / "networks.safetensors")
    networks.save(tmp_path / "folder")
    with pytest.raises(StorageError, match=r"found a posterior: open it with ob\.load_posterior"):
        ob.Population.open(tmp_path / "posterior.safetensors")
    for name in ("networks.safetensors", "folder"):
        with pytest.raises(StorageError, match=rf"expected a posterior in .*{name}.*Population\.open"):
            ob.load_posterior(tmp_path / name)


# Folders of save_pretrained.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_one_network_in_a_folder_with_a_configuration(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder, network = tmp_path / "hf", Tied()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "architectures": ["Tied"]}))
    weight = network.embed.weight.detach()
    save_file({"embed.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    torch.save({"state": torch.zeros(2)}, folder / "optimizer.pt")
    found = ob.Population.open(folder, spec=network)
    assert len(found) == 1 and found.names == ("embed.weight", "head.weight")
    assert torch.equal(found.member(0)["head.weight"], weight) and torch.equal(found.member(0)["embed.weight"], weight)
    with pytest.raises(SpecError, match=r"missing head\.weight"):
        ob.Population.open(folder, spec=as_spec(network))
    (folder / "model.safetensors").unlink()
    parts = {"embed.weight": "model-00001-of-00002.safetensors", "more": "model-00002-of-00002.safetensors"}
    save_file({"embed.weight": weight}, folder / parts["embed.weight"])
    save_file({"more": weight[0].clone()}, folder / parts["more"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    whole = ob.Population.open(folder)
    assert len(whole) == 1 and set(whole.names) == set(parts) and torch.equal(whole.member(0)["more"], weight[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"more": "../secret.safetensors"}}))
    with pytest.raises(StorageError, match="name the parts of a network beside it"):
        ob.Population.open(folder)
