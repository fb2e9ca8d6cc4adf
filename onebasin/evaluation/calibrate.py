"""Calibration after training: scalings of logits folded into the networks, or a map of their average predictive.

Three ways, by what one map belongs to (`per`):

    "population"   the same map for the logits of every network, chosen for the NLL of their average predictive;
    "member"       a map for each network, chosen for its own NLL: each is calibrated, their average need not be;
    "average"      a map of the average predictive, after averaging: p^(1/T), or isotonic; nothing is folded.

Averaging calibrated networks doubts too much (Rahaman and Thiery, 2021), so "population" is the default. Temperature,
vector and matrix of the first two are folded into the last linear layer where that is exact, which a run in float64
proves on the given inputs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.alignment import output_layers
from onebasin.errors import InputError
from onebasin.evaluation.evaluate import (
    Estimate,
    Resampling,
    class_logits,
    class_numbers,
    estimates,
    mean_estimator,
    metric_estimates,
    refuse_heads,
)
from onebasin.evaluation.figures import reliability_panel
from onebasin.functional import (
    AnyInputs,
    Data,
    Inputs,
    OutputPart,
    check_labels,
    kind_of_targets,
    measured_of,
    pair_of,
    predictions,
    select_output,
)
from onebasin.metrics import (
    SCALINGS,
    Isotonic,
    Reliability,
    Scaling,
    accuracy,
    as_class_numbers,
    brier,
    ece,
    fit_isotonic,
    fit_scaling,
    reliability,
    weighted_mean,
)
from onebasin.parallel import Executor, Progress, progress_of
from onebasin.population import Population
from onebasin.posterior import Networks, OutputMap, Posterior, first_of, networks_of, predict
from onebasin.reporting import (
    Axis,
    Cell,
    Column,
    Figure,
    Record,
    Result,
    Series,
    Table,
    as_number,
    one_panel,
    result_record,
)
from onebasin.state import State

CALIBRATIONS = (*SCALINGS, "isotonic")
CALIBRATED = ("population", "member", "average")
RIDGES = (0.001, 0.01, 0.1, 1.0, 10.0)
_PROOF = 1e-9  # largest difference of log probabilities, relative to their size, that float64 may leave
_PROVED = 10  # networks at most that the proof runs
_SHOWN = 12  # maps of members in the table


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Result):
    """The result of `onebasin.calibrate`.

    It is also the calibrated predictive as a function: of logits (members, examples, classes), or with `per` "average"
    of average probabilities (examples, classes), it gives calibrated average probabilities (examples, classes).

    Attributes:
        method: "temperature", "vector", "matrix" or "isotonic".
        per: "population", "member" or "average".
        networks: what was given, a State, Population or Posterior, with the map folded in, without log densities; None
            where that is not exact, and `why` says why.
        why: "" where networks are there.
        scalings: the maps of logits, one, or one per network; empty for isotonic.
        isotonic: the isotonic map, else None.
        before: accuracy, nll, brier and ece of the average predictive as it was.
        after: the same after calibration, every example judged by a map that was fitted without it.
        gain: nll before less nll after, example by example, with its interval.
        ridge: of vector and matrix; None for others.
        proof: largest difference of log probabilities in float64 between folded networks and mapped outputs; None
            without folding.
        examples: how many there were.
        folds: parts of the examples that were left out in turn.
        settings: how it was done.
        reliability: confidence and accuracy in bins, before and after.
    """

    method: str
    per: str
    networks: State | Population | Posterior | None
    why: str
    scalings: tuple[Scaling, ...]
    isotonic: Isotonic | None
    before: Mapping[str, Estimate]
    after: Mapping[str, Estimate]
    gain: Estimate
    ridge: float | None
    proof: float | None
    examples: int
    folds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    reliability: tuple[Reliability, ...] = ()

    @property
    def temperature(self) -> float | None:
        """T where one temperature is all that is done, else None."""
        return self.scalings[0].temperature if len(self.scalings) == 1 else None

    def __call__(self, predictions: Tensor) -> Tensor:
        """Calibrated average probabilities (examples, classes), float64.

        Args:
            predictions: logits (members, examples, classes), as `predict(..., quantity="logits")` returns them; with
                `per` "average" the average probabilities (examples, classes) of `predict(..., average=True)`.
        """
        if self.per == "average":
            if predictions.dim() != 2:
                raise InputError(
                    f"expected average probabilities (examples, classes), found shape {tuple(predictions.shape)}: give "
                    "predict(..., average=True)"
                )
            return _of_average(self.isotonic or self.scalings[0], predictions.double().log())
        axes = 3 if self.settings.get("likelihood", "categorical") == "categorical" else 2
        if predictions.dim() < axes:
            raise InputError(
                f"expected logits of all members, ({'members, examples, classes'[: 17 if axes == 2 else None]}), found "
                f"shape {tuple(predictions.shape)}: give logits[None] of a single network"
            )
        if len(self.scalings) not in (1, len(predictions)):
            raise InputError(
                f"expected logits (members, examples, classes) of {len(self.scalings)} members, found shape "
                f'{tuple(predictions.shape)}: give predict(..., quantity="logits") of the same networks'
            )
        return _of_members(self.scalings, class_logits(predictions, self.settings.get("likelihood", "categorical")))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; maps as nested lists."""
        return {
            "method": self.method,
            "per": self.per,
            "temperature": self.temperature,
            "scalings": [{"matrix": one.matrix.tolist(), "shift": one.shift.tolist()} for one in self.scalings],
            "before": {name: value._asdict() for name, value in self.before.items()},
            "after": {name: value._asdict() for name, value in self.after.items()},
            "gain": self.gain._asdict(),
            "ridge": self.ridge,
            "folded": self.networks is not None,
            "why": self.why,
            "proof": self.proof,
            "examples": self.examples,
            "folds": self.folds,
        }

    def record(self) -> Record:
        """Scores before and after, what the maps do, and both reliability diagrams."""
        names = {"accuracy": "higher", "nll": "lower", "brier": "lower", "ece": "lower"}
        scores = Table(
            "scores",
            "What calibration changes",
            (Column("metric"), Column("before", digits=4), Column("after", digits=4)),
            tuple((name, as_number(*self.before[name]), as_number(*self.after[name])) for name in names),
            f"in brackets: {self.settings.get('level', 0.95):.0%} bootstrap intervals over examples",
            f"after: each example is judged by a map fitted to the other {self.folds - 1} of {self.folds} parts",
        )
        answer = (
            f"The {_WHAT[self.method]}{self._said} {'gains' if self.gain.value >= 0 else 'loses'} "
            f"{abs(self.gain.value):.4f} nats of NLL per example on {self.examples:,} held-out examples "
            f"(interval of the gain {self.gain.low:.4f} to {self.gain.high:.4f}); ECE "
            f"{self.before['ece'].value:.4f} -> {self.after['ece'].value:.4f}."
        )
        folded = (
            "The map is folded into the weights: the networks predict what the mapped outputs say, up to "
            f"{self.proof:.1e} of log probability in float64."
            if self.proof is not None and self.networks is not None
            else f"Nothing is folded into weights: {self.why}."
        )
        items: list[Table | Figure] = [scores, *self._maps()]
        items.insert(1, self._figure())
        return result_record(
            "calibration",
            f"Calibration by {_WHAT[self.method]}, per {self.per}",
            (answer, folded, _PER[self.per]),
            items,
            values=self.to_dict(),
            settings=dict(self.settings),
        )

    @property
    def _said(self) -> str:
        return "" if self.temperature is None else f" (T = {self.temperature:.4g})"

    def _maps(self) -> list[Table | Figure]:
        if not self.scalings:
            assert self.isotonic is not None
            lines = tuple(
                Series(f"class {label}", tuple(knots.tolist()), tuple(values.tolist()))
                for label, (knots, values) in enumerate(zip(self.isotonic.knots, self.isotonic.values, strict=True))
            )
            title = "What becomes of each probability, before they are divided by their sum?"
            axes = Axis("probability before", low=0.0, high=1.0), Axis("after", low=0.0, high=1.0)
            return [one_panel("maps", title, "One ascending map per class.", "lines", *axes, series=lines)]
        rows: list[tuple[Cell, ...]] = []
        for number, one in enumerate(self.scalings[:_SHOWN]):
            factors, off = one.matrix.diagonal(), one.matrix - torch.diag(one.matrix.diagonal())
            name = "all networks" if len(self.scalings) == 1 else f"network {number}"
            temperature = None if one.temperature is None else as_number(one.temperature)
            ends = map(as_number, (float(factors.min()), float(factors.max()), float(off.abs().max())))
            rows.append((name, temperature, *ends, as_number(float(one.shift.abs().max()))))
        more = len(self.scalings) - len(rows)
        columns = (
            Column("map"), Column("T", "logits are divided by it", digits=4), Column("least factor", digits=4),
            Column("largest factor", digits=4), Column("largest mixing", "of one logit into another", digits=4),
            Column("largest shift", digits=4),
        )  # fmt: skip
        note = f"and {more:,} more networks, in .scalings" if more > 0 else ""
        return [Table("maps", "What is done to the logits", columns, tuple(rows), note=note)]

    def _figure(self) -> Figure:
        titles = [f"before, ECE {self.before['ece'].value:.4f}", f"after, ECE {self.after['ece'].value:.4f}"]
        panels = tuple(reliability_panel(found, title) for found, title in zip(self.reliability, titles, strict=True))
        caption = "Bars are 95 % intervals of each share (Wilson); after: judged by maps fitted without the example."
        return Figure("reliability", "Are they as often right as they say, before and after?", caption, panels)


