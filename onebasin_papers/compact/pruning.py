"""Part six: which weights may go? The right panel of the paper's figure 3, with the baselines that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import onebasin as ob
from onebasin_papers.compact import presets as published
from onebasin_papers.compact.setting import Runs, Setting, forms, setting, variational
from onebasin_papers.compact.verdicts import CAVEAT, graded, smaller
from onebasin_papers.numbers import line, measured, told
from onebasin_papers.study import Part

# ----------------------------------------------------------------------
# Pruning curves: test accuracy when only some weights are left, for every network and every ranking.


CRITERIA = ("sigma", "sigma-high", "snr", "magnitude", "random")
BORROWED = "Ensemble, HMC sigma"
Key = tuple[str, str]  # whose network (and whose ranking), by which criterion
Curves = dict[Key, list[tuple[float, ...]]]  # -> one curve per run, accuracy in per cent at LEVELS


def curves(bench: Runs) -> Curves:
    """All curves of all seeds."""
    plan = bench.plan
    found: Curves = {}
    for seed in range(plan.seeds):
        bench.show(seed, plan.seeds, "pruning")
        for name, state, ranking, criteria in _networks(bench, seed):
            for by, curve in _curve(bench, state, ranking, criteria).items():
                found.setdefault((name, by), []).append(curve)
    return found


def area(curve: Sequence[float]) -> float:
    """Mean accuracy over all levels below 100 %: one number for a curve.

    >>> area([90.0, 50.0, 10.0])
    30.0
    """
    return sum(curve[1:]) / (len(curve) - 1)


Case = tuple[str, ob.State | None, ob.Posterior, Sequence[str]]  # name, network (None: the mean), ranking, criteria


def _networks(bench: Runs, seed: int) -> Iterator[Case]:
    """What is pruned by what: the paper's eight curves, and others for comparison."""
    run = seed % bench.plan.hmc_runs
    sampled, members, fitted = forms(bench, "hmc", run), forms(bench, "ensemble", seed), variational(bench, seed)
    mean = members.rebased.mean
    onto = _borrower(bench, mean)
    if seed < bench.plan.hmc_runs:
        yield "HMC q_r", None, sampled.rebased, CRITERIA
        yield "HMC q_d", None, sampled.raw, ("sigma",)
        yield "HMC sample", sampled.aligned.member(-1), sampled.rebased, ("sigma",)
    yield "Ensemble q_r", None, members.rebased, CRITERIA
    yield "Ensemble q_d", None, members.raw, ("sigma",)
    yield "Ensemble member", members.aligned.member(-1), members.rebased, ("sigma",)
    yield "VI q", None, fitted, CRITERIA
    yield BORROWED, None, onto(sampled.rebased, sampled.samples.member(0)), ("sigma", "snr")
    yield "Ensemble, VI sigma", None, onto(fitted, fitted.mean), ("sigma", "snr")


def _borrower(bench: Runs, mean: ob.State) -> Callable[[ob.Posterior, ob.State], ob.Posterior]:
    """Standard deviations of another posterior around the mean of the ensemble, matched by activations as in the paper.

    Args of what is returned: the posterior, and the network in its basin that is matched to the mean.
    """
    here = setting(bench)
    problem = here.problem

    def borrowed(posterior: ob.Posterior, reference: ob.State) -> ob.Posterior:
        return ob.transfer(posterior, mean, here.symmetry, reference, model=problem.model, inputs=problem.train[0])

    return borrowed


