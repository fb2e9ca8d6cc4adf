"""The straight path between two networks: loss and error along it, and how high it rises.

Two numbers are called a barrier in the literature. With L(t) the loss at (1 - t) a + t b:

    max      = max over t of L(t) - [(1 - t) L(0) + t L(1)]      above the chord; never below 0
    midpoint = L(1/2) - [L(0) + L(1)] / 2                        below 0 where the path sags
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from onebasin.align.pair.match import match
from onebasin.align.path.recalibrate import recalibrate
from onebasin.align.path.repair import Repair, blend, repair, unit_statistics
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.predict import Inputs, Loss, Score, losses
from onebasin.predict.forward import BATCH
from onebasin.state import State, as_state, check_state, interpolate, spec_of
from onebasin.symmetry import Symmetry

Network = Mapping[str, Tensor] | nn.Module
Data = tuple[Inputs, Tensor]
Correct = Callable[[State, float], State]  # (network at t, t) -> the same, corrected


class Measure(TypedDict, total=False):
    """How losses are taken, see `predict.losses`."""

    loss: Loss
    batch: int


class Options(Measure, total=False):
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
    **options: Unpack[Options],
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
    refuse_unknown(options, ("points", "symmetry", *Options.__annotations__), "barrier")
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
