"""Tables and figures of a population: what it holds, its weights, the norm of each network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onebasin.population.writer import block_members
from onebasin.reporting import (
    Axis,
    Column,
    Figure,
    Number,
    Record,
    Series,
    Table,
    counted,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State, dtype_name, trained_parameters

if TYPE_CHECKING:
    from onebasin.population.population import Population

MEMBERS = 500  # networks that a figure reads, at most
_OVERLAID, _TENSORS = 3, 12  # tensors of a histogram, whose outlines would hide each other, and rows of a map instead
_BINS, _WIDE = 48, 4.5  # bins of both, and their reach in standard deviations
_LEGEND, _WRITTEN = 12, 24  # chains with a name in the legend, and points that have a short name


def population_record(population: Population, content: str, *, figures: bool = True) -> Record:
    """The record of a population; without figures no weight is read.

    Args:
        population: the networks.
        content: what a network is made of, in one line.
        figures: draw weights and norms of at most `MEMBERS` networks, fewer where they are large.
    """
    spec = population.spec
    tensors = largest_first(spec.items(), lambda item: item[1].size)
    rows = tuple(
        (name, " x ".join(map(str, one.shape)) or "scalar", dtype_name(one.dtype), Number(one.size))
        for name, one in tensors
    )
    heads = (Column("tensor"), Column("shape"), Column("dtype"), Column("numbers", "in one network", digits=0))
    items: list[Table | Figure] = [Table("tensors", "What does each network hold?", heads, rows)]
    chains = dict[int, int]()
    text = "The networks carry no chain numbers."
    if population.chain is not None:
        numbers, counts = population.chain.unique(return_counts=True)
        chains = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        known = {chain: count for chain, count in chains.items() if chain >= 0}
        shortest, longest = min(known.values(), default=0), max(known.values(), default=0)
        lengths = f"{shortest:,} to " if shortest < longest else ""
        text = f"{counted(len(known), 'chain')} of {lengths}{counted(longest, 'network')}."
        table = tuple(
            (chain_name(chain), Number(count)) for chain, count in largest_first(chains.items(), lambda item: item[1])
        )
        items.append(Table("chains", "Which chains are there?", (Column("chain"), Column("networks", digits=0)), table))
    if figures and len(population):
        items += _figures(population)
    return result_record(
        "population",
        population_title(len(population)),
        (f"{content[:1].upper()}{content[1:]}. {text}", *_notes(population)),
        items,
        values={
            "members": len(population),
            "chains": chains,
            "tensors": {name: {"shape": list(one.shape), "dtype": dtype_name(one.dtype)} for name, one in spec.items()},
            "where": population.where,
            "provenance": dict(population.provenance),
        },
    )


def population_title(members: int) -> str:
    """The title of a population, here and in its one line."""
    return f"Population of {counted(members, 'network')}"


def _notes(population: Population) -> tuple[str, ...]:
    """What the sampler's diagnostics say in words, such as that the training was not finished."""
    told = population.provenance.get("diagnostics")
    notes = told.get("notes") if isinstance(told, Mapping) else None
    if not isinstance(notes, Sequence) or isinstance(notes, str):
        return ()
    return tuple(f"Note: {text}" for text in notes if isinstance(text, str))


