"""Every number of one crowd in the table, in the paper's units."""

from __future__ import annotations

import math

from torch import Tensor

from onebasin.assess import evaluate
from onebasin.discrepancy import discrepancy
from onebasin.population import Population
from onebasin.predict.predicting import predict
from onebasin.studies.symmetry.crowds import Desk, hmc, problem, reference, symmetry

Numbers = dict[str, float]

FORM = "unit-norm/max"  # in which symmetries are removed: rows of length 1, sorted by their largest entry
PRESET = "paper"  # Laplace and Gaussian kernels at ten bandwidths each
SQUARED = 10.0  # what the paper most likely multiplies squared MMD by
PERCENT, PER_MILLE, HUNDREDTHS = 100.0, 1000.0, 100.0
SYMMETRIC = ("hmc_mmd", "hmc_mmd_runs", "hmc_mmd_rest", "hmc_ns", "hmc_ns_rest", "tv", "agreement")  # in both crowds
COMPARED = 30  # draws of each chain of HMC that enter a comparison of weights: neighbours say little more


def numbers(bench: Desk, crowd: Population, *, rival: Population | None = None) -> Numbers:
    """All measures of a crowd.

    Args:
        bench: with reference and HMC.
        crowd: to be judged.
        rival: the HMC that it is compared with; that of the study unless given.
    """
    own = problem(bench)
    answers = hmc_predictive(bench) if rival is None else predict(own.model, rival, own.test[0], average=True)
    found = _predictive(bench, crowd, answers)
    found |= _apart(bench, crowd, reference(bench), "")
    return found | _apart(bench, crowd, thinned(bench) if rival is None else rival, "hmc_")


def thinned(bench: Desk) -> Population:
    """HMC with at most `COMPARED` draws of each chain, evenly spread."""
    step = max(1, bench.plan.chain_draws // COMPARED)
    return bench.once("hmc-thinned", lambda: hmc(bench)[::step])


def hmc_predictive(bench: Desk) -> Tensor:
    """The average predictive of all HMC draws on test inputs (examples, classes)."""
    own = problem(bench)
    return bench.once("hmc-predictive", lambda: predict(own.model, hmc(bench), own.test[0], average=True))


def _predictive(bench: Desk, crowd: Population, answers: Tensor) -> Numbers:
    own = problem(bench)
    # Errors are taken over runs, not over examples.
    found = evaluate(own.model, crowd, own.test, outside=own.outside, reference=answers, resamples=2)
    inside, told = found.inside, found.detection["msp"]
    return {
        "accuracy": PERCENT * inside["accuracy"].value,
        "ece": PERCENT * inside["ece"].value,
        "ace": PER_MILLE * inside["ace_class_wise"].value,
        "brier": PERCENT * inside["brier"].value,
        "aupr": PERCENT * told["aupr_in"].value,
        "aupr_out": PERCENT * told["aupr_out"].value,
        "auroc": PERCENT * told["auroc"].value,
        "fpr95": PERCENT * told["fpr95_in"].value,
        "nll": inside["nll"].value,
        "temperature": math.nan if found.temperature is None else found.temperature,
        "id_mi": HUNDREDTHS * inside["mutual_information"].value,
        "ood_mi": HUNDREDTHS * found.outside["mutual_information"].value,
        "tv": PERCENT * found.reference["total_variation"].value,
        "agreement": PERCENT * found.reference["agreement"].value,
    }


def _apart(bench: Desk, crowd: Population, other: Population, prefix: str) -> Numbers:
    """MMD with and without symmetries, and the parts of them that runs explain."""
    found = discrepancy(
        crowd, other, symmetry=symmetry(bench), forms=FORM, preset=PRESET, permutations=0, resamples=0, layers=False
    )
    raw, without = found.raw.total, found.ns
    assert without is not None  # a form was asked for
    return {
        f"{prefix}mmd": SQUARED * raw.squared,
        f"{prefix}mmd_runs": SQUARED * raw.explained,
        f"{prefix}mmd_rest": SQUARED * raw.remainder,
        f"{prefix}ns": SQUARED * without.squared,
        f"{prefix}ns_rest": SQUARED * without.remainder,
    }
