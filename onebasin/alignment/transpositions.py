"""How far units were moved: the number of transpositions, and permutations that have a given number.

The number of transpositions of a permutation is the least number of swaps of two units that makes it. A cycle of
length k needs k - 1 swaps, so it is n minus the number of cycles, fixed points included: 0 for the identity, n - 1 at
most. It is the same for the inverse and after relabelling the units. A random permutation of n units has n - H_n on
average (H_n = 1 + 1/2 + ... + 1/n), which is nearly n: the number between unrelated networks says "unrelated".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.errors import InputError, SymmetryError
from onebasin.reporting import (
    Axis,
    Column,
    Figure,
    Number,
    Record,
    Result,
    Rule,
    Series,
    Table,
    histogram,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.symmetry import Element, ExpandedElement, Symmetry

CHUNK = 1 << 20  # units looked at together, which bounds the memory


@dataclass(frozen=True, eq=False, repr=False)
class Transpositions(Result):
    """How many swaps and flips an element needs; counts are integers, () for one element, (members,) for a batch.

    The moves are the group's own: swap two units of a space, with all that is nested in them (two heads change
    places whole), or flip one sign of one unit. A swap turns no sign, a flip turns one, and a swap of heads keeps the
    order inside them, so none saves another: `moves`, all swaps + all flips, is the least. Scales are not counted.

    Attributes:
        spaces: space name -> swaps. A space nested in parents adds up its copies, each read as the order inside
            that head once the heads have moved.
        flips: space name -> number of factors below zero, over all sign freedoms of the space.
        sizes: space name -> (copies, units) of the permutable spaces.
        positions: space name -> transpositions of the one permutation of all its copies * units places; empty
            where no symmetry was given. Here a swap of two heads costs one per unit inside. It does not depend on how
            the units of different heads are numbered, as `spaces` does, but hides that whole heads were moved.
        members: None for one element.
    """

    spaces: Mapping[str, Tensor]
    flips: Mapping[str, Tensor]
    sizes: Mapping[str, tuple[int, int]]
    positions: Mapping[str, Tensor]
    members: int | None = None

    @property
    def total(self) -> Tensor:
        """Swaps in all spaces together."""
        return self._sum(self.spaces)

    @property
    def moves(self) -> Tensor:
        """The least number of swaps and flips: all swaps + all flips."""
        return self.total + self._sum(self.flips)

    @property
    def maximum(self) -> int:
        """The largest possible total: copies * (n - 1), summed over spaces."""
        return sum(copies * (units - 1) for copies, units in self.sizes.values())

    @property
    def normalised(self) -> Tensor:
        """Total over maximum, between 0 and 1; 0 where nothing can be permuted. float64."""
        return self.total.double() / max(1, self.maximum)

    @property
    def expected(self) -> float:
        """Mean of the total over uniformly random elements."""
        return math.fsum(copies * expected_transpositions(units)[0] for copies, units in self.sizes.values())

    @property
    def spread(self) -> float:
        """Standard deviation of the total over uniformly random elements."""
        variances = (copies * expected_transpositions(units)[1] ** 2 for copies, units in self.sizes.values())
        return math.sqrt(math.fsum(variances))

    def record(self) -> Record:
        """Swaps and flips by space beside what chance would give; of a batch, means and a histogram of totals."""
        total = self.total.double()
        many = f"{int(total):,}" if self.members is None else f"On average {float(total.mean()):,.1f}"
        text = f"{many} swaps of at most {self.maximum:,}; at random {self.expected:,.1f} ± {self.spread:.1f}."
        found = [self._row(name, sizes) for name, sizes in self.sizes.items()]
        rows = largest_first(found, lambda row: float(row[1].value or 0))
        items: list[Table | Figure] = [Table("moves", "How far were units moved?", _MOVES, tuple(rows))]
        items += [self._totals(text)] if self.members is not None and self.maximum else []
        items += [self._bars(text, found)] if found else []
        values: dict[str, Any] = {"total": self.total.tolist(), "moves": self.moves.tolist(), "maximum": self.maximum}
        values |= {"expected": self.expected, "spread": self.spread, "sizes": self.sizes}
        for what in ("spaces", "flips", "positions"):
            values[what] = {name: count.tolist() for name, count in getattr(self, what).items()}
        of = "" if self.members is None else f" of {self.members:,} elements"
        return result_record("transpositions", f"Transpositions{of}", text, items, values=values)

    def _row(self, name: str, sizes: tuple[int, int]) -> tuple[str, Number, Number, Number, Number, Number]:
        (copies, units), (mean, deviation) = sizes, expected_transpositions(sizes[1])
        flips = self.flips.get(name)
        return (
            name,
            Number(copies * units),
            Number(float(self.spaces[name].double().mean())),
            Number(copies * mean, math.sqrt(copies) * deviation),
            Number(copies * (units - 1)),
            Number(0.0 if flips is None else float(flips.double().mean())),
        )

    def _bars(self, text: str, rows: list[tuple[str, Number, Number, Number, Number, Number]]) -> Figure:
        shown = largest_first(rows, lambda row: float(row[1].value or 0), _BARS)[:_BARS]
        places = tuple(map(float, range(len(shown))))
        more = f" The {_BARS} largest of {len(rows):,} spaces." if len(rows) > _BARS else ""
        return one_panel(
            "swaps",
            "In which spaces were units moved?",
            f"{text}{more}",
            "bars",
            Axis("", names=tuple(row[0] for row in shown)),
            "swaps of two units",
            series=(
                Series("found", places, tuple(row[2].value for row in shown)),
                Series("a random order", places, tuple(row[3].value for row in shown), dashed=True),
            ),
        )

    def _totals(self, text: str) -> Figure:
        """A histogram of totals, and what random elements would give, exactly."""
        totals, chance = self.total.cpu(), probabilities(self.sizes.values())
        first = self.maximum - len(chance) + 1
        low = max(0, min(int(totals.min()), math.floor(self.expected - 4 * self.spread)))
        high = min(self.maximum, max(int(totals.max()), math.ceil(self.expected + 4 * self.spread)))
        step = -(-(high + 1 - low) // _BINS)
        edges = [low - 0.5 + step * place for place in range(-(-(high + 1 - low) // step) + 1)]
        random = [
            len(totals) * float(chance[max(0, math.ceil(edge) - first) : max(0, math.ceil(edge + step) - first)].sum())
            for edge in edges[:-1]
        ]
        return one_panel(
            "totals",
            "How far was each network moved?",
            f"{text} Chances of random permutations are exact.",
            "histogram",
            "swaps of two units, all spaces together",
            "networks",
            series=(
                histogram("found", totals.tolist(), edges),
                Series("random permutations", tuple(edges), tuple(random)),
            ),
            rules=(Rule("at random", self.expected, "vertical"),),
        )

    def _sum(self, counts: Mapping[str, Tensor]) -> Tensor:
        none = torch.zeros(() if self.members is None else (self.members,), dtype=torch.long)
        return torch.stack(list(counts.values())).sum(0) if counts else none


_BARS, _BINS = 20, 40  # spaces and bins of a figure
_MOVES = (
    Column("space"),
    Column("units", "in all copies of the space", digits=0),
    Column("swaps", "least number of swaps of two units; of several elements their mean", digits=1),
    Column("at random", "mean and standard deviation over uniformly random orders", digits=1),
    Column("at most", "the largest number that an order can need", digits=0),
    Column("flips", "signs that were turned; of several elements their mean", digits=1),
)


def probabilities(sizes: Iterable[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Chances of the largest totals of uniformly random elements, in ascending order up to the maximum.

    A permutation of n units has n minus the number of its cycles, and cycles close independently: the k-th unit closes
    one with probability 1/k. Totals that have a chance below 1e-18 are left out at the low end.

    Args:
        sizes: (copies, units) of each space.

    >>> (24 * probabilities([(1, 4)])).round()  # of the 24 orders of 4 units, by the number of swaps from 0 to 3
    array([ 1.,  6., 11.,  6.])
    """
    chance = np.ones(1)
    for copies, units in sizes:
        for _ in range(copies):
            chance = _trimmed(np.convolve(chance, _cycles(units)))
    return chance[::-1]


