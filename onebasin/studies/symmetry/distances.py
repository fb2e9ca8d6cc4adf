"""Smaller tables beside the large one: the part of runs, the distance to HMC, and what hangs on the normal form."""

from __future__ import annotations

from collections.abc import Sequence

from onebasin.discrepancy import discrepancy, same_run_share
from onebasin.record import Cell, Column, Number, Table
from onebasin.studies.numbers import measured
from onebasin.studies.symmetry.crowds import Desk, problem, reference, starts, symmetry
from onebasin.studies.symmetry.measure import FORM, PRESET, SQUARED
from onebasin.studies.symmetry.methods import METHODS, multi_mode, runs_of
from onebasin.studies.symmetry.published import ENSEMBLE, MULTI, ONE, published
from onebasin.studies.symmetry.rows import Row

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
    """Share of the pairs of networks of a multi-mode crowd that come from one run."""
    return same_run_share([max(1, bench.plan.draws // bench.plan.runs)] * bench.plan.runs)


def run_table(bench: Desk, found: Sequence[Row]) -> Table:
    """Does one-mode against multi-mode restate how many runs were pooled?"""
    columns = (
        Column("method"),
        Column("one mode", "10 x squared MMD of the one-mode row", "lower", 2),
        Column("multi mode", "the same of the multi-mode row", "lower", 2),
        Column("ratio", "multi mode / one mode", "", 3),
        Column("gap", "one mode - multi mode", "", 2),
        Column("gap from runs", "what the number of runs alone predicts, from the multi-mode row", "", 2),
        Column("without runs", "MMD of the multi-mode row without pairs of one run", "lower", 2),
    )
    return Table(
        "runs",
        "Does the distance say more than how many runs were pooled?",
        columns,
        tuple(_run_row(bench, one, multi) for one, multi in pairs(found)),
        "± one standard error over independent repetitions",
        f"Where crowds differ in nothing but their runs, the ratio is {run_share(bench):.3f}. The last column is what "
        "is left: 0 means that single networks of the method follow the law of independent trainings.",
    )


def _run_row(bench: Desk, one: Row, multi: Row) -> tuple[Cell, ...]:
    printed = [published(row.method, row.form, "mmd") for row in (one, multi)]
    ratio = None if printed[0] is None or printed[1] is None else printed[1] / printed[0]
    first, second = one.mean("mmd"), multi.mean("mmd")
    return (
        one.method,
        one.number("mmd"),
        multi.number("mmd"),
        Number(second / first if first else None, published=ratio, note="" if first else "nothing to divide by"),
        Number(first - second),
        Number(gap_of_runs(bench, multi)),
        measured(multi.values("mmd_rest")),
    )


def distance_table(bench: Desk, found: Sequence[Row]) -> Table:
    """How far is each crowd from HMC?"""
    columns = (
        Column("method"),
        Column("form"),
        Column("MMD to HMC", "10 x squared MMD of raw weights", "lower", 2),
        Column("NS to HMC", f"the same without symmetries, in the form {FORM}", "lower", 2),
        Column("NS without runs", "NS without pairs of one run: what is left if runs are not counted", "lower", 2),
        Column("TV to HMC", "total variation of the average predictives, mean over test examples", "lower", 2, "%"),
        Column("agreement", "test examples with the same most probable class as HMC", "higher", 1, "%"),
    )
    measures = ("hmc_mmd", "hmc_ns", "hmc_ns_rest", "tv", "agreement")
    return Table(
        "hmc",
        "How far is each method from Hamiltonian Monte Carlo?",
        columns,
        tuple((row.method, row.form, *(_to_hmc(row, name) for name in measures)) for row in found),
        "± one standard error over independent repetitions",
        "A chain of HMC is compared with the other chains, half of the chains with the other half; their predictives "
        "too. Without runs, a single run has no distance of its own.",
    )


def _to_hmc(row: Row, measure: str) -> Number:
    if measure.endswith("_rest") and row.form == ONE:
        return Number(None, note="needs several runs")
    return row.number(measure)


def form_table(bench: Desk) -> Table:
    """What hangs on the way in which symmetries are removed?"""
    own, plan = problem(bench), bench.plan
    crowds = {title: multi_mode(runs_of(bench, method), plan, 0) for method, title in METHODS.items()}
    crowds[ENSEMBLE] = starts(bench)[: plan.runs]
    found = {}
    for place, (title, crowd) in enumerate(crowds.items()):
        bench.show(place, len(crowds), f"other forms: {title}")
        found[title] = discrepancy(
            crowd, reference(bench), symmetry=symmetry(bench), forms=FORMS, model=own.model, inputs=own.test[0],
            preset=PRESET, permutations=0, resamples=0, layers=False,
        )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (form, *(Number(SQUARED * one.sensitivity[form]) for one in found.values())) for form in ("raw", *FORMS)
    ]
    functions = [one.function for one in found.values()]
    rows.append(
        ("as functions", *(Number(None if one is None else SQUARED * one.squared, note="") for one in functions))
    )
    return Table(
        "forms",
        "What hangs on the way in which symmetries are removed?",
        (Column("form", "scale / order of units"), *(Column(title, digits=2) for title in crowds)),
        tuple(rows),
        note=f"10 x squared MMD to the reference, first group of the multi-mode rows, once. {FORM} is the NS of the "
        "large table. 'aligned' moves all networks into one frame; 'as functions' compares probabilities on test "
        "inputs and needs no form.",
    )
