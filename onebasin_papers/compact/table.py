"""Part three, the paper's table 1: how much of a posterior is left in one mean and one deviation per weight?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.compact import presets as published
from onebasin_papers.compact.mixing import mixing_table
from onebasin_papers.compact.setting import Runs, Setting, forms, setting, variational
from onebasin_papers.compact.verdicts import CAVEAT, NOT, POINTS, REPRODUCED, VARIATION, close, falls, graded, smaller
from onebasin_papers.numbers import line, measured, told
from onebasin_papers.study import Part

# ----------------------------------------------------------------------
# How well a population or a compact form predicts, beside what the HMC samples say.


@dataclass(frozen=True)
class Score:
    """One population in one run; shares, not per cent.

    Attributes:
        agreement: share of test inputs for which the average predictives of population and HMC choose the same class.
        variation: total variation between the two, averaged over test inputs.
        draws: accuracy of the average predictive.
        mean: accuracy of the mean network; None for a set of networks.
        nll: negative log likelihood of the average predictive, in nats.
        ece: its expected calibration error.
        stored: numbers to keep, in networks.
    """

    agreement: float
    variation: float
    draws: float
    mean: float | None
    nll: float
    ece: float
    stored: float


def scored(here: Setting, population: ob.Population | ob.Posterior, reference: Tensor, draws: int, seed: int) -> Score:
    """Judge a population on the test inputs.

    Args:
        here: the problem.
        population: networks, or a posterior that networks are drawn from.
        reference: average predictive of HMC (examples, classes).
        draws: number of networks drawn from a posterior.
        seed: of these draws.
    """
    model, (inputs, targets) = here.problem.model, here.problem.test
    found = ob.predict(model, population, inputs, average=True, draws=draws, seed=seed)
    single: float | None = None
    if isinstance(population, ob.Posterior):
        single, stored = here.right(population.mean), population.storage
    else:
        stored = float(len(population))
    return Score(
        float(ob.metrics.agreement(found, reference)),
        float(ob.metrics.total_variation(found, reference)),
        float(ob.metrics.accuracy(found, targets)),
        single,
        float(ob.metrics.nll(found, targets)),
        float(ob.metrics.ece(found, targets)),
        stored,
    )


# ----------------------------------------------------------------------
# Every compact form of every posterior, judged against the HMC samples: the paper's seven, and ours.


RANK = 8  # directions of the low-rank form
HALVES = "HMC: one half of the chains"
REFINED = "HMC: refined"
OURS = {  # name -> what it is
    HALVES: "samples of one half of the chains, judged against those of the other half: the noise of the reference",
    "HMC: consensus": "mean and deviation of samples that were aligned by weights to a common frame",
    "HMC: low rank": f"the same with the {RANK} directions of largest variance, so that weights may vary together",
    REFINED: "HMC: consensus, moved by gradient until its draws predict what the samples predict on training inputs",
    "HMC: 2 samples": "as many samples as the storage of a mean and a deviation holds",
    "HMC: 10 samples": "as many samples as the low-rank form takes",
    "Ensemble: consensus": "mean and deviation of members that were aligned by weights to a common frame",
    "Ensemble: 2 members": "as many members as the storage of a mean and a deviation holds",
}
Networks = ob.Population | ob.Posterior


def scores(bench: Runs) -> dict[str, list[Score]]:
    """Name of the form -> its score in each run; forms of HMC have as many as there are runs of HMC."""
    here, plan = setting(bench), bench.plan
    found: dict[str, list[Score]] = {}
    for seed in range(plan.seeds):
        run = seed % plan.hmc_runs
        samples = forms(bench, "hmc", run).samples
        half = len(samples) // 2
        reference, other_half = (
            _predictive(bench, f"{run}-{part}", own) for part, own in (("all", samples), ("half", samples[half:]))
        )
        drawn = bench.number("draws", seed)
        for number, (name, population) in enumerate(_populations(bench, seed)):
            bench.show(number + seed * _ROWS, plan.seeds * _ROWS, f"judging {name}")
            goal = other_half if name == HALVES else reference
            found.setdefault(name, []).append(scored(here, population, goal, plan.posterior_draws, drawn))
    return found


_ROWS = 7 + len(OURS)


def _populations(bench: Runs, seed: int) -> Iterator[tuple[str, Networks]]:
    """All forms of one seed, in the order of the table; those of HMC once for each run of it."""
    if seed < bench.plan.hmc_runs:
        own = forms(bench, "hmc", seed)
        yield "HMC samples", own.samples
        yield "HMC q_d", own.raw
        yield "HMC q_r", own.rebased
    members = forms(bench, "ensemble", seed)
    yield "Ensemble members", members.samples
    yield "Ensemble q_d", members.raw
    yield "Ensemble q_r", members.rebased
    yield "VI q", variational(bench, seed)
    if seed < bench.plan.hmc_runs:
        yield from _of_hmc(bench, own.samples, seed)
    yield "Ensemble: consensus", ob.fit(_consensus(bench, members.samples), model=setting(bench).problem.model)
    yield "Ensemble: 2 members", members.samples[:2]


def _of_hmc(bench: Runs, samples: ob.Population, seed: int) -> Iterator[tuple[str, Networks]]:
    """Our forms of the HMC samples."""
    problem, steps = setting(bench).problem, bench.plan.refine_steps
    frame = _consensus(bench, samples)
    fitted = ob.fit(frame, model=problem.model)
    yield HALVES, samples[: len(samples) // 2]
    yield "HMC: consensus", fitted
    yield "HMC: low rank", ob.fit(frame, "low-rank", rank=min(RANK, len(samples) - 1), model=problem.model)
    if steps:
        drawn = bench.number("refine", seed)
        yield (
            REFINED,
            ob.refine(problem.model, fitted, samples, problem.train[0], steps=steps, seed=drawn, progress=bench.show),
        )
    yield "HMC: 2 samples", thinned(samples, 2)
    yield "HMC: 10 samples", thinned(samples, RANK + 2)


def _consensus(bench: Runs, population: ob.Population) -> ob.Population:
    return ob.align(population, setting(bench).symmetry, progress=bench.show).population


def _predictive(bench: Runs, name: str, samples: ob.Population) -> Tensor:
    """The average predictive on the test inputs, computed once for all seeds that share it."""
    problem = setting(bench).problem
    return bench.once(f"predictive-{name}", lambda: ob.predict(problem.model, samples, problem.test[0], average=True))


def thinned(samples: ob.Population, count: int) -> ob.Population:
    """Samples evenly spaced over all chains."""
    return samples[((torch.arange(count) + 0.5) * len(samples) / count).long()]


# ----------------------------------------------------------------------
# Part three, the paper's table 1: how much of a posterior is left in one mean and one deviation per weight?


NAME, TITLE = "table", "How much of a posterior is left in one mean and one standard deviation per weight?"
_FALL = 0.8  # of the total variation that q_r may have, at most, beside q_d; the paper's fall for HMC is to 0.76
Found = Mapping[str, Sequence[Score]]


def run(bench: Runs) -> ob.reporting.Section:
    """Judge all forms."""
    found = scores(bench)
    here = setting(bench)
    items = (_figure(found), _table(found), mixing_table(bench))
    return ob.reporting.Section(NAME, TITLE, _text(here, found), items, claims(found))


PART = Part(NAME, TITLE, run)


def _all(found: Found, name: str, take: Callable[[Score], float]) -> list[float]:
    return [take(own) for own in found[name]]


def _variation(own: Score) -> float:
    return own.variation


def _draws(own: Score) -> float:
    return 100 * own.draws


def _text(here: Setting, found: Found) -> tuple[str, ...]:
    def accuracy(name: str) -> str:
        return told(_all(found, name, _draws), 1)

    def variation(name: str) -> str:
        return told(_all(found, name, _variation))

    best = (
        f" At the same storage our refined form has a total variation of {variation(REFINED)}, two samples "
        f"{variation('HMC: 2 samples')}."
        if REFINED in found
        else ""
    )
    return (
        f"Draws from q_r, a mean and a standard deviation of every weight after rebasin, are right on "
        f"{accuracy('Ensemble q_r')} % for an ensemble (its members {accuracy('Ensemble members')} %) and on "
        f"{accuracy('HMC q_r')} % for HMC (its samples {accuracy('HMC samples')} %); without rebasin, on "
        f"{accuracy('Ensemble q_d')} % and {accuracy('HMC q_d')} %. From the predictive of all HMC samples q_r is a "
        f"total variation of {variation('Ensemble q_r')} (ensemble) and {variation('HMC q_r')} (HMC) away.{best}",
        "q_d is the mean and the standard deviation of every weight of the networks as they came; q_r the same after "
        "rebasin, every network matched to the first by activations. Networks are drawn from them with independent "
        f"weights, and their predictions averaged. The problem is {here.problem.name} with {here.widths}; published "
        "values are for MNIST with 784-512-10, so signs and orders can be compared, exact values cannot.",
        f"Two halves of the HMC chains differ by {variation(HALVES)} in total variation: no form can be judged more "
        "closely than that. Rows with a colon in their name are ours, the others the paper's.",
    )


def _figure(found: Found) -> ob.reporting.Figure:
    """Total variation of all forms but the samples themselves."""
    names = tuple(name for name in found if name != "HMC samples")
    places = tuple(map(float, range(len(names))))
    ours = line("this run", places, [_all(found, name, _variation) for name in names], shade=0)
    paper = [published.TABLE[name].variation if name in published.TABLE else None for name in names]
    axis = ob.reporting.Axis("", names=names)
    series = (ours, ob.reporting.Series("published", places, tuple(paper), shade=1))
    return ob.reporting.Figure(
        "compact-variation",
        "Which compact form predicts what the HMC samples predict?",
        "Total variation from the average predictive of all HMC samples, lower is better. Means over seeds with one "
        "standard error; published for MNIST 784-512-10. Forms with a colon are ours.",
        (ob.reporting.Panel("bars", "", axis, ob.reporting.Axis("total variation from HMC", low=0), series),),
    )


_COLUMNS = (
    ob.reporting.Column("form", "what is kept of a posterior"),
    ob.reporting.Column("by", "whose form it is: the paper's or ours"),
    ob.reporting.Column("stored", "numbers to keep, in networks", "lower", digits=1),
    ob.reporting.Column(
        "agreement",
        "share of test inputs for which the average predictives of this form and of all HMC samples choose the same "
        "class",
        "higher",
    ),
    ob.reporting.Column(
        "total variation",
        "half the sum of absolute differences between the class probabilities of this form and of all HMC samples, "
        "averaged over test inputs: 0 for the same predictive, 1 for the opposite",
        "lower",
    ),
    ob.reporting.Column(
        "accuracy of draws", "test accuracy of the average predictive of networks drawn", "higher", 2, "%"
    ),
    ob.reporting.Column("accuracy of mean", "test accuracy of the single network at the mean", "higher", 2, "%"),
    ob.reporting.Column(
        "NLL", "negative log likelihood of the test labels under the average predictive", "lower", unit="nats"
    ),
    ob.reporting.Column(
        "ECE", "expected calibration error: mean gap between confidence and accuracy, 15 bins", "lower"
    ),
)


def _table(found: Found) -> ob.reporting.Table:
    return ob.reporting.Table(
        "compact-table",
        "What compact forms keep of a posterior, against all HMC samples",
        _COLUMNS,
        tuple(_row(name, own) for name, own in found.items()),
        f"± one standard error over {max(map(len, found.values()))} seeds (rows of HMC: {len(found['HMC samples'])})",
        "; ".join(f"{name}: {what}" for name, what in OURS.items() if name in found) + ".",
    )


def _row(name: str, own: Sequence[Score]) -> tuple[ob.reporting.Cell, ...]:
    paper = published.TABLE.get(name)
    means = [100 * score.mean for score in own if score.mean is not None]
    return (
        name,
        "ours" if name in OURS else "paper",
        ob.reporting.Number(own[0].stored),
        measured([score.agreement for score in own], paper and paper.agreement),
        measured([score.variation for score in own], paper and paper.variation),
        measured([_draws(score) for score in own], paper and paper.draws),
        measured(means, paper and paper.mean) if means else None,
        measured([score.nll for score in own]),
        measured([score.ece for score in own]),
    )


def claims(found: Found) -> tuple[ob.reporting.Claim, ...]:
    """What the paper says about its table, and what we add."""
    return (
        _better(found, "HMC"),
        _better(found, "Ensemble"),
        _not_close_hmc(found),
        *((_equal_storage(found),) if REFINED in found else ()),
    )


def _better(found: Found, method: str) -> ob.reporting.Claim:
    raw, rebased = f"{method} q_d", f"{method} q_r"
    before, after = _all(found, raw, _variation), _all(found, rebased, _variation)
    paper = published.TABLE[raw], published.TABLE[rebased]
    verdict = falls(before, after, _FALL)
    return ob.reporting.Claim(
        f"{'HMC samples' if method == 'HMC' else 'Ensembles'}: the compact form after rebasin (q_r) is far better than "
        "without (q_d).",
        verdict,
        f"total variation {told(before)} -> {told(after)}, accuracy of draws {told(_all(found, raw, _draws), 1)} -> "
        f"{told(_all(found, rebased, _draws), 1)} % (criterion: total variation falls by more than three standard "
        f"errors and to at most {_FALL:g} of what it was)",
        f"{paper[0].variation} -> {paper[1].variation}, {paper[0].draws} -> {paper[1].draws} %",
        f"{fmean(after) / fmean(before):.0%} of the total variation are left.",
    )


def _not_close_hmc(found: Found) -> ob.reporting.Claim:
    lost = [own.draws - form.draws for own, form in zip(found["HMC samples"], found["HMC q_r"], strict=True)]
    paper = published.TABLE["HMC samples"], published.TABLE["HMC q_r"]
    return ob.reporting.Claim(
        "For HMC q_r is not close to the samples.",
        NOT if close(lost, _all(found, "HMC q_r", _variation)) else REPRODUCED,
        f"samples {told(_all(found, 'HMC samples', _draws), 1)} % right, q_r {told(_all(found, 'HMC q_r', _draws), 1)} "
        f"%; total variation 0 and {told(_all(found, 'HMC q_r', _variation))} (criterion: more than {100 * POINTS:g} "
        f"points or {VARIATION:g} lost)",
        f"{paper[0].draws} % and {paper[1].draws} %, total variation 0 and {paper[1].variation}",
    )


def _equal_storage(found: Found) -> ob.reporting.Claim:
    """Ours: a form of two networks should beat two networks."""
    form, two = _all(found, REFINED, _variation), _all(found, "HMC: 2 samples", _variation)
    paper = _all(found, "HMC q_r", _variation)
    verdict = graded(smaller(form, two), smaller(form, paper))
    return ob.reporting.Claim(
        "Ours: refined, a mean and a deviation of HMC samples predict better than two samples, which take as much "
        "room.",
        verdict,
        f"total variation {told(form)} against {told(two)} of two samples and {told(paper)} of q_r (criterion: in "
        "every run and by more than three standard errors)",
        "",
        "Better than q_r, but not surely better than two samples." if verdict == CAVEAT else "",
    )
