"""What are approximate posteriors worth, and how far are they from a reference? The paper's table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.numbers import mean_number
from onebasin_papers.symmetry.networks import (
    AVERAGES,
    IMPLICIT,
    METHODS,
    SymmetryWorkspace,
    chain_of,
    described,
    hmc,
    implicit_of,
    methods_of,
    multi_mode,
    one_mode,
    packed,
    problem,
    reference,
    runs_of,
    starts,
    symmetry,
)
from onebasin_papers.symmetry.settings import ENSEMBLE, MULTI, ONE, UP_OF_ALL, column, published
from onebasin_papers.verdicts import (
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

report = ob.reporting

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


_DISTANCES = ("mmd", "mmd_runs", "mmd_rest", "ns", "ns_rest")


def numbers(
    workspace: SymmetryWorkspace,
    population: ob.Population,
    *,
    rival: ob.Population | None = None,
    model: nn.Module | None = None,
) -> Numbers:
    """All measures of a population.

    Args:
        workspace: with reference and HMC.
        population: to be judged.
        rival: the HMC that it is compared with; that of the study unless given.
        model: the architecture of the population where it is another one; its weights then have no distances (NaN).
    """
    task = problem(workspace)
    answers = hmc_predictive(workspace) if rival is None else ob.predict(task.model, rival, task.test[0], average=True)
    result = _predictive(workspace, population, answers, task.model if model is None else model)
    if model is not None:
        return result | {f"{prefix}{name}": math.nan for prefix in ("", "hmc_") for name in _DISTANCES}
    result |= _apart(workspace, population, reference(workspace), "")
    return result | _apart(workspace, population, thinned(workspace) if rival is None else rival, "hmc_")


def thinned(workspace: SymmetryWorkspace) -> ob.Population:
    """HMC with at most `COMPARED` draws of each chain, evenly spread."""
    step = max(1, workspace.settings.chain_draws // COMPARED)
    return workspace.cached("hmc-thinned", lambda: hmc(workspace)[::step])


def hmc_predictive(workspace: SymmetryWorkspace) -> Tensor:
    """The average predictive of all HMC draws on test inputs (examples, classes)."""
    task = problem(workspace)
    return workspace.cached(
        "hmc-predictive", lambda: ob.predict(task.model, hmc(workspace), task.test[0], average=True)
    )


def _predictive(workspace: SymmetryWorkspace, population: ob.Population, answers: Tensor, model: nn.Module) -> Numbers:
    task = problem(workspace)
    # Errors are taken over runs, not over examples.
    evaluation = ob.evaluate(model, population, task.test, ood=task.outside, reference=answers, n_resamples=2)
    inside, detection = evaluation.in_distribution, evaluation.detection["msp"]
    return {
        "accuracy": PERCENT * inside["accuracy"].value,
        "ece": PERCENT * inside["ece"].value,
        "ace": PER_MILLE * inside["ace_class_wise"].value,
        "brier": PERCENT * inside["brier"].value,
        "aupr": PERCENT * detection["aupr_in"].value,
        "aupr_out": PERCENT * detection["aupr_out"].value,
        "auroc": PERCENT * detection["auroc"].value,
        "fpr95": PERCENT * detection["fpr95_in"].value,
        "nll": inside["nll"].value,
        "temperature": math.nan if evaluation.temperature is None else evaluation.temperature,
        "id_mi": HUNDREDTHS * inside["mutual_information"].value,
        "ood_mi": HUNDREDTHS * evaluation.ood["mutual_information"].value,
        "tv": PERCENT * evaluation.reference["total_variation"].value,
        "agreement": PERCENT * evaluation.reference["agreement"].value,
    }


def _apart(workspace: SymmetryWorkspace, population: ob.Population, other: ob.Population, prefix: str) -> Numbers:
    """MMD with and without symmetries, and the parts of them that runs explain."""
    discrepancy = ob.discrepancy(
        population,
        other,
        symmetry=symmetry(workspace),
        normal_forms=FORM,
        preset=PRESET,
        permutations=0,
        n_resamples=0,
        layers=False,
    )
    raw, without = discrepancy.raw.total, discrepancy.mmd_canonical
    assert without is not None  # a form was asked for
    return {
        f"{prefix}mmd": SQUARED * raw.squared,
        f"{prefix}mmd_runs": SQUARED * raw.explained,
        f"{prefix}mmd_rest": SQUARED * raw.remainder,
        f"{prefix}ns": SQUARED * without.squared,
        f"{prefix}ns_rest": SQUARED * without.remainder,
    }


HMC = "HMC"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        method: as in the paper.
        form: `ONE` or `MULTI`.
        runs: independent runs in each repetition.
        each: networks of each run.
        groups: for each group its repetitions. Groups of the same number of two methods share their start.
    """

    method: str
    form: str
    runs: int
    each: int
    groups: tuple[tuple[Numbers, ...], ...]

    @property
    def design(self) -> str:
        """Independent runs x networks of each."""
        return f"{self.runs} x {self.each}"

    @property
    def run_share(self) -> float:
        """Share of the pairs of networks that come from one run."""
        return ob.same_run_share([self.each] * self.runs)

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

    def number(self, measure: str) -> report.Number:
        """For a table, with the published value beside it."""
        if not self.values(measure):
            several = measure.endswith("_rest") and self.form == ONE
            return report.Number(None, note="needs several runs" if several else "another architecture")
        return mean_number(self.values(measure), published(self.method, self.form, measure))