def _curve(
    bench: Runs, state: ob.State | None, ranking: ob.Posterior, criteria: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    problem = setting(bench).problem
    found = ob.pruning_curve(problem.model, ranking, problem.test, state=state, by=criteria, levels=ob.LEVELS)
    return {by: tuple(100 * (value or 0.0) for value in found.accuracy(by)) for by in criteria}


# ----------------------------------------------------------------------
# Part six: which weights may go? The right panel of the paper's figure 3, with the baselines that it lacks.


NAME, TITLE = "pruning", "Does a weight's uncertainty tell whether it may be pruned?"
_KEPT = tuple(100 * level for level in ob.LEVELS)
_WORDS = {
    "sigma": "least uncertain kept (paper)",
    "sigma-high": "most uncertain kept",
    "snr": "signal to noise",
    "magnitude": "magnitude",
    "random": "random",
}


def run(bench: Runs) -> ob.reporting.Section:
    """Prune everything by everything."""
    here, found = setting(bench), curves(bench)
    return ob.reporting.Section(NAME, TITLE, _text(here, found), (_figure(found), _table(found)), claims(found))


PART = Part(NAME, TITLE, run)


def _areas(found: Curves, *key: str) -> list[float]:
    name, by = key
    return [area(curve) for curve in found[name, by]]


def _text(here: Setting, found: Curves) -> tuple[str, ...]:
    own = {by: told(_areas(found, "Ensemble q_r", by), 1) for by in CRITERIA}
    return (
        f"Averaged over all levels from 90 to 1 % of the weights kept, the mean of the ensemble is right on "
        f"{told(_areas(found, BORROWED, 'sigma'), 1)} % when the standard deviations of HMC decide (least uncertain "
        f"kept), {own['sigma']} % with its own, {own['magnitude']} % when the largest weights are kept, and "
        f"{own['random']} % when chance decides. The mean of HMC pruned by its own standard deviations is right on "
        f"{told(_areas(found, 'HMC q_r', 'sigma'), 1)} %, that of variational inference on "
        f"{told(_areas(found, 'VI q', 'sigma'), 1)} %.",
        "All weights of a network are ranked together, the last ones are set to zero, and nothing is retrained. "
        "Standard deviations of another method are first moved into the basin of the network that is pruned, by "
        f"matching activations. {here.widths}, {here.problem.name}; published curves are for MNIST 784-512-10, and the "
        "paper has no baselines: magnitude, signal to noise, random and the opposite of its own rule are ours.",
    )


def _series(found: Curves, key: Key, name: str, shade: int) -> ob.reporting.Series:
    return line(name, _KEPT, list(zip(*found[key], strict=True)), shade=shade)


def _dashed(name: str, shade: int) -> ob.reporting.Series:
    curve = published.PRUNING[name]
    return ob.reporting.Series("published", tuple(map(float, published.SHARES_KEPT)), curve, dashed=True, shade=shade)


def _figure(found: Curves) -> ob.reporting.Figure:
    panels = []
    for name, title in (("HMC q_r", "mean of HMC"), ("Ensemble q_r", "mean of the ensemble"), ("VI q", "mean of VI")):
        own = [_series(found, (name, by), _WORDS[by], shade) for shade, by in enumerate(CRITERIA)]
        panels.append(_panel(title, [*own, _dashed(name, 0)]))
    crossed = [
        _series(found, (BORROWED, "sigma"), "HMC sigma (paper)", 0),
        _series(found, ("Ensemble, VI sigma", "sigma"), "VI sigma", 5),
        _series(found, ("Ensemble q_r", "sigma"), "own sigma", 6),
        _series(found, ("Ensemble q_r", "magnitude"), "magnitude", 3),
        _series(found, ("Ensemble q_r", "random"), "random", 4),
    ]
    panels.append(_panel("mean of the ensemble, others' uncertainties", [*crossed, _dashed(BORROWED, 0)]))
    return ob.reporting.Figure(
        "pruning-curves",
        "How many weights can go before a network forgets?",
        f"Means over {len(found['VI q', 'sigma'])} seeds, bands of one standard error; dashed: MNIST 784-512-10, the "
        "least uncertain weights kept, read off figure 3 of the paper.",
        tuple(panels),
    )


def _panel(title: str, series: Sequence[ob.reporting.Series]) -> ob.reporting.Panel:
    x = ob.reporting.Axis("weights kept (%)", scale="log", low=1, high=100)
    return ob.reporting.Panel("lines", title, x, ob.reporting.Axis("test accuracy (%)", low=0, high=100), tuple(series))


def _table(found: Curves) -> ob.reporting.Table:
    columns = (
        ob.reporting.Column(
            "network, ranked by", "whose mean network is pruned, and whose uncertainty ranks its weights"
        ),
        ob.reporting.Column("criterion", "which weights are kept"),
        ob.reporting.Column("mean", "mean accuracy over all levels below 100 %", "higher", 1, "%"),
        *(
            ob.reporting.Column(f"{level:g} %", f"test accuracy with {level:g} % of the weights kept", "higher", 1, "%")
            for level in _KEPT
        ),
    )
    return ob.reporting.Table(
        "pruning-table",
        "Test accuracy of pruned networks",
        columns,
        tuple(_row(key, own) for key, own in found.items()),
        f"± one standard error over {len(found['VI q', 'sigma'])} seeds (rows of HMC: "
        f"{len(found['HMC q_r', 'sigma'])})",
        "Published values are for MNIST 784-512-10. In the paper “one sample” and “one member” were pruned without "
        "moving them into the basin of the standard deviations; here they are moved.",
    )


def _row(key: Key, own: Sequence[Sequence[float]]) -> tuple[ob.reporting.Cell, ...]:
    name, by = key
    paper = published.PRUNING.get(name) if by == "sigma" else None
    cells = [measured(column, paper[place] if paper else None) for place, column in enumerate(zip(*own, strict=True))]
    return (name, _WORDS[by], measured([area(curve) for curve in own], area(paper) if paper else None), *cells)


def claims(found: Curves) -> tuple[ob.reporting.Claim, ...]:
    """What the paper says about its curves, and what we add."""
    borrowed, runs = _areas(found, BORROWED, "sigma"), len(found["HMC q_r", "sigma"])
    sampled, own = _areas(found, "HMC q_r", "sigma"), _areas(found, "Ensemble q_r", "sigma")
    magnitude, random = _areas(found, "Ensemble q_r", "magnitude"), _areas(found, "Ensemble q_r", "random")
    theirs = {name: f"{area(curve):.1f} %" for name, curve in published.PRUNING.items()}
    return (
        _claim(
            "An ensemble's mean pruned by HMC's standard deviations beats HMC's own mean pruned by them.",
            sampled,
            borrowed[:runs],
            f"{told(borrowed, 1)} % against {told(sampled, 1)} %",
            f"{theirs[BORROWED]} against {theirs['HMC q_r']}",
        ),
        _claim(
            "It also beats the ensemble's mean pruned by the ensemble's own standard deviations.",
            own,
            borrowed,
            f"{told(borrowed, 1)} % against {told(own, 1)} %",
            f"{theirs[BORROWED]} against {theirs['Ensemble q_r']}",
        ),
        _claim(
            "Ours: pruning by HMC's standard deviations is worse than pruning by magnitude, which needs no "
            "uncertainty.",
            borrowed,
            magnitude,
            f"{told(borrowed, 1)} % against {told(magnitude, 1)} %, and {told(random, 1)} % for a random order",
            "no baseline was published",
        ),
    )


def _claim(text: str, low: Sequence[float], high: Sequence[float], ours: str, theirs: str) -> ob.reporting.Claim:
    """That one curve lies below another, by the mean accuracy over all levels."""
    verdict = graded(smaller(low, high), fmean(low) < fmean(high))
    return ob.reporting.Claim(
        text,
        verdict,
        f"{ours} (mean accuracy over all levels; criterion: in every run and by more than three standard errors)",
        theirs,
        "On average only, not in every run for sure." if verdict == CAVEAT else "",
    )
