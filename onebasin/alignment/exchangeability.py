"""Do samples treat the units of a layer alike? Tests that independent trainings pass and a stuck chain fails.

With a prior and an initialisation that do not tell units apart, the posterior does not either: relabelling the units
of a space leaves it as it is, so each unit is equally likely to be the one with the largest weight. Approximate
posteriors, and Monte Carlo chains in practice, break this (Laurent, Aldea & Franchi 2024). `exchangeability` counts
over the members of a population which unit it is, and compares the counts with uniform ones (`uniformity`).

A chain that has explored the posterior also exchanges roles: what a unit's weights were early says nothing about what
they are late. Counting which unit holds the largest weight sees that only where one unit stands out; `persistence`
compares early and late means of all weights, which see it everywhere, and neighbours that are alike cannot imitate it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from onebasin.alignment.layout import BlockAxis, BlockLayout, TensorBlock
from onebasin.errors import InputError, SpecError
from onebasin.population import Population
from onebasin.reporting import (
    Axis,
    Column,
    Figure,
    Panel,
    Record,
    Result,
    Rule,
    Series,
    Table,
    cells_of,
    histogram,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.symmetry import Symmetry

SHORTEST = 20  # draws; in a shorter chain memory cannot be told from chance
SMALLEST = 5.0  # expected count below which the chi-square tail is not trusted
SIMULATIONS = 9_999
CHUNK = 1 << 22  # simulated draws and counts held at a time


@dataclass(frozen=True, repr=False)
class Uniformity(Result):
    """What the counts say.

    Attributes:
        statistic: sum of (count - expected)^2 / expected over outcomes and copies, divided by the inflation.
        freedom: its mean if every outcome is equally likely: copies * (n - 1).
        effective: independent draws that would tell as much: draws / inflation.
        p: probability of at least this statistic if every outcome is equally likely.
    """

    statistic: float
    freedom: int
    effective: float
    p: float

    def record(self) -> Record:
        """The statistic beside the chi-square distribution that equally likely outcomes give."""
        from scipy.stats import chi2

        text = f"chi-square {self.statistic:.1f} on {self.freedom:,} degrees of freedom, p = {self.p:.2g}."
        high = max(self.statistic, self.freedom + 5 * math.sqrt(2 * self.freedom)) * 1.05
        places = tuple(high * (place + 0.5) / _POINTS for place in range(_POINTS))
        figure = one_panel(
            "chi-square",
            "Would equally likely outcomes differ as much?",
            text,
            "lines",
            "chi-square",
            "density if equally likely",
            series=(Series("", places, tuple(chi2.pdf(places, self.freedom).tolist())),),
            rules=(Rule("found", self.statistic, "vertical"),),
        )
        numbers = (self.statistic, self.freedom, self.effective, self.p)
        line = cells_of("counts", *numbers)
        heads = (
            Column(""),
            Column("chi-square", digits=1),
            Column("degrees of freedom", digits=0),
            Column("effective draws", "independent draws that would tell as much", digits=1),
            Column("p"),
        )
        values = dict(zip(("statistic", "freedom", "effective", "p"), numbers, strict=True))
        table = Table("uniformity", "Are all outcomes equally likely?", heads, (line,))
        return result_record("uniformity", "Test of counts for uniformity", text, (table, figure), values=values)


_POINTS = 120  # of a curve


def uniformity(counts: Tensor, *, inflation: float = 1.0, seed: int = 0) -> Uniformity:
    """Test counts (n,), or (copies, n) of several independent contests with equally many draws, for uniformity.

    Dividing by the inflation gives the statistic its right mean for autocorrelated draws, the first-order correction
    of Rao & Scott (1981); it is exact in the limit where all outcomes are remembered equally long. The tail is that of
    the chi-square distribution, or where fewer than 5 effective draws per outcome are expected, that of 9,999
    simulated counts (so p is then at least 1e-4).

    >>> ensemble = torch.tensor([45, 49, 46, 43, 45, 54, 47, 56, 38, 47, 50, 44, 41, 44, 51, 53])
    >>> found = uniformity(ensemble)
    >>> print(f"{found.statistic:.1f} on {found.freedom} degrees of freedom, p = {found.p:.2f}")
    7.5 on 15 degrees of freedom, p = 0.94
    """
    rows = counts.reshape(-1, counts.shape[-1])
    copies, outcomes = rows.shape
    draws = int(rows[0].sum())
    if draws < 1 or bool((rows.sum(1) != draws).any()):
        raise InputError(f"every copy needs the same number of draws, at least 1; found {rows.sum(1).tolist()}.")
    effective = draws / inflation
    statistic = float(_chi_square(rows, draws)) / inflation
    freedom = copies * (outcomes - 1)
    if effective < SMALLEST * outcomes:
        p = _simulated(statistic, (copies, outcomes), max(1, round(effective)), seed)
    else:
        half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
        p = float(torch.special.gammaincc(half[0], half[1]))
    return Uniformity(statistic, freedom, effective, p)


def _chi_square(counts: Tensor, draws: int) -> Tensor:
    """Sum over copies of sum (count - draws/n)^2 / (draws/n) for counts (..., copies, n)."""
    copies, outcomes = counts.shape[-2:]
    return counts.double().square().sum((-2, -1)) * (outcomes / draws) - copies * draws


def _simulated(statistic: float, shape: tuple[int, int], draws: int, seed: int) -> float:
    """Share of simulated statistics that are at least as large, the observed one counted among them."""
    copies, outcomes = shape
    generator = torch.Generator().manual_seed(seed)
    step = max(1, CHUNK // (copies * (draws + outcomes)))
    larger = 0
    for start in range(0, SIMULATIONS, step):
        rows = min(step, SIMULATIONS - start) * copies
        winners = torch.randint(outcomes, (rows, draws), generator=generator) + outcomes * torch.arange(rows)[:, None]
        counts = winners.reshape(-1).bincount(minlength=rows * outcomes).reshape(-1, copies, outcomes)
        # Statistics that are equal on paper must count as equal, whatever was rounded.
        larger += int((_chi_square(counts, draws) >= statistic - 1e-9 * (1 + statistic)).sum())
    return (1 + larger) / (1 + SIMULATIONS)


def inflation(winners: Tensor, chain: Tensor, outcomes: int) -> float:
    """How many draws of the chains are worth one independent draw: at least 1.

    It is the integrated autocorrelation time 1 + 2 (r_1 + r_2 + ...) of the indicators "outcome i was drawn", averaged
    over outcomes and copies. Two draws agree or not, so the autocovariance at lag l, summed over outcomes, is the
    share of pairs at that lag that agree, less what the chain's own frequencies explain; the sum ends by Geyer's
    initial monotone sequence, and what is lost by estimating the frequencies is added to first order. Centring each
    chain at its own frequencies is what lets a chain fail that hops quickly between few of the outcomes, or that
    always draws the same one and so shows no memory at all. It is a little too small (by 10 to 15 %) for chains of only
    ten autocorrelation times.

    Args:
        winners: (members, copies) integers below `outcomes`, draws of a chain in their order.
        chain: (members,) number of the chain, below zero for networks made independently of all others. Chains of
            fewer than 20 draws count as one draw each.
        outcomes: number of possible outcomes.
    """
    _, where, lengths = chain.unique(return_inverse=True, return_counts=True)
    length = torch.where(chain < 0, 1, lengths[where])
    worth = torch.where(length < SHORTEST, length, 0).double()
    long = (length >= SHORTEST).nonzero()[:, 0]
    if len(long):
        long = long[where[long].argsort(stable=True)]
        worth[long] = _autocorrelation_time(winners[long], where[long].unique(return_inverse=True)[1], outcomes)
    return float(worth.mean())


def _autocorrelation_time(winners: Tensor, chain: Tensor, outcomes: int) -> float:
    """For draws (T, copies) sorted by chain: pooled over chains, copies and outcomes, at least 1."""
    total, copies = winners.shape
    lengths = chain.bincount()
    column = (chain[:, None] * copies + torch.arange(copies)) * outcomes + winners
    share = column.reshape(-1).bincount(minlength=len(lengths) * copies * outcomes).reshape(-1, copies, outcomes)
    share = share.double() / lengths[:, None, None]
    shares_drawn = share.reshape(-1)[column]
    square = share.square().sum(-1)[chain]

    def covariance(lag: int) -> float:
        first, last = slice(0, total - lag), slice(lag, total)
        agree = (winners[first] == winners[last]) + (square[first] - shares_drawn[first] - shares_drawn[last])
        return float(agree[chain[first] == chain[last]].sum()) / (total * copies)

    variance = covariance(0)
    if variance <= 1e-12:  # nothing but one outcome
        return 1.0
    summed, least, lag = -variance, math.inf, 0
    while lag + 1 < int(lengths.max()) and (pair := covariance(lag) + covariance(lag + 1)) > 0:
        least = min(least, pair)
        summed += 2 * least
        lag += 2
    time = max(1.0, summed / variance)
    # A mean taken from the same draws lowers every covariance by about variance * time / length.
    lags = torch.arange(1 - max(1, lag), max(1, lag)).abs()[:, None]
    lost = float((1 - lags / lengths).clamp_min(0).sum()) / total
    left = max(1 - lost + time * len(lengths) / total, time * len(lengths) / total)  # the time is at most the length
    return max(1.0, time / left)


def adjust(p: Sequence[float], method: str = "holm") -> list[float]:
    """Correct p-values for their number: "holm" bounds the chance of any false alarm, "bh" the share of false alarms.

    >>> [round(value, 3) for value in adjust([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    >>> [round(value, 3) for value in adjust([0.01, 0.04, 0.03], "bh")]
    [0.03, 0.04, 0.04]
    """
    many = len(p)
    values, order = torch.tensor(p, dtype=torch.float64).sort()
    if method == "holm":
        adjusted = (values * torch.arange(many, 0, -1)).cummax(0).values
    elif method == "bh":
        adjusted = (values * many / torch.arange(1, many + 1)).flip(0).cummin(0).values.flip(0)
    else:
        raise InputError(f"correction must be 'holm' or 'bh' (Benjamini and Hochberg), found {method!r}.")
    return torch.empty_like(adjusted).scatter(0, order, adjusted.clamp_max(1)).tolist()


STATISTICS = ("max", "norm")


@dataclass(frozen=True)
class Row:
    """One space.

    Attributes:
        space: its name.
        units: number of units.
        copies: number of copies, for a space nested in parents.
        members: networks counted.
        effective: independent networks that would tell as much.
        statistic: chi-square over units and copies, corrected for autocorrelation.
        freedom: its mean if units are alike, copies * (units - 1).
        p: probability of at least this statistic if units are alike.
        adjusted: p corrected for the number of spaces.
        verdict: "rejected"; "consistent" with units that are alike; or "too few to tell" where no outcome whatever
            could have been rejected.
    """

    space: str
    units: int
    copies: int
    members: int
    effective: float
    statistic: float
    freedom: int
    p: float
    adjusted: float
    verdict: str


@dataclass(frozen=True, repr=False)
class Exchangeability(Result):
    """What `exchangeability` found.

    Attributes:
        rows: one per permutable space of at least two units.
        counts: space name -> integers (copies, units): how often each unit won.
        level: adjusted p-values below it are rejected.
    """

    rows: tuple[Row, ...]
    counts: Mapping[str, Tensor]
    level: float

    @property
    def passed(self) -> bool:
        """Whether no space is rejected, and at least one could have been."""
        return {row.verdict for row in self.rows} in ({"consistent"}, {"consistent", "too few to tell"})

    def record(self) -> Record:
        """A row per space, how often each unit won, and the p-values."""
        rejected = sum(row.verdict == "rejected" for row in self.rows)
        said = "passed" if self.passed else "units are not alike" if rejected else "too few members to tell"
        text = f"{said}: {rejected} of {len(self.rows)} spaces rejected at {self.level:g}"
        rows = tuple(
            cells_of(
                one.space,
                f"{one.units} x {one.copies}" if one.copies > 1 else str(one.units),
                *(one.members, one.effective, one.statistic, one.freedom, one.p, one.adjusted),
                one.verdict,
            )
            for one in largest_first(self.rows, lambda one: -one.adjusted)
        )
        shown = largest_first(self.rows, lambda row: -row.adjusted, _PANELS)[:_PANELS]
        more = f" The {_PANELS} spaces with the smallest p of {len(self.rows)}." if len(self.rows) > _PANELS else ""
        wins = Figure(
            "wins",
            "How often does each unit come out on top?",
            f"{text}.{more}",
            tuple(self._wins(row) for row in shown),
        )
        bars = largest_first(self.rows, lambda row: -row.adjusted, _BARS)[:_BARS]
        chances = one_panel(
            "p-values",
            "In which spaces are units not alike?",
            f"{text}. p-values are corrected for the number of spaces.",
            "bars",
            Axis("", names=tuple(row.space for row in bars)),
            Axis("adjusted p", "log", high=1.0),
            series=(Series("", tuple(map(float, range(len(bars)))), tuple(max(row.adjusted, _LEAST) for row in bars)),),
            rules=(Rule("level", self.level),),
        )
        table = Table("spaces", "Are units alike?", _SPACES, rows)
        values = {"passed": self.passed, "level": self.level, "rows": [asdict(row) for row in self.rows]}
        counts = {name: wins.tolist() for name, wins in self.counts.items()}
        return result_record(
            "exchangeability",
            "Exchangeability of units",
            text,
            (table, wins, chances),
            values={**values, "counts": counts},
        )

    def _wins(self, row: Row) -> Panel:
        counts = self.counts[row.space].sum(0)
        return Panel(
            "histogram",
            row.space,
            Axis("unit"),
            Axis("networks it leads"),
            (Series("", tuple(place - 0.5 for place in range(row.units + 1)), tuple(map(float, counts))),),
            (Rule("equally often", float(counts.sum()) / row.units),),
        )


_PANELS, _BARS, _LEAST = 6, 20, 1e-17  # spaces of the figures, and where a p-value of 0 is drawn
_SPACES = (
    Column("space"),
    Column("units", "in one copy, and copies"),
    Column("members", digits=0),
    Column("effective", "independent networks that would tell as much", digits=1),
    Column("chi-square", "over units and copies, corrected for autocorrelation", digits=1),
    Column("on", "degrees of freedom", digits=0),
    Column("p", "if units are alike", digits=2),
    Column("adjusted", "p corrected for the number of spaces", digits=2),
    Column("verdict"),
)


def exchangeability(
    population: Population,
    symmetry: Symmetry,
    *,
    statistic: str = "max",
    chain: Sequence[int] | Tensor | None = None,
    correction: str = "holm",
    level: float = 0.05,
    seed: int = 0,
) -> Exchangeability:
    """Test whether the units of each space are equally likely to come out on top.

    Give the samples as they were drawn: a population that was aligned or put in canonical order has its units told
    apart on purpose and is rejected, as it should be.

    A unit is judged by all weights that touch it, incoming and outgoing alike, each over the mean magnitude in the
    block of the tensor that it belongs to (running statistics of batch norms are left out); ties are broken at random.
    The copies of a nested space (the units inside each head) are contests of their own, whose chi-squares are added.

    Draws of one chain count as a sample of what that chain explores, corrected for its autocorrelation, so that a
    chain which stays near one network is rejected however it was started. To ask only whether the starts are alike,
    give one draw per chain.

    Args:
        population: the samples, read block by block; draws of a chain in their order.
        symmetry: of the model they belong to.
        statistic: "max", the largest magnitude of a weight, or "norm", the root of the sum of squares.
        chain: chain of each member (members,), instead of `population.chain`. Members without one, or with a number
            below zero, count as independent; a chain of fewer than 20 draws counts as one draw.
        correction: for the number of spaces, "holm" or "bh".
        level: reject below this adjusted p-value.
        seed: for ties, and for simulated p-values where counts are small.

    Raises:
        InputError: fewer than two members, nothing to permute, or an option that does not exist.
        SpecError: the population is not of the symmetry's model, or holds NaN or infinity.
    """
    layout = BlockLayout.of(symmetry)
    weighed = {axis.space for block in layout.blocks for axis in block.axes}
    tested = [
        number for number in sorted(weighed) if layout.spaces[number].permutable and layout.spaces[number].size > 1
    ]
    _check(len(population), bool(tested), statistic, level)
    chains = _chains(population, chain)
    winners = _winners(population, layout, tested, statistic, seed)
    results, counts = [], {}
    for number in tested:
        space, won = symmetry.spaces[number], winners[number]
        cells = torch.arange(space.copies) * space.size + won
        counts[space.name] = cells.reshape(-1).bincount(minlength=space.copies * space.size).reshape(-1, space.size)
        factor = inflation(won, chains, space.size)
        results.append(uniformity(counts[space.name], inflation=factor, seed=seed))
    adjusted = adjust([result.p for result in results], correction)
    rows = []
    for number, result, value in zip(tested, results, adjusted, strict=True):
        space = symmetry.spaces[number]
        # The strongest evidence there can be: all effective draws on one unit of each copy. Would it do?
        strongest = space.copies * (result.effective - 1) * math.log(space.size)
        decidable = strongest > math.log(len(tested) / level)
        verdict = "rejected" if value < level else "consistent" if decidable else "too few to tell"
        facts = (len(population), result.effective, result.statistic, result.freedom, result.p, value, verdict)
        rows.append(Row(space.name, space.size, space.copies, *facts))
    return Exchangeability(tuple(rows), counts, level)


def _check(members: int, any_tested: bool, statistic: str, level: float) -> None:
    if members < 2:
        raise InputError(f"exchangeability compares networks: it needs at least 2 members, found {members}.")
    if not any_tested:
        raise InputError("this symmetry permutes no units, so there is nothing to compare; discover another model's.")
    if statistic not in STATISTICS:
        raise InputError(f"statistic must be one of {', '.join(STATISTICS)}, found {statistic!r}.")
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, found {level}.")


def _chains(population: Population, chain: Sequence[int] | Tensor | None) -> Tensor:
    """Chain of each member, -1 for none."""
    members = len(population)
    given = population.chain if chain is None else torch.as_tensor(chain)
    if given is None:
        return torch.full((members,), -1)
    if tuple(given.shape) != (members,) or given.is_floating_point():
        raise InputError(
            f"chain should be {members} integers, one per member, found {given.dtype} of shape {tuple(given.shape)}."
        )
    return given.long().cpu()


def _winners(
    population: Population, layout: BlockLayout, tested: list[int], statistic: str, seed: int
) -> dict[int, Tensor]:
    """Number of each space -> which unit came out on top in each copy, (members, copies)."""
    generator = torch.Generator().manual_seed(seed)
    winners: dict[int, list[Tensor]] = {number: [] for number in tested}
    for start, stacked in population.blocks():
        layout.check(stacked, where="the population", batched=True)
        scores: dict[int, Tensor] = {}
        for block in layout.blocks:
            part = _in_mean_magnitudes(block, stacked[block.tensor], start)
            for axis in block.axes:
                if axis.space in winners:
                    score = _score(block, axis, part, statistic)
                    old = scores.get(axis.space, torch.zeros_like(score))
                    scores[axis.space] = torch.maximum(old, score) if statistic == "max" else old + score
        for number, score in scores.items():
            winners[number].append(_top(score.reshape(len(score), -1, layout.spaces[number].size).cpu(), generator))
    return {number: torch.cat(parts) for number, parts in winners.items()}


def _in_mean_magnitudes(block: TensorBlock, stacked: Tensor, start: int) -> Tensor:
    """The magnitudes in a block, (M, *dims, rest), over their mean in each member."""
    wide = stacked if stacked.dtype in (torch.float32, torch.float64) else stacked.float()
    part = block.take(wide).abs()
    mean = part.reshape(len(part), -1).mean(1)
    if not bool(mean.isfinite().all()):
        member = start + int((~mean.isfinite()).nonzero()[0, 0])
        raise SpecError(
            f"member {member} is not finite: tensor {block.tensor} holds NaN or infinity; leave this network out or "
            "train it again with a smaller step"
        )
    return part / torch.where(mean > 0, mean, 1).reshape(-1, *[1] * (part.dim() - 1))


def _score(block: TensorBlock, axis: BlockAxis, part: Tensor, statistic: str) -> Tensor:
    """What each unit scores in a block: (M, copies * size)."""
    if statistic == "norm":
        return block.gather(axis, part.square().sum(-1))
    return block.reduce(axis, part, torch.amax)


def _top(score: Tensor, generator: torch.Generator) -> Tensor:
    """The unit with the largest score, one of them at random where several are equal: (..., n) -> (...)."""
    tied = score == score.amax(-1, keepdim=True)
    lots = torch.rand(score.shape, generator=generator)
    return torch.where(tied, lots, -1.0).argmax(-1)


_APART = 0.2  # share of the draws, in the middle, that is left out, so that early and late do not touch


@dataclass(frozen=True, repr=False)
class Persistence(Result):
    """What `persistence` found.

    Attributes:
        correlation: of early and late means over units, pooled over weights: 1 if roles are kept, 0 if exchanged.
        p: share of relabellings of the late units that agree at least as well with the early ones; the observed one
            is counted among them.
        relabelled: correlations after random relabellings of the late units.
    """

    correlation: float
    p: float
    relabelled: tuple[float, ...] = ()

    def record(self) -> Record:
        """The correlation beside those of relabelled units."""
        kept = "units keep their roles" if self.p <= 0.05 else "nothing shows that units keep their roles"
        text = f"{kept}: early and late weights correlate by {self.correlation:.3f}, p = {self.p:.2g}."
        ends = (*self.relabelled, self.correlation)
        low, high = min(ends), max(ends)
        reach = max(high - low, 0.02)
        edges = [low - 0.02 * reach + 1.04 * reach * place / _BINS for place in range(_BINS + 1)]
        figure = one_panel(
            "relabelled",
            "Would relabelled units agree as well?",
            text,
            "histogram",
            "correlation of early and late weights",
            "relabellings of units",
            series=(histogram("", self.relabelled, edges),),
            rules=(Rule("found", self.correlation, "vertical"),),
        )
        heads = (Column(""), Column("correlation"), Column("p"), Column("relabelled, mean"))
        mean = sum(self.relabelled) / len(self.relabelled) if self.relabelled else None
        line = cells_of("early and late", self.correlation, self.p, mean)
        table = Table("persistence", "Do units keep their roles?", heads, (line,))
        values = {"correlation": self.correlation, "p": self.p, "relabelled": self.relabelled}
        return result_record("persistence", "Persistence of roles along a chain", text, (table, figure), values=values)


_BINS = 40  # of a histogram


def persistence(draws: Tensor, *, permutations: int = 999, seed: int = 0) -> Persistence:
    """Compare early and late means of a chain's weights (members, units, *rest), units by units.

    The p-value is exact if early and late draws are independent of each other and units are alike; draws may remember
    their neighbours as long as they like within each part.

    >>> generator = torch.Generator().manual_seed(0)
    >>> noise, roles = torch.randn(100, 8, 5, generator=generator), torch.randn(8, 5, generator=generator)
    >>> kept, lost = persistence(noise + roles), persistence(noise)
    >>> kept.correlation > 0.9, kept.p, abs(lost.correlation) < 0.5, lost.p > 0.05
    (True, 0.001, True, True)

    Args:
        draws: one chain in its order.
        permutations: random relabellings.
        seed: of the relabellings.
    """
    if draws.dim() < 2 or len(draws) < 5 or draws.shape[1] < 2:
        raise InputError(f"expected at least 5 draws (members, units, ...) of 2 units, found {tuple(draws.shape)}")
    part = max(1, int(len(draws) * (1 - _APART) / 2))
    early, late = (_centred(draws[rows]) for rows in (slice(0, part), slice(len(draws) - part, None)))
    norm = float(early.norm() * late.norm())
    if norm == 0:
        return Persistence(0.0, 1.0, (0.0,) * permutations)
    # Entry (i, k): how well early unit i agrees with late unit k; a relabelling sums one entry of each row.
    agreement = early @ late.T / norm
    units = len(agreement)
    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(permutations, units, generator=generator).argsort(1)
    correlation = float(agreement.trace())
    relabelled = agreement[torch.arange(units), orders].sum(1)
    better = int((relabelled >= correlation - 1e-12).sum())
    return Persistence(correlation, (1 + better) / (1 + permutations), tuple(relabelled.tolist()))


def _centred(draws: Tensor) -> Tensor:
    """Means over draws, each weight less its mean over units: float64 (units, weights)."""
    means = draws.detach().double().mean(0).flatten(1).cpu()
    return means - means.mean(0)
