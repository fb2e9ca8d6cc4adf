"""The report of an evaluation: plain numbers with intervals, for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

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
    """What `onebasin.assess.evaluate` found. Print it, or take `record`.

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
