"""Did HMC mix? What the paper does not report: acceptance, R-hat, effective sample sizes, and the budget."""

from __future__ import annotations

from statistics import fmean

import torch

from onebasin.inference import diagnose
from onebasin.inference.diagnosis import Mixing, chain_rows, mixing
from onebasin.population import Population
from onebasin.record import Cell, Column, Number, Table
from onebasin.studies.compact import published
from onebasin.studies.compact.crowds import hmc
from onebasin.studies.compact.setting import Runs, setting

_INPUTS = 200  # test inputs on which functions are compared
_WEIGHTS = 500  # of the first layer, whose effective sample size is looked at


def weight_mixing(samples: Population) -> Mixing:
    """R-hat and effective sample size of some weights, evenly spaced over the first layer."""
    weights = samples.tensor("0.weight").flatten(1)
    places = torch.linspace(0, weights.shape[1] - 1, min(_WEIGHTS, weights.shape[1])).long()
    return mixing(weights[:, places][chain_rows(samples)])


def mixing_table(bench: Runs) -> Table:
    """One row per run of HMC."""
    plan, problem = bench.plan, setting(bench).problem
    rows: list[tuple[Cell, ...]] = []
    for run in range(plan.hmc_runs):
        samples = hmc(bench, run)
        functions = diagnose(samples, problem.model, problem.test[0][:_INPUTS], weights=False).functions
        told = samples.provenance["diagnostics"]
        assert functions is not None  # model and inputs were given
        rows.append(
            (
                f"run {run + 1}",
                Number(plan.chains),
                Number(plan.draws),
                Number(plan.gradients),
                Number(fmean(told["acceptance"])),
                Number(fmean(told["step_size"])),
                Number(float(sum(told["divergences"]))),
                Number(functions.worst_rhat),
                Number(functions.median_rhat),
                Number(functions.median_bulk),
                Number(weight_mixing(samples).median_bulk),
            )
        )
    share = plan.gradients / published.GRADIENTS
    return Table(
        "compact-mixing",
        "Can the HMC samples be trusted?",
        _COLUMNS,
        tuple(rows),
        note=f"The paper ran one chain with {published.GRADIENTS:,} gradients over 60,000 images and reports none of "
        f"these numbers; a run here has {share:.2%} of its gradients, over {len(problem.train[1]):,} images. Functions "
        f"are class probabilities on {min(_INPUTS, len(problem.test[1]))} test inputs, weights {_WEIGHTS} of the first "
        "layer.",
    )


_COLUMNS = (
    Column("run"),
    Column("chains", "independent chains, each from a network of its own", digits=0),
    Column("draws", "samples kept from each chain", digits=0),
    Column("gradients", "gradients over all training examples, of all chains together, on average", digits=0),
    Column("acceptance", "mean probability with which the end of a trajectory is accepted; 0.6 to 0.9 is healthy"),
    Column("step size", "of the leapfrog integrator", digits=4),
    Column("divergences", "trajectories that left for infinity", "lower", digits=0),
    Column("worst R-hat", "of functions: spread between chains over spread within them; below 1.05 is mixed", "lower"),
    Column("median R-hat", "the median over functions", "lower"),
    Column(
        "ESS", "effective sample size of functions: as many independent samples would know as much; median", "higher", 0
    ),
    Column("ESS of weights", "the same of weights, before alignment", "higher", 0),
)
