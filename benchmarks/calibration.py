"""How often do intervals of calibration errors cover the truth? Test sets from classifiers whose truth is known.

    python -m benchmarks.calibration [--repeats 400] [--draws 400]

Logits z of K classes are normal with standard deviation s, targets are drawn from softmax(z), and the classifier says
softmax(t z): calibrated at t = 1, too sure above and too doubtful below. The truth is the calibration error of the
population in the same 15 bins, with the probabilities of outcomes in place of outcomes, from 400,000 examples. A row
gives, of each error, the truth, the share of test sets whose 95 % interval covers it, and the mean width.
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


def truths(case: Classifier, examples: int = 400_000, seed: int = 1) -> dict[str, float]:
    """The calibration errors of the population, of the names in `METRICS`."""
    said, true, _ = drawn_examples(case, examples, torch.Generator().manual_seed(seed))
    confidence, label = said.max(1)
    gap = true.gather(1, label[:, None]).squeeze(1) - confidence
    place = torch.searchsorted(torch.arange(1, BINS, dtype=torch.float64) / BINS, confidence)
    by_class = torch.stack([_equal_mass(said[:, own], true[:, own] - said[:, own]) for own in range(case.classes)])
    found = {
        "ece": torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, gap).abs().sum() / examples,
        "ace top-label": _equal_mass(confidence, gap),
        "ace class-wise": by_class.mean(),
    }
    return {name: float(value) for name, value in found.items()}


def _equal_mass(predicted: Tensor, gap: Tensor) -> Tensor:
    """Mean over bins of equal mass of |mean gap|."""
    parts = gap[predicted.argsort()].tensor_split(BINS)
    return torch.stack([part.mean().abs() for part in parts]).mean()


def covered(
    case: Classifier,
    examples: int,
    metric: Callable[..., Tensor],
    truth: float,
    *,
    repeats: int,
    draws: int,
    seed: int = 0,
) -> tuple[float, float]:
    """Share of test sets whose interval covers the truth, and the mean width of intervals."""
    generator = torch.Generator().manual_seed(seed)
    hits, widths = 0, 0.0
    for _ in range(repeats):
        said, _, targets = drawn_examples(case, examples, generator)
        found = interval(metric, said, targets, generator=generator, draws=draws)
        hits += bool(found.low <= truth <= found.high)
        widths += float(found.high - found.low) / repeats
    return hits / repeats, widths


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
        truth = truths(case)
        for size in given.sizes:
            cells = []
            for name, metric in METRICS.items():
                share, width = covered(case, size, metric, truth[name], repeats=given.repeats, draws=given.draws)
                cells.append(f"{truth[name]:.4f}: {100 * share:.1f} %, {width:.4f}")
            print(
                f"| {case.classes}, {case.spread:g}, {case.factor:g} | {size:,} | " + " | ".join(cells) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
