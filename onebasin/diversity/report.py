"""What is known about the diversity of a crowd, as a record and as text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from onebasin.diversity.spread import Spread
from onebasin.tables import table


@dataclass(frozen=True)
class Side:
    """One set of inputs.

    Attributes:
        examples: how many inputs.
        crowd: mutual information of all networks together in nats, mean over examples.
        pairs: mutual information of every pair.
        within: of pairs from one chain; None where chains are unknown or have one network each.
        between: of pairs from two chains.
    """

    examples: int
    crowd: float
    pairs: Spread
    within: Spread | None
    between: Spread | None


@dataclass(frozen=True)
class Pair:
    """Two networks that are close as functions.

    Attributes:
        first: number of a network in the crowd.
        second: number of the other.
        inside: their mutual information on the inside inputs.
        outside: the same on the outside inputs, if there are any.
        share: `inside` by the median over pairs.
        same_chain: whether they come from one chain; None if that is unknown.
    """

    first: int
    second: int
    inside: float
    outside: float | None
    share: float
    same_chain: bool | None


@dataclass(frozen=True)
class Collapse:
    """Networks that have become one function.

    Attributes:
        limit: pairs with an inside mutual information up to this have collapsed.
        pairs: number of such pairs.
        within: how many of them come from one chain; None where chains are unknown.
        functions: number of groups if collapsed pairs are joined: different functions in the crowd.
    """

    limit: float
    pairs: int
    within: int | None
    functions: int


@dataclass(frozen=True, eq=False)
class Diversity:
    """How much the networks of a crowd differ as functions. Mutual information is in nats.

    Attributes:
        networks: the networks that were compared, int64 (M,): numbers in the crowd.
        of: size of the crowd.
        inside: on the inputs that the networks were made for.
        outside: on foreign inputs, if there were any.
        pearson: correlation over pairs of inside and outside mutual information; None without outside inputs, or
            where one does not vary. Pairs share networks, so this is no test: M networks count, not M^2 / 2 pairs.
        spearman: the same of ranks.
        collapse: pairs of equal or nearly equal functions.
        closest: the closest pairs, ascending.
        matrix: mutual information of every pair on the inside inputs, float64 (M, M).
        outside_matrix: the same on the outside inputs.
        remarks: sentences about numbers that may mislead.
    """

    networks: Tensor
    of: int
    inside: Side
    outside: Side | None
    pearson: float | None
    spearman: float | None
    collapse: Collapse
    closest: tuple[Pair, ...]
    matrix: Tensor
    outside_matrix: Tensor | None
    remarks: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; without the matrices."""
        return {
            "networks": self.networks.tolist(),
            "of": self.of,
            "inside": _plain(self.inside),
            "outside": None if self.outside is None else _plain(self.outside),
            "pearson": self.pearson,
            "spearman": self.spearman,
            "collapse": asdict(self.collapse),
            "closest": [asdict(pair) for pair in self.closest],
            "remarks": list(self.remarks),
        }

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.record(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        """Tables for people."""
        count = len(self.networks)
        chosen = "" if count == self.of else f" chosen from {self.of:,}"
        lines = [f"{count:,} networks{chosen}, {self.inside.pairs.count:,} pairs; mutual information in nats", ""]
        head = ("", "pairs", "mean", "sd", "min", "5%", "median", "95%", "max")
        rows = _rows("inside", self.inside) + ([] if self.outside is None else _rows("outside", self.outside))
        lines += [table([head, *rows], rule=False), ""]
        lines += [f"all networks together: {self.inside.crowd:.4g} inside"]
        if self.outside is not None:
            lines[-1] += f", {self.outside.crowd:.4g} outside"
        if self.pearson is not None and self.spearman is not None:
            lines.append(f"inside and outside over pairs: correlation {self.pearson:.3f}, of ranks {self.spearman:.3f}")
        within = "" if self.collapse.within is None else f" ({self.collapse.within:,} within one chain)"
        lines += [
            f"collapsed pairs, up to {self.collapse.limit:.4g}: {self.collapse.pairs:,}{within}; "
            f"different functions: {self.collapse.functions:,}",
        ]
        if self.closest:
            titles = ("closest", "inside", "of median", "outside", "chain")
            lines += ["", table([titles, *map(_closest, self.closest)], rule=False)]
        lines += [line for said in self.remarks for line in ("", said)]
        return "\n".join(lines)


def _plain(side: Side) -> dict[str, Any]:
    found = asdict(side)
    for name in ("pairs", "within", "between"):
        if found[name] is not None:
            found[name]["quantiles"] = {f"{level:g}": value for level, value in found[name]["quantiles"].items()}
    return found


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
    outside = "" if pair.outside is None else f"{pair.outside:.4g}"
    chain = "" if pair.same_chain is None else ("same" if pair.same_chain else "other")
    return f"{pair.first} and {pair.second}", f"{pair.inside:.4g}", f"{pair.share:.3g}", outside, chain
