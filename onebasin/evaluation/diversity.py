"""The diversity of networks: mutual information of every pair, in distribution and out of it, with intervals.

M networks make M (M - 1) / 2 pairs, but only M things were drawn. So for intervals networks are drawn again, with
replacement, and a pair counts as often as both of its networks were drawn; pairs of a network with its own copy are
left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.evaluation.figures import joint_figure
from onebasin.functional import (
    AnyInputs,
    Inputs,
    OutputPart,
    answers,
    examples_in,
    inputs_of,
    measured_of,
    pieces,
    select_output,
)
from onebasin.metrics import mutual_information, pairwise_mutual_information, pearson, spearman
from onebasin.parallel import Executor, Progress, executor_for, progress_of
from onebasin.population import Population
from onebasin.posterior import (
    Networks,
    PredictOptions,
    check_classes,
    check_nan,
    first_of,
    networks_of,
    predict,
    stale_statistics,
)
from onebasin.reporting import (
    Axis,
    Cell,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Result,
    Series,
    Table,
    as_number,
    one_panel,
    result_record,
    table,
)

LEVELS = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
BINS = 40


@dataclass(frozen=True)
class PairStatistics:
    """The distribution of some numbers.

    Attributes:
        count: how many.
        mean: their mean.
        sd: their standard deviation, with divisor count - 1; 0 for a single one.
        quantiles: level -> value, from the smallest (0.0) over the median (0.5) to the largest (1.0).
        edges: borders of the bins of the histogram, ascending.
        counts: numbers in each bin, one fewer than edges; the last bin is closed.
    """

    count: int
    mean: float
    sd: float
    quantiles: dict[float, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor) -> PairStatistics | None:
        """The distribution of values (n,), None if there are none.

        >>> statistics = PairStatistics.of(torch.tensor([1.0, 2.0, 6.0]))
        >>> statistics.mean, statistics.quantiles[0.5], sum(statistics.counts)
        (3.0, 2.0, 3)
        """
        if not len(values):
            return None
        ordered = values.double().sort().values
        low, high = float(ordered[0]), float(ordered[-1])
        edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64) if high > low else ordered[[0, -1]]
        bins = (torch.searchsorted(edges, ordered.cpu(), right=True) - 1).clamp(0, len(edges) - 2)
        return cls(
            len(values),
            float(ordered.mean()),
            float(ordered.std()) if len(values) > 1 else 0.0,
            dict(zip(LEVELS, np.quantile(ordered.cpu().numpy(), LEVELS).tolist(), strict=True)),
            tuple(edges.tolist()),
            tuple(torch.bincount(bins, minlength=len(edges) - 1).tolist()),
        )


@dataclass(frozen=True, repr=False)
class Side(Result):
    """One set of inputs.

    Attributes:
        examples: how many inputs.
        population: mutual information of all networks together in nats, mean over examples.
        pairs: mutual information of every pair.
        within: of pairs from one chain; None where chains are unknown or have one network each.
        between: of pairs from two chains.
    """

    examples: int
    population: float
    pairs: PairStatistics
    within: PairStatistics | None
    between: PairStatistics | None

    def record(self) -> Record:
        """A table and a histogram of the mutual information of pairs."""
        answer = f"Two networks have {self.pairs.mean:.4g} nats on average, all together {self.population:.4g}."
        title = f"Mutual information of {self.pairs.count:,} pairs of networks on {self.examples:,} inputs"
        items = (_pairs_table({"all pairs": self}), _pairs_figure({"": self}, answer))
        return result_record("side", title, answer, items, values=json.loads(json.dumps(_plain(self))))


def _kinds(side: Side) -> dict[str, PairStatistics]:
    """All pairs, and those within and between chains where both exist."""
    if side.within is None or side.between is None:
        return {"": side.pairs}
    return {"": side.pairs, "within a chain": side.within, "between chains": side.between}


_PAIRS = (
    Column("pairs of networks"),
    Column("pairs", digits=0),
    *(Column(name, "mutual information in nats", digits=4) for name in
      ("mean", "sd", "min", "5 %", "median", "95 %", "max")),
)  # fmt: skip


def _pairs_table(sides: dict[str, Side]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (", ".join(filter(None, (name, kind))), Number(found.count), Number(found.mean), Number(found.sd),
         *(Number(found.quantiles[level]) for level in (0.0, 0.05, 0.5, 0.95, 1.0)))
        for name, side in sides.items() for kind, found in _kinds(side).items()
    )  # fmt: skip
    return Table("pairs", "Mutual information of pairs, in nats", _PAIRS, rows)


def _pairs_figure(sides: dict[str, Side], caption: str) -> Figure:
    panels = []
    for name, side in sides.items():
        kinds = _kinds(side)
        drawn = {kind: kinds[kind] for kind in kinds if kind or len(kinds) == 1}
        series = tuple(
            Series(kind, _widened(found.edges), tuple(count / found.count for count in found.counts))
            for kind, found in drawn.items()
        )
        panels.append(Panel("histogram", name, Axis("mutual information of a pair (nats)"), Axis("share of pairs"),
                            series))  # fmt: skip
    return Figure("pairs-histogram", "How much do two networks differ?", caption, tuple(panels))


def _widened(edges: tuple[float, ...]) -> tuple[float, ...]:
    """Edges of a histogram; a single bin without width gets one."""
    half = 0.1 * abs(edges[0]) or 0.1
    return (edges[0] - half, edges[-1] + half) if edges[0] == edges[-1] else edges


@dataclass(frozen=True)
class Pair:
    """Two networks that are close as functions.

    Attributes:
        first: number of a network in the population.
        second: number of the other.
        in_distribution: their mutual information on the inputs that the networks were made for.
        ood: the same on out-of-distribution inputs, if there are any.
        share: `in_distribution` by the median over pairs.
        same_chain: whether they come from one chain; None if that is unknown.
    """

    first: int
    second: int
    in_distribution: float
    ood: float | None
    share: float
    same_chain: bool | None


@dataclass(frozen=True)
class Collapse:
    """Networks that have become one function.

    Attributes:
        limit: pairs with a mutual information, in distribution, up to this have collapsed.
        pairs: number of such pairs.
        within: how many of them come from one chain; None where chains are unknown.
        functions: number of groups if collapsed pairs are joined: different functions in the population.
    """

    limit: float
    pairs: int
    within: int | None
    functions: int


@dataclass(frozen=True, eq=False, repr=False)
class Diversity(Result):
    """Mutual information of pairs of networks, in nats: how much they differ as functions.

    Attributes:
        networks: the networks that were compared, int64 (M,): numbers in the population.
        of: size of the population.
        in_distribution: on the inputs that the networks were made for.
        ood: on out-of-distribution inputs, if there were any.
        pearson: correlation over pairs of both mutual informations; None without out-of-distribution inputs, or where
            one does not vary. Pairs share networks, so this is no test: M networks count, not M^2 / 2 pairs.
        spearman: the same of ranks.
        collapse: pairs of equal or nearly equal functions.
        closest: the closest pairs, ascending.
        matrix: mutual information of every pair in distribution, float64 (M, M).
        ood_matrix: the same on out-of-distribution inputs.
        remarks: sentences about numbers that may mislead.
    """

    networks: Tensor
    of: int
    in_distribution: Side
    ood: Side | None
    pearson: float | None
    spearman: float | None
    collapse: Collapse
    closest: tuple[Pair, ...]
    matrix: Tensor
    ood_matrix: Tensor | None
    remarks: tuple[str, ...] = ()

    def record(self) -> Record:
        """Tables of pairs; their joint density in and out of distribution, and histograms, as figures."""
        sides = {"in distribution": self.in_distribution}
        sides |= {} if self.ood is None else {"out of distribution": self.ood}
        means = ", ".join(f"{side.pairs.mean:.4g} nats {name}" for name, side in sides.items())
        answer = (
            f"Two networks have a mutual information of {means} on average; {self.collapse.pairs:,} pairs are one "
            f"function, which leaves {self.collapse.functions:,} different ones."
        )
        figures = [_pairs_figure(sides, answer)]
        if self.ood_matrix is not None:
            first, second = torch.triu_indices(len(self.matrix), len(self.matrix), 1)
            near, far = self.matrix[first, second], self.ood_matrix[first, second]
            figures.insert(0, joint_figure(near, far, self.pearson))
        chosen = "" if len(self.networks) == self.of else f" chosen from {self.of:,}"
        tables = [_pairs_table(sides)]
        if self.closest:
            rows = tuple(
                (f"{pair.first} and {pair.second}", Number(pair.in_distribution), Number(pair.share),
                 as_number(pair.ood),
                 None if pair.same_chain is None else ("same" if pair.same_chain else "other"))
                for pair in self.closest
            )  # fmt: skip
            tables.append(Table("closest", "Networks that are closest as functions", _CLOSEST, rows))
        return result_record(
            "diversity",
            f"Diversity of {len(self.networks):,} networks{chosen}",
            (answer, *self.remarks),
            (*tables, *figures),
            values=json.loads(self.to_json()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; without the matrices. Keys are older than the attributes: inside, outside."""
        closest = [asdict(pair) for pair in self.closest]
        for pair in closest:
            pair["inside"], pair["outside"] = pair.pop("in_distribution"), pair.pop("ood")
        return {
            "networks": self.networks.tolist(),
            "of": self.of,
            "inside": _plain(self.in_distribution),
            "outside": None if self.ood is None else _plain(self.ood),
            "pearson": self.pearson,
            "spearman": self.spearman,
            "collapse": asdict(self.collapse),
            "closest": closest,
            "remarks": list(self.remarks),
        }

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        """Tables for people."""
        count = len(self.networks)
        chosen = "" if count == self.of else f" chosen from {self.of:,}"
        lines = [
            f"{count:,} networks{chosen}, {self.in_distribution.pairs.count:,} pairs; mutual information in nats",
            "",
        ]
        head = ("", "pairs", "mean", "sd", "min", "5%", "median", "95%", "max")
        rows = _rows("in distribution", self.in_distribution) + ([] if self.ood is None else _rows("ood", self.ood))
        lines += [table([head, *rows], rule=False), ""]
        lines += [f"all networks together: {self.in_distribution.population:.4g} in distribution"]
        if self.ood is not None:
            lines[-1] += f", {self.ood.population:.4g} ood"
        if self.pearson is not None and self.spearman is not None:
            both = f"correlation {self.pearson:.3f}, of ranks {self.spearman:.3f}"
            lines.append(f"in distribution and ood over pairs: {both}")
        within = "" if self.collapse.within is None else f" ({self.collapse.within:,} within one chain)"
        lines += [
            f"collapsed pairs, up to {self.collapse.limit:.4g}: {self.collapse.pairs:,}{within}; "
            f"different functions: {self.collapse.functions:,}",
        ]
        if self.closest:
            titles = ("closest", "in distribution", "of median", "ood", "chain")
            lines += ["", table([titles, *map(_closest, self.closest)], rule=False)]
        lines += [line for said in self.remarks for line in ("", said)]
        return "\n".join(lines)