def _figures(population: Population) -> Iterator[Figure]:
    """Weights by tensor and the norm of each network, of networks that are spread evenly over the population."""
    names = [name for name in trained_parameters(population.spec) if population.spec[name].size]
    if not names:
        return
    count = min(len(population), MEMBERS, block_members(population.spec))
    rows = torch.linspace(0, len(population) - 1, count, dtype=torch.float64).round().long()
    part = population[rows].select(*names)
    block = {name: _wide(value) for name, value in part.stacked().items()}
    what = f"{count:,} of {len(population):,} networks, evenly spread" if count < len(population) else "all networks"
    series, spread = _histograms(block)
    caption = f"Weights of {what}, by tensor; their root mean square is {spread:.3g}." + (
        f" The {_TENSORS} largest of {len(names)} tensors." if len(names) > _TENSORS else ""
    )
    title, share = "How are the weights distributed?", "share of the weights"
    if len(series) <= _OVERLAID:
        yield one_panel("weights", title, caption, "histogram", "weight", share, series=series)
    else:
        edges = series[0].x
        yield one_panel(
            "weights",
            title,
            f"{caption} A row for each tensor, from 0 to its fullest bin.",
            "heat",
            "weight",
            Axis("", names=tuple(one.name for one in series)),
            grid=tuple(_beside_largest(one.y) for one in series),
            columns=tuple((low + high) / 2 for low, high in pairwise(edges)),
            rows=tuple(map(float, range(len(series)))),
            colour=Axis("share, of that in the fullest bin", low=0.0),
        )
    norms = torch.stack([value.square().flatten(1).sum(1).cpu() for value in block.values()]).sum(0).sqrt()
    finite = norms.isfinite()
    yield one_panel(
        "norms",
        "Are the networks equally large?",
        f"Euclidean norm of all weights of {what}"
        + (f": {float(norms[finite].min()):.4g} to {float(norms[finite].max()):.4g}." if bool(finite.any()) else "."),
        "points",
        "network, in the order of the population",
        "norm of its weights",
        series=chain_series(rows.tolist(), part.chain, rows.double(), norms),
    )


def _wide(value: Tensor) -> Tensor:
    return (value.abs() if value.is_complex() else value).double()


def _histograms(block: State) -> tuple[tuple[Series, ...], float]:
    """Shares of the weights of the largest tensors in bins of their own common range, and the root mean square."""
    values = [(name, value[value.isfinite()]) for name, value in block.items()]
    shown = largest_first(values, lambda item: item[1].numel(), _TENSORS)[:_TENSORS]
    spread = float(torch.cat([value for _, value in values]).square().mean().sqrt()) if values else 0.0
    ends = [(float(value.min()), float(value.max())) for _, value in shown if value.numel()]
    reach = _WIDE * max((float(value.square().mean().sqrt()) for _, value in shown if value.numel()), default=1.0)
    low = max(min((low for low, _ in ends), default=-1.0), -reach)
    high = min(max((high for _, high in ends), default=1.0), reach)
    low, high = (low, high) if low < high else (low - 0.5, low + 0.5)
    edges = tuple((low + (high - low) * torch.arange(_BINS + 1, dtype=torch.float64) / _BINS).tolist())
    series = tuple(
        Series(name, edges, tuple((value.cpu().histc(_BINS, low, high) / max(1, value.numel())).tolist()))
        for name, value in shown
    )
    return series, spread


def _beside_largest(shares: Sequence[float | None]) -> tuple[float, ...]:
    """Shares as parts of the largest one."""
    known = [share or 0.0 for share in shares]
    largest = max(known) or 1.0
    return tuple(share / largest for share in known)


def chain_name(chain: int) -> str:
    """A chain by its number; below zero nothing is known."""
    return f"chain {chain}" if chain >= 0 else "chain unknown"


def chain_series(members: Sequence[int], chain: Tensor | None, x: Tensor, y: Tensor) -> tuple[Series, ...]:
    """Points of networks, a series with a colour of its own for each chain; values that are not finite leave gaps.

    Args:
        members: number of each network, for its label.
        chain: chain of each network, or None.
        x: places (networks,), finite.
        y: values (networks,).
    """
    numbers = [0] * len(members) if chain is None else chain.tolist()
    chains = list(dict.fromkeys(numbers))
    few = len(members) <= _WRITTEN
    series = []
    for shade, one in enumerate(chains):
        rows = [row for row, number in enumerate(numbers) if number == one]
        of = "" if chain is None else f", {chain_name(one)}"
        series.append(
            Series(
                "" if chain is None or len(chains) > _LEGEND else chain_name(one),
                tuple(float(x[row]) for row in rows),
                tuple(float(y[row]) if bool(y[row].isfinite()) else None for row in rows),
                shade=shade,
                labels=tuple(f"{members[row]}" if few else f"network {members[row]}{of}" for row in rows),
            )
        )
    return tuple(series)
