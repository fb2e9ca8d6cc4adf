"""Rows of the table: a method in one form, measured in several independent repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from onebasin.population import Population
from onebasin.record import Number
from onebasin.studies.numbers import measured
from onebasin.studies.symmetry.crowds import Desk, hmc, starts
from onebasin.studies.symmetry.measure import SYMMETRIC, Numbers, numbers, thinned
from onebasin.studies.symmetry.methods import METHODS, chain_of, multi_mode, one_mode, runs_of
from onebasin.studies.symmetry.published import ENSEMBLE, MULTI, ONE, published

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

    def number(self, measure: str) -> Number:
        """For a table, with the published value beside it."""
        if not self.values(measure):
            return Number(None, note="needs several runs")
        return measured(self.values(measure), published(self.method, self.form, measure))


def rows(bench: Desk) -> list[Row]:
    """All rows, in the paper's order: one-mode methods, multi-mode methods, deep ensembles, HMC."""
    return bench.once("rows", lambda: _measured(bench))


def _measured(bench: Desk) -> list[Row]:
    plan, found = bench.plan, list[Row]()
    crowds = {method: runs_of(bench, method) for method in METHODS}
    share, groups = max(1, plan.draws // plan.runs), range(plan.groups)
    designs = {ONE: f"1 x {plan.draws}", MULTI: f"{plan.runs} x {share}"}
    total, done = 2 * len(METHODS) + 2, 0
    for form, design in designs.items():
        for method, title in METHODS.items():
            bench.show(done, total, f"measuring {title}, {form}")
            repeated = tuple(
                tuple(numbers(bench, one) for one in _forms(crowds[method], bench, form, group)) for group in groups
            )
            found.append(Row(title, form, design, repeated))
            done += 1
    bench.show(done, total, "measuring deep ensembles and HMC")
    begun = starts(bench)
    ensembles = tuple((numbers(bench, begun[group * plan.runs : (group + 1) * plan.runs]),) for group in groups)
    return [*found, Row(ENSEMBLE, MULTI, f"{plan.runs} x 1", ensembles), *_chains(bench)]


def _forms(crowd: Population, bench: Desk, form: str, group: int) -> Iterator[Population]:
    plan = bench.plan
    if form == MULTI:
        yield multi_mode(crowd, plan, group)
        return
    for run in range(min(plan.singles, plan.runs)):
        yield one_mode(crowd, group * plan.runs + run)


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
