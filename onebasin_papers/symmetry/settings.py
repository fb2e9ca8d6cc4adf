"""Settings of both presets for paper 2, what the paper published, the glossary and the summary of the report.

Published numbers are for ResNet-18 on CIFAR-100, out-of-distribution images from SVHN, no errors given. Units: MMD and
NS as printed (most likely 10 x squared MMD), ACE in per mille (most likely), mutual information in hundredths of a nat,
the others in per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onebasin as ob
from onebasin_papers.study import Settings

report = ob.reporting

MEASURES = ("mmd", "ns", "accuracy", "ece", "ace", "brier", "aupr", "fpr95", "id_mi", "ood_mi")
ONE, MULTI = "one mode", "multi mode"
ENSEMBLE = "Deep ensemble"

_ROWS: dict[tuple[str, str], tuple[float, ...]] = {
    ("Dropout", ONE): (4.5, 7.5, 74.2, 14.7, 3.2, 38.8, 76.4, 47.7, 5.7, 9.1),
    ("viBNN", ONE): (9.0, 10.2, 57.9, 24.6, 3.0, 63.7, 60.9, 79.1, 2.7, 4.2),
    ("SWAG", ONE): (6.7, 7.2, 70.9, 2.3, 1.2, 38.9, 86.2, 48.0, 2.4, 6.3),
    ("Laplace", ONE): (5.7, 7.0, 75.1, 0.9, 0.9, 34.6, 81.3, 42.4, 27.6, 63.3),
    ("SGHMC", ONE): (7.5, 7.9, 73.7, 4.9, 1.0, 36.2, 79.4, 62.3, 0.2, 0.5),
    ("Dropout", MULTI): (0.7, 4.5, 79.5, 4.3, 1.0, 29.2, 78.2, 48.1, 20.5, 46.3),
    ("viBNN", MULTI): (6.1, 5.6, 66.5, 2.8, 2.0, 45.3, 71.9, 71.7, 45.5, 81.1),
    ("SWAG", MULTI): (5.0, 5.4, 72.8, 1.5, 1.1, 36.9, 89.1, 50.6, 6.5, 19.7),
    ("Laplace", MULTI): (0.6, 4.3, 78.9, 6.9, 0.8, 30.3, 82.9, 41.3, 44.1, 98.5),
    (ENSEMBLE, MULTI): (0.0, 0.0, 79.5, 1.6, 0.6, 28.7, 81.1, 45.6, 22.5, 58.0),
}
PAIR_INFORMATION = {"inside": 0.1075, "outside": 0.222}  # nats: the most frequent values over 499,500 pairs
UP_OF_ALL = {"CIFAR-100": (8, 9), "TinyImageNet": (2, 7)}  # rows, ensembles left out, where NS is above MMD


def published(method: str, form: str, measure: str) -> float | None:
    """A printed number, None where the paper has none.

    >>> published("SWAG", "multi mode", "accuracy"), published("SGHMC", "multi mode", "accuracy")
    (72.8, None)
    """
    row = _ROWS.get((method, form))
    return None if row is None or measure not in MEASURES else row[MEASURES.index(measure)]


def column(measure: str) -> list[float]:
    """A printed column, all rows."""
    return [row[MEASURES.index(measure)] for row in _ROWS.values()]


@dataclass(frozen=True)
class SymmetrySettings(Settings):
    """Settings of the study.

    Attributes:
        architecture: a key of `networks.ARCHITECTURES`; it decides about the data too.
        examples: training examples that are used at most, the first ones.
        test_examples: test examples, and foreign ones, that are used at most.
        prior: standard deviation of the Gaussian prior of every weight, which is the weight decay of trainings.
        reference_networks: independent trainings that methods are compared with.
        epochs: of every training, by SGD with momentum 0.9 and a cosine schedule.
        batch: examples in a batch of SGD.
        rate: learning rate of SGD.
        groups: repetitions of the table.
        runs: independent runs of one method in one repetition; pooled they are its multi-mode form.
        singles: runs of each repetition that are also measured by themselves, as one-mode forms.
        draws: networks of each population in the table: `draws` of one run, or draws / runs of each of its runs.
        chains: of HMC.
        chain_draws: networks drawn from each chain of HMC.
        warmup: trajectories of HMC before the first draw.
        leapfrog: steps of a trajectory of HMC.
        thin: trajectories of HMC between draws.
        dropout_rate: the probability to drop a unit.
        vi_epochs: of variational inference.
        vi_rate: learning rate of variational inference.
        swag_collect: networks that SWAG fits a Gaussian to.
        swag_rate: learning rate of SWAG and SWA while they are collected.
        laplace_layers: layers whose weights are uncertain for Laplace.
        laplace_structure: of the curvature that Laplace uses.
        sghmc_rate: step of SGHMC.
        sghmc_thin: epochs of SGHMC between draws.
        sghmc_warmup: epochs of SGHMC before the first draw.
        members: networks of an implicit ensemble, which are trained together.
        mask_scale: of Masksembles: 1 for masks that are all alike, larger for less overlap.
        packed_share: of the units of a layer in a network of a Packed-Ensemble.
        rank_one: members of the BatchEnsemble that a refined mean and deviation is compared with; so many that both
            store about two networks.
        refine_steps: of the refinement of that mean and deviation.
        workers: processes; results do not depend on them.
        lanes: networks that are computed side by side.
        permutations: of the test whether trainings can stand for HMC.
        toy_networks: trainings with two hidden units.
        toy_epochs: of these trainings.
        mass_decays: weight decays that are tried, 0 first.
        mass_networks: trainings with each weight decay.
        mass_epochs: of these trainings.
        order_networks: trainings whose units are watched.
        order_rates: learning rates of the phases of these trainings.
        order_epochs: of each phase.
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
    members: int = 4
    mask_scale: float = 1.5
    packed_share: float = 0.5
    rank_one: int = 8
    refine_steps: int = 3000
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


