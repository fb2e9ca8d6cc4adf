"""Deep ensembles: independent trainings, batched over members; also snapshots and checkpoints of one training.

Members differ in their initial weights and in the order of their data. One member is a MAP estimate, or a maximum
likelihood one with prior=None.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack, cast

from onebasin.errors import InputError
from onebasin.inference.density.minibatch import Minibatches
from onebasin.inference.density.target import Target
from onebasin.inference.kernel import Plan, Stage
from onebasin.inference.methods.training import Optimiser, Training


class TrainingOptions(TypedDict, total=False):
    """How networks are trained.

    Attributes:
        epochs: passes over the data.
        batch: examples in a mini-batch; None for all.
        rate: learning rate, of the mean loss per example.
        optimiser: "adam" or "sgd".
        momentum: of SGD.
        decay: decoupled weight decay, beside the prior.
        schedule: "constant", or "cosine" from the rate to zero.
    """

    epochs: int
    batch: int | None
    rate: float
    optimiser: str
    momentum: float
    decay: float
    schedule: str


class Options(TrainingOptions, total=False):
    """Options of an ensemble.

    Attributes:
        draws: networks from each training: 1 gives a deep ensemble.
        snapshots: several draws share the epochs in equal cycles of a cosine rate, each ending in a draw; without it,
            further draws are checkpoints after the training.
        every: epochs between checkpoints.
    """

    draws: int
    snapshots: bool
    every: int


def count(value: int, what: str, least: int = 1) -> int:
    """A number of something; refuses what is below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"expected {what} to be a whole number from {least} on, found {value!r}: give such a number")
    return value


def training_stage(target: Target, options: TrainingOptions, *, optimum: bool = False) -> Stage:
    """The stage that trains every chain, with Adam for 100 epochs on batches of 100 unless told otherwise.

    Args:
        target: the posterior.
        options: those that were given.
        optimum: whether the result depends on where training ends; not where chains only start there.
    """
    batches = Minibatches(target.examples, options.get("batch", 100))
    optimiser = Optimiser(
        options.get("optimiser", "adam"),
        options.get("rate", 1e-3),
        options.get("momentum", 0.9),
        options.get("decay", 0.0),
        options.get("schedule", "constant"),
        compile=target.compile,
    )
    steps = count(options.get("epochs", 100), "epochs", 0) * batches.per_epoch
    return Stage("training", Training(target, optimiser, batches), steps, optimum)


def build(target: Target, **options: Unpack[Options]) -> Plan:
    """Plan an ensemble."""
    draws = count(options.get("draws", 1), "draws")
    stage = training_stage(target, cast(TrainingOptions, options), optimum=True)
    kernel = cast(Training, stage.kernel)
    per_epoch = kernel.minibatches.per_epoch
    if draws == 1:
        return Plan((stage,), 1, (0,))
    if not options.get("snapshots", False):
        if kernel.optimiser.schedule == "cosine":
            raise InputError(
                "expected a constant rate for checkpoints after the training, found a cosine schedule, which has ended "
                "at zero there: use snapshots=True, or schedule='constant'"
            )
        every = count(options.get("every", 1), "every") * per_epoch
        return Plan((Stage(stage.name, kernel, max(0, stage.steps - every), optimum=True),), draws, (every,))
    cycle = max(1, stage.steps // draws)
    chosen = kernel.optimiser
    optimiser = replace(chosen, schedule="cyclical", cycle=cycle)
    return Plan((Stage(stage.name, Training(target, optimiser, kernel.minibatches), 0),), draws, (cycle,))
