"""A two-dimensional map of a population, as given and aligned: networks that are close are drawn close.

Squared distances over all trained weights are summed tensor by tensor, a range of columns at a time, so that no more
than a block of the population is in memory. Two axes of them follow in one of two ways:

    pca   the two directions of largest variance; what they leave out is hidden. Classical MDS gives the same places.
    mds   from there on, places are moved until their distances are as close as possible to the true ones (SMACOF,
          de Leeuw 1977); what remains is stated as Kruskal's stress-1, sqrt(sum (d - true)^2 / sum true^2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.alignment.align import Alignment, align
from onebasin.errors import InputError
from onebasin.metrics import Within
from onebasin.parallel import Progress, progress_of
from onebasin.population import BLOCK_BYTES, Population, chain_series
from onebasin.reporting import Axis, Column, Figure, Panel, Record, Result, Table, cells_of, result_record
from onebasin.state import check_spec, trained_parameters
from onebasin.symmetry import Symmetry

METHODS = ("mds", "pca")
MOVES, SETTLED = 300, 1e-7  # SMACOF ends after so many moves, or when the stress falls by less than this part of it
_SIDES = 1.45  # width of a panel over its height, so that both axes have nearly the same scale


@dataclass(frozen=True, eq=False, repr=False)
class PopulationMap(Result):
    """Places of the networks of a population in two dimensions.

    Attributes:
        places: (networks, 2) float64; their mean is the origin.
        squared: (networks, networks) float64, squared distances over all trained weights.
        share: part of the sum of squared distances that lies in the plane of the two largest principal directions.
        stress: Kruskal's stress-1 of the places; 0 where all distances are kept.
        method: "mds" or "pca".
        chain: chain of each network, or None.
        aligned: the same of the aligned population, if it was asked for.
    """

    places: Tensor
    squared: Tensor
    share: float
    stress: float
    method: str
    chain: Tensor | None = None
    aligned: PopulationMap | None = None

    @property
    def maps(self) -> dict[str, PopulationMap]:
        """The maps by name: "as given" and, where there is one, "aligned"."""
        return {"as given": self} if self.aligned is None else {"as given": self, "aligned": self.aligned}

    @property
    def distance(self) -> float | None:
        """Root mean square distance of two different networks; None of one."""
        return self._rms(torch.ones_like(self.squared, dtype=torch.bool))

    @property
    def within(self) -> float | None:
        """The same of two networks of one chain; None where there are none."""
        return None if self._same is None else self._rms(self._same)

    @property
    def between(self) -> float | None:
        """The same of networks of two chains; None where there are none."""
        return None if self._same is None else self._rms(~self._same & self._known)

    @property
    def _same(self) -> Tensor | None:
        return None if self.chain is None else (self.chain[:, None] == self.chain) & (self.chain >= 0)

    @property
    def _known(self) -> Tensor:
        return (
            torch.ones_like(self.squared, dtype=torch.bool)
            if self.chain is None
            else ((self.chain[:, None] >= 0) & (self.chain >= 0))
        )

    def _rms(self, pairs: Tensor) -> float | None:
        chosen = self.squared[pairs & ~torch.eye(len(pairs), dtype=torch.bool)]
        return float(chosen.mean().sqrt()) if chosen.numel() else None

    def record(self) -> Record:
        """Distances and how much of them the map shows; the map; the place of every network."""
        members, maps = len(self.places), self.maps
        kept = ", ".join(f"{100 * one.share:.0f} % {name}" for name, one in maps.items())
        text = f"{members:,} networks in two dimensions, which hold {kept} of all squared distances"
        text += f"; stress {', '.join(f'{one.stress:.2f} {name}' for name, one in maps.items())}."
        if self.aligned is not None and self.distance and self.aligned.distance is not None:
            text += (
                f" Two networks are {self.distance:.4g} apart as given and {self.aligned.distance:.4g} once aligned, "
                "on average (root mean square)."
            )
        rows = tuple(
            cells_of(name, one.distance, one.within, one.between, one.share, one.stress) for name, one in maps.items()
        )
        places = torch.cat([one.places for one in maps.values()], 1)
        heads = [Column("network"), Column("chain")]
        heads += [Column(f"{axis}, {name}", digits=4) for name in maps for axis in ("x", "y")]
        lines = tuple(
            cells_of(str(member), "" if self.chain is None else str(int(self.chain[member])), *places[member].tolist())
            for member in range(members)
        )
        reach = max(float(places[:, 1::2].abs().max()), float(places[:, 0::2].abs().max()) / _SIDES) * 1.1 or 1.0
        panels = tuple(
            Panel(
                "points",
                name if len(maps) > 1 else "",
                Axis("distance in weight space", low=-_SIDES * reach, high=_SIDES * reach),
                Axis("distance in weight space", low=-reach, high=reach),
                chain_series(range(members), self.chain, one.places[:, 0], one.places[:, 1]),
            )
            for name, one in maps.items()
        )
        return result_record(
            "population-map",
            f"Map of {members:,} network{'s' if members != 1 else ''}",
            text,
            (
                Table("distances", "How far apart are the networks?", _DISTANCES, rows),
                Figure("map", "Which networks are close to each other?", text, panels),
                Table("places", "Where is each network?", tuple(heads), lines),
            ),
            settings={"method": self.method},
            values={
                name: {
                    **{"places": one.places.tolist(), "share": one.share, "stress": one.stress},
                    **{"distance": one.distance, "within": one.within, "between": one.between},
                    "chain": None if one.chain is None else one.chain.tolist(),
                }
                for name, one in maps.items()
            },
        )


_DISTANCES = (
    Column("population"),
    Column("distance", "root mean square distance of two different networks", digits=4),
    Column("within chains", "the same of two networks of one chain", digits=4),
    Column("between chains", "the same of networks of two chains", digits=4),
    Column("share shown", "part of all squared distances that lies in the plane of two principal directions"),
    Column("stress", "Kruskal's stress-1 of the places: 0 where all distances are kept", "lower"),
)


def population_map(
    population: Population,
    symmetry: Symmetry | None = None,
    *,
    aligned: Alignment | Population | None = None,
    method: str = "mds",
    progress: Progress | bool | None = None,
) -> PopulationMap:
    """Draw a population as points in two dimensions, as given and aligned.

    Args:
        population: networks of one architecture, in memory or on disk; read block by block and not changed.
        symmetry: align the population, see `align`, and draw the result beside it.
        aligned: the result of an alignment that is there already, instead of `symmetry`.
        method: "mds" places networks so that distances are kept as well as possible; "pca" takes the two directions of
            largest variance.
        progress: True for a line on stderr with the time left, or a function that is called with (numbers read of each
            network, numbers in all, what is being done).

    Raises:
        InputError: there is no network, a method that does not exist, or both symmetry and aligned.
        SpecError: the aligned networks are not of the same architecture.

    >>> square = Population.from_stacked({"w": torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0], [2.0, 1.0]])})
    >>> found = population_map(square)
    >>> round(found.share, 6), round(found.stress, 6)
    (1.0, 0.0)
    """
    if method not in METHODS:
        raise InputError(f"expected a method among {', '.join(METHODS)}, found {method!r}: give 'mds'")
    if not len(population):
        raise InputError("expected at least one network to draw, found an empty population: add members")
    if symmetry is not None and aligned is not None:
        raise InputError("expected a symmetry or an aligned population, found both: leave one out")
    progress = progress_of(progress)
    if symmetry is not None:
        aligned = align(population, symmetry, progress=progress)
    frozen = aligned.symmetry.frozen if isinstance(aligned, Alignment) else {}
    names = trained_parameters(population.spec, frozen=frozen)
    given = _mapped(population, names, method, progress)
    if aligned is None:
        return given
    moved = aligned.population if isinstance(aligned, Alignment) else aligned
    check_spec(moved.spec, population.spec, where="the aligned population")
    if len(moved) != len(population):
        raise InputError(
            f"expected as many aligned networks as given ones, found {len(moved)} and {len(population)}: align the same"
        )
    other = _mapped(moved, names, method, progress)
    return replace(given, aligned=replace(other, places=_turned(other.places, given.places)))


def _mapped(population: Population, names: tuple[str, ...], method: str, progress: Progress | None) -> PopulationMap:
    squared = _squared_distances(population, names, progress)
    places, share = _principal(squared)
    true = squared.sqrt()
    if method == "mds":
        places = _smacof(places, true)
    norm = float(true.square().sum())
    stress = float((torch.cdist(places, places) - true).square().sum() / norm) ** 0.5 if norm else 0.0
    return PopulationMap(places, squared, share, stress, method, population.chain)


def _squared_distances(population: Population, names: tuple[str, ...], progress: Progress | None) -> Tensor:
    """Squared distances of all pairs (networks, networks), a range of columns of a tensor at a time."""
    members = len(population)
    within, columns = Within(members), max(1, BLOCK_BYTES // (8 * members))
    total, done = sum(population.spec[name].size for name in names), 0
    for name in names:
        spec = population.spec[name]
        for start in range(0, spec.size, columns):
            stop = min(start + columns, spec.size)
            out = torch.empty(members, stop - start, dtype=spec.dtype)
            population.read_columns(name, start, stop, out)
            rows = torch.view_as_real(out).flatten(1) if out.is_complex() else out
            within.add(rows.double())
            done += stop - start
            if progress is not None:
                progress(done, total, "measuring distances between networks")
    return within.found()


def _principal(squared: Tensor) -> tuple[Tensor, float]:
    """Places (networks, 2) along the two largest principal directions, and their share of the sum of squares."""
    centred = squared - squared.mean(0) - squared.mean(1, keepdim=True) + squared.mean()
    values, vectors = torch.linalg.eigh(-centred / 2)
    largest = values.flip(0)[:2].clamp_min(0)
    places = vectors.flip(1)[:, :2] * largest.sqrt()
    places = places * torch.where(places.sum(0) < 0, -1.0, 1.0)  # a sign of its own has no meaning: choose one
    total = float(values.clamp_min(0).sum())
    share = float(largest.sum()) / total if total else 1.0
    return torch.nn.functional.pad(places, (0, 2 - places.shape[1])), share


def _smacof(places: Tensor, true: Tensor) -> Tensor:
    """Places moved until their distances fit the true ones; the stress never rises."""
    members, before = len(places), float("inf")
    for _ in range(MOVES if members > 2 else 0):
        found = torch.cdist(places, places)
        after = float((found - true).square().sum())
        if not after < before * (1 - SETTLED):
            break
        before = after
        ratio = torch.where(found > 0, true / found.clamp_min(1e-300), 0.0)
        places = (places * ratio.sum(1, keepdim=True) - ratio @ places) / members
    return places


def _turned(places: Tensor, like: Tensor) -> Tensor:
    """Places turned and mirrored so that they lie as close to others as possible; distances stay."""
    left, _, right = torch.linalg.svd(places.T @ like)
    turned: Tensor = places @ left @ right
    return turned
