"""Evaluation of networks on labelled data: scores, calibration, out-of-distribution detection, with intervals.

Which metrics are reported for classes is the table `onebasin.metrics.CLASS_METRICS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.evaluation.figures import (
    LEVELS,
    ScoreHistogram,
    coverage_curve,
    coverage_figure,
    reliability_figure,
    risk_figure,
    score_figure,
)
from onebasin.evaluation.pixels import ClassSums, Sampled, class_sums, masked_scores, score_means, value_sums
from onebasin.evaluation.shift import METRICS, Shift, ShiftedInputs, levels_of, shifted_inputs
from onebasin.functional import (
    IGNORED,
    LIKELIHOODS,
    AnyInputs,
    Bound,
    ClassLoss,
    Data,
    FixedGaussian,
    GaussianHead,
    Head,
    Inputs,
    Likelihood,
    Measured,
    OutputPart,
    batches,
    check_class_numbers,
    check_classes_fit,
    check_labels,
    check_one_hot,
    check_rows,
    examples_in,
    kind_of_targets,
    measured_of,
    pair_of,
    select_output,
    without,
)
from onebasin.metrics import (
    CLASS_METRICS,
    COLDEST,
    Counts,
    Reliability,
    absolute,
    abstention,
    agreement,
    as_class_numbers,
    best_temperature,
    bin_sums,
    central_interval,
    confidence_and_errors,
    depth_errors,
    ece,
    gaps_of,
    image_gaps,
    interval,
    iou_of,
    log_density,
    ood_scores,
    pixel_reliability,
    reliability,
    resampled,
    risk_at_coverage,
    rmse,
    separation,
    separation_of,
    takes_weights,
    tempered,
    total_variation,
    weighted_mean,
)
from onebasin.parallel import Executor, Progress, executor_for, progress_of
from onebasin.population import Population
from onebasin.posterior import (
    Linearised,
    Networks,
    OutputGaussian,
    Posterior,
    Predictive,
    PredictOptions,
    check_linearised,
    first_of,
    linearise,
    predict,
    stale_statistics,
)
from onebasin.reporting import Cell, Column, Figure, Record, Result, Table, as_number, result_record

# Attribute -> its key in the record, which is older than the attribute.
_GROUPS = {
    "in_distribution": "inside",
    "selective": "selective",
    "iou": "iou",
    "tempered": "tempered",
    "ood": "outside",
    "reference": "reference",
}
_TITLES = {
    "in_distribution": "on the examples",
    "selective": "on the examples, without the least confident",
    "iou": "intersection over union of each class",
    "tempered": "on half of them, tempered by the other half",
    "ood": "on out-of-distribution inputs",
    "reference": "compared with the reference",
}


class Estimate(NamedTuple):
    """A number and its bootstrap interval over examples; both ends are NaN where there is none to be trusted.

    >>> Estimate(0.98432, 0.98, 0.99), Estimate(0.98432, math.nan, math.nan)
    (0.9843 [0.9800, 0.9900], 0.9843 (no interval))
    """

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        if math.isnan(self.low) and math.isnan(self.high):
            return f"{self.value:.4f} (no interval)"
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Result):
    """The numbers of `onebasin.evaluate`.

    Attributes:
        kind: the likelihood of the targets, as "categorical", "bernoulli", "gaussian" or a word of `LIKELIHOODS`.
        members: networks that were evaluated.
        examples: how many there were; images, where targets have pixels.
        ood_examples: out-of-distribution inputs, 0 if none were given.
        in_distribution: numbers on the examples. Classes: accuracy, nll, brier, ece, ace_class_wise, ace_top_label,
            mutual_information; of pixels no ace, but mean_iou. Values: rmse, nll, and coverage_L and width_L for
            intervals of L per cent; of a distribution head and of pixels also mae, and of positive ones silog, abs_rel,
            sq_rel and delta_1 to delta_3.
        temperature: the T fitted on a random half of the examples; None for values, and where no T is best.
        tempered: nll and ece on the other half with that T, and nll_before and ece_before without; empty without T.
        ood: mutual_information on out-of-distribution inputs.
        detection: of each score the auroc, aupr_in, aupr_out, fpr95_in and fpr95_out; in and out say which kind is
            called positive.
        reference: agreement and total_variation with the reference's average predictive.
        settings: how it was done.
        remarks: sentences about numbers that are not there, or that may mislead.
        reliability: confidence and accuracy in bins of the confidence; None for values.
        scores: of each score of `detection` its counts in bins, in and out of distribution.
        coverage: of values, the share of targets inside central intervals of 5, 10, ... 95 and 99 %.
        selective: of classes aurc and augrc, risk_at_80 (share of errors among the most confident 80 %) and
            coverage_at_5 (largest share of examples that can be answered with 5 % errors).
        selective_risk: share of errors among the most confident 5, 10, ... 100 %, for the figure.
        shifted: scores on shifted inputs; None if none were given.
        iou: of pixels with classes, intersection over union of each class.
        pixels: targets that count, where they have pixels; 0 where they have none.
    """

    kind: str
    members: int
    examples: int
    ood_examples: int
    in_distribution: Mapping[str, Estimate]
    temperature: float | None = None
    tempered: Mapping[str, Estimate] = field(default_factory=dict)
    ood: Mapping[str, Estimate] = field(default_factory=dict)
    detection: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    reference: Mapping[str, Estimate] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    reliability: Reliability | None = None
    scores: Mapping[str, ScoreHistogram] = field(default_factory=dict)
    coverage: tuple[float, ...] = ()
    selective: Mapping[str, Estimate] = field(default_factory=dict)
    selective_risk: tuple[float, ...] = ()
    shifted: Shift | None = None
    iou: Mapping[str, Estimate] = field(default_factory=dict)
    pixels: int = 0

    def record(self) -> Record:
        """Tables of all numbers; reliability, scores in and out of distribution, or coverage as figures."""
        figures: list[Figure] = []
        if self.reliability is not None:
            error = self.in_distribution["ece"].value
            figures.append(reliability_figure(self.reliability, error, unit="pixels" if self.pixels else "examples"))
        if self.scores:
            figures.append(score_figure(self.scores, {s: own["auroc"].value for s, own in self.detection.items()}))
        if self.coverage:
            asked = {
                float(name.removeprefix("coverage_")) / 100: estimate
                for name, estimate in self.in_distribution.items()
                if name.startswith("coverage_")
            }
            figures.append(coverage_figure(self.coverage, asked))
        if self.selective:
            figures.append(risk_figure(self.selective_risk, self.selective["aurc"].value))
        if self.shifted is not None:
            figures.append(self.shifted.figure())
        return result_record(
            "evaluation",
            f"Evaluation of {self._networks} on {self._examples}",
            (self._answer(), *self.remarks),
            (*self._tables(), *figures),
            values=self.to_dict(),
            settings=dict(self.settings),
            terms={_words(name): _MEANINGS[name] for name in self._names() if name in _MEANINGS},
        )

    def _names(self) -> list[str]:
        """Names of all numbers and scores, each once."""
        numbers = [name for group in _GROUPS for name in getattr(self, group)]
        return list(
            dict.fromkeys([*numbers, *self.detection, *(name for own in self.detection.values() for name in own)])
        )

    def _answer(self) -> str:
        said = [f"{_words(name)} {estimate}" for name, estimate in self.in_distribution.items()]
        wanted = ("accuracy", "rmse", "nll", "ece", "mean_iou", "silog")
        chosen = [text for name, text in zip(self.in_distribution, said, strict=True) if name in wanted] or said[:2]
        areas = {score: own["auroc"] for score, own in self.detection.items()}
        best = max(areas, key=lambda score: areas[score].value, default="")
        ood = f"; {_words(best)} tells out-of-distribution inputs apart with an AUROC of {areas[best]}" if best else ""
        return f"The average predictive has {', '.join(chosen)}{ood}."

    def _tables(self) -> list[Table]:
        level = self.settings.get("level")
        drawn = "images" if self.pixels else "examples"
        errors = "" if level is None else f"in brackets: {level:.0%} bootstrap intervals over {drawn}"
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (_words(name), _TITLES[group] + (f" (T = {self.temperature:.4g})" if group == "tempered" else ""),
             as_number(*estimate))
            for group in _GROUPS for name, estimate in getattr(self, group).items()
        )  # fmt: skip
        columns: tuple[Column, ...] = (Column("metric"), Column("where"), Column("value", digits=4))
        tables = [Table("metrics", "What the predictions are worth", columns, rows, errors)]
        if self.detection:
            names = list(next(iter(self.detection.values())))
            rows = tuple(
                (_words(score), *(as_number(*own[name]) for name in names)) for score, own in self.detection.items()
            )
            columns = (Column("score"), *(Column(_words(name), _MEANINGS.get(name, ""), digits=4) for name in names))
            title = "Telling out-of-distribution inputs from the examples"
            tables.append(Table("detection", title, columns, rows, errors))
        return tables if self.shifted is None else [*tables, self.shifted.table()]

    @property
    def _examples(self) -> str:
        return f"{self.examples:,} images, {self.pixels:,} pixels" if self.pixels else f"{self.examples:,} examples"

    @property
    def _networks(self) -> str:
        return f"{self.members:,} network{'' if self.members == 1 else 's'}"

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain dicts and lists, without those of the figures; an estimate is {"value", "low", "high"}.

        JSON has no infinity: a number that is infinite or not a number is None here, and null in the text. The tables
        of `str` show it.
        """
        record = asdict(replace(self, reliability=None, scores={}, shifted=None)) | {"remarks": list(self.remarks)}
        for name in ("reliability", "scores", "coverage", "selective_risk", "shifted"):
            del record[name]
        if self.shifted is not None:
            record["shifted"] = self.shifted.to_dict()
        record["outside_examples"] = record.pop("ood_examples")
        for group, key in _GROUPS.items():
            del record[group]
            record[key] = {name: _plain(estimate) for name, estimate in getattr(self, group).items()}
        record["detection"] = {
            score: {name: _plain(estimate) for name, estimate in numbers.items()}
            for score, numbers in self.detection.items()
        }
        return record

    def to_json(self) -> str:
        """The same as JSON text; null stands for what is infinite."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        """Tables for people: each number, and its interval in brackets."""
        ood = f", {self.ood_examples:,} out-of-distribution inputs" if self.ood_examples else ""
        lines = [f"{self._networks}, {self._examples}{ood}, {self.kind}"]
        for group in _GROUPS:
            numbers: Mapping[str, Estimate] = getattr(self, group)
            if not numbers:
                continue
            temperature = f" (T = {self.temperature:.4g})" if group == "tempered" else ""
            lines += ["", f"{_TITLES[group]}{temperature}"]
            width = max(map(len, numbers))
            lines += [f"  {_words(name).ljust(width)}  {estimate}".rstrip() for name, estimate in numbers.items()]
        if self.shifted is not None:
            lines += ["", "under shift", self.shifted.lines()]
        return "\n".join([*lines, *self._detection(), *[line for said in self.remarks for line in ("", said)]])

    def _detection(self) -> list[str]:
        if not self.detection:
            return []
        columns = list(next(iter(self.detection.values())))
        first = max(map(len, self.detection))
        cells = {score: [str(numbers[name]) for name in columns] for score, numbers in self.detection.items()}
        widths = [max(len(row[place]) for row in cells.values()) for place in range(len(columns))]
        head = "  ".join(_words(name).ljust(width) for name, width in zip(columns, widths, strict=True))
        rows = [
            f"  {_words(score).ljust(first)}  {'  '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))}"
            for score, row in cells.items()
        ]
        return ["", "telling out-of-distribution inputs from the examples", f"  {' ' * first}  {head}".rstrip(), *rows]


def _plain(estimate: Estimate) -> dict[str, float | None]:
    """An estimate as JSON can hold it.

    >>> _plain(Estimate(math.inf, 2.0, math.inf))
    {'value': None, 'low': 2.0, 'high': None}
    """
    return {name: value if math.isfinite(value) else None for name, value in estimate._asdict().items()}


_MEANINGS = {
    "accuracy": "share of the examples whose most probable class is right",
    "nll": "negative log likelihood: mean of minus the log probability of what was right, in nats",
    "brier": "Brier score: mean square distance of the probabilities from 1 for the right class and 0 for the others",
    "ece": "expected calibration error: mean difference of confidence and accuracy over 15 bins of the confidence",
    "ace_class_wise": "adaptive calibration error over bins of equally many examples, for each class by itself",
    "ace_top_label": "adaptive calibration error over bins of equally many examples, of the largest probability",
    "mutual_information": "what the networks dispute: entropy of their average minus their average entropy, in nats",
    "agreement": "share of the inputs with the same most probable class as the reference",
    "total_variation": "mean over inputs of half the sum of differences of probabilities, to the reference",
    "rmse": "root of the mean square error",
    "auroc": "area under the ROC curve: the chance that a foreign input has the higher score than a familiar one",
    "aupr_in": "area under the precision-recall curve, familiar examples called positive",
    "aupr_out": "area under the precision-recall curve, foreign examples called positive",
    "fpr95_in": "share of the foreign examples that pass for familiar where 95 % of the familiar ones do",
    "fpr95_out": "share of the familiar examples that pass for foreign where 95 % of the foreign ones do",
    "msp": "out-of-distribution score: minus the largest average probability (maximum softmax probability)",
    "entropy": "out-of-distribution score: entropy of the average probabilities, in nats",
    "max_logit": "out-of-distribution score: minus the largest average logit",
    "energy": "out-of-distribution score: minus the log of the sum of exponentials of the average logits",
}


def _words(name: str) -> str:
    return name.replace("_", " ")


# Counts of the examples of each sample (draws, examples) -> numbers by name (draws,); None: the samples as they are.
Numbers = Callable[[Counts | None], Mapping[str, Tensor]]


class Resampling(NamedTuple):
    """Options of bootstrap intervals."""

    n_resamples: int
    confidence_level: float
    seed: int


def estimates(numbers: Numbers, sizes: Sequence[int], resampling: Resampling) -> dict[str, Estimate]:
    """Each number with its interval, all from the same draws of examples.

    >>> estimates(mean_estimator({"x": torch.arange(5.0)}), [5], Resampling(100, 0.9, 0))["x"].value
    2.0

    Each of `sizes` is the number of examples in a sample that is drawn by itself.
    """
    whole = numbers(None)
    value = torch.stack(list(whole.values()))
    ends = resampled(
        lambda counts: torch.stack(list(numbers(counts).values()), dim=-1),
        value,
        sizes,
        generator=torch.Generator().manual_seed(resampling.seed),
        n_resamples=resampling.n_resamples,
        confidence_level=resampling.confidence_level,
        on=value.device,
    )
    rows = zip(*(part.tolist() for part in ends), strict=True)
    return {name: Estimate(*row) for name, row in zip(whole, rows, strict=True)}


def metric_estimates(
    metrics: Mapping[str, Callable[..., Tensor]], probabilities: Tensor, targets: Tensor, resampling: Resampling
) -> dict[str, Estimate]:
    """Each metric of probabilities (examples, classes) by itself, from the same draws of examples.

    >>> from onebasin.metrics.calibration import ece
    >>> p, targets = torch.tensor([[0.8, 0.2]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> [round(end, 2) for end in metric_estimates({"ece": ece}, p, targets, Resampling(200, 0.95, 0))["ece"]]
    [0.0, 0.0, 0.08]
    """
    result = {}
    for name, metric in metrics.items():
        ends = interval(
            metric,
            probabilities,
            targets,
            generator=torch.Generator().manual_seed(resampling.seed),
            n_resamples=resampling.n_resamples,
            confidence_level=resampling.confidence_level,
        )
        result[name] = Estimate(*map(float, ends))
    return result


def mean_estimator(values: Mapping[str, Tensor]) -> Numbers:
    """Means over the examples of one sample.

    >>> mean_estimator({"x": torch.tensor([1.0, 3.0])})((torch.tensor([[0.0, 2.0]]),))
    {'x': tensor([3.], dtype=torch.float64)}
    """
    return lambda counts: {name: weighted_mean(each, only(counts)) for name, each in values.items()}


def only(counts: Counts | None) -> Tensor | None:
    """The counts of a single sample, as metrics take them."""
    return None if counts is None else counts[0]


def class_logits(outputs: Tensor, kind: str) -> Tensor:
    """Logits (members, examples, classes); of one logit z the pair (-z/2, z/2), which has the same probabilities.

    Args:
        outputs: what networks return (members, examples, ...).
        kind: "categorical" for outputs (examples, classes), "bernoulli" for one logit per example.
    """
    shape = tuple(outputs.shape[1:])
    if kind == "bernoulli":
        if math.prod(shape) != shape[0]:
            raise InputError(
                f"expected one logit per example for a bernoulli likelihood, found outputs {shape}: "
                'choose likelihood="categorical", or evaluate the outputs one by one'
            )
        half = outputs.double().reshape(len(outputs), -1, 1) / 2
        return torch.cat([-half, half], dim=2)
    if len(shape) > 2:
        raise InputError(
            f"expected outputs (examples, classes), one class per example, found {shape}, one for each pixel: judge "
            "them with onebasin.evaluate and class numbers (examples, height, width); nothing else takes pixels"
        )
    if len(shape) != 2 or shape[1] < 2:
        raise InputError(
            f"expected outputs (examples, classes) of at least 2 classes, found {shape}: choose "
            'likelihood="bernoulli" for one logit, "gaussian" for values'
        )
    return outputs


def refuse_heads(likelihood: str | Likelihood | None, kind: str, where: str, remedy: str) -> None:
    """Refuse distribution heads where only classes and Gaussian values are read.

    Raises:
        InputError: the likelihood is one.
    """
    own = likelihood if isinstance(likelihood, Likelihood) else LIKELIHOODS.get(kind)
    if isinstance(own, Head):
        raise InputError(f"{where} reads no distribution heads, found likelihood={own.name!r}: give {remedy}")


def predictive_numbers(
    predictive: Predictive, targets: Tensor, bins: int, resampling: Resampling
) -> dict[str, Estimate]:
    """The metrics of `CLASS_METRICS`, and the mean mutual information, on labelled examples.

    The NLL comes from the logarithms of the average predictive, which do not underflow.
    """
    p, losses, information = predictive.mean, _losses(predictive.log_mean, targets), predictive.mutual_information
    metrics = {name: metric for name, metric in CLASS_METRICS.items() if name != "nll"}
    binned = {name: partial(metric, bins=bins) for name, metric in metrics.items() if gaps_of(metric) is not None}
    weighted = {name: metric for name, metric in metrics.items() if name not in binned and takes_weights(metric)}
    alone = binned | {name: metric for name, metric in metrics.items() if name not in binned | weighted}

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = only(counts)
        means = {"nll": weighted_mean(losses, weights), "mutual_information": weighted_mean(information, weights)}
        return {name: metric(p, targets, weights=weights) for name, metric in weighted.items()} | means

    result = estimates(numbers, [len(p)], resampling) | metric_estimates(alone, p, targets, resampling)
    return {name: result[name] for name in (*CLASS_METRICS, "mutual_information")}


def selective_numbers(
    p: Tensor, targets: Tensor, resampling: Resampling
) -> tuple[dict[str, Estimate], tuple[float, ...]]:
    """The numbers of `metrics.abstention` for the confidence, and the share of errors at coverages of 5, ... 100 %."""
    confidence, errors = confidence_and_errors(p, targets)
    found = estimates(lambda counts: abstention(confidence, errors, weights=only(counts)), [len(p)], resampling)
    curve = risk_at_coverage(confidence, errors, torch.arange(1, 21) / 20)
    return found, tuple(curve.tolist())


def tempered_numbers(
    logs: Tensor, targets: Tensor, bins: int, resampling: Resampling
) -> tuple[float | None, dict[str, Estimate]]:
    """T fitted on a random half of the examples; NLL and ECE on the others with T and, as before, without.

    The average predictive is tempered as a whole: p^(1/T), scaled to sum 1. The intervals take T as given. None and
    no numbers where there are no two halves, or no T is best: where every example of the first half is right, smaller
    is always better, and a single mistake in the other half then costs without bound.
    """
    if len(logs) < 2:
        return None, {}
    generator = torch.Generator().manual_seed(resampling.seed)
    order = torch.randperm(len(logs), generator=generator).to(logs.device)
    fitting, judging = order[: len(order) // 2], order[len(order) // 2 :]
    temperature = best_temperature(logs[fitting], targets[fitting])
    if temperature <= COLDEST:
        return None, {}
    goals, degrees = targets[judging], {"": temperature, "_before": 1.0}
    losses = {end: _losses((logs[judging] / degree).log_softmax(1), goals) for end, degree in degrees.items()}
    predicted = {end: tempered(logs[judging], degree) for end, degree in degrees.items()}

    likelihoods = estimates(
        mean_estimator({f"nll{end}": each for end, each in losses.items()}), [len(goals)], resampling
    )
    result: dict[str, Estimate] = {}
    for end in degrees:
        error = metric_estimates({f"ece{end}": partial(ece, bins=bins)}, predicted[end], goals, resampling)
        result |= {f"nll{end}": likelihoods[f"nll{end}"], **error}
    return temperature, result


def comparison_numbers(mean: Tensor, reference: Tensor, resampling: Resampling) -> dict[str, Estimate]:
    """Agreement and total variation of two average predictives (examples, classes)."""

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = only(counts)
        return {
            "agreement": agreement(mean, reference, weights=weights),
            "total_variation": total_variation(mean, reference, weights=weights),
        }

    return estimates(numbers, [len(mean)], resampling)


def detection_numbers(
    in_distribution: Predictive, ood: Predictive, resampling: Resampling
) -> dict[str, dict[str, Estimate]]:
    """AUROC, AUPR and FPR95 of each score; both kinds of inputs are drawn separately for the intervals."""
    near, far = (ood_scores(own.mean, own.logits, own.mutual_information) for own in (in_distribution, ood))
    return _detection_of({name: (near[name], far[name]) for name in near}, resampling)


def _detection_of(pairs: Mapping[str, tuple[Tensor, Tensor]], resampling: Resampling) -> dict[str, dict[str, Estimate]]:
    """Numbers of `separation` for each score, given in distribution and out of it."""
    sizes = [len(scores) for scores in pairs["msp"]]

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = None if counts is None else (counts[0], counts[1])
        return {
            f"{score}.{name}": value
            for score, pair in pairs.items()
            for name, value in separation(*pair, weights=weights).items()
        }

    return _by_score(estimates(numbers, sizes, resampling))


def _by_score(found: Mapping[str, Estimate]) -> dict[str, dict[str, Estimate]]:
    """Estimates under "score.name" as score -> name -> estimate."""
    result: dict[str, dict[str, Estimate]] = {}
    for key, estimate in found.items():
        score, _, name = key.partition(".")
        result.setdefault(score, {})[name] = estimate
    return result


def _histograms(in_distribution: Predictive, ood: Predictive) -> dict[str, ScoreHistogram]:
    near, far = (ood_scores(own.mean, own.logits, own.mutual_information) for own in (in_distribution, ood))
    return {name: ScoreHistogram.of(near[name], far[name]) for name in near}


def _losses(logs: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of each example, from logarithms: an NLL that does not underflow."""
    return -logs.gather(1, as_class_numbers(targets, logs)[:, None]).squeeze(1)


Noise = float | str | None


def value_numbers(
    means: Tensor, spread: Tensor, targets: Tensor, levels: Sequence[float], resampling: Resampling
) -> dict[str, Estimate]:
    """RMSE of the mean, NLL of the mixture, and coverage and width of its central intervals; see `gaussians`."""
    goals = targets.double()
    central = means.mean(0, keepdim=True)
    each = {"nll": -log_density(means, goals, spread)}
    for level in levels:
        low, high = central_interval(means, spread, level)
        each[f"coverage_{100 * level:g}"] = _per_example(((goals >= low) & (goals <= high)).double())
        each[f"width_{100 * level:g}"] = _per_example(high - low)

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        return {"rmse": rmse(central, goals, weights=only(counts)), **mean_estimator(each)(counts)}

    return estimates(numbers, [len(goals)], resampling)


def gaussians(outputs: Tensor, targets: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Means in float64 (members, *shape of targets), and a standard deviation that broadcasts to them.

    >>> means, spread = gaussians(torch.tensor([[[1.0, 0.0]]]), torch.tensor([2.0]), "learned")
    >>> means, spread
    (tensor([[1.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))

    Args:
        outputs: as many values per example as targets; or (members, examples, 2 k), k means and then k logarithms of
            standard deviations.
        targets: (examples, ...), of k values each.
        noise: the standard deviation of targets; "learned" where members give it; None: learned if they do.

    Raises:
        InputError: there is no noise, or outputs do not fit targets.
    """
    exact = outputs.detach().double()
    shape = (len(exact), *targets.shape)
    values = targets[0].numel()
    given = exact[0, 0].numel() if exact.dim() > 1 and exact.shape[1] == len(targets) else 0
    if noise is None and given == 2 * values:
        noise = "learned"
    if noise == "learned" and given == 2 * values and exact.dim() == 3:
        means, logs = exact.chunk(2, dim=2)
        return means.reshape(shape), logs.exp().reshape(shape)
    if isinstance(noise, int | float) and given == values and _core(exact[0]) == _core(targets):
        return exact.reshape(shape), torch.as_tensor(float(noise), dtype=torch.float64, device=exact.device)
    heads = [name for name, one in LIKELIHOODS.items() if isinstance(one, Head) and one.parts * values == given]
    if noise is None and heads:
        raise InputError(
            f"expected outputs like targets {tuple(targets.shape)}, found {tuple(exact.shape[1:])}, as many as "
            f"{' or '.join(heads)} has: give the likelihood of training, as likelihood={heads[0]!r}, or for a Gaussian "
            "change the model's last layer and give noise=standard deviation"
        )
    raise InputError(
        f"expected outputs like targets {tuple(targets.shape)} with noise=standard deviation, or (examples, "
        f'{2 * values}) with noise="learned", found outputs {tuple(exact.shape[1:])} and noise={noise!r}: give the '
        "noise level of the targets, or change the model's last layer"
    )


def _per_example(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


def _core(tensor: Tensor) -> tuple[int, ...]:
    """The shape of an example without axes of length 1, which may be added or left out."""
    return tuple(size for size in tensor.shape[1:] if size != 1)


_NO_TEMPERATURE = (
    "no temperature: it is fitted on half of the examples, and all of the {} there are right, so the lowest is the best"
)


_NO_TEMPERATURE_OF_PIXELS = (
    "no temperature: it is fitted on pixels of half of the images, and all of them are right, so the lowest is the best"
)
_ONE_IMAGE = "intervals say nothing: they come from drawing images, and there is one only"


def evaluate(
    model: nn.Module,
    networks: Networks,
    data: Data,
    *,
    output: OutputPart = None,
    ood: AnyInputs = None,
    shifted: ShiftedInputs | None = None,
    ood_mask: Any = None,
    reference: Networks | Tensor | None = None,
    likelihood: str | Likelihood | None = None,
    noise: Noise = None,
    ignore_index: int | None = None,
    bins: int = 15,
    coverage: Sequence[float] = (0.5, 0.9, 0.95),
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    draws: int | None = None,
    statistics: AnyInputs = None,
    linearised: Linearised = False,
    seed: int = 0,
    chunk: int | None = None,
    batch: int | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Evaluation:
    """Evaluate the average predictive of networks, each number with a bootstrap interval over the examples.

    Classifiers run once over the examples, once over `ood` and once for a reference, and only averages are kept: a
    thousand networks need no more memory than one. Values need all predictions together, members x examples x outputs:
    1,000 networks on 10,000 examples are 80 MB.

    Targets with pixels, class numbers (images, ..., height, width) or values of three axes or more, are judged pixel by
    pixel, with intervals over images; networks run over blocks of images, of which only sums are kept. Values with a
    distribution head (`likelihood="laplace"` and others) are judged in blocks as well: their predictive is the mixture
    of the networks' distributions.

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[3.0], [0.0]], [[2.0], [0.0]]])})
    >>> inputs, targets = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0, 1, 0, 0])
    >>> evaluation = evaluate(nn.Linear(1, 2, bias=False), population, (inputs, targets), ood=torch.zeros(3, 1))
    >>> evaluation.in_distribution["accuracy"].value, evaluation.detection["msp"]["auroc"].value
    (0.75, 1.0)

    Args:
        model: the function; left exactly as it was.
        networks: a Population, or a Posterior, from which networks are drawn.
        data: (inputs, targets), tensors or arrays, inputs as in `predict`; a Dataset or DataLoader of pairs or of
            dicts (read once, its order kept); or rows of a Hugging Face data set. Of dicts and rows the targets are the
            column label, labels, target, targets or y, and the inputs all others: `columns` names them otherwise.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        ood: out-of-distribution inputs, as in `predict`, to be told from those of `data`; for classifiers.
        shifted: shifted versions of all inputs of `data`, for classifiers: name -> inputs, or name -> severity (1, 2,
            ...) -> inputs; instead of inputs a function that makes them. `onebasin.data.shifts` corrupts images so.
            Images with pixels are told apart by the mean of each score over their pixels.
        ood_mask: which pixels of `ood` are out of distribution (images, height, width); then these are told apart from
            the other pixels of the same images.
        reference: other networks of the same model, or their average predictive (examples, classes) for these inputs;
            for classifiers. A reference posterior is drawn from with `seed` + 1.
        likelihood: "categorical" for class numbers, "bernoulli" for targets 0 or 1 and one logit, "gaussian" for
            values; or a word or object of `LIKELIHOODS`, which says how outputs are read. By default categorical for
            whole-number types, gaussian for floats; floats that may be class labels are refused.
        noise: for gaussian: the standard deviation of targets, or "learned" where the model gives means and log
            deviations, which is the default where it does.
        ignore_index: a class number of pixels that do not count, as 255. Values that do not count are NaN.
        bins: bins of calibration errors.
        coverage: levels of the predictive intervals of values.
        n_resamples: bootstrap draws of the examples.
        confidence_level: confidence level of the bootstrap intervals.
        draws: networks drawn from a Posterior; 100 by default.
        statistics: inputs, such as those of training, on which running statistics are measured for each draw, as in
            `predict`; where they are missing, a remark and a warning say so, unless this is False.
        linearised: evaluate networks that are linear in their weights, as in `predict`: "sampled" (or True) or, for
            classes, "probit". For one value per example with a given noise the Gaussian over values is exact, and
            nothing is drawn. A reference is taken as it is.
        seed: seed of the draws, of the halves for the temperature, and of the bootstrap.
        chunk: networks in one pass, as in `predict`.
        batch: examples in one pass, as in `predict`.
        progress: True for a line on stderr with the time left, or a function that is called with (networks done,
            networks in all, "networks") in each of the passes.
        workers: processes; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Raises:
        InputError: nothing reads an option, targets do not fit, or the networks' outputs are not finite.

    Warns:
        StatisticsWarning: draws have running statistics that are not their own; the remarks say so too.
    """
    model = select_output(model, output)
    inputs, targets = pair_of(data, model)
    ood, statistics = measured_of(ood, model), measured_of(statistics, model)
    kind = kind_of_targets(targets, likelihood, noise)
    own = likelihood if isinstance(likelihood, Likelihood) else LIKELIHOODS.get(kind)
    values = kind == "gaussian" or isinstance(own, Head)
    _check_idle(networks, reference, draws, statistics)
    check_linearised(networks, linearised, statistics)
    if values and linearised == "probit":
        raise InputError('the probit form is one of classes, found values: give linearised="sampled"')
    if values and (ood is not None or reference is not None):
        raise InputError(f"ood and reference compare class probabilities, found a {kind} likelihood: leave them out")
    targets = without(targets, ignore_index)
    if ood_mask is not None and ood is None:
        raise InputError("ood_mask says which pixels of ood are out of distribution, found no ood: give ood=images")
    pixels = targets.dim() > 2 or (targets.dim() == 2 and not values and kind != "bernoulli")
    if (ignore_index is not None or ood_mask is not None) and not pixels:
        raise InputError(
            f"ignore_index and ood_mask are for targets with pixels, found {tuple(targets.shape)}: leave them out, and "
            "the examples that should not count too"
        )
    if shifted is not None and (values or pixels):
        found = "targets with pixels" if pixels else f"a {kind} likelihood"
        raise InputError(
            f"shifted scores one class per example, found {found}: evaluate each set of shifted data alone"
        )
    levels = [] if shifted is None else levels_of(shifted)
    options = PredictOptions(
        draws=100 if draws is None else draws,
        seed=seed,
        statistics=statistics,
        chunk=chunk,
        batch=batch,
        progress=progress_of(progress),
        linearised=linearised,
    )
    notes: dict[str, None] = {}
    for each, passes in ((networks, options), (reference, replace(options, linearised=False))):
        if isinstance(each, Posterior):
            notes |= dict.fromkeys(stale_statistics(model, each, inputs, passes)[1])
    if notes:
        options = replace(options, statistics=False)  # the warning has been given
    resampling = Resampling(n_resamples, confidence_level, seed)
    settings = {"level": confidence_level, "seed": seed, "method": "bca", "resamples": n_resamples}
    settings |= {"linearised": linearised} if linearised else {}
    with executor_for(workers, executor) as opened:
        options = replace(options, executor=opened)
        if values and (pixels or own is not None):
            numbers = _heads(model, networks, inputs, targets, kind, own, noise, coverage, resampling, options)
            evaluation = replace(numbers, settings={**settings, "noise": noise, "likelihood": _named(own)})
        elif not values and pixels:
            many = _Pixels(kind, own, ood_mask, ignore_index is not None)
            numbers = _pixel_classes(model, networks, inputs, targets, many, ood, reference, bins, resampling, options)
            extra = {"bins": bins, "calibration_method": "absolute", "ignore_index": ignore_index}
            evaluation = replace(numbers, settings={**settings, **extra, "likelihood": _named(own)})
        elif kind == "gaussian":
            numbers = _values(model, networks, inputs, targets, noise, coverage, resampling, options)
            evaluation = replace(numbers, settings={**settings, "noise": noise})
        else:
            numbers = _classes(model, networks, inputs, targets, kind, own, ood, reference, bins, resampling, options)
            evaluation = replace(numbers, settings={**settings, "bins": bins, "calibration_method": "absolute"})
            if levels:
                shift = _shift(model, networks, evaluation, targets, kind, own, levels, bins, resampling, options)
                evaluation = replace(evaluation, shifted=shift)
    return replace(evaluation, remarks=(*evaluation.remarks, *notes))


def _values(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    targets: Tensor,
    noise: Noise,
    coverage: Sequence[float],
    resampling: Resampling,
    options: PredictOptions,
) -> Evaluation:
    given = {option.name: getattr(options, option.name) for option in fields(options)}
    exact = _exact(model, networks, inputs, targets, noise, options)
    outputs = predict(model, networks, inputs, quantity="values", **given) if exact is None else exact.mean
    goals = targets.to(outputs.device)
    means, spread = gaussians(outputs, goals.double(), noise)
    if exact is not None:
        spread = (spread.square() + exact.std.double().reshape(means.shape).square()).sqrt()
    numbers = value_numbers(means, spread, goals, coverage, resampling)
    curve = coverage_curve(means, goals.double(), spread)
    return Evaluation("gaussian", len(outputs), len(targets), 0, numbers, coverage=curve)


def _exact(
    model: nn.Module, networks: Networks, inputs: Inputs, targets: Tensor, noise: Noise, options: PredictOptions
) -> OutputGaussian | None:
    """The Gaussians of a linearised network where they give the predictive in closed form, else None.

    They do for one value per example with a given noise level: values of one example are correlated otherwise.
    """
    if not options.linearised or not isinstance(networks, Posterior):
        return None
    alone = targets[0].numel() == 1 and isinstance(noise, int | float)
    if not alone or not torch.allclose(networks.weights, networks.weights[:1]):
        return None
    return linearise(model, networks, inputs, progress=options.progress)


def _classes(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    targets: Tensor,
    kind: str,
    own: Likelihood | None,
    ood: Inputs | None,
    reference: Networks | Tensor | None,
    bins: int,
    resampling: Resampling,
    options: PredictOptions,
) -> Evaluation:
    prepare = partial(_logits_of, own=own, kind=kind)
    shown = prepare(_few_outputs(model, networks, inputs, options)[None])[0]
    goals = class_numbers(targets, kind)
    check_labels(goals, shown)  # before all networks run
    predictive = Predictive.of(model, networks, inputs, options, prepare=prepare)
    goals = goals.to(predictive.logits.device)
    numbers = predictive_numbers(predictive, goals, bins, resampling)
    temperature, cooled = tempered_numbers(predictive.log_mean, goals, bins, resampling)
    remarks = (_NO_TEMPERATURE.format(len(goals) // 2),) if temperature is None and len(goals) > 1 else ()
    selective, risk = selective_numbers(predictive.mean, goals, resampling)
    evaluation = Evaluation(
        kind, predictive.members, len(goals), 0, numbers, temperature, cooled, remarks=remarks,
        reliability=reliability(predictive.mean, goals, bins), selective=selective, selective_risk=risk,
    )  # fmt: skip
    if ood is not None:
        far = Predictive.of(model, networks, ood, options, prepare=prepare)
        information = mean_estimator({"mutual_information": far.mutual_information})
        evaluation = replace(
            evaluation,
            ood_examples=len(far.logits),
            ood=estimates(information, [len(far.logits)], resampling),
            detection=detection_numbers(predictive, far, resampling),
            scores=_histograms(predictive, far),
        )
    if reference is not None:
        if not isinstance(reference, Tensor):
            # Two posteriors should not be compared by the same random numbers.
            options = replace(options, seed=resampling.seed + 1, linearised=False)
            reference = Predictive.of(model, reference, inputs, options, prepare=prepare).mean
        evaluation = replace(evaluation, reference=comparison_numbers(predictive.mean, reference, resampling))
    return evaluation


def _logits_of(outputs: Tensor, own: Likelihood | None, kind: str) -> Tensor:
    """Logits of classes (members, examples, classes) of outputs under a likelihood."""
    return class_logits(own.logits(outputs, 2) if isinstance(own, ClassLoss) else outputs, kind)


def _shift(
    model: nn.Module,
    networks: Networks,
    evaluation: Evaluation,
    targets: Tensor,
    kind: str,
    own: Likelihood | None,
    levels: Sequence[tuple[str, int, Any]],
    bins: int,
    resampling: Resampling,
    options: PredictOptions,
) -> Shift:
    """Scores of each set of shifted inputs, and their mean, for which the same examples are drawn from all sets."""
    numbers: dict[str, dict[int, dict[str, Estimate]]] = {}
    sums: dict[str, Tensor] = {}
    for name, severity, source in levels:
        inputs = shifted_inputs(source, model, len(targets), f"{name} at severity {severity}")
        predictive = Predictive.of(model, networks, inputs, options, prepare=partial(_logits_of, own=own, kind=kind))
        p, goals = predictive.mean, as_class_numbers(class_numbers(targets, kind), predictive.mean)
        each = {"accuracy": (p.argmax(1) == goals).double(), "nll": _losses(predictive.log_mean, goals)}
        error = metric_estimates({"ece": partial(ece, bins=bins)}, p, goals, resampling)
        numbers.setdefault(name, {})[severity] = estimates(mean_estimator(each), [len(p)], resampling) | error
        sums = {key: sums.get(key, torch.zeros_like(one)) + one / len(levels) for key, one in each.items()}
    errors = [each["ece"].value for found in numbers.values() for each in found.values()]
    mean = estimates(mean_estimator(sums), [len(targets)], resampling)
    single = next(iter(next(iter(numbers.values())).values())) if len(errors) == 1 else None
    mean["ece"] = single["ece"] if single else Estimate(sum(errors) / len(errors), math.nan, math.nan)
    clean = {key: evaluation.in_distribution[key] for key in METRICS}
    return Shift(clean, numbers, mean, len(targets))


class _Pixels(NamedTuple):
    """How targets with pixels are read: their likelihood, the mask of `ood`, whether some pixels are left out."""

    kind: str
    own: Likelihood | None
    mask: Any
    ignored: bool

    def goals(self, targets: Tensor) -> Tensor:
        """Class numbers (images, ...), `IGNORED` where a pixel does not count."""
        if self.kind != "bernoulli":
            return targets
        missing = targets.isnan() if targets.is_floating_point() else targets == IGNORED
        rest = targets[~missing]
        if not bool(((rest == 0) | (rest == 1)).all()):
            raise InputError(
                f"expected targets 0 or 1 for a bernoulli likelihood, found {float(rest.min()):g} to "
                f"{float(rest.max()):g}: give 0 or 1, or evaluate with another likelihood"
            )
        return torch.where(missing, IGNORED, targets).long()

    def logits(self, outputs: Tensor, axes: int) -> Tensor:
        """Logits (members, images, classes, ...) of outputs, for targets of so many axes."""
        if isinstance(self.own, ClassLoss):
            return self.own.logits(outputs, 2)
        if self.kind != "bernoulli":
            return outputs
        half = (outputs[:, :, None] if outputs.dim() == axes + 1 else outputs).double() / 2
        return torch.cat([-half, half], dim=2)


def _pixel_classes(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    targets: Tensor,
    many: _Pixels,
    ood: Inputs | None,
    reference: Networks | Tensor | None,
    bins: int,
    resampling: Resampling,
    options: PredictOptions,
) -> Evaluation:
    prepare = partial(many.logits, axes=targets.dim())
    goals = many.goals(targets)
    shown = prepare(_few_outputs(model, networks, inputs, options)[None])[0]
    check_one_hot(goals, shown)
    check_classes_fit(shown, goals[: len(shown)])
    check_class_numbers(goals[goals != IGNORED] if many.ignored or many.kind == "bernoulli" else goals, shown.shape[1])
    if isinstance(reference, Tensor) and reference.shape != (len(goals), *shown.shape[1:]):
        raise InputError(
            f"expected a reference for the same examples and classes {(len(goals), *shown.shape[1:])}, found "
            f"{tuple(reference.shape)}: compute it on the same inputs"
        )
    # Two posteriors should not be compared by the same random numbers.
    second = replace(options, seed=resampling.seed + 1, linearised=False)
    found = class_sums(model, networks, inputs, goals, prepare, shown.shape[1:], bins, options, reference, second)
    means, compared = dict(found.means), ("agreement", "total_variation")
    pixels = means.pop("pixels")
    remarks = [] if len(goals) > 1 else [_ONE_IMAGE]

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = only(counts)
        each = iou_of(found.areas, weights)
        result = {name: _share(value, pixels, weights) for name, value in means.items()}
        return result | {"mean_iou": each.nanmean(-1)} | {f"class_{k}": each[..., k] for k in range(each.shape[-1])}

    own = {name: _sound(one) for name, one in estimates(numbers, [len(goals)], resampling).items()}
    own["ece"] = _pixel_ece(found.bins, resampling)
    absent = [name for name, one in own.items() if name.startswith("class_") and math.isnan(one.value)]
    if absent:
        remarks.append(
            f"no intersection over union of {', '.join(map(_words, absent))}, which no pixel is or is said to be"
        )
    temperature, cooled = _pixel_temperature(found.sampled, bins, resampling)
    if temperature is None and len(goals) > 1:
        remarks.append(_NO_TEMPERATURE_OF_PIXELS)
    evaluation = Evaluation(
        many.kind, found.members, len(goals), 0,
        {name: own[name] for name in ("accuracy", "mean_iou", "nll", "brier", "ece", "mutual_information")},
        temperature, cooled, remarks=tuple(remarks), reliability=pixel_reliability(found.bins),
        reference={name: own[name] for name in compared if name in own},
        iou={name: one for name, one in own.items() if name.startswith("class_") and name not in absent},
        pixels=int(pixels.sum()),
    )  # fmt: skip
    return (
        evaluation
        if ood is None
        else _pixel_ood(evaluation, found, model, networks, ood, many, prepare, shown, resampling, options)
    )


def _pixel_ood(
    evaluation: Evaluation,
    found: ClassSums,
    model: nn.Module,
    networks: Networks,
    ood: Inputs,
    many: _Pixels,
    prepare: Callable[[Tensor], Tensor],
    shown: Tensor,
    resampling: Resampling,
    options: PredictOptions,
) -> Evaluation:
    """Images told apart by the mean of each score; with a mask, pixels inside of it from those outside."""
    values = shown[0].numel()
    if many.mask is None:
        far, information = score_means(model, networks, ood, prepare, values, options)
        pairs = {name: (found.scores[name], far[name]) for name in far}
        return replace(
            evaluation,
            ood_examples=len(information),
            ood=estimates(mean_estimator({"mutual_information": information}), [len(information)], resampling),
            detection=_detection_of(pairs, resampling),
            scores={name: ScoreHistogram.of(*pair) for name, pair in pairs.items()},
        )
    mask = torch.as_tensor(many.mask).bool()
    wanted = (examples_in(ood), *shown.shape[2:])
    if tuple(mask.shape) != wanted or not bool(mask.any()) or bool(mask.all()):
        raise InputError(
            f"expected ood_mask {wanted} with pixels of both kinds, found {tuple(mask.shape)} with "
            f"{int(mask.sum()):,} of {mask.numel():,} pixels out of distribution: leave it out where all are"
        )
    counts, information = masked_scores(model, networks, ood, mask, prepare, values, options)
    known = information[~information.isnan()]

    def numbers(drawn: Counts | None) -> dict[str, Tensor]:
        return {
            f"{score}.{name}": value
            for score, pair in counts.items()
            for name, value in separation_of(*pair, only(drawn)).items()
        }

    return replace(
        evaluation,
        ood_examples=len(mask),
        ood=estimates(mean_estimator({"mutual_information": known}), [len(known)], resampling),
        detection=_by_score(estimates(numbers, [len(mask)], resampling)),
    )


def _pixel_temperature(found: Sampled, bins: int, resampling: Resampling) -> tuple[float | None, dict[str, Estimate]]:
    """As `tempered_numbers`, on pixels of each image that were chosen at random; halves and intervals are of images."""
    if len(found.logs) < 2:
        return None, {}
    order = torch.randperm(len(found.logs), generator=torch.Generator().manual_seed(resampling.seed))
    order = order.to(found.logs.device)
    fitting, judging = order[: len(order) // 2], order[len(order) // 2 :]
    kept = found.counted[fitting].flatten()
    logs = found.logs[fitting].movedim(1, 2).flatten(0, 1)[kept]
    counted, goals = found.counted[judging], found.targets[judging]
    if not len(logs) or not bool(counted.any()):
        return None, {}
    temperature = best_temperature(logs, found.targets[fitting].flatten()[kept])
    if temperature <= COLDEST:
        return None, {}
    result: dict[str, Estimate] = {}
    pixels = counted.double().sum(1)
    for end, degree in {"": temperature, "_before": 1.0}.items():
        cooled = (found.logs[judging] / degree).log_softmax(1)
        losses = torch.where(counted, -cooled.gather(1, goals[:, None])[:, 0], 0.0).sum(1)
        confidence, predicted = cooled.exp().max(1)
        sums = bin_sums(confidence, predicted == goals, counted, bins)

        def numbers(drawn: Counts | None, losses: Tensor = losses) -> dict[str, Tensor]:
            return {"nll": _share(losses, pixels, only(drawn))}

        result[f"nll{end}"] = estimates(numbers, [len(pixels)], resampling)["nll"]
        result[f"ece{end}"] = _pixel_ece(sums, resampling)
    return temperature, result


def _pixel_ece(sums: Tensor, resampling: Resampling) -> Estimate:
    """The calibration error of pixels, with an interval over images."""
    ends = absolute(
        partial(image_gaps, sums),
        len(sums),
        generator=torch.Generator().manual_seed(resampling.seed),
        n_resamples=resampling.n_resamples,
        confidence_level=resampling.confidence_level,
        on=sums.device,
    )
    return Estimate(*map(float, ends))


def _heads(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    targets: Tensor,
    kind: str,
    own: Likelihood | None,
    noise: Noise,
    coverage: Sequence[float],
    resampling: Resampling,
    options: PredictOptions,
) -> Evaluation:
    """Values whose predictive is a mixture of distributions, example by example or pixel by pixel."""
    for level in coverage:
        if not 0 < level < 1:
            raise InputError(f"expected a level between 0 and 1, found {level}; 0.95 is usual")
    shown = _few_outputs(model, networks, inputs, options)
    goals = targets[: len(shown)]
    head = own if isinstance(own, Head) else _gaussian_head(shown, goals, noise)
    head.check(shown, goals)
    members, sums = value_sums(model, networks, inputs, targets, head, shown[0].numel(), coverage, options)
    depth = {name.removeprefix("depth."): each for name, each in sums.items() if name.startswith("depth.")}

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        weights = only(counts)
        share = partial(_share, pixels=sums["values"], weights=weights)
        result = {"rmse": share(sums["square"]).sqrt(), "mae": share(sums["absolute"])}
        result["nll"] = _share(sums["nll"], sums["events"], weights)
        for level in coverage:
            result[f"coverage_{100 * level:g}"] = share(sums[f"inside_{level}"])
            result[f"width_{100 * level:g}"] = share(sums[f"width_{level}"])
        return result | (depth_errors(depth, weights) if depth else {})

    found = {name: _sound(one) for name, one in estimates(numbers, [len(targets)], resampling).items()}
    remarks = [] if len(targets) > 1 else [_ONE_IMAGE]
    if math.isnan(found.get("silog", Estimate(0.0, 0.0, 0.0)).value):
        del found["silog"]
        remarks.append("no silog: some predictions of positive targets are not positive, and have no logarithm")
    total = sums["values"].sum()
    curve = tuple(float(sums[f"curve_{place}"].sum() / total) for place in range(len(LEVELS)))
    pixels = int(total) if targets.dim() > 2 else 0
    return Evaluation(kind, members, len(targets), 0, found, remarks=tuple(remarks), coverage=curve, pixels=pixels)


def _gaussian_head(outputs: Tensor, targets: Tensor, noise: Noise) -> Head:
    """The Gaussian whose noise is given, or learned where networks give twice as many outputs as there are targets."""
    if noise == "learned" or (noise is None and outputs[0].numel() == 2 * targets[0].numel()):
        return GaussianHead()
    if isinstance(noise, int | float) and noise > 0:
        return FixedGaussian(float(noise))
    raise InputError(
        f"a gaussian likelihood needs the noise level of the targets, found {noise!r}: give noise=standard deviation, "
        'or noise="learned" with a model that gives a mean and a log standard deviation per target'
    )


def _few_outputs(model: nn.Module, networks: Networks, inputs: Inputs, options: PredictOptions) -> Tensor:
    """Outputs of the first network for the first examples."""
    rows, call = next(batches(inputs, options.sample_size()))
    few = Bound(model, first_of(options.networks(networks)))(call)
    check_rows(few, rows.stop - rows.start)
    return few


def _share(sums: Tensor, pixels: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over images (images,) per pixel, with weights (..., images)."""
    if weights is None:
        return sums.sum() / pixels.sum()
    return (weights @ sums) / (weights @ pixels)


