"""Split conformal prediction with networks: sets of classes, or intervals of values, that cover a promised share.

The promise holds on average over calibration examples and new ones that are exchangeable with them, for any model and
any networks; it is no promise for each class or each input. What a stratum of easy or hard inputs gets is measured by
`Conformal.evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.evaluation.evaluate import (
    Estimate,
    Noise,
    Resampling,
    class_logits,
    class_numbers,
    estimates,
    gaussians,
    mean_estimator,
    refuse_heads,
)
from onebasin.evaluation.figures import wilson
from onebasin.functional import (
    AnyInputs,
    Data,
    Inputs,
    OutputPart,
    check_labels,
    inputs_of,
    kind_of_targets,
    measured_of,
    pair_of,
    select_output,
)
from onebasin.metrics import (
    INTERVALS,
    SETS,
    as_class_numbers,
    central_interval,
    class_scores,
    conformal_rank,
    conformal_threshold,
    interval_excess,
)
from onebasin.parallel import Executor, Progress, progress_of
from onebasin.posterior import Networks, Predictive, PredictOptions, predict, stale_statistics
from onebasin.reporting import (
    Axis,
    Cell,
    Column,
    Record,
    Result,
    Rule,
    Series,
    Table,
    as_number,
    finite,
    one_panel,
    result_record,
)

QUANTILES = "quantiles"
_STRATA = 5  # of intervals, by width
_BINS = 40
_THRESHOLDS = (Column("of"), Column("threshold", digits=4))
_ROUNDING = 1e-9  # of widths, below which they are one stratum


class Stratum(NamedTuple):
    """Examples whose sets or intervals are of like size.

    Attributes:
        name: which sizes.
        examples: how many.
        coverage: the share of them whose target is covered, NaN without examples.
        size: mean size of their sets, or width of their intervals.
    """

    name: str
    examples: int
    coverage: float
    size: float


@dataclass(frozen=True, eq=False, repr=False)
class ConformalCoverage(Result):
    """The result of `Conformal.evaluate`.

    Attributes:
        method: of the sets or intervals.
        promised: the coverage that was asked for.
        examples: how many there were.
        numbers: of sets coverage, size, empty (share of sets without a class) and single (with one); of intervals
            coverage, width and interval_score. Each with its bootstrap interval.
        strata: coverage by size.
        settings: how it was done.
    """

    method: str
    promised: float
    examples: int
    numbers: Mapping[str, Estimate]
    strata: tuple[Stratum, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """Coverage of the stratum that is covered worst; empty sets, which cover nothing, are left out."""
        return min((one.coverage for one in self.strata if one.examples and one.size > 0), default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "method": self.method,
            "promised": self.promised,
            "examples": self.examples,
            **{name: value._asdict() for name, value in self.numbers.items()},
            "strata": [one._asdict() for one in self.strata],
        }

    def record(self) -> Record:
        """The numbers, and coverage by size as a table and as bars."""
        size = "width" if "width" in self.numbers else "size"
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (name.replace("_", " "), as_number(*value)) for name, value in self.numbers.items()
        )
        ends = {one.name: wilson(one.coverage, one.examples) for one in self.strata if one.examples}
        strata: tuple[tuple[Cell, ...], ...] = tuple(
            (one.name, as_number(one.examples), as_number(one.coverage, *ends.get(one.name, (None, None))),
             as_number(one.size))
            for one in self.strata
        )  # fmt: skip
        seen = [one for one in self.strata if one.examples]
        bars = Series("", tuple(range(len(seen))), tuple(finite(one.coverage) for one in seen),
                      tuple(ends[one.name][0] for one in seen), tuple(ends[one.name][1] for one in seen))  # fmt: skip
        answer = (
            f"{self.numbers['coverage'].value:.1%} of {self.examples:,} targets are covered, {self.promised:.1%} were "
            f"promised; the mean {size} is {self.numbers[size].value:.4g}, and the stratum that is covered worst has "
            f"{self.least:.1%}."
        )
        title = "Are large and small ones as often right?"
        return result_record(
            "conformal-coverage",
            f"Coverage of {self.method.upper()} on {self.examples:,} examples",
            answer,
            (
                Table("numbers", "What is covered", (Column("metric"), Column("value", digits=4)), rows,
                      f"in brackets: {self.settings.get('level', 0.95):.0%} bootstrap intervals over examples"),
                Table("strata", f"Coverage by {size}", (Column(size), Column("examples", digits=0), Column("coverage"),
                      Column(f"mean {size}")), strata, "in brackets: 95 % intervals of each share (Wilson)"),
                one_panel("strata-bars", title, f"{answer} Bars are 95 % intervals (Wilson).", "bars",
                          Axis(size, names=tuple(one.name for one in seen)),
                          Axis("share of targets covered", low=0.0, high=1.05), series=(bars,),
                          rules=(Rule("promised", self.promised),)),
            ),
            values=self.to_dict(),
            settings=dict(self.settings),
        )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Conformal(Result):
    """The result of `onebasin.conformal`: sets or intervals for new inputs, out of the same networks.

    Attributes:
        method: "thr", "aps" or "raps" for sets, "cqr", "split" or "normalised" for intervals.
        coverage: the share that is promised.
        thresholds: of the scores, float64, one, or one per value of an example; infinite where there were too few
            calibration examples, so that everything is covered.
        scores: of the calibration examples, float64 (examples, ...).
        model: the function.
        networks: that predict.
        options: of `metrics.class_scores`, or of values.
        predicting: how networks run.
    """

    method: str
    coverage: float
    thresholds: Tensor
    scores: Tensor
    model: nn.Module
    networks: Networks
    options: Mapping[str, Any]
    predicting: PredictOptions

    @property
    def examples(self) -> int:
        """Number of calibration examples."""
        return len(self.scores)

    @property
    def law(self) -> tuple[float, float]:
        """95 % interval of the share that is covered, given the calibration examples: Beta(k, n + 1 - k)."""
        from scipy.stats import beta

        place = conformal_rank(self.examples, self.coverage)
        if place > self.examples:
            return 1.0, 1.0
        low, high = beta.interval(0.95, place, self.examples + 1 - place)
        return float(low), float(high)

    def sets(self, inputs: AnyInputs, *, seed: int | None = None) -> Tensor:
        """Which classes are in the set of each input, bool (examples, classes).

        Randomised methods draw a number for each input of a call: equal calls give equal sets. In calls of few inputs
        with one seed the same numbers come again and again, and the share that is covered is not the promised one:
        there give each call a seed of its own, or calibrate with randomised=False.

        Args:
            inputs: as in `predict`.
            seed: of the random numbers; None for that of the calibration plus 1.
        """
        if self.method not in SETS:
            raise InputError(f"{self.method} has intervals, found a question for sets: call .intervals(inputs)")
        p = self._probabilities(inputs_of(inputs, self.model))
        return self._class_scores(p, int(self.options["seed"]) + 1 if seed is None else seed) <= float(self.thresholds)

    def intervals(self, inputs: AnyInputs) -> tuple[Tensor, Tensor]:
        """Lower and upper end for each input, float64 (examples, *shape); where they would cross, both the middle."""
        if self.method not in INTERVALS:
            raise InputError(f"{self.method} has sets of classes, found a question for intervals: call .sets(inputs)")
        low, high, unit = self._ends(inputs_of(inputs, self.model))
        reach = self.thresholds.to(low.device) * unit
        low, high = low - reach, high + reach
        middle = (low + high) / 2
        crossed = low > high
        return torch.where(crossed, middle, low), torch.where(crossed, middle, high)

    def evaluate(
        self, data: Data, *, n_resamples: int = 1000, confidence_level: float = 0.95, seed: int = 0
    ) -> ConformalCoverage:
        """Coverage and size on labelled examples, which should be others than those of the calibration.

        Args:
            data: as in `onebasin.evaluate`.
            n_resamples: bootstrap draws of the examples.
            confidence_level: of the intervals.
            seed: of the bootstrap.
        """
        inputs, targets = pair_of(data, self.model)
        resampling = Resampling(n_resamples, confidence_level, seed)
        if self.method in SETS:
            each, strata = self._of_sets(inputs, targets)
        else:
            each, strata = self._of_intervals(inputs, targets)
        numbers = estimates(mean_estimator(each), [len(targets)], resampling)
        settings = {"level": confidence_level, "seed": seed, "resamples": n_resamples}
        return ConformalCoverage(self.method, self.coverage, len(targets), numbers, strata, settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "method": self.method,
            "coverage": self.coverage,
            "thresholds": [finite(value) for value in self.thresholds.reshape(-1).tolist()],
            "examples": self.examples,
            "law": list(self.law),
            **{name: self.options[name] for name in ("penalty", "rank", "randomised") if name in self.options},
        }

    def record(self) -> Record:
        """The threshold, the law of what is covered, and the scores that it came from."""
        low, high = self.law
        finite_scores = self.scores[self.scores.isfinite()].double().cpu()
        edges = torch.linspace(float(finite_scores.min()), float(finite_scores.max()) + 1e-12, _BINS + 1).double()
        counts = torch.histogram(finite_scores.reshape(-1), edges).hist
        values = self.thresholds.reshape(-1).tolist()
        rules = tuple(Rule("threshold", value, "vertical") for value in values[:1] if math.isfinite(value))
        said = ", ".join(f"{value:.4g}" for value in values[:3]) + (", ..." if len(values) > 3 else "")
        answer = (
            f"With the threshold {said} of {self.examples:,} calibration examples, {self.coverage:.1%} are covered on "
            f"average, and with these very examples between {low:.1%} and {high:.1%} (95 %)."
        )
        if math.isinf(max(values)):
            answer = (
                f"Everything is covered: {self.examples:,} calibration examples are too few to promise "
                f"{self.coverage:.1%}; give at least {_fewest(self.coverage):,}."
            )
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (f"value {number}" if len(values) > 1 else "all", as_number(value)) for number, value in enumerate(values)
        )
        figure = one_panel(
            "scores", "How strange are the calibration examples?", answer, "histogram",
            Axis("conformal score"), Axis("examples"),
            series=(Series("", tuple(edges.tolist()), tuple(map(float, counts.tolist()))),), rules=rules,
        )  # fmt: skip
        what = "sets" if self.method in SETS else "intervals"
        return result_record(
            "conformal",
            f"Conformal {what} by {self.method.upper()}, {self.coverage:.1%} promised",
            answer,
            (
                Table("thresholds", "Thresholds of the scores", (Column("of"), Column("threshold", digits=4)), rows),
                figure,
            ),
            values=self.to_dict(),
            settings={"seed": self.options["seed"]},
        )

    def _probabilities(self, inputs: Inputs) -> Tensor:
        prepare = partial(class_logits, kind=self.options["kind"])
        return Predictive.of(self.model, self.networks, inputs, self.predicting, prepare=prepare).mean

    def _class_scores(self, p: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(len(p), generator=generator, dtype=torch.float64) if self.options["randomised"] else None
        given = {name: self.options[name] for name in ("penalty", "rank")}
        return class_scores(p, self.method, uniform=uniform, **given)

    def _ends(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Ends of the intervals before they are moved by the threshold, and the unit of the threshold."""
        given = {option.name: getattr(self.predicting, option.name) for option in fields(self.predicting)}
        outputs = predict(self.model, self.networks, inputs, quantity="values", **given)
        noise, shape = self.options["noise"], (outputs.shape[1], *self.options["shape"])
        if noise == QUANTILES:
            return *_quantiles(outputs, shape), torch.ones(shape, dtype=torch.float64, device=outputs.device)
        bare = noise is None and self.method != "cqr"  # neither needs a law of the targets
        fits = outputs[0].numel() == math.prod(shape)
        means, spread = gaussians(outputs, torch.zeros(shape, device=outputs.device), 0.0 if bare and fits else noise)
        centre = means.mean(0)
        ones = torch.ones_like(centre)
        if self.method == "cqr":
            return *central_interval(means, spread, self.coverage), ones
        if self.method == "split":
            return centre, centre, ones
        unit = (spread.square().expand_as(means).mean(0) + means.var(0, correction=0)).sqrt()
        if not bool((unit > 0).all()):
            raise InputError(
                "expected predictions with a spread to normalise by, found some without: give noise=, or several "
                'networks, or choose method="split"'
            )
        return centre, centre, unit

    def _of_sets(self, inputs: Inputs, targets: Tensor) -> tuple[dict[str, Tensor], tuple[Stratum, ...]]:
        found = self.sets(inputs)
        goals = as_class_numbers(class_numbers(targets, self.options["kind"]), found)
        held, size = found.gather(1, goals[:, None])[:, 0].double(), found.sum(1).double()
        each = {"coverage": held, "size": size, "empty": (size == 0).double(), "single": (size == 1).double()}
        borders = _sizes(found.shape[1])
        names = [f"{low}" if low == high else f"{low} to {high}" for low, high in borders]
        masks = [(size >= low) & (size <= high) for low, high in borders]
        return each, _strata(names, masks, held, size)

    def _of_intervals(self, inputs: Inputs, targets: Tensor) -> tuple[dict[str, Tensor], tuple[Stratum, ...]]:
        low, high = self.intervals(inputs)
        goal = targets.to(low.device).double()
        excess = interval_excess(low, high, goal)
        held, width = _mean(excess <= 0), _mean(high - low)
        score = _mean(high - low + 2 / (1 - self.coverage) * excess.clamp(min=0))
        ends = torch.quantile(width, torch.linspace(0, 1, _STRATA + 1, dtype=torch.float64, device=width.device))
        if not float(ends[-1] - ends[0]) > _ROUNDING * float(ends[-1]):  # infinite ones are equal too
            names, masks = [f"{float(ends[0]):.3g}"], [torch.ones_like(held, dtype=torch.bool)]
        else:
            place = torch.searchsorted(ends[1:-1].contiguous(), width)
            names = [f"{float(a):.4g} to {float(b):.4g}" for a, b in pairwise(ends)]
            masks = [place == number for number in range(_STRATA)]
        return {"coverage": held, "width": width, "interval_score": score}, _strata(names, masks, held, width)