_CLOSEST = (
    Column("networks"),
    Column("in distribution", "mutual information in nats", digits=4),
    Column("of median", "the same by the median over pairs"),
    Column("out of distribution", "mutual information in nats", digits=4),
    Column("chain"),
)


def _plain(side: Side) -> dict[str, Any]:
    plain = asdict(side)
    for name in ("pairs", "within", "between"):
        if plain[name] is not None:
            plain[name]["quantiles"] = {f"{level:g}": value for level, value in plain[name]["quantiles"].items()}
    return plain


def _rows(name: str, side: Side) -> list[tuple[str, ...]]:
    spreads = {name: side.pairs}
    if side.within is not None and side.between is not None:
        spreads |= {"  within a chain": side.within, "  between chains": side.between}
    return [
        (
            title,
            f"{spread.count:,}",
            *(f"{value:.4g}" for value in (spread.mean, spread.sd)),
            *(f"{spread.quantiles[level]:.4g}" for level in (0.0, 0.05, 0.5, 0.95, 1.0)),
        )
        for title, spread in spreads.items()
    ]


def _closest(pair: Pair) -> tuple[str, ...]:
    ood = "" if pair.ood is None else f"{pair.ood:.4g}"
    chain = "" if pair.same_chain is None else ("same" if pair.same_chain else "other")
    return f"{pair.first} and {pair.second}", f"{pair.in_distribution:.4g}", f"{pair.share:.3g}", ood, chain


