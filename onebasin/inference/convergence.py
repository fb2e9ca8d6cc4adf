"""Whether training had ended when it was stopped: the trend of the loss over the last fifth of the training.

Progress s in [0, 1] is the share of the sum of all learning rates that has been spent: with a constant rate the share
of steps, with a cosine schedule more slowly towards the end. The epochs with s > 0.8, six at least, are cut into six to
ten bins of whole epochs, so that each bin has seen every example equally often and the choice of mini-batches makes no
noise. A training of fewer than six epochs is looked at as a whole, in bins of steps. The mean losses of the bins are
fitted by least squares,

    loss(s) = a - fall * s + b * rate(s) + residual,    noise = t * standard error of fall, from the residuals,

t being the 99 % quantile of Student's t. The term in the rate is there for schedules only: a rate that goes to zero
takes the noise of mini-batches out of the weights, and the loss falls by that although nothing is left to be learned.

`fall` is what the loss would lose if training went on as long again, at the pace of its end; as losses flatten it is
an upper bound. Training counts as unfinished where fall > 0.03 nats per example, that is where each example would
become 3 % more probable, and where fall > noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebasin.inference.kernel import Info, StepIndex

if TYPE_CHECKING:
    from onebasin.inference.kernel import Stage

SHARE = 0.2  # of the sum of learning rates, at the end of training
FEWEST, MOST = 6, 10  # bins
LEAST_FALL = 0.03  # nats per example
# The 99 % quantile of Student's t with 1 ... 8 degrees of freedom.
STUDENT = (31.8205, 6.9646, 4.5407, 3.7469, 3.3649, 3.1427, 2.9980, 2.8965)


@dataclass(frozen=True, eq=False)
class Tail:
    """The end of a training, cut into bins.

    Attributes:
        first: the first step of it.
        size: steps in each bin; those of the last epochs that fill no bin come first, in no bin.
        bins: how many there are.
        design: the columns 1, s and, unless it is constant, the rate, averaged over each bin; float64 (bins, 2 or 3).
    """

    first: int
    size: int
    bins: int
    design: Tensor

    @classmethod
    def of(cls, stage: Stage) -> Tail:
        """The tail of a stage whose kernel has an `optimizer` and `minibatches`; `stage.steps` must not be 0."""
        kernel: Any = stage.kernel  # see `Stage.optimum`
        steps = stage.steps
        rate = torch.tensor([kernel.optimizer.lr_at(StepIndex(step, steps)) for step in range(steps)]).double()
        progress = rate.cumsum(0) / rate.sum()
        step_unit, wanted = kernel.minibatches.per_epoch, steps
        if steps < FEWEST * step_unit:
            step_unit = 1
        else:
            wanted = max(FEWEST, int((progress > 1 - SHARE).sum()) // step_unit)  # epochs in the tail
        bins = min(MOST, wanted)
        size = wanted // bins * step_unit
        first = steps - bins * size
        columns = [torch.ones_like(rate), progress, *([] if bool((rate == rate[0]).all()) else [rate / rate.max()])]
        design = torch.stack(columns, dim=1)[first:].reshape(bins, size, -1).mean(1)
        return cls(first, size, bins, design)

    def added(self, losses: Tensor | None, step: int, infos: list[Info]) -> Tensor | None:
        """The sums of losses of the bins and their counts, (chains, 2, bins), after steps from `step` on."""
        for number, info in enumerate(infos, step):
            if number >= self.first:
                loss = info["loss"].double()
                losses = loss.new_zeros(len(loss), 2, self.bins) if losses is None else losses.clone()
                place = (number - self.first) // self.size
                losses[:, 0, place] += loss
                losses[:, 1, place] += 1
        return losses

    def trend(self, losses: Tensor) -> Info:
        """Mean loss of the last bin, `loss_fall` and `loss_noise`, each (chains,); with few bins the first alone."""
        means = (losses[:, 0] / losses[:, 1]).cpu()
        freedom = self.bins - self.design.shape[1]
        if freedom < 1:
            return {"final_loss": means[:, -1]}
        solve = torch.linalg.pinv(self.design)  # (columns, bins)
        coefficients = means @ solve.T
        square = (means - coefficients @ self.design.T).square().sum(1) / freedom
        noise = STUDENT[freedom - 1] * (square * solve[1].square().sum()).sqrt()
        return {"final_loss": means[:, -1], "loss_fall": -coefficients[:, 1], "loss_noise": noise}


def unfinished(fall: list[float], noise: list[float]) -> list[int]:
    """Which chains were still falling, by more than is of no account and by more than noise.

    >>> unfinished([0.2, 0.2, 0.01], [0.01, 0.3, 0.001])
    [0]
    """
    pairs = enumerate(zip(fall, noise, strict=True))
    return [chain for chain, (loss, least) in pairs if loss > LEAST_FALL and loss > least]


def unfinished_sentence(chains: list[int], fall: list[float]) -> str:
    """What to say of them; `fall` is that of all chains."""
    worst = max(fall[chain] for chain in chains)
    return (
        f"the loss of {len(chains)} of {len(fall)} trainings was still falling at their end: trained as long again it "
        f"would lose up to {worst:.2g} per example at the last pace; give more epochs, or a higher lr"
    )
