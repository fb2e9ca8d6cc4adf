"""What a crowd predicts on some inputs, as a goal for a posterior that shall predict the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from onebasin.calling import Call, Inputs, call_arguments
from onebasin.cluster import Places
from onebasin.population import Population
from onebasin.predict.batches import examples_in
from onebasin.predict.running import summarise

_LEAST = 1e-12  # of a probability or a variance under a logarithm


@dataclass(frozen=True, eq=False)
class Teacher:
    """The average predictive of a crowd and how much its members disagree.

    Attributes:
        inputs: positional and keyword arguments, one example per row of every tensor.
        mean: the average prediction (examples, ...): probabilities, or values.
        spread: the mean entropy of the members (examples, ...), or the standard deviation of their values.
        classes: whether predictions are probabilities.
    """

    inputs: Call
    mean: Tensor
    spread: Tensor
    classes: bool

    @classmethod
    def ask(
        cls, model: nn.Module, crowd: Population, inputs: Inputs, *, classes: bool, **places: Unpack[Places]
    ) -> Teacher:
        """Run all networks of the crowd over the inputs; `places` say where."""
        found = summarise(model, crowd, inputs, output="probabilities" if classes else "values", **places)
        spread = found.expected_entropy if classes else found.variance(correction=0).sqrt()
        assert spread is not None
        return cls(call_arguments(inputs), found.mean, spread, classes)

    def __len__(self) -> int:
        return examples_in(self.inputs[0] + tuple(self.inputs[1].values()))

    def distance(
        self, outputs: Tensor, weights: Tensor, rows: Tensor, diversity: float, *, mirrored: bool = False
    ) -> Tensor:
        """How far networks are from the goal on some of the inputs.

        Classes: mean over examples of KL(average predictive of the crowd || that of the networks)
        + diversity |mean entropy of the crowd - that of the networks|, in nats.
        Values: mean squared differences of mean and of standard deviation, over the mean variance of the crowd.

        Args:
            outputs: of the networks on these inputs, (members, batch, ...).
            weights: of the networks in averages (members,), sum 1.
            rows: the numbers of the inputs, (batch,).
            diversity: how much the second term counts.
            mirrored: the networks are a sample in mirrored pairs. The logarithm of an average of few is too small on
                average, by var / (2 q^2) to second order, which would punish networks for disagreeing: add it.
        """
        mean, spread = (goal[rows].to(outputs) for goal in (self.mean, self.spread))
        if not self.classes:
            return self._values(outputs, weights, mean, spread, diversity)
        logs = outputs.log_softmax(2)
        shape = (-1, *[1] * (outputs.dim() - 1))
        average = torch.logsumexp(logs + weights.log().reshape(shape), 0)
        if mirrored:
            average = average + _missing(logs, weights)
        gap = (torch.xlogy(mean, mean.clamp(min=_LEAST)) - mean * average).sum(1).mean()
        entropy = torch.einsum("m,m...->...", weights, -(logs.exp() * logs).sum(2))
        return gap + diversity * (entropy - spread).abs().mean()

    def _values(self, outputs: Tensor, weights: Tensor, mean: Tensor, spread: Tensor, diversity: float) -> Tensor:
        average = torch.einsum("m,m...->...", weights, outputs)
        variance = torch.einsum("m,m...->...", weights, (outputs - average).square())
        unit = spread.square().mean().clamp(min=_LEAST)
        gap = (average - mean).square().mean() / unit
        return gap + diversity * ((variance + _LEAST * unit).sqrt() - spread).square().mean() / unit


def _missing(logs: Tensor, weights: Tensor) -> Tensor:
    """What the logarithm of the average of mirrored pairs lacks on average, (batch, classes, ...).

    With q = sum_k w_k p_k over pairs, E[log q] = log E[q] - var(q) / (2 q^2) + ..., and var(q) is estimated by
    sum_k w_k^2 (p_k - q)^2 n / (n - 1). At most about 1/2, where one pair of many is all there is.
    """
    pairs, own = logs.exp().unflatten(0, (-1, 2)).mean(1), weights.unflatten(0, (-1, 2)).sum(1)
    count = len(own)
    if count < 2:
        return torch.zeros_like(logs[0])
    mean = torch.einsum("m,m...->...", own, pairs)
    variance = torch.einsum("m,m...->...", own.square(), (pairs - mean).square()) * count / (count - 1)
    return variance / (2 * mean.square().clamp(min=_LEAST**2))
