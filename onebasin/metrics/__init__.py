"""Numbers from tensors: scores, calibration, detection, distances, diagnostics of chains.

Probabilities and logits are (examples, classes) for an average predictive, (members, examples, classes) for networks;
targets are class numbers (examples,). With `weights` (..., examples), counts of examples, the result is (...), else a
single number; results are float64. Arrays of numpy are taken like tensors; what does not fit raises `InputError`.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from onebasin.metrics.bootstrap import Counts, Interval, absolute, gaps_of, interval, resampled, takes_weights
from onebasin.metrics.calibration import COLDEST, Reliability, ace, best_temperature, ece, reliability, tempered
from onebasin.metrics.chains import configurational_temperature, ebfmi, ess, kinetic_temperature, mcse, rhat
from onebasin.metrics.concordance import kendall_tau, pearson, ranks, spearman
from onebasin.metrics.depth import (
    absolute_relative_error,
    depth_errors,
    depth_sums,
    silog,
    squared_relative_error,
    threshold_accuracy,
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
from onebasin.metrics.pixels import (
    areas,
    bin_sums,
    image_gaps,
    iou,
    iou_of,
    mean_iou,
    pixel_reliability,
    score_counts,
    separation_of,
)
from onebasin.metrics.probabilities import as_class_numbers, weighted_mean
from onebasin.metrics.regression import (
    central_interval,
    coverage,
    gaussian_nll,
    log_density,
    mixture_quantile,
    rmse,
    width,
)
from onebasin.metrics.scores import accuracy, agreement, brier, nll, total_variation

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
    "METRICS",
    "Across",
    "Counts",
    "Interval",
    "Pooled",
    "Reliability",
    "Within",
    "absolute",
    "absolute_relative_error",
    "accuracy",
    "ace",
    "add_absolutes",
    "agreement",
    "areas",
    "as_class_numbers",
    "aupr",
    "auroc",
    "bandwidths",
    "best_temperature",
    "bin_sums",
    "brier",
    "central_interval",
    "configurational_temperature",
    "coverage",
    "depth_errors",
    "depth_sums",
    "ebfmi",
    "ece",
    "energy",
    "entropy",
    "entropy_score",
    "ess",
    "expected_entropy",
    "fpr95",
    "gaps_of",
    "gaussian_nll",
    "image_gaps",
    "interval",
    "iou",
    "iou_of",
    "kendall_tau",
    "kernel_matrix",
    "kinetic_temperature",
    "log_density",
    "max_logit",
    "mcse",
    "mean_iou",
    "metric_of",
    "mirrored",
    "mixture_quantile",
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
    "pixel_reliability",
    "predictive_entropy",
    "random_counts",
    "random_sides",
    "ranks",
    "reliability",
    "resampled",
    "rhat",
    "rmse",
    "rounding",
    "score_counts",
    "separation",
    "separation_of",
    "side_statistics",
    "silog",
    "spearman",
    "squared_relative_error",
    "takes_weights",
    "tempered",
    "threshold_accuracy",
    "total_variation",
    "unbiased",
    "unit_of",
    "weighted_mean",
    "weighted_statistics",
    "width",
]
