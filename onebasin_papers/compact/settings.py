"""Settings of both presets for paper 1, what the paper published, the glossary and the summary of the report.

Published numbers are those of the table of Xiao, Liu & Bamler (arXiv 2401.00611), and those read off their vector
figures. All of them are for MNIST and one hidden layer, 784-512-10. Losses and distances come from figures and are
exact to about the digit shown; accuracies are in per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onebasin as ob
from onebasin_papers.study import Settings

UNITS = 512
GRADIENTS = 5_000_000  # of their HMC run, each over all 60,000 images
SHARES_KEPT = (100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 1)  # per cent, of the pruning curves


class Swapped(NamedTuple):
    """One place of their figure 2; squared distances, and the barrier at the midpoint in nats."""

    after: float
    start: float
    trained: float
    undone: float | None
    barrier: float


# Transpositions at the start -> what they found, as means over five runs.
TRANSPOSITIONS = {
    1: Swapped(1, 1.38, 2.9, 0.27, 0.000),
    53: Swapped(53, 70.5, 134.7, 0.27, 0.017),
    105: Swapped(105, 135.1, 258.4, 0.31, 0.036),
    157: Swapped(157.5, 193.3, 373.1, 0.35, 0.084),
    209: Swapped(209, 242.9, 461.3, None, 0.117),
    261: Swapped(261, 287.0, 550.0, 0.29, 0.183),
    313: Swapped(313.5, 319.6, 611.2, 0.27, 0.247),
    344: Swapped(344.5, 332.0, 634.1, 0.33, 0.314),
    417: Swapped(417, 348.1, 664.1, 0.33, 0.298),
    511: Swapped(510.5, 348.8, 666.1, 0.31, 0.283),
}
PEAK = 344  # transpositions with the highest barrier
LARGEST_CHANGE = 2  # of the number of transpositions by training, over all runs

# Loss at lambda = 0, 0.1, ..., 1 after 50 epochs, before and after rebasin; and the largest number of transpositions on
# the axis of the panel after rebasin.
PATH_BEFORE = (0.10, 0.12, 0.17, 0.25, 0.34, 0.38, 0.34, 0.25, 0.17, 0.12, 0.10)
PATH_AFTER = (0.100, 0.103, 0.106, 0.110, 0.112, 0.113, 0.112, 0.110, 0.107, 0.103, 0.101)
BARRIER_BEFORE, BARRIER_AFTER = 0.28, 0.012
SWAPS_BEFORE, SWAPS_AFTER = 510, 50


class Scores(NamedTuple):
    """One column of their table 1; accuracies in per cent."""

    agreement: float
    variation: float
    draws: float
    mean: float | None


TABLE = {
    "HMC samples": Scores(1, 0, 98.43, None),
    "HMC q_d": Scores(0.1212, 0.8641, 11.11, 28.06),
    "HMC q_r": Scores(0.8249, 0.6570, 82.34, 92.25),
    "Ensemble members": Scores(0.9931, 0.0229, 98.66, None),
    "Ensemble q_d": Scores(0.5239, 0.7210, 52.25, 86.40),
    "Ensemble q_r": Scores(0.9868, 0.0495, 97.72, 97.97),
    "VI q": Scores(0.9885, 0.0235, 98.11, 98.04),
}


class Widths(NamedTuple):
    """Standard deviations of all weights, in units of the prior's; None where the figure only says "below 0.01"."""

    mean: float | None
    low: float | None
    median: float | None
    high: float | None
    at_prior: float | None


SIGMA = {
    "HMC q_d": Widths(0.998, 0.961, 1.001, 1.041, 0.996),
    "HMC q_r": Widths(0.993, 0.952, 0.992, 1.032, 0.995),
    "Ensemble q_d": Widths(0.041, None, 0.025, 0.125, None),
    "Ensemble q_r": Widths(0.029, None, None, 0.095, None),
    "VI q": Widths(0.913, 0.405, 0.995, 1.025, 0.81),
}

