"""Where a barrier comes from: what each correction takes away from it, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import Tensor, nn

from onebasin.align.path.connect import (
    Barrier,
    Data,
    Measure,
    Network,
    aligned,
    ends,
    look,
    repairer,
    walk,
    with_test,
)
from onebasin.align.path.temperature import temperature
from onebasin.metrics.tempering import COLDEST
from onebasin.options import refuse_unknown
from onebasin.predict import Inputs, Score, score
from onebasin.predict.forward import BATCH, wide_outputs
from onebasin.state import State
from onebasin.symmetry import Symmetry


class Options(Measure, total=False):
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
    **options: Unpack[Options],
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
    refuse_unknown(options, ("points", "test", *Options.__annotations__), "barrier_report")
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
