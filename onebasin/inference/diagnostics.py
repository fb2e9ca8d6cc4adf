"""Diagnostics of runs, have the chains mixed? R-hat and effective sample size, of functions and of weights.

Weights of different chains need not agree even when their functions do: hidden units may have changed places. So the
verdict is about functions; weights are worth a look before and after alignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import (
    AnyInputs,
    OutputPart,
    inputs_of,
    predictions,
    select_output,
)
from onebasin.inference.kernel import Info, StepIndex
from onebasin.metrics import ebfmi, ess, ranks, rhat
from onebasin.parallel import Progress, progress_of
from onebasin.population import Population, check_population
from onebasin.reporting import (
    SHOWN,
    Axis,
    Cell,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Result,
    Rule,
    Series,
    Table,
    as_number,
    encode,
    finite,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import check_spec

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


_FINE = 4  # bins of R-hat for each factor of MIXED
_EDGES = tuple(MIXED ** (number / _FINE) for number in range(-_FINE, 48 * _FINE))  # 0.95 to 9.8


@dataclass(frozen=True, repr=False)
class Mixing(Result):
    """Summary over many quantities.

    Attributes:
        worst_rhat: the largest R-hat (rank-normalised, split).
        median_rhat: the median.
        share_mixed: share of quantities with R-hat below 1.05.
        least_bulk: smallest effective sample size in the bulk.
        median_bulk: the median.
        least_tail: smallest effective sample size in the tails.
        quantities: how many there are; those that never vary are left out.
        rhats: quantities in bins of their R-hat, for the figure; the outer bins hold what lies beyond them.
    """

    worst_rhat: float
    median_rhat: float
    share_mixed: float
    least_bulk: float
    median_bulk: float
    least_tail: float
    quantities: int
    rhats: tuple[int, ...] = field(default=(), compare=False)

    def record(self) -> Record:
        """A table, and a histogram of R-hat."""
        text = f"Of {self.quantities:,} quantities {self.share_mixed:.1%} have an R-hat below {MIXED}; the worst is "
        text += f"{self.worst_rhat:.3f}."
        rows: tuple[tuple[Cell, ...], ...] = (("all quantities", *_cells(self)),)
        items = (Table("mixing", "R-hat and effective sample sizes", _COLUMNS, rows), _rhats({"": [self]}, text))
        return result_record("mixing", f"Mixing of {self.quantities:,} quantities", text, items, values=_plain(self))


_COLUMNS = (
    Column("quantities"),
    Column("number", "those that never vary are left out", digits=0),
    Column("worst R-hat", "rank-normalised, split", "lower"),
    Column("median R-hat", "rank-normalised, split", "lower"),
    Column(f"below {MIXED}", "share of quantities with a small R-hat", "higher", 1, "%"),
    Column("least ESS, bulk", "smallest effective sample size in the bulk", "higher", 0),
    Column("least ESS, tail", "smallest effective sample size in the tails", "higher", 0),
    Column("median ESS", "effective sample size in the bulk", "higher", 0),
)


def _cells(mixing: Mixing) -> tuple[Number, ...]:
    return (
        Number(mixing.quantities),
        as_number(mixing.worst_rhat),
        as_number(mixing.median_rhat),
        as_number(100 * mixing.share_mixed),
        as_number(mixing.least_bulk),
        as_number(mixing.least_tail),
        as_number(mixing.median_bulk),
    )


def _plain(mixing: Mixing) -> dict[str, Any]:
    numbers = {part.name: getattr(mixing, part.name) for part in fields(mixing) if part.name != "rhats"}
    return {name: finite(value) for name, value in numbers.items()}


def _rhats(groups: Mapping[str, Iterable[Mixing]], caption: str) -> Figure:
    """A histogram of R-hat over all quantities of each group, cut to where there are any."""
    sums = {name: [sum(column) for column in zip(*(own.rhats for own in group if own.rhats), strict=True)]
            for name, group in groups.items()}  # fmt: skip
    filled = [place for counts in sums.values() for place, count in enumerate(counts) if count]
    first, last = max(0, min(filled, default=0) - 2), min(len(_EDGES) - 1, max(filled, default=8) + 3)
    last = max(last, _FINE * 2 + 2)  # the rule at 1.05 is always in view
    series = tuple(
        Series(name, _EDGES[first : last + 1], tuple(100 * count / sum(counts) for count in counts[first:last]))
        for name, counts in sums.items()
        if counts
    )
    return one_panel(
        "rhat", "Do chains agree?", caption, "histogram", Axis("R-hat", scale="log"), "share of quantities (%)",
        series=series, rules=(Rule(f"mixed below {MIXED}", MIXED, "vertical"),),
    )  # fmt: skip


_CHAINS, _POINTS, _RANKS = 8, 400, 20  # chains of a trace, their points, and bins of ranks


@dataclass(frozen=True)
class Trace:
    """One output of the networks along the chains.

    Attributes:
        name: which one, as "output 3 of example 17".
        rhat: its R-hat.
        numbers: the chains that are kept, at most 8 of different means, from the smallest to the largest.
        draws: draws that are kept of each, at most 400.
        values: a row for each of these chains, with a value for each of these draws.
        ranks: a row for each of these chains: how many of its draws are in each of 20 bins of the ranks among all draws
            of all chains.
    """

    name: str
    rhat: float
    numbers: tuple[int, ...]
    draws: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, values: Tensor, name: str, ratio: float) -> Trace:
        """The trace of a quantity (chains, draws)."""
        chains, draws = values.shape
        order = values.mean(1).argsort()
        kept = order[torch.linspace(0, chains - 1, min(chains, _CHAINS)).round().long()]
        steps = torch.linspace(0, draws - 1, min(draws, _POINTS)).round().long()
        bins = (ranks(values.flatten()).reshape(values.shape) - 1) * _RANKS / values.numel()
        counts = [torch.bincount(bins[row].long().clamp(0, _RANKS - 1), minlength=_RANKS).tolist() for row in kept]
        rows = values[kept][:, steps].double().tolist()
        return cls(name, ratio, tuple(kept.tolist()), tuple(steps.tolist()), tuple(map(tuple, rows)),
                   tuple(map(tuple, counts)))  # fmt: skip

    def panels(self) -> tuple[Panel, Panel]:
        """The values by draw, and the ranks of each chain."""
        names = [f"chain {number}" for number in self.numbers]
        traces = tuple(Series(name, tuple(map(float, self.draws)), row, shade=number)
                       for name, number, row in zip(names, self.numbers, self.values, strict=True))  # fmt: skip
        edges = tuple(100 * number / _RANKS for number in range(_RANKS + 1))
        shares = tuple(Series(name, edges, tuple(100 * count / max(1, sum(row)) for count in row), shade=number)
                       for name, number, row in zip(names, self.numbers, self.ranks, strict=True))  # fmt: skip
        even = Rule("mixed", 100 / _RANKS)
        return (
            Panel("lines", f"{self.name}, R-hat {self.rhat:.3f}", Axis("draw"), Axis("output"), traces),
            Panel(
                "histogram", "ranks", Axis("rank among all draws (%)"), Axis("draws of the chain (%)"), shares, (even,)
            ),
        )


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """R-hat and effective sample sizes of a population.

    Attributes:
        functions: of outputs on the given inputs; None without model and inputs.
        weights: tensor name -> of its entries.
        chains: number of chains.
        draws: draws of each.
        sampler: how the sampler fared, from the population's provenance.
        aligned: tensor name -> the same of the aligned population, where one was given.
        traces: the output with the largest R-hat and the one with the median, along the chains.
        quantity: what functions were compared as, "probabilities" or "values"; None where they were not looked at.
        reasons: why it is this quantity, and what was taken for a chain; a sentence each.
    """

    functions: Mixing | None
    weights: Mapping[str, Mixing]
    chains: int
    draws: int
    sampler: Mapping[str, Any] = field(default_factory=dict)
    aligned: Mapping[str, Mixing] = field(default_factory=dict)
    traces: tuple[Trace, ...] = field(default=(), compare=False)
    quantity: str | None = None
    reasons: tuple[str, ...] = ()

    @property
    def mixed(self) -> bool:
        """Whether every output has R-hat below 1.05."""
        return self.functions is not None and self.functions.worst_rhat < MIXED

    def record(self) -> Record:
        """A table of functions and tensors; traces and ranks of outputs, and histograms of R-hat, as figures."""
        rows: list[tuple[Cell, ...]] = [] if self.functions is None else [("functions", *_cells(self.functions))]
        for name in largest_first(self.weights, lambda name: self.weights[name].quantities):
            rows.append((name, *_cells(self.weights[name])))
            if name in self.aligned:
                rows.append((f"{name}, aligned", *_cells(self.aligned[name])))
        answer = self._answer()
        figures = []
        if self.traces:
            panels = tuple(panel for trace in self.traces for panel in trace.panels())
            caption = "Chains that have mixed lie upon each other, and their ranks are even. " + answer
            figures.append(Figure("traces", "Do chains visit the same functions?", caption, panels[:2]))
            figures += [Figure("traces-median", "And at the median output?", caption, panels[2:])] if panels[2:] else []
        groups = {"functions": [self.functions]} if self.functions else {}
        groups |= {"weights": list(self.weights.values())} if self.weights else {}
        groups |= {"weights, aligned": list(self.aligned.values())} if self.aligned else {}
        figures.append(_rhats(groups, answer))
        figures += [self._tensors(answer)] if self.weights else []
        return result_record(
            "diagnosis",
            f"Diagnosis of {self.chains} chain{'s' if self.chains != 1 else ''} of {self.draws} draws",
            (answer, *self.reasons),
            (Table("mixing", "R-hat and effective sample sizes", _COLUMNS, tuple(rows), rivals=False), *figures),
            values={
                "chains": self.chains,
                "draws": self.draws,
                "functions": None if self.functions is None else _plain(self.functions),
                "weights": {name: _plain(own) for name, own in self.weights.items()},
                "aligned": {name: _plain(own) for name, own in self.aligned.items()},
                "sampler": encode(dict(self.sampler)),
                "quantity": self.quantity,
            },
            settings={} if self.quantity is None else {"quantity": self.quantity},
        )

    def _answer(self) -> str:
        if self.functions is not None:
            subject = "The chains have" if self.chains > 1 else "The chain has"
            what = "probabilities" if self.quantity == "probabilities" else "outputs"
            worst = f"{self.functions.worst_rhat:.3f}{'' if self.mixed else f', {MIXED} or more'}"
            return (
                f"{subject} {'' if self.mixed else 'not '}mixed: the worst R-hat of {self.functions.quantities:,} "
                f"{what} is {worst}, and the smallest effective sample size {self.functions.least_bulk:,.0f} of "
                f"{self.chains * self.draws:,} draws."
            )
        mixed, every = _share_mixed(self.weights)
        moved = f", {_share_mixed(self.aligned)[0]:.1%} once they are aligned" if self.aligned else ""
        return f"Of {every:,} weights {mixed:.1%} have an R-hat below {MIXED}{moved}; functions were not looked at."

    def _tensors(self, caption: str) -> Figure:
        names = tuple(largest_first(self.weights, lambda name: self.weights[name].quantities)[:SHOWN])
        sides = {"as given": self.weights, "aligned": self.aligned}
        series = tuple(
            Series(title, tuple(range(len(names))), tuple(finite(side[name].median_rhat) if name in side else None
                                                          for name in names))
            for title, side in sides.items() if side
        )  # fmt: skip
        more = "" if len(names) == len(self.weights) else f" The {len(names)} largest of {len(self.weights):,} tensors."
        return one_panel("tensors", "In which tensors do weights agree?", caption + more, "bars", Axis("", names=names),
                      Axis("median R-hat", scale="log"), series=series, rules=(Rule(f"{MIXED}", MIXED),))  # fmt: skip


def _share_mixed(weights: Mapping[str, Mixing]) -> tuple[float, int]:
    """The share of all weights with a small R-hat, and how many weights there are."""
    every = sum(own.quantities for own in weights.values())
    return sum(own.quantities * own.share_mixed for own in weights.values()) / max(1, every), every


def diagnose(
    model: nn.Module | None,
    population: Population,
    inputs: AnyInputs = None,
    *,
    quantity: str | None = None,
    output: OutputPart = None,
    weights: bool = True,
    aligned: Any = None,
    progress: Progress | bool | None = None,
) -> Diagnosis:
    """R-hat and effective sample sizes in function space and in weight space.

    Args:
        model: the function; None to look at weights only.
        population: draws of several chains (`population.chain`); at least 4 of each.
        inputs: where functions are compared, as in `predict`; None without a model.
        quantity: "probabilities" applies a softmax, "values" takes outputs as they are; by default probabilities for
            draws of a run of `sample` with classes, and values for all others, as the result says.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        weights: whether weights are looked at.
        aligned: what `align` returned, or the same networks after it, in the same order, whose weights are looked at
            as well: chains that agree as functions agree as weights only once their symmetries are gone.
        progress: True for a line on stderr with the time left, or a function that is called with (parts done, parts,
            which part): the functions, then every tensor.
    """
    if quantity not in (None, "probabilities", "values"):
        near = "probabilities" if str(quantity).startswith("p") else "values"
        raise InputError(f'expected quantity "probabilities" or "values", found {quantity!r}: give quantity="{near}"')
    if (model is None) != (inputs is None):
        raise InputError(
            "expected a model and inputs, found one of them: functions are compared with both; give None for both to "
            "look at weights only"
        )
    check_population(population)
    rows = chain_rows(population)
    aligned = getattr(aligned, "population", aligned)  # of an Alignment
    if aligned is not None:
        check_population(aligned)
        check_spec(aligned.spec, population.spec, where="the aligned population, compared with the other,")
        if len(aligned) != len(population):
            raise InputError(
                f"expected the same {len(population)} networks aligned, found {len(aligned)}: give "
                "align(population, symmetry).population"
            )
    real = [name for name, tensor in population.spec.items() if tensor.dtype.is_floating_point] if weights else []
    parts = [*([] if model is None else ["functions"]), *real]

    listener = progress_of(progress)

    def show(part: str) -> None:
        if listener is not None:
            listener(parts.index(part), len(parts), part)

    def mixing_of(name: str) -> Mixing:
        show(name)
        return mixing(population.tensor(name)[rows])

    functions: Mixing | None = None
    traces: tuple[Trace, ...] = ()
    chosen, reasons = None, []
    if model is not None and inputs is not None:
        show("functions")
        model = select_output(model, output)
        values = predictions(model, population, inputs_of(inputs, model))
        chosen, reason = _compared_as(population, quantity, classes=values.dim() > 2 and values.shape[2] > 1)
        reasons.append(reason)
        if chosen == "probabilities":
            values = values.softmax(2 if values.dim() > 2 else -1)
        functions, traces = mixing(values[rows]), _traces(values[rows])
    each = {name: mixing_of(name) for name in real}
    varying = {name: one for name, one in each.items() if one.quantities}
    moved = {} if aligned is None else {name: mixing(aligned.tensor(name)[rows]) for name in varying}
    told = population.provenance.get("diagnostics", {})
    if population.chain is None:
        reasons.append(
            f"The population has no chain numbers: all {len(population):,} networks were taken for one chain, in their "
            "order, and R-hat compares its two halves only; give chain=, one number per network, where it is made."
        )
    return Diagnosis(functions, varying, rows.shape[0], rows.shape[1], told, moved, traces, chosen, tuple(reasons))


def _traces(values: Tensor) -> tuple[Trace, ...]:
    """The outputs (chains, draws, examples, ...) with the largest and with the median R-hat."""
    flat = values.flatten(2) if values.dim() > 2 else values[:, :, None]
    varying = (flat != flat[:1, :1]).flatten(0, 1).any(0).nonzero()[:, 0]
    if not len(varying):
        return ()
    ratio = rhat(flat[:, :, varying]).nan_to_num(nan=float("inf"))
    order = ratio.argsort()
    chosen = dict.fromkeys((int(order[-1]), int(order[(len(order) - 1) // 2])))
    each = flat.shape[2] // values.shape[2] if values.dim() > 2 else 1
    return tuple(
        Trace.of(flat[:, :, varying[place]], f"output {int(varying[place]) % each} of example "
                 f"{int(varying[place]) // each}", float(ratio[place]))
        for place in chosen
    )  # fmt: skip


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
        _binned(ratio),
    )


def _binned(ratio: Tensor) -> tuple[int, ...]:
    """How many are in each bin of R-hat; NaN counts as infinite."""
    places = torch.bucketize(
        ratio.nan_to_num(nan=float("inf")).cpu(), torch.tensor(_EDGES, dtype=ratio.dtype), right=True
    )
    counts: list[int] = torch.bincount((places - 1).clamp(0, len(_EDGES) - 2), minlength=len(_EDGES) - 1).tolist()
    return tuple(counts)


def _largest(values: Tensor) -> float:
    """The largest entry; NaN counts as infinite."""
    return float(values.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf")).max())


def _compared_as(population: Population, wanted: str | None, *, classes: bool) -> tuple[str, str]:
    """What functions are compared as, and a sentence about it; `classes`: whether outputs may be those of classes."""
    likelihood = population.provenance.get("likelihood")
    of_classes = likelihood in ("categorical", "focal", "label_smoothing")
    quantity = wanted or ("probabilities" if of_classes else "values")
    if quantity == "probabilities":
        return quantity, "Functions were compared as probabilities: a softmax of what the model returns."
    unsure = classes and not wanted and not likelihood
    hint = '; of a classifier quantity="probabilities" compares what it predicts' if unsure else ""
    return quantity, f"Functions were compared as values: what the model returns, without a softmax{hint}."
