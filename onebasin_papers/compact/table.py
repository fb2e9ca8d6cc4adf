"""Part three, the paper's table 1: how much of a posterior is left in one mean and one deviation per weight?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import (
    FORM_KEYS,
    WEIGHTS,
    CompactWorkspace,
    Setting,
    forms,
    hmc,
    own_draws,
    setting,
    variational,
    weight_mixing,
)
from onebasin_papers.numbers import mean_line, mean_number, mean_text
from onebasin_papers.study import Part
from onebasin_papers.verdicts import CAVEAT, NOT, POINTS, REPRODUCED, VARIATION, close, falls, graded, smaller

report = ob.reporting


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


def score_networks(
    here: Setting, population: ob.Population | ob.Posterior, reference: Tensor, draws: int, seed: int
) -> Score:
    """Judge a population on the test inputs.

    Args:
        here: the problem.
        population: networks, or a posterior that networks are drawn from.
        reference: average predictive of HMC (examples, classes).
        draws: number of networks drawn from a posterior.
        seed: of these draws.
    """
    model, (inputs, targets) = here.problem.model, here.problem.test
    predictive = ob.predict(model, population, inputs, average=True, draws=draws, seed=seed)
    single: float | None = None
    if isinstance(population, ob.Posterior):
        single, stored = here.right(population.mean), population.storage
    else:
        stored = float(len(population))
    return Score(
        float(ob.metrics.agreement(predictive, reference)),
        float(ob.metrics.total_variation(predictive, reference)),
        float(ob.metrics.accuracy(predictive, targets)),
        single,
        float(ob.metrics.nll(predictive, targets)),
        float(ob.metrics.ece(predictive, targets)),
        stored,
    )


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


def scores(workspace: CompactWorkspace) -> dict[str, list[Score]]:
    """Name of the form -> its score in each run; forms of HMC have as many as there are runs of HMC."""
    here, settings = setting(workspace), workspace.settings
    for title in workspace.own.methods:
        own_draws(workspace, title, 0)  # first, so that a mistake in a user's method shows at once
    rows = _ROWS + 3 * len(workspace.own.methods)
    results: dict[str, list[Score]] = {}
    for seed in range(settings.seeds):
        run = seed % settings.hmc_runs
        samples = forms(workspace, "hmc", run).samples
        half = len(samples) // 2
        reference, other_half = (
            _predictive(workspace, f"{run}-{part}", networks)
            for part, networks in (("all", samples), ("half", samples[half:]))
        )
        drawn = workspace.seed_for("draws", seed)
        for number, (name, population) in enumerate(_populations(workspace, seed)):
            workspace.progress(number + seed * rows, settings.seeds * rows, f"judging {name}")
            goal = other_half if name == HALVES else reference
            results.setdefault(name, []).append(score_networks(here, population, goal, settings.posterior_draws, drawn))
    return results


_ROWS = 7 + len(OURS)


def _populations(workspace: CompactWorkspace, seed: int) -> Iterator[tuple[str, Networks]]:
    """All forms of one seed, in the order of the table; those of HMC once for each run of it."""
    if seed < workspace.settings.hmc_runs:
        hmc_forms = forms(workspace, "hmc", seed)
        yield "HMC samples", hmc_forms.samples
        yield "HMC q_d", hmc_forms.raw
        yield "HMC q_r", hmc_forms.rebased
    members = forms(workspace, "ensemble", seed)
    yield "Ensemble members", members.samples
    yield "Ensemble q_d", members.raw
    yield "Ensemble q_r", members.rebased
    yield "VI q", variational(workspace, seed)
    if seed < workspace.settings.hmc_runs:
        yield from _of_hmc(workspace, hmc_forms.samples, seed)
    yield "Ensemble: consensus", ob.fit(_consensus(workspace, members.samples), model=setting(workspace).problem.model)
    yield "Ensemble: 2 members", members.samples[:2]
    if seed < workspace.settings.hmc_runs:
        for title in workspace.own.methods:
            own = forms(workspace, title, seed)
            yield f"{title} samples", own.samples
            yield f"{title} q_d", own.raw
            yield f"{title} q_r", own.rebased


def _of_hmc(workspace: CompactWorkspace, samples: ob.Population, seed: int) -> Iterator[tuple[str, Networks]]:
    """Our forms of the HMC samples."""
    problem, steps = setting(workspace).problem, workspace.settings.refine_steps
    frame = _consensus(workspace, samples)
    fitted = ob.fit(frame, model=problem.model)
    yield HALVES, samples[: len(samples) // 2]
    yield "HMC: consensus", fitted
    yield "HMC: low rank", ob.fit(frame, "low-rank", rank=min(RANK, len(samples) - 1), model=problem.model)
    if steps:
        drawn = workspace.seed_for("refine", seed)
        yield (
            REFINED,
            ob.refine(
                problem.model, fitted, samples, problem.train[0], steps=steps, seed=drawn, progress=workspace.progress
            ),
        )
    yield "HMC: 2 samples", thinned(samples, 2)
    yield "HMC: 10 samples", thinned(samples, RANK + 2)


def _consensus(workspace: CompactWorkspace, population: ob.Population) -> ob.Population:
    return ob.align(population, setting(workspace).symmetry, progress=workspace.progress).population


def _predictive(workspace: CompactWorkspace, name: str, samples: ob.Population) -> Tensor:
    """The average predictive on the test inputs, computed once for all seeds that share it."""
    problem = setting(workspace).problem
    return workspace.cached(
        f"predictive-{name}", lambda: ob.predict(problem.model, samples, problem.test[0], average=True)
    )


def thinned(samples: ob.Population, count: int) -> ob.Population:
    """Samples evenly spaced over all chains."""
    return samples[((torch.arange(count) + 0.5) * len(samples) / count).long()]


NAME, TITLE = "table", "How much of a posterior is left in one mean and one standard deviation per weight?"
_FALL = 0.8  # of the total variation that q_r may have, at most, beside q_d; the paper's fall for HMC is to 0.76
Results = Mapping[str, Sequence[Score]]


def run(workspace: CompactWorkspace) -> report.Section:
    """Judge all forms."""
    results = scores(workspace)
    here = setting(workspace)
    items = (_figure(results), _table(results), mixing_table(workspace))
    text = (*_text(here, results), *(_own_text(title, results) for title in workspace.own.methods))
    return report.Section(NAME, TITLE, text, items, claims(results))


PART = Part(NAME, TITLE, run, (*FORM_KEYS, "posterior_draws", "refine_steps"))


def _all(results: Results, name: str, take: Callable[[Score], float]) -> list[float]:
    return [take(score) for score in results[name]]


def _variation(score: Score) -> float:
    return score.variation


def _draws(score: Score) -> float:
    return 100 * score.draws


def _text(here: Setting, results: Results) -> tuple[str, ...]:
    def accuracy(name: str) -> str:
        return mean_text(_all(results, name, _draws), 1)

    def variation(name: str) -> str:
        return mean_text(_all(results, name, _variation))

    best = (
        f" At the same storage our refined form has a total variation of {variation(REFINED)}, two samples "
        f"{variation('HMC: 2 samples')}."
        if REFINED in results
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


def _own_text(title: str, results: Results) -> str:
    """What became of a user's method."""
    right = {form: mean_text(_all(results, f"{title} {form}", _draws), 1) for form in ("samples", "q_d", "q_r")}
    far = {form: mean_text(_all(results, f"{title} {form}", _variation)) for form in right}
    return (
        f"The own method {title}: its samples are right on {right['samples']} % and predict a total variation of "
        f"{far['samples']} away from HMC; draws from q_d are right on {right['q_d']} % ({far['q_d']} away), draws from "
        f"q_r on {right['q_r']} % ({far['q_r']} away)."
    )


