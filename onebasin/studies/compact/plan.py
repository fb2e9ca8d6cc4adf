"""What the study of compact posteriors runs: the quick preset on digits, the full one on the paper's network."""

from __future__ import annotations

from dataclasses import dataclass

from onebasin.errors import InputError
from onebasin.studies.bench import Plan
from onebasin.studies.compact import published


@dataclass(frozen=True)
class CompactPlan(Plan):
    """Sizes and budgets.

    The quick preset is about one hidden layer of 64 units on the embedded digits. The full one is the paper's own
    network and data, 784-512-10 on MNIST, with its optimisers, grids and numbers of epochs. Only HMC has to be cut
    short there: a gradient over all 60,000 images takes 1.4 s on one core (measured), so the paper's 5,000,000 would
    keep two cores busy for 40 days. The 80,000 of this preset, 1.6 %, take 16 hours; what they are worth is measured
    (acceptance, effective sample size, R-hat) and stands in the report. The paper's 500 networks with planted
    permutations would take ten hours; ten networks say the same (see `retrained`). All parts together take more than a
    day (an estimate from steps that were timed).

    Attributes:
        units: hidden units.
        planted: numbers of transpositions that are planted.
        runs: of the planted permutations.
        retrained: whether every permuted network P m0 is really trained, from a start of its own for each number. SGD
            treats all units alike, so training P m0 gives P (m0 trained with that order of examples) up to rounding:
            without it two orders are trained from one start per run, and all permutations are planted afterwards.
        pairs: independent pairs of networks whose path is followed through training.
        epochs: of SGD in both.
        every: epochs from one look at a path to the next.
        rate: learning rate of SGD.
        rates: multiples of it with which the planted permutations are tried too.
        seeds: ensembles and variational posteriors.
        hmc_runs: independent runs of HMC, each of several chains.
        chains: in a run of HMC.
        warmup: trajectories before the first draw.
        draws: of each chain.
        leapfrog: steps of a trajectory, on average.
        members: of an ensemble.
        widths: numbers of hidden units with which ensembles are tried, ascending.
        ensemble_epochs: of Adam, with rate 1e-3 and batches of 100.
        vi_epochs: of variational inference.
        vi_rate: its learning rate.
        posterior_draws: networks drawn from each compact form.
        refine_steps: of the refinement; 0 leaves it out.
        prior: standard deviation of every weight.
        workers: processes for HMC.
    """

    units: int = 64
    planted: tuple[int, ...] = (1, 7, 13, 19, 26, 32, 39, 42, 51, 63)
    runs: int = 3
    retrained: bool = True
    pairs: int = 3
    epochs: int = 50
    every: int = 5
    rate: float = 0.01
    rates: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    seeds: int = 3
    hmc_runs: int = 3
    chains: int = 4
    warmup: int = 100
    draws: int = 100
    leapfrog: int = 100
    members: int = 5
    widths: tuple[int, ...] = (64, 128, 256, 512)
    ensemble_epochs: int = 200
    vi_epochs: int = 500
    vi_rate: float = 3e-2
    posterior_draws: int = 100
    refine_steps: int = 400
    prior: float = 1.0
    workers: int = 2

    @property
    def gradients(self) -> int:
        """Gradients over all training examples in one run of HMC, on average."""
        return self.chains * (self.warmup + self.draws) * self.leapfrog


_GRID = tuple(1 + (published.UNITS - 2) * step // 49 for step in range(50))  # the paper's 50 numbers of transpositions


def plan(preset: str, data_dir: str | None) -> CompactPlan:
    """The settings of a preset.

    Args:
        preset: "quick", embedded data, some minutes; or "full", the paper's network on MNIST, days.
        data_dir: the folder that holds MNIST, for the full preset; None looks at ONEBASIN_DATA.
    """
    if preset == "quick":
        return CompactPlan(preset, data_dir)
    if preset != "full":
        raise InputError(f'expected preset "quick" or "full", found {preset!r}: choose one of them')
    return CompactPlan(
        preset,
        data_dir,
        units=published.UNITS,
        planted=_GRID,
        runs=5,
        retrained=False,
        pairs=5,
        epochs=50,
        every=1,
        rate=1e-3,
        rates=(1.0, 10.0, 100.0),
        seeds=5,
        hmc_runs=1,
        chains=2,
        warmup=40,
        draws=160,
        leapfrog=200,
        ensemble_epochs=50,
        vi_epochs=50,
        vi_rate=1e-3,
        refine_steps=1000,
    )
