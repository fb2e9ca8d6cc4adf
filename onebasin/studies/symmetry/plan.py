"""What `reproduce symmetry` runs: sizes and budgets of both presets, in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onebasin.errors import InputError
from onebasin.studies.bench import Plan


@dataclass(frozen=True)
class SymmetryPlan(Plan):
    """Settings of the study.

    Attributes:
        architecture: a key of `networks.ARCHITECTURES`; it decides about the data too.
        examples: training examples that are used at most, the first ones.
        test_examples: test examples, and foreign ones, that are used at most.
        prior: standard deviation of the Gaussian prior of every weight, which is the weight decay of trainings.
        reference_networks: independent trainings that methods are compared with.
        epochs, batch, rate: of SGD with momentum 0.9 and a cosine schedule, for every training.
        groups: repetitions of the table.
        runs: independent runs of one method in one repetition; pooled they are its multi-mode form.
        singles: runs of each repetition that are also measured by themselves, as one-mode forms.
        draws: networks of each crowd in the table: `draws` of one run, or draws / runs of each of its runs.
        chains, chain_draws, warmup, leapfrog, thin: of HMC.
        dropout_rate: the probability to drop a unit.
        vi_epochs, vi_rate: of variational inference.
        swag_collect, swag_rate: networks that a Gaussian is fitted to, and the learning rate while they are collected.
        laplace_layers, laplace_structure: which weights are uncertain, and how.
        sghmc_rate, sghmc_thin, sghmc_warmup: its step, epochs between draws, epochs before the first.
        workers: processes; results do not depend on them.
        lanes: networks that are computed side by side.
        permutations: of tests.
        toy_networks, toy_epochs: trainings with two hidden units.
        mass_decays, mass_networks, mass_epochs: weight decays, and trainings with each.
        order_networks, order_rates, order_epochs: trainings that are watched, learning rates of their phases, epochs
            of each.
        archive_networks: networks of one archive.
    """

    architecture: str = "mlp"
    examples: int = 1347
    test_examples: int = 1950
    prior: float = 1.0
    reference_networks: int = 300
    epochs: int = 30
    batch: int = 64
    rate: float = 0.05
    groups: int = 5
    runs: int = 10
    singles: int = 2
    draws: int = 100
    chains: int = 8
    chain_draws: int = 150
    warmup: int = 150
    leapfrog: int = 120
    thin: int = 1
    dropout_rate: float = 0.1
    vi_epochs: int = 100
    vi_rate: float = 1e-2
    swag_collect: int = 30
    swag_rate: float = 0.02
    laplace_layers: str = "last"
    laplace_structure: str = "kfac"
    sghmc_rate: float = 1e-2
    sghmc_thin: int = 1
    sghmc_warmup: int = 30
    workers: int = 2
    lanes: int = 16
    permutations: int = 999
    toy_networks: int = 4_000
    toy_epochs: int = 10
    mass_decays: tuple[float, ...] = (0.0, 2e-4, 1e-3, 5e-3)
    mass_networks: int = 24
    mass_epochs: int = 60
    order_networks: int = 8
    order_rates: tuple[float, ...] = (0.2, 0.02, 0.002)
    order_epochs: int = 20
    archive_networks: int = 128


QUICK = SymmetryPlan()
# What it costs: about 2,900 passes over CIFAR-10 for trainings and some 2,400 gradients of all images for HMC. A pass
# of ResNet-20 forwards and backwards takes about ten minutes of one core, so this is a matter of weeks on two of them.
# Every finished network is kept and an interrupted run goes on; HMC is far from converged, and its R-hat is told.
FULL = replace(
    QUICK,
    preset="full",
    architecture="resnet20",
    examples=50_000,
    test_examples=2_000,
    reference_networks=64,
    epochs=20,
    batch=128,
    groups=2,
    runs=5,
    draws=50,
    chains=3,
    chain_draws=30,
    warmup=10,
    leapfrog=20,
    vi_epochs=40,
    vi_rate=1e-3,
    swag_collect=20,
    swag_rate=0.01,
    sghmc_rate=1e-3,
    sghmc_warmup=5,
    lanes=1,
    toy_networks=10_000,
    mass_networks=24,
    mass_epochs=30,
    order_networks=3,
    order_epochs=8,
    archive_networks=1_024,
)
_PRESETS = {"quick": QUICK, "full": FULL}


def plan(preset: str = "quick", data_dir: str | None = None) -> SymmetryPlan:
    """The settings of a preset.

    >>> plan("quick").architecture, plan("full").architecture
    ('mlp', 'resnet20')

    Args:
        preset: "quick", on embedded digits, or "full", on CIFAR-10.
        data_dir: the folder with data sets for the full preset.
    """
    if preset not in _PRESETS:
        raise InputError(f"expected preset quick or full, found {preset!r}: give one of these")
    return replace(_PRESETS[preset], data_dir=data_dir)