def rows(workspace: SymmetryWorkspace) -> list[Row]:
    """All rows, in the paper's order: one-mode methods, multi-mode methods, one network of each run, HMC."""
    return workspace.cached("rows", lambda: _measured(workspace))


def _measured(workspace: SymmetryWorkspace) -> list[Row]:
    settings, measured_rows = workspace.settings, list[Row]()
    implicit = implicit_of(workspace)
    methods = {**methods_of(workspace), **implicit}
    populations = {method: runs_of(workspace, method) for method in (*workspace.own.methods, *METHODS, *implicit)}
    total, done = 2 * len(methods) + 2, 0
    for form in (ONE, MULTI):
        for method, title in methods.items():
            workspace.progress(done, total, f"measuring {title}, {form}")
            model = packed(workspace).model if method == "packed" else None
            repeated = tuple(
                tuple(
                    numbers(workspace, one, model=model) for one in _forms(populations[method], workspace, form, group)
                )
                for group in range(settings.groups)
            )
            networks = len(next(_forms(populations[method], workspace, form, 0)))
            runs = 1 if form == ONE else settings.runs
            measured_rows.append(Row(title, form, runs, networks // runs, repeated))
            done += 1
    workspace.progress(done, total, "measuring deep ensembles, averages and HMC")
    singles = {ENSEMBLE: starts(workspace)} | {title: runs_of(workspace, method) for method, title in AVERAGES.items()}
    for title, population in singles.items():
        ensembles = tuple(
            (numbers(workspace, population[group * settings.runs : (group + 1) * settings.runs]),)
            for group in range(settings.groups)
        )
        measured_rows.append(Row(title, MULTI, settings.runs, 1, ensembles))
    return [*measured_rows, *_chains(workspace)]


def _forms(population: ob.Population, workspace: SymmetryWorkspace, form: str, group: int) -> Iterator[ob.Population]:
    settings = workspace.settings
    if form == MULTI:
        yield multi_mode(population, settings, group)
        return
    for run in range(min(settings.singles, settings.runs)):
        yield one_mode(population, group * settings.runs + run)


def _chains(workspace: SymmetryWorkspace) -> Iterator[Row]:
    """HMC: each chain alone against the other chains, and two halves of the chains against each other."""
    settings, everything, few = workspace.settings, hmc(workspace), thinned(workspace)
    chain, thin = chain_of(everything), chain_of(few)
    apart = tuple(
        (numbers(workspace, everything[chain == number], rival=few[thin != number]),)
        for number in range(settings.chains)
    )
    yield Row(HMC, ONE, 1, settings.chain_draws, apart)
    half = settings.chains // 2
    first, second = few[thin < half], few[thin >= half]
    there, back = numbers(workspace, first, rival=second), numbers(workspace, second, rival=first)
    once = {name: value for name, value in back.items() if name not in SYMMETRIC}  # the same there and back
    yield Row(HMC, MULTI, half, len(few) // settings.chains, ((there,), (once,)))


FORMS = (FORM, "unit-norm/first", "unit-norm/norm", "balanced/max", "balanced/norm", "keep/max", "aligned")


def pairs(rows: Sequence[Row], own: Collection[str] = ()) -> list[tuple[Row, Row]]:
    """One-mode and multi-mode rows of each method of the paper, and of some others; HMC left out."""
    multi = {row.method: row for row in rows if row.form == MULTI}
    wanted = {*METHODS.values(), *own}
    return [(row, multi[row.method]) for row in rows if row.form == ONE and row.method in wanted]


def gap_of_runs(multi: Row) -> float:
    """How far one mode should be above many if only the number of runs counts, from the multi-mode row alone.

    With f the share of pairs of one run, 1 for one mode, MMD is d + f v; the multi-mode row gives f v.
    """
    share = multi.run_share
    return (1 - share) * multi.mean("mmd_runs") / share if share else 0.0


def run_share(workspace: SymmetryWorkspace) -> float:
    """Share of the pairs of networks that come from one run, in multi-mode populations of the paper's methods."""
    settings = workspace.settings
    return ob.same_run_share([max(1, settings.draws // settings.runs)] * settings.runs)


def run_table(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> report.Table:
    """Does one-mode against multi-mode restate how many runs were pooled?"""
    columns = (
        report.Column("method"),
        report.Column("one mode", "10 x squared MMD of the one-mode row", "lower", 2),
        report.Column("multi mode", "the same of the multi-mode row", "lower", 2),
        report.Column("ratio", "multi mode / one mode", "", 3),
        report.Column("gap", "one mode - multi mode", "", 2),
        report.Column("gap from runs", "what the number of runs alone predicts, from the multi-mode row", "", 2),
        report.Column("without runs", "MMD of the multi-mode row without pairs of one run", "lower", 2),
    )
    return report.Table(
        "runs",
        "Does the distance say more than how many runs were pooled?",
        columns,
        tuple(
            _run_row(workspace, one, multi)
            for one, multi in pairs(rows, (*workspace.own.methods, *IMPLICIT.values()))
            if one.values("mmd")
        ),
        "± one standard error over independent repetitions",
        f"Where populations differ in nothing but their runs, the ratio is {run_share(workspace):.3f} for the paper's "
        "methods; implicit ensembles have fewer networks in a run. The last column is what is left: 0 means that "
        "single networks of the method follow the law of independent trainings.",
    )


def _run_row(workspace: SymmetryWorkspace, one: Row, multi: Row) -> tuple[report.Cell, ...]:
    printed = [published(row.method, row.form, "mmd") for row in (one, multi)]
    ratio = None if printed[0] is None or printed[1] is None else printed[1] / printed[0]
    first, second = one.mean("mmd"), multi.mean("mmd")
    return (
        one.method,
        one.number("mmd"),
        multi.number("mmd"),
        report.Number(second / first if first else None, published=ratio, note="" if first else "nothing to divide by"),
        report.Number(first - second),
        report.Number(gap_of_runs(multi)),
        mean_number(multi.values("mmd_rest")),
    )


def distance_table(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> report.Table:
    """How far is each population from HMC?"""
    columns = (
        report.Column("method"),
        report.Column("form"),
        report.Column("MMD to HMC", "10 x squared MMD of raw weights", "lower", 2),
        report.Column("NS to HMC", f"the same without symmetries, in the form {FORM}", "lower", 2),
        report.Column(
            "NS without runs", "NS without pairs of one run: what is left if runs are not counted", "lower", 2
        ),
        report.Column(
            "TV to HMC", "total variation of the average predictives, mean over test examples", "lower", 2, "%"
        ),
        report.Column("agreement", "test examples with the same most probable class as HMC", "higher", 1, "%"),
    )
    measures = ("hmc_mmd", "hmc_ns", "hmc_ns_rest", "tv", "agreement")
    return report.Table(
        "hmc",
        "How far is each method from Hamiltonian Monte Carlo?",
        columns,
        tuple((row.method, row.form, *(_to_hmc(row, name) for name in measures)) for row in rows),
        "± one standard error over independent repetitions",
        "A chain of HMC is compared with the other chains, half of the chains with the other half; their predictives "
        "too. Without runs, a single run has no distance of its own.",
    )


def _to_hmc(row: Row, measure: str) -> report.Number:
    if measure.endswith("_rest") and row.form == ONE:
        return report.Number(None, note="needs several runs")
    return row.number(measure)


def form_table(workspace: SymmetryWorkspace) -> report.Table:
    """What hangs on the way in which symmetries are removed?"""
    task, settings = problem(workspace), workspace.settings
    populations = {
        title: multi_mode(runs_of(workspace, method), settings, 0) for method, title in methods_of(workspace).items()
    }
    populations[ENSEMBLE] = starts(workspace)[: settings.runs]
    discrepancies = {}
    for place, (title, population) in enumerate(populations.items()):
        workspace.progress(place, len(populations), f"other forms: {title}")
        discrepancies[title] = ob.discrepancy(
            population, reference(workspace), symmetry=symmetry(workspace), normal_forms=FORMS, model=task.model,
            inputs=task.test[0], preset=PRESET, permutations=0, n_resamples=0, layers=False,
        )  # fmt: skip
    rows: list[tuple[report.Cell, ...]] = [
        (form, *(report.Number(SQUARED * one.sensitivity[form]) for one in discrepancies.values()))
        for form in ("raw", *FORMS)
    ]
    functions = [one.function for one in discrepancies.values()]
    rows.append(
        ("as functions", *(report.Number(None if one is None else SQUARED * one.squared, note="") for one in functions))
    )
    return report.Table(
        "forms",
        "What hangs on the way in which symmetries are removed?",
        (report.Column("form", "scale / order of units"), *(report.Column(title, digits=2) for title in populations)),
        tuple(rows),
        note=f"10 x squared MMD to the reference, first group of the multi-mode rows, once. {FORM} is the NS of the "
        "large table. 'aligned' moves all networks into one frame; 'as functions' compares probabilities on test "
        "inputs and needs no form.",
    )


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


def claims(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> Iterator[report.Claim]:
    """All claims, each with its verdict; they are about the paper's methods."""
    others = {*workspace.own.methods, *IMPLICIT.values(), *AVERAGES.values()}
    rows = [row for row in rows if row.method not in others]
    for words, measure, better, unit in _BETTER:
        yield _multi_mode(rows, words, measure, better, unit)
    yield _runs(workspace, rows)
    yield _symmetries(rows)
    yield _correlated(rows)
    yield _reference(workspace, rows)


def _multi_mode(rows: Sequence[Row], words: str, measure: str, better: str, unit: str) -> report.Claim:
    differences = [
        difference(one.method, one.by_group(measure), multi.by_group(measure), better) for one, multi in pairs(rows)
    ]
    verdict = better_in_most(differences)
    won = sum(gain.mean > 0 for gain in differences)
    listed = ", ".join(f"{gain.method} {gain.mean:+.2f} ± {gain.error:.2f}" for gain in differences)
    return report.Claim(
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
    worse = [gain.method for gain in differences if gain.mean <= 0]
    sure = [gain.method for gain in differences if gain.lost]
    which = f"not for {', '.join(worse)}" if worse else "for all methods"
    return f"{which}; worse beyond chance: {', '.join(sure) or 'none'}"


def _runs(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> report.Claim:
    both = pairs(rows)
    predicted = [gap_of_runs(multi) for _, multi in both]
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
    return report.Claim(
        "That one-mode methods are farther from the reference by MMD mostly restates how many runs were pooled.",
        verdict,
        f"one mode minus multi mode: {listed}",
        "multi mode / one mode on CIFAR-100: Laplace 0.11, Dropout 0.16, viBNN 0.68, SWAG 0.75; runs alone give 0.09",
        f"not within a quarter for {', '.join(off)}" if verdict == CAVEAT else "",
    )


def _symmetries(rows: Sequence[Row]) -> report.Claim:
    approximate = [row for row in rows if row.method not in (ENSEMBLE, HMC)]
    up = [row for row in approximate if row.mean("ns") > row.mean("mmd")]
    verdict, p = as_often_as_not(len(up), len(approximate))
    listed = ", ".join(f"{row.method} ({row.form})" for row in up) or "none"
    published_counts = ", ".join(f"{rows} of {of} on {name}" for name, (rows, of) in UP_OF_ALL.items())
    return report.Claim(
        "Removing symmetries raises the distance about as often as it lowers it (a reviewer's remark).",
        verdict,
        f"NS is above MMD in {len(up)} of {len(approximate)} rows ({listed}); p {p:.2f} for half of the time",
        f"above in {published_counts}",
        f"{len(approximate)} rows are too few to tell {len(up)} from half" if verdict == CAVEAT else "",
    )


def _correlated(rows: Sequence[Row]) -> report.Claim:
    compared = [row for row in rows if row.method != HMC]  # as in the paper
    distances = [row.mean("mmd") for row in compared]
    ours = [correlation(name, distances, [row.mean(name) for row in compared]) for name in _WORTH]
    theirs = [correlation(name, column("mmd"), column(name)) for name in _WORTH]
    verdict, clear = no_clear_correlation(ours)
    printed = no_clear_correlation(theirs)[0]
    return report.Claim(
        "Closeness to the reference (MMD) does not clearly go with how well a population performs.",
        verdict,
        f"rank correlation over {len(compared)} rows: "
        + ", ".join(f"{one.measure} {one.rho:+.2f}" for one in ours)
        + f"; so few rows show only correlations beyond about ±{noticeable(len(compared), len(ours)):.2f}",
        "from the published CIFAR-100 rows: "
        + ", ".join(f"{one.measure} {one.rho:+.2f}" for one in theirs)
        + f"; by the same criterion: {printed}",
        f"it does for {', '.join(clear)} (p < 0.05 after correction)" if verdict == CAVEAT else "",
    )


def _reference(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> report.Claim:
    """Not in the paper: reviewers asked for it."""
    apart = ob.discrepancy(
        reference(workspace),
        thinned(workspace),
        symmetry=symmetry(workspace),
        normal_forms=FORM,
        permutations=workspace.settings.permutations,
        n_resamples=0,
        layers=False,
    )
    gap = apart.mmd_canonical
    assert gap is not None  # a form was asked for
    approximate = [row for row in rows if row.method != HMC]
    by_function = min(approximate, key=lambda row: row.mean("tv"))
    by_weights = min((row for row in approximate if row.form == MULTI), key=lambda row: row.mean("hmc_ns_rest"))
    ensemble = next(row for row in rows if row.method == ENSEMBLE)
    return report.Claim(
        "Independent trainings can stand for the Bayesian posterior (the paper's reference, which reviewers doubted).",
        stands_for(gap.p_value, gap.remainder),
        f"without symmetries they are {SQUARED * gap.remainder:.2f} from HMC beyond what runs explain "
        f"(p {gap.p_value:.3g}, runs exchanged); ensembles predict {ensemble.mean('tv'):.1f} % (total variation) away "
        f"from HMC. Nearest to HMC as a predictor: {by_function.method} ({by_function.form}, "
        f"{by_function.mean('tv'):.1f} %); by weights: {by_weights.method} ({by_weights.mean('hmc_ns_rest'):.2f})",
        "not tested",
    )


TITLE = "What are approximate posteriors worth, and how far are they from independent trainings and from HMC?"

COLUMNS = {
    "mmd": report.Column(
        "MMD", "10 x squared MMD of raw weights to the reference of independent trainings", "lower", 2
    ),
    "ns": report.Column("NS", "the same after symmetries were removed (no symmetry)", "lower", 2),
    "accuracy": report.Column("Acc", "share of test examples whose most probable class is right", "higher", 2, "%"),
    "ece": report.Column("ECE", "expected calibration error: confidence against accuracy in 15 bins", "lower", 2, "%"),
    "ace": report.Column(
        "ACE", "adaptive calibration error: class-wise, 15 bins of equal mass", "lower", 2, "per mille"
    ),
    "brier": report.Column(
        "Brier", "squared distance of probabilities to the truth, summed over classes, x 100", "lower", 2
    ),
    "nll": report.Column("NLL", "negative log likelihood of an example", "lower", 3, "nats"),
    "aupr": report.Column("AUPR", "area under precision and recall, familiar against foreign inputs", "higher", 1, "%"),
    "auroc": report.Column(
        "AUROC", "chance that a foreign input looks more foreign than a familiar one", "higher", 1, "%"
    ),
    "fpr95": report.Column("FPR95", "foreign inputs accepted where 95 % of the familiar ones are", "lower", 1, "%"),
    "id_mi": report.Column("ID MI", "mutual information of the networks on test inputs, x 100 nats", "lower", 2),
    "ood_mi": report.Column("OOD MI", "the same on foreign inputs", "higher", 1),
}
HIGHER = {name for name, column in COLUMNS.items() if column.better == "higher"}


def part(workspace: SymmetryWorkspace) -> report.Section:
    """Measure every method in both forms, and compare with what was published."""
    table_rows = rows(workspace)
    items = (
        _main(workspace, table_rows),
        _scatter(table_rows),
        run_table(workspace, table_rows),
        distance_table(workspace, table_rows),
        form_table(workspace),
    )
    own = tuple(_own_text(title, table_rows) for title in workspace.own.methods)
    text = (*_answer(workspace, table_rows), *own, *_sureness(table_rows), _setting(workspace), _mixing(workspace))
    return report.Section("table", TITLE, text, items, tuple(claims(workspace, table_rows)))


def _own_text(title: str, rows: Sequence[Row]) -> str:
    """What became of a user's method: its numbers, and its place among all rows."""

    def place(row: Row, measure: str) -> str:
        better = [other for other in rows if _beats(other.mean(measure), row.mean(measure), measure in HIGHER)]
        return f"place {len(better) + 1} of {len(rows)}"

    forms = [
        f"{row.form}: {row.mean('accuracy'):.1f} % right ({place(row, 'accuracy')}), NLL {row.mean('nll'):.3f} "
        f"({place(row, 'nll')}), AUPR {row.mean('aupr'):.1f} % ({place(row, 'aupr')}), MMD {row.mean('mmd'):.2f} to "
        f"independent trainings ({place(row, 'mmd')}), total variation {row.mean('tv'):.1f} % to HMC "
        f"({place(row, 'tv')})"
        for row in rows
        if row.method == title
    ]
    return f"The own method {title}, {'; '.join(forms)}."


def _beats(one: float, other: float, higher: bool) -> bool:
    return one > other if higher else one < other


def _main(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> report.Table:
    settings, task = workspace.settings, problem(workspace)
    head = (
        report.Column("method"),
        report.Column("form"),
        report.Column("networks", "independent runs x networks of each"),
    )
    errors = (
        f"± one standard error over independent repetitions: {settings.groups * settings.singles} runs for one-mode "
        "rows, "
        f"{settings.groups} groups of {settings.runs} runs for multi-mode rows and ensembles, chains for HMC; test "
        "examples "
        "are the same for all, so that differences between rows are surer than single numbers"
    )
    return report.Table(
        "methods",
        f"Methods on {task.name}, beside what the paper found on CIFAR-100",
        (*head, *COLUMNS.values()),
        tuple((row.method, row.form, row.design, *(row.number(name) for name in COLUMNS)) for row in rows),
        errors,
        f"Published values are for ResNet-18 on CIFAR-100 against SVHN, so only patterns can agree. MMD: mean of 20 "
        f"kernels. NS: symmetries removed in the form {FORM}. Foreign inputs are {task.outside_name}, told by the "
        "largest probability. SWAG, Laplace and SGHMC begin at the networks of the deep ensemble.",
    )


def _scatter(rows: Sequence[Row]) -> report.Figure:
    """Distance against what a population is worth."""
    label = {name: f"{column.name} ({column.unit})" if column.unit else column.name for name, column in COLUMNS.items()}
    panels = [
        report.Panel(
            "points", COLUMNS[name].name, report.Axis("MMD to trainings"), report.Axis(label[name]), _points(rows, name)
        )
        for name in ("accuracy", "brier", "ece", "ood_mi")
    ]
    equal = (report.Rule("NS = MMD", direction="diagonal"),)
    panels.append(
        report.Panel("points", "NS against MMD", report.Axis("MMD"), report.Axis("NS"), _points(rows, "ns"), equal)
    )
    measured = [row for row in rows if row.values("mmd")]
    above = sum(row.mean("ns") > row.mean("mmd") for row in measured)
    return report.Figure(
        "distance-and-worth",
        "Is a population that is close to independent trainings better?",
        f"Each point is a row of the table, with one standard error. Removing symmetries raises the distance in "
        f"{above} of {len(measured)} rows.",
        tuple(panels),
    )


def _points(rows: Sequence[Row], measure: str) -> tuple[report.Series, ...]:
    """A measure against MMD, one series for each form."""
    series = []
    for shade, form in enumerate((ONE, MULTI)):
        form_rows = [row for row in rows if row.form == form and row.values("mmd")]
        ends = [(row.mean(measure), row.number(measure).error or 0.0) for row in form_rows]
        series.append(
            report.Series(
                form,
                tuple(row.mean("mmd") for row in form_rows),
                tuple(mean for mean, _ in ends),
                tuple(mean - error for mean, error in ends),
                tuple(mean + error for mean, error in ends),
                shade=shade,
            )
        )
    return tuple(series)


def _answer(workspace: SymmetryWorkspace, rows: Sequence[Row]) -> tuple[str, ...]:
    best = max(rows, key=lambda row: row.mean("accuracy"))
    nearest = min((row for row in rows if row.values("mmd")), key=lambda row: row.mean("mmd"))
    like = min((row for row in rows if row.method != "HMC"), key=lambda row: row.mean("tv"))
    share = run_share(workspace)
    return (
        f"{best.method} ({best.form}) is right most often, {best.mean('accuracy'):.1f} % of the test examples. "
        f"Nearest to independent trainings by MMD is {nearest.method} ({nearest.form}, {nearest.mean('mmd'):.2f}), and "
        f"{like.method} ({like.form}) predicts most like HMC (total variation {like.mean('tv'):.1f} %).",
        f"One-mode rows take all networks from one run, multi-mode rows take as many from {workspace.settings.runs} "
        "runs. That "
        f"alone divides the part of MMD that comes from runs by {1 / share if share else float('inf'):.0f}.",
    )


def _sureness(rows: Sequence[Row]) -> tuple[str, ...]:
    """Why averaging helps calibration or does not; nothing where no temperature is best."""
    forms = [
        [value for pair in pairs(rows) for row in pair if row.form == form for value in row.values("temperature")]
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


def _setting(workspace: SymmetryWorkspace) -> str:
    settings, task = workspace.settings, problem(workspace)
    weights = sum(value.numel() for value in task.model.parameters())
    return (
        f"The networks: {task.described or described(settings.architecture)}, {weights:,} weights, on "
        f"{len(task.train[0]):,} examples of {task.name}. Each training is {settings.epochs} epochs of SGD with "
        "momentum; its weight decay is a Gaussian prior "
        f"of standard deviation {settings.prior:g}, the same for all methods. The reference has "
        f"{settings.reference_networks:,} independent trainings."
    )


def _mixing(workspace: SymmetryWorkspace) -> str:
    task, settings = problem(workspace), workspace.settings
    mixing = ob.diagnose(task.model, hmc(workspace), task.test[0][:200], weights=False).functions
    chains = (
        f"HMC: {settings.chains} chains of {settings.chain_draws} draws after {settings.warmup} of warm-up, "
        f"{settings.leapfrog} leapfrog steps each"
    )
    if mixing is None:
        return f"{chains}; too short to tell whether they have mixed."
    return (
        f"{chains}; R-hat of predictions is {mixing.median_rhat:.3f} in the median and {mixing.worst_rhat:.2f} at "
        "worst "
        "(1 is perfect)."
    )
