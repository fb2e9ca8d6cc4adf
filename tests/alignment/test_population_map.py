"""Maps of populations: distances against brute force, exact where two dimensions suffice, better than PCA elsewhere."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.errors import InputError, SpecError

MODEL = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))


def population(members: int = 12, chain: list[int] | None = None) -> ob.Population:
    generator = torch.Generator().manual_seed(0)
    state = MODEL.state_dict()
    stacked = {
        name: torch.randn(members, *value.shape, generator=generator).abs() if value.is_floating_point()
        else torch.zeros(members, *value.shape, dtype=value.dtype)
        for name, value in state.items()
    }  # fmt: skip
    return ob.Population.from_stacked(stacked, chain=chain)


@pytest.fixture(scope="module")
def symmetry() -> ob.Symmetry:
    return ob.discover(MODEL, torch.randn(4, 3))


def test_distances_are_those_of_all_trained_weights() -> None:
    networks = population(chain=[0] * 4 + [1] * 5 + [-1] * 3)
    found = ob.population_map(networks)
    names = [name for name in networks.names if "running" not in name and "tracked" not in name]
    flat = torch.cat([networks.tensor(name).double().flatten(1) for name in names], 1)
    expected = torch.cdist(flat, flat)
    assert torch.allclose(found.squared.sqrt(), expected, atol=1e-6)
    within = torch.cat([expected[:4, :4][~torch.eye(4).bool()], expected[4:9, 4:9][~torch.eye(5).bool()]])
    assert found.within == pytest.approx(float(within.square().mean().sqrt()))
    assert found.between == pytest.approx(float(expected[:4, 4:9].square().mean().sqrt()))  # -1 is of no chain


@pytest.mark.parametrize("method", ["mds", "pca"])
def test_a_plane_is_drawn_as_it_is(method: str) -> None:
    generator = torch.Generator().manual_seed(1)
    places = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    frame = torch.linalg.qr(torch.randn(50, 2, generator=generator, dtype=torch.float64)).Q
    found = ob.population_map(ob.Population.from_stacked({"w": places @ frame.T}), method=method)
    assert found.share == pytest.approx(1) and found.stress < 1e-6
    assert torch.allclose(torch.cdist(found.places, found.places), torch.cdist(places, places), atol=1e-6)


def test_pca_gives_the_scores_of_the_two_largest_singular_values() -> None:
    networks = ob.Population.from_stacked({"w": torch.randn(9, 30, generator=torch.Generator().manual_seed(2))})
    flat = networks.tensor("w").double()
    left, values, _ = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    found = ob.population_map(networks, method="pca")
    assert torch.allclose(found.places.abs(), (left * values)[:, :2].abs(), atol=1e-6)
    assert found.share == pytest.approx(float(values[:2].square().sum() / values.square().sum()))
    assert ob.population_map(networks).stress < 0.9 * found.stress  # mds keeps distances better


def test_planted_copies_fall_onto_one_place(symmetry: ob.Symmetry) -> None:
    one = population(1)
    copies = ob.Population.from_states([one[0]] * 6)
    moved = symmetry.apply(symmetry.random(0, members=6, freedoms=("permutation", "sign")), copies)
    told: list[tuple[int, int, str]] = []
    found = ob.population_map(moved, symmetry, progress=lambda *facts: told.append(facts))
    assert found.aligned is not None and found.distance is not None and found.aligned.distance is not None
    assert found.distance > 1 and found.aligned.distance < 1e-2 * found.distance
    assert told[-1][0] == told[-1][1]
    again = ob.population_map(moved, aligned=ob.align(moved, symmetry))
    assert again.aligned is not None
    assert torch.equal(again.aligned.squared, found.aligned.squared)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_few_networks_have_a_map(members: int) -> None:
    found = ob.population_map(population(members))
    assert found.places.shape == (members, 2) and found.stress < 1e-6
    assert found.plot().has_data() and str(found)


def test_what_cannot_be_drawn_is_refused(symmetry: ob.Symmetry) -> None:
    networks = population(3)
    with pytest.raises(InputError, match="'tsne'"):
        ob.population_map(networks, method="tsne")
    with pytest.raises(InputError, match="found both"):
        ob.population_map(networks, symmetry, aligned=networks)
    with pytest.raises(InputError, match="found 2 and 3"):
        ob.population_map(networks, aligned=networks[:2])
    with pytest.raises(InputError, match="empty population"):
        ob.population_map(networks[:0])
    with pytest.raises(SpecError):
        ob.population_map(networks, aligned=ob.Population.from_stacked({"w": torch.zeros(3, 2)}))
