"""Part six: which weights may go? The right panel of the paper's figure 3, with the baselines that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import onebasin as ob
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import FORM_KEYS, CompactWorkspace, Setting, forms, setting, variational
from onebasin_papers.numbers import mean_line, mean_number, mean_text
from onebasin_papers.study import Part
from onebasin_papers.verdicts import CAVEAT, graded, smaller

report = ob.reporting

CRITERIA = ("sigma", "sigma-high", "snr", "magnitude", "random")
BORROWED = "Ensemble, HMC sigma"
Key = tuple[str, str]  # whose network (and whose ranking), by which criterion
Curves = dict[Key, list[tuple[float, ...]]]  # -> one curve per run, accuracy in per cent at LEVELS


def curves(workspace: CompactWorkspace) -> Curves:
    """All curves of all seeds."""
    settings = workspace.settings
    results: Curves = {}
    for seed in range(settings.seeds):
        workspace.progress(seed, settings.seeds, "pruning")
        for name, state, ranking, criteria in _networks(workspace, seed):
            for by, curve in _curve(workspace, state, ranking, criteria).items():
                results.setdefault((name, by), []).append(curve)
    return results


def area(curve: Sequence[float]) -> float:
    """Mean accuracy over all levels below 100 %: one number for a curve.

    >>> area([90.0, 50.0, 10.0])
    30.0
    """
    return sum(curve[1:]) / (len(curve) - 1)


Case = tuple[str, ob.State | None, ob.Posterior, Sequence[str]]  # name, network (None: the mean), ranking, criteria


def _networks(workspace: CompactWorkspace, seed: int) -> Iterator[Case]:
    """What is pruned by what: the paper's eight curves, and others for comparison."""
    run = seed % workspace.settings.hmc_runs
    sampled, members, fitted = (
        forms(workspace, "hmc", run),
        forms(workspace, "ensemble", seed),
        variational(workspace, seed),
    )
    mean = members.rebased.mean
    onto = _borrower(workspace, mean)
    if seed < workspace.settings.hmc_runs:
        yield "HMC q_r", None, sampled.rebased, CRITERIA
        yield "HMC q_d", None, sampled.raw, ("sigma",)
        yield "HMC sample", sampled.aligned.member(-1), sampled.rebased, ("sigma",)
    yield "Ensemble q_r", None, members.rebased, CRITERIA
    yield "Ensemble q_d", None, members.raw, ("sigma",)
    yield "Ensemble member", members.aligned.member(-1), members.rebased, ("sigma",)
    yield "VI q", None, fitted, CRITERIA
    yield BORROWED, None, onto(sampled.rebased, sampled.samples.member(0)), ("sigma", "snr")
    yield "Ensemble, VI sigma", None, onto(fitted, fitted.mean), ("sigma", "snr")
    if seed < workspace.settings.hmc_runs:
        for title in workspace.own.methods:
            own = forms(workspace, title, seed)
            yield f"{title} q_r", None, own.rebased, CRITERIA
            yield f"{title} q_d", None, own.raw, ("sigma",)


def _borrower(workspace: CompactWorkspace, mean: ob.State) -> Callable[[ob.Posterior, ob.State], ob.Posterior]:
    """Standard deviations of another posterior around the mean of the ensemble, matched by activations as in the paper.

    Args of what is returned: the posterior, and the network in its basin that is matched to the mean.
    """
    here = setting(workspace)
    problem = here.problem

    def borrow(posterior: ob.Posterior, reference: ob.State) -> ob.Posterior:
        return ob.transfer(posterior, mean, here.symmetry, reference, model=problem.model, inputs=problem.train[0])

    return borrow


