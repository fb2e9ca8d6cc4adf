"""Part three, the paper's table 1: how much of a posterior is left in one mean and one deviation per weight?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from onebasin.record import Axis, Cell, Claim, Column, Figure, Number, Panel, Section, Series, Table
from onebasin.studies.compact import published
from onebasin.studies.compact.compared import HALVES, OURS, REFINED, scores
from onebasin.studies.compact.mixing import mixing_table
from onebasin.studies.compact.scores import Score
from onebasin.studies.compact.setting import Runs, Setting, setting
from onebasin.studies.compact.verdicts import CAVEAT, NOT, POINTS, REPRODUCED, VARIATION, close, falls, graded, smaller
from onebasin.studies.numbers import line, measured, told
from onebasin.studies.study import Part

NAME, TITLE = "table", "How much of a posterior is left in one mean and one standard deviation per weight?"
_FALL = 0.8  # of the total variation that q_r may have, at most, beside q_d; the paper's fall for HMC is to 0.76
Found = Mapping[str, Sequence[Score]]


def run(bench: Runs) -> Section:
    """Judge all forms."""
    found = scores(bench)
    here = setting(bench)
    items = (_figure(found), _table(found), mixing_table(bench))
    return Section(NAME, TITLE, _text(here, found), items, claims(found))


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


def _figure(found: Found) -> Figure:
    """Total variation of all forms but the samples themselves."""
    names = tuple(name for name in found if name != "HMC samples")
    places = tuple(map(float, range(len(names))))
    ours = line("this run", places, [_all(found, name, _variation) for name in names], shade=0)
    paper = [published.TABLE[name].variation if name in published.TABLE else None for name in names]
    axis = Axis("", names=names)
    series = (ours, Series("published", places, tuple(paper), shade=1))
    return Figure(
        "compact-variation",
        "Which compact form predicts what the HMC samples predict?",
        "Total variation from the average predictive of all HMC samples, lower is better. Means over seeds with one "
        "standard error; published for MNIST 784-512-10. Forms with a colon are ours.",
        (Panel("bars", "", axis, Axis("total variation from HMC", low=0), series),),
    )


_COLUMNS = (
    Column("form", "what is kept of a posterior"),
    Column("by", "whose form it is: the paper's or ours"),
    Column("stored", "numbers to keep, in networks", "lower", digits=1),
    Column(
        "agreement",
        "share of test inputs for which the average predictives of this form and of all HMC samples choose the same "
        "class",
        "higher",
    ),
    Column(
        "total variation",
        "half the sum of absolute differences between the class probabilities of this form and of all HMC samples, "
        "averaged over test inputs: 0 for the same predictive, 1 for the opposite",
        "lower",
    ),
    Column("accuracy of draws", "test accuracy of the average predictive of networks drawn", "higher", 2, "%"),
    Column("accuracy of mean", "test accuracy of the single network at the mean", "higher", 2, "%"),
    Column("NLL", "negative log likelihood of the test labels under the average predictive", "lower", unit="nats"),
    Column("ECE", "expected calibration error: mean gap between confidence and accuracy, 15 bins", "lower"),
)


def _table(found: Found) -> Table:
    return Table(
        "compact-table",
        "What compact forms keep of a posterior, against all HMC samples",
        _COLUMNS,
        tuple(_row(name, own) for name, own in found.items()),
        f"± one standard error over {max(map(len, found.values()))} seeds (rows of HMC: {len(found['HMC samples'])})",
        "; ".join(f"{name}: {what}" for name, what in OURS.items() if name in found) + ".",
    )


def _row(name: str, own: Sequence[Score]) -> tuple[Cell, ...]:
    paper = published.TABLE.get(name)
    means = [100 * score.mean for score in own if score.mean is not None]
    return (
        name,
        "ours" if name in OURS else "paper",
        Number(own[0].stored),
        measured([score.agreement for score in own], paper and paper.agreement),
        measured([score.variation for score in own], paper and paper.variation),
        measured([_draws(score) for score in own], paper and paper.draws),
        measured(means, paper and paper.mean) if means else None,
        measured([score.nll for score in own]),
        measured([score.ece for score in own]),
    )


def claims(found: Found) -> tuple[Claim, ...]:
    """What the paper says about its table, and what we add."""
    return (
        _better(found, "HMC"),
        _better(found, "Ensemble"),
        _not_close_hmc(found),
        *((_equal_storage(found),) if REFINED in found else ()),
    )


def _better(found: Found, method: str) -> Claim:
    raw, rebased = f"{method} q_d", f"{method} q_r"
    before, after = _all(found, raw, _variation), _all(found, rebased, _variation)
    paper = published.TABLE[raw], published.TABLE[rebased]
    verdict = falls(before, after, _FALL)
    return Claim(
        f"{'HMC samples' if method == 'HMC' else 'Ensembles'}: the compact form after rebasin (q_r) is far better than "
        "without (q_d).",
        verdict,
        f"total variation {told(before)} -> {told(after)}, accuracy of draws {told(_all(found, raw, _draws), 1)} -> "
        f"{told(_all(found, rebased, _draws), 1)} % (criterion: total variation falls by more than three standard "
        f"errors and to at most {_FALL:g} of what it was)",
        f"{paper[0].variation} -> {paper[1].variation}, {paper[0].draws} -> {paper[1].draws} %",
        f"{fmean(after) / fmean(before):.0%} of the total variation are left.",
    )


def _not_close_hmc(found: Found) -> Claim:
    lost = [own.draws - form.draws for own, form in zip(found["HMC samples"], found["HMC q_r"], strict=True)]
    paper = published.TABLE["HMC samples"], published.TABLE["HMC q_r"]
    return Claim(
        "For HMC q_r is not close to the samples.",
        NOT if close(lost, _all(found, "HMC q_r", _variation)) else REPRODUCED,
        f"samples {told(_all(found, 'HMC samples', _draws), 1)} % right, q_r {told(_all(found, 'HMC q_r', _draws), 1)} "
        f"%; total variation 0 and {told(_all(found, 'HMC q_r', _variation))} (criterion: more than {100 * POINTS:g} "
        f"points or {VARIATION:g} lost)",
        f"{paper[0].draws} % and {paper[1].draws} %, total variation 0 and {paper[1].variation}",
    )


def _equal_storage(found: Found) -> Claim:
    """Ours: a form of two networks should beat two networks."""
    form, two = _all(found, REFINED, _variation), _all(found, "HMC: 2 samples", _variation)
    paper = _all(found, "HMC q_r", _variation)
    verdict = graded(smaller(form, two), smaller(form, paper))
    return Claim(
        "Ours: refined, a mean and a deviation of HMC samples predict better than two samples, which take as much "
        "room.",
        verdict,
        f"total variation {told(form)} against {told(two)} of two samples and {told(paper)} of q_r (criterion: in "
        "every run and by more than three standard errors)",
        "",
        "Better than q_r, but not surely better than two samples." if verdict == CAVEAT else "",
    )
