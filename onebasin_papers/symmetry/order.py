"""When do units change places during training? The order of units by their largest weight, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.numbers import mean_error, mean_line
from onebasin_papers.study import Workspace
from onebasin_papers.symmetry.networks import problem, symmetry
from onebasin_papers.symmetry.settings import SymmetrySettings
from onebasin_papers.verdicts import graded

report = ob.reporting

TITLE = "When do hidden units change places during training?"
STOPPED = 0.1  # of the changes in the first phase: what counts as stopped
_SIGMAS = 3.29  # p = 0.001, two-sided

_ANSWERS = {
    "reproduced": "While the learning rate is high, and no longer",
    "reproduced with a caveat": "Mostly while the learning rate is high",
    "not reproduced": "Not only while the learning rate is high",
}
Rate = tuple[float, float]  # mean and standard error over trainings


def part(workspace: Workspace[SymmetrySettings]) -> report.Section:
    """Train with a rate that falls in steps, and again with a constant one; compare orders of successive epochs."""
    settings = workspace.settings
    stepped, constant = (
        _exchange_shares(workspace, settings.order_rates, "stepped"),
        _exchange_shares(workspace, settings.order_rates[:1], "constant"),
    )
    swaps = {"rate falls in steps": stepped, "rate stays high": constant}
    phases = [_rates(table, settings) for table in swaps.values()]
    high, low, control = phases[0][0], phases[0][-1], phases[1][-1]
    verdict = order_verdict(high, low, control)
    first, last = settings.order_rates[0], settings.order_rates[-1]
    text = (
        f"{_ANSWERS[verdict]}: at rate {first:g} {_rate_text(high)} of all pairs of units exchange their order in an "
        "epoch, "
        f"at rate {last:g} {_rate_text(low)}. Trainings that keep the high rate exchange {_rate_text(control)} at the "
        "same age.",
        "The units of each hidden layer are ordered by their largest weight after every epoch. Kendall's tau between "
        f"successive orders counts pairs that changed sides: (1 - tau) / 2 is their share. {settings.order_networks} "
        f"trainings by SGD with momentum; the rate falls after every {settings.order_epochs} epochs. The second half "
        "of "
        "each phase is averaged, so that what is left of the phase before does not count.",
        "Changes also die out by themselves as training converges. The trainings at constant rate tell the two apart: "
        "same age, same start, no fall of the rate.",
    )
    claim = report.Claim(
        "Units change their order while the learning rate is high, and stop when it is low.",
        verdict,
        f"pairs exchanged per epoch: {_rate_text(high)} at rate {first:g}, {_rate_text(low)} at rate {last:g}, "
        f"{_rate_text(control)} "
        "at the same age with the high rate",
        "permutations happen mostly in phases of high learning rate, then stop",
        f"changes fall, but not below {100 * STOPPED:.0f} % of those at the high rate"
        if verdict.endswith("caveat")
        else "",
    )
    return report.Section("order", TITLE, text, (_figure(swaps, settings), _table(phases, settings)), (claim,))


def order_verdict(high: Rate, low: Rate, control: Rate) -> str:
    """Reproduced if changes at the low rate are under a tenth of those at the high one, and fewer than in the control.

    Both by 3.29 standard errors; with a caveat if they are merely fewer than in both.

    >>> order_verdict((10.0, 0.5), (0.2, 0.05), (6.0, 0.5)), order_verdict((10.0, 0.5), (3.0, 0.2), (6.0, 0.5))
    ('reproduced', 'reproduced with a caveat')
    >>> order_verdict((10.0, 0.5), (0.2, 0.05), (0.2, 0.05)), order_verdict((1.0, 0.5), (0.9, 0.5), (6.0, 0.5))
    ('not reproduced', 'not reproduced')
    """
    fewer = all(_above(more, low) for more in (high, control))
    return graded(fewer and _above((STOPPED * high[0], STOPPED * high[1]), low), fewer)


def _above(more: Rate, less: Rate) -> bool:
    return more[0] - less[0] > _SIGMAS * math.hypot(more[1], less[1])


def _rate_text(rate: Rate) -> str:
    return f"{rate[0]:.2g} ± {rate[1]:.1g} %"


def _exchange_shares(workspace: Workspace[SymmetrySettings], rates: Sequence[float], name: str) -> Tensor:
    """Share of pairs of units that change sides in an epoch, in per cent: (trainings, epochs - 1)."""
    settings = workspace.settings
    populations: list[ob.Population] = []
    for phase in range(len(settings.order_rates)):
        rate = rates[min(phase, len(rates) - 1)]
        kind = name if phase else "first"  # both kinds share their first phase
        populations.append(_phase(workspace, f"order-{kind}-{phase}", rate, populations[-1] if populations else None))
    shares: list[Tensor] = []
    for orders in zip(*(_orders(workspace, population) for population in populations), strict=True):
        ranks = torch.cat([table.argsort(-1) for table in orders], 1)  # (trainings, epochs, copies, units)
        shares.append(50 * (1 - ob.metrics.kendall_tau(ranks[:, 1:], ranks[:, :-1])).mean(-1))
    return torch.stack(shares).mean(0)


def _phase(
    workspace: Workspace[SymmetrySettings], name: str, rate: float, before: ob.Population | None
) -> ob.Population:
    """Networks after every epoch of a phase; it begins where the one before has ended."""
    settings, task = workspace.settings, problem(workspace)
    method = ob.Ensemble(
        draws=settings.order_epochs, epochs=1, every=1, batch=settings.batch, lr=rate, optimizer="sgd", momentum=0.9
    )
    return workspace.sample(
        name,
        task.model,
        task.train,
        method,
        chains=settings.order_networks,
        chains_per_batch=settings.lanes,
        start="fresh" if before is None else before[settings.order_epochs - 1 :: settings.order_epochs],
        prior=settings.prior,
        compile=False,
    )


def _orders(workspace: Workspace[SymmetrySettings], population: ob.Population) -> list[Tensor]:
    """Units of every space in the order of their largest weight: (trainings, epochs, copies, units) each."""
    orders = ob.canonicalise(population, symmetry(workspace), scale="keep", order="max").element.orders
    several = [name for name, table in orders.items() if table.shape[-1] > 1]
    return [orders[name].reshape(workspace.settings.order_networks, -1, *_copies(orders[name])) for name in several]


def _copies(table: Tensor) -> tuple[int, int]:
    return math.prod(table.shape[1:-1]), table.shape[-1]


def _rates(swaps: Tensor, settings: SymmetrySettings) -> list[Rate]:
    """Mean over the second half of every phase, with its standard error over trainings."""
    rates = []
    for phase in range(len(settings.order_rates)):
        last = (phase + 1) * settings.order_epochs - 1  # the first column compares epochs 1 and 2
        mean, error = mean_error(swaps[:, last - settings.order_epochs // 2 : last].mean(1).tolist())
        rates.append((mean, math.inf if error is None else error))
    return rates


def _figure(swaps: dict[str, Tensor], settings: SymmetrySettings) -> report.Figure:
    series = tuple(
        mean_line(name, range(2, table.shape[1] + 2), table.T.tolist(), dashed=place > 0, digits=6)
        for place, (name, table) in enumerate(swaps.items())
    )
    falls = tuple(
        report.Rule(f"rate {rate:g}", phase * settings.order_epochs + 0.5, "vertical")
        for phase, rate in enumerate(settings.order_rates)
        if phase
    )
    axes = report.Axis("epoch", low=0), report.Axis("pairs that changed sides, %", low=0)
    return report.Figure(
        "order-changes",
        "How many pairs of units change sides in an epoch?",
        f"Mean over {settings.order_networks} trainings and all hidden layers, with a band of one standard error. "
        "Vertical "
        f"lines: the learning rate falls, from {settings.order_rates[0]:g}. Dashed: it does not.",
        (report.Panel("lines", "the learning rate falls at the vertical lines", *axes, series, falls),),
    )


def _table(phases: Sequence[Sequence[Rate]], settings: SymmetrySettings) -> report.Table:
    rows = tuple(
        (f"{phase + 1}", report.Number(rate), report.Number(*stepped), report.Number(*constant))
        for phase, (rate, stepped, constant) in enumerate(zip(settings.order_rates, *phases, strict=True))
    )
    return report.Table(
        "order-phases",
        "How many pairs of units change sides in an epoch?",
        (
            report.Column("phase"),
            report.Column("rate", "learning rate of SGD where it falls", "", 3),
            report.Column("it falls", "pairs that changed sides in an epoch, second half of the phase", "", 3, "%"),
            report.Column("it stays", "the same in trainings that keep the first rate", "", 3, "%"),
        ),
        rows,
        errors=f"± one standard error over {settings.order_networks} trainings",
    )