# Test accuracy in per cent at SHARES_KEPT; the least uncertain weights are kept.
PRUNING = {
    "HMC q_r": (92.25, 73.45, 65.21, 65.10, 63.72, 70.98, 68.28, 63.67, 53.43, 33.26, 16.97, 7.94),
    "HMC q_d": (28.07, 12.09, 12.39, 12.52, 12.18, 13.12, 13.02, 12.97, 12.90, 12.91, 12.17, 10.97),
    "HMC sample": (96.62, 62.65, 52.52, 50.68, 42.58, 32.71, 30.45, 19.76, 16.64, 14.74, 12.16, 5.64),
    "Ensemble q_r": (97.98, 54.50, 27.36, 10.26, 9.74, 10.75, 10.13, 9.80, 9.80, 9.80, 9.80, 9.80),
    "Ensemble q_d": (86.40, 9.78, 9.74, 9.74, 9.74, 9.74, 9.74, 10.58, 9.80, 9.80, 9.80, 9.80),
    "Ensemble member": (98.42, 29.32, 14.63, 9.74, 9.74, 9.74, 9.74, 9.80, 9.80, 9.80, 9.80, 9.80),
    "Ensemble, HMC sigma": (97.98, 95.72, 94.50, 92.89, 91.42, 90.50, 86.65, 83.56, 79.84, 62.64, 40.54, 19.72),
    "VI q": (98.04, 98.06, 98.07, 98.07, 98.07, 98.07, 98.07, 98.09, 98.05, 97.51, 70.08, 14.96),
}


@dataclass(frozen=True)
class CompactSettings(Settings):
    """Sizes and budgets.

    The quick preset is about one hidden layer of 64 units on the embedded digits. The full one is the paper's own
    network and data, 784-512-10 on MNIST, with its optimisers, grids and numbers of epochs. Only HMC has to be cut
    short there: a gradient over all 60,000 images takes 1.4 s on one core (measured), so the paper's 5,000,000 would
    keep two cores busy for 40 days. The 80,000 of this preset, 1.6 %, take 16 hours; what they are worth is measured
    (acceptance, effective sample size, R-hat) and stands in the report. The paper's 500 networks with planted
    permutations would take ten hours; ten networks say the same (see `retrained`). All parts together take more than a
    day (an estimate from steps that were timed).

    Attributes:
        units: hidden units; with an own model, its width.
        planted: numbers of transpositions that are planted.
        runs: repetitions with other planted permutations.
        retrained: whether every permuted network P m0 is really trained, from a start of its own for each number. SGD
            treats all units alike, so training P m0 gives P (m0 trained with that order of examples) up to rounding:
            without it two orders are trained from one start per run, and all permutations are planted afterwards.
        pairs: independent pairs of networks whose path is followed through training.
        epochs: of SGD for planted permutations and for pairs.
        every: epochs from one look at a path to the next.
        rate: learning rate of SGD.
        rates: multiples of the learning rate with which the planted permutations are tried too.
        seeds: ensembles and variational posteriors.
        hmc_runs: independent runs of HMC, each of several chains.
        chains: in a run of HMC, and of a method of one's own.
        warmup: trajectories of HMC before the first draw.
        draws: networks drawn from each chain.
        leapfrog: steps of a trajectory of HMC, on average.
        members: networks of an ensemble.
        widths: numbers of hidden units with which ensembles are tried, ascending.
        ensemble_epochs: of training an ensemble by Adam, with rate 1e-3 and batches of 100.
        vi_epochs: of variational inference.
        vi_rate: learning rate of variational inference.
        posterior_draws: networks drawn from each compact form.
        refine_steps: of the refinement; 0 leaves it out.
        prior: standard deviation of the Gaussian prior of every weight.
        workers: processes for HMC and methods of one's own.
    """

    units: int = 64
    planted: tuple[int, ...] = (1, 7, 13, 19, 26, 32, 39, 42, 51, 63)
    runs: int = 3
    retrained: bool = True
    pairs: int = 3
    epochs: int = 50
    every: int = 5
    rate: float = 0.01
    rates: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    seeds: int = 3
    hmc_runs: int = 3
    chains: int = 4
    warmup: int = 100
    draws: int = 100
    leapfrog: int = 100
    members: int = 5
    widths: tuple[int, ...] = (64, 128, 256, 512)
    ensemble_epochs: int = 200
    vi_epochs: int = 500
    vi_rate: float = 3e-2
    posterior_draws: int = 100
    refine_steps: int = 400
    prior: float = 1.0
    workers: int = 2

    @property
    def gradients(self) -> int:
        """Gradients over all training examples in one run of HMC, on average."""
        return self.chains * (self.warmup + self.draws) * self.leapfrog