@lru_cache
def _cycles(units: int) -> np.ndarray[Any, Any]:
    """Chances of 1, 2, 3, ... cycles in a random permutation."""
    chance = np.ones(1)
    for unit in range(2, units + 1):
        chance = _trimmed(np.convolve(chance, [1 - 1 / unit, 1 / unit]))
    return chance


def _trimmed(chance: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return chance[: int(np.flatnonzero(chance > 1e-18)[-1]) + 1]


def transpositions(element: Element, symmetry: Symmetry | None = None) -> Transpositions:
    """Count the swaps and flips of an element, or of each element of a batch.

    Args:
        element: any element; one from `match` says how far one network was moved onto another.
        symmetry: where it is from. With it, spaces that the element leaves out count as not moved (without it they
            are not known), the element is checked, and `positions` are counted too.

    >>> order = torch.tensor([3, 0, 4, 1, 2])  # the cycles (0 3 1)(2 4)
    >>> found = transpositions(Element({"hidden": order}, {}))
    >>> print(int(found.total), "of at most", found.maximum, f"and at random {found.expected:.1f} ± {found.spread:.1f}")
    3 of at most 4 and at random 2.7 ± 0.9
    """
    many = 1 if element.members is None else element.members
    orders, positions = _known(element, many) if symmetry is None else _spread(element, symmetry)
    found = {
        "spaces": {name: count_transpositions(order).sum(1) for name, order in orders.items()},
        "flips": {name: (f.reshape(len(f), many, -1) < 0).sum((0, 2)) for name, f in element.factors.items()},
        "positions": {name: count_transpositions(order) for name, order in positions.items()},
    }
    if element.members is None:
        found = {what: {name: count[0] for name, count in counts.items()} for what, counts in found.items()}
    sizes = {name: (order.shape[1], order.shape[2]) for name, order in orders.items()}
    return Transpositions(**found, sizes=sizes, members=element.members)


def _known(element: Element, many: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Orders (M, copies, n) of the spaces that the element names."""
    for name, order in element.orders.items():
        whole = torch.arange(order.shape[-1], device=order.device)
        if order.is_floating_point() or not bool((order.sort(-1).values == whole).all()):
            raise SymmetryError(
                f"the order of space {name!r} should hold each of 0 to {len(whole) - 1} once per copy, found something "
                "else; draw the element from a Symmetry."
            )
    return {name: order.reshape(many, -1, order.shape[-1]) for name, order in element.orders.items()}, {}


def _spread(element: Element, symmetry: Symmetry) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Orders (M, copies, n), and permutations (M, copies * n) of all places, of every permutable space."""
    wide = ExpandedElement(symmetry, element)
    orders, positions = {}, {}
    for number, space in enumerate(symmetry.spaces):
        if space.permutable:
            orders[space.name] = wide.orders[number]
            places = wide.origin(number)[:, :, None] * space.size + wide.orders[number]
            positions[space.name] = places.reshape(wide.many, -1)
    return orders, positions


def count_transpositions(orders: Tensor) -> Tensor:
    """Number of transpositions of permutations (..., n), as integers (...).

    Each unit takes the smallest label on its cycle, by leaps that double in length: n log n work for all at once.
    The units that keep their own label are one per cycle.
    """
    units = orders.shape[-1]
    own = torch.arange(units, device=orders.device)
    counts = []
    for leap in orders.reshape(-1, units).long().split(max(1, CHUNK // units)):
        label = own.expand_as(leap)
        for _ in range((units - 1).bit_length()):
            label = torch.minimum(label, label.gather(1, leap))
            leap = leap.gather(1, leap)
        counts.append((label != own).sum(1))
    return torch.cat(counts).reshape(orders.shape[:-1])


def expected_transpositions(n: int) -> tuple[float, float]:
    """Mean n - H_n and standard deviation sqrt(H_n - sum 1/k^2) for a uniformly random permutation of n units.

    >>> "{:.2f} {:.2f}".format(*expected_transpositions(512))
    '505.18 2.27'
    """
    if n < 1:
        raise InputError(f"a permutation needs at least 1 unit, found {n}.")
    harmonic = math.fsum(1 / k for k in range(1, n + 1))
    return n - harmonic, math.sqrt(max(0.0, harmonic - math.fsum(1 / k**2 for k in range(1, n + 1))))


def permutation_with(n: int, swaps: int, generator: torch.Generator | int, *, method: str = "uniform") -> Tensor:
    """Draw a permutation (n,) that has exactly `swaps` transpositions.

    Args:
        n: number of units.
        swaps: 0 (the identity) to n - 1 (one cycle of all units).
        generator: a `torch.Generator` or an integer seed.
        method: "uniform": every permutation with n - swaps cycles is equally likely. "paper": the generator of Xiao,
            Liu & Bamler (2024), who start n - swaps cycles with one unit each and put every other unit into a cycle
            chosen uniformly. It is not uniform: cycles come out too equal in length. With k = n - swaps cycles it
            leaves k (1 - 1/k)^swaps units unmoved on average.
    """
    return _draw(1, n, swaps, generator, method, "a permutation")[0]


def element_with(
    symmetry: Symmetry, swaps: Mapping[str, int] | int, generator: torch.Generator | int, method: str = "uniform"
) -> Element:
    """Draw an element with exactly the given number of swaps in each space; everything else stays at the identity.

    Args:
        symmetry: where to draw from.
        swaps: space name -> swaps, added up over the copies of a nested space (at most copies * (n - 1)); or one
            number if only one space is permutable.
        generator: a `torch.Generator` or an integer seed.
        method: as in `permutation_with`. Over several copies "uniform" is uniform over all their orders together;
            "paper", which knows one copy only, first deals the swaps to the copies at random.
    """
    if isinstance(generator, int):  # one stream for all spaces
        generator = torch.Generator().manual_seed(generator)
    if isinstance(swaps, int):
        permutable = [space.name for space in symmetry.spaces if space.permutable]
        if len(permutable) != 1:
            raise InputError(
                f"one number of swaps fits a symmetry with one permutable space, found {len(permutable)}; give a dict "
                f"of swaps for some of: {', '.join(permutable) or 'none'}."
            )
        swaps = {permutable[0]: swaps}
    element = symmetry.identity()
    orders = dict(element.orders)
    for name, count in swaps.items():
        space = symmetry[name]
        if not space.permutable:
            raise SymmetryError(f"the units of space {name!r} are rigid; ask for swaps of a permutable space.")
        drawn = _draw(space.copies, space.size, count, generator, method, f"space {name!r}")
        orders[name] = drawn.reshape(orders[name].shape)
    return Element(orders, element.factors)


def _draw(copies: int, n: int, swaps: int, generator: torch.Generator | int, method: str, what: str) -> Tensor:
    """Orders (copies, n) with `swaps` transpositions together."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    if n < 1 or not 0 <= swaps <= copies * (n - 1):
        raise InputError(
            f"{what} of {n} units{f' in {copies} copies' if copies > 1 else ''} can have 0 to {copies * max(0, n - 1)} "
            f"transpositions, found {swaps}."
        )
    if method == "uniform":
        return _uniform(copies, n, swaps, generator)
    if method == "paper":
        slots = torch.randperm(copies * (n - 1), generator=generator, device=generator.device)[:swaps] // max(1, n - 1)
        return torch.stack([_paper(n, int(share), generator) for share in slots.bincount(minlength=copies)])
    raise InputError(f"method must be 'uniform' or 'paper', found {method!r}.")


def _paper(n: int, swaps: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    cycles = n - swaps
    joined = torch.randint(cycles, (swaps,), generator=generator, device=device)
    lengths = 1 + joined.bincount(minlength=cycles)
    order = torch.empty(n, dtype=torch.long, device=device)
    for cycle in torch.randperm(n, generator=generator, device=device).split(lengths.tolist()):
        order[cycle] = cycle.roll(1)
    return order.cpu()


def _uniform(copies: int, n: int, swaps: int, generator: torch.Generator) -> Tensor:
    """Seat units one after the other: each opens a cycle, or goes behind a uniformly chosen earlier unit.

    Given which units open a cycle, all permutations that fit are equally likely, so only the openers matter.
    """
    opens = _openers(copies, n, copies * n - swaps, generator)
    picks = torch.rand(copies, n, generator=generator, device=generator.device, dtype=torch.float64)
    earlier = (picks * torch.arange(n, device=generator.device)).long()
    orders = []
    for starts, behind in zip(opens.tolist(), earlier.tolist(), strict=True):
        order = list(range(n))
        for unit in range(n):
            if not starts[unit]:
                order[unit], order[behind[unit]] = order[behind[unit]], unit
        orders.append(order)
    return torch.tensor(orders)


def _openers(copies: int, n: int, cycles: int, generator: torch.Generator) -> Tensor:
    """Which units open a cycle (copies, n), given that `cycles` do: exact, by rejection.

    Under Ewens' law with parameter t unit j opens a cycle with probability t / (t + j), independently, and given the
    number of cycles the law is the uniform one whatever t is. With t chosen so that `cycles` is the mean, it is also
    the mode, and about one try in 2.5 standard deviations of the number of cycles succeeds.
    """
    units = torch.arange(n, device=generator.device, dtype=torch.float64)
    if cycles in (copies, copies * n):
        return (units == 0 if cycles == copies else units >= 0).expand(copies, n)
    chance = 1 / (1 + units / _ewens(n, cycles / copies))
    while True:
        opens = torch.rand(copies, n, generator=generator, device=generator.device, dtype=torch.float64) < chance
        if int(opens.sum()) == cycles:
            return opens


@lru_cache
def _ewens(n: int, cycles: float) -> float:
    """The parameter t at which a permutation of n units has `cycles` cycles on average, by bisection of log t."""
    low, high = -50.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        mean = float((1 / (1 + torch.arange(n, dtype=torch.float64) * math.exp(-middle))).sum())
        low, high = (middle, high) if mean < cycles else (low, middle)
    return math.exp(low)
