"""A researcher has draws of her own sampler: what do they say about the weights, and what are they worth?

`python examples/researcher.py` takes some five seconds and writes the folder researcher/.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import onebasin as ob

FOLDER = Path("researcher")


def network() -> nn.Module:
    """Her model: a classifier of 8 x 8 digits."""
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def langevin(seed: int, x: torch.Tensor, y: torch.Tensor, draws: int = 20) -> list[dict[str, np.ndarray]]:
    """Her sampler: Langevin dynamics with a normal prior of variance 0.5, every tenth step after 200 steps."""
    torch.manual_seed(seed)
    model, step, kept = network(), 3e-4, []
    for number in range(200 + 10 * draws):
        model.zero_grad()
        weights = parameters_to_vector(model.parameters())
        energy = nn.functional.cross_entropy(model(x), y, reduction="sum") + weights.square().sum()
        energy.backward()
        slope = parameters_to_vector([weight.grad for weight in model.parameters()])
        noise = (2 * step) ** 0.5 * torch.randn_like(weights)
        vector_to_parameters(weights.detach() - step * slope + noise, model.parameters())
        if number >= 200 and number % 10 == 9:
            kept.append({name: value.numpy().copy() for name, value in model.state_dict().items()})
    return kept


def main() -> None:
    """Open the draws, remove symmetries, fit a posterior, evaluate it, and show all of it on one page."""
    FOLDER.mkdir(exist_ok=True)
    train, test = ob.data.split(*ob.data.digits(), test=0.5, seed=0)
    chains = [langevin(seed, *train) for seed in range(3)]
    arrays = {name: np.stack([[draw[name] for draw in chain] for chain in chains]) for name in chains[0][0]}
    np.savez(FOLDER / "draws.npz", **arrays)  # (chains, draws, *shape) for each tensor, as samplers keep them

    model = network()
    population = ob.Population.from_arviz(dict(np.load(FOLDER / "draws.npz")))
    symmetry = ob.discover(model, train[0][:2])
    aligned = ob.align(population, symmetry)
    diagnosis = ob.diagnose(model, population, test[0][:20], aligned=aligned.population)
    posterior = ob.fit(aligned.population, model=model)
    refined = ob.refine(model, posterior, population, train[0], steps=100, draws=16)
    evaluation = ob.evaluate(model, refined, test, reference=population, draws=50, n_resamples=50)
    print(diagnosis)
    print(evaluation)

    places = ob.population_map(population, aligned=aligned)
    places.plot()
    plt.savefig(FOLDER / "map.png")
    print(
        ob.report(
            FOLDER / "page", symmetry, places, aligned, diagnosis, refined, evaluation, title="My draws", figures=False
        )
    )


if __name__ == "__main__":
    main()
