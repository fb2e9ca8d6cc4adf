"""Everything that a population is worth on some data, in one call."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, StatisticsWarning, check_options
from onebasin.functional import Inputs, Measured, check_targets, kind_of_targets
from onebasin.metrics import (
    COLDEST,
    Counts,
    accuracy,
    ace,
    agreement,
    as_class_numbers,
    best_temperature,
    brier,
    central_interval,
    ece,
    energy,
    entropy,
    information,
    interval,
    log_density,
    max_logit,
    msp,
    resampled,
    rmse,
    separation,
    tempered,
    total_variation,
    weighted_mean,
)
from onebasin.metrics import entropy_score as doubt
from onebasin.parallel import ExecutionOptions, Executor, MemoryNeeds, executor_for
from onebasin.population import Population
from onebasin.posterior import (
    Networks,
    Posterior,
    PredictOptions,
    needs,
    networks_of,
    passes,
    predict,
    stale_statistics,
)
from onebasin.posterior import PredictOptions as Passing

# ----------------------------------------------------------------------
# The report of an evaluation: plain numbers with intervals, for people and for programs.


_GROUPS = ("inside", "tempered", "outside", "reference")
_TITLES = {
    "inside": "on the examples",
    "tempered": "on half of them, tempered by the other half",
    "outside": "on foreign inputs",
    "reference": "compared with the reference",
}


class Estimate(NamedTuple):
    """A number and its bootstrap interval over examples; both ends are NaN where there is none to be trusted."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `onebasin.evaluate` found. Print it, or take `record`.

    Attributes:
        kind: "categorical", "bernoulli" or "gaussian", the likelihood of the targets.
        members: networks that were evaluated.
        examples: how many there were.
        outside_examples: foreign inputs, 0 if none were given.
        inside: numbers on the examples. Classes: accuracy, nll, brier, ece, ace_class_wise, ace_top_label,
            mutual_information. Values: rmse, nll, and coverage_L and width_L for intervals of L per cent.
        temperature: the T fitted on a random half of the examples; None for values, and where no T is best.
        tempered: nll and ece on the other half with that T, and nll_before and ece_before without; empty without T.
        outside: mutual_information on foreign inputs.
        detection: of each score the auroc, aupr_in, aupr_out, fpr95_in and fpr95_out; in and out say which kind is
            called positive.
        reference: agreement and total_variation with the reference's average predictive.
        settings: how it was done.
        remarks: sentences about numbers that are not there, or that may mislead.
    """

    kind: str
    members: int
    examples: int
    outside_examples: int
    inside: Mapping[str, Estimate]
    temperature: float | None = None
    tempered: Mapping[str, Estimate] = field(default_factory=dict)
    outside: Mapping[str, Estimate] = field(default_factory=dict)
    detection: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    reference: Mapping[str, Estimate] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers; each estimate is {"value", "low", "high"}.

        JSON has no infinity: a number that is infinite or not a number is None here, and null in the text. The tables
        of `str` show it.
        """
        found = asdict(self) | {"remarks": list(self.remarks)}
        for group in _GROUPS:
            found[group] = {name: _plain(estimate) for name, estimate in getattr(self, group).items()}
        found["detection"] = {
            score: {name: _plain(estimate) for name, estimate in numbers.items()}
            for score, numbers in self.detection.items()
        }
        return found

    def to_json(self) -> str:
        """The record as JSON text; null stands for what is infinite."""
        return json.dumps(self.record(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        """Tables for people: each number, and its interval in brackets."""
        networks = f"{self.members:,} network{'' if self.members == 1 else 's'}"
        foreign = f", {self.outside_examples:,} foreign inputs" if self.outside_examples else ""
        lines = [f"{networks}, {self.examples:,} examples{foreign}, {self.kind}"]
        for group in _GROUPS:
            numbers: Mapping[str, Estimate] = getattr(self, group)
            if not numbers:
                continue
            temperature = f" (T = {self.temperature:.4g})" if group == "tempered" else ""
            lines += ["", f"{_TITLES[group]}{temperature}"]
            width = max(map(len, numbers))
            lines += [f"  {_words(name).ljust(width)}  {_cell(own)}".rstrip() for name, own in numbers.items()]
        return "\n".join([*lines, *self._detection(), *[line for said in self.remarks for line in ("", said)]])

    def _detection(self) -> list[str]:
        if not self.detection:
            return []
        columns = list(next(iter(self.detection.values())))
        first = max(map(len, self.detection))
        cells = {score: [_cell(numbers[name]) for name in columns] for score, numbers in self.detection.items()}
        widths = [max(len(row[place]) for row in cells.values()) for place in range(len(columns))]
        head = "  ".join(_words(name).ljust(width) for name, width in zip(columns, widths, strict=True))
        rows = [
            f"  {_words(score).ljust(first)}  {'  '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))}"
            for score, row in cells.items()
        ]
        return ["", "telling foreign inputs from the examples", f"  {' ' * first}  {head}".rstrip(), *rows]


def _plain(estimate: Estimate) -> dict[str, float | None]:
    """An estimate as JSON can hold it.

    >>> _plain(Estimate(math.inf, 2.0, math.inf))
    {'value': None, 'low': 2.0, 'high': None}
    """
    return {name: value if math.isfinite(value) else None for name, value in estimate._asdict().items()}


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(estimate: Estimate) -> str:
    """A number with its interval.

    >>> _cell(Estimate(0.98432, 0.98, 0.99))
    '0.9843 [0.9800, 0.9900]'
    >>> _cell(Estimate(0.98432, math.nan, math.nan))
    '0.9843 (no interval)'
    """
    if math.isnan(estimate.low) and math.isnan(estimate.high):
        return f"{estimate.value:.4f} (no interval)"
    return f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


# ----------------------------------------------------------------------
# Several numbers of the same examples, with one set of bootstrap draws for all of them.


# Counts of the examples of each sample (draws, examples) -> numbers by name (draws,); None: the samples as they are.
Numbers = Callable[[Counts | None], Mapping[str, Tensor]]


class Sampling(NamedTuple):
    """How intervals are made: draws of examples, the probability they should cover, and a seed."""

    draws: int
    level: float
    seed: int


def estimates(numbers: Numbers, sizes: Sequence[int], sampling: Sampling) -> dict[str, Estimate]:
    """Each number with its interval, all from the same draws of examples.

    >>> estimates(mean_estimator({"x": torch.arange(5.0)}), [5], Sampling(100, 0.9, 0))["x"].value
    2.0

    Args:
        numbers: computes them.
        sizes: examples in each sample that is drawn by itself.
        sampling: how intervals are made.
    """
    whole = numbers(None)
    value = torch.stack(list(whole.values()))
    found = resampled(
        lambda counts: torch.stack(list(numbers(counts).values()), dim=-1),
        value,
        sizes,
        generator=torch.Generator().manual_seed(sampling.seed),
        draws=sampling.draws,
        level=sampling.level,
        on=value.device,
    )
    rows = zip(*(part.tolist() for part in found), strict=True)
    return {name: Estimate(*row) for name, row in zip(whole, rows, strict=True)}


def calibration_estimates(
    metrics: Mapping[str, Callable[..., Tensor]], probabilities: Tensor, targets: Tensor, sampling: Sampling
) -> dict[str, Estimate]:
    """Calibration errors, each with the interval of `onebasin.metrics.bootstrap.absolute`.

    >>> from onebasin.metrics.calibration import ece
    >>> p, targets = torch.tensor([[0.8, 0.2]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> [round(end, 2) for end in calibration_estimates({"ece": ece}, p, targets, Sampling(200, 0.95, 0))["ece"]]
    [0.0, 0.0, 0.08]

    Args:
        metrics: by name: `ece` or `ace`, or a `functools.partial` of one with further keywords.
        probabilities: (examples, classes).
        targets: (examples,).
        sampling: how intervals are made; every metric sees the same draws.
    """
    found = {}
    for name, metric in metrics.items():
        generator = torch.Generator().manual_seed(sampling.seed)
        ends = interval(metric, probabilities, targets, generator=generator, draws=sampling.draws, level=sampling.level)
        found[name] = Estimate(*map(float, ends))
    return found


def mean_estimator(values: Mapping[str, Tensor]) -> Numbers:
    """Means over the examples of one sample.

    >>> mean_estimator({"x": torch.tensor([1.0, 3.0])})((torch.tensor([[0.0, 2.0]]),))
    {'x': tensor([3.], dtype=torch.float64)}

    Args:
        values: one per example (examples,), by name.
    """
    return lambda counts: {name: weighted_mean(own, only(counts)) for name, own in values.items()}


def only(counts: Counts | None) -> Tensor | None:
    """The counts of a single sample, as metrics take them."""
    return None if counts is None else counts[0]


# ----------------------------------------------------------------------
# One pass over a population of classifiers that keeps averages only, so that memory does not grow with the population.


KEPT = 32  # networks whose outputs have the bytes of `_Running` and of what one more network adds, in float64


@dataclass(frozen=True, eq=False)
class Averages:
    """What a population of classifiers predicts together, float64.

    Attributes:
        members: how many networks.
        probabilities: the average predictive (examples, classes).
        log_probabilities: its logarithm, which does not underflow (examples, classes).
        logits: the mean of logits (examples, classes).
        mean_entropy: the mean of the entropies of members (examples,).
    """

    members: int
    probabilities: Tensor
    log_probabilities: Tensor
    logits: Tensor
    mean_entropy: Tensor

    @property
    def mutual_information(self) -> Tensor:
        """How much the members disagree on each example, (examples,) in nats."""
        return information(self.probabilities, self.mean_entropy)

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores of `onebasin.metrics.ood_scores`, each (examples,), higher = more foreign."""
        return {
            "msp": msp(self.probabilities),
            "entropy": doubt(self.probabilities),
            "mutual_information": self.mutual_information,
            "max_logit": max_logit(self.logits),
            "energy": energy(self.logits),
        }


def gather(
    model: nn.Module, population: Networks, inputs: Inputs, kind: str, **options: Unpack[PredictOptions]
) -> Averages:
    """Run every network over the inputs, and average.

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[3.0], [0.0]], [[0.0], [3.0]]])})
    >>> found = gather(nn.Linear(1, 2, bias=False), population, torch.ones(1, 1), "categorical")
    >>> found.probabilities, found.members
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), 2)

    Args:
        model: the function.
        population: a Population, or a Posterior that is drawn from.
        inputs: as in `onebasin.predict`.
        kind: "categorical" for outputs (examples, classes), "bernoulli" for one logit per example.
        options: as in `predict`.

    Raises:
        InputError: outputs are of another shape or not finite.
    """
    running: _Running | None = None
    with passes(model, population, inputs, kept=KEPT, **options) as chunks:
        for start, block in chunks:
            for number, outputs in enumerate(block):
                logits = _class_logits(outputs, kind, start + number)
                if running is None:
                    running = _Running(logits)
                else:
                    running.add(logits)
    assert running is not None  # a population has at least one network
    return running.averages()


class _Running:
    """Sums over members of differences from the first one: equal members have exactly its averages."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.logs = logits.log_softmax(1)
        self.probabilities = self.logs.exp()
        self.entropy = entropy(self.probabilities)
        self.total_logs = self.logs
        self.sums = [torch.zeros_like(own) for own in (self.logits, self.probabilities, self.entropy)]
        self.members = 1

    def add(self, logits: Tensor) -> None:
        logs = logits.log_softmax(1)
        probabilities = logs.exp()
        self.total_logs = torch.logaddexp(self.total_logs, logs)
        own = (logits - self.logits, probabilities - self.probabilities, entropy(probabilities) - self.entropy)
        for total, value in zip(self.sums, own, strict=True):
            total += value
        self.members += 1

    def averages(self) -> Averages:
        logits, probabilities, doubts = (
            first + total / self.members
            for first, total in zip((self.logits, self.probabilities, self.entropy), self.sums, strict=True)
        )
        logs = self.total_logs - math.log(self.members)
        # A mean of differences can take a probability of 1e-300 below zero by rounding.
        return Averages(self.members, probabilities.clamp(min=0), logs, logits, doubts)


