"""The problem and the networks that all parts share: trainings, HMC, and runs of the approximate methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.study import Problem, Workspace, digits_problem
from onebasin_papers.symmetry.settings import SymmetrySettings


class Architecture(NamedTuple):
    """A network and its data.

    Attributes:
        title: in words.
        build: makes one.
        data: name of the training and test images, as `load` takes it.
        outside: name of the foreign images.
    """

    title: str
    build: Callable[[], nn.Module]
    data: str
    outside: str


ARCHITECTURES = {
    "optunet": Architecture("OptuNet, a ConvNet of 392 weights", ob.examples.optunet, "mnist", "fashion-mnist"),
    "resnet20": Architecture(
        "ResNet-20 with filter response norm and SiLU", ob.examples.resnet20_frn_silu, "cifar10", "cifar100"
    ),
}
HIDDEN = (16, 16)  # widths of the network on embedded digits


def described(architecture: str) -> str:
    """What an architecture is, for people.

    >>> described("mlp")
    'a perceptron with hidden layers of 16 and 16 relu units'
    """
    if architecture == "mlp":
        return f"a perceptron with hidden layers of {' and '.join(map(str, HIDDEN))} relu units"
    return ARCHITECTURES[architecture].title


def problem_of(architecture: str, directory: str | None, seed: int) -> Problem:
    """The network and its data.

    Args:
        architecture: "mlp" on embedded digits, or a key of `ARCHITECTURES`.
        directory: where data sets are that do not come with the package.
        seed: of the division of the digits.
    """
    if architecture == "mlp":
        return digits_problem(*HIDDEN, seed=seed)
    chosen = ARCHITECTURES[architecture]
    data, outside = (ob.data.load(name, directory=directory) for name in (chosen.data, chosen.outside))
    with ob.global_seed(0):
        model = chosen.build().eval()
    return Problem(chosen.data, model, data.train, data.test, outside.test[0], f"images of {chosen.outside}")


SymmetryWorkspace = Workspace[SymmetrySettings]


def problem(workspace: SymmetryWorkspace, architecture: str = "") -> Problem:
    """Network and data, cut to the sizes of the plan.

    Args:
        workspace: with the plan.
        architecture: that of the plan unless another is named.
    """
    wanted = architecture or workspace.settings.architecture

    def make() -> Problem:
        whole = problem_of(wanted, workspace.settings.data_dir, workspace.seed)
        train, test, most = workspace.settings.examples, workspace.settings.test_examples, len(whole.outside)
        chosen = whole.outside[:: max(1, most // test)][:test]  # from everywhere: neighbours are alike
        (inputs, targets), (held, classes) = whole.train, whole.test
        return replace(
            whole, train=(inputs[:train], targets[:train]), test=(held[:test], classes[:test]), outside=chosen
        )

    return workspace.cached(f"problem/{wanted}", make)


def symmetry(workspace: SymmetryWorkspace, architecture: str = "") -> ob.Symmetry:
    """What leaves the network's function unchanged: discovered, and proved on the spot."""
    task = problem(workspace, architecture)
    name = f"symmetry/{architecture or workspace.settings.architecture}"
    return workspace.cached(name, lambda: ob.discover(task.model, task.train[0][:2]))


def reference(workspace: SymmetryWorkspace) -> ob.Population:
    """Independent trainings, each from its own random start; every member is a run of its own."""
    return trained(workspace, "reference", workspace.settings.reference_networks)


def starts(workspace: SymmetryWorkspace) -> ob.Population:
    """The trained networks that SWAG, Laplace and SGHMC begin with: `runs` for each group; none is in the reference."""
    return trained(workspace, "starts", workspace.settings.groups * workspace.settings.runs)


