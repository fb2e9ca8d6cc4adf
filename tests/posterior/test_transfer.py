"""Masks and standard deviations go with the units they belong to."""

import functools

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin import Symmetry
from onebasin.errors import InputError
from onebasin.functional.call import outputs
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.pruning import prune, transfer
from onebasin.state import State, spec_of, state_of


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@functools.cache
def setting() -> tuple[nn.Module, Symmetry, State]:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))
    symmetry = ob.discover(model, torch.zeros(1, 6))
    state = {name: numbers(*value.shape, seed=n) for n, (name, value) in enumerate(state_of(model).items())}
    return model, symmetry, state


def posterior_around(state: State, seed: int = 5) -> Posterior:
    layout = FlatLayout(tuple(state), spec_of(state), {})
    std = 0.1 + torch.rand(layout.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Posterior.equal([Gaussian(layout.flat(state), Diagonal(std))], layout, [state])


@pytest.mark.parametrize("by", ["weights", "activations"])
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_follows_its_units(by: str, seed: int) -> None:
    model, symmetry, reference = setting()
    posterior = posterior_around(reference)
    masks = prune(posterior, 0.3, "sigma")
    planted = symmetry.random(seed, freedoms=["permutation", "sign"])
    network = symmetry.apply(planted, reference)
    data = {"model": model, "inputs": numbers(500, 6, seed=9)} if by == "activations" else {}
    moved = transfer(masks, network, symmetry, reference, **data)
    assert all(torch.equal(moved[name], mask) for name, mask in masks.carried(planted, symmetry).items())
    x = numbers(20, 6, seed=3)
    expected = outputs(model, masks.apply(reference), x)
    assert torch.allclose(outputs(model, moved.apply(network), x), expected, atol=1e-4)
    assert not torch.allclose(outputs(model, masks.apply(network), x), expected, atol=0.5)  # the paper's mistake


def test_a_mask_follows_through_noise() -> None:
    _, symmetry, reference = setting()
    masks = prune(posterior_around(reference), 0.3, "sigma")
    planted = symmetry.random(4, freedoms=["permutation", "sign"])
    noisy = {name: value + 0.3 * numbers(*value.shape, seed=40) for name, value in reference.items()}
    moved = transfer(masks, symmetry.apply(planted, noisy), symmetry, reference)
    assert all(torch.equal(moved[name], mask) for name, mask in masks.carried(planted, symmetry).items())


def test_standard_deviations_follow_and_the_mean_is_the_network() -> None:
    _, symmetry, reference = setting()
    posterior = posterior_around(reference)
    planted = symmetry.random(7, freedoms=["permutation", "sign"])
    network = symmetry.apply(planted, reference)
    found = transfer(posterior, network, symmetry)
    expected = symmetry.apply(planted, posterior.std, kind="std")
    for name, value in network.items():
        assert torch.equal(found.mean[name], value)
        assert torch.allclose(found.std[name], expected[name], rtol=1e-6)
    # SNR does not care how a network is written down: the same units lose the same weights.
    one = prune(posterior, 0.4, "snr").carried(planted, symmetry)
    assert all(torch.equal(mask, one[name]) for name, mask in prune(found, 0.4, "snr").items())


def test_scales_are_followed_where_it_is_asked() -> None:
    _, symmetry, reference = setting()
    posterior = posterior_around(reference)
    planted = symmetry.random(8)
    network = symmetry.apply(planted, reference)
    found = transfer(posterior, network, symmetry, scale="reference")
    expected = symmetry.apply(planted, posterior.std, kind="std")
    assert all(torch.allclose(found.std[name], expected[name], rtol=1e-4) for name in network)
    kept = transfer(posterior, network, symmetry)
    for name, value in kept.std.items():  # the same numbers, in other places
        assert torch.allclose(value.flatten().sort().values, posterior.std[name].flatten().sort().values)


def test_nothing_is_changed_and_half_a_request_is_refused() -> None:
    model, symmetry, reference = setting()
    masks = prune(reference, 0.5, "magnitude")
    network = symmetry.apply(symmetry.random(1), reference)
    before = [{name: value.clone() for name, value in tensors.items()} for tensors in (network, reference, masks)]
    transfer(masks, network, symmetry, reference)
    for tensors, old in zip((network, reference, masks), before, strict=True):
        assert all(torch.equal(tensors[name], value) for name, value in old.items())
    with pytest.raises(InputError, match="no reference"):
        transfer(masks, network, symmetry)
    with pytest.raises(InputError, match="give both"):
        transfer(masks, network, symmetry, reference, model=model)