def conformal(
    model: nn.Module,
    networks: Networks,
    data: Data,
    *,
    method: str | None = None,
    coverage: float = 0.9,
    penalty: float = 0.01,
    rank: int = 5,
    randomised: bool = True,
    noise: Noise = None,
    output: OutputPart = None,
    likelihood: str | None = None,
    draws: int = 100,
    statistics: AnyInputs = None,
    seed: int = 0,
    chunk: int | None = None,
    batch: int | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Conformal:
    """Sets of classes, or intervals of values, that cover the target of a promised share of new inputs.

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[1.0]]]), "bias": torch.zeros(1, 1)})
    >>> x = torch.arange(9.0)[:, None]
    >>> found = conformal(nn.Linear(1, 1), population, (x, x + torch.arange(0.1, 1.0, 0.1)[:, None]))
    >>> [round(float(end), 4) for end in found.intervals(torch.zeros(1, 1))]  # the largest of nine errors is 0.9
    [-0.9, 0.9]

    Args:
        model: the function; left exactly as it was.
        networks: a Population, or a Posterior, from which networks are drawn; their average predictive counts.
        data: calibration examples that training has not seen, as in `evaluate`.
        method: for classes "thr", "aps" (the default) or "raps", see `metrics.class_scores`. For values "split"
            (absolute residuals, the default), "normalised" (by the predictive deviation) or "cqr" (both ends of the
            predictive's central interval are moved).
        coverage: the share that is promised.
        penalty: of "raps", for each class beyond `rank`.
        rank: of "raps".
        randomised: of "aps" and "raps": the last class is in by chance, so that the promise is met and not exceeded.
        noise: of values, as in `evaluate`; or "quantiles" where the model gives a lower and an upper quantile of each
            value, (examples, 2 values), as quantile regression does: then method is "cqr".
        output: which part of what the model returns counts, as in `predict`.
        likelihood: as in `evaluate`.
        draws: networks drawn from a Posterior.
        statistics: inputs for the running statistics of draws, as in `predict`.
        seed: of draws and of random sets.
        chunk: networks in one pass, as in `predict`.
        batch: examples in one pass, as in `predict`.
        progress: True for a line on stderr with the time left, or a function that is called with (networks done,
            networks in all, "networks").
        workers: processes; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Raises:
        InputError: the method is for other targets, or an option does not fit.
    """
    model = select_output(model, output)
    inputs, targets = pair_of(data, model)
    if noise == QUANTILES:
        likelihood = likelihood or "gaussian"
    kind = kind_of_targets(targets, likelihood, noise)
    refuse_heads(
        likelihood, kind, "conformal", 'a model of means with likelihood="gaussian", or judge it with evaluate'
    )
    values = kind == "gaussian"
    method = method or ("cqr" if noise == QUANTILES else "split" if values else "aps")
    known = INTERVALS if values else SETS
    if method not in known or (noise == QUANTILES and method != "cqr"):
        raise InputError(
            f"expected a method for {'values' if values else 'classes'} out of {', '.join(known)}, found {method!r}: "
            f"give {'cqr' if noise == QUANTILES else known[1]!r}"
        )
    if not 0 < coverage < 1:
        raise InputError(f"expected a coverage between 0 and 1, found {coverage}: 0.9 is usual")
    predicting = PredictOptions(
        draws=draws, seed=seed, statistics=measured_of(statistics, model), chunk=chunk, batch=batch,
        progress=progress_of(progress), workers=workers, executor=executor,
    )  # fmt: skip
    predicting, _ = stale_statistics(model, networks, inputs, predicting)
    options: dict[str, Any] = {"kind": kind, "seed": seed}
    if values:
        options |= {"noise": noise, "shape": tuple(targets.shape[1:])}
    else:
        options |= {"randomised": randomised and method != "thr"}
        options |= {"penalty": penalty, "rank": rank}
    nothing = torch.zeros(0, dtype=torch.float64)
    found = Conformal(method, coverage, nothing, nothing, model, networks, options, predicting)
    if values:
        low, high, unit = found._ends(inputs)
        scores = interval_excess(low, high, targets.to(low.device)) / unit
        columns = scores.reshape(len(scores), -1).T
        thresholds = torch.tensor([conformal_threshold(column, coverage) for column in columns], dtype=torch.float64)
        return replace(found, scores=scores, thresholds=thresholds.reshape(scores.shape[1:]))
    p = found._probabilities(inputs)
    goals = class_numbers(targets, kind)
    check_labels(goals, p)
    scores = found._class_scores(p, seed).gather(1, as_class_numbers(goals, p)[:, None])[:, 0]
    return replace(
        found, scores=scores, thresholds=torch.tensor(conformal_threshold(scores, coverage), dtype=torch.float64)
    )


def _fewest(coverage: float) -> int:
    """Calibration examples that are enough for a finite threshold.

    >>> _fewest(0.9), _fewest(0.95), _fewest(0.5)
    (9, 19, 1)
    """
    count = max(1, math.floor(coverage / (1 - coverage)) - 1)
    while conformal_rank(count, coverage) > count:
        count += 1
    return count


def _quantiles(outputs: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean lower and upper quantiles over networks, each of `shape`."""
    if outputs.dim() != 3 or outputs[0].numel() != 2 * math.prod(shape):
        raise InputError(
            f'expected outputs (examples, {2 * math.prod(shape[1:])}) with noise="quantiles", lower ones first, found '
            f"{tuple(outputs.shape[1:])}: give noise=standard deviation for means"
        )
    low, high = outputs.double().mean(0).chunk(2, dim=1)
    return low.reshape(shape), high.reshape(shape)


def _mean(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).mean(1)


def _sizes(classes: int) -> list[tuple[int, int]]:
    """Sizes of sets in strata: 0 to 3 one by one, then doubling.

    >>> _sizes(10)
    [(0, 0), (1, 1), (2, 2), (3, 3), (4, 7), (8, 10)]
    """
    borders = [(size, size) for size in range(min(3, classes) + 1)]
    low = 4
    while low <= classes:
        borders.append((low, min(2 * low - 1, classes)))
        low *= 2
    return borders


def _strata(names: list[str], masks: list[Tensor], held: Tensor, size: Tensor) -> tuple[Stratum, ...]:
    return tuple(
        Stratum(name, int(mask.sum()), *(float(each[mask].mean()) if bool(mask.any()) else math.nan
                                         for each in (held, size)))
        for name, mask in zip(names, masks, strict=True)
    )  # fmt: skip
