"""The crowds that parts of the study share: trained once, kept on disk, asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onebasin.population import Population
from onebasin.studies.bench import Bench
from onebasin.studies.problem import Problem
from onebasin.studies.symmetry.networks import problem_of
from onebasin.studies.symmetry.plan import SymmetryPlan
from onebasin.symmetry import Symmetry, discover

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


def symmetry(bench: Desk, architecture: str = "") -> Symmetry:
    """What leaves the network's function unchanged: discovered, and proved on the spot."""
    own = problem(bench, architecture)
    name = f"symmetry/{architecture or bench.plan.architecture}"
    return bench.once(name, lambda: discover(own.model, own.train[0][:2]))


def reference(bench: Desk) -> Population:
    """Independent trainings, each from its own random start; every member is a run of its own."""
    return trained(bench, "reference", bench.plan.reference_networks)


def starts(bench: Desk) -> Population:
    """The trained networks that SWAG, Laplace and SGHMC begin with: `runs` for each group; none is in the reference."""
    return trained(bench, "starts", bench.plan.groups * bench.plan.runs)


def hmc(bench: Desk) -> Population:
    """Hamiltonian Monte Carlo: several chains, each from a training of its own; warm-up is left out."""
    plan = bench.plan
    begun = trained(bench, "hmc-starts", plan.chains)
    options = {"modes": plan.chains, "draws": plan.chain_draws, "warmup": plan.warmup, "leapfrog": plan.leapfrog}
    return sampled(bench, "hmc", "hmc", {**options, "thin": plan.thin, "start": begun, "epochs": 0, "lanes": 4})


def trained(bench: Desk, name: str, networks: int) -> Population:
    """Some independent trainings by SGD, whose weight decay is the prior."""
    return sampled(bench, name, "ensemble", {**training(bench), "modes": networks})


def training(bench: Desk) -> dict[str, Any]:
    """How every network of the study is trained."""
    plan = bench.plan
    return {
        "epochs": plan.epochs,
        "batch": plan.batch,
        "rate": plan.rate,
        "optimiser": "sgd",
        "momentum": 0.9,
        "schedule": "cosine",
    }


def sampled(bench: Desk, name: str, method: str, options: Mapping[str, Any]) -> Population:
    """`sample` with the posterior of the study, kept under this name."""
    plan, own = bench.plan, problem(bench)
    shared = {"prior": plan.prior, "workers": plan.workers, "lanes": plan.lanes, "compile": False}
    return bench.networks(name, own.model, own.train, method, {**shared, **options})
