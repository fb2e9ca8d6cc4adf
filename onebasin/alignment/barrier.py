"""Where a barrier comes from: what each correction takes away from it, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from onebasin.alignment.match import match
from onebasin.alignment.repair import Repair, blend, recalibrate, repair, unit_statistics
from onebasin.errors import InputError, check_options
from onebasin.functional import BATCH, Inputs, Loss, Score, losses, score, wide_outputs
from onebasin.metrics import COLDEST, best_temperature
from onebasin.state import State, as_state, check_state, interpolate, spec_of
from onebasin.symmetry import Symmetry


def temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the T > 0 that minimises the cross-entropy of logits / T over all examples and places.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 0.0]]).expand(4, 2)  # right three times out of four: log 3 would be honest
    >>> round(1 / temperature(logits, torch.tensor([0, 0, 0, 1])), 6)
    1.098612

    Args:
        logits: (examples, classes, ...).
        targets: class numbers (examples, ...).

    Returns:
        As `best_temperature`, which it calls with one row per example and place.
    """
    score(logits, targets)  # refuses what is not a classification
    return best_temperature(logits.detach().movedim(1, -1).flatten(0, -2), targets.reshape(-1).to(logits.device))


Network = Mapping[str, Tensor] | nn.Module
Data = tuple[Inputs, Tensor]
Correct = Callable[[State, float], State]  # (network at t, t) -> the same, corrected


class Measure(TypedDict, total=False):
    """How losses are taken, see `predict.losses`."""

    loss: Loss
    batch: int


class BarrierOptions(Measure, total=False):
    """What `barrier` can do besides.

    Attributes:
        test: (inputs, targets) on which the same path is measured too.
        variance: None, "recalibrate" or "repair": what is done to the networks between the two ends.
    """

    test: Data | None
    variance: str | None


@dataclass(frozen=True, eq=False)
class Barrier:
    """Loss and error along the path, on one set of data.

    Attributes:
        t: (points,) from 0 to 1, the middle included.
        loss: (points,) float64.
        error: (points,) float64, None for regression.
        test: the same path on other data, if they were given.
        aligned: the path to the aligned second network, if a symmetry was given.
    """

    t: Tensor
    loss: Tensor
    error: Tensor | None
    test: Barrier | None = None
    aligned: Barrier | None = None

    @property
    def max(self) -> float:
        """Highest loss above the chord between the ends."""
        return _above_chord(self.t, self.loss)

    @property
    def midpoint(self) -> float:
        """Loss in the middle minus the mean of the ends."""
        return _above_mean(self.loss)

    @property
    def error_max(self) -> float | None:
        """Highest error above the chord between the ends."""
        return None if self.error is None else _above_chord(self.t, self.error)

    @property
    def error_midpoint(self) -> float | None:
        """Error in the middle minus the mean of the ends."""
        return None if self.error is None else _above_mean(self.error)

    def __str__(self) -> str:
        """A table for people."""
        lines = [f"{'':<16}  {'loss barrier':>12}  {'midpoint':>9}  {'error barrier':>13}"]
        for name, path in (("as given", self), ("aligned", self.aligned)):
            for where, found in (("train", path), ("test", path.test if path else None)):
                if found:
                    error = "-" if found.error_max is None else f"{found.error_max:.4f}"
                    lines.append(f"{name + ', ' + where:<16}  {found.max:>12.4f}  {found.midpoint:>9.4f}  {error:>13}")
        return "\n".join(lines)


