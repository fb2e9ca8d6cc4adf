"""The straight path between two networks: loss and error along it, how high it rises, and what lowers it.

Two numbers are called a barrier in the literature. With L(t) the loss at (1 - t) a + t b:

    max      = max over t of L(t) - [(1 - t) L(0) + t L(1)]      above the chord; never below 0
    midpoint = L(1/2) - [L(0) + L(1)] / 2                        below 0 where the path sags

`barrier_report` tells where a barrier comes from: what each correction takes away from it, step by step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.alignment.match import match
from onebasin.alignment.repair import Repair, blend, recalibrate, repair, unit_statistics
from onebasin.errors import InputError
from onebasin.functional import (
    BATCH,
    Data,
    Inputs,
    Loss,
    OutputPart,
    Score,
    losses,
    pair_of,
    score,
    select_output,
    wide_outputs,
)
from onebasin.metrics import COLDEST, best_temperature
from onebasin.parallel import Progress, progress_of
from onebasin.reporting import (
    Axis,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Result,
    Series,
    Table,
    cells_of,
    result_record,
)
from onebasin.state import State, as_state, check_state, interpolate, spec_of
from onebasin.symmetry import Symmetry

Network = Mapping[str, Tensor] | nn.Module
Pair = tuple[Inputs, Tensor]
Correct = Callable[[State, float], State]  # (network at t, t) -> the same, corrected
Scorer = Callable[[State, float], Sequence[Score]]  # (network at t, t) -> its scores, one for each set of data


@dataclass(frozen=True, eq=False, repr=False)
class Barrier(Result):
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

    @property
    def curves(self) -> dict[str, Barrier]:
        """The paths that were measured, by name: "as given" and "aligned"; with test data also which data."""
        paths = {name: path for name, path in (("as given", self), ("aligned", self.aligned)) if path is not None}
        if self.test is None:
            return paths
        pairs = {f"{name}, {where}": curve for name, path in paths.items()
                 for where, curve in (("train", path), ("test", path.test)) if curve is not None}  # fmt: skip
        return pairs

    def record(self) -> Record:
        """A table of barriers, and loss and error along the path."""
        rows = tuple(
            (name, Number(curve.max), Number(curve.midpoint), Number(curve.error_max))
            for name, curve in self.curves.items()
        )
        aligned = "" if self.aligned is None else f", and {self.aligned.max:.4f} once the second network is aligned"
        text = f"The loss rises to {self.max:.4f} above the chord between both networks{aligned}."
        if self.aligned is not None and self.aligned.max > self.max:
            text += " Alignment does not help here: see what match says of how much the networks have in common."
        panels = tuple(
            Panel("lines", "", Axis("way from the first network to the second"), Axis(what), self._series(what))
            for what in ("loss", "error")
            if getattr(self, what) is not None
        )
        return result_record(
            "barrier",
            "Loss barrier between two networks",
            text,
            (
                Table("barriers", "Barriers of the straight path", _BARRIERS, rows),
                Figure("path", "What is the loss on the way?", text, panels),
            ),
            values={name: {"t": c.t.tolist(), "loss": c.loss.tolist(), "error": None if c.error is None else
                           c.error.tolist(), "max": c.max, "midpoint": c.midpoint, "error_max": c.error_max}
                    for name, c in self.curves.items()},
        )  # fmt: skip

    def _series(self, what: str) -> tuple[Series, ...]:
        return tuple(
            Series(
                name,
                tuple(curve.t.tolist()),
                tuple(getattr(curve, what).tolist()),
                shade=int(name.startswith("aligned")),
                dashed=name.endswith("test"),
            )
            for name, curve in self.curves.items()
        )


_BARRIERS = (
    Column("path"),
    Column("loss barrier", "highest loss above the chord between the ends", "lower", 4),
    Column("midpoint", "loss in the middle minus the mean of the ends", "lower", 4),
    Column("error barrier", "highest error above the chord between the ends", "lower", 4),
)


def barrier(
    model: nn.Module,
    a: Network,
    b: Network,
    data: Data,
    *,
    output: OutputPart = None,
    points: int = 25,
    symmetry: Symmetry | None = None,
    test: Data | None = None,
    variance: str | None = None,
    loss: Loss = "cross-entropy",
    batch: int = BATCH,
    progress: Progress | bool | None = None,
) -> Barrier:
    """Measure loss and error along the straight path from `a` to `b`; nothing is changed.

    Args:
        model: the function.
        a: one end, a State or a module.
        b: the other end.
        data: (inputs, targets), tensors or arrays; or a Dataset, a DataLoader or rows, as in `evaluate`.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        points: networks on the path, both ends and the middle included: an odd number.
        symmetry: also measure the path to `b` aligned to `a`; see `Barrier.aligned`.
        test: data on which the same path is measured too.
        variance: "recalibrate" measures the statistics of batch norms on the inputs, "repair" restores the spread of
            all units, at every point but the ends, which stay the networks that were given; None interpolates batch
            norms like all else.
        loss: "cross-entropy", "mse" or a function, see `losses`.
        batch: largest number of examples in one forward pass.
        progress: True for a line on stderr with the time left, or a function that is called with (networks on paths
            done, networks in all, which path).

    Raises:
        SpecError: the networks are not two of this model.
        InputError: data, targets or options do not fit.
    """
    model = select_output(model, output)
    data, test = pair_of(data, model), None if test is None else pair_of(test, model)
    start, end = ends(a, b)
    shown = Shown(progress_of(progress), points * (1 if symmetry is None else 2))
    scores = _scorer(model, data, test, loss, batch)

    def path_to(state: State, name: str) -> Barrier:
        correct = corrector(model, start, state, data[0], variance=variance, batch=batch)
        return _with_test(curves(start, state, points, shown.after(scores, name), correct))

    raw = path_to(end, GIVEN)
    return raw if symmetry is None else replace(raw, aligned=path_to(aligned(start, end, symmetry), "aligned"))


class Shown:
    """Networks on paths, counted for `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def after(self, scores: Scorer, name: str) -> Scorer:
        """The same scores, each followed by a call of `progress` with the name of the path."""
        if self._progress is None:
            return scores
        self._progress(self._done, self._total, name)

        def counted(state: State, t: float) -> Sequence[Score]:
            found = scores(state, t)
            self._done += 1
            assert self._progress is not None
            self._progress(self._done, self._total, name)
            return found

        return counted


def _scorer(model: nn.Module, data: Pair, test: Pair | None, loss: Loss, batch: int) -> Scorer:
    """A function that scores a network on the data, and on test data if there are any."""
    sets = [data] if test is None else [data, test]
    return lambda state, t: [losses(model, state, *examples, loss=loss, batch=batch) for examples in sets]


def aligned(a: State, b: State, symmetry: Symmetry, *, scale: str = "reference") -> State:
    """The member of the orbit of `b` that is closest to `a`; see `match`."""
    return symmetry.apply(match(a, b, symmetry, scale=scale).element, b)


def ends(a: Network, b: Network) -> tuple[State, State]:
    """Both ends as States of one spec, without gradients."""
    start, end = as_state(a), as_state(b)
    check_state(end, spec_of(start), where="the second network")
    return start, end


def curves(a: State, b: State, points: int, scores: Scorer, correct: Correct | None = None) -> list[Barrier]:
    """One curve along the path from `a` to `b` for each of the scores of a network."""
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
            rows.append(scores(state, t))
        except InputError as error:
            raise InputError(f"on the path at t = {t:.3f}: {error}") from error
    return [_curve(grid, column) for column in zip(*rows, strict=True)]


def _with_test(curves: Sequence[Barrier]) -> Barrier:
    """The curve on the data, with the one on the test data if there is one."""
    return replace(curves[0], test=curves[1]) if len(curves) > 1 else curves[0]


def corrector(
    model: nn.Module, a: State, b: State, inputs: Inputs, *, variance: str | None, batch: int = BATCH
) -> Correct | None:
    """The correction of networks on the path: None, "recalibrate" or "repair"."""
    if variance is None:
        return None
    if variance == "recalibrate":
        return lambda state, t: recalibrate(model, state, inputs, batch=batch)
    if variance == "repair":
        repaired = repairer(model, a, b, inputs, batch=batch)
        return lambda state, t: repaired(state, t).state
    raise InputError(f'expected variance None, "recalibrate" or "repair", found {variance!r}')


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


@dataclass(frozen=True, eq=False, repr=False)
class BarrierReport(Result):
    """What is left of a barrier after each correction. Print it, or take `rows`."""

    steps: tuple[Step, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One plain dict per step and set of data.

        `loss_barrier` is `Barrier.max` and `gain` how much of it this step took away; `midpoint_barrier` and
        `midpoint_gain` are the same in the middle of the path, where gains add up (above the chord nothing falls
        below zero).
        """
        rows = []
        for data in ("train", "test"):
            before: Barrier | None = None
            for step in self.steps:
                path = step.path if data == "train" else step.path.test
                if path is None:
                    continue
                rows.append(_row(step, data, path, None if step.control else before))
                before = path
        return rows

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

    def record(self) -> Record:
        """A table of barriers by step, and the loss along each path."""
        given, moved = self.moved
        text = [
            f"The loss barrier on the training data goes from {given:.4f} to {moved:.4f} when the second network is "
            f"moved, and to {self._steps[-1].path.max:.4f} with all corrections.",
            *(f"{step.name}: {step.note}." for step in self.steps if step.note),
        ]
        rows = tuple(
            cells_of(f"{one['step']}, {one['data']}", *(one[key] for _, key, _ in _COLUMNS)) for one in self.rows
        )
        heads = ("loss barrier", "gain", "midpoint barrier", "midpoint gain", "midpoint loss", "error barrier")
        where = {"train": "training data", "test": "test data"}
        paths = {
            data: [(step, step.path if data == "train" else step.path.test) for step in self.steps] for data in where
        }
        panels = tuple(
            Panel(
                "lines",
                where[data] if self.steps[0].path.test is not None else "",
                Axis("way from the first network to the second"),
                Axis("loss"),
                tuple(
                    Series(
                        step.name, tuple(path.t.tolist()), tuple(path.loss.tolist()), dashed=step.control, shade=shade
                    )
                    for shade, (step, path) in enumerate(paths[data])
                    if path is not None
                ),
            )
            for data in where
            if any(path is not None for _, path in paths[data])
        )
        return result_record(
            "barrier-report",
            "What is left of a barrier after each correction",
            text,
            (
                Table("steps", "What does each correction take away?", (
                    Column("step"), *(Column(name, digits=4) for name in heads)), rows),
                Figure("paths", "What is the loss on the way?", text[0], panels),
            ),
            values=json.loads(self.to_json()),
        )  # fmt: skip

    @property
    def _steps(self) -> list[Step]:
        """Those that are corrections."""
        return [step for step in self.steps if not step.control]

    def __str__(self) -> str:
        """A table."""
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
    output: OutputPart = None,
    points: int = 25,
    calibration: Data | None = None,
    loss: Loss = "cross-entropy",
    batch: int = BATCH,
    progress: Progress | bool | None = None,
) -> BarrierReport:
    """Measure the path from `a` to `b` several times, with one more correction each time; nothing is changed.

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
        train: for measuring and for all corrections: (inputs, targets), or other data as in `evaluate`.
        test: the same for measuring only.
        output: which part of what the model returns counts, as in `barrier`.
        points: networks on each path: an odd number.
        calibration: data to fit temperatures on, since those of training are learned by heart; None fits
            them on `train` all the same.
        loss: "cross-entropy", "mse" or a function, see `losses`.
        batch: largest number of examples in one forward pass.
        progress: True for a line on stderr with the time left, or a function that is called with (networks on paths
            done, networks in all, which correction).
    """
    model = select_output(model, output)
    train, test = pair_of(train, model), None if test is None else pair_of(test, model)
    calibration = train if calibration is None else pair_of(calibration, model)
    start, end = ends(a, b)
    scales = any(kind.endswith("scale") for space in symmetry.spaces for kind in space.generators)
    shown = Shown(progress_of(progress), points * (4 if scales else 3))
    scores = _scorer(model, train, test, loss, batch)

    def path_to(state: State, name: str) -> Step:
        return Step(name, _with_test(curves(start, state, points, shown.after(scores, name))))

    steps = [path_to(end, GIVEN)]
    moved = aligned(start, end, symmetry, scale="keep")
    steps.append(path_to(moved, ORDERED))
    if scales:
        moved = aligned(start, end, symmetry, scale="reference")
        steps.append(path_to(moved, SCALED))
    repaired = repairer(model, start, moved, train[0], batch=batch)
    notes: dict[float, str] = {}

    def correct(state: State, t: float) -> State:
        repair = repaired(state, t)
        notes[t] = repair.summary
        return repair.state

    if loss != "cross-entropy":
        path = _with_test(curves(start, moved, points, shown.after(scores, "variance"), correct))
        return BarrierReport((*steps, Step("variance", path, notes[0.5])))
    sets = [train] if test is None else [train, test]
    thermometer = _Thermometer(model, sets, calibration, batch)
    both = curves(start, moved, points, shown.after(thermometer, "variance and temperature"), correct)
    plain, everywhere = both[: len(sets)], both[len(sets) :]
    between = [_with_ends_of(cool, hot) for cool, hot in zip(plain, everywhere, strict=True)]
    return BarrierReport(
        (
            *steps,
            Step("variance", _with_test(plain), notes[0.5]),
            Step("temperature", _with_test(between), str(thermometer)),
            Step("temperature, ends too", _with_test(everywhere), control=True),
        )
    )


class _Thermometer:
    """Scores networks on each set of data, first as they are and then at the temperature that suits them."""

    def __init__(self, model: nn.Module, sets: Sequence[Pair], calibration: Pair, batch: int) -> None:
        self.model, self.sets, self.calibration, self.batch = model, sets, calibration, batch
        self.temperatures: dict[float, float] = {}

    def __call__(self, state: State, t: float) -> list[Score]:
        pairs = [(self._logits(state, inputs), targets) for inputs, targets in self.sets]
        inputs, targets = self.calibration
        known = self.calibration is self.sets[0]  # then the pass need not be repeated
        best = temperature(pairs[0][0] if known else self._logits(state, inputs), targets)
        # Where all answers are right, the best would be 0 and ruin any other data.
        hot = self.temperatures[t] = 1.0 if best == COLDEST else best
        return [score(*pair) for pair in pairs] + [score(values / hot, labels) for values, labels in pairs]

    def _logits(self, state: State, inputs: Inputs) -> Tensor:
        return wide_outputs(self.model, state, inputs, batch=self.batch)

    def __str__(self) -> str:
        middle, first, last = (self.temperatures[t] for t in (0.5, 0, 1))
        return f"T = {middle:.3g} in the middle, {first:.3g} and {last:.3g} at the ends"


def temperature(logits: Tensor, targets: Tensor) -> float:
    """The T > 0 that minimises the cross-entropy of logits / T over all examples and places.

    Merged networks doubt too much: their best T is below 1. Logits are (examples, classes, ...), targets class numbers
    (examples, ...).

    >>> import torch
    >>> logits = torch.tensor([[1.0, 0.0]]).expand(4, 2)  # right three times out of four: log 3 would be honest
    >>> round(1 / temperature(logits, torch.tensor([0, 0, 0, 1])), 6)
    1.098612
    """
    score(logits, targets)  # refuses what is not a classification
    return best_temperature(logits.detach().movedim(1, -1).flatten(0, -2), targets.reshape(-1).to(logits.device))


def _with_ends_of(plain: Barrier, corrected: Barrier) -> Barrier:
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
