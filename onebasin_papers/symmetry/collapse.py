"""Collapse: do independent trainings become the same function, and does diversity tell diversity on OOD data?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.symmetry.networks import SymmetryWorkspace, problem, reference
from onebasin_papers.symmetry.settings import PAIR_INFORMATION
from onebasin_papers.verdicts import CAVEAT, none_collapsed, varies_more, weakly_correlated

report = ob.reporting

TITLE = "Do independently trained networks become the same function?"
INSIDE, OUTSIDE = "mutual information on test inputs (nats)", "mutual information on foreign inputs (nats)"
BINS = 30


def part(workspace: SymmetryWorkspace) -> report.Section:
    """Compare all pairs of the reference networks."""
    task, population = problem(workspace), reference(workspace)

    def progress(done: int, of: int, doing: str) -> None:
        workspace.progress(done, of, f"reference {doing}")

    result = ob.diversity(
        task.model, population, task.test[0], ood=task.outside, members=len(population), progress=progress
    )
    assert result.ood is not None and result.ood_matrix is not None  # foreign inputs were given
    inside, outside = result.matrix, result.ood_matrix
    together = ob.correlation_of_pairs(inside, outside, workspace.generator("collapse", "pairs"))
    means = [
        ob.mean_of_pairs(one, workspace.generator("collapse", name)) for name, one in (("in", inside), ("out", outside))
    ]
    sides = {"test inputs": (result.in_distribution, means[0]), f"{task.outside_name}": (result.ood, means[1])}
    text = (
        f"No: of {result.in_distribution.pairs.count:,} pairs of {len(result.networks)} networks "
        f"{result.collapse.pairs} collapsed"
        if result.collapse.pairs == 0
        else f"Some do: {result.collapse.pairs:,} of {result.in_distribution.pairs.count:,} pairs collapsed"
    )
    text += (
        f". The closest pair still has {result.closest[0].share:.0%} of the median mutual information; a pair counts "
        "as "
        f"collapsed from {result.collapse.limit / result.in_distribution.pairs.quantiles[0.5]:.0%} downwards."
    )
    more = (
        f"Pairs that differ on test inputs differ on {task.outside_name} with a correlation of {together.value:.2f} "
        f"(95 % {together.low:.2f} to {together.high:.2f}; networks drawn again, because pairs share them)."
    )
    items = (_table(sides), _histograms(result), _joint(inside, outside))
    return report.Section("collapse", TITLE, (text, more), items, tuple(_claims(result, together, means)))


def most_frequent(side: ob.Side) -> float:
    """The middle of the fullest bin."""
    place = max(range(len(side.pairs.counts)), key=lambda bin_: side.pairs.counts[bin_])
    edges = side.pairs.edges
    return (edges[place] + edges[min(place + 1, len(edges) - 1)]) / 2


def _table(sides: dict[str, tuple[ob.Side, ob.Resampled]]) -> report.Table:
    heads = ("mean", "most frequent", "standard deviation", "smallest", "5 %", "95 %", "largest")
    rows: list[tuple[report.Cell, ...]] = []
    for (name, (side, mean)), printed in zip(sides.items(), PAIR_INFORMATION.values(), strict=True):
        spread = side.pairs
        rows.append(
            (
                name,
                report.Number(mean.value, mean.error),
                report.Number(most_frequent(side), published=printed),
                report.Number(spread.sd),
                *(report.Number(spread.quantiles[level]) for level in (0.0, 0.05, 0.95, 1.0)),
            )
        )
    return report.Table(
        "pairs",
        "How different are two trainings as functions?",
        (
            report.Column("inputs"),
            *(report.Column(head, "mutual information of a pair of networks", digits=4) for head in heads),
        ),
        tuple(rows),
        "± one standard error, networks drawn again",
        "In nats: 0 for the same function, 0.693 for two networks that are sure of different classes everywhere. "
        "Published: 1,000 ResNet-18 on CIFAR-100, foreign images from SVHN; read off a figure.",
    )


def _histograms(result: ob.Diversity) -> report.Figure:
    assert result.ood is not None
    panels = []
    sides = {"on test inputs": (result.in_distribution, INSIDE), "on foreign inputs": (result.ood, OUTSIDE)}
    for (title, (side, label)), printed in zip(sides.items(), PAIR_INFORMATION.values(), strict=True):
        bars = report.Series("pairs", side.pairs.edges, tuple(map(float, side.pairs.counts)), shade=0)
        rule = report.Rule("published, other data", printed, "vertical")
        panels.append(report.Panel("histogram", title, report.Axis(label), report.Axis("pairs"), (bars,), (rule,)))
    spreads = [side.pairs.sd / side.pairs.mean for side in (result.in_distribution, result.ood)]
    return report.Figure(
        "pair-information",
        "How much do two independent trainings differ?",
        f"Mutual information of all pairs. Its standard deviation is {spreads[0]:.0%} of the mean on test inputs and "
        f"{spreads[1]:.0%} on foreign ones.",
        tuple(panels),
    )


def _joint(inside: Tensor, outside: Tensor) -> report.Figure:
    first, second = torch.triu_indices(len(inside), len(inside), 1)
    x, y = inside[first, second], outside[first, second]
    columns, rows = (_edges(values) for values in (x, y))
    places = _bin(y, rows) * BINS + _bin(x, columns)
    counts = torch.bincount(places, minlength=BINS * BINS).reshape(BINS, BINS)
    grid = tuple(tuple(float(count) if count else None for count in row) for row in counts.tolist())
    middles = [tuple(((edges[1:] + edges[:-1]) / 2).tolist()) for edges in (columns, rows)]
    panel = report.Panel(
        "heat",
        "",
        report.Axis(INSIDE),
        report.Axis(OUTSIDE),
        grid=grid,
        columns=middles[0],
        rows=middles[1],
        colour=report.Axis("pairs"),
    )
    return report.Figure(
        "pair-information-joint",
        "Do pairs that differ on test inputs also differ on foreign ones?",
        f"All {len(x):,} pairs.",
        (panel,),
    )


def _edges(values: Tensor) -> Tensor:
    low, high = float(values.min()), float(values.max())
    return torch.linspace(low, high if high > low else low + 1, BINS + 1, dtype=torch.float64)


def _bin(values: Tensor, edges: Tensor) -> Tensor:
    return (torch.searchsorted(edges, values.double().contiguous(), right=True) - 1).clamp(0, BINS - 1)


def _claims(result: ob.Diversity, together: ob.Resampled, means: Sequence[ob.Resampled]) -> list[report.Claim]:
    assert result.ood is not None
    pairs, collapse = result.in_distribution.pairs, result.collapse
    verdict, weak = none_collapsed(collapse.pairs, pairs.count), weakly_correlated(together.low, together.high)
    spreads = [side.pairs.sd / side.pairs.mean for side in (result.in_distribution, result.ood)]
    return [
        report.Claim(
            "No two independent trainings collapse to the same function.",
            verdict,
            f"{collapse.pairs:,} of {pairs.count:,} pairs at or below a tenth of the median; the closest pair has "
            f"{result.closest[0].share:.0%} of it (mean {means[0].value:.4f} ± {means[0].error:.4f} nats)",
            "none of 499,500 pairs; most frequent 0.1075 nats, range 0.103 to 0.112",
            f"{collapse.pairs:,} pairs did" if verdict == CAVEAT else "",
        ),
        report.Claim(
            "Diversity on familiar and on foreign inputs is at most weakly correlated over pairs.",
            weak,
            f"correlation {together.value:.2f}, 95 % {together.low:.2f} to {together.high:.2f}",
            "a joint density that is nearly round; no number",
            "the interval crosses ±0.5, the border taken for weak" if weak == CAVEAT else "",
        ),
        report.Claim(
            "Diversity varies more from pair to pair on foreign inputs than on familiar ones.",
            varies_more(spreads[0], spreads[1]),
            f"standard deviation / mean: {spreads[0]:.1%} on test inputs, {spreads[1]:.1%} on foreign ones",
            "about 1.3 % and 10 % (read off figures)",
        ),
    ]
