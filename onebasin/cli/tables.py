"""Tables that several verbs print."""

from torch import Tensor

from onebasin.alignment import Transpositions, expected_transpositions
from onebasin.reporting import text_table
from onebasin.symmetry import Space, Symmetry


def short(number: float) -> str:
    """A number in four digits, or all before the point.

    >>> short(33432.9), short(0.00757857), short(-1e-15), short(2)
    ('33,433', '0.007579', '-1e-15', '2')
    """
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def swaps(counts: Transpositions, symmetry: Symmetry) -> str:
    """Swaps and flips of each space beside the swaps that chance gives; of a batch, means over its members."""
    if not symmetry.spaces:
        return "this architecture has no symmetries, so nothing can be moved"
    rows = [_row(space, counts) for space in symmetry.spaces]
    if len(counts.sizes) > 1:
        rows.append(("all", "", _mean(counts.total), f"{counts.expected:.1f} ± {counts.spread:.1f}", ""))
    return text_table(("space", "units", "swaps", "at random", "flips"), rows)


def chance(space: Space) -> tuple[float, float]:
    """Mean and spread of the swaps of a random order of all copies of a space."""
    mean, spread = expected_transpositions(space.size)
    return space.copies * mean, space.copies**0.5 * spread


def _row(space: Space, counts: Transpositions) -> tuple[str, str, str, str, str]:
    units = str(space.size) if space.copies == 1 else f"{space.size} x {space.copies}"
    flips = _mean(counts.flips[space.name]) if any(kind.endswith("sign") for kind in space.generators) else ""
    if not space.permutable:
        return space.name, units, "", "", flips
    mean, spread = chance(space)
    return space.name, units, _mean(counts.spaces[space.name]), f"{mean:.1f} ± {spread:.1f}", flips


def _mean(counts: Tensor) -> str:
    return f"{float(counts.double().mean()):.1f}" if counts.dim() else str(int(counts))
