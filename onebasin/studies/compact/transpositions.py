"""Part one: does a permutation that was planted at the start survive training, and what does it cost?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from onebasin.align.transpositions import expected_transpositions
from onebasin.record import Claim, Section
from onebasin.state import State
from onebasin.studies.compact import published
from onebasin.studies.compact.planted import Faster, compared, faster, pairs
from onebasin.studies.compact.planted_shown import CLOSE, Rows, columns_of, planted_figure, planted_table, rates_table
from onebasin.studies.compact.setting import Runs, Setting, setting
from onebasin.studies.compact.verdicts import CAVEAT, SURE, graded, grows, survives
from onebasin.studies.numbers import told
from onebasin.studies.study import Part

_STRANGERS = 31  # networks that are matched to the next one
NAME, TITLE = "transpositions", "Does a permutation planted at the start survive training?"


def run(bench: Runs) -> Section:
    """Train all pairs and compare them."""
    here, plan = setting(bench), bench.plan
    rows: Rows = []
    unrelated: list[State] = []
    for which in range(plan.runs):
        found = pairs(bench, which)
        rows.append([])
        for swaps, pair in zip(plan.planted, found, strict=True):
            bench.show(len(rows[-1]) + which * len(found), plan.runs * len(found), "comparing pairs")
            rows[-1].append(compared(here, swaps, pair))
        unrelated += [pair.trained[0] for pair in (found if plan.retrained else found[:1])]
    strangers = [here.swaps(a, b) for a, b in pairwise(unrelated[:_STRANGERS])]
    rates = [faster(bench, factor) for factor in plan.rates]
    claims = (_survival(rows, rates), _growth(rows, plan.units), _unrelated(strangers, plan.units))
    return Section(
        NAME,
        TITLE,
        _text(here, rows, strangers, rates),
        (
            planted_figure(rows, plan.units),
            planted_table(rows, plan.units),
            rates_table(rates, plan.planted[2 * len(plan.planted) // 3]),
        ),
        claims,
    )


PART = Part(NAME, TITLE, run)


def _text(here: Setting, rows: Rows, strangers: Sequence[int], rates: Sequence[Faster]) -> tuple[str, ...]:
    flat, last = [row for own in rows for row in own], [own[-1] for own in rows]
    units = here.units
    peak = max(columns_of(rows, lambda row: row.barrier), key=fmean)
    expected, spread = expected_transpositions(units)
    fast = rates[-1]
    return (
        f"Training changes the planted number of transpositions by at most {_most(row.change for row in flat)} of "
        f"{units - 1} when units are matched by activations, and by at most "
        f"{_most(row.change_by_weights for row in flat)} when they are matched by weights. The barrier between the two "
        f"networks rises to {told(peak)} nats with the number of swapped units, and is at most "
        f"{max(row.undone_barrier for row in flat):.4f} once the swaps are undone.",
        f"Each pair starts as one network ({here.widths}, {here.problem.name}) and a copy whose hidden units were "
        "permuted by a known number of transpositions (swaps of two units). Both are trained by SGD with their own "
        "order of the examples. Matching activations cannot tell units apart that no example activates: there are "
        f"{told([float(row.silent) for row in flat], 1)} of them per network.",
        f"Undone, the two are {told([row.undone for row in last], 2)} apart (squared), against "
        f"{told([row.trained for row in last], 1)} with all units misplaced: an easy test, as it was in the paper "
        f"(0.31 against 666). With {fast.rate:g} as learning rate the undone distance is {fmean(fast.apart):.0%} of "
        f"the misplaced one, and the number changes by {_list(fast.changes)} in {len(fast.changes)} runs.",
        f"Networks from unrelated starts are matched with {told([float(value) for value in strangers], 1)} "
        f"transpositions; a random permutation of {units} units has {expected:.1f} ± {spread:.1f}. The number between "
        "unrelated networks says that they are unrelated, and nothing else.",
    )


def _most(changes: Iterable[int]) -> int:
    return max(map(abs, changes))


def _list(values: Sequence[int]) -> str:
    return ", ".join(f"{value:+d}" if value else "0" for value in values)


def _survival(rows: Rows, rates: Sequence[Faster]) -> Claim:
    flat = [row for own in rows for row in own]
    changes, by_weights = [row.change for row in flat], [row.change_by_weights for row in flat]
    apart = fmean([own[-1].undone / own[-1].trained for own in rows])
    verdict = survives(changes, by_weights, published.LARGEST_CHANGE)
    guessed = (
        f"Matching activations guesses units that no example activates ({fmean([row.silent for row in flat]):.1f} per "
        "network here); matching weights does not. "
        if verdict == CAVEAT
        else ""
    )
    return Claim(
        "The number of transpositions between two networks survives training.",
        verdict,
        f"in {len(flat)} pairs the number changes by at most {_most(changes)} by activations and {_most(by_weights)} "
        f"by weights (criterion: at most {published.LARGEST_CHANGE} by activations; by weights alone gives a caveat)",
        f"at most {published.LARGEST_CHANGE} of 511 in five runs, by activations",
        f"{guessed}Undone, the networks are {apart:.2%} as far apart as with all units misplaced (0.05 % in the "
        f"paper), an easy test; at learning rate {rates[-1].rate:g} they are {fmean(rates[-1].apart):.0%} as far "
        f"apart, and the number changes by at most {_most(rates[-1].changes)} by weights.",
    )


def _growth(rows: Rows, units: int) -> Claim:
    """Judged up to where the published curve has its peak."""
    upto = published.PEAK / (published.UNITS - 1) + CLOSE
    rising = [[row for row in own if row.planted / (units - 1) <= upto] for own in rows]
    verdict, found = grows([float(row.planted) for row in rising[0]], [[row.barrier for row in own] for own in rising])
    highest = max(columns_of(rows, lambda row: row.barrier), key=fmean)
    return Claim(
        "The loss barrier between two networks grows with the number of transpositions between them.",
        verdict,
        f"rank correlation {told(found)} up to two thirds of the largest number, highest barrier {told(highest)} nats "
        "(criterion: at least 0.9 in every run)",
        "rises from 0.000 to 0.314 nats at 344 of 511, then 0.28",
        "The barrier is largely a count of misplaced units.",
    )


def _unrelated(strangers: Sequence[int], units: int) -> Claim:
    expected, spread = expected_transpositions(units)
    values = [float(value) for value in strangers]
    off = (fmean(values) - expected) / (spread / len(values) ** 0.5)
    return Claim(
        "Independently trained networks are a random permutation apart (our reading; the paper does not test it).",
        graded(abs(off) < SURE, partly=False),
        f"{told(values, 1)} transpositions between {len(values)} pairs of strangers, {expected:.1f} expected of random "
        f"permutations, {off:+.1f} standard errors off (criterion: less than {SURE:g})",
        f"about {published.SWAPS_BEFORE} of 511",
    )