def _class_logits(outputs: Tensor, kind: str, number: int) -> Tensor:
    """Logits (examples, classes) in float64; of one logit z the pair (-z/2, z/2), which has the same probabilities."""
    exact = outputs.detach().double()
    if kind == "bernoulli":
        if exact.numel() != len(exact):
            raise InputError(
                f"expected one logit per example for a bernoulli likelihood, found outputs {tuple(exact.shape)}: "
                'choose likelihood="categorical", or evaluate the outputs one by one'
            )
        half = exact.reshape(-1, 1) / 2
        exact = torch.cat([-half, half], dim=1)
    if exact.dim() != 2 or exact.shape[1] < 2:
        raise InputError(
            f"expected outputs (examples, classes) of at least 2 classes, found {tuple(exact.shape)}: choose "
            'likelihood="bernoulli" for one logit, "gaussian" for values'
        )
    if not bool(torch.isfinite(exact).all()):
        raise InputError(
            f"expected finite outputs of every network, found NaN or infinity from network {number}: look for them in "
            "its weights and in the inputs, or leave it out"
        )
    return exact


# ----------------------------------------------------------------------
# The numbers of a population of classifiers.


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

    likelihoods = estimates(mean_estimator({f"nll{end}": own for end, own in losses.items()}), [len(goals)], sampling)
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
    return estimates(
        mean_estimator({"mutual_information": foreign.mutual_information}), [len(foreign.logits)], sampling
    )


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


