"""Min-mass: are trained networks as light as their function allows, and does weight decay make them so?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.numbers import edges, histogram, mean_error, mean_line, mean_number
from onebasin_papers.problems import Problem
from onebasin_papers.study import Workspace
from onebasin_papers.symmetry import networks as populations
from onebasin_papers.symmetry.networks import training
from onebasin_papers.symmetry.settings import SymmetrySettings
from onebasin_papers.verdicts import graded

report = ob.reporting


def convnet() -> nn.Sequential:
    """OptuNet for 8 x 8 pixels in a row: the same layers and symmetries with smaller kernels, 168 weights.

    >>> sum(weight.numel() for weight in convnet().parameters())
    168
    """
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *ob.examples.optunet(first=3, pool=2, second=2))


def scaled(workspace: Workspace[SymmetrySettings]) -> dict[str, Problem]:
    """Networks in words -> with their data: first of the kind that the paper looks at, then a perceptron.

    On a user's problem there is one kind, the user's.
    """
    if workspace.own.problem is not None:
        return {"own network": populations.problem(workspace)}
    perceptron = populations.problem(workspace, "mlp")
    if workspace.settings.preset == "full":
        return {"OptuNet": populations.problem(workspace, "optunet"), "perceptron": perceptron}
    with ob.global_seed(0):
        small = convnet().eval()
    return {"small OptuNet": replace(perceptron, model=small), "perceptron": perceptron}


def scales_of(workspace: Workspace[SymmetrySettings], kind: str, task: Problem) -> ob.Symmetry:
    """What leaves such a network's function unchanged."""
    return workspace.cached(f"symmetry/scaled/{kind}", lambda: ob.discover(task.model, task.train[0][:2]))


TITLE = "Does weight decay find the lightest network of its kind?"
MARGIN = 1.0  # per cent of excess mass up to which a network counts as the lightest; the least in the paper's figure
_SIGMAS = 3.29  # p = 0.001, two-sided
_PUBLISHED = "excess mass from 1 to 58 %, with peaks near 10 and 30 %"
_ANSWERS = {"reproduced": "No", "reproduced with a caveat": "Only where it is strong", "not reproduced": "Nearly"}
_SEED = 11  # the same starts for all decays, so that they can be compared one by one


@dataclass(frozen=True, eq=False)
class Group:
    """Networks of one kind trained with one weight decay.

    Attributes:
        kind: of network, in words.
        decay: the weight decay.
        before: squared norm of each network (members,).
        after: that of the lightest network with the same function.
        imbalance: incoming less outgoing mass of units, root mean square over that of the start.
        expected: the same if gradients did not change it, and decay alone acted.
        correct: accuracy of each network on test data.
    """

    kind: str
    decay: float
    before: Tensor
    after: Tensor
    imbalance: float
    expected: float
    correct: tuple[float, ...]

    @cached_property
    def excess(self) -> tuple[float, ...]:
        """How much heavier than necessary each network is, in per cent."""
        return tuple((100 * (self.before / self.after - 1)).tolist())

    @cached_property
    def mean(self) -> float:
        """Mean excess."""
        return mean_error(self.excess)[0]

    @cached_property
    def bound(self) -> float:
        """Mean excess less 3.29 standard errors."""
        mean, error = mean_error(self.excess)
        return mean - _SIGMAS * (error or math.inf)

    @property
    def name(self) -> str:
        """In figures."""
        return f"decay {self.decay:g}"


