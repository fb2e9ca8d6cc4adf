"""The three posteriors that are compared, and their compact forms: HMC, a deep ensemble, variational inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

import onebasin as ob
from onebasin_papers.compact.presets import CompactPlan
from onebasin_papers.problem import Problem, digits_problem, mlp
from onebasin_papers.study import Bench

# ----------------------------------------------------------------------
# The problem, the symmetry and the judges that all parts of this study share.


Runs = Bench[CompactPlan]


@dataclass(frozen=True, eq=False)
class Setting:
    """One hidden layer and its data.

    Attributes:
        problem: architecture and data.
        symmetry: permutations of hidden units; scales are kept, as in the paper.
    """

    problem: Problem
    symmetry: ob.Symmetry

    @property
    def widths(self) -> str:
        """The architecture, as "64-64-10"."""
        sizes = [value.shape for name, value in self.problem.model.state_dict().items() if name.endswith("weight")]
        return "-".join(str(size) for size in (sizes[0][1], *(size[0] for size in sizes)))

    @property
    def units(self) -> int:
        """Number of hidden units."""
        return self.symmetry.spaces[0].size

    def match(self, a: ob.State, b: ob.State) -> ob.Element:
        """Rebasin as in the paper: uncentred activations on all training inputs, one assignment."""
        problem = self.problem
        return ob.match_activations(problem.model, a, b, self.symmetry, problem.train[0], kind="uncentred").element

    def rebased(self, a: ob.State, b: ob.State) -> ob.State:
        """The second network in the basin of the first."""
        return self.symmetry.apply(self.match(a, b), b)

    def swaps(self, a: ob.State, b: ob.State) -> int:
        """Number of transpositions of the permutation that matches b to a."""
        return int(ob.transpositions(self.match(a, b), self.symmetry).total)

    def swaps_by_weights(self, a: ob.State, b: ob.State) -> int:
        """The same, matched by all weights, which tells units apart that no example activates."""
        return int(ob.transpositions(ob.match(a, b, self.symmetry).element, self.symmetry).total)

    def silent(self, state: ob.State) -> int:
        """Number of hidden units that no training example activates."""
        active = (self.problem.train[0] @ state["0.weight"].T + state["0.bias"]).amax(0) > 0
        return int((~active).sum())

    def loss(self, state: ob.State) -> float:
        """Test loss, in nats."""
        return ob.losses(self.problem.model, state, *self.problem.test).loss

    def right(self, state: ob.State) -> float:
        """Share of the test examples that one network gets right."""
        return 1 - (ob.losses(self.problem.model, state, *self.problem.test).error or 0.0)

    def start(self, bench: Runs, *name: str | int) -> ob.State:
        """A fresh network with torch's own initialisation."""
        return ob.fresh(self.problem.model, bench.number(*name), 0)


def setting(bench: Runs, units: int | None = None) -> Setting:
    """The setting of a plan, or the same with another number of hidden units; made once."""
    if units is None or units == bench.plan.units:
        return bench.once("setting", lambda: _of(_problem(bench.plan)))
    problem = setting(bench).problem
    model = mlp(problem.train[0].shape[1], units, 10)
    return bench.once(f"setting-{units}", lambda: _of(replace(problem, model=model)))


def distance(a: ob.State, b: ob.State) -> float:
    """|a - b|^2 over all weights."""
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)


def _of(problem: Problem) -> Setting:
    found = ob.discover(problem.model, problem.train[0][:2])
    spaces = tuple(space.without({"scale"}) for space in found.spaces)
    return Setting(problem, replace(found, spaces=spaces))


def _problem(plan: CompactPlan) -> Problem:
    return _mnist(plan) if plan.preset == "full" else digits_problem(plan.units)


def _mnist(plan: CompactPlan) -> Problem:
    import onebasin as ob

    found = ob.data.load("mnist", directory=plan.data_dir)
    train, test = (_flat(part) for part in (found.train, found.test))
    return Problem("MNIST", mlp(784, plan.units, 10), train, test, test[0][:0], "nothing")


def _flat(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].flatten(1), pair[1]


# ----------------------------------------------------------------------
# The three posteriors that are compared, and their compact forms: HMC, a deep ensemble, variational inference.


_START_EPOCHS = 20  # of the networks that chains start from


@dataclass(frozen=True, eq=False)
class Forms:
    """A population and the paper's two compact forms of it.

    Attributes:
        samples: the networks as they came.
        aligned: the same, rebased to the first one by activations.
        raw: q_d, mean and standard deviation of every weight of the samples.
        rebased: q_r, the same of the aligned networks.
    """

    samples: ob.Population
    aligned: ob.Population
    raw: ob.Posterior
    rebased: ob.Posterior


def hmc(bench: Runs, run: int) -> ob.Population:
    """Samples of one run of HMC, several chains of them."""
    plan, problem = bench.plan, setting(bench).problem
    method = ob.HMC(draws=plan.draws, warmup=plan.warmup, leapfrog=plan.leapfrog, epochs=_START_EPOCHS)
    options: dict[str, Any] = {
        "chains": plan.chains,
        "prior": plan.prior,
        "chains_per_batch": -(-plan.chains // plan.workers),
        "threads": 1,
        "workers": plan.workers,
    }
    return bench.networks(f"hmc-{run}", problem.model, problem.train, method, options)


def ensemble(bench: Runs, seed: int, units: int | None = None) -> ob.Population:
    """Independently trained networks, maximum a posteriori; of another width than the plan's if `units` are given."""
    plan, here = bench.plan, setting(bench, units)
    method = ob.Ensemble(epochs=plan.ensemble_epochs, optimizer="adam", lr=1e-3, batch=100)
    name, problem = f"ensemble-{here.units}-{seed}", here.problem
    options = {"chains": plan.members, "prior": plan.prior}
    return bench.networks(name, problem.model, problem.train, method, options)


def variational(bench: Runs, seed: int) -> ob.Posterior:
    """The mean-field Gaussian; it is kept beside the networks of the run."""

    def made() -> ob.Posterior:
        plan, problem = bench.plan, setting(bench).problem
        file = bench.folder / "networks" / f"vi-{seed}.safetensors"
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            method, drawn = ob.VI(epochs=plan.vi_epochs, batch=100, lr=plan.vi_rate), bench.number("vi", seed)
            posterior = ob.approximate(
                problem.model, problem.train, method, prior=plan.prior, seed=drawn, progress=bench.show
            )
            posterior.save(file)
        return ob.load_posterior(file)

    return bench.once(f"vi-{seed}", made)


def forms(bench: Runs, method: str, run: int, units: int | None = None) -> Forms:
    """The compact forms of "hmc" or "ensemble", made once; the latter also of another width."""
    samples = hmc(bench, run) if method == "hmc" else ensemble(bench, run, units)
    here = setting(bench, units)
    return bench.once(f"forms-{method}-{here.units}-{run}", lambda: _forms(bench, here, samples))


def _forms(bench: Runs, here: Setting, samples: ob.Population) -> Forms:
    problem = here.problem
    aligned = ob.align(
        samples,
        here.symmetry,
        reference="first",
        by="activations",
        model=problem.model,
        inputs=problem.train[0],
        kind="uncentred",
        progress=bench.show,
    ).population
    return Forms(samples, aligned, *(ob.fit(population, model=problem.model) for population in (samples, aligned)))
