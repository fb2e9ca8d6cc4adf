"""What are approximate posteriors worth, and how far are they from a reference? The paper's table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torch import Tensor

import onebasin as ob
from onebasin_papers.numbers import measured
from onebasin_papers.symmetry.networks import (
    METHODS,
    Desk,
    chain_of,
    described,
    hmc,
    multi_mode,
    one_mode,
    problem,
    reference,
    runs_of,
    starts,
    symmetry,
)
from onebasin_papers.symmetry.presets import ENSEMBLE, MULTI, ONE, UP_OF_ALL, column, published
from onebasin_papers.symmetry.verdicts import (
    CAVEAT,
    Difference,
    as_often_as_not,
    better_in_most,
    correlation,
    difference,
    no_clear_correlation,
    noticeable,
    runs_tell,
    stands_for,
)

# ----------------------------------------------------------------------
# Every number of one population in the table, in the paper's units.


Numbers = dict[str, float]

FORM = "unit-norm/max"  # in which symmetries are removed: rows of length 1, sorted by their largest entry
PRESET = "paper"  # Laplace and Gaussian kernels at ten bandwidths each
SQUARED = 10.0  # what the paper most likely multiplies squared MMD by
PERCENT, PER_MILLE, HUNDREDTHS = 100.0, 1000.0, 100.0
SYMMETRIC = (
    "hmc_mmd",
    "hmc_mmd_runs",
    "hmc_mmd_rest",
    "hmc_ns",
    "hmc_ns_rest",
    "tv",
    "agreement",
)  # in both populations
COMPARED = 30  # draws of each chain of HMC that enter a comparison of weights: neighbours say little more


def numbers(bench: Desk, population: ob.Population, *, rival: ob.Population | None = None) -> Numbers:
    """All measures of a population.

    Args:
        bench: with reference and HMC.
        population: to be judged.
        rival: the HMC that it is compared with; that of the study unless given.
    """
    own = problem(bench)
    answers = hmc_predictive(bench) if rival is None else ob.predict(own.model, rival, own.test[0], average=True)
    found = _predictive(bench, population, answers)
    found |= _apart(bench, population, reference(bench), "")
    return found | _apart(bench, population, thinned(bench) if rival is None else rival, "hmc_")


def thinned(bench: Desk) -> ob.Population:
    """HMC with at most `COMPARED` draws of each chain, evenly spread."""
    step = max(1, bench.plan.chain_draws // COMPARED)
    return bench.once("hmc-thinned", lambda: hmc(bench)[::step])


def hmc_predictive(bench: Desk) -> Tensor:
    """The average predictive of all HMC draws on test inputs (examples, classes)."""
    own = problem(bench)
    return bench.once("hmc-predictive", lambda: ob.predict(own.model, hmc(bench), own.test[0], average=True))


def _predictive(bench: Desk, population: ob.Population, answers: Tensor) -> Numbers:
    own = problem(bench)
    # Errors are taken over runs, not over examples.
    found = ob.evaluate(own.model, population, own.test, ood=own.outside, reference=answers, n_resamples=2)
    inside, told = found.in_distribution, found.detection["msp"]
    return {
        "accuracy": PERCENT * inside["accuracy"].value,
        "ece": PERCENT * inside["ece"].value,
        "ace": PER_MILLE * inside["ace_class_wise"].value,
        "brier": PERCENT * inside["brier"].value,
        "aupr": PERCENT * told["aupr_in"].value,
        "aupr_out": PERCENT * told["aupr_out"].value,
        "auroc": PERCENT * told["auroc"].value,
        "fpr95": PERCENT * told["fpr95_in"].value,
        "nll": inside["nll"].value,
        "temperature": math.nan if found.temperature is None else found.temperature,
        "id_mi": HUNDREDTHS * inside["mutual_information"].value,
        "ood_mi": HUNDREDTHS * found.ood["mutual_information"].value,
        "tv": PERCENT * found.reference["total_variation"].value,
        "agreement": PERCENT * found.reference["agreement"].value,
    }


def _apart(bench: Desk, population: ob.Population, other: ob.Population, prefix: str) -> Numbers:
    """MMD with and without symmetries, and the parts of them that runs explain."""
    found = ob.discrepancy(
        population,
        other,
        symmetry=symmetry(bench),
        normal_forms=FORM,
        preset=PRESET,
        permutations=0,
        n_resamples=0,
        layers=False,
    )
    raw, without = found.raw.total, found.mmd_canonical
    assert without is not None  # a form was asked for
    return {
        f"{prefix}mmd": SQUARED * raw.squared,
        f"{prefix}mmd_runs": SQUARED * raw.explained,
        f"{prefix}mmd_rest": SQUARED * raw.remainder,
        f"{prefix}ns": SQUARED * without.squared,
        f"{prefix}ns_rest": SQUARED * without.remainder,
    }


# ----------------------------------------------------------------------
# Rows of the table: a method in one form, measured in several independent repetitions.


HMC = "HMC"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        method: as in the paper.
        form: `ONE` or `MULTI`.
        design: runs x networks of each.
        groups: for each group its repetitions. Groups of the same number of two methods share their start.
    """

    method: str
    form: str
    design: str
    groups: tuple[tuple[Numbers, ...], ...]

    def values(self, measure: str) -> list[float]:
        """All repetitions in which it is defined: a distance without runs needs several of them."""
        return [value for group in self.groups for one in group if not math.isnan(value := one.get(measure, math.nan))]

    def by_group(self, measure: str) -> list[float]:
        """Means over the repetitions of each group."""
        return [fmean(one[measure] for one in group) for group in self.groups]

    def mean(self, measure: str) -> float:
        """Mean over all repetitions."""
        values = self.values(measure)
        return fmean(values) if values else math.nan

    def number(self, measure: str) -> ob.reporting.Number:
        """For a table, with the published value beside it."""
        if not self.values(measure):
            return ob.reporting.Number(None, note="needs several runs")
        return measured(self.values(measure), published(self.method, self.form, measure))