def _curve(
    workspace: CompactWorkspace, state: ob.State | None, ranking: ob.Posterior, criteria: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    problem = setting(workspace).problem
    curve = ob.pruning_curve(problem.model, ranking, problem.test, state=state, by=criteria, levels=ob.LEVELS)
    return {by: tuple(100 * (value or 0.0) for value in curve.accuracy(by)) for by in criteria}


NAME, TITLE = "pruning", "Does a weight's uncertainty tell whether it may be pruned?"
_KEPT = tuple(100 * level for level in ob.LEVELS)
_WORDS = {
    "sigma": "least uncertain kept (paper)",
    "sigma-high": "most uncertain kept",
    "snr": "signal to noise",
    "magnitude": "magnitude",
    "random": "random",
}


def run(workspace: CompactWorkspace) -> report.Section:
    """Prune everything by everything."""
    here, results = setting(workspace), curves(workspace)
    items = (_figure(results, tuple(workspace.own.methods)), _table(results))
    return report.Section(NAME, TITLE, _text(here, results), items, claims(results))


PART = Part(NAME, TITLE, run, FORM_KEYS)


def _areas(results: Curves, *key: str) -> list[float]:
    name, by = key
    return [area(curve) for curve in results[name, by]]


def _text(here: Setting, results: Curves) -> tuple[str, ...]:
    areas = {by: mean_text(_areas(results, "Ensemble q_r", by), 1) for by in CRITERIA}
    return (
        f"Averaged over all levels from 90 to 1 % of the weights kept, the mean of the ensemble is right on "
        f"{mean_text(_areas(results, BORROWED, 'sigma'), 1)} % when the standard deviations of HMC decide (least "
        "uncertain "
        f"kept), {areas['sigma']} % with its own, {areas['magnitude']} % when the largest weights are kept, and "
        f"{areas['random']} % when chance decides. The mean of HMC pruned by its own standard deviations is right on "
        f"{mean_text(_areas(results, 'HMC q_r', 'sigma'), 1)} %, that of variational inference on "
        f"{mean_text(_areas(results, 'VI q', 'sigma'), 1)} %.",
        "All weights of a network are ranked together, the last ones are set to zero, and nothing is retrained. "
        "Standard deviations of another method are first moved into the basin of the network that is pruned, by "
        f"matching activations. {here.widths}, {here.problem.name}; published curves are for MNIST 784-512-10, and the "
        "paper has no baselines: magnitude, signal to noise, random and the opposite of its own rule are ours.",
    )


def _series(results: Curves, key: Key, name: str, shade: int) -> report.Series:
    return mean_line(name, _KEPT, list(zip(*results[key], strict=True)), shade=shade)


def _dashed(name: str, shade: int) -> report.Series:
    curve = published.PRUNING[name]
    return report.Series("published", tuple(map(float, published.SHARES_KEPT)), curve, dashed=True, shade=shade)


def _figure(results: Curves, own: tuple[str, ...]) -> report.Figure:
    panels = []
    for name, title in (("HMC q_r", "mean of HMC"), ("Ensemble q_r", "mean of the ensemble"), ("VI q", "mean of VI")):
        series = [_series(results, (name, by), _WORDS[by], shade) for shade, by in enumerate(CRITERIA)]
        panels.append(_panel(title, [*series, _dashed(name, 0)]))
    for title in own:
        series = [_series(results, (f"{title} q_r", by), _WORDS[by], shade) for shade, by in enumerate(CRITERIA)]
        panels.append(_panel(f"mean of {title}", series))
    crossed = [
        _series(results, (BORROWED, "sigma"), "HMC sigma (paper)", 0),
        _series(results, ("Ensemble, VI sigma", "sigma"), "VI sigma", 5),
        _series(results, ("Ensemble q_r", "sigma"), "own sigma", 6),
        _series(results, ("Ensemble q_r", "magnitude"), "magnitude", 3),
        _series(results, ("Ensemble q_r", "random"), "random", 4),
    ]
    panels.append(_panel("mean of the ensemble, others' uncertainties", [*crossed, _dashed(BORROWED, 0)]))
    return report.Figure(
        "pruning-curves",
        "How many weights can go before a network forgets?",
        f"Means over {len(results['VI q', 'sigma'])} seeds, bands of one standard error; dashed: MNIST 784-512-10, the "
        "least uncertain weights kept, read off figure 3 of the paper.",
        tuple(panels),
    )


def _panel(title: str, series: Sequence[report.Series]) -> report.Panel:
    x = report.Axis("weights kept (%)", scale="log", low=1, high=100)
    return report.Panel("lines", title, x, report.Axis("test accuracy (%)", low=0, high=100), tuple(series))


def _table(results: Curves) -> report.Table:
    columns = (
        report.Column("network, ranked by", "whose mean network is pruned, and whose uncertainty ranks its weights"),
        report.Column("criterion", "which weights are kept"),
        report.Column("mean", "mean accuracy over all levels below 100 %", "higher", 1, "%"),
        *(
            report.Column(f"{level:g} %", f"test accuracy with {level:g} % of the weights kept", "higher", 1, "%")
            for level in _KEPT
        ),
    )
    return report.Table(
        "pruning-table",
        "Test accuracy of pruned networks",
        columns,
        tuple(_row(key, runs) for key, runs in results.items()),
        f"± one standard error over {len(results['VI q', 'sigma'])} seeds (rows of HMC: "
        f"{len(results['HMC q_r', 'sigma'])})",
        "Published values are for MNIST 784-512-10. In the paper “one sample” and “one member” were pruned without "
        "moving them into the basin of the standard deviations; here they are moved.",
    )


def _row(key: Key, runs: Sequence[Sequence[float]]) -> tuple[report.Cell, ...]:
    name, by = key
    paper = published.PRUNING.get(name) if by == "sigma" else None
    cells = [
        mean_number(column, paper[place] if paper else None) for place, column in enumerate(zip(*runs, strict=True))
    ]
    return (name, _WORDS[by], mean_number([area(curve) for curve in runs], area(paper) if paper else None), *cells)


def claims(results: Curves) -> tuple[report.Claim, ...]:
    """What the paper says about its curves, and what we add."""
    borrowed, runs = _areas(results, BORROWED, "sigma"), len(results["HMC q_r", "sigma"])
    sampled, ensemble = _areas(results, "HMC q_r", "sigma"), _areas(results, "Ensemble q_r", "sigma")
    magnitude, random = _areas(results, "Ensemble q_r", "magnitude"), _areas(results, "Ensemble q_r", "random")
    theirs = {name: f"{area(curve):.1f} %" for name, curve in published.PRUNING.items()}
    return (
        _claim(
            "An ensemble's mean pruned by HMC's standard deviations beats HMC's own mean pruned by them.",
            sampled,
            borrowed[:runs],
            f"{mean_text(borrowed, 1)} % against {mean_text(sampled, 1)} %",
            f"{theirs[BORROWED]} against {theirs['HMC q_r']}",
        ),
        _claim(
            "It also beats the ensemble's mean pruned by the ensemble's own standard deviations.",
            ensemble,
            borrowed,
            f"{mean_text(borrowed, 1)} % against {mean_text(ensemble, 1)} %",
            f"{theirs[BORROWED]} against {theirs['Ensemble q_r']}",
        ),
        _claim(
            "Ours: pruning by HMC's standard deviations is worse than pruning by magnitude, which needs no "
            "uncertainty.",
            borrowed,
            magnitude,
            f"{mean_text(borrowed, 1)} % against {mean_text(magnitude, 1)} %, and {mean_text(random, 1)} % for a "
            "random order",
            "no baseline was published",
        ),
    )


def _claim(text: str, low: Sequence[float], high: Sequence[float], ours: str, theirs: str) -> report.Claim:
    """That one curve lies below another, by the mean accuracy over all levels."""
    verdict = graded(smaller(low, high), fmean(low) < fmean(high))
    return report.Claim(
        text,
        verdict,
        f"{ours} (mean accuracy over all levels; criterion: in every run and by more than three standard errors)",
        theirs,
        "On average only, not in every run for sure." if verdict == CAVEAT else "",
    )
