"""Pruning curves: how well a network does when only some of its weights are left."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, Unpack

from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError
from onebasin.norms import Measured, norms_used, refreshed_one, warn_stale
from onebasin.options import refuse_unknown
from onebasin.posterior import Posterior
from onebasin.predict import Loss, losses
from onebasin.predict.forward import BATCH
from onebasin.pruning.criteria import CRITERIA
from onebasin.pruning.masks import Masks
from onebasin.pruning.ranking import Network, Ranking
from onebasin.state import State, as_state

LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)  # those of paper 1


class Options(TypedDict, total=False):
    """Further options of `pruning_curve`.

    Attributes:
        names: only these tensors are pruned, by name or pattern.
        repeats: orders that "random" averages over; 3 by default.
        seed: of the first of them.
        loss: as in `onebasin.predict.losses`; "cross-entropy" by default.
        batch: largest number of examples in one forward pass.
        statistics: inputs, such as those of training, on which the running statistics of norms are measured for each
            pruned network. False: keep those of the network. By default the same, with a warning and a remark where
            the network is the mean of a Posterior, which has only averages.
    """

    names: Collection[str] | None
    repeats: int
    seed: int
    loss: Loss
    batch: int
    statistics: Measured


@dataclass(frozen=True)
class Point:
    """One network of a curve.

    Attributes:
        keep: the share that was asked for.
        kept: number of weights that were kept.
        loss: mean loss; for "random" averaged over its orders.
        accuracy: share of right classes, likewise; None where there are no classes.
        spread: standard deviation of the accuracy (or of the loss, without classes) over orders; 0 for one order.
    """

    keep: float
    kept: int
    loss: float
    accuracy: float | None
    spread: float = 0.0


@dataclass(frozen=True)
class PruningCurve:
    """What `pruning_curve` found.

    Attributes:
        points: criterion -> one point per level.
        levels: the shares that were kept.
        per: "global" or "tensor".
        examples: how many there were.
        remarks: sentences about numbers that may mislead.
    """

    points: Mapping[str, tuple[Point, ...]]
    levels: tuple[float, ...]
    per: str
    examples: int
    remarks: tuple[str, ...] = ()

    def accuracy(self, by: str) -> tuple[float | None, ...]:
        """Share of right classes at each level."""
        return tuple(point.accuracy for point in self.points[by])

    def loss(self, by: str) -> tuple[float, ...]:
        """Mean loss at each level."""
        return tuple(point.loss for point in self.points[by])

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "levels": list(self.levels),
            "per": self.per,
            "examples": self.examples,
            "criteria": {by: [asdict(point) for point in points] for by, points in self.points.items()},
            "remarks": list(self.remarks),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        """Accuracy in per cent (the loss, without classes): one row per level, one column per criterion."""
        classes = all(point.accuracy is not None for points in self.points.values() for point in points)
        widths = {by: max(9, len(by) + 2) for by in self.points}
        lines = [f"{'kept %':>7}" + "".join(f"{by:>{widths[by]}}" for by in self.points)]
        for row, level in enumerate(self.levels):
            cells = [_cell(points[row], classes, widths[by]) for by, points in self.points.items()]
            lines.append(f"{100 * level:>7.4g}" + "".join(cells))
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join([*lines, *[line for said in self.remarks for line in ("", said)]])


def pruning_curve(
    model: nn.Module,
    state: Network | None,
    posterior: Posterior | Network,
    data: tuple[Inputs, Tensor],
    *,
    by: Sequence[str] = CRITERIA,
    levels: Sequence[float] = LEVELS,
    per: str = "global",
    **options: Unpack[Options],
) -> PruningCurve:
    """Prune one network by several criteria to several levels, each time from the whole network, and judge it.

    Args:
        model: the function; left as it was.
        state: the network to prune, in the basis of the posterior (see `transfer`); None for the posterior's mean.
        posterior: whose means and standard deviations rank the weights, as in `prune`.
        data: inputs and targets to judge on.
        by: the criteria.
        levels: shares to keep.
        per: as in `prune`.
        **options: see `Options`.

    Returns:
        Loss and accuracy for each criterion and level. Nothing that was given is changed.
    """
    refuse_unknown(options, Options.__annotations__, "pruning_curve")
    inputs, targets = data
    statistics = options.get("statistics")
    constant = posterior.constant_statistics if isinstance(posterior, Posterior) else frozenset()
    averaged: tuple[str, ...] = ()
    if state is None and isinstance(posterior, Posterior) and statistics is None:
        averaged = norms_used(model, posterior.mean, inputs, constant=constant)
    remedy = "give statistics=, inputs such as those of training (on the command line --statistics), or False"
    remarks = (warn_stale("pruned means of this posterior", averaged, remedy),) if averaged else ()
    if state is None:
        state = posterior.mean if isinstance(posterior, Posterior) else posterior
    network = as_state(state)

    def pruned(masks: Masks) -> State:
        left = masks.apply(network)
        if statistics is None or statistics is False:
            return left
        return refreshed_one(model, left, statistics, constant=constant)[0]

    seed, repeats, names = options.get("seed", 0), options.get("repeats", 3), options.get("names")
    if repeats < 1 or not _several(by) or not _several(levels):
        raise InputError(
            f"expected at least one criterion and one level, each as a list, and repeats >= 1, found "
            f"by={by!r}, levels={levels!r} and repeats={repeats}: give some, such as levels=[0.5]"
        )
    levels = tuple(float(level) for level in levels)
    judging: dict[str, Any] = {"loss": options.get("loss", "cross-entropy"), "batch": options.get("batch", BATCH)}
    points: dict[str, tuple[Point, ...]] = {}
    examples = 0
    for criterion in by:
        orders = range(repeats if criterion == "random" else 1)
        rankings = [Ranking.of(posterior, criterion, names=names, seed=seed + order) for order in orders]
        found = []
        for level in levels:
            masks = [ranking.masks(level, per) for ranking in rankings]
            scores = [losses(model, pruned(one), inputs, targets, **judging) for one in masks]
            right = [1 - score.error for score in scores if score.error is not None]
            examples = scores[0].examples
            found.append(_point(level, masks[0].kept, [score.loss for score in scores], right))
        points[criterion] = tuple(found)
    return PruningCurve(points, levels, per, examples, remarks)


def _several(given: object) -> bool:
    """Whether there is a list with something in it; a text is a sequence of letters, which nobody means."""
    return isinstance(given, Collection) and not isinstance(given, str) and len(given) > 0


def _point(level: float, kept: int, values: list[float], right: list[float]) -> Point:
    accuracy = math.fsum(right) / len(right) if right else None
    return Point(level, kept, math.fsum(values) / len(values), accuracy, _deviation(right or values))


def _deviation(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _cell(point: Point, classes: bool, width: int) -> str:
    if classes and point.accuracy is not None:
        return f"{100 * point.accuracy:>{width}.2f}"
    return f"{point.loss:>{width}.4g}"