# ----------------------------------------------------------------------
# The numbers of a population that predicts values.


Noise = float | str | None


def value_numbers(
    outputs: Tensor, targets: Tensor, noise: Noise, levels: Sequence[float], sampling: Sampling
) -> dict[str, Estimate]:
    """RMSE of the mean, NLL of the mixture, and coverage and width of its central intervals.

    Args:
        outputs: what members give, (members, examples, ...), see `gaussians`.
        targets: (examples, ...).
        noise: as in `gaussians`.
        levels: of the intervals.
        sampling: how intervals are made.
    """
    goals = targets.double()
    means, spread = gaussians(outputs, goals, noise)
    central = means.mean(0, keepdim=True)
    each = {"nll": -log_density(means, goals, spread)}
    for level in levels:
        low, high = central_interval(means, spread, level)
        each[f"coverage_{100 * level:g}"] = _per_example(((goals >= low) & (goals <= high)).double())
        each[f"width_{100 * level:g}"] = _per_example(high - low)

    def numbers(counts: Counts | None) -> dict[str, Tensor]:
        return {"rmse": rmse(central, goals, weights=only(counts)), **mean_estimator(each)(counts)}

    return estimates(numbers, [len(goals)], sampling)


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
    found = exact[0, 0].numel() if exact.dim() > 1 and exact.shape[1] == len(targets) else 0
    if noise is None and found == 2 * values:
        noise = "learned"
    if noise == "learned" and found == 2 * values and exact.dim() == 3:
        means, logs = exact.chunk(2, dim=2)
        return means.reshape(shape), logs.exp().reshape(shape)
    if isinstance(noise, int | float) and found == values and _core(exact[0]) == _core(targets):
        return exact.reshape(shape), torch.as_tensor(float(noise), dtype=torch.float64, device=exact.device)
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