QUICK = SymmetrySettings()
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


def preset_settings(preset: str = "quick", data_dir: str | None = None) -> SymmetrySettings:
    """The settings of a preset.

    >>> preset_settings("quick").architecture, preset_settings("full").architecture
    ('mlp', 'resnet20')

    Args:
        preset: "quick", on embedded digits, or "full", on CIFAR-10.
        data_dir: the folder with data sets for the full preset.
    """
    if preset not in _PRESETS:
        raise ob.errors.InputError(f"expected preset quick or full, found {preset!r}: give quick")
    return replace(_PRESETS[preset], data_dir=data_dir)


TERMS = {
    "network": "one set of weights for an architecture; another set that computes the same function is another network",
    "symmetry": "a change of the weights that leaves the function of a network as it was: units change places "
    "(permutation), or a unit gets larger weights in and smaller ones out (scale)",
    "orbit": "all networks that symmetries make of one",
    "normal form": "one chosen network of each orbit: here rows of length 1, sorted by their largest entry",
    "mode": "a place where networks end that were trained; each independent run finds its own",
    "one mode": "all networks of a population come from one training run",
    "multi mode": "as many networks, but from several independent runs",
    "reference": "independent trainings of the same architecture, which the paper takes for the posterior",
    "posterior": "how probable each network is, given the training examples and a Gaussian prior of the weights",
    "HMC": "Hamiltonian Monte Carlo: draws from the posterior itself, if its chains are long enough",
    "chain": "successive draws of one run of a sampler; neighbours are alike",
    "MMD": "maximum mean discrepancy: a distance of two sets of networks; here 10 x its square, without bias",
    "NS": "no symmetry: the same distance after symmetries were removed from both sets",
    "dropout": "training with units left out at random; a draw is a network with some of its units left out",
    "viBNN": "variational inference: the closest Gaussian with independent weights",
    "SWAG": "a Gaussian through the places that SGD visits after training",
    "SWA": "the mean of the networks that SGD visits at the end of training, one network",
    "EMA": "the moving average of a training, one network",
    "Laplace": "a Gaussian whose shape is the curvature of the loss at a trained network; here of its last layer",
    "SGHMC": "stochastic gradient Hamiltonian Monte Carlo: a chain of noisy steps on small batches",
    "BatchEnsemble": "networks that share their weights, each with factors of its own for rows and columns",
    "LP-BNN": "BatchEnsemble whose factors of columns are drawn by a small variational autoencoder",
    "Masksembles": "networks that share their weights, each with a fixed set of units left out",
    "MIMO": "one network that answers for several inputs at once, from as many slots and heads",
    "MC batch norm": "one network with the statistics of random training batches, folded into its weights",
    "Packed-Ensembles": "narrow networks trained side by side; here each has half of the units of every layer",
    "implicit ensemble": "networks that are trained together and share most of their numbers",
    "deep ensemble": "independently trained networks, whose probabilities are averaged",
    "ECE": "expected calibration error: how far confidence is from accuracy, in bins of confidence",
    "ACE": "adaptive calibration error: the same for every class, in bins that hold equally many examples",
    "Brier score": "squared distance between predicted probabilities and what was the case",
    "AUPR": "area under the curve of precision and recall for telling familiar inputs from foreign ones",
    "FPR95": "share of foreign inputs that are taken for familiar where 95 % of the familiar ones are",
    "mutual information": "how much networks disagree, in nats: entropy of their mean prediction minus their mean "
    "entropy; ID on test inputs, OOD on foreign ones",
    "functional collapse": "two networks that were trained independently and compute nearly the same",
    "equal marginals": "every unit of a layer has the same distribution over independent trainings",
    "exchangeability": "units can take each other's part: which of them holds the largest weight is left to chance",
    "mass": "the sum of squared weights of a network",
    "min-mass": "the smallest mass that scales can give to a network without changing its function",
    "excess mass": "how much heavier a network is than the lightest of its orbit, in per cent",
    "Kendall's tau": "how alike two orders are: 1 for the same, -1 for the reverse",
    "R-hat": "whether chains agree: 1 if they do, larger if each stays where it is",
}


