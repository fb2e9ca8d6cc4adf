"""Two independent networks followed through training: loss and transpositions along the straight line between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebasin.population import Population
from onebasin.state import State, interpolate
from onebasin.studies.compact.planted import sgd
from onebasin.studies.compact.setting import Runs, Setting, setting

POINTS = 11  # lambda = 0, 0.1, ..., 1


@dataclass(frozen=True)
class Path:
    """What lies between two networks, at `POINTS` places.

    Attributes:
        loss: test loss, in nats.
        swaps: transpositions of the permutation that matches the network there to the first one.
    """

    loss: tuple[float, ...]
    swaps: tuple[int, ...]

    @property
    def midpoint(self) -> float:
        """Loss in the middle over the mean of the ends."""
        return self.loss[POINTS // 2] - (self.loss[0] + self.loss[-1]) / 2

    @property
    def highest(self) -> float:
        """Largest loss over the mean of the ends, as the paper defines a barrier."""
        return max(self.loss) - (self.loss[0] + self.loss[-1]) / 2


@dataclass(frozen=True)
class Followed:
    """One pair through training.

    Attributes:
        epochs: when it was looked at.
        before: the path at each of these, as the networks are.
        after: the same to the rebased second network.
    """

    epochs: tuple[int, ...]
    before: tuple[Path, ...]
    after: tuple[Path, ...]


def followed(bench: Runs, pair: int) -> Followed:
    """Train two fresh networks and look at the line between them every few epochs, from the start on."""
    here, plan = setting(bench), bench.plan
    starts = [here.start(bench, "pair", pair, end) for end in range(2)]
    looks = plan.epochs // plan.every
    options = {**sgd(bench), "modes": 2, "epochs": 0, "draws": looks, "every": plan.every}
    options["start"] = Population.from_states(starts)
    kept = bench.networks(f"pair-{pair}", here.problem.model, here.problem.train, "ensemble", options)
    pairs = [(starts[0], starts[1]), *((kept.member(look), kept.member(looks + look)) for look in range(looks))]
    before, after = [], []
    for look, (a, b) in enumerate(pairs):
        bench.show(pair * len(pairs) + look, plan.pairs * len(pairs), "walking between networks")
        before.append(walked(here, a, b))
        after.append(walked(here, a, here.rebased(a, b)))
    return Followed(tuple(plan.every * look for look in range(looks + 1)), tuple(before), tuple(after))


def walked(here: Setting, a: State, b: State) -> Path:
    """Walk from a to b."""
    states = [interpolate(a, b, step / (POINTS - 1)) for step in range(POINTS)]
    return Path(tuple(here.loss(state) for state in states), tuple(here.swaps(a, state) for state in states))


def average(grids: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[float, ...], ...]:
    """The mean of several grids of numbers, place by place.

    >>> average([[[0.0, 2.0]], [[1.0, 4.0]]])
    ((0.5, 3.0),)
    """
    return tuple(
        tuple(sum(values) / len(values) for values in zip(*rows, strict=True)) for rows in zip(*grids, strict=True)
    )