# ----------------------------------------------------------------------
# Everything that a population is worth on some data, in one call.


_COPIES = 16  # of the outputs of all members, counted by their bytes: values are looked at in float64
_NO_TEMPERATURE = (
    "no temperature: it is fitted on half of the examples, and all of the {} there are right, so the lowest is the best"
)


class EvaluateOptions(ExecutionOptions, total=False):
    """What `evaluate` may also be told; where the networks run is said as in `ExecutionOptions`.

    Attributes:
        likelihood: "categorical" for class numbers, "bernoulli" for targets 0 or 1 and one logit, "gaussian" for
            values. Default: categorical for whole-number types, gaussian for floats; floats that may be class labels
            are refused, see `onebasin.predict.targets.kind_of_targets`.
        noise: for gaussian: the standard deviation of targets, or "learned" where the model gives means and log
            deviations, which is the default where it does.
        draws: networks drawn from a Posterior, 100 by default.
        statistics: inputs, such as those of training, on which running statistics are measured for each draw, as in
            `predict`; where they are missing, a remark and a warning say so, unless this is False.
        seed: of these draws, of the halves for the temperature, and of the bootstrap; 0 by default.
        bins: of calibration errors, 15 by default.
        resamples: bootstrap draws of the examples, 1,000 by default.
        level: of the bootstrap intervals, 0.95 by default.
        coverage: levels of the predictive intervals of values, (0.5, 0.9, 0.95) by default.
        chunk: networks in one pass, as in `predict`.
        batch: examples in one pass, as in `predict`.
        progress: called with (networks done, networks in all) in each of the passes.
    """

    likelihood: str | None
    noise: Noise
    draws: int
    statistics: Measured
    seed: int
    bins: int
    resamples: int
    level: float
    coverage: Sequence[float]
    chunk: int
    batch: int
    progress: Callable[[int, int], None]


