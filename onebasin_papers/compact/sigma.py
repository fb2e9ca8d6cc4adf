"""Part five: the standard deviation of every weight. The left panels of the paper's figure 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import (
    FORM_KEYS,
    CompactWorkspace,
    Setting,
    forms,
    hmc,
    setting,
    variational,
    weight_mixing,
)
from onebasin_papers.numbers import mean_number, mean_text
from onebasin_papers.study import Part
from onebasin_papers.verdicts import graded, smaller

report = ob.reporting

NAME, TITLE = "sigma", "How uncertain is every single weight, and how much of that is the prior?"
_BINS = 80
_TOLERANCE = 0.1  # how close to the prior's standard deviation counts as being there
_MOST = 0.5  # of the weights


@dataclass(frozen=True)
class WeightDeviations:
    """Standard deviations of all weights of one posterior, in units of the prior's.

    Attributes:
        std: of every weight (D,).
        unused: share of weights that also have the prior's mean.
    """

    std: Tensor
    unused: float

    @property
    def mean(self) -> float:
        """Over all weights."""
        return float(self.std.mean())

    @property
    def at_prior(self) -> float:
        """Share of weights within `_TOLERANCE` of the prior."""
        return float(((self.std - 1).abs() < _TOLERANCE).double().mean())

    def quantile(self, level: float) -> float:
        """Of the standard deviations, by order: torch's own refuses more than 16 million weights."""
        ordered = self.std.sort().values
        return float(ordered[round(level * (len(ordered) - 1))])


Results = Mapping[str, Sequence[WeightDeviations]]


def run(workspace: CompactWorkspace) -> report.Section:
    """Look at all standard deviations."""
    here, settings = setting(workspace), workspace.settings
    results: dict[str, list[WeightDeviations]] = {}
    for method, runs in (("HMC", settings.hmc_runs), ("Ensemble", settings.seeds)):
        for seed in range(runs):
            compact_forms = forms(workspace, method.lower(), seed)
            results.setdefault(f"{method} q_d", []).append(_deviations(compact_forms.raw, settings.prior))
            results.setdefault(f"{method} q_r", []).append(_deviations(compact_forms.rebased, settings.prior))
    results["VI q"] = [_deviations(variational(workspace, seed), settings.prior) for seed in range(settings.seeds)]
    for title in workspace.own.methods:
        own = [forms(workspace, title, seed) for seed in range(settings.hmc_runs)]
        results[f"{title} q_d"] = [_deviations(one.raw, settings.prior) for one in own]
        results[f"{title} q_r"] = [_deviations(one.rebased, settings.prior) for one in own]
    chances = _chance_ranges(workspace)
    items = (_figure(results, chances, tuple(workspace.own.methods)), _table(results, chances))
    return report.Section(NAME, TITLE, _text(here, results, chances), items, (_lower(results), _at_prior(results)))


PART = Part(NAME, TITLE, run, FORM_KEYS)


@dataclass(frozen=True)
class ChanceRange:
    """What draws from the prior alone would show.

    Attributes:
        name: how many draws, in words.
        low, high: 5 % and 95 % quantile of their standard deviation over the prior's.
    """

    name: str
    low: float
    high: float

    @property
    def width(self) -> float:
        """From the 5 % to the 95 % quantile."""
        return self.high - self.low


def _chance_ranges(workspace: CompactWorkspace) -> tuple[ChanceRange, ChanceRange]:
    """As many independent draws as there are samples, and as many as these are worth."""
    samples = hmc(workspace, 0)
    form = forms(workspace, "hmc", 0).raw
    worth = max(4.0, min(float(len(samples)), weight_mixing(samples).median_bulk))
    every, few = (
        ChanceRange(
            f"{count:.0f} draws from the prior", *ob.prior_shares(form, workspace.settings.prior, networks=count).spread
        )
        for count in (float(len(samples)), worth)
    )
    return every, few


def _deviations(posterior: ob.Posterior, prior: float) -> WeightDeviations:
    share = ob.prior_shares(posterior, prior, tolerance=_TOLERANCE).total
    return WeightDeviations((posterior.flat_std / prior).float(), share)


def _text(here: Setting, results: Results, chances: tuple[ChanceRange, ChanceRange]) -> tuple[str, ...]:
    shares = {
        name: mean_text([100 * deviations.at_prior for deviations in results[name]], 1) for name in ("HMC q_r", "VI q")
    }
    width = fmean([deviations.quantile(0.95) - deviations.quantile(0.05) for deviations in results["HMC q_r"]])
    every, few = chances
    return (
        f"{shares['HMC q_r']} % of the weights of HMC and {shares['VI q']} % of those of variational inference have a "
        f"standard deviation within {_TOLERANCE:g} of the prior's (published: 99.5 and 81 %); about such weights the "
        "data say little. On average rebasin changes it from "
        f"{mean_text([deviations.mean for deviations in results['HMC q_d']])} to "
        f"{mean_text([deviations.mean for deviations in results['HMC q_r']])} (HMC) and from "
        f"{mean_text([deviations.mean for deviations in results['Ensemble q_d']])} to "
        f"{mean_text([deviations.mean for deviations in results['Ensemble q_r']])} "
        "(ensemble), in units of the prior's.",
        f"The standard deviations of HMC after rebasin spread over {width:.3f} (5 to 95 %). {every.name} would spread "
        f"over {every.width:.3f} by chance, and {few.name}, which is what the samples are worth, over {few.width:.3f}: "
        "to that extent a ranking of weights by their standard deviation is a ranking by chance.",
        f"Standard deviations of {len(results['VI q'][0].std):,} weights ({here.widths}, {here.problem.name}), over "
        "samples as they came (q_d) and after rebasin to the first by activations (q_r).",
    )


