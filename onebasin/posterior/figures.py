"""Tables and figures of posteriors: spread of all weights, of each tensor, and one tensor as a map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.posterior.layout import FlatLayout
from onebasin.reporting import (
    SHOWN,
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
    histogram,
    largest_first,
    one_panel,
    result_record,
)

_BINS = 50
CELLS = 200  # of a map, along each axis
_LEVELS = (0.05, 0.5, 0.95)
_SPREADS = (
    Column("tensor"),
    Column("weights", digits=0),
    Column("size of mean", "root of the mean square of the means", digits=4),
    Column("sigma 5 %", "quantile of the standard deviations", digits=4),
    Column("sigma median", "quantile of the standard deviations", digits=4),
    Column("sigma 95 %", "quantile of the standard deviations", digits=4),
)


def quantiles(values: Tensor, levels: Iterable[float] = _LEVELS) -> list[float]:
    """Quantiles of a tensor of any size."""
    found: list[float] = np.quantile(values.double().cpu().numpy(), list(levels)).tolist()
    return found


@dataclass(frozen=True, eq=False)
class Spread:
    """Means and standard deviations of the weights of a posterior, as vectors (D,)."""

    layout: FlatLayout
    mean: Tensor
    std: Tensor

    def tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and standard deviation of each tensor."""
        parts = zip(self.mean.split(self.layout.sizes), self.std.split(self.layout.sizes), strict=True)
        return dict(zip(self.layout.names, parts, strict=True))

    def table(self) -> Table:
        """A row for each tensor, and one for all."""
        every = self.tensors()
        names = largest_first(every, lambda name: every[name][0].numel())
        parts = {"all": (self.mean, self.std), **{name: every[name] for name in names}}
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (
                name,
                Number(mean.numel()),
                as_number(float(mean.square().mean().sqrt())),
                *map(as_number, quantiles(std)),
            )
            for name, (mean, std) in parts.items()
        )
        return Table("tensors", "Means and standard deviations of each tensor", _SPREADS, rows)

    def histogram(self, before: Spread | None) -> Figure:
        """Standard deviations of all weights, and those before alignment."""
        sides = {"before alignment": before, "aligned": self} if before is not None else {"": self}
        stds = {name: side.std[side.std > 0].double().cpu().numpy() for name, side in sides.items() if side is not None}
        positive = [part for part in stds.values() if len(part)]
        ends = (min(map(np.min, positive)), max(map(np.max, positive))) if positive else (0.5, 2.0)
        low, high = (ends[0] / 1.1, ends[1] * 1.1) if ends[0] < ends[1] else (ends[0] / 2, ends[1] * 2)
        edges = np.geomspace(low, high, _BINS + 1).tolist()
        series = tuple(histogram(name, part, edges) for name, part in stds.items())
        middle = " and ".join(f"{np.median(part):.4g}{f' {name}' if name else ''}" for name, part in stds.items()
                              if len(part))  # fmt: skip
        still = int((self.std == 0).sum())
        without = f" {still:,} weights have none and are left out." if still else ""
        return one_panel(
            "sigma", "How sure is the posterior of its weights?", f"The median sigma is {middle or 'zero'}.{without}",
            "histogram", Axis("standard deviation of a weight", scale="log"), "weights", series=series,
        )  # fmt: skip

    def layers(self, before: Spread | None) -> Figure:
        """Median and 5 to 95 % of the standard deviations of each tensor, in the order of the network."""
        names = self.layout.names
        few = len(names) <= SHOWN
        sides = {"before alignment": before, "aligned": self} if before is not None else {"": self}
        series = []
        for title, side in sides.items():
            if side is not None:
                known = side.tensors()
                rows = [quantiles(known[name][1]) if name in known else None for name in names]
                low, middle, high = (tuple(None if row is None else row[place] for row in rows) for place in range(3))
                series.append(Series(title, tuple(range(len(names))), middle, low, high))
        axis = Axis("", names=names) if few else Axis("number of the tensor, in the order of the network")
        kind = "bars" if few else "lines"
        return one_panel(
            "layers", "Which tensors are uncertain?",
            "Median of sigma, and the range from its 5 % to its 95 % quantile.",
            kind, axis, Axis("standard deviation", scale="log"), series=tuple(series),
        )  # fmt: skip


