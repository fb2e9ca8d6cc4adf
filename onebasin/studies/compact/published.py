"""What Xiao, Liu & Bamler (arXiv 2401.00611) report: numbers of their table, and those read off their vector figures.

All of them are for MNIST and one hidden layer, 784-512-10. Losses and distances come from figures and are exact to
about the digit shown; accuracies are in per cent.
"""

from __future__ import annotations

from typing import NamedTuple

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

    mean: float
    low: float | None
    median: float | None
    high: float
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
