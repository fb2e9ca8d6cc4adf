"""Where on its orbit of positive scales a Bayesian network sits: log-concave, and not at the point of least mass.

Under a Gaussian prior of variance v, and a likelihood that scales do not change, the log scales s of one network given
its place across the orbit have the density (paper-symmetry.md, section 1.8)

    p(s) proportional to exp( sum of n * s - mass(s) / (2 v) ),

n being the sum of powers over all weights that a coordinate moves: for a unit of a perceptron the number of its
incoming minus that of its outgoing weights (the volume that the scales stretch). The mass is convex, so this is
log-concave. Its mode has in - out = v * (n_in - n_out): exact posterior samples are heavier than necessary.

Scales before a batch norm ("norm-scale") stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onebasin.alignment.balance import (
    Lift,
    LogScales,
    Mass,
    MassLayout,
    massless,
    minimise,
    slope,
    unbounded_directions,
)
from onebasin.alignment.layout import BlockLayout
from onebasin.errors import InputError
from onebasin.reporting import (
    Column,
    Number,
    Record,
    Result,
    Rule,
    Table,
    cells_of,
    histogram,
    largest_first,
    one_panel,
    result_record,
    size_in,
)
from onebasin.symmetry import Element, Symmetry

_CHUNK = 1 << 23  # numbers that one step of the sampler may hold at a time
_LEAPS = 8  # leapfrog steps of a Hamiltonian move: a quarter turn where the density is a Gaussian


def scale_posterior(
    state: Mapping[str, Tensor], symmetry: Symmetry, *, variance: float = 1.0, biases: bool = True
) -> ScalePosterior:
    """The law of a network's log scales, given everything else about it.

    Args:
        state: one network, anywhere on its orbit: s = 0 is where it is.
        symmetry: of its model; the generators of kind "scale" are the coordinates.
        variance: of the Gaussian prior of every weight.
        biases: whether biases have that prior too. If not, theirs is flat: they have no mass, but the volume that the
            scales stretch is still theirs too, so that they count in n.

    Raises:
        InputError: there is no such law, because a unit without live writers or readers may have any scale.
    """
    if not variance > 0:
        raise InputError(f"expected a positive prior variance, found {variance}: give the variance of a weight")
    block_layout = BlockLayout.of(symmetry, statistics=True)
    block_layout.check(state, where="the network")
    layout = MassLayout.of(block_layout)
    free = [number for number, gauge in enumerate(layout.gauges) if gauge.kind == "scale"]
    if not free:
        raise InputError("this symmetry has no free scales, so there is no law of scales: nothing to do")
    stacked = {name: tensor[None] for name, tensor in state.items()}
    mass = layout.reduce(stacked, biases=biases)
    unbounded = unbounded_directions(
        mass, [mass.one_sign(number) != 0 or number not in free for number, _ in enumerate(layout.gauges)]
    )
    for number in free:
        dead = unbounded[number].all | massless(mass, number)
        if bool(dead.any()):
            name, unit = layout.gauges[number].name, int(dead[0].nonzero()[0])
            raise InputError(f"coordinate {unit} of space {name} is dead, so that any scale serves: prune it first")
    ones = {name: torch.ones_like(tensor) for name, tensor in stacked.items()}
    return ScalePosterior(layout, mass, layout.reduce(ones), float(variance))


_WIDTH, _BINS, _SERIES = 1024, 40, 6  # log scales up to which deviations are shown; bins and spaces of a figure


@dataclass(frozen=True, eq=False, repr=False)
class ScalePosterior(Result):
    """The law of log scales s (coordinates,): gauges one after the other, each copy * size + unit."""

    layout: MassLayout
    mass: Mass
    counted: Mass  # of a network of ones: how many weights each coordinate moves
    variance: float

    @cached_property
    def gauges(self) -> list[int]:
        """The gauges that are free."""
        return [number for number, gauge in enumerate(self.layout.gauges) if gauge.kind == "scale"]

    @cached_property
    def sizes(self) -> list[int]:
        """Number of coordinates of each free gauge."""
        return [self.layout.gauges[number].size for number in self.gauges]

    @cached_property
    def counts(self) -> Tensor:
        """N of every coordinate: the sum of powers over the weights that it moves."""
        return slope(self.counted, self.gauges, self.counted.here)[0].round()

    def log_density(self, s: Tensor) -> Tensor:
        """Unnormalised log density at s (..., coordinates): (...)."""
        rows = self._rows(s)
        return (rows @ self.counts - self.mass.total(self._point(rows)) / (2 * self.variance)).reshape(s.shape[:-1])

    def gradient(self, s: Tensor) -> Tensor:
        """Gradient of the log density at s (..., coordinates)."""
        rows = self._rows(s)
        return (self.counts - slope(self.mass, self.gauges, self._point(rows)) / self.variance).reshape(s.shape)

    def mode(self) -> Tensor:
        """The most likely log scales (coordinates,), where in - out = variance * (n_in - n_out)."""
        return self._mode.clone()

    @cached_property
    def _mode(self) -> Tensor:
        pulls = dict(zip(self.gauges, self.counts.split(self.sizes), strict=True))
        lifts, frozen = [], []
        for number, logs in enumerate(self.mass.here.logs):
            values = self.variance * pulls[number][None] if number in pulls else torch.zeros_like(logs)
            lifts.append(Lift(0, values))
            frozen.append(torch.full_like(logs, number not in pulls, dtype=torch.bool))
        minimum = minimise(self.mass, lifts, frozen, tolerance=1e-13, sweeps=2000)
        return torch.cat([minimum.logs[number] for number in self.gauges], 1)[0]

    def sample(self, count: int, generator: torch.Generator, *, moves: int = 20) -> Tensor:
        """Independent draws (count, coordinates).

        Every draw is the end of a chain of its own: it starts from the Gaussian that fits the mode and makes
        `moves` Hamiltonian moves with exact gradients, each accepted or refused by Metropolis' rule. In coordinates in
        which that Gaussian is standard, a move is a quarter turn, after which little memory is left; so the chains
        are long past their start, and the draws do not depend on each other.
        """
        if count < 1 or moves < 1:
            raise InputError(f"expected at least one draw and one move, found {count} and {moves}")
        widest = max(part.values.numel() for part in self.mass.parts)
        size = max(1, _CHUNK // widest)
        return torch.cat([self._chains(min(size, count - start), generator, moves) for start in range(0, count, size)])

    def element(self, s: Tensor) -> Element:
        """The elements that move the network to log scales s: one for (coordinates,), a batch for (n, coordinates)."""
        rows = self._rows(s)
        element = self.layout.block_layout.symmetry.identity(len(rows))
        for number, table in zip(self.gauges, rows.split(self.sizes, 1), strict=True):
            gauge = self.layout.gauges[number]
            factors = element.factors[gauge.name]
            factors[gauge.generator] = table.exp().cpu().reshape(factors[gauge.generator].shape)
        return element if s.dim() > 1 else element.member(0)

    def record(self) -> Record:
        """The mode by space: where the most likely scales lie, how wide the law is there, and the mass."""
        mode, width = self._mode, sum(self.sizes)
        deviation = self._spread.norm(dim=0) if width <= _WIDTH else None  # its cost is cubic
        masses = [float(self.mass.total(self._point(rows))) for rows in (torch.zeros_like(mode)[None], mode[None])]
        text = (
            f"The most likely scales make the squared norm {masses[1]:.4g}, it is {masses[0]:.4g} as given; "
            f"{width:,} log scales, the largest at {float(mode.abs().max()):.3g}."
        )
        names = [self.layout.gauges[number].name for number in self.gauges]
        parts = mode.split(self.sizes)
        spreads = [None] * len(parts) if deviation is None else deviation.split(self.sizes)
        rows = [
            cells_of(
                name,
                len(part),
                Number(float(part.mean()), low=float(part.min()), high=float(part.max())),
                None if spread is None else float(spread.mean()),
            )
            for name, part, spread in zip(names, parts, spreads, strict=True)
        ]
        ends = max(float(mode.abs().max()), 0.1) * 1.05
        edges = [ends * (2 * place / _BINS - 1) for place in range(_BINS + 1)]
        shown = largest_first(zip(names, parts, strict=True), lambda part: len(part[1]), _SERIES)[:_SERIES]
        figure = one_panel(
            "mode",
            "How far is the network from its most likely scales?",
            text,
            "histogram",
            "log scale of a unit at the mode",
            "units",
            series=tuple(histogram(name, part.tolist(), edges) for name, part in shown),
            rules=(Rule("as given", 0.0, "vertical"),),
        )
        heads = (
            Column("space"),
            Column("log scales", "coordinates", digits=0),
            Column("mode", "mean over units, and the least and the largest"),
            Column("deviation", "standard deviation of the Gaussian that fits the mode, mean over units"),
        )
        table = Table("spaces", "Where do the scales of units lie?", heads, tuple(largest_first(rows, size_in(1))))
        values = {"variance": self.variance, "mode": mode.tolist(), "counts": self.counts.tolist()}
        return result_record("scale-posterior", "The law of a network's scales", text, (table, figure), values=values)

    def _rows(self, s: Tensor) -> Tensor:
        width = sum(self.sizes)
        if s.shape[-1:] != (width,):
            raise InputError(f"expected log scales (..., {width}), found shape {tuple(s.shape)}: lay all gauges flat")
        return s.reshape(-1, width).to(dtype=torch.float64, device=self.mass.rest.device)

    def _point(self, rows: Tensor) -> LogScales:
        given = dict(zip(self.gauges, rows.split(self.sizes, 1), strict=True))
        return LogScales(
            [given.get(number, logs.expand(len(rows), -1)) for number, logs in enumerate(self.mass.here.logs)]
        )

    @cached_property
    def _spread(self) -> Tensor:
        """(coordinates, coordinates): turns standard normal numbers into steps of the Gaussian that fits the mode."""
        width, step = sum(self.sizes), 1e-4
        moves = step * torch.eye(width, dtype=torch.float64, device=self.mass.rest.device)
        bend = (self.gradient(self._mode - moves) - self.gradient(self._mode + moves)) / (2 * step)
        lower = torch.linalg.cholesky((bend + bend.T) / 2)
        spread: Tensor = torch.linalg.solve_triangular(lower, torch.eye(width, out=torch.empty_like(bend)), upper=False)
        return spread

    def _chains(self, count: int, generator: torch.Generator, moves: int) -> Tensor:
        """Hamiltonian moves of `count` chains."""

        def noise() -> Tensor:
            drawn = torch.randn(count, width, generator=generator, dtype=torch.float64, device=generator.device)
            return drawn.to(self.mass.rest.device)

        spread, width = self._spread, sum(self.sizes)
        place = noise()
        for _ in range(moves):
            speed, start = noise(), place
            uniform = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
            jitter = torch.rand(count, 1, generator=generator, dtype=torch.float64, device=generator.device)
            leap = (0.8 + 0.4 * jitter.to(place.device)) * math.pi / 2 / _LEAPS
            energy = self._energy(place, speed)
            speed = speed + leap / 2 * self._pull(place)
            for leapt in range(_LEAPS):
                place = place + leap * speed
                speed = speed + leap * (1 if leapt < _LEAPS - 1 else 0.5) * self._pull(place)
            accepted = uniform.to(place.device).log() < energy - self._energy(place, speed)
            place = torch.where(accepted[:, None], place, start)
        return self._mode + place @ spread

    def _pull(self, place: Tensor) -> Tensor:
        return self.gradient(self._mode + place @ self._spread) @ self._spread.T

    def _energy(self, place: Tensor, speed: Tensor) -> Tensor:
        return speed.square().sum(1) / 2 - self.log_density(self._mode + place @ self._spread)
