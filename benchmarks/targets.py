"""How the benchmarks say what was reached: mean and spread, and each target as met or MISSED."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, standard deviation over seeds, and the range."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    shown = [f"{value:.{digits}f}" for value in (statistics.mean(values), deviation, min(values), max(values))]
    return f"{shown[0]} ± {shown[1]} ({shown[2]} to {shown[3]})"


def head(title: str, text: str = "") -> None:
    """A title with a rule and a sentence below it."""
    print(f"\n{title}\n{'=' * len(title)}")
    if text:
        print(text)


@dataclass
class Targets:
    """What a benchmark was to reach; `missed` decides its exit code."""

    missed: list[str] = field(default_factory=list)

    def judge(self, claim: str, found: str, reached: bool) -> None:
        """Print a target beside what was found."""
        print(f"  target {claim}: {found}: {'met' if reached else 'MISSED'}", flush=True)
        if not reached:
            self.missed.append(claim)

    def close(self) -> int:
        """Print the sum, and return the exit code."""
        print(f"\n{len(self.missed)} targets missed" + "".join(f"\n  {claim}" for claim in self.missed))
        return 1 if self.missed else 0