def evaluate(
    model: nn.Module,
    population: Networks,
    data: tuple[Inputs, Tensor],
    *,
    outside: Inputs | None = None,
    reference: Networks | Tensor | None = None,
    **options: Unpack[EvaluateOptions],
) -> Evaluation:
    """Evaluate the average predictive of a population, each number with a bootstrap interval over the examples.

    Classifiers run once over the examples, once over `outside` and once for a reference population, and only averages
    are kept: a thousand networks need no more memory than one. Values need all predictions together, members x examples
    x outputs: 1,000 networks on 10,000 examples are 80 MB.

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[3.0], [0.0]], [[2.0], [0.0]]])})
    >>> inputs, targets = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0, 1, 0, 0])
    >>> found = evaluate(nn.Linear(1, 2, bias=False), population, (inputs, targets), outside=torch.zeros(3, 1))
    >>> found.inside["accuracy"].value, found.detection["msp"]["auroc"].value
    (0.75, 1.0)

    Args:
        model: the function; left exactly as it was.
        population: a Population, or a Posterior, from which networks are drawn.
        data: (inputs, targets). Inputs are a tensor, a tuple of positional or a dict of keyword inputs.
        outside: foreign inputs, to be told from those of `data`; for classifiers.
        reference: another population of the same model, or its average predictive (examples, classes) for these inputs;
            for classifiers. A reference posterior is drawn from with `seed` + 1.
        options: see `Options`.

    Raises:
        InputError: an option is unknown or nothing reads it, targets do not fit, or the networks' outputs are not
            finite.

    Warns:
        StatisticsWarning: draws have running statistics that are not their own; the remarks say so too.
    """
    check_options(options, EvaluateOptions.__annotations__, "evaluate")
    inputs, targets = data
    targets = torch.as_tensor(targets)
    check_targets(inputs, targets)
    kind = kind_of_targets(targets, options.get("likelihood"), options.get("noise"))
    _refuse_idle(population, reference, options)
    if kind == "gaussian" and (outside is not None or reference is not None):
        raise InputError(
            "outside and reference compare class probabilities, found a gaussian likelihood: leave them out"
        )
    question = _Question(model, population, inputs, targets, kind, outside, reference)
    populations = [own for own in (population, reference) if isinstance(own, Posterior)]
    notes = tuple(dict.fromkeys(filter(None, (stale_statistics(model, own, inputs, options) for own in populations))))
    for note in notes:
        warnings.warn(note, StatisticsWarning, stacklevel=2)
    if notes:
        options = {**options, "statistics": False}  # it has been said
    with executor_for(options, **_needs(question, options)) as executor:
        found = _values(question, options, executor) if kind == "gaussian" else _classes(question, options, executor)
    return replace(found, remarks=(*found.remarks, *notes))


class _Question(NamedTuple):
    """What is to be evaluated."""

    model: nn.Module
    population: Networks
    inputs: Inputs
    targets: Tensor
    kind: str
    outside: Inputs | None
    reference: Networks | Tensor | None


def _needs(question: _Question, options: EvaluateOptions) -> MemoryNeeds:
    """The memory of the largest of all passes."""
    model, population, inputs = question.model, question.population, question.inputs
    members = len(networks_of(population, options.get("draws", 100), 0))
    kept = _COPIES * members if question.kind == "gaussian" else KEPT
    runs = [(population, inputs)]
    if question.outside is not None:
        runs.append((population, question.outside))
    if question.reference is not None and not isinstance(question.reference, Tensor):
        runs.append((question.reference, inputs))
    found = [needs(model, own, examples, kept, options) for own, examples in runs]
    return MemoryNeeds(each=max(one["each"] for one in found), here=sum(one["here"] for one in found))


