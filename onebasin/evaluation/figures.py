"""Figures of evaluations, out of plain numbers: reliability, scores in and out of distribution, coverage, pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onebasin.metrics import Reliability
from onebasin.reporting import Axis, Figure, Panel, Rule, Series, one_panel

_BINS = 40  # of scores
_FEW = 100  # pairs: fewer are drawn as points
_CELLS = 30  # of a joint density, along each axis
LEVELS = (*(number / 20 for number in range(1, 20)), 0.99)  # of predictive intervals, for the figure
_NORMAL = 1.959963984540054  # 97.5 % quantile


class ScoreHistogram(NamedTuple):
    """Counts of a score in and out of distribution, in the same bins.

    Attributes:
        edges: borders of the bins, ascending.
        in_distribution: examples in each bin, one fewer than edges.
        ood: out-of-distribution inputs in each bin.
    """

    edges: tuple[float, ...]
    in_distribution: tuple[int, ...]
    ood: tuple[int, ...]

    @classmethod
    def of(cls, near: Tensor, far: Tensor) -> ScoreHistogram:
        """Count finite scores.

        >>> ScoreHistogram.of(torch.tensor([0.0, 1.0]), torch.tensor([4.0, torch.inf])).ood[-1]
        1
        """
        kinds = [scores[scores.isfinite()].double().cpu().numpy() for scores in (near, far)]
        edges = np.histogram_bin_edges(np.concatenate(kinds), _BINS)
        counts = [tuple(np.histogram(kind, edges)[0].tolist()) for kind in kinds]
        return cls(tuple(edges.tolist()), *counts)


def coverage_curve(means: Tensor, targets: Tensor, spread: Tensor) -> tuple[float, ...]:
    """Share of targets inside the central interval of the mixture of Gaussians, at each of `LEVELS`.

    A target is inside the interval of level L where its cumulative probability u has |2 u - 1| <= L.
    """
    u = torch.special.ndtr((targets - means) / spread).mean(0)
    apart = (2 * u - 1).abs()
    return tuple(float((apart <= level).double().mean()) for level in LEVELS)


def reliability_panel(found: Reliability, title: str = "", unit: str = "examples") -> Panel:
    """Accuracy by confidence, with the diagonal of the calibrated; shares of "pixels" get no bars, see below."""
    parts = (part.tolist() for part in (found.confidence, found.accuracy, found.count))
    rows = [row for row in zip(*parts, strict=True) if row[2]]
    ends = [wilson(accuracy, count) for _, accuracy, count in rows]
    dots = Series(
        "",
        tuple(confidence for confidence, _, _ in rows),
        tuple(accuracy for _, accuracy, _ in rows),
        tuple(low for low, _ in ends) if unit == "examples" else (),
        tuple(high for _, high in ends) if unit == "examples" else (),
    )
    confidence = Axis("confidence: largest probability", low=0.0, high=1.0)
    share = Axis("share of right answers", low=0.0, high=1.05)
    return Panel("points", title, confidence, share, (dots,), (Rule("calibrated", direction="diagonal"),))


def reliability_figure(found: Reliability, error: float, unit: str = "examples") -> Figure:
    """Accuracy by confidence, and how many examples have which confidence.

    Args:
        found: the diagram.
        error: the calibration error.
        unit: what is counted; shares of "pixels" get no bars, for they are not independent.
    """
    counts = Series("", tuple(found.edges.tolist()), tuple(map(float, found.count.tolist())))
    bars = "; bars are 95 % intervals of each share (Wilson)" if unit == "examples" else ""
    caption = (
        f"Expected calibration error {error:.4f}. Below the diagonal the networks are too sure, above it not sure "
        f"enough{bars}."
    )
    panel = reliability_panel(found, unit=unit)
    return Figure(
        "reliability",
        "Are they as often right as they say?",
        caption,
        (panel, Panel("histogram", "", panel.x, Axis(unit), (counts,))),
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` examples.

    >>> [round(end, 4) for end in wilson(0.5, 100)]
    [0.4038, 0.5962]
    """
    square = _NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _NORMAL * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return middle - half, middle + half


