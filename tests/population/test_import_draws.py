"""Draws of other libraries become a Population in one call, in the shapes in which these libraries return them."""

import numpy as np
import torch
from torch import nn

import onebasin as ob
from onebasin.state import flatten, state_of
from tests.judging import sample


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def test_numpyro_and_blackjax_give_dicts_of_arrays_with_chain_and_draw_axes() -> None:
    spec = state_of(model())
    numbers = np.random.default_rng(0)
    draws = {name: numbers.normal(size=(4, 5, *value.shape)).astype("float32") for name, value in spec.items()}
    population = ob.Population.from_stacked(draws, by_chain=True)
    assert population.chain is not None
    assert population.chain.tolist() == [chain for chain in range(4) for _ in range(5)]
    assert np.array_equal(population.member(7)["0.weight"].numpy(), draws["0.weight"][1, 2])
    assert len(ob.diagnose(None, population).weights) == 4


def test_hamiltorch_gives_a_list_of_flat_vectors_in_the_order_of_parameters() -> None:
    networks = [model() for _ in range(6)]
    vectors = [nn.utils.parameters_to_vector(network.parameters()).detach() for network in networks]
    population = ob.Population.from_flat(torch.stack(vectors), networks[0])
    for index, network in enumerate(networks):
        for name, value in state_of(network).items():
            assert torch.equal(population.member(index)[name], value)


def test_flat_draws_of_several_chains_keep_their_chain() -> None:
    network = model()
    matrix = torch.arange(3 * 4 * 13.0).reshape(3, 4, 13)
    population = ob.Population.from_flat(matrix, network)
    assert population.chain is not None
    assert population.chain.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(flatten(population.member(6)), matrix[1, 2])


def test_own_draws_can_be_the_start_of_chains() -> None:
    x = torch.linspace(-1, 1, 10)[:, None].expand(10, 2)
    start = ob.Population.from_models([model(), model()])
    draws = sample(
        model(), (x, x[:, :1]), "ensemble", noise=0.1, epochs=0, chains=3, start=start
    )  # no training: the start itself
    for member, origin in zip(draws, (0, 1, 0), strict=True):
        assert torch.equal(member["0.weight"], start.member(origin)["0.weight"])
