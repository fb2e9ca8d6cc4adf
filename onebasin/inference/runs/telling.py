"""Progress of a run in one line: what is done, how the sampler fares, how fast it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from onebasin.inference.runs.loop import Progress, Tell
from onebasin.inference.runs.units import Unit

Show = Callable[[int, int, str], None]  # (gradients done, gradients in all, a sentence)
_SHOWN = {
    "acceptance": "acceptance {:.2f}",
    "step_size": "step {:.2g}",
    "kinetic_temperature": "kinetic T {:.2f}",
    "loss": "loss {:.4g}",
}


@dataclass(eq=False)
class Teller:
    """Adds up the progress of all units.

    Attributes:
        show: receives (gradients done, gradients in all, a sentence).
        units: how many there are.
    """

    show: Show
    units: int
    latest: dict[str, Progress] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    first: dict[str, int] = field(default_factory=dict)

    def __call__(self, unit: Unit, progress: Progress) -> None:
        """Take news of one unit into account, and show."""
        before = self.latest.get(unit.name)
        self.first.setdefault(unit.name, progress.done if before is None else before.done)
        self.latest[unit.name] = progress
        chains = sum(one.chains for one in self.latest.values())
        done = sum(one.done for one in self.latest.values())
        fresh = sum((one.done - self.first[name]) * one.chains for name, one in self.latest.items())
        rate = fresh / max(1e-9, time.monotonic() - self.began)
        words = [progress.stage]
        if progress.draws:
            words.append(f"{sum(one.draws * one.chains for one in self.latest.values())} draws of {chains} chains")
        words += [text.format(progress.info[name]) for name, text in _SHOWN.items() if name in progress.info]
        words.append(f"{sum(one.divergences for one in self.latest.values())} divergences")
        words.append(f"{rate:,.0f} gradients/s")
        self.show(done, progress.total * self.units, ", ".join(words))


def teller(units: list[Unit], show: Show | None) -> Tell | None:
    """What adds up the progress of units for `show`; None where nobody watches."""
    return None if show is None else Teller(show, len(units))
