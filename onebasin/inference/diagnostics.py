"""Diagnostics of runs, have the chains mixed? R-hat and effective sample size, of functions and of weights.

Weights of different chains need not agree even when their functions do: hidden units may have changed places. So the
verdict is about functions; weights are worth a look before and after alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import Inputs, predictions
from onebasin.inference.kernel import Info, StepIndex
from onebasin.metrics import ebfmi, ess, rhat
from onebasin.population import Population

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


_LOST = 0.5  # a chain that diverges in more than this share of its steps gets nowhere either
_STUCK = 0.01  # a chain that accepts less than this has stopped moving


def summary(info: Mapping[str, Tensor]) -> dict[str, Any]:
    """JSON-able numbers from Info (chains, steps) after warm-up.

    Every entry becomes its mean per chain. For HMC also `exp_energy_change`, the mean of exp(-dH), which is 1 for a
    correct sampler, `ebfmi`, and the chains that are stuck. For trainings `still_falling`, the chains whose loss had
    not settled (`onebasin.inference.diagnostics`), and `notes`, sentences for people.
    """
    numbers: dict[str, Any] = {
        name: [float(row) for row in value.nanmean(dim=1)]
        for name, value in info.items()
        if name not in ("energy", "energy_change", "divergent")
    }
    if "divergent" in info:
        numbers["divergences"] = [int(row) for row in info["divergent"].nansum(dim=1)]
        lost = (info["divergent"].nanmean(dim=1) > _LOST).tolist()
        numbers["stuck"] = [chain for chain, bad in enumerate(lost) if bad]
    if "energy_change" in info:
        change = info["energy_change"]
        sound = torch.where(torch.isfinite(change), torch.exp(-change), torch.where(change.isnan(), change, 0.0))
        numbers["exp_energy_change"] = [float(row) for row in sound.nanmean(dim=1)]
        slow = [chain for chain, rate in enumerate(numbers["accepted"]) if rate < _STUCK]
        numbers["stuck"] = sorted({*numbers["stuck"], *slow})
    if "energy" in info and info["energy"].shape[1] >= 4:
        numbers["ebfmi"] = [float(row) for row in ebfmi(info["energy"])]
    if "loss_fall" in info:
        fall = numbers["loss_fall"]
        numbers["still_falling"] = chains = unfinished(fall, numbers["loss_noise"])
        numbers["notes"] = [unfinished_sentence(chains, fall)] if chains else []
    return numbers


MIXED = 1.05  # an R-hat above this says that chains disagree, or drift


@dataclass(frozen=True)
class Mixing:
    """Summary over many quantities.

    Attributes:
        worst_rhat: the largest R-hat (rank-normalised, split).
        median_rhat: the median.
        share_mixed: share of quantities with R-hat below 1.05.
        least_bulk: smallest effective sample size in the bulk.
        median_bulk: the median.
        least_tail: smallest effective sample size in the tails.
        quantities: how many there are; those that never vary are left out.
    """

    worst_rhat: float
    median_rhat: float
    share_mixed: float
    least_bulk: float
    median_bulk: float
    least_tail: float
    quantities: int


@dataclass(frozen=True)
class Diagnosis:
    """R-hat and effective sample sizes of a population, as a table when printed.

    Attributes:
        functions: of outputs on the given inputs; None without model and inputs.
        weights: tensor name -> of its entries.
        chains: number of chains.
        draws: draws of each.
        sampler: how the sampler fared, from the population's provenance.
    """

    functions: Mixing | None
    weights: Mapping[str, Mixing]
    chains: int
    draws: int
    sampler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mixed(self) -> bool:
        """Whether every output has R-hat below 1.05."""
        return self.functions is not None and self.functions.worst_rhat < MIXED

    def __str__(self) -> str:
        """A table a person can read."""
        named = {"functions": self.functions, **self.weights} if self.functions else dict(self.weights)
        width = max([len(name) for name in named] + [8])
        head = f"{'':{width}}  worst R-hat  median  below {MIXED}  least ESS (bulk, tail)  median ESS  quantities"
        rows = [
            f"{name:{width}}  {mixing.worst_rhat:11.3f}  {mixing.median_rhat:6.3f}  {mixing.share_mixed:10.1%}"
            f"  {mixing.least_bulk:12.0f}, {mixing.least_tail:8.0f}  {mixing.median_bulk:10.0f}"
            f"  {mixing.quantities:10,}"
            for name, mixing in named.items()
            if mixing is not None
        ]
        return "\n".join([f"{self.chains} chains of {self.draws} draws", head, *rows])


def diagnose(
    model: nn.Module | None,
    population: Population,
    inputs: Inputs | None = None,
    *,
    outputs: str | None = None,
    weights: bool = True,
) -> Diagnosis:
    """R-hat and effective sample sizes in function space and in weight space.

    Args:
        model: the function; None to look at weights only.
        population: draws of several chains (`population.chain`); at least 4 of each.
        inputs: where functions are compared; None without a model.
        outputs: "probabilities" applies a softmax, "raw" takes outputs as they are; by default what the likelihood of
            the run suggests.
        weights: whether weights are looked at.
    """
    if outputs not in (None, "probabilities", "raw"):
        raise InputError(f'expected outputs "probabilities" or "raw", found {outputs!r}: give outputs="raw"')
    if (model is None) != (inputs is None):
        raise InputError(
            "expected a model and inputs, found one of them: functions are compared with both; give None for both to "
            "look at weights only"
        )
    rows = chain_rows(population)
    functions = None
    if model is not None and inputs is not None:
        values = predictions(model, population, inputs)
        if (outputs or _suggested(population)) == "probabilities":
            values = values.softmax(-1)
        functions = mixing(values[rows])
    real = [name for name, tensor in population.spec.items() if tensor.dtype.is_floating_point] if weights else []
    each = {name: mixing(population.tensor(name)[rows]) for name in real}
    varying = {name: one for name, one in each.items() if one.quantities}
    return Diagnosis(functions, varying, rows.shape[0], rows.shape[1], population.provenance.get("diagnostics", {}))


def chain_rows(population: Population) -> Tensor:
    """Members of each chain in their order, (chains, draws); longer chains are cut to the shortest."""
    chain = population.chain
    if chain is None:
        chain = torch.zeros(len(population), dtype=torch.int64)
    rows = [(chain == number).nonzero()[:, 0] for number in chain.unique()]
    shortest = min((len(row) for row in rows), default=0)
    if shortest < 4:
        raise InputError(f"expected at least 4 draws of each chain, found {shortest}: draw more before judging")
    return torch.stack([row[:shortest] for row in rows])


def mixing(values: Tensor) -> Mixing:
    """Summarise quantities (chains, draws, ...); one that never varies says nothing and is left out."""
    flat = values.flatten(2) if values.dim() > 2 else values[:, :, None]
    flat = flat[:, :, (flat != flat[:1, :1]).flatten(0, 1).any(0)]
    if not flat.shape[2]:
        unknown = float("nan")
        return Mixing(unknown, unknown, unknown, unknown, unknown, unknown, 0)
    ratio, bulk, tail = rhat(flat), ess(flat, "bulk"), ess(flat, "tail")
    return Mixing(
        _largest(ratio),
        float(ratio.nanmedian()),
        float((ratio < MIXED).double().mean()),
        -_largest(-bulk),
        float(bulk.nanmedian()),
        -_largest(-tail),
        len(ratio),
    )


def _largest(values: Tensor) -> float:
    """The largest entry; NaN counts as infinite."""
    return float(values.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf")).max())


def _suggested(population: Population) -> str:
    return "probabilities" if population.provenance.get("likelihood") == "categorical" else "raw"