def _figure(results: Results) -> report.Figure:
    """Total variation of all forms but the samples themselves."""
    names = tuple(name for name in results if name != "HMC samples")
    places = tuple(map(float, range(len(names))))
    ours = mean_line("this run", places, [_all(results, name, _variation) for name in names], shade=0)
    paper = [published.TABLE[name].variation if name in published.TABLE else None for name in names]
    axis = report.Axis("", names=names)
    series = (ours, report.Series("published", places, tuple(paper), shade=1))
    return report.Figure(
        "compact-variation",
        "Which compact form predicts what the HMC samples predict?",
        "Total variation from the average predictive of all HMC samples, lower is better. Means over seeds with one "
        "standard error; published for MNIST 784-512-10. Forms with a colon are ours.",
        (report.Panel("bars", "", axis, report.Axis("total variation from HMC", low=0), series),),
    )


_COLUMNS = (
    report.Column("form", "what is kept of a posterior"),
    report.Column("by", "whose form it is: the paper's, ours, or of a method of one's own"),
    report.Column("stored", "numbers to keep, in networks", "lower", digits=1),
    report.Column(
        "agreement",
        "share of test inputs for which the average predictives of this form and of all HMC samples choose the same "
        "class",
        "higher",
    ),
    report.Column(
        "total variation",
        "half the sum of absolute differences between the class probabilities of this form and of all HMC samples, "
        "averaged over test inputs: 0 for the same predictive, 1 for the opposite",
        "lower",
    ),
    report.Column("accuracy of draws", "test accuracy of the average predictive of networks drawn", "higher", 2, "%"),
    report.Column("accuracy of mean", "test accuracy of the single network at the mean", "higher", 2, "%"),
    report.Column(
        "NLL", "negative log likelihood of the test labels under the average predictive", "lower", unit="nats"
    ),
    report.Column("ECE", "expected calibration error: mean gap between confidence and accuracy, 15 bins", "lower"),
)