def barrier(
    model: nn.Module,
    a: Network,
    b: Network,
    inputs: Inputs,
    targets: Tensor,
    *,
    points: int = 25,
    symmetry: Symmetry | None = None,
    **options: Unpack[BarrierOptions],
) -> Barrier:
    """Measure loss and error along the straight path from `a` to `b`; nothing is changed.

    Args:
        model: the function.
        a: one end, a State or a module.
        b: the other end.
        inputs: data as in `predict.outputs`.
        targets: as in `predict.losses`.
        points: networks on the path, both ends and the middle included: an odd number.
        symmetry: also walk to `b` aligned to `a`; see `Barrier.aligned`.
        options: `test`, a second pair (inputs, targets); `variance`, "recalibrate" to measure the statistics of batch
            norms on `inputs`, or "repair" to restore the spread of all units, at every point but the ends, which
            stay the networks that were given (by default batch norms are interpolated too); `loss` and `batch`, see
            `predict.losses`.

    Raises:
        SpecError: the networks are not two of this model.
        InputError: data, targets or options do not fit.
    """
    check_options(options, ("points", "symmetry", *BarrierOptions.__annotations__), "barrier")
    start, end = ends(a, b)
    test, variance = options.get("test"), options.get("variance")
    sets: list[Data] = [(inputs, targets)] if test is None else [(inputs, targets), test]
    measure: Measure = {"loss": options.get("loss", "cross-entropy"), "batch": options.get("batch", BATCH)}

    def path_to(goal: State) -> Barrier:
        correct = corrector(model, start, goal, inputs, variance=variance, batch=measure["batch"])
        return with_test(walk(start, goal, points, lambda state, t: look(model, state, sets, measure), correct))

    raw = path_to(end)
    return raw if symmetry is None else replace(raw, aligned=path_to(aligned(start, end, symmetry)))


def aligned(a: State, b: State, symmetry: Symmetry, *, scale: str = "reference") -> State:
    """The member of the orbit of `b` that is closest to `a`; see `match`."""
    return symmetry.apply(match(a, b, symmetry, scale=scale).element, b)


def ends(a: Network, b: Network) -> tuple[State, State]:
    """Both ends as States of one spec, without gradients."""
    start, end = as_state(a), as_state(b)
    check_state(end, spec_of(start), where="the second network")
    return start, end


def look(model: nn.Module, state: State, sets: Sequence[Data], measure: Measure) -> list[Score]:
    """Scores of one network on each set of data."""
    return [losses(model, state, inputs, targets, **measure) for inputs, targets in sets]


def walk(
    a: State, b: State, points: int, judge: Callable[[State, float], Sequence[Score]], correct: Correct | None = None
) -> list[Barrier]:
    """Walk from `a` to `b` and give one curve for each score that `judge` takes of a network."""
    if points < 3 or points % 2 == 0:
        raise InputError(
            f"expected an odd number of points, 3 or more, found {points}: one of them must be in the middle"
        )
    rows = []
    grid = torch.arange(points, dtype=torch.float64) / (points - 1)  # the middle is 1/2 without rounding
    for t in grid.tolist():
        if t in (0, 1):
            state = b if t else a
        else:
            state = interpolate(a, b, t)
            state = correct(state, t) if correct else state
        try:
            rows.append(judge(state, t))
        except InputError as error:
            raise InputError(f"on the path at t = {t:.3f}: {error}") from error
    return [_curve(grid, scores) for scores in zip(*rows, strict=True)]


def with_test(curves: Sequence[Barrier]) -> Barrier:
    """The curve on the data, carrying the one on the test data if there is one."""
    return replace(curves[0], test=curves[1]) if len(curves) > 1 else curves[0]


def corrector(
    model: nn.Module, a: State, b: State, inputs: Inputs, *, variance: str | None, batch: int = BATCH
) -> Correct | None:
    """What is done to a network on the path: nothing, "recalibrate" or "repair"."""
    if variance is None:
        return None
    if variance == "recalibrate":
        return lambda state, t: recalibrate(model, state, inputs, batch=batch)
    if variance == "repair":
        repaired = repairer(model, a, b, inputs, batch=batch)
        return lambda state, t: repaired(state, t).state
    raise InputError(f'expected variance None, "recalibrate" or "repair", found {variance!r}: choose one of them')


def repairer(
    model: nn.Module, a: State, b: State, inputs: Inputs, *, batch: int = BATCH
) -> Callable[[State, float], Repair]:
    """A function (network at t, t) -> its repair; the statistics of the ends are taken once."""
    parts = [unit_statistics(model, end, inputs, batch=batch) for end in (a, b)]
    return lambda state, t: repair(model, state, blend(parts, (1 - t, t)), inputs, batch=batch)


def _curve(grid: Tensor, scores: Sequence[Score]) -> Barrier:
    errors = [score.error for score in scores if score.error is not None]
    loss = torch.tensor([score.loss for score in scores], dtype=torch.float64)
    return Barrier(grid, loss, torch.tensor(errors, dtype=torch.float64) if len(errors) == len(scores) else None)


def _above_chord(t: Tensor, values: Tensor) -> float:
    return float((values - torch.lerp(values[0], values[-1], t)).max())