def rows(bench: Desk) -> list[Row]:
    """All rows, in the paper's order: one-mode methods, multi-mode methods, deep ensembles, HMC."""
    return bench.once("rows", lambda: _measured(bench))


def _measured(bench: Desk) -> list[Row]:
    plan, found = bench.plan, list[Row]()
    populations = {method: runs_of(bench, method) for method in METHODS}
    share, groups = max(1, plan.draws // plan.runs), range(plan.groups)
    designs = {ONE: f"1 x {plan.draws}", MULTI: f"{plan.runs} x {share}"}
    total, done = 2 * len(METHODS) + 2, 0
    for form, design in designs.items():
        for method, title in METHODS.items():
            bench.show(done, total, f"measuring {title}, {form}")
            repeated = tuple(
                tuple(numbers(bench, one) for one in _forms(populations[method], bench, form, group))
                for group in groups
            )
            found.append(Row(title, form, design, repeated))
            done += 1
    bench.show(done, total, "measuring deep ensembles and HMC")
    begun = starts(bench)
    ensembles = tuple((numbers(bench, begun[group * plan.runs : (group + 1) * plan.runs]),) for group in groups)
    return [*found, Row(ENSEMBLE, MULTI, f"{plan.runs} x 1", ensembles), *_chains(bench)]


def _forms(population: ob.Population, bench: Desk, form: str, group: int) -> Iterator[ob.Population]:
    plan = bench.plan
    if form == MULTI:
        yield multi_mode(population, plan, group)
        return
    for run in range(min(plan.singles, plan.runs)):
        yield one_mode(population, group * plan.runs + run)


def _chains(bench: Desk) -> Iterator[Row]:
    """HMC: each chain alone against the other chains, and two halves of the chains against each other."""
    plan, everything, few = bench.plan, hmc(bench), thinned(bench)
    chain, thin = chain_of(everything), chain_of(few)
    apart = tuple((numbers(bench, everything[chain == own], rival=few[thin != own]),) for own in range(plan.chains))
    yield Row(HMC, ONE, f"1 x {plan.chain_draws}", apart)
    half = plan.chains // 2
    first, second = few[thin < half], few[thin >= half]
    there, back = numbers(bench, first, rival=second), numbers(bench, second, rival=first)
    once = {name: value for name, value in back.items() if name not in SYMMETRIC}  # the same there and back
    yield Row(HMC, MULTI, f"{half} x {len(few) // plan.chains}", ((there,), (once,)))


# ----------------------------------------------------------------------
# Smaller tables beside the large one: the part of runs, the distance to HMC, and what hangs on the normal form.


FORMS = (FORM, "unit-norm/first", "unit-norm/norm", "balanced/max", "balanced/norm", "keep/max", "aligned")


def pairs(found: Sequence[Row]) -> list[tuple[Row, Row]]:
    """One-mode and multi-mode rows of each method of the paper, HMC left out."""
    multi = {row.method: row for row in found if row.form == MULTI}
    return [(row, multi[row.method]) for row in found if row.form == ONE and row.method in METHODS.values()]


def gap_of_runs(bench: Desk, multi: Row) -> float:
    """How far one mode should be above many if only the number of runs counts, from the multi-mode row alone.

    With f the share of pairs of one run, 1 for one mode, MMD is d + f v; the multi-mode row gives f v.
    """
    share = run_share(bench)
    return (1 - share) * multi.mean("mmd_runs") / share if share else 0.0


def run_share(bench: Desk) -> float:
    """Share of the pairs of networks of a multi-mode population that come from one run."""
    return ob.same_run_share([max(1, bench.plan.draws // bench.plan.runs)] * bench.plan.runs)


def run_table(bench: Desk, found: Sequence[Row]) -> ob.reporting.Table:
    """Does one-mode against multi-mode restate how many runs were pooled?"""
    columns = (
        ob.reporting.Column("method"),
        ob.reporting.Column("one mode", "10 x squared MMD of the one-mode row", "lower", 2),
        ob.reporting.Column("multi mode", "the same of the multi-mode row", "lower", 2),
        ob.reporting.Column("ratio", "multi mode / one mode", "", 3),
        ob.reporting.Column("gap", "one mode - multi mode", "", 2),
        ob.reporting.Column("gap from runs", "what the number of runs alone predicts, from the multi-mode row", "", 2),
        ob.reporting.Column("without runs", "MMD of the multi-mode row without pairs of one run", "lower", 2),
    )
    return ob.reporting.Table(
        "runs",
        "Does the distance say more than how many runs were pooled?",
        columns,
        tuple(_run_row(bench, one, multi) for one, multi in pairs(found)),
        "± one standard error over independent repetitions",
        f"Where populations differ in nothing but their runs, the ratio is {run_share(bench):.3f}. The last column is "
        "what is left: 0 means that single networks of the method follow the law of independent trainings.",
    )


def _run_row(bench: Desk, one: Row, multi: Row) -> tuple[ob.reporting.Cell, ...]:
    printed = [published(row.method, row.form, "mmd") for row in (one, multi)]
    ratio = None if printed[0] is None or printed[1] is None else printed[1] / printed[0]
    first, second = one.mean("mmd"), multi.mean("mmd")
    return (
        one.method,
        one.number("mmd"),
        multi.number("mmd"),
        ob.reporting.Number(
            second / first if first else None, published=ratio, note="" if first else "nothing to divide by"
        ),
        ob.reporting.Number(first - second),
        ob.reporting.Number(gap_of_runs(bench, multi)),
        measured(multi.values("mmd_rest")),
    )


def distance_table(bench: Desk, found: Sequence[Row]) -> ob.reporting.Table:
    """How far is each population from HMC?"""
    columns = (
        ob.reporting.Column("method"),
        ob.reporting.Column("form"),
        ob.reporting.Column("MMD to HMC", "10 x squared MMD of raw weights", "lower", 2),
        ob.reporting.Column("NS to HMC", f"the same without symmetries, in the form {FORM}", "lower", 2),
        ob.reporting.Column(
            "NS without runs", "NS without pairs of one run: what is left if runs are not counted", "lower", 2
        ),
        ob.reporting.Column(
            "TV to HMC", "total variation of the average predictives, mean over test examples", "lower", 2, "%"
        ),
        ob.reporting.Column("agreement", "test examples with the same most probable class as HMC", "higher", 1, "%"),
    )
    measures = ("hmc_mmd", "hmc_ns", "hmc_ns_rest", "tv", "agreement")
    return ob.reporting.Table(
        "hmc",
        "How far is each method from Hamiltonian Monte Carlo?",
        columns,
        tuple((row.method, row.form, *(_to_hmc(row, name) for name in measures)) for row in found),
        "± one standard error over independent repetitions",
        "A chain of HMC is compared with the other chains, half of the chains with the other half; their predictives "
        "too. Without runs, a single run has no distance of its own.",
    )


def _to_hmc(row: Row, measure: str) -> ob.reporting.Number:
    if measure.endswith("_rest") and row.form == ONE:
        return ob.reporting.Number(None, note="needs several runs")
    return row.number(measure)


def form_table(bench: Desk) -> ob.reporting.Table:
    """What hangs on the way in which symmetries are removed?"""
    own, plan = problem(bench), bench.plan
    populations = {title: multi_mode(runs_of(bench, method), plan, 0) for method, title in METHODS.items()}
    populations[ENSEMBLE] = starts(bench)[: plan.runs]
    found = {}
    for place, (title, population) in enumerate(populations.items()):
        bench.show(place, len(populations), f"other forms: {title}")
        found[title] = ob.discrepancy(
            population, reference(bench), symmetry=symmetry(bench), normal_forms=FORMS, model=own.model,
            inputs=own.test[0], preset=PRESET, permutations=0, n_resamples=0, layers=False,
        )  # fmt: skip
    rows: list[tuple[ob.reporting.Cell, ...]] = [
        (form, *(ob.reporting.Number(SQUARED * one.sensitivity[form]) for one in found.values()))
        for form in ("raw", *FORMS)
    ]
    functions = [one.function for one in found.values()]
    rows.append(
        (
            "as functions",
            *(ob.reporting.Number(None if one is None else SQUARED * one.squared, note="") for one in functions),
        )
    )
    return ob.reporting.Table(
        "forms",
        "What hangs on the way in which symmetries are removed?",
        (
            ob.reporting.Column("form", "scale / order of units"),
            *(ob.reporting.Column(title, digits=2) for title in populations),
        ),
        tuple(rows),
        note=f"10 x squared MMD to the reference, first group of the multi-mode rows, once. {FORM} is the NS of the "
        "large table. 'aligned' moves all networks into one frame; 'as functions' compares probabilities on test "
        "inputs and needs no form.",
    )


# ----------------------------------------------------------------------
# The paper's claims about its table, judged by our numbers.


# What multi-mode is said to be better at: words, measure, the better direction, unit.
_BETTER = (
    ("more accurate", "accuracy", "higher", "points"),
    ("better by the Brier score", "brier", "lower", "points"),
    ("better calibrated (ECE)", "ece", "lower", "points"),
    ("better calibrated, class by class (ACE)", "ace", "lower", "per mille"),
    ("more diverse on familiar inputs (ID MI)", "id_mi", "higher", "hundredths of a nat"),
    ("more diverse on foreign inputs (OOD MI)", "ood_mi", "higher", "hundredths of a nat"),
)
_WORTH = ("accuracy", "brier", "ece", "ace", "aupr", "fpr95")  # what distance is said not to go with


def claims(bench: Desk, found: Sequence[Row]) -> Iterator[ob.reporting.Claim]:
    """All claims, each with its verdict."""
    for words, measure, better, unit in _BETTER:
        yield _multi_mode(found, words, measure, better, unit)
    yield _runs(bench, found)
    yield _symmetries(found)
    yield _correlated(found)
    yield _reference(bench, found)


def _multi_mode(found: Sequence[Row], words: str, measure: str, better: str, unit: str) -> ob.reporting.Claim:
    differences = [
        difference(one.method, one.by_group(measure), multi.by_group(measure), better) for one, multi in pairs(found)
    ]
    verdict = better_in_most(differences)
    won = sum(own.mean > 0 for own in differences)
    listed = ", ".join(f"{own.method} {own.mean:+.2f} ± {own.error:.2f}" for own in differences)
    return ob.reporting.Claim(
        f"Multi-mode methods are {words} than their one-mode forms.",
        verdict,
        f"better for {won} of {len(differences)} methods ({unit}, positive is better: {listed})",
        _printed(measure, better),
        _caveat(differences) if verdict == CAVEAT else "",
    )


def _printed(measure: str, better: str) -> str:
    sign = 1 if better == "higher" else -1
    gains = [
        sign * (multi - one)
        for name in ("Dropout", "viBNN", "SWAG", "Laplace")
        if (one := published(name, ONE, measure)) is not None and (multi := published(name, MULTI, measure)) is not None
    ]
    return f"CIFAR-100: better for {sum(gain > 0 for gain in gains)} of {len(gains)} methods"


def _caveat(differences: Sequence[Difference]) -> str:
    worse = [own.method for own in differences if own.mean <= 0]
    sure = [own.method for own in differences if own.lost]
    told = f"not for {', '.join(worse)}" if worse else "for all methods"
    return f"{told}; worse beyond chance: {', '.join(sure) or 'none'}"


def _runs(bench: Desk, found: Sequence[Row]) -> ob.reporting.Claim:
    both = pairs(found)
    predicted = [gap_of_runs(bench, multi) for _, multi in both]
    gaps = [one.mean("mmd") - multi.mean("mmd") for one, multi in both]
    verdict = runs_tell(predicted, gaps)
    listed = ", ".join(
        f"{one.method} {gap:.2f} ({guess:.2f} predicted)"
        for (one, _), gap, guess in zip(both, gaps, predicted, strict=True)
    )
    off = [
        one.method
        for (one, _), gap, guess in zip(both, gaps, predicted, strict=True)
        if abs(guess - gap) > 0.25 * abs(gap)
    ]
    return ob.reporting.Claim(
        "That one-mode methods are farther from the reference by MMD mostly restates how many runs were pooled.",
        verdict,
        f"one mode minus multi mode: {listed}",
        "multi mode / one mode on CIFAR-100: Laplace 0.11, Dropout 0.16, viBNN 0.68, SWAG 0.75; runs alone give 0.09",
        f"not within a quarter for {', '.join(off)}" if verdict == CAVEAT else "",
    )


def _symmetries(found: Sequence[Row]) -> ob.reporting.Claim:
    own = [row for row in found if row.method not in (ENSEMBLE, HMC)]
    up = [row for row in own if row.mean("ns") > row.mean("mmd")]
    verdict, p = as_often_as_not(len(up), len(own))
    listed = ", ".join(f"{row.method} ({row.form})" for row in up) or "none"
    told = ", ".join(f"{rows} of {of} on {name}" for name, (rows, of) in UP_OF_ALL.items())
    return ob.reporting.Claim(
        "Removing symmetries raises the distance about as often as it lowers it (a reviewer's remark).",
        verdict,
        f"NS is above MMD in {len(up)} of {len(own)} rows ({listed}); p {p:.2f} for half of the time",
        f"above in {told}",
        f"{len(own)} rows are too few to tell {len(up)} from half" if verdict == CAVEAT else "",
    )


def _correlated(found: Sequence[Row]) -> ob.reporting.Claim:
    own = [row for row in found if row.method != HMC]  # as in the paper
    distances = [row.mean("mmd") for row in own]
    ours = [correlation(name, distances, [row.mean(name) for row in own]) for name in _WORTH]
    theirs = [correlation(name, column("mmd"), column(name)) for name in _WORTH]
    verdict, clear = no_clear_correlation(ours)
    printed = no_clear_correlation(theirs)[0]
    return ob.reporting.Claim(
        "Closeness to the reference (MMD) does not clearly go with how well a population performs.",
        verdict,
        f"rank correlation over {len(own)} rows: "
        + ", ".join(f"{one.measure} {one.rho:+.2f}" for one in ours)
        + f"; so few rows show only correlations beyond about ±{noticeable(len(own), len(ours)):.2f}",
        "from the published CIFAR-100 rows: "
        + ", ".join(f"{one.measure} {one.rho:+.2f}" for one in theirs)
        + f"; by the same criterion: {printed}",
        f"it does for {', '.join(clear)} (p < 0.05 after correction)" if verdict == CAVEAT else "",
    )


def _reference(bench: Desk, found: Sequence[Row]) -> ob.reporting.Claim:
    """Not in the paper: reviewers asked for it."""
    apart = ob.discrepancy(
        reference(bench),
        thinned(bench),
        symmetry=symmetry(bench),
        normal_forms=FORM,
        permutations=bench.plan.permutations,
        n_resamples=0,
        layers=False,
    )
    gap = apart.mmd_canonical
    assert gap is not None  # a form was asked for
    others = [row for row in found if row.method != HMC]
    by_function = min(others, key=lambda row: row.mean("tv"))
    by_weights = min((row for row in others if row.form == MULTI), key=lambda row: row.mean("hmc_ns_rest"))
    ensemble = next(row for row in found if row.method == ENSEMBLE)
    return ob.reporting.Claim(
        "Independent trainings can stand for the Bayesian posterior (the paper's reference, which reviewers doubted).",
        stands_for(gap.p_value, gap.remainder),
        f"without symmetries they are {SQUARED * gap.remainder:.2f} from HMC beyond what runs explain "
        f"(p {gap.p_value:.3g}, runs exchanged); ensembles predict {ensemble.mean('tv'):.1f} % (total variation) away "
        f"from HMC. Nearest to HMC as a predictor: {by_function.method} ({by_function.form}, "
        f"{by_function.mean('tv'):.1f} %); by weights: {by_weights.method} ({by_weights.mean('hmc_ns_rest'):.2f})",
        "not tested",
    )


# ----------------------------------------------------------------------
# What are approximate posteriors worth, and how far are they from a reference? The paper's table.


TITLE = "What are approximate posteriors worth, and how far are they from independent trainings and from HMC?"

COLUMNS = {
    "mmd": ob.reporting.Column(
        "MMD", "10 x squared MMD of raw weights to the reference of independent trainings", "lower", 2
    ),
    "ns": ob.reporting.Column("NS", "the same after symmetries were removed (no symmetry)", "lower", 2),
    "accuracy": ob.reporting.Column(
        "Acc", "share of test examples whose most probable class is right", "higher", 2, "%"
    ),
    "ece": ob.reporting.Column(
        "ECE", "expected calibration error: confidence against accuracy in 15 bins", "lower", 2, "%"
    ),
    "ace": ob.reporting.Column(
        "ACE", "adaptive calibration error: class-wise, 15 bins of equal mass", "lower", 2, "per mille"
    ),
    "brier": ob.reporting.Column(
        "Brier", "squared distance of probabilities to the truth, summed over classes, x 100", "lower", 2
    ),
    "nll": ob.reporting.Column("NLL", "negative log likelihood of an example", "lower", 3, "nats"),
    "aupr": ob.reporting.Column(
        "AUPR", "area under precision and recall, familiar against foreign inputs", "higher", 1, "%"
    ),
    "auroc": ob.reporting.Column(
        "AUROC", "chance that a foreign input looks more foreign than a familiar one", "higher", 1, "%"
    ),
    "fpr95": ob.reporting.Column(
        "FPR95", "foreign inputs accepted where 95 % of the familiar ones are", "lower", 1, "%"
    ),
    "id_mi": ob.reporting.Column("ID MI", "mutual information of the networks on test inputs, x 100 nats", "lower", 2),
    "ood_mi": ob.reporting.Column("OOD MI", "the same on foreign inputs", "higher", 1),
}
HIGHER = {name for name, column in COLUMNS.items() if column.better == "higher"}


def part(bench: Desk) -> ob.reporting.Section:
    """Measure every method in both forms, and compare with what was published."""
    found = rows(bench)
    items = (
        _main(bench, found),
        _scatter(found),
        run_table(bench, found),
        distance_table(bench, found),
        form_table(bench),
    )
    text = (*_answer(bench, found), *_sureness(found), _setting(bench), _mixing(bench))
    return ob.reporting.Section("table", TITLE, text, items, tuple(claims(bench, found)))


def _main(bench: Desk, found: Sequence[Row]) -> ob.reporting.Table:
    plan, own = bench.plan, problem(bench)
    head = (
        ob.reporting.Column("method"),
        ob.reporting.Column("form"),
        ob.reporting.Column("networks", "independent runs x networks of each"),
    )
    errors = (
        f"± one standard error over independent repetitions: {plan.groups * plan.singles} runs for one-mode rows, "
        f"{plan.groups} groups of {plan.runs} runs for multi-mode rows and ensembles, chains for HMC; test examples "
        "are the same for all, so that differences between rows are surer than single numbers"
    )
    return ob.reporting.Table(
        "methods",
        f"Methods on {own.name}, beside what the paper found on CIFAR-100",
        (*head, *COLUMNS.values()),
        tuple((row.method, row.form, row.design, *(row.number(name) for name in COLUMNS)) for row in found),
        errors,
        f"Published values are for ResNet-18 on CIFAR-100 against SVHN, so only patterns can agree. MMD: mean of 20 "
        f"kernels. NS: symmetries removed in the form {FORM}. Foreign inputs are {own.outside_name}, told by the "
        "largest probability. SWAG, Laplace and SGHMC begin at the networks of the deep ensemble.",
    )


def _scatter(found: Sequence[Row]) -> ob.reporting.Figure:
    """Distance against what a population is worth."""
    label = {name: f"{own.name} ({own.unit})" if own.unit else own.name for name, own in COLUMNS.items()}
    panels = [
        ob.reporting.Panel(
            "points",
            COLUMNS[name].name,
            ob.reporting.Axis("MMD to trainings"),
            ob.reporting.Axis(label[name]),
            _points(found, name),
        )
        for name in ("accuracy", "brier", "ece", "ood_mi")
    ]
    equal = (ob.reporting.Rule("NS = MMD", direction="diagonal"),)
    panels.append(
        ob.reporting.Panel(
            "points", "NS against MMD", ob.reporting.Axis("MMD"), ob.reporting.Axis("NS"), _points(found, "ns"), equal
        )
    )
    above = sum(row.mean("ns") > row.mean("mmd") for row in found)
    return ob.reporting.Figure(
        "distance-and-worth",
        "Is a population that is close to independent trainings better?",
        f"Each point is a row of the table, with one standard error. Removing symmetries raises the distance in "
        f"{above} of {len(found)} rows.",
        tuple(panels),
    )


def _points(found: Sequence[Row], measure: str) -> tuple[ob.reporting.Series, ...]:
    """A measure against MMD, one series for each form."""
    series = []
    for shade, form in enumerate((ONE, MULTI)):
        own = [row for row in found if row.form == form]
        ends = [(row.mean(measure), row.number(measure).error or 0.0) for row in own]
        series.append(
            ob.reporting.Series(
                form,
                tuple(row.mean("mmd") for row in own),
                tuple(mean for mean, _ in ends),
                tuple(mean - error for mean, error in ends),
                tuple(mean + error for mean, error in ends),
                shade=shade,
            )
        )
    return tuple(series)


def _answer(bench: Desk, found: Sequence[Row]) -> tuple[str, ...]:
    best = max(found, key=lambda row: row.mean("accuracy"))
    nearest = min(found, key=lambda row: row.mean("mmd"))
    like = min((row for row in found if row.method != "HMC"), key=lambda row: row.mean("tv"))
    share = run_share(bench)
    return (
        f"{best.method} ({best.form}) is right most often, {best.mean('accuracy'):.1f} % of the test examples. "
        f"Nearest to independent trainings by MMD is {nearest.method} ({nearest.form}, {nearest.mean('mmd'):.2f}), and "
        f"{like.method} ({like.form}) predicts most like HMC (total variation {like.mean('tv'):.1f} %).",
        f"One-mode rows take all networks from one run, multi-mode rows take as many from {bench.plan.runs} runs. That "
        f"alone divides the part of MMD that comes from runs by {1 / share if share else float('inf'):.0f}.",
    )


def _sureness(found: Sequence[Row]) -> tuple[str, ...]:
    """Why averaging helps calibration or does not; nothing where no temperature is best."""
    forms = [
        [value for pair in pairs(found) for row in pair if row.form == form for value in row.values("temperature")]
        for form in (ONE, MULTI)
    ]
    if not all(forms):
        return ()
    one, many = (median(values) for values in forms)
    effect = "does not make them less sure here"
    if many < one:
        effect = "makes them less sure, which helps " + ("here too" if many >= 1 else "only those that are too sure")
    return (
        f"Calibration: predictions would be best at a temperature of {one:.2f} in one mode and {many:.2f} in many "
        "(medians over all repetitions); above 1 they are too sure of themselves, below 1 not sure enough. "
        f"Averaging over runs {effect}.",
    )


def _setting(bench: Desk) -> str:
    plan, own = bench.plan, problem(bench)
    weights = sum(value.numel() for value in own.model.parameters())
    return (
        f"The networks: {described(plan.architecture)}, {weights:,} weights, on {len(own.train[0]):,} examples of "
        f"{own.name}. Each training is {plan.epochs} epochs of SGD with momentum; its weight decay is a Gaussian prior "
        f"of standard deviation {plan.prior:g}, the same for all methods. The reference has "
        f"{plan.reference_networks:,} independent trainings."
    )


def _mixing(bench: Desk) -> str:
    own, plan = problem(bench), bench.plan
    found = ob.diagnose(own.model, hmc(bench), own.test[0][:200], weights=False).functions
    told = f"HMC: {plan.chains} chains of {plan.chain_draws} draws after {plan.warmup} of warm-up, {plan.leapfrog} "
    told += "leapfrog steps each"
    if found is None:
        return f"{told}; too short to tell whether they have mixed."
    return (
        f"{told}; R-hat of predictions is {found.median_rhat:.3f} in the median and {found.worst_rhat:.2f} at worst "
        "(1 is perfect)."
    )