def _table(results: Results) -> report.Table:
    return report.Table(
        "compact-table",
        "What compact forms keep of a posterior, against all HMC samples",
        _COLUMNS,
        tuple(_row(name, scores) for name, scores in results.items()),
        f"± one standard error over {max(map(len, results.values()))} seeds (rows of HMC: "
        f"{len(results['HMC samples'])})",
        "; ".join(f"{name}: {what}" for name, what in OURS.items() if name in results) + ".",
    )


def _row(name: str, scores: Sequence[Score]) -> tuple[report.Cell, ...]:
    paper = published.TABLE.get(name)
    means = [100 * score.mean for score in scores if score.mean is not None]
    return (
        name,
        "ours" if name in OURS else "paper" if paper is not None else "own",
        report.Number(scores[0].stored),
        mean_number([score.agreement for score in scores], paper and paper.agreement),
        mean_number([score.variation for score in scores], paper and paper.variation),
        mean_number([_draws(score) for score in scores], paper and paper.draws),
        mean_number(means, paper and paper.mean) if means else None,
        mean_number([score.nll for score in scores]),
        mean_number([score.ece for score in scores]),
    )


def claims(results: Results) -> tuple[report.Claim, ...]:
    """What the paper says about its table, and what we add."""
    return (
        _better(results, "HMC"),
        _better(results, "Ensemble"),
        _not_close_hmc(results),
        *((_equal_storage(results),) if REFINED in results else ()),
    )


def _better(results: Results, method: str) -> report.Claim:
    raw, rebased = f"{method} q_d", f"{method} q_r"
    before, after = _all(results, raw, _variation), _all(results, rebased, _variation)
    paper = published.TABLE[raw], published.TABLE[rebased]
    verdict = falls(before, after, _FALL)
    return report.Claim(
        f"{'HMC samples' if method == 'HMC' else 'Ensembles'}: the compact form after rebasin (q_r) is far better than "
        "without (q_d).",
        verdict,
        f"total variation {mean_text(before)} -> {mean_text(after)}, accuracy of draws "
        f"{mean_text(_all(results, raw, _draws), 1)} -> "
        f"{mean_text(_all(results, rebased, _draws), 1)} % (criterion: total variation falls by more than three "
        "standard "
        f"errors and to at most {_FALL:g} of what it was)",
        f"{paper[0].variation} -> {paper[1].variation}, {paper[0].draws} -> {paper[1].draws} %",
        f"{fmean(after) / fmean(before):.0%} of the total variation are left.",
    )


