"""The problem and the networks that all parts share: HMC, deep ensembles, variational inference, compact forms."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.compact.settings import CompactSettings
from onebasin_papers.problems import Own, OwnArchitecture, Problem, digits_problem, mlp
from onebasin_papers.study import Workspace

CompactWorkspace = Workspace[CompactSettings]


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
        """The architecture, as "64-64-10"; in words where it is the user's."""
        if self.problem.described:
            return self.problem.described
        sizes = [value.shape for name, value in self.problem.model.state_dict().items() if name.endswith("weight")]
        return "-".join(str(size) for size in (sizes[0][1], *(size[0] for size in sizes)))

    @property
    def chance(self) -> ob.Transpositions:
        """No transposition, beside the most that there can be, and what random permutations have."""
        return ob.transpositions(self.symmetry.identity(), self.symmetry)

    @property
    def most(self) -> int:
        """The largest number of transpositions: hidden units less one, summed over layers."""
        return self.chance.maximum

    def planted(self, swaps: int, generator: torch.Generator) -> ob.Element:
        """A permutation with so many transpositions, dealt to the layers at random where there are several."""
        sizes = self.chance.sizes
        if len(sizes) == 1:
            return ob.element_with(self.symmetry, swaps, generator, "paper")
        room = torch.tensor([copies * (units - 1) for copies, units in sizes.values()])
        layers = torch.arange(len(room)).repeat_interleave(room)
        dealt = layers[torch.randperm(len(layers), generator=generator)[:swaps]].bincount(minlength=len(room))
        shares = dict(zip(sizes, dealt.tolist(), strict=True))
        return ob.element_with(self.symmetry, shares, generator, "paper")

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

    def silent(self, state: ob.State) -> int | None:
        """Number of hidden units that no training example activates; None for all but one hidden layer with relu."""
        if [type(layer) for layer in self.problem.model.children()] != [nn.Linear, nn.ReLU, nn.Linear]:
            return None
        active = (self.problem.train[0] @ state["0.weight"].T + state["0.bias"]).amax(0) > 0
        return int((~active).sum())

    def loss(self, state: ob.State) -> float:
        """Test loss, in nats."""
        return ob.losses(self.problem.model, state, *self.problem.test).loss

    def right(self, state: ob.State) -> float:
        """Share of the test examples that one network gets right."""
        return 1 - (ob.losses(self.problem.model, state, *self.problem.test).error or 0.0)

    def start(self, workspace: CompactWorkspace, *name: str | int) -> ob.State:
        """A fresh network with torch's own initialisation."""
        return ob.fresh(self.problem.model, workspace.seed_for(*name), 0)


def setting(workspace: CompactWorkspace, units: int | None = None) -> Setting:
    """The setting of a plan, or the same with another number of hidden units; made once."""
    if units is None or units == workspace.settings.units:
        return workspace.cached("setting", lambda: _setting_of(_problem(workspace)))
    problem, widened = setting(workspace).problem, workspace.own.widened
    model = mlp(problem.train[0].shape[1], units, 10) if widened is None else widened(units)
    return workspace.cached(f"setting-{units}", lambda: _setting_of(replace(problem, model=model)))


def distance(a: ob.State, b: ob.State) -> float:
    """|a - b|^2 over all weights."""
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)


def _setting_of(problem: Problem) -> Setting:
    symmetry = ob.discover(problem.model, problem.train[0][:2])
    spaces = tuple(space.without({"scale"}) for space in symmetry.spaces)
    return Setting(problem, replace(symmetry, spaces=spaces))


def _problem(workspace: CompactWorkspace) -> Problem:
    return workspace.own.problem or preset_problem(workspace.settings)


def preset_problem(settings: CompactSettings, seed: int = 0) -> Problem:
    """The paper's network and data; they do not depend on the seed."""
    return _mnist(settings) if settings.preset == "full" else digits_problem(settings.units)


def perceptron(settings: CompactSettings, features: int, classes: int) -> OwnArchitecture:
    """The architecture of the paper for other data."""
    return OwnArchitecture(
        f"a perceptron {features}-{settings.units}-{classes}",
        lambda units: mlp(features, units or settings.units, classes),
        settings.units,
        is_flat=True,
    )


