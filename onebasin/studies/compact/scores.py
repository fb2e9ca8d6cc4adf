"""How well a crowd or a compact form predicts, beside what the HMC samples say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onebasin import metrics
from onebasin.population import Population
from onebasin.posterior import Posterior
from onebasin.predict.predicting import predict
from onebasin.studies.compact.setting import Setting


@dataclass(frozen=True)
class Score:
    """One crowd in one run; shares, not per cent.

    Attributes:
        agreement: share of test inputs for which the average predictives of crowd and HMC choose the same class.
        variation: total variation between the two, averaged over test inputs.
        draws: accuracy of the average predictive.
        mean: accuracy of the mean network; None for a set of networks.
        nll: negative log likelihood of the average predictive, in nats.
        ece: its expected calibration error.
        stored: numbers to keep, in networks.
    """

    agreement: float
    variation: float
    draws: float
    mean: float | None
    nll: float
    ece: float
    stored: float


def scored(here: Setting, crowd: Population | Posterior, reference: Tensor, draws: int, seed: int) -> Score:
    """Judge a crowd on the test inputs.

    Args:
        here: the problem.
        crowd: networks, or a posterior that networks are drawn from.
        reference: average predictive of HMC (examples, classes).
        draws: number of networks drawn from a posterior.
        seed: of these draws.
    """
    model, (inputs, targets) = here.problem.model, here.problem.test
    found = predict(model, crowd, inputs, average=True, draws=draws, seed=seed)
    single: float | None = None
    if isinstance(crowd, Posterior):
        single, stored = here.right(crowd.mean), crowd.networks
    else:
        stored = float(len(crowd))
    return Score(
        float(metrics.agreement(found, reference)),
        float(metrics.total_variation(found, reference)),
        float(metrics.accuracy(found, targets)),
        single,
        float(metrics.nll(found, targets)),
        float(metrics.ece(found, targets)),
        stored,
    )
