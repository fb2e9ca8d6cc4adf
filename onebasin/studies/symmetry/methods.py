"""The approximate methods of the table, each run often enough for its one-mode and its multi-mode form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebasin.population import Population
from onebasin.studies.symmetry.crowds import Desk, sampled, starts, training
from onebasin.studies.symmetry.plan import SymmetryPlan

METHODS = {"dropout": "Dropout", "vi": "viBNN", "swag": "SWAG", "laplace": "Laplace", "sghmc": "SGHMC"}  # in tables
_AT_STARTS = ("swag", "laplace", "sghmc")  # explore around networks that are trained already


def runs_of(bench: Desk, method: str) -> Population:
    """All runs of a method: `groups` x `runs` of them with `draws` networks each, the run being the chain.

    SWAG, Laplace and SGHMC begin at the networks of the deep ensemble, run by run, so that methods differ by what they
    add to it and not by luck of the training.
    """
    plan = bench.plan
    options: dict[str, Any] = {"modes": plan.groups * plan.runs, "draws": plan.draws, **_options(plan, method)}
    if method in _AT_STARTS:
        options |= {**training(bench), "start": starts(bench), "epochs": 0}
    elif method == "dropout":
        options |= training(bench)
    return sampled(bench, method, method, options)


def _options(plan: SymmetryPlan, method: str) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "dropout": {"dropout": plan.dropout_rate},
        "vi": {"epochs": plan.vi_epochs, "batch": plan.batch, "rate": plan.vi_rate},
        "swag": {"step": plan.swag_rate, "collect": plan.swag_collect, "rank": min(20, plan.swag_collect - 1)},
        "laplace": {"layers": plan.laplace_layers, "structure": plan.laplace_structure},
        "sghmc": {"step": plan.sghmc_rate, "thin": plan.sghmc_thin, "warmup": plan.sghmc_warmup},
    }
    return options[method]


def one_mode(crowd: Population, run: int) -> Population:
    """All networks of one run."""
    return crowd[chain_of(crowd) == run]


def multi_mode(crowd: Population, plan: SymmetryPlan, group: int) -> Population:
    """Of each run of a group draws / runs networks, evenly spread over it: as many as in one mode, from all runs."""
    share = max(1, plan.draws // plan.runs)
    step = plan.draws // share
    chain = chain_of(crowd)
    wanted = range(group * plan.runs, (group + 1) * plan.runs)
    return crowd[torch.cat([(chain == run).nonzero().flatten()[::step][:share] for run in wanted])]


def chain_of(crowd: Population) -> Tensor:
    """The run of each network (members,)."""
    assert crowd.chain is not None  # what `sample` makes has chains
    return crowd.chain
