"""Do independent trainings become the same function, and does diversity inside tell diversity outside?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import onebasin as ob
from onebasin_papers.symmetry.networks import Desk, problem, reference
from onebasin_papers.symmetry.presets import PAIR_INFORMATION
from onebasin_papers.symmetry.verdicts import CAVEAT, none_collapsed, varies_more, weakly_correlated

TITLE = "Do independently trained networks become the same function?"
INSIDE, OUTSIDE = "mutual information on test inputs (nats)", "mutual information on foreign inputs (nats)"
BINS = 30


def part(bench: Desk) -> ob.reporting.Section:
    """Compare all pairs of the reference networks."""
    own, population = problem(bench), reference(bench)

    def progress(done: int, of: int, doing: str) -> None:
        bench.show(done, of, f"reference {doing}")

    found = ob.diversity(
        own.model, population, own.test[0], ood=own.outside, members=len(population), progress=progress
    )
    assert found.ood is not None and found.ood_matrix is not None  # foreign inputs were given
    inside, outside = found.matrix, found.ood_matrix
    together = ob.correlation_of_pairs(inside, outside, bench.stream("collapse", "pairs"))
    means = [ob.mean_of_pairs(one, bench.stream("collapse", name)) for name, one in (("in", inside), ("out", outside))]
    sides = {"test inputs": (found.in_distribution, means[0]), f"{own.outside_name}": (found.ood, means[1])}
    text = (
        f"No: of {found.in_distribution.pairs.count:,} pairs of {len(found.networks)} networks "
        f"{found.collapse.pairs} collapsed"
        if found.collapse.pairs == 0
        else f"Some do: {found.collapse.pairs:,} of {found.in_distribution.pairs.count:,} pairs collapsed"
    )
    text += (
        f". The closest pair still has {found.closest[0].share:.0%} of the median mutual information; a pair counts as "
        f"collapsed from {found.collapse.limit / found.in_distribution.pairs.quantiles[0.5]:.0%} downwards."
    )
    more = (
        f"Pairs that differ on test inputs differ on {own.outside_name} with a correlation of {together.value:.2f} "
        f"(95 % {together.low:.2f} to {together.high:.2f}; networks drawn again, because pairs share them)."
    )
    items = (_table(sides), _histograms(found), _joint(inside, outside))
    return ob.reporting.Section("collapse", TITLE, (text, more), items, tuple(_claims(found, together, means)))


def most_frequent(side: ob.Side) -> float:
    """The middle of the fullest bin."""
    place = max(range(len(side.pairs.counts)), key=lambda bin_: side.pairs.counts[bin_])
    edges = side.pairs.edges
    return (edges[place] + edges[min(place + 1, len(edges) - 1)]) / 2


def _table(sides: dict[str, tuple[ob.Side, ob.Resampled]]) -> ob.reporting.Table:
    heads = ("mean", "most frequent", "standard deviation", "smallest", "5 %", "95 %", "largest")
    rows: list[tuple[ob.reporting.Cell, ...]] = []
    for (name, (side, mean)), printed in zip(sides.items(), PAIR_INFORMATION.values(), strict=True):
        spread = side.pairs
        rows.append(
            (
                name,
                ob.reporting.Number(mean.value, mean.error),
                ob.reporting.Number(most_frequent(side), published=printed),
                ob.reporting.Number(spread.sd),
                *(ob.reporting.Number(spread.quantiles[level]) for level in (0.0, 0.05, 0.95, 1.0)),
            )
        )
    return ob.reporting.Table(
        "pairs",
        "How different are two trainings as functions?",
        (
            ob.reporting.Column("inputs"),
            *(ob.reporting.Column(head, "mutual information of a pair of networks", digits=4) for head in heads),
        ),
        tuple(rows),
        "± one standard error, networks drawn again",
        "In nats: 0 for the same function, 0.693 for two networks that are sure of different classes everywhere. "
        "Published: 1,000 ResNet-18 on CIFAR-100, foreign images from SVHN; read off a figure.",
    )


def _histograms(found: ob.Diversity) -> ob.reporting.Figure:
    assert found.ood is not None
    panels = []
    sides = {"on test inputs": (found.in_distribution, INSIDE), "on foreign inputs": (found.ood, OUTSIDE)}
    for (title, (side, label)), printed in zip(sides.items(), PAIR_INFORMATION.values(), strict=True):
        bars = ob.reporting.Series("pairs", side.pairs.edges, tuple(map(float, side.pairs.counts)), shade=0)
        rule = ob.reporting.Rule("published, other data", printed, "vertical")
        panels.append(
            ob.reporting.Panel(
                "histogram", title, ob.reporting.Axis(label), ob.reporting.Axis("pairs"), (bars,), (rule,)
            )
        )
    spreads = [side.pairs.sd / side.pairs.mean for side in (found.in_distribution, found.ood)]
    return ob.reporting.Figure(
        "pair-information",
        "How much do two independent trainings differ?",
        f"Mutual information of all pairs. Its standard deviation is {spreads[0]:.0%} of the mean on test inputs and "
        f"{spreads[1]:.0%} on foreign ones.",
        tuple(panels),
    )


def _joint(inside: Tensor, outside: Tensor) -> ob.reporting.Figure:
    first, second = torch.triu_indices(len(inside), len(inside), 1)
    x, y = inside[first, second], outside[first, second]
    columns, rows = (_edges(values) for values in (x, y))
    places = _bin(y, rows) * BINS + _bin(x, columns)
    counts = torch.bincount(places, minlength=BINS * BINS).reshape(BINS, BINS)
    grid = tuple(tuple(float(count) if count else None for count in row) for row in counts.tolist())
    middles = [tuple(((edges[1:] + edges[:-1]) / 2).tolist()) for edges in (columns, rows)]
    panel = ob.reporting.Panel(
        "heat",
        "",
        ob.reporting.Axis(INSIDE),
        ob.reporting.Axis(OUTSIDE),
        grid=grid,
        columns=middles[0],
        rows=middles[1],
        colour=ob.reporting.Axis("pairs"),
    )
    return ob.reporting.Figure(
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


def _claims(found: ob.Diversity, together: ob.Resampled, means: Sequence[ob.Resampled]) -> list[ob.reporting.Claim]:
    assert found.ood is not None
    pairs, collapse = found.in_distribution.pairs, found.collapse
    verdict, weak = none_collapsed(collapse.pairs, pairs.count), weakly_correlated(together.low, together.high)
    spreads = [side.pairs.sd / side.pairs.mean for side in (found.in_distribution, found.ood)]
    return [
        ob.reporting.Claim(
            "No two independent trainings collapse to the same function.",
            verdict,
            f"{collapse.pairs:,} of {pairs.count:,} pairs at or below a tenth of the median; the closest pair has "
            f"{found.closest[0].share:.0%} of it (mean {means[0].value:.4f} ± {means[0].error:.4f} nats)",
            "none of 499,500 pairs; most frequent 0.1075 nats, range 0.103 to 0.112",
            f"{collapse.pairs:,} pairs did" if verdict == CAVEAT else "",
        ),
        ob.reporting.Claim(
            "Diversity on familiar and on foreign inputs is at most weakly correlated over pairs.",
            weak,
            f"correlation {together.value:.2f}, 95 % {together.low:.2f} to {together.high:.2f}",
            "a joint density that is nearly round; no number",
            "the interval crosses ±0.5, the border taken for weak" if weak == CAVEAT else "",
        ),
        ob.reporting.Claim(
            "Diversity varies more from pair to pair on foreign inputs than on familiar ones.",
            varies_more(spreads[0], spreads[1]),
            f"standard deviation / mean: {spreads[0]:.1%} on test inputs, {spreads[1]:.1%} on foreign ones",
            "about 1.3 % and 10 % (read off figures)",
        ),
    ]