NOISE = 1e-9  # nats: less than this is rounding


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs i < j of M networks.

    Attributes:
        first: i, int64 (pairs,).
        second: j, int64 (pairs,).
        same: 1 if both come from one chain, 0 if not, -1 if that is unknown, int64 (pairs,).
    """

    first: Tensor
    second: Tensor
    same: Tensor

    @classmethod
    def of(cls, count: int, chain: Tensor | None) -> Pairs:
        """The pairs of `count` networks with chains (count,), -1 or None where they are unknown."""
        first, second = torch.triu_indices(count, count, 1)
        chain = torch.full((count,), -1) if chain is None else chain
        known = (chain[first] >= 0) & (chain[second] >= 0)
        return cls(first, second, torch.where(known, (chain[first] == chain[second]).long(), -1))

    def values(self, matrix: Tensor) -> Tensor:
        """The entries (pairs,) of a symmetric matrix (M, M)."""
        return matrix[self.first, self.second]

    def side(self, matrix: Tensor, examples: int, population: float) -> Side:
        """The distribution of mutual information (M, M) over pairs, by chains."""
        values = self.values(matrix)
        whole = PairStatistics.of(values)
        assert whole is not None  # there are at least two networks
        return Side(
            examples,
            population,
            whole,
            PairStatistics.of(values[self.same == 1]),
            PairStatistics.of(values[self.same == 0]),
        )

    def collapse(self, matrix: Tensor, threshold: float) -> Collapse:
        """The pairs whose entries are at most this share of the median, or rounding."""
        from scipy.sparse.csgraph import connected_components

        values = self.values(matrix)
        limit = max(threshold * float(np.median(values.cpu().numpy())), NOISE)
        below = values <= limit
        known = bool((self.same >= 0).any())
        groups, _ = connected_components((matrix <= limit).numpy(), directed=False)
        within = int((below & (self.same == 1)).sum()) if known else None
        return Collapse(limit, int(below.sum()), within, int(groups))

    def closest(self, matrix: Tensor, ood: Tensor | None, networks: Tensor, count: int) -> tuple[Pair, ...]:
        """The pairs with the smallest entries, ascending, with the numbers of `networks` in the population."""
        values = self.values(matrix)
        middle = float(np.median(values.cpu().numpy()))
        order = values.argsort(stable=True)[:count].tolist()
        return tuple(
            Pair(
                int(networks[self.first[place]]),
                int(networks[self.second[place]]),
                float(values[place]),
                None if ood is None else float(ood[self.first[place], self.second[place]]),
                float(values[place]) / middle if middle > 0 else 0.0,
                None if self.same[place] < 0 else bool(self.same[place]),
            )
            for place in order
        )


class _Resampled(NamedTuple):
    value: float
    error: float
    low: float
    high: float


class Resampled(Result, _Resampled):
    """A number, its standard error and the ends of its percentile interval over drawings of networks."""

    def record(self) -> Record:
        """A table of one row, and the number with its interval."""
        title = "A number over pairs of networks"
        text = f"{self.value:.4g} ± {self.error:.2g}, with an interval from {self.low:.4g} to {self.high:.4g}."
        columns = (Column(""), *(Column(name, digits=4) for name in ("value", "standard error", "low", "high")))
        point = Series("", (0.0,), (self.value,), (self.low,), (self.high,))
        items = (
            Table("numbers", title, columns, (("over pairs", *map(as_number, self)),)),
            one_panel(
                "interval",
                title,
                text,
                "points",
                Axis("", low=-1, high=1, names=("over pairs",)),
                "value",
                series=(point,),
            ),
        )
        return result_record("resampled", title, text, items, values=self._asdict())


def mean_of_pairs(
    matrix: Tensor, generator: torch.Generator, *, n_resamples: int = 1000, confidence_level: float = 0.95
) -> Resampled:
    """Mean over pairs of a symmetric matrix (M, M), whose diagonal does not count.

    >>> tuple(mean_of_pairs(1 - torch.eye(5), torch.Generator(), n_resamples=10))
    (1.0, 0.0, 1.0, 1.0)
    """
    return _resampled((_pairs_only(matrix),), _mean, generator, n_resamples, confidence_level)


def correlation_of_pairs(
    first: Tensor,
    second: Tensor,
    generator: torch.Generator,
    *,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
) -> Resampled:
    """Pearson's correlation over pairs of two symmetric matrices (M, M) about the same networks.

    Args:
        first: one number for each pair.
        second: another.
        generator: random numbers of the resamples.
        n_resamples: times that the networks are drawn again.
        confidence_level: confidence level of the interval.
    """
    if first.shape != second.shape:
        raise InputError(
            f"expected two matrices about the same networks, found {tuple(first.shape)} and {tuple(second.shape)}: "
            "give both for all of them"
        )
    matrices = (_pairs_only(first), _pairs_only(second))
    return _resampled(matrices, _correlation, generator, n_resamples, confidence_level)


def _pairs_only(matrix: Tensor) -> Tensor:
    """In float64, with a diagonal of 0."""
    return matrix.double().cpu().clone().fill_diagonal_(0)


def _sums(counts: Tensor, matrix: Tensor) -> Tensor:
    """Sum over pairs, each as often as both networks were drawn: c' A c, (draws,)."""
    return ((counts @ matrix) * counts).sum(1)


