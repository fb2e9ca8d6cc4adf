"""Does sampling predict as well as the best published results on small tabular sets?

    python -m benchmarks.uci [--seeds 3] [--sets boston concrete energy yacht] [--only airfoil|splits]

airfoil: 10 networks 5-16-16-16-16-2 that give mean and log standard deviation, prior N(0, 1), on the very split of the
published figures of microcanonical Langevin ensembles (bde: RMSE 0.1215 ± 0.0042, NLL -0.9126 ± 0.0131 over 5 seeds of
the networks, for standardised targets; about 240 s on 10 cores). Their NLL is that of a Gaussian with the mean and
variance of the predictive, so ours is too; that of the mixture itself is printed beside it. splits: one hidden layer of
50 on published splits, beside MC dropout.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import tabular
from benchmarks.tabular import Split
from benchmarks.targets import Targets, head, spread
from onebasin.functional.population_pass import predictions
from onebasin.inference import HMC, MCLMC, Ensemble, sample
from onebasin.inference.likelihood import LearnedNoise, learned_gaussian
from onebasin.metrics.chains import rhat

SETS = ("boston", "concrete", "energy", "yacht")
RMSE, NLL, SECONDS = 0.1215 + 0.0042, -0.9126 + 0.0131, 300.0  # one standard deviation is granted
SPLITS_SECONDS = 900.0
_TRAINING: dict[str, Any] = {"batch": None, "epochs": 3000, "lr": 0.02, "lr_schedule": "cosine"}
_AIRFOIL: dict[str, Any] = {
    **_TRAINING,
    "warmup": 90_000,
    "draws": 100,
    "thin": 520,
    "length": 150.0,
    "loose": 0.5,
    "variance": 0.1,
}
_SPLITS: dict[str, Any] = {"batch": None, "epochs": 300, "lr": 0.01, "warmup": 100, "draws": 100, "leapfrog": 30}


def network(inputs: int, widths: Sequence[int], outputs: int) -> nn.Sequential:
    """A relu MLP."""
    sizes = [inputs, *widths]
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs))


def scores(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """RMSE of the mean prediction and mean log density of the mixture; outputs (members, n, 2), targets (n, 1)."""
    outputs, targets = outputs.double(), targets.double()
    error = (outputs[..., :1].mean(0) - targets).square().mean().sqrt()
    densities = torch.stack([learned_gaussian(member, targets) for member in outputs])
    return float(error), float((densities.logsumexp(0) - math.log(len(outputs))).mean())


def moment_matched(outputs: Tensor, targets: Tensor) -> float:
    """Mean log density of the Gaussian with the mean and variance of the predictive mixture."""
    outputs, targets = outputs.double(), targets.double()
    means, variances = outputs[..., :1], (2 * outputs[..., 1:]).exp()
    mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    return float(learned_gaussian(torch.cat([mean, 0.5 * variance.log()], 1), targets).mean())


def airfoil(targets: Targets, seeds: Sequence[int]) -> None:
    """Judge microcanonical sampling on airfoil."""
    head("airfoil", "10 chains, the published split, standardised targets; deep ensemble: where the chains start")
    rows = [_airfoil_once(seed) for seed in seeds]
    errors, losses, seconds = ([row[place] for row in rows] for place in range(3))
    print(f"  RMSE {spread(errors, 4)}, NLL {spread(losses, 4)}, seconds {spread(seconds, 0)}")
    targets.judge(f"airfoil RMSE <= {RMSE:.4f}", f"{statistics.mean(errors):.4f}", statistics.mean(errors) <= RMSE)
    targets.judge(f"airfoil NLL <= {NLL:.4f}", f"{statistics.mean(losses):.4f}", statistics.mean(losses) <= NLL)
    targets.judge(f"airfoil in {SECONDS:.0f} s", f"{max(seconds):.0f} s", max(seconds) <= SECONDS)


def _airfoil_once(seed: int) -> tuple[float, float, float]:
    split = tabular.published_airfoil()
    model = network(5, [16] * 4, 2)
    common: dict[str, Any] = {"chains": 10, "seed": seed, "workers": 2, "noise": "learned"}
    ensemble = sample(model, split.train, Ensemble(**_TRAINING), **common)
    outputs = predictions(model, ensemble, split.test[0])
    error, density = scores(outputs, split.test[1])[0], moment_matched(outputs, split.test[1])
    print(f"  seed {seed}: deep ensemble RMSE {error:.4f}, NLL {-density:.4f}", flush=True)
    begin = time.perf_counter()
    population = sample(model, split.train, MCLMC(**_AIRFOIL), **common)
    seconds = time.perf_counter() - begin
    outputs = predictions(model, population, split.test[0])
    error, mixture = scores(outputs, split.test[1])
    density = moment_matched(outputs, split.test[1])
    found = population.provenance["diagnostics"]
    mixing = rhat(outputs[..., 0].unflatten(0, (common["chains"], -1)))  # members are ordered by chain
    print(
        f"  seed {seed}: sampled RMSE {error:.4f}, NLL {-density:.4f} (mixture {-mixture:.4f}), {seconds:.0f} s, "
        f"step {statistics.mean(found['step_size']):.2g}, "
        f"energy variance per weight {statistics.mean(found['energy_variance']):.2g}, "
        f"R-hat of test predictions: median {float(mixing.median()):.2f}, largest {float(mixing.max()):.2f}",
        flush=True,
    )
    return error, -density, seconds


def splits(targets: Targets, sets: Sequence[str]) -> None:
    """Judge HMC on the published splits: log likelihood in the original unit at least that of MC dropout."""
    head("UCI splits", "one hidden layer of 50, one learned noise level, HMC with 4 chains; gain ± standard error")
    begin = time.perf_counter()
    for name in sets:
        rows = [_split_once(split, seed) for seed, split in enumerate(tabular.fixed_splits(name))]
        gains = [row[0] - row[2] for row in rows]
        gain, error = statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
        found, known = (statistics.mean(row[place] for row in rows) for place in (0, 2))
        ours, theirs = (statistics.mean(row[place] for row in rows) for place in (1, 3))
        print(f"  {name}: log likelihood {found:.3f}, MC dropout {known:.3f}; RMSE {ours:.3f}, MC dropout {theirs:.3f}")
        targets.judge(f"{name} at least MC dropout's log likelihood", f"{gain:+.3f} ± {error:.3f}", gain >= 0)
    seconds = time.perf_counter() - begin
    if set(sets) == set(SETS):
        targets.judge(f"UCI splits in {SPLITS_SECONDS:.0f} s", f"{seconds:.0f} s", seconds <= SPLITS_SECONDS)


def _split_once(split: Split, seed: int) -> tuple[float, float, float, float]:
    """Log likelihood and RMSE in the original unit, ours and the reference's."""
    assert split.reference is not None  # published splits have one
    model = LearnedNoise(network(split.train[0].shape[1], [50], 1))
    population = sample(model, split.train, HMC(**_SPLITS), chains=4, seed=seed, noise="learned")
    error, density = scores(predictions(model, population, split.test[0]), split.test[1])
    return density - math.log(split.unit), error * split.unit, *split.reference


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--only", choices=("airfoil", "splits"))
    chosen = parser.parse_args()
    if not tabular.present():
        print(tabular.ABSENT)
        return 0
    targets = Targets()
    if chosen.only != "splits":
        airfoil(targets, range(chosen.seeds))
    if chosen.only != "airfoil":
        splits(targets, chosen.sets)
    return targets.close()


if __name__ == "__main__":
    raise SystemExit(main())
