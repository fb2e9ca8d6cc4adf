"""Scores under shift: the same examples, corrupted in several ways and severities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from onebasin.errors import InputError
from onebasin.functional import AnyInputs, Inputs, examples_in, inputs_of
from onebasin.reporting import (
    Axis,
    Cell,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Result,
    Series,
    Table,
    as_number,
    finite,
    result_record,
    table,
)

if TYPE_CHECKING:
    from onebasin.evaluation.evaluate import Estimate

METRICS = ("accuracy", "nll", "ece")
CLEAN = 0  # the severity of examples as they are

# Name -> inputs, or name -> severity -> inputs; instead of inputs a function that makes them.
ShiftedInputs = Mapping[str, AnyInputs | Callable[[], AnyInputs] | Mapping[int, AnyInputs | Callable[[], AnyInputs]]]


@dataclass(frozen=True, eq=False, repr=False)
class Shift(Result):
    """Scores of the average predictive on shifted inputs with the targets of the examples.

    Attributes:
        clean: accuracy, nll and ece on the examples as they are.
        numbers: shift -> severity -> accuracy, nll and ece.
        mean: of accuracy, nll and ece over all shifts and severities; that of ece without an interval.
        examples: how many there are in each set.
    """

    clean: Mapping[str, Estimate]
    numbers: Mapping[str, Mapping[int, Mapping[str, Estimate]]]
    mean: Mapping[str, Estimate]
    examples: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; severities are keys of text."""
        return {
            "clean": _plain(self.clean),
            "numbers": {
                name: {str(severity): _plain(own) for severity, own in levels.items()}
                for name, levels in self.numbers.items()
            },
            "mean": _plain(self.mean),
            "examples": self.examples,
        }

    def record(self) -> Record:
        """A table of all scores, and a figure of each score by severity."""
        drop = self.clean["accuracy"].value - self.mean["accuracy"].value
        worst, level = min(
            ((name, severity) for name, levels in self.numbers.items() for severity in levels),
            key=lambda place: self.numbers[place[0]][place[1]]["accuracy"].value,
        )
        answer = (
            f"Over {len(self._rows()):,} shifts the accuracy is {self.mean['accuracy'].value:.4f}, {drop:.4f} lower "
            f"than without; the worst is {_words(worst)} at severity {level}, with "
            f"{self.numbers[worst][level]['accuracy'].value:.4f}. The ECE goes from {self.clean['ece'].value:.4f} to "
            f"{self.mean['ece'].value:.4f} on average."
        )
        return result_record(
            "shift",
            f"Shift of {self.examples:,} examples",
            answer,
            (self.table(), self.figure(answer)),
            values=self.to_dict(),
        )

    def _rows(self) -> list[tuple[str, int, Mapping[str, Estimate]]]:
        return [(name, severity, own) for name, levels in self.numbers.items() for severity, own in levels.items()]

    def table(self) -> Table:
        """One row for each shift and severity, between the clean examples and the mean."""
        rows: list[tuple[Cell, ...]] = [
            (_words(name), Number(severity), *(as_number(*own[metric]) for metric in METRICS))
            for name, severity, own in [("none", CLEAN, self.clean), *self._rows()]
        ]
        rows.append(("mean of all", None, *(as_number(*self.mean[metric]) for metric in METRICS)))
        columns = (
            Column("shift"), Column("severity", digits=0), Column("accuracy", better="higher", digits=4),
            Column("nll", better="lower", digits=4), Column("ece", better="lower", digits=4),
        )  # fmt: skip
        errors = "in brackets: bootstrap intervals over examples"
        note = "the mean is over all shifts and severities, without the examples as they are"
        return Table("shifts", "What is left under shift?", columns, tuple(rows), errors, note, rivals=False)

    def figure(self, caption: str = "") -> Figure:
        """Each score by severity, one line per shift; severity 0 are the examples as they are."""
        panels = []
        for metric in METRICS:
            series = []
            for name, levels in self.numbers.items():
                points = {CLEAN: self.clean, **levels}
                series.append(
                    Series(_words(name), tuple(map(float, points)),
                           tuple(finite(own[metric].value) for own in points.values()))
                )  # fmt: skip
            panels.append(Panel("lines", "", Axis("severity"), Axis(metric), tuple(series)))
        title = "How do scores change with the severity of a shift?"
        return Figure("shift", title, caption or "Severity 0 are the examples as they are.", tuple(panels))

    def lines(self) -> str:
        """The table as text, with intervals."""
        rows = [("none", "0", self.clean), *((name, str(severity), own) for name, severity, own in self._rows())]
        rows.append(("mean", "", self.mean))
        head = ("shift", "severity", *METRICS)
        return table([head, *((_words(name), severity, *(str(own[metric]) for metric in METRICS))
                              for name, severity, own in rows)])  # fmt: skip


def shifted_inputs(source: AnyInputs | Callable[[], AnyInputs], model: nn.Module, examples: int, name: str) -> Inputs:
    """The inputs of one shift; a function that makes them is called.

    Raises:
        InputError: they are not as many as the examples.
    """
    given = source() if callable(source) and not hasattr(source, "shape") else source
    inputs = inputs_of(given, model)
    if examples_in(inputs) != examples:
        raise InputError(
            f"expected {examples} shifted inputs for {name}, one per target, found {examples_in(inputs)}: shift all "
            "examples, in their order"
        )
    return inputs


def levels_of(shifted: ShiftedInputs) -> list[tuple[str, int, Any]]:
    """(shift, severity, inputs or a function) of all; inputs without a severity have 1.

    >>> [row[:2] for row in levels_of({"rotated": [0.0], "noise": {1: [0.0], 2: [0.0]}})]
    [('rotated', 1), ('noise', 1), ('noise', 2)]
    """
    if not isinstance(shifted, Mapping) or not shifted or not all(isinstance(name, str) for name in shifted):
        found = f"a {type(shifted).__name__}"
        if isinstance(shifted, Mapping):
            found = "names that are no texts" if shifted else "an empty one"
        raise InputError(
            f"expected shifted as a mapping of names to inputs, found {found}: give onebasin.data.shifts(inputs)"
        )
    rows = []
    for name, source in shifted.items():
        levels = source if isinstance(source, Mapping) and all(isinstance(key, int) for key in source) else {1: source}
        if not levels or any(level <= CLEAN for level in levels):
            raise InputError(f"expected severities from 1 on for {name}, found {list(levels)}: number them 1, 2, ...")
        rows += [(name, level, levels[level]) for level in sorted(levels)]
    return rows


def _words(name: str) -> str:
    return name.replace("_", " ")


def _plain(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: {part: finite(end) for part, end in own._asdict().items()} for name, own in estimates.items()}
