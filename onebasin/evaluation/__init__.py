"""Evaluation of networks and populations: evaluate, diversity, discrepancy."""

from onebasin.evaluation.calibrate import CALIBRATED, CALIBRATIONS, Calibration, calibrate
from onebasin.evaluation.conformal import Conformal, ConformalCoverage, Stratum, conformal
from onebasin.evaluation.discrepancy import NORMAL_FORMS, PRESETS, Compared, Discrepancy, MMDResult, discrepancy
from onebasin.evaluation.distances import Distances, pair_distances, tensor_distances
from onebasin.evaluation.diversity import (
    Collapse,
    Diversity,
    Pair,
    PairStatistics,
    Resampled,
    Side,
    correlation_of_pairs,
    diversity,
    mean_of_pairs,
)
from onebasin.evaluation.evaluate import Estimate, Evaluation, evaluate
from onebasin.evaluation.runs import same_run_share
from onebasin.evaluation.shift import Shift, ShiftedInputs

__all__ = [
    "CALIBRATED",
    "CALIBRATIONS",
    "NORMAL_FORMS",
    "PRESETS",
    "Calibration",
    "Collapse",
    "Compared",
    "Conformal",
    "ConformalCoverage",
    "Discrepancy",
    "Distances",
    "Diversity",
    "Estimate",
    "Evaluation",
    "MMDResult",
    "Pair",
    "PairStatistics",
    "Resampled",
    "Shift",
    "ShiftedInputs",
    "Side",
    "Stratum",
    "calibrate",
    "conformal",
    "correlation_of_pairs",
    "discrepancy",
    "diversity",
    "evaluate",
    "mean_of_pairs",
    "pair_distances",
    "same_run_share",
    "tensor_distances",
]
