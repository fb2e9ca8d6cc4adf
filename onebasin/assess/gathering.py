"""One pass over a crowd of classifiers that keeps averages only, so that memory does not grow with the crowd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError
from onebasin.metrics.entropy import entropy, information
from onebasin.metrics.ood_scores import energy, max_logit, msp
from onebasin.metrics.ood_scores import entropy as doubt
from onebasin.predict.drawing import Crowd
from onebasin.predict.passing import Options, passes

KEPT = 32  # networks whose outputs have the bytes of `_Running` and of what one more network adds, in float64


@dataclass(frozen=True, eq=False)
class Averages:
    """What a crowd of classifiers predicts together, float64.

    Attributes:
        members: how many networks.
        probabilities: the average predictive (examples, classes).
        log_probabilities: its logarithm, which does not underflow (examples, classes).
        logits: the mean of logits (examples, classes).
        mean_entropy: the mean of the entropies of members (examples,).
    """

    members: int
    probabilities: Tensor
    log_probabilities: Tensor
    logits: Tensor
    mean_entropy: Tensor

    @property
    def mutual_information(self) -> Tensor:
        """How much the members disagree on each example, (examples,) in nats."""
        return information(self.probabilities, self.mean_entropy)

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores of `onebasin.metrics.ood_scores`, each (examples,), higher = more foreign."""
        return {
            "msp": msp(self.probabilities),
            "entropy": doubt(self.probabilities),
            "mutual_information": self.mutual_information,
            "max_logit": max_logit(self.logits),
            "energy": energy(self.logits),
        }


def gather(model: nn.Module, crowd: Crowd, inputs: Inputs, kind: str, **options: Unpack[Options]) -> Averages:
    """Run every network over the inputs, and average.

    >>> from onebasin.population import Population
    >>> crowd = Population.from_stacked({"weight": torch.tensor([[[3.0], [0.0]], [[0.0], [3.0]]])})
    >>> found = gather(nn.Linear(1, 2, bias=False), crowd, torch.ones(1, 1), "categorical")
    >>> found.probabilities, found.members
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), 2)

    Args:
        model: the function.
        crowd: a Population, or a Posterior that is drawn from.
        inputs: as in `onebasin.predict.predicting.predict`.
        kind: "categorical" for outputs (examples, classes), "bernoulli" for one logit per example.
        options: as in `predict`.

    Raises:
        InputError: outputs are of another shape or not finite.
    """
    running: _Running | None = None
    with passes(model, crowd, inputs, kept=KEPT, **options) as chunks:
        for start, block in chunks:
            for number, outputs in enumerate(block):
                logits = _class_logits(outputs, kind, start + number)
                if running is None:
                    running = _Running(logits)
                else:
                    running.add(logits)
    assert running is not None  # a crowd has at least one network
    return running.averages()


class _Running:
    """Sums over members of differences from the first one: equal members have exactly its averages."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.logs = logits.log_softmax(1)
        self.probabilities = self.logs.exp()
        self.entropy = entropy(self.probabilities)
        self.total_logs = self.logs
        self.sums = [torch.zeros_like(own) for own in (self.logits, self.probabilities, self.entropy)]
        self.members = 1

    def add(self, logits: Tensor) -> None:
        logs = logits.log_softmax(1)
        probabilities = logs.exp()
        self.total_logs = torch.logaddexp(self.total_logs, logs)
        own = (logits - self.logits, probabilities - self.probabilities, entropy(probabilities) - self.entropy)
        for total, value in zip(self.sums, own, strict=True):
            total += value
        self.members += 1

    def averages(self) -> Averages:
        logits, probabilities, doubts = (
            first + total / self.members
            for first, total in zip((self.logits, self.probabilities, self.entropy), self.sums, strict=True)
        )
        logs = self.total_logs - math.log(self.members)
        # A mean of differences can take a probability of 1e-300 below zero by rounding.
        return Averages(self.members, probabilities.clamp(min=0), logs, logits, doubts)


def _class_logits(outputs: Tensor, kind: str, number: int) -> Tensor:
    """Logits (examples, classes) in float64; of one logit z the pair (-z/2, z/2), which has the same probabilities."""
    exact = outputs.detach().double()
    if kind == "bernoulli":
        if exact.numel() != len(exact):
            raise InputError(
                f"expected one logit per example for a bernoulli likelihood, found outputs {tuple(exact.shape)}: "
                'choose likelihood="categorical", or evaluate the outputs one by one'
            )
        half = exact.reshape(-1, 1) / 2
        exact = torch.cat([-half, half], dim=1)
    if exact.dim() != 2 or exact.shape[1] < 2:
        raise InputError(
            f"expected outputs (examples, classes) of at least 2 classes, found {tuple(exact.shape)}: choose "
            'likelihood="bernoulli" for one logit, "gaussian" for values'
        )
    if not bool(torch.isfinite(exact).all()):
        raise InputError(
            f"expected finite outputs of every network, found NaN or infinity from network {number}: look for them in "
            "its weights and in the inputs, or leave it out"
        )
    return exact