def refined_items(provenance: Mapping[str, Any]) -> tuple[list[str], list[Table | Figure]]:
    """Sentences, tables and figures about how a posterior was refined; nothing where it was not."""
    texts: list[str] = []
    items: list[Table | Figure] = []
    for form, facts in ((form, provenance.get(form)) for form in ("refined", "scaled")):
        if not isinstance(facts, Mapping) or "distance" not in facts:
            continue
        texts.append(
            f"It was {form} in {facts.get('steps', 0):,} steps to predict what {facts.get('networks', 0):,} networks "
            f"predict: widths are {facts.get('narrowing', math.nan):.3g} times those of the fit (median), and a "
            f"distance of {facts['distance']:.4g} is left."
        )
        if fidelities := facts.get("fidelity"):
            note = draws_note(facts.get("fidelity_draws"), facts.get("fidelity_seed"))
            items.append(
                fidelity_table(fidelities, name=f"{form}-fidelity", note=f"On the inputs of the descent. {note}")
            )
        if descent := facts.get("descent"):
            line = Series("", tuple(map(float, descent["steps"])), tuple(descent["distances"]))
            items.append(one_panel(f"{form}-descent", "Has the descent ended?", texts[-1], "lines", "step",
                                Axis("distance of the predictions", scale="log"), series=(line,)))  # fmt: skip
    return texts, items


_FIDELITY = (
    Column("on"),
    Column("examples", digits=0),
    Column("agreement", "share of the inputs with the same most probable class", "higher", 4),
    Column("total variation", "mean over inputs of half the sum of differences of probabilities", "lower", 4),
    Column("rms difference", "of the average values", "lower", 4),
    Column("a single network", "agreement, or rms difference, of one network with the average of all", digits=4),
    Column("verdict"),
)


def draws_note(draws: int | None, seed: int | None) -> str:
    """The sentence that says which draws a comparison used; "" where that is not known."""
    return "" if draws is None else f"The average of {draws:,} draws of the posterior, with seed {seed}."


def fidelity_table(found: Mapping[str, Mapping[str, Any]], name: str = "fidelity", note: str = "") -> Table:
    """A row for each kind of inputs, out of plain numbers."""
    keys = ("agreement", "total_variation", "rms_difference", "single")
    rows = tuple(
        (kind, Number(own["examples"]), *(as_number(own[key]) for key in keys),
         "a single network is closer" if own["low"] else "close enough")
        for kind, own in found.items()
    )  # fmt: skip
    return Table(name, "The posterior against all networks", _FIDELITY, rows, note=note.strip(), rivals=False)


