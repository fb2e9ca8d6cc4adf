"""Pruning on MNIST: the compact form of an ensemble, and how much of it can go, by every criterion.

    python -m benchmarks.pruning [--quick]

The ensemble is that of `benchmarks.fixed_ensemble` (five MAP networks 784-512-10, prior N(0, 1)), aligned by weights to
a consensus, and as in paper 1 by activations to the first member. Variational inference on the same problem lends its
standard deviations; HMC does on the reduced problem of `benchmarks.fixed_samples`, since on this one it would take five
million gradients. Nothing is retrained after pruning, as in the paper.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.fixed_ensemble import PAPER, Settings, ensemble, network, place
from benchmarks.fixed_samples import PRIOR, mnist_problem
from benchmarks.mnist import ABSENT, Digits, load
from benchmarks.planted import only
from benchmarks.targets import Targets, head, spread
from onebasin import Population, Posterior, State, Symmetry
from onebasin.functional.losses import losses
from onebasin.functional.population_pass import predictions
from onebasin.metrics.scores import agreement, total_variation
from onebasin.posterior.fit import fit
from onebasin.posterior.pruning import LEVELS, prune, pruning_curve, transfer
from onebasin.posterior.units import remove_units, resized

DRAWS = 100
VI_EPOCHS = 20
# Test accuracy in per cent at LEVELS, read off the figure of paper 1 (paper-compact.md, 7.2).
PUBLISHED = {
    "own sigma": (97.98, 54.50, 27.36, 10.26, 9.74, 10.75, 10.13, 9.80, 9.80, 9.80, 9.80, 9.80),
    "HMC sigma": (97.98, 95.72, 94.50, 92.89, 91.42, 90.50, 86.65, 83.56, 79.84, 62.64, 40.54, 19.72),
    "VI": (98.04, 98.06, 98.07, 98.07, 98.07, 98.07, 98.07, 98.09, 98.05, 97.51, 70.08, 14.96),
}


@dataclass
class Judge:
    """A model, its symmetry, and data to judge on."""

    model: nn.Module
    symmetry: Symmetry
    test: tuple[Tensor, Tensor]

    def right(self, state: State) -> float:
        """Per cent right of one network."""
        return 100 * (1 - (losses(self.model, state, *self.test).error or 0.0))


class Study(Judge):
    """The fixed ensemble on MNIST."""

    def __init__(self, digits: Digits, settings: Settings) -> None:
        model = network(settings)
        symmetry = ob.discover(model, torch.zeros(1, settings.widths[0]))
        super().__init__(model, symmetry, (digits.test_images, digits.test_labels))
        self.digits, self.settings = digits, settings
        self.members: Population = ensemble(digits, settings)

    def predictive(self, population: Population) -> Tensor:
        """The average of softmax outputs (examples, classes)."""
        return predictions(self.model, population, self.test[0]).double().softmax(2).mean(0)

    def forms(self) -> dict[str, Posterior]:
        """The diagonal Gaussians of the raw and of the aligned ensemble."""
        permuting = only(self.symmetry, ("permutation",))
        inputs = self.digits.train_images[: self.settings.examples]
        paper = ob.align(
            self.members, permuting, reference="first", by="activations", model=self.model, inputs=inputs,
            kind="uncentred",
        )  # fmt: skip
        populations = {
            "raw (q_d)": self.members,
            "activations, first (paper 1)": paper.population,
            "weights, consensus": ob.align(self.members, permuting).population,
            "weights, balanced consensus": ob.align(self.members, self.symmetry).population,
        }
        return {name: fit(population, "diagonal", model=self.model) for name, population in populations.items()}

    def variational(self, epochs: int) -> Posterior:
        """Mean-field variational inference on the same problem, kept beside the ensemble."""
        kept = Path(f"{place(self.settings)}-vi-{epochs}.safetensors")
        if not kept.is_file():
            data = (
                self.digits.train_images[: self.settings.examples],
                self.digits.train_labels[: self.settings.examples],
            )
            method = ob.VI(epochs=epochs, batch=self.settings.batch, lr=self.settings.rate)
            posterior = ob.approximate(self.model, data, method, prior=self.settings.prior, seed=self.settings.seed)
            posterior.save(kept)
        return ob.load_posterior(kept)


def compact_table(study: Study, forms: Mapping[str, Posterior], targets: Targets) -> None:
    """How much of the ensemble's own predictive each form keeps."""
    rates = [study.right(member) for member in study.members]
    whole = study.predictive(study.members)
    print(f"  members {spread(rates)} % right; together {100 * share_right(whole, study.test[1]):.2f} %")
    print(f"\n{'form':<32}{'agreement':>11}{'TV':>9}{'draws %':>10}{'mean network %':>16}")
    reached = {}
    for name, form in forms.items():
        drawn = study.predictive(form.draw(DRAWS, torch.Generator().manual_seed(0)))
        row = (float(agreement(drawn, whole)), float(total_variation(drawn, whole)))
        reached[name] = (row[0], study.right(form.mean))
        right = 100 * share_right(drawn, study.test[1])
        print(f"{name:<32}{row[0]:>11.4f}{row[1]:>9.4f}{right:>10.2f}{reached[name][1]:>16.2f}")
    print("  published: q_d 52.25 % draws, 86.40 % mean network; q_r 97.72 % draws, 97.97 % mean network\n")
    best = reached["weights, balanced consensus"]
    targets.judge("q_r agrees with the ensemble on at least 0.985", f"{best[0]:.4f}", best[0] >= 0.985)
    below = statistics.mean(rates) - best[1]
    targets.judge("mean network within 0.3 points of the members", f"{below:+.2f} points below", abs(below) <= 0.3)


