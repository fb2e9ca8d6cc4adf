"""Numbers from tensors: scores, calibration, detection, distances, diagnostics of chains.

Probabilities and logits are (examples, classes) for an average predictive, (members, examples, classes) for networks;
targets are class numbers (examples,). With `weights` (..., examples), counts of examples, the result is (...), else a
single number; results are float64. Arrays of numpy are taken like tensors; what does not fit raises `InputError`.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from onebasin.metrics.bootstrap import Counts, Interval, gaps_of, interval, resampled, takes_weights
from onebasin.metrics.calibration import COLDEST, Reliability, ace, best_temperature, ece, mce, reliability, tempered
from onebasin.metrics.chains import configurational_temperature, ebfmi, ess, kinetic_temperature, mcse, rhat
from onebasin.metrics.concordance import kendall_tau, pearson, ranks, spearman
from onebasin.metrics.conformal import (
    INTERVALS,
    SETS,
    class_scores,
    conformal_rank,
    conformal_threshold,
    interval_excess,
)
from onebasin.metrics.detection import (
    aupr,
    auroc,
    energy,
    entropy_score,
    fpr95,
    max_logit,
    msp,
    ood_scores,
    separation,
)
from onebasin.metrics.disagreement import disagreement, variation_ratio
from onebasin.metrics.entropy import entropy, expected_entropy, mutual_information, predictive_entropy
from onebasin.metrics.mmd import (
    FEWEST,
    Pooled,
    bandwidths,
    kernel_matrix,
    metric_of,
    mmd,
    mmd_interval,
    mmd_test,
    percentiles,
    permutation_p,
    random_counts,
    random_sides,
    rounding,
    side_statistics,
    unbiased,
    weighted_statistics,
)
from onebasin.metrics.pairs import (
    METRICS,
    Across,
    Within,
    add_absolutes,
    mirrored,
    pairwise_mutual_information,
    unit_of,
)
from onebasin.metrics.probabilities import as_class_numbers, weighted_mean
from onebasin.metrics.regression import (
    central_interval,
    coverage,
    cumulative_probability,
    gaussian_nll,
    interval_score,
    log_density,
    quantile_calibration_error,
    rmse,
    width,
)
from onebasin.metrics.scaling import SCALINGS, Isotonic, Scaling, fit_isotonic, fit_scaling, scaled_nll
from onebasin.metrics.scores import accuracy, agreement, brier, nll, total_variation
from onebasin.metrics.selective import (
    abstention,
    augrc,
    aurc,
    ause,
    confidence_and_errors,
    coverage_at_risk,
    risk_at_coverage,
)
from onebasin.metrics.smooth_calibration import smooth_ece

# What `evaluate` reports of the average probabilities of classes, by (probabilities, targets), in this order.
CLASS_METRICS: dict[str, Callable[..., Tensor]] = {
    "accuracy": accuracy,
    "nll": nll,
    "brier": brier,
    "ece": ece,
    "ace_class_wise": partial(ace, kind="class-wise"),
    "ace_top_label": partial(ace, kind="top-label"),
}

__all__ = [
    "CLASS_METRICS",
    "COLDEST",
    "FEWEST",
    "INTERVALS",
    "METRICS",
    "SCALINGS",
    "SETS",
    "Across",
    "Counts",
    "Interval",
    "Isotonic",
    "Pooled",
    "Reliability",
    "Scaling",
    "Within",
    "abstention",
    "accuracy",
    "ace",
    "add_absolutes",
    "agreement",
    "as_class_numbers",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "ause",
    "bandwidths",
    "best_temperature",
    "brier",
    "central_interval",
    "class_scores",
    "confidence_and_errors",
    "configurational_temperature",
    "conformal_rank",
    "conformal_threshold",
    "coverage",
    "coverage_at_risk",
    "cumulative_probability",
    "disagreement",
    "ebfmi",
    "ece",
    "energy",
    "entropy",
    "entropy_score",
    "ess",
    "expected_entropy",
    "fit_isotonic",
    "fit_scaling",
    "fpr95",
    "gaps_of",
    "gaussian_nll",
    "interval",
    "interval_excess",
    "interval_score",
    "kendall_tau",
    "kernel_matrix",
    "kinetic_temperature",
    "log_density",
    "max_logit",
    "mce",
    "mcse",
    "metric_of",
    "mirrored",
    "mmd",
    "mmd_interval",
    "mmd_test",
    "msp",
    "mutual_information",
    "nll",
    "ood_scores",
    "pairwise_mutual_information",
    "pearson",
    "percentiles",
    "permutation_p",
    "predictive_entropy",
    "quantile_calibration_error",
    "random_counts",
    "random_sides",
    "ranks",
    "reliability",
    "resampled",
    "rhat",
    "risk_at_coverage",
    "rmse",
    "rounding",
    "scaled_nll",
    "separation",
    "side_statistics",
    "smooth_ece",
    "spearman",
    "takes_weights",
    "tempered",
    "total_variation",
    "unbiased",
    "unit_of",
    "variation_ratio",
    "weighted_mean",
    "weighted_statistics",
    "width",
]
