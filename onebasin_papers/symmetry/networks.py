"""The approximate methods of the table, each run often enough for its one-mode and its multi-mode form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.problem import Problem, digits_problem
from onebasin_papers.study import Bench
from onebasin_papers.symmetry.presets import SymmetryPlan

# ----------------------------------------------------------------------
# Architectures of the study, and the data that each is trained on.


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


# ----------------------------------------------------------------------
# The populations that parts of the study share: trained once, kept on disk, asked for by name.


Desk = Bench[SymmetryPlan]


def problem(bench: Desk, architecture: str = "") -> Problem:
    """Network and data, cut to the sizes of the plan.

    Args:
        bench: with the plan.
        architecture: that of the plan unless another is named.
    """
    wanted = architecture or bench.plan.architecture

    def made() -> Problem:
        whole = problem_of(wanted, bench.plan.data_dir, bench.seed)
        train, test, most = bench.plan.examples, bench.plan.test_examples, len(whole.outside)
        chosen = whole.outside[:: max(1, most // test)][:test]  # from everywhere: neighbours are alike
        (inputs, targets), (held, classes) = whole.train, whole.test
        return replace(
            whole, train=(inputs[:train], targets[:train]), test=(held[:test], classes[:test]), outside=chosen
        )

    return bench.once(f"problem/{wanted}", made)


def symmetry(bench: Desk, architecture: str = "") -> ob.Symmetry:
    """What leaves the network's function unchanged: discovered, and proved on the spot."""
    own = problem(bench, architecture)
    name = f"symmetry/{architecture or bench.plan.architecture}"
    return bench.once(name, lambda: ob.discover(own.model, own.train[0][:2]))


def reference(bench: Desk) -> ob.Population:
    """Independent trainings, each from its own random start; every member is a run of its own."""
    return trained(bench, "reference", bench.plan.reference_networks)


def starts(bench: Desk) -> ob.Population:
    """The trained networks that SWAG, Laplace and SGHMC begin with: `runs` for each group; none is in the reference."""
    return trained(bench, "starts", bench.plan.groups * bench.plan.runs)


def hmc(bench: Desk) -> ob.Population:
    """Hamiltonian Monte Carlo: several chains, each from a training of its own; warm-up is left out."""
    plan = bench.plan
    begun = trained(bench, "hmc-starts", plan.chains)
    method = ob.HMC(draws=plan.chain_draws, warmup=plan.warmup, leapfrog=plan.leapfrog, thin=plan.thin, epochs=0)
    return sampled(bench, "hmc", method, {"chains": plan.chains, "start": begun, "chains_per_batch": 4})


def trained(bench: Desk, name: str, networks: int) -> ob.Population:
    """Some independent trainings by SGD, whose weight decay is the prior."""
    return sampled(bench, name, ob.Ensemble(**training(bench)), {"chains": networks})


def training(bench: Desk) -> dict[str, Any]:
    """How every network of the study is trained."""
    plan = bench.plan
    return {
        "epochs": plan.epochs,
        "batch": plan.batch,
        "lr": plan.rate,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr_schedule": "cosine",
    }


def sampled(bench: Desk, name: str, method: ob.Method, options: Mapping[str, Any]) -> ob.Population:
    """`sample` with the posterior of the study, kept under this name."""
    plan, own = bench.plan, problem(bench)
    shared = {"prior": plan.prior, "workers": plan.workers, "chains_per_batch": plan.lanes, "compile": False}
    return bench.networks(name, own.model, own.train, method, {**shared, **options})


# ----------------------------------------------------------------------
# The approximate methods of the table, each run often enough for its one-mode and its multi-mode form.


METHODS = {"dropout": "Dropout", "vi": "viBNN", "swag": "SWAG", "laplace": "Laplace", "sghmc": "SGHMC"}  # in tables
_AT_STARTS = ("swag", "laplace", "sghmc")  # explore around networks that are trained already


def runs_of(bench: Desk, method: str) -> ob.Population:
    """All runs of a method: `groups` x `runs` of them with `draws` networks each, the run being the chain.

    SWAG, Laplace and SGHMC begin at the networks of the deep ensemble, run by run, so that methods differ by what they
    add to it and not by luck of the training.
    """
    plan = bench.plan
    options: dict[str, Any] = {"chains": plan.groups * plan.runs}
    if method in _AT_STARTS:
        options["start"] = starts(bench)
    return sampled(bench, method, _method(bench, method), options)


def _method(bench: Desk, method: str) -> ob.Method:
    plan, draws = bench.plan, bench.plan.draws
    around = {**training(bench), "epochs": 0}  # of networks that are trained already
    if method == "dropout":
        return ob.Dropout(draws=draws, dropout=plan.dropout_rate, **training(bench))
    if method == "vi":
        return ob.VI(draws=draws, epochs=plan.vi_epochs, batch=plan.batch, lr=plan.vi_rate)
    if method == "swag":
        collect = plan.swag_collect
        return ob.SWAG(draws=draws, step=plan.swag_rate, collect=collect, rank=min(20, collect - 1), **around)
    if method == "laplace":
        return ob.Laplace(draws=draws, layers=plan.laplace_layers, structure=plan.laplace_structure, **around)
    return ob.SGHMC(draws=draws, step=plan.sghmc_rate, thin=plan.sghmc_thin, warmup=plan.sghmc_warmup, **around)


def one_mode(population: ob.Population, run: int) -> ob.Population:
    """All networks of one run."""
    return population[chain_of(population) == run]


def multi_mode(population: ob.Population, plan: SymmetryPlan, group: int) -> ob.Population:
    """Of each run of a group draws / runs networks, evenly spread over it: as many as in one mode, from all runs."""
    share = max(1, plan.draws // plan.runs)
    step = plan.draws // share
    chain = chain_of(population)
    wanted = range(group * plan.runs, (group + 1) * plan.runs)
    return population[torch.cat([(chain == run).nonzero().flatten()[::step][:share] for run in wanted])]


def chain_of(population: ob.Population) -> Tensor:
    """The run of each network (members,)."""
    assert population.chain is not None  # what `sample` makes has chains
    return population.chain