def _not_close_hmc(results: Results) -> report.Claim:
    lost = [
        samples.draws - form.draws for samples, form in zip(results["HMC samples"], results["HMC q_r"], strict=True)
    ]
    paper = published.TABLE["HMC samples"], published.TABLE["HMC q_r"]
    return report.Claim(
        "For HMC q_r is not close to the samples.",
        NOT if close(lost, _all(results, "HMC q_r", _variation)) else REPRODUCED,
        f"samples {mean_text(_all(results, 'HMC samples', _draws), 1)} % right, q_r "
        f"{mean_text(_all(results, 'HMC q_r', _draws), 1)} "
        f"%; total variation 0 and {mean_text(_all(results, 'HMC q_r', _variation))} (criterion: more than "
        f"{100 * POINTS:g} "
        f"points or {VARIATION:g} lost)",
        f"{paper[0].draws} % and {paper[1].draws} %, total variation 0 and {paper[1].variation}",
    )


def _equal_storage(results: Results) -> report.Claim:
    """Ours: a form of two networks should beat two networks."""
    form, two = _all(results, REFINED, _variation), _all(results, "HMC: 2 samples", _variation)
    paper = _all(results, "HMC q_r", _variation)
    verdict = graded(smaller(form, two), smaller(form, paper))
    return report.Claim(
        "Ours: refined, a mean and a deviation of HMC samples predict better than two samples, which take as much "
        "room.",
        verdict,
        f"total variation {mean_text(form)} against {mean_text(two)} of two samples and {mean_text(paper)} of q_r "
        "(criterion: in "
        "every run and by more than three standard errors)",
        "",
        "Better than q_r, but not surely better than two samples." if verdict == CAVEAT else "",
    )


_INPUTS = 200  # test inputs on which functions are compared


def mixing_table(workspace: CompactWorkspace) -> report.Table:
    """One row per run of HMC."""
    settings, problem = workspace.settings, setting(workspace).problem
    rows: list[tuple[report.Cell, ...]] = []
    for run in range(settings.hmc_runs):
        samples = hmc(workspace, run)
        functions = ob.diagnose(problem.model, samples, problem.test[0][:_INPUTS], weights=False).functions
        diagnostics = samples.provenance["diagnostics"]
        assert functions is not None  # model and inputs were given
        rows.append(
            (
                f"run {run + 1}",
                report.Number(settings.chains),
                report.Number(settings.draws),
                report.Number(settings.gradients),
                report.Number(fmean(diagnostics["acceptance"])),
                report.Number(fmean(diagnostics["step_size"])),
                report.Number(float(sum(diagnostics["divergences"]))),
                report.Number(functions.worst_rhat),
                report.Number(functions.median_rhat),
                report.Number(functions.median_bulk),
                report.Number(weight_mixing(samples).median_bulk),
            )
        )
    share = settings.gradients / published.GRADIENTS
    return report.Table(
        "compact-mixing",
        "Can the HMC samples be trusted?",
        _MIXING_COLUMNS,
        tuple(rows),
        note=f"The paper ran one chain with {published.GRADIENTS:,} gradients over 60,000 images and reports none of "
        f"these numbers; a run here has {share:.2%} of its gradients, over {len(problem.train[1]):,} images. Functions "
        f"are class probabilities on {min(_INPUTS, len(problem.test[1]))} test inputs, weights {WEIGHTS} of the first "
        "layer.",
    )


_MIXING_COLUMNS = (
    report.Column("run"),
    report.Column("chains", "independent chains, each from a network of its own", digits=0),
    report.Column("draws", "samples kept from each chain", digits=0),
    report.Column("gradients", "gradients over all training examples, of all chains together, on average", digits=0),
    report.Column(
        "acceptance", "mean probability with which the end of a trajectory is accepted; 0.6 to 0.9 is healthy"
    ),
    report.Column("step size", "of the leapfrog integrator", digits=4),
    report.Column("divergences", "trajectories that left for infinity", "lower", digits=0),
    report.Column(
        "worst R-hat", "of functions: spread between chains over spread within them; below 1.05 is mixed", "lower"
    ),
    report.Column("median R-hat", "the median over functions", "lower"),
    report.Column(
        "ESS", "effective sample size of functions: as many independent samples would know as much; median", "higher", 0
    ),
    report.Column("ESS of weights", "the same of weights, before alignment", "higher", 0),
)