@dataclass(frozen=True, eq=False, repr=False)
class LayerMap(Result):
    """Mean and standard deviation of one tensor of a posterior, as a map.

    Attributes:
        name: of the tensor.
        mean: in its shape, float64.
        std: in its shape, float64.
    """

    name: str
    mean: Tensor
    std: Tensor

    @property
    def grids(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as matrices of at most 200 x 200 cells, each the average of its weights."""
        return _averaged(_matrix(self.mean)), _averaged(_matrix(self.std))

    def record(self) -> Record:
        """A table of quantiles, and two heat maps."""
        shape = " x ".join(map(str, self.mean.shape)) or "1"
        grids, whole = self.grids, _matrix(self.mean).shape
        sure = (self.mean.abs() > 2 * self.std).double().mean()
        answer = (
            f"Of {self.mean.numel():,} weights {float(sure):.1%} are further from zero than two standard deviations; "
            f"the median sigma is {quantiles(self.std)[1]:.4g}."
        )
        cut = tuple(grids[0].shape) != tuple(whole)
        said = (
            f"The {whole[0]:,} x {whole[1]:,} weights are averaged to {len(grids[0])} x {grids[0].shape[1]} cells."
            if cut
            else "Each cell is one weight."
        )
        levels = (0.0, 0.05, 0.5, 0.95, 1.0)
        ratio = (self.mean.abs() / self.std)[self.std > 0]
        kinds = {"mean": self.mean, "sigma": self.std, "|mean| / sigma": ratio}
        columns = (Column("of its weights"), *(Column(title, digits=4) for title in
                                               ("smallest", "5 %", "median", "95 %", "largest")))  # fmt: skip
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (title, *map(as_number, quantiles(values, levels))) for title, values in kinds.items() if values.numel()
        )
        return result_record(
            "layer-map",
            f"{self.name}, {shape}: mean and standard deviation",
            (answer, said),
            (
                Table("quantiles", "Quantiles over its weights", columns, rows),
                Figure("map", "What does this layer hold?", f"{answer} {said}", self._panels()),
            ),
            values={"name": self.name, "shape": list(self.mean.shape), "cells": list(grids[0].shape),
                    "mean": grids[0].tolist(), "std": grids[1].tolist()},
        )  # fmt: skip

    def _panels(self) -> tuple[Panel, ...]:
        """Two heat maps; of a vector its means with their standard deviations."""
        grids, (tall, wide) = self.grids, _matrix(self.mean).shape
        columns, rows = _places(wide, grids[0].shape[1]), _places(tall, len(grids[0]))
        if self.mean.dim() < 2:
            mean, low, high = (tuple((grids[0] + side * grids[1])[0].tolist()) for side in (0, -1, 1))
            points = Series("mean ± standard deviation", columns, mean, low, high)
            return (Panel("points", "", Axis("unit"), Axis("weight"), (points,)),)
        across = Axis("all further axes, one after another" if self.mean.dim() > 2 else "second axis: inputs")
        most = float(grids[0].abs().max())
        scales = (Axis("mean", low=-most, high=most), Axis("standard deviation", low=0.0))
        return tuple(
            Panel("heat", scale.label, across, Axis("first axis: units"), grid=_rows(grid), columns=columns, rows=rows,
                  colour=scale)
            for grid, scale in zip(grids, scales, strict=True)
        )  # fmt: skip


def _matrix(value: Tensor) -> Tensor:
    """A tensor as a matrix: first axis by all others; a vector is one row."""
    return value.reshape(1, -1) if value.dim() < 2 else value.flatten(1)


def _averaged(matrix: Tensor) -> Tensor:
    """A matrix of at most 200 x 200 cells, each the mean of the entries in it.

    >>> _averaged(torch.arange(400.0)[None])[0, :2]
    tensor([0.5000, 2.5000], dtype=torch.float64)
    """
    rows, columns = (min(size, CELLS) for size in matrix.shape)
    averaged: Tensor = torch.nn.functional.adaptive_avg_pool2d(matrix.double().cpu()[None], (rows, columns))[0]
    return averaged


def _places(size: int, cells: int) -> tuple[float, ...]:
    """The middle of each cell, in numbers of entries from 0 on."""
    return tuple((place + 0.5) * size / cells - 0.5 for place in range(cells))


def _rows(grid: Tensor) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(value if math.isfinite(value) else None for value in row) for row in grid.tolist())


def chosen_tensor(layout: FlatLayout, name: str) -> str:
    """The name, if it is one of the uncertain tensors; of a tied one either name will do."""
    known = [own for own in layout.spec if layout.tied.get(own, own) in layout.names]
    if name not in known:
        listed = ", ".join(known[:6]) + (", ..." if len(known) > 6 else "")
        raise InputError(f"expected one of the posterior's tensors ({listed}), found {name!r}: give one of these")
    return name
