"""The numbers of a crowd of classifiers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from onebasin.assess.evaluation import Estimate
from onebasin.assess.gathering import Averages
from onebasin.assess.intervals import Sampling, calibration_estimates, estimates, means, only
from onebasin.metrics.agreement import agreement, total_variation
from onebasin.metrics.bootstrap import Counts
from onebasin.metrics.calibration import ace, ece
from onebasin.metrics.detection import separation
from onebasin.metrics.probabilities import as_class_numbers
from onebasin.metrics.scores import accuracy, brier
from onebasin.metrics.tempering import COLDEST, best_temperature, tempered
from onebasin.metrics.weighing import weighted_mean


def predictive_numbers(own: Averages, targets: Tensor, bins: int, sampling: Sampling) -> dict[str, Estimate]:
    """Accuracy, NLL, Brier score, calibration errors and mean mutual information on labelled examples."""
    p, losses, information = own.probabilities, _losses(own.log_probabilities, targets), own.mutual_information

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = only(counts)
        return {
            "accuracy": accuracy(p, targets, weights=weights),
            "nll": weighted_mean(losses, weights),
            "brier": brier(p, targets, weights=weights),
            "mutual_information": weighted_mean(information, weights),
        }

    errors = {
        "ece": partial(ece, bins=bins),
        "ace_class_wise": partial(ace, bins=bins, kind="class-wise"),
        "ace_top_label": partial(ace, bins=bins, kind="top-label"),
    }
    found = estimates(numbers, [len(p)], sampling) | calibration_estimates(errors, p, targets, sampling)
    return {name: found[name] for name in ("accuracy", "nll", "brier", *errors, "mutual_information")}


def tempered_numbers(
    logs: Tensor, targets: Tensor, bins: int, sampling: Sampling
) -> tuple[float | None, dict[str, Estimate]]:
    """T fitted on a random half of the examples; NLL and ECE on the others with T and, as before, without.

    The average predictive is tempered as a whole: p^(1/T), scaled to sum 1. The intervals take T as given. None and
    no numbers where there are no two halves, or no T is best: where every example of the first half is right, smaller
    is always better, and a single mistake in the other half then costs without bound.
    """
    if len(logs) < 2:
        return None, {}
    generator = torch.Generator().manual_seed(sampling.seed)
    order = torch.randperm(len(logs), generator=generator).to(logs.device)
    fitting, judging = order[: len(order) // 2], order[len(order) // 2 :]
    temperature = best_temperature(logs[fitting], targets[fitting])
    if temperature <= COLDEST:
        return None, {}
    goals, degrees = targets[judging], {"": temperature, "_before": 1.0}
    losses = {end: _losses((logs[judging] / degree).log_softmax(1), goals) for end, degree in degrees.items()}
    predicted = {end: tempered(logs[judging], degree) for end, degree in degrees.items()}

    likelihoods = estimates(means({f"nll{end}": own for end, own in losses.items()}), [len(goals)], sampling)
    found: dict[str, Estimate] = {}
    for end in degrees:
        error = calibration_estimates({f"ece{end}": partial(ece, bins=bins)}, predicted[end], goals, sampling)
        found |= {f"nll{end}": likelihoods[f"nll{end}"], **error}
    return temperature, found


def comparison_numbers(own: Tensor, reference: Tensor, sampling: Sampling) -> dict[str, Estimate]:
    """Agreement and total variation of two average predictives (examples, classes)."""

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = only(counts)
        return {
            "agreement": agreement(own, reference, weights=weights),
            "total_variation": total_variation(own, reference, weights=weights),
        }

    return estimates(numbers, [len(own)], sampling)


def outside_numbers(foreign: Averages, sampling: Sampling) -> dict[str, Estimate]:
    """Mean mutual information on foreign inputs."""
    return estimates(means({"mutual_information": foreign.mutual_information}), [len(foreign.logits)], sampling)


def detection_numbers(own: Averages, foreign: Averages, sampling: Sampling) -> dict[str, dict[str, Estimate]]:
    """How well each score tells foreign inputs from familiar ones, which are drawn separately for the intervals."""
    outside = foreign.scores
    pairs = {name: (inside, outside[name]) for name, inside in own.scores.items()}

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = None if counts is None else (counts[0], counts[1])
        return {
            f"{score}.{name}": value
            for score, pair in pairs.items()
            for name, value in separation(*pair, weights=weights).items()
        }

    found: dict[str, dict[str, Estimate]] = {score: {} for score in pairs}
    for key, estimate in estimates(numbers, [len(own.logits), len(foreign.logits)], sampling).items():
        score, _, name = key.partition(".")
        found[score][name] = estimate
    return found


def _losses(logs: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each example, from logarithms: an NLL that does not underflow."""
    return -logs.gather(1, as_class_numbers(targets, logs)[:, None]).squeeze(1)
