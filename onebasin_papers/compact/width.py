"""Part four: the compact form of an ensemble against its own members, for networks of several widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

import onebasin as ob
from onebasin_papers.compact import presets as published
from onebasin_papers.compact.setting import Runs, Setting, forms, setting
from onebasin_papers.compact.verdicts import CAVEAT, POINTS, VARIATION, close, graded
from onebasin_papers.numbers import line, measured, told
from onebasin_papers.study import Part

NAME, TITLE = "width", "How wide must networks be for the compact form of an ensemble to work?"
_FORMS = ("q_d", "q_r", "consensus")
_WORDS = {"q_d": "q_d", "q_r": "q_r", "consensus": "consensus (ours)"}


@dataclass(frozen=True)
class Kept:
    """What a compact form keeps of one ensemble.

    Attributes:
        variation: total variation from the members' average predictive.
        right: share of right answers.
        members: that of the members together.
        sigma: mean standard deviation of the weights.
    """

    variation: float
    right: float
    members: float
    sigma: float


Found = Mapping[int, Mapping[str, Sequence[Kept]]]  # units -> form -> seeds


def run(bench: Runs) -> ob.reporting.Section:
    """Train ensembles of all widths."""
    plan = bench.plan
    found: dict[int, dict[str, list[Kept]]] = {}
    for units in plan.widths:
        found[units] = {name: [] for name in _FORMS}
        for seed in range(plan.seeds):
            for name, kept in _of_one(bench, units, seed).items():
                found[units][name].append(kept)
    here = setting(bench)
    return ob.reporting.Section(NAME, TITLE, _text(here, found), (_figure(found), _table(found)), (claim(found),))


PART = Part(NAME, TITLE, run)


def _of_one(bench: Runs, units: int, seed: int) -> dict[str, Kept]:
    here, own = setting(bench, units), forms(bench, "ensemble", seed, units)
    model, (inputs, targets) = here.problem.model, here.problem.test
    consensus = ob.align(own.samples, here.symmetry, progress=bench.show).population
    members = ob.predict(model, own.samples, inputs, average=True)
    posteriors = {"q_d": own.raw, "q_r": own.rebased, "consensus": ob.fit(consensus, model=model)}
    drawn = bench.number("draws", seed)

    def right(predictive: Tensor) -> float:
        return float(ob.metrics.accuracy(predictive, targets))

    found = {}
    for name, posterior in posteriors.items():
        draws = ob.predict(model, posterior, inputs, average=True, draws=bench.plan.posterior_draws, seed=drawn)
        variation = float(ob.metrics.total_variation(draws, members))
        sigma = float(posterior.flat_std.mean()) / bench.plan.prior
        found[name] = Kept(variation, right(draws), right(members), sigma)
    return found


def _text(here: Setting, found: Found) -> tuple[str, ...]:
    narrow, wide = min(found), max(found)

    def variation(units: int) -> str:
        return told([kept.variation for kept in found[units]["q_r"]])

    return (
        f"The wider, the better: the total variation between draws from q_r and the ensemble itself is "
        f"{variation(narrow)} with {narrow} hidden units and {variation(wide)} with {wide}."
        if fmean([kept.variation for kept in found[wide]["q_r"]])
        < fmean([kept.variation for kept in found[narrow]["q_r"]])
        else f"Width does not help: the total variation between draws from q_r and the ensemble itself is "
        f"{variation(narrow)} with {narrow} hidden units and {variation(wide)} with {wide}.",
        f"Ensembles on {here.problem.name}, {len(found[wide]['q_r'])} for each width, are compared with their own "
        "members; no HMC is needed. A likely reason, not tested here: in a wide layer members find more similar units "
        "to be matched with, and independent noise of single weights averages out.",
    )


def _figure(found: Found) -> ob.reporting.Figure:
    widths = sorted(found)

    def ours(name: str, shade: int, right: bool) -> ob.reporting.Series:
        columns = [[100 * own.right if right else own.variation for own in found[units][name]] for units in widths]
        return line(_WORDS[name], widths, columns, shade=shade)

    members = [[100 * own.members for own in found[units]["q_r"]] for units in widths]
    x = ob.reporting.Axis("hidden units", scale="log")
    theirs = {"q_d": published.TABLE["Ensemble q_d"].draws, "q_r": published.TABLE["Ensemble q_r"].draws}
    points = [
        ob.reporting.Series(f"{name}, published", (float(published.UNITS),), (value,), dashed=True, shade=shade)
        for shade, (name, value) in enumerate(theirs.items())
    ]
    return ob.reporting.Figure(
        "width-curves",
        "How much of an ensemble does its compact form keep in wider networks?",
        f"Means over {len(found[widths[0]]['q_r'])} seeds, bands of one standard error. Published values are for "
        "MNIST.",
        (
            ob.reporting.Panel(
                "lines",
                "Distance to the ensemble",
                x,
                ob.reporting.Axis("total variation", low=0),
                tuple(ours(name, shade, right=False) for shade, name in enumerate(_FORMS)),
            ),
            ob.reporting.Panel(
                "lines",
                "Accuracy",
                x,
                ob.reporting.Axis("test accuracy (%)"),
                (
                    *(ours(name, shade, right=True) for shade, name in enumerate(_FORMS)),
                    line("members", widths, members, shade=3),
                    *points,
                ),
            ),
        ),
    )


_COLUMNS = (
    ob.reporting.Column("units", "hidden units", digits=0),
    ob.reporting.Column("form", "what is kept of the ensemble"),
    ob.reporting.Column("total variation", "from the average predictive of the members", "lower"),
    ob.reporting.Column(
        "accuracy of draws", "test accuracy of the average predictive of networks drawn", "higher", 2, "%"
    ),
    ob.reporting.Column("accuracy of members", "test accuracy of the members' average predictive", "higher", 2, "%"),
    ob.reporting.Column("mean sigma", "mean standard deviation of all weights, in units of the prior's", digits=4),
)


def _table(found: Found) -> ob.reporting.Table:
    rows: list[tuple[ob.reporting.Cell, ...]] = []
    for units, by_name in found.items():
        for name, own in by_name.items():
            known = units == published.UNITS and f"Ensemble {name}" in published.TABLE
            right = published.TABLE[f"Ensemble {name}"].draws if known else None
            members = published.TABLE["Ensemble members"].draws if known else None
            rows.append(
                (
                    ob.reporting.Number(units),
                    _WORDS[name],
                    measured([kept.variation for kept in own]),
                    measured([kept.right for kept in own], right, scale=100),
                    measured([kept.members for kept in own], members, scale=100),
                    measured([kept.sigma for kept in own], published.SIGMA[f"Ensemble {name}"].mean if known else None),
                )
            )
    seeds = len(next(iter(found.values()))["q_r"])
    return ob.reporting.Table(
        "width-table",
        "Compact forms of ensembles against their own members",
        _COLUMNS,
        tuple(rows),
        f"± one standard error over {seeds} seeds",
        "Published values are for MNIST 784-512-10.",
    )


def claim(found: Found) -> ob.reporting.Claim:
    """Judged at the largest width, which is the paper's in both presets."""
    wide, narrow = max(found), min(found)
    own = found[wide]["q_r"]
    lost, variation = [kept.members - kept.right for kept in own], [kept.variation for kept in own]
    verdict = graded(close(lost, variation), fmean(lost) <= 2 * POINTS)
    paper = published.TABLE["Ensemble members"], published.TABLE["Ensemble q_r"]
    accuracy_only = f"Only the accuracy is close, within {200 * POINTS:g} points. " if verdict == CAVEAT else ""
    elsewhere = found[narrow]["q_r"]
    return ob.reporting.Claim(
        "For ensembles q_r is close to the samples.",
        verdict,
        f"with {wide} hidden units q_r loses {told([100 * value for value in lost], 1)} points of accuracy and is a "
        f"total variation of {told(variation)} away from the ensemble (criterion: at most {100 * POINTS:g} points and "
        f"{VARIATION:g})",
        f"{paper[0].draws} % and {paper[1].draws} %; total variation from HMC {paper[0].variation} and "
        f"{paper[1].variation}, so between {paper[1].variation - paper[0].variation:.3f} and {VARIATION:g} from each "
        "other",
        f"{accuracy_only}With {narrow} units the total variation is {told([kept.variation for kept in elsewhere])}.",
    )
