"""Did HMC mix? What the paper does not report: acceptance, R-hat, effective sample sizes, and the budget."""

from __future__ import annotations

from statistics import fmean

import torch

import onebasin as ob
from onebasin_papers.compact import presets as published
from onebasin_papers.compact.setting import Runs, hmc, setting

_INPUTS = 200  # test inputs on which functions are compared
_WEIGHTS = 500  # of the first layer, whose effective sample size is looked at


def weight_mixing(samples: ob.Population) -> ob.Mixing:
    """R-hat and effective sample size of some weights, evenly spaced over the first layer."""
    weights = samples.tensor("0.weight").flatten(1)
    places = torch.linspace(0, weights.shape[1] - 1, min(_WEIGHTS, weights.shape[1])).long()
    return ob.mixing(weights[:, places][ob.chain_rows(samples)])


def mixing_table(bench: Runs) -> ob.reporting.Table:
    """One row per run of HMC."""
    plan, problem = bench.plan, setting(bench).problem
    rows: list[tuple[ob.reporting.Cell, ...]] = []
    for run in range(plan.hmc_runs):
        samples = hmc(bench, run)
        functions = ob.diagnose(problem.model, samples, problem.test[0][:_INPUTS], weights=False).functions
        told = samples.provenance["diagnostics"]
        assert functions is not None  # model and inputs were given
        rows.append(
            (
                f"run {run + 1}",
                ob.reporting.Number(plan.chains),
                ob.reporting.Number(plan.draws),
                ob.reporting.Number(plan.gradients),
                ob.reporting.Number(fmean(told["acceptance"])),
                ob.reporting.Number(fmean(told["step_size"])),
                ob.reporting.Number(float(sum(told["divergences"]))),
                ob.reporting.Number(functions.worst_rhat),
                ob.reporting.Number(functions.median_rhat),
                ob.reporting.Number(functions.median_bulk),
                ob.reporting.Number(weight_mixing(samples).median_bulk),
            )
        )
    share = plan.gradients / published.GRADIENTS
    return ob.reporting.Table(
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
    ob.reporting.Column("run"),
    ob.reporting.Column("chains", "independent chains, each from a network of its own", digits=0),
    ob.reporting.Column("draws", "samples kept from each chain", digits=0),
    ob.reporting.Column(
        "gradients", "gradients over all training examples, of all chains together, on average", digits=0
    ),
    ob.reporting.Column(
        "acceptance", "mean probability with which the end of a trajectory is accepted; 0.6 to 0.9 is healthy"
    ),
    ob.reporting.Column("step size", "of the leapfrog integrator", digits=4),
    ob.reporting.Column("divergences", "trajectories that left for infinity", "lower", digits=0),
    ob.reporting.Column(
        "worst R-hat", "of functions: spread between chains over spread within them; below 1.05 is mixed", "lower"
    ),
    ob.reporting.Column("median R-hat", "the median over functions", "lower"),
    ob.reporting.Column(
        "ESS", "effective sample size of functions: as many independent samples would know as much; median", "higher", 0
    ),
    ob.reporting.Column("ESS of weights", "the same of weights, before alignment", "higher", 0),
)