def _passing(options: EvaluateOptions, executor: Executor) -> Passing:
    """The options of `predict`, with a cluster that is open already."""
    kept = Passing.__annotations__.keys() - ExecutionOptions.__annotations__.keys()
    return cast("Passing", {name: value for name, value in options.items() if name in kept} | {"executor": executor})


def _sampling(options: EvaluateOptions) -> tuple[Sampling, dict[str, Any]]:
    """How intervals are made, and how the record says it."""
    sampling = Sampling(options.get("resamples", 1000), options.get("level", 0.95), options.get("seed", 0))
    told: dict[str, Any] = {**sampling._asdict(), "method": "bca"}
    told["resamples"] = told.pop("draws")
    return sampling, told


def _values(question: _Question, options: EvaluateOptions, executor: Executor) -> Evaluation:
    sampling, settings = _sampling(options)
    levels, noise = options.get("coverage", (0.5, 0.9, 0.95)), options.get("noise")
    passing = _passing(options, executor)
    outputs = predict(question.model, question.population, question.inputs, output="values", **passing)
    numbers = value_numbers(outputs, question.targets.to(outputs.device), noise, levels, sampling)
    return Evaluation(
        question.kind, len(outputs), len(question.targets), 0, numbers, settings={**settings, "noise": noise}
    )


def _classes(question: _Question, options: EvaluateOptions, executor: Executor) -> Evaluation:
    sampling, settings = _sampling(options)
    settings["bins"] = bins = options.get("bins", 15)
    settings["calibration_method"] = "absolute"
    model, population, inputs, targets, kind, outside, reference = question
    passing = _passing(options, executor)
    own = gather(model, population, inputs, kind, **passing)
    goals = _class_numbers(targets, kind).to(own.logits.device)
    inside = predictive_numbers(own, goals, bins, sampling)
    temperature, cooled = tempered_numbers(own.log_probabilities, goals, bins, sampling)
    remarks = (_NO_TEMPERATURE.format(len(goals) // 2),) if temperature is None and len(goals) > 1 else ()
    facts: dict[str, Any] = {"settings": settings, "remarks": remarks}
    found = Evaluation(kind, own.members, len(goals), 0, inside, temperature, cooled, **facts)
    if outside is not None:
        foreign = gather(model, population, outside, kind, **passing)
        away, told = outside_numbers(foreign, sampling), detection_numbers(own, foreign, sampling)
        found = replace(found, outside_examples=len(foreign.logits), outside=away, detection=told)
    if reference is not None:
        if not isinstance(reference, Tensor):
            passing["seed"] = sampling.seed + 1  # two posteriors should not be compared by the same random numbers
            reference = gather(model, reference, inputs, kind, **passing).probabilities
        found = replace(found, reference=comparison_numbers(own.probabilities, reference, sampling))
    return found


def _refuse_idle(population: Networks, reference: Networks | Tensor | None, options: EvaluateOptions) -> None:
    """Refuse options that nothing would read."""
    drawn = not all(isinstance(own, Population | Tensor | None) for own in (population, reference))
    if options.get("statistics") is not None and not drawn:
        raise InputError(
            "running statistics are measured for networks drawn from posteriors, found statistics= with a population, "
            "whose networks have their own: leave it out"
        )
    if "draws" in options and not drawn:
        raise InputError(
            f"networks are drawn from posteriors only, found draws={options['draws']} with a population, all of whose "
            f"networks are evaluated: leave it out, or take some of them, as population[:{options['draws']}]"
        )


def _class_numbers(targets: Tensor, kind: str) -> Tensor:
    """Targets as class numbers (examples,); 0 and 1 may be stored as floats, in a column."""
    if kind == "bernoulli" and targets.numel() == len(targets) and bool(((targets == 0) | (targets == 1)).all()):
        return targets.reshape(-1).long()
    if kind == "bernoulli":
        raise InputError(
            f"expected one target per example, 0 or 1, found {tuple(targets.shape)} from {float(targets.min()):g} to "
            f"{float(targets.max()):g}: evaluate the outputs one by one"
        )
    return targets
