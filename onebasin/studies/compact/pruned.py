"""Pruning curves: test accuracy when only some weights are left, for every network and every ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from onebasin.posterior import Posterior
from onebasin.pruning import LEVELS, pruning_curve, transfer
from onebasin.state import State
from onebasin.studies.compact.crowds import forms, variational
from onebasin.studies.compact.setting import Runs, setting

CRITERIA = ("sigma", "sigma-high", "snr", "magnitude", "random")
BORROWED = "Ensemble, HMC sigma"
Key = tuple[str, str]  # whose network (and whose ranking), by which criterion
Curves = dict[Key, list[tuple[float, ...]]]  # -> one curve per run, accuracy in per cent at LEVELS


def curves(bench: Runs) -> Curves:
    """All curves of all seeds."""
    plan = bench.plan
    found: Curves = {}
    for seed in range(plan.seeds):
        bench.show(seed, plan.seeds, "pruning")
        for name, state, ranking, criteria in _networks(bench, seed):
            for by, curve in _curve(bench, state, ranking, criteria).items():
                found.setdefault((name, by), []).append(curve)
    return found


def area(curve: Sequence[float]) -> float:
    """Mean accuracy over all levels below 100 %: one number for a curve.

    >>> area([90.0, 50.0, 10.0])
    30.0
    """
    return sum(curve[1:]) / (len(curve) - 1)


Case = tuple[str, State | None, Posterior, Sequence[str]]  # name, network (None: the mean), ranking, criteria


def _networks(bench: Runs, seed: int) -> Iterator[Case]:
    """What is pruned by what: the paper's eight curves, and others for comparison."""
    run = seed % bench.plan.hmc_runs
    sampled, members, fitted = forms(bench, "hmc", run), forms(bench, "ensemble", seed), variational(bench, seed)
    mean = members.rebased.mean
    onto = _borrower(bench, mean)
    if seed < bench.plan.hmc_runs:
        yield "HMC q_r", None, sampled.rebased, CRITERIA
        yield "HMC q_d", None, sampled.raw, ("sigma",)
        yield "HMC sample", sampled.aligned.member(-1), sampled.rebased, ("sigma",)
    yield "Ensemble q_r", None, members.rebased, CRITERIA
    yield "Ensemble q_d", None, members.raw, ("sigma",)
    yield "Ensemble member", members.aligned.member(-1), members.rebased, ("sigma",)
    yield "VI q", None, fitted, CRITERIA
    yield BORROWED, None, onto(sampled.rebased, sampled.samples.member(0)), ("sigma", "snr")
    yield "Ensemble, VI sigma", None, onto(fitted, fitted.mean), ("sigma", "snr")


def _borrower(bench: Runs, mean: State) -> Callable[[Posterior, State], Posterior]:
    """Standard deviations of another posterior around the mean of the ensemble, matched by activations as in the paper.

    Args of what is returned: the posterior, and the network in its basin that is matched to the mean.
    """
    here = setting(bench)
    problem = here.problem

    def borrowed(posterior: Posterior, reference: State) -> Posterior:
        return transfer(posterior, mean, here.symmetry, reference, model=problem.model, inputs=problem.train[0])

    return borrowed


def _curve(
    bench: Runs, state: State | None, ranking: Posterior, criteria: Sequence[str]
) -> dict[str, tuple[float, ...]]:
    problem = setting(bench).problem
    found = pruning_curve(problem.model, state, ranking, problem.test, by=criteria, levels=LEVELS)
    return {by: tuple(100 * (value or 0.0) for value in found.accuracy(by)) for by in criteria}
