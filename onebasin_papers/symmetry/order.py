"""When do units change places during training? The order of units by their largest weight, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.numbers import line, mean_error
from onebasin_papers.study import Bench
from onebasin_papers.symmetry.networks import problem, symmetry
from onebasin_papers.symmetry.presets import SymmetryPlan

TITLE = "When do hidden units change places during training?"
STOPPED = 0.1  # of the changes in the first phase: what counts as stopped
_SIGMAS = 3.29  # p = 0.001, two-sided

_ANSWERS = {
    "reproduced": "While the learning rate is high, and no longer",
    "reproduced with a caveat": "Mostly while the learning rate is high",
    "not reproduced": "Not only while the learning rate is high",
}
Rate = tuple[float, float]  # mean and standard error over trainings


def part(bench: Bench[SymmetryPlan]) -> ob.reporting.Section:
    """Train with a rate that falls in steps, and again with a constant one; compare orders of successive epochs."""
    plan = bench.plan
    stepped, constant = _watched(bench, plan.order_rates, "stepped"), _watched(bench, plan.order_rates[:1], "constant")
    swaps = {"rate falls in steps": stepped, "rate stays high": constant}
    phases = [_rates(table, plan) for table in swaps.values()]
    high, low, control = phases[0][0], phases[0][-1], phases[1][-1]
    verdict = order_verdict(high, low, control)
    first, last = plan.order_rates[0], plan.order_rates[-1]
    text = (
        f"{_ANSWERS[verdict]}: at rate {first:g} {_told(high)} of all pairs of units exchange their order in an epoch, "
        f"at rate {last:g} {_told(low)}. Trainings that keep the high rate exchange {_told(control)} at the same age.",
        "The units of each hidden layer are ordered by their largest weight after every epoch. Kendall's tau between "
        f"successive orders counts pairs that changed sides: (1 - tau) / 2 is their share. {plan.order_networks} "
        f"trainings by SGD with momentum; the rate falls after every {plan.order_epochs} epochs. The second half of "
        "each phase is averaged, so that what is left of the phase before does not count.",
        "Changes also die out by themselves as training converges. The trainings at constant rate tell the two apart: "
        "same age, same start, no fall of the rate.",
    )
    claim = ob.reporting.Claim(
        "Units change their order while the learning rate is high, and stop when it is low.",
        verdict,
        f"pairs exchanged per epoch: {_told(high)} at rate {first:g}, {_told(low)} at rate {last:g}, {_told(control)} "
        "at the same age with the high rate",
        "permutations happen mostly in phases of high learning rate, then stop",
        f"changes fall, but not below {100 * STOPPED:.0f} % of those at the high rate"
        if verdict.endswith("caveat")
        else "",
    )
    return ob.reporting.Section("order", TITLE, text, (_figure(swaps, plan), _table(phases, plan)), (claim,))


def order_verdict(high: Rate, low: Rate, control: Rate) -> str:
    """Reproduced if changes at the low rate are under a tenth of those at the high one, and fewer than in the control.

    Both by 3.29 standard errors; with a caveat if they are merely fewer than in both.

    >>> order_verdict((10.0, 0.5), (0.2, 0.05), (6.0, 0.5)), order_verdict((10.0, 0.5), (3.0, 0.2), (6.0, 0.5))
    ('reproduced', 'reproduced with a caveat')
    >>> order_verdict((10.0, 0.5), (0.2, 0.05), (0.2, 0.05)), order_verdict((1.0, 0.5), (0.9, 0.5), (6.0, 0.5))
    ('not reproduced', 'not reproduced')
    """
    if not all(_above(more, low) for more in (high, control)):
        return "not reproduced"
    return "reproduced" if _above((STOPPED * high[0], STOPPED * high[1]), low) else "reproduced with a caveat"


def _above(more: Rate, less: Rate) -> bool:
    return more[0] - less[0] > _SIGMAS * math.hypot(more[1], less[1])


def _told(rate: Rate) -> str:
    return f"{rate[0]:.2g} ± {rate[1]:.1g} %"


def _watched(bench: Bench[SymmetryPlan], rates: Sequence[float], name: str) -> Tensor:
    """Share of pairs of units that change sides in an epoch, in per cent: (trainings, epochs - 1)."""
    plan = bench.plan
    populations: list[ob.Population] = []
    for phase in range(len(plan.order_rates)):
        rate = rates[min(phase, len(rates) - 1)]
        kind = name if phase else "first"  # both kinds share their first phase
        populations.append(_phase(bench, f"order-{kind}-{phase}", rate, populations[-1] if populations else None))
    shares: list[Tensor] = []
    for orders in zip(*(_orders(bench, population) for population in populations), strict=True):
        ranks = torch.cat([table.argsort(-1) for table in orders], 1)  # (trainings, epochs, copies, units)
        shares.append(50 * (1 - ob.metrics.kendall_tau(ranks[:, 1:], ranks[:, :-1])).mean(-1))
    return torch.stack(shares).mean(0)


def _phase(bench: Bench[SymmetryPlan], name: str, rate: float, before: ob.Population | None) -> ob.Population:
    """Networks after every epoch of a phase; it begins where the one before has ended."""
    plan, own = bench.plan, problem(bench)
    method = ob.Ensemble(
        draws=plan.order_epochs, epochs=1, every=1, batch=plan.batch, lr=rate, optimizer="sgd", momentum=0.9
    )
    options = {"chains": plan.order_networks, "prior": plan.prior, "compile": False, "chains_per_batch": plan.lanes}
    begun = {} if before is None else {"start": before[plan.order_epochs - 1 :: plan.order_epochs]}
    return bench.networks(name, own.model, own.train, method, {**options, **begun})


def _orders(bench: Bench[SymmetryPlan], population: ob.Population) -> list[Tensor]:
    """Units of every space in the order of their largest weight: (trainings, epochs, copies, units) each."""
    found = ob.canonicalise(population, symmetry(bench), scale="keep", order="max").element.orders
    several = [name for name, table in found.items() if table.shape[-1] > 1]
    return [found[name].reshape(bench.plan.order_networks, -1, *_copies(found[name])) for name in several]


def _copies(table: Tensor) -> tuple[int, int]:
    return math.prod(table.shape[1:-1]), table.shape[-1]


def _rates(swaps: Tensor, plan: SymmetryPlan) -> list[Rate]:
    """Mean over the second half of every phase, with its standard error over trainings."""
    found = []
    for phase in range(len(plan.order_rates)):
        last = (phase + 1) * plan.order_epochs - 1  # the first column compares epochs 1 and 2
        mean, error = mean_error(swaps[:, last - plan.order_epochs // 2 : last].mean(1).tolist())
        found.append((mean, math.inf if error is None else error))
    return found


def _figure(swaps: dict[str, Tensor], plan: SymmetryPlan) -> ob.reporting.Figure:
    series = tuple(
        line(name, range(2, table.shape[1] + 2), table.T.tolist(), dashed=place > 0, digits=6)
        for place, (name, table) in enumerate(swaps.items())
    )
    falls = tuple(
        ob.reporting.Rule(f"rate {rate:g}", phase * plan.order_epochs + 0.5, "vertical")
        for phase, rate in enumerate(plan.order_rates)
        if phase
    )
    axes = ob.reporting.Axis("epoch", low=0), ob.reporting.Axis("pairs that changed sides, %", low=0)
    return ob.reporting.Figure(
        "order-changes",
        "How many pairs of units change sides in an epoch?",
        f"Mean over {plan.order_networks} trainings and all hidden layers, with a band of one standard error. Vertical "
        f"lines: the learning rate falls, from {plan.order_rates[0]:g}. Dashed: it does not.",
        (ob.reporting.Panel("lines", "the learning rate falls at the vertical lines", *axes, series, falls),),
    )


def _table(phases: Sequence[Sequence[Rate]], plan: SymmetryPlan) -> ob.reporting.Table:
    rows = tuple(
        (f"{phase + 1}", ob.reporting.Number(rate), ob.reporting.Number(*stepped), ob.reporting.Number(*constant))
        for phase, (rate, stepped, constant) in enumerate(zip(plan.order_rates, *phases, strict=True))
    )
    return ob.reporting.Table(
        "order-phases",
        "How many pairs of units change sides in an epoch?",
        (
            ob.reporting.Column("phase"),
            ob.reporting.Column("rate", "learning rate of SGD where it falls", "", 3),
            ob.reporting.Column(
                "it falls", "pairs that changed sides in an epoch, second half of the phase", "", 3, "%"
            ),
            ob.reporting.Column("it stays", "the same in trainings that keep the first rate", "", 3, "%"),
        ),
        rows,
        errors=f"± one standard error over {plan.order_networks} trainings",
    )
