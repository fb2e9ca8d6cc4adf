"""Part six: which weights may go? The right panel of the paper's figure 3, with the baselines that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from onebasin.pruning import LEVELS
from onebasin.record import Axis, Cell, Claim, Column, Figure, Panel, Section, Series, Table
from onebasin.studies.compact import published
from onebasin.studies.compact.pruned import BORROWED, CRITERIA, Curves, Key, area, curves
from onebasin.studies.compact.setting import Runs, Setting, setting
from onebasin.studies.compact.verdicts import CAVEAT, graded, smaller
from onebasin.studies.numbers import line, measured, told
from onebasin.studies.study import Part

NAME, TITLE = "pruning", "Does a weight's uncertainty tell whether it may be pruned?"
_KEPT = tuple(100 * level for level in LEVELS)
_WORDS = {
    "sigma": "least uncertain kept (paper)",
    "sigma-high": "most uncertain kept",
    "snr": "signal to noise",
    "magnitude": "magnitude",
    "random": "random",
}


def run(bench: Runs) -> Section:
    """Prune everything by everything."""
    here, found = setting(bench), curves(bench)
    return Section(NAME, TITLE, _text(here, found), (_figure(found), _table(found)), claims(found))


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


def _series(found: Curves, key: Key, name: str, shade: int) -> Series:
    return line(name, _KEPT, list(zip(*found[key], strict=True)), shade=shade)


def _dashed(name: str, shade: int) -> Series:
    curve = published.PRUNING[name]
    return Series("published", tuple(map(float, published.SHARES_KEPT)), curve, dashed=True, shade=shade)


def _figure(found: Curves) -> Figure:
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
    return Figure(
        "pruning-curves",
        "How many weights can go before a network forgets?",
        f"Means over {len(found['VI q', 'sigma'])} seeds, bands of one standard error; dashed: MNIST 784-512-10, the "
        "least uncertain weights kept, read off figure 3 of the paper.",
        tuple(panels),
    )


def _panel(title: str, series: Sequence[Series]) -> Panel:
    x = Axis("weights kept (%)", scale="log", low=1, high=100)
    return Panel("lines", title, x, Axis("test accuracy (%)", low=0, high=100), tuple(series))


def _table(found: Curves) -> Table:
    columns = (
        Column("network, ranked by", "whose mean network is pruned, and whose uncertainty ranks its weights"),
        Column("criterion", "which weights are kept"),
        Column("mean", "mean accuracy over all levels below 100 %", "higher", 1, "%"),
        *(
            Column(f"{level:g} %", f"test accuracy with {level:g} % of the weights kept", "higher", 1, "%")
            for level in _KEPT
        ),
    )
    return Table(
        "pruning-table",
        "Test accuracy of pruned networks",
        columns,
        tuple(_row(key, own) for key, own in found.items()),
        f"± one standard error over {len(found['VI q', 'sigma'])} seeds (rows of HMC: "
        f"{len(found['HMC q_r', 'sigma'])})",
        "Published values are for MNIST 784-512-10. In the paper “one sample” and “one member” were pruned without "
        "moving them into the basin of the standard deviations; here they are moved.",
    )


def _row(key: Key, own: Sequence[Sequence[float]]) -> tuple[Cell, ...]:
    name, by = key
    paper = published.PRUNING.get(name) if by == "sigma" else None
    cells = [measured(column, paper[place] if paper else None) for place, column in enumerate(zip(*own, strict=True))]
    return (name, _WORDS[by], measured([area(curve) for curve in own], area(paper) if paper else None), *cells)


def claims(found: Curves) -> tuple[Claim, ...]:
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


def _claim(text: str, low: Sequence[float], high: Sequence[float], ours: str, theirs: str) -> Claim:
    """That one curve lies below another, by the mean accuracy over all levels."""
    verdict = graded(smaller(low, high), fmean(low) < fmean(high))
    return Claim(
        text,
        verdict,
        f"{ours} (mean accuracy over all levels; criterion: in every run and by more than three standard errors)",
        theirs,
        "On average only, not in every run for sure." if verdict == CAVEAT else "",
    )