def _pairs(counts: Tensor) -> Tensor:
    """Pairs of two different networks in each drawing, in both orders (draws,)."""
    return counts.sum(1).square() - counts.square().sum(1)


def _mean(counts: Tensor, matrix: Tensor) -> Tensor:
    return _sums(counts, matrix) / _pairs(counts)


def _correlation(counts: Tensor, first: Tensor, second: Tensor) -> Tensor:
    size = len(first)
    ones = 1 - torch.eye(size, dtype=first.dtype)
    a, b = (matrix - ones * matrix.sum() / (size * (size - 1)) for matrix in (first, second))
    x, y = _mean(counts, a), _mean(counts, b)
    both = _mean(counts, a * b) - x * y
    return both / ((_mean(counts, a * a) - x * x) * (_mean(counts, b * b) - y * y)).clamp(min=0).sqrt()


def _resampled(
    matrices: tuple[Tensor, ...],
    statistic: Callable[..., Tensor],
    generator: torch.Generator,
    n_resamples: int,
    confidence_level: float,
) -> Resampled:
    size = len(matrices[0])
    if size < 3:
        raise InputError(f"expected at least 3 networks to draw from, found {size}: add members")
    chosen = torch.randint(size, (n_resamples, size), generator=generator)
    counts = torch.zeros(n_resamples, size, dtype=torch.float64).scatter_add_(
        1, chosen, torch.ones(n_resamples, size, dtype=torch.float64)
    )
    value = float(statistic(torch.ones(1, size, dtype=torch.float64), *matrices))
    values = statistic(counts, *matrices)
    values = values[values.isfinite()]
    ends = torch.tensor([(1 - confidence_level) / 2, (1 + confidence_level) / 2], dtype=values.dtype)
    low, high = torch.quantile(values, ends).tolist()
    return Resampled(value, float(values.std()), low, high)