LEAST = {
    "examples": 2, "test_examples": 2, "reference_networks": 5, "batch": 1, "groups": 1, "runs": 2, "singles": 1,
    "draws": 5, "members": 2, "rank_one": 2, "refine_steps": 1, "chains": 4, "chain_draws": 5, "leapfrog": 1, "thin": 1,
    "swag_collect": 3, "sghmc_thin": 1, "workers": 1, "lanes": 1, "permutations": 1, "toy_networks": 20,
    "toy_epochs": 1, "mass_networks": 2, "mass_epochs": 1, "order_networks": 1, "order_epochs": 2,
    "archive_networks": 1,
}  # fmt: skip
# Names of rows, which a method of the user's cannot have.
ROWS = (
    "HMC", "Deep ensemble", "Dropout", "viBNN", "SWAG", "Laplace", "SGHMC", "BatchEnsemble", "LP-BNN", "Masksembles",
    "MIMO", "MC batch norm", "Packed-Ensembles", "SWA", "EMA",
)  # fmt: skip
MOST = 15  # sentences


def summarise(sections: Sequence[report.Section]) -> list[str]:
    """The count of verdicts, then each question with its answer, and what did not hold.

    >>> claim = report.Claim("They fly.", "not reproduced", "penguins do not")
    >>> summarise([report.Section("birds", "Do birds fly?", ("Most do.",), claims=(claim,))])
    ['Of 1 claim 0 were reproduced, 0 with a caveat, and 1 not.', 'Do birds fly? Most do.', 'Not reproduced: They fly.']
    """
    claims = [claim for section in sections for claim in section.claims]
    counts = [sum(claim.verdict == verdict for claim in claims) for verdict in report.VERDICTS]
    counted = (
        f"Of {len(claims)} claim{'' if len(claims) == 1 else 's'} {counts[0]} were reproduced, {counts[1]} with a "
    )
    sentences = [f"{counted}caveat, and {counts[2]} not."] if claims else []
    sentences += [f"{section.title} {section.text[0]}" for section in sections if section.text]
    sentences += [_failed(claim) for claim in claims if claim.verdict == report.VERDICTS[2]]
    return sentences[:MOST]


def _failed(claim: report.Claim) -> str:
    return f"{claim.verdict.capitalize()}: {claim.text}"
