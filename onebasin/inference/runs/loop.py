"""The loop: stages in turn, block by block, then draws. Everything in between is a place where a run can be continued.

A block is a few steps with random numbers of its own: a run that is interrupted goes on at the end of a block, and
draws the same numbers as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onebasin.inference.convergence import Tail
from onebasin.inference.density.layout import Layout
from onebasin.inference.kernel import Info, Moment, Networks, Plan
from onebasin.inference.runs.checkpoint import leaves
from onebasin.inference.runs.journal import Journal, Place
from onebasin.inference.runs.pending import Pending
from onebasin.inference.runs.units import Unit
from onebasin.inference.seeds import Streams
from onebasin.state import check_state, spec_of

BLOCK = 20  # steps with one set of random streams
_CHECKPOINT_SECONDS = 2.0

Tell = Callable[[Unit, "Progress"], None]


@dataclass(frozen=True)
class Progress:
    """How far one unit is.

    Attributes:
        done: gradients of one chain so far, out of `total`.
        total: gradients of one chain in the whole run.
        stage: what is being done.
        draws: draws of each chain that are safely kept.
        chains: chains of the unit.
        divergences: of these chains so far, since the process has begun.
        info: the latest Info, averaged over chains and the last block.
    """

    done: int
    total: int
    stage: str
    draws: int
    chains: int
    divergences: int
    info: Mapping[str, float]


@dataclass(eq=False)
class UnitRun:
    """Runs one unit of chains through a plan.

    Attributes:
        plan: what to do.
        layout: how positions become networks.
        seed: of the run.
        tell: receives the progress after each block.
        heed: is called after each step, and raises to end the run.
    """

    plan: Plan
    layout: Layout
    seed: int
    tell: Tell | None = None
    heed: Callable[[], None] | None = None
    _written: float = field(default_factory=time.monotonic)
    _finished: int = 0  # draws that are kept, and divergences so far: for those who watch
    _divergences: int = 0

    def __call__(self, unit: Unit, start: Callable[[], Networks], journal: Journal) -> Place:
        """Run until all draws are made; returns the last place."""
        kernels = [stage.kernel for stage in self.plan.stages]
        place = journal.place(unit, kernels)
        if place is None:
            state = kernels[0].init(start(), self._streams(unit, 0, "init"))
            place = Place(0, 0, 0, state)
        else:
            fresh = kernels[place.stage].init(start(), self._streams(unit, place.stage, "init"))
            found, expected = (dict(leaves(state)) for state in (place.state, fresh))
            check_state(found, spec_of(expected), where=f"the checkpoint of {unit.name}")
        place = self._stages(unit, place, journal)
        return self._draws(unit, place, journal)

    def _stages(self, unit: Unit, place: Place, journal: Journal) -> Place:
        """Everything before the first draw."""
        stages = self.plan.stages
        while True:
            stage = stages[place.stage]
            tail = Tail.of(stage) if stage.optimum and stage.steps and not place.draw else None
            while place.step < stage.steps and not place.draw:
                place, infos = self._block(unit, place, min(BLOCK, stage.steps - place.step))
                if tail is not None:
                    losses = tail.added(place.losses, place.step - len(infos), infos)
                    place = replace(place, losses=losses)
                self._checkpoint(unit, place, journal)
            if tail is not None and place.losses is not None:
                kernel: Any = stage.kernel  # see `Stage.optimum`
                place = replace(place, losses=None, ended={**tail.trend(place.losses), **kernel.ending(place.state)})
            if place.stage + 1 == len(stages):
                return place
            ended = stage.kernel.draw(place.state, self._streams(unit, place.stage, "end"))
            following = stages[place.stage + 1].kernel
            state = following.init(ended, self._streams(unit, place.stage + 1, "init"))
            place = Place(place.stage + 1, 0, 0, state, ended=place.ended)
            self._checkpoint(unit, place, journal)

    def _draws(self, unit: Unit, place: Place, journal: Journal) -> Place:
        """All draws, written every now and then, and at once when the run is interrupted."""
        kernel = self.plan.stages[-1].kernel
        pending = Pending(unit, self.layout, journal, place.draw)
        try:
            while place.draw < self.plan.draws:
                infos = self._fit_info(place)
                left = self.plan.thin[place.draw % len(self.plan.thin)]
                while left:
                    place, found = self._block(unit, place, min(BLOCK, left))
                    infos += found
                    left -= min(BLOCK, left)
                drawn = kernel.draw(place.state, self._streams(unit, place.stage, f"draw {place.draw}"))
                place = replace(place, draw=place.draw + 1)
                pending.add(drawn, infos)
                if pending.due():
                    pending.flush()
                    self._checkpoint(unit, place, journal)
                self._finished = pending.finished
        finally:
            pending.flush()
        journal.remember(unit, place)
        self._finished = pending.finished
        self._report(unit, place, [])
        return place

    def _fit_info(self, place: Place) -> list[Info]:
        """What is known of the training, and what a kernel that fits a density has to say about the fit, once."""
        tell = getattr(self.plan.stages[-1].kernel, "summary", None)
        found = {} if place.draw else {**place.ended, **({} if tell is None else tell(place.state))}
        return [found] if found else []

    def _block(self, unit: Unit, place: Place, steps: int) -> tuple[Place, list[Info]]:
        """A few steps with one set of streams, named after the stage and the number of its first step."""
        stage = self.plan.stages[place.stage]
        streams = self._streams(unit, place.stage, f"step {place.step}")
        state, infos = place.state, []
        for step in range(place.step, place.step + steps):
            state, info = stage.kernel.step(state, Moment(step, stage.steps), streams)
            infos.append(info)
            if self.heed is not None:
                self.heed()
        place = replace(place, step=place.step + steps, state=state)
        self._report(unit, place, infos)
        return place, infos

    def _checkpoint(self, unit: Unit, place: Place, journal: Journal) -> None:
        """Remember the place from time to time; what lies between would be computed again."""
        if time.monotonic() - self._written > _CHECKPOINT_SECONDS:
            journal.remember(unit, place)
            self._written = time.monotonic()

    def _streams(self, unit: Unit, stage: int, block: str) -> Streams:
        return Streams(self.seed, unit.window, f"{self.plan.stages[stage].name} {stage} {block}")

    def _report(self, unit: Unit, place: Place, infos: list[Info]) -> None:
        if self.tell is None:
            return
        self._divergences += sum(int(one["divergent"][unit.rows].sum()) for one in infos if "divergent" in one)
        done, total = work_done(self.plan, place), work(self.plan)
        names = infos[0] if infos else {}
        means = {name: float(torch.stack([one[name].double() for one in infos]).mean()) for name in names}
        stage = self.plan.stages[place.stage]
        last = place.stage + 1 == len(self.plan.stages)
        doing = "drawing" if last and place.step >= stage.steps else stage.name
        kept, chains = self._finished, len(unit.keep)
        self.tell(unit, Progress(done, total, doing, kept, chains, self._divergences, means))


def work(plan: Plan) -> int:
    """Gradients of one chain in the whole run."""
    before = [stage.steps for stage in plan.stages[:-1]]
    rounds, part = divmod(plan.draws, len(plan.thin))
    steps = plan.stages[-1].steps + rounds * sum(plan.thin) + sum(plan.thin[:part])
    return sum(before) + steps * plan.gradients


def work_done(plan: Plan, place: Place) -> int:
    """Gradients of one chain so far."""
    before = sum(stage.steps for stage in plan.stages[: place.stage])
    return before + place.step * (plan.gradients if place.stage + 1 == len(plan.stages) else 1)
