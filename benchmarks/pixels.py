"""How often do intervals of the calibration error of pixels cover the truth, with images drawn, and with pixels drawn?

    python -m benchmarks.pixels [--repeats 100] [--draws 200]

A classifier of two classes says its confidence c, uniform from 0.55 to 0.95, at every pixel, and is right with
probability c - g: the truth is g. Half of the pixels of an image are right or wrong by one random number that they
share. A row gives the share of test sets whose 95 % interval covers g, and the mean width.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from onebasin.metrics.bootstrap import absolute, interval
from onebasin.metrics.calibration import ece
from onebasin.metrics.pixels import bin_sums, image_gaps

BINS = 15
SIZES = ((20, 100), (40, 30), (100, 100))


def one(images: int, pixels: int, gap: float, draws: int, seed: int) -> list[tuple[bool, float]]:
    """Whether the interval covers, and its width: drawing images, then drawing pixels."""
    generator = torch.Generator().manual_seed(seed)
    said, alone = (torch.rand(images, pixels, generator=generator, dtype=torch.float64) for _ in range(2))
    shared = torch.rand(images, 1, generator=generator, dtype=torch.float64)
    together = torch.rand(images, pixels, generator=generator) < 0.5
    said = 0.4 * said + 0.55
    right = torch.where(together, shared, alone) < said - gap
    sums = bin_sums(said, right, torch.ones_like(right), BINS)
    flat = torch.stack([said.flatten(), 1 - said.flatten()], 1)
    both = (
        absolute(partial(image_gaps, sums), images, generator=generator, n_resamples=draws),
        interval(ece, flat, (~right.flatten()).long(), generator=generator, n_resamples=draws),
    )
    return [(bool(found.low <= gap <= found.high), float(found.high - found.low)) for found in both]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--draws", type=int, default=200)
    given = parser.parse_args()
    print("| truth | images x pixels | images drawn | pixels drawn |\n| --- | --- | --- | --- |")
    for gap in (0.0, 0.1):
        for images, pixels in SIZES:
            found = [one(images, pixels, gap, given.draws, seed) for seed in range(given.repeats)]
            cells = []
            for side in zip(*found, strict=True):
                share, width = (sum(values) / len(found) for values in zip(*side, strict=True))
                cells.append(f"{100 * share:.0f} %, {width:.3f}")
            print(f"| {gap:g} | {images} x {pixels} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
