"""Part five: the standard deviation of every weight. The left panels of the paper's figure 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.compact import presets as published
from onebasin_papers.compact.mixing import weight_mixing
from onebasin_papers.compact.setting import Runs, Setting, forms, hmc, setting, variational
from onebasin_papers.compact.verdicts import graded, smaller
from onebasin_papers.numbers import measured, told
from onebasin_papers.study import Part

NAME, TITLE = "sigma", "How uncertain is every single weight, and how much of that is the prior?"
_BINS = 80
_TOLERANCE = 0.1  # how close to the prior's standard deviation counts as being there
_MOST = 0.5  # of the weights


@dataclass(frozen=True)
class Spread:
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


Found = Mapping[str, Sequence[Spread]]


def run(bench: Runs) -> ob.reporting.Section:
    """Look at all standard deviations."""
    here, plan = setting(bench), bench.plan
    found: dict[str, list[Spread]] = {}
    for method, runs in (("HMC", plan.hmc_runs), ("Ensemble", plan.seeds)):
        for seed in range(runs):
            own = forms(bench, method.lower(), seed)
            found.setdefault(f"{method} q_d", []).append(_spread(own.raw, plan.prior))
            found.setdefault(f"{method} q_r", []).append(_spread(own.rebased, plan.prior))
    found["VI q"] = [_spread(variational(bench, seed), plan.prior) for seed in range(plan.seeds)]
    chances = _chances(bench)
    items = (_figure(found, chances), _table(found, chances))
    return ob.reporting.Section(NAME, TITLE, _text(here, found, chances), items, (_lower(found), _at_prior(found)))


PART = Part(NAME, TITLE, run)


@dataclass(frozen=True)
class Chance:
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


def _chances(bench: Runs) -> tuple[Chance, Chance]:
    """As many independent draws as there are samples, and as many as these are worth."""
    samples = hmc(bench, 0)
    form = forms(bench, "hmc", 0).raw
    worth = max(4.0, min(float(len(samples)), weight_mixing(samples).median_bulk))
    every, few = (
        Chance(f"{count:.0f} draws from the prior", *ob.prior_shares(form, bench.plan.prior, networks=count).spread)
        for count in (float(len(samples)), worth)
    )
    return every, few


def _spread(posterior: ob.Posterior, prior: float) -> Spread:
    share = ob.prior_shares(posterior, prior, tolerance=_TOLERANCE).total
    return Spread((posterior.flat_std / prior).float(), share)


def _text(here: Setting, found: Found, chances: tuple[Chance, Chance]) -> tuple[str, ...]:
    shares = {name: told([100 * own.at_prior for own in found[name]], 1) for name in ("HMC q_r", "VI q")}
    width = fmean([own.quantile(0.95) - own.quantile(0.05) for own in found["HMC q_r"]])
    every, few = chances
    return (
        f"{shares['HMC q_r']} % of the weights of HMC and {shares['VI q']} % of those of variational inference have a "
        f"standard deviation within {_TOLERANCE:g} of the prior's (published: 99.5 and 81 %); about such weights the "
        f"data say little. On average rebasin changes it from {told([own.mean for own in found['HMC q_d']])} to "
        f"{told([own.mean for own in found['HMC q_r']])} (HMC) and from "
        f"{told([own.mean for own in found['Ensemble q_d']])} to {told([own.mean for own in found['Ensemble q_r']])} "
        "(ensemble), in units of the prior's.",
        f"The standard deviations of HMC after rebasin spread over {width:.3f} (5 to 95 %). {every.name} would spread "
        f"over {every.width:.3f} by chance, and {few.name}, which is what the samples are worth, over {few.width:.3f}: "
        "to that extent a ranking of weights by their standard deviation is a ranking by chance.",
        f"Standard deviations of {len(found['VI q'][0].std):,} weights ({here.widths}, {here.problem.name}), over "
        "samples as they came (q_d) and after rebasin to the first by activations (q_r).",
    )


def _figure(found: Found, chances: tuple[Chance, Chance]) -> ob.reporting.Figure:
    panels = []
    for method in ("HMC", "Ensemble", "VI"):
        names = [name for name in found if name.startswith(method)]
        top = max(float(own.std.max()) for name in names for own in found[name])
        edges = torch.linspace(0, 1.02 * top, _BINS + 1)
        series = tuple(
            _histogram(name, found[name], edges, shade=2 if name == "VI q" else int(name.endswith("q_r")))
            for name in names
        )
        rules: tuple[ob.reporting.Rule, ...] = (ob.reporting.Rule("prior", 1.0, "vertical"),)
        if method == "HMC":
            few = chances[1]
            rules += (
                ob.reporting.Rule("", few.low, "vertical"),
                ob.reporting.Rule("", few.high, "vertical"),
            )
        x = ob.reporting.Axis("standard deviation / the prior's", low=0)
        panels.append(
            ob.reporting.Panel("histogram", method, x, ob.reporting.Axis("weights", scale="log"), series, rules)
        )
    return ob.reporting.Figure(
        "sigma-histograms",
        "How uncertain are single weights, before and after rebasin?",
        f"Counts in {_BINS} bins, averaged over seeds, on a logarithmic scale. For HMC the two outer lines are the 5 "
        f"and 95 % quantiles of {chances[1].name}, which is what chance alone would give.",
        tuple(panels),
    )


def _histogram(name: str, runs: Sequence[Spread], edges: Tensor, shade: int) -> ob.reporting.Series:
    counts = sum(torch.histogram(own.std, edges).hist for own in runs) / len(runs)
    heights = tuple(round(float(count), 3) if count > 0 else None for count in torch.as_tensor(counts))
    return ob.reporting.Series(name, tuple(round(float(edge), 5) for edge in edges), heights, shade=shade)


_COLUMNS = (
    ob.reporting.Column("form", "whose standard deviations"),
    ob.reporting.Column("mean", "mean standard deviation over all weights, in units of the prior's"),
    ob.reporting.Column("5 %", "5 % quantile over all weights"),
    ob.reporting.Column("median", "median over all weights"),
    ob.reporting.Column("95 %", "95 % quantile over all weights"),
    ob.reporting.Column(
        "at the prior", f"share of weights whose standard deviation is within {_TOLERANCE:g} of the prior's", digits=3
    ),
    ob.reporting.Column(
        "unused", "share of weights that also have a mean within a tenth of the prior's deviation", digits=3
    ),
)


def _table(found: Found, chances: tuple[Chance, Chance]) -> ob.reporting.Table:
    rows = []
    for name, runs in found.items():
        paper = published.SIGMA[name]
        rows.append(
            (
                name,
                measured([own.mean for own in runs], paper.mean),
                measured([own.quantile(0.05) for own in runs], paper.low),
                measured([own.quantile(0.5) for own in runs], paper.median),
                measured([own.quantile(0.95) for own in runs], paper.high),
                measured([own.at_prior for own in runs], paper.at_prior),
                measured([own.unused for own in runs]),
            )
        )
    return ob.reporting.Table(
        "sigma-table",
        "Standard deviations of all weights, in units of the prior's",
        _COLUMNS,
        (
            *rows,
            *(
                (own.name, None, ob.reporting.Number(own.low), None, ob.reporting.Number(own.high), None, None)
                for own in chances
            ),
        ),
        f"± one standard error over {max(map(len, found.values()))} seeds",
        "Published values are for MNIST 784-512-10, read off a histogram to its bins of 0.01. The last two rows are "
        "what as many independent draws from the prior would show: the number of HMC samples, and their effective "
        "number.",
    )


def _lower(found: Found) -> ob.reporting.Claim:
    pairs = {
        method: ([own.mean for own in found[f"{method} q_r"]], [own.mean for own in found[f"{method} q_d"]])
        for method in ("HMC", "Ensemble")
    }
    held = [smaller(*pair) for pair in pairs.values()]
    return ob.reporting.Claim(
        "Rebasin lowers the standard deviations of weights.",
        graded(all(held), any(held)),
        "; ".join(f"{method} {told(before, 4)} -> {told(after, 4)}" for method, (after, before) in pairs.items())
        + " on average (criterion: in every run, by more than three standard errors, for both)",
        "HMC 0.998 -> 0.993; ensemble 0.041 -> 0.029",
        _only(pairs, held),
    )


def _at_prior(found: Found) -> ob.reporting.Claim:
    shares = {name: [own.at_prior for own in found[name]] for name in ("HMC q_r", "VI q")}
    held = [min(values) > _MOST for values in shares.values()]
    return ob.reporting.Claim(
        "Under HMC and variational inference most weights have the standard deviation of the prior: they are not used.",
        graded(all(held), any(held)),
        "; ".join(f"{name} {told([100 * value for value in values], 1)} %" for name, values in shares.items())
        + f" of the weights within {_TOLERANCE:g} (criterion: more than {_MOST:.0%} in every run, for both)",
        "HMC 99.5 %, VI 81 %",
        _only(shares, held),
    )


def _only(names: Iterable[str], held: Sequence[bool]) -> str:
    """A caveat where some of the methods do what is claimed, and others do not."""
    which = [name for name, own in zip(names, held, strict=True) if own]
    return f"This holds for {which[0]} only." if which and not all(held) else ""
