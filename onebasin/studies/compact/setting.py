"""The problem, the symmetry and the judges that all parts of this study share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from onebasin.align import match, match_activations, transpositions
from onebasin.inference.runs.start import fresh
from onebasin.predict import losses
from onebasin.state import State
from onebasin.studies.bench import Bench
from onebasin.studies.compact.plan import CompactPlan
from onebasin.studies.problem import Problem, digits_problem, mlp
from onebasin.symmetry import Element, Symmetry, discover

Runs = Bench[CompactPlan]


@dataclass(frozen=True, eq=False)
class Setting:
    """One hidden layer and its data.

    Attributes:
        problem: architecture and data.
        symmetry: permutations of hidden units; scales are kept, as in the paper.
    """

    problem: Problem
    symmetry: Symmetry

    @property
    def widths(self) -> str:
        """The architecture, as "64-64-10"."""
        sizes = [value.shape for name, value in self.problem.model.state_dict().items() if name.endswith("weight")]
        return "-".join(str(size) for size in (sizes[0][1], *(size[0] for size in sizes)))

    @property
    def units(self) -> int:
        """Number of hidden units."""
        return self.symmetry.spaces[0].size

    def match(self, a: State, b: State) -> Element:
        """Rebasin as in the paper: uncentred activations on all training inputs, one assignment."""
        problem = self.problem
        return match_activations(problem.model, a, b, self.symmetry, problem.train[0], kind="uncentred").element

    def rebased(self, a: State, b: State) -> State:
        """The second network in the basin of the first."""
        return self.symmetry.apply(self.match(a, b), b)

    def swaps(self, a: State, b: State) -> int:
        """Number of transpositions of the permutation that matches b to a."""
        return int(transpositions(self.match(a, b), self.symmetry).total)

    def swaps_by_weights(self, a: State, b: State) -> int:
        """The same, matched by all weights, which tells units apart that no example activates."""
        return int(transpositions(match(a, b, self.symmetry).element, self.symmetry).total)

    def silent(self, state: State) -> int:
        """Number of hidden units that no training example activates."""
        active = (self.problem.train[0] @ state["0.weight"].T + state["0.bias"]).amax(0) > 0
        return int((~active).sum())

    def loss(self, state: State) -> float:
        """Test loss, in nats."""
        return losses(self.problem.model, state, *self.problem.test).loss

    def right(self, state: State) -> float:
        """Share of the test examples that one network gets right."""
        return 1 - (losses(self.problem.model, state, *self.problem.test).error or 0.0)

    def start(self, bench: Runs, *name: str | int) -> State:
        """A fresh network with torch's own initialisation."""
        return fresh(self.problem.model, bench.number(*name), 0)


def setting(bench: Runs, units: int | None = None) -> Setting:
    """The setting of a plan, or the same with another number of hidden units; made once."""
    if units is None or units == bench.plan.units:
        return bench.once("setting", lambda: _of(_problem(bench.plan)))
    problem = setting(bench).problem
    model = mlp(problem.train[0].shape[1], units, 10)
    return bench.once(f"setting-{units}", lambda: _of(replace(problem, model=model)))


def distance(a: State, b: State) -> float:
    """|a - b|^2 over all weights."""
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)


def _of(problem: Problem) -> Setting:
    found = discover(problem.model, problem.train[0][:2])
    spaces = tuple(space.without({"scale"}) for space in found.spaces)
    return Setting(problem, replace(found, spaces=spaces))


def _problem(plan: CompactPlan) -> Problem:
    return _mnist(plan) if plan.preset == "full" else digits_problem(plan.units)


def _mnist(plan: CompactPlan) -> Problem:
    from onebasin.data import load

    found = load("mnist", directory=plan.data_dir)
    train, test = (_flat(part) for part in (found.train, found.test))
    return Problem("MNIST", mlp(784, plan.units, 10), train, test, test[0][:0], "nothing")


def _flat(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].flatten(1), pair[1]
