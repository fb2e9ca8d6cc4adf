"""The settings of the demo, and the populations that its parts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onebasin as ob
from onebasin_papers.problem import Problem, digits_problem
from onebasin_papers.study import Bench, Plan


@dataclass(frozen=True)
class DemoPlan(Plan):
    """Sizes and budgets.

    Attributes:
        hidden: units of the hidden layer.
        prior: standard deviation of the Gaussian prior of all methods.
        members: networks of the ensemble.
        epochs: of its training, and of the training that VI and SWAG begin with.
        chains, draws, warmup, leapfrog: of HMC.
        steps: of the refinement.
        judged: networks drawn from a posterior when it is judged.
        workers: processes of HMC.
    """

    hidden: int = 32
    prior: float = 0.6
    members: int = 20
    epochs: int = 60
    chains: int = 4
    draws: int = 100
    warmup: int = 200
    leapfrog: int = 60
    steps: int = 1200
    judged: int = 300
    workers: int = 2


METHODS = ("HMC", "ensemble", "VI", "SWAG")


def problem(bench: Bench[DemoPlan]) -> Problem:
    """The digits and the architecture."""
    return bench.once("problem", lambda: digits_problem(bench.plan.hidden))


def symmetry(bench: Bench[DemoPlan]) -> ob.Symmetry:
    """What leaves the function of the architecture unchanged."""
    data = problem(bench)
    return bench.once("symmetry", lambda: ob.discover(data.model, data.train[0][:4]))


def population(bench: Bench[DemoPlan], method: str) -> ob.Population:
    """The networks of one method, by its name in `METHODS`."""
    plan, data = bench.plan, problem(bench)
    methods: dict[str, ob.Method] = {
        "HMC": ob.HMC(draws=plan.draws, warmup=plan.warmup, leapfrog=plan.leapfrog, epochs=20),
        "ensemble": ob.Ensemble(epochs=plan.epochs, batch=100, lr=5e-3),
        "VI": ob.VI(draws=plan.draws, epochs=2 * plan.epochs, batch=100, lr=1e-2),
        "SWAG": ob.SWAG(draws=plan.draws, epochs=plan.epochs, batch=100, lr=5e-3),
    }
    options: dict[str, dict[str, Any]] = {
        "HMC": {"chains": plan.chains, "workers": plan.workers},
        "ensemble": {"chains": plan.members},
    }
    return bench.networks(
        method.lower(), data.model, data.train, methods[method], {"prior": plan.prior} | options.get(method, {})
    )


def aligned(bench: Bench[DemoPlan], method: str) -> ob.Alignment:
    """The networks of one method in one basin."""
    return bench.once(f"aligned/{method}", lambda: ob.align(population(bench, method), symmetry(bench)))
