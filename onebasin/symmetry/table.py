"""A symmetry as a table that a person enjoys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebasin.symmetry.group import Symmetry
    from onebasin.symmetry.space import Space

MOST_RIGID = 12


def render(symmetry: Symmetry) -> str:
    """Spaces, sizes, freedoms, tensors moved; the size of the orbit; what stayed rigid and why."""
    rows = [("space", "units", "freedoms", "tensors moved")]
    rows += [(space.name, _units(space), _freedoms(space), _tensors(space)) for space in symmetry.spaces]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*[cell.ljust(width) for cell, width in zip(row, widths, strict=False)], row[3]]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    if not symmetry.spaces:
        lines = ["no symmetries found"]
    lines += ["", _orbit(symmetry)]
    if symmetry.rigid:
        lines += ["", "rigid, as it must be:", *_rigid(symmetry)]
    if symmetry.unexplained:
        lines += ["", "not explained, or to be looked at:", *[f"  {sentence}" for sentence in symmetry.unexplained]]
    return "\n".join(lines)


def _units(space: Space) -> str:
    return str(space.size) if space.copies == 1 else f"{space.size} x {space.copies}"


def _freedoms(space: Space) -> str:
    counts = {kind: space.generators.count(kind) for kind in space.freedoms}
    return ", ".join(kind if counts[kind] < 2 else f"{kind} x{counts[kind]}" for kind in space.freedoms)


def _tensors(space: Space) -> str:
    found = list(dict.fromkeys(f"{leg.tensor}[{leg.axis}]" for leg in space.legs))
    shown = ", ".join(found[:4])
    return shown if len(found) <= 4 else f"{shown}, and {len(found) - 4} more"


def _orbit(symmetry: Symmetry) -> str:
    log10 = symmetry.log10_order
    count = f"{round(10**log10):,}" if log10 < 6 else f"10^{log10:,.1f}"
    scales = f", and a continuum of {symmetry.dimensions:,} scales" if symmetry.dimensions else ""
    return f"{count} equivalent networks by permutations and signs{scales}"


def _rigid(symmetry: Symmetry) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for tensor, axis, reason in symmetry.rigid:
        by_reason.setdefault(reason, []).append(f"{tensor}[{axis}]")
    lines = []
    for reason, found in by_reason.items():
        unique = list(dict.fromkeys(found))
        more = "" if len(unique) <= MOST_RIGID else f", and {len(unique) - MOST_RIGID} more"
        lines.append(f"  {', '.join(unique[:MOST_RIGID])}{more}: {reason}")
    return lines
