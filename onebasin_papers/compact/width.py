"""Part four: the compact form of an ensemble against its own members, for networks of several widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

import onebasin as ob
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import CompactWorkspace, Setting, forms, setting
from onebasin_papers.numbers import mean_line, mean_number, mean_text
from onebasin_papers.study import Part
from onebasin_papers.verdicts import CAVEAT, POINTS, VARIATION, close, graded

report = ob.reporting

NAME, TITLE = "width", "How wide must networks be for the compact form of an ensemble to work?"
_FORMS = ("q_d", "q_r", "consensus")
_WORDS = {"q_d": "q_d", "q_r": "q_r", "consensus": "consensus (ours)"}


@dataclass(frozen=True)
class CompactScore:
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


Results = Mapping[int, Mapping[str, Sequence[CompactScore]]]  # units -> form -> seeds


def run(workspace: CompactWorkspace) -> report.Section:
    """Train ensembles of all widths."""
    settings = workspace.settings
    results: dict[int, dict[str, list[CompactScore]]] = {}
    for units in settings.widths:
        results[units] = {name: [] for name in _FORMS}
        for seed in range(settings.seeds):
            for name, score in _score_forms(workspace, units, seed).items():
                results[units][name].append(score)
    here = setting(workspace)
    return report.Section(NAME, TITLE, _text(here, results), (_figure(results), _table(results)), (claim(results),))


def _obstacle(workspace: CompactWorkspace) -> str:
    if workspace.own.widened is not None:
        return ""
    return "the model has no width to change; a factory with an argument width, as in cnn(width=8), would have one"


PART = Part(
    NAME,
    TITLE,
    run,
    ("units", "widths", "seeds", "members", "ensemble_epochs", "posterior_draws", "prior"),
    _obstacle,
)


def _score_forms(workspace: CompactWorkspace, units: int, seed: int) -> dict[str, CompactScore]:
    here, ensemble_forms = setting(workspace, units), forms(workspace, "ensemble", seed, units)
    model, (inputs, targets) = here.problem.model, here.problem.test
    consensus = ob.align(ensemble_forms.samples, here.symmetry, progress=workspace.progress).population
    members = ob.predict(model, ensemble_forms.samples, inputs, average=True)
    posteriors = {"q_d": ensemble_forms.raw, "q_r": ensemble_forms.rebased, "consensus": ob.fit(consensus, model=model)}
    drawn = workspace.seed_for("draws", seed)

    def right(predictive: Tensor) -> float:
        return float(ob.metrics.accuracy(predictive, targets))

    scores = {}
    for name, posterior in posteriors.items():
        draws = ob.predict(model, posterior, inputs, average=True, draws=workspace.settings.posterior_draws, seed=drawn)
        variation = float(ob.metrics.total_variation(draws, members))
        sigma = float(posterior.flat_std.mean()) / workspace.settings.prior
        scores[name] = CompactScore(variation, right(draws), right(members), sigma)
    return scores


def _text(here: Setting, results: Results) -> tuple[str, ...]:
    narrow, wide = min(results), max(results)

    def variation(units: int) -> str:
        return mean_text([score.variation for score in results[units]["q_r"]])

    return (
        f"The wider, the better: the total variation between draws from q_r and the ensemble itself is "
        f"{variation(narrow)} with {narrow} hidden units and {variation(wide)} with {wide}."
        if fmean([score.variation for score in results[wide]["q_r"]])
        < fmean([score.variation for score in results[narrow]["q_r"]])
        else f"Width does not help: the total variation between draws from q_r and the ensemble itself is "
        f"{variation(narrow)} with {narrow} hidden units and {variation(wide)} with {wide}.",
        f"Ensembles on {here.problem.name}, {len(results[wide]['q_r'])} for each width, are compared with their own "
        "members; no HMC is needed. A likely reason, not tested here: in a wide layer members find more similar units "
        "to be matched with, and independent noise of single weights averages out.",
    )


def _figure(results: Results) -> report.Figure:
    widths = sorted(results)

    def ours(name: str, shade: int, right: bool) -> report.Series:
        columns = [
            [100 * score.right if right else score.variation for score in results[units][name]] for units in widths
        ]
        return mean_line(_WORDS[name], widths, columns, shade=shade)

    members = [[100 * score.members for score in results[units]["q_r"]] for units in widths]
    x = report.Axis("hidden units", scale="log")
    theirs = {"q_d": published.TABLE["Ensemble q_d"].draws, "q_r": published.TABLE["Ensemble q_r"].draws}
    points = [
        report.Series(f"{name}, published", (float(published.UNITS),), (value,), dashed=True, shade=shade)
        for shade, (name, value) in enumerate(theirs.items())
    ]
    return report.Figure(
        "width-curves",
        "How much of an ensemble does its compact form keep in wider networks?",
        f"Means over {len(results[widths[0]]['q_r'])} seeds, bands of one standard error. Published values are for "
        "MNIST.",
        (
            report.Panel(
                "lines",
                "Distance to the ensemble",
                x,
                report.Axis("total variation", low=0),
                tuple(ours(name, shade, right=False) for shade, name in enumerate(_FORMS)),
            ),
            report.Panel(
                "lines",
                "Accuracy",
                x,
                report.Axis("test accuracy (%)"),
                (
                    *(ours(name, shade, right=True) for shade, name in enumerate(_FORMS)),
                    mean_line("members", widths, members, shade=3),
                    *points,
                ),
            ),
        ),
    )


_COLUMNS = (
    report.Column("units", "hidden units", digits=0),
    report.Column("form", "what is kept of the ensemble"),
    report.Column("total variation", "from the average predictive of the members", "lower"),
    report.Column("accuracy of draws", "test accuracy of the average predictive of networks drawn", "higher", 2, "%"),
    report.Column("accuracy of members", "test accuracy of the members' average predictive", "higher", 2, "%"),
    report.Column("mean sigma", "mean standard deviation of all weights, in units of the prior's", digits=4),
)


def _table(results: Results) -> report.Table:
    rows: list[tuple[report.Cell, ...]] = []
    for units, by_name in results.items():
        for name, scores in by_name.items():
            known = units == published.UNITS and f"Ensemble {name}" in published.TABLE
            right = published.TABLE[f"Ensemble {name}"].draws if known else None
            members = published.TABLE["Ensemble members"].draws if known else None
            rows.append(
                (
                    report.Number(units),
                    _WORDS[name],
                    mean_number([score.variation for score in scores]),
                    mean_number([score.right for score in scores], right, scale=100),
                    mean_number([score.members for score in scores], members, scale=100),
                    mean_number(
                        [score.sigma for score in scores], published.SIGMA[f"Ensemble {name}"].mean if known else None
                    ),
                )
            )
    seeds = len(next(iter(results.values()))["q_r"])
    return report.Table(
        "width-table",
        "Compact forms of ensembles against their own members",
        _COLUMNS,
        tuple(rows),
        f"± one standard error over {seeds} seeds",
        "Published values are for MNIST 784-512-10.",
    )


def claim(results: Results) -> report.Claim:
    """Judged at the largest width, which is the paper's in both presets."""
    wide, narrow = max(results), min(results)
    scores = results[wide]["q_r"]
    lost, variation = [score.members - score.right for score in scores], [score.variation for score in scores]
    verdict = graded(close(lost, variation), fmean(lost) <= 2 * POINTS)
    paper = published.TABLE["Ensemble members"], published.TABLE["Ensemble q_r"]
    accuracy_only = f"Only the accuracy is close, within {200 * POINTS:g} points. " if verdict == CAVEAT else ""
    elsewhere = results[narrow]["q_r"]
    return report.Claim(
        "For ensembles q_r is close to the samples.",
        verdict,
        f"with {wide} hidden units q_r loses {mean_text([100 * value for value in lost], 1)} points of accuracy and is "
        "a "
        f"total variation of {mean_text(variation)} away from the ensemble (criterion: at most {100 * POINTS:g} points "
        "and "
        f"{VARIATION:g})",
        f"{paper[0].draws} % and {paper[1].draws} %; total variation from HMC {paper[0].variation} and "
        f"{paper[1].variation}, so between {paper[1].variation - paper[0].variation:.3f} and {VARIATION:g} from each "
        "other",
        f"{accuracy_only}With {narrow} units the total variation is "
        f"{mean_text([score.variation for score in elsewhere])}.",
    )
