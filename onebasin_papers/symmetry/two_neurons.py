"""Figure 1 of the paper: two hidden units, where one sees with bare eyes what symmetries do to a posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.numbers import edges, heat, mean_number
from onebasin_papers.study import Workspace
from onebasin_papers.symmetry.settings import SymmetrySettings
from onebasin_papers.verdicts import graded

report = ob.reporting

TITLE = "What do symmetries do to a posterior that one can look at?"
LOSS = 0.01  # as in the paper: a run is kept when its mean loss is at most this
_EXAMPLES = 200  # of each class
_GROUPS = 10  # of networks, for standard errors
_SIGMAS = 3.29  # p = 0.001, two-sided


class TwoNeurons(nn.Module):
    """2 inputs, 2 hidden units with relu, 1 output.

    The output layer stands first, because a canonical order goes by the first tensor that touches a unit: units are
    then ordered by their output weights, as in the paper's figure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(2, 1)
        self.hidden = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Score (examples, 2) -> (examples, 1)."""
        score: Tensor = self.output(self.hidden(x).relu())
        return score


@dataclass(frozen=True, eq=False)
class ToyPopulation:
    """One panel: networks, and what is measured of them.

    Attributes:
        name: of the panel.
        population: the networks.
    """

    name: str
    population: ob.Population

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Output weights of the two units, (members,) each."""
        first, second = self.population.tensor("output.weight")[:, 0].unbind(1)
        return first, second

    @cached_property
    def above(self) -> int:
        """Networks above the diagonal: the second unit has the larger output weight."""
        return int((self.weights[1] > self.weights[0]).sum())

    @cached_property
    def shared(self) -> report.Number:
        """|mean|^2 / mean of |w|^2 over all 9 weights, in per cent, with its standard error over groups."""
        rows = torch.cat([self.population.tensor(name).flatten(1) for name in self.population.names], 1).chunk(_GROUPS)
        return mean_number(
            [float(group.mean(0).square().sum() / group.square().sum(1).mean()) for group in rows], scale=100
        )

    @cached_property
    def thickness(self) -> report.Number:
        """Distance between the quartiles of the ring's radius over its median, in per cent, over groups."""
        radius = torch.stack(self.weights, 1).norm(dim=1)
        at = torch.tensor([0.25, 0.5, 0.75], dtype=radius.dtype)
        quartiles = [group.quantile(at) for group in radius.chunk(_GROUPS)]
        return mean_number([float((q[2] - q[0]) / q[1]) for q in quartiles], scale=100)


def part(workspace: Workspace[SymmetrySettings]) -> report.Section:
    """Train thousands of tiny networks, and draw their output weights raw and without symmetries."""
    data = two_clouds(workspace.generator("two-neurons"))
    with ob.global_seed(0):
        model = TwoNeurons().eval()
    trained = _trainings(workspace, model, data)
    solved = trained[_losses(trained) <= LOSS].to(dtype=torch.float64)
    symmetry = ob.discover(model, data[0][:2])
    lightest = ob.canonicalise(solved, symmetry, scale="balanced", order="keep").population or solved
    ordered = ob.canonicalise(solved, symmetry, scale="balanced", order="max").population or solved
    views = (
        ToyPopulation("as trained", solved),
        ToyPopulation("scale removed", lightest),
        ToyPopulation("scale and order removed", ordered),
    )
    change = _change(model.double(), views, data[0].double())
    raw, last = views[0], views[-1]
    claim = report.Claim(
        "The posterior is a mixture of copies of one canonical posterior, one copy per order of the units.",
        mirror_verdict(raw.above, last.above, len(solved), change),
        f"{raw.above:,} of {len(solved):,} networks above the diagonal as trained, {last.above} afterwards; outputs "
        f"changed by at most {change:.0e} of the largest",
        "one half of the plane is left after sorting",
    )
    text = (
        f"They copy it: of {len(solved):,} networks {100 * raw.above / len(solved):.0f} % lie on one side of a mirror "
        "as "
        f"trained and {100 * last.above / len(solved):.0f} % after scale and order are removed, while no output "
        "changes "
        f"by more than {change:.0e} of the largest. What all networks have in common rises from {raw.shared.value:.1f} "
        f"% to {last.shared.value:.1f} % of their squared norm.",
        f"{len(trained):,} networks with two hidden units were trained side by side on two clouds of {_EXAMPLES} "
        f"points each, by plain SGD with rate 2 in batches of 10 for {workspace.settings.toy_epochs} epochs. "
        f"{len(solved):,} are "
        f"shown: those whose mean loss on the training data is at most {LOSS} afterwards, so that all of them solve "
        "the task. (The paper takes the mean over the last epoch.)",
        "The symmetries were discovered in the model, not written down for it: the two units may swap, and each may be "
        "rescaled. Scales are removed by moving to the lightest network with the same function (the paper gives "
        "incoming weights norm 3), the order by sorting units by their output weights.",
    )
    return report.Section("two-neurons", TITLE, text, (_figure(views), _table(views)), (claim,))