HELD = 256 << 20  # bytes of probabilities in memory: inputs are cut into pieces that give as many
SLICE = 1 << 24  # probabilities of all networks for some examples: what one worker looks at
_CELLS = 1 << 22  # probabilities that are looked at in float64 at a time


def diversity(
    model: nn.Module,
    networks: Networks,
    inputs: AnyInputs,
    *,
    output: OutputPart = None,
    ood: AnyInputs = None,
    members: int = 1000,
    threshold: float = 0.1,
    closest: int = 10,
    draws: int = 100,
    statistics: AnyInputs = None,
    seed: int = 0,
    chunk: int | None = None,
    batch: int | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Diversity:
    """Compare every pair of networks as functions, by the mutual information H((p + q) / 2) - (H(p) + H(q)) / 2.

    >>> population = Population.from_stacked({"weight": torch.tensor([[[9e9], [0.0]], [[0.0], [9e9]], [[0.0], [9e9]]])})
    >>> result = diversity(nn.Linear(1, 2, bias=False), population, torch.tensor([[1.0]]))
    >>> result.matrix[0].tolist(), result.collapse.functions  # log 2 for networks that contradict each other
    ([0.0, 0.6931..., 0.6931...], 2)

    Args:
        model: the function of a classifier; left exactly as it was.
        networks: a Population, whose `chain` says which networks belong together; or a Posterior that is drawn from,
            with its components as chains.
        inputs: inputs like those the networks were made for, as in `predict`.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        ood: out-of-distribution inputs.
        members: largest number of networks that are compared. Of a larger Population so many are chosen at random by
            `seed`; a Posterior gives as many as `draws` says.
        threshold: pairs whose mutual information on `inputs` is at most this share of the median have collapsed
            into one function.
        closest: how many of the closest pairs are listed.
        draws: networks drawn from a Posterior.
        statistics: inputs on which running statistics of norms are measured for each draw, as in `predict`.
        seed: seed of the draws and of the choice.
        chunk: networks in one pass, as in `predict`.
        batch: examples in one pass, as in `predict`.
        progress: True for a line on stderr with the time left, or a function that is called with (networks done,
            networks in all, "networks") in each pass over the networks.
        workers: processes; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Raises:
        InputError: there are fewer than two networks or two classes, or an option makes no sense.
    """
    model = select_output(model, output)
    inputs, ood, statistics = inputs_of(inputs, model), measured_of(ood, model), measured_of(statistics, model)
    if members < 2 or threshold < 0 or closest < 0:
        raise InputError(
            f"expected members >= 2, threshold >= 0 and closest >= 0, found {members}, {threshold} and {closest}: "
            "correct them"
        )
    numbers, networks, of = _chosen(networks, members, draws, seed)
    options = PredictOptions(
        draws=draws, seed=seed, statistics=statistics, chunk=chunk, batch=batch, progress=progress_of(progress)
    )
    options, notes = stale_statistics(model, networks, inputs, options)
    pairs = Pairs.of(len(numbers), networks_of(networks, len(numbers), seed).chain)
    ood_matrix: Tensor | None = None
    with executor_for(workers, executor) as opened:
        options = replace(options, executor=opened)
        matrix, whole = _information(model, networks, inputs, options, opened)
        if ood is not None:
            ood_matrix, ood_whole = _information(model, networks, ood, options, opened)
    side, other = pairs.side(matrix, examples_in(inputs), whole), None
    correlations: tuple[float | None, float | None] = None, None
    if ood is not None and ood_matrix is not None:
        other = pairs.side(ood_matrix, examples_in(ood), ood_whole)
        here, there = pairs.values(matrix), pairs.values(ood_matrix)
        correlations = pearson(here, there), spearman(here, there)
    collapse, listed = pairs.collapse(matrix, threshold), pairs.closest(matrix, ood_matrix, numbers, closest)
    return Diversity(numbers, of, side, other, *correlations, collapse, listed, matrix, ood_matrix, notes)


def _chosen(networks: Networks, members: int, draws: int, seed: int) -> tuple[Tensor, Networks, int]:
    """Numbers of the networks to compare, these networks, and how many there were to choose from."""
    count = len(networks_of(networks, draws, seed))
    numbers = torch.arange(count)
    if isinstance(networks, Population) and count > members:
        numbers = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:members].sort().values
        networks = networks[numbers]
    if len(numbers) < 2:
        raise InputError(f"expected at least 2 networks to compare, found {len(numbers)}: add members")
    return numbers, networks, count