def share_right(predictive: Tensor, labels: Tensor) -> float:
    return float((predictive.argmax(1) == labels).double().mean())


def own_table(study: Study, form: Posterior) -> None:
    """Every criterion on one form: section 7.3 of paper-compact.md with our numbers."""
    print(pruning_curve(study.model, form, study.test, repeats=3))
    print(f"  published, by sigma: {', '.join(f'{value:.1f}' for value in PUBLISHED['own sigma'])}")


def borrowed_table(judge: Judge, name: str, other: Posterior, mean: State, member: State) -> None:
    """Standard deviations of another method: on its own mean, and on networks that it has never seen."""
    onto_mean, onto_member = (transfer(other, state, judge.symmetry) for state in (mean, member))
    rescaled = transfer(other, mean, judge.symmetry, scale="reference")
    sources = {
        f"{name}: sigma": (other.mean, other, "sigma"),
        "snr": (other.mean, other, "snr"),
        f"mean: {name} sigma": (mean, onto_mean, "sigma"),
        "unaligned": (mean, other, "sigma"),
        "rescaled": (mean, rescaled, "sigma"),
        f"mean: {name} snr": (mean, onto_mean, "snr"),
        "rescaled ": (mean, rescaled, "snr"),
        "mean: magnitude": (mean, onto_mean, "magnitude"),
        f"member: {name} sigma": (member, onto_member, "sigma"),
        "unaligned ": (member, other, "sigma"),
        "member: magnitude": (member, onto_member, "magnitude"),
    }
    columns = {
        title: tuple(judge.right(prune(source, level, by).apply(state)) for level in LEVELS)
        for title, (state, source, by) in sources.items()
        if source is not rescaled or judge.symmetry.dimensions
    }
    show(columns)


def show(columns: Mapping[str, tuple[float, ...]]) -> None:
    """A table of percentages, one row per level."""
    widths = {title: max(8, len(title) + 2) for title in columns}
    print(f"{'kept %':>7}" + "".join(f"{title:>{widths[title]}}" for title in columns))
    for row, level in enumerate(LEVELS):
        cells = [f"{values[row]:>{widths[title]}.2f}" for title, values in columns.items()]
        print(f"{100 * level:>7.4g}" + "".join(cells))


def mask_table(study: Study, lent: Posterior) -> None:
    """A mask found for one network, used on another one: after it was moved, and as it is."""
    first, second, inputs = study.members.member(0), study.members.member(1), study.digits.train_images[:10_000]
    sources: dict[str, tuple[Posterior | State, str]] = {"first": (first, "magnitude"), "VI": (lent, "snr")}
    columns: dict[str, list[float]] = {}
    for level in LEVELS:
        own = {"own magnitude": prune(second, level, "magnitude")}
        for name, (source, by) in sources.items():
            masks, origin = prune(source, level, by), source.mean if isinstance(source, Posterior) else source
            own[f"{name}, by weights"] = transfer(masks, second, study.symmetry, origin)
            own[f"{name}, by activations"] = transfer(
                masks, second, study.symmetry, origin, model=study.model, inputs=inputs
            )
            own[f"{name}, as it is"] = masks
        own["random"] = prune(second, level, "random")
        for title, masks in own.items():
            columns.setdefault(title, []).append(study.right(masks.apply(second)))
    show({title: tuple(values) for title, values in columns.items()})


