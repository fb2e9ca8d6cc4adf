"""Incoming less outgoing mass of units."""

from __future__ import annotations

import torch
from torch import nn

import onebasin as ob
from onebasin.alignment.balance import imbalance
from onebasin.functional.call import global_seed


def networks() -> tuple[nn.Module, ob.Population, ob.Symmetry]:
    with global_seed(0):
        models = [
            nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(3)
        ]
    model = models[0]
    population = ob.Population.from_models(models).to(dtype=torch.float64)
    model.double()
    return model, population, ob.discover(model, torch.zeros(1, 3, dtype=torch.float64))


def test_it_is_in_less_out_by_hand() -> None:
    _, population, symmetry = networks()
    for biases in (True, False):
        w = [population.tensor(f"{layer}.weight") for layer in (0, 2, 4)]
        b = [population.tensor(f"{layer}.bias").square() * biases for layer in (0, 2)]
        hand = [w[k].square().sum(2) + b[k] - w[k + 1].square().sum(1) for k in range(2)]
        assert torch.allclose(imbalance(population, symmetry, biases=biases), torch.cat(hand, 1), atol=1e-12)


def test_it_vanishes_at_the_least_mass_and_only_there() -> None:
    _, population, symmetry = networks()
    balanced = ob.balance(population, symmetry, tolerance=1e-13).population
    assert balanced is not None
    assert float(imbalance(balanced, symmetry).abs().max()) < 1e-10
    assert float(imbalance(population, symmetry).abs().max()) > 1e-2


def test_gradient_flow_keeps_it_and_decay_shrinks_it() -> None:
    model, _, symmetry = networks()
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(20, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    start = imbalance(ob.Population.from_models([model]), symmetry)
    rate, steps, decay = 1e-4, 2000, 0.5
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimiser.step()
    last = imbalance(ob.Population.from_models([model]), symmetry)
    expected = start * (1 - rate * decay) ** (2 * steps)
    moved = float((start - last).abs().max())
    assert moved > 0.15 * float(start.abs().max())  # exp(-0.2) is left
    assert float((last - expected).abs().max()) < 0.01 * moved  # steps are small, not infinitely so