def score_figure(histograms: Mapping[str, ScoreHistogram], areas: Mapping[str, float]) -> Figure:
    """Each score in and out of distribution."""
    panels = []
    for name, found in histograms.items():
        shares = {"in distribution": found.in_distribution, "out of distribution": found.ood}
        series = tuple(
            Series(title, found.edges, tuple(count / max(1, sum(counts)) for count in counts))
            for title, counts in shares.items()
        )
        words = name.replace("_", " ")
        panels.append(
            Panel("histogram", f"{words}, AUROC {areas[name]:.3f}", Axis(words), Axis("share of inputs"), series)
        )
    best = max(areas, key=lambda name: areas[name])
    caption = f"The score that separates best is {best.replace('_', ' ')}, with an AUROC of {areas[best]:.4f}."
    return Figure("ood", "Do scores tell out-of-distribution inputs from the examples?", caption, tuple(panels))


def risk_figure(risk: Sequence[float], area: float) -> Figure:
    """Share of errors among the most confident examples, by their share; `risk` at equal steps up to all of them."""
    places = tuple((number + 1) / len(risk) for number in range(len(risk)))
    line = Series("", places, tuple(risk))
    half = risk[len(risk) // 2 - 1]
    caption = (
        f"Of all examples {risk[-1]:.2%} are wrong, of the most confident half {half:.2%}. The area under the line is "
        f"{area:.4f} (AURC)."
    )
    coverage = Axis("share of examples that are answered", low=0.0, high=1.02)
    rules = (Rule("all answered", risk[-1]),)
    axes = coverage, Axis("share of errors among them", low=0.0)
    return one_panel("risk", "Are the confident answers the right ones?", caption, "lines", *axes, series=(line,),
                     rules=rules)  # fmt: skip


def coverage_figure(curve: Sequence[float], asked: Mapping[float, tuple[float, float, float]]) -> Figure:
    """Share of targets inside central intervals, by their level; `asked` are level -> value, low, high."""
    line = Series("all levels", LEVELS, tuple(curve))
    levels = sorted(level for level in asked if all(map(math.isfinite, asked[level])))
    values, low, high = ([asked[level][place] for level in levels] for place in range(3))
    dots = Series("levels in the table", tuple(levels), tuple(values), tuple(low), tuple(high))
    gap = max(zip(curve, LEVELS, strict=True), key=lambda pair: abs(pair[0] - pair[1]))
    caption = (
        f"Intervals of {gap[1]:.0%} hold {gap[0]:.1%} of the targets, which is furthest from what they promise. Below "
        "the diagonal intervals are too narrow, above it too wide."
    )
    return one_panel(
        "coverage",
        "Do predictive intervals hold as many targets as they promise?",
        caption,
        "points",
        Axis("level of the interval", low=0.0, high=1.05),
        Axis("share of targets inside", low=0.0, high=1.05),
        series=(line, dots) if levels else (line,),
        rules=(Rule("as promised", direction="diagonal"),),
    )


def joint_figure(near: Tensor, far: Tensor, correlation: float | None) -> Figure:
    """Number of pairs by their mutual information in distribution and out of it, as a heat map; few pairs as points."""
    x, y = (values.double().cpu().numpy() for values in (near, far))
    title, known = "Do pairs that differ in distribution differ out of it?", ""
    if correlation is not None:
        known = f" Their correlation is {correlation:.3f}."
    axes = "mutual information of a pair in distribution (nats)", "out of distribution (nats)"
    if len(x) < _FEW:
        points = Series("", tuple(x.tolist()), tuple(y.tolist()))
        return one_panel("joint", title, f"{len(x):,} pairs of networks.{known}", "points", *axes, series=(points,))
    counts, across, up = np.histogram2d(x, y, bins=_CELLS)
    columns, rows = ((edges[1:] + edges[:-1]) / 2 for edges in (across, up))
    grid = tuple(tuple(float(count) or None for count in row) for row in counts.T)
    return one_panel(
        "joint",
        title,
        f"{len(x):,} pairs of networks; white where there is none.{known}",
        "heat",
        *axes,
        grid=grid,
        columns=tuple(columns.tolist()),
        rows=tuple(rows.tolist()),
        colour=Axis("pairs", scale="log"),
    )
