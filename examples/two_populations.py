"""Does one run replace many trainings? Populations compared as weights, without symmetries, and as functions.

Run it with `python examples/two_populations.py`; it takes some ten seconds.
"""

import math
from dataclasses import replace

import onebasin as ob
from onebasin.data.dataset import split
from onebasin.data.load import digits
from onebasin.examples.small import digits_mlp


def main() -> None:
    """Train a reference, sample three candidates, and see how far each is from the reference."""
    train, test = split(*digits(), test=0.5, seed=0)
    model = digits_mlp()
    symmetry = ob.discover(model, test[0][:2])
    ensemble = ob.Ensemble(epochs=20, lr=3e-3)
    swag = ob.SWAG(epochs=20, lr=3e-3)
    reference = ob.sample(model, train, ensemble, chains=24, prior=0.3, seed=0)
    populations = {
        "12 other trainings": ob.sample(model, train, ensemble, chains=12, prior=0.3, seed=1),
        "SWAG, 4 runs of 3": ob.sample(model, train, replace(swag, draws=3), chains=4, prior=0.3, seed=1),
        "SWAG, 1 run of 12": ob.sample(model, train, replace(swag, draws=12), prior=0.3, seed=1),
    }

    quick = {"layers": False, "permutations": 199, "n_resamples": 0}
    print(f"{len(reference)} trainings as the reference")
    print(f"{'':20s}{'raw MMD^2':>10s}{'NS':>8s}{'from runs':>11s}{'p':>7s}{'functions':>11s}{'diversity':>11s}")
    for name, population in populations.items():
        found = ob.discrepancy(population, reference, symmetry=symmetry, model=model, inputs=test[0], **quick)
        pairs = ob.diversity(model, population, test[0]).in_distribution.pairs.mean
        canonical = found.mmd_canonical
        runs = "unknown" if math.isnan(canonical.explained) else f"{canonical.explained:.3f}"
        numbers = f"{found.raw.total.squared:10.3f}{canonical.squared:8.3f}{runs:>11s}{canonical.p_value:7.3f}"
        print(f"{name:20s}{numbers}{found.function.squared:11.3f}{pairs:11.4f}")


if __name__ == "__main__":
    main()