def part(workspace: Workspace[SymmetrySettings]) -> report.Section:
    """Train groups of networks with several weight decays, and move each to the lightest of its orbit."""
    kinds = scaled(workspace)
    groups = [_group(workspace, kind, decay) for kind in kinds for decay in workspace.settings.mass_decays]
    first, *others = ([group for group in groups if group.kind == kind] for kind in kinds)
    free, strongest = first[0], first[-1]
    decayed = [group for group in first if group.decay > 0]
    whose = "networks of the paper's kind" if others else "networks"
    elsewhere = "".join(
        f" A {second[0].kind} of ordinary width ends {second[-1].mean:.2g} to {second[0].mean:.2g} % too heavy."
        for second in others
    )
    text = (
        f"{_ANSWERS[lightest_verdict([group.bound for group in decayed])]}: with weight decays from "
        f"{decayed[0].decay:g} to {strongest.decay:g} {whose} ({free.kind}) end "
        f"{strongest.mean:.1f} to {decayed[0].mean:.1f} % heavier than the lightest network that computes the same; "
        f"without decay it is {free.mean:.1f} %.{elsewhere}",
        f"Each group holds {len(free.excess)} networks on {next(iter(kinds.values())).name}, trained by SGD for "
        f"{workspace.settings.mass_epochs} epochs from the same starts. Every hidden unit may be rescaled without "
        "changing the "
        "function; along that orbit the squared norm is convex, and its only minimum, where every unit takes in as "
        "much mass as it gives out, is found by balancing. Biases count, as they do for the weight decay. (Filter "
        "response norm and SiLU leave no such freedom: there is nothing to measure in ResNet-20.) A group counts as "
        f"not the lightest when its mean excess is above {MARGIN:g} %, the least in the paper's figure, by 3.29 "
        "standard errors.",
        "In small steps gradients do not change the imbalance of a unit (incoming less outgoing mass), and decay "
        f"shrinks it by exp(-2 x rate x decay) per step. In {free.kind} that alone would leave "
        f"{100 * strongest.expected:.2g} % of the imbalance of the start at the strongest decay, and all of it without "
        f"decay; we find {100 * strongest.imbalance:.0f} % and {100 * free.imbalance:.0f} %. Any difference is made by "
        "steps of finite size and noisy gradients, all the time, against the decay.",
    )
    claims = (
        _claim("Training with weight decay does not reach the network of least mass.", decayed, _PUBLISHED),
        *(
            _claim(
                f"Training a {second[0].kind} with weight decay does not reach it either.",
                [group for group in second if group.decay > 0],
                "stated without restriction; perceptrons are not shown",
            )
            for second in others
        ),
    )
    return report.Section("mass", TITLE, text, (_profile(first), _table(groups)), claims)


def obstacle(workspace: Workspace[SymmetrySettings]) -> str:
    """Why the mass of the user's networks cannot be measured; "" if it can."""
    free = any("scale" in space.freedoms for space in populations.symmetry(workspace).spaces)
    return "" if free else "no unit of the model may be rescaled, so that no network is heavier than necessary"


def _claim(text: str, decayed: Sequence[Group], published: str) -> report.Claim:
    verdict = lightest_verdict([group.bound for group in decayed])
    reached = [f"{group.decay:g}" for group in decayed if group.bound <= MARGIN]
    return report.Claim(
        text,
        verdict,
        "; ".join(f"{group.name}: {group.mean:.2g} % too heavy, at least {group.bound:.2g} %" for group in decayed),
        published,
        f"the excess may be below {MARGIN:g} % with decay {' and '.join(reached)}"
        if verdict.endswith("caveat")
        else "",
    )


def lightest_verdict(bounds: Sequence[float]) -> str:
    """Reproduced if the lower confidence bound of the mean excess is above 1 % for every decay, not if for none.

    >>> lightest_verdict([5.0, 2.0]), lightest_verdict([5.0, 0.3]), lightest_verdict([0.5, 0.3])
    ('reproduced', 'reproduced with a caveat', 'not reproduced')
    """
    above = sum(bound > MARGIN for bound in bounds)
    return graded(above == len(bounds), above > 0)


def _group(workspace: Workspace[SymmetrySettings], kind: str, decay: float) -> Group:
    task = scaled(workspace)[kind]
    group = scales_of(workspace, kind, task)
    trained, start = (
        _trainings(workspace, kind, value, epochs)
        for value, epochs in ((decay, workspace.settings.mass_epochs), (0.0, 0))
    )
    balanced = ob.balance(trained, group)
    first, last = (ob.imbalance(population, group).square().mean().sqrt() for population in (start, trained))
    steps = workspace.settings.mass_epochs * math.ceil(len(task.train[0]) / workspace.settings.batch)
    path = (
        0.5 * steps * workspace.settings.rate / (1 - 0.9)
    )  # a cosine schedule is half the rate on average; momentum 0.9
    return Group(
        kind,
        decay,
        balanced.mass_before,
        balanced.mass_after,
        float(last / first),
        math.exp(-2 * decay * path),
        tuple(
            float(ob.metrics.accuracy(guess, task.test[1])) for guess in ob.predict(task.model, trained, task.test[0])
        ),
    )


