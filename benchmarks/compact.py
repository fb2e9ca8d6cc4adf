"""Compact forms of one fixed set of HMC samples, beside as many thinned samples as fit in the same storage.

Every form is fitted to the same 1,000 samples (`benchmarks.fixed_samples`) and judged on held-out inputs against the
samples' own average predictive: agreement and total variation (TV) inside and outside of the distribution, accuracy,
NLL, ECE, AUROC of outside inputs by maximum probability and by mutual information (MI), and MI itself in nats.
Forms that are moved by gradient see unlabelled training inputs and noisy copies of them, never held-out or outside
ones. Rows with +- are means and standard deviations over seeds of the refinement; posteriors are judged by 1,000 draws.

    python -m benchmarks.compact [digits] [mnist] [--seeds 3] [--only TEXT]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onebasin as ob
from benchmarks.fixed_samples import PRIOR, Problem, problems
from benchmarks.targets import Targets, head
from onebasin import metrics
from onebasin.population.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predict import Predictive, PredictOptions
from onebasin.posterior.refine import fit_scales, refine

DRAWS = 1000  # as many as there are samples: fewer would add their own noise to TV
HEADS = ("agree", "TV", "TV out", "acc", "NLL", "ECE", "AUROC", "AUROC MI", "MI", "MI out")
SCORES = ("AUROC", "AUROC MI", "MI", "MI out")  # those that the goal wants within 0.02 of the samples' own
VI = ob.VI(epochs=300, batch=250, lr=1e-2)
Population = Population | Posterior


@dataclass(frozen=True)
class Judge:
    """Held-out inputs and what the samples say about them."""

    problem: Problem
    inside: Tensor
    outside: Tensor

    @classmethod
    def of(cls, problem: Problem, samples: Population) -> Judge:
        averages = [ob.predict(problem.model, samples, x, average=True) for x in (problem.test[0], problem.outside)]
        return cls(problem, *averages)

    def row(self, population: Population, seed: int = 0) -> dict[str, float]:
        """All numbers of one form."""
        model, (inputs, targets) = self.problem.model, self.problem.test
        inside, outside = (
            Predictive.of(model, population, x, PredictOptions(draws=DRAWS, seed=seed))
            for x in (inputs, self.problem.outside)
        )
        mean, foreign = inside.mean, outside.mean
        information = [inside.mutual_information, outside.mutual_information]
        numbers = (
            metrics.agreement(mean, self.inside),
            metrics.total_variation(mean, self.inside),
            metrics.total_variation(foreign, self.outside),
            metrics.accuracy(mean, targets),
            metrics.nll(mean, targets),
            metrics.ece(mean, targets),
            metrics.auroc(metrics.msp(mean), metrics.msp(foreign)),
            metrics.auroc(*information),
            information[0].mean(),
            information[1].mean(),
        )
        return dict(zip(HEADS, map(float, numbers), strict=True))


@dataclass(frozen=True)
class Populations:
    """The samples as they came, and in three common frames."""

    raw: Population
    first: Population
    consensus: Population
    balanced: Population

    @classmethod
    def of(cls, problem: Problem, raw: Population) -> Populations:
        symmetry = ob.discover(problem.model, problem.train[0][:2])
        paper = ob.align(
            raw,
            symmetry,
            reference="first",
            by="activations",
            model=problem.model,
            inputs=problem.train[0],
            scale="keep",
        )
        return cls(
            raw,
            paper.population,
            ob.align(raw, symmetry, scale="keep").population,
            ob.align(raw, symmetry).population,
        )


Form = tuple[str, Callable[[int], Population], bool]  # name, maker from a seed, whether several seeds are worth it


def thinned(raw: Population, count: int) -> Population:
    """Samples evenly spaced over all chains."""
    return raw[((torch.arange(count) + 0.5) * len(raw) / count).long()]


def point(state: ob.State, like: Posterior) -> Posterior:
    """One network as a posterior without spread."""
    centre = like.layout.flat(state).float()
    return Posterior.equal([Gaussian(centre, Diagonal(torch.zeros_like(centre)))], like.layout, [{}])


def pair(population: Population, like: Posterior) -> Posterior:
    """Two samples, of the first and of the third chain, as a mixture without spread."""
    flats = [
        like.layout.flat(population.member(index)).float() for index in (len(population) // 8, 5 * len(population) // 8)
    ]
    return Posterior.equal([Gaussian(flat, Diagonal(torch.zeros_like(flat))) for flat in flats], like.layout, [{}, {}])


def sample_with_sigma(population: Population, like: Posterior) -> Posterior:
    """The first sample with the standard deviations of the fit: a start that is not the aligned mean."""
    centre = like.layout.flat(population.member(0)).float()
    return Posterior.equal([Gaussian(centre, like.components[0].covariance)], like.layout, [{}])


def always(population: Population) -> Callable[[int], Population]:
    """The same population for every seed."""
    return lambda _: population


def plain_forms(populations: Populations) -> Iterator[Form]:
    """What can be fitted without a forward pass."""
    for count in (1, 2, 5, 10, 20, 50):
        yield f"{count} thinned samples", always(thinned(populations.raw, count)), False
    for name, population in (
        ("raw (q_d)", populations.raw),
        ("aligned to first (paper 1's q_r)", populations.first),
        ("consensus", populations.consensus),
        ("balanced + consensus", populations.balanced),
    ):
        yield name, always(ob.fit(population)), False
    fitted = ob.fit(populations.balanced)
    yield "its mean network alone", always(point(fitted.mean, fitted)), False
    lows = {f"low rank {rank} + diagonal": ob.fit(populations.balanced, "low-rank", rank=rank) for rank in (8, 98)}
    lows["low rank 98 alone"] = ob.fit(populations.balanced, "low-rank", rank=98, diagonal=False)
    for count in (5, 10):
        mixture = ob.fit(populations.balanced, "mixture", components=count, pooled=True)
        lows[f"mixture of {count}, one sigma"] = mixture
    for name, low in lows.items():
        yield name, always(low), False


def moved_forms(populations: Populations, problem: Problem) -> Iterator[Form]:
    """What is moved towards the samples' predictive on unlabelled training inputs."""
    fitted = ob.fit(populations.balanced)
    low = ob.fit(populations.balanced, "low-rank", rank=8)
    mixture = ob.fit(populations.balanced, "mixture", components=5, pooled=True)
    model, inputs = problem.model, problem.train[0]

    def refined(start: Posterior, **options: Any) -> Callable[[int], Population]:
        return lambda seed: refine(model, start, populations.raw, inputs, seed=seed, **options)

    yield (
        "calibrated (width, gain per tensor)",
        lambda seed: fit_scales(model, fitted, populations.raw, inputs, seed=seed),
        False,
    )
    yield "REFINED", refined(fitted), True
    yield "refined, kl_weight 0.001", refined(fitted, kl_weight=1e-3), False
    yield "refined, inputs alone", refined(fitted, noise=0, mixed=0, diversity=0), False
    yield "refined, diversity 1", refined(fitted, diversity=1), False
    yield "refined, diversity 0", refined(fitted, diversity=0), False
    yield "refined from paper 1's q_r", refined(ob.fit(populations.first)), False
    yield "refined from one sample", refined(sample_with_sigma(populations.balanced, fitted)), False
    yield "two networks refined, no sigma", refined(pair(populations.balanced, fitted)), False
    yield "low rank 8 refined", refined(low), False
    yield "mixture of 5 refined", refined(mixture), False
    yield "VI (mean field)", lambda seed: ob.approximate(model, problem.train, VI, seed=seed, prior=PRIOR), False


