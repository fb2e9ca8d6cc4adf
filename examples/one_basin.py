"""Five networks trained from different starts: scattered in weight space, and then in one basin.

Run it with `python examples/one_basin.py`; it takes a few seconds.
"""

import torch
from torch import nn

import onebasin as ob


def network() -> nn.Sequential:
    """Two hidden layers of 64 units."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def rings(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes: inside and outside of a circle."""
    x = torch.randn(1000, 2, generator=generator)
    return x, (x.norm(dim=1) > 1.2).long()


def trained(seed: int, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A network trained from its own start."""
    torch.manual_seed(seed)
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model


def main() -> None:
    """Train, align, compare."""
    x, y = rings(torch.Generator().manual_seed(0))
    model = network()
    symmetry = ob.discover(model, x[:2])
    population = ob.Population.from_models([trained(seed, x, y) for seed in range(5)])

    found = ob.align(population, symmetry)  # every member moved, no function changed
    print(found)

    a, b = population.member(0), population.member(1)
    raw = ob.barrier(model, a, b, (x, y))
    aligned = ob.barrier(model, found.population.member(0), found.population.member(1), (x, y))
    print(f"loss barrier between two members: {raw.max:.3f} as trained, {aligned.max:.3f} aligned")

    mean = {name: population.tensor(name).mean(0) for name in population.names}
    merged = ob.merge(model, population, symmetry)
    for title, state in (("mean of the networks as trained", mean), ("mean of the aligned networks", merged)):
        right = torch.func.functional_call(model, state, x).argmax(1) == y
        print(f"{title}: {float(right.float().mean()):.3f} of the points right")


if __name__ == "__main__":
    main()
