"""What `discrepancy` found, as numbers, as JSON and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onebasin.tables import table


@dataclass(frozen=True)
class Kernel:
    """One kernel at one bandwidth; fields as in `Gap`."""

    kernel: str
    bandwidth: float
    squared: float
    explained: float
    p_value: float = math.nan


@dataclass(frozen=True)
class Gap:
    """How far two crowds are apart in one space; means over all kernels and bandwidths of the preset.

    Attributes:
        squared: unbiased estimate of the squared MMD, all members taken as independent.
        explained: the part of it that comes from members sharing a run, see `runs`; 0 where each is its own run.
        remainder: squared - explained.
        low: lower end of the bootstrap interval of the remainder; NaN where a crowd has fewer than three runs.
        high: its upper end.
        p_value: of the hypothesis that runs of both crowds follow one law, all kernels together; NaN for one run
            against one run, which no exchange tells apart.
        kernels: each by itself.
    """

    squared: float
    explained: float
    remainder: float
    low: float
    high: float
    p_value: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Compared:
    """Two crowds in one form.

    Attributes:
        total: all weights together.
        layers: each tensor by itself; their p-values are not corrected for being many.
        within_first: mean squared Euclidean distance of two networks of the first crowd.
        within_second: of two networks of the second crowd.
        across: of one of the first and one of the second.
        notes: what has no normal form.
    """

    total: Gap
    layers: Mapping[str, Gap]
    within_first: float
    within_second: float
    across: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Discrepancy:
    """How far two crowds of networks are apart.

    Attributes:
        members: networks of both crowds.
        runs: independent runs of both crowds.
        shares: share of pairs of members that come from one run, in both crowds.
        preset: kernels and bandwidths.
        raw: as the weights are.
        forms: form -> after symmetries were removed in this way; the first is `ns`.
        function: on predictions, which need no form; None without a model and inputs.
        notes: what should be known when these numbers are read.
    """

    members: tuple[int, int]
    runs: tuple[int, int]
    shares: tuple[float, float]
    preset: str
    raw: Compared
    forms: Mapping[str, Compared]
    function: Gap | None
    notes: tuple[str, ...]

    @property
    def ns(self) -> Gap | None:
        """No symmetries: all weights in the first form, or None if no symmetry was given."""
        return next(iter(self.forms.values())).total if self.forms else None

    @property
    def sensitivity(self) -> dict[str, float]:
        """Form -> squared MMD, raw included: how much hangs on the choice of a form."""
        return {"raw": self.raw.total.squared, **{form: found.total.squared for form, found in self.forms.items()}}

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; what is not defined is None."""
        found: dict[str, Any] = _plain(asdict(self))
        return found

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        """Tables for people: one row for each form, then one for each tensor, raw and in the first form."""
        runs = "" if self.runs == self.members else f" of {self.runs[0]:,} and {self.runs[1]:,} runs"
        rows = [("raw", self.raw.total), *((form, found.total) for form, found in self.forms.items())]
        rows += [("function", self.function)] if self.function else []
        parts = [
            f"{self.members[0]:,} against {self.members[1]:,} networks{runs}, preset {self.preset}",
            _table("", rows),
        ]
        for form, found in list({"raw": self.raw, **self.forms}.items())[:2]:
            if found.layers:
                parts.append(_table(form, found.layers.items()))
        notes = [*self.notes, *(note for found in (self.raw, *self.forms.values()) for note in found.notes)]
        return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _table(title: str, gaps: Iterable[tuple[str, Gap]]) -> str:
    head = (title, "MMD^2", "from runs", "remainder", "interval", "p")
    return table([head, *((name, *_cells(gap)) for name, gap in gaps)])


def _cells(gap: Gap) -> tuple[str, str, str, str, str]:
    runs = (_short(gap.explained), _short(gap.remainder)) if gap.explained else ("", "")
    interval = "" if math.isnan(gap.low) else f"{_short(gap.low)} to {_short(gap.high)}"
    return _short(gap.squared), *runs, interval, "-" if math.isnan(gap.p_value) else f"{gap.p_value:.3g}"


def _short(number: float) -> str:
    return "unknown" if math.isnan(number) else f"{number:.4f}" if abs(number) >= 1e-3 else f"{number:.1e}"


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
