"""Implicit ensembles in weight space: how far apart are their members, and what are they worth for their room?

Not in the paper, whose table has none of them. BatchEnsemble, LP-BNN, Masksembles, MIMO and draws of batch-norm
statistics are unrolled into ordinary networks of one architecture; then the tools for independent trainings apply.

Criteria, written down on 2026-11-19 before the first run:

- variance: the mean squared distance of two members of one ensemble divided by that of members of two ensembles, as
  given and in one frame. "Hardly within one" holds if it is below a tenth in one frame for every method by three
  standard errors over the groups; with a caveat if that is so for more than half of the methods.
- basin: the highest loss on the straight line between the first two members of an ensemble, as given, against the same
  between the first members of two ensembles. "One basin" holds if for every method the mean barrier within is below a
  tenth of that between; with a caveat if it is for more than half.
- storage: a refined mean and deviation of the deep ensemble of a group (two networks) against a BatchEnsemble of about
  the same storage, by the negative log likelihood on test data, paired over groups: holds if better by a t-test at
  5 %, with a caveat if better on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

import onebasin as ob
from onebasin_papers.numbers import mean_error, mean_number
from onebasin_papers.symmetry.networks import (
    SymmetryWorkspace,
    chain_of,
    implicit_of,
    problem,
    runs_of,
    sampled,
    starts,
    symmetry,
    training,
)
from onebasin_papers.verdicts import SURE, difference, graded

report = ob.reporting

TITLE = "Are the members of an implicit ensemble different networks, and what are they worth for their room?"
SMALL = 0.1  # share of variance within runs, and of barriers: a tenth is called little
_PAIRS = 2  # runs of each group whose barriers are measured: within each, and between the first two


@dataclass(frozen=True)
class Spread:
    """Where the weights of one implicit ensemble differ.

    Attributes:
        method: its title.
        given: share of the variance of weights within runs, one number for each group.
        aligned: the same after all members of the group were moved into one frame.
        within: highest loss between two members of one run, as given (nats).
        within_aligned: the same after the second was moved to the first.
        between: highest loss between the first members of two runs, as given.
        between_aligned: the same after alignment.
        verdicts: of `match`, for two members of one run.
    """

    method: str
    given: tuple[float, ...]
    aligned: tuple[float, ...]
    within: tuple[float, ...]
    within_aligned: tuple[float, ...]
    between: tuple[float, ...]
    between_aligned: tuple[float, ...]
    verdicts: tuple[str, ...]


def share_within(population: ob.Population, names: Sequence[str]) -> float:
    """The mean squared distance of two networks of one run divided by that of networks of two runs.

    Where runs do not matter it is 1, where all members of a run are the same network 0.
    """
    flat = torch.cat([population.tensor(name).flatten(1).double() for name in names], dim=1)
    chain = chain_of(population)
    squares = torch.cdist(flat, flat).square()
    same = chain[:, None] == chain[None, :]
    apart = ~torch.eye(len(flat), dtype=torch.bool)
    everything = float(squares[~same].mean())
    return float(squares[same & apart].mean()) / everything if everything else 0.0


def spread_of(workspace: SymmetryWorkspace, method: str, title: str) -> Spread:
    """Variances and barriers of one method."""
    settings, task = workspace.settings, problem(workspace)
    population = _members(runs_of(workspace, method), settings.members)
    names = [name for name, value in task.model.named_parameters() if value.requires_grad]
    chain = chain_of(population)
    shares: dict[str, list[float]] = {"given": [], "aligned": []}
    barriers: dict[str, list[float]] = {"within": [], "within_aligned": [], "between": [], "between_aligned": []}
    verdicts = []
    for group in range(settings.groups):
        own = population[(chain >= group * settings.runs) & (chain < (group + 1) * settings.runs)]
        shares["given"].append(share_within(own, names))
        shares["aligned"].append(share_within(ob.align(own, symmetry(workspace)).population, names))
        runs = [own[chain_of(own) == run] for run in chain_of(own).unique()[:_PAIRS].tolist()]
        for members in runs:
            _add_barrier(workspace, barriers, "within", members[0], members[1])
            verdicts.append(ob.match(members[0], members[1], symmetry(workspace)).verdict)
        _add_barrier(workspace, barriers, "between", runs[0][0], runs[1][0])
    return Spread(
        title,
        verdicts=tuple(verdicts),
        **{name: tuple(values) for name, values in (shares | barriers).items()},
    )


def _members(population: ob.Population, each: int) -> ob.Population:
    """At most so many members of each run."""
    chain = chain_of(population)
    return population[torch.cat([(chain == run).nonzero().flatten()[:each] for run in chain.unique()])]


def _add_barrier(
    workspace: SymmetryWorkspace, barriers: dict[str, list[float]], name: str, one: ob.State, other: ob.State
) -> None:
    task = problem(workspace)
    path = ob.barrier(task.model, one, other, task.train, points=11, symmetry=symmetry(workspace))
    assert path.aligned is not None  # a symmetry was given
    barriers[name].append(path.max)
    barriers[f"{name}_aligned"].append(path.aligned.max)


@dataclass(frozen=True)
class Stored:
    """What a way of keeping networks is worth.

    Attributes:
        title: what is kept.
        networks: its storage, in networks.
        numbers: for each group name -> value.
    """

    title: str
    networks: float
    numbers: tuple[dict[str, float], ...]


def stored_forms(workspace: SymmetryWorkspace) -> list[Stored]:
    """A refined mean and deviation, BatchEnsembles and few networks: test scores at about equal storage."""
    return workspace.cached("stored", lambda: _stored_forms(workspace))


def _stored_forms(workspace: SymmetryWorkspace) -> list[Stored]:
    settings, task = workspace.settings, problem(workspace)
    begun, group_size = starts(workspace), settings.runs
    large = sampled(
        workspace,
        "rank-one",
        ob.BatchEnsemble(members=settings.rank_one, **training(settings)),
        chains=settings.groups,
    )
    small = runs_of(workspace, "batchensemble")
    forms: dict[str, list[dict[str, float]]] = {}
    for group in range(settings.groups):
        workspace.progress(group, settings.groups, "refining, and scores at equal storage")
        ensemble = begun[group * group_size : (group + 1) * group_size]
        aligned = ob.align(ensemble, symmetry(workspace)).population
        fitted = ob.fit(aligned, model=task.model)
        refined = ob.refine(
            task.model,
            fitted,
            ensemble,
            task.train[0],
            steps=settings.refine_steps,
            seed=workspace.seed_for("refine", group),
        )
        drawn = refined.draw(100, workspace.generator("refined", group))
        candidates = {
            "refined mean and deviation": drawn,
            "two trainings": ensemble[:2],
            f"{group_size} trainings": ensemble,
            f"BatchEnsemble of {settings.members}": small[chain_of(small) == group * group_size],
            f"BatchEnsemble of {settings.rank_one}": large[chain_of(large) == group],
        }
        for title, networks in candidates.items():
            forms.setdefault(title, []).append(_scores(workspace, networks))
    storage = {
        "refined mean and deviation": 2.0,
        "two trainings": 2.0,
        f"{group_size} trainings": float(group_size),
        f"BatchEnsemble of {settings.members}": _rank_one_storage(workspace, settings.members),
        f"BatchEnsemble of {settings.rank_one}": _rank_one_storage(workspace, settings.rank_one),
    }
    return [Stored(title, storage[title], tuple(values)) for title, values in forms.items()]


def _rank_one_storage(workspace: SymmetryWorkspace, members: int) -> float:
    """Numbers of a BatchEnsemble in networks: shared matrices, and for each member factors and biases."""
    shapes = [value.shape for value in problem(workspace).model.parameters() if value.requires_grad]
    weights = sum(shape.numel() for shape in shapes)
    biases = sum(shape.numel() for shape in shapes if len(shape) == 1)
    factors = sum(shape[0] + shape[1] for shape in shapes if len(shape) > 1)
    return (weights - biases + members * (factors + biases)) / weights


def _scores(workspace: SymmetryWorkspace, networks: ob.Population) -> dict[str, float]:
    task = problem(workspace)
    found = ob.evaluate(task.model, networks, task.test, n_resamples=2).in_distribution
    return {name: found[name].value for name in ("accuracy", "nll", "brier", "ece")}


def part(workspace: SymmetryWorkspace) -> report.Section:
    """Measure every implicit ensemble that is made of networks of the architecture."""
    methods = {method: title for method, title in implicit_of(workspace).items() if method != "packed"}
    spreads = []
    for place, (method, title) in enumerate(methods.items()):
        workspace.progress(place, len(methods) + 1, f"variances and barriers of {title}")
        spreads.append(spread_of(workspace, method, title))
    forms = stored_forms(workspace) if "batchensemble" in methods else []
    text = (_answer(spreads), *((_worth(forms),) if forms else ()))
    items = (_spread_table(spreads), *((_storage_table(forms),) if forms else ()))
    return report.Section("implicit", TITLE, text, items, tuple(_claims(workspace, spreads, forms)))


def _answer(spreads: Sequence[Spread]) -> str:
    low, high = (pick(spreads, key=lambda one: fmean(one.aligned)) for pick in (min, max))
    same = [verdict == "already aligned" for one in spreads for verdict in one.verdicts]
    return (
        f"Members of one ensemble differ by {fmean(low.aligned):.1%} ({low.method}) to {fmean(high.aligned):.1%} "
        f"({high.method}) of the squared distance between ensembles, once all are in one frame; of {len(same)} pairs "
        f"of members {sum(same)} are in one basin as they are, by the verdict of match."
    )


def _worth(forms: Sequence[Stored]) -> str:
    listed = ", ".join(
        f"{form.title} ({form.networks:.2f} networks) {fmean(one['nll'] for one in form.numbers):.3f}" for form in forms
    )
    return f"Negative log likelihood on test data (nats): {listed}."


def _spread_table(spreads: Sequence[Spread]) -> report.Table:
    columns = (
        report.Column("method"),
        report.Column("within runs", "squared distance of two members of a run / of two runs, as given", "", 2, "%"),
        report.Column("in one frame", "the same after alignment of all members of the group", "", 2, "%"),
        report.Column("barrier within", "highest loss between two members of a run, as given", "lower", 4, "nats"),
        report.Column("aligned", "the same after alignment", "lower", 4, "nats"),
        report.Column("barrier between", "highest loss between members of two runs, as given", "lower", 4, "nats"),
        report.Column("between, aligned", "the same after alignment", "lower", 4, "nats"),
        report.Column("one basin", "pairs of members that `match` calls already aligned"),
    )
    rows: list[tuple[report.Cell, ...]] = [
        (
            one.method,
            mean_number([100 * value for value in one.given]),
            mean_number([100 * value for value in one.aligned]),
            *(mean_number(values) for values in (one.within, one.within_aligned, one.between, one.between_aligned)),
            f"{sum(verdict == 'already aligned' for verdict in one.verdicts)} of {len(one.verdicts)}",
        )
        for one in spreads
    ]
    return report.Table(
        "members",
        "How different are the members of an implicit ensemble?",
        columns,
        tuple(rows),
        "± one standard error over groups of runs, or over pairs of networks",
        "Packed-Ensembles have no such row: their members are narrow networks without anything in common.",
    )


def _storage_table(forms: Sequence[Stored]) -> report.Table:
    columns = (
        report.Column("what is kept"),
        report.Column("networks", "storage, in networks", "lower", 2),
        report.Column("Acc", "share of right answers on test data", "higher", 2, "%"),
        report.Column("NLL", "negative log likelihood", "lower", 4, "nats"),
        report.Column("Brier", "Brier score x 100", "lower", 2),
        report.Column("ECE", "expected calibration error", "lower", 2, "%"),
    )
    rows = tuple(
        (
            form.title,
            report.Number(form.networks),
            mean_number([100 * one["accuracy"] for one in form.numbers]),
            mean_number([one["nll"] for one in form.numbers]),
            mean_number([100 * one["brier"] for one in form.numbers]),
            mean_number([100 * one["ece"] for one in form.numbers]),
        )
        for form in forms
    )
    return report.Table(
        "storage",
        "What is the room of two networks best used for?",
        columns,
        rows,
        "± one standard error over groups",
        "The refined mean and deviation stand for all trainings of a group, and cost these trainings and more.",
    )


def _claims(workspace: SymmetryWorkspace, spreads: Sequence[Spread], forms: Sequence[Stored]) -> Iterator[report.Claim]:
    little = [_surely_below(one.aligned, SMALL) for one in spreads]
    yield report.Claim(
        "Ours: the weights of implicit ensembles vary between runs, hardly within one.",
        graded(all(little), 2 * sum(little) > len(little)),
        "share within runs in one frame: "
        + ", ".join(f"{one.method} {100 * fmean(one.aligned):.2f} %" for one in spreads)
        + f" (criterion: below {SMALL:.0%} by three standard errors, for every method)",
        "not tested",
        _but(spreads, little),
    )
    flat = [fmean(one.within) < SMALL * fmean(one.between) for one in spreads]
    yield report.Claim(
        "Ours: the members of one implicit ensemble sit in one basin, without alignment.",
        graded(all(flat), 2 * sum(flat) > len(flat)),
        "barrier within a run / between two: "
        + ", ".join(f"{one.method} {fmean(one.within):.4f} / {fmean(one.between):.3f} nats" for one in spreads)
        + f" (criterion: below {SMALL:.0%} of it, for every method)",
        "not tested",
        _but(spreads, flat),
    )
    if forms:
        yield _storage_claim(workspace, forms)


def _storage_claim(workspace: SymmetryWorkspace, forms: Sequence[Stored]) -> report.Claim:
    by_title = {form.title: form for form in forms}
    refined = by_title["refined mean and deviation"]
    rival = by_title[f"BatchEnsemble of {workspace.settings.rank_one}"]
    losses = [[one["nll"] for one in form.numbers] for form in (rival, refined)]
    gain = difference("refined", losses[0], losses[1], "lower")
    return report.Claim(
        "Ours: two networks' room is better used for a refined mean and deviation than for a rank-one ensemble.",
        graded(gain.won, gain.mean > 0),
        f"negative log likelihood lower by {gain.mean:.4f} ± {gain.error:.4f} nats than that of {rival.title} "
        f"({rival.networks:.2f} networks), paired over {len(refined.numbers)} groups (criterion: p below 0.05, found "
        f"{gain.p_value:.3g})",
        "not tested",
        "" if gain.won or gain.mean <= 0 else f"p {gain.p_value:.2f}: chance is not excluded",
    )


def _but(spreads: Sequence[Spread], held: Sequence[bool]) -> str:
    """The caveat of a claim that holds for most methods; "" where it holds for all of them, or for too few."""
    others = [one.method for one, holds in zip(spreads, held, strict=True) if not holds]
    return f"not for {', '.join(others)}" if others and 2 * len(others) < len(held) else ""


def _surely_below(values: Sequence[float], limit: float) -> bool:
    mean, error = mean_error(list(values))
    return mean + SURE * (error or 0.0) < limit