def line(name: str, storage: str, rows: list[dict[str, float]]) -> str:
    """One line of the table; several rows become mean and standard deviation."""
    cells = []
    for column in HEADS:
        values = [row[column] for row in rows]
        error = f"±{statistics.stdev(values):.3f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.4f}{error}".rjust(13))
    return f"{name:36s}{storage:>6s} {''.join(cells)}"


def table(problem: Problem, targets: Targets, seeds: int, only: str) -> None:
    """Print the table of one problem and judge the goals."""
    samples = problem.samples()
    widths = "-".join(map(str, problem.widths))
    head(f"{problem.name}, {widths}, {len(samples)} HMC samples", f"{len(problem.test[1])} held-out inputs")
    judge, populations = Judge.of(problem, samples), Populations.of(problem, samples)
    print(f"{'form':36s}{'stored':>6s} {''.join(name.rjust(13) for name in HEADS)}")
    found = {"samples": [judge.row(samples)]}
    print(line("all samples", str(len(samples)), found["samples"]), flush=True)
    for forms in (plain_forms(populations), moved_forms(populations, problem)):
        for name, make, random in forms:
            if only in name:
                made = [make(seed) for seed in range(seeds if random else 1)]
                found[name] = [judge.row(population, seed) for seed, population in enumerate(made)]
                storage = made[0].storage if isinstance(made[0], Posterior) else len(made[0])
                print(line(name, f"{storage:.3g}", found[name]), flush=True)
    if not only:
        goals(targets, problem.name, {name: _mean(rows) for name, rows in found.items()})


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def goals(targets: Targets, name: str, found: dict[str, dict[str, float]]) -> None:
    """What two networks' worth of storage should reach."""
    best, ten, own = found["REFINED"], found["10 thinned samples"], found["samples"]
    targets.judge(f"{name}: agreement >= 0.98", f"{best['agree']:.4f}", best["agree"] >= 0.98)
    targets.judge(f"{name}: TV <= 0.03", f"{best['TV']:.4f}", best["TV"] <= 0.03)
    targets.judge(
        f"{name}: TV below that of 10 thinned samples", f"{best['TV']:.4f} < {ten['TV']:.4f}", best["TV"] < ten["TV"]
    )
    for score in SCORES:
        gap = abs(best[score] - own[score])
        targets.judge(f"{name}: {score} within 0.02 of the samples' own", f"off by {gap:.4f}", gap <= 0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="digits, mnist; both without a name")
    parser.add_argument("--seeds", type=int, default=3, help="of REFINED")
    parser.add_argument("--only", default="", metavar="TEXT", help="only forms with this text in their name, no goals")
    options = parser.parse_args()
    targets = Targets()
    for problem in problems(options.names):
        table(problem, targets, options.seeds, options.only)
    return targets.close()


if __name__ == "__main__":
    sys.exit(main())
