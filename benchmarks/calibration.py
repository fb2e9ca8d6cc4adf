"""How often do intervals of calibration errors cover the truth? Test sets from classifiers whose truth is known.

    python -m benchmarks.calibration [--repeats 400] [--draws 400]

Logits z of K classes are normal with standard deviation s, targets are drawn from softmax(z), and the classifier says
softmax(t z): calibrated at t = 1, too sure above and too doubtful below. The truth is the calibration error of the
population in the same 15 bins (of `ace` those that hold equally many of the test set), with the probabilities of
outcomes in place of outcomes, from 400,000 examples. A row gives, of each error, the truth (its mean, where bins are of
the test set), the share of test sets whose 95 % interval covers it, and the mean width.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.metrics.bootstrap import interval
from onebasin.metrics.calibration import ace, ece

METRICS: dict[str, Callable[..., Tensor]] = {
    "ece": ece,
    "ace top-label": partial(ace, kind="top-label"),
    "ace class-wise": ace,
}
BINS = 15
_BORDERS = torch.arange(1, BINS, dtype=torch.float64) / BINS


class Classifier(NamedTuple):
    """A classifier: classes, standard deviation of logits, and the factor t it multiplies them by."""

    classes: int
    spread: float
    factor: float


CASES = (
    Classifier(2, 2.0, 1.0),
    Classifier(2, 2.0, 1.5),
    Classifier(10, 2.0, 1.0),
    Classifier(10, 2.0, 1.1),
    Classifier(10, 2.0, 1.5),
    Classifier(10, 6.0, 1.0),
    Classifier(10, 6.0, 2.0),
    Classifier(3, 8.0, 0.5),
    Classifier(5, 60.0, 10.0),
)
SIZES = (100, 300, 1000, 5000)


def drawn_examples(case: Classifier, examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """What the classifier says and what is true, each (examples, classes), and targets (examples,)."""
    logits = case.spread * torch.randn(examples, case.classes, generator=generator, dtype=torch.float64)
    true = logits.softmax(1)
    return (case.factor * logits).softmax(1), true, torch.multinomial(true, 1, generator=generator).squeeze(1)


class Truth:
    """The calibration errors of the population that test sets of a classifier come from."""

    def __init__(self, case: Classifier, examples: int = 400_000, seed: int = 1) -> None:
        """Draw the population, with probabilities of outcomes in place of outcomes."""
        said, true, _ = drawn_examples(case, examples, torch.Generator().manual_seed(seed))
        confidence, label = said.max(1)
        gap = true.gather(1, label[:, None]).squeeze(1) - confidence
        place = torch.searchsorted(_BORDERS, confidence)
        self.ece = float(torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, gap).abs().sum() / examples)
        self.top = _cumulated(confidence, gap)
        self.classes = [_cumulated(said[:, own], true[:, own] - said[:, own]) for own in range(case.classes)]

    def of(self, name: str, said: Tensor) -> float:
        """The error of the population in the bins of a test set; those of `ace` hold equally many of its examples."""
        if name == "ece":
            return self.ece
        if name == "ace top-label":
            return _in_bins(*self.top, said.amax(1))
        each = [_in_bins(*table, column) for table, column in zip(self.classes, said.T, strict=True)]
        return sum(each) / len(each)


def _cumulated(predicted: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions in ascending order, and the mean over all of the gaps up to each, 0 before the first."""
    ascending, order = predicted.sort()
    return ascending.contiguous(), torch.nn.functional.pad(gap[order].cumsum(0) / len(gap), (1, 0))


def _in_bins(ascending: Tensor, cumulated: Tensor, sample: Tensor) -> float:
    """The sum over the bins of a sample of |population's gap there|; a border between two values lies between both."""
    values, counts = sample.unique(return_counts=True)
    mass = torch.nn.functional.pad(counts.double().cumsum(0), (1, 0))
    sums = torch.nn.functional.pad(cumulated[torch.searchsorted(ascending, values, right=True)], (1, 0))
    sums[-1] = cumulated[-1]
    ends = torch.arange(1, BINS, dtype=torch.float64) / BINS * mass[-1]
    after = torch.searchsorted(mass, ends).clamp(1, len(values))
    part = (ends - mass[after - 1]) / (mass[after] - mass[after - 1])
    inner = torch.lerp(sums[after - 1], sums[after], part)
    return float(torch.cat([sums[:1], inner, sums[-1:]]).diff().abs().sum())


class Coverage(NamedTuple):
    """Share of test sets whose interval covers the truth; means of the truth and of the width of intervals."""

    share: float
    truth: float
    width: float


def covered(
    case: Classifier, examples: int, name: str, truth: Truth, *, repeats: int, draws: int, seed: int = 0
) -> Coverage:
    """Judge the intervals of one metric on many test sets."""
    generator = torch.Generator().manual_seed(seed)
    hits, values, widths = 0, 0.0, 0.0
    for _ in range(repeats):
        said, _, targets = drawn_examples(case, examples, generator)
        found = interval(METRICS[name], said, targets, generator=generator, n_resamples=draws)
        value = truth.of(name, said)
        hits += bool(found.low <= value <= found.high)
        values += value / repeats
        widths += float(found.high - found.low) / repeats
    return Coverage(hits / repeats, values, widths)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| K, s, t | examples | " + " | ".join(METRICS) + " |\n| --- | --- |" + " --- |" * len(METRICS))
    for case in CASES:
        truth = Truth(case)
        for size in given.sizes:
            cells = []
            for name in METRICS:
                found = covered(case, size, name, truth, repeats=given.repeats, draws=given.draws)
                cells.append(f"{found.truth:.4f}: {100 * found.share:.1f} %, {found.width:.4f}")
            print(
                f"| {case.classes}, {case.spread:g}, {case.factor:g} | {size:,} | " + " | ".join(cells) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