def hmc(workspace: SymmetryWorkspace) -> ob.Population:
    """Hamiltonian Monte Carlo: several chains, each from a training of its own; warm-up is left out."""
    settings = workspace.settings
    begun = trained(workspace, "hmc-starts", settings.chains)
    method = ob.HMC(
        draws=settings.chain_draws, warmup=settings.warmup, leapfrog=settings.leapfrog, thin=settings.thin, epochs=0
    )
    return sampled(workspace, "hmc", method, chains=settings.chains, start=begun, chains_per_batch=4)


def trained(workspace: SymmetryWorkspace, name: str, networks: int) -> ob.Population:
    """Some independent trainings by SGD, whose weight decay is the prior."""
    return sampled(workspace, name, ob.Ensemble(**training(workspace)), chains=networks)


def training(workspace: SymmetryWorkspace) -> dict[str, Any]:
    """How every network of the study is trained."""
    settings = workspace.settings
    return {
        "epochs": settings.epochs,
        "batch": settings.batch,
        "lr": settings.rate,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr_schedule": "cosine",
    }


def sampled(workspace: SymmetryWorkspace, name: str, method: ob.Method, **options: Any) -> ob.Population:
    """`sample` with the posterior of the study, kept under this name."""
    settings, task = workspace.settings, problem(workspace)
    defaults = {"chains_per_batch": settings.lanes, "prior": settings.prior, "workers": settings.workers}
    return workspace.sample(name, task.model, task.train, method, compile=False, **{**defaults, **options})


METHODS = {"dropout": "Dropout", "vi": "viBNN", "swag": "SWAG", "laplace": "Laplace", "sghmc": "SGHMC"}  # in tables
_AT_STARTS = ("swag", "laplace", "sghmc")  # explore around networks that are trained already


def runs_of(workspace: SymmetryWorkspace, method: str) -> ob.Population:
    """All runs of a method: `groups` x `runs` of them with `draws` networks each, the run being the chain.

    SWAG, Laplace and SGHMC begin at the networks of the deep ensemble, run by run, so that methods differ by what they
    add to it and not by luck of the training.
    """
    chains = workspace.settings.groups * workspace.settings.runs
    start = starts(workspace) if method in _AT_STARTS else "fresh"
    return sampled(workspace, method, _method(workspace, method), chains=chains, start=start)


def _method(workspace: SymmetryWorkspace, method: str) -> ob.Method:
    settings, draws = workspace.settings, workspace.settings.draws
    around = {**training(workspace), "epochs": 0}  # of networks that are trained already
    if method == "dropout":
        return ob.Dropout(draws=draws, dropout=settings.dropout_rate, **training(workspace))
    if method == "vi":
        return ob.VI(draws=draws, epochs=settings.vi_epochs, batch=settings.batch, lr=settings.vi_rate)
    if method == "swag":
        collect = settings.swag_collect
        return ob.SWAG(draws=draws, step=settings.swag_rate, collect=collect, rank=min(20, collect - 1), **around)
    if method == "laplace":
        return ob.Laplace(draws=draws, layers=settings.laplace_layers, structure=settings.laplace_structure, **around)
    return ob.SGHMC(
        draws=draws, step=settings.sghmc_rate, thin=settings.sghmc_thin, warmup=settings.sghmc_warmup, **around
    )


def one_mode(population: ob.Population, run: int) -> ob.Population:
    """All networks of one run."""
    return population[chain_of(population) == run]


def multi_mode(population: ob.Population, settings: SymmetrySettings, group: int) -> ob.Population:
    """Of each run of a group draws / runs networks, evenly spread over it: as many as in one mode, from all runs."""
    share = max(1, settings.draws // settings.runs)
    step = settings.draws // share
    chain = chain_of(population)
    wanted = range(group * settings.runs, (group + 1) * settings.runs)
    return population[torch.cat([(chain == run).nonzero().flatten()[::step][:share] for run in wanted])]


def chain_of(population: ob.Population) -> Tensor:
    """The run of each network (members,)."""
    assert population.chain is not None  # what `sample` makes has chains
    return population.chain