def _figure(results: Results, chances: tuple[ChanceRange, ChanceRange], own: tuple[str, ...]) -> report.Figure:
    panels = []
    for method in ("HMC", "Ensemble", "VI", *own):
        names = [name for name in (f"{method} q_d", f"{method} q_r", f"{method} q") if name in results]
        top = max(float(deviations.std.max()) for name in names for deviations in results[name])
        edges = torch.linspace(0, 1.02 * top, _BINS + 1)
        series = tuple(
            _histogram(name, results[name], edges, shade=2 if name == "VI q" else int(name.endswith("q_r")))
            for name in names
        )
        rules: tuple[report.Rule, ...] = (report.Rule("prior", 1.0, "vertical"),)
        if method == "HMC":
            few = chances[1]
            rules += (report.Rule("", few.low, "vertical"), report.Rule("", few.high, "vertical"))
        x = report.Axis("standard deviation / the prior's", low=0)
        panels.append(report.Panel("histogram", method, x, report.Axis("weights", scale="log"), series, rules))
    return report.Figure(
        "sigma-histograms",
        "How uncertain are single weights, before and after rebasin?",
        f"Counts in {_BINS} bins, averaged over seeds, on a logarithmic scale. For HMC the two outer lines are the 5 "
        f"and 95 % quantiles of {chances[1].name}, which is what chance alone would give.",
        tuple(panels),
    )


def _histogram(name: str, runs: Sequence[WeightDeviations], edges: Tensor, shade: int) -> report.Series:
    counts = sum(torch.histogram(deviations.std, edges).hist for deviations in runs) / len(runs)
    heights = tuple(round(float(count), 3) if count > 0 else None for count in torch.as_tensor(counts))
    return report.Series(name, tuple(round(float(edge), 5) for edge in edges), heights, shade=shade)


_COLUMNS = (
    report.Column("form", "whose standard deviations"),
    report.Column("mean", "mean standard deviation over all weights, in units of the prior's"),
    report.Column("5 %", "5 % quantile over all weights"),
    report.Column("median", "median over all weights"),
    report.Column("95 %", "95 % quantile over all weights"),
    report.Column(
        "at the prior", f"share of weights whose standard deviation is within {_TOLERANCE:g} of the prior's", digits=3
    ),
    report.Column("unused", "share of weights that also have a mean within a tenth of the prior's deviation", digits=3),
)


def _table(results: Results, chances: tuple[ChanceRange, ChanceRange]) -> report.Table:
    rows = []
    for name, runs in results.items():
        paper = published.SIGMA.get(name, published.Widths(*[None] * 5))
        rows.append(
            (
                name,
                mean_number([deviations.mean for deviations in runs], paper.mean),
                mean_number([deviations.quantile(0.05) for deviations in runs], paper.low),
                mean_number([deviations.quantile(0.5) for deviations in runs], paper.median),
                mean_number([deviations.quantile(0.95) for deviations in runs], paper.high),
                mean_number([deviations.at_prior for deviations in runs], paper.at_prior),
                mean_number([deviations.unused for deviations in runs]),
            )
        )
    return report.Table(
        "sigma-table",
        "Standard deviations of all weights, in units of the prior's",
        _COLUMNS,
        (
            *rows,
            *(
                (deviations.name, None, report.Number(deviations.low), None, report.Number(deviations.high), None, None)
                for deviations in chances
            ),
        ),
        f"± one standard error over {max(map(len, results.values()))} seeds",
        "Published values are for MNIST 784-512-10, read off a histogram to its bins of 0.01. The last two rows are "
        "what as many independent draws from the prior would show: the number of HMC samples, and their effective "
        "number.",
    )


def _lower(results: Results) -> report.Claim:
    pairs = {
        method: (
            [deviations.mean for deviations in results[f"{method} q_r"]],
            [deviations.mean for deviations in results[f"{method} q_d"]],
        )
        for method in ("HMC", "Ensemble")
    }
    held = [smaller(*pair) for pair in pairs.values()]
    return report.Claim(
        "Rebasin lowers the standard deviations of weights.",
        graded(all(held), any(held)),
        "; ".join(
            f"{method} {mean_text(before, 4)} -> {mean_text(after, 4)}" for method, (after, before) in pairs.items()
        )
        + " on average (criterion: in every run, by more than three standard errors, for both)",
        "HMC 0.998 -> 0.993; ensemble 0.041 -> 0.029",
        _only(pairs, held),
    )


def _at_prior(results: Results) -> report.Claim:
    shares = {name: [deviations.at_prior for deviations in results[name]] for name in ("HMC q_r", "VI q")}
    held = [min(values) > _MOST for values in shares.values()]
    return report.Claim(
        "Under HMC and variational inference most weights have the standard deviation of the prior: they are not used.",
        graded(all(held), any(held)),
        "; ".join(f"{name} {mean_text([100 * value for value in values], 1)} %" for name, values in shares.items())
        + f" of the weights within {_TOLERANCE:g} (criterion: more than {_MOST:.0%} in every run, for both)",
        "HMC 99.5 %, VI 81 %",
        _only(shares, held),
    )


def _only(names: Iterable[str], held: Sequence[bool]) -> str:
    """A caveat where some of the methods do what is claimed, and others do not."""
    which = [name for name, holds in zip(names, held, strict=True) if holds]
    return f"This holds for {which[0]} only." if which and not all(held) else ""