def _trainings(workspace: Workspace[SymmetrySettings], kind: str, decay: float, epochs: int) -> ob.Population:
    """Networks by SGD, whose Gaussian prior is the weight decay: decay = 1 / (examples * deviation^2)."""
    settings, task = workspace.settings, scaled(workspace)[kind]
    prior = (len(task.train[0]) * decay) ** -0.5 if decay else None
    method = replace(ob.Ensemble(**training(settings)), epochs=epochs)
    half = -(-settings.mass_networks // 2)  # two processes find as much to do
    name = f"mass-{kind.replace(' ', '-').lower()}-{f'{decay:g}' if epochs else 'start'}"
    return workspace.sample(
        name,
        task.model,
        task.train,
        method,
        chains=settings.mass_networks,
        prior=prior,
        workers=settings.workers,
        chains_per_batch=min(settings.lanes, half),
        compile=False,
        seed=workspace.seed + _SEED,
    )


def _profile(groups: Sequence[Group]) -> report.Figure:
    points = tuple(
        report.Series(group.name, tuple(_short(group.before)), tuple(_short(group.after)), shade=shade)
        for shade, group in enumerate(groups)
    )
    most = max(max(group.excess) for group in groups)
    places = edges(0.0, math.ceil(most / 5) * 5, 15)
    counted = tuple(
        histogram(group.name, torch.tensor(group.excess), places, shade=shade) for shade, group in enumerate(groups)
    )
    bars = mean_line("", range(len(groups)), [group.excess for group in groups], digits=6)
    names = tuple(f"{group.decay:g}" for group in groups)
    heavier = sum(bool((group.before > group.after).all()) for group in groups)
    diagonal = report.Rule("as light as possible", direction="diagonal")
    trained, least = (report.Axis("squared norm after training"), report.Axis("least squared norm of its orbit"))
    excess, decays = report.Axis("excess mass, %", low=0), report.Axis("weight decay", names=names)
    return report.Figure(
        "mass-profile",
        "How much heavier than necessary are trained networks?",
        f"Left: one point per network; on the diagonal it would be as light as possible. In {heavier} of {len(groups)} "
        f"groups all networks lie below it. Middle: the same in per cent, at most {most:.0f} %. Right: the mean of "
        "each group, with its standard error.",
        (
            report.Panel("points", "mass and least mass", trained, least, points, (diagonal,)),
            report.Panel("histogram", "excess mass", excess, report.Axis("networks", low=0), counted),
            report.Panel("bars", "effect of weight decay", decays, report.Axis("mean excess mass, %", low=0), (bars,)),
        ),
    )


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _table(groups: Sequence[Group]) -> report.Table:
    rows = tuple(
        (
            group.kind,
            report.Number(group.decay),
            mean_number(group.before.tolist()),
            mean_number(group.after.tolist()),
            mean_number(group.excess),
            report.Number(group.bound),
            report.Number(100 * group.imbalance),
            report.Number(100 * group.expected),
            mean_number(group.correct, scale=100),
        )
        for group in groups
    )
    return report.Table(
        "mass-decay",
        "What does weight decay do to the mass?",
        (
            report.Column("network"),
            report.Column("weight decay", digits=4),
            report.Column("mass", "sum of squared weights after training", "", 1),
            report.Column("least", "the same for the lightest network that computes the same", "", 1),
            report.Column("excess", "mass over least mass, less one", "lower", 2, "%"),
            report.Column("at least", "mean excess less 3.29 standard errors", "", 2, "%"),
            report.Column("imbalance", "incoming less outgoing mass of units, over that of the start", "", 1, "%"),
            report.Column("decay alone", "what would be left if gradients did not change it", "", 1, "%"),
            report.Column("accuracy", "on test data", "higher", 1, "%"),
        ),
        rows,
        errors=f"± one standard error over {len(groups[0].excess)} networks",
    )