def _sound(estimate: Estimate) -> Estimate:
    """Without an interval where a draw of images has no number, as a class that is in none of them."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return Estimate(estimate.value, math.nan, math.nan)
    return estimate


def _named(own: Likelihood | None) -> str | None:
    """A likelihood as settings hold it."""
    return None if own is None else repr(own)


def _check_idle(
    networks: Networks, reference: Networks | Tensor | None, draws: int | None, statistics: Measured
) -> None:
    """Raise `InputError` for options that nothing would read."""
    if not all(isinstance(each, Population | Tensor | None) for each in (networks, reference)):
        return
    if statistics is not None:
        raise InputError(
            "running statistics are measured for networks drawn from posteriors, found statistics= with a population, "
            "whose networks have their own: leave it out"
        )
    if draws is not None:
        raise InputError(
            f"networks are drawn from posteriors only, found draws={draws} with a population, all of whose "
            f"networks are evaluated: leave it out, or take some of them, as population[:{draws}]"
        )


def class_numbers(targets: Tensor, kind: str) -> Tensor:
    """Targets as class numbers (examples,); 0 and 1 may be stored as floats, in a column."""
    if kind == "bernoulli" and targets.numel() == len(targets) and bool(((targets == 0) | (targets == 1)).all()):
        return targets.reshape(-1).long()
    if kind == "bernoulli":
        raise InputError(
            f"expected one target per example, 0 or 1, found {tuple(targets.shape)} from {float(targets.min()):g} to "
            f"{float(targets.max()):g}: evaluate the outputs one by one"
        )
    return targets