_WHAT = {
    "temperature": "temperature",
    "vector": "vector scaling",
    "matrix": "matrix scaling",
    "isotonic": "isotonic regression",
}
_PER = {
    "population": "One map for the logits of every network, fitted to the NLL of their average predictive.",
    "member": "A map for each network, fitted to its own NLL: each network is calibrated, their average need not be.",
    "average": "A map of the average predictive, applied after averaging; single networks stay as they are.",
}


def calibrate(
    model: nn.Module,
    networks: Networks | Mapping[str, Tensor],
    data: Data,
    method: str = "temperature",
    *,
    per: str | None = None,
    ridge: float | None = None,
    folds: int = 5,
    output: OutputPart = None,
    likelihood: str | None = None,
    bins: int = 15,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    draws: int = 100,
    statistics: AnyInputs = None,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    chunk: int | None = None,
    batch: int | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Calibration:
    """Calibrate networks on held-out examples, and give networks with the calibration folded into their weights.

    The logits of all networks on all examples are held at once: members x examples x classes.

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[1.0], [0.0]]]), "bias": torch.zeros(1, 2)})
    >>> data = torch.ones(40, 1), torch.tensor([0, 0, 0, 1] * 10)  # right three times out of four
    >>> found = calibrate(nn.Linear(1, 2), population, data, n_resamples=20)
    >>> round(1 / found.temperature, 6), found.networks.tensor("weight").flatten().tolist()
    (1.098612, [1.0986..., 0.0])

    Args:
        model: the function; left exactly as it was.
        networks: one network (a State), a Population, or a Posterior, from which networks are drawn.
        data: labelled examples that training has not seen, as in `evaluate`; classes, or 0 and 1 with one logit.
        method: "temperature" divides logits by T; "vector" multiplies each by a factor and adds a shift, "matrix" mixes
            them, both held to the best temperature by a ridge; "isotonic" maps each class's probability by an ascending
            function.
        per: "population", "member" or "average", see above. Default: population, for isotonic average.
        ridge: of vector and matrix, above 0; None tries `RIDGES` and takes the one of least cross-validated NLL.
        folds: parts of the examples that are left out in turn, to judge the calibration.
        output: which part of what the model returns are the logits, as in `predict`.
        likelihood: "categorical" or "bernoulli", as in `evaluate`.
        bins: bins of calibration errors.
        n_resamples: bootstrap draws of the examples.
        confidence_level: of the intervals.
        draws: networks drawn from a Posterior.
        statistics: inputs for the running statistics of draws, as in `predict`.
        seed: of draws, parts and intervals.
        path: a new folder for a calibrated Population that is larger than memory.
        chunk: networks in one pass, as in `predict`.
        batch: examples in one pass, as in `predict`.
        progress: True for a line on stderr with the time left, or a function that is called with (networks done,
            networks in all, "networks"), then with (fits done, fits in all, "fits").
        workers: processes; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Raises:
        InputError: an option does not fit, every example is right, or a posterior's covariance would not keep its form.
    """
    per = _checked(networks, method, per, folds)
    model = select_output(model, output)
    inputs, targets = pair_of(data, model)
    statistics, shown = measured_of(statistics, model), progress_of(progress)
    kind = kind_of_targets(targets, likelihood)
    refuse_heads(likelihood, kind, "calibrate", "a classifier, or judge it with evaluate")
    if kind == "gaussian":
        raise InputError("expected classes to calibrate, found values: for intervals of values see ob.conformal")
    if kind == "bernoulli" and method == "matrix":
        raise InputError('expected several classes to mix, found one logit: choose method="vector", which is Platt\'s')
    if isinstance(networks, Mapping):
        members: Population | Posterior = Population.from_states([networks])
    else:
        networks_of(networks, draws, seed)  # refuses what is neither
        members = networks
    logits = class_logits(
        predict(model, members, inputs, quantity="logits", draws=draws, statistics=statistics, seed=seed, chunk=chunk,
                batch=batch, progress=shown, workers=workers, executor=executor),
        kind,
    )  # fmt: skip
    goals = class_numbers(targets, kind)
    check_labels(goals, logits[0])
    goals = as_class_numbers(goals, logits)
    if bool((goals == goals[0]).all()):
        raise InputError(
            f"expected examples of at least two classes to calibrate on, found class {int(goals[0])} alone: the map "
            "that always says so would be the best; shuffle the data before they are divided"
        )
    if len(goals) < 2 * folds:
        raise InputError(f"expected at least {2 * folds} examples for {folds} folds, found {len(goals)}: give more")
    fold = _Folding.of(model, members, inputs, per) if method in SCALINGS else _Folding((), "isotonic maps bend")
    shifted = not fold.layers or any(bias for _, bias in fold.layers)
    ridges: Sequence[float | None] = (None,) if method not in ("vector", "matrix") else (ridge,) if ridge else RIDGES
    done, fits = count(1), len(ridges) * folds + 1
    task = _Task(method, per, logits, goals, shifted, lambda: shown and shown(next(done), fits, "fits"))
    parts = _parts(len(goals), folds, seed)
    ridge, after = task.best_ridge(parts, ridges)
    maps = task.fitted(torch.ones(len(goals), dtype=torch.bool), ridge)
    before = task.average
    resampling = Resampling(n_resamples, confidence_level, seed)
    folded, proof, why = fold.apply(networks, members, maps, kind, inputs, seed, path)
    losses = [-each.log().gather(1, goals[:, None]).squeeze(1) for each in (before, after)]
    gain = estimates(mean_estimator({"nll": losses[0] - losses[1]}), [len(goals)], resampling)["nll"]
    return Calibration(
        method, per, folded, why,
        tuple(one for one in maps if isinstance(one, Scaling)),
        next((one for one in maps if isinstance(one, Isotonic)), None),
        _scores(before, losses[0], goals, bins, resampling), _scores(after, losses[1], goals, bins, resampling), gain,
        ridge, proof, len(goals), folds,
        {"level": confidence_level, "seed": seed, "resamples": n_resamples, "bins": bins, "likelihood": kind},
        tuple(reliability(each, goals, bins) for each in (before, after)),
    )  # fmt: skip


def _checked(networks: object, method: str, per: str | None, folds: int) -> str:
    if method not in CALIBRATIONS:
        raise InputError(f"expected a method out of {', '.join(CALIBRATIONS)}, found {method!r}: give 'temperature'")
    per = per or ("average" if method == "isotonic" else "population")
    if per not in CALIBRATED:
        raise InputError(f"expected per out of {', '.join(CALIBRATED)}, found {per!r}: give 'population'")
    if method == "isotonic" and per != "average":
        raise InputError(f"isotonic maps are those of the average predictive, found per={per!r}: leave per out")
    if per == "member" and isinstance(networks, Posterior):
        raise InputError('networks of a posterior are drawn anew each time, found per="member": leave per out')
    if folds < 2:
        raise InputError(f"expected at least 2 folds, found {folds}: leave folds out for 5")
    return per


Map = Scaling | Isotonic


@dataclass(frozen=True, eq=False)
class _Task:
    """Maps of one kind, fitted to some of the examples and applied to others."""

    method: str
    per: str
    logits: Tensor
    goals: Tensor
    shift: bool
    report: Callable[[], object]

    @cached_property
    def log_average(self) -> Tensor:
        """Logarithm of the average predictive (examples, classes)."""
        return self.logits.double().log_softmax(2).logsumexp(0) - math.log(len(self.logits))

    @cached_property
    def average(self) -> Tensor:
        """The average predictive (examples, classes)."""
        return self.log_average.softmax(1)

    def fitted(self, rows: Tensor, ridge: float | None) -> tuple[Map, ...]:
        """The maps for some rows of the examples, a mask (examples,)."""
        goals = self.goals[rows.to(self.goals.device)]
        if self.method == "isotonic":
            self.report()
            return (fit_isotonic(self.average[rows.to(self.goals.device)], goals),)
        logits = self.log_average[None] if self.per == "average" else self.logits
        seen = logits[:, rows.to(logits.device)]
        fit = partial(fit_scaling, targets=goals, method=self.method, ridge=ridge or 0.0, shift=self.shift)
        maps = tuple(fit(one[None]) for one in seen) if self.per == "member" else (fit(seen),)
        self.report()
        return maps

    def mapped(self, maps: Sequence[Map], rows: Tensor) -> Tensor:
        """Calibrated average probabilities of some rows."""
        if self.per == "average":
            return _of_average(maps[0], self.log_average[rows.to(self.goals.device)])
        return _of_members(
            [one for one in maps if isinstance(one, Scaling)], self.logits[:, rows.to(self.goals.device)]
        )

    def left_out(self, parts: Tensor, ridge: float | None) -> Tensor:
        """Calibrated average probabilities, each example by maps fitted to the other parts."""
        result = torch.empty_like(self.average)
        for part in parts.unique().tolist():
            rows = parts == part
            result[rows.to(result.device)] = self.mapped(self.fitted(~rows, ridge), rows)
        return result

    def best_ridge(self, parts: Tensor, ridges: Sequence[float | None]) -> tuple[float | None, Tensor]:
        """The ridge of least NLL of examples that were left out, and `left_out` with it."""
        found = [(ridge, self.left_out(parts, ridge)) for ridge in ridges]
        return min(found, key=lambda pair: float(-pair[1].log().gather(1, self.goals[:, None]).mean()))


def _of_members(scalings: Sequence[Scaling], logits: Tensor) -> Tensor:
    """The average predictive (examples, classes) of scaled logits (members, examples, classes)."""
    each = [scalings[0 if len(scalings) == 1 else number](one) for number, one in enumerate(logits)]
    return torch.stack([one.softmax(1) for one in each]).mean(0)


def _of_average(one: Map, logs: Tensor) -> Tensor:
    """Mapped average predictive, from its logarithms."""
    if isinstance(one, Isotonic):
        return one(logs.exp())
    floor = torch.finfo(logs.dtype).min / 4 / logs.shape[1]
    return one(logs.clamp(min=floor)).softmax(1)


def _parts(examples: int, folds: int, seed: int) -> Tensor:
    """The part of each example, int64 (examples,), parts of nearly equal size."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    parts = torch.empty(examples, dtype=torch.int64)
    parts[order] = torch.arange(examples) % folds
    return parts


def _scores(p: Tensor, losses: Tensor, goals: Tensor, bins: int, resampling: Resampling) -> dict[str, Estimate]:
    def numbers(counts: tuple[Tensor, ...] | None) -> dict[str, Tensor]:
        weights = None if counts is None else counts[0]
        return {
            "accuracy": accuracy(p, goals, weights=weights),
            "nll": weighted_mean(losses, weights),
            "brier": brier(p, goals, weights=weights),
        }

    return estimates(numbers, [len(p)], resampling) | metric_estimates(
        {"ece": partial(ece, bins=bins)}, p, goals, resampling
    )


@dataclass(frozen=True, eq=False)
class _Folding:
    """The last layers of a model, or why nothing can be folded into them."""

    layers: tuple[tuple[str, str | None], ...]
    why: str
    model: nn.Module | None = None

    @classmethod
    def of(cls, model: nn.Module, members: Networks, inputs: Inputs, per: str) -> _Folding:
        if per == "average":
            return cls((), "what is mapped is the average of several networks, which is no network")
        layers = output_layers(model, first_of(networks_of(members, 1, 0)), inputs)
        if not layers:
            return cls((), "no linear or convolutional layer leads to the output")
        for layer in layers:
            if layer.why:
                return cls((), f"the last layer {layer.weight} cannot be changed, {layer.why}")
        return cls(tuple((layer.weight, layer.bias) for layer in layers), "", model)

    def apply(
        self,
        networks: Networks | Mapping[str, Tensor],
        members: Networks,
        maps: Sequence[Map],
        kind: str,
        inputs: Inputs,
        seed: int,
        path: str | os.PathLike[str] | None,
    ) -> tuple[State | Population | Posterior | None, float | None, str]:
        """What was given with the maps folded in, the proof, and why there is none."""
        if self.model is None:
            return None, None, self.why
        scalings = [one for one in maps if isinstance(one, Scaling)]
        outputs = [OutputMap(self.layers, *_for_outputs(one, kind)) for one in scalings]
        proof, size = self._proof(members, scalings, outputs, kind, inputs, seed)
        if not proof <= _PROOF * max(1.0, size):
            return None, None, (
                f"log probabilities of folded networks differ from those of mapped outputs by {proof:.1e}: the output "
                "is not the result of its last layer"
            )  # fmt: skip
        if isinstance(members, Posterior):
            return outputs[0].of_posterior(members), proof, ""
        # Neither prior nor likelihood of the new weights is that of the old ones.
        folded = replace(members, log_density=None).map(partial(_folded_block, outputs), path=path)
        if isinstance(networks, Population):
            return folded, proof, ""
        return folded.member(0), proof, ""

    def _proof(
        self,
        members: Networks,
        scalings: Sequence[Scaling],
        outputs: Sequence[OutputMap],
        kind: str,
        inputs: Inputs,
        seed: int,
    ) -> tuple[float, float]:
        """Largest difference of log probabilities in float64, and the largest log probability."""
        assert self.model is not None
        if isinstance(members, Posterior):
            drawn = networks_of(members, 2, seed)
            some = Population.from_stacked(next(iter(drawn.blocks(2)))[1])
        else:
            some = members.part(0, min(len(members), _PROVED))
        wide = some.to(dtype=torch.float64)
        moved = wide.map(partial(_folded_block, outputs))
        worst = size = 0.0
        before, after = (class_logits(predictions(self.model, each, inputs), kind) for each in (wide, moved))
        for number, (given, found) in enumerate(zip(before, after, strict=True)):
            wanted = scalings[0 if len(scalings) == 1 else number](given).log_softmax(1)
            gap = (found.log_softmax(1) - wanted).abs().max()
            worst, size = max(worst, float(gap)), max(size, float(wanted.abs().max()))
        return worst, size


def _folded_block(outputs: Sequence[OutputMap], block: State, start: int) -> State:
    """A block of networks, of which the first has number `start`, with the maps folded in."""
    if len(outputs) == 1:
        return outputs[0].of_networks(block)
    count = len(next(iter(block.values())))
    each = [
        outputs[start + row].of_networks({name: value[row : row + 1] for name, value in block.items()})
        for row in range(count)
    ]
    return {name: torch.cat([one[name] for one in each]) for name in block}


def _for_outputs(one: Scaling, kind: str) -> tuple[Tensor, Tensor]:
    """The map of what the model returns: of one logit z, which stands for the pair (-z/2, z/2), z -> a z + b."""
    if kind != "bernoulli":
        return one.matrix, one.shift
    factors = one.matrix.diagonal()
    return factors.mean().reshape(1, 1), (one.shift[1] - one.shift[0]).reshape(1)
