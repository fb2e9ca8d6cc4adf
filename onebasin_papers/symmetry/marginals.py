"""The corollary of equal marginals: is every unit of a layer equally likely to hold the largest weight?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

import onebasin as ob
from onebasin_papers.study import Workspace
from onebasin_papers.symmetry.networks import METHODS, hmc, one_mode, reference, runs_of, symmetry
from onebasin_papers.symmetry.settings import SymmetrySettings
from onebasin_papers.verdicts import graded

report = ob.reporting

TITLE = "Does every hidden unit play the same role?"
# Which of 16 units holds the largest weight in 753 networks; bar heights read off the paper's poster.
PUBLISHED = {
    "independent trainings": (45, 49, 46, 43, 45, 54, 47, 56, 38, 47, 50, 44, 41, 44, 51, 53),
    "HMC, all chains": (33, 144, 0, 0, 64, 30, 6, 34, 8, 44, 213, 112, 40, 7, 0, 18),
}
_LEVEL = 0.01  # of the comparison of early and late means
_SINGLE = ("sghmc", "swag")  # further methods that are asked run by run


@dataclass(frozen=True, eq=False)
class Trial:
    """One kind of population.

    Attributes:
        name: in tables.
        tests: for each population of this kind, which unit holds the largest weight.
        persistence: for each, whether units of the first layer keep their roles.
    """

    name: str
    tests: tuple[ob.Exchangeability, ...]
    persistence: tuple[ob.Persistence, ...]

    @property
    def rejected(self) -> int:
        """Populations in which some layer has units that are not alike."""
        return sum(any(row.verdict == "rejected" for row in test.rows) for test in self.tests)

    @property
    def failed(self) -> bool:
        """Whether either test rejects."""
        return self.rejected + self.persistent > 0

    @property
    def persistent(self) -> int:
        """Populations in which units keep their roles from the first draws to the last."""
        return sum(test.p < _LEVEL for test in self.persistence)

    @property
    def correlation(self) -> float:
        """Of early and late means of weights; the median over populations."""
        return statistics.median(test.correlation for test in self.persistence)

    @cached_property
    def crude(self) -> float:
        """Chi-square of the first layer as if all draws were independent; the median over populations."""
        rows = [test.rows[0] for test in self.tests]
        return statistics.median(row.statistic * row.members / row.effective for row in rows)

    def cells(self) -> tuple[str | report.Number, ...]:
        """A row of the table."""
        rows = [test.rows[0] for test in self.tests]
        published = {name: ob.uniformity(torch.tensor(count)).statistic for name, count in PUBLISHED.items()}
        return (
            self.name,
            report.Number(len(rows)),
            report.Number(statistics.median(row.members for row in rows)),
            report.Number(statistics.median(row.effective for row in rows)),
            report.Number(self.crude, published=published.get(self.name)),
            report.Number(statistics.median(row.statistic for row in rows)),
            report.Number(rows[0].freedom, published=15.0 if self.name in published else None),
            f"{self.rejected} of {len(rows)}",
            report.Number(self.correlation),
            f"{self.persistent} of {len(rows)}",
        )


def part(workspace: Workspace[SymmetrySettings]) -> report.Section:
    """Ask independent trainings and single chains whether their units are alike."""
    own = {title: runs_of(workspace, title) for title in workspace.own.methods}  # a mistake in them shows at once
    trained, chains = reference(workspace), hmc(workspace)
    alone = replace(trained, chain=torch.full((len(trained),), -1))
    trials = [
        _trial(workspace, "independent trainings", [alone]),
        _trial(workspace, "HMC, all chains", [chains]),
        _trial(workspace, "HMC, each chain", _runs(chains)),
        *(_trial(workspace, f"{METHODS[method]}, each run", _runs(runs_of(workspace, method))) for method in _SINGLE),
    ]
    own_trials = [_trial(workspace, f"{title}, each run", _runs(runs)) for title, runs in own.items()]
    independent, pooled, single = trials[0], trials[1], trials[2]
    layer = independent.tests[0].rows[0]
    text = (
        f"Across independent trainings {'no' if independent.failed else 'yes'}: the unit of the first hidden layer "
        f"with the largest weight is spread over {len(trained):,} trainings with chi-square {layer.statistic:.1f} on "
        f"{layer.freedom} degrees of freedom (p = {layer.p:.2g}). Within one chain of HMC "
        f"{_alike(single.persistent, len(single.persistence))}: in {single.persistent} of {len(single.persistence)} "
        "chains units "
        f"keep their roles from the first draws to the last (correlation {single.correlation:.2f}; "
        f"{independent.correlation:.2f} between trainings).",
        "Prior, initialisation and optimiser do not tell the units of a layer apart, so the true posterior cannot "
        "either. A sampler that has explored it finds each unit in each role equally often. A chain that stays where "
        "it began does not: it knows one of the equivalent copies only. Predictions do not suffer from that, averages "
        "of weights do.",
        "The paper counts which unit holds the largest weight. Taken as if draws were independent, our chains of HMC "
        f"give chi-square {pooled.crude:,.0f} together; draws remember their predecessors, though, and divided by "
        f"their autocorrelation time it is {pooled.tests[0].rows[0].statistic:.0f}, so that equal roles are "
        f"{'rejected' if pooled.rejected else 'not rejected'} for all chains together, and for {single.rejected} of "
        f"{len(single.tests)} single ones.",
        "This count sees only the unit that stands out, so we also compare early and late means of all incoming "
        "weights of every unit, over the first and the last two fifths of the draws. Their p-value comes from "
        "relabelling the late units at random; memory that is shorter than the fifth between them cannot spoil it.",
    )
    items = (_figure(trials), _table([*trials, *own_trials]))
    return report.Section("marginals", TITLE, text, items, _claims(trials))


def _alike(failing: int, chains: int) -> str:
    """Whether units are alike within chains.

    >>> _alike(0, 8), _alike(2, 8), _alike(5, 8)
    ('yes', 'mostly yes', 'no')
    """
    return "no" if 2 * failing > chains else "mostly yes" if failing else "yes"


def _runs(population: ob.Population) -> list[ob.Population]:
    """A population, chain by chain."""
    return (
        [population]
        if population.chain is None
        else [one_mode(population, int(run)) for run in population.chain.unique()]
    )


def _trial(workspace: Workspace[SymmetrySettings], name: str, populations: Sequence[ob.Population]) -> Trial:
    first = next(name for name, tensor in populations[0].spec.items() if len(tensor.shape) > 1)
    tests = tuple(
        ob.exchangeability(population, symmetry(workspace), seed=workspace.seed) for population in populations
    )
    return Trial(
        name, tests, tuple(ob.persistence(population.tensor(first), seed=workspace.seed) for population in populations)
    )


def equal_verdict(independent_failed: bool, rejected: int, persistent: int, singles: int) -> str:
    """Reproduced if independent trainings pass both tests and every single chain fails that of the paper.

    With a caveat if every single chain fails at least the sharper test, that units keep their roles.

    >>> equal_verdict(False, 8, 8, 8), equal_verdict(False, 3, 8, 8)
    ('reproduced', 'reproduced with a caveat')
    >>> equal_verdict(False, 3, 7, 8), equal_verdict(True, 8, 8, 8)
    ('not reproduced', 'not reproduced')
    """
    fails = not independent_failed and max(rejected, persistent) >= singles
    return graded(fails and rejected == singles, fails)


def _claims(trials: Sequence[Trial]) -> tuple[report.Claim, ...]:
    independent, _, single, *approximations = trials
    claims = []
    for what, group in (("chains of HMC", (single,)), ("runs of SGHMC and SWAG", tuple(approximations))):
        tested = sum(len(trial.tests) for trial in group)
        rejected, persistent = (sum(getattr(trial, how) for trial in group) for how in ("rejected", "persistent"))
        verdict = equal_verdict(independent.failed, rejected, persistent, tested)
        caveat = (
            f"the paper's count, corrected for the memory of draws, rejects {rejected} of {tested}; that units keep "
            f"their roles is found in {persistent} of {tested}"
        )
        claims.append(
            report.Claim(
                f"All units of a layer have equal marginals over independent trainings, and not within single {what}.",
                verdict,
                f"independent trainings {'fail' if independent.failed else 'pass'} both tests; of {tested} {what} "
                f"{rejected} fail the count of the largest weight, {persistent} the comparison of early and late means",
                "chi-square 7.5 on 15 degrees of freedom over trainings, 1157 over three chains of HMC, not corrected",
                caveat if verdict == "reproduced with a caveat" else "",
            )
        )
    return tuple(claims)


def _bars(name: str, counts: Sequence[int], shade: int) -> report.Series:
    total = sum(counts)
    return report.Series(
        name,
        tuple(float(place) for place in range(len(counts))),
        tuple(round(100 * count / total, 3) for count in counts),
        shade=shade,
    )


def _figure(trials: Sequence[Trial]) -> report.Figure:
    space = trials[0].tests[0].rows[0].space
    names = ("independent trainings", "HMC, all chains", "HMC, one chain")
    ours = {name: trial.tests[0].counts[space].sum(0).tolist() for name, trial in zip(names, trials[:3], strict=True)}
    panels = []
    for title, counts_of in (("here: first hidden layer", ours), ("published: ResNet-20", PUBLISHED)):
        units = len(next(iter(counts_of.values())))
        x = report.Axis("number of the unit", names=tuple(str(unit) for unit in range(units)))
        bars = tuple(_bars(name, counts, shade) for shade, (name, counts) in enumerate(counts_of.items()))
        rule = report.Rule("equal", round(100 / units, 3))
        panels.append(
            report.Panel("bars", title, x, report.Axis("holds the largest weight, % of networks", low=0), bars, (rule,))
        )
    most = {name: 100 * max(counts) / sum(counts) for name, counts in ours.items()}
    shares = ", ".join(f"{share:.0f} % ({name})" for name, share in most.items())
    return report.Figure(
        "marginals-counts",
        "Which unit holds the largest weight?",
        f"Equal roles give every unit {100 / len(next(iter(ours.values()))):.1f} %. The most frequent unit has "
        f"{shares}. "
        "Weights are compared in units of the mean magnitude of their layer.",
        tuple(panels),
    )


def _table(trials: Sequence[Trial]) -> report.Table:
    return report.Table(
        "marginals-tests",
        "Are the units of a layer alike?",
        (
            report.Column("population"),
            report.Column("populations", "how many populations of this kind were tested, each by itself", digits=0),
            report.Column("networks", "in each", digits=0),
            report.Column(
                "effective", "independent networks that would tell as much, for the first hidden layer", digits=0
            ),
            report.Column(
                "chi-square", "of the counts of the first hidden layer, as if all draws were independent", digits=1
            ),
            report.Column("corrected", "chi-square divided by the autocorrelation time of the draws", digits=1),
            report.Column("freedom", "what chi-square would be on average if units were alike", digits=0),
            report.Column(
                "rejected",
                "populations in which some layer is rejected at 5 %, corrected for the number of layers (Holm)",
            ),
            report.Column(
                "roles", "correlation over units of early and late means of incoming weights, first layer", digits=2
            ),
            report.Column("roles kept", "populations in which it is larger than relabelling explains, at 1 %"),
        ),
        tuple(trial.cells() for trial in trials),
        note="Where several populations were tested, numbers are medians over them. Published: ResNet-20 on "
        "CIFAR-10 with 753 networks, read off a figure.",
    )