def _information(
    model: nn.Module, networks: Networks, inputs: Inputs, options: PredictOptions, executor: Executor
) -> tuple[Tensor, float]:
    """Mutual information of every pair, float64 (M, M), and of all networks together; means over examples."""
    total, whole, examples = torch.zeros(()), 0.0, 0
    members = options.networks(networks)
    answer = answers(model, first_of(members), inputs)
    for piece in pieces(answer, len(members), inputs, HELD):
        predicted = _probabilities(model, networks, piece, options)
        probabilities = predicted.movedim(2, -1).flatten(1, -2)  # places of a network that speaks about many
        step = max(1, SLICE // probabilities[:, 0].numel())
        slices = (part.contiguous() for part in probabilities.split(step, dim=1))
        for matrix, together in executor.map(_compared, slices, shared=None):
            total, whole = total + matrix, whole + together
        examples += probabilities.shape[1]
    return total / examples, whole / examples


def _compared(shared: None, probabilities: Tensor) -> tuple[Tensor, float]:
    """Mutual information of every pair (M, M) and of all networks (M, examples, classes), summed over examples."""
    matrix = probabilities.shape[1] * pairwise_mutual_information(probabilities).cpu()
    step = max(1, _CELLS // probabilities[:, 0].numel())
    return matrix, sum(float(mutual_information(part).sum()) for part in probabilities.split(step, dim=1))


def _probabilities(model: nn.Module, networks: Networks, inputs: Inputs, options: PredictOptions) -> Tensor:
    """Probabilities of networks; for half precision in float32, because rounded probabilities do not sum to 1."""
    given = {option.name: getattr(options, option.name) for option in fields(options)}
    scores = predict(model, networks, inputs, quantity="logits", **given)
    check_classes(scores)
    probabilities = scores.softmax(2) if scores.dtype.itemsize >= 4 else scores.softmax(2, dtype=torch.float32)
    check_nan(probabilities, 0)
    return probabilities