def two_clouds(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points (400, 2) around (-2, -2) and (2, 2) with unit variance, and their classes (400, 1) as 0.0 and 1.0."""
    noise = torch.randn(2, _EXAMPLES, 2, generator=generator)
    inputs = noise + torch.tensor([-2.0, 2.0])[:, None, None]
    return inputs.flatten(0, 1), torch.tensor([0.0, 1.0]).repeat_interleave(_EXAMPLES)[:, None]


def mirror_verdict(above_before: int, above_after: int, networks: int, change: float) -> str:
    """Reproduced if the raw population is its own mirror image and the sorted one lies on one side of the mirror.

    The first is a binomial test at p = 0.001: exchangeable units are in either order with probability one half.

    >>> mirror_verdict(520, 0, 1000, 1e-12), mirror_verdict(700, 0, 1000, 1e-12), mirror_verdict(520, 1, 1000, 1e-12)
    ('reproduced', 'not reproduced', 'not reproduced')
    """
    mirrored = abs(above_before - networks / 2) <= _SIGMAS * math.sqrt(networks) / 2
    return graded(mirrored and above_after == 0 and change <= 1e-9, partly=False)


def _trainings(workspace: Workspace[SymmetrySettings], model: nn.Module, data: tuple[Tensor, Tensor]) -> ob.Population:
    method = ob.Ensemble(epochs=workspace.settings.toy_epochs, batch=10, lr=2.0, optimizer="sgd", momentum=0.0)
    chains = workspace.settings.toy_networks
    return workspace.sample(
        "two-neurons",
        model,
        data,
        method,
        chains=chains,
        prior=None,
        likelihood="bernoulli",
        chains_per_batch=min(chains, 2000),
        workers=workspace.settings.workers,
        compile=False,
    )


def _losses(trained: ob.Population) -> Tensor:
    """Mean loss of each network on the training data (members,): without a prior the log density is all loss."""
    density = trained.log_density
    return torch.zeros(len(trained)) if density is None else -density / (2 * _EXAMPLES)


def _change(model: nn.Module, views: tuple[ToyPopulation, ...], inputs: Tensor) -> float:
    """Largest change of an output over the largest output."""
    outputs = [ob.predict(model, view.population, inputs, quantity="values") for view in views]
    return max(float((values - outputs[0]).abs().max() / outputs[0].abs().max()) for values in outputs)


def _figure(views: tuple[ToyPopulation, ...]) -> report.Figure:
    places = edges(-5.0, 5.0, 36)
    axes = (
        report.Axis("output weight of unit 1", low=-5, high=5),
        report.Axis("output weight of unit 2", low=-5, high=5),
    )
    mirror = report.Rule("mirror", direction="diagonal")
    raw, scaled, last = views
    return report.Figure(
        "two-neurons-weights",
        "Where do the two output weights of trained networks lie?",
        f"Left: {raw.above:,} networks above the mirror, {len(raw.population) - raw.above:,} below: either unit can "
        "take either role. Middle: every network moved to the lightest one with the same function; the ring's "
        f"thickness goes from {raw.thickness.value:.1f} % to {scaled.thickness.value:.1f} % of its radius. "
        f"Right: units sorted, {last.above} networks are left above the mirror. Empty places hold no network.",
        tuple(heat(view.name, *view.weights, places, axes, mirror) for view in views),
    )


def _table(views: tuple[ToyPopulation, ...]) -> report.Table:
    return report.Table(
        "two-neurons-numbers",
        "How much do the networks have in common?",
        (
            report.Column("networks"),
            report.Column("above the mirror", "networks whose second unit has the larger output weight", digits=0),
            report.Column("in common", "squared norm of the mean network over the mean squared norm", "higher", 1, "%"),
            report.Column("ring", "distance of the quartiles of the radius over its median", "lower", 1, "%"),
        ),
        tuple((view.name, report.Number(view.above), view.shared, view.thickness) for view in views),
        errors=f"± one standard error over {_GROUPS} groups of networks",
        note="Two networks that are mirror images have little in common although they compute the same.",
    )
