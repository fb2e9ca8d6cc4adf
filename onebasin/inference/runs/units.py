"""Which chains run together.

Chains are computed in windows of `lanes` neighbours, always all of a window: the same shapes give the same rounding,
whoever computes them. A unit of work keeps some chains of one window; smaller units mean that a window is computed by
several workers, each keeping its part. So draws depend neither on the number of workers nor on the size of units.
"""

from __future__ import annotations

from dataclasses import dataclass

from onebasin.errors import InputError

LANES = 8  # chains in one vectorised pass; about what keeps activations of small networks in a core's cache


@dataclass(frozen=True)
class Unit:
    """Chains `keep` out of the computed chains `window`."""

    window: range
    keep: range

    @property
    def name(self) -> str:
        """A name for files, which sorts by chain."""
        return f"u{self.keep.start:06d}"

    @property
    def rows(self) -> slice:
        """Where the kept chains are in the window."""
        return slice(self.keep.start - self.window.start, self.keep.stop - self.window.start)


def lanes_for(chains: int, *, small: bool = True) -> int:
    """Equal windows of at most `LANES` chains; two of small networks from four chains on: two workers find work.

    >>> [lanes_for(chains) for chains in (1, 3, 4, 8, 10, 17)]
    [1, 3, 2, 4, 5, 6]
    >>> lanes_for(5, small=False)  # large ones keep all cores busy by themselves
    5
    """
    windows = max(-(-chains // LANES), 2 if chains >= 4 and small else 1)
    return -(-chains // windows)


def units(chains: int, lanes: int, chunk: int | None = None) -> list[Unit]:
    """Cut chains into units.

    >>> [(unit.window, unit.keep) for unit in units(5, 3, 2)]
    [(range(0, 3), range(0, 2)), (range(0, 3), range(2, 3)), (range(3, 6), range(3, 5))]

    Args:
        chains: how many.
        lanes: chains in a window.
        chunk: chains in a unit at most; by default a whole window.
    """
    if chunk is not None and chunk < 1:
        raise InputError(f"a chunk has at least 1 chain, found {chunk}: leave it out for {lanes}")
    step = min(chunk or lanes, lanes)
    return [
        Unit(range(begin, begin + lanes), range(first, min(first + step, begin + lanes, chains)))
        for begin in range(0, chains, lanes)
        for first in range(begin, min(begin + lanes, chains), step)
    ]