LEAST = {
    "units": 2, "planted": 1, "runs": 1, "pairs": 1, "epochs": 1, "every": 1, "seeds": 1, "hmc_runs": 1, "chains": 2,
    "draws": 4, "leapfrog": 1, "members": 2, "widths": 2, "ensemble_epochs": 1, "vi_epochs": 1, "posterior_draws": 1,
    "workers": 1,
}  # fmt: skip
ROWS = ("HMC", "Ensemble", "VI")  # of the paper's tables
_GRID = tuple(1 + (UNITS - 2) * step // 49 for step in range(50))  # the paper's 50 numbers of transpositions


def preset_settings(preset: str, data_dir: str | None) -> CompactSettings:
    """The settings of a preset.

    Args:
        preset: "quick", embedded data, some minutes; or "full", the paper's network on MNIST, days.
        data_dir: the folder that holds MNIST, for the full preset; None looks at ONEBASIN_DATA.
    """
    if preset == "quick":
        return CompactSettings(preset, data_dir)
    if preset != "full":
        raise ob.errors.InputError(f'expected preset "quick" or "full", found {preset!r}: give "quick"')
    return CompactSettings(
        preset,
        data_dir,
        units=UNITS,
        planted=_GRID,
        runs=5,
        retrained=False,
        pairs=5,
        epochs=50,
        every=1,
        rate=1e-3,
        rates=(1.0, 10.0, 100.0),
        seeds=5,
        hmc_runs=1,
        chains=2,
        warmup=40,
        draws=160,
        leapfrog=200,
        ensemble_epochs=50,
        vi_epochs=50,
        vi_rate=1e-3,
        refine_steps=1000,
    )


TERMS = {
    "agreement": "Share of inputs for which two average predictives choose the same class.",
    "barrier": "How much higher the loss is on the straight line between two networks than at its ends, here at the "
    "midpoint: L((a + b) / 2) - (L(a) + L(b)) / 2.",
    "deep ensemble": "Networks trained independently from different starts; here maximum a posteriori.",
    "ECE": "Expected calibration error: mean gap between how sure a predictive is and how often it is right.",
    "effective sample size": "As many independent samples would know a mean as precisely as these dependent ones.",
    "HMC": "Hamiltonian Monte Carlo: samples of the posterior with gradients over all training examples.",
    "NLL": "Negative log likelihood of the labels under the average predictive, in nats per example.",
    "number of transpositions": "Least number of swaps of two hidden units that makes a permutation: n minus its "
    "number of cycles. A random permutation of n units has n - H_n on average, H_n = 1 + 1/2 + ... + 1/n.",
    "q_d": "Gaussian with the mean and the standard deviation of every weight over networks as they came.",
    "q_r": "The same over networks after rebasin to the first of them.",
    "R-hat": "Spread between chains over spread within them; 1 where they agree, below 1.05 where they have mixed.",
    "rebasin": "Permute the hidden units of a network so that it lies in the basin of another; its function stays.",
    "refined": "Moved by gradient until draws predict what the samples predict, on unlabelled training inputs.",
    "sigma": "Standard deviation of a weight under a posterior.",
    "signal to noise": "|mean| / standard deviation of a weight.",
    "total variation": "Half the sum of absolute differences between two class distributions, averaged over inputs.",
    "variational inference": "The Gaussian with independent weights that is closest to the posterior in KL divergence.",
}


def summarise(sections: Sequence[ob.reporting.Section]) -> list[str]:
    """How many claims hold, those that do not, and the answer of each part."""
    claims = [claim for section in sections for claim in section.claims]
    failed = [
        f"Not reproduced: {claim.text} Found: {claim.found}."
        for claim in claims
        if claim.verdict == ob.reporting.VERDICTS[2]
    ]
    answers = [section.text[0] for section in sections]
    return [f"Of {len(claims)} claims: {ob.reporting.tally(claims)}.", *failed, *answers] if claims else answers