def own_settings(settings: CompactSettings, own: Own, changed: Collection[str]) -> CompactSettings:
    """Settings that fit the user's architecture where they were not set by hand.

    Args:
        settings: with what was set by hand.
        own: what the user brings.
        changed: what was set by hand.

    Raises:
        InputError: the architecture has nothing to permute, or more is to be planted than it has.
    """
    most, grid = settings.units - 1, settings.planted
    if own.problem is not None:
        here = _setting_of(own.problem)
        most = here.most
        if not most:
            raise ob.errors.InputError(
                f"expected a model with hidden units that can be permuted, found none in {own.problem.described}: "
                "onebasin discover says why"
            )
        units = own.width or sum(copies * size for copies, size in here.chance.sizes.values())
        settings = replace(settings, units=units)
        if own.widened is not None and "widths" not in changed and "units" not in changed:
            settings = replace(settings, widths=tuple(units * factor for factor in _FACTORS))
    if "planted" in changed and not 1 <= min(grid) <= max(grid) <= most:
        raise ob.errors.InputError(
            f"expected 1 to {most} planted transpositions, which is what the architecture has room for, found "
            f"{min(grid)} to {max(grid)}: change transpositions.planted"
        )
    if max(grid) > most or (own.problem is not None and "planted" not in changed):
        settings = replace(settings, planted=tuple(sorted({max(1, swaps * most // max(grid)) for swaps in grid})))
    return settings


_FACTORS = (1, 2, 4, 8)  # from the smallest width that is tried to the largest, as in the quick preset


def _mnist(settings: CompactSettings) -> Problem:
    images = ob.data.load("mnist", directory=settings.data_dir)
    train, test = (_flat(part) for part in (images.train, images.test))
    return Problem("MNIST", mlp(784, settings.units, 10), train, test, test[0][:0], "nothing")


def _flat(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].flatten(1), pair[1]


FORM_KEYS = (
    "units", "seeds", "hmc_runs", "chains", "warmup", "draws", "leapfrog", "members", "ensemble_epochs", "vi_epochs",
    "vi_rate", "prior", "workers",
)  # fmt: skip
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


def hmc(workspace: CompactWorkspace, run: int) -> ob.Population:
    """Samples of one run of HMC, several chains of them."""
    settings, problem = workspace.settings, setting(workspace).problem
    method = ob.HMC(draws=settings.draws, warmup=settings.warmup, leapfrog=settings.leapfrog, epochs=_START_EPOCHS)
    return workspace.sample(
        f"hmc-{run}",
        problem.model,
        problem.train,
        method,
        chains=settings.chains,
        prior=settings.prior,
        chains_per_batch=-(-settings.chains // settings.workers),
        threads=1,
        workers=settings.workers,
    )


def ensemble(workspace: CompactWorkspace, seed: int, units: int | None = None) -> ob.Population:
    """Independently trained networks, maximum a posteriori; of another width than the plan's if `units` are given."""
    settings, here = workspace.settings, setting(workspace, units)
    method = ob.Ensemble(epochs=settings.ensemble_epochs, optimizer="adam", lr=1e-3, batch=100)
    name, problem = f"ensemble-{units or settings.units}-{seed}", here.problem
    return workspace.sample(name, problem.model, problem.train, method, chains=settings.members, prior=settings.prior)


def own_draws(workspace: CompactWorkspace, title: str, run: int) -> ob.Population:
    """Samples by one of the user's methods, as many chains and draws as a run of HMC has."""
    settings, problem = workspace.settings, setting(workspace).problem
    return workspace.sample_own(
        title,
        str(run),
        settings.draws,
        lambda: ensemble(workspace, run),
        model=problem.model,
        data=problem.train,
        chains=settings.chains,
        prior=settings.prior,
        chains_per_batch=-(-settings.chains // settings.workers),
        threads=1,
        workers=settings.workers,
    )


def variational(workspace: CompactWorkspace, seed: int) -> ob.Posterior:
    """The mean-field Gaussian; it is kept beside the networks of the run."""

    def make() -> ob.Posterior:
        settings, problem = workspace.settings, setting(workspace).problem
        file = workspace.folder / "networks" / f"vi-{seed}.safetensors"
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            method, drawn = (
                ob.VI(epochs=settings.vi_epochs, batch=100, lr=settings.vi_rate),
                workspace.seed_for("vi", seed),
            )
            posterior = ob.approximate(
                problem.model, problem.train, method, prior=settings.prior, seed=drawn, progress=workspace.progress
            )
            posterior.save(file)
        return ob.load_posterior(file)

    return workspace.cached(f"vi-{seed}", make)


def forms(workspace: CompactWorkspace, method: str, run: int, units: int | None = None) -> Forms:
    """The compact forms of "hmc", "ensemble" or a user's method, made once; of ensembles also of another width."""
    if method in workspace.own.methods:
        samples = own_draws(workspace, method, run)
    else:
        samples = hmc(workspace, run) if method == "hmc" else ensemble(workspace, run, units)
    here = setting(workspace, units)
    return workspace.cached(f"forms-{method}-{units}-{run}", lambda: _forms(workspace, here, samples))


def _forms(workspace: CompactWorkspace, here: Setting, samples: ob.Population) -> Forms:
    problem = here.problem
    aligned = ob.align(
        samples,
        here.symmetry,
        reference="first",
        by="activations",
        model=problem.model,
        inputs=problem.train[0],
        kind="uncentred",
        progress=workspace.progress,
    ).population
    return Forms(samples, aligned, *(ob.fit(population, model=problem.model) for population in (samples, aligned)))


WEIGHTS = 500  # of the first layer, whose effective sample size is looked at


def weight_mixing(samples: ob.Population) -> ob.Mixing:
    """R-hat and effective sample size of some weights, evenly spaced over the first layer."""
    first = next(name for name, tensor in samples.spec.items() if len(tensor.shape) > 1)
    weights = samples.tensor(first).flatten(1)
    places = torch.linspace(0, weights.shape[1] - 1, min(WEIGHTS, weights.shape[1])).long()
    return ob.mixing(weights[:, places][ob.chain_rows(samples)])