def reduced_hmc() -> None:
    """Paper 1's own protocol on a problem where HMC mixes: its standard deviations prune an ensemble's mean.

    Only permutations: a network in its lightest scales has other standard deviations than the prior gave it.
    """
    problem = mnist_problem()
    if problem is None:
        return
    model, samples = problem.model, problem.samples()
    symmetry = only(ob.discover(model, problem.train[0][:1]), ("permutation",))
    judge = Judge(model, symmetry, problem.test)
    method = ob.Ensemble(epochs=100, batch=100, lr=1e-3, lr_schedule="cosine")
    members = ob.sample(model, problem.train, method, chains=5, prior=PRIOR)
    hmc, own = (
        fit(ob.align(population, symmetry).population, "diagonal", model=model) for population in (samples, members)
    )
    rates = [judge.right(member) for member in members]
    print(f"  {len(samples)} samples; members {spread(rates)} % right, their mean {judge.right(own.mean):.2f} %\n")
    print("the mean of HMC samples, by all criteria")
    print(pruning_curve(model, hmc, problem.test, repeats=3))
    print("\nthe mean of the ensemble, and a member, by standard deviations of HMC")
    borrowed_table(judge, "HMC", hmc, own.mean, members.member(0))


def units_table(study: Study, form: Posterior) -> None:
    """Whole hidden units removed from the mean network; the tensors are smaller, so nothing is multiplied by zero."""
    print(f"{'units %':>7}" + "".join(f"{by:>9}" for by in ("norm", "snr", "random")) + f"{'weights %':>11}")
    for keep in (0.75, 0.5, 0.25, 0.1):
        cells, left = [], 0.0
        for by in ("norm", "snr", "random"):
            found = remove_units(form.mean, study.symmetry, keep, by, posterior=form)
            small = resized(study.model, found.state, study.test[0][:2])
            cells.append(100 * (1 - (losses(small, found.state, *study.test).error or 0.0)))
            left = sum(value.numel() for value in found.state.values()) / form.layout.size
        print(f"{100 * keep:>7.4g}" + "".join(f"{cell:>9.2f}" for cell in cells) + f"{100 * left:>11.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="does everything run? The figures mean nothing")
    options = parser.parse_args()
    digits = load()
    if digits is None:
        print(ABSENT)
        return 0
    settings = replace(PAPER, epochs=1, examples=2000, members=3) if options.quick else PAPER
    began, targets = time.perf_counter(), Targets()
    study = Study(digits, settings)
    forms = study.forms()
    head("Ensemble of 5, MNIST 784-512-10: compact forms", f"mean and standard deviation of each weight; {DRAWS} draws")
    compact_table(study, forms, targets)
    for name in ("weights, balanced consensus", "activations, first (paper 1)"):
        head(f"Pruning the mean network: {name}", "test accuracy in %; random over three orders; no retraining")
        own_table(study, forms[name])
    best = forms["weights, balanced consensus"]
    lent = study.variational(1 if options.quick else VI_EPOCHS)
    head("Standard deviations of mean-field VI", "moved into the basis of what is pruned; test accuracy in %")
    borrowed_table(study, "VI", lent, best.mean, study.members.member(0))
    print(f"  published, VI by sigma: {', '.join(f'{value:.1f}' for value in PUBLISHED['VI'])}")
    print(f"  published, ensemble mean by HMC sigma: {', '.join(f'{value:.1f}' for value in PUBLISHED['HMC sigma'])}")
    head("Masks of other networks on the second member", "moved into its basis, or used as they are")
    mask_table(study, lent)
    if not options.quick:
        head("Standard deviations of HMC", "2,000 images of 14 x 14 pixels, 196-32-10, prior N(0, 0.3^2)")
        reduced_hmc()
    head("Whole units", "removed from the mean network; tensors resized")
    units_table(study, best)
    print(f"\n{time.perf_counter() - began:.0f} s")
    return targets.close() and not options.quick


if __name__ == "__main__":
    sys.exit(main())
