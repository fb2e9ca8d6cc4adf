"""What a crowd of networks is worth: tensors in, tensors out."""

from onebasin.metrics.agreement import agreement, total_variation
from onebasin.metrics.bootstrap import Interval, interval
from onebasin.metrics.calibration import Reliability, ace, ece, reliability
from onebasin.metrics.concordance import kendall_tau
from onebasin.metrics.detection import aupr, auroc, fpr95
from onebasin.metrics.effective import ess, mcse
from onebasin.metrics.entropy import entropy, expected_entropy, mutual_information, predictive_entropy
from onebasin.metrics.mixing import ebfmi, rhat
from onebasin.metrics.mmd import mmd, mmd_interval, mmd_test
from onebasin.metrics.ood_scores import energy, max_logit, msp
from onebasin.metrics.pairs import pairwise_mutual_information
from onebasin.metrics.regression import coverage, gaussian_nll, rmse, width
from onebasin.metrics.scores import accuracy, brier, nll
from onebasin.metrics.temperature import configurational_temperature, kinetic_temperature
from onebasin.metrics.tempering import best_temperature, tempered

__all__ = [
    "Interval",
    "Reliability",
    "accuracy",
    "ace",
    "agreement",
    "aupr",
    "auroc",
    "best_temperature",
    "brier",
    "configurational_temperature",
    "coverage",
    "ebfmi",
    "ece",
    "energy",
    "entropy",
    "ess",
    "expected_entropy",
    "fpr95",
    "gaussian_nll",
    "interval",
    "kendall_tau",
    "kinetic_temperature",
    "max_logit",
    "mcse",
    "mmd",
    "mmd_interval",
    "mmd_test",
    "msp",
    "mutual_information",
    "nll",
    "pairwise_mutual_information",
    "predictive_entropy",
    "reliability",
    "rhat",
    "rmse",
    "tempered",
    "total_variation",
    "width",
]