def _above_mean(values: Tensor) -> float:
    return float(values[len(values) // 2] - (values[0] + values[-1]) / 2)


class BarrierReportOptions(Measure, total=False):
    """What `barrier_report` can do besides.

    Attributes:
        calibration: (inputs, targets) on which temperatures are fitted, instead of the training data.
    """

    calibration: Data


GIVEN, ORDERED, SCALED = "as given", "permutation and sign", "scale"  # names of steps that only move b
_COLUMNS = (  # title, key of a row, width
    ("loss barrier", "loss_barrier", 12),
    ("gain", "gain", 8),
    ("midpoint", "midpoint_barrier", 9),
    ("gain", "midpoint_gain", 8),
    ("loss there", "midpoint_loss", 10),
    ("error barrier", "error_barrier", 13),
)


@dataclass(frozen=True, eq=False)
class Step:
    """One row of the report: the path after a correction, which includes all those above it.

    `control` marks a row that is no further correction, but another way to look at the last one.
    """

    name: str
    path: Barrier
    note: str = ""
    control: bool = False


@dataclass(frozen=True, eq=False)
class BarrierReport:
    """What is left of a barrier after each correction. Print it, or take `rows`."""

    steps: tuple[Step, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One plain dict per step and set of data.

        `loss_barrier` is `Barrier.max` and `gain` how much of it this step took away; `midpoint_barrier` and
        `midpoint_gain` are the same in the middle of the path, where gains add up (above the chord nothing falls
        below zero).
        """
        found = []
        for data in ("train", "test"):
            before: Barrier | None = None
            for step in self.steps:
                path = step.path if data == "train" else step.path.test
                if path is None:
                    continue
                found.append(_row(step, data, path, None if step.control else before))
                before = path
        return found

    @property
    def moved(self) -> tuple[float, float]:
        """The loss barrier on the training data as given, and the least after moving b, before other corrections."""
        paths = {step.name: step.path.max for step in self.steps}
        return paths[GIVEN], min(paths[name] for name in (ORDERED, SCALED) if name in paths)

    def to_json(self) -> str:
        """Rows and curves as JSON text."""
        curves = [
            {"step": step.name, "data": data, "loss": path.loss.tolist(), "error": _listed(path.error)}
            for step in self.steps
            for data, path in (("train", step.path), ("test", step.path.test))
            if path is not None
        ]
        return json.dumps({"t": self.steps[0].path.t.tolist(), "rows": self.rows, "curves": curves}, indent=1)

    def __str__(self) -> str:
        """A table for people."""
        rows = self.rows
        width = max(len(row["step"]) for row in rows)
        head = "  ".join(title.rjust(size) for title, _, size in _COLUMNS)
        lines: list[str] = []
        for data in dict.fromkeys(row["data"] for row in rows):
            lines += ["", f"{data.ljust(width)}  {head}"]
            for row in rows:
                if row["data"] == data:
                    lines.append(f"{row['step'].ljust(width)}  {_cells(row)}".rstrip())
        notes = [f"{step.name}: {step.note}" for step in self.steps if step.note]
        return "\n".join([*lines[1:], *([""] if notes else []), *notes])


def barrier_report(
    model: nn.Module,
    a: Network,
    b: Network,
    symmetry: Symmetry,
    train: Data,
    test: Data | None = None,
    *,
    points: int = 25,
    **options: Unpack[BarrierReportOptions],
) -> BarrierReport:
    """Walk from `a` to `b` again and again, with one more correction each time; nothing is changed.

    1. as given;
    2. permutation and sign: `b` aligned to `a`, units keeping their scale;
    3. scale: aligned with scales (where the symmetry has any);
    4. variance: batch norms recalibrated and all other units repaired on the training inputs, between the ends;
    5. temperature, for "cross-entropy": logits divided by the T that fits the training data best, between the ends;
       and as a control at the ends too, since a network that only gains confidence has not come closer. Where all
       answers are right no T is best, and 1 is taken.

    Args:
        model: the function.
        a: one end, a State or a module.
        b: the other end.
        symmetry: of the model, see `discover`.
        train: (inputs, targets) for measuring and for all corrections.
        test: (inputs, targets) for measuring only.
        points: networks on each path: an odd number.
        options: `loss` and `batch`, see `predict.losses`; `calibration`, other data to fit temperatures on, since
            those of training are learned by heart.
    """
    check_options(options, ("points", "test", *BarrierReportOptions.__annotations__), "barrier_report")
    start, end = ends(a, b)
    sets = [train] if test is None else [train, test]
    measure: Measure = {"loss": options.get("loss", "cross-entropy"), "batch": options.get("batch", BATCH)}

    def path_to(goal: State) -> Barrier:
        return with_test(walk(start, goal, points, lambda state, t: look(model, state, sets, measure)))

    goal = aligned(start, end, symmetry, scale="keep")
    steps = [Step(GIVEN, path_to(end)), Step(ORDERED, path_to(goal))]
    if any(kind.endswith("scale") for space in symmetry.spaces for kind in space.generators):
        goal = aligned(start, end, symmetry, scale="reference")
        steps.append(Step(SCALED, path_to(goal)))
    repaired = repairer(model, start, goal, train[0], batch=measure["batch"])
    notes: dict[float, str] = {}

    def correct(state: State, t: float) -> State:
        found = repaired(state, t)
        notes[t] = str(found)
        return found.state

    if measure["loss"] != "cross-entropy":
        plain = walk(start, goal, points, lambda state, t: look(model, state, sets, measure), correct)
        return BarrierReport((*steps, Step("variance", with_test(plain), notes[0.5])))
    thermometer = _Thermometer(model, sets, options.get("calibration", train), measure["batch"])
    curves = walk(start, goal, points, thermometer, correct)
    plain, everywhere = curves[: len(sets)], curves[len(sets) :]
    between = [_between(cool, hot) for cool, hot in zip(plain, everywhere, strict=True)]
    return BarrierReport(
        (
            *steps,
            Step("variance", with_test(plain), notes[0.5]),
            Step("temperature", with_test(between), str(thermometer)),
            Step("temperature, ends too", with_test(everywhere), control=True),
        )
    )


class _Thermometer:
    """Scores networks on each set of data, first as they are and then at the temperature that suits them."""

    def __init__(self, model: nn.Module, sets: Sequence[Data], calibration: Data, batch: int) -> None:
        self.model, self.sets, self.calibration, self.batch = model, sets, calibration, batch
        self.found: dict[float, float] = {}

    def __call__(self, state: State, t: float) -> list[Score]:
        pairs = [(self._logits(state, inputs), targets) for inputs, targets in self.sets]
        inputs, targets = self.calibration
        known = self.calibration is self.sets[0]  # then the pass need not be repeated
        hot = self.found[t] = _fitting(pairs[0][0] if known else self._logits(state, inputs), targets)
        return [score(*pair) for pair in pairs] + [score(values / hot, wanted) for values, wanted in pairs]

    def _logits(self, state: State, inputs: Inputs) -> Tensor:
        return wide_outputs(self.model, state, inputs, batch=self.batch)

    def __str__(self) -> str:
        return f"T = {self.found[0.5]:.3g} in the middle, {self.found[0]:.3g} and {self.found[1]:.3g} at the ends"


def _fitting(logits: Tensor, targets: Tensor) -> float:
    """The best temperature; 1 where all answers are right, so that the best would be 0 and ruin any other data."""
    found = temperature(logits, targets)
    return 1.0 if found == COLDEST else found


def _between(plain: Barrier, corrected: Barrier) -> Barrier:
    """The corrected curve with the ends of the plain one."""
    loss = corrected.loss.clone()
    loss[0], loss[-1] = plain.loss[0], plain.loss[-1]
    return replace(corrected, loss=loss)


def _row(step: Step, data: str, path: Barrier, before: Barrier | None) -> dict[str, Any]:
    middle = len(path.t) // 2
    return {
        "step": step.name,
        "data": data,
        "loss_barrier": path.max,
        "gain": None if before is None else before.max - path.max,
        "midpoint_barrier": path.midpoint,
        "midpoint_gain": None if before is None else before.midpoint - path.midpoint,
        "midpoint_loss": float(path.loss[middle]),
        "error_barrier": path.error_max,
        "midpoint_error_barrier": path.error_midpoint,
        "midpoint_error": None if path.error is None else float(path.error[middle]),
    }


def _cells(row: dict[str, Any]) -> str:
    return "  ".join(("" if row[key] is None else f"{row[key]:.4f}").rjust(size) for _, key, size in _COLUMNS)


def _listed(values: Tensor | None) -> list[float] | None:
    return None if values is None else values.tolist()
