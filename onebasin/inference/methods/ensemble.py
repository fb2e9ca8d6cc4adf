"""Deep ensembles: independent trainings, batched over members; also snapshots and checkpoints of one training.

Members differ in their initial weights and in the order of their data. One member is a MAP estimate, or a maximum
likelihood one with prior=None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

from onebasin.errors import InputError
from onebasin.inference.kernel import ChainPlan, Stage, check_counts
from onebasin.inference.target import Target
from onebasin.inference.training import TrainedMethod, Training


@dataclass(frozen=True, kw_only=True)
class Ensemble(TrainedMethod):
    """Deep ensembles: independent trainings; also snapshots and checkpoints of one training.

    Attributes:
        draws: networks from each training: 1 gives a deep ensemble.
        snapshots: several draws share the epochs in equal cycles of a cosine rate, each ending in a draw; without it,
            further draws are checkpoints after the training.
        every: epochs between checkpoints.
    """

    name: ClassVar[str] = "ensemble"
    draws: int = 1
    snapshots: bool = False
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws, every=self.every)
        if not self.snapshots:
            check_checkpoints(self.draws, self.lr_schedule, "use snapshots=True, or ")

        if self.snapshots and (self.lr_schedule == "milestones" or self.lr_warmup):
            raise InputError(
                f"expected snapshots with their own cosine cycles, found lr_schedule={self.lr_schedule!r} and "
                f"lr_warmup={self.lr_warmup}: leave them out, or snapshots=True, for checkpoints after the training"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train; then one draw, checkpoints, or snapshots."""
        stage = self.training(target, optimum=True)
        if self.draws == 1:
            return ChainPlan((stage,), 1, (0,))
        kernel = cast(Training, stage.kernel)
        if not self.snapshots:
            every = self.every * kernel.minibatches.per_epoch
            return ChainPlan((replace(stage, steps=max(0, stage.steps - every)),), self.draws, (every,))
        cycle = max(1, stage.steps // self.draws)
        cyclical = replace(kernel, optimizer=replace(kernel.optimizer, schedule="cyclical", cycle=cycle))
        return ChainPlan((Stage(stage.name, cyclical, 0),), self.draws, (cycle,))


def check_checkpoints(draws: int, lr_schedule: str, instead: str = "use ") -> None:
    """Raise where several draws would be taken after the rate has come to zero."""
    if draws > 1 and lr_schedule == "cosine":
        raise InputError(
            "expected a constant rate for checkpoints after the training, found a cosine schedule, which has ended "
            f'at zero there: {instead}lr_schedule="constant"'
        )
