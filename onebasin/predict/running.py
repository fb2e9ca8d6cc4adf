"""What thousands of networks predict together, in the memory of a few: sums that grow network by network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError
from onebasin.predict.drawing import Crowd
from onebasin.predict.passing import Options, passes
from onebasin.predict.predicting import Output, check_classes, check_output, refuse_nan

_KEPT = 16  # networks whose outputs have the bytes of two summaries and of what is made of them in between


@dataclass(frozen=True, eq=False)
class Summary:
    """Moments over networks of what they predict, float64.

    Attributes:
        output: what was predicted: "probabilities", "logits" or "values".
        members: number of networks.
        mean: their mean (examples, ...); of probabilities the average predictive.
        deviations: sum over networks of (prediction - mean)^2 (examples, ...).
        expected_entropy: mean over networks of the entropy of their probabilities in nats (examples, ...); None where
            no probabilities were predicted.
    """

    output: Output
    members: int
    mean: Tensor
    deviations: Tensor
    expected_entropy: Tensor | None = None

    def variance(self, correction: int = 1) -> Tensor:
        """Variance over networks (examples, ...), with divisor members - correction."""
        if self.members <= correction:
            raise InputError(
                f"a variance needs at least {correction + 1} networks, found {self.members}: add members, or choose "
                "correction=0"
            )
        return self.deviations / (self.members - correction)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the average predictive in nats (examples, ...), the total uncertainty."""
        if self.expected_entropy is None:
            raise InputError(f'{self.output} have no entropy: summarise with output="probabilities"')
        found: Tensor = torch.special.entr(self.mean).sum(1)
        return found

    @property
    def mutual_information(self) -> Tensor:
        """H(mean) - mean of H in nats (examples, ...): how much the networks disagree, 0 when they are one function."""
        total = self.entropy  # asks for probabilities
        assert self.expected_entropy is not None
        return (total - self.expected_entropy).clamp(min=0)

    def merge(self, other: Summary) -> Summary:
        """The summary of both crowds together, exactly (Chan, Golub and LeVeque).

        With n and m networks of means p and q, deviations = deviations_n + deviations_m + (q - p)^2 n m / (n + m).
        """
        if self.output != other.output or self.mean.shape != other.mean.shape:
            raise InputError(
                f"expected summaries of the same predictions, found {self.output} {tuple(self.mean.shape)} and "
                f"{other.output} {tuple(other.mean.shape)}: summarise the same inputs in the same way"
            )
        members, share = self.members + other.members, other.members / (self.members + other.members)
        gap = other.mean - self.mean
        deviations = self.deviations + other.deviations + gap.square() * (self.members * share)
        entropy = None
        if self.expected_entropy is not None and other.expected_entropy is not None:
            entropy = torch.lerp(self.expected_entropy, other.expected_entropy, share)
        return Summary(self.output, members, self.mean + share * gap, deviations, entropy)


def summarise(
    model: nn.Module, crowd: Crowd, inputs: Inputs, *, output: Output = "probabilities", **options: Unpack[Options]
) -> Summary:
    """Run every network of a crowd over `inputs`, and keep mean, variance and expected entropy only.

    >>> from onebasin.population import Population
    >>> crowd = Population.from_stacked({"weight": torch.tensor([[[9e9], [0.0]], [[0.0], [9e9]]])})
    >>> found = summarise(nn.Linear(1, 2, bias=False), crowd, torch.tensor([[1.0]]))
    >>> found.mean, found.mutual_information  # two networks that are sure of different classes: log 2
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))

    Args:
        model: the function; left exactly as it was.
        crowd: a Population, or a Posterior that is drawn from.
        inputs: as in `predict`.
        output: as in `predict`; here probabilities are computed in float64.
        options: as in `predict`.

    Raises:
        InputError: as `predict`.
    """
    check_output(output, options)
    whole: Summary | None = None
    with passes(model, crowd, inputs, kept=_KEPT, **options) as chunks:
        for start, part in chunks:
            if output == "probabilities":
                check_classes(part)
            for number, own in enumerate(part):
                single = _single(own, output, start + number)
                whole = single if whole is None else whole.merge(single)
    assert whole is not None  # there is at least one network
    return whole


def _single(outputs: Tensor, output: Output, number: int) -> Summary:
    """The summary of one network that returns `outputs` (examples, ...)."""
    values, entropy = outputs.double(), None
    if output == "probabilities":
        values = values.softmax(1)
        entropy = torch.special.entr(values).sum(1)
    refuse_nan(values[None], number)
    if not bool(values.isfinite().all()):
        raise InputError(
            f"expected finite numbers from every network, found infinity from network {number}: it has no variance, so "
            "leave the network out, or ask predict for the average alone"
        )
    return Summary(output, 1, values, torch.zeros_like(values), entropy)
