"""Every compact form of every posterior, judged against the HMC samples: the paper's seven, and ours."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onebasin.align import align
from onebasin.compact import refine
from onebasin.population import Population
from onebasin.posterior import Posterior, fit
from onebasin.predict.predicting import predict
from onebasin.studies.compact.crowds import forms, variational
from onebasin.studies.compact.scores import Score, scored
from onebasin.studies.compact.setting import Runs, setting

RANK = 8  # directions of the low-rank form
HALVES = "HMC: one half of the chains"
REFINED = "HMC: refined"
OURS = {  # name -> what it is
    HALVES: "samples of one half of the chains, judged against those of the other half: the noise of the reference",
    "HMC: consensus": "mean and deviation of samples that were aligned by weights to a common frame",
    "HMC: low rank": f"the same with the {RANK} directions of largest variance, so that weights may vary together",
    REFINED: "HMC: consensus, moved by gradient until its draws predict what the samples predict on training inputs",
    "HMC: 2 samples": "as many samples as the storage of a mean and a deviation holds",
    "HMC: 10 samples": "as many samples as the low-rank form takes",
    "Ensemble: consensus": "mean and deviation of members that were aligned by weights to a common frame",
    "Ensemble: 2 members": "as many members as the storage of a mean and a deviation holds",
}
Crowd = Population | Posterior


def scores(bench: Runs) -> dict[str, list[Score]]:
    """Name of the form -> its score in each run; forms of HMC have as many as there are runs of HMC."""
    here, plan = setting(bench), bench.plan
    found: dict[str, list[Score]] = {}
    for seed in range(plan.seeds):
        run = seed % plan.hmc_runs
        samples = forms(bench, "hmc", run).samples
        half = len(samples) // 2
        reference, other_half = (
            _predictive(bench, f"{run}-{part}", own) for part, own in (("all", samples), ("half", samples[half:]))
        )
        drawn = bench.number("draws", seed)
        for number, (name, crowd) in enumerate(_crowds(bench, seed)):
            bench.show(number + seed * _ROWS, plan.seeds * _ROWS, f"judging {name}")
            goal = other_half if name == HALVES else reference
            found.setdefault(name, []).append(scored(here, crowd, goal, plan.posterior_draws, drawn))
    return found


_ROWS = 7 + len(OURS)


def _crowds(bench: Runs, seed: int) -> Iterator[tuple[str, Crowd]]:
    """All forms of one seed, in the order of the table; those of HMC once for each run of it."""
    if seed < bench.plan.hmc_runs:
        own = forms(bench, "hmc", seed)
        yield "HMC samples", own.samples
        yield "HMC q_d", own.raw
        yield "HMC q_r", own.rebased
    members = forms(bench, "ensemble", seed)
    yield "Ensemble members", members.samples
    yield "Ensemble q_d", members.raw
    yield "Ensemble q_r", members.rebased
    yield "VI q", variational(bench, seed)
    if seed < bench.plan.hmc_runs:
        yield from _of_hmc(bench, own.samples, seed)
    yield "Ensemble: consensus", fit(_consensus(bench, members.samples), model=setting(bench).problem.model)
    yield "Ensemble: 2 members", members.samples[:2]


def _of_hmc(bench: Runs, samples: Population, seed: int) -> Iterator[tuple[str, Crowd]]:
    """Our forms of the HMC samples."""
    problem, steps = setting(bench).problem, bench.plan.refine_steps
    frame = _consensus(bench, samples)
    fitted = fit(frame, model=problem.model)
    yield HALVES, samples[: len(samples) // 2]
    yield "HMC: consensus", fitted
    yield "HMC: low rank", fit(frame, "low-rank", rank=min(RANK, len(samples) - 1), model=problem.model)
    if steps:
        drawn = bench.number("refine", seed)
        yield (
            REFINED,
            refine(fitted, problem.model, samples, problem.train[0], steps=steps, seed=drawn, progress=bench.show),
        )
    yield "HMC: 2 samples", thinned(samples, 2)
    yield "HMC: 10 samples", thinned(samples, RANK + 2)


def _consensus(bench: Runs, crowd: Population) -> Population:
    return align(crowd, setting(bench).symmetry, progress=bench.show).population


def _predictive(bench: Runs, name: str, samples: Population) -> Tensor:
    """The average predictive on the test inputs, computed once for all seeds that share it."""
    problem = setting(bench).problem
    return bench.once(f"predictive-{name}", lambda: predict(problem.model, samples, problem.test[0], average=True))


def thinned(samples: Population, count: int) -> Population:
    """Samples evenly spaced over all chains."""
    return samples[((torch.arange(count) + 0.5) * len(samples) / count).long()]
