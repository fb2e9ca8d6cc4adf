"""From distances to a `Gap`: kernels at their bandwidths, the part of runs, a test and an interval.

What is exchanged and drawn again are runs, because only runs are independent. Where every run of both crowds has
equally many members, whole runs change sides, and the statistic is the one without pairs of one run. Where sizes
differ, one member is drawn of each run and these change sides: fewer, but exchangeable if runs follow one law.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from onebasin.discrepancy.distances import Distances
from onebasin.discrepancy.report import Gap, Kernel
from onebasin.discrepancy.runs import Runs
from onebasin.errors import InputError
from onebasin.metrics.kernels import bandwidths, metric_of
from onebasin.metrics.mmd import kernel_matrix, unbiased
from onebasin.metrics.resampled import (
    FEWEST,
    percentiles,
    permutation_p,
    random_counts,
    random_sides,
    rounding,
    side_statistics,
    weighted_statistics,
)

PRESETS = {
    "median": (("gaussian", "median"),),
    "pooled": (("laplace", "pooled"), ("gaussian", "pooled")),
    "paper": (("laplace", "paper"), ("gaussian", "paper")),
    "paper-floors": (("laplace", "paper-floors"), ("gaussian", "paper-floors")),
}


class Judge:
    """Kernels and random draws that serve every pair of crowds in every form, so that forms differ by nothing else.

    Args:
        runs: of both crowds.
        preset: a key of `PRESETS`.
        permutations: of the test; 0 for none.
        resamples: of the interval; 0 for none.
        confidence: of the interval.
        seed: of both.
    """

    def __init__(
        self,
        runs: Runs,
        *,
        preset: str = "median",
        permutations: int = 999,
        resamples: int = 1000,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> None:
        if preset not in PRESETS:
            raise InputError(f"expected preset {', '.join(PRESETS)}, found {preset!r}: choose one of them")
        if permutations < 0 or resamples < 0:
            raise InputError(
                f"expected 0 or more permutations and resamples, found {permutations} and {resamples}: 0 is for none"
            )
        self.runs, self.preset, self.confidence = runs, preset, confidence
        percentiles(torch.zeros(1), confidence)  # refuses what is no confidence, before anything is measured
        generator = torch.Generator().manual_seed(seed)
        self.chosen = runs.one_of_each(generator)
        count, split = len(runs.sizes), runs.split
        # Two runs can only change places, which the statistic does not notice: no p-value says anything.
        self.sides = random_sides(count, split, permutations, generator) if permutations and count > 2 else None
        enough = resamples and min(runs.counts) >= FEWEST
        self.counts = random_counts(count, split, resamples, generator) if enough else None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that the kernels need."""
        return tuple(dict.fromkeys(metric_of(kernel) for kernel, _ in PRESETS[self.preset]))

    @property
    def nbytes(self) -> int:
        """Bytes of the draws."""
        return sum(draws.nbytes for draws in (self.sides, self.counts) if draws is not None)

    def gap(self, measured: Distances) -> Gap:
        """Judge the distances of two crowds, which are not to be used any more."""
        device = self._settle(measured)
        kernels: list[Kernel] = []
        exchanged: list[tuple[Tensor, Tensor]] = []
        drawn: list[Tensor] = []
        for kernel, rule in PRESETS[self.preset]:
            pooled = measured.pooled(metric_of(kernel), spend=True)
            for width in bandwidths(rule, pooled.distances, pooled.split).tolist():
                matrix = kernel_matrix(pooled, width, kernel)
                sums = self.runs.sums(matrix)
                squared = float(unbiased(matrix, pooled.split))
                kernels.append(Kernel(kernel, width, squared, self.runs.explained(sums)))
                if self.sides is not None:
                    ours = self._exchangeable(matrix, sums)
                    exchanged.append((side_statistics(ours, self.sides), rounding(ours, self.runs.split)))
                if self.counts is not None:
                    sizes = self.runs.sizes.to(device)
                    drawn.append(weighted_statistics(sums, sizes, self.runs.split, self.counts))
        return self._gathered(kernels, exchanged, drawn)

    def _gathered(self, kernels: list[Kernel], exchanged: list[tuple[Tensor, Tensor]], drawn: list[Tensor]) -> Gap:
        p_value, low, high = math.nan, math.nan, math.nan
        if exchanged:
            statistics, slack = (torch.stack(parts) for parts in zip(*exchanged, strict=True))
            each, p_value = permutation_p(statistics, slack)
            kernels = [replace(row, p_value=p) for row, p in zip(kernels, each.tolist(), strict=True)]
        if drawn:
            low, high = percentiles(torch.stack(drawn).mean(0), self.confidence)
        squared = sum(row.squared for row in kernels) / len(kernels)
        explained = sum(row.explained for row in kernels) / len(kernels)
        return Gap(squared, explained, squared - explained, low, high, p_value, tuple(kernels))

    def _exchangeable(self, matrix: Tensor, sums: Tensor) -> Tensor:
        """Kernel of all pairs of what changes sides (runs, runs), 0 on the diagonal."""
        size = float(self.runs.sizes[0])
        if bool((self.runs.sizes == size).all()):
            return sums if size == 1 else (sums / size**2).fill_diagonal_(0)
        chosen = self.chosen.to(matrix.device)
        return matrix[chosen][:, chosen]

    def _settle(self, measured: Distances) -> torch.device:
        """Move the draws to where the distances are."""
        matrix = measured.l2 if measured.l2 is not None else measured.l1
        assert matrix is not None
        self.sides = None if self.sides is None else self.sides.to(matrix.device)
        self.counts = None if self.counts is None else self.counts.to(matrix.device)
        return matrix.device
